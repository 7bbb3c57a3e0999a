"""The model families of the package, and their lookup by name.

A new family is a file in this folder and a line in `SHIPPED`.
"""

from jaxscale.choices import check_choice, did_you_mean
from jaxscale.model_families.bert import BERT
from jaxscale.model_families.deepseek import DEEPSEEK_V3
from jaxscale.model_families.esm import ESM
from jaxscale.model_families.family import Family
from jaxscale.model_families.gemma import GEMMA2, GEMMA3
from jaxscale.model_families.gpt import GPT, M6_T
from jaxscale.model_families.gpt_neox import GPT_NEOX
from jaxscale.model_families.gpt_oss import GPT_OSS
from jaxscale.model_families.llama import LLAMA
from jaxscale.model_families.mistral import MISTRAL, MIXTRAL
from jaxscale.model_families.olmo import OLMO2, OLMO3
from jaxscale.model_families.phi3 import PHI3
from jaxscale.model_families.qwen import QWEN2, QWEN3
from jaxscale.model_families.qwen_moe import QWEN3_MOE
from jaxscale.model_families.t5 import MT5, T5, UMT5

DECODERS = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, OLMO2, OLMO3, PHI3, GPT, GPT_NEOX)
PLANNED = (*DECODERS, BERT, ESM)
"""Of which the planner has formulas."""
SHIPPED = (*PLANNED, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS, M6_T, T5, MT5, UMT5)

FAMILIES = {family.name: family for family in SHIPPED}


def find_family(name: str) -> Family:
    """A shipped family.

    Raises:
      ValueError: the name is not known; suggests the nearest.
    """
    check_choice("model.family", name, FAMILIES)
    return FAMILIES[name]


def refuse_setting(family: Family, option: str) -> str:
    """The error for an option that the family does not let a user set."""
    others = [one.name for one in SHIPPED if option in one.settings]
    where = f"; {option} is one of {', '.join(others)}" if others else ""
    near = did_you_mean(option, family.settings)
    return (
        f"model.{option} is not a setting of model.family = {family.name!r}; its settings are the "
        f"sizes and {', '.join(sorted(family.settings))}{where}{near}"
    )

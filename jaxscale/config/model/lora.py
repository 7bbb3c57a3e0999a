"""LoRA options of `ModelConfig`: low-rank adapters for fine-tuning (arXiv 2106.09685)."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxscale.choices import check_at_least, check_choice

LORA = ("lora_rank", "lora_alpha", "lora_targets", "lora_tokens")
"""The settings of adapters, not written for a model without them."""

OF_ATTENTION = ("q", "k", "v", "out")
OF_LATENT = ("q_plain", "q_turned", "kv_down", "k_turned", "k_plain", "v", "out")
"""Weights of latent attention; "q_down" precedes them where queries are compressed."""
OF_MLP = ("up", "gate", "down")

RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")
"""An item of `lora_tokens`: an id, or the first and the last id of a range."""

ADAPTER = "_lora"
"""The suffix of an adapter's name, after the name of its weight."""

SIDE, PROMPT = "side", "prompt"
"""The names of a layer of a side network, and of prompt vectors, which are adapters, too."""


@dataclass(frozen=True)
class LoraOptions:
    """The options of adapters. Without adapters `lora_rank` is 0; with them every other parameter
    is frozen."""

    lora_rank: int = 0  # of an adapter's two matrices; 0: no adapters
    lora_alpha: float = 16.0  # the adapters' output is multiplied by alpha / rank
    # Weights of a layer with an adapter, of q,k,v,out,up,gate,down or those of latent attention;
    # "": all but those of experts, and of MLPs next to experts.
    lora_targets: str = ""
    lora_tokens: str = ""  # ids whose rows of embedding and head are also trained, as 384-385,7

    def check_lora(
        self, vocab_size: int, *, attention: tuple[str, ...], gated: bool, has_experts: bool
    ) -> None:
        """Refuses options that contradict each other, and weights that the model does not have.

        Args:
          attention, gated, has_experts: as in `adapted`.

        Raises:
          ValueError: with the setting to change.
        """
        check_at_least("model", self, lora_rank=0)
        if not self.lora_rank:
            for name in ("lora_targets", "lora_tokens"):
                if value := getattr(self, name):
                    raise ValueError(
                        f"model.{name} = {value!r} with model.lora_rank = 0 (no adapters); set "
                        "model.lora_rank, such as 16"
                    )
            return
        if (last := max(self.trained_tokens, default=0)) >= vocab_size:
            raise ValueError(
                f"model.lora_tokens = {self.lora_tokens!r} names token {last}; at most "
                f"{vocab_size - 1}, since model.vocab_size = {vocab_size}"
            )
        if self.lora_alpha <= 0:
            raise ValueError(f"model.lora_alpha = {self.lora_alpha} must be above 0")
        for name in self._named_targets:
            check_choice("model.lora_targets", name, (*attention, *_of_mlp(gated)))
        if len(set(self._named_targets)) < len(self._named_targets):
            raise ValueError(f"model.lora_targets = {self.lora_targets!r} names a weight twice")

    @property
    def trained_tokens(self) -> tuple[int, ...]:
        """The tokens whose rows of the embedding, and of an untied head, are trained, in the order
        of these rows.

        Raises:
          ValueError: `lora_tokens` is not ids and ranges of ids, or names one twice.
        """
        return _parse_ids(self.lora_tokens)

    @property
    def _named_targets(self) -> list[str]:
        return [name.strip() for name in self.lora_targets.split(",")] if self.lora_targets else []

    def adapted(
        self, *, attention: tuple[str, ...], gated: bool, has_experts: bool
    ) -> tuple[str, ...]:
        """The weights of a layer that have an adapter.

        Args:
          attention: the weights of attention.
          gated: whether MLPs have a gate.
          has_experts: whether the adapters of MLPs must be named: each expert has its own.
        """
        if not self.lora_rank:
            return ()
        usual = attention if has_experts else (*attention, *_of_mlp(gated))
        named = self._named_targets or usual
        return tuple(name for name in (*attention, *_of_mlp(gated)) if name in named)


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's: "layers/attention/q_lora/a", "layers/side/up"."""
    return any(part.endswith(ADAPTER) or part in (SIDE, PROMPT) for part in name.split("/"))


def to_ranges(ids: Sequence[int]) -> str:
    """Ids as `lora_tokens` names them: "7,384-385"."""
    runs: list[list[int]] = []
    for one in ids:
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@functools.lru_cache(maxsize=64)
def _parse_ids(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(",") if text else ():
        match = RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(
                f"model.lora_tokens = {text!r}: {part.strip()!r} is not a token's id or a range of "
                "ids, such as 7 or 384-385"
            )
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise ValueError(f"model.lora_tokens = {text!r} names a token twice")
    return tuple(found)


def _of_mlp(gated: bool) -> tuple[str, ...]:
    return OF_MLP if gated else ("up", "down")

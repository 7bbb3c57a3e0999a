"""What a layer keeps of each token for its backward pass, by remat policy: exact.

The suite holds it to `remat.rematerialised`, value by value.
"""

from dataclasses import dataclass

from jaxscale.config import ModelConfig
from jaxscale.layout import remat_names
from jaxscale.planner.arrays import itemsize


@dataclass(frozen=True)
class Kept:
    """One value; over the ranks of tensor together."""

    name: str
    elements: int  # of a token
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of a token."""
        return self.elements * self.element_bytes


def kept_values(model: ModelConfig, remat: str) -> list[Kept]:
    """The values that a policy of `Layout.remat` keeps, a few constants of a layer left out."""
    width, names = itemsize(model.compute_dtype), remat_names(remat)
    stream, queries = model.d_model, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    sizes = {
        "query": queries, "key": keys, "value": keys, "attention": queries,
        "attention_out": stream, "mlp_up": model.d_ff,
        "mlp_gate": model.d_ff if model.family == "llama" else 0,
    }  # fmt: skip
    kept = {"input": stream} | {name: sizes[name] for name in names}
    if not by_names(remat):
        # What every product and norm reads. In the place of the attention's product the stream
        # that it is added to is kept, and the kernel's result whether or not it runs again.
        kept |= {"attention norm": stream, "mlp norm": stream, "attention": queries}
        if model.qk_norm:
            kept |= {"query before its norm": queries, "key before its norm": keys}
    found = [Kept(name, size, width) for name, size in kept.items() if size]
    if "attention" in names:
        # log(sum(exp(score))), of every head.
        found.append(Kept("attention sums", model.num_heads, max(width, 4)))
    return found


def kept_bytes(model: ModelConfig, remat: str) -> int:
    """Of a layer and a token, over the ranks of tensor together."""
    return sum(one.num_bytes for one in kept_values(model, remat))


def by_names(remat: str) -> bool:
    """Whether JAX keeps the named values and makes again all that is not named."""
    return remat not in ("none", "save_all_but_attention")

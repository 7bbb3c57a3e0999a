"""What a layer keeps of each token for its backward pass, by remat policy: exact.

The suite holds it to `remat.rematerialised`, value by value.
"""

from dataclasses import dataclass

from jaxscale.config import ModelConfig
from jaxscale.layout import by_names, kept_passes, remat_names
from jaxscale.planner.model.param_shapes import itemsize


@dataclass(frozen=True)
class SavedValue:
    """One value; over the ranks of tensor together."""

    name: str
    elements: int  # of a token
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of a token."""
        return self.elements * self.element_bytes


def saved_values(model: ModelConfig, remat: str) -> list[SavedValue]:
    """The values that a policy of `Layout.remat` keeps, a few constants of a layer left out."""
    width, names = itemsize(model.compute_dtype), remat_names(remat)
    stream, queries = model.d_model, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    sizes = {
        "query": queries,
        "key": keys,
        "value": keys,
        "attention": queries,
        "attention_out": stream,
        "mlp_up": model.d_ff,
        "mlp_gate": model.d_ff if model.family == "llama" else 0,
    }
    kept = {"input": stream} | {name: sizes[name] for name in names}
    if not by_names(remat):
        # What every product and norm reads. In the place of the attention's product the stream
        # that it is added to is kept, and the kernel's result whether or not it runs again.
        kept |= {"attention norm": stream, "mlp norm": stream, "attention": queries}
        if model.qk_norm:
            kept |= {"query before its norm": queries, "key before its norm": keys}
    found = [SavedValue(name, size, width) for name, size in kept.items() if size]
    if "attention" in names:
        # log(sum(exp(score))), of every head.
        found.append(SavedValue("attention sums", model.num_heads, max(width, 4)))
    return found


def saved_bytes(model: ModelConfig, remat: str) -> int:
    """Of a layer and a token, over the ranks of tensor together."""
    return sum(one.num_bytes for one in saved_values(model, remat))


def stash_bytes(model: ModelConfig, remat: str) -> dict[str, int]:
    """What a pipeline keeps of a layer and a token, over the ranks of tensor together, by the
    table's buffers: "residual_b" from F to B, "residual_w" from F to W, "cotangent" from B to W.

    W needs no weights, so what it reads beside kept values is what B has made: see
    `pipeline.split`, to which the suite holds this.
    """
    names, gpt = set(remat_names(remat)), model.family == "gpt"
    stream, queries = model.d_model, model.num_heads * model.head_dim
    keys, hidden = model.num_kv_heads * model.head_dim, model.d_ff
    sizes = {"query": queries, "key": keys, "value": keys}
    # Gradients of the results of products: of both halves' last ones, and of those before.
    cotangent = 2 * stream + queries + 2 * keys + hidden * (1 if gpt else 2)
    # The activation is made again from both its factors.
    cotangent += 2 * hidden * gpt
    if kept_passes(remat) is not None or not by_names(remat):
        residual_b = 2 * stream + queries + 2 * keys + hidden * gpt
        residual_b += (queries + keys) * model.qk_norm
        residual_w = 2 * stream + queries + 2 * hidden * (not gpt)
        sums = remat != "save_all_but_attention"
    else:
        residual_b, residual_w = sum(sizes[name] for name in names & sizes.keys()), 0
        normed = sizes.keys() <= names  # else B makes the norm that W reads
        ungated = not gpt and {"mlp_up", "mlp_gate"} <= names
        rest_of_mlp = ungated and "attention_out" in names  # likewise
        input_for_w = normed or rest_of_mlp
        residual_w += stream * input_for_w
        residual_b += stream * (not input_for_w)
        cotangent += stream * (not normed)
        sums = "attention" in names
        residual_w += queries * sums
        cotangent += queries * (not sums)
        if rest_of_mlp:
            residual_w += stream
        else:
            residual_b += stream * ("attention_out" in names)
            cotangent += stream
        if gpt:
            residual_b += hidden * ("mlp_up" in names)
        else:
            there = len(names & {"mlp_up", "mlp_gate"})
            residual_w += there * hidden
            cotangent += (2 - there) * hidden
    width = itemsize(model.compute_dtype)
    return {
        "residual_b": width * residual_b + max(width, 4) * model.num_heads * sums,
        "residual_w": width * residual_w,
        "cotangent": width * cotangent,
    }

"""Remat policies: the residuals that a layer saves for its backward pass."""

import functools
import re
from dataclasses import dataclass

from jaxscale.choices import check_choice
from jaxscale.config.schedule_spec import AUTO

BLOCK_TENSORS = ("query", "key", "value", "attention", "attention_out", "mlp_gate", "mlp_up")
"""Results of a layer's matmuls, by their names in remat policies; "attention" is the output of the
attention kernel. The result of a layer's last matmul is not listed: no backward pass needs it.
"""
REMATS = ("none", "full", "save_matmuls", "save_all_but_attention")
REMATS_WITH_NAMES = ("save", "offload")  # as in "save:query,key,value"
KEEP = "keep"  # as in "keep:4"


@dataclass(frozen=True)
class RematPolicy:
    """Remat policy, `Layout.remat` parsed: the tensors that a layer saves for its backward pass."""

    kind: str  # of REMATS, REMATS_WITH_NAMES, or KEEP
    names: tuple[str, ...]  # the tensors that are saved, of BLOCK_TENSORS
    # Passes whose residuals a pipeline rank saves at a time; the schedule has recompute operations
    # for the others: 0 with "full", 4 with "keep:4"; None without such operations. It is the `keep`
    # of `pipeline.orders.make_order`.
    kept_passes: int | None = None

    @property
    def by_names(self) -> bool:
        """Whether a layer saves only the named tensors, and recomputes other results."""
        return self.kind not in ("none", "save_all_but_attention")

    @property
    def offloads(self) -> bool:
        """Whether the named tensors are saved in host memory."""
        return self.kind == "offload"


@functools.cache
def parse_remat(remat: str) -> RematPolicy:
    """Reads "full", "save:query,key" or "keep:4"; "auto", not yet chosen, saves all.

    Raises:
      ValueError: no such policy or tensor (names the nearest), or "keep:" without a number of at
        least 1.
    """
    kind, colon, listed = remat.partition(":")
    if kind == KEEP:
        return RematPolicy(KEEP, (), _kept_passes(remat, listed))
    if not colon:
        named = (f"{name}:TENSOR,..." for name in REMATS_WITH_NAMES)
        check_choice("layout.remat", remat, (*REMATS, *named, f"{KEEP}:NUMBER", AUTO))
        if remat == "full":
            return RematPolicy(remat, (), 0)
        if remat == "save_all_but_attention":
            kept = tuple(name for name in BLOCK_TENSORS if name != "attention")
            return RematPolicy(remat, kept)
        return RematPolicy(remat, BLOCK_TENSORS)
    if kind in (*REMATS, AUTO):
        raise ValueError(
            f"layout.remat = {remat!r}: {kind!r} takes no names; write {kind!r} alone, or "
            f"save:{listed} to save these"
        )
    check_choice("layout.remat", kind, (*REMATS_WITH_NAMES, KEEP))
    names = tuple(name.strip() for name in listed.split(","))
    for name in names:
        check_choice(f"layout.remat = {remat!r}", name, BLOCK_TENSORS, equals=": ")
    if len(set(names)) < len(names):
        raise ValueError(f"layout.remat = {remat!r} names a tensor twice; name it once")
    return RematPolicy(kind, names)


def _kept_passes(remat: str, number: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", number, re.ASCII):
        raise ValueError(
            f"layout.remat = {remat!r}; write keep:NUMBER, such as keep:4, for the number of "
            "passes that each pipeline rank keeps, or 'full' to keep none"
        )
    return int(number)

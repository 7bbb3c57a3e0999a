"""Optimizer settings of a run, and groups of parameters with other settings.

Nothing here imports JAX: a mistyped key must be refused in a fraction of a second.
"""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxscale.choices import check_at_least, check_choice
from jaxscale.config.model import DTYPES
from jaxscale.formatting import changed_fields

OPTIMIZERS = ("adamw", "adafactor", "lion", "muon")
ROUNDINGS = ("nearest", "stochastic")
SCHEDULES = ("cosine", "linear", "wsd", "constant")

UNSTRUCTURED = "unstructured"
SPARSITY_SETTINGS = tuple(f"sparsity_{name}" for name in ("begin", "steps", "every", "pattern"))
MOST_OF_GROUP = 32
"""Weights in a group of a pattern N:M; ranking them takes the square of comparisons."""

FACTORED_SIZE = 128
"""Adafactor keeps whole second moments of matrices with a smaller side (arXiv 1804.04235)."""

LEAST_EPSILON = 2.0**-126
"""The smallest float32 number that devices do not round to 0."""

PRUNING_READS, STEP_READS = 33, 3
"""Readings of a weight in an update that prunes, and in each step of a sparse run."""

DENSE = ("routes", "lora_rank", "side_width")
"""Logical axes of the layers' matrices that `sparsity` leaves dense: routers and adapters."""

OPTIONAL = ("weight_decay", "sparsity")
"""Keys of an entry of `optimizer.groups` that may be None."""

STACKS = ("layers", "experts")
"""Logical axes along which a parameter is a stack of matrices."""

SIDES = ("embed", "lora_rank")
"""Logical axes that are one side of a matrix: the first of these that it has. The second is for
low-rank adapters, so that both of their factors count as matrices."""

UNUSED = {
    "lion": ("epsilon", "second_moment_dtype"),
    "adafactor": ("b1", "b2", "epsilon", "moment_dtype"),
}
"""Update rule -> the settings that it does not read."""


@dataclass(frozen=True)
class ParamGroup:
    """A group of parameters, by name, with another learning rate or decay, or frozen."""

    params: str  # a pattern of names such as layers/attention/*; * matches any characters
    learning_rate_scale: float = 1.0  # factor of the learning rate, and so of the decay
    weight_decay: float | None = None  # None: optimizer.weight_decay, on matrices only
    frozen: bool = False  # no update, no moments, not in the gradient norm
    sparsity: float | None = None  # None: optimizer.sparsity, on matrices of the layers only

    def __post_init__(self) -> None:
        if not self.params:
            raise ValueError(
                "optimizer.groups: params = '' matches no parameter; write a pattern of names, "
                "such as 'embed/*'"
            )
        for name in ("learning_rate_scale", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"optimizer.groups: {name} = {value} must be finite and at least 0"
                )
        if self.sparsity is not None and not 0 <= self.sparsity < 1:
            raise ValueError(
                f"optimizer.groups: sparsity = {self.sparsity} is a share of weights; at least 0 "
                "and below 1"
            )
        others = self.learning_rate_scale, self.weight_decay, self.sparsity
        if self.frozen and others != (1.0, None, None):
            raise ValueError(
                f"optimizer.groups: {self.params!r} is frozen = True, which leaves nothing for "
                "learning_rate_scale, weight_decay and sparsity to change; leave them out"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule and its schedule.

    `groups` are `ParamGroup`s, or mappings with their keys; the first that matches a parameter
    counts.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3  # at the peak
    schedule: str = "cosine"
    schedule_steps: int | None = None  # its length; None: `run.steps` of the first start
    warmup_steps: int = 0
    final_learning_rate: float = 0.1  # at the end, as a share of the peak
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8  # added to the root of AdamW's second moment
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # on the global gradient norm; 0 means none
    moment_dtype: str = "float32"  # of first moments
    second_moment_dtype: str = "float32"
    moment_rounding: str = "nearest"  # of moments to bfloat16; "stochastic" is unbiased
    accumulation_dtype: str = "float32"  # of gradients, summed over micro-batches
    reduction_dtype: str = ""  # of their sums over ranks; "" is accumulation_dtype
    keep_state: bool = False  # a new run also takes the moments of the run in model.init_from
    groups: tuple[ParamGroup, ...] = ()  # parameters with another rate or decay, or frozen
    sparsity: float = 0.0  # final share of zeros in each matrix of the layers
    sparsity_begin: int = 0  # updates before pruning begins
    sparsity_steps: int | None = None  # updates over which it is reached
    sparsity_every: int = 1  # updates between prunings
    sparsity_pattern: str = UNSTRUCTURED  # or "N:M"
    table_learning_rate: float = 0.01  # of row-wise Adagrad, for a model's tables; constant
    table_staleness: int = 0  # steps after which a table's gradients are applied
    mup_base_width: int = 0  # d_model at which the rate was tuned, for muP; 0: no scaling by width

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        check_choice("optimizer.name", self.name, OPTIMIZERS)
        check_choice("optimizer.schedule", self.schedule, SCHEDULES)
        check_choice("optimizer.moment_dtype", self.moment_dtype, DTYPES)
        check_choice("optimizer.second_moment_dtype", self.second_moment_dtype, DTYPES)
        check_choice("optimizer.accumulation_dtype", self.accumulation_dtype, DTYPES)
        if self.reduction_dtype:
            check_choice("optimizer.reduction_dtype", self.reduction_dtype, DTYPES)
        check_choice("optimizer.moment_rounding", self.moment_rounding, ROUNDINGS)
        check_at_least(
            "optimizer",
            self,
            learning_rate=0,
            warmup_steps=0,
            final_learning_rate=0,
            b1=0,
            b2=0,
            weight_decay=0,
            clip_norm=0,
            table_learning_rate=0,
            table_staleness=0,
            mup_base_width=0,
        )
        if not self.epsilon >= LEAST_EPSILON:
            raise ValueError(
                f"optimizer.epsilon = {self.epsilon} is too small; at least {LEAST_EPSILON:.3g}, "
                "such as 1e-8: with 0 the update of a parameter without a gradient, such as an "
                "unused token's, is 0 / 0"
            )
        self._check_unused()
        object.__setattr__(self, "groups", to_param_groups(self.groups))
        if self.schedule_steps is not None:
            check_at_least("optimizer", self, schedule_steps=1)
        for name in ("b1", "b2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"optimizer.{name} = {getattr(self, name)} must be below 1")
        self._check_moments()
        self._check_sparsity()
        if self.final_learning_rate > 1:
            raise ValueError(
                f"optimizer.final_learning_rate = {self.final_learning_rate} is a share of "
                "optimizer.learning_rate; at most 1"
            )

    @property
    def reduced_in(self) -> str:
        """The type in which gradients are summed over ranks."""
        return self.reduction_dtype or self.accumulation_dtype

    @property
    def prunes(self) -> bool:
        """Whether weights are pruned."""
        return self.sparsity > 0 or any(group.sparsity for group in self.groups)

    @property
    def pruning_reads(self) -> float:
        """Readings of each pruned weight in a step while the sparsity rises, on average: one for
        each bit of a threshold, and those of masks, of zero gradients and of the metric."""
        return (PRUNING_READS / self.sparsity_every + STEP_READS) * self.prunes

    @property
    def kept_of(self) -> tuple[int, int] | None:
        """N and M of `sparsity_pattern`: N weights of M stay; None if it is unstructured."""
        if self.sparsity_pattern == UNSTRUCTURED:
            return None
        kept, _, group = self.sparsity_pattern.partition(":")
        return int(kept), int(group)

    @property
    def unread(self) -> set[str]:
        """The settings that nothing reads, or that are off by default."""
        unread = {"keep_state", "mup_base_width", "reduction_dtype", *UNUSED.get(self.name, ())}
        unread |= set() if self._has_narrow_moments else {"moment_rounding"}
        unread |= set() if self.prunes else {*SPARSITY_SETTINGS}
        return unread | ({"final_learning_rate"} if self.schedule == "constant" else set())

    @property
    def _has_narrow_moments(self) -> bool:
        return "bfloat16" in (getattr(self, name) for name in self._dtypes)

    @property
    def _dtypes(self) -> tuple[str, ...]:
        """The settings of the types of the rule's moments."""
        both = ("moment_dtype", "second_moment_dtype")
        return tuple(name for name in both if name not in UNUSED.get(self.name, ()))

    def _check_unused(self) -> None:
        """Refuses settings that would change nothing."""
        for name in UNUSED.get(self.name, ()):
            if getattr(self, name) != getattr(OptimizerConfig, name):
                readers = [rule for rule in OPTIMIZERS if name not in UNUSED.get(rule, ())]
                raise ValueError(
                    f"optimizer.{name} = {getattr(self, name)!r} is for {', '.join(readers)}; "
                    f"leave it out with optimizer.name = {self.name!r}"
                )

    def _check_sparsity(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(
                f"optimizer.sparsity = {self.sparsity} is a share of weights; at least 0 and "
                "below 1"
            )
        check_at_least("optimizer", self, sparsity_begin=0, sparsity_every=1)
        if self.sparsity_steps is not None:
            check_at_least("optimizer", self, sparsity_steps=1)
        elif self.prunes:
            raise ValueError(
                "optimizer.sparsity needs optimizer.sparsity_steps, the updates over which it is "
                "reached, such as half of run.steps after optimizer.sparsity_begin of a quarter; "
                "1 prunes in one update"
            )
        pattern = self.sparsity_pattern
        form = re.fullmatch(r"([1-9]\d?):([1-9]\d?)", pattern)
        if pattern != UNSTRUCTURED and not (form and int(form[1]) < int(form[2]) <= MOST_OF_GROUP):
            raise ValueError(
                f"optimizer.sparsity_pattern = {pattern!r} is neither {UNSTRUCTURED!r} nor N:M "
                f"with N below M and M at most {MOST_OF_GROUP}, such as '2:4'"
            )
        if not self.kept_of:
            return
        share = 1 - self.kept_of[0] / self.kept_of[1]
        shares = {"optimizer.sparsity": self.sparsity}
        shares |= {
            f"sparsity of {one.params!r} in optimizer.groups": one.sparsity for one in self.groups
        }
        for name, value in shares.items():
            if value and abs(value - share) > 1e-9:
                raise ValueError(
                    f"{name} = {value} is not that of optimizer.sparsity_pattern = {pattern!r}, "
                    f"which is {share:.6g}; set that, or 'unstructured'"
                )

    def _check_moments(self) -> None:
        """Refuses moments that rounding to nearest would freeze, since adding less than 2^-8 of a
        bfloat16 number may not change it; and stochastic rounding without bfloat16 moments."""
        if self.moment_rounding == "stochastic":
            if not self._has_narrow_moments:
                raise ValueError(
                    "optimizer.moment_rounding = 'stochastic' is for moments in bfloat16, and "
                    f"those of optimizer.name = {self.name!r} are not; set "
                    + " or ".join(f"optimizer.{name}" for name in self._dtypes)
                    + " = 'bfloat16', or optimizer.moment_rounding = 'nearest'"
                )
            return
        if self.second_moment_dtype == "bfloat16":
            first = " (optimizer.moment_dtype, of first moments, can be bfloat16)"
            raise ValueError(
                "optimizer.second_moment_dtype = 'bfloat16' would freeze second moments, which "
                "change by less than bfloat16's precision in a step; set float32 or float64"
                f"{first if 'moment_dtype' in self._dtypes else ''}, or set "
                "optimizer.moment_rounding = 'stochastic'"
            )
        decay = "b2" if self.name == "lion" else "b1"
        if self.moment_dtype == "bfloat16" and getattr(self, decay) > 1 - 2**-8:
            raise ValueError(
                f"optimizer.moment_dtype = 'bfloat16' would freeze a moment that decays by "
                f"optimizer.{decay} = {getattr(self, decay)}; at most {1 - 2**-8:.3f}, or set "
                "optimizer.moment_dtype = 'float32' or optimizer.moment_rounding = 'stochastic'"
            )


def matrix_dims(axes: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The dimensions of a matrix's rows and of its columns, one of them of `SIDES`; None for a
    vector.

    Args:
      axes: the logical axes of a parameter.
    """
    side = next((axes.index(name) for name in SIDES if name in axes), None)
    rest = tuple(i for i, name in enumerate(axes) if name not in STACKS and i != side)
    if side is None or not rest:
        return None
    return ((side,), rest) if side < rest[0] else (rest, (side,))


def prunes_by_rule(axes: Sequence[str]) -> bool:
    """Whether `sparsity` is for a parameter with these logical axes: a matrix of the layers."""
    return "layers" in axes and matrix_dims(axes) is not None and not {*axes} & {*DENSE}


def to_param_groups(value: Sequence[object]) -> tuple[ParamGroup, ...]:
    """Reads entries of a configuration: mappings with a key `params`, or records.

    Raises:
      ValueError: an unknown key (the nearest is named) or a value that is not allowed.
    """
    return tuple(_to_group(f"optimizer.groups[{i}]", entry) for i, entry in enumerate(value))


def find_group(name: str, groups: Sequence[ParamGroup]) -> ParamGroup:
    """The first group whose pattern matches a parameter's name, or a neutral group.

    >>> find_group("embed/tokens", [ParamGroup("embed/*", frozen=True), ParamGroup("*")]).frozen
    True
    """
    matching = (group for group in groups if fnmatch.fnmatchcase(name, group.params))
    return next(matching, ParamGroup("*"))


def check_groups(
    groups: Sequence[ParamGroup], known: Sequence[str], moved: Collection[str] = ()
) -> None:
    """Refuses groups that would change nothing, or that freeze every parameter.

    Args:
      known: the names of all parameters.
      moved: the parameters that the model updates or freezes in place of the optimizer.

    Raises:
      ValueError: with the setting to change.
    """
    earlier: set[str] = set()
    for i, group in enumerate(groups):
        title = f"optimizer.groups[{i}] = {group.params!r}"
        matching = fnmatch.filter(known, group.params)
        if not matching:
            raise ValueError(f"{title} matches no parameter; they are {', '.join(known)}")
        left = [name for name in matching if name not in earlier]
        earlier.update(matching)
        if not left:
            raise ValueError(
                f"{title} changes nothing: earlier entries match {', '.join(matching)}, and the "
                "first match counts; move it before them, or leave it out"
            )
        if group != ParamGroup(group.params, frozen=group.frozen) and set(left) <= set(moved):
            raise ValueError(
                f"{title} changes nothing: its settings are for the "
                f"optimizer, and the model itself updates or freezes {', '.join(left)}; leave the "
                "entry out, or set frozen = True in it"
            )
    if all(name in moved or find_group(name, groups).frozen for name in known):
        raise ValueError(
            "optimizer.groups freeze every parameter; leave 'frozen' out for the parameters to "
            "train"
        )


def _to_group(name: str, entry: object) -> ParamGroup:
    if isinstance(entry, ParamGroup):
        return entry
    if not isinstance(entry, Mapping) or "params" not in entry:
        raise ValueError(
            f"{name} = {entry!r} is not a mapping with the key 'params', such as "
            "{'params': 'embed/*', 'learning_rate_scale': 0.1} or {'params': 'head/*', "
            "'frozen': True}"
        )
    known = [field.name for field in dataclasses.fields(ParamGroup)]
    expected = {"params": "text", "frozen": "True or False"}
    for key, value in entry.items():
        check_choice(f"{name} key ", key, known, equals="")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = {"params": isinstance(value, str), "frozen": isinstance(value, bool)}
        if not fits.get(key, number or (value is None and key in OPTIONAL)):
            raise ValueError(
                f"{name}[{key!r}] = {value!r} is of type {type(value).__name__}; expected "
                f"{expected.get(key, 'a number')}"
            )
    return ParamGroup(**entry)

"""Optimizer settings of a run, and groups of parameters with other settings.

Nothing here imports JAX: a mistyped key must be refused in a fraction of a second.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxscale.choices import check_at_least, check_choice
from jaxscale.config.model import DTYPES
from jaxscale.formatting import changed_fields

OPTIMIZERS = ("adamw", "adafactor", "lion", "muon")
ROUNDINGS = ("nearest", "stochastic")
SCHEDULES = ("cosine", "linear", "wsd", "constant")

FACTORED_SIZE = 128
"""Adafactor keeps whole second moments of matrices with a smaller side (arXiv 1804.04235)."""

LEAST_EPSILON = 2.0**-126
"""The smallest float32 number that devices do not round to 0."""

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
        if self.frozen and (self.learning_rate_scale != 1 or self.weight_decay is not None):
            raise ValueError(
                f"optimizer.groups: {self.params!r} is frozen = True, which leaves nothing for "
                "learning_rate_scale and weight_decay to change; leave them out"
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
    def unread(self) -> set[str]:
        """The settings that nothing reads, or that are off by default."""
        unread = {"keep_state", "reduction_dtype", *UNUSED.get(self.name, ())}
        unread |= set() if self._has_narrow_moments else {"moment_rounding"}
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
                f"{title} changes nothing: learning_rate_scale and weight_decay are for the "
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
        if not fits.get(key, number or (value is None and key == "weight_decay")):
            raise ValueError(
                f"{name}[{key!r}] = {value!r} is of type {type(value).__name__}; expected "
                f"{expected.get(key, 'a number')}"
            )
    return ParamGroup(**entry)

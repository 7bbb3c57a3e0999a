"""Refusing an unknown name or number, and suggesting the nearest that is allowed."""

import difflib
import math
import numbers
from collections.abc import Iterable


def nearest(got: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names most similar to `got`, at most `count` of them.

    Args:
      cutoff: the least similarity, from 0 (anything) to 1 (equal), of `difflib`.
    """
    return difflib.get_close_matches(str(got), list(known), n=count, cutoff=cutoff)


def did_you_mean(got: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> str:
    """The end of an error message, or "" where no known name is similar to `got`.

    >>> did_you_mean("adam", ("adamw", "lion"))
    "; did you mean 'adamw'?"
    >>> did_you_mean("sgd", ("adamw", "lion"))
    ''
    """
    near = nearest(got, known, count, cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def check_choice(name: str, got: object, allowed: Iterable[str], *, equals: str = " = ") -> None:
    """Refuses a value that is not allowed.

    Args:
      name: of the setting, as the user writes it.
      equals: between the name and the value.

    Raises:
      ValueError: `got` is not in `allowed`; names the nearest.
    """
    allowed = tuple(allowed)
    if got not in allowed:
        raise ValueError(
            f"{name}{equals}{got!r} is not known; it can be "
            f"{', '.join(choice or "''" for choice in allowed)}"
            f"{did_you_mean(got, allowed)}"
        )


def check_kind(name: str, got: object, kind: type | tuple[type, ...], advice: str) -> None:
    """Refuses an argument of a function that is of another type; without this it would fail far
    from there.

    Args:
      advice: what to pass.

    Raises:
      ValueError: `got` is no `kind`.
    """
    if not isinstance(got, kind):
        raise ValueError(f"{name} is of type {type(got).__name__}; {advice}")


def check_count(name: str, got: object, least: int) -> None:
    """Raises ValueError for an argument that is not a whole number, or is below `least`."""
    if isinstance(got, bool) or not isinstance(got, numbers.Integral):
        raise ValueError(f"{name} = {got!r} is not a whole number")
    if got < least:
        raise ValueError(f"{name} = {got} is too small; at least {least}")


def check_at_least(section: str, record: object, **least: float) -> None:
    """Raises ValueError for the first field of `record` that is below its lower bound."""
    for name, bound in least.items():
        if not getattr(record, name) >= bound:
            raise ValueError(
                f"{section}.{name} = {getattr(record, name)} is too small; at least {bound}"
            )


def nearest_divisors(size: int, parts: int) -> str:
    """The numbers nearest to `parts`, below and above, into which `size` divides: "2 or 4"."""
    found = divisors(size)
    below = [n for n in found if n < parts][-1:]
    return " or ".join(map(str, below + [n for n in found if n > parts][:1]))


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})

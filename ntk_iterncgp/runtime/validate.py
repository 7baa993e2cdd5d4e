"""Scalars that come from the user: of the right kind and size, or an error message that names the setting."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral


def whole_number(name: str, value: object, *, at_least: int, or_none: bool = False) -> int:
    """A setting that counts something, as a Python int; NumPy's whole numbers are whole numbers."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        kind = "None or a whole number" if or_none else "a whole number"
        raise ValueError(f"`{name}` must be {kind} of at least {at_least}; got {value!r}. Try {name}={at_least}.")
    if int(value) >= 2**63:
        raise ValueError(f"`{name}` must be a whole number below 2^63; got a larger one. Try a smaller one.")
    return int(value)


def seed_number(value: object) -> int:
    """Check a seed: a whole number of at least 0."""
    return whole_number("seed", value, at_least=0)


def non_negative(name: str, value: object) -> float:
    """A tolerance: a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"`{name}` must be a number of at least 0; got {value!r}. Try {name}=0.")
    if isinstance(value, int) and value >= 2**63:
        raise ValueError(f"`{name}` must be a number below 2^63; got a larger one. Try a smaller one.")
    return value


def one_of(name: str, value: str, choices: Sequence[str]) -> str:
    """The value, if it is one of the choices."""
    if value not in choices:
        listed = ", ".join(repr(str(getattr(choice, "value", choice))) for choice in choices)
        raise ValueError(f"`{name}` must be one of {listed}; got {value!r}. Try the default.")
    return value


def checked_contrasts(contrasts: int | str) -> int | str:
    """The setting, or a ValueError that says what it must be."""
    is_number = isinstance(contrasts, int) and not isinstance(contrasts, bool) and contrasts >= 1
    if not is_number and contrasts not in ("all", "auto"):
        raise ValueError(
            f"`contrasts` must be a positive whole number, 'all' or 'auto'; got {contrasts!r}. Try 'auto'."
        )
    return contrasts

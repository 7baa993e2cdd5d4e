"""When to stop, and what to tell the user about it: a status is a value with advice, never an exception."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral


class Status(StrEnum):
    """How a run ended."""

    CONVERGED = "converged"
    BUDGET = "budget"
    NEWTON_STEPS = "newton_steps"
    EXHAUSTED = "exhausted"
    DIVERGED = "diverged"
    INTERRUPTED = "interrupted"

    @property
    def advice(self) -> str:
        return _ADVICE[self]


_ADVICE = {
    Status.CONVERGED: "The mean has converged. refine(max_products=…) contracts the variance further.",
    Status.BUDGET: "All products were spent before the mean converged. refine(max_products=…) goes on from here.",
    Status.NEWTON_STEPS: "max_newton_steps was reached before the mean converged. Allow more steps, or call refine().",
    Status.EXHAUSTED: "The policy has no new action to offer. refine(…) goes on with random probes.",
    Status.DIVERGED: "An undamped Newton step left the finite numbers; this is the point before it. Use damped=True.",
    Status.INTERRUPTED: "The run was interrupted; the posterior is valid for the work done. refine(…) goes on.",
}


def whole_number(name: str, value: object, *, at_least: int, or_none: bool = False) -> int:
    """A setting that counts something, as a Python int; NumPy's whole numbers are whole numbers."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        kind = "None or a whole number" if or_none else "a whole number"
        raise ValueError(f"{name} expects {kind} of at least {at_least}, but got {value!r}.")
    if int(value) >= 2**63:
        raise ValueError(f"{name} expects a whole number below 2^63, but got a larger one.")
    return int(value)


def seed_number(value: object) -> int:
    return whole_number("seed", value, at_least=0)


def share(name: str, value: object) -> float:
    """A tolerance: a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{name} expects a number of at least 0, but got {value!r}.")
    if isinstance(value, int) and value >= 2**63:
        raise ValueError(f"{name} expects a share, a whole one below 2^63, but got a larger number.")
    return value


@dataclass(frozen=True)
class Stopping:
    """The budget and the tolerances, in the units that cost."""

    max_products: int = 100
    products_per_step: int = 5
    max_newton_steps: int = 20
    newton_tol: float = 1e-2  # relative change of g = f − m between Newton steps
    residual_tol: float = 1e-5  # relative residual of the linear system, measured through W
    spend_all: bool = False  # go on when the mean has converged, until the products are spent

    def __post_init__(self) -> None:
        for name in ("max_products", "products_per_step", "max_newton_steps"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), at_least=1))
        for name in ("newton_tol", "residual_tol"):
            share(name, getattr(self, name))

"""Settings of Newton's method, and how a run ended: a status is a value with advice, never an exception."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ntk_iterncgp.runtime.validate import non_negative, whole_number


class Status(StrEnum):
    """How a run ended."""

    EXACT = "exact"
    CONVERGED = "converged"
    BUDGET = "budget"
    NEWTON_STEPS = "newton_steps"
    EXHAUSTED = "exhausted"
    DIVERGED = "diverged"
    INTERRUPTED = "interrupted"

    @property
    def advice(self) -> str:
        """What the status means, and what to do next."""
        return _ADVICE[self]


_ADVICE = {
    Status.EXACT: "Computed with the whole kernel matrix: mean and variance are exact, and nothing is left to refine.",
    Status.CONVERGED: "The mean has converged. refine(max_products=…) contracts the variance further.",
    Status.BUDGET: "All products were spent before the mean converged. refine(max_products=…) continues from here.",
    Status.NEWTON_STEPS: "max_newton_steps was reached before the mean converged. Allow more steps, or call refine().",
    Status.EXHAUSTED: "The policy has no new action to offer. refine(…) continues with random probes.",
    Status.DIVERGED: "An undamped Newton step left the finite numbers; this is the point before it. Use damped=True.",
    Status.INTERRUPTED: "The run was interrupted; the posterior is valid for the work done. refine(…) continues.",
}


@dataclass(frozen=True)
class Stopping:
    """The budget and the tolerances, in the units that cost."""

    max_products: int = 100  # with the prior
    products_per_step: int = 5  # of these, in one Newton step
    max_newton_steps: int = 20
    newton_tol: float = 1e-2  # relative change of g = f − m between Newton steps
    residual_tol: float = 1e-5  # relative residual of the linear system, measured through W
    spend_all: bool = False  # continue after the mean has converged, until the products are spent

    def __post_init__(self) -> None:
        for name in ("max_products", "products_per_step", "max_newton_steps"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), at_least=1))
        for name in ("newton_tol", "residual_tol"):
            non_negative(name, getattr(self, name))


COMPRESSIONS = ("mean+trace", "eigen")


@dataclass(frozen=True)
class NewtonOptions:
    """Settings of the outer loop, besides those of when it stops."""

    max_rank: int | None = None  # how many actions to retain between Newton steps; None: all
    compression: str = "mean+trace"  # how to choose them, one of `COMPRESSIONS`
    damped: bool = True  # shorten Newton's steps until the objective rises

    def __post_init__(self) -> None:
        if self.max_rank is not None:
            object.__setattr__(self, "max_rank", whole_number("max_rank", self.max_rank, at_least=1, or_none=True))
        if self.compression not in COMPRESSIONS:
            names = " or ".join(map(repr, COMPRESSIONS))
            raise ValueError(f"`compression` must be {names}; got {self.compression!r}. Try {COMPRESSIONS[0]!r}.")
        if not isinstance(self.damped, bool):
            raise ValueError(f"`damped` must be True or False; got {self.damped!r}. Try True.")

    @property
    def keeps_mean(self) -> bool:
        """Whether compression leaves Newton's point where it is, so that Ψ never falls."""
        return self.max_rank is None or self.compression != "eigen"


@dataclass(frozen=True)
class Position:
    """Where a run stands within its loops, so that it can be resumed from a state alone.

    A run is a generator, and its loop counters would be lost with it. So each state that is yielded carries them:
    resumed from such a state, a run continues as if it had never stopped. Products with the prior are counted from the
    first one ever.
    """

    limit: int  # the number of products at which the budget of the run is spent
    steps_left: int = 0  # Newton steps, the current one included
    step_start: int | None = None  # the number of products when the current Newton step began; None: between two
    stage: int = 0  # a run may have several, with different policies
    status: Status | None = None  # how the stage ended; None: it has not

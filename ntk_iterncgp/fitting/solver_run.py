"""The solver as a run: Newton steps and products with a prior, their history, and the report of how they ended."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from torch import Tensor

from ntk_iterncgp.fitting.drive import Run, Stage, Trajectory
from ntk_iterncgp.fitting.report import FitReport, Record, from_table, to_table
from ntk_iterncgp.fitting.solver_saving import from_content, to_content
from ntk_iterncgp.solver.state import State
from ntk_iterncgp.solver.stopping import Status

FREQUENT_METER_RANK = 512
"""Up to this rank the meter is read after every block of actions, beyond it after every Newton step: it costs O(B³),
and within a step an earlier reading stays a lower bound."""
NEARLY_EXACT = 0.01

Steps = Generator[State, None, tuple[State, Status]]


class SolverRun(Run[State]):
    """States of the solver are frozen and hold nothing that is filled in later: Ctrl-C need not wait for the next."""

    def __init__(
        self, steps: Callable[[State], Steps], start: State, max_products: int, digests: Tensor | None = None
    ) -> None:
        self._steps, self.start, self.max_products, self.digests = steps, start, max_products, digests

    def steps(self, state: State) -> Steps:
        """Newton steps, or products at one linear system."""
        return self._steps(state)

    def stage(self, state: State) -> Stage:
        """Products of this call."""
        return Stage("IterNCGP", self.max_products, "product", state.num_products - self.start.num_products)

    def record(self, state: State, last: Record | None, seconds: float) -> Record:
        """After every state."""
        rank, is_new_step = state.buffer.size, last is None or state.newton_step > last.newton_step
        if last is None or is_new_step or rank <= FREQUENT_METER_RANK:
            information = state.information_captured
        else:
            information = last.information_captured
        return Record(
            num_products=state.num_products,
            newton_step=state.newton_step,
            rank=rank,
            objective=state.objective,
            relative_residual=state.relative_residual,
            information_captured=information,
            seconds=seconds,
        )

    def shown(self, record: Record) -> str:
        """The meter, and how far the linear system is solved."""
        return f"information ≥ {100 * record.information_captured:.1f} %, residual {record.relative_residual:.1e}"

    def can_resume(self, state: State) -> bool:
        """A state that knows its place in the run."""
        return state.position is not None

    def stop(self, state: State) -> State:
        """Without its place in this run."""
        return state.with_counters(position=None)  # whatever comes next is a run of its own

    def to_dict(self, trajectory: Trajectory[State]) -> dict[str, Any]:
        """State and history, which has the clock."""
        return {
            "state": to_content(trajectory.state),
            "history": to_table(trajectory.history),
            "status": trajectory.status,
            "data": self.digests,
        }

    def from_dict(self, saved: Mapping[str, Any], start: Trajectory[State]) -> Trajectory[State]:
        """In the formats of the state in which the call starts."""
        status, history = saved["status"], from_table(saved["history"])
        state = from_content(saved["state"], start.state)
        seconds = history[-1].seconds - start.before if history else 0.0
        return Trajectory(state, history, start.before, seconds, None if status is None else Status(status))


def solver_report(trajectory: Trajectory[State]) -> FitReport:
    """How a run of the solver ended, and what it cost."""
    state, status = trajectory.state, trajectory.status
    assert status is not None
    return FitReport(
        status=status.value,
        advice=_advice(status, state.variance_ratio),
        num_products=state.problem.prior.num_products,
        num_newton_steps=state.newton_step,
        rank=state.buffer.size,
        information_captured=state.tight_information_captured,
        seconds=trajectory.before + trajectory.seconds,
        history=trajectory.history,
        variance_ratio=state.variance_ratio,
    )


def _advice(status: Status, variance_ratio: float) -> str:
    """What to do next. A mean that has converged says nothing about the variance."""
    nearly_exact = f"the variance is on average within {100 * NEARLY_EXACT:.0f} % of exact."
    if status is Status.EXHAUSTED and variance_ratio < 1 + NEARLY_EXACT:
        return f"The policy has no new action to offer, and {nearly_exact}"
    if status is not Status.CONVERGED:
        return status.advice
    if variance_ratio < 1 + NEARLY_EXACT:
        return f"The mean has converged, and {nearly_exact}"
    return (
        f"The mean has converged. The variance may still be {variance_ratio:.3g} times the exact one, on average over "
        "the data: refine(max_products=…) contracts the variance further."
    )

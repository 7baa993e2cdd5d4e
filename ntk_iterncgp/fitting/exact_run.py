"""Newton's method with the whole kernel matrix as a run: its history, its checkpoint, its report and its self-check."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.fitting.drive import Run, Stage, Trajectory
from ntk_iterncgp.fitting.report import FitReport, Record, SelfCheckError, from_table, refusal, to_table
from ntk_iterncgp.fitting.self_check import falls
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.solver.exact import ExactState, exact_newton
from ntk_iterncgp.solver.state import Iterate
from ntk_iterncgp.solver.stopping import Status

USUAL_STEPS = 8  # from the prior mean, for a progress bar and an estimate of what a fit costs
CHECKED_DATA = 16
CHECK_TOLERANCE = 1e-6
SETTLED_DECREMENT = 1e-4  # of the mode, in posterior standard deviations


class ExactRun(Run[ExactState]):
    """States are frozen; each is a Newton point, from which a run can be resumed."""

    def __init__(self, start: ExactState, digests: Tensor | None = None) -> None:
        self.start, self.digests = start, digests

    def steps(self, state: ExactState) -> Generator[ExactState, None, tuple[ExactState, Status]]:
        """Newton steps to the mode."""
        return exact_newton(state)

    def stage(self, state: ExactState) -> Stage:
        """Newton steps of this call."""
        done = state.newton_step - self.start.newton_step
        return Stage("Exact", max(done, USUAL_STEPS), "step", done)

    def record(self, state: ExactState, last: Record | None, seconds: float) -> Record:
        """After every Newton step."""
        return Record(
            num_products=state.num_products,
            newton_step=state.newton_step,
            rank=state.problem.curvature_rank,
            objective=state.objective,
            relative_residual=0.0,  # each linear system is solved
            information_captured=1.0,
            seconds=seconds,
        )

    def shown(self, record: Record) -> str:
        """What Newton's method maximises."""
        return f"log p(y, f) {record.objective:.6g}"

    def stop(self, state: ExactState) -> ExactState:
        """As it is."""
        return state

    def advice_when_interrupted(self, state: ExactState) -> str:
        """What the warning says."""
        return "The fit was interrupted before its mode was found; refine() resumes it."

    def to_dict(self, trajectory: Trajectory[ExactState]) -> dict[str, Any]:
        """Newton's point and the history; K follows from the data."""
        state = trajectory.state
        return {
            "state": to_content(state),
            "history": to_table(trajectory.history),
            "status": trajectory.status,
            "data": self.digests,
        }

    def from_dict(self, saved: Mapping[str, Any], start: Trajectory[ExactState]) -> Trajectory[ExactState]:
        """For the problem of the state in which the call starts."""
        status, history = saved["status"], from_table(saved["history"])
        seconds = history[-1].seconds - start.before if history else 0.0
        state = from_content(saved["state"], start.state)
        return Trajectory(state, history, start.before, seconds, None if status is None else Status(status))


def to_content(state: ExactState) -> dict[str, Any]:
    """Newton's point, from which all else follows."""
    return {
        "exact": True,
        "representer_weights": state.iterate.representer_weights,
        "offset": state.iterate.offset,
        "newton_step": state.newton_step,
    }


def from_content(saved: Mapping[str, Any], like: ExactState) -> ExactState:
    """The state that was saved; `like` is one of the same problem."""
    n, device = like.problem.num_rows, like.matrices.device

    def checked(name: str) -> Tensor:
        value = saved[name]
        if not isinstance(value, Tensor) or value.dtype != torch.float64 or value.shape != (n,):
            raise ValueError(f"{name} must be a float64 tensor of shape ({n},)")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} holds NaN or infinity")
        return value.to(device)

    iterate = Iterate(like.iterate.coefficients, checked("representer_weights"), checked("offset"))
    return replace(like, iterate=iterate, newton_step=int(saved["newton_step"]))


def exact_report(trajectory: Trajectory[ExactState]) -> FitReport:
    """How an exact fit ended: there is nothing that it does not know."""
    state, status = trajectory.state, trajectory.status
    assert status is not None
    is_exact = status is Status.EXACT
    return FitReport(
        status=status.value,
        advice=status.advice if is_exact else "The mode has not been found yet. refine() resumes the search.",
        num_products=state.num_products,
        num_newton_steps=state.newton_step,
        rank=state.problem.curvature_rank,
        information_captured=1.0,
        seconds=trajectory.before + trajectory.seconds,
        history=trajectory.history,
        variance_ratio=1.0,
    )


def exact_checked(state: ExactState, history: Sequence[Record], *, is_finished: bool) -> ExactState:
    """The state, if it stands for what it says; else raise `SelfCheckError`.

    K is asked for again at some data, g must be K v, the factors must solve their system, and where Newton's method
    has ended ∇ = v to within a fraction of a posterior standard deviation. Nothing but K could be mended.
    """
    found = _problems(state, is_finished) | falls(history)
    if parallel.any_of(bool(found)):
        raise SelfCheckError(refusal(found.values() or ["the same in all processes"]))
    return state


def _problems(state: ExactState, is_finished: bool) -> dict[str, str]:
    iterate, prior = state.iterate, state.problem.prior
    assert isinstance(prior, GramPrior)
    if not all(bool(torch.isfinite(t).all()) for t in (iterate.representer_weights, iterate.offset, state.latent)):
        return {"point": "a finite point, but it holds NaN or infinity"}
    found: dict[str, str] = {}
    generator = torch.Generator().manual_seed(state.newton_step)
    rows = torch.randperm(prior.num_data, generator=generator)[:CHECKED_DATA].to(prior.device)
    size = float(state.matrices.diagonal(dim1=1, dim2=2).max())
    off = float((prior.between(prior.inputs[rows], prior.inputs) - state.matrices[:, rows]).abs().max())
    if not off <= CHECK_TOLERANCE * size:
        found["kernel"] = f"the kernel to be that of the fit, but at random data it differs by {off:.1e}"
    again = state.multiply(iterate.representer_weights)
    if not float((again - iterate.offset).norm()) <= CHECK_TOLERANCE * (1 + float(again.norm())):
        found["point"] = "Newton's point to follow from its weights, but it does not"
    probe = torch.randn(state.latent.shape, generator=generator, dtype=torch.float64).to(prior.device)
    probe = state.problem.project(probe.flatten()).reshape(probe.shape)
    solved = state.system.solve(probe).flatten()  # (K + W⁺)⁻¹ b, for which b − K v = W⁺v within the range of W
    b = state.problem.curvature(state.latent, probe.flatten() - state.multiply(solved))
    # W(b − K v) is a difference of numbers as large as W K v, each of them rounded.
    gain = size * prior.num_data * float(state.system.roots.square().max())
    tolerance = max(CHECK_TOLERANCE**0.5, torch.finfo(torch.float64).eps * gain)
    if not float((b - solved).norm()) <= tolerance * (1e-12 + float(solved.norm())):
        found["matrix"] = "the factors of K + W⁺ to solve its linear systems, but they do not"
    if is_finished and not found:
        rest = state.score - iterate.representer_weights
        step = state.solution.offset - iterate.offset  # Σ(∇ − v)
        decrement = math.sqrt(max(float(rest @ step), 0.0))
        if not decrement <= SETTLED_DECREMENT:
            found["mode"] = f"the mode, but it is {decrement:.1e} posterior standard deviations away"
    return found

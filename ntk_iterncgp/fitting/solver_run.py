"""The solver as a run: Newton steps and products with a prior, their history, and the report of how they ended."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.fitting.drive import Run, Stage, Trajectory
from ntk_iterncgp.fitting.report import FitReport, Record, from_table, to_table
from ntk_iterncgp.linalg.columns import Buffer, Columns, DenseColumns, Images, KroneckerColumns
from ntk_iterncgp.priors.ntk import NetworkImages
from ntk_iterncgp.solver.state import Iterate, State
from ntk_iterncgp.solver.stopping import Position, Status

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


# --- what is saved ----------------------------------------------------------------------------------------------------


COUNTERS = ("newton_step", "num_products", "num_proposals", "products_left")


def to_content(state: State) -> dict[str, Any]:
    """All that the next states are made of."""
    buffer, iterate = state.buffer, state.iterate
    return {
        "actions": _columns(buffer.actions),
        "images": _images(buffer.images),
        "coefficients": iterate.coefficients,
        "representer_weights": iterate.representer_weights,
        "offset": iterate.offset,
        "anchor_share": iterate.anchor_share,
        "gram": state.gram,
        "noise_gram": state.noise_gram,
        "generator": state.generator.get_state(),
        "counters": {name: getattr(state, name) for name in COUNTERS},
        "products_of_prior": state.problem.prior.num_products,
        "position": None if state.position is None else asdict(state.position),
        "computed": {name: value for name, value in state.__dict__.items() if _is_handed_on(name, value)},
    }


def from_content(saved: Mapping[str, Any], like: State) -> State:
    """The state that was saved; `like` is one of the same problem, in the same formats."""
    problem, device = like.problem, like.gram.device
    actions = _filled(like.buffer.actions, saved["actions"])
    images = _with_images(like.buffer.images, saved["images"])
    B, n = actions.size, problem.num_rows

    def checked(name: str, *shape: int) -> Tensor:
        value = saved[name]
        if not isinstance(value, Tensor) or value.dtype != torch.float64 or value.shape != shape:
            raise ValueError(f"{name} must be a float64 tensor of shape {shape}")
        return _finite(value.to(device), name)

    iterate = Iterate(
        checked("coefficients", B),
        checked("representer_weights", n),
        checked("offset", n),
        float(saved["anchor_share"]),
    )
    position = saved["position"]
    if position is not None:
        status = position["status"]
        position = Position(**{**position, "status": None if status is None else Status(status)})
    like.generator.set_state(saved["generator"])
    problem.prior.num_products = int(saved["products_of_prior"])
    state = replace(
        like,
        iterate=iterate,
        buffer=Buffer(actions, images),
        gram=checked("gram", B, B),
        noise_gram=checked("noise_gram", B, B),
        position=position,
    ).with_counters(**{name: int(saved["counters"][name]) for name in COUNTERS})
    handed_on = {}
    for name, value in saved["computed"].items():
        if not _is_handed_on(name, value):
            raise ValueError(f"{name[:60]!r} is nothing that a state computes")
        if isinstance(value, Tensor):
            anew = getattr(state, name)
            if value.shape != anew.shape or value.dtype != anew.dtype:
                raise ValueError(f"{name} must be {anew.dtype} of shape {tuple(anew.shape)}")
            value = _finite(value.to(device), name)
        handed_on[name] = value
    state = replace(state)  # without what was computed anew
    state.__dict__.update(handed_on)
    return state


def _is_handed_on(name: str, value: Any) -> bool:
    return isinstance(getattr(State, name, None), cached_property) and isinstance(value, (Tensor, float))


def _columns(columns: Columns) -> Tensor:  # (columns, rows)
    """With all rows, over however many processes they are spread."""
    stored = columns.factor.whole()
    return stored.storage[: stored.size]


def _images(images: Images) -> dict[str, Tensor]:
    if isinstance(images, NetworkImages):
        return {"weights": _columns(images.weights), "outputs": _columns(images.outputs)}
    assert isinstance(images, Columns)
    return {"outputs": _columns(images)}


def _with_images(like: Images, saved: Mapping[str, Tensor]) -> Images:
    if isinstance(like, NetworkImages):
        weights, outputs = (_filled(getattr(like, name), saved[name]) for name in ("weights", "outputs"))
        assert isinstance(weights, DenseColumns) and isinstance(outputs, DenseColumns)
        return NetworkImages(weights, outputs)
    assert isinstance(like, Columns)
    return _filled(like, saved["outputs"])


def _filled(like: Columns, saved: Tensor) -> Columns:  # (columns, rows)
    """Columns of the same format and room, with other content; of its rows those of this process."""
    stored = like.factor
    num_rows = stored.num_data * stored.num_outputs
    if not isinstance(saved, Tensor) or saved.ndim != 2 or saved.shape[1] != num_rows:
        raise ValueError(f"columns must have {num_rows} rows")
    if saved.dtype != stored.dtype:
        raise ValueError(f"columns must be {stored.dtype}")
    storage = stored.storage.new_empty(max(len(stored.storage), len(saved)), stored.storage.shape[1])
    storage[: len(saved)] = stored.shard.take(_finite(saved, "columns").T).T
    dense = DenseColumns(storage, len(saved), stored.num_outputs, stored.shard)
    return KroneckerColumns(dense, like.contrasts) if isinstance(like, KroneckerColumns) else dense


def _finite(value: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} holds NaN or infinity")
    return value

"""Running the solver on a user's behalf: progress bar, callback, history, Ctrl-C, checkpoints, and the report."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ntk_iterncgp import parallel
from ntk_iterncgp.checkpoint import UNSAVED, Call, unusable
from ntk_iterncgp.interrupt import Interrupt, interruptible
from ntk_iterncgp.solver.saving import from_content, to_content
from ntk_iterncgp.solver.state import State
from ntk_iterncgp.solver.stopping import Status

FREQUENT_METER_RANK = 512
"""Up to this rank the meter is read after every block of actions, beyond it after every Newton step: it costs O(B³),
and within a step an earlier reading stays a lower bound."""
NEARLY_EXACT = 0.01

Callback = Callable[[State], object]
Run = Generator[State, None, tuple[State, Status]]


@dataclass(frozen=True)
class Record:
    """One line of the history: after a block of actions, or after a Newton step."""

    num_products: int
    newton_step: int
    rank: int
    objective: float
    relative_residual: float
    information_captured: float
    seconds: float
    epochs: float | None = None  # of a network: sweeps over its data, in forward+backward passes


@dataclass(frozen=True)
class FitReport:
    """How a fit ended, what it cost and how much it used of what the data say.

    `status` speaks of the mean. How far the variance is, `variance_ratio` says: at most so many times that of the exact
    posterior it is, on average over the training inputs (weighted by W). None: not known.
    """

    status: str
    advice: str
    num_products: int
    num_newton_steps: int
    rank: int
    information_captured: float
    seconds: float
    history: list[Record] = field(repr=False)
    epochs: float | None = None
    trace_is_exact: bool = True  # or else tr(W K) was estimated, and with it the information captured
    products_by: str = ""  # how products with an explicit kernel were computed, and why
    variance_ratio: float | None = None

    def __str__(self) -> str:
        costs = [] if self.epochs is None else [f"{self.epochs:.1f} epochs"]
        if self.num_products:
            costs += [f"{self.num_products} products", f"{self.num_newton_steps} Newton steps"]
        least, most = ("at least", "at most") if self.trace_is_exact else ("an estimated", "an estimated")
        variance = "" if self.variance_ratio is None else f", {most} {self.variance_ratio:.3g} times the exact variance"
        products = f", products by {self.products_by}" if self.products_by else ""
        return (
            f"{self.status}: {', '.join(costs)}, rank {self.rank}, {least} {100 * self.information_captured:.1f} % "
            f"of the information captured{variance}, {self.seconds:.1f} s{products}. {self.advice}"
        )


def drive(
    run: Callable[[State], Run],
    state: State,
    *,
    max_products: int,
    progress_bar: bool,
    callback: Callback | None,
    history: Sequence[Record],
    call: Call = UNSAVED,
    data: Tensor | None = None,
) -> tuple[State, FitReport]:
    """Exhaust a run from a state, or from where it was saved. Interrupted, it ends with the last state, which is valid.

    `data` are the digests of the data that are saved with it, and by which they are known again. Ctrl-C reaches several
    processes at different moments: each then only takes note, and they stop together after the next state.
    """
    first = state.num_products
    state, past, ended = _taken_up(call, state, history)
    history = list(past)
    offset, started = history[-1].seconds if history else 0.0, time.perf_counter()
    status = Status.INTERRUPTED if ended is None else ended
    information = state.information_captured if call.saved is None else history[-1].information_captured
    newton_step = state.newton_step
    steps = run(state) if ended is None else iter(())
    bar = tqdm(
        total=max_products,
        initial=state.num_products - first,
        desc="IterNCGP",
        unit="product",
        disable=not (progress_bar and parallel.is_main()),
    )
    several, agreed, stack = parallel.num_processes() > 1, False, ExitStack()
    interrupt = stack.enter_context(interruptible()) if several else Interrupt()

    def content(status: Status | None = None) -> dict[str, Any]:
        return {"state": to_content(state), "history": to_table(history), "status": status, "data": data}

    call.forget()
    try:
        while ended is None:
            try:
                state = next(steps)
            except StopIteration as end:
                state, status = end.value
                break
            agreed = parallel.any_of(interrupt.requested)
            if agreed:
                raise KeyboardInterrupt
            if state.buffer.size <= FREQUENT_METER_RANK or state.newton_step > newton_step:
                information, newton_step = state.information_captured, state.newton_step
            record = Record(
                num_products=state.num_products,
                newton_step=state.newton_step,
                rank=state.buffer.size,
                objective=state.objective,
                relative_residual=state.relative_residual,
                information_captured=information,
                seconds=offset + time.perf_counter() - started,
            )
            history.append(record)
            bar.update(state.num_products - first - bar.n)
            bar.set_postfix_str(
                f"information ≥ {100 * record.information_captured:.1f} %, residual {record.relative_residual:.1e}"
            )
            if callback is not None:
                called = time.perf_counter()
                callback(state)
                started += time.perf_counter() - called  # the caller's time is not the fit's
            if state.position is not None:
                call.offer(content)
    except KeyboardInterrupt:
        if several and not agreed:  # insisted upon in this process alone
            raise
        warnings.warn(Status.INTERRUPTED.advice, stacklevel=3)
    finally:
        bar.close()
        stack.close()
    state = state.with_counters(position=None)  # whatever comes next is a run of its own
    if status is not Status.INTERRUPTED:
        call.end(lambda: content(status))
    report = FitReport(
        status=status.value,
        advice=_advice(status, state.variance_ratio),
        num_products=state.problem.prior.num_products,
        num_newton_steps=state.newton_step,
        rank=state.buffer.size,
        information_captured=state.tight_information_captured,
        seconds=offset + time.perf_counter() - started,
        history=history,
        variance_ratio=state.variance_ratio,
    )
    return state, report


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


def _taken_up(call: Call, state: State, history: Sequence[Record]) -> tuple[State, Sequence[Record], Status | None]:
    """State and history as they are, or as the call has saved them; and how the run ended, if it has."""
    if call.saved is None:
        return state, history, None
    try:
        ended = call.saved["status"]
        saved = from_content(call.saved["state"], state), from_table(call.saved["history"])
        return *saved, None if ended is None else Status(ended)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise unusable("a state of this run", error) from error


def seconds_spent(call: Call, history: Sequence[Record]) -> float:
    """In a call that is taken up again, before it was saved. `history` is what it began with."""
    if call.saved is None:
        return 0.0
    return from_table(call.saved["history"])[-1].seconds - (history[-1].seconds if history else 0.0)


def to_table(history: Sequence[Record]) -> Tensor:  # (records, 8)
    """The history in float64, which holds all of its numbers; NaN stands for no epochs."""
    rows = [[math.nan if value is None else float(value) for value in astuple(record)] for record in history]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(fields(Record)))


def from_table(table: Tensor) -> list[Record]:
    names = [f.name for f in fields(Record)]
    if not isinstance(table, Tensor) or table.dtype != torch.float64 or table.shape != (len(table), len(names)):
        raise ValueError("a history is expected to have a column for each of its numbers, in float64")
    if not bool(torch.isfinite(table[:, :3]).all()):
        raise ValueError("a history is expected to count in whole numbers")

    def record(values: list[float]) -> Record:
        row: dict[str, Any] = dict(zip(names, values, strict=True))
        row |= {name: int(row[name]) for name in ("num_products", "newton_step", "rank")}
        return Record(**row | {"epochs": None if math.isnan(row["epochs"]) else row["epochs"]})

    return [record(values) for values in table.tolist()]

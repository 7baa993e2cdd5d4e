"""Running the solver on a user's behalf: progress bar, callback, history, Ctrl-C, and the report at the end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass, field

from tqdm.auto import tqdm

from ntk_iterncgp import parallel
from ntk_iterncgp.interrupt import Interrupt, interruptible
from ntk_iterncgp.solver.state import State
from ntk_iterncgp.solver.stopping import Status

FREQUENT_METER_RANK = 512
"""Up to this rank the meter is read after every block of actions, beyond it after every Newton step: it costs O(B³),
and within a step an earlier reading stays a lower bound."""

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
    """How a fit ended, what it cost and how much it used of what the data say."""

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

    def __str__(self) -> str:
        costs = [] if self.epochs is None else [f"{self.epochs:.1f} epochs"]
        if self.num_products:
            costs += [f"{self.num_products} products", f"{self.num_newton_steps} Newton steps"]
        bound = "at least" if self.trace_is_exact else "an estimated"
        products = f", products by {self.products_by}" if self.products_by else ""
        return (
            f"{self.status}: {', '.join(costs)}, rank {self.rank}, {bound} {100 * self.information_captured:.1f} % "
            f"of the information captured, {self.seconds:.1f} s{products}. {self.advice}"
        )


def drive(
    run: Run,
    state: State,
    *,
    max_products: int,
    progress_bar: bool,
    callback: Callback | None,
    history: list[Record],
) -> tuple[State, FitReport]:
    """Exhaust a run. Interrupted, it ends with the last state, which is valid. Ctrl-C reaches several processes at
    different moments: each then only takes note, and they stop together after the next state."""
    offset = history[-1].seconds if history else 0.0
    started, first = time.perf_counter(), state.num_products
    history, status = list(history), Status.INTERRUPTED
    information, newton_step = state.information_captured, state.newton_step
    visible = progress_bar and parallel.is_main()
    bar = tqdm(total=max_products, desc="IterNCGP", unit="product", disable=not visible)
    several, agreed, stack = parallel.num_processes() > 1, False, ExitStack()
    interrupt = stack.enter_context(interruptible()) if several else Interrupt()
    try:
        while True:
            try:
                state = next(run)
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
    except KeyboardInterrupt:
        if several and not agreed:  # insisted upon in this process alone
            raise
        warnings.warn(Status.INTERRUPTED.advice, stacklevel=3)
    finally:
        bar.close()
        stack.close()
    report = FitReport(
        status=status.value,
        advice=status.advice,
        num_products=state.problem.prior.num_products,
        num_newton_steps=state.newton_step,
        rank=state.buffer.size,
        information_captured=state.tight_information_captured,
        seconds=offset + time.perf_counter() - started,
        history=history,
    )
    return state, report

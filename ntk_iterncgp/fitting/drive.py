"""One driver for everything that takes long: it asks a run for its next state until the run ends or must stop.

A `Run` is an algorithm, written as a generator of states. `drive` has all the rest: the budget, the clock, Ctrl-C, the
progress bar, the history, the checkpoint, and the agreement between several processes. To refine is to drive from the
last state of a fit; to resume, from a saved one.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from tqdm.auto import tqdm

from ntk_iterncgp.fitting.report import Record
from ntk_iterncgp.persistence.checkpoint import CheckpointSession, unusable
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.solver.stopping import Status


@dataclass(frozen=True)
class Budget:
    """Epochs (a forward and a backward pass over the data each) and seconds; None is no limit."""

    epochs: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "seconds"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and value > 0):
                raise ValueError(f"`{name}` must be a positive number; got {value!r}. Try {name}=1.")
            if isinstance(value, int) and value >= 2**63:
                raise ValueError(f"`{name}` must be below 2^63; got a larger number. Try {name}=None for no limit.")

    def has_spent_epochs(self, epochs: float) -> bool:
        """Of which all processes know alike."""
        return self.epochs is not None and epochs >= self.epochs - 1e-9


UNLIMITED = Budget()


S = TypeVar("S")


class Stage(NamedTuple):
    """What a progress bar shows."""

    name: str
    total: int
    unit: str
    done: int = 0
    stays: bool = True  # when it is complete


@dataclass(eq=False)
class Trajectory(Generic[S]):
    """Where a call of fit or refine stands; its history goes back to the first fit."""

    state: S
    history: list[Record]
    before: float  # seconds that earlier calls took
    seconds: float = 0.0  # and this one so far
    status: Status | None = None  # how it ended, if it has


class Run(ABC, Generic[S]):
    """An algorithm as a generator of states, and what its driver needs to know about them."""

    waits: ClassVar[bool] = False
    """Whether Ctrl-C has to wait for the next state: some of a state's tensors are summed up in place."""

    @abstractmethod
    def steps(self, state: S) -> Generator[S, None, tuple[S, Status]]:
        """Continue from a state; yields those at which it can be stopped, and returns the last with how it ended."""

    @abstractmethod
    def stage(self, state: S) -> Stage:
        """For the progress bar."""

    @abstractmethod
    def record(self, state: S, last: Record | None, seconds: float) -> Record | None:
        """A line for the history, if one is due after this state."""

    @abstractmethod
    def shown(self, record: Record) -> str:
        """A record beside the progress bar."""

    @abstractmethod
    def stop(self, state: S) -> S:
        """The state with which a run ends, at whichever state it was stopped."""

    @abstractmethod
    def to_dict(self, trajectory: Trajectory[S]) -> dict[str, Any]:
        """Tensors, numbers and texts from which it can be resumed."""

    @abstractmethod
    def from_dict(self, saved: Mapping[str, Any], start: Trajectory[S]) -> Trajectory[S]:
        """What was saved; `start` is where the call begins."""

    def epochs(self, state: S) -> float:
        """What has been spent of a budget in epochs."""
        return 0.0

    def can_resume(self, state: S) -> bool:
        """Whether a run can be resumed from this state in another process."""
        return True

    def last_record(self, state: S, last: Record | None, seconds: float) -> Record | None:
        """A line for the history after the run has stopped."""
        return None

    def advice_when_interrupted(self, state: S) -> str:
        """What the warning says."""
        return Status.INTERRUPTED.advice


def drive(
    run: Run[S],
    state: S,
    *,
    budget: Budget = UNLIMITED,
    history: Sequence[Record] = (),
    seconds: float = 0.0,
    callback: Callable[[S], object] | None = None,
    progress_bar: bool = False,
    session: CheckpointSession | None = None,
) -> Trajectory[S]:
    """Continue from a state, or from where it was saved, until the run ends, the budget is spent or Ctrl-C is hit.

    Args:
        run: the algorithm.
        state: where it starts.
        budget: what may be spent, the epochs counted from the first fit and the seconds from this call.
        history: of the calls before.
        seconds: that these took.
        callback: is given each state; its time does not count.
        progress_bar: whether to show one, in the main process.
        session: where to save, and what was saved; None: nowhere.

    Returns:
        The last state, the history, and how the run ended.
    """
    trajectory = Trajectory(state, list(history), before=seconds)
    if session is not None and session.saved is not None:
        try:
            trajectory = run.from_dict(session.saved, trajectory)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise unusable("a state of this run", error) from error
        session.forget()
    if trajectory.status is None:
        bar = _Bar(progress_bar and parallel.is_main())
        started = time.perf_counter() - trajectory.seconds
        _Driver(run, trajectory, budget, callback, session, bar, started).go()
    if trajectory.status is Status.INTERRUPTED:
        warnings.warn(run.advice_when_interrupted(trajectory.state), stacklevel=4)
    elif session is not None:
        session.end(lambda: run.to_dict(trajectory))
    return trajectory


@dataclass(eq=False)
class _Driver(Generic[S]):
    """The loop, which fills in a trajectory."""

    run: Run[S]
    trajectory: Trajectory[S]
    budget: Budget
    callback: Callable[[S], object] | None
    session: CheckpointSession | None
    bar: _Bar
    started: float

    def go(self) -> None:
        """Ctrl-C reaches several processes at different moments: each takes note, and they stop together."""
        trajectory, several = self.trajectory, parallel.num_processes() > 1
        with ExitStack() as stack:
            stack.callback(self.bar.close)
            interrupt = stack.enter_context(interruptible()) if several or self.run.waits else Interrupt()
            try:
                trajectory.status = self._loop(interrupt)
                if parallel.any_of(interrupt.requested):  # in the last step, too: nothing may follow
                    trajectory.status = Status.INTERRUPTED
            except KeyboardInterrupt:
                if interrupt.requested or several:  # insisted upon, or by this process alone
                    raise
                trajectory.status = Status.INTERRUPTED
            trajectory.state = self.run.stop(trajectory.state)
            self._write(self.run.last_record)
            self._tick()

    def _loop(self, interrupt: Interrupt) -> Status:
        trajectory, run = self.trajectory, self.run
        status: Status
        steps = run.steps(trajectory.state)
        self.bar.show(run.stage(trajectory.state))
        with closing(steps):
            while not self.budget.has_spent_epochs(run.epochs(trajectory.state)):
                seconds, most = self._tick(), self.budget.seconds
                if most is not None and parallel.any_of(seconds >= most):  # their clocks differ: they agree
                    break
                try:
                    trajectory.state = next(steps)
                except StopIteration as end:
                    trajectory.state, status = end.value
                    self.bar.show(run.stage(trajectory.state))
                    return status
                self.bar.show(run.stage(trajectory.state))
                self._write(run.record)
                if self.callback is not None:
                    called = time.perf_counter()
                    self.callback(trajectory.state)
                    self.started += time.perf_counter() - called
                is_interrupted = parallel.any_of(interrupt.requested)
                if self.session is not None and run.can_resume(trajectory.state):
                    if is_interrupted:
                        self.session.save(self._content())
                    else:
                        self.session.offer(self._content)
                if is_interrupted:
                    return Status.INTERRUPTED
        return Status.BUDGET

    def _write(self, record: Callable[[S, Record | None, float], Record | None]) -> None:
        trajectory = self.trajectory
        last = trajectory.history[-1] if trajectory.history else None
        found = record(trajectory.state, last, trajectory.before + self._tick())
        if found is not None:
            trajectory.history.append(found)
            self.bar.write(self.run.shown(found))

    def _tick(self) -> float:
        self.trajectory.seconds = time.perf_counter() - self.started
        return self.trajectory.seconds

    def _content(self) -> dict[str, Any]:
        self._tick()
        return self.run.to_dict(self.trajectory)


@dataclass(eq=False)
class _Bar:
    """A progress bar for each stage, one after the other."""

    is_shown: bool
    stage: Stage | None = None
    bar: tqdm[Any] = field(default_factory=partial(tqdm, disable=True))

    def show(self, stage: Stage) -> None:
        if self.stage is None or stage[:3] != self.stage[:3] or stage.done < self.stage.done:
            self.close()
            self.bar = tqdm(
                total=stage.total,
                initial=stage.done,
                desc=stage.name,
                unit=stage.unit,
                leave=stage.stays,
                disable=not self.is_shown,
            )
        self.stage = stage
        self.bar.update(stage.done - self.bar.n)

    def write(self, text: str) -> None:
        self.bar.set_postfix_str(text)

    def close(self) -> None:
        self.bar.close()


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@dataclass
class Interrupt:
    """Whether the user has asked to stop."""

    requested: bool = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Let Ctrl-C set a flag while open.

    Signals belong to the main thread: elsewhere nothing changes, nor where Ctrl-C is ignored or handled by something
    other than Python.
    """
    interrupt = Interrupt()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield interrupt
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)

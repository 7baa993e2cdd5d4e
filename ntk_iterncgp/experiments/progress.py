"""Progress of what takes long: a bar where there is a terminal, and elsewhere a line every 30 seconds.

    with reporting("Test inputs", log, total=10_000, unit="inputs") as progress:
        for part in parts:
            progress.advance(len(part))

    Test inputs: 2,250 of 10,000 inputs after 4 min, about 14 min to go

A bar in a file, or in the log of a batch system, is of no use, and an hour without a word looks like a run that hangs.
Lines come from a thread of their own, so that they come in time however long a single step takes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, final

from torch.utils.data import DataLoader
from tqdm.auto import tqdm

EVERY_SECONDS = 30.0

Say = Callable[[str], object]
"""Shows a line and keeps it, for instance the log of a run."""

T = TypeVar("T")


def silent(line: str) -> None:
    """Report nothing."""


@final
class Progress:
    """How much has been done; `total` is None where nobody knows how much there is."""

    def __init__(self, what: str = "", *, bar: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self._bar, self._clock = what, bar, clock
        self.start(None, "steps")

    def start(self, total: int | None, unit: str) -> None:
        """Count anew, for instance in the next sweep over the data; `unit` is what is counted, in the plural."""
        self.done, self.total, self.unit, self._started = 0, total, unit, self._clock()
        if self._bar is not None:
            self._bar.unit = f" {unit}"
            self._bar.reset(total)

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        if self._bar is not None:
            self._bar.update(amount)

    def line(self) -> str:
        """Done, total and remaining."""
        seconds, done, total = self._clock() - self._started, self.done, self.total
        if total is None:
            what = f"{done:,} {self.unit} " if done else ""
            return f"{self.what}: {what}after {duration(seconds)}"
        done_so_far = f"{self.what}: {min(done, total):,} of {total:,} {self.unit} after {duration(seconds)}"
        if not 0 < done < total:
            return done_so_far
        return f"{done_so_far}, about {duration(seconds * (total - done) / done)} to go"

    def counted(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The same loader, of which each sweep counts anew, batch by batch."""
        settings: dict[str, Any] = {"batch_size": loader.batch_size, "collate_fn": loader.collate_fn}
        return _Counted(self, loader.dataset, **settings)


class _Counted(DataLoader[Any]):
    """A loader in the order of its dataset, which tells a `Progress` about its batches."""

    def __init__(self, progress: Progress, dataset: Any, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self._progress = progress

    def __iter__(self) -> Any:
        self._progress.start(len(self), "batches")
        for batch in super().__iter__():
            yield batch
            self._progress.advance()


@contextmanager
def reporting(what: str, say: Say = silent, *, total: int | None = None, unit: str = "steps") -> Iterator[Progress]:
    """Report on what is done inside the block.

    Args:
        what: What is going on.
        say: Given a line every `EVERY_SECONDS` where stderr is no terminal.
        total: How much there is to do, if that is known.
        unit: What is counted, in the plural.

    Returns:
        The progress, to be advanced.
    """
    is_terminal, over = sys.stderr is not None and sys.stderr.isatty(), threading.Event()
    bar = tqdm(desc=what, leave=False) if is_terminal else None
    progress = Progress(what, bar=bar)
    progress.start(total, unit)

    def beat() -> None:
        while not over.wait(EVERY_SECONDS):
            with suppress(OSError):  # a full disk: the run itself will find out
                say(progress.line())

    thread = None
    if not is_terminal and say is not silent:
        thread = threading.Thread(target=beat, name="reporting", daemon=True)
        thread.start()
    try:
        yield progress
    finally:
        over.set()
        if thread is not None:
            thread.join()
        if bar is not None:
            bar.close()


def reported(items: Iterable[T], what: str, say: Say = silent, *, total: int, unit: str) -> Iterator[T]:
    """The items, and a report on how many of them have been used."""
    with reporting(what, say, total=total, unit=unit) as progress:
        for item in items:
            yield item
            progress.advance()


def duration(seconds: float) -> str:
    """As people say it: 45 s, 12 min, 3 h 05 min."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"

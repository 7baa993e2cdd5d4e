"""What a piece of work costs: seconds, and the peak of memory above what was held when it began.

The peak is that of the GPU where there is one, else that of the process as Linux counts it (`VmHWM`, which can be
reset); elsewhere it is not known. Freed blocks that the C library keeps for later are given back first: what they are
used for next would not be seen otherwise.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import torch

from ntk_iterncgp.runtime.memory import peak_resident_bytes, resident_bytes, restart_peak


@final
class Stopwatch:
    """Seconds by name, added up; and where asked the largest peak of memory in bytes."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str, *, memory: bool = False) -> Iterator[None]:
        held = reset_peak() if memory else None
        started = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - started
            if held is not None:
                self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), peak_bytes() - held)


def reset_peak() -> int | None:
    """Let the peak start from now: what is held, in bytes, or None where there is no such thing."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # not Linux, or another C library
        return None
    return resident_bytes() if restart_peak() else None


def peak_bytes() -> int:
    """The most that was held since the reset."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else peak_resident_bytes()

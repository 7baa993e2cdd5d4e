"""Ctrl-C that waits for a safe moment: the first asks a loop to stop after its current batch, the second insists."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """Whether the user has asked to stop."""

    requested: bool = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """While open, Ctrl-C sets a flag. Signals belong to the main thread: elsewhere nothing changes, nor where Ctrl-C is
    ignored or handled by something other than Python."""
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

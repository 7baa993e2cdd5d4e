"""Processes for the tests, forked from a server that has imported everything once: that takes most of such a test."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from ntk_iterncgp import __main__
from ntk_iterncgp.persistence.locks import FolderLock

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.parallel_work", "ntk_iterncgp.experiments.runs"])


def started_command(arguments: list[str], folder: Path, prepare: Callable[[], None] | None = None) -> ForkServerProcess:
    """`ntk-iterncgp arguments` in a folder, after `prepare`; what it prints is in the files stdout and stderr there."""
    process = CONTEXT.Process(target=_command, args=(arguments, folder, prepare))
    process.start()
    return process


def _command(arguments: list[str], folder: Path, prepare: Callable[[], None] | None) -> None:
    os.chdir(folder)
    for name, stream in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    if prepare is not None:
        prepare()
    sys.argv = ["ntk-iterncgp", *arguments]
    sys.exit(__main__.main())


@contextmanager
def lock_held_elsewhere(folder: Path, purpose: str = "fit") -> Iterator[ForkServerProcess]:
    """Another process that holds the lock of a folder until the block ends, or until it is killed."""
    here, there = CONTEXT.Pipe()
    other = CONTEXT.Process(target=_hold, args=(folder, purpose, there))
    other.start()
    there.close()
    try:
        assert here.recv() == "held"
        yield other
    finally:
        here.close()
        other.join(60)


def _hold(folder: Path, purpose: str, pipe: Connection) -> None:
    with FolderLock(folder, purpose):
        pipe.send("held")
        pipe.poll(None)  # until the other end is closed

"""One writer at a time: a lock on a folder, which ends with the process that holds it.

Two runs that write into one folder mix their results, and two that resume one checkpoint overwrite each other's saves.
So a run holds the operating system's advisory lock (`flock`, or `locking` on Windows) on the file `.lock` in its
folder. The system releases it when the process ends, however it ends: what a killed run leaves behind blocks nobody.
The file names its holder, for the message that the second run gets.

On a file system without such locks the file alone decides: its holder counts while that process is alive on this
machine. That is weaker (two runs that start in the same millisecond are both let in), and still better than nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, final
from weakref import WeakValueDictionary

from ntk_iterncgp.persistence.files import FileError

fcntl: ModuleType | None
msvcrt: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
try:
    import msvcrt
except ImportError:  # everywhere else
    msvcrt = None

NAME = ".lock"
TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)  # what the system says where another process holds the lock
LOCKED_BYTE = 2**30  # on Windows a locked byte cannot be read: one far behind the text

_held: WeakValueDictionary[Path, FolderLock] = WeakValueDictionary()  # by this process
_guard = threading.Lock()


class FolderInUse(FileError):
    """Another process, or another thread, writes into this folder."""


@final
class FolderLock:
    """The right to write into a folder, until `release` or the end of the process.

    A thread that asks again gets the lock again, and its earlier one is void: the call that held it has failed.
    """

    _file: int | None = None

    def __init__(self, folder: str | Path, purpose: str) -> None:
        """Take the lock of an existing folder.

        Args:
            folder: The folder to write into.
            purpose: What for, in a word or two, for the message that others get.

        Raises:
            FolderInUse: Another process or thread holds the lock.
        """
        self.path = Path(folder).resolve() / NAME
        self.process, self.thread = os.getpid(), threading.current_thread()
        with _guard:
            earlier = _held.get(self.path)
            if earlier is not None and earlier.process == self.process:
                if earlier.thread is not self.thread and earlier.thread.is_alive():
                    raise FolderInUse(_in_use(folder, {"pid": self.process, "purpose": "another thread of this run"}))
                earlier._release()
            self._file = _locked(self.path, folder)
            _held[self.path] = self
        about = {"pid": self.process, "host": socket.gethostname(), "purpose": purpose, "since": time.time()}
        with contextlib.suppress(OSError):  # a full disk: then nobody knows who holds it
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, json.dumps(about).encode())

    @property
    def is_held(self) -> bool:
        """Whether it has neither been released nor taken over by a later call."""
        return self._file is not None

    def release(self) -> None:
        """Let others write; the file goes away. To release again does nothing."""
        with _guard:
            self._release()

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is None or self.process != os.getpid():  # a forked child holds no lock of its own
            return
        if _held.get(self.path) is self:
            del _held[self.path]
        if os.name == "posix":  # while it is locked, so that nobody's file is removed but this one
            self.path.unlink(missing_ok=True)
            os.close(file)
        else:
            os.close(file)
            with contextlib.suppress(OSError):  # taken by another process in between
                self.path.unlink(missing_ok=True)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self._release()  # a call that failed and was forgotten; without the guard, which this very thread may hold


def _locked(path: Path, folder: str | Path) -> int:
    """A descriptor of the lock file, locked."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _try_lock(file):
                raise FolderInUse(_in_use(folder, _read(path)))
            if _is_same(file, path):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the holder before us has removed it: others will lock a new one


def _try_lock(file: int) -> bool:
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if msvcrt is not None:
            os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            return True
    except OSError as error:
        if error.errno in TAKEN:
            return False
    return not _is_alive(_parsed(os.read(file, 4096)))  # no locks on this file system


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether the process that wrote this runs on this machine. Of others nothing is known, so they do not count."""
    pid = holder.get("pid")
    if type(pid) is not int or pid in (0, os.getpid()) or holder.get("host") != socket.gethostname():
        return False
    if os.name != "posix":  # there `kill` would end it
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return {}


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:  # not written yet
        return {}
    return found if isinstance(found, dict) else {}


def _in_use(folder: str | Path, holder: dict[str, Any]) -> str:
    who = f"process {holder['pid']}" if "pid" in holder else "another process"
    who += f" on {holder['host']}" if holder.get("host") not in (None, socket.gethostname()) else ""
    since = holder.get("since")
    when = [time.strftime("since %Y-%m-%d %H:%M:%S", time.localtime(since))] if isinstance(since, (int, float)) else []
    details = ", ".join([*([str(holder["purpose"])] if "purpose" in holder else []), *when])
    who += f" writes into it ({details})" if details else " writes into it"
    return (
        f"The folder '{folder}' must not be in use by another run; {who}. Wait for it, stop it, or name another folder."
    )

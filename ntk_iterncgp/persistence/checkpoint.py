"""Resuming after a crash: what a run has done is saved as it goes, and the same call again resumes it.

    checkpoint = Checkpoint("runs/mine/checkpoint", every_seconds=30)
    la.fit(train_loader, checkpoint=checkpoint)       # kill -9, then the same program again: it is resumed

It ends with the numbers of a run that was never stopped, bit for bit on the same machine. What is saved belongs to one
run: with other settings, another model or other data it is refused, and what differs is named.

Two files take turns, each written whole before it counts, so the one before the last is always there: a last one that
cannot be read is passed over with a message. A save that fails (a full disk) is reported, and the run continues.
Nothing is lost but the work of the last `every_seconds`, or of the last product with the prior, which is saved whole;
where a save takes long, saves are made so far apart that they take no more than a tenth of the time.

A call that has ended removes what it saved, so that the same call later starts anew. Where several calls belong
together, a `with` block keeps all of them until it ends:

    with Checkpoint("runs/mine/checkpoint") as checkpoint:
        la.fit(train_loader, checkpoint=checkpoint)
        la.refine(train_loader, epochs=2, checkpoint=checkpoint)  # killed here: the next time the fit is not repeated

While a call or a `with` block runs, its folder is locked: a second run that would resume the checkpoint is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

from torch import Tensor

from ntk_iterncgp.persistence.files import (
    FileError,
    read_tensors,
    temporary_prefix,
    with_tensors,
    without_tensors,
    write_tensors,
)
from ntk_iterncgp.persistence.locks import FolderLock
from ntk_iterncgp.runtime import parallel

FORMAT, VERSION = "ntk-iterncgp checkpoint", 2
SAVING_SHARE = 0.1  # of the time, at most
MAX_TEXT, MAX_NAMED = 60, 5  # in a message about what differs

Content = Mapping[str, Any]
"""A tree of tensors, numbers and texts. It does not depend on how many processes made it."""


class CheckpointMismatch(FileError):
    """A checkpoint of another run."""


@final
class Checkpoint:
    """Where and how often to save. `say` is given a message when a run is resumed, or a file is of no use."""

    def __init__(
        self, directory: str | Path, *, every_seconds: float = 30.0, say: Callable[[str], object] = print
    ) -> None:
        if isinstance(every_seconds, bool) or not isinstance(every_seconds, (int, float)) or not every_seconds >= 0:
            raise ValueError(f"`every_seconds` must be a number of at least 0; got {every_seconds!r}. Try 30.")
        self.directory, self.every_seconds, self.say = Path(directory), float(every_seconds), say
        self._calls, self._together = 0, False
        self._lock: FolderLock | None = None  # of a `with` block, from its first call on

    def __enter__(self) -> Checkpoint:
        self._calls, self._together = 0, True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._together = False
        if self._lock is not None:
            self._lock.release()
        self._lock = None
        if kind is None:
            self.clear()
        self.remove_folder_if_empty()

    def clear(self) -> None:
        """Remove everything that was saved; the next call starts anew."""
        self._calls = 0
        if not parallel.is_main():
            return
        for path in self.directory.glob("[0-9]*-*.[ab].safetensors"):
            path.unlink(missing_ok=True)
        self.remove_folder_if_empty()

    def locked(self, name: str) -> FolderLock:
        """The lock of the folder, for one call or for all of a `with` block."""
        if self._lock is not None and self._lock.is_held:
            return self._lock
        lock = FolderLock(self.directory, name)
        if self._together:
            self._lock = lock
        return lock

    def remove_folder_if_empty(self) -> None:
        """Nothing of a run is left behind."""
        if parallel.is_main() and self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def session(
        self, name: str, settings: Mapping[str, Any], model: Mapping[str, Any] | None = None
    ) -> CheckpointSession:
        """One fit or refine, as it was saved or from its beginning. Calls are known by their order and their name."""
        return CheckpointSession(
            self, f"{self._calls}-{name}", {"settings": dict(settings), "model": dict(model or {})}
        )

    def has_ended(self) -> bool:
        """A call has, and the next one is counted; whether what it saved is retained for those calls."""
        self._calls += 1
        return self._together


@final
class CheckpointSession:
    """One fit or refine that is saved as it goes."""

    def __init__(self, checkpoint: Checkpoint, name: str, identity: Mapping[str, Any]) -> None:
        self.checkpoint, self.name, self.identity = checkpoint, name, identity
        self.saved: Any = None  # what to resume
        self.has_ended = False
        self._sequence, self._last_save, self._save_seconds = 0, time.monotonic(), 0.0
        self._complained = False
        self._lock: FolderLock | None = None  # the main process's
        self._open(checkpoint)

    # --- saving -------------------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether it is time to save again; of several processes the main one's clock decides."""
        wait = max(self.checkpoint.every_seconds, self._save_seconds / SAVING_SHARE)
        return parallel.any_of(parallel.is_main() and time.monotonic() - self._last_save >= wait)

    def offer(self, content: Callable[[], Content]) -> None:
        """Save if it is time."""
        if self.is_due():
            self.save(content())

    def save(self, content: Content, *, has_ended: bool = False) -> None:
        """Save now. What fails is reported once; the run continues, the last good file stays. One process writes."""
        if not parallel.is_main():
            return
        started = time.monotonic()
        tensors: dict[str, Tensor] = {}
        about = {
            "format": f"{FORMAT} {VERSION}",
            "sequence": self._sequence,
            "has_ended": has_ended,
            "identity": self.identity,
            "content": without_tensors(content, "content", tensors),
        }
        try:
            self.checkpoint.directory.mkdir(parents=True, exist_ok=True)
            write_tensors(self._path(self._sequence % 2), tensors, about)
            self._sequence += 1
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._say(
                    f"Could not save to '{self.checkpoint.directory}' ({error.strerror or error}). The run continues "
                    f"and tries again{'' if self._sequence == 0 else '; what was saved before is intact'}."
                )
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - started

    def end(self, content: Callable[[], Content]) -> None:
        """The call has its result: retained where more calls follow, else removed."""
        is_kept = self.checkpoint.has_ended()
        if not self.has_ended and is_kept:
            self.save(content(), has_ended=True)
        elif not self.has_ended and parallel.is_main():
            for slot in (0, 1):
                self._path(slot).unlink(missing_ok=True)
        if self._lock is not None and not is_kept:
            self._lock.release()
            self.checkpoint.remove_folder_if_empty()

    def forget(self) -> None:
        """What was saved has been resumed, and need not be in memory twice."""
        self.saved = None

    def _path(self, slot: int) -> Path:
        return self.checkpoint.directory / f"{self.name}.{'ab'[slot]}.safetensors"

    # --- finding ------------------------------------------------------------------------------------------------------

    def _open(self, checkpoint: Checkpoint) -> None:
        if parallel.is_main():
            self._prepare(checkpoint)
        with parallel.main_first():
            found = [loaded for slot in (0, 1) if (loaded := self._read(slot)) is not None]
        last = max((about["sequence"] for about, _ in found), default=-1)
        if len(set(parallel.extremes([last]))) > 1:
            raise FileError(
                f"All processes must find the same checkpoint in '{checkpoint.directory}'; got different ones. Try a "
                "folder that all of them see."
            )
        if not found:
            return
        about, content = max(found, key=lambda pair: pair[0]["sequence"])
        self.refuse(_differences(about["identity"], self.identity))
        self._sequence, self.saved, self.has_ended = about["sequence"] + 1, content, about["has_ended"]
        what = f"'{self.name.partition('-')[2]}' in '{checkpoint.directory}'"
        if self.has_ended:
            self._say(f"The result of {what} was saved already, and is taken from there.")
        else:
            self._say(f"Going on with {what} from where it was saved.")

    def _prepare(self, checkpoint: Checkpoint) -> None:
        """A folder that can be written to, without what a killed process was writing."""
        try:
            checkpoint.directory.mkdir(parents=True, exist_ok=True)
            self._lock = checkpoint.locked(self.name.partition("-")[2])
            for slot in (0, 1):
                for path in checkpoint.directory.glob(f"{temporary_prefix(self._path(slot))}*"):
                    path.unlink(missing_ok=True)
            probe = checkpoint.directory / f".{self.name}.writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise FileError(
                f"The folder of a checkpoint must be writable; got '{checkpoint.directory}' "
                f"({error.strerror or error}). Try another folder."
            ) from error

    def _say(self, message: str) -> None:
        if parallel.is_main():
            self.checkpoint.say(message)

    def _read(self, slot: int) -> tuple[dict[str, Any], Any] | None:
        """What one of the two files holds; None, with a message, where it cannot be used."""
        path = self._path(slot)
        if not path.exists():
            return None
        try:
            about, tensors = read_tensors(path, FORMAT, VERSION)
            content = with_tensors(about["content"], tensors)
            kinds = {"sequence": int, "has_ended": bool, "identity": dict}
            if not isinstance(content, dict) or any(type(about[key]) is not kind for key, kind in kinds.items()):
                raise TypeError("nothing to resume is in it")
        except FileError as error:
            problem = str(error)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            problem = f"'{path}' is damaged ({error})."
        else:
            return about, content
        self._say(f"A checkpoint is passed over: {problem}")
        return None

    # --- whose it is --------------------------------------------------------------------------------------------------

    def refuse(self, differences: list[str]) -> None:
        """Raise an error that names what differs from the run that was saved, if anything does."""
        if differences:
            if self._lock is not None:
                self._lock.release()
            raise CheckpointMismatch(
                f"The checkpoint in '{self.checkpoint.directory}' must be of this run; got another: "
                f"{'; '.join(differences)}. Try the run as it was, another folder, or remove this one to start anew."
            )

    def check_data(self, found: Tensor) -> None:  # (N,)
        """Compare the digests of the data with those saved."""
        if self.saved is not None:
            self.refuse(_differing_rows(self.saved["data"], found))


def open_session(checkpoint: Checkpoint, name: str, settings: Content, model: Content) -> CheckpointSession:
    """The session of one call of a front door, resumed from what was saved or at its beginning."""
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"`checkpoint` must be a Checkpoint; got {type(checkpoint).__name__}. Try Checkpoint('folder')."
        )
    return checkpoint.session(name, settings, model)


def unusable(what: str, error: Exception) -> FileError:
    """For content whose digest is right and which makes no sense all the same."""
    return FileError(f"The checkpoint must hold {what}; got something else ({error}). Try to remove it and start anew.")


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words: settings with both values, parts of the model by name."""
    old, new = saved.get("settings"), now["settings"]
    if not isinstance(old, dict):
        named = ["it does not say of which settings it is"]
    else:
        named = [part for key in sorted({*old, *new}) for part in _few(list(_entries(key, old.get(key), new.get(key))))]
    old, new = saved.get("model"), now["model"]
    names = {*old, *new} if isinstance(old, dict) else {"all of it"}
    changed = sorted(name for name in names if not isinstance(old, dict) or old.get(name) != new.get(name))
    if changed:
        named.append(f"its model has other values in {', '.join(_few(changed))}")
    return named


def _entries(name: str, saved: Any, now: Any) -> Iterator[str]:
    """Both values of each entry that differs, down to the innermost."""
    if saved == now:
        return
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in sorted({*saved, *now}):
            yield from _entries(f"{name}.{key}", saved.get(key), now.get(key))
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for place, (one, other) in enumerate(zip(saved, now, strict=True)):
            yield from _entries(f"{name}[{place}]", one, other)
    else:
        one, other = repr(saved), repr(now)
        first = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
        yield f"its {name} is {_around(one, first)} and here it is {_around(other, first)}"


def _around(text: str, place: int) -> str:
    """The text, or where it is long a part of it that shows this place."""
    if len(text) <= MAX_TEXT:
        return text
    start = max(0, min(place - MAX_TEXT // 2, len(text) - MAX_TEXT))
    stop = start + MAX_TEXT
    return f"{'…' * (start > 0)}{text[start:stop]}{'…' * (stop < len(text))}"


def _few(found: list[str]) -> list[str]:
    return found if len(found) <= MAX_NAMED else [*found[:MAX_NAMED], f"{len(found) - MAX_NAMED} more"]


def _differing_rows(saved: Any, found: Tensor) -> list[str]:
    found = found.cpu()
    if not isinstance(saved, Tensor) or len(saved) != len(found):
        count = f"{len(saved):,}" if isinstance(saved, Tensor) else "no"
        return [f"its data are {count} and here they are {len(found):,}"]
    rows = (saved.cpu() != found).nonzero()[:, 0].tolist()
    if not rows:
        return []
    some = ", ".join(map(str, rows[:5])) + (" …" if len(rows) > 5 else "")
    return [f"{len(rows):,} of its {len(found):,} data differ from those here (numbers {some})"]

"""Two runs in one folder: the second is refused with the name of the first, and a dead process blocks nobody."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ntk_iterncgp import Checkpoint
from ntk_iterncgp.experiments import cli
from ntk_iterncgp.persistence import locks
from ntk_iterncgp.persistence.locks import FolderInUse, FolderLock
from tests.checkpoint_helpers import RUNS, checkpoint_in
from tests.processes import lock_held_elsewhere

NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")


@pytest.mark.process
def test_a_second_process_is_refused_by_the_name_of_the_first_and_let_in_after_it(tmp_path: Path) -> None:
    with lock_held_elsewhere(tmp_path, "ntk-iterncgp evaluate") as other:
        with pytest.raises(FolderInUse) as refused:
            FolderLock(tmp_path, "fit")
        assert f"process {other.pid} writes into it (ntk-iterncgp evaluate, since 20" in str(refused.value)
    FolderLock(tmp_path, "fit").release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_the_lock_of_a_killed_process_blocks_nobody(tmp_path: Path) -> None:
    with lock_held_elsewhere(tmp_path) as other:
        other.kill()
        other.join(60)
        assert (tmp_path / ".lock").exists()  # what it left behind
        with FolderLock(tmp_path, "fit") as lock:
            assert lock.is_held and json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_thread_gets_its_lock_again_and_another_thread_is_refused(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, "fit")  # of a call that failed, and that something still refers to
    second = FolderLock(tmp_path, "fit")
    assert second.is_held and not first.is_held
    first.release()  # void: it does not release what the second holds
    found: list[str] = []

    def ask() -> None:
        try:
            FolderLock(tmp_path, "fit")
        except FolderInUse as error:
            found.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(found) == 1 and "another thread of this run" in found[0]
    second.release()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(found) == 1


def test_a_lock_that_is_forgotten_is_released(tmp_path: Path) -> None:
    FolderLock(tmp_path, "fit")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
@NEEDS_FORK
def test_a_forked_child_neither_holds_nor_releases_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "fit")
    child = os.fork()
    if child == 0:
        lock.release()
        try:
            FolderLock(tmp_path, "fit")
        except FolderInUse:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / ".lock").exists()
    lock.release()


def test_whoever_locks_a_file_that_its_holder_has_just_removed_locks_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, removed = locks._try_lock, []

    def removed_in_between(file: int) -> bool:
        if not removed:
            removed.append(os.fstat(file).st_ino)
            (tmp_path / ".lock").unlink()
        return plain(file)

    monkeypatch.setattr(locks, "_try_lock", removed_in_between)
    with FolderLock(tmp_path, "fit"):
        assert (tmp_path / ".lock").exists() and len(removed) == 1


class NoLocks:
    """A file system without locks."""

    LOCK_EX = LOCK_NB = 0

    @staticmethod
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.process
def test_without_locks_of_the_system_a_living_process_blocks_and_a_dead_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "fcntl", NoLocks)
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    here, parent = socket.gethostname(), os.getppid()
    for pid, host, is_blocked in ((parent, here, True), (int(dead.stdout), here, False), (parent, "elsewhere", False)):
        (tmp_path / ".lock").write_text(json.dumps({"pid": pid, "host": host, "purpose": "fit", "since": 0}))
        if is_blocked:
            with pytest.raises(FolderInUse, match=f"process {pid} writes into it"):
                FolderLock(tmp_path, "fit")
        else:
            FolderLock(tmp_path, "fit").release()
    for damaged in ("", "[1, 2]", '{"pid": "x"}', "\x00"):
        (tmp_path / ".lock").write_text(damaged)
        FolderLock(tmp_path, "fit").release()


@pytest.mark.cli
@pytest.mark.process
@pytest.mark.parametrize("command", [("fit", "empty.yaml"), ("evaluate", "empty.yaml"), ("reproduce", "policies")])
def test_a_second_run_in_one_folder_says_so_and_stops(
    command: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").touch()
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.log").write_text("of the first run\n")
    with lock_held_elsewhere(out, "ntk-iterncgp fit") as other:
        assert cli.main([*command, "--output-dir", "out"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("ntk-iterncgp: The folder 'out' must not be in use by another run") and "\n" in error
        assert error.count("\n") == 1 and f"process {other.pid} writes into it (ntk-iterncgp fit, since" in error
        assert sorted(path.name for path in out.iterdir()) == [".lock", "run.log"]
        assert (out / "run.log").read_text() == "of the first run\n"


@pytest.mark.process
@pytest.mark.parametrize("run", ["clusters", "softmax, Kronecker"])
def test_a_second_run_that_would_resume_the_same_checkpoint_is_refused(run: str, tmp_path: Path) -> None:
    with lock_held_elsewhere(tmp_path), pytest.raises(FolderInUse, match="must not be in use by another run"):
        RUNS[run](checkpoint_in(tmp_path))
    RUNS[run](checkpoint_in(tmp_path))
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


def test_a_block_of_calls_holds_its_folder_between_them(tmp_path: Path) -> None:
    with Checkpoint(tmp_path, say=lambda text: None) as checkpoint:
        checkpoint.session("fit", {}).end(dict)
        assert (tmp_path / ".lock").exists()
        lock = checkpoint.locked("refine")
        checkpoint.session("refine", {}).end(dict)
        assert lock.is_held
    assert not lock.is_held and not tmp_path.exists()

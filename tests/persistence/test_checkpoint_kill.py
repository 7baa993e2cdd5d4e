"""A process that is really killed, at moments that nobody chose. `bench kill_and_resume` does the same for minutes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kill_and_resume
from benchmarks.kill_and_resume import Event, kept, late_and_missed
from ntk_iterncgp.persistence.checkpoint import CheckpointSession

ROOT = Path(__file__).parents[2]
NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")


@pytest.mark.process
@NEEDS_FORK
def test_killed_five_times_at_random_a_program_ends_with_the_same_bits_and_loses_no_more_than_an_interval(
    tmp_path: Path,
) -> None:
    """In a process of its own: one that has taken derivatives cannot be forked and take more of them."""
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.kill_and_resume", "--quick", "--seed=1"]
    ended = subprocess.run([*command, f"--json={file}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    doors = json.loads(file.read_text())
    assert [found["door"] for found in doors] == list(kill_and_resume.DOORS)
    assert {"update", "kernel update"} <= set(kill_and_resume.DOORS)
    for found in doors:
        assert found["kills"] == 5 and found["same"]
        assert found["resumed"] >= 3, "it went on from what was saved"


@pytest.mark.cli
@NEEDS_FORK
@pytest.mark.parametrize("what", ["never saves", "starts anew"])
def test_a_program_that_loses_more_is_found_out(
    what: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if what == "never saves":
        monkeypatch.setattr(CheckpointSession, "is_due", lambda call: False)
    else:
        monkeypatch.setattr(CheckpointSession, "_read", lambda call, slot: None)
    assert kill_and_resume.main(["--quick", "--door", "kernel"]) == 1
    told = capfd.readouterr().out.splitlines()[-1].split()
    same, _, limit, missed, anew, _, nothing_lost = told[3:10]
    assert (same, nothing_lost) == ("yes", "NO") and limit == "(1)"
    assert int(missed) > 0 if what == "never saves" else int(anew) > 0


def life(*events: tuple[str, float]) -> list[Event]:
    return [(what, when, 0.01) for what, when in events]


def test_late_is_what_was_done_after_the_interval_and_not_saved() -> None:
    every = 1.0
    begun = ("begun", 0.0), ("work", 0.5), ("chance", 0.5), ("work", 1.2)
    assert late_and_missed(life(*begun), every) == (1, 0)
    assert late_and_missed(life(*begun, ("chance", 1.3), ("saved", 1.4), ("work", 2.0)), every) == (0, 0)
    passed_over = *begun, ("chance", 1.3), ("work", 1.5), ("chance", 1.6), ("work", 1.7)
    assert late_and_missed(life(*passed_over), every) == (3, 1)
    slowly = [("saved", 0.0, 0.5), ("work", 4.0, 0.0), ("chance", 4.1, 0.0), ("work", 4.9, 0.0), ("chance", 4.9, 0.0)]
    assert late_and_missed(slowly, every) == (0, 0), "saves move apart where one takes long"


def test_kept_is_what_was_done_from_where_a_call_was_taken_up_to_the_last_save() -> None:
    again = ("begun", 0.0), ("work", 0.5), ("begun", 1.0)
    new = ("work", 2.0), ("chance", 2.0), ("work", 3.0), ("saved", 3.0), ("work", 4.0)
    assert kept(life(*again, *new), opening=0) == 2 and kept(life(*again, *new), opening=1) == 1
    assert kept(life(*again, *new[:3]), opening=0) == kept([], opening=0) == 0

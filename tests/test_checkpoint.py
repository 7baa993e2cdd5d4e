"""Checkpoints: a run that was killed goes on from its last save and ends with the same bits, or says why it cannot."""

from pathlib import Path

import pytest

from ntk_iterncgp import checkpoint as module
from tests.checkpoint_helpers import RUNS, Killed, assert_same, checkpoint_in, die_at_save

# Going on


@pytest.fixture(autouse=True)
def saves_may_take_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every state is saved, however long that takes."""
    monkeypatch.setattr(module, "SAVING_SHARE", float("inf"))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_every_save_ends_as_if_it_had_not_been(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after its first save, the next one after the second, and so on."""
    run, folder, kills = RUNS[name], tmp_path / "checkpoint", 0
    expected = run()
    while True:
        said: list[str] = []
        with monkeypatch.context() as patch:
            die_at_save(1, patch)
            try:
                with checkpoint_in(folder, said) as checkpoint:
                    resumed = run(checkpoint)
            except Killed:
                kills += 1
                assert kills < 100
                continue
        assert said, "nothing was said"
        break
    assert kills >= 2
    assert_same(resumed, expected)
    assert not folder.exists()

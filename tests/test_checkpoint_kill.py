"""A process that is really killed, at moments that nobody chose. `bench kill_and_resume` does the same for minutes."""

import os

import pytest

from benchmarks import kill_and_resume


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")
@pytest.mark.parametrize("door", kill_and_resume.DOORS)
def test_killed_five_times_at_random_a_program_ends_with_the_same_bits(door: str) -> None:
    found = kill_and_resume.survive(door, 5, kill_and_resume.QUICK, seed=1)
    assert found.kills == 5 and found.same
    assert found.resumed >= 3, "it went on from what was saved"

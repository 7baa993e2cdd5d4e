"""The check that a user with a GPU runs: here its half on the CPU."""

import pytest

from ntk_iterncgp.experiments import gpu_check


@pytest.mark.slow
@pytest.mark.cli
def test_the_check_prints_its_table_and_passes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "IMAGES", 64)
    monkeypatch.setattr(gpu_check, "POINTS", 100)
    assert gpu_check.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("float32" in line for line in lines) in (2, 4) and lines[-1].endswith("passed.")


@pytest.mark.cli
def test_a_deviation_fails_the_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: object, dtype: gpu_check.torch.dtype) -> object:
        return lambda: gpu_check.torch.ones(3) * (1.5 if dtype == gpu_check.torch.float32 else 1.0)

    monkeypatch.setattr(gpu_check, "TASKS", {"network": broken})
    assert gpu_check.main() == 1
    assert "FAILED" in capsys.readouterr().out

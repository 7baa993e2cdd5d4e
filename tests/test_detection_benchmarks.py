"""The benchmarks of detection and of shift run in their quick versions, and print and write what they promise."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import detection, shift
from ntk_iterncgp.experiments.models import build


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "cnn.pt"
    torch.save(build("cnn", 10, (1, 8, 8)).state_dict(), file)
    return file


@pytest.mark.cli
def test_detection_prints_each_method_with_its_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "detection.json"
    detection.main(["--quick", "--json", str(file)])
    found = json.loads(file.read_text())["digits"]
    assert {"entropy", "energy", "mahalanobis", "knn", "last layer", "KFAC", "prior", "detector"} < found.keys()
    assert all(found["KFAC"].keys() == found["detector"].keys() == set(detection.UNFAMILIAR) for _ in found)
    assert all(0 <= auroc <= 1 and 0 <= passing <= 1 for auroc, passing in found["last layer"].values())
    assert found["KFAC"] != found["entropy"] != found["last layer"]
    lines = {line[:22].strip(): line for line in capsys.readouterr().out.splitlines()}
    costs = {"entropy": 1, "last layer": 1, "KFAC": 21, "detector": 3, "by typicality": 3}
    assert all(lines[name].endswith(f"cost {cost}") for name, cost in costs.items())


@pytest.mark.cli
def test_detection_takes_any_checkpoint(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, own = tmp_path / "own.json", ["--data", "digits", "--model", "cnn"]
    detection.main(["--quick", "--checkpoint", str(checkpoint), *own, "--halves", "--json", str(file)])
    found, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert found.keys() == {"checkpoint"} and "\ncheckpoint: quarter turn" in shown
    assert "two detectors of 100 inputs each: AUROC " in shown and "of 1000 inputs" not in shown
    torch.manual_seed(0)
    x = torch.rand(5, 1, 8, 8)
    model = detection.network("checkpoint", x, torch.zeros(5).long(), 0, checkpoint)
    assert torch.equal(model(x), build_from(checkpoint)(x)), "it is not trained further"


def build_from(checkpoint: Path) -> torch.nn.Module:
    model = build("cnn", 10, (1, 8, 8))
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    return model.eval()


@pytest.mark.cli
def test_shift_prints_the_columns_that_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shift.json"
    shift.main(["--quick", "--columns", "NLL,ECE", "--json", str(file)])
    found, shown = json.loads(file.read_text())["digits"], capsys.readouterr().out
    head, *rows = shown[shown.index("strength") :].splitlines()
    assert len(rows) == 5 and "iterncgp NLL" in head and "temperature ECE" in head and "accuracy" not in head
    for strength, row in zip(shift.STRENGTHS, rows, strict=True):
        assert f"{found[str(strength)]['iterncgp']['ECE']:.4f}" in row
    whole = shift.table(found, list(shift.COLUMNS))
    assert "network accuracy" in whole and f"{found['5']['iterncgp']['accuracy']:.4f}" in whole
    with pytest.raises(SystemExit):
        shift.main(["--quick", "--columns", "AUROC"])

"""A model of one's own, by import path, on a table of one's own: trained here if asked for, and never in silence."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ntk_iterncgp.experiments import cli
from ntk_iterncgp.persistence.files import load_posterior

pytestmark = pytest.mark.cli

CENTRES = np.array([[2.0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0]])
SOURCE = """
import torch

def make(outputs=3, learnt=False):
    model = torch.nn.Linear(4, outputs)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
        if learnt:  # each class by the input that is large for it
            model.weight.copy_(3 * torch.eye(4)[:3])
    return model
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of three classes, one of targets, a module with a model, and a configuration."""
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 300)
    x = CENTRES[y] + 0.7 * generator.normal(size=(300, 4))
    np.savetxt(tmp_path / "classes.csv", np.column_stack([x, y]), delimiter=",")
    np.savetxt(tmp_path / "targets.csv", np.column_stack([x, x @ [1, 2, -1, 0.5]]), delimiter=",")
    (tmp_path / "own_model.py").write_text(SOURCE)
    (tmp_path / "run.yaml").write_text(
        "data: {name: arrays, train: classes.csv}\nmodel: {name: 'own_model:make', learning_rate: 0.03}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(command: str, *settings: str) -> tuple[int, str]:
    """The exit code, and the log of the run."""
    changes = [text for setting in ("fit.num_actions=20", *settings) for text in ("--set", setting)]
    log = Path("out", "run.log")
    log.unlink(missing_ok=True)
    code = cli.main([command, "run.yaml", *changes, "--output-dir", "out"])
    return code, log.read_text(encoding="utf-8") if log.exists() else ""


def made(**arguments: object) -> dict[str, torch.Tensor]:
    import own_model  # type: ignore[import-not-found]

    return own_model.make(**arguments).state_dict()


def fitted_weights() -> dict[str, torch.Tensor]:
    return load_posterior(Path("out", "posterior.safetensors"))[1]


def test_an_own_model_without_a_checkpoint_is_trained_as_long_as_is_asked_for(folder: Path) -> None:
    code, log = run("evaluate", "model.train_epochs=15", "evaluate.baselines=[map]")
    assert code == 0 and "so it is trained here for 15 epochs." in log and "Warning: the network" not in log
    weights = fitted_weights()
    assert not torch.equal(weights["weight"], made()["weight"])
    torch.testing.assert_close(load_file(folder / "out" / "model.safetensors"), weights, rtol=0, atol=0)
    results = json.loads((folder / "out" / "results.json").read_text(encoding="utf-8"))
    assert all(method["accuracy"] > 0.85 for method in results["methods"])  # 38 % where it is not trained


def test_with_no_epochs_its_weights_are_fitted_as_the_function_returns_them(folder: Path) -> None:
    code, log = run("fit", "model.train_epochs=0", "model.arguments={learnt: true}")
    assert code == 0 and "own_model:make, 15 weights used unchanged, not trained here" in log
    torch.testing.assert_close(fitted_weights(), made(learnt=True), rtol=0, atol=0)
    assert not (folder / "out" / "model.safetensors").exists()
    assert "% right on 240 of the training data" in log and "Warning: the network" not in log


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_network_that_has_learnt_nothing_is_warned_of(folder: Path, task: str) -> None:
    settings = ["model.train_epochs=0", f"data.task={task}"]
    if task == "regression":
        settings += ["data.train=targets.csv", "model.arguments={outputs: 1}"]
    code, log = run("fit", *settings)
    assert code == 0 and "Warning: the network fits its training data no better than" in log
    assert ("the mean of the targets" if task == "regression" else "always the commonest class") in log


def test_an_own_model_of_targets_is_trained_too(folder: Path) -> None:
    settings = ("model.train_epochs=30", "data.task=regression", "data.train=targets.csv")
    code, log = run("fit", *settings, "model.arguments={outputs: 1}")
    assert code == 0 and "Warning: the network" not in log and "trained here for 30 epochs" in log


def test_a_checkpoint_is_taken_and_epochs_beside_it_are_said_to_be_unused(folder: Path) -> None:
    save_file(made(learnt=True), folder / "net.safetensors")
    code, log = run("fit", "model.checkpoint=net.safetensors", "model.train_epochs=7")
    assert code == 0 and "15 weights from net.safetensors" in log and "model.train_epochs is not used" in log
    torch.testing.assert_close(fitted_weights(), made(learnt=True), rtol=0, atol=0)


def test_without_a_word_about_training_an_own_model_is_refused_before_any_work(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fit") == (2, "")
    assert "model.train_epochs must be set for 'own_model:make' without a checkpoint" in capsys.readouterr().err
    assert not (folder / "out").exists()

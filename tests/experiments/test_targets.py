"""Runs about real targets: their families against closed forms, and fit, predict and evaluate from a table."""

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.experiments import cli
from ntk_iterncgp.experiments.config import RunConfig
from ntk_iterncgp.experiments.evaluation.crossfit import folds
from ntk_iterncgp.experiments.evaluation.regression import (
    NOISES,
    Fixed,
    IterNCGP,
    Spectral,
    Units,
    best_pair,
    compare,
    tune,
)
from ntk_iterncgp.experiments.evaluation.stopwatch import Stopwatch, reset_peak
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.laplace_torch import IterNCGPAllLaplace
from ntk_iterncgp.laplace_torch.grid import pass_once

GRID = torch.logspace(-3, 6, 37, dtype=torch.float64)


def sets(*settings: str) -> list[str]:
    return [text for setting in settings for text in ("--set", setting)]


def network() -> tuple[nn.Module, DataLoader, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    X = torch.randn(60, 2, dtype=torch.float64)
    y = X[:, :1].sin() + 0.1 * torch.randn(60, 1, dtype=torch.float64)
    return model, DataLoader(TensorDataset(X, y), batch_size=25), X, y


def test_ours_with_all_actions_is_the_exact_posterior_at_every_precision_and_noise() -> None:
    model, loader, X, _ = network()
    la = IterNCGPAllLaplace(model, "regression", num_actions=60)
    la.fit(loader)
    x = torch.randn(8, 2, dtype=torch.float64)
    parts = pass_once(la, DataLoader(TensorDataset(x, torch.zeros(8, 1, dtype=torch.float64)), 3), False)
    J, J_x = (Jacobian(model).rows(inputs, len(inputs)).jacobian[:, 0] for inputs in (X, x))
    values, vectors = torch.linalg.eigh(J.T @ J)
    ours, exact = (
        IterNCGP(la.posterior, parts, GRID, refined=False),
        Spectral(model(x)[:, 0], J_x @ vectors, values, GRID),
    )
    for precision, noise in ((0.1, 0.01), (3.0, 0.5)):
        weights = torch.linalg.inv(J.T @ J / noise + precision * torch.eye(J.shape[1], dtype=torch.float64))
        truth = (J_x @ weights @ J_x.T).diagonal()
        pair = torch.tensor([precision, noise], dtype=torch.float64)
        for family in (ours, exact):
            mean, variance = family.moments(pair[0], pair[1], torch.arange(8))
            torch.testing.assert_close(variance, truth, rtol=1e-5, atol=1e-10)
            torch.testing.assert_close(mean, model(x)[:, 0].detach(), rtol=1e-6, atol=1e-9)


def test_the_search_finds_the_least_loss_of_a_slanted_valley() -> None:
    for target in ((0, 0), (17, 30), (36, 56), (5, 51)):

        def loss(i: int, j: int, target: tuple[int, int] = target) -> float:
            a, b = i - target[0], j - target[1]
            return (a - b) ** 2 + 0.05 * (a + b) ** 2

        assert best_pair(37, 57, loss) == target


def test_the_noise_that_made_the_targets_is_found_and_covers_them() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(4000, generator=generator, dtype=torch.float64)
    targets = mean + 0.3 * torch.randn(4000, generator=generator, dtype=torch.float64)
    constant, wrong = Fixed(mean, torch.zeros(4000)), Fixed(torch.zeros(4000), torch.zeros(4000))
    _, noise = tune(constant, targets, torch.arange(4000))
    assert math.sqrt(noise) == pytest.approx(0.3, rel=0.1)
    found = compare(
        {"map": wrong, "iterncgp": constant},
        targets,
        folds("crossfit", 4000, validation_size=1, seed=0),
        start=(1.0, 0.1),
        units=Units(5.0, 2.0),
        watch=Stopwatch(),
        config=RunConfig(),
        unavailable={},
    )
    assert found["iterncgp"].metrics.coverage[0.9] == pytest.approx(0.9, abs=0.03)
    assert found["iterncgp"].metrics.rmse == pytest.approx(0.6, rel=0.05)  # in units of two
    torch.testing.assert_close(found.targets, 5 + 2 * targets)
    assert found["map"].difference is not None and found["map"].difference.lower > 0
    assert len(NOISES) == 57


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """442 patients, ten columns and the progress of their disease."""
    folder = tmp_path_factory.mktemp("diabetes")
    X, y = load_diabetes(return_X_y=True)
    np.savetxt(folder / "all.csv", np.column_stack([X, y]), delimiter=",", header=",".join("abcdefghijk"), comments="")
    np.savez(folder / "new.npz", x=X[:9])
    (folder / "run.yaml").write_text(
        f"data:\n  name: arrays\n  task: regression\n  train: {folder / 'all.csv'}\nmodel:\n  name: mlp\n"
    )
    return folder


NETWORK = ("model.arguments={width: 10, depth: 1}", "model.train_epochs=20", "fit.num_actions=60")
KERNEL = ("kernel.name=RBF", "kernel.lengthscale=5", "kernel.outputscale=1", "kernel.noise=0.5")


@pytest.mark.cli
@pytest.mark.parametrize(
    ("settings", "methods"),
    [
        (NETWORK, ["map", "prior", "exact", "iterncgp"]),
        ((*NETWORK, "data.held_out=0"), ["map", "prior", "exact", "iterncgp"]),
        (KERNEL, ["map", "iterncgp"]),
        ((*KERNEL, "kernel.optimize_steps=3"), ["map", "iterncgp"]),
    ],
    ids=["network", "by evidence", "kernel", "kernel, optimized"],
)
def test_a_table_of_targets_is_fitted_predicted_and_evaluated(
    table: Path, tmp_path: Path, settings: tuple[str, ...], methods: list[str]
) -> None:
    baselines = "evaluate.baselines=[map, temperature, prior, exact]"
    arguments = [str(table / "run.yaml"), *sets(*settings, baselines), "--output-dir", str(tmp_path)]
    assert cli.main(["fit", *arguments]) == 0
    posterior, new = str(tmp_path / "posterior.safetensors"), str(table / "new.npz")
    assert cli.main(["predict", posterior, "--input", new, "--output", str(tmp_path / "new.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "new.csv").read_text(encoding="utf-8").splitlines()))
    columns = ["input", "mean", "std", "epistemic", "lower", "upper"]
    assert list(rows[0])[:6] == columns and set(list(rows[0])[6:]) <= {"novelty", "p_value"} and len(rows) == 9
    for row in rows:
        mean, std, epistemic, lower, upper = (float(row[name]) for name in columns[1:])
        assert 0 <= mean <= 400 and epistemic < std < 200  # in the units of the table
        assert (lower + upper) / 2 == pytest.approx(mean, rel=1e-3)
        assert upper - lower == pytest.approx(3.92 * std, rel=1e-3)
    assert cli.main(["evaluate", *arguments]) == 0
    assert "Posterior of an earlier fit" in (tmp_path / "run.log").read_text(encoding="utf-8")
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [method["name"] for method in results["methods"]] == methods
    ours = results["methods"][-1]
    assert 45 < ours["rmse"] < 80 and 4.5 < ours["nll"] < 7  # the targets have a standard deviation of 77
    assert 0.8 <= ours["coverage"]["0.95"] <= 1 and 0.35 <= ours["coverage"]["0.5"] <= 0.7
    if "exact" in methods:
        assert results["variance_over_exact"]["least"] >= 1 - 1e-4
        assert results["unavailable"] == {"temperature": "It is offered for classification alone."}
    else:
        assert list(results["unavailable"]) == ["temperature", "prior only", "exact linearised Laplace"]
    assert ours["fit_seconds"] > 0 and results["methods"][0]["fit_peak_bytes"] is None
    if reset_peak() is not None:  # where the system can tell
        assert ours["fit_peak_bytes"] >= 0
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'class="panel" alt="([^"]*)"', report)[:3] == ["Coverage", "Predictions", "Errors"]


@pytest.mark.cli
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("1,2\n3,nan\n4,5\n", "must hold finite numbers; got NaN or infinity. Try without those rows."),
        ("1,2\n", "one y for each of at least two x; got 1 x and 1 y."),
    ],
)
def test_a_table_that_cannot_be_learnt_from_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, sentence: str
) -> None:
    (tmp_path / "bad.csv").write_text(content)
    (tmp_path / "run.yaml").write_text(
        f"data:\n  name: arrays\n  task: regression\n  train: {tmp_path / 'bad.csv'}\nmodel:\n  name: mlp\n"
    )
    assert cli.main(["fit", str(tmp_path / "run.yaml"), "--output-dir", str(tmp_path / "out")]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.cli
def test_real_targets_without_the_task_are_met_with_advice(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "real.npz", x=np.zeros((5, 2)), y=np.linspace(0, 1, 5))
    arguments = [str(table / "run.yaml"), *sets(f"data.train={tmp_path / 'real.npz'}", "data.task=classification")]
    assert cli.main(["fit", *arguments, "--output-dir", str(tmp_path / "out")]) == 2
    assert "must be whole numbers from 0; got others. Try data.task=regression" in capsys.readouterr().err

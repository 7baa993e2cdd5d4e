"""Long runs say how far they are: every 30 seconds where there is no terminal, on the screen and in the log."""

import io
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.experiments import cli
from ntk_iterncgp.experiments import progress as reporting
from ntk_iterncgp.experiments.config import EvaluateConfig, RunConfig
from ntk_iterncgp.experiments.datasets import Data, Scaling
from ntk_iterncgp.experiments.evaluation import sweep
from ntk_iterncgp.experiments.evaluation.baselines import BASELINES
from ntk_iterncgp.experiments.evaluation.compare import compare_network
from ntk_iterncgp.experiments.progress import Progress, duration, reported
from ntk_iterncgp.jacobian import autograd as jacobian
from ntk_iterncgp.jacobian import blocks, layers
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.laplace_torch import IterNCGPAllLaplace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_done_total_and_remaining() -> None:
    clock = Clock()
    progress = Progress("Test inputs", clock=clock)
    assert progress.line() == "Test inputs: after 0 s"
    progress.start(10_000, "inputs")
    clock.now += 40
    assert progress.line() == "Test inputs: 0 of 10,000 inputs after 40 s"
    clock.now += 200
    progress.advance(2500)
    assert progress.line() == "Test inputs: 2,500 of 10,000 inputs after 4 min, about 12 min to go"
    progress.advance(7500)
    assert progress.line() == "Test inputs: 10,000 of 10,000 inputs after 4 min"
    progress.start(None, "groups")
    progress.advance(3)
    assert progress.line() == "Test inputs: 3 groups after 0 s"
    assert [duration(s) for s in (0.4, 99, 100, 3599, 6000, 11100)] == [
        "0 s",
        "99 s",
        "2 min",
        "60 min",
        "1 h 40 min",
        "3 h 05 min",
    ]


def test_lines_come_in_time_however_long_a_step_takes_and_stop_with_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "EVERY_SECONDS", 0.05)
    said: list[str] = []
    for step in reported(range(2), "Counting", said.append, total=2, unit="steps"):
        deadline = time.monotonic() + 30
        while len(said) < 3 * (step + 1) and time.monotonic() < deadline:  # a single step, several lines
            time.sleep(0.01)
    assert len(said) >= 6 and re.match(r"Counting: [012] of 2 steps after \d+ s", said[-1])
    number = len(said)
    time.sleep(0.2)
    assert len(said) == number
    with pytest.raises(KeyError), reporting.reporting("Failing", said.append):
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name == "reporting"]


def test_on_a_terminal_there_is_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(reporting, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", Terminal())
    said: list[str] = []
    for _ in reported(range(3), "Counting", said.append, total=3, unit="steps"):
        time.sleep(0.15)
    assert not said and "Counting:  67%" in sys.stderr.getvalue() and "2/3" in sys.stderr.getvalue()


def test_a_log_that_cannot_be_written_does_not_disturb_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "EVERY_SECONDS", 0.01)

    def full(line: str) -> None:
        raise OSError("no space left")

    with reporting.reporting("Writing", full):
        time.sleep(0.1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A command on a small table with a line at every turn; returns its log."""
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 200)
    x = 2 * np.eye(4)[y] + generator.normal(size=(200, 4))
    np.savetxt(tmp_path / "classes.csv", np.column_stack([x, y]), delimiter=",")
    np.savetxt(tmp_path / "targets.csv", np.column_stack([x, x @ [1, 2, -1, 0.5]]), delimiter=",")
    (tmp_path / "run.yaml").write_text(
        "data: {name: arrays, train: classes.csv}\nfit: {num_actions: 20}\n"
        "model: {name: mlp, arguments: {width: 6, depth: 1}, train_epochs: 5}\n"
        "evaluate: {link_samples: 32, bootstrap: 20}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reporting, "EVERY_SECONDS", 0.001)

    def command(*settings: str) -> str:
        changes = [text for setting in settings for text in ("--set", setting)]
        assert cli.main(["evaluate", "run.yaml", *changes, "--output-dir", "out"]) == 0
        return Path("out", "run.log").read_text(encoding="utf-8")

    return command


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that waits, at its start and after each step, until a line has been shown: on any machine, however busy."""
    lines: dict[Progress, int] = {}
    line, start, advance = Progress.line, Progress.start, Progress.advance

    def counted(progress: Progress) -> str:
        lines[progress] = lines.get(progress, 0) + 1
        return line(progress)

    def wait(progress: Progress) -> None:
        before, deadline = lines.get(progress, 0), time.monotonic() + 5
        while lines.get(progress, 0) < before + 2 and time.monotonic() < deadline:  # the second follows the first
            if not any(thread.name == "reporting" for thread in threading.enumerate()):
                return
            time.sleep(0.001)

    def slow_start(progress: Progress, total: int | None, unit: str) -> None:
        start(progress, total, unit)
        if progress.what and progress in lines:  # not where it is made: its thread comes after that
            wait(progress)

    def slow_advance(progress: Progress, amount: int = 1) -> None:
        advance(progress, amount)
        wait(progress)

    monkeypatch.setattr(Progress, "line", counted)
    monkeypatch.setattr(Progress, "start", slow_start)
    monkeypatch.setattr(Progress, "advance", slow_advance)


@pytest.mark.cli
@pytest.mark.usefixtures("unhurried")
def test_every_long_part_of_an_evaluation_reports_on_the_screen_and_in_the_log(
    run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    log = run("evaluate.baselines=[map, prior, last_layer, kfac, exact]")
    shown = capsys.readouterr().out
    for line in (
        r"Training: \d+ of \d+ batches after \d+ s, about \d+ s to go",
        r"Fitting \(estimated: \d+ s\): after \d+ s",
        r"Calibrating on 32 held-out inputs: after \d+ s",
        r"Fitting: exact linearised Laplace: \d+ of 128 data",
        r"Fitting: KFAC \(laplace-torch\): \d+ of 1 batches",
        r"Test inputs: \d+ of 40 inputs",
        r"Tuning and scoring: IterNCGP: \d+ of \d+ values of its hyperparameter after \d+ s, about \d+ s to go",
    ):
        assert re.search(line, log), line
        assert re.search(line, shown), line


@pytest.mark.cli
@pytest.mark.usefixtures("unhurried")
def test_an_evaluation_of_targets_and_one_of_a_kernel_report_too(run: Callable[..., str]) -> None:
    log = run("data.task=regression", "data.train=targets.csv", "evaluate.baselines=[map, exact]")
    assert re.search(r"Test inputs: \d+ of 40 inputs", log) and "Fitting: exact linearised Laplace" in log
    log = run("data.task=regression", "data.train=targets.csv", "kernel.name=RBF")
    assert re.search(r"Test inputs: \d of 1 parts", log)


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 5), nn.Linear(5, 3)
    ).double()


def test_rows_are_computed_and_written_out_once_for_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = convolutional(), torch.randn(30, 1, 8, 8, dtype=torch.float64)
    train, test = (TensorDataset(part, torch.arange(15) % 3) for part in images.split(15))
    la = IterNCGPAllLaplace(model, "classification", num_actions=6)
    la.fit(DataLoader(train, 5))
    config = RunConfig(evaluate=EvaluateConfig(baselines=("prior", "last_layer", "exact"), link_samples=16))
    data = Data(train, test, Scaling((0.0,), (1.0,)), ("a", "b", "c"), (1, 8, 8))
    counts = {"backward": 0, "patches": 0, "written out": 0}
    by_layers, patches, matrix = jacobian.layer_rows, layers.patches, blocks.Contraction.matrix
    inside: list[bool] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            counts[name] += bool(inside)
            return function(*arguments, **settings)

        return call

    plain = sweep.rows_at

    def watched(*arguments: Any, **settings: Any) -> Any:
        inside.append(True)
        yield from plain(*arguments, **settings)
        inside.clear()

    monkeypatch.setattr("ntk_iterncgp.experiments.evaluation.compare.rows_at", watched)
    monkeypatch.setattr(jacobian, "layer_rows", counted("backward", by_layers))
    monkeypatch.setattr(layers, "patches", counted("patches", patches))
    monkeypatch.setattr(blocks.Contraction, "matrix", property(counted("written out", matrix.fget)))
    compare_network(la, model, data, config, lambda line: None)
    assert counts == {"backward": 1, "patches": 1, "written out": 3}  # one part, a convolution and two linear layers


@pytest.mark.cli
def test_rows_of_a_regression_are_computed_once_for_ours_and_the_exact_posterior(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    plain = Jacobian.rows

    def counted(self: Jacobian, x: Any, num_rows: int, *more: Any) -> Any:
        sizes.append(num_rows)
        return plain(self, x, num_rows, *more)

    monkeypatch.setattr(Jacobian, "rows", counted)
    run("data.task=regression", "data.train=targets.csv", "evaluate.baselines=[exact]", "fit.num_actions=20")
    assert sizes.count(40) == 1, "the test inputs"


@pytest.mark.parametrize("written_out", [False, True])
def test_rows_that_are_written_out_give_the_same_products(written_out: bool) -> None:
    model, x = convolutional(), torch.randn(7, 1, 8, 8, dtype=torch.float64)
    la = IterNCGPAllLaplace(model, "classification", num_actions=6)
    loader = DataLoader(TensorDataset(x, torch.arange(7) % 3), 4)
    la.fit(loader)
    weights, variance = torch.randn(la.n_params, 5, dtype=torch.float64), torch.rand(la.n_params, dtype=torch.float64)
    with torch.no_grad():
        truth = torch.cat([Jacobian(model)._pulled_back(x[n : n + 1], 1, torch.eye(3).double()) for n in range(7)])
    start = 0
    for rows, y in sweep.rows_at(la, loader, written_out=written_out):
        J = truth[start : start + len(y)]
        torch.testing.assert_close(rows.times(weights), J @ weights)
        torch.testing.assert_close(rows.covariance(variance), J * variance @ J.mT)
        for (cross, covariance), part, some in zip(
            rows.by_layer(weights, la._layer_sizes()),
            J.split(la._layer_sizes(), 2),
            weights.split(la._layer_sizes()),
            strict=True,
        ):
            torch.testing.assert_close(cross, part @ some)
            torch.testing.assert_close(covariance, part @ part.mT)
        torch.testing.assert_close(rows.jacobian, J)
        start += len(y)
    assert start == 7


def test_baselines_count_what_they_read() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    loader = DataLoader(TensorDataset(torch.randn(40, 4).double(), torch.arange(40) % 3), batch_size=16)
    settings, grid = EvaluateConfig(sod_size=7, ella_size=25, ella_rank=6, valla_size=5, valla_steps=4), torch.ones(1)
    for name, total, unit in (
        ("last_layer", 3, "batches"),
        ("kfac", 3, "batches"),
        ("ella", 3, "batches"),
        ("exact", 40, "data"),
        ("sod", 7, "data"),
        ("valla", 4, "minibatches"),
    ):
        progress = Progress(name)
        BASELINES[name](model, loader, settings, 0, grid, progress)
        assert (progress.done, progress.total, progress.unit) == (total, total, unit), name

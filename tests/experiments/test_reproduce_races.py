"""The Poisson schedules, the mixture and MNIST at their smallest: baselines against oracles, claims at equal time."""

import gzip
import math
import re
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from ntk_iterncgp import kernels
from ntk_iterncgp.experiments.reproduce import contenders, gmm, main, mnist, poisson, svgp
from ntk_iterncgp.experiments.reproduce.contenders import best_settings, svgps
from ntk_iterncgp.experiments.reproduce.outcome import Claim, Outcome
from ntk_iterncgp.experiments.reproduce.quadratic import quadratic_forms
from ntk_iterncgp.experiments.reproduce.race import Classes, Clock
from ntk_iterncgp.experiments.reproduce.race_claims import claims
from ntk_iterncgp.experiments.reproduce.subset import newton_steps
from ntk_iterncgp.experiments.settings import ConfigError
from tests import oracles
from tests.experiments.test_reproduce import Ran, assert_written, outcome_of


def matching(outcome: Outcome, pattern: str) -> list[Claim]:
    found = [claim for claim in outcome.claims if re.search(pattern, claim.sentence)]
    assert found, pattern
    return found


# --- the command ------------------------------------------------------------------------------------------------------

RACE = ["num_test=40", "num_seen=20", "max_products=4", "inducing_points=[50]", "learning_rates=[0.05]"]
COMMANDS: dict[str, tuple[list[str], list[str], list[str]]] = {  # settings, figures, tables
    "poisson": (
        ["num_redraws=1", "num_samples=100", "num_test=10", "budget=20", "iterations_per_step=[1, 5]"],
        ["poisson_schedules", "poisson_beliefs_paper", "poisson_beliefs_ours"],
        ["poisson", "poisson_summary"],
    ),
    "gmm": ([*RACE, "num_train=150", "subset_sizes=[50]"], ["gmm", "gmm_data"], ["gmm", "gmm_summary"]),
    "mnist": ([*RACE, "num_train=150"], ["mnist"], ["mnist", "mnist_summary"]),
}


@pytest.mark.cli
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_writes_the_files_of_the_long_experiments_too(
    name: str, small_mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, figures, tables = COMMANDS[name]
    folder, changes = tmp_path / "out", [text for setting in settings for text in ("--set", setting)]
    assert main([name, "--quick", *changes, "--output-dir", str(folder)]) == 0
    run = Ran(folder, capsys.readouterr().out)
    assert_written(run, figures)
    assert all(len(run.rows(table)) > 1 for table in tables)


# --- Poisson ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_iteration_per_newton_step_is_the_best_schedule_and_ours_never_fails() -> None:
    """The log-rate of seed 1, where there is something to gain; for that of seed 0 the paper's schedules are a tie."""
    outcome = outcome_of("poisson", seed=1, num_redraws=3, num_samples=300, num_test=30)
    assert all(claim.holds for claim in outcome.claims)
    arrivals = {
        (row["method"], row["iterations_per_step"]): row["median_iterations_to_arrive"]
        for row in outcome.tables["poisson_summary"]
    }
    assert all(arrivals["ours", j] >= 1.5 * arrivals["ours", 1] for j in (5, 10, 20))
    assert all(arrivals["ours", j] < arrivals["paper", j] for j in (1, 5, 10, 20))
    assert set(outcome.figures) == {"poisson_schedules", "poisson_beliefs_paper", "poisson_beliefs_ours"}
    spent = {row["iterations"] for row in outcome.tables["poisson"]}
    assert max(spent) <= 100 and min(spent) == 0


def test_where_no_schedule_arrives_none_is_the_best() -> None:
    outcome = outcome_of("poisson", budget=2, num_redraws=1, num_samples=200, num_test=10, iterations_per_step=[1, 5])
    for claim in matching(outcome, "most efficient"):
        assert not claim.holds and ": none. j ≤ 1: inf iterations" in claim.numbers and "1 of 1 never" in claim.numbers
    assert not matching(outcome, "no schedule fails")[0].holds


@pytest.mark.parametrize(
    ("arrivals", "winner"),
    [
        ({1: 6, 5: 13, 20: 19}, "j ≤ 1"),
        ({1: 12, 5: 10, 20: 15}, "j ≤ 5"),
        ({1: 11, 5: 10, 20: 15}, "a tie of j ≤ 1 and j ≤ 5"),
        ({1: 0, 5: 0}, "a tie of j ≤ 1 and j ≤ 5"),
        ({1: 27, 5: math.inf}, "j ≤ 1"),
        ({1: math.inf, 5: math.inf}, "none"),
        ({1: 6}, "none"),
    ],
)
def test_a_schedule_wins_only_by_a_margin_and_only_if_it_arrives(arrivals: dict[int, float], winner: str) -> None:
    assert poisson._winner(arrivals) == winner


def test_a_run_has_arrived_when_its_nll_stays_near_the_converged_one() -> None:
    def run(*values: float) -> list[dict[str, Any]]:
        return [{"iterations": k, "test_nll": value} for k, value in enumerate(values)]

    assert poisson._arrival(run(3.0, 1.0, 2.0, 1.0, 0.9), 1.05) == 3
    assert poisson._arrival(run(1.0, 1.0), 1.05) == 0
    assert poisson._arrival(run(3.0, 1.0, 1.1), 1.05) == math.inf
    assert poisson._arrival(run(3.0, 1.0, math.nan), 1.05) == math.inf


@pytest.mark.slow
def test_where_the_papers_schedules_diverge_ours_converges() -> None:
    """The log-rate of seed 3, with rates up to 37."""
    changes = {"seed": 3, "num_redraws": 1, "num_samples": 300, "num_test": 30, "iterations_per_step": [1, 10]}
    outcome = outcome_of("poisson", **changes)
    final = {(r["method"], r["iterations_per_step"]): r["worst_final_nll"] for r in outcome.tables["poisson_summary"]}
    assert final["paper", 10] > 10 * final["ours", 10]
    assert final["ours", 1] < 3 and final["ours", 10] < 3


def test_the_test_nll_by_monte_carlo_is_that_of_quadrature() -> None:
    settings = poisson.PoissonSettings(num_test=5)
    generator = torch.Generator().manual_seed(0)
    counts = poisson._log_rate(settings)
    problem = poisson.make_problem(counts.kernel, poisson.Poisson(), counts.inputs, torch.ones(100))
    state = poisson.start(problem, poisson._stopping(settings, 1))
    targets = torch.arange(5.0, dtype=torch.float64)
    noise = torch.randn(200_000, generator=generator, dtype=torch.float64)
    nll = poisson._test_nll(state, poisson.in_between, counts.test_inputs, targets, noise)
    f = torch.linspace(-25, 25, 20_001, dtype=torch.float64)
    prior = torch.distributions.Normal(0.0, settings.outputscale**0.5).log_prob(f).exp()
    each = [-(prior * torch.distributions.Poisson(f.exp()).log_prob(y).exp()).sum() * (f[1] - f[0]) for y in targets]
    exact = sum(-float((-value).log()) for value in each) / 5
    assert nll == pytest.approx(exact, abs=0.02)


# --- the subset of data -----------------------------------------------------------------------------------------------


def test_the_subset_of_data_is_the_exact_laplace_approximation() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(15, 2, generator=generator, dtype=torch.float64)
    x = torch.rand(4, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (15,), generator=generator)
    kernel = kernels.Matern32(lengthscale=0.5, outputscale=4.0)
    *_, laplace = newton_steps(kernel, X, y, 3, tolerance=1e-12)
    mean, variance = laplace.predict(x)
    K, Kx, Kxx = (oracles.block_kernel([kernel(a, b)] * 3) for a, b in ((X, X), (x, X), (x, x)))
    zeros = torch.zeros
    exact_mean, exact = oracles.posterior(
        "softmax", K, Kx, Kxx, zeros(45, dtype=torch.float64), zeros(12, dtype=torch.float64), y
    )
    torch.testing.assert_close(mean.flatten(), exact_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(variance.flatten(), exact.diagonal(), rtol=1e-6, atol=1e-7)


def test_the_first_step_of_a_subset_has_one_projection_for_all_classes_and_the_next_one_for_each() -> None:
    classes = gmm.draw(gmm.GmmSettings(num_train=60, num_test=5), 0)
    kernel = kernels.Matern32(lengthscale=0.5, outputscale=4.0)
    first, second, *_ = newton_steps(kernel, classes.train_inputs, classes.train_labels, 10, tolerance=0.0)
    assert [len({id(E) for E in step.projections}) for step in (first, second)] == [1, 10]
    _, variance = first.predict(classes.test_inputs)
    # At f = 0 W = (I − 11ᵀ/C)/C: in the span of a contrast the noise is C, and the mean over classes is not observed.
    K, cross = (kernel(classes.train_inputs.double(), z.double()) for z in (classes.train_inputs, classes.test_inputs))
    removed = (cross * torch.linalg.solve(K + 10 * torch.eye(60, dtype=torch.float64), cross)).sum(0)
    torch.testing.assert_close(variance, (4.0 - 0.9 * removed)[:, None].expand(-1, 10), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 33])
def test_quadratic_forms_are_those_of_the_whole_matrix(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(quadratic_forms(root + root.T, x), (x * ((root + root.T) @ x)).sum(0))


# --- the mixture ------------------------------------------------------------------------------------------------------


def test_the_mixture_has_the_papers_gaussians_whatever_the_seed_of_the_data() -> None:
    settings = gmm.GmmSettings(num_train=4000, num_test=200)
    first, second = gmm.draw(settings, 0), gmm.draw(settings, 1)
    assert not torch.equal(first.train_inputs, second.train_inputs)
    for c in range(10):
        one, other = first.train_inputs[first.train_labels == c], second.train_inputs[second.train_labels == c]
        assert len(one) == 400
        assert (one.mean(0) - other.mean(0)).abs().max() < 0.08
        eigenvalues = torch.linalg.eigvalsh(one.double().T.cov())
        assert eigenvalues.min() > 0.0008 and eigenvalues.max() < 0.125  # drawn from [0.001, 0.1]


@pytest.mark.slow
def test_on_the_mixture_iterncgp_beats_subsets_and_svgp_at_equal_time_and_compression_costs_little() -> None:
    sizes = {"num_train": 1500, "num_test": 300, "num_seen": 100, "subset_sizes": [100, 250], "max_rank": 3}
    outcome = outcome_of("gmm", **sizes, inducing_points=[100], learning_rates=[0.05])
    compressed = matching(outcome, "compression stays")
    assert [claim.sentence.rpartition(": ")[2] for claim in compressed] == ["paper, j ≤ 5, R = 3", "ours, R = 3"]
    for claim in matching(outcome, "accuracy|nll") + compressed:
        assert claim.holds, claim
    methods = {row["method"] for row in outcome.tables["gmm"]}
    assert methods == {
        "paper, j ≤ 5, R = ∞",
        "paper, j ≤ 5, R = 3",
        "ours",
        "ours, R = 3",
        "SoD 100",
        "SoD 250",
        "SVGP 100, 0.05",
    }
    ends = {row["method"]: row for row in outcome.tables["gmm_summary"]}
    assert ends["ours, R = 3"]["rank"] <= 3 + 5 < ends["ours"]["rank"]  # and the actions of the last Newton step
    slowest = max(row["seconds"] for name, row in ends.items() if name.startswith(("paper", "ours")))
    assert ends["SVGP 100, 0.05"]["seconds"] >= 0.99 * slowest  # the same time, and the step that it is in


def test_svgp_has_the_same_kernel_fixed_and_the_papers_inducing_points() -> None:
    classes = gmm.draw(gmm.GmmSettings(num_train=200, num_test=20), 0)
    kernel = kernels.Matern32(lengthscale=0.3, outputscale=0.7)
    model, _ = svgp._model(svgp.require_gpytorch(), classes, kernel, 100)
    X = classes.test_inputs
    torch.testing.assert_close(model.covar_module(X).to_dense().detach(), kernel(X, X), rtol=1e-4, atol=1e-5)
    learned = dict(model.named_parameters())
    assert not any(p.requires_grad for name, p in learned.items() if "covar_module" in name)
    inducing = next(p for name, p in learned.items() if "inducing_points" in name)
    assert inducing.shape == (10, 10, 3)  # U/C for each class, each one of the training data
    assert torch.cdist(inducing.detach().flatten(0, 1), classes.train_inputs).min(1).values.max() < 1e-3


def test_svgp_is_scored_by_what_gpytorchs_model_answers() -> None:
    classes = gmm.draw(gmm.GmmSettings(num_train=200, num_test=30), 0)
    gpytorch = svgp.require_gpytorch()
    torch.manual_seed(0)
    model, likelihood = svgp._model(gpytorch, classes, kernels.Matern32(lengthscale=0.3, outputscale=0.7), 100)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=200)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(5):  # the last step is one that the model has not seen when it is asked
        optimizer.zero_grad()
        (-objective(model(classes.train_inputs), classes.train_labels)).backward()
        optimizer.step()
    mean, variance = svgp._predict(gpytorch, model)(classes.test_inputs)
    assert model.training  # it goes on
    with torch.no_grad():
        answer = model.eval()(classes.test_inputs)
    assert variance.std() > 0.01 and mean.std() > 0.01
    torch.testing.assert_close(mean, answer.mean.double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(variance, answer.variance.double(), rtol=1e-4, atol=1e-5)


def test_an_svgp_that_diverges_keeps_its_last_scores_or_those_of_the_prior() -> None:
    classes = gmm.draw(gmm.GmmSettings(num_train=200, num_test=20, num_seen=20), 0)
    clock = svgp.race(classes, kernels.Matern32(lengthscale=0.3, outputscale=0.7), 50, 1e30, 5.0, seed=0)
    assert clock.seconds < 5.0  # it did not go on
    assert all(torch.isfinite(torch.tensor(row["test_nll"])) for row in clock.rows) and len(clock.rows) == 1


def test_the_clock_stands_still_while_scores_are_taken() -> None:
    labels = torch.tensor([0, 1])
    classes = Classes(torch.zeros(2, 1), labels, torch.zeros(2, 1), labels, 2, 2)
    clock = Clock("slow to score", "ours", classes)

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        deadline = clock.resumed + 0.2
        while time.perf_counter() < deadline:
            pass
        return torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)

    clock.score(predict)
    assert clock.pause() < 0.1
    assert clock.rows[0]["test_accuracy"] == 1.0 and clock.rows[0]["seconds"] < 0.1


def test_the_best_settings_of_svgp_are_those_that_lead_in_some_score() -> None:
    def clock(nll: float, accuracy: float, ece: float) -> Clock:
        row = {
            f"{d}_{k}": v for d in ("test", "train") for k, v in (("nll", nll), ("accuracy", accuracy), ("ece", ece))
        }
        return Clock("", "svgp", Classes(*[torch.zeros(1, 1)] * 4, 2, 1), [row])

    grid = [(100, 0.1), (200, 0.1), (300, 0.1), (400, 0.1)]
    clocks = [clock(1.0, 0.9, 0.3), clock(2.0, 0.5, 0.1), clock(1.5, 0.8, 0.4), clock(3.0, 0.1, 0.9)]
    assert best_settings(clocks, grid, 2) == [(100, 0.1), (300, 0.1)]
    assert (400, 0.1) not in best_settings(clocks, grid, 4)


def test_svgp_gets_the_full_time_for_the_best_settings_of_shorter_heats(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float, float]] = []

    def race(classes: Any, kernel: Any, inducing: int, rate: float, seconds: float, seed: int) -> Clock:
        asked.append((inducing, rate, seconds))
        row = {f"{d}_{k}": sign * inducing for d in ("test", "train") for k, sign in SIGNS.items()}
        return Clock("", "svgp", Classes(*[torch.zeros(1, 1)] * 4, 2, 1), [row])

    SIGNS = {"nll": 1.0, "accuracy": -1.0, "ece": 1.0}  # few inducing points are best
    monkeypatch.setattr(svgp, "race", race)
    kernel, grid = kernels.Matern32(), [(100, 0.1), (200, 0.1), (300, 0.1)]
    chosen, clocks, heats = svgps(None, kernel, grid, 8.0, 0, 1)  # type: ignore[arg-type]
    assert chosen == [(100, 0.1)] and len(clocks) == 1 and len(heats) == 3
    assert asked == [(100, 0.1, 1.0), (200, 0.1, 1.0), (300, 0.1, 1.0), (100, 0.1, 8.0)]
    asked.clear()
    assert svgps(None, kernel, chosen, 8.0, 1, 1)[0] == chosen  # type: ignore[arg-type]
    assert asked == [(100, 0.1, 8.0)]  # another seed: no heats again


def test_a_heat_whose_one_step_took_the_full_time_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float]] = []

    def race(classes: Any, kernel: Any, inducing: int, rate: float, seconds: float, seed: int) -> Clock:
        asked.append((inducing, seconds))
        row = {f"{d}_{k}": 1.0 for d in ("test", "train") for k in ("nll", "accuracy", "ece")}
        took = max(seconds, inducing / 100)  # for its one step at least
        return Clock(str(inducing), "svgp", Classes(*[torch.zeros(1, 1)] * 4, 2, 1), [row], took)

    monkeypatch.setattr(svgp, "race", race)
    grid = [(799, 0.1), (800, 0.1), (900, 0.1)]
    monkeypatch.setattr(contenders, "best_settings", lambda heats, grid, number: grid[:2])
    _, clocks, heats = svgps(None, kernels.Matern32(), grid, 8.0, 0, 2)  # type: ignore[arg-type]
    assert asked == [(799, 1.0), (800, 1.0), (900, 1.0), (799, 8.0)]
    assert clocks[1] is heats[1] and [clock.method for clock in clocks] == ["799", "800"]


def test_a_slow_subset_is_left_out_at_equal_time_and_named() -> None:
    def line(method: str, group: str, seconds: float, nll: float) -> dict[str, Any]:
        scores = {"test_nll": nll, "test_accuracy": 1 - nll, "test_ece": nll}
        return {"method": method, "group": group, "seconds": seconds, **scores}

    found = claims(
        [line("p", "paper", 2, 0.5), line("o", "ours", 1, 0.4), line("a", "sod", 1, 0.6), line("b", "sod", 9, 0.1)]
    )
    first = found[0]
    assert first.holds and "against 0.4000 (a, 1.0 s); with more time 0.9000 (b, 9.0 s)" in first.numbers
    assert len(found) == 6


# --- MNIST ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """scikit-learn's digits in the files and the format of MNIST."""
    images, labels = load_digits(return_X_y=True)
    pixels, folder = (images * 15.9).astype("uint8"), tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for prefix, part in (("train", slice(0, 1200)), ("t10k", slice(1200, None))):
        number = len(labels[part])
        header = struct.pack(">BBBBiii", 0, 0, 8, 3, number, 8, 8)
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels[part].tobytes()))
        header = struct.pack(">BBBBi", 0, 0, 8, 1, number)
        content = gzip.compress(header + labels[part].astype("uint8").tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(content)
    monkeypatch.setenv("NTK_ITERNCGP_DATA", str(tmp_path))
    return folder


@pytest.mark.slow
def test_on_digits_iterncgp_beats_svgp_in_accuracy_and_nll_at_equal_time(small_mnist: Path) -> None:
    sizes = {"num_train": 800, "num_test": 300, "num_seen": 100}
    outcome = outcome_of("mnist", **sizes, max_products=6, inducing_points=[100], learning_rates=[0.05])
    for claim in matching(outcome, "accuracy|nll"):
        assert claim.holds, claim
    assert {"paper, j ≤ 5, R = ∞", "paper, j ≤ 1, R = ∞", "ours"} < {row["method"] for row in outcome.tables["mnist"]}


def test_mnist_is_read_as_it_is(small_mnist: Path) -> None:
    images, labels = load_digits(return_X_y=True)
    classes = mnist.load_mnist(mnist.MnistSettings(num_train=1200, num_test=10))
    assert sorted(classes.train_labels.tolist()) == sorted(labels[:1200].tolist())
    pixels = torch.from_numpy((images[:1200] * 15.9).astype("uint8")).float() / 255
    chosen = torch.randperm(1200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(classes.train_inputs, pixels[chosen])
    with pytest.raises(ConfigError, match=r"num_train must be at most 1200, .* got 1201"):
        mnist.load_mnist(mnist.MnistSettings(num_train=1201, num_test=10))


@pytest.mark.cli
@pytest.mark.parametrize("damage", ["cut short", "another byte", "not packed", "not images", "other labels"])
def test_damaged_files_of_mnist_are_a_sentence(
    damage: str, small_mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = small_mnist / "train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    flipped = whole[:1000] + bytes([whole[1000] ^ 255]) + whole[1001:]
    content = {
        "cut short": whole[:5000],
        "another byte": flipped,
        "not packed": b"images",
        "not images": gzip.compress(b"not images"),
        "other labels": (small_mnist / "t10k-images-idx3-ubyte.gz").read_bytes(),
    }
    file.write_bytes(content[damage])
    assert main(["mnist", "--quick", "--output-dir", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    expected = "got 597 images, 1200 labels." if damage == "other labels" else "must be whole; got: "
    assert expected in message and message.count("\n") == 1


@pytest.mark.cli
def test_mnist_is_looked_for_where_other_data_are_and_missing_files_are_a_sentence(
    small_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NTK_ITERNCGP_DATA", str(tmp_path / "elsewhere"))
    assert main(["mnist", "--quick", "--output-dir", str(tmp_path / "out")]) == 2
    assert "elsewhere/MNIST/raw' must hold train-images-idx3-ubyte.gz and" in capsys.readouterr().err
    monkeypatch.delenv("NTK_ITERNCGP_DATA")
    (tmp_path / "data").mkdir()
    (tmp_path / "MNIST").rename(tmp_path / "data" / "MNIST")
    monkeypatch.chdir(tmp_path)
    assert len(mnist.load_mnist(mnist.MnistSettings(num_train=10, num_test=10)).train_labels) == 10
    (tmp_path / "data" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ConfigError, match=r"must hold t10k-images-idx3-ubyte.gz and t10k-labels"):
        mnist.load_mnist(mnist.MnistSettings(num_train=10, num_test=10))


def test_without_gpytorch_there_is_a_sentence_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(svgp.importlib, "import_module", missing)
    settings = gmm.GmmSettings(num_train=100, num_test=10)
    with pytest.raises(ConfigError, match=r"must be installed for SVGP; got none\. Try pip install gpytorch"):
        gmm.run(settings)

"""Scores, cross-fitting and baselines against values by hand, scikit-learn and laplace-torch itself."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from laplace import ELLA, FunctionalLaplace, Laplace, VaLLA
from laplace.curvature import CurvlinopsGGN
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from ntk_iterncgp.experiments.config import EvaluateConfig, RunConfig, TuningConfig
from ntk_iterncgp.experiments.datasets import Data, Scaling
from ntk_iterncgp.experiments.evaluation import (
    bootstrap_difference,
    ood_metrics,
    regression_metrics,
    risk_curve,
    roc_curve,
)
from ntk_iterncgp.experiments.evaluation.baselines import BASELINES, Exact, Kfac, LastLayer, SubsetOfData, Unavailable
from ntk_iterncgp.experiments.evaluation.compare import compare_network, precision_grid
from ntk_iterncgp.experiments.evaluation.crossfit import crossfit, folds, folds_of, nll_of
from ntk_iterncgp.experiments.evaluation.families import Latent, Tempered
from ntk_iterncgp.experiments.evaluation.links import class_probabilities, entropy, mutual_information
from ntk_iterncgp.experiments.evaluation.report import _tuned_to, verdict
from ntk_iterncgp.experiments.evaluation.stopwatch import Stopwatch, reset_peak
from ntk_iterncgp.experiments.evaluation.uncertainty import Difference
from ntk_iterncgp.experiments.evaluation.valla import VariationalPosterior, fit_valla
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.jacobian.rows import DenseRows
from ntk_iterncgp.runtime.memory import highest_bytes, peak_resident_bytes

GRID = torch.tensor([0.1, 1.0, 30.0], dtype=torch.float64)
SETTINGS = EvaluateConfig(sod_size=7, ella_size=25, ella_rank=6, valla_size=5, valla_steps=3)


def problem() -> tuple[nn.Module, DataLoader, Tensor]:
    """A small network in float64, its data, and new inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    X, y = torch.randn(40, 4, dtype=torch.float64), torch.arange(40) % 3
    return model, DataLoader(TensorDataset(X, y), batch_size=16), torch.randn(5, 4, dtype=torch.float64)


def covariance_of(name: str, model: nn.Module, loader: DataLoader, x: Tensor, index: int) -> Tensor:
    baseline = BASELINES[name](model, loader, SETTINGS, 0, GRID)
    for part in x.split(2):
        baseline.see(Jacobian(model).rows(part, len(part)))
    family = baseline.family(1.0, 64)
    assert isinstance(family, Latent)
    mean, covariance = family.moments(index, torch.arange(len(x)))
    torch.testing.assert_close(mean, model(x))
    return covariance


def rows_at(model: nn.Module, x: Tensor) -> DenseRows:
    return Jacobian(model).rows(x, len(x))


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "subset", "structure"),
    [("exact", "all", "full"), ("kfac", "all", "kron"), ("last_layer", "last_layer", "full")],
)
def test_a_baseline_has_the_variance_that_laplace_torch_reports(
    name: str, subset: str, structure: str, index: int
) -> None:
    model, loader, x = problem()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(copy.deepcopy(model), "classification", subset_of_weights=subset, hessian_structure=structure)
        la.fit(loader)
        la.prior_precision = float(GRID[index])
        expected = la._glm_predictive_distribution(x)[1]
    tolerance = 1e-5  # laplace-torch inverts with a jitter, and KFAC's covariances are kept in float32
    torch.testing.assert_close(covariance_of(name, model, loader, x, index), expected, rtol=tolerance, atol=tolerance)


def test_ella_has_the_variance_that_laplace_torch_reports() -> None:
    model, loader, x = problem()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = ELLA(copy.deepcopy(model), "classification", 25, 6, prior_precision=30.0, seed=0)
        la.fit(loader)
        expected = la._glm_predictive_distribution(x)[1]
    torch.testing.assert_close(covariance_of("ella", model, loader, x, 2), expected, rtol=1e-8, atol=1e-10)


def test_the_subset_of_data_has_the_variance_that_laplace_torch_reports() -> None:
    model, loader, x = problem()
    chosen = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:7].tolist()  # as SubsetOfData chooses
    subset = DataLoader(Subset(loader.dataset, chosen), batch_size=7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = FunctionalLaplace(copy.deepcopy(model), "classification", 7, prior_precision=30.0, backend=CurvlinopsGGN)
        la.fit(subset)
        expected = la._glm_predictive_distribution(x)[1]
    torch.testing.assert_close(covariance_of("sod", model, loader, x, 2), expected, rtol=1e-6, atol=1e-9)


def theirs_of(ours: VariationalPosterior, model: nn.Module, loader: DataLoader, precision: float) -> VaLLA:
    """laplace-torch's VaLLA with the parameters of ours."""
    classes = ours.one_hot.argmax(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = ours.inputs.detach()
        la = VaLLA(copy.deepcopy(model), "classification", start, inducing_classes=classes, backend=CurvlinopsGGN)
        la.fit(loader, iterations=1, lr=1e-30)  # tells it how much data there are
    rows, columns = torch.tril_indices(len(classes), len(classes))
    la.L.data = ours.lower.detach()[rows, columns].clone()
    la.inducing_locations.data = ours.inputs.detach().clone()
    la.log_prior_precision.data = torch.tensor([precision], dtype=torch.float64).log()
    return la


def test_valla_has_the_variance_that_laplace_torch_reports_and_minimises_its_objective() -> None:
    model, loader, x = problem()
    ours = fit_valla(Jacobian(model), loader, num_inducing=5, num_steps=3, batch_size=16, seed=0)  # as Valla does
    theirs = theirs_of(ours, model, loader, 30.0)
    expected = theirs._glm_predictive_distribution(x)[1]
    torch.testing.assert_close(covariance_of("valla", model, loader, x, 2), expected, rtol=1e-6, atol=1e-9)
    x, y = next(iter(loader))
    theirs.log_prior_precision.data = ours.log_precision.detach().reshape(1)
    torch.testing.assert_close(ours.objective(rows_at(model, x), y, 40), theirs._objective(x, y))


def test_valla_lowers_its_objective() -> None:
    model, loader, _ = problem()
    X, y = loader.dataset.tensors  # type: ignore[attr-defined]

    def objective(num_steps: int) -> float:
        found = fit_valla(Jacobian(model), loader, num_inducing=5, num_steps=num_steps, batch_size=20, seed=0)
        return float(found.objective(rows_at(model, X), y, len(y)).detach())

    assert objective(60) < objective(0) - 0.1


def test_a_stopwatch_sees_memory_that_was_given_back() -> None:
    if reset_peak() is None:
        pytest.skip("the peak of memory is known on Linux only")
    watch, size = Stopwatch(), 64 * 2**20
    for _ in range(2):  # the second time the block would come from what the C library keeps
        with watch("fit", memory=True):
            torch.ones(size // 4).sum()
        assert 0.9 * size < watch.peak_bytes.pop("fit") < 1.5 * size
    assert watch.seconds["fit"] > 0


def test_the_peak_of_the_whole_process_outlives_a_stopwatch() -> None:
    if reset_peak() is None:
        pytest.skip("the peak of memory is known on Linux only")
    torch.ones(2**24).sum()
    before = highest_bytes()
    with Stopwatch()("fit", memory=True):
        pass
    assert highest_bytes() >= before > peak_resident_bytes()


def test_the_prior_alone_is_the_kernel_over_the_precision() -> None:
    model, loader, x = problem()
    J = rows_at(model, x).jacobian
    torch.testing.assert_close(covariance_of("prior", model, loader, x, 2), J @ J.mT / 30)


def test_a_network_that_is_too_large_for_the_truth_is_said_to_be() -> None:
    model, loader, _ = problem()
    with pytest.raises(Unavailable, match="51 weights are more than"):
        Exact(model, loader, EvaluateConfig(exact_limit=50), 0, GRID)


def test_fitting_a_baseline_leaves_the_model_without_hooks() -> None:
    model, loader, _ = problem()
    for kind in (LastLayer, Kfac, SubsetOfData):
        kind(model, loader, SETTINGS, 0, GRID)
    assert all(not m._forward_hooks and not m._backward_hooks for m in model.modules())
    assert not any(p.grad is not None for p in model.parameters())


def test_no_fold_is_scored_with_what_it_was_tuned_on() -> None:
    first, second = folds("crossfit", 11, validation_size=3, seed=0)
    assert torch.equal(first[0], second[1]) and torch.equal(first[1], second[0])
    assert sorted([*first[1].tolist(), *second[1].tolist()]) == list(range(11))
    ((tune, score),) = folds("validation", 11, validation_size=3, seed=0)
    assert len(tune) == 3 and sorted([*tune.tolist(), *score.tolist()]) == list(range(11))
    ((tune, score),) = folds("none", 11, validation_size=3, seed=0)
    assert len(tune) == 0 and len(score) == 11
    assert [len(folds("validation", n, validation_size=None, seed=0)[0][0]) for n in (450, 5000)] == [225, 1000]
    with pytest.raises(ValueError, match="at least two inputs fewer than the 3 of the test set; got 2"):
        folds("validation", 3, validation_size=2, seed=0)
    with pytest.raises(ValueError, match="at least two test inputs; got 1"):
        folds("crossfit", 1, validation_size=None, seed=0)


def test_crossfitting_finds_the_best_temperature_of_each_half() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(400, 3, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((logits / 2.5).softmax(1), 1, generator=generator)[:, 0]
    family = Tempered(logits, torch.logspace(-1, 1, 41, dtype=torch.float64))
    both = folds("crossfit", 400, validation_size=1, seed=0)
    tuned = crossfit(family, labels, both, "quadrature")
    assert tuned.scored.tolist() == list(range(400)) and not tuned.at_edge
    for (tune, score), index in zip(both, tuned.indices, strict=True):
        losses = [float(nll_of(family.probabilities(i, tune, ""), labels[tune]).mean()) for i in range(41)]
        assert index == min(range(41), key=lambda i: losses[i])
        torch.testing.assert_close(tuned.probabilities[score], family.probabilities(index, score, ""))
    flipped = labels.clone()
    flipped[both[0][1]] = (labels[both[0][1]] + 1) % 3  # the labels of a fold say nothing about its own temperature
    assert crossfit(family, flipped, both, "quadrature").indices[0] == tuned.indices[0]


def test_an_optimum_at_the_end_of_the_grid_is_reported() -> None:
    logits, labels = 20 * torch.eye(3, dtype=torch.float64).repeat(20, 1), torch.arange(60) % 3
    family = Tempered(logits, torch.logspace(0, 1, 5, dtype=torch.float64))
    assert crossfit(family, labels, folds("crossfit", 60, validation_size=1, seed=0), "quadrature").at_edge


def test_the_quadrature_agrees_with_plain_sampling_and_adds_up_to_one() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(4, 3, 3, generator=generator, dtype=torch.float64)
    mean, covariance = torch.randn(4, 3, generator=generator, dtype=torch.float64), root @ root.mT
    draws = mean[:, None] + torch.randn(4, 200_000, 3, generator=generator, dtype=torch.float64) @ root.mT
    p = class_probabilities(mean, covariance, link="quadrature", num_samples=2048)
    torch.testing.assert_close(p, draws.softmax(2).mean(1), atol=5e-3, rtol=0)
    torch.testing.assert_close(p.sum(1), torch.ones(4, dtype=torch.float64))
    within = entropy(draws.softmax(2).flatten(0, 1)).reshape(4, -1).mean(1)
    doubt = mutual_information(mean, covariance, num_samples=2048)
    torch.testing.assert_close(doubt, entropy(p) - within, atol=5e-3, rtol=0)
    assert float(mutual_information(mean, 0 * covariance, num_samples=64).max()) < 1e-12


def test_ood_scores_agree_with_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    test, other = torch.randn(300, generator=generator), 1 + torch.randn(200, generator=generator)
    test, other = test.round(decimals=1), other.round(decimals=1)  # with ties
    truth, scores = [0] * 300 + [1] * 200, torch.cat([test, other]).tolist()
    found = ood_metrics(test, other)
    assert found.auroc == pytest.approx(roc_auc_score(truth, scores), abs=1e-6)
    assert found.aupr == pytest.approx(average_precision_score(truth, scores), abs=1e-5)
    threshold = test.sort().values[284]  # 285 of 300 pass
    assert found.fpr95 == pytest.approx(float((other <= threshold).float().mean()), abs=1e-6)
    x, y = roc_curve(test, other)
    assert float(torch.trapezoid(y, x)) == pytest.approx(found.auroc, abs=1e-6)
    with pytest.raises(ValueError, match="other_scores must be at least one finite number"):
        ood_metrics(test, torch.tensor([float("nan")]))


def test_the_risk_curve_starts_with_the_surest_and_ends_with_the_error() -> None:
    share, risk = risk_curve(torch.tensor([0.9, 0.5, 0.7, 0.6]), torch.tensor([False, True, True, False]))
    assert share.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])


def test_a_bootstrap_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator, inside = torch.Generator().manual_seed(0), 0
    for trial in range(200):
        a, b = torch.randn(60, generator=generator), 0.3 + torch.randn(60, generator=generator)
        found = bootstrap_difference(a, b, num_resamples=400, seed=trial)
        assert found.lower <= found.mean <= found.upper
        inside += found.lower <= 0.3 <= found.upper
    assert 0.88 <= inside / 200 <= 0.99
    assert bootstrap_difference(torch.zeros(5), torch.ones(5)).is_clear
    with pytest.raises(ValueError, match="at least two inputs"):
        bootstrap_difference(torch.zeros(1), torch.ones(1))


def test_regression_scores_of_the_true_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, variance = torch.randn(5000, generator=generator), 0.5 + torch.rand(5000, generator=generator)
    targets = mean + variance.sqrt() * torch.randn(5000, generator=generator)
    found = regression_metrics(mean, variance, targets)
    assert all(share == pytest.approx(level, abs=0.02) for level, share in found.coverage.items())
    normal = torch.distributions.Normal(mean.double(), variance.double().sqrt())
    assert found.nll == pytest.approx(float(-normal.log_prob(targets.double()).mean()), rel=1e-6)
    assert found.rmse == pytest.approx(float((targets - mean).square().mean().sqrt()), rel=1e-5)
    with pytest.raises(ValueError, match="positive"):
        regression_metrics(mean, 0 * variance, targets)


def test_the_calibrated_row_is_tuned_as_a_fit_is_on_the_other_half() -> None:
    model, loader, _ = problem()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 4, dtype=torch.float64, generator=generator), torch.arange(60) % 3
    data = Data(loader.dataset, TensorDataset(x, y), Scaling((0.0,), (1.0,)), ("a", "b", "c"), (4,), {})
    config = RunConfig(evaluate=EvaluateConfig(baselines=("temperature",)))
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=20)
    la.fit(loader)
    found = compare_network(la, model, data, config, lambda line: None)
    own = found["calibrated"]
    assert [result.label for result in found.results] == ["temperature scaling", "IterNCGP", "IterNCGP, calibrated"]
    places = {int(n): place for place, n in enumerate(found.scored)}
    for (tune, score), T, precision in zip(folds_of(config, 60), own.output_temperatures, own.values, strict=True):
        chosen = la.calibrate(DataLoader(TensorDataset(x[tune], y[tune]), batch_size=30))
        assert (T, precision) == pytest.approx((chosen.output_temperature, chosen.prior_precision), rel=1e-4)
        p = la(x[score], link_approx="quadrature", n_samples=config.evaluate.link_samples)
        assert torch.allclose(own.probabilities[[places[int(n)] for n in score]], p, atol=1e-4)
    assert own.difference is not None and own.probit is None
    assert "IterNCGP, calibrated and temperature scaling" in " ".join(verdict(found.results)).replace(
        "has a lower NLL than", "and"
    ).replace("has a higher NLL than", "and")
    assert " T 1" not in _tuned_to(found["iterncgp"]) and _tuned_to(own).count("T ") == 2


@pytest.mark.parametrize("protocol", ["none", "crossfit"])
def test_without_data_to_calibrate_on_the_pair_of_the_fit_is_scored(protocol: str) -> None:
    model, loader, _ = problem()
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 3  # halves of fifteen
    data = Data(loader.dataset, TensorDataset(x, y), Scaling((0.0,), (1.0,)), ("a", "b", "c"), (4,), {})
    config = RunConfig(evaluate=EvaluateConfig(baselines=("map",)), tuning=TuningConfig(protocol=protocol))
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=20, prior_precision=3.0)
    la.fit(loader)
    la.output_temperature = 1.3
    own = compare_network(la, model, data, config, lambda line: None)["calibrated"]
    assert set(own.output_temperatures) == {1.3} and set(own.values) == {3.0}


def test_detection_by_the_margin_is_the_flavours_own_at_the_precision_of_the_evidence() -> None:
    model, loader, _ = problem()
    test = TensorDataset(torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 3)
    far = TensorDataset(3 * torch.randn(20, 4, dtype=torch.float64), torch.zeros(20, dtype=torch.long))
    data = Data(loader.dataset, test, Scaling((0.0,), (1.0,)), ("a", "b", "c"), (4,), {"far": far})
    config = RunConfig(evaluate=EvaluateConfig(baselines=("map", "prior")))
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=20, prior_precision=3.0)
    la.fit(loader)
    found = compare_network(la, model, data, config, lambda line: None)
    assert float(la.prior_precision) == 3.0  # left as it was
    bounds = [float(la.log_marginal_likelihood(prior_precision=value.reshape(1))) for value in precision_grid(config)]
    best = precision_grid(config)[int(torch.tensor(bounds).argmax())]
    assert found.evidence_precision == float(best)
    la.prior_precision = float(best)
    margins = [la.uncertainty(part.tensors[0]).margin_variance for part in (test, far)]
    margin = found["iterncgp"].ood["far"].by_margin
    assert margin is not None and margin == ood_metrics(*margins)
    assert found["prior"].ood["far"].by_margin != margin
    assert found["map"].ood["far"].by_margin is None


def test_a_handful_of_test_inputs_settles_nothing() -> None:
    clear = Difference(0.5, 0.4, 0.6)
    few, many = (
        SimpleNamespace(name="map", label="the network", losses=torch.zeros(n), difference=clear) for n in (19, 20)
    )
    assert verdict([few]) == ["19 test inputs are too few to tell IterNCGP from the network by NLL."]
    assert verdict([many]) == [
        "IterNCGP has a lower NLL than the network, beyond chance: difference [+0.4000, +0.6000]."
    ]


def test_what_is_within_chance_is_said_once() -> None:
    within, clear = Difference(0.1, -0.4, 0.6), Difference(-0.5, -0.6, -0.4)
    labels = {"map": "the network", "temperature": "a temperature", "prior": "the prior"}
    results = [
        SimpleNamespace(name=name, label=label, losses=torch.zeros(30), difference=clear if name == "map" else within)
        for name, label in labels.items()
    ]
    assert verdict(results) == [
        "IterNCGP has a higher NLL than the network, beyond chance: difference [-0.6000, -0.4000].",
        "Differences in NLL within chance: IterNCGP and a temperature [-0.4000, +0.6000]; IterNCGP and the prior "
        "[-0.4000, +0.6000].",
    ]

"""What the trace for the meter costs, and how good it is where it is estimated; and what an estimate of costs costs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp import likelihoods
from ntk_iterncgp.data.fixed_order import FixedOrderData
from ntk_iterncgp.fitting import cluster_run, timing
from ntk_iterncgp.jacobian import rows as rows_of_prior
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.likelihoods.base import CurvatureAt
from ntk_iterncgp.priors import ntk
from ntk_iterncgp.priors.ntk import NTKPrior
from tests import oracles
from tests.clusters_helpers import digits, make_net
from tests.network_cases import dense_jacobian, outputs_of

CPU = torch.device("cpu")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any network is a large one."""
    monkeypatch.setattr(rows_of_prior, "FEW_NUMBERS", 0)


def wide_net(num_outputs: int = 10, width: int = 5000) -> nn.Module:
    """Rows of eight data are more numbers than a small network has."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(60, width), nn.ReLU(), nn.Linear(width, num_outputs))


def loader_of(num_data: int, num_outputs: int = 10, batch_size: int = 32) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(num_data, 60, generator=generator), torch.arange(num_data) % num_outputs
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


# Probes


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("in_order", [False, True], ids=["visited", "in order"])
def test_the_probed_diagonal_is_unbiased_weight_by_weight(likelihood: str, in_order: bool, large: None) -> None:
    net = make_net(3, likelihood=likelihood, num_data=12, num_outputs=4)
    outputs = outputs_of(net.model, net.x)
    family = likelihoods.Softmax(4) if likelihood == "classification" else likelihoods.Gaussian(0.36, num_outputs=4)
    curvature, J = CurvatureAt(family, outputs), dense_jacobian(net.model, net.x).flatten(0, 1)
    data = FixedOrderData(list(net.loader()) if in_order else net.loader(), device=CPU)
    jacobian, draws = Jacobian(net.model), []
    prior = NTKPrior(jacobian, data, outputs, torch.ones(jacobian.num_params), num_calls=100)
    assert prior.trace == (0, 5, False) and not prior.trace_is_exact
    assert torch.equal(prior.curvature_diagonal(curvature), prior.curvature_diagonal(curvature))
    for seed in range(400):
        prior.sample_seed = seed
        draws.append(prior.curvature_diagonal(curvature))
    stacked, expected = torch.stack(draws), (J.T @ net.curvature() @ J).diagonal()
    error = stacked.std(0) / len(draws) ** 0.5
    assert bool((error > 0).any())
    assert bool(((stacked.mean(0) - expected).abs() <= 5 * error + 1e-12 * expected.max()).all())


@pytest.mark.slow
def test_ten_probes_know_the_trace_of_digits_to_a_quarter(large: None) -> None:
    errors = []
    for seed in range(3):
        net = digits(seed)
        jacobian, data = Jacobian(net.model), FixedOrderData(net.loader(), device=CPU)
        with torch.no_grad():
            outputs = net.model(net.x)
        prior = NTKPrior(jacobian, data, outputs, torch.ones(jacobian.num_params), num_calls=200)
        assert prior.trace.num_probes == 10
        for sample in range(10):
            prior.sample_seed = sample
            found = prior.curvature_trace(CurvatureAt(likelihoods.Softmax(10), outputs.double()))
            errors.append(found / net.curvature_trace - 1)
    assert max(map(abs, errors)) < 0.25 and torch.tensor(errors).square().mean().sqrt() < 0.12


@pytest.mark.parametrize("policy", ["clusters", "curvature_residual"])
def test_a_probed_meter_says_that_it_is_an_estimate(policy: str, large: None) -> None:
    net = make_net(1, num_data=40)
    la = net.laplace(policy=policy, num_actions=10)
    la.fit(net.loader())
    assert not la.report_.trace_is_exact and "an estimated" in str(la.report_)
    assert 0 < la.report_.information_captured <= 1


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_the_root_of_the_softmax_curvature_is_one_and_sums_to_zero(scale: float) -> None:
    """Also of decided data, where 1 − π is rounding; relative to the size of each W."""
    latent = scale * torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    softmax, eye = likelihoods.Softmax(5).for_prior_variance(1e20), torch.eye(5, dtype=torch.float64).expand(20, 5, 5)
    root, W = softmax.curvature_root(latent, eye), softmax.curvature(latent, eye)
    size = W.diagonal(dim1=1, dim2=2).sum(1)
    assert float(((root @ root.mT - W).abs().amax((1, 2)) / size).max()) < 1e-12
    torch.testing.assert_close(softmax.curvature_traces(latent), size, rtol=1e-12, atol=0)
    assert float((root.sum(1).abs() / root.abs().amax(1)).max()) < 1e-14


@pytest.mark.parametrize(
    "likelihood", [likelihoods.Bernoulli(), likelihoods.Poisson(), likelihoods.Gaussian(0.3, num_outputs=3)], ids=repr
)
def test_the_root_of_any_curvature_is_one(likelihood: likelihoods.Likelihood) -> None:
    C = likelihood.num_outputs
    latent = torch.randn(6, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    eye = torch.eye(C, dtype=torch.float64).expand(6, C, C)
    root, W = likelihood.curvature_root(latent, eye), likelihood.curvature(latent, eye)
    torch.testing.assert_close(root @ root.mT, W)
    torch.testing.assert_close(likelihood.curvature_traces(latent), W.diagonal(dim1=1, dim2=2).sum(1))


# What they cost


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Passes with derivatives, and data of which all rows are computed; in all, and those of them for the trace."""
    counts, inside = {"passes": 0, "rows": 0, "passes of trace": 0, "rows of trace": 0}, [False]

    def wrapped(kind: str, number: Any, original: Any) -> Any:
        def call(self: Any, *arguments: Any, **settings: Any) -> Any:
            counts[kind] += number(*arguments)
            counts[f"{kind} of trace"] += inside[0] * number(*arguments)
            return original(self, *arguments, **settings)

        return call

    def diagonal(*arguments: Any, **settings: Any) -> Tensor:
        inside[0] = True
        try:
            return original(*arguments, **settings)
        finally:
            inside[0] = False

    original = rows_of_prior.curvature_diagonal
    with monkeypatch.context() as patch:
        patch.setattr(Jacobian, "vjp", wrapped("passes", lambda x, v: v.shape[2], Jacobian.vjp))
        patch.setattr(Jacobian, "jvp", wrapped("passes", lambda x, v: v.shape[1], Jacobian.jvp))
        patch.setattr(Jacobian, "rows", wrapped("rows", lambda x, number, *_: number, Jacobian.rows))
        for room in (cluster_run, ntk):
            patch.setattr(room, "curvature_diagonal", diagonal)
        yield counts


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "num_actions"), [("clusters", 10), ("clusters", 40), ("curvature_residual", 10)])
def test_the_trace_of_a_large_network_takes_a_twentieth_of_the_backward_passes(
    policy: str, num_actions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few data too, where all rows of J took most of a fit."""
    for num_data in (32, 320):
        la = Laplace(wide_net(), "classification", "all", "iterncgp", policy=policy, num_actions=num_actions)
        with counted(monkeypatch) as counts:
            la.fit(loader_of(num_data))
        assert counts["rows of trace"] == 0
        assert 1 <= counts["passes of trace"] <= max(1, 0.05 * counts["passes"])
        assert counts["rows"] <= 2 * max(1, 0.05 * num_data / 7), "nor do the checks"


def test_a_small_network_has_an_exact_trace_from_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net(0, num_data=40)
    la = net.laplace(num_actions=10)
    with counted(monkeypatch) as counts:
        la.fit(net.loader())
    assert la.report_.trace_is_exact and counts["rows of trace"] == 40
    J = dense_jacobian(net.model, net.x).flatten(0, 1)
    W = oracles.curvature_matrix("softmax", outputs_of(net.model, net.x))
    assert float(la.posterior.curvature_diagonal.sum()) == pytest.approx(float((J.T @ W @ J).trace()), rel=1e-10)


def test_a_fit_of_a_thousand_classes_does_not_differentiate_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    la = Laplace(wide_net(1000, 100), "classification", "all", "iterncgp", num_actions=10, chunk_bytes=2**26)
    with counting_gradients(monkeypatch) as gradients:
        la.fit(loader_of(40, 1000))
    assert la.report_.rank == 10 and gradients[0] < 150


# The estimate of costs


@contextmanager
def counting_gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    count, original = [0], torch.autograd.grad

    def grad(*arguments: Any, **settings: Any) -> Any:
        count[0] += 1
        return original(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", grad)
        yield count


@pytest.mark.parametrize("policy", ["clusters", "curvature_residual"])
def test_an_estimate_of_a_thousand_classes_differentiates_a_few_outputs(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for num_outputs in (4, 1000):
        la = Laplace(wide_net(num_outputs, 20), "classification", "all", "iterncgp", policy=policy, num_actions=5)
        with counting_gradients(monkeypatch) as gradients:
            found[num_outputs] = la.estimate_cost(loader_of(40, num_outputs))
        assert gradients[0] < 100
    assert found[1000].predict_seconds > 50 * found[4].predict_seconds


def test_rows_of_many_outputs_are_proven_and_their_memory_is_counted_by_a_few() -> None:
    model, x = wide_net(30, 40), torch.randn(3, 60)
    jacobian = Jacobian(model)
    jacobian.prepare(x, 3)
    with torch.no_grad():
        rows = jacobian.rows(x[:2], 2)
        assert type(rows).__name__ == "LayerRows"
        assert jacobian.bytes_per_row(30) == pytest.approx(4 * rows.num_numbers / 2, rel=0.01)


@pytest.mark.slow
def test_the_estimate_counts_the_trace_and_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backward pass takes a second, and so do the rows at a datum: as many as a fit makes."""
    monkeypatch.setattr(timing, "seconds_of", lambda work: 0.0)
    monkeypatch.setattr(timing, "seconds_by_size", lambda work, largest: lambda size: 1.0)
    no_products = timing.Products(10, 0.0, 0.0)
    seconds = timing.RowSeconds(100.0 / timing.row_epochs(10), no_products, no_products)
    monkeypatch.setattr(timing, "row_seconds", lambda *whatever: seconds)
    la = Laplace(wide_net(), "classification", "all", "iterncgp", num_actions=40)
    told = la.estimate_cost(loader_of(320)).fit_seconds
    with counted(monkeypatch) as counts:
        la.fit(loader_of(320))
    swept = 320 / 32 / 3 + counts["passes"] - counts["passes of trace"]
    checked = 100.0 * counts["rows"]  # for the adjoint, and for variances
    assert told == pytest.approx(swept + counts["passes of trace"] + checked, rel=0.1)


def test_the_proof_of_rows_by_layers_makes_three_forward_passes() -> None:
    """Every start of a fit makes them again."""
    model, passed = wide_net(30, 40), list[int]()
    model.register_forward_pre_hook(lambda module, inputs: passed.append(len(inputs[0])))
    Jacobian(model).prepare(torch.randn(64, 60), 64)
    assert passed == [2, 2, 2]


class Clock:
    """Time that passes with work alone: for each call and for each datum."""

    def __init__(self, each_call: float, each_datum: float) -> None:
        self.now, self.sizes, self.costs = 0.0, list[int](), (each_call, each_datum)

    def perf_counter(self) -> float:
        return self.now

    def work(self, size: int) -> None:
        self.sizes.append(size)
        self.now += self.costs[0] + self.costs[1] * size


@pytest.mark.parametrize("each_call", [1e-4, 0.01, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("each_datum", [1e-6, 1e-3, 0.1, 1.0, 10.0])
def test_a_line_through_times_costs_its_patience_or_three_data(
    each_call: float, each_datum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(each_call, each_datum)
    monkeypatch.setattr(timing, "time", clock)
    line = timing.seconds_by_size(clock.work, 512)
    one = each_call + each_datum
    assert clock.now <= timing.PATIENCE + 4 * one and len(clock.sizes) <= 2 * 6
    if one <= 2 * timing.PATIENCE:  # two sizes at least
        assert [line(size) for size in (1, 2, 512)] == pytest.approx([each_call + n * each_datum for n in (1, 2, 512)])


@pytest.mark.slow
@pytest.mark.parametrize("num_outputs", [4, 1000])
@pytest.mark.parametrize("seconds", [1e-3, 0.2, 5.0], ids=["quick", "slow", "very slow"])
def test_an_estimate_makes_a_bounded_number_of_passes(
    num_outputs: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counts, with a clock that goes on with every datum that is differentiated."""
    clock, passed = Clock(0.0, seconds), list[int]()
    monkeypatch.setattr(timing, "time", clock)
    model = wide_net(num_outputs, 20)
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=5)

    def seen(module: nn.Module, inputs: tuple[Tensor]) -> None:
        passed.append(len(inputs[0]))
        clock.work(len(inputs[0]))

    la.model.register_forward_pre_hook(seen)
    with counting_gradients(monkeypatch) as gradients:
        la.estimate_cost(loader_of(320, num_outputs))
    beside = 3 * 32 + 1 + 3 * timing.TIMED_DATA  # the first batch, and what proves rows by layers
    timed = sum(passed) - beside
    assert timed * seconds <= 3 * timing.PATIENCE + 12 * seconds
    assert len(passed) <= 40 and gradients[0] <= 60

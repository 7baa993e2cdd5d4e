"""Ordinary tasks in float32: regression with little noise, weak priors, several outputs. Dense truth in float64.

All of them are small enough for policy="auto" to be exact, so actions are asked for by name: policy="clusters", unless
a test says otherwise. `linearised_truth` writes the posterior out by a singular value decomposition, which loses
nothing where a variance is 1e-12 of the prior's.
"""

from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laplace import Laplace
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from tests import oracles
from tests.clusters_helpers import in_groups


@dataclass(frozen=True)
class Task:
    model: nn.Module
    x: Tensor
    y: Tensor
    new: Tensor
    classification: bool
    subset: str = "all"

    def loader(self, dtype: torch.dtype) -> DataLoader:
        y = self.y if self.classification else self.y.to(dtype)
        return DataLoader(TensorDataset(self.x.to(dtype), y), batch_size=32)

    def laplace(self, model_dtype: torch.dtype, **settings: Any) -> Any:
        likelihood = "classification" if self.classification else "regression"
        settings = {**in_groups(settings), **settings}
        return Laplace(deepcopy(self.model).to(model_dtype), likelihood, self.subset, "iterncgp", **settings)


def jacobian(model: nn.Module, x: Tensor, subset: str = "all") -> tuple[Tensor, Tensor]:  # (N, C, P), (N, C)
    exact = deepcopy(model).double()
    params = {name: value.detach() for name, value in exact.named_parameters()}
    if subset == "last_layer":
        params = dict(list(params.items())[-2:])  # its weight and its bias
    J = jacrev(lambda p: functional_call(exact, p, (x.double(),)))(params)
    return torch.cat([J[name].flatten(2) for name in params], 2).detach(), exact(x.double()).detach()


def linearised_truth(task: Task, precision: float, sigma: float) -> tuple[Tensor, float]:
    """Exact variances (b, C) at new inputs, and log|I + W^{1/2} K W^{1/2}|."""
    (J, f), (new_J, _) = (jacobian(task.model, x, task.subset) for x in (task.x, task.new))
    root = oracles.curvature_root("softmax" if task.classification else "gaussian", f, sigma**2)
    scaled = root.T @ J.flatten(0, 1) / precision**0.5
    _, values, vectors = torch.linalg.svd(scaled, full_matrices=len(scaled) < scaled.shape[1])  # all right vectors
    gains = torch.zeros(len(vectors), dtype=torch.float64)
    gains[: len(values)] = values.square()
    z = new_J @ vectors.T / precision**0.5
    return (z.square() / (1 + gains)).sum(2), float(gains.log1p().sum())


def variances(la: Any, x: Tensor) -> Tensor:  # (b, C)
    return la.predictive_moments(x)[1].diagonal(dim1=1, dim2=2).double()


def bounds(la: Any) -> tuple[float, float]:
    lower, upper = la.posterior.log_determinant_bounds(la.prior_precision, la._noise_scale)
    return float(lower), float(upper)


@st.composite
def tasks(draw: st.DrawFn, subset: str = "all") -> tuple[Task, dict[str, float], int]:
    """Networks, priors from 1e-4 to 1e4, noise from 0.01 to 3, confident classifiers; and a number of actions."""
    classification = draw(st.booleans())
    outputs = draw(st.integers(2, 4) if classification else st.integers(1, 3))
    features, width = draw(st.integers(1, 6)), draw(st.sampled_from([4, 12, 30]))
    act, depth = draw(st.sampled_from([nn.Tanh, nn.ReLU])), draw(st.integers(subset == "last_layer", 2))
    torch.manual_seed(draw(st.integers(0, 10_000)))
    sizes = [features, *[width] * depth, outputs]
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), act()]
    model = nn.Sequential(*layers[:-1])
    if classification:
        with torch.no_grad():
            model[-1].weight *= draw(st.sampled_from([1.0, 5.0, 20.0]))
    num_data = draw(st.sampled_from([20, 60, 150]))
    x, new = torch.randn(num_data, features), 2 * torch.randn(25, features)
    y = torch.randint(outputs, (num_data,)) if classification else torch.randn(num_data, outputs)
    hyper = {"prior_precision": 10 ** draw(st.floats(-4, 4))}
    if not classification:
        hyper["sigma_noise"] = 10 ** draw(st.floats(-2, 0.5))
    return Task(model, x, y, new, classification, subset), hyper, draw(st.sampled_from([10, 40, 200]))


SAME_ACTIONS = [("all", "clusters"), ("last_layer", "clusters"), ("all", "curvature_residual")]


@pytest.mark.slow
@pytest.mark.parametrize(("subset", "policy"), SAME_ACTIONS)
@settings(max_examples=15)
@given(data=st.data())
def test_float32_is_as_good_as_float64_and_both_are_bounds(subset: str, policy: str, data: st.DataObject) -> None:
    task, hyper, num_actions = data.draw(tasks(subset))
    exact, log_determinant = linearised_truth(task, hyper["prior_precision"], hyper.get("sigma_noise", 1.0))
    found: dict[torch.dtype, list[tuple[Tensor, float]]] = {}
    for dtype in (torch.float32, torch.float64):
        la = task.laplace(dtype, num_actions=num_actions, policy=policy, **hyper)
        loader, x = task.loader(dtype), task.new.to(dtype)
        la.fit(loader)
        steps = []
        for epochs in (2, 2, None):
            steps.append((variances(la, x), float(la.log_marginal_likelihood())))
            slack = 1e-4 * (1 + log_determinant)
            lower, upper = bounds(la)
            assert lower <= log_determinant + slack and upper >= log_determinant - slack
            assert bool((steps[-1][0] >= (1 - 1e-3) * exact).all()) and bool((steps[-1][0] >= 0).all())
            if len(steps) > 1:
                assert bool((steps[-1][0] <= (1 + 1e-5) * steps[-2][0]).all())
            if epochs is not None:
                la.refine(loader, epochs=epochs)
        found[dtype] = steps
    for (variance, evidence), (wide, wide_evidence) in zip(*found.values(), strict=True):
        assert float((variance / wide - 1).abs().max()) <= 0.02
        assert abs(evidence - wide_evidence) <= 0.5 + 0.01 * abs(wide_evidence)


@pytest.mark.slow
@pytest.mark.parametrize(("subset", "policy"), [*SAME_ACTIONS, ("last_layer", "curvature_residual")])
@settings(max_examples=10)
@given(data=st.data())
def test_the_guarantee_holds_with_derivatives_in_float32(subset: str, policy: str, data: st.DataObject) -> None:
    """As for networks too large for derivatives in float64. By products the actions are others than in float64: the
    variance of the last layer has been 500 times that of the same fit in float64, but never below the exact one."""
    task, hyper, num_actions = data.draw(tasks(subset))
    exact, log_determinant = linearised_truth(task, hyper["prior_precision"], hyper.get("sigma_noise", 1.0))
    la = task.laplace(torch.float32, num_actions=num_actions, policy=policy, dtype=torch.float32, **hyper)
    loader = task.loader(torch.float32)
    la.fit(loader)
    before = torch.full_like(exact, torch.inf)
    for _ in range(3):
        assert la.posterior.images.dtype == torch.float32
        variance = variances(la, task.new)
        assert bool((variance >= (1 - 2e-3) * exact).all()) and bool((variance <= (1 + 1e-5) * before).all())
        before = variance
        lower, upper = bounds(la)
        assert lower <= 1.001 * log_determinant + 1e-3 and upper >= 0.999 * log_determinant - 1e-3
        la.refine(loader, epochs=2)


def regression_net(num_outputs: int, scales: Tensor, width: int = 16) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, num_outputs))
    with torch.no_grad():
        model[2].weight *= scales[:, None]
    x, new = torch.randn(500, 4), torch.randn(100, 4)
    return Task(model, x, torch.randn(500, num_outputs), new, classification=False)


@pytest.mark.parametrize(
    ("num_outputs", "spread", "most"),
    [(1, 0, 1.05), (2, 2, 1.15), (3, 0, 1.06), (3, 2, 1.15), (5, 2, 1.25), (8, 0, 1.25), (8, 2, 1.45)],
)
def test_each_output_of_a_regression_is_within_half_of_the_exact_variance(
    num_outputs: int, spread: float, most: float
) -> None:
    """Where outputs are alike, and where their Jacobians are of sizes from 10^−spread to 10^spread."""
    task = regression_net(num_outputs, 10 ** torch.linspace(-spread, spread, num_outputs))
    exact, _ = linearised_truth(task, 1.0, 0.3)
    la = task.laplace(torch.float32, sigma_noise=0.3)
    la.fit(task.loader(torch.float32))
    ratios = variances(la, task.new) / exact
    assert bool((ratios >= 1 - 1e-6).all()) and la.posterior.rank <= 200
    assert float(ratios.mean(0).max()) <= most


@pytest.mark.slow
def test_the_evidence_of_several_outputs_picks_the_precision_of_the_exact_one() -> None:
    task = regression_net(3, torch.ones(3))
    la = task.laplace(torch.float32, sigma_noise=0.3)
    la.fit(task.loader(torch.float32))
    la.optimize_prior_precision(method="marglik", prior_structure="scalar")
    grid = [10 ** (k / 10) for k in range(-20, 31)]
    squares, J = float(la.mean.double().square().sum()), jacobian(task.model, task.x)[0].flatten(0, 1)
    gains = torch.linalg.svdvals(J / 0.3).square()
    exact = max(grid, key=lambda d: -0.5 * (float((gains / d).log1p().sum()) + d * squares))
    assert 0.6 <= float(la.prior_precision) / exact <= 1.7


def test_outputs_take_turns_where_the_epochs_are_few() -> None:
    task = regression_net(4, torch.ones(4))
    la = task.laplace(torch.float32, sigma_noise=0.3, max_epochs=1.34)
    la.fit(task.loader(torch.float32))
    exact, _ = linearised_truth(task, 1.0, 0.3)
    ratios = (variances(la, task.new) / exact).mean(0)
    assert la.report_.epochs <= 1.34 and float(ratios.max()) < 10 and float(ratios.max() / ratios.min()) < 1.5


@pytest.mark.slow
def test_the_evidence_of_a_sine_curve_finds_the_same_noise_in_float32_and_float64() -> None:
    torch.manual_seed(0)
    x = 8 * torch.rand(150, 1)
    y = x.sin() + 0.3 * torch.randn(150, 1)
    model, found = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)), []
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(500):
        adam.zero_grad()
        (model(x) - y).square().mean().backward()
        adam.step()
    task = Task(model, x, y, x[:5], classification=False)
    for dtype in (torch.float32, torch.float64):
        la = task.laplace(dtype)
        la.fit(task.loader(dtype))
        logs = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
        adam = torch.optim.Adam([logs], 1e-1)
        for _ in range(100):
            adam.zero_grad()
            loss = -la.log_marginal_likelihood(logs[0].exp(), logs[1].exp())
            loss.backward()
            adam.step()
        found.append((float(logs[1].detach().exp()), float(loss.detach())))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-2) and 0.2 < found[0][0] < 0.4
    assert found[0][1] == pytest.approx(found[1][1], abs=0.1)


@pytest.mark.parametrize("precision", [1e-4, 1.0])
def test_with_all_actions_the_evidence_is_exact(precision: float) -> None:
    for seed, scale in ((0, 1.0), (1, 8.0)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 3))
        with torch.no_grad():
            model[2].weight *= scale
        x = torch.randn(40, 3)
        task = Task(model, x, torch.randint(3, (40,)), x[:3], classification=True)
        _, log_determinant = linearised_truth(task, precision, 1.0)
        la = task.laplace(torch.float64, num_actions=80, prior_precision=precision)
        loader = task.loader(torch.float64)
        la.fit(loader)
        while la.report_.status != "exhausted":
            la.refine(loader, epochs=1)
        lower, upper = bounds(la)
        assert lower == pytest.approx(log_determinant, rel=1e-6)
        assert upper == pytest.approx(log_determinant, rel=1e-6)
        assert la.report_.information_captured > 1 - 1e-5


def test_the_report_has_the_information_at_the_current_hyperparameters() -> None:
    task = regression_net(1, torch.ones(1))
    la = task.laplace(torch.float32, num_actions=20, sigma_noise=0.3)
    la.fit(task.loader(torch.float32))
    at_fit = la.report_.information_captured
    la.prior_precision = 100.0
    strong = la.report_.information_captured
    assert strong == la.posterior.information_captured(la.prior_precision, la._noise_scale) and strong > at_fit + 0.05
    la.sigma_noise = 3.0
    assert la.report_.information_captured != strong
    la.compress(5)
    assert la.report_.rank == 5 and f"{100 * la.report_.information_captured:.1f} %" in str(la.report_)


@pytest.mark.parametrize("policy", ["unit", "curvature_residual"])
def test_the_evidence_of_a_refined_classifier_is_sober_before_it_has_converged(policy: str) -> None:
    """Of decided data W⁺ is any size, and v is not yet ∇: the evidence was −5e11."""
    torch.manual_seed(1)
    x = 3 * torch.randn(40, 1)
    model = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 3))
    with torch.no_grad():
        model[2].weight *= 20
    y, found = model(x).argmax(1), []
    y[:5] = (y[:5] + 1) % 3
    task = Task(model, x, y, x[:3], classification=True)
    for dtype in (torch.float32, torch.float64):
        la = task.laplace(dtype, mean="refined", policy=policy, num_actions=10, prior_precision=1e-2)
        la.fit(task.loader(dtype))
        logits = la.predictive_moments(x.to(dtype))[0].double()
        at_mean = -float(nn.functional.cross_entropy(logits, y, reduction="sum"))
        penalty = float(la.scatter)
        assert float(la.log_likelihood) == pytest.approx(at_mean, rel=1e-3, abs=1e-3)
        found.append(float(la.log_marginal_likelihood()))
        assert found[-1] == pytest.approx(at_mean - 0.5 * (penalty + bounds(la)[1]), rel=1e-3, abs=1e-2)
    assert found[0] == pytest.approx(found[1], rel=1e-2, abs=0.5)


@pytest.mark.parametrize("policy", ["residual", "curvature_residual"])
def test_products_in_a_float32_model_find_what_they_find_in_float64(policy: str) -> None:
    """Actions after the residual has fallen amplify any difference: that of σ² in float32 became one of 10 %."""
    torch.manual_seed(40)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 5))
    task = Task(model, torch.randn(40, 3), torch.randn(40, 5), 2 * torch.randn(20, 3), classification=False)
    sigma, found = float(torch.tensor(0.2373)), []
    for dtype in (torch.float32, torch.float64):
        la = task.laplace(dtype, policy=policy, num_actions=100, sigma_noise=sigma, prior_precision=0.75)
        la.fit(task.loader(dtype))
        found.append(la.latent(task.new.to(dtype))[1].diagonal(dim1=1, dim2=2).double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)


def test_residuals_that_are_rounding_are_no_actions() -> None:
    """K of a linear layer has few eigenvalues: after six actions the mean is found, and four more were of rounding."""
    torch.manual_seed(29)
    task = Task(nn.Linear(5, 2), torch.randn(60, 5), torch.randn(60, 2), 2 * torch.randn(25, 5), classification=False)
    found = []
    for dtype in (torch.float32, torch.float64):
        la = task.laplace(
            dtype, policy="residual", mean="refined", num_actions=10, sigma_noise=0.011, prior_precision=0.14
        )
        la.fit(task.loader(dtype))
        found.append(variances(la, task.new.to(dtype)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("policy", ["random_subspace", "unit", "curvature_residual"])
def test_the_evidence_of_a_refined_regression_is_a_lower_bound_with_any_actions(policy: str) -> None:
    """What bᵀ(K + σ²I)⁻¹b has beyond the actions was left out: random ones were 320 000 nats too sure."""
    torch.manual_seed(0)
    model, sigma, precision = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 2)), 0.05, 0.01
    task = Task(model, torch.randn(60, 3), torch.randn(60, 2), torch.randn(5, 3), classification=False)
    J, f = jacobian(model, task.x)
    shift = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    b = (task.y.double() - (f - J @ shift)).flatten()  # the prior mean of the weights is 0
    flat = J.flatten(0, 1)
    K = flat @ flat.T / precision + sigma**2 * torch.eye(120, dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(torch.zeros_like(b), K).log_prob(b)
    for dtype, num_actions in ((torch.float32, 20), (torch.float32, 60), (torch.float64, 120)):
        la = task.laplace(
            dtype, mean="refined", policy=policy, num_actions=num_actions, sigma_noise=sigma, prior_precision=precision
        )
        la.fit(task.loader(dtype))
        evidence = float(la.log_marginal_likelihood())
        assert evidence <= float(exact) + 1e-4 * abs(float(exact))
        at_mean = torch.distributions.Normal(la.predictive_moments(task.x.to(dtype))[0].double(), sigma)
        assert float(la.log_likelihood) == pytest.approx(float(at_mean.log_prob(task.y).sum()), rel=1e-3)
    assert evidence >= float(exact) - 0.02 * abs(float(exact))

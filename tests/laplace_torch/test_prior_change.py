"""Another prior after the fit: followed as if fitted with it where that is possible, refused where it is not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests import oracles
from tests.laplace_helpers import MLP, ONE, SEVERAL, close, fitted, near_and_far, training, unfitted, validation
from tests.network_cases import NetworkCase, dense_jacobian, outputs_of

PRECISIONS = (1e4, 1.0, 1e-2, 1e-4)


def confident_net(
    scale: float, num_outputs: int = 5, *, num_data: int = 30, wrong: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, DataLoader]:
    """A network whose logits are up to a few times `scale`, with that many labels wrong."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, num_outputs))
        x = torch.randn(num_data, 4)
    with torch.no_grad():
        model[2].weight *= scale
        model[2].bias *= scale
        y = model(x).argmax(1)
    y[:wrong] = (y[:wrong] + 1) % num_outputs
    return model.to(dtype), DataLoader(TensorDataset(x.to(dtype), y), batch_size=16)


class Truth:
    """The exact posterior of the linearised network, in float64, for any precision."""

    def __init__(self, model: nn.Module, loader: DataLoader, new: Tensor, f: Tensor | None = None) -> None:
        x = loader.dataset.tensors[0]  # type: ignore[attr-defined]
        J = dense_jacobian(model, x).double().flatten(0, 1)
        f = outputs_of(model, x).double() if f is None else f
        root = oracles.curvature_root("softmax", f)
        self.half = root.T @ J
        self.J = dense_jacobian(model, new).double()

    def variances(self, precision: float) -> Tensor:  # (b, C)
        """By singular values: of a weak prior (Λ + JᵀWJ)⁻¹ would keep few digits."""
        _, values, V = torch.linalg.svd(self.half, full_matrices=True)
        values = torch.cat([values, values.new_zeros(len(V) - len(values))]) if len(V) > len(values) else values
        along = self.J @ V.T
        return (along.square() / (precision + values[: len(V)].square())).sum(2)

    def log_determinant(self, precision: float) -> float:
        return float(torch.linalg.svdvals(self.half).square().div(precision).log1p().sum())


# What the network's own mean follows


@pytest.mark.parametrize("scale", [20.0, 1000.0])
@pytest.mark.parametrize("policy", ["unit", "residual", "curvature_residual", "random_subspace"])
@pytest.mark.parametrize("num_actions", [20, 72])
def test_variance_never_falls_below_the_exact_posterior_of_any_precision(
    scale: float, policy: str, num_actions: int
) -> None:
    """A floor on probabilities that is right for the prior of the fit says too much under a weaker one."""
    for wrong in (0, 4):
        model, loader = confident_net(scale, num_data=18, wrong=wrong)
        x = torch.cat([torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double(), near(loader)])
        truth, settings = Truth(model, loader, x), {"policy": policy, "num_actions": num_actions}
        la = Laplace(model, "classification", "all", "iterncgp", prior_precision=1e4, **settings)
        la.fit(loader)
        for now in PRECISIONS:
            la.prior_precision = now
            found, exact = la.predictive_moments(x)[1].diagonal(dim1=1, dim2=2), truth.variances(now)
            assert float((found / exact).min()) > 1 - 1e-6
            lower, upper = map(float, la.posterior.log_determinant_bounds(la.prior_precision, la._noise_scale))
            information = truth.log_determinant(now)
            assert lower <= information * (1 + 1e-9) + 1e-9 and upper >= information * (1 - 1e-9) - 1e-6


def near(loader: DataLoader) -> Tensor:
    return loader.dataset.tensors[0][:8]  # type: ignore[attr-defined]


@pytest.mark.parametrize("scale", [20.0, 1000.0])
def test_all_units_of_a_confident_network_are_the_exact_posterior_of_any_precision(scale: float) -> None:
    """However small the probabilities are, their noise does not drown that of the others."""
    model, loader = confident_net(scale, num_data=18)
    truth = Truth(model, loader, near(loader))
    la = Laplace(model, "classification", "all", "iterncgp", policy="unit", num_actions=72, prior_precision=1.0)
    la.fit(loader)
    assert la.posterior.rank == 72
    for now in PRECISIONS:
        la.prior_precision = now
        close(la.predictive_moments(near(loader))[1].diagonal(dim1=1, dim2=2), truth.variances(now), 1e-8)


@pytest.mark.parametrize("policy", ["unit", "residual", "curvature_residual", "random_subspace"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_actions_of_the_networks_own_mean_have_unit_noise(policy: str, dtype: torch.dtype) -> None:
    """SᵀW⁺S = I to the rounding of the dtype, also where the policy has nothing left to propose."""
    eps = torch.finfo(dtype).eps
    for scale in (1.0, 100.0):
        model, loader = confident_net(scale, 10, dtype=dtype)
        la = Laplace(model, "classification", "all", "iterncgp", policy=policy, num_actions=150, prior_precision=1e-4)
        la.fit(loader)
        one = torch.eye(la.posterior.rank, dtype=torch.float64)
        assert float((la.posterior.noise_gram - one).abs().max()) < 100 * eps


# False alarms


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mean", ["network", "refined"])
@pytest.mark.parametrize("policy", ["unit", "residual", "curvature_residual"])
def test_confident_networks_raise_no_false_alarm(policy: str, mean: str, dtype: torch.dtype) -> None:
    """Weak priors, where the noise of decided data is 1e18 times that of the others."""
    for num_outputs, num_data, scale in ((2, 30, 1000.0), (5, 20, 100.0), (10, 12, 1000.0)):
        model, loader = confident_net(scale, num_outputs, num_data=num_data, dtype=dtype)
        settings = {"policy": policy, "mean": mean, "num_actions": num_data * (num_outputs - 1)}
        la = Laplace(model, "classification", "all", "iterncgp", prior_precision=1e-4, **settings)
        la.fit(loader)
        found = la.predictive_moments(near(loader))[1].double().diagonal(dim1=1, dim2=2)
        exact = Truth(model.double(), training_double(loader), near(loader).double(), la._fit.state.latent)
        tolerance = 1e-6 if dtype == torch.float64 else 1e-3
        assert float((found / exact.variances(1e-4)).min()) > 1 - tolerance


def training_double(loader: DataLoader) -> DataLoader:
    x, y = loader.dataset.tensors  # type: ignore[attr-defined]
    return DataLoader(TensorDataset(x.double(), y), batch_size=16)


# What a refined mean follows, and what it refuses

CHANGES = [
    ("prior_precision", 3.0, "1", "3"),
    ("prior_mean", 0.5, "0", "0.5"),
    ("temperature", 0.5, "1", "0.5"),
]


@pytest.mark.parametrize(("name", "value", "was", "now"), CHANGES, ids=[name for name, *_ in CHANGES])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_refined_classifier_refuses_another_prior(subset: str, name: str, value: float, was: str, now: str) -> None:
    la, x = fitted(MLP, subset, mean="refined", num_actions=8), near_and_far(MLP)
    before, own = la.predictive_moments(x), getattr(la, name)
    asked: list[Any] = [
        lambda: la(x),
        lambda: la(x, link_approx="quadrature"),
        lambda: la.predictive_moments(x, joint=True),
        lambda: la.uncertainty(x),
        lambda: la.sample(2),
        lambda: la.log_marginal_likelihood(),
        lambda: la.functional_variance(torch.ones(1, 3, la.n_params, dtype=torch.float64)),
        lambda: la.compress(3),
        lambda: la.refine(training(MLP), epochs=1),
        lambda: la.state_dict(),
    ]
    setattr(la, name, value)
    for question in asked:
        with pytest.raises(ValueError, match=rf"`{name}` must be that of the fit, {was}, .* got {now}\. Try fit"):
            question()
    setattr(la, name, own)
    for found, expected in zip(la.predictive_moments(x), before, strict=True):
        assert torch.equal(found, expected)
    setattr(la, name, value)
    la.fit(training(MLP))
    again = fitted(MLP, subset, mean="refined", num_actions=8, **{name: value})
    close(la.predictive_moments(x)[1], again.predictive_moments(x)[1], 1e-12)


def test_a_refused_question_about_the_evidence_leaves_the_precision_as_it_was() -> None:
    la = fitted(MLP, mean="refined", num_actions=8)
    expected = float(la.log_marginal_likelihood())
    with pytest.raises(ValueError, match="`prior_precision` must be that of the fit, 1, "):
        la.log_marginal_likelihood(prior_precision=torch.tensor(3.0, dtype=torch.float64))
    assert float(la.prior_precision) == 1.0 and float(la.log_marginal_likelihood()) == expected
    same = torch.ones(la.n_layers, dtype=torch.float64)  # another shape, not another prior
    assert float(la.log_marginal_likelihood(prior_precision=same)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", ["marglik", "gridsearch", "validation"])
def test_a_refined_classifier_is_not_tuned_without_refits(method: str) -> None:
    la = fitted(MLP, mean="refined", num_actions=8)
    with pytest.raises(ValueError, match=r"needs a fit for every candidate; got 'refined'\. Try to tune with mean="):
        la.optimize_prior_precision(method=method, val_loader=validation(MLP))
    assert float(la.prior_precision) == 1.0


def test_a_loaded_refined_classifier_refuses_another_prior_too(tmp_path: Path) -> None:
    la, x = fitted(MLP, mean="refined", num_actions=8, prior_precision=2.0, temperature=0.7), near_and_far(MLP)
    torch.save(la.state_dict(), tmp_path / "posterior.pt")
    other = unfitted(MLP, mean="refined", num_actions=8)
    other.load_state_dict(torch.load(tmp_path / "posterior.pt", weights_only=True))
    assert torch.equal(other.predictive_moments(x)[1], la.predictive_moments(x)[1])
    other.prior_precision = 1.0
    with pytest.raises(ValueError, match="`prior_precision` must be that of the fit, 2, "):
        other(x)


@pytest.mark.parametrize("case", [ONE, SEVERAL], ids=["one output", "several outputs"])
@pytest.mark.parametrize("num_actions", [6, 60])
def test_a_refined_regression_follows_any_prior_as_the_same_actions_would(case: NetworkCase, num_actions: int) -> None:
    """With few actions too: K S and b = y − m change as they would have in the fit."""
    settings = {"mean": "refined", "policy": "unit", "num_actions": num_actions}
    la, x = fitted(case, **settings), near_and_far(case)
    for precision, sigma, mean in ((1e-3, 0.1, 0.0), (0.1, 0.1, 0.5), (3.0, 2.0, 0.5), (1e3, 2.0, 0.0)):
        la.prior_precision, la.sigma_noise, la.prior_mean = precision, sigma, mean
        again = fitted(case, prior_precision=precision, sigma_noise=sigma, prior_mean=mean, **settings)
        for found, expected in zip(la.predictive_moments(x), again.predictive_moments(x), strict=True):
            close(found, expected, 1e-7)
        close(la.log_det_ratio, again.log_det_ratio, 1e-7)
        if num_actions == 60:  # all: with fewer, what they miss of the misfit depends on the prior, too
            close(la.log_marginal_likelihood(), again.log_marginal_likelihood(), 1e-7)

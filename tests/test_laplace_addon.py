"""The flavours of laplace-torch: equal to its full Laplace where all actions are taken, never below it elsewhere; and
what a user relies on besides: the model left alone, no stale posterior, hyperparameters and evidence without data,
saving, samples, and a sentence for everything that cannot work.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from laplace import Laplace
from laplace.baselaplace import BaseLaplace, DiagLaplace, FullLaplace, FunctionalLaplace, KronLaplace
from laplace.laplace import _all_subclasses
from laplace.lllaplace import DiagLLLaplace, FullLLLaplace, FunctionalLLLaplace, KronLLLaplace
from laplace.utils.enums import LinkApprox, PredType
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from ntk_iterncgp import FitReport, IterNCGPAllLaplace, IterNCGPLastLayerLaplace
from tests import oracles
from tests.network_cases import BY_NAME, CASES, NetworkCase, dense_jacobian, outputs_of, untouched

MLP, ONE, SEVERAL = (BY_NAME[n] for n in ("mlp", "regression with one output", "regression with several outputs"))
ENOUGH = 200  # products: more than any of these problems can use
NUM_DATA, BATCH = 14, 7

problems = pytest.mark.parametrize("case", [MLP, ONE, SEVERAL], ids=["classification", "one output", "several outputs"])
subsets = pytest.mark.parametrize("subset", ["all", "last_layer"])
# That no such warning is given is for a test of its own to say.
quiet_scalars = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning")
policies = pytest.mark.parametrize("policy", ["curvature_residual", "random_subspace"])

# The last linear layers of the cases whose outputs are those of a last linear layer.
HEADS = {
    "mlp": "2",
    "cnn with BatchNorm and in-place ReLU": "5",
    "residual net": "head",
    "transformer encoder layer": "head",
    "LayerNorm and attention": "head",
    "frozen layer": "2",
    "tied embedding": "head",
    "layer applied twice": "4",
    "embedding": "head",
    "mapping": "head",
    "mapping and outputs with logits": "head",
    "unused parameters": "body.2",
    "regression with flat outputs": "body.2",
    "regression with one output": "2",
    "regression with several outputs": "2",
}


# The dense truth


@dataclass(frozen=True)
class Dense:
    """A linearised network written out: Jacobians at the training and at new inputs, outputs, targets, weights."""

    likelihood: str
    J: Tensor  # (n, P)
    f: Tensor  # (N, C)
    y: Tensor
    weights: Tensor  # (P,)
    new_J: Tensor  # (b, C, P)
    new_f: Tensor  # (b, C)

    def log_prob(self, f: Tensor, sigma: float) -> Tensor:
        return oracles.log_prob(self.likelihood, f, self.y, noise=sigma**2)

    def curvature(self, f: Tensor, sigma: float) -> Tensor:  # (n, n)
        return oracles.curvature_matrix(self.likelihood, f, noise=sigma**2)

    def covariance(
        self, precision: Tensor | float, sigma: float = 1.0, temperature: float = 1.0, f: Tensor | None = None
    ) -> Tensor:  # (P, P)
        """(Λ + JᵀWJ)⁻¹ with W at the network's outputs, or at other latent values."""
        W = self.curvature(self.f if f is None else f, sigma) / temperature
        return oracles.weight_covariance(self.J, W, precision)

    def at_new(self, weight_covariance: Tensor) -> Tensor:  # (b, C, C)
        return self.new_J @ weight_covariance @ self.new_J.mT

    def mode(
        self, precision: Tensor, prior_mean: Tensor, sigma: float = 1.0, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Newton's method in weight space, halved until it ascends: θ that maximises

        log p(y | f* + J(θ − θ*)) / T − ½ (θ − μ₀)ᵀΛ(θ − μ₀), and the latent values (N, C) there.
        """

        def latent(theta: Tensor) -> Tensor:
            return self.f + (self.J @ (theta - self.weights)).reshape(self.f.shape)

        def objective(theta: Tensor) -> Tensor:
            penalty = (precision * (theta - prior_mean).square()).sum() / 2
            return self.log_prob(latent(theta), sigma) / temperature - penalty

        theta = prior_mean.clone()
        for _ in range(100):
            f = latent(theta)
            score = oracles.score(self.likelihood, f, self.y, noise=sigma**2) / temperature
            gradient = self.J.T @ score - precision * (theta - prior_mean)
            step = self.covariance(precision, sigma, temperature, f) @ gradient
            while not objective(theta + step) >= objective(theta) - 1e-13 * objective(theta).abs():
                step = step / 2
            theta = theta + step
            if float(step.norm()) <= 1e-13 * float(theta.norm()):
                return theta, latent(theta)
        raise RuntimeError("The oracle did not converge.")


def written_out(case: NetworkCase, subset: str = "all", *, num_data: int = NUM_DATA, x: Any = None) -> Dense:
    model = case.model().eval()
    batches = list(case.loader(num_data=num_data, batch_size=BATCH))
    inputs = [batch if case.name.startswith("mapping") else batch[0] for batch in batches]
    y = torch.cat([b[case.dict_key_y] if case.name.startswith("mapping") else b[1] for b in batches])
    x = case.new_inputs() if x is None else x
    if subset == "all":
        jacobian, chosen = dense_jacobian, [p for p in model.parameters() if p.requires_grad]
    else:
        head = model.get_submodule(HEADS[case.name])
        jacobian, chosen = head_jacobian(head), list(head.parameters())
    return Dense(
        "softmax" if case.likelihood == "classification" else "gaussian",
        torch.cat([jacobian(model, batch) for batch in inputs]).flatten(0, 1),
        torch.cat([outputs_of(model, batch) for batch in inputs]),
        y,
        torch.cat([p.detach().flatten() for p in chosen]),
        jacobian(model, x),
        outputs_of(model, x),
    )


def head_jacobian(head: nn.Linear) -> Callable[[nn.Module, Any], Tensor]:
    """J = φᵀ ⊗ I, entry by entry, from the inputs of the last layer."""

    def jacobian(model: nn.Module, x: Any) -> Tensor:
        seen: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        with torch.no_grad():
            model(x)
        handle.remove()
        (phi,) = seen
        C, D = head.weight.shape
        weight = torch.zeros(len(phi), C, C, D, dtype=phi.dtype)
        for c in range(C):
            weight[:, c, c] = phi
        eye = torch.eye(C, dtype=phi.dtype).expand(len(phi), C, C)
        return torch.cat([weight.flatten(2)] + ([eye] if head.bias is not None else []), 2)

    return jacobian


def training(case: NetworkCase, dtype: torch.dtype = torch.float64) -> DataLoader:
    return case.loader(dtype, num_data=NUM_DATA, batch_size=BATCH)


def training_inputs(case: NetworkCase) -> Tensor:
    return torch.cat([batch[0] for batch in training(case)])


def fitted(
    case: NetworkCase,
    subset: str = "all",
    *,
    dtype: torch.dtype = torch.float64,
    loader: Any = None,
    model: nn.Module | None = None,
    **settings: Any,
) -> Any:
    la = unfitted(case, subset, dtype=dtype, model=model, **settings)
    la.fit(training(case, dtype) if loader is None else loader)
    return la


def unfitted(
    case: NetworkCase,
    subset: str = "all",
    *,
    dtype: torch.dtype = torch.float64,
    model: nn.Module | None = None,
    **settings: Any,
) -> Any:
    model = case.model(dtype) if model is None else model
    settings = {"num_actions": ENOUGH, **case.keys, **settings}
    return Laplace(model, case.likelihood, subset, "iterncgp", **settings)


def full_laplace(case: NetworkCase, subset: str = "all", **settings: Any) -> Any:
    """laplace-torch's own, with the exact Gauss–Newton matrix."""
    la = Laplace(case.model(), case.likelihood, subset, "full", **settings)
    la.fit(training(case))
    return la


def near_and_far(case: NetworkCase, dtype: torch.dtype = torch.float64) -> Tensor:
    """Two training inputs, two new ones, and two far away from all."""
    training, new = next(iter(case.loader(dtype)))[0], case.new_inputs(dtype)
    return torch.cat([training[:2], new[:2], 10 * new[2:4]])


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    """To a tolerance relative to the largest entry."""
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * scale)


def differ(one: Tensor, other: Tensor, by: float = 1e-3) -> bool:
    return float((one - other).abs().max()) > by * float(other.abs().max())


def not_below(actual: Tensor, exact: Tensor, tolerance: float = 1e-9) -> None:
    """actual − exact is positive semidefinite."""
    difference = (actual - exact).double()
    smallest = torch.linalg.eigvalsh((difference + difference.mT) / 2).min()
    assert float(smallest) >= -tolerance * float(exact.abs().max()), (
        f"below the exact variance by {-float(smallest):.2e}"
    )


@pytest.fixture
def every_warning() -> Iterator[None]:
    """torch gives some warnings once in a session; here each time, whichever test comes first."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def precisions(la: Any, structure: str) -> Tensor | float:
    generator = torch.Generator().manual_seed(6)
    size = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}[structure]
    return (0.3 + 3 * torch.rand(size, generator=generator)).double()


# Equal to the full Laplace


@problems
@subsets
def test_with_enough_actions_mean_variance_and_evidence_are_those_of_the_full_laplace(
    case: NetworkCase, subset: str
) -> None:
    settings = {"prior_precision": 0.7, "temperature": 1.3}
    if case.likelihood == "regression":
        settings["sigma_noise"] = 0.6
    la, full = fitted(case, subset, **settings), full_laplace(case, subset, **settings)
    x = near_and_far(case)
    mean, variance = la.predictive_moments(x)
    expected_mean, expected_variance = full._glm_predictive_distribution(x)
    close(mean, expected_mean)
    close(variance, expected_variance)
    close(la.log_marginal_likelihood(), full.log_marginal_likelihood())
    assert la.report_.information_captured == pytest.approx(1.0, abs=1e-6)


@problems
@subsets
@policies
def test_both_policies_reach_the_full_laplace(case: NetworkCase, subset: str, policy: str) -> None:
    la, full = fitted(case, subset, policy=policy), full_laplace(case, subset)
    x = near_and_far(case)
    close(la.predictive_moments(x)[1], full._glm_predictive_distribution(x)[1])


@problems
@subsets
@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
def test_hyperparameters_set_after_the_fit_take_effect_as_if_fitted_with_them(
    case: NetworkCase, subset: str, structure: str
) -> None:
    """No pass over data: the loader is gone by then."""
    la, x = fitted(case, subset, prior_precision=5.0), near_and_far(case)
    before = la.predictive_moments(x)[1]
    precision = precisions(la, structure)
    la.prior_precision = precision
    settings: dict[str, Any] = {"temperature": 0.4}
    la.temperature = 0.4
    if case.likelihood == "regression":
        settings["sigma_noise"] = la.sigma_noise = 0.3
    if subset == "last_layer" and structure == "layerwise":  # which laplace-torch does not offer for a last layer
        precision = torch.repeat_interleave(precision, torch.tensor([p.numel() for p in la.params]))
    full = full_laplace(case, subset, prior_precision=precision, **settings)
    mean, variance = la.predictive_moments(x)
    close(mean, full._glm_predictive_distribution(x)[0])
    close(variance, full._glm_predictive_distribution(x)[1])
    close(la.log_marginal_likelihood(), full.log_marginal_likelihood())
    assert differ(before, variance)


@problems
@subsets
def test_the_evidence_sees_the_prior_mean_of_the_weights(case: NetworkCase, subset: str) -> None:
    la, full = fitted(case, subset, prior_mean=0.3), full_laplace(case, subset, prior_mean=0.3)
    close(la.log_marginal_likelihood(), full.log_marginal_likelihood())
    assert differ(la.log_marginal_likelihood(), fitted(case, subset).log_marginal_likelihood())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kind_of_model_has_the_exact_posterior_of_all_weights(case: NetworkCase) -> None:
    la, dense = fitted(case, prior_precision=2.0), written_out(case)
    mean, variance = la.predictive_moments(case.new_inputs())
    close(mean, dense.new_f, 1e-12)
    close(variance, dense.at_new(dense.covariance(2.0)))


@pytest.mark.parametrize("case", [BY_NAME[name] for name in HEADS], ids=str)
def test_every_kind_of_model_has_the_exact_posterior_of_its_last_layer(case: NetworkCase) -> None:
    la, dense = fitted(case, "last_layer", prior_precision=2.0), written_out(case, "last_layer")
    mean, variance = la.predictive_moments(case.new_inputs())
    close(mean, dense.new_f, 1e-12)
    close(variance, dense.at_new(dense.covariance(2.0)))


@problems
@subsets
def test_single_precision_is_close_to_double(case: NetworkCase, subset: str) -> None:
    la, dense = fitted(case, subset, dtype=torch.float32), written_out(case, subset)
    mean, variance = la.predictive_moments(case.new_inputs(torch.float32))
    assert mean.dtype == variance.dtype == torch.float32
    close(mean, dense.new_f, 1e-5)
    close(variance, dense.at_new(dense.covariance(1.0)), 2e-3)
    exact = full_laplace(case, subset).log_marginal_likelihood()
    close(la.log_marginal_likelihood(), exact.detach(), 1e-3)


def test_a_named_last_layer_and_a_found_one_are_the_same() -> None:
    named = fitted(MLP, "last_layer", last_layer_name="2")
    found = fitted(MLP, "last_layer")
    x = MLP.new_inputs()
    close(named.predictive_moments(x)[1], found.predictive_moments(x)[1], 1e-12)


# Never below it


@problems
@subsets
@policies
@pytest.mark.parametrize("num_actions", [1, 4, 15])
def test_at_every_rank_the_covariance_is_not_below_the_full_laplace(
    case: NetworkCase, subset: str, policy: str, num_actions: int
) -> None:
    """Jointly over inputs near the data and far from them, at the prior of the fit and at another one."""
    la = fitted(case, subset, policy=policy, num_actions=num_actions)
    x = near_and_far(case)
    dense = written_out(case, subset, x=x)
    flat = dense.new_J.flatten(0, 1)
    assert 1 <= la.report_.rank <= num_actions
    for precision in (1.0, 0.1, 7.0):
        la.prior_precision = precision
        joint, exact = la.predictive_moments(x, joint=True)[1], flat @ dense.covariance(precision) @ flat.T
        not_below(joint, exact)
        not_below(flat @ flat.T / precision, joint)  # nor above the prior


@problems
@subsets
def test_more_actions_never_add_variance(case: NetworkCase, subset: str) -> None:
    x = near_and_far(case)
    before = None
    for num_actions in (1, 2, 5, 12, 40):
        covariance = fitted(case, subset, num_actions=num_actions).predictive_moments(x, joint=True)[1]
        if before is not None:
            not_below(before, covariance)
        before = covariance


@problems
@policies
@pytest.mark.parametrize("compression", ["mean+trace", "eigen"])
@pytest.mark.parametrize("max_rank", [1, 6])
def test_a_compressed_fit_keeps_its_rank_and_is_not_below_the_full_laplace(
    case: NetworkCase, policy: str, compression: str, max_rank: int
) -> None:
    la = fitted(case, policy=policy, max_rank=max_rank, compression=compression, num_actions=24)
    x = near_and_far(case)
    dense = written_out(case, x=x)
    flat = dense.new_J.flatten(0, 1)
    assert la.report_.rank == la.posterior.rank == max_rank
    not_below(la.predictive_moments(x, joint=True)[1], flat @ dense.covariance(1.0) @ flat.T)


@problems
@subsets
def test_compressing_after_the_fit_adds_variance_and_never_falls_below(case: NetworkCase, subset: str) -> None:
    la, x = fitted(case, subset), near_and_far(case)
    dense = written_out(case, subset, x=x)
    flat = dense.new_J.flatten(0, 1)
    exact = flat @ dense.covariance(1.0) @ flat.T
    before = la.predictive_moments(x, joint=True)[1]
    evidence = la.log_marginal_likelihood()
    for max_rank in (12, 6, 3, 1):
        la.compress(max_rank)
        after = la.predictive_moments(x, joint=True)[1]
        assert la.posterior.rank == max_rank
        not_below(after, before)
        not_below(after, exact)
        assert float(la.log_marginal_likelihood()) <= float(evidence) + 1e-9  # still a lower bound
        before = after
    assert differ(before, exact)


def test_compressing_to_no_less_than_there_is_changes_nothing() -> None:
    la, x = fitted(MLP, num_actions=6), MLP.new_inputs()
    before = la.predictive_moments(x)[1]
    la.compress(6)
    assert torch.equal(la.predictive_moments(x)[1], before)


@pytest.mark.parametrize("max_rank", [0, -3, 2.5])
def test_compressing_to_no_rank_at_all_is_refused(max_rank: Any) -> None:
    la, x = fitted(MLP, num_actions=6), MLP.new_inputs()
    before = la.predictive_moments(x)[1]
    with pytest.raises(ValueError, match=r"max_rank expects .*whole number of at least 1"):
        la.compress(max_rank)
    assert torch.equal(la.predictive_moments(x)[1], before)


@problems
@subsets
@pytest.mark.parametrize("num_actions", [3, 12])
def test_single_precision_is_not_below_the_full_laplace_beyond_its_rounding(
    case: NetworkCase, subset: str, num_actions: int
) -> None:
    la, x = fitted(case, subset, dtype=torch.float32, num_actions=num_actions), near_and_far(case)
    dense = written_out(case, subset, x=x)
    flat = dense.new_J.flatten(0, 1)
    joint = la.predictive_moments(x.float(), joint=True)[1]
    not_below(joint, flat @ dense.covariance(1.0) @ flat.T, tolerance=1e-4)


# The mean


@problems
@subsets
@pytest.mark.parametrize("num_actions", [1, 10])
def test_the_mean_is_the_networks_output_at_any_rank(case: NetworkCase, subset: str, num_actions: int) -> None:
    la, x = fitted(case, subset, num_actions=num_actions, prior_mean=0.5), near_and_far(case)
    torch.testing.assert_close(la.predictive_moments(x)[0], outputs_of(case.model(), x), rtol=0, atol=1e-14)


@problems
@subsets
@pytest.mark.parametrize("prior_mean", ["zero", "vector"])
def test_the_refined_mean_and_covariance_are_those_of_the_mode_of_the_linearised_model(
    case: NetworkCase, subset: str, prior_mean: str
) -> None:
    """The weights are random, far from any maximum a posteriori, and the prior differs from weight to weight."""
    x = near_and_far(case)
    dense = written_out(case, subset, x=x)
    mu = 0.5 * torch.randn(len(dense.weights), generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    mu = torch.zeros_like(mu) if prior_mean == "zero" else mu
    precision = 0.5 + torch.rand(len(mu), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    sigma, temperature = (0.5 if case.likelihood == "regression" else 1.0), 0.8
    la = fitted(
        case,
        subset,
        mean="refined",
        prior_precision=precision,
        prior_mean=mu,
        sigma_noise=sigma,
        temperature=temperature,
        newton_tol=1e-12,
    )
    theta, f = dense.mode(precision, mu, sigma, temperature)
    mean, variance = la.predictive_moments(x)
    close(mean, dense.new_f + dense.new_J @ (theta - dense.weights))
    close(variance, dense.at_new(dense.covariance(precision, sigma, temperature, f)))
    assert differ(mean, dense.new_f), "the mode is expected to be somewhere else than the network"


@problems
@subsets
def test_the_refined_mean_in_single_precision_is_close_to_the_mode(case: NetworkCase, subset: str) -> None:
    dense = written_out(case, subset)
    la = fitted(case, subset, dtype=torch.float32, mean="refined", newton_tol=1e-6)
    P = len(dense.weights)
    theta, f = dense.mode(torch.ones(P).double(), torch.zeros(P).double())
    mean, variance = la.predictive_moments(case.new_inputs(torch.float32))
    assert mean.dtype == torch.float32
    close(mean, dense.new_f + dense.new_J @ (theta - dense.weights), 2e-3)
    close(variance, dense.at_new(dense.covariance(1.0, f=f)), 2e-3)


@problems
def test_the_refined_evidence_is_the_laplace_evidence_at_the_mode(case: NetworkCase) -> None:
    """For regression that is the evidence of GP regression, exactly."""
    dense, sigma = written_out(case), 0.5 if case.likelihood == "regression" else 1.0
    la = fitted(case, mean="refined", prior_precision=2.0, sigma_noise=sigma, newton_tol=1e-12)
    assert float(la.log_marginal_likelihood()) == pytest.approx(_evidence(dense, 2.0, sigma), rel=1e-6)


def _evidence(dense: Dense, precision: float, sigma: float) -> float:
    P = len(dense.weights)
    theta, f = dense.mode(torch.full((P,), precision).double(), torch.zeros(P).double(), sigma)
    W, K = dense.curvature(f, sigma), dense.J @ dense.J.T / precision
    value = dense.log_prob(f, sigma) - precision * theta @ theta / 2 - oracles.log_determinant(W, K) / 2
    if dense.likelihood == "gaussian":
        m = dense.f.flatten() - dense.J @ dense.weights
        gp = oracles.exact_gp_regression(K, K, K, m, m, dense.y, sigma**2)[2]
        assert float(gp) == pytest.approx(float(value), rel=1e-9)
    return float(value)


@pytest.mark.parametrize("case", [ONE, SEVERAL], ids=["one output", "several outputs"])
def test_a_refined_regression_follows_a_new_prior_and_noise_as_if_fitted_with_them(case: NetworkCase) -> None:
    la, x = fitted(case, mean="refined", prior_precision=1.0, sigma_noise=1.0), near_and_far(case)
    dense = written_out(case, x=x)
    before = la.predictive_moments(x)[0]
    la.prior_precision, la.sigma_noise = 4.0, 0.8
    P = len(dense.weights)
    theta, _ = dense.mode(torch.full((P,), 4.0).double(), torch.zeros(P).double(), 0.8)
    mean, variance = la.predictive_moments(x)
    close(mean, dense.new_f + dense.new_J @ (theta - dense.weights))
    close(variance, dense.at_new(dense.covariance(4.0, 0.8)))
    assert differ(before, mean)


@pytest.mark.parametrize("case", [ONE, SEVERAL], ids=["one output", "several outputs"])
def test_the_evidence_of_a_refined_regression_follows_a_new_prior_and_noise(case: NetworkCase) -> None:
    """Fitted with the one and set to the other, or fitted with the other: the same evidence."""
    la, dense = fitted(case, mean="refined", prior_precision=1.0, sigma_noise=1.0), written_out(case)
    la.prior_precision, la.sigma_noise = 4.0, 0.8
    assert float(la.log_marginal_likelihood()) == pytest.approx(_evidence(dense, 4.0, 0.8), rel=1e-6)


@problems
def test_a_refined_posterior_never_keeps_a_mean_of_another_prior_mean(case: NetworkCase) -> None:
    """A new prior mean of the weights is followed, or refused; never ignored in part."""
    la, x = fitted(case, mean="refined", newton_tol=1e-12), near_and_far(case)
    try:
        la.prior_mean = 0.5
        mean = la.predictive_moments(x)[0]
    except (RuntimeError, ValueError) as refusal:
        assert "prior_mean" in str(refusal) or "prior mean" in str(refusal)
    else:
        again = fitted(case, mean="refined", prior_mean=0.5, newton_tol=1e-12).predictive_moments(x)[0]
        if case.likelihood == "regression":
            close(mean, again, 1e-4)
        else:  # W stays where it was: one Newton step towards the new mode
            old = fitted(case, mean="refined", newton_tol=1e-12).predictive_moments(x)[0]
            assert (mean - again).norm() < 0.5 * (old - again).norm()


@problems
@policies
@pytest.mark.parametrize("max_rank", [None, 5])
@pytest.mark.parametrize("num_actions", [4, 15])
def test_a_refined_fit_that_stops_early_is_not_below_the_exact_covariance_at_its_own_mean(
    case: NetworkCase, policy: str, max_rank: int | None, num_actions: int
) -> None:
    """W is that at the latent values it reached, which its own mean at the training inputs tells."""
    la = fitted(case, mean="refined", policy=policy, num_actions=num_actions, max_rank=max_rank, newton_tol=1e-12)
    x = near_and_far(case)
    dense = written_out(case, x=x)
    reached = la.predictive_moments(training_inputs(case))[0]
    flat = dense.new_J.flatten(0, 1)
    exact = flat @ dense.covariance(1.0, f=reached) @ flat.T
    not_below(la.predictive_moments(x, joint=True)[1], exact, tolerance=1e-6)
    assert max_rank is None or la.posterior.rank <= max_rank


@problems
def test_compressing_a_refined_posterior_keeps_its_mean(case: NetworkCase) -> None:
    la, x = fitted(case, mean="refined", newton_tol=1e-12), near_and_far(case)
    mean = la.predictive_moments(x)[0]
    la.compress(3)
    close(la.predictive_moments(x)[0], mean, 1e-8)


@pytest.mark.parametrize("num_actions", [1, 3, 5, 10])
@pytest.mark.parametrize("precision", [1.0, 0.01])
def test_a_refined_mean_is_never_worse_than_the_network_it_started_from(num_actions: int, precision: float) -> None:
    """By log p(y | f) − ½ (μ − μ₀)ᵀΛ(μ − μ₀), which the damped steps raise and the report records."""
    la = fitted(MLP, mean="refined", num_actions=num_actions, prior_precision=precision)
    dense = written_out(MLP)
    start = float(dense.log_prob(dense.f, 1.0)) - 0.5 * precision * float(dense.weights @ dense.weights)
    objectives = [record.objective for record in la.report_.history]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise([start, *objectives]))
    latent = la.predictive_moments(training_inputs(MLP))[0]
    reported = float(dense.log_prob(latent, 1.0)) - 0.5 * float(la.scatter)
    assert reported >= start
    assert reported == pytest.approx(objectives[-1], rel=1e-2)


# Evidence and hyperparameters


@problems
@subsets
@pytest.mark.parametrize("num_actions", [4, ENOUGH])
@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
def test_the_gradient_of_the_evidence_is_right(
    case: NetworkCase, subset: str, num_actions: int, structure: str
) -> None:
    la = fitted(case, subset, num_actions=num_actions)
    precision = precisions(la, structure).requires_grad_()
    arguments: tuple[Tensor, ...] = (precision,)
    if case.likelihood == "regression":
        arguments = (precision, torch.tensor(0.7, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(lambda *given: la.log_marginal_likelihood(*given), arguments, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", [MLP, ONE], ids=["classification", "regression"])
def test_the_gradient_of_the_refined_evidence_is_right(case: NetworkCase) -> None:
    la = fitted(case, mean="refined", newton_tol=1e-12)
    precision = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: la.log_marginal_likelihood(given), (precision,), rtol=1e-4, atol=1e-6)


@problems
@subsets
@policies
@pytest.mark.parametrize("num_actions", [1, 5, 15])
def test_the_evidence_of_few_actions_is_a_lower_bound(
    case: NetworkCase, subset: str, policy: str, num_actions: int
) -> None:
    la, dense = fitted(case, subset, policy=policy, num_actions=num_actions), written_out(case, subset)
    W, fit = dense.curvature(dense.f, 1.0), dense.log_prob(dense.f, 1.0)
    for precision in (0.05, 1.0, 20.0):
        bound = float(la.log_marginal_likelihood(prior_precision=torch.tensor(precision, dtype=torch.float64)))
        penalty = precision * dense.weights @ dense.weights
        exact = float(fit - (penalty + oracles.log_determinant(W, dense.J @ dense.J.T / precision)) / 2)
        assert bound <= exact + 1e-11 * abs(exact)


@subsets
def test_sigma_noise_is_refused_for_classification(subset: str) -> None:
    la = fitted(MLP, subset)
    with pytest.raises(ValueError, match="sigma_noise is expected for regression only"):
        la.log_marginal_likelihood(sigma_noise=torch.tensor(0.5))


@pytest.mark.parametrize("case", [MLP, ONE], ids=["classification", "regression"])
def test_predictions_go_on_after_the_evidence_has_been_differentiated(case: NetworkCase, every_warning: None) -> None:
    la, x = fitted(case), case.new_inputs()
    precision = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor(0.5, dtype=torch.float64, requires_grad=True) if case is ONE else None
    la.log_marginal_likelihood(precision, sigma).backward()
    mean, variance = la.predictive_moments(x)
    assert not mean.requires_grad and not variance.requires_grad
    expected = fitted(case, prior_precision=2.0, **({"sigma_noise": 0.5} if case is ONE else {}))
    close(variance, expected.predictive_moments(x)[1])
    la.compress(6)
    assert not la.predictive_moments(x)[1].requires_grad
    saved = la.state_dict()
    assert not any(value.requires_grad for value in saved.values() if isinstance(value, Tensor))
    assert not any(value.requires_grad for value in saved["posterior"].values() if isinstance(value, Tensor))
    la.fit(training(case))
    close(la.predictive_moments(x)[1], variance)


@quiet_scalars
@problems
@subsets
@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
def test_tuning_by_the_evidence_raises_it(case: NetworkCase, subset: str, structure: str) -> None:
    la = fitted(case, subset, num_actions=5)
    before = float(la.log_marginal_likelihood())
    la.optimize_prior_precision(method="marglik", prior_structure=structure, n_steps=40)
    assert la.prior_precision.shape == (1 if structure == "scalar" else la.n_layers,)
    assert not la.prior_precision.requires_grad
    assert float(la.log_marginal_likelihood()) > before


def test_tuning_by_the_evidence_is_silent(every_warning: None) -> None:
    la = fitted(MLP, num_actions=5)
    la.optimize_prior_precision(method="marglik", n_steps=2)
    assert not la.prior_precision.requires_grad


@quiet_scalars
def test_tuning_one_precision_by_the_evidence_finds_the_best_of_a_fine_grid() -> None:
    la = fitted(ONE)
    la.optimize_prior_precision(method="marglik", prior_structure="scalar", n_steps=200)
    found = float(la.prior_precision)
    grid = torch.logspace(-3, 3, 400, dtype=torch.float64)
    values = torch.tensor([float(la.log_marginal_likelihood(prior_precision=p)) for p in grid])
    best = float(grid[values.argmax()])
    assert 2e-3 < best < 500
    assert found == pytest.approx(best, rel=0.1)


def test_one_precision_per_weight_by_the_evidence_is_refused() -> None:
    with pytest.raises(ValueError, match="prior_structure expects 'scalar' or 'layerwise', but got 'diag'"):
        fitted(MLP).optimize_prior_precision(method="marglik", prior_structure="diag")


def test_an_unknown_way_of_tuning_is_refused() -> None:
    la = fitted(MLP)
    with pytest.raises(ValueError, match="method expects 'marglik' or 'gridsearch', but got 'magic'"):
        la.optimize_prior_precision(method="magic")
    with pytest.raises(ValueError, match="'gridsearch' expects a val_loader"):
        la.optimize_prior_precision(method="gridsearch")


def validation(case: NetworkCase, num_data: int = 15) -> DataLoader:
    """Held-out data in batches of four."""
    return DataLoader(case.dataset(num_data, 5, torch.float64), batch_size=4)


GRID = {"log_prior_prec_min": -2, "log_prior_prec_max": 3, "grid_size": 6}
CANDIDATES = torch.logspace(-2, 3, 6)


@functools.cache
def refits(name: str, subset: str) -> list[Any]:
    """A fit for each candidate."""
    case = BY_NAME[name]
    settings = {"sigma_noise": 0.4} if case.likelihood == "regression" else {}
    return [fitted(case, subset, prior_precision=float(candidate), **settings) for candidate in CANDIDATES]


def score_by_hand(case: NetworkCase, la: Any, link: str = "probit") -> float:
    """The negative log-likelihood of the validation set."""
    total = 0.0
    for x, y in validation(case):
        if case.likelihood == "classification":
            total -= float(la(x, pred_type="glm", link_approx=link).gather(1, y[:, None]).log().sum())
        else:
            mean, variance = la(x, diagonal_output=True)
            normal = torch.distributions.Normal(mean, (variance + la.sigma_noise**2).sqrt())
            total -= float(normal.log_prob(y.reshape(mean.shape)).sum())
    return total


def best(scores: list[float]) -> float:
    assert max(scores) - min(scores) > 1e-2, "the score is expected to depend on the prior"
    return pytest.approx(float(CANDIDATES[torch.tensor(scores).argmin()]), rel=1e-5)


@pytest.mark.parametrize(
    ("case", "link"),
    [(MLP, "probit"), (MLP, "bridge"), (MLP, "bridge_norm"), (ONE, "probit"), (SEVERAL, "probit")],
    ids=["probit", "bridge", "bridge_norm", "one output", "several outputs"],
)
@subsets
def test_the_grid_picks_what_refitting_and_scoring_by_hand_picks(case: NetworkCase, link: str, subset: str) -> None:
    la = fitted(case, subset, **({"sigma_noise": 0.4} if case.likelihood == "regression" else {}))
    la.optimize_prior_precision(method="gridsearch", val_loader=validation(case), link_approx=link, **GRID)
    assert float(la.prior_precision) == best([score_by_hand(case, refit, link) for refit in refits(case.name, subset)])


@pytest.mark.parametrize("case", [MLP, ONE], ids=["classification", "regression"])
def test_the_grid_follows_the_refined_mean(case: NetworkCase) -> None:
    """It picks what the same posterior scores best at, when set to each precision."""
    la, scores = fitted(case, mean="refined", sigma_noise=0.4 if case is ONE else 1.0), []
    for candidate in CANDIDATES:
        la.prior_precision = float(candidate)
        scores.append(score_by_hand(case, la))
    la.optimize_prior_precision(method="gridsearch", val_loader=validation(case), **GRID)
    assert float(la.prior_precision) == best(scores)


class SummedLoss(torchmetrics.Metric):
    """Adds up what it is given, and remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.asked: list[float] = []

    def update(self, probabilities: Tensor, targets: Tensor) -> None:
        self.total = self.total - probabilities.gather(1, targets[:, None]).log().sum()

    def compute(self) -> Tensor:
        self.asked.append(float(self.total))
        return self.total


def test_a_metric_is_reset_between_candidates() -> None:
    la, metric = fitted(MLP), SummedLoss()
    metric.update(torch.full((3, 3), 1e-30, dtype=torch.float64), torch.zeros(3, dtype=torch.long))  # left from before
    la.optimize_prior_precision(method="gridsearch", val_loader=validation(MLP), loss=metric, **GRID)
    scores = [score_by_hand(MLP, refit) for refit in refits("mlp", "all")]
    close(torch.tensor(metric.asked), torch.tensor(scores), 1e-6)
    assert float(la.prior_precision) == best(scores)


@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
@subsets
def test_a_loss_sees_for_each_candidate_what_refitting_predicts(subset: str, link: str) -> None:
    la, seen = fitted(MLP, subset), []

    def loss(probabilities: Tensor, targets: Tensor) -> Tensor:
        assert len(targets) == 15
        seen.append(-float(probabilities.gather(1, targets[:, None]).log().sum()))
        return torch.tensor(seen[-1])

    la.optimize_prior_precision(method="gridsearch", val_loader=validation(MLP), loss=loss, link_approx=link, **GRID)
    scores = [score_by_hand(MLP, refit, link) for refit in refits("mlp", subset)]
    close(torch.tensor(seen), torch.tensor(scores), 1e-6)
    assert float(la.prior_precision) == best(scores)


@pytest.mark.parametrize("case", [ONE, SEVERAL], ids=["one output", "several outputs"])
def test_a_metric_of_the_mean_alone_serves_for_regression(case: NetworkCase) -> None:
    """With a refined mean even the squared error depends on the prior; several outputs add up, as in laplace-torch."""
    la = fitted(case, mean="refined")
    metric = torchmetrics.MeanSquaredError(num_outputs=case.num_outputs)
    la.optimize_prior_precision(method="gridsearch", val_loader=validation(case), loss=metric, **GRID)
    chosen, errors = float(la.prior_precision), []
    x, y = next(iter(DataLoader(case.dataset(15, 5, torch.float64), batch_size=15)))
    for candidate in CANDIDATES:
        la.prior_precision = float(candidate)
        errors.append(float((la(x)[0] - y).square().mean(0).sum()))
    assert chosen == best(errors)


def test_the_grid_passes_the_validation_set_once() -> None:
    class Counting(TensorDataset):
        asked = 0

        def __getitem__(self, index: int) -> Any:
            Counting.asked += 1
            return super().__getitem__(index)

    x, y = next(iter(DataLoader(MLP.dataset(15, 5, torch.float64), batch_size=15)))
    fitted(MLP).optimize_prior_precision(
        method="gridsearch", val_loader=DataLoader(Counting(x, y), batch_size=4), grid_size=20
    )
    assert Counting.asked == 15


# Samples and links


@problems
@subsets
@pytest.mark.parametrize("num_actions", [4, ENOUGH])
def test_weight_samples_have_the_mean_and_covariance_of_the_posterior(
    case: NetworkCase, subset: str, num_actions: int
) -> None:
    la, dense = fitted(case, subset, num_actions=num_actions, prior_precision=2.0), written_out(case, subset)
    samples = la.sample(40_000, generator=torch.Generator().manual_seed(0))
    P = len(dense.weights)
    assert samples.shape == (40_000, P) and samples.dtype == torch.float64
    eye = torch.eye(P, dtype=torch.float64)[None]
    covariance = la.functional_variance(eye)[0]  # J = I: the covariance of the weights themselves
    if num_actions == ENOUGH:
        close(covariance, dense.covariance(2.0))
    not_below(covariance, dense.covariance(2.0))
    error = (covariance.diagonal() / 40_000).sqrt()
    assert float(((samples.mean(0) - dense.weights).abs() / error).max()) < 5
    scale = covariance.diagonal().sqrt()
    correlation_error = (samples.T.cov() - covariance) / scale[:, None] / scale
    assert float(correlation_error.abs().max()) < 6 * (2 / 40_000) ** 0.5


def test_refined_weight_samples_are_around_the_mode() -> None:
    la, dense = fitted(MLP, mean="refined", newton_tol=1e-12), written_out(MLP)
    P = len(dense.weights)
    theta, _ = dense.mode(torch.ones(P).double(), torch.zeros(P).double())
    samples = la.sample(20_000, generator=torch.Generator().manual_seed(0))
    assert float((samples.mean(0) - theta).abs().max()) < 6 / 20_000**0.5
    assert float((samples.mean(0) - dense.weights).abs().max()) > 0.1


@problems
@subsets
def test_samples_are_reproducible_by_a_generator(case: NetworkCase, subset: str) -> None:
    la, x = fitted(case, subset, num_actions=6), case.new_inputs()
    draws: dict[str, Callable[[torch.Generator], Tensor]] = {
        "weights": lambda g: la.sample(5, generator=g),
        "functions": lambda g: la.functional_samples(x, n_samples=5, generator=g),
        "joint functions": lambda g: la.functional_samples(x, n_samples=5, generator=g, joint=True),
        "predictions": lambda g: la.predictive_samples(x, n_samples=5, generator=g),
    }
    for name, draw in draws.items():
        first, again, other = (draw(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert torch.equal(first, again), name
        assert not torch.equal(first, other), name
    assert draws["functions"](torch.Generator()).shape == (5, len(x), case.num_outputs)


def test_monte_carlo_predictions_are_reproducible_by_a_generator() -> None:
    la, x = fitted(MLP), MLP.new_inputs()
    first, again, other = (
        la(x, link_approx="mc", n_samples=20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


@problems
@subsets
def test_the_joint_covariance_has_the_marginal_ones_on_its_diagonal(case: NetworkCase, subset: str) -> None:
    la, x = fitted(case, subset, num_actions=7), near_and_far(case)
    mean, variance = la.predictive_moments(x)
    joint_mean, joint = la.predictive_moments(x, joint=True)
    b, C = mean.shape
    close(joint_mean, mean.flatten(), 1e-14)
    blocks = joint.reshape(b, C, b, C)[torch.arange(b), :, torch.arange(b)]
    close(blocks, variance, 1e-12)
    dense = written_out(case, subset, x=x)
    close(la.functional_variance(dense.new_J), variance, 1e-10)
    close(la.functional_covariance(dense.new_J), joint, 1e-10)


def test_functional_samples_have_the_joint_covariance() -> None:
    la, x = fitted(SEVERAL, num_actions=7), SEVERAL.new_inputs()
    mean, joint = la.predictive_moments(x, joint=True)
    draws = la.functional_samples(x, n_samples=40_000, joint=True, generator=torch.Generator().manual_seed(0))
    scale = joint.diagonal().sqrt()
    error = (draws.flatten(1).T.cov() - joint) / scale[:, None] / scale
    assert float(error.abs().max()) < 6 * (2 / 40_000) ** 0.5
    assert float(((draws.mean(0).flatten() - mean) / scale).abs().max()) < 5 / 40_000**0.5


@subsets
def test_probabilities_are_those_of_the_links_applied_to_the_moments(subset: str) -> None:
    la, x = fitted(MLP, subset, prior_precision=0.2), near_and_far(MLP)
    mean, covariance = la.predictive_moments(x)
    variance = covariance.diagonal(dim1=1, dim2=2)
    probit = torch.softmax(mean / (1 + math.pi / 8 * variance).sqrt(), 1)
    close(la(x), probit, 1e-12)
    close(la(x, pred_type="glm", link_approx="probit"), probit, 1e-12)
    close(la(x, pred_type=PredType.GLM, link_approx=LinkApprox.PROBIT), probit, 1e-12)
    close(la(x, pred_type="gp"), probit, 1e-12)
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(3, dtype=torch.float64))
    noise = torch.randn(20_000, *mean.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sampled = torch.softmax(mean + torch.einsum("bcd,sbd->sbc", root, noise), -1).mean(0)
    generator = torch.Generator().manual_seed(1)
    torch.testing.assert_close(
        la(x, link_approx="mc", n_samples=20_000, generator=generator), sampled, rtol=0, atol=0.02
    )
    for link in ("bridge", "bridge_norm"):
        probabilities = la(x, link_approx=link)
        close(probabilities.sum(1), torch.ones(len(x)), 1e-12)
        assert bool((probabilities > 0).all()) and differ(probabilities, probit)


@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
@subsets
def test_links_give_what_the_full_laplace_gives(link: str, subset: str) -> None:
    la, full, x = fitted(MLP, subset), full_laplace(MLP, subset), near_and_far(MLP)
    close(la(x, pred_type="glm", link_approx=link), full(x, pred_type="glm", link_approx=link))


@pytest.mark.parametrize("case", [ONE, SEVERAL], ids=["one output", "several outputs"])
@subsets
def test_regression_gives_mean_and_variance_in_the_forms_of_laplace_torch(case: NetworkCase, subset: str) -> None:
    la, full, x = fitted(case, subset), full_laplace(case, subset), case.new_inputs()
    for kind in ("gp", "glm"):
        for ours, theirs in zip(la(x, pred_type=kind), full(x, pred_type="glm"), strict=True):
            close(ours, theirs)
        for ours, theirs in zip(la(x, pred_type=kind, joint=True), full(x, pred_type="glm", joint=True), strict=True):
            close(ours, theirs)
    mean, diagonal = la(x, diagonal_output=True)
    assert diagonal.shape == mean.shape == (len(x), case.num_outputs)
    close(diagonal, la(x)[1].diagonal(dim1=1, dim2=2), 1e-14)


def test_sampled_network_weights_are_no_prediction_type() -> None:
    with pytest.raises(ValueError, match="Only gp is supported"):
        fitted(MLP)(MLP.new_inputs(), pred_type="nn", link_approx="mc")


@problems
@subsets
@pytest.mark.parametrize("mean_mode", ["network", "refined"])
def test_gradients_through_the_inputs_are_right(case: NetworkCase, subset: str, mean_mode: str) -> None:
    la = fitted(case, subset, enable_backprop=True, num_actions=8, mean=mean_mode)
    x = case.new_inputs()[:2].requires_grad_()

    def moments(x: Tensor) -> tuple[Tensor, ...]:
        predictions = la(x)
        return (*la.predictive_moments(x), *(predictions if isinstance(predictions, tuple) else (predictions,)))

    assert torch.autograd.gradcheck(moments, (x,), rtol=1e-5, atol=1e-7)


@subsets
def test_without_enable_backprop_predictions_carry_no_graph(subset: str) -> None:
    la, x = fitted(MLP, subset), MLP.new_inputs().requires_grad_()
    assert not la(x).requires_grad
    assert not any(moment.requires_grad for moment in la.predictive_moments(x))


# Saving


def save_and_load(la: Any, folder: Path) -> Any:
    torch.save(la.state_dict(), folder / "posterior.pt")
    return torch.load(folder / "posterior.pt", weights_only=True)


@problems
@subsets
@pytest.mark.parametrize("mean_mode", ["network", "refined"])
def test_a_saved_posterior_predicts_as_before_without_the_training_data(
    case: NetworkCase, subset: str, mean_mode: str, tmp_path: Path
) -> None:
    la, x = fitted(case, subset, mean=mean_mode, num_actions=7, prior_mean=0.1), near_and_far(case)
    la.prior_precision = precisions(la, "layerwise")
    la.temperature = 0.5
    if case.likelihood == "regression":
        la.sigma_noise = 0.2
    other = unfitted(case, subset, mean=mean_mode)
    other.load_state_dict(save_and_load(la, tmp_path))
    for ours, theirs in zip(other.predictive_moments(x, joint=True), la.predictive_moments(x, joint=True), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())
    seeds = (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3))
    assert torch.equal(other.sample(3, generator=seeds[0]), la.sample(3, generator=seeds[1]))
    other.prior_precision = la.prior_precision = 0.3  # and goes on following its hyperparameters
    assert torch.equal(other.predictive_moments(x)[1], la.predictive_moments(x)[1])
    with pytest.raises(RuntimeError, match="not been fitted in this session"):
        other.report_  # noqa: B018


@subsets
def test_a_mapping_model_is_saved_and_loaded(subset: str, tmp_path: Path) -> None:
    case = BY_NAME["mapping"]
    la, x = fitted(case, subset), case.new_inputs()
    other = unfitted(case, subset)
    other.load_state_dict(save_and_load(la, tmp_path))
    assert torch.equal(other(x), la(x))


def changed(model: nn.Module, name: str) -> nn.Module:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] += 1e-3
    return model


@problems
@subsets
def test_a_posterior_of_other_weights_is_refused(case: NetworkCase, subset: str, tmp_path: Path) -> None:
    saved = save_and_load(fitted(case, subset, num_actions=4), tmp_path)
    other = unfitted(case, subset, model=changed(case.model(), "2.weight"))
    with pytest.raises(ValueError, match="belong to this model, but its weights have other values"):
        other.load_state_dict(saved)


def test_a_posterior_of_a_last_layer_is_refused_on_other_features(tmp_path: Path) -> None:
    """The last layer is the same, the layers before it are not: J is another one."""
    saved = save_and_load(fitted(MLP, "last_layer", num_actions=4), tmp_path)
    other = unfitted(MLP, "last_layer", model=changed(MLP.model(), "0.weight"))
    with pytest.raises(ValueError, match="expected to belong to this model"):
        other.load_state_dict(saved)


def test_a_posterior_is_refused_where_frozen_weights_differ(tmp_path: Path) -> None:
    case = BY_NAME["frozen layer"]
    saved = save_and_load(fitted(case, num_actions=4), tmp_path)
    with pytest.raises(ValueError, match="expected to belong to this model"):
        unfitted(case, model=changed(case.model(), "0.weight")).load_state_dict(saved)


@pytest.mark.parametrize(
    ("case", "subset", "settings", "named"),
    [
        (MLP, "all", {"mean": "refined"}, "mean_mode is 'network' and here it is 'refined'"),
        (BY_NAME["frozen layer"], "all", {}, "parameters is"),
        (BY_NAME["frozen bias"], "all", {}, "parameters is"),
        (MLP, "last_layer", {"last_layer_name": "2"}, "flavour is 'IterNCGPAllLaplace'"),
    ],
    ids=["mean", "frozen layer", "frozen bias", "flavour"],
)
def test_a_posterior_of_another_kind_is_refused_by_what_differs(
    case: NetworkCase, subset: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    saved = save_and_load(fitted(MLP, num_actions=4), tmp_path)
    other = unfitted(case, subset, **settings)
    with pytest.raises(ValueError, match=f"expected to match this one, but its {named}"):
        other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="Call fit before"):  # nothing was taken over
        other(case.new_inputs())


def test_a_posterior_of_another_likelihood_is_refused(tmp_path: Path) -> None:
    saved = save_and_load(fitted(SEVERAL, num_actions=4), tmp_path)
    other = Laplace(SEVERAL.model(), "classification", "all", "iterncgp")
    with pytest.raises(ValueError, match="its likelihood is 'regression' and here it is 'classification'"):
        other.load_state_dict(saved)


def test_a_posterior_of_all_weights_is_refused_by_a_last_layer_that_is_yet_to_be_found(tmp_path: Path) -> None:
    saved = save_and_load(fitted(MLP, num_actions=4), tmp_path)
    with pytest.raises(ValueError, match="flavour is 'IterNCGPAllLaplace'"):
        unfitted(MLP, "last_layer").load_state_dict(saved)


def test_what_is_no_saved_posterior_is_refused() -> None:
    for subset in ("all", "last_layer"):
        with pytest.raises(ValueError, match="expected to match this one, but its format is None"):
            unfitted(MLP, subset).load_state_dict(MLP.model().state_dict())


def test_a_posterior_in_another_precision_is_refused_or_predicts(tmp_path: Path) -> None:
    saved = save_and_load(fitted(MLP, num_actions=4), tmp_path)
    other = unfitted(MLP, dtype=torch.float32)
    try:
        other.load_state_dict(saved)
    except ValueError as refusal:
        assert "float" in str(refusal)
    else:
        close(other(MLP.new_inputs(torch.float32)), fitted(MLP, num_actions=4)(MLP.new_inputs()), 1e-4)


def test_nothing_can_be_saved_before_a_fit() -> None:
    for subset in ("all", "last_layer"):
        with pytest.raises(RuntimeError, match="Call fit before"):
            unfitted(MLP, subset).state_dict()


# No stale posterior


QUESTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "call": lambda la, x: la(x),
    "moments": lambda la, x: la.predictive_moments(x),
    "functional samples": lambda la, x: la.functional_samples(x, n_samples=2),
    "weight samples": lambda la, x: la.sample(2),
    "evidence": lambda la, x: la.log_marginal_likelihood(),
    "evidence tuning": lambda la, x: la.optimize_prior_precision(method="marglik", n_steps=1),
    "grid": lambda la, x: la.optimize_prior_precision(method="gridsearch", val_loader=validation(MLP), grid_size=2),
    "state": lambda la, x: la.state_dict(),
    "compression": lambda la, x: la.compress(2),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_before_the_fit_is_refused(question: str) -> None:
    for subset in ("all", "last_layer"):
        with pytest.raises(RuntimeError, match="Call fit before"):
            QUESTIONS[question](unfitted(MLP, subset), MLP.new_inputs())


@pytest.mark.parametrize("question", QUESTIONS)
@subsets
def test_a_question_after_the_weights_have_changed_is_refused(question: str, subset: str) -> None:
    la = fitted(MLP, subset, num_actions=4)
    model = la.model if subset == "all" else la.model.model
    changed(model, "2.bias")
    with pytest.raises(RuntimeError, match=r"the weights it was fitted with, but they have changed since. Call fit"):
        QUESTIONS[question](la, MLP.new_inputs())


def test_a_refit_after_the_weights_have_changed_is_that_of_the_new_weights() -> None:
    la, x = fitted(MLP), MLP.new_inputs()
    changed(la.model, "2.bias")
    la.fit(training(MLP))
    close(la.predictive_moments(x)[0], outputs_of(la.model, x), 1e-14)
    assert la(x).shape == (len(x), 3)


def test_frozen_weights_that_have_changed_are_noticed() -> None:
    case = BY_NAME["frozen layer"]
    la = fitted(case, num_actions=4)
    changed(la.model, "0.weight")
    with pytest.raises(RuntimeError, match="they have changed since"):
        la(case.new_inputs())


def test_running_statistics_that_have_changed_are_noticed() -> None:
    case = BY_NAME["cnn with BatchNorm and in-place ReLU"]
    la = fitted(case, num_actions=4)
    la.model[1].running_mean += 0.1
    with pytest.raises(RuntimeError, match="changed since"):
        la(case.new_inputs())


def test_features_of_a_last_layer_that_have_changed_are_noticed() -> None:
    la = fitted(MLP, "last_layer", num_actions=4)
    changed(la.model.model, "0.weight")
    with pytest.raises(RuntimeError, match="they have changed since"):
        la(MLP.new_inputs())


@subsets
def test_predictions_follow_a_prior_that_is_changed_in_place(subset: str) -> None:
    la, x = fitted(MLP, subset, prior_precision=1.0), MLP.new_inputs()
    before = la.predictive_moments(x)[1]
    la.prior_precision.mul_(3.0)
    after = la.predictive_moments(x)[1]
    assert differ(before, after)
    close(after, fitted(MLP, subset, prior_precision=3.0).predictive_moments(x)[1])


@subsets
def test_a_prior_set_between_construction_and_fit_counts(subset: str) -> None:
    la, x = unfitted(MLP, subset, prior_precision=1.0, num_actions=4), MLP.new_inputs()
    la.prior_precision = 50.0
    la.fit(training(MLP))
    assert float(la.prior_precision) == 50.0
    expected = fitted(MLP, subset, prior_precision=50.0, num_actions=4)
    close(la.predictive_moments(x)[1], expected.predictive_moments(x)[1], 1e-12)


@subsets
def test_a_second_fit_replaces_the_first(subset: str) -> None:
    la, x = fitted(MLP, subset, loader=MLP.loader(num_data=6)), MLP.new_inputs()
    small = la.predictive_moments(x)[1]
    la.fit(training(MLP))
    close(la.predictive_moments(x)[1], fitted(MLP, subset).predictive_moments(x)[1], 1e-12)
    assert differ(small, la.predictive_moments(x)[1]) and la.n_data == NUM_DATA


@pytest.mark.parametrize("mean_mode", ["network", "refined"])
@subsets
def test_a_second_fit_that_fails_leaves_the_first_usable(subset: str, mean_mode: str) -> None:
    la, x = fitted(MLP, subset, mean=mean_mode, num_actions=6), MLP.new_inputs()
    before, evidence, report = la.predictive_moments(x), la.log_marginal_likelihood(), la.report_
    inputs, labels = next(iter(MLP.loader(num_data=6, batch_size=6)))
    for bad in (DataLoader(TensorDataset(inputs, labels + 5), 3), DataLoader(TensorDataset(inputs / 0, labels), 3), []):
        with pytest.raises(ValueError, match=r"expected|expects"):
            la.fit(bad)
        after = la.predictive_moments(x)
        assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
        assert torch.equal(la.log_marginal_likelihood(), evidence) and la.report_ is report


# The user's model and data


@quiet_scalars
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fitting_and_predicting_leave_the_model_of_the_user_untouched(case: NetworkCase) -> None:
    for subset in ("all", "last_layer") if case.name in HEADS else ("all",):
        model, x = case.model(), case.new_inputs()
        next(model.children()).train(False)
        with untouched(model):
            la = fitted(case, subset, model=model, num_actions=3)
            la(x)
            la.predictive_moments(x, joint=True)
            la.sample(2)
            la.functional_samples(x, n_samples=2)
            la.optimize_prior_precision(method="marglik", n_steps=2)
            la.state_dict()


@pytest.mark.parametrize("mean_mode", ["network", "refined"])
@pytest.mark.parametrize("sweep", range(1, 9))
def test_a_fit_that_breaks_off_leaves_the_model_of_the_user_untouched(sweep: int, mean_mode: str) -> None:
    """In whichever pass the model fails."""

    class Fails(nn.Sequential):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            Fails.passes += 1
            if Fails.passes > 4 * sweep:
                raise ArithmeticError("broken off")
            return super().forward(x)

    model = Fails(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double().train()
    model[1].eval()
    with untouched(model):
        la = unfitted(MLP, model=model, mean=mean_mode)
        with pytest.raises(ArithmeticError, match="broken off"):
            la.fit(MLP.loader(num_data=9))
    with pytest.raises(RuntimeError, match="Call fit before"):
        la(MLP.new_inputs())


@subsets
def test_samplers_and_drop_last_are_respected(subset: str) -> None:
    whole = MLP.dataset(NUM_DATA, 1, torch.float64)
    x, chosen = MLP.new_inputs(), [1, 2, 4, 8, 9]
    part = DataLoader(torch.utils.data.Subset(whole, chosen), batch_size=2)
    sampled = DataLoader(whole, batch_size=2, sampler=SubsetRandomSampler(chosen))
    close(
        fitted(MLP, subset, loader=sampled).predictive_moments(x)[1],
        fitted(MLP, subset, loader=part).predictive_moments(x)[1],
        1e-9,
    )
    dropping = fitted(MLP, subset, loader=DataLoader(whole, batch_size=6, drop_last=True))
    first = fitted(MLP, subset, loader=DataLoader(torch.utils.data.Subset(whole, range(12)), batch_size=6))
    close(dropping.predictive_moments(x)[1], first.predictive_moments(x)[1], 1e-12)
    assert dropping.n_data == 12


@subsets
def test_a_shuffling_loader_gives_the_same_posterior(subset: str) -> None:
    shuffling = DataLoader(MLP.dataset(NUM_DATA, 1, torch.float64), batch_size=3, shuffle=True)
    x = MLP.new_inputs()
    close(
        fitted(MLP, subset, loader=shuffling).predictive_moments(x)[1],
        fitted(MLP, subset).predictive_moments(x)[1],
        1e-9,
    )


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_flat_targets_and_columns_of_targets_are_the_same(subset: str) -> None:
    x, y = next(iter(ONE.loader(num_data=NUM_DATA, batch_size=NUM_DATA)))
    flat = fitted(ONE, subset, loader=DataLoader(TensorDataset(x, y[:, 0]), batch_size=4), mean="refined")
    column = fitted(ONE, subset, mean="refined", loader=DataLoader(TensorDataset(x, y), batch_size=4))
    for ours, theirs in zip(flat(x), column(x), strict=True):
        close(ours, theirs, 1e-12)
    close(flat.log_marginal_likelihood(), column.log_marginal_likelihood(), 1e-12)


@subsets
def test_a_mapping_without_targets_can_be_predicted(subset: str) -> None:
    case = BY_NAME["mapping"]
    la, x = fitted(case, subset), case.new_inputs()
    unlabelled = type(x)({key: value for key, value in x.items() if key != "labels"})
    assert torch.equal(la(unlabelled), la(x))


class FirstToken(nn.Module):
    """The last layer is applied to every token, and the first one taken afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))[:, 0]


def test_features_of_a_sequence_can_be_reduced_also_in_a_batch_of_one() -> None:
    torch.manual_seed(0)
    model = FirstToken().double()
    x, y = torch.randn(7, 3, 4, dtype=torch.float64), torch.arange(7) % 2
    la = Laplace(model, "classification", "last_layer", "iterncgp", num_actions=ENOUGH, feature_reduction="pick_first")
    la.fit(DataLoader(TensorDataset(x, y), batch_size=3))  # the last batch has one datum
    phi = torch.tanh(model.body(x))[:, 0].detach()
    J = head_jacobian(model.head)(nn.Sequential(model.head), phi)
    f = model.head(phi).detach()
    exact = J @ oracles.weight_covariance(J.flatten(0, 1), oracles.curvature_matrix("softmax", f), 1.0) @ J.mT
    close(la.predictive_moments(x)[1], exact)
    close(la.predictive_moments(x[:1])[1], exact[:1])


class EndsInSomethingElse(nn.Module):
    """The outputs are not those of the last linear layer."""

    def __init__(self, ending: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.ending = nn.Linear(3, 4), nn.Linear(4, 3), ending

    def forward(self, x: Tensor) -> Tensor:
        return self.ending(self.head(torch.tanh(self.body(x))))


@pytest.mark.parametrize("ending", [lambda f: 2 * f, lambda f: torch.log_softmax(f, 1)], ids=["scaled", "log-softmax"])
def test_a_model_that_does_not_end_in_its_last_linear_layer_is_refused(ending: Callable[[Tensor], Tensor]) -> None:
    """Else the mean would not be the network's output."""
    la = Laplace(EndsInSomethingElse(ending).double(), "classification", "last_layer", "iterncgp", num_actions=5)
    with pytest.raises(ValueError, match="last"):
        la.fit(MLP.loader())


def test_a_model_without_a_linear_last_layer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Softplus()).double()
    la = Laplace(model, "classification", "last_layer", "iterncgp")
    with pytest.raises(ValueError, match="linear last layer"):
        la.fit(MLP.loader())


def test_a_frozen_model_is_refused() -> None:
    la = Laplace(MLP.model().requires_grad_(False), "classification", "all", "iterncgp")
    with pytest.raises(ValueError, match="all are frozen"):
        la.fit(MLP.loader())


# Bad input


@subsets
def test_a_loader_with_no_data_is_refused(subset: str) -> None:
    for empty in ([], DataLoader(MLP.dataset(5, 1, torch.float64), batch_size=8, drop_last=True)):
        with pytest.raises(ValueError, match="the loader is empty"):
            unfitted(MLP, subset).fit(empty)


@pytest.mark.parametrize(("offset", "found"), [(1, "= 3"), (-1, "= -1")])
@subsets
def test_labels_outside_the_classes_are_refused(offset: int, found: str, subset: str) -> None:
    x, _ = next(iter(MLP.loader(num_data=6, batch_size=6)))
    loader = DataLoader(TensorDataset(x, torch.tensor([0, 1, 2, 0, 1, 2]) + offset), batch_size=3)
    with pytest.raises(ValueError, match=rf"expects whole-number labels from 0 to 2.*{found}"):
        unfitted(MLP, subset).fit(loader)


@subsets
def test_targets_of_another_shape_are_refused(subset: str) -> None:
    x, _ = next(iter(SEVERAL.loader(num_data=6, batch_size=6)))
    loader = DataLoader(TensorDataset(x, torch.zeros(6, 3)), batch_size=3)
    with pytest.raises(ValueError, match=r"2 output\(s\) expects y of shape \(N, 2\), but got \(6, 3\)"):
        unfitted(SEVERAL, subset).fit(loader)
    with pytest.raises(ValueError, match="Expected one target for each of the 6 training inputs, but got 12"):
        unfitted(MLP, subset).fit([(x, torch.zeros(12, dtype=torch.long))])


@subsets
def test_targets_that_are_not_finite_are_refused(subset: str) -> None:
    x, y = next(iter(ONE.loader(num_data=6, batch_size=6)))
    y[4] = float("nan")
    with pytest.raises(ValueError, match="Expected finite targets"):
        unfitted(ONE, subset).fit([(x, y)])


@subsets
@pytest.mark.parametrize("row", [0, 5], ids=["first batch", "last batch"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_model_that_returns_nan_is_refused(subset: str, row: int, value: float) -> None:
    x, y = next(iter(MLP.loader(num_data=6, batch_size=6)))
    x[row] = value
    la = unfitted(MLP, subset)
    with pytest.raises(ValueError, match="expected to return finite outputs"):
        la.fit(DataLoader(TensorDataset(x, y), batch_size=2))
    with pytest.raises(RuntimeError, match="Call fit before"):
        la(MLP.new_inputs())


@subsets
def test_a_stream_without_length_is_refused(subset: str) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            yield from MLP.dataset(6, 1, torch.float64)  # type: ignore[misc]

    with pytest.raises(ValueError, match="An IterableDataset is expected to know its length"):
        unfitted(MLP, subset).fit(DataLoader(Stream(), batch_size=2))


@subsets
def test_noise_in_the_model_is_found_at_the_door(subset: str) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(nn.functional.dropout(self.body(x), 0.5, training=True))

    with pytest.raises(ValueError, match="Turn off dropout"):
        Laplace(Noisy().double(), "classification", subset, "iterncgp").fit(MLP.loader())


@problems
@subsets
def test_an_empty_batch_is_refused(case: NetworkCase, subset: str) -> None:
    la, x = fitted(case, subset, num_actions=3), case.new_inputs()[:0]
    for question in (la, la.predictive_moments, la.functional_samples, la.predictive_samples):
        with pytest.raises(ValueError, match="at least one input"):
            question(x)


def saturated(scale: float) -> nn.Module:
    model = MLP.model()
    with torch.no_grad():
        model[2].weight *= scale
        model[2].bias *= scale
    return model


@pytest.mark.parametrize("scale", [1e2, 1e4])
@pytest.mark.parametrize("mean_mode", ["network", "refined"])
@subsets
def test_saturated_logits_give_finite_answers(subset: str, mean_mode: str, scale: float) -> None:
    la, x = fitted(MLP, subset, model=saturated(scale), mean=mean_mode, num_actions=10), near_and_far(MLP)
    mean, variance = la.predictive_moments(x)
    assert bool(mean.isfinite().all()) and bool(variance.isfinite().all())
    assert bool((variance.diagonal(dim1=1, dim2=2) > 0).all())
    probabilities = la(x)
    assert bool(probabilities.isfinite().all())
    close(probabilities.sum(1), torch.ones(len(x)), 1e-12)
    assert math.isfinite(float(la.log_marginal_likelihood()))


@pytest.mark.parametrize("scale", [1e2, 1e3, 1e4])
@subsets
def test_saturated_logits_are_not_below_the_exact_variance(subset: str, scale: float) -> None:
    """Decided points say nothing, however large the prior variance is."""
    model, x, seen = saturated(scale), near_and_far(MLP), training_inputs(MLP)
    jacobian = dense_jacobian if subset == "all" else head_jacobian(model[2])
    J, new = jacobian(model, seen).flatten(0, 1), jacobian(model, x).flatten(0, 1)
    exact = oracles.posterior_at("softmax", outputs_of(model, seen), J @ J.T, new @ J.T, new @ new.T)
    la = fitted(MLP, subset, model=model, num_actions=10)
    not_below(la.predictive_moments(x, joint=True)[1], exact, 1e-5)


@subsets
def test_reward_modeling_is_refused(subset: str) -> None:
    with pytest.raises(
        ValueError, match="expects the likelihood 'classification' or 'regression', but got 'reward_mod"
    ):
        Laplace(MLP.model(), "reward_modeling", subset, "iterncgp")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean": "mode"}, "mean expects 'network' or 'refined', but got 'mode'"),
        ({"policy": "magic"}, "policy expects one of 'unit'.*got 'magic'"),
        ({"compression": "zip"}, r"compression expects one of .*got 'zip'"),
        ({"max_rank": 0}, "max_rank expects None or a whole number"),
        ({"num_actions": 0}, "expects a whole number of at least 1, but got 0"),
        ({"newton_tol": -1.0}, "newton_tol expects"),
        ({"sigma_noise": 0.5}, "only available for regression"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@subsets
def test_settings_that_cannot_be_are_refused(subset: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Laplace(MLP.model(), "classification", subset, "iterncgp", **settings)


def test_a_budget_of_actions_is_refused_by_the_name_it_has_here() -> None:
    with pytest.raises(ValueError, match="num_actions expects a whole number"):
        Laplace(MLP.model(), "classification", "all", "iterncgp", num_actions=0)


def test_adding_data_to_a_posterior_is_refused() -> None:
    with pytest.raises(ValueError, match="override=False is not offered"):
        fitted(MLP, num_actions=2).fit(MLP.loader(), override=False)


# Memory


@pytest.mark.parametrize("question", ["fit", "predict"])
def test_a_budget_too_small_for_one_row_is_refused_by_the_sizes(question: str) -> None:
    la = fitted(MLP, num_actions=2)
    if question == "fit":
        la = unfitted(MLP, chunk_bytes=100)
    else:
        la.settings = type(la.settings)(**{**vars(la.settings), "chunk_bytes": 100})
    message = (
        r"chunk_bytes is expected to hold.*3 outputs × 31 weights, which take .*MiB, but it is .*Raise chunk_bytes"
    )
    with pytest.raises(ValueError, match=message):
        if question == "fit":
            la.fit(MLP.loader())
        else:
            la(MLP.new_inputs())


@pytest.mark.parametrize(("subset", "row"), [("all", 3 * 3 * 31 * 8), ("last_layer", 8 * (2 * 9 + 2 * 4))])
@pytest.mark.parametrize("mean_mode", ["network", "refined"])
def test_predictions_do_not_depend_on_the_memory_they_are_given(subset: str, row: int, mean_mode: str) -> None:
    x = torch.cat([near_and_far(MLP), MLP.new_inputs()])
    large = fitted(MLP, subset, mean=mean_mode, num_actions=8)
    small = fitted(MLP, subset, mean=mean_mode, num_actions=8, chunk_bytes=4 * row)  # ten inputs in three parts
    for ours, theirs in zip(small.predictive_moments(x), large.predictive_moments(x), strict=True):
        close(ours, theirs, 1e-10)
    close(small(x), large(x), 1e-10)
    close(small.log_marginal_likelihood(), large.log_marginal_likelihood(), 1e-10)
    for la in (small, large):
        la.optimize_prior_precision(method="gridsearch", val_loader=validation(MLP), **GRID)
    assert torch.equal(small.prior_precision, large.prior_precision)


def test_a_joint_prediction_that_does_not_fit_is_refused() -> None:
    la = fitted(MLP, num_actions=4, chunk_bytes=2 * 3 * 3 * 31 * 8)
    with pytest.raises(ValueError, match=r"A joint prediction is expected to fit in chunk_bytes at once.*2 parts"):
        la.predictive_moments(MLP.new_inputs(), joint=True)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("mean_mode", ["network", "refined"])
def test_a_last_layer_of_a_thousand_classes_stays_small(mean_mode: str) -> None:
    """513 000 weights: their covariance would take two terabytes, one dense row of J for 1000 classes two gigabytes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1000))
    x, y = torch.randn(6, 8), torch.randint(1000, (6,))
    la = Laplace(model, "classification", "last_layer", "iterncgp", num_actions=6, mean=mean_mode)
    with LargestTensor() as largest:
        la.fit(DataLoader(TensorDataset(x, y), batch_size=4))
        probabilities = la(x[:2])
        la.log_marginal_likelihood()
        la.sample(2)
    assert probabilities.shape == (2, 1000) and bool(probabilities.isfinite().all())
    assert la.n_params == 513_000 and la.report_.rank == 6
    assert largest.num_bytes >= 6 * 4 * 513_000  # A itself: the meter works
    assert largest.num_bytes <= 80 * 2**20


def test_the_rows_of_all_weights_stay_within_the_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 10))  # 2470 weights
    x, y = torch.randn(64, 30), torch.randint(10, (64,))
    budget = 2 * 2**20
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=4, chunk_bytes=budget)
    with LargestTensor() as largest:
        la.fit(DataLoader(TensorDataset(x, y), batch_size=32))
        la(x)
    whole = 64 * 10 * 2470 * 4
    assert whole > 3 * budget
    assert largest.num_bytes <= budget


# As a flavour of laplace-torch


def test_both_flavours_are_registered_and_the_others_keep_their_own_classes() -> None:
    model = MLP.model()
    expected: dict[tuple[str, str], tuple[type, dict[str, Any]]] = {
        ("all", "iterncgp"): (IterNCGPAllLaplace, {}),
        ("last_layer", "iterncgp"): (IterNCGPLastLayerLaplace, {}),
        ("all", "full"): (FullLaplace, {}),
        ("all", "kron"): (KronLaplace, {}),
        ("all", "diag"): (DiagLaplace, {}),
        ("all", "gp"): (FunctionalLaplace, {"n_subset": 4}),
        ("last_layer", "full"): (FullLLLaplace, {}),
        ("last_layer", "kron"): (KronLLLaplace, {}),
        ("last_layer", "diag"): (DiagLLLaplace, {}),
        ("last_layer", "gp"): (FunctionalLLLaplace, {"n_subset": 4}),
    }
    for (subset, structure), (flavour, settings) in expected.items():
        assert type(Laplace(model, "classification", subset, structure, **settings)) is flavour
    assert type(Laplace(model, "classification", hessian_structure="iterncgp")) is IterNCGPLastLayerLaplace


def test_no_class_of_the_package_shares_a_key() -> None:
    """laplace-torch keeps one class per key, whichever comes last: an inherited key would hijack its owner's."""
    keyed = [flavour for flavour in _all_subclasses(BaseLaplace) if hasattr(flavour, "_key")]
    ours = [flavour for flavour in keyed if flavour.__module__.startswith("ntk_iterncgp")]
    assert {flavour._key for flavour in ours} == {("all", "iterncgp"), ("last_layer", "iterncgp")} and len(ours) == 2
    assert not {flavour._key for flavour in keyed if flavour not in ours} & {flavour._key for flavour in ours}


def test_the_quick_start_of_laplace_torch_runs_with_one_word_changed() -> None:
    digits = load_digits()
    inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
    targets = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[:400]), targets[:400]).backward()
        optimizer.step()
    train_loader = DataLoader(TensorDataset(inputs[:400], targets[:400]), batch_size=100, shuffle=True)
    val_loader = DataLoader(TensorDataset(inputs[400:600], targets[400:600]), batch_size=100)
    x, y = inputs[600:], targets[600:]

    # User-specified LA flavor
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="iterncgp")
    la.fit(train_loader)
    la.optimize_prior_precision(method="gridsearch", pred_type="glm", link_approx="probit", val_loader=val_loader)

    # User-specified predictive approx.
    pred = la(x, pred_type="glm", link_approx="probit")

    assert pred.shape == (len(x), 10) and pred.dtype == torch.float32
    torch.testing.assert_close(pred.sum(1), torch.ones(len(x)))
    assert float((pred.argmax(1) == y).float().mean()) > 0.85
    assert 1e-4 < float(la.prior_precision) < 1e4
    with torch.no_grad():
        network = torch.softmax(model(inputs[400:600]), 1)
    losses = [float(nn.functional.nll_loss(p.log(), targets[400:600])) for p in (la(inputs[400:600]), network)]
    assert losses[0] < losses[1], "where the prior was tuned, uncertainty is expected to help"


# Reports


@pytest.mark.parametrize("mean_mode", ["network", "refined"])
@subsets
def test_the_report_says_what_was_done(subset: str, mean_mode: str) -> None:
    la = fitted(MLP, subset, num_actions=7, mean=mean_mode)
    report = la.report_
    assert isinstance(report, FitReport)
    assert report.num_products == 7 and report.rank == la.posterior.rank == 7
    assert report.status == "budget" and report.advice
    assert 0 < report.information_captured < 1 and report.seconds > 0
    assert (report.num_newton_steps == 0) == (mean_mode == "network")
    assert "7 products" in str(report) and "rank 7" in str(report)
    captured = [record.information_captured for record in report.history]
    assert report.history[-1].num_products == 7
    if mean_mode == "network":
        assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(captured))
        lower, upper = la.posterior.log_determinant_bounds(la.prior_precision, torch.tensor(1.0).double())
        assert report.information_captured == pytest.approx(float(lower / upper), rel=1e-6)


def test_the_advice_of_a_report_names_only_what_exists() -> None:
    report = fitted(MLP, num_actions=3).report_
    assert "refine(" not in report.advice or hasattr(fitted(MLP, num_actions=3), "refine")


def test_information_captured_is_a_lower_bound_on_the_exact_share() -> None:
    dense = written_out(MLP)
    exact = oracles.log_determinant(dense.curvature(dense.f, 1.0), dense.J @ dense.J.T)
    for num_actions in (1, 4, 12):
        la = fitted(MLP, num_actions=num_actions)
        lower, _ = la.posterior.log_determinant_bounds(la.prior_precision, torch.tensor(1.0).double())
        assert la.report_.information_captured <= float(lower / exact) + 1e-9 <= 1 + 2e-9


def test_a_fit_is_the_same_every_time_and_follows_its_seed() -> None:
    x = MLP.new_inputs()
    first, again, other = (
        fitted(MLP, policy="random_subspace", num_actions=8, seed=seed).predictive_moments(x)[1] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_fit_leaves_the_random_numbers_of_the_caller_alone() -> None:
    la = unfitted(MLP, policy="random_subspace", num_actions=8)
    loader = MLP.loader()
    before = torch.get_rng_state()
    la.fit(loader)
    la(MLP.new_inputs())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_policy_may_be_any_callable() -> None:
    seen = []

    def first_rows(state: Any) -> Tensor:
        seen.append(state.problem.num_rows)
        block = torch.zeros(state.problem.num_rows, 2, dtype=torch.float64)
        block[3 * len(seen), 0] = block[3 * len(seen) + 1, 1] = 1.0
        return block

    la = fitted(MLP, policy=first_rows, num_actions=6)
    assert la.report_.rank == 6 and seen == [3 * NUM_DATA] * 3
    dense = written_out(MLP)
    not_below(la.predictive_moments(MLP.new_inputs())[1], dense.at_new(dense.covariance(1.0)))


def test_an_interrupted_fit_is_valid_for_the_work_done() -> None:
    def interrupt(state: Any) -> Tensor:
        if state.buffer.size >= 3:
            raise KeyboardInterrupt
        return state.curvature_residual[:, None]

    la, x = unfitted(MLP, policy=interrupt), MLP.new_inputs()
    with pytest.warns(UserWarning, match="interrupted"):
        la.fit(training(MLP))
    assert la.report_.status == "interrupted" and la.report_.rank == 3
    close(la.predictive_moments(x)[1], fitted(MLP, num_actions=3).predictive_moments(x)[1], 1e-9)


def test_progress_bars_are_shown_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    la = fitted(MLP, num_actions=3)
    la.optimize_prior_precision(method="gridsearch", val_loader=validation(MLP), grid_size=3)
    assert capsys.readouterr() == ("", "")
    la.fit(MLP.loader(), progress_bar=True)
    assert "information" in capsys.readouterr().err


@pytest.mark.cuda
@subsets
def test_a_model_on_another_device_than_the_data_draws_the_data_to_it(subset: str) -> None:
    la = fitted(MLP, subset, model=MLP.model().cuda(), num_actions=5)
    mean, variance = la.predictive_moments(MLP.new_inputs().cuda())
    expected = fitted(MLP, subset, num_actions=5).predictive_moments(MLP.new_inputs())
    close(mean.cpu(), expected[0])
    close(variance.cpu(), expected[1])

"""The flavours of laplace-torch: equal to its full Laplace where all actions are taken, never below it elsewhere."""

import itertools
from typing import Any

import pytest
import torch

from tests import oracles
from tests.laplace_helpers import (
    HEADS,
    MLP,
    ONE,
    SEVERAL,
    Dense,
    close,
    differ,
    fitted,
    full_laplace,
    near_and_far,
    not_below,
    policies,
    precisions,
    problems,
    subsets,
    training_inputs,
    written_out,
)
from tests.network_cases import BY_NAME, CASES, NetworkCase, outputs_of

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
    evidence, rank = la.log_marginal_likelihood(), la.posterior.rank
    for max_rank in (12, 6, 3, 1):
        la.compress(max_rank)
        after = la.predictive_moments(x, joint=True)[1]
        assert la.posterior.rank == min(max_rank, rank)
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
    with pytest.raises(ValueError, match=r"`max_rank` must be .*whole number of at least 1"):
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

"""Samples and links of the laplace-torch flavours."""

import math
from collections.abc import Callable

import pytest
import torch
from laplace.utils.enums import LinkApprox, PredType
from torch import Tensor

from tests.laplace_helpers import (
    ENOUGH,
    MLP,
    ONE,
    SEVERAL,
    close,
    differ,
    fitted,
    full_laplace,
    near_and_far,
    not_below,
    problems,
    subsets,
    written_out,
)
from tests.network_cases import NetworkCase

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

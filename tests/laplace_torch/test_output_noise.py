"""A noise of its own for each output of a regression: W = diag(1/σ_c²), against dense matrices in float64."""

import math
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn

from tests import oracles
from tests.laplace_torch.test_first_day import Task, bounds, jacobian, regression_net, variances

SIGMA = torch.tensor([0.05, 0.4, 3.0], dtype=torch.float64)
PRECISION = 0.7


@pytest.fixture(scope="module")
def task() -> Task:
    whole = regression_net(3, torch.tensor([1.0, 0.3, 5.0]), width=6)
    return Task(whole.model, whole.x[:40], whole.y[:40], whole.new[:15], classification=False)


def fitted(task: Task, of: torch.dtype = torch.float64, sigma: Any = SIGMA, **settings: Any) -> Any:
    la = task.laplace(of, prior_precision=PRECISION, sigma_noise=sigma, **settings)
    la.fit(task.loader(of))
    return la


def truth(task: Task, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The exact covariance (b, C, C), the evidence at the network's weights, and log|I + W^{1/2} K W^{1/2}|."""
    (J, f), new_J = jacobian(task.model, task.x), jacobian(task.model, task.new)[0]
    W = (1 / sigma.square()).repeat(len(f)).diag()
    flat, theta = J.flatten(0, 1), nn.utils.parameters_to_vector(task.model.parameters()).detach().double()
    covariance = new_J @ oracles.weight_covariance(flat, W, PRECISION) @ new_J.mT
    fit = torch.distributions.Normal(f, sigma.expand_as(f)).log_prob(task.y.double()).sum()
    determinant = oracles.log_determinant(W, flat @ flat.T / PRECISION)
    return covariance, fit - 0.5 * (PRECISION * theta.square().sum() + determinant), determinant


@pytest.mark.parametrize("policy", ["exact", "clusters", "random_subspace"])
def test_with_all_actions_it_is_the_exact_posterior_under_any_common_scale(task: Task, policy: str) -> None:
    more = {} if policy == "exact" else {"num_actions": 120}
    la = fitted(task, policy=policy, **more)
    for sigma in (SIGMA, 2 * SIGMA):
        la.sigma_noise = sigma
        covariance, evidence, _ = truth(task, sigma)
        torch.testing.assert_close(la.latent(task.new.double())[1], covariance, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(la.log_marginal_likelihood(), evidence, rtol=1e-7, atol=0)
    assert torch.equal(la.sigma_noise, 2 * SIGMA)


@pytest.mark.parametrize("policy", ["clusters", "random_subspace"])
def test_few_actions_in_float32_never_claim_more_than_the_exact_posterior(task: Task, policy: str) -> None:
    la = fitted(task, torch.float32, SIGMA.float(), policy=policy, num_actions=15, dtype=torch.float32)
    covariance, evidence, determinant = truth(task, SIGMA)
    exact, found = covariance.diagonal(dim1=1, dim2=2), variances(la, task.new)
    assert bool((found >= (1 - 2e-3) * exact).all()) and float((found / exact).max()) > 1.01
    lower, upper = bounds(la)
    assert lower <= 1.001 * float(determinant) and upper >= 0.999 * float(determinant)
    assert float(la.log_marginal_likelihood()) <= float(evidence) + 1e-4 * abs(float(evidence))


@pytest.mark.parametrize("policy", ["clusters", "exact"])
def test_in_float32_all_actions_reach_the_exact_posterior(task: Task, policy: str) -> None:
    more = {} if policy == "exact" else {"num_actions": 120}
    la = fitted(task, torch.float32, SIGMA.float(), policy=policy, **more)
    exact = truth(task, SIGMA)[0].diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(variances(la, task.new), exact, rtol=2e-3, atol=0)


def test_the_refined_mean_and_its_evidence_are_those_of_gp_regression(task: Task) -> None:
    la = fitted(task, mean="refined", num_actions=120, actions_per_step=120, newton_tol=1e-12)
    (J, f), (new_J, new_f) = jacobian(task.model, task.x), jacobian(task.model, task.new)
    theta = nn.utils.parameters_to_vector(task.model.parameters()).detach().double()
    flat, noise = J.flatten(0, 1), SIGMA.square().repeat(len(f)).diag()
    K, prior_mean = flat @ flat.T / PRECISION, f.flatten() - flat @ theta
    missed = task.y.double().flatten() - prior_mean
    weights = torch.linalg.solve(K + noise, missed)
    expected = new_f - new_J @ theta + new_J @ (flat.T @ weights) / PRECISION
    torch.testing.assert_close(la.latent(task.new.double())[0], expected, rtol=1e-5, atol=1e-7)
    evidence = -0.5 * (missed @ weights + torch.logdet(K + noise) + len(missed) * math.log(2 * math.pi))
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence, rtol=1e-6, atol=0)


def test_a_last_layer_has_the_posterior_of_the_same_weights_with_the_others_frozen(task: Task) -> None:
    la = Laplace(
        task.laplace(torch.float64).model, "regression", "last_layer", "iterncgp", sigma_noise=SIGMA, num_actions=40
    )
    la.fit(task.loader(torch.float64))
    frozen = task.laplace(torch.float64).model.requires_grad_(False)
    frozen[2].requires_grad_(True)
    same = Laplace(frozen, "regression", "all", "iterncgp", sigma_noise=SIGMA, num_actions=40)
    same.fit(task.loader(torch.float64))
    x = task.new.double()
    torch.testing.assert_close(la.latent(x)[1], same.latent(x)[1], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(la.log_marginal_likelihood(), same.log_marginal_likelihood(), rtol=1e-7, atol=0)


def test_equal_noises_are_one_noise(task: Task) -> None:
    one, same = fitted(task, sigma=0.4, num_actions=20), fitted(task, sigma=torch.full((3,), 0.4), num_actions=20)
    x = task.new.double()
    assert torch.allclose(one.latent(x)[1], same.latent(x)[1], rtol=1e-6, atol=0)
    assert torch.allclose(one.log_marginal_likelihood(), same.log_marginal_likelihood(), rtol=1e-6)


def test_updates_and_merges_add_up_and_a_saved_fit_predicts_the_same(task: Task) -> None:
    data = list(zip(task.x.double().split(20), task.y.double().split(20), strict=True))
    halves = [task.laplace(torch.float64, prior_precision=PRECISION, sigma_noise=SIGMA, num_actions=60) for _ in data]
    for la, batch in zip(halves, data, strict=True):
        la.fit([batch])
    updated = task.laplace(torch.float64, prior_precision=PRECISION, sigma_noise=SIGMA, num_actions=60)
    updated.fit(data[:1])
    updated.update(data[1:])
    halves[0].merge(halves[1].state_dict())
    loaded = task.laplace(torch.float64)
    loaded.load_state_dict(updated.state_dict())
    covariance, evidence, _ = truth(task, SIGMA)
    for la in (updated, halves[0], loaded):
        torch.testing.assert_close(la.latent(task.new.double())[1], covariance, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(la.log_marginal_likelihood(), evidence, rtol=1e-7, atol=0)
        assert torch.equal(la.sigma_noise, SIGMA)
    normal = torch.distributions.Normal(torch.zeros(3, dtype=torch.float64), SIGMA)
    assert torch.allclose(loaded.uncertainty(task.new.double()).aleatoric, normal.entropy().sum())

    other = fitted(task, sigma=SIGMA.flip(0), num_actions=5)
    with pytest.raises(ValueError, match="`other` must have the ratios of sigma_noise between outputs of this fit"):
        updated.merge(other)


def test_other_ratios_between_outputs_take_another_fit(task: Task) -> None:
    la, x = fitted(task, num_actions=20), task.new.double()
    for other in (SIGMA.flip(0), 0.4, SIGMA[:2]):
        la.sigma_noise = other
        for ask in (la.latent, la.functional_variance):
            with pytest.raises(ValueError, match="`sigma_noise` must have the ratios between outputs that it had"):
                ask(x if ask == la.latent else jacobian(task.model, task.new)[0])
        with pytest.raises(ValueError, match="`sigma_noise` must have the ratios"):
            la.log_marginal_likelihood()
        with pytest.raises(ValueError, match="`sigma_noise` must have the ratios"):
            la.refine(task.loader(torch.float64), epochs=1)
    la.sigma_noise = SIGMA.flip(0)
    la.fit(task.loader(torch.float64))
    assert torch.allclose(la.latent(x)[1], fitted(task, sigma=SIGMA.flip(0), num_actions=20).latent(x)[1])


def test_a_noise_for_each_output_is_checked(task: Task) -> None:
    la = task.laplace(torch.float64, sigma_noise=SIGMA[:2])
    with pytest.raises(ValueError, match="one for each of the 3 outputs; got a tensor of shape \\(2,\\)"):
        la.fit(task.loader(torch.float64))
    with pytest.raises(ValueError, match=r"`sigma_noise` must be 1 for classification, .*; got a tensor of 3"):
        Laplace(task.model, "classification", "all", "iterncgp", sigma_noise=SIGMA)

"""Latent moments and predictions are differentiable in the inputs: against finite differences, for all kernels.

By products (where policy="auto" would be exact), and exact.
"""

from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch
from torch import Tensor, nn

from ntk_iterncgp import NonConjugateGP, likelihoods
from ntk_iterncgp.kernels import (
    RBF,
    Deep,
    FromGPyTorch,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
)

N, B = 25, 3
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


X, x = normal(N, 2), normal(B, 2)
WAVE = torch.sin(3 * X[:, 0])
NETWORK = nn.Sequential(nn.Linear(2, 5), nn.Tanh()).double().requires_grad_(False)
KERNELS: dict[str, Kernel] = {
    "rbf": RBF(0.8, 1.3),
    "matern12": Matern12(0.8, 1.3),
    "matern32": Matern32([0.8, 1.1], 1.3),
    "matern52": Matern52(0.8, 1.3),
    "periodic": Periodic(0.9, 1.3, [2.0, 3.0]),
    "rational quadratic": RationalQuadratic([0.8, 1.1], 1.3, 0.7),
    "linear": Linear([0.8, 1.3]),
    "sum": RBF(0.8) + Matern32(0.5),
    "product": RBF(0.8) * Matern12(2.0),
    "scaled": 2.0 * Matern52(0.6),
    "deep": Deep(NETWORK, RBF(1.0)),
    "gpytorch": FromGPyTorch(gpytorch.kernels.PeriodicKernel()),
}
LIKELIHOODS: dict[str, tuple[likelihoods.Likelihood, Tensor]] = {
    "gaussian": (likelihoods.Gaussian(0.1), WAVE),
    "two outputs": (likelihoods.Gaussian(0.1, 2), torch.stack([WAVE, -WAVE], 1)),
    "bernoulli": (likelihoods.Bernoulli(), (WAVE > 0).double()),
    "poisson": (likelihoods.Poisson(), (2 * WAVE.exp()).round()),
    "negative binomial": (likelihoods.NegativeBinomial(0.5), (2 * WAVE.exp()).round()),
    "binomial": (likelihoods.Binomial(torch.full((N,), 6.0)), (3 + 2 * WAVE).round()),
    "ordinal": (likelihoods.Ordinal(4), (1.5 + 1.4 * WAVE).round()),
    "two classes": (likelihoods.Softmax(2), (WAVE > 0).long()),
    "softmax": (likelihoods.Softmax(3), (WAVE > 0).long() + (X[:, 1] > 0).long()),
}

BUDGET: dict[str, dict[str, Any]] = {"curvature_residual": {"max_products": 8}, "exact": {}}
policies = pytest.mark.parametrize("policy", BUDGET)


def finite_differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-5) -> Tensor:
    steps = step * torch.eye(at.numel(), dtype=at.dtype).reshape(-1, *at.shape)
    slopes = [(function(at + s) - function(at - s)) / (2 * step) for s in steps]
    return torch.stack(slopes).reshape(at.shape)


def gradients_agree(function: Callable[[Tensor], Tensor]) -> None:
    """Of a sum with random weights, so that no entry is left out."""
    with torch.no_grad():
        weights = normal(*function(x).shape)
        slopes = finite_differences(lambda at: (weights * function(at)).sum(), x)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((weights * function(leaf)).sum(), leaf)
    torch.testing.assert_close(gradient, slopes, rtol=1e-5, atol=1e-7)


@policies
@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_moments_have_the_gradients_of_finite_differences(kernel: str, name: str, policy: str) -> None:
    likelihood, y = LIKELIHOODS[name]
    gp = NonConjugateGP(KERNELS[kernel], likelihood, policy=policy, **BUDGET[policy]).fit(X, y)
    gradients_agree(lambda at: gp.latent(at)[0])
    gradients_agree(lambda at: gp.latent(at)[1])
    gradients_agree(lambda at: gp.latent(at, joint=True)[0])
    gradients_agree(lambda at: gp.latent(at, joint=True)[1])


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_so_have_predictions_of_the_exact_posterior(name: str) -> None:
    likelihood, y = LIKELIHOODS[name]
    gp = NonConjugateGP(RBF(0.8), likelihood, policy="exact").fit(X, y)
    gradients_agree(gp.predict)


@pytest.mark.parametrize("actions", ["joint", "kronecker", "a kernel each"])
@pytest.mark.parametrize("name", ["two classes", "softmax"])
def test_so_have_predictions_however_actions_are_stored(name: str, actions: str) -> None:
    likelihood, y = LIKELIHOODS[name]
    if actions == "a kernel each":
        kernels = [RBF(0.8), Matern32(0.5), Matern52(1.0)][: likelihood.num_outputs]
        gp = NonConjugateGP(kernels, likelihood, max_products=8, policy="curvature_residual").fit(X, y)
    else:
        gp = NonConjugateGP(RBF(0.8), likelihood, actions=actions, max_products=8, policy="curvature_residual").fit(
            X, y
        )
    gradients_agree(lambda at: gp.latent(at)[1])
    gradients_agree(lambda at: gp.latent(at, joint=True)[1])
    gradients_agree(lambda at: gp.predict(at))
    if name == "two classes":
        gradients_agree(lambda at: gp.predict(at, link="quadrature"))


def test_inputs_by_the_thousand_have_gradients_too() -> None:
    """Where k(x, X) is not written out but multiplied by tiles."""
    likelihood, y = LIKELIHOODS["bernoulli"]
    gp = NonConjugateGP(Matern32(0.8), likelihood, max_products=8, chunk_bytes=4000, policy="curvature_residual").fit(
        X, y
    )
    whole = NonConjugateGP(Matern32(0.8), likelihood, max_products=8, policy="curvature_residual").fit(X, y)
    gradients = []
    for posterior in (gp, whole):
        leaf = torch.cat([x] * 50).requires_grad_()
        gradients.append(torch.autograd.grad(posterior.latent(leaf)[1].sum(), leaf)[0])
    torch.testing.assert_close(*gradients)


def test_the_inputs_may_ask_for_a_gradient_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    likelihood, y = LIKELIHOODS["gaussian"]
    gp = NonConjugateGP(RBF(0.8), likelihood, max_products=8, policy="curvature_residual").fit(X, y)
    gp.latent(x.clone().requires_grad_())[1].sum().backward()
    assert not [str(w.message) for w in recwarn]

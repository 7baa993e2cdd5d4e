"""What `converged` promises, a mean within a tenth of a posterior standard deviation; and how far the variance is."""

import math

import pytest
import torch
from torch import Tensor

from ntk_iterncgp import NonConjugateGP, likelihoods
from ntk_iterncgp.kernels import RBF, Kernel, Matern12, Matern32
from ntk_iterncgp.solver import State
from tests import oracles


def data(num_data: int, seed: int = 0) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(num_data, 1, generator=generator, dtype=torch.float64)
    return X, torch.sin(6 * X[:, 0]), generator


def newton_weights(name: str, f: Tensor, K: Tensor, y: Tensor, noise: float | None = None) -> Tensor:
    """An exact Newton step from f. Where W is a large diagonal, (K + W⁻¹) v = g + W⁻¹∇ rounds less than the oracle."""
    if name == "softmax":
        return oracles.newton_weights(name, f, K, torch.zeros(len(K), dtype=torch.float64), y, noise)
    variance = oracles.curvature_root(name, f, noise).diagonal() ** -2
    targets = f.flatten() + variance * oracles.score(name, f, y, noise)
    return torch.cholesky_solve(targets[:, None], torch.linalg.cholesky(K + variance.diag()))[:, 0]


def exact_mode(name: str, K: Tensor, y: Tensor, noise: float | None = None) -> tuple[Tensor, Tensor]:
    """f (N, C) and v by damped Newton steps, until one of them is 1e-3 standard deviations of the noise."""
    m = torch.zeros(len(K), dtype=torch.float64)
    v = torch.zeros_like(m)
    for _ in range(200):
        f = (K @ v).reshape(len(y), -1)
        step = newton_weights(name, f, K, y, noise) - v
        now, size = oracles.psi(name, v, K, m, y, noise), 1.0
        while not oracles.psi(name, v + size * step, K, m, y, noise) >= now - 1e-12 * now.abs():
            size /= 2
        v = v + size * step
        moved = oracles.curvature_root(name, f, noise).T @ (K @ step)
        # A Gaussian's first step is exact; with as little noise as this, the next ones are rounding.
        if size == 1 and (name == "gaussian" or float(moved.norm()) < 1e-3):
            return (K @ v).reshape(len(y), -1), v
    raise RuntimeError("The dense Newton steps did not converge.")


def error_of_mean(gp: NonConjugateGP, kernel: Kernel, name: str, X: Tensor, y: Tensor, x: Tensor) -> float:
    """The largest, in standard deviations of the exact posterior, at new inputs and at the data."""
    C, worst = gp.likelihood.num_outputs, 0.0
    K = oracles.block_kernel([kernel(X, X)] * C)
    noise = gp.likelihood.variance if isinstance(gp.likelihood, likelihoods.Gaussian) else None
    f, v = exact_mode(name, K, y, noise)
    for at in (X, x):
        cross, prior = oracles.block_kernel([kernel(at, X)] * C), oracles.block_kernel([kernel(at, at)] * C)
        covariance = oracles.posterior_at(name, f, K, cross, prior, noise)
        off = (gp.latent(at)[0].flatten() - cross @ v).abs()
        worst = max(worst, float((off / covariance.diagonal().clamp_min(1e-300).sqrt()).max()))
    return worst


@pytest.mark.parametrize("outputscale", [1.0, 25.0])
@pytest.mark.parametrize("level", [1.0, 1e2, 1e4, 1e5, 1e6])
def test_counts_up_to_a_million_converge_to_the_mode(level: float, outputscale: float) -> None:
    """With a prior mean of zero: 1 % of a log-rate of 14 is 140 standard deviations of a count of a million."""
    X, f, generator = data(100)
    y = torch.poisson(level * f.exp(), generator=generator)
    kernel = Matern32(0.3, outputscale)
    gp = NonConjugateGP(kernel, likelihoods.Poisson(), policy="curvature_residual").fit(X, y)
    error = error_of_mean(gp, kernel, "poisson", X, y, torch.linspace(-0.1, 1.1, 30, dtype=torch.float64)[:, None])
    assert gp.report_.status == "converged" and error < 0.1


@pytest.mark.parametrize("level", [1e4, 1e6])
def test_without_the_products_that_it_takes_a_mean_is_not_called_converged(level: float) -> None:
    X, f, generator = data(100)
    y = torch.poisson(level * f.exp(), generator=generator)
    gp = NonConjugateGP(Matern32(0.3), likelihoods.Poisson(), max_products=30, policy="curvature_residual").fit(X, y)
    assert gp.report_.status in ("budget", "newton_steps")
    assert error_of_mean(gp, Matern32(0.3), "poisson", X, y, X[:1]) > 0.1
    gp.refine(70)
    assert gp.report_.status == "converged"
    assert error_of_mean(gp, Matern32(0.3), "poisson", X, y, X[:1]) < 0.1


@pytest.mark.parametrize("policy", ["curvature_residual", "residual"])
@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "softmax"])
def test_where_a_run_has_converged_its_mean_is_right_everywhere(name: str, policy: str) -> None:
    X, f, generator = data(150)
    if name == "gaussian":
        y = f + 1e-3 * torch.randn(150, generator=generator, dtype=torch.float64)
        likelihood: likelihoods.Likelihood = likelihoods.Gaussian(1e-6)
    elif name == "bernoulli":
        y, likelihood = torch.bernoulli((5 * f).sigmoid(), generator=generator), likelihoods.Bernoulli()
    else:
        y, likelihood = (X[:, 0] * 3).long(), likelihoods.Softmax(3)
    kernel = Matern32(0.2, 10.0)
    gp = NonConjugateGP(kernel, likelihood, policy=policy, max_products=150, max_newton_steps=60).fit(X, y)
    assert gp.report_.status == "converged"
    assert error_of_mean(gp, kernel, name, X, y, torch.linspace(-0.5, 1.5, 30, dtype=torch.float64)[:, None]) < 0.1


@pytest.mark.parametrize("name", ["poisson", "bernoulli", "softmax"])
def test_the_newton_decrement_bounds_the_next_exact_step_at_every_point(name: str) -> None:
    """Also far from the mode, where it is large."""
    X, f, generator = data(60)
    kernel = RBF(0.2, 4.0)
    y, likelihood = {
        "poisson": lambda: (torch.poisson(100 * f.exp(), generator=generator), likelihoods.Poisson()),
        "bernoulli": lambda: (torch.bernoulli((5 * f).sigmoid(), generator=generator), likelihoods.Bernoulli()),
        "softmax": lambda: ((X[:, 0] * 3).long(), likelihoods.Softmax(3)),
    }[name]()
    K, checked = oracles.block_kernel([kernel(X, X)] * likelihood.num_outputs), []

    def check(state: State) -> None:
        g = state.iterate.offset
        exact = K @ newton_weights(name, state.latent, K, y)
        solved = state.solution.offset
        covariance = oracles.posterior_at(name, state.latent, K, K, K)
        deviation = covariance.diagonal().clamp_min(0).sqrt() + 1e-9
        for there, bound in ((g, state.newton_decrement), (solved, state.solution_error)):
            assert float(((exact - there).abs() / deviation).max()) <= bound * (1 + 1e-4) + 1e-4
        checked.append(state.newton_decrement)

    NonConjugateGP(kernel, likelihood, max_products=40, policy="curvature_residual").fit(X, y, callback=check)
    assert max(checked) > 1 and min(checked) < 0.1


def test_a_converged_regression_says_how_far_its_variance_is() -> None:
    X, f, generator = data(300)
    y = f + 0.1 * torch.randn(300, generator=generator, dtype=torch.float64)
    kernel, noise = Matern12(0.3), 0.01
    gp = NonConjugateGP(kernel, likelihoods.Gaussian(noise), policy="curvature_residual").fit(X, y)
    K = kernel(X, X)
    exact = (K - K @ torch.linalg.solve(K + noise * torch.eye(300, dtype=torch.float64), K)).diagonal()
    report, ratio = gp.report_, float(gp.latent(X)[1].sum() / exact.sum())
    assert report.status == "converged" and ratio > 1.3 and report.variance_ratio is not None
    assert ratio <= report.variance_ratio <= 4 * ratio
    told = f"{report.variance_ratio:.3g} times the exact"
    assert f"The variance may still be {told} one" in report.advice and f"at most {told} variance" in str(report)
    assert report.advice.startswith("The mean has converged.") and "refine(" in report.advice
    gp.refine(300)
    assert gp.report_.variance_ratio == pytest.approx(1.0, abs=1e-6)
    assert gp.report_.status in ("converged", "exhausted") and "within 1 % of exact" in gp.report_.advice


def test_without_any_action_the_ratio_is_still_an_upper_bound() -> None:
    X, _, _ = data(40)
    gp = NonConjugateGP(RBF(0.3), likelihoods.Gaussian(0.1), policy="curvature_residual").fit(X, torch.zeros(40))
    K = RBF(0.3)(X, X)
    exact = (K - K @ torch.linalg.solve(K + 0.1 * torch.eye(40, dtype=torch.float64), K)).diagonal()
    assert gp.report_.rank == 0 and gp.report_.variance_ratio is not None
    assert 1 / float(exact.mean()) <= gp.report_.variance_ratio < math.inf

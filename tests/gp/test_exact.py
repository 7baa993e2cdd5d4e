"""The exact posterior against the dense oracle, the choice of it, and the switch to the one that iterates."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ntk_iterncgp import NonConjugateGP
from ntk_iterncgp.fitting.report import SelfCheckError
from ntk_iterncgp.gp.affordable import Sizes
from ntk_iterncgp.kernels import RBF, Kernel, Matern32, Matern52
from ntk_iterncgp.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson, Softmax
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver.exact import ExactState
from tests import oracles
from tests.checkpoint_helpers import Killed, checkpoint_in, die_at_save

N, b, NOISE = 24, 6, 0.3
PARTS: list[Kernel] = [Matern52(0.3, 5.0), RBF(0.5, 2.0), Matern32(0.8, 1.0)]


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, x = uniform(N, 2, seed=0), uniform(b, 2, seed=1)
LIKELIHOODS: dict[str, tuple[Likelihood, Tensor]] = {
    "gaussian": (Gaussian(NOISE, 2), torch.sin(9 * X) + 0.3 * uniform(N, 2, seed=2)),
    "bernoulli": (Bernoulli(), (uniform(N, seed=3) < X[:, 0]).double()),
    "poisson": (Poisson(), (200 * uniform(N, seed=4) ** 4).round()),
    "softmax": (Softmax(3), (3 * uniform(N, seed=5)).long()),
}
NAMES = pytest.mark.parametrize("name", LIKELIHOODS)
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["one kernel", "a kernel each"])


def made(name: str, *, shared: bool = True, scale: float = 1.0, **settings: Any) -> NonConjugateGP:
    likelihood, _ = LIKELIHOODS[name]
    parts = [scale * part for part in PARTS[: 1 if shared else likelihood.num_outputs]]
    mean = [0.2 * (c + 1) for c in range(likelihood.num_outputs)]
    return NonConjugateGP(parts[0] if shared else parts, likelihood, mean=mean, **settings)


def fitted(name: str, **settings: Any) -> NonConjugateGP:
    return made(name, **settings).fit(X, LIKELIHOODS[name][1])


def dense(gp: NonConjugateGP, left: Tensor, right: Tensor) -> Tensor:
    outputs = gp.likelihood.num_outputs
    parts = gp.kernels if len(gp.kernels) == outputs else gp.kernels * outputs
    return oracles.block_kernel([k(left, right) for k in parts])


def truth(gp: NonConjugateGP, name: str, X: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean (b C,), covariance (b C, b C) and log evidence of the oracle."""
    K = dense(gp, X, X)
    m, mx = gp.mean.repeat(len(X)), gp.mean.repeat(len(x))
    mean, covariance = oracles.posterior(name, K, dense(gp, x, X), dense(gp, x, x), m, mx, y, NOISE)
    return mean, covariance, float(oracles.log_evidence(name, K, m, y, NOISE))


@SHARED
@NAMES
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_it_equals_the_dense_posterior(name: str, shared: bool, scale: float) -> None:
    gp = fitted(name, shared=shared, scale=scale, policy="exact")
    outputs, y = gp.likelihood.num_outputs, LIKELIHOODS[name][1]
    mean, covariance, evidence = truth(gp, name, X, y, x)
    tolerance = dict(rtol=0.0, atol=1e-8 * scale)
    found_mean, found = gp.latent(x, joint=True)
    torch.testing.assert_close(found_mean.flatten(), mean, **tolerance)
    torch.testing.assert_close(found, covariance, **tolerance)
    blocks = torch.stack([covariance[i : i + outputs, i : i + outputs] for i in range(0, b * outputs, outputs)])
    torch.testing.assert_close(gp.latent(x)[1], blocks, **tolerance)
    marginal_mean, variance = gp.posterior_.marginals(x)
    torch.testing.assert_close(marginal_mean.flatten(), mean, **tolerance)
    torch.testing.assert_close(variance, blocks.diagonal(dim1=1, dim2=2), **tolerance)
    bounds = gp.log_evidence()
    assert bounds.lower == bounds.value == bounds.upper == pytest.approx(evidence, abs=1e-8 * scale)
    report = gp.report_
    assert report.status == "exact" and report.information_captured == 1.0 and report.variance_ratio == 1.0
    assert str(report).startswith("exact: ") and "all of the information captured" in str(report)


@NAMES
def test_its_elbo_is_that_of_the_dense_posterior(name: str) -> None:
    gp = fitted(name, policy="exact")
    K, outputs = dense(gp, X, X), gp.likelihood.num_outputs
    state = gp.posterior_.state
    W = oracles.curvature_matrix(name, state.latent, noise=NOISE)
    eye = torch.eye(len(K), dtype=torch.float64)
    covariance = K @ torch.linalg.inv(eye + W @ K)
    v = state.iterate.representer_weights
    divergence = 0.5 * (v @ K @ v + torch.logdet(eye + W @ K) - (W @ covariance).trace())
    blocks = torch.stack([covariance[i : i + outputs, i : i + outputs] for i in range(0, N * outputs, outputs)])
    expected = gp.likelihood.expected_log_prob(state.latent, blocks, state.problem.targets).sum()
    assert gp.elbo() == pytest.approx(float(expected - divergence), abs=2e-3 if name == "softmax" else 1e-7)
    if name == "gaussian":
        assert gp.elbo() == pytest.approx(gp.log_evidence().value, abs=1e-8)


@SHARED
@NAMES
def test_there_is_no_jump_between_it_and_an_iterative_fit_with_all_actions(name: str, shared: bool) -> None:
    exact = fitted(name, shared=shared)
    settings: dict[str, Any] = dict(policy="unit", max_products=1000, newton_tol=1e-9, max_newton_steps=100)
    iterative = fitted(name, shared=shared, actions="joint", **settings).refine(1000)
    assert iterative.report_.rank == exact.report_.rank
    for one, other in zip(exact.latent(x, joint=True), iterative.latent(x, joint=True), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6)
    assert exact.log_evidence().value == pytest.approx(iterative.log_evidence().value, abs=1e-6)


@NAMES
def test_float32_data_get_the_answers_of_float64(name: str) -> None:
    y = LIKELIHOODS[name][1]
    single = made(name).fit(X.float(), y)
    double = made(name).fit(X.float().double(), y)
    for one, other in zip(single.latent(x.float()), double.latent(x.float().double()), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    assert single.log_evidence() == double.log_evidence()


@NAMES
def test_gradients_with_respect_to_new_inputs_agree_with_finite_differences(name: str) -> None:
    gp = fitted(name)
    leaf = x[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda at: gp.latent(at), leaf, atol=1e-6)
    assert torch.autograd.gradcheck(lambda at: gp.latent(at, joint=True)[1], leaf, atol=1e-6)
    assert torch.autograd.gradcheck(lambda at: gp.predict(at), leaf, atol=1e-6)


def test_samples_have_the_moments_of_the_posterior() -> None:
    gp = fitted("softmax")
    mean, covariance = gp.latent(x[:2], joint=True)
    draws = gp.sample(x[:2], 20_000, generator=torch.Generator().manual_seed(0)).flatten(1)
    torch.testing.assert_close(draws.mean(0), mean.flatten(), rtol=0.0, atol=0.1)
    torch.testing.assert_close(torch.cov(draws.T), covariance, rtol=0.0, atol=0.15)


# The mode


def test_newton_ascends_on_large_counts_where_full_steps_diverge() -> None:
    for seed in range(10):
        inputs = uniform(30, 1, seed=seed)
        counts = torch.poisson((8 * torch.sin(9 * inputs[:, 0])).exp(), generator=torch.Generator().manual_seed(seed))
        gp = NonConjugateGP(RBF(0.2, 5.0), Poisson()).fit(inputs, counts)
        values = [record.objective for record in gp.report_.history]
        assert gp.report_.status == "exact"
        assert all(after >= before - 1e-9 * abs(before) for before, after in itertools.pairwise(values))
        state = gp.posterior_.state
        slope = (state.score - state.iterate.representer_weights).abs().max()
        assert float(slope) <= 1e-6 * float(state.score.abs().max())


def test_repeated_and_saturated_data_are_no_trouble() -> None:
    inputs = torch.cat([X, X, X[:1].expand(20, -1)])
    for likelihood, y in ((Softmax(3), inputs[:, 0] > 0.5), (Gaussian(1e-8), inputs[:, 0])):
        gp = NonConjugateGP(RBF(2.0, 1e4), likelihood).fit(inputs, y.double())
        variance = gp.latent(x)[1].diagonal(dim1=1, dim2=2)
        assert gp.report_.status == "exact" and bool(torch.isfinite(variance).all()) and bool((variance >= 0).all())


def test_refining_says_that_there_is_nothing_to_refine() -> None:
    gp = fitted("poisson")
    before, history = gp.latent(x), gp.report_.history
    assert gp.refine(5) is gp
    assert gp.report_.status == "exact" and "nothing is left to refine" in str(gp.report_)
    assert gp.report_.history == history
    for one, other in zip(gp.latent(x), before, strict=True):
        assert torch.equal(one, other)


def test_the_callback_sees_every_newton_step() -> None:
    seen: list[ExactState] = []
    gp = made("softmax").fit(X, LIKELIHOODS["softmax"][1], callback=seen.append)
    assert [state.newton_step for state in seen] == list(range(1, gp.report_.num_newton_steps + 1))
    assert [state.objective for state in seen] == [record.objective for record in gp.report_.history]


# The choice


def test_auto_is_exact_for_few_data_and_iterates_for_many_or_where_iteration_is_asked_for() -> None:
    y = LIKELIHOODS["bernoulli"][1]
    assert NonConjugateGP(RBF(0.3), Bernoulli()).fit(X, y).report_.status == "exact"
    for settings in ({"policy": "curvature_residual"}, {"max_rank": 5}, {"damped": False}, {"actions": "joint"}):
        report = NonConjugateGP(RBF(0.3), Bernoulli(), **settings).fit(X, y).report_  # type: ignore[arg-type]
        assert report.status != "exact" and report.num_products > 0


@pytest.mark.parametrize(("outputs", "few", "many"), [(1, 2_000, 40_000), (10, 800, 10_000)])
def test_the_choice_is_the_cheaper_one_by_flops(outputs: int, few: int, many: int) -> None:
    def sizes(num_data: int, max_products: int = 100) -> Sizes:
        rank = max(outputs - 1, 1)
        return Sizes(num_data, 5, outputs, 1, outputs > 1, False, max_products, min(3000, max_products * rank**2))

    assert sizes(few).exact_flops < sizes(few).iterative_flops
    assert sizes(many).exact_flops > sizes(many).iterative_flops
    assert sizes(many, 10).iterative_flops < sizes(many, 100).iterative_flops


def test_forcing_what_does_not_fit_is_refused_with_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntk_iterncgp.gp.affordable.available_bytes", lambda device: 2**10)
    with pytest.raises(MemoryError, match=r"K has 24² entries\. Try policy='auto'"):
        fitted("poisson", policy="exact")
    assert fitted("poisson", policy="auto").report_.status != "exact"


class Unstructured(Softmax):
    """Of a curvature that nobody knows how to factor."""

    def noise_diagonal(self, latent: Tensor) -> None:  # type: ignore[override]
        return None

    def noise(self, latent: Tensor, block: Tensor) -> Tensor:
        return Softmax(3).noise(latent, block)


def test_a_likelihood_without_the_structure_iterates_and_is_refused_when_forced() -> None:
    y = LIKELIHOODS["softmax"][1]
    gp = NonConjugateGP(RBF(0.5), Unstructured(3), max_products=5).fit(X, y)
    assert gp.report_.status != "exact"
    with pytest.raises(ValueError, match=r"`policy` must be an iterative one for .* Try policy='curvature_residual'"):
        NonConjugateGP(RBF(0.5), Unstructured(3), policy="exact").fit(X, y)


# Failures


def test_a_kernel_that_changes_while_it_is_fitted_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GramPrior.between
    asked = []

    def between(self: GramPrior, x: Tensor, z: Tensor) -> Tensor:
        asked.append(len(x))
        return original(self, x, z) * (1.0 if len(asked) == 1 else 1.1)

    monkeypatch.setattr(GramPrior, "between", between)
    with pytest.raises(SelfCheckError, match="the kernel to be that of the fit"):
        fitted("poisson")


@NAMES
def test_a_fit_that_was_killed_goes_on_with_the_same_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    y, said = LIKELIHOODS[name][1], list[str]()
    whole = fitted(name)
    with monkeypatch.context() as patch:
        die_at_save(1, patch)
        with pytest.raises(Killed):
            made(name).fit(X, y, checkpoint=checkpoint_in(tmp_path))
    resumed = made(name).fit(X, y, checkpoint=checkpoint_in(tmp_path, said))
    assert any("Going on with 'fit'" in sentence for sentence in said)
    for one, other in zip(resumed.latent(x), whole.latent(x), strict=True):
        assert torch.equal(one, other)
    assert resumed.log_evidence() == whole.log_evidence()
    assert not any(tmp_path.iterdir()) if tmp_path.exists() else True


# Regression where there is a gap


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("policy", ["auto", "curvature_residual"])
def test_the_band_is_narrow_at_the_data_and_opens_in_a_gap_and_outside(dtype: torch.dtype, policy: str) -> None:
    """A sin curve, 150 points, σ = 0.1, none between 2 and 4."""
    generator = torch.Generator().manual_seed(0)
    inputs = 6 * torch.rand(150, 1, generator=generator, dtype=torch.float64)
    inputs = inputs[(inputs[:, 0] < 2) | (inputs[:, 0] > 4)].to(dtype)
    y = torch.sin(inputs[:, 0]) + 0.1 * torch.randn(len(inputs), generator=generator, dtype=torch.float64).to(dtype)
    gp = NonConjugateGP(RBF(1.0), Gaussian(0.01), policy=policy, max_products=150).fit(inputs, y)
    grid = torch.linspace(-6, 12, 181, dtype=dtype)[:, None]
    mean, covariance = gp.latent(grid)
    deviation, at = covariance[:, 0, 0].sqrt(), grid[:, 0]
    error = (mean[:, 0] - torch.sin(at)).abs()
    observed = ((at > 0.2) & (at < 1.8)) | ((at > 4.2) & (at < 5.8))
    gap, outside = (at - 3).abs() < 0.2, (at < -4) | (at > 10)
    assert float(deviation[observed].max()) < 0.06 and float(error[observed].max()) < 0.1
    assert float(deviation[gap].min()) > 3 * float(deviation[observed].max())
    assert bool((error <= 3 * deviation + 0.02)[~outside].all())
    torch.testing.assert_close(deviation[outside], torch.ones_like(deviation[outside]), rtol=1e-2, atol=0.0)
    K = gp.kernels[0](inputs.double(), inputs.double()) + 0.01 * torch.eye(len(inputs), dtype=torch.float64)
    cross = gp.kernels[0](grid.double(), inputs.double())
    exact = (1 - (cross * torch.linalg.solve(K, cross.T).T).sum(1)).clamp_min(0).sqrt()
    assert bool((deviation.double() >= exact * (1 - 1e-3)).all())
    if policy == "auto":
        torch.testing.assert_close(deviation.double(), exact, rtol=1e-3, atol=1e-5)
        assert math.isclose(gp.elbo(), gp.log_evidence().value, abs_tol=1e-6)

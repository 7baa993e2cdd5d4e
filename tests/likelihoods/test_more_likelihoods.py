"""Counts, levels and fixed noise: W may see the targets, and parameters belong to a datum.

Derivatives against autograd, normalisation, log-concavity, extreme values, and fits against the dense truth."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from ntk_iterncgp import NonConjugateGP, likelihoods
from ntk_iterncgp.kernels import RBF, Matern32
from ntk_iterncgp.likelihoods import (
    Bernoulli,
    Binomial,
    FixedNoiseGaussian,
    Gaussian,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
)

N = 8
EXPOSURE = torch.linspace(0.2, 5.0, N, dtype=torch.float64)
COUNTS = torch.tensor([0.0, 1, 4, 30, 2, 0, 7, 300])
LEVELS = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])
VALUES = torch.linspace(-2, 3, N, dtype=torch.float64)
CASES: dict[str, tuple[Likelihood, Tensor]] = {
    "poisson with exposures": (Poisson(EXPOSURE), COUNTS),
    "quasi-poisson": (Poisson(2.0, fractional=True), COUNTS + 0.5),
    "negative binomial": (NegativeBinomial(0.7), COUNTS),
    "negative binomial with exposures": (NegativeBinomial(3.0, exposure=EXPOSURE), COUNTS),
    "binomial": (Binomial(12), COUNTS.clamp_max(12)),
    "binomial with trials": (Binomial([1, 2, 5, 40, 3, 9, 7, 300]), COUNTS),
    "ordinal logit": (Ordinal(4), LEVELS),
    "ordinal probit": (Ordinal(4, thresholds=[-1.0, 0.1, 2.5], link="probit"), LEVELS),
    "fixed noise": (FixedNoiseGaussian(0.3 * EXPOSURE), VALUES),
}


def case(name: str) -> tuple[Likelihood, Tensor]:
    likelihood, targets = CASES[name]
    targets = likelihood.check_targets(targets)
    return likelihood.given(targets), targets


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(likelihood: Likelihood, latent: Tensor) -> Tensor:
    return likelihood.curvature(latent, torch.ones(len(latent), 1, 1, dtype=latent.dtype))[:, 0, 0]


@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("name", CASES)
def test_score_and_curvature_are_those_of_autograd(name: str, scale: float) -> None:
    likelihood, y = case(name)
    f = (scale * draw(N, 1)).requires_grad_()
    (score,) = torch.autograd.grad(likelihood.log_prob(f, y).sum(), f)
    torch.testing.assert_close(likelihood.score(f, y), score, rtol=1e-9, atol=1e-9)
    (second,) = torch.autograd.grad(likelihood.score(f, y).sum(), f)
    torch.testing.assert_close(weights(likelihood, f.detach()), -second[:, 0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_the_log_probability_is_concave_and_noise_inverts_the_curvature(name: str) -> None:
    likelihood, y = case(name)
    for value in (-30.0, -5.0, -1.0, 0.0, 1.0, 5.0, 30.0):
        f = torch.full((N, 1), value, dtype=torch.float64)
        assert (weights(likelihood, f) > 0).all()
        step = torch.full_like(f, 0.5)
        middle = likelihood.log_prob(f, y) * 2
        ends = likelihood.log_prob(f + step, y) + likelihood.log_prob(f - step, y)
        assert (middle - ends >= -1e-10 * (1 + middle.abs())).all()
        block = draw(N, 1, 2)
        torch.testing.assert_close(likelihood.noise(f, likelihood.curvature(f, block)), block, rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [-800.0, -60.0, 60.0, 800.0])
@pytest.mark.parametrize("name", [name for name in CASES if "poisson" not in name])
def test_extreme_latent_values_give_finite_numbers(name: str, size: float, dtype: torch.dtype) -> None:
    likelihood, y = case(name)
    f, block = torch.full((N, 1), size, dtype=dtype), torch.ones(N, 1, 2, dtype=dtype)
    found = [likelihood.score(f, y), likelihood.curvature(f, block), likelihood.noise(f, block)]
    found.append(likelihood.log_prob(f.double(), y))
    assert all(value is not None and value.isfinite().all() for value in found)


def test_probabilities_are_those_of_scipy() -> None:
    f, mean = draw(N, 1), EXPOSURE * draw(N, 1)[:, 0].exp()
    size = 1 / 3.0
    expected = {
        "poisson with exposures": stats.poisson.logpmf(COUNTS, mean),
        "negative binomial with exposures": stats.nbinom.logpmf(COUNTS, size, size / (size + mean)),
        "binomial": stats.binom.logpmf(COUNTS.clamp_max(12), 12, f[:, 0].sigmoid()),
        "fixed noise": stats.norm.logpdf(VALUES, f[:, 0], (0.3 * EXPOSURE).sqrt()),
    }
    for name, value in expected.items():
        likelihood, y = case(name)
        torch.testing.assert_close(likelihood.log_prob(f, y), torch.from_numpy(value), rtol=1e-11, atol=1e-11)


def test_a_small_dispersion_is_poisson() -> None:
    f, y = draw(N, 1), COUNTS.double()
    close = NegativeBinomial(1e-7).log_prob(f, y) - Poisson().log_prob(f, y)
    assert close[:7].abs().max() < 1e-4


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_the_levels_share_the_probability_and_their_cuts_are_where_they_should_be(link: str) -> None:
    likelihood, f = Ordinal(5, link=link), torch.tensor([[-700.0], [-3.0], [0.0], [2.0], [40.0]], dtype=torch.float64)
    p = likelihood.response(f)
    torch.testing.assert_close(p.sum(1), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-13)
    torch.testing.assert_close(p[2], torch.full((5,), 0.2, dtype=torch.float64), rtol=0, atol=1e-13)
    assert p[0, 0] == 1 and p[4, 4] == pytest.approx(1)
    for level in range(5):
        y = torch.full((5,), level)
        torch.testing.assert_close(likelihood.log_prob(f, y).exp(), p[:, level], rtol=1e-12, atol=1e-300)


def test_two_levels_are_a_binary_label() -> None:
    f, y = draw(N, 1), torch.tensor([0, 1] * 4)
    ordinal = Ordinal(2).given(y)
    torch.testing.assert_close(ordinal.log_prob(f, y), Bernoulli().log_prob(f, y.double()))
    torch.testing.assert_close(weights(ordinal, f), weights(Bernoulli(), f))


def test_a_level_in_a_thin_slice_of_the_tail_keeps_its_accuracy() -> None:
    y = torch.tensor([1])
    for link in ("logit", "probit"):
        likelihood = Ordinal(3, thresholds=[0.0, 1e-6], link=link).given(y)
        for f in (-30.0, 30.0):
            latent = torch.tensor([[f]], dtype=torch.float64)
            density = -f if link == "logit" else -0.5 * f * f - 0.5 * math.log(2 * math.pi)
            expected = math.log(1e-6) + (-abs(f) if link == "logit" else density)
            assert likelihood.log_prob(latent, y).item() == pytest.approx(expected, rel=1e-4)
            slope = -math.copysign(1.0, f) if link == "logit" else -f
            assert likelihood.score(latent, y).item() == pytest.approx(slope, rel=1e-4)
            assert 0 < float(weights(likelihood, latent)) <= 1


@pytest.mark.parametrize("name", CASES)
def test_the_expected_log_probability_agrees_with_monte_carlo(name: str) -> None:
    likelihood, y = case(name)
    mean, variance, draws = 0.5 * draw(N, 1), 0.5, 100_000
    found = likelihood.expected_log_prob(mean, torch.full((N, 1, 1), variance, dtype=torch.float64), y)
    noise = variance**0.5 * draw(draws, seed=4)
    sampled = torch.stack([likelihood.log_prob(mean + z, y) for z in noise[:4000]])
    error = sampled.std(0) / math.sqrt(len(sampled))
    assert ((found - sampled.mean(0)).abs() < 4.5 * error + 1e-6).all()


@pytest.mark.parametrize("name", CASES)
def test_the_likelihood_of_some_data_is_a_part_of_that_of_all(name: str) -> None:
    likelihood, y = case(name)
    f, block = draw(N, 1), draw(N, 1, 2)
    for data in (slice(2, 5), torch.tensor([7, 1])):
        part = likelihood.on(data)
        assert torch.equal(part.log_prob(f[data], y[data]), likelihood.log_prob(f, y)[data])
        assert torch.equal(part.curvature(f[data], block[data]), likelihood.curvature(f, block)[data])
        assert torch.equal(part.noise(f[data], block[data]), likelihood.noise(f, block)[data])


@pytest.mark.parametrize("name", CASES)
def test_an_equal_likelihood_is_made_of_its_settings(name: str) -> None:
    likelihood, targets = CASES[name]
    again = type(likelihood)(**likelihood.settings())
    y = again.check_targets(targets)
    f = draw(N, 1)
    assert repr(again) == repr(likelihood)
    assert torch.equal(again.given(y).log_prob(f, y), likelihood.given(y).log_prob(f, y))


# Fits against the dense truth


def dense_mode(likelihood: Likelihood, y: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """Newton's method, halving steps, with derivatives by autograd: f and the diagonal of W."""
    v = torch.zeros(len(K), dtype=torch.float64)

    def psi(v: Tensor) -> Tensor:
        return likelihood.log_prob((K @ v)[:, None], y).sum() - v @ K @ v / 2

    for _ in range(100):
        f = (K @ v)[:, None].requires_grad_()
        (score,) = torch.autograd.grad(likelihood.log_prob(f, y).sum(), f)
        (second,) = torch.autograd.grad(likelihood.score(f, y).sum(), f)
        W, f = -second[:, 0], f.detach()[:, 0]
        b = W * f + score[:, 0]
        step = torch.linalg.solve(torch.eye(len(K), dtype=torch.float64) + W[:, None] * K, b) - v
        while psi(v + step) < psi(v) - 1e-12 * psi(v).abs():
            step = step / 2
        v = v + step
        if step.abs().max() < 1e-13:
            break
    return K @ v, W


@pytest.mark.parametrize("name", CASES)
def test_a_fit_is_the_laplace_posterior_of_the_dense_truth(name: str) -> None:
    likelihood, targets = CASES[name]
    X, x = draw(N, 1), draw(5, 1, seed=1)
    kernel = RBF(0.8, 1.5)
    precise: dict[str, Any] = dict(max_products=400, products_per_step=20, max_newton_steps=60, newton_tol=1e-10)
    gp = NonConjugateGP(kernel, likelihood, **precise).fit(X, targets)
    bound, y = case(name)
    K, Kx, Kxx = kernel(X, X), kernel(x, X), kernel(x, x)
    f, W = dense_mode(bound, y, K)
    root = W.sqrt()
    inner = torch.eye(N, dtype=torch.float64) + root[:, None] * K * root
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(inner), (root * Kx).T, upper=False)
    mean, covariance = gp.latent(x, joint=True)
    torch.testing.assert_close(mean.flatten(), Kx @ torch.linalg.solve(K, f), rtol=0, atol=1e-5)
    torch.testing.assert_close(covariance, Kxx - half.T @ half, rtol=0, atol=1e-5)


PER_DATUM = {
    "poisson with exposures": (Poisson, {"exposure": EXPOSURE}),
    "negative binomial with exposures": (
        lambda exposure: NegativeBinomial(3.0, exposure=exposure),
        {"exposure": EXPOSURE},
    ),
    "binomial with trials": (Binomial, {"trials": torch.tensor([1, 2, 5, 40, 3, 9, 7, 300])}),
    "fixed noise": (FixedNoiseGaussian, {"noise": 0.3 * EXPOSURE}),
}


def updated(name: str, old: int, **settings: Any) -> NonConjugateGP:
    """A fit to the first data, and an update with the others and their own exposures, trials or noises."""
    likelihood, targets = CASES[name]
    make, parameters = PER_DATUM.get(name, (lambda: likelihood, {}))
    X = draw(N, 1)
    gp = NonConjugateGP(RBF(0.8, 1.5), make(**{key: value[:old] for key, value in parameters.items()}), **settings)
    gp.fit(X[:old], targets[:old])
    return gp.update(X[old:], targets[old:], **{key: value[old:] for key, value in parameters.items()})


@pytest.mark.parametrize("policy", ["exact", "curvature_residual"])
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_the_laplace_posterior_of_all_data(name: str, policy: str) -> None:
    precise: dict[str, Any] = dict(max_products=400, products_per_step=20, max_newton_steps=60, newton_tol=1e-10)
    gp = updated(name, 5, policy=policy, **precise)
    if policy != "exact":
        gp.refine(400)
    X, x, kernel = draw(N, 1), draw(5, 1, seed=1), gp.kernels[0]
    bound, y = case(name)
    K, Kx, Kxx = kernel(X, X), kernel(x, X), kernel(x, x)
    f, W = dense_mode(bound, y, K)
    root = W.sqrt()
    inner = torch.eye(N, dtype=torch.float64) + root[:, None] * K * root
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(inner), (root * Kx).T, upper=False)
    tolerance = 1e-8 if policy == "exact" else 1e-5
    mean, covariance = gp.latent(x, joint=True)
    score = bound.score(f[:, None], y)[:, 0]  # v at the mode, without K⁻¹
    torch.testing.assert_close(mean.flatten(), Kx @ score, rtol=0, atol=tolerance)
    torch.testing.assert_close(covariance, Kxx - half.T @ half, rtol=0, atol=tolerance)
    log_p = bound.log_prob(f[:, None], y).sum()
    evidence = float(log_p - 0.5 * f @ score - 0.5 * torch.logdet(inner))
    assert gp.log_evidence().value == pytest.approx(evidence, abs=10 * tolerance)
    assert repr(gp.likelihood) == repr(CASES[name][0])
    again = NonConjugateGP.from_state_dict(gp.state_dict())
    assert torch.equal(again.predict(x), gp.predict(x))


def test_an_exposure_of_all_data_becomes_one_of_each() -> None:
    X, rate = draw(40, 1), 3.0
    gp = NonConjugateGP(RBF(2.0, 4.0), Poisson(2.0), mean=1.0).fit(X[:20], torch.full((20,), 2 * rate))
    gp.update(X[20:], torch.full((20,), 50 * rate), exposure=50.0 * torch.ones(20))
    assert isinstance(gp.likelihood, Poisson) and gp.likelihood.exposure.tolist() == [2.0] * 20 + [50.0] * 20
    torch.testing.assert_close(gp.predict(X), torch.full((40, 1), rate, dtype=torch.float64), rtol=0.05, atol=0)


def test_updates_with_parameters_that_do_not_fit_are_refused_and_change_nothing() -> None:
    X, y = draw(N, 1), COUNTS
    gp = NonConjugateGP(RBF(), Poisson(EXPOSURE[:5])).fit(X[:5], y[:5])
    before, held = gp.predict(X), gp.likelihood
    for given, error, sentence in (
        ({}, ValueError, r"one entry for each datum; got 5 for 3 data.*`update` takes that of its new data"),
        ({"exposure": EXPOSURE}, ValueError, r"got 8 for 3 data"),
        ({"exposure": -EXPOSURE[5:]}, ValueError, r"`exposure` must be positive and finite; got -"),
        ({"trials": EXPOSURE[5:]}, TypeError, r"`trials` must be a parameter of each datum of .*it has \['exposure'\]"),
    ):
        with pytest.raises(error, match=sentence):
            gp.update(X[5:], y[5:], **given)
    assert gp.likelihood is held and torch.equal(gp.predict(X), before)
    with pytest.raises(TypeError, match=r"`exposure` must be a parameter of each datum of Bernoulli\(\); it has none"):
        NonConjugateGP(RBF(), Bernoulli()).fit(X, y > 3).update(X, y > 3, exposure=EXPOSURE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_variance_is_not_below_the_exact_one_after_a_few_products(name: str, dtype: torch.dtype) -> None:
    likelihood, targets = CASES[name]
    X, x, kernel = draw(N, 1), draw(9, 1, seed=1), Matern32(0.5, 2.0)
    gp = NonConjugateGP(kernel, likelihood, max_products=3, products_per_step=3, max_newton_steps=1)
    gp.fit(X.to(dtype), targets)
    state = gp.posterior_.state
    W = weights(state.problem.likelihood, state.latent)
    K, Kx = kernel(X, X), kernel(x, X)
    root = W.sqrt()
    inner = torch.eye(N, dtype=torch.float64) + root[:, None] * K * root
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(inner), (root * Kx).T, upper=False)
    exact = kernel.diagonal(x) - half.square().sum(0)
    variance = gp.latent(x.to(dtype))[1][:, 0, 0].double()
    assert (variance >= exact * (1 - 1e-3) - 1e-6).all()


def test_exposure_tells_rates_from_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.linspace(0, 1, 200, dtype=torch.float64)[:, None]
    exposure = 20 * torch.rand(200, generator=generator, dtype=torch.float64) + 1
    rate = (1 + torch.sin(6 * X[:, 0])).exp()
    counts = torch.poisson(exposure * rate, generator=generator)
    for likelihood in (Poisson(exposure), NegativeBinomial(1e-3, exposure=exposure)):
        gp = NonConjugateGP(RBF(0.3, 2.0), likelihood).fit(X, counts)
        assert (gp.predict(X)[:, 0] / rate - 1).abs().mean() < 0.06  # a rate per unit of exposure


def test_data_with_little_noise_are_followed_and_noisy_ones_are_not() -> None:
    X = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    gp = NonConjugateGP(RBF(0.1), FixedNoiseGaussian([1e-4, 10.0])).fit(X, torch.tensor([1.0, 1.0]))
    first, second = gp.predict(X)[:, 0].tolist()
    assert first == pytest.approx(1, abs=1e-3) and second == pytest.approx(1 / 11, abs=1e-3)


def test_levels_are_predicted_with_their_probabilities() -> None:
    X = torch.linspace(-2, 2, 120, dtype=torch.float64)[:, None]
    levels = torch.bucketize(X[:, 0] + 0.1 * draw(120), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))
    gp = NonConjugateGP(RBF(1.0, 30.0), Ordinal(4, thresholds=[-4.0, 0.0, 4.0])).fit(X, levels)
    for link in ("probit", "quadrature", "mc"):
        p = gp.predict(X, link=link)
        assert p.shape == (120, 4) and (p.sum(1) - 1).abs().max() < 1e-9
        assert (p.argmax(1) == levels).double().mean() > 0.85
    assert gp.elbo() <= gp.log_evidence().upper + 1.0
    with pytest.raises(ValueError, match=r"must have a response that rises.*got Ordinal\(4"):
        gp.credible_interval(X)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: NegativeBinomial(0.0), r"`dispersion` must be a positive, finite number; got 0\.0\. Try"),
        (lambda: Poisson(exposure=[1.0, 0.0]), r"`exposure` must be positive and finite; got 0\. Try"),
        (lambda: Poisson(exposure=torch.ones(2, 2)), r"`exposure` must be one number.*shape \(2, 2\)"),
        (lambda: Poisson(exposure=[1.0, 2.0]).check_targets(torch.tensor([1, 2, 3])), r"got 2 for 3 data"),
        (lambda: Poisson(fractional=True).check_targets(torch.tensor([0.5, -1.0])), r"no negative numbers.*y\[1\]"),
        (lambda: Binomial(2.5), r"`trials` must be whole numbers"),
        (lambda: Binomial(3).check_targets(torch.tensor([1, 4])), r"from 0 to the number of trials.*y\[1\] = 4"),
        (lambda: Ordinal(1), r"`num_levels` must be a whole number of at least 2; got 1"),
        (
            lambda: Ordinal(3, thresholds=[1.0, 0.0]),
            r"`thresholds` must be 2 rising, finite.*got \[1\.0, 0\.0\]",
        ),
        (lambda: Ordinal(3, link="cloglog"), r"`link` must be one of 'logit', 'probit'; got 'cloglog'"),
        (lambda: Ordinal(3).check_targets(torch.tensor([0, 3])), r"levels from 0 to 2.*y\[1\] = 3"),
        (
            lambda: FixedNoiseGaussian(torch.tensor(0.1)),
            r"one variance for each datum.*a single.*Gaussian\(0\.1\)",
        ),
        (lambda: FixedNoiseGaussian([0.1]).check_targets(torch.zeros(2)), r"got 1 for 2 data\. Try"),
    ],
)
def test_misuse_gets_a_message_that_helps(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_heavy_tails_are_refused_with_what_to_use() -> None:
    with pytest.raises(
        AttributeError, match=r"There is no likelihood `StudentT`: .*not log-concave.*FixedNoiseGaussian"
    ):
        _ = likelihoods.StudentT
    with pytest.raises(AttributeError, match="has no attribute 'Gamma'"):
        _ = likelihoods.Gamma


def test_several_noises_are_not_a_noise() -> None:
    with pytest.raises(TypeError, match=r"one variance for all data; got several.*FixedNoiseGaussian"):
        Gaussian(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`exposure` must be a positive number, or one for each datum; got str"):
        Poisson("long")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["negative binomial", "ordinal logit"])
def test_a_curvature_that_sees_the_targets_asks_for_them(name: str) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"must be asked of one bound to its (counts|levels), .*; got one without targets\. Try given",
    ):
        CASES[name][0].curvature(draw(N, 1), draw(N, 1, 1))


@pytest.mark.parametrize("name", CASES)
def test_hyperparameters_are_found_by_the_evidence_of_each_likelihood(name: str) -> None:
    likelihood, targets = CASES[name]
    X = draw(N, 1)
    before = NonConjugateGP(RBF(5.0, 0.1), likelihood).fit(X, targets)
    after = NonConjugateGP(RBF(5.0, 0.1), likelihood).optimize(X, targets, max_steps=2)
    assert after.optimization_ is not None and after.elbo() >= before.elbo() - 0.5
    assert repr(after.kernels) != repr(before.kernels)

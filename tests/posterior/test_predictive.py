"""From a latent Gaussian to predictions: every link against brute force, intervals against their quantiles."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from ntk_iterncgp.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson, Softmax
from ntk_iterncgp.likelihoods.quadrature import standard_normal_quantile
from ntk_iterncgp.posterior.predictive import LINKS, classification_uncertainty, credible_interval, expected_response

NUM_DRAWS = 1_000_000
ONE_OUTPUT = [Gaussian(0.1), Bernoulli(), Poisson()]
ALL = [*ONE_OUTPUT, Softmax(3)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlated(num_inputs: int, num_outputs: int, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (b, C), covariance (b, C, C) with correlations of all signs, and its root."""
    root = scale * draw(num_inputs, num_outputs, num_outputs, seed=seed + 1)
    return draw(num_inputs, num_outputs, seed=seed), root @ root.mT, root


def brute_force(likelihood: Likelihood, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """E[response(f)] at one input from a million draws, and its standard error, both (C,)."""
    drawn = likelihood.response(mean + draw(NUM_DRAWS, len(mean), seed=99) @ root.T)
    return drawn.mean(0), drawn.std(0) / math.sqrt(NUM_DRAWS)


def close(actual: Tensor, expected: Tensor, atol: float = 1e-12, rtol: float = 0.0) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


# Links


@pytest.mark.parametrize("scale", [0.3, 1.5])
def test_quadrature_agrees_with_a_million_draws_for_bernoulli(scale: float) -> None:
    mean, covariance, root = correlated(3, 1, scale)
    actual = expected_response(Bernoulli(), mean, covariance, link="quadrature")
    for i in range(3):
        expected, error = brute_force(Bernoulli(), mean[i], root[i])
        close(actual[i], expected, atol=float(5 * error.max()))


@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_quadrature_agrees_with_a_million_draws_for_softmax_with_correlated_classes(scale: float) -> None:
    mean, covariance, root = correlated(2, 4, scale)
    actual = expected_response(Softmax(4), mean, covariance, link="quadrature", num_samples=4096)
    for i in range(2):
        expected, error = brute_force(Softmax(4), mean[i], root[i])
        close(actual[i], expected, atol=float(5 * error.max()) + 1e-3)


def on_a_line(function: Callable[[Tensor], Tensor], mean: float, deviation: float) -> float:
    """E[function(f)] for one latent value, by 40 Gauss–Legendre points on each of a thousand pieces."""
    in_z = np.linspace(-13, 13, 400)
    in_f = (np.linspace(-60, 60, 601) - mean) / deviation
    cuts = np.unique(np.clip(np.concatenate([in_z, in_f]), -13, 13))
    nodes, weights = np.polynomial.legendre.leggauss(40)
    half, centre = np.diff(cuts)[:, None] / 2, (cuts[1:] + cuts[:-1])[:, None] / 2
    z = torch.as_tensor(centre + half * nodes)
    density = torch.as_tensor(half * weights) * torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return float((density * function(mean + deviation * z)).sum())


def as_two_classes(mean: float, deviation: float) -> tuple[Tensor, Tensor]:
    """Two correlated logits whose difference has this mean and standard deviation."""
    correlation = 0.6
    each = deviation**2 / (2 * (1 - correlation))
    covariance = each * torch.tensor([[[1.0, correlation], [correlation, 1.0]]], dtype=torch.float64)
    return torch.tensor([[mean + 0.7, 0.7]], dtype=torch.float64), covariance


@pytest.mark.parametrize("mean", [0.0, 0.25, -2.0, 7.0, -30.0, 100.0, -1000.0])
@pytest.mark.parametrize("deviation", [0.01, 0.3, 1.0, 3.0, 10.0, 60.0, 300.0, 1000.0])
def test_quadrature_on_a_line_is_right_however_broad_the_posterior_is(deviation: float, mean: float) -> None:
    """64 Gauss–Hermite points were off by .045 at a standard deviation of 60."""
    probability, score = (on_a_line(h, mean, deviation) for h in (torch.sigmoid, torch.nn.functional.logsigmoid))
    one = torch.tensor([[mean]], dtype=torch.float64), torch.tensor([[[deviation**2]]], dtype=torch.float64)
    two = as_two_classes(mean, deviation)
    assert float(expected_response(Bernoulli(), *one, link="quadrature")) == pytest.approx(probability, abs=1e-9)
    found = expected_response(Softmax(2), *two, link="quadrature")[0]
    assert found.tolist() == pytest.approx([probability, 1 - probability], abs=1e-9)
    single = expected_response(Softmax(2), *(t.float() for t in two), link="quadrature")[0]
    assert single.tolist() == pytest.approx([probability, 1 - probability], abs=1e-5 + 1e-6 * abs(mean) / deviation)
    label = torch.ones(1, dtype=torch.float64)
    assert float(Bernoulli().expected_log_prob(*one, label)) == pytest.approx(score, rel=1e-9, abs=1e-9)
    assert float(Softmax(2).expected_log_prob(*two, label.long() - 1)) == pytest.approx(score, rel=1e-9, abs=1e-9)
    entropy = on_a_line(lambda f: binary_entropy(f), mean, deviation)
    uncertain = classification_uncertainty(*two)
    assert float(uncertain.aleatoric) == pytest.approx(entropy, abs=1e-9)
    assert float(uncertain.entropy) == pytest.approx(float(torch.special.entr(found).sum()), abs=1e-9)


def binary_entropy(f: Tensor) -> Tensor:
    return sum((torch.sigmoid(s * f) * -torch.nn.functional.logsigmoid(s * f) for s in (1, -1)), torch.zeros(()))


@pytest.mark.parametrize("num_samples", [1, 16, 100_000])
def test_on_a_line_the_number_of_points_is_not_the_callers_to_choose(num_samples: int) -> None:
    mean, covariance = as_two_classes(7.0, 60.0)
    expected = expected_response(Softmax(2), mean, covariance, link="quadrature")
    assert torch.equal(
        expected_response(Softmax(2), mean, covariance, link="quadrature", num_samples=num_samples), expected
    )


@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_quadrature_on_a_line_is_differentiable_in_mean_and_variance(scale: float) -> None:
    mean, variance = draw(4, 1).requires_grad_(), (scale * draw(4, 1, 1, seed=1).square()).requires_grad_()

    def total(mean: Tensor, variance: Tensor) -> Tensor:
        return expected_response(Bernoulli(), mean, variance, link="quadrature")

    assert torch.autograd.gradcheck(total, (mean, variance), eps=1e-5, atol=1e-7)


def test_quadrature_uses_the_whole_covariance_where_probit_sees_the_diagonal() -> None:
    mean, covariance, root = correlated(1, 4)
    expected, _ = brute_force(Softmax(4), mean[0], root[0])
    diagonal = torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))
    whole, part = (
        expected_response(Softmax(4), mean, given, link="quadrature", num_samples=4096)
        for given in (covariance, diagonal)
    )
    assert (part[0] - expected).abs().max() > 10 * (whole[0] - expected).abs().max()
    probit = (expected_response(Softmax(4), mean, given) for given in (covariance, diagonal))
    assert torch.equal(*probit)


def test_quadrature_is_exact_for_poisson_where_the_closed_form_is() -> None:
    mean, covariance, _ = correlated(20, 1)
    exact = (mean + covariance[:, 0] / 2).exp()
    close(expected_response(Poisson(), mean, covariance, link="probit"), exact, rtol=1e-14)
    close(expected_response(Poisson(), mean, covariance, link="quadrature"), exact, rtol=1e-12)


def test_every_link_of_a_gaussian_gives_the_latent_mean() -> None:
    mean, covariance, _ = correlated(5, 2)
    likelihood = Gaussian(0.1, 2)
    assert torch.equal(expected_response(likelihood, mean, covariance, link="probit"), mean)
    close(expected_response(likelihood, mean, covariance, link="quadrature"), mean)


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_monte_carlo_agrees_with_quadrature_to_its_own_error(likelihood: Likelihood) -> None:
    mean, covariance, _ = correlated(4, likelihood.num_outputs, 0.5)
    generator = torch.Generator().manual_seed(1)
    drawn = expected_response(likelihood, mean, covariance, link="mc", num_samples=100_000, generator=generator)
    exact = expected_response(likelihood, mean, covariance, link="quadrature", num_samples=8192)
    close(drawn, exact, atol=0.02)


def test_monte_carlo_is_reproduced_by_its_generator_and_differs_without() -> None:
    mean, covariance, _ = correlated(4, 3)

    def drawn(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return expected_response(Softmax(3), mean, covariance, link="mc", num_samples=64, generator=generator)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_quadrature_is_deterministic_and_leaves_the_global_generator_alone() -> None:
    mean, covariance, _ = correlated(4, 3)
    torch.manual_seed(3)
    untouched = torch.rand(1)
    torch.manual_seed(3)
    first = expected_response(Softmax(3), mean, covariance, link="quadrature")
    assert torch.equal(torch.rand(1), untouched)
    assert torch.equal(expected_response(Softmax(3), mean, covariance, link="quadrature"), first)


@pytest.mark.parametrize("link", LINKS)
def test_links_work_in_float32_too(link: str) -> None:
    mean, covariance, _ = correlated(4, 3)
    single = expected_response(Softmax(3), mean.float(), covariance.float(), link=link, num_samples=4096)
    double = expected_response(Softmax(3), mean, covariance, link=link, num_samples=4096)
    assert single.dtype == torch.float32
    close(single.double(), double, atol=0.05 if link == "mc" else 1e-5)


def test_the_probit_formula_divides_the_logits_by_their_spread() -> None:
    mean, covariance, _ = correlated(6, 3)
    variance = covariance.diagonal(dim1=1, dim2=2)
    shrunk = mean / torch.sqrt(1 + torch.pi / 8 * variance)
    close(expected_response(Softmax(3), mean, covariance), shrunk.softmax(1))
    one = expected_response(Bernoulli(), mean[:, :1], covariance[:, :1, :1])
    close(one, torch.sigmoid(shrunk[:, :1]))


def test_the_probit_approximation_is_within_two_percent_for_one_output() -> None:
    mean = torch.linspace(-6, 6, 25, dtype=torch.float64)[:, None]
    for variance in (0.1, 1.0, 10.0):
        covariance = torch.full((25, 1, 1), variance, dtype=torch.float64)
        probit = expected_response(Bernoulli(), mean, covariance, link="probit")
        close(probit, expected_response(Bernoulli(), mean, covariance, link="quadrature"), atol=0.02)


@pytest.mark.parametrize("link", LINKS)
def test_class_probabilities_are_positive_and_sum_to_one(link: str) -> None:
    mean, covariance, _ = correlated(50, 5, 3.0)
    probabilities = expected_response(Softmax(5), mean, covariance, link=link, num_samples=64)
    assert (probabilities >= 0).all()
    close(probabilities.sum(1), torch.ones(50, dtype=torch.float64))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_without_variance_every_link_gives_the_response(likelihood: Likelihood, link: str) -> None:
    C = likelihood.num_outputs
    mean = 2 * draw(6, C)
    zero = torch.zeros(6, C, C, dtype=torch.float64)
    close(expected_response(likelihood, mean, zero, link=link), likelihood.response(mean), rtol=1e-12)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("likelihood", [Bernoulli(), Softmax(3)], ids=repr)
def test_decided_and_hopeless_inputs_give_finite_probabilities(likelihood: Likelihood, link: str) -> None:
    C = likelihood.num_outputs
    signs = torch.where(draw(8, C, seed=2) > 0, 1.0, -1.0).double()
    for size in (0.0, 60.0, 800.0):
        for variance in (0.0, 1.0, 1e12):
            covariance = variance * torch.eye(C, dtype=torch.float64).expand(8, C, C)
            probabilities = expected_response(likelihood, size * signs, covariance, link=link)
            assert probabilities.isfinite().all()
            assert ((probabilities >= 0) & (probabilities <= 1 + 1e-12)).all()


def test_an_unlimited_variance_leaves_nothing_but_a_guess() -> None:
    covariance = 1e12 * torch.eye(1, dtype=torch.float64)[None]
    mean = torch.tensor([[3.0]], dtype=torch.float64)
    for link in ("probit", "quadrature"):
        close(expected_response(Bernoulli(), mean, covariance, link=link), torch.full_like(mean, 0.5), atol=1e-4)


def test_an_unknown_link_gets_a_sentence() -> None:
    mean, covariance, _ = correlated(2, 1)
    with pytest.raises(ValueError, match="`link` must be one of 'probit', 'quadrature', 'mc'; got 'logit'"):
        expected_response(Bernoulli(), mean, covariance, link="logit")


@pytest.mark.parametrize("link", ["quadrature", "mc"])
@pytest.mark.parametrize("num_samples", [0, -1])
def test_fewer_than_one_sample_gets_a_sentence(link: str, num_samples: int) -> None:
    mean, covariance, _ = correlated(2, 3)
    with pytest.raises(ValueError, match=rf"samples` must be .*; got {num_samples}"):
        expected_response(Softmax(3), mean, covariance, link=link, num_samples=num_samples)


# Intervals


@pytest.mark.parametrize("level", [0.5, 0.9, 0.999])
def test_the_quantile_of_a_level_is_that_of_the_normal_distribution(level: float) -> None:
    normal = Normal(torch.zeros((), dtype=torch.float64), 1.0)
    expected = normal.icdf(torch.tensor((1 + level) / 2, dtype=torch.float64))
    assert standard_normal_quantile(level) == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("level", [0.5, 0.95])
@pytest.mark.parametrize("likelihood", ONE_OUTPUT, ids=repr)
def test_a_credible_interval_holds_its_mass_and_leaves_as_much_on_either_side(
    likelihood: Likelihood, level: float
) -> None:
    mean, covariance, root = correlated(3, 1, 0.7)
    lower, upper = credible_interval(likelihood, mean, covariance[:, 0], level=level)
    for i in range(3):
        drawn = likelihood.response(mean[i] + draw(NUM_DRAWS, 1, seed=9) @ root[i])
        error = 5 * 0.5 / math.sqrt(NUM_DRAWS)
        assert float((drawn < lower[i]).double().mean()) == pytest.approx((1 - level) / 2, abs=error)
        assert float((drawn > upper[i]).double().mean()) == pytest.approx((1 - level) / 2, abs=error)


def test_the_ends_of_a_credible_interval_are_the_analytic_quantiles() -> None:
    mean, variance = torch.tensor([[0.4]], dtype=torch.float64), torch.tensor([[0.09]], dtype=torch.float64)
    z = 1.959963984540054
    for likelihood, response in [(Gaussian(0.1), float), (Poisson(), math.exp)]:
        lower, upper = credible_interval(likelihood, mean, variance, level=0.95)
        assert float(lower) == pytest.approx(response(0.4 - 0.3 * z), rel=1e-12)
        assert float(upper) == pytest.approx(response(0.4 + 0.3 * z), rel=1e-12)


def test_an_interval_without_variance_is_a_point() -> None:
    mean = draw(4, 1)
    lower, upper = credible_interval(Poisson(), mean, torch.zeros_like(mean))
    assert torch.equal(lower, upper) and torch.equal(lower, mean.exp())


def test_softmax_has_no_interval_and_says_what_to_do_instead() -> None:
    mean = draw(4, 3)
    with pytest.raises(ValueError, match=r"probabilities depend on all\. Try .* sample\(x, n_samples\)"):
        credible_interval(Softmax(3), mean, torch.ones_like(mean))


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 95, math.nan])
def test_a_level_that_is_no_probability_gets_a_sentence(level: float) -> None:
    mean = draw(4, 1)
    with pytest.raises(ValueError, match=rf"`level` must be between 0 and 1; got {level}\. Try 0\.95"):
        credible_interval(Poisson(), mean, torch.ones_like(mean), level=level)

"""The four likelihoods: derivatives against autograd, noise against the pseudo-inverse, finite when saturated."""

import math

import pytest
import torch
from torch import Tensor

from ntk_iterncgp.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson, Softmax
from ntk_iterncgp.likelihoods.base import CURVATURE_FLOOR
from ntk_iterncgp.likelihoods.quadrature import contrast_root, covariance_root, line_points, normal_points
from tests import oracles

N = 6
NOISE = 0.3
CPU = torch.device("cpu")
LIKELIHOODS: dict[str, Likelihood] = {
    "gaussian": Gaussian(NOISE, num_outputs=2),
    "bernoulli": Bernoulli(),
    "poisson": Poisson(),
    "softmax": Softmax(4),
}
NAMES = list(LIKELIHOODS)
CLASSIFIERS = ["bernoulli", "softmax"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def latent_of(name: str, scale: float = 2.0) -> Tensor:
    return scale * draw(N, LIKELIHOODS[name].num_outputs)


def targets_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if name == "gaussian":
        return draw(N, 2, seed=7)
    high = {"bernoulli": 2, "poisson": 9, "softmax": 4}[name]
    return LIKELIHOODS[name].check_targets(torch.randint(high, (N,), generator=generator))


def identity(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """One C×C identity per datum: a product with it writes out a block-diagonal matrix."""
    return torch.eye(LIKELIHOODS[name].num_outputs, dtype=dtype).expand(N, -1, -1)


def close(actual: Tensor, expected: Tensor, atol: float = 1e-12, rtol: float = 0.0) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


# Derivatives


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_agree_with_the_oracle_datum_by_datum(name: str) -> None:
    f, y = latent_of(name), targets_of(name)
    expected = torch.stack([oracles.log_prob(name, f[i : i + 1], y[i : i + 1], NOISE) for i in range(N)])
    close(LIKELIHOODS[name].log_prob(f, y), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_score_is_the_gradient_of_the_log_probability(name: str) -> None:
    likelihood, f, y = LIKELIHOODS[name], latent_of(name), targets_of(name)
    close(likelihood.score(f, y), torch.func.grad(lambda f: likelihood.log_prob(f, y).sum())(f))


@pytest.mark.parametrize("name", NAMES)
def test_the_curvature_is_the_negative_hessian_of_the_log_probability(name: str) -> None:
    likelihood, f, y = LIKELIHOODS[name], latent_of(name), targets_of(name)
    for i in range(N):
        one = slice(i, i + 1)
        hessian = torch.func.hessian(lambda g, one=one: likelihood.log_prob(g[None], y[one]).sum())(f[i])
        close(likelihood.curvature(f[one], identity(name)[one])[0], -hessian)


@pytest.mark.parametrize("name", NAMES)
def test_products_with_a_block_are_products_with_the_written_out_matrices(name: str) -> None:
    likelihood, f = LIKELIHOODS[name], latent_of(name)
    block = draw(N, likelihood.num_outputs, 3, seed=1)
    flat = block.flatten(0, 1)
    close(likelihood.curvature(f, block).flatten(0, 1), oracles.curvature_matrix(name, f, noise=NOISE) @ flat)
    close(likelihood.noise(f, block).flatten(0, 1), oracles.noise_matrix(name, f, NOISE) @ flat, atol=1e-9)


# The range of the curvature


@pytest.mark.parametrize("name", NAMES)
def test_the_noise_is_the_pseudo_inverse_of_the_curvature(name: str) -> None:
    likelihood, f = LIKELIHOODS[name], latent_of(name)
    W = likelihood.curvature(f, identity(name))
    close(likelihood.noise(f, identity(name)), torch.linalg.pinv(W, rtol=1e-10, hermitian=True), rtol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_projection_is_curvature_times_noise_and_projects(name: str) -> None:
    likelihood, f = LIKELIHOODS[name], latent_of(name)
    P = likelihood.project(identity(name))
    close(P, P.mT)
    close(likelihood.project(P), P)
    close(likelihood.curvature(f, likelihood.noise(f, identity(name))), P, atol=1e-10)
    close(likelihood.noise(f, likelihood.curvature(f, identity(name))), P, atol=1e-10)
    assert round(float(P[0].trace())) == likelihood.curvature_rank


@pytest.mark.parametrize("name", NAMES)
def test_the_contrasts_are_an_orthonormal_basis_of_the_range_of_the_curvature(name: str) -> None:
    likelihood = LIKELIHOODS[name]
    H = likelihood.contrasts(CPU)
    assert H.dtype == torch.float64 and H.shape == (likelihood.num_outputs, likelihood.curvature_rank)
    close(H.T @ H, torch.eye(likelihood.curvature_rank, dtype=torch.float64), atol=1e-15)
    close(H @ H.T, likelihood.project(identity(name))[0], atol=1e-15)


@pytest.mark.parametrize("num_classes", [2, 3, 10, 100])
def test_softmax_contrasts_are_orthonormal_and_zero_sum_for_any_number_of_classes(num_classes: int) -> None:
    H = Softmax(num_classes).contrasts(CPU)
    close(H.T @ H, torch.eye(num_classes - 1, dtype=torch.float64), atol=1e-14)
    close(H.sum(0), torch.zeros(num_classes - 1, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_the_noise_diagonal_acts_as_the_noise_within_the_range_of_the_curvature(name: str) -> None:
    likelihood, f = LIKELIHOODS[name], latent_of(name)
    left, right = (likelihood.project(draw(N, likelihood.num_outputs, 3, seed=seed)) for seed in (1, 2))
    diagonal = likelihood.noise_diagonal(f)
    assert diagonal is not None and diagonal.shape == f.shape
    close(left.mT @ (diagonal[..., None] * right), left.mT @ likelihood.noise(f, right), rtol=1e-12)


def test_a_likelihood_that_writes_only_what_it_must_has_full_rank_and_no_noise_diagonal() -> None:
    class Plain(Bernoulli):
        noise_diagonal = Likelihood.noise_diagonal

    plain, block = Plain(), draw(N, 1, 2)
    assert plain.noise_diagonal(draw(N, 1)) is None
    assert plain.curvature_rank == 1 and plain.project(block) is block


# Expectations


@pytest.mark.parametrize("name", NAMES)
def test_the_expected_log_probability_agrees_with_monte_carlo(name: str) -> None:
    likelihood, y, num_samples = LIKELIHOODS[name], targets_of(name), 200_000
    C = likelihood.num_outputs
    mean, root = latent_of(name, scale=1.0), 0.7 * draw(N, C, C, seed=3)
    noise = draw(num_samples, C, seed=4)
    for i in range(N):
        drawn = likelihood.log_prob(mean[i] + noise @ root[i].T, y[i : i + 1].expand(num_samples, *y.shape[1:]))
        actual = likelihood.expected_log_prob(mean[i : i + 1], (root @ root.mT)[i : i + 1], y[i : i + 1])
        assert abs(actual - drawn.mean()) < 4 * drawn.std() / math.sqrt(num_samples) + 2e-3


@pytest.mark.parametrize("name", NAMES)
def test_without_variance_the_expected_log_probability_is_the_log_probability(name: str) -> None:
    likelihood, f, y = LIKELIHOODS[name], latent_of(name), targets_of(name)
    zero = torch.zeros(N, f.shape[1], f.shape[1], dtype=torch.float64)
    close(likelihood.expected_log_prob(f, zero, y), likelihood.log_prob(f, y), atol=1e-11)


@pytest.mark.parametrize("num_outputs", [2, 3, 10])
def test_the_points_of_a_standard_normal_have_its_moments(num_outputs: int) -> None:
    points, weights = normal_points(num_outputs, 512, CPU)
    close(weights.sum(), torch.ones((), dtype=torch.float64), atol=1e-13)
    close(weights @ points, torch.zeros(num_outputs, dtype=torch.float64), atol=1e-13)
    second = points.T @ (weights[:, None] * points)
    close(second, torch.eye(num_outputs, dtype=torch.float64), atol=0.1)


@pytest.mark.parametrize("mean", [0.0, 3.0, -400.0])
def test_the_points_of_a_line_have_the_moments_of_a_normal_wherever_they_are_cut(mean: float) -> None:
    deviation = torch.tensor([0.0, 1e-3, 1.0, 60.0, 1e3], dtype=torch.float64)
    points, weights = line_points(torch.full_like(deviation, mean), deviation)
    for power, moment in ((0, 1.0), (1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)):
        close((weights * points**power).sum(1), torch.full_like(deviation, moment), atol=1e-9, rtol=1e-9)


def test_the_root_of_a_covariance_squares_to_it_also_where_it_is_singular() -> None:
    half = draw(5, 4, 2)
    root = covariance_root(half @ half.mT)
    close(root @ root.mT, half @ half.mT, 1e-8)


def test_points_do_not_turn_with_the_last_bit_where_variances_are_nearly_equal() -> None:
    H, mean, change = Softmax(7).contrasts(CPU), draw(4, 7), 1e-7 * draw(4, 7, 7)
    covariance = 25 * torch.eye(7, dtype=torch.float64).expand(4, 7, 7)
    root, moved = (contrast_root(mean, given, H) for given in (covariance, covariance + change @ change.mT))
    close(moved, root, 1e-12)
    close(root @ root.mT, H @ H.T @ covariance @ H @ H.T, 1e-8)
    close(contrast_root(mean, H.T @ covariance @ H, H), root)  # the same from the covariance of the contrasts alone


@pytest.mark.parametrize("name", NAMES)
def test_the_response_is_the_mean_of_an_observation(name: str) -> None:
    f, y = latent_of(name), targets_of(name)
    response = LIKELIHOODS[name].response(f)
    score = LIKELIHOODS[name].score(f, y)
    observed = torch.nn.functional.one_hot(y, 4) if name == "softmax" else y.reshape(f.shape)
    close(response, observed - score * (NOISE if name == "gaussian" else 1.0))  # in all four, y − E[y] is the score


# Saturation


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [60.0, 800.0])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_saturated_logits_give_finite_numbers_everywhere(name: str, size: float, dtype: torch.dtype) -> None:
    likelihood, y = LIKELIHOODS[name], targets_of(name)
    C = likelihood.num_outputs
    signs = torch.where(draw(N, C, seed=5) > 0, 1.0, -1.0)
    signs[0], signs[1] = 1.0, -1.0
    f = (size * signs).to(dtype)
    block = draw(N, C, 2, seed=6).to(dtype)
    assert likelihood.noise_diagonal(f) is not None
    for value in (
        likelihood.log_prob(f, y),
        likelihood.score(f, y),
        likelihood.curvature(f, block),
        likelihood.noise(f, block),
        likelihood.noise_diagonal(f),
        likelihood.response(f),
        likelihood.expected_response(f, torch.full_like(f, 3.0)),
    ):
        assert value is not None and value.isfinite().all()
    assert likelihood.score(f, y).abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [-800.0, -60.0, 60.0])
def test_extreme_log_rates_give_finite_numbers_everywhere(size: float, dtype: torch.dtype) -> None:
    likelihood, y = Poisson(), targets_of("poisson")
    f, block = torch.full((N, 1), size, dtype=dtype), torch.ones(N, 1, 2, dtype=dtype)
    for value in (
        likelihood.log_prob(f, y),
        likelihood.score(f, y),
        likelihood.curvature(f, block),
        likelihood.noise(f, block),
        likelihood.response(f),
    ):
        assert value.isfinite().all()


def test_a_rate_beyond_all_numbers_is_impossible_and_not_undefined() -> None:
    """A line search that steps there must see Ψ fall, hence −∞ and not NaN."""
    y = Poisson().check_targets(torch.tensor([0, 5]))
    assert Poisson().log_prob(torch.full((2, 1), 800.0, dtype=torch.float64), y).tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_at_decided_points_curvature_and_noise_stay_inverse_to_each_other(name: str) -> None:
    likelihood = LIKELIHOODS[name]
    f = latent_of(name)
    f[:, 0] += 60.0  # all others are below the floor
    P = likelihood.project(identity(name))
    close(likelihood.curvature(f, likelihood.noise(f, identity(name))), P, atol=1e-5)
    assert likelihood.noise(f, identity(name)).abs().max() <= 1.01 / CURVATURE_FLOOR
    floor = 2 * likelihood.num_outputs * CURVATURE_FLOOR
    assert likelihood.curvature(f, identity(name)).abs().max() < floor  # it adds nothing that can be seen


def test_the_curvature_of_a_decided_point_keeps_its_relative_accuracy() -> None:
    latent = torch.tensor([[40.0, 0.0, -3.0, 5.0], [0.0, 34.0, 1.0, 33.0]], dtype=torch.float64)
    p = latent.softmax(1)
    others = torch.stack([p[:, [d for d in range(4) if d != c]].sum(1) for c in range(4)], 1)  # 1 − p, not rounded
    expected = -p[:, :, None] * p[:, None, :]
    expected.diagonal(dim1=1, dim2=2).copy_(p * others)
    found = Softmax(4).for_prior_variance(1e20).curvature(latent, torch.eye(4, dtype=torch.float64).expand(2, 4, 4))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0.0)


def test_the_score_of_a_decided_point_keeps_its_relative_accuracy() -> None:
    expected = math.exp(-50.0)
    y = torch.tensor([1.0], dtype=torch.float64)
    score = Bernoulli().score(torch.tensor([[50.0]], dtype=torch.float64), y)
    assert score.item() == pytest.approx(expected, rel=1e-12, abs=0)


# Sentences


@pytest.mark.parametrize(
    ("likelihood", "targets", "sentence"),
    [
        (Bernoulli(), [0, 1, 2], r"must be labels 0 and 1 for Bernoulli; got y\[2\] = 2"),
        (Bernoulli(), [-1, 1], r"labels 0 and 1 .*; got y\[0\] = -1"),
        (Bernoulli(), [0.0, 0.5], r"labels 0 and 1.* y\[1\] = 0\.5"),
        (Bernoulli(), [[0, 1], [1, 0]], r"shape \(N,\) for Bernoulli, each 0 or 1; got \(2, 2\)"),
        (Poisson(), [3, -2], r"must be counts .* for Poisson, no negative .*; got y\[1\] = -2"),
        (Poisson(), [0.5, 1.0], r"no fractional numbers; got y\[0\] = 0\.5"),
        (Poisson(), [[1, 2]], r"shape \(N,\) for Poisson, each a count; got \(1, 2\)"),
        (Softmax(3), [0, 1, 3], r"must be whole numbers from 0 to 2 for Softmax\(3\); got y\[2\] = 3"),
        (Softmax(3), [0, -1], r"from 0 to 2 .*; got y\[1\] = -1\. Try"),
        (Softmax(3), [0.0, 1.5], r"whole numbers .*; got y\[1\] = 1\.5"),
        (Softmax(3), [[0, 1, 0]], r"shape \(N,\) for Softmax, each a class label; got \(1, 3\)"),
        (Gaussian(0.1), [[0.0, 1.0]], r"shape \(N, 1\) or \(N,\) for Gaussian with 1 output\(s\); got \(1, 2\)"),
        (Gaussian(0.1, 2), [0.0, 1.0], r"shape \(N, 2\) for Gaussian with 2 output\(s\); got \(2, 1\)"),
        (Gaussian(0.1, 2), [[[0.0, 1.0]]], r"\(N, 2\) .*; got \(1, 1, 2\)\. Try a network"),
    ],
)
def test_unfit_targets_get_a_sentence_that_names_the_first_of_them(
    likelihood: Likelihood, targets: list, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        likelihood.check_targets(torch.tensor(targets))


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.uint8])
def test_whole_numbers_are_good_targets_in_any_dtype_and_as_a_column(name: str, dtype: torch.dtype) -> None:
    expected = targets_of(name)
    assert torch.equal(LIKELIHOODS[name].check_targets(expected.to(dtype)), expected)
    assert torch.equal(LIKELIHOODS[name].check_targets(expected.to(dtype)[:, None]), expected)


def test_truth_values_are_good_labels() -> None:
    truths = torch.tensor([True, False])
    assert Bernoulli().check_targets(truths).tolist() == [1, 0]
    assert Softmax(2).check_targets(truths).tolist() == [1, 0]


@pytest.mark.parametrize("num_classes", [1, 0, -3])
def test_softmax_with_fewer_than_two_classes_is_refused(num_classes: int) -> None:
    with pytest.raises(ValueError, match=rf"at least two; got {num_classes}\. Try Bernoulli\(\)"):
        Softmax(num_classes)


@pytest.mark.parametrize("make", [lambda: Softmax(2.5), lambda: Gaussian(0.1, num_outputs=1.5)])  # type: ignore[arg-type]
def test_a_fractional_number_of_outputs_is_refused(make) -> None:
    with pytest.raises((TypeError, ValueError), match=r"must be .*; got .*\.5"):
        make()


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, math.inf])
def test_a_noise_that_is_not_positive_and_finite_is_refused(noise: float) -> None:
    with pytest.raises(
        ValueError, match=rf"`noise` must be a positive, finite variance; got {noise}\. Try noise=0\.01"
    ):
        Gaussian(noise)


def test_a_gaussian_without_outputs_is_refused() -> None:
    with pytest.raises(ValueError, match="`num_outputs` must be a whole number of at least one; got 0"):
        Gaussian(0.1, num_outputs=0)


def test_likelihoods_say_what_they_are() -> None:
    written = [repr(likelihood) for likelihood in (Gaussian(0.1), Gaussian(0.1, 3), Bernoulli(), Poisson(), Softmax(3))]
    assert written == [
        "Gaussian(noise=0.1)",
        "Gaussian(noise=0.1, num_outputs=3)",
        "Bernoulli()",
        "Poisson()",
        "Softmax(3)",
    ]

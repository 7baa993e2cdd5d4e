"""The oracles against autograd, torch.distributions, scikit-learn and each other: right first, then judges."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.gaussian_process.kernels import ConstantKernel
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, MultivariateNormal, Normal, Poisson

from tests import oracles
from tests.oracles import LIKELIHOODS

NOISE = 0.3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def rbf(X1: Tensor, X2: Tensor, lengthscale: float = 1.0, outputscale: float = 1.0) -> Tensor:
    return outputscale * torch.exp(-0.5 * (X1[:, None] - X2).square().sum(2) / lengthscale**2)


def targets(name: str, N: int, C: int, seed: int = 7) -> Tensor:
    if name == "softmax":
        return torch.randint(C, (N,), generator=generator(seed))
    if name == "bernoulli":
        return torch.randint(2, (N,), generator=generator(seed))
    if name == "poisson":
        return torch.randint(12, (N,), generator=generator(seed))
    return draw(N, C, seed=seed)


def outputs(name: str) -> int:
    return {"softmax": 4, "gaussian": 2}.get(name, 1)


def problem(name: str, N: int = 9, b: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """K, Kx, Kxx, m, mx, y with a different kernel for every class and a prior mean that is not zero."""
    C = outputs(name)
    X, x = draw(N, 2), draw(b, 2, seed=1)
    scales = [(0.5 + 0.3 * c, 1.0 + c) for c in range(C)]
    K, Kx, Kxx = (
        oracles.block_kernel([rbf(left, right, *scale) for scale in scales]) for left, right in [(X, X), (x, X), (x, x)]
    )
    return K, Kx, Kxx, 0.5 * draw(N * C, seed=2), 0.5 * draw(b * C, seed=3), targets(name, N, C)


def close(actual: Tensor, expected: Tensor, atol: float = 1e-11, rtol: float = 0.0) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def test_the_oracles_import_nothing_from_the_package() -> None:
    tree = ast.parse(Path(oracles.__file__).read_text())
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert froms | names == {"collections.abc", "math", "torch"}


# Likelihoods


def test_log_probabilities_agree_with_torch_distributions() -> None:
    f = draw(6, 4)
    y = {name: targets(name, 6, 4) for name in LIKELIHOODS}
    close(oracles.log_prob("softmax", f, y["softmax"]), Categorical(logits=f).log_prob(y["softmax"]).sum())
    close(oracles.log_prob("gaussian", f, y["gaussian"], NOISE), Normal(f, NOISE**0.5).log_prob(y["gaussian"]).sum())
    one = f[:, :1]
    expected = Bernoulli(logits=one[:, 0]).log_prob(y["bernoulli"].double()).sum()
    close(oracles.log_prob("bernoulli", one, y["bernoulli"]), expected)
    close(
        oracles.log_prob("poisson", one, y["poisson"]), Poisson(one[:, 0].exp()).log_prob(y["poisson"].double()).sum()
    )


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_score_and_curvature_are_the_derivatives_of_the_log_probability(name: str) -> None:
    N, C = 5, outputs(name)
    f, y = 2 * draw(N, C), targets(name, N, C)

    def objective(flat: Tensor) -> Tensor:
        return oracles.log_prob(name, flat.reshape(N, C), y, NOISE)

    gradient = torch.func.grad(objective)(f.flatten())
    hessian = torch.func.hessian(objective)(f.flatten())
    close(oracles.score(name, f, y, NOISE), gradient, atol=1e-13)
    close(oracles.curvature_matrix(name, f, y, NOISE), -hessian, atol=1e-13)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_root_and_the_noise_belong_to_the_curvature(name: str) -> None:
    f = 2 * draw(5, outputs(name))
    W = oracles.curvature_matrix(name, f, noise=NOISE)
    R = oracles.curvature_root(name, f, NOISE)
    close(R @ R.T, W, atol=1e-14)
    close(oracles.symmetric_root(W) @ oracles.symmetric_root(W), W, atol=1e-13)
    close(oracles.noise_matrix(name, f, NOISE), torch.linalg.pinv(W, rtol=1e-10, hermitian=True), rtol=1e-9)


def test_softmax_with_two_classes_is_bernoulli_of_the_difference() -> None:
    f, y = 3 * draw(6, 2), targets("bernoulli", 6, 1)
    difference = f[:, 1:] - f[:, :1]
    close(oracles.log_prob("softmax", f, y), oracles.log_prob("bernoulli", difference, y))
    close(oracles.score("softmax", f, y).reshape(6, 2)[:, 1], oracles.score("bernoulli", difference, y))


def test_saturated_probabilities_keep_their_relative_accuracy() -> None:
    gap = 60.0  # the small probability is 1e-26: one minus the large one is zero in floating point
    f, small = torch.tensor([[gap, 0.0]], dtype=torch.float64), torch.exp(torch.tensor(-gap, dtype=torch.float64))
    expected = small * torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    R = oracles.curvature_root("softmax", f)
    for W in (oracles.curvature_matrix("softmax", f), R @ R.T):
        close(W, expected, atol=0.0, rtol=1e-13)
    y = torch.tensor([0])
    close(oracles.score("softmax", f, y), small * torch.tensor([1.0, -1.0]).double(), atol=0.0, rtol=1e-13)
    one = torch.tensor([[gap]], dtype=torch.float64)
    close(oracles.curvature_matrix("bernoulli", one), small[None, None], atol=0.0, rtol=1e-13)
    close(oracles.score("bernoulli", one, torch.tensor([1])), small[None], atol=0.0, rtol=1e-13)


# Prior


def test_the_class_index_is_the_fastest() -> None:
    matrices = [draw(3, 4, seed=c) for c in range(2)]
    K = oracles.block_kernel(matrices)
    assert K.shape == (6, 8)
    for i in range(3):
        for j in range(4):
            block = K[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            assert torch.equal(block, torch.stack([M[i, j] for M in matrices]).diag())


# Mode


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_at_the_mode_the_weights_are_the_score_and_psi_is_stationary(name: str) -> None:
    K, _, _, m, _, y = problem(name)
    f, v = oracles.mode(name, K, m, y, NOISE)
    close(f.flatten(), m + K @ v, atol=1e-13)
    close(v, oracles.score(name, f, y, NOISE), atol=1e-12)
    slope = torch.func.grad(lambda w: oracles.psi(name, w, K, m, y, NOISE))(v)
    close(slope, torch.zeros_like(slope), atol=1e-11)
    top = oracles.psi(name, v, K, m, y, NOISE)
    for seed in range(20):
        assert oracles.psi(name, v + 1e-3 * draw(len(v), seed=seed), K, m, y, NOISE) < top


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_one_newton_step_solves_its_linear_system(name: str) -> None:
    K, _, _, m, _, y = problem(name)
    f = draw(len(y), outputs(name), seed=4)
    v = oracles.newton_weights(name, f, K, m, y, NOISE)
    W = oracles.curvature_matrix(name, f, y, NOISE)
    b = W @ (f.flatten() - m) + oracles.score(name, f, y, NOISE)
    close(v + W @ K @ v, b, atol=1e-10)


def test_the_mode_is_found_where_undamped_newton_fails() -> None:
    failures = 0
    for seed in range(8):
        X = draw(40, 1, seed=seed)
        K = rbf(X, X, 0.5, 5.0)
        latent = torch.linalg.cholesky(K + 1e-8 * torch.eye(40)) @ draw(40, seed=100 + seed)
        y = torch.poisson(latent.exp(), generator=generator(seed))
        m = torch.zeros(40, dtype=torch.float64)
        f, v = oracles.mode("poisson", K, m, y)
        close(v, oracles.score("poisson", f, y), atol=1e-9 * y.max().item())
        undamped = m[:, None]
        for _ in range(30):
            if undamped.isfinite().all() and undamped.max() < 30:
                undamped = (m + K @ oracles.newton_weights("poisson", undamped, K, m, y))[:, None]
        failures += not torch.allclose(undamped, f, atol=1e-6)
    assert failures > 0  # otherwise this test says nothing


@pytest.mark.parametrize("outputscale", [1.0, 20.0])
def test_the_binary_case_agrees_with_scikit_learn(outputscale: float) -> None:
    X, x = draw(30, 2), draw(7, 2, seed=1)
    y = (X[:, 0] + 0.5 * draw(30, seed=2) > 0).long()
    K, Kx, Kxx = (rbf(a, b, 0.7, outputscale) for a, b in [(X, X), (x, X), (x, x)])
    zeros = torch.zeros(37, dtype=torch.float64)
    f, _ = oracles.mode("bernoulli", K, zeros[:30], y)
    mean, covariance = oracles.posterior("bernoulli", K, Kx, Kxx, zeros[:30], zeros[:7], y)

    kernel = ConstantKernel(outputscale, "fixed") * SklearnRBF(0.7, "fixed")
    peer = GaussianProcessClassifier(kernel, optimizer=None, max_iter_predict=10_000).fit(X.numpy(), y.numpy())
    inner = peer.base_estimator_
    close(f[:, 0], K @ torch.from_numpy(inner.y_train_ - inner.pi_), atol=1e-5)
    close(
        oracles.log_evidence("bernoulli", K, zeros[:30], y),
        torch.tensor(peer.log_marginal_likelihood_value_),
        atol=1e-6,
    )
    solved = np.linalg.solve(inner.L_, inner.W_sr_[:, None] * Kx.T.numpy())
    close(mean, Kx @ torch.from_numpy(inner.y_train_ - inner.pi_), atol=1e-5)
    close(covariance.diag(), torch.from_numpy(Kxx.diag().numpy() - np.einsum("ij,ij->j", solved, solved)), atol=1e-5)


# Posterior


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_posterior_is_the_formula_written_with_an_inverse(name: str) -> None:
    K, Kx, Kxx, m, mx, y = problem(name)
    f, v = oracles.mode(name, K, m, y, NOISE)
    mean, covariance = oracles.posterior(name, K, Kx, Kxx, m, mx, y, NOISE)
    W = oracles.curvature_matrix(name, f, y, NOISE)
    inverse = torch.linalg.inv(torch.eye(len(K)) + W @ K)
    close(mean, mx + Kx @ v)
    close(covariance, Kxx - Kx @ inverse @ W @ Kx.T)
    close(oracles.log_determinant(W, K), torch.logdet(torch.eye(len(K)) + W @ K))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_weight_space_and_function_space_agree(name: str) -> None:
    N, C, P, b = 7, outputs(name), 5, 3
    J, Jx = draw(N * C, P), draw(b * C, P, seed=1)  # outputs are correlated, as in a network
    precision = draw(P, seed=2).exp()
    K, Kx, Kxx = (left @ (right / precision).T for left, right in [(J, J), (Jx, J), (Jx, Jx)])
    f = draw(N, C, seed=3)  # any latent values, not only the mode
    sigma = oracles.weight_covariance(J, oracles.curvature_matrix(name, f, noise=NOISE), precision)
    close(oracles.posterior_at(name, f, K, Kx, Kxx, NOISE), Jx @ sigma @ Jx.T, atol=1e-10)
    same = oracles.weight_covariance(J, oracles.curvature_matrix(name, f, noise=NOISE), 2.0)
    close(oracles.posterior_at(name, f, J @ J.T / 2, Jx @ J.T / 2, Jx @ Jx.T / 2, NOISE), Jx @ same @ Jx.T, atol=1e-10)


@pytest.mark.parametrize("name", ["poisson", "bernoulli", "softmax"])
def test_a_huge_prior_and_a_tiny_curvature_lose_no_accuracy(name: str) -> None:
    """Multiplying K by 2^s and W by 2^-s multiplies the covariance by 2^s."""
    C, s = (2, 80) if name == "softmax" else (1, 80)
    log_scale = s * torch.log(torch.tensor(2.0, dtype=torch.float64))
    X, x = draw(6, 2), draw(3, 2, seed=1)
    K, Kx, Kxx = (oracles.block_kernel([rbf(a, b)] * C) for a, b in [(X, X), (x, X), (x, x)])
    near = -40 + draw(6, C, seed=2)  # W = e^f to rounding, for all three
    if name == "softmax":
        near[:, 0] = 0.0
    far = near.clone()
    far[:, -1] -= log_scale
    reference = oracles.posterior_at(name, near, 2.0**57 * K, 2.0**57 * Kx, 2.0**57 * Kxx)
    extreme = oracles.posterior_at(name, far, 2.0 ** (57 + s) * K, 2.0 ** (57 + s) * Kx, 2.0 ** (57 + s) * Kxx)
    assert (reference / 2.0**57 - Kxx).abs().max() > 0.1  # the data do say something
    close(extreme / 2.0 ** (57 + s), reference / 2.0**57)


def test_the_gaussian_case_is_exact_regression() -> None:
    K, Kx, Kxx, m, mx, y = problem("gaussian")
    mean, covariance, evidence = oracles.exact_gp_regression(K, Kx, Kxx, m, mx, y, NOISE)
    laplace_mean, laplace_covariance = oracles.posterior("gaussian", K, Kx, Kxx, m, mx, y, NOISE)
    close(laplace_mean, mean)
    close(laplace_covariance, covariance)
    close(oracles.log_evidence("gaussian", K, m, y, NOISE), evidence)
    close(evidence, MultivariateNormal(m, K + NOISE * torch.eye(len(K), dtype=torch.float64)).log_prob(y.flatten()))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_more_actions_tighten_the_bounds_on_the_log_determinant(name: str) -> None:
    K, _, _, _, _, y = problem(name)
    C = outputs(name)
    f = draw(len(y), C, seed=5)
    W, pseudo_inverse = oracles.curvature_matrix(name, f, y, NOISE), oracles.noise_matrix(name, f, NOISE)
    rank = len(K) - (len(y) if name == "softmax" else 0)
    basis = torch.linalg.qr(W @ draw(len(K), rank, seed=6)).Q  # of the range of W
    truth, previous = oracles.log_determinant(W, K), 0.0
    for B in range(1, rank + 1):
        lower, upper = oracles.log_determinant_bounds(basis[:, :B], K, W, pseudo_inverse, rank)
        assert previous - 1e-9 <= lower <= truth + 1e-9
        assert truth <= upper + 1e-9
        previous = lower.item()
    close(lower, truth, atol=1e-8)
    close(upper, truth, atol=1e-8)


def test_evidence_is_the_gaussian_integral_of_the_quadratic_model_at_the_mode() -> None:
    K, _, _, m, _, y = problem("softmax")
    f, v = oracles.mode("softmax", K, m, y)
    W = oracles.curvature_matrix("softmax", f)
    value = oracles.psi("softmax", v, K, m, y) - 0.5 * torch.logdet(torch.eye(len(K)) + W @ K)
    close(oracles.log_evidence("softmax", K, m, y), value)


# Linear algebra


def test_conjugate_gradient_iterates_are_best_in_their_krylov_space() -> None:
    root, b = draw(8, 8), draw(8, seed=1)
    A = root @ root.T + torch.eye(8)
    iterates = oracles.conjugate_gradients(A, b, 8)
    exact = torch.linalg.solve(A, b)
    assert iterates.shape == (9, 8)
    close(iterates[8], exact, atol=1e-9)
    krylov = torch.stack([torch.linalg.matrix_power(A, i) @ b for i in range(5)], 1)
    for j in range(1, 6):
        Q = torch.linalg.qr(krylov[:, :j]).Q
        close(iterates[j], Q @ torch.linalg.solve(Q.T @ A @ Q, Q.T @ b), atol=1e-9)


def test_an_unknown_likelihood_or_missing_noise_is_refused() -> None:
    f, y = draw(2, 1), torch.zeros(2)
    with pytest.raises(ValueError, match=r"Expected one of .*, but got 'probit'"):
        oracles.log_prob("probit", f, y)
    with pytest.raises(ValueError, match="needs its noise variance"):
        oracles.score("gaussian", f, y)

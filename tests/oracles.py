"""The dense truth, in float64: what every fast path of the package is compared with. Imports nothing from the package.

N data, C outputs, n = N C with the class index fastest: entry (datum, class) sits at datum * C + class. K (n, n) is the
prior covariance, m (n,) the prior mean, f (N, C) latent values, g = f - m, W (n, n) the curvature -grad^2 log p(y | f),
v (n,) representer weights with g = K v. The mode satisfies v = grad log p(y | f).

    v = (I + W K)^-1 (W g + grad)        cov = K** - K* (I + W K)^-1 W K*^T
    log Z = log p(y | f) - v^T g / 2 - log|I + W K| / 2

Wherever (I + W K)^-1 is needed it goes through the symmetric I + R^T K R >= I with W = R R^T. R is in closed form and
has no cancellation, so W may be tiny and K huge.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LIKELIHOODS = ("gaussian", "bernoulli", "poisson", "softmax")


# Likelihoods. Targets y: (N,) or (N, C) as f; for softmax the class indices (N,).


def log_prob(name: str, f: Tensor, y: Tensor, noise: float | None = None) -> Tensor:
    """log p(y | f) summed over all data, with its normalising constants."""
    if name == "softmax":
        return f.log_softmax(1).gather(1, y.long()[:, None]).sum()
    t = y.reshape(f.shape).to(f.dtype)
    if name == "gaussian":
        variance = _given(noise)
        return (-0.5 * (t - f) ** 2 / variance - 0.5 * math.log(2 * math.pi * variance)).sum()
    if name == "bernoulli":
        return (t * f - torch.nn.functional.softplus(f)).sum()
    if name == "poisson":
        return (t * f - f.exp() - torch.lgamma(t + 1)).sum()
    raise ValueError(f"Expected one of {LIKELIHOODS}, but got {name!r}.")


def score(name: str, f: Tensor, y: Tensor, noise: float | None = None) -> Tensor:
    """grad_f log p(y | f), (n,)."""
    if name == "softmax":
        p = f.log_softmax(1).exp()
        observed = torch.nn.functional.one_hot(y.long(), f.shape[1]).bool()
        return torch.where(observed, _rest(p), -p).flatten()  # y - p, where 1 - p is the sum of the others
    t = y.reshape(f.shape).to(f.dtype)
    if name == "gaussian":
        return ((t - f) / _given(noise)).flatten()
    if name == "bernoulli":
        return (t * torch.sigmoid(-f) - (1 - t) * torch.sigmoid(f)).flatten()
    if name == "poisson":
        return (t - f.exp()).flatten()
    raise ValueError(f"Expected one of {LIKELIHOODS}, but got {name!r}.")


def curvature_root(name: str, f: Tensor, noise: float | None = None) -> Tensor:
    """R (n, n), block diagonal, with R R^T = W.

    For softmax diag(p) - p p^T = D^1/2 (I - q q^T) D^1/2 with q = p^1/2 of length one, so I - q q^T is a projection,
    hence its own square: R = D^1/2 (I - q q^T).
    """
    if name == "softmax":
        log_p = f.log_softmax(1)
        p, q = log_p.exp(), (log_p / 2).exp()
        return torch.block_diag(*(torch.diag_embed(q * _rest(p)) - _off_diagonal(p, q)))
    if name == "gaussian":
        return torch.full_like(f, _given(noise) ** -0.5).flatten().diag()
    if name == "bernoulli":
        logsigmoid = torch.nn.functional.logsigmoid
        return ((logsigmoid(f) + logsigmoid(-f)) / 2).exp().flatten().diag()
    if name == "poisson":
        return (f / 2).exp().flatten().diag()
    raise ValueError(f"Expected one of {LIKELIHOODS}, but got {name!r}.")


def curvature_matrix(name: str, f: Tensor, y: Tensor | None = None, noise: float | None = None) -> Tensor:
    """W = -grad_f^2 log p(y | f), (n, n), block diagonal. For these likelihoods it does not depend on y."""
    if name == "softmax":
        p = f.log_softmax(1).exp()
        return torch.block_diag(*(torch.diag_embed(p * _rest(p)) - _off_diagonal(p, p)))
    return curvature_root(name, f, noise).square()  # diagonal


def noise_matrix(name: str, f: Tensor, noise: float | None = None) -> Tensor:
    """The pseudo-inverse of W, (n, n): for softmax P diag(1 / p) P with P = I - 1 1^T / C."""
    if name == "softmax":
        C = f.shape[1]
        P = torch.eye(C, dtype=f.dtype) - 1 / C
        return torch.block_diag(*(P @ torch.diag_embed((-f.log_softmax(1)).exp()) @ P))
    return curvature_root(name, f, noise).diag().pow(-2).diag()


def _given(noise: float | None) -> float:
    if noise is None:
        raise ValueError("The gaussian likelihood needs its noise variance.")
    return noise


def _rest(p: Tensor) -> Tensor:
    """1 - p_c as the sum of the other probabilities, (N, C)."""
    C = p.shape[1]
    return p @ (1 - torch.eye(C, dtype=p.dtype))


def _off_diagonal(a: Tensor, b: Tensor) -> Tensor:
    """a_c b_c' for c different from c', and 0 on the diagonal, (N, C, C)."""
    C = a.shape[1]
    return a[:, :, None] * b[:, None, :] * (1 - torch.eye(C, dtype=a.dtype))


# Priors


def block_kernel(kernel_matrices: Sequence[Tensor]) -> Tensor:
    """The covariance (a C, b C) of C independent outputs with covariances (a, b), class index fastest."""
    stacked = torch.stack(list(kernel_matrices))  # (C, a, b)
    C, a, b = stacked.shape
    return torch.einsum("cij,cd->icjd", stacked, torch.eye(C, dtype=stacked.dtype)).reshape(a * C, b * C)


# The mode


def psi(name: str, v: Tensor, K: Tensor, m: Tensor, y: Tensor, noise: float | None = None) -> Tensor:
    """What the mode maximises: log p(y | m + K v) - v^T K v / 2."""
    g = K @ v
    return log_prob(name, _as_latent(m + g, y), y, noise) - v @ g / 2


def newton_weights(name: str, f: Tensor, K: Tensor, m: Tensor, y: Tensor, noise: float | None = None) -> Tensor:
    """The exact, undamped Newton step from f: v = (I + W K)^-1 (W g + grad), (n,)."""
    R = curvature_root(name, f, noise)
    b = R @ (R.T @ (f.flatten() - m)) + score(name, f, y, noise)
    return b - R @ torch.cholesky_solve((R.T @ (K @ b))[:, None], _factor(R, K))[:, 0]


def mode(name: str, K: Tensor, m: Tensor, y: Tensor, noise: float | None = None) -> tuple[Tensor, Tensor]:
    """The latent mode f (N, C) and its weights v (n,): Newton's method, each step halved until psi rises."""
    v = best_v = torch.zeros_like(m)
    best_error, flat_steps = math.inf, 0
    while flat_steps < 5:  # when psi no longer rises, the last steps only remove rounding
        f = _as_latent(m + K @ v, y)
        gradient = score(name, f, y, noise)
        error = ((gradient - v).abs().max() / gradient.abs().max().clamp_min(1.0)).item()
        if error < best_error:
            best_v, best_error = v, error
        if error < 1e-15:
            break
        step = newton_weights(name, f, K, m, y, noise) - v
        now = psi(name, v, K, m, y, noise)
        while not (then := psi(name, v + step, K, m, y, noise)) >= now - 1e-13 * now.abs():  # a nan is halved too
            step = step / 2
        v = v + step
        flat_steps = flat_steps + 1 if then - now <= 1e-13 * now.abs() else 0
    if best_error > 1e-6:
        raise RuntimeError(f"The oracle did not find the mode: the score and v still differ by {best_error:.1e}.")
    return _as_latent(m + K @ best_v, y), best_v


def _as_latent(flat: Tensor, y: Tensor) -> Tensor:
    return flat.reshape(len(y), -1)


# The posterior


def posterior_at(name: str, f: Tensor, K: Tensor, Kx: Tensor, Kxx: Tensor, noise: float | None = None) -> Tensor:
    """The covariance (b C, b C) at new inputs when W is taken at any given f: K** - K* (I + W K)^-1 W K*^T."""
    R = curvature_root(name, f, noise)
    A = torch.linalg.solve_triangular(_factor(R, K), R.T @ Kx.T, upper=False)
    return Kxx - A.T @ A


def posterior_from_root(R: Tensor, K: Tensor, Kx: Tensor, prior: Tensor) -> Tensor:
    """The variances (b C,) at new inputs with prior variances (b C,), for W = R R^T."""
    A = torch.linalg.solve_triangular(_factor(R, K), R.T @ Kx.T, upper=False)
    return prior - A.square().sum(0)


def posterior(
    name: str, K: Tensor, Kx: Tensor, Kxx: Tensor, m: Tensor, mx: Tensor, y: Tensor, noise: float | None = None
) -> tuple[Tensor, Tensor]:
    """Mean (b C,) and covariance (b C, b C) of the Laplace posterior, given Kx (b C, n) and Kxx (b C, b C)."""
    f, v = mode(name, K, m, y, noise)
    return mx + Kx @ v, posterior_at(name, f, K, Kx, Kxx, noise)


def weight_covariance(J: Tensor, W: Tensor, prior_precision: Tensor | float) -> Tensor:
    """(Lambda + J^T W J)^-1 of a linear model with Jacobian J (n, P) and prior precision a number or (P,)."""
    precision = torch.as_tensor(prior_precision, dtype=J.dtype).expand(J.shape[1]).diag()
    return torch.linalg.inv(precision + J.T @ W @ J)


def exact_gp_regression(
    K: Tensor, Kx: Tensor, Kxx: Tensor, m: Tensor, mx: Tensor, y: Tensor, noise: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (b C,), covariance (b C, b C) and log evidence of GP regression with Gaussian noise, the closed form."""
    L = torch.linalg.cholesky(K + noise * torch.eye(len(K), dtype=K.dtype))
    residual = y.flatten().to(K.dtype) - m
    alpha = torch.cholesky_solve(residual[:, None], L)[:, 0]
    A = torch.linalg.solve_triangular(L, Kx.T, upper=False)
    evidence = -0.5 * residual @ alpha - L.diag().log().sum() - 0.5 * len(K) * math.log(2 * math.pi)
    return mx + Kx @ alpha, Kxx - A.T @ A, evidence


def _factor(R: Tensor, K: Tensor) -> Tensor:
    B = torch.eye(R.shape[1], dtype=K.dtype) + R.T @ K @ R
    return torch.linalg.cholesky((B + B.T) / 2)


# Evidence


def symmetric_root(W: Tensor) -> Tensor:
    """W^1/2, symmetric and positive semidefinite."""
    values, vectors = torch.linalg.eigh(W)
    return vectors * values.clamp_min(0).sqrt() @ vectors.T


def log_determinant(W: Tensor, K: Tensor) -> Tensor:
    """log |I + W^1/2 K W^1/2|."""
    return 2 * _factor(symmetric_root(W), K).diag().log().sum()


def log_evidence_at(
    name: str, f: Tensor, v: Tensor, K: Tensor, m: Tensor, y: Tensor, noise: float | None = None
) -> Tensor:
    """The Laplace evidence at given f and v: log p(y | f) - v^T g / 2 - log |I + W^1/2 K W^1/2| / 2."""
    W = curvature_matrix(name, f, y, noise)
    return log_prob(name, f, y, noise) - v @ (f.flatten() - m) / 2 - log_determinant(W, K) / 2


def log_evidence(name: str, K: Tensor, m: Tensor, y: Tensor, noise: float | None = None) -> Tensor:
    """The Laplace evidence at the mode."""
    f, v = mode(name, K, m, y, noise)
    return log_evidence_at(name, f, v, K, m, y, noise)


def log_determinant_bounds(S: Tensor, K: Tensor, W: Tensor, pseudo_inverse: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds on log_determinant(W, K) from actions S (n, B) in the range of W, whose rank is given."""
    T, G = K @ S, S.T @ K @ S
    noise = S.T @ pseudo_inverse @ S
    M = G + noise
    lower = torch.logdet(M) - torch.logdet(noise)
    total = (W * K).sum()  # tr(W K)
    left = rank - S.shape[1]
    unseen = total - torch.linalg.solve(noise, G).trace()
    by_trace = lower + left * torch.log1p(unseen / left) if left else lower
    by_image = lower + total - torch.linalg.solve(M, T.T @ W @ T + G).trace()
    return lower, torch.minimum(by_trace, by_image)


# Linear algebra


def conjugate_gradients(A: Tensor, b: Tensor, j: int) -> Tensor:
    """The iterates x_0 = 0, ..., x_j of textbook conjugate gradients for A x = b, (j + 1, n)."""
    x, r = torch.zeros_like(b), b.clone()
    p = r
    iterates = [x]
    for _ in range(j):
        Ap = A @ p
        step = (r @ r) / (p @ Ap)
        x, r_next = x + step * p, r - step * Ap
        p = r_next + (r_next @ r_next) / (r @ r) * p
        r = r_next
        iterates.append(x)
    return torch.stack(iterates)

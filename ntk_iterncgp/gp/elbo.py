"""The evidence lower bound of an iterative fit as a function of the hyperparameters, with its actions and sites held.

A fit leaves actions S and Gaussian sites: the noise W⁺ and the pseudo-targets b at its last point. Holding those, the
posterior is a function of the hyperparameters θ, and so is the bound

    T = K_θ S,  G = SᵀT,  M = G + SᵀW⁺S,  w = M⁻¹Sᵀb
    ELBO(θ) = Σ_n E_q[log p(y_n | f_n)] − ½ [wᵀGw + log|M| − log|SᵀW⁺S| − tr(M⁻¹G)]
    q(f_n) = N(m + T_n w, k_θ(x_n, x_n) − T_n M⁻¹ T_nᵀ)

It is a lower bound on the log-evidence at every θ, whatever was fitted (the mean and variance of q are merely not the
best ones far away), so it is safe to climb: unlike the Laplace evidence it cannot be raised by moving to where the
approximation errs in its favour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ntk_iterncgp.gp.hyperparameters import NOISE, kernels_with
from ntk_iterncgp.kernels import Kernel
from ntk_iterncgp.likelihoods import Gaussian
from ntk_iterncgp.linalg.columns import Columns, DenseColumns, KroneckerColumns
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver.state import State

MAX_LOG_STEP = 2.0  # θ moves by at most a factor of e² between two fits: the sites were made elsewhere


def climb(
    state: State, kernels: list[Kernel], values: Mapping[str, Tensor], free: Sequence[str]
) -> tuple[dict[str, Tensor], int]:
    """Maximise the bound over the `free` hyperparameters, holding the actions and sites of a fit.

    Args:
        state: of the fit.
        kernels: of the fit.
        values: the hyperparameters of the fit.
        free: the names of those to change.

    Returns:
        All hyperparameters at the maximum, and how many products were spent.
    """
    num_products = 0
    start = {name: values[name].log() for name in free}
    kronecker = isinstance(state.buffer.actions, KroneckerColumns)
    logs = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.LBFGS(
        list(logs.values()), max_iter=20, line_search_fn="strong_wolfe", tolerance_change=1e-6
    )

    def current() -> dict[str, Tensor]:
        bounded = {n: start[n] + MAX_LOG_STEP * torch.tanh((x - start[n]) / MAX_LOG_STEP) for n, x in logs.items()}
        return dict(values) | {name: x.exp() for name, x in bounded.items()}

    def loss() -> Tensor:
        nonlocal num_products
        optimizer.zero_grad()
        now = current()
        value = -elbo_at(state, kernels_with(kernels, now), now.get(NOISE)) / state.problem.num_rows
        value.backward()
        num_products += 3 * state.buffer.actions.factor.size // (state.problem.prior.num_outputs if kronecker else 1)
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    found = {name: value.detach() for name, value in current().items()}
    finite = all(bool(value.isfinite().all()) for value in found.values())
    return (found if finite else dict(values)), num_products


def elbo_at(state: State, kernels: list[Kernel], noise: Tensor | None = None) -> Tensor:
    """The bound for other kernels (and noise) with the actions and sites of a state, differentiable in them."""
    problem, actions, prior = state.problem, state.buffer.actions.whole(), state.problem.prior
    assert isinstance(prior, GramPrior)
    moved = GramPrior(
        kernels,
        prior.inputs,
        prior.mean[0],
        chunk_bytes=prior.chunk_bytes,
        method=prior.method,
        tolerance=0.0,
        shard=actions.shard,  # every process climbs alike, on its own
    )
    images = moved.image(actions)
    gram = _gram(actions, images)
    gram = 0.5 * (gram + gram.T)
    scale: Tensor | float = 1.0
    if noise is not None:
        assert isinstance(problem.likelihood, Gaussian)
        scale = noise.to(gram.device) / problem.likelihood.variance
    eye = torch.eye(actions.size, dtype=torch.float64, device=gram.device)
    noise_gram = scale * state.noise_gram + state.rounding * eye
    lower, noise_lower = _cholesky(gram + noise_gram), _cholesky(noise_gram)
    projected = actions.inner(state.right_hand_side[:, None])  # Sᵀb
    w = torch.cholesky_solve(projected, lower)  # (B, 1)
    divergence = 0.5 * (
        (w.T @ gram @ w).squeeze()
        + 2 * lower.diagonal().log().sum()
        - 2 * noise_lower.diagonal().log().sum()
        - torch.cholesky_solve(gram, lower).trace()
    )
    total = gram.new_zeros(())
    for data in images.slices():
        total = total + checkpoint(
            _expected_log_prob,
            state,
            moved,
            images,
            lower,
            w,
            noise,
            data,
            use_reentrant=False,
            preserve_rng_state=False,
        )
    return total - divergence


def _cholesky(matrix: Tensor) -> Tensor:
    """The Cholesky factor; of a matrix that is not positive definite in rounding, with as much noise as it takes."""
    size, jitter = float(matrix.detach().diagonal().mean()), 0.0
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    lower: Tensor
    while True:
        lower, info = torch.linalg.cholesky_ex(matrix + jitter * size * eye)
        if int(info) == 0 or not jitter < 1:
            return lower
        jitter = max(10 * jitter, 1e-14)


def _gram(actions: Columns, images: Columns) -> Tensor:  # (B, B)
    """SᵀT, differentiable in T."""
    if isinstance(actions, KroneckerColumns) and isinstance(images, KroneckerColumns):
        inner = actions.factor.matrix.double().T @ images.factor.matrix.double()
        return torch.kron(inner, actions.contrasts.T @ actions.contrasts)
    assert isinstance(actions, DenseColumns) and isinstance(images, DenseColumns)
    return actions.matrix.double().T @ images.matrix.double()


def _expected_log_prob(
    state: State, prior: GramPrior, images: Columns, lower: Tensor, w: Tensor, noise: Tensor | None, data: slice
) -> Tensor:
    """Σ E_q[log p(y_n | f_n)] over some data."""
    rows = images.rows(data)  # (rows, C, B)
    mean = prior.mean[data] + (rows @ w)[..., 0]
    half = torch.linalg.solve_triangular(lower, rows.flatten(0, 1).T, upper=False).T.unflatten(0, rows.shape[:2])
    covariance: Tensor = prior.blocks_of(prior.inputs[data]) - half @ half.mT
    likelihood, targets = state.problem.likelihood.on(data), state.problem.targets[data]
    if noise is not None:
        squares = (targets - mean).square() + covariance.diagonal(dim1=1, dim2=2)
        return -0.5 * (squares / noise + (2 * torch.pi * noise).log()).sum()
    return likelihood.expected_log_prob(mean, covariance, targets).sum()

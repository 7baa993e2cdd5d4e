"""Choosing a kernel's hyperparameters, and the noise, by the evidence lower bound.

A fit leaves actions S and Gaussian sites: the noise W⁺ and the pseudo-targets b at its last point. Holding those, the
posterior is a function of the hyperparameters θ, and so is the bound

    T = K_θ S,  G = SᵀT,  M = G + SᵀW⁺S,  w = M⁻¹Sᵀb
    ELBO(θ) = Σ_n E_q[log p(y_n | f_n)] − ½ [wᵀGw + log|M| − log|SᵀW⁺S| − tr(M⁻¹G)]
    q(f_n) = N(m + T_n w, k_θ(x_n, x_n) − T_n M⁻¹ T_nᵀ)

It is a lower bound on the log-evidence at every θ, whatever was fitted (the mean and variance of q are merely not the
best ones far away), so it is safe to climb: unlike the Laplace evidence it cannot be raised by moving to where the
approximation errs in its favour. One step maximises it over log θ with S and the sites held, by L-BFGS; then the GP is
fitted again there. For a Gaussian likelihood with all actions taken one step is exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm

from ntk_iterncgp.fitting.report import FitReport
from ntk_iterncgp.kernels import Kernel
from ntk_iterncgp.likelihoods import Gaussian, Likelihood
from ntk_iterncgp.linalg.columns import Columns, DenseColumns, KroneckerColumns
from ntk_iterncgp.posterior.function_space import FunctionPosterior
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.runtime.validate import non_negative
from ntk_iterncgp.solver import Status
from ntk_iterncgp.solver.state import State

NOISE = "noise"
MAX_LOG_STEP = 2.0  # θ moves by at most a factor of e² between two fits: the sites were made elsewhere


class Fitted(Protocol):
    """A GP fitted at some hyperparameters. If it was interrupted, the bound holds for the work done."""

    @property
    def posterior_(self) -> FunctionPosterior:
        """The posterior of the fit."""

    @property
    def report_(self) -> FitReport:
        """How the fit ended."""


F = TypeVar("F", bound=Fitted)


@dataclass(frozen=True)
class OptimizationReport:
    """How the search went; `history` has one entry for each fit."""

    status: str  # "converged", "max_steps" or "interrupted"
    elbo: float
    hyperparameters: dict[str, Any]
    num_products: int
    seconds: float
    history: list[dict[str, Any]]

    def __str__(self) -> str:
        advice = "" if self.status == "converged" else " Call optimize again to continue from here."
        fits = f"{len(self.history)} fit{'s' if len(self.history) > 1 else ''}"
        return (
            f"{self.status}: ELBO {self.history[0]['elbo']:.6g} -> {self.elbo:.6g} in {fits}, "
            f"{self.num_products} products, {self.seconds:.1f} s.{advice}"
        )


def maximise_elbo(
    fit: Callable[[list[Kernel], Likelihood], F],
    kernels: list[Kernel],
    likelihood: Likelihood,
    *,
    max_steps: int,
    tolerance: float,
    fixed: Sequence[str],
    progress_bar: bool,
) -> tuple[F, OptimizationReport]:
    """Fit, climb, fit again, until no hyperparameter moves by more than `tolerance`, or until Ctrl-C.

    Args:
        fit: fits a GP with given kernels and likelihood.
        kernels: where to start; one for all outputs, or one for each.
        likelihood: where to start; the noise of a Gaussian is a hyperparameter too.
        max_steps: how often to climb.
        tolerance: as a change of log θ.
        fixed: names of hyperparameters to leave as they are.
        progress_bar: whether to show one.

    Returns:
        The fit with the largest bound, and how the search went.
    """
    started = time.perf_counter()
    values = {name: value.detach().clone() for name, value in hyperparameters(kernels, likelihood).items()}
    if not values:
        raise ValueError(f"`kernel` must have hyperparameters to optimise; got {kernels[0]!r}, which shows none.")
    tolerance, free = non_negative("tolerance", tolerance), _free(values, fixed)
    history: list[dict[str, Any]] = []
    best: tuple[F, float, dict[str, Any]] | None = None  # with its bound, and where it was
    num_products, status, interrupted = 0, "max_steps", False

    def evaluate() -> State:
        """Fit at the current values, and enter it in the history."""
        nonlocal best, num_products, interrupted
        fitted, place = fit(*with_values(kernels, likelihood, values)), {n: x.tolist() for n, x in values.items()}
        elbo, state = fitted.posterior_.elbo(), fitted.posterior_.state
        num_products += state.num_products
        history.append({"elbo": elbo} | place)
        if best is None or elbo > best[1]:
            best = fitted, elbo, place
        interrupted = fitted.report_.status == Status.INTERRUPTED
        if interrupted:
            raise KeyboardInterrupt
        return state

    visible = progress_bar and parallel.is_main()
    try:
        for _ in tqdm(range(max_steps), desc="Hyperparameters", disable=not visible):
            before = values
            values, spent = climb(evaluate(), kernels, values, free)
            num_products += spent
            moved = max(float((values[name] / before[name]).log().abs().max()) for name in free)
            if moved <= tolerance:
                status = "converged"
                break
        evaluate()
    except KeyboardInterrupt:
        if best is None or (parallel.num_processes() > 1 and not interrupted):  # the others have not been interrupted
            raise
        status = Status.INTERRUPTED.value
    assert best is not None
    fitted, elbo, found = best
    return fitted, OptimizationReport(status, elbo, found, num_products, time.perf_counter() - started, history)


def _free(values: Mapping[str, Tensor], fixed: Sequence[str]) -> list[str]:
    """The names that are not fixed."""
    if isinstance(fixed, str) or not isinstance(fixed, Iterable):
        raise TypeError(f"`fixed` must be a list of names; got {fixed!r}. Try fixed={list(values)[:1]}.")
    fixed = list(fixed)
    unknown = [name for name in fixed if name not in values]
    if unknown:
        raise ValueError(f"`fixed` must hold names among {list(values)}; got {unknown}.")
    free = [name for name in values if name not in fixed]
    if not free:
        raise ValueError(f"`fixed` must leave something to optimise; got all of {list(values)}.")
    return free


def hyperparameters(kernels: list[Kernel], likelihood: Likelihood) -> dict[str, Tensor]:
    """The hyperparameters of kernels and likelihood by name.

    Such as `lengthscale`; with a kernel for each output `0.lengthscale`; and `noise` for a Gaussian likelihood.
    """
    found: dict[str, Tensor] = {}
    for place, kernel in enumerate(kernels):
        prefix = f"{place}." if len(kernels) > 1 else ""
        found |= {f"{prefix}{name}": value for name, value in kernel.hyperparameters().items()}
    if isinstance(likelihood, Gaussian):
        found[NOISE] = torch.tensor(likelihood.variance, dtype=torch.float64)
    return found


def with_values(
    kernels: list[Kernel], likelihood: Likelihood, values: Mapping[str, Tensor]
) -> tuple[list[Kernel], Likelihood]:
    """Copies of the kernels and the likelihood with other hyperparameters."""
    if NOISE in values and isinstance(likelihood, Gaussian):
        likelihood = Gaussian(float(values[NOISE]), likelihood.num_outputs)
    return _kernels_with(kernels, values), likelihood


def _kernels_with(kernels: list[Kernel], values: Mapping[str, Tensor]) -> list[Kernel]:
    values = {name: value for name, value in values.items() if name != NOISE}
    if len(kernels) == 1:
        return [kernels[0].with_hyperparameters(values)]
    parts: list[dict[str, Tensor]] = [{} for _ in kernels]
    for name, value in values.items():
        place, inner = name.split(".", 1)
        parts[int(place)][inner] = value
    return [kernel.with_hyperparameters(part) for kernel, part in zip(kernels, parts, strict=True)]


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
        value = -elbo_at(state, _kernels_with(kernels, now), now.get(NOISE)) / state.problem.num_rows
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
    covariance = prior.blocks_of(prior.inputs[data]) - half @ half.mT
    likelihood, targets = state.problem.likelihood, state.problem.targets[data]
    if noise is not None:
        squares = (targets - mean).square() + covariance.diagonal(dim1=1, dim2=2)
        return -0.5 * (squares / noise + (2 * torch.pi * noise).log()).sum()
    return likelihood.expected_log_prob(mean, covariance, targets).sum()

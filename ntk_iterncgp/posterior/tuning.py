"""Choosing the prior precision after the fit, from small matrices alone.

By the evidence: its lower bound is a differentiable function of one precision, or one for each parameter tensor.
By a validation set: the rows of J at its inputs are needed once. With unit precision they give J Jᵀ and J A, and then

    cov(δ) = J Jᵀ/δ − (J A/δ) M(δ)⁻¹ (J A/δ)ᵀ

for every precision δ of the grid, so fifty candidates cost little more than one. Stored layer by layer, they give the
covariance for a precision per layer, and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torch.nn.functional import nll_loss
from tqdm.auto import tqdm

from ntk_iterncgp.jacobian.blocks import WeightColumns
from ntk_iterncgp.jacobian.rows import Rows
from ntk_iterncgp.posterior.contrasts import Shape, ranking
from ntk_iterncgp.posterior.weight_space import WeightPosterior, downdate_rounding

STRUCTURES = ("scalar", "layerwise")

Moments = tuple[Tensor, Tensor, Tensor]
"""Mean (b, C), covariance (b, C, C) and targets of some validation data."""


def tune_by_evidence(
    evidence: Callable[[Tensor], Tensor],
    num_layers: int,
    like: Tensor,
    *,
    start: float | Tensor,
    structure: str,
    num_steps: int,
    learning_rate: float,
    progress_bar: bool,
) -> Tensor:
    """Maximise the evidence over the prior precision, by Adam on its logarithm.

    Args:
        evidence: the evidence for a precision, differentiable.
        num_layers: how many parameter tensors there are.
        like: gives the dtype and device of the precision.
        start: where to start.
        structure: "scalar" or "layerwise": one precision, or one for each parameter tensor.
        num_steps: of Adam.
        learning_rate: of Adam.
        progress_bar: whether to show one.

    Returns:
        The best precision, (1,) or (L,).
    """
    initial = torch.as_tensor(start, dtype=like.dtype, device=like.device).reshape(-1)
    initial = starting_precision(initial, structure, num_layers)
    log_precision = initial.log().clone().requires_grad_()
    optimizer = torch.optim.Adam([log_precision], lr=learning_rate)
    best, best_value = initial.clone(), -float("inf")
    for _ in tqdm(range(num_steps), desc="Evidence", disable=not progress_bar):
        optimizer.zero_grad()
        value = evidence(log_precision.exp())
        if value.item() > best_value:
            best, best_value = log_precision.detach().exp(), value.item()
        # Of the precision alone: a noise that a user's own loop has learnt is still part of the graph of its last step.
        log_precision.grad = torch.autograd.grad(-value, log_precision)[0]
        optimizer.step()
    last = log_precision.detach().exp()
    return last if evidence(last).item() >= best_value else best


def starting_precision(start: Tensor, structure: str, num_layers: int) -> Tensor:  # (1,) or (L,)
    """One precision, or one for each parameter tensor, to start a search from."""
    if structure not in STRUCTURES:
        raise ValueError(
            "`prior_structure` must be 'scalar' or 'layerwise', since the data cannot determine one precision per "
            f"weight; got {structure!r}. Try 'layerwise'."
        )
    return start.expand(num_layers) if len(start) == 1 and structure == "layerwise" else start


@dataclass(frozen=True, eq=False)
class ValidationPart:
    """Some validation inputs and the small matrices of a unit prior precision there, for each layer or in one."""

    outputs: Tensor  # f(x; θ*) (b, C)
    shifted: Tensor  # J(x)(θ* − μ₀) (b, C); zero for contrasts, of which no refined mean is asked
    covariance: Tensor  # J_l J_lᵀ (l, b, C, C)
    cross: Tensor  # J_l A_l (l, b, C, B)
    targets: Tensor
    rounding: float = 0.0  # of what is removed from k(x, x), as a fraction of it
    is_of_contrasts: bool = False  # whether J is HᵀJ of the leading contrasts of each input (`contrasts.py`)

    @classmethod
    def of(
        cls,
        rows: Rows,
        posterior: WeightPosterior,
        shift: Tensor,
        targets: Tensor,
        *,
        layerwise: bool = False,
        is_of_contrasts: bool = False,
        dtype: torch.dtype | None = None,
    ) -> ValidationPart:
        """Compute the small matrices of some inputs.

        Args:
            rows: the rows of J at these inputs.
            posterior: of the fit.
            shift: θ* − μ₀ (P,).
            targets: one for each input.
            layerwise: whether to separate the parameter tensors.
            is_of_contrasts: whether the rows are those of leading contrasts.
            dtype: of the products; None: that of derivatives.
        """
        sizes, images = posterior.layer_sizes if layerwise else (len(posterior.images),), posterior.images
        dtype = posterior.dtype if dtype is None else dtype
        cross, covariance = zip(*rows.by_layer(WeightColumns(images, dtype), sizes), strict=True)
        shifted = torch.zeros_like(rows.outputs) if is_of_contrasts else rows.times(shift[:, None])[..., 0]
        return cls(
            rows.outputs.double(),
            shifted,
            torch.stack(covariance),
            torch.stack(cross).to(dtype),
            targets,
            downdate_rounding(posterior.dtype, dtype),
            is_of_contrasts,
        )

    def prior(self, precision: Tensor) -> Tensor:  # (1,) or (l,) -> (b, C, C)
        """k(x, x), and what rounding may remove from it."""
        prior = (self.covariance / precision.double().reshape(-1, 1, 1, 1)).sum(0)
        return prior + torch.diag_embed(self.rounding * prior.diagonal(dim1=1, dim2=2))

    def moments(
        self, posterior: WeightPosterior, precision: Tensor, noise_scale: Tensor, *, refined: bool
    ) -> tuple[Tensor, Tensor]:
        """Mean (b, C) and covariance (b, C, C) for one precision, or one per layer; differentiable in it.

        Args:
            posterior: of the fit.
            precision: of the prior, (1,) or (l,).
            noise_scale: τ = σ²·T.
            refined: whether the mean is the mode of the linearised model, or the network's own outputs.
        """
        factor = posterior.factor(precision, noise_scale)
        each = 1 / precision.double().reshape(-1, 1, 1, 1)
        cross = (each * self.cross).sum(0)
        half = factor.half_solve(cross.flatten(0, 1).T).T.unflatten(0, cross.shape[:2])
        mean = self.outputs
        if refined:
            weights = factor.solve(posterior.right_hand_side[:, None])
            mean = mean - self.shifted + (cross @ weights)[..., 0]
        covariance = self.prior(precision) - half @ half.mT
        return mean, self.filled(covariance, posterior.shape(precision, noise_scale) if self.is_of_contrasts else None)

    def filled(self, covariance: Tensor, shape: Shape | None) -> Tensor:  # (b, C, C), or (b, k, k) of contrasts
        """The covariance of all outputs; an estimate where it is that of contrasts. The shape is held for constant."""
        if not self.is_of_contrasts:
            return covariance
        shape = shape or Shape.independent(self.outputs.shape[1], covariance.device)
        return shape.covariance(covariance, ranking(self.outputs))


class ScalarPath:
    """The validation set in the eigenbasis of R^{-½} AᵀA R^{-½}: each further precision δ costs one small product.

    The noise of rounding is proportional to 1/δ, as AᵀA is, to which it is added.

    cov(δ) = J Jᵀ/δ − Z diag(1 / (δ(γ + δτ))) Zᵀ,    Z = J A R^{-½} V
    """

    def __init__(self, posterior: WeightPosterior, parts: Sequence[ValidationPart], noise_scale: Tensor) -> None:
        lower, gram = torch.linalg.cholesky(posterior.noise_gram), posterior.unit_gram
        half = torch.linalg.solve_triangular(lower, gram + posterior.rounding(gram), upper=False)
        whitened = torch.linalg.solve_triangular(lower, half.T, upper=False)
        self.gamma, vectors = torch.linalg.eigh(0.5 * (whitened + whitened.T))
        basis = torch.linalg.solve_triangular(lower.T, vectors, upper=True)  # R^{-½} V
        self.posterior, self.noise_scale = posterior, noise_scale.double()
        self.rotated = [part.cross[0] @ basis.to(part.cross.dtype) for part in parts]
        self.parts = parts

    def moments(self, precision: Tensor) -> list[Moments]:
        """Means, covariances and targets of all parts for one precision."""
        removed = 1 / (precision * (self.gamma.clamp_min(0) + precision * self.noise_scale))
        has_contrasts = any(part.is_of_contrasts for part in self.parts)
        shape = self.posterior.shape(precision.reshape(1), self.noise_scale) if has_contrasts else None
        result = []
        for part, Z in zip(self.parts, self.rotated, strict=True):
            scaled = Z * removed.sqrt().to(Z.dtype)
            covariance = part.prior(precision) - (scaled @ scaled.mT).double()
            result.append((part.outputs, part.filled(covariance, shape), part.targets))
        return result


def tune_by_validation(
    posterior: WeightPosterior,
    parts: Sequence[ValidationPart],
    grid: Tensor,
    noise_scale: Tensor,
    score: Callable[[list[Moments]], float],
    *,
    refined: bool,
    progress_bar: bool,
) -> Tensor:
    """Choose the precision of a grid with the least score on the validation set.

    Args:
        posterior: of the fit.
        parts: the validation set.
        grid: the candidates.
        noise_scale: τ = σ²·T.
        score: of the means, covariances and targets for one candidate.
        refined: whether the mean is the mode of the linearised model, or the network's own outputs.
        progress_bar: whether to show one.

    Returns:
        The best candidate (1,).
    """
    path = None if refined or posterior.rank == 0 else ScalarPath(posterior, parts, noise_scale)
    scores = []
    for precision in tqdm(grid, desc="Prior precision", disable=not progress_bar):
        if path is not None:
            scores.append(score(path.moments(precision.double())))
            continue
        moments = [
            (*part.moments(posterior, precision.reshape(1), noise_scale, refined=refined), part.targets)
            for part in parts
        ]
        scores.append(score(moments))
    values = torch.tensor(scores)
    if not bool(torch.isfinite(values).any()):
        raise ValueError("`loss` must be finite somewhere on the grid; got NaN or infinity everywhere. Try loss=None.")
    return grid[int(torch.where(values.isfinite(), values, torch.inf).argmin())].reshape(1)


def tune_by_gradient(
    posterior: WeightPosterior,
    parts: Sequence[ValidationPart],
    loss: Callable[[Sequence[Moments], Tensor], Tensor],
    start: Tensor,  # (1,) or (L,)
    noise_scale: Tensor,
    *,
    tune_temperature: bool,
    refined: bool,
    num_steps: int,
    learning_rate: float,
    progress_bar: bool,
) -> tuple[Tensor, float]:
    """Minimise the loss on the validation set over the precision, and the temperature if asked, by Adam.

    Args:
        posterior: of the fit.
        parts: the validation set, layer by layer if there is one precision for each.
        loss: of the moments and the noise scale, differentiable.
        start: the precision to start from.
        noise_scale: τ = σ²·T.
        tune_temperature: whether to tune the noise scale too.
        refined: whether the mean is the mode of the linearised model, or the network's own outputs.
        num_steps: of Adam.
        learning_rate: of Adam.
        progress_bar: whether to show one.

    Returns:
        The best precision, and the factor by which to multiply the temperature.
    """
    log_precision = start.double().log().clone().requires_grad_()
    log_factor = torch.zeros((), dtype=torch.float64, device=start.device, requires_grad=tune_temperature)
    variables = [log_precision, log_factor] if tune_temperature else [log_precision]
    optimizer = torch.optim.Adam(variables, lr=learning_rate)
    best, best_value = (start.double(), 1.0), float("inf")
    for step in tqdm(range(num_steps + 1), desc="Validation loss", disable=not progress_bar):
        optimizer.zero_grad()
        scale = noise_scale.double() * log_factor.exp()
        moments: list[Moments] = [
            (*part.moments(posterior, log_precision.exp(), scale, refined=refined), part.targets) for part in parts
        ]
        value = loss(moments, scale)
        if value.item() < best_value:
            best, best_value = (log_precision.detach().exp(), float(log_factor.detach().exp())), value.item()
        if step < num_steps:
            value.backward()
            optimizer.step()
    return best


def gaussian_nll(moments: Sequence[Moments], noise_variance: Tensor) -> Tensor:
    """Σ −log N(y; mean, variance + noise). Unlike the squared error it depends on the prior precision."""
    total = torch.zeros((), dtype=torch.float64, device=noise_variance.device)
    for mean, covariance, targets in moments:
        variance = covariance.diagonal(dim1=1, dim2=2) + noise_variance
        squares = (targets.reshape(mean.shape) - mean).square()
        total = total + 0.5 * (squares / variance + (2 * torch.pi * variance).log()).sum()
    return total


def categorical_nll(predictions: Sequence[tuple[Any, Tensor]]) -> Tensor:
    """Σ −log p(y) for class probabilities, a probability of zero counting as the smallest normal number."""
    losses = [nll_loss(p.clamp_min(1e-38).log(), targets, reduction="sum") for p, targets in predictions]
    return torch.stack(losses).sum()


def metric_value(loss: Any, predictions: Sequence[tuple[Any, ...]]) -> float:
    """Evaluate a user's loss on batches of (…, targets).

    A torchmetrics metric is reset first, so that candidates do not add up.
    """
    if isinstance(loss, torchmetrics.Metric):
        loss.reset()
        for batch in predictions:
            try:
                loss.update(*batch)
            except TypeError:  # a metric of the mean alone
                loss.update(batch[0], batch[-1])
        return float(loss.compute().sum())
    return float(loss(*(torch.cat(items) for items in zip(*predictions, strict=True))))

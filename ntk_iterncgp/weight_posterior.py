"""The posterior of a linearised network's weights, from A = JᵀS and small matrices: no training data, any prior.

    Σ_θ = Λ⁻¹ − Λ⁻¹A M⁻¹AᵀΛ⁻¹,    M = AᵀΛ⁻¹A + τ R,    R = SᵀW⁺S

A and R do not depend on the prior precision Λ, nor on the noise or temperature, which only scale R (τ = σ²·T). So all
hyperparameters may change after the fit and take effect at once: G(Λ) = AᵀΛ⁻¹A is a sum of one small matrix per
parameter tensor, over its precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.precision import full_precision
from ntk_iterncgp.priors.rows import Rows
from ntk_iterncgp.solver.factor import Factor, rounding_noise

SLICE_ROWS = 2**14  # weights at a time, in sums over all of them
NO_PART = 1e-6  # of an action, lost to rounding
SLICE_COLUMNS = 128  # actions at a time, where half of a symmetric matrix is enough


@dataclass(frozen=True, eq=False)
class WeightPosterior:
    """What a fit leaves behind. `layer_sizes` are the numbers of weights of the parameter tensors."""

    images: Tensor  # A (P, B)
    noise_gram: Tensor  # R (B, B), for τ = 1
    right_hand_side: Tensor  # M w (B,), which is Sᵀb at the mode: zero where the mean is the network itself
    anchor_share: float  # how much of θ* − μ₀ is left in the mean: zero once Newton has taken a full step
    prior_mean: Tensor  # μ₀ of the fit, (1,) or (P,)
    curvature_diagonal: Tensor  # the diagonal of JᵀWJ (P,), for τ = 1
    curvature_rank: int
    layer_sizes: tuple[int, ...]
    trace_is_exact: bool

    @property
    def rank(self) -> int:
        return self.images.shape[1]

    def to_dict(self) -> dict[str, Tensor | int | bool]:
        """Plain tensors and numbers. The layer sizes are the model's own."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layer_sizes"}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], layer_sizes: tuple[int, ...], device: torch.device) -> WeightPosterior:
        moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in saved.items()}
        return cls(**moved, layer_sizes=layer_sizes)

    # --- small matrices for a prior -------------------------------------------------------------------------------

    @cached_property
    def unit_gram(self) -> Tensor:  # (B, B)
        """AᵀA."""
        return inner_products(self.images, self.images)

    @cached_property
    def layer_grams(self) -> Tensor:  # (L, B, B)
        """A_lᵀA_l for each parameter tensor."""
        return torch.stack([inner_products(part, part) for part in self.images.split(self.layer_sizes)])

    def knowing(self, unit_gram: Tensor) -> WeightPosterior:  # (B, B)
        """Itself, where AᵀA has been computed already."""
        self.__dict__["unit_gram"] = unit_gram
        return self

    def gram(self, prior_precision: Tensor) -> Tensor:  # (1,), (L,) or (P,) -> (B, B)
        """AᵀΛ⁻¹A, differentiable in Λ."""
        precision = prior_precision.double()
        if len(precision) == 1:
            return self.unit_gram / precision
        if len(precision) == len(self.layer_sizes):
            return torch.einsum("l,lbc->bc", 1 / precision, self.layer_grams)
        parts = zip(self.images.split(SLICE_ROWS), precision.split(SLICE_ROWS), strict=True)
        return sum(
            (((part.double() / p[:, None]).T @ part.double()) for part, p in parts),
            start=torch.zeros_like(self.noise_gram),
        )

    def noise(self, gram: Tensor, noise_scale: Tensor) -> tuple[Tensor, float]:  # AᵀΛ⁻¹A (B, B) -> (B, B)
        """τR with what the rounding of A may amount to on its diagonal, and that number. Where actions are nearly
        dependent in R it is more than R: who divides by R alone takes rounding for information."""
        noise = noise_scale.double() * self.noise_gram
        with torch.no_grad():
            rounding = rounding_noise(gram, noise, self.images.dtype)
        return noise + rounding * torch.eye(self.rank, dtype=torch.float64, device=gram.device), rounding

    def factor(self, prior_precision: Tensor, noise_scale: Tensor) -> Factor:
        gram = self.gram(prior_precision)
        return Factor(gram + self.noise(gram, noise_scale)[0])

    def right_hand_side_for(self, prior_mean: Tensor) -> Tensor:  # (B,)
        """Sᵀb for another prior mean: b = f − m + W⁺∇ changes by J(μ₀ − μ₀′) at the same f."""
        change = (self.prior_mean - prior_mean).double().reshape(-1)
        if not bool(change.any()):
            return self.right_hand_side
        weights = change.expand(len(self.images)).to(self.images.dtype)
        with full_precision(weights.device):
            return self.right_hand_side + (self.images.T @ weights).double()

    def precision_of_weights(self, prior_precision: Tensor) -> Tensor:  # (P,)
        return precision_of_weights(prior_precision, self.layer_sizes)

    # --- predictions ----------------------------------------------------------------------------------------------

    def conditioned(self, prior_precision: Tensor, noise_scale: Tensor) -> ConditionedPosterior:
        """The posterior for one choice of hyperparameters, ready for predictions."""
        variance, gram = 1 / self.precision_of_weights(prior_precision.detach()), self.gram(prior_precision.detach())
        noise, _ = self.noise(gram, noise_scale.detach())
        return ConditionedPosterior(self, variance, Factor(gram + noise), noise)

    # --- evidence -------------------------------------------------------------------------------------------------

    def log_determinant_bounds(self, prior_precision: Tensor, noise_scale: Tensor) -> tuple[Tensor, Tensor]:
        """lo ≤ log|I + W^{½}KW^{½}| ≤ hi, differentiable in both arguments."""
        precision = self.precision_of_weights(prior_precision)
        trace = (self.curvature_diagonal / precision).sum() / noise_scale
        free = self.curvature_rank - self.rank
        if self.rank:
            gram = self.gram(prior_precision)
            noise, rounding = self.noise(gram, noise_scale)
            root = torch.linalg.cholesky(noise)
            half = torch.linalg.solve_triangular(root, gram, upper=False)
            whitened = torch.linalg.solve_triangular(root, half.T, upper=False)
            # Where rounding takes a part of the actions, what is missing may also be in their span: |I + Y + Z| is at
            # most |I + Y| |I + Z|, and Z has the rank of W.
            if rounding * float(torch.cholesky_inverse(root.detach()).trace()) > NO_PART:
                free = self.curvature_rank
            one = torch.eye(self.rank, dtype=torch.float64, device=gram.device)
            lower = 2 * torch.linalg.cholesky(one + 0.5 * (whitened + whitened.T)).diagonal().log().sum()
            captured = whitened.trace()
        else:
            lower = captured = torch.zeros((), dtype=torch.float64, device=self.images.device)
        missing = (trace - captured).clamp_min(0)
        return lower, lower + free * torch.log1p(missing / free) if free > 0 else lower

    def information_captured(self, prior_precision: Tensor, noise_scale: Tensor) -> float:
        lower, upper = self.log_determinant_bounds(prior_precision.detach(), noise_scale.detach())
        return float(lower / upper) if float(upper) > 0 else 1.0

    # --- less memory ----------------------------------------------------------------------------------------------

    def leading(self, number: int) -> WeightPosterior:
        """Of the first actions alone."""
        return replace(
            self,
            images=self.images[:, :number],
            noise_gram=self.noise_gram[:number, :number],
            right_hand_side=self.right_hand_side[:number],
        )

    @torch.no_grad()
    def compress(self, max_rank: int, prior_precision: Tensor, noise_scale: Tensor) -> WeightPosterior:
        """The `max_rank` combinations that keep the mean, and contract the variance most, at a given prior."""
        if max_rank >= self.rank:
            return self
        root = self.factor(prior_precision, noise_scale).root()
        contraction = root.T @ self.gram(prior_precision) @ root
        mean = root.T @ self.right_hand_side[:, None]
        u = mean / mean.norm().clamp_min(1e-300)
        along = contraction @ u
        deflated = contraction - u @ along.T - along @ u.T + (u.T @ along) * (u @ u.T)  # beside u
        keep = max_rank - int(float(mean.norm()) > 0)
        top = torch.linalg.eigh(deflated).eigenvectors[:, self.rank - keep :]
        combined = top if keep == max_rank else torch.cat([u, top], 1)
        Q = torch.linalg.qr(root @ combined).Q
        return replace(
            self,
            images=self.images @ Q.to(self.images.dtype),
            noise_gram=Q.T @ self.noise_gram @ Q,
            right_hand_side=Q.T @ self.right_hand_side,
        )


def inner_products(left: Tensor, right: Tensor) -> Tensor:  # (p, B), (p, B′) -> (B, B′)
    """Products in the dtype of the images, whose rounding is allowed for as noise; their sum in float64."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    is_symmetric = left is right
    with full_precision(left.device):
        for one, other in zip(left.split(SLICE_ROWS), right.split(SLICE_ROWS), strict=True):
            if not is_symmetric:
                total += one.T @ other
                continue
            for start in range(0, one.shape[1], SLICE_COLUMNS):  # a triangle of blocks
                columns = slice(start, start + SLICE_COLUMNS)
                total[columns, start:] += one[:, columns].T @ one[:, start:]
    return total.triu() + total.triu(1).T if is_symmetric else total


def precision_of_weights(prior_precision: Tensor, layer_sizes: tuple[int, ...]) -> Tensor:  # (1,), (L,), (P,) -> (P,)
    """One precision for each weight, in float64."""
    precision = prior_precision.double()
    if len(precision) == len(layer_sizes) != 1:
        return torch.repeat_interleave(precision, torch.tensor(layer_sizes, device=precision.device))
    return precision.expand(sum(layer_sizes))


class ConditionedPosterior:
    """N(μ, Σ_θ) for one prior precision and noise."""

    def __init__(self, posterior: WeightPosterior, variance: Tensor, factor: Factor, noise: Tensor) -> None:
        self.posterior, self.variance, self.factor, self.noise = posterior, variance, factor, noise
        self.scaled_images = variance.to(posterior.images.dtype)[:, None] * posterior.images  # Λ⁻¹A

    def mean_shift(self, prior_mean: Tensor) -> Tensor:  # (P,)
        """Λ⁻¹A M⁻¹Sᵀb: what the data add to the prior mean of the weights."""
        coefficients = self.factor.solve(self.posterior.right_hand_side_for(prior_mean)[:, None])
        return self._combine(coefficients)[:, 0]

    def _combine(self, coefficients: Tensor) -> Tensor:  # (B, k) -> (P, k)
        """Λ⁻¹A a, in float64 but for the products."""
        with full_precision(coefficients.device):
            return (self.scaled_images @ coefficients.to(self.scaled_images.dtype)).double()

    def covariance(self, rows: Rows, *, joint: bool = False) -> Tensor:  # (b, C, C), or (b·C, b·C)
        """J(x) Σ_θ J(x)ᵀ, in float64."""
        with full_precision(self.variance.device):
            cross, prior = rows.products(self.scaled_images, self.variance, joint=joint)  # (b, C, B), as the result
        half = self.factor.half_solve(cross.flatten(0, 1).T).T  # (b·C, B)
        if not joint:
            half = half.unflatten(0, cross.shape[:2])
        return prior - half @ half.mT

    def contributions(self, rows: Rows, groups: Tensor, combinations: Tensor) -> Tensor:  # (P, g), (g, B) -> (b, g)
        """What each group of data takes from the variance at each input, summed over outputs. With z those of the
        groups and z Q those of the actions, it is z_g (Q M⁻¹Qᵀz)_g."""
        cross = rows.times(self.variance.to(groups.dtype)[:, None] * groups)  # (b, C, g)
        solved = self.factor.solve((cross @ combinations).flatten(0, 1).T).T
        return (cross * (solved @ combinations.T).unflatten(0, cross.shape[:2])).sum(1)

    def sample(self, num_samples: int, generator: torch.Generator | None) -> Tensor:  # (num_samples, P)
        """Draws of θ − μ: a draw ε from the prior, corrected by what the data say about it (Matheron's rule)."""
        images, device = self.posterior.images, self.variance.device
        shape = (len(images), num_samples)
        epsilon = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
        epsilon = epsilon * self.variance.sqrt()[:, None]
        noise_root = torch.linalg.cholesky(self.noise)
        shape = (self.posterior.rank, num_samples)
        eta = noise_root @ torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
        with full_precision(device):
            observed = (images.T @ epsilon.to(images.dtype)).double() + eta
        return (epsilon - self._combine(self.factor.solve(observed))).T

"""How much the variance would still fall with twice the actions, from small matrices.

In the basis where R = I and AᵀΛ⁻¹A = diag(γ), action b takes q_b γ_b/(γ_b + τ) off the variance at some inputs, where
q_b is the part of their prior variance along it. Both fall about as powers of b: lines through log γ_b and log q_b
against log b, over the last three quarters of the actions, go on to 2B, and the sum saturates at what is outside of
their span. A geometric series of the falls from B/4 to B/2
to B knows neither that the spectrum bends where γ passes τ, nor where it ends, and is up to three times off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_iterncgp.jacobian.rows import Rows
from ntk_iterncgp.jacobian.weights import WeightColumns
from ntk_iterncgp.linalg.factor import Factor
from ntk_iterncgp.posterior.weight_space import WeightPosterior
from ntk_iterncgp.runtime.threads import full_precision

FEWEST = 8  # actions, from which on there is a trend
LITTLE, MUCH = 0.02, 0.2  # of the variance


@dataclass(frozen=True)
class Convergence:
    """The mean variance at some inputs: prior, with half of the actions, with all of them, and with twice as many.

    Prints as a sentence. The last is an extrapolation, between zero and the variance with all.
    """

    prior_variance: float
    half_variance: float
    variance: float
    doubled_variance: float
    num_actions: int

    @property
    def fall(self) -> float:
        """By how much twice the actions would lower the variance, as a fraction of it."""
        return 1 - self.doubled_variance / self.variance if self.variance > 0 else 0.0

    @property
    def advice(self) -> str:
        """One sentence."""
        if self.fall < LITTLE:
            return "More actions would change little here."
        if self.fall < MUCH:
            return "refine(train_loader, epochs=1) would get some of it."
        return f"It is far from converged here: fit with num_actions={2 * self.num_actions}, or refine."

    def __str__(self) -> str:
        left, half = self.variance / self.prior_variance, self.half_variance / self.prior_variance
        return (
            f"{self.num_actions} actions leave {100 * left:.3g} % of the prior variance ({100 * half:.3g} % with half "
            f"of them); twice as many would lower it by about {100 * self.fall:.3g} %. {self.advice}"
        )


def spectrum(posterior: WeightPosterior, prior_precision: Tensor) -> tuple[Tensor, Tensor]:  # (B,), (B, B)
    """γ in descending order, and the combinations R^{-½}V of the actions that are independent under prior and noise."""
    factor = Factor(posterior.noise_gram)
    whitened = factor.half_solve(factor.half_solve(posterior.gram(prior_precision)).T)
    gamma, vectors = torch.linalg.eigh(0.5 * (whitened + whitened.T))
    return gamma.flip(0).clamp_min(0), (factor.root() @ vectors).flip(1)


def fall_of_doubling(gamma: Tensor, parts: Tensor, noise_scale: float, most: int) -> float:  # (B,), (B,)
    """What actions B + 1 to 2B would take off a variance.

    Args:
        gamma: Signal-to-noise of the actions, descending.
        parts: q, the prior variance along each of them.
        noise_scale: τ.
        most: How many actions there can be in all.

    Returns:
        The sum of q γ/(γ + τ) over the actions that are not there yet, by the power laws.
    """
    B = len(gamma)
    more = min(2 * B, most) - B
    if more <= 0:
        return 0.0
    if B < FEWEST:  # no trend: as much as the second half took
        taken = (parts * gamma / (gamma + noise_scale))[B // 2 :].sum()
        return float(taken)
    seen = torch.arange(B // 4 + 1, B + 1, dtype=torch.float64, device=gamma.device).log()
    next_ones = torch.arange(B + 1, B + more + 1, dtype=torch.float64, device=gamma.device).log()
    centred = seen - seen.mean()

    def continued(values: Tensor) -> Tensor:
        logs = values[B // 4 :].clamp_min(values.max() * 1e-15 + 1e-300).log()
        slope = (centred @ logs / centred.square().sum()).clamp_max(0)
        return (logs.mean() + slope * (next_ones - seen.mean())).exp()

    gammas = continued(gamma).clamp_max(gamma[-1])
    return float((continued(parts) * gammas / (gammas + noise_scale)).sum())


def convergence_at(
    rows: Iterable[Rows], posterior: WeightPosterior, prior_precision: Tensor, noise_scale: Tensor
) -> Convergence:
    """Compare half of the actions, all, and twice as many at some inputs.

    Args:
        rows: The rows of J there, of all outputs or of some contrasts.
        posterior: Of the fit.
        prior_precision: Λ, (1,), (L,) or (P,).
        noise_scale: τ = σ²·T.
    """
    gamma, basis = spectrum(posterior, prior_precision)
    tau, variance = float(noise_scale), 1 / posterior.precision_of_weights(prior_precision)
    images = WeightColumns(posterior.images, posterior.dtype, variance)
    total, along, count = 0.0, torch.zeros_like(gamma), 0
    for some in rows:
        with full_precision(variance.device):
            cross, prior = some.products(images, variance)
        along += (cross.double() @ basis).square().sum((0, 1))
        total, count = total + float(prior.diagonal(dim1=1, dim2=2).sum()), count + len(prior)
    parts = torch.where(gamma > 0, along / gamma.clamp_min(1e-300), 0) / count
    taken = parts * gamma / (gamma + tau)
    prior_variance, half = total / count, len(gamma) // 2
    left = max(prior_variance - float(taken.sum()), 0.0)
    fall = fall_of_doubling(gamma, parts, tau, min(posterior.curvature_rank, len(posterior.images)))
    fall = min(_saturated(fall, prior_variance - float(parts.sum())), left)
    return Convergence(prior_variance, prior_variance - float(taken[:half].sum()), left, left - fall, posterior.rank)


def _saturated(fall: float, outside: float) -> float:
    """Others can only take what is outside of the span of the actions, and each a part of what is left of that."""
    return outside * -math.expm1(-fall / outside) if outside > 0 else 0.0

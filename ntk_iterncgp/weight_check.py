"""What can be said about a posterior of weights by itself, and at a few inputs: after a fit, and when one is loaded.

numbers    finite, of the right sizes; the diagonal of JᵀWJ not negative
noise      R symmetric and positive definite
bound      tr(R⁻¹AᵀA) ≤ tr(JᵀWJ), where that is known exactly: nobody knows more than all data say
variance   between zero and the prior's, at the inputs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ntk_iterncgp.priors.jacobian import Rows
from ntk_iterncgp.self_check import SelfCheckError, refusal
from ntk_iterncgp.solver.factor import rounding_noise
from ntk_iterncgp.weight_posterior import SLICE_ROWS, WeightPosterior

MARGIN = 500.0  # in units of rounding: a network amplifies it, and other batches are summed in another order
FLOOR = 1e-10  # what is asked of float64
SMALL = 1e-6  # a curvature that says nothing
COLUMNS = 32  # of the images, scaled by the prior variance at once


def network_rounding(dtype: torch.dtype) -> float:
    """The relative error that a product with J may have."""
    return max(FLOOR, MARGIN * torch.finfo(dtype).eps)


def check_posterior(
    posterior: WeightPosterior, prior_precision: Tensor, noise_scale: Tensor, at: Iterable[Rows] = ()
) -> WeightPosterior:
    """The same posterior, or a `SelfCheckError`."""
    told = list(_sizes(posterior, prior_precision, noise_scale)) or list(_matrices(posterior))
    if not told and posterior.rank:
        told = [sentence for rows in at for sentence in _variance(posterior, prior_precision, noise_scale, rows)]
    if told:
        raise SelfCheckError(refusal(told))
    return posterior


def _sizes(posterior: WeightPosterior, prior_precision: Tensor, noise_scale: Tensor) -> Iterator[str]:
    P, B = sum(posterior.layer_sizes), posterior.images.shape[-1]
    shapes = {
        "images": (P, B),
        "noise_gram": (B, B),
        "right_hand_side": (B,),
        "curvature_diagonal": (P,),
    }
    for name, shape in shapes.items():
        value = getattr(posterior, name)
        if tuple(value.shape) != shape:
            yield f"{name} of shape {shape}, but got {tuple(value.shape)}"
        elif not all(bool(torch.isfinite(part).all()) for part in value.split(SLICE_ROWS)):  # no copy of the images
            yield f"finite numbers in {name}, but it holds NaN or infinity"
    diagonal = posterior.curvature_diagonal  # of decided data it is a difference of numbers that are nearly the same
    if len(diagonal) and float(diagonal.min()) < -1e-3 * max(float(diagonal.max()), SMALL):
        yield "a curvature of the weights that is nowhere negative, but it is"
    for name, value in (("prior_precision", prior_precision), ("the noise scale", noise_scale)):
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            yield f"{name} to be positive and finite, but it is not"


def _matrices(posterior: WeightPosterior) -> Iterator[str]:
    R = posterior.noise_gram
    if posterior.rank == 0:
        return
    sides = R.diagonal().clamp_min(1e-300).rsqrt()
    scaled = R * sides[:, None] * sides
    if not float((scaled - scaled.T).abs().max()) <= FLOOR:
        yield "a symmetric noise of the actions, but it is not"
        return
    info = torch.linalg.cholesky_ex(scaled).info
    if int(info) != 0 or bool((R.diagonal() <= 0).any()):
        yield "a positive definite noise of the actions, but it is not"
        return
    if posterior.trace_is_exact:
        gram, known = posterior.unit_gram * sides[:, None] * sides, float(posterior.curvature_diagonal.sum())
        # Nearly dependent actions would make information of rounding; of right images AᵀA has no more than B tr(JᵀWJ).
        rounding = rounding_noise(gram, scaled, posterior.images.dtype)
        limit = torch.finfo(posterior.images.dtype).eps * posterior.rank * known
        scaled.diagonal().add_(min(rounding, limit))
        said = float(torch.linalg.solve(scaled, gram).trace())
        slack = 0.5 if posterior.images.dtype != torch.float64 else 1e-3
        if not said <= (1 + slack) * known + SMALL:
            yield f"actions that say no more than all data do ({known:.4g}), but they say {said:.4g}"


def _variance(posterior: WeightPosterior, prior_precision: Tensor, noise_scale: Tensor, rows: Rows) -> Iterator[str]:
    variance = 1 / posterior.precision_of_weights(prior_precision)
    prior = rows.covariance(variance).diagonal(dim1=1, dim2=2)  # (b, C)
    scaled = variance.to(posterior.images.dtype)[:, None]
    cross = torch.cat([rows.times(scaled * part) for part in posterior.images.split(COLUMNS, 1)], 2)  # (b, C, B)
    half = posterior.factor(prior_precision, noise_scale).half_solve(cross.flatten(0, 1).T)
    left = 1 - half.square().sum(0) / prior.flatten().clamp_min(1e-300)
    if not bool((left >= -(network_rounding(posterior.images.dtype) ** 0.5)).all()):
        worst = float(left.nan_to_num(nan=-torch.inf).min())
        yield f"variances between zero and the prior's, but one is {worst:.1e} times the prior's"

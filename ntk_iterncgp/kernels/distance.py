"""Squared distances between two sets of points, right at every scale.

    D_ij = |x_i - z_j|^2

The familiar expansion |x|^2 + |z|^2 - 2 x.z is one matrix product, hence fast, but it cancels: coincident points come
out at a small nonzero distance, and a Matern kernel takes the square root of that error. Differences never cancel, but
adding them up is slow when there are many coordinates. So:

* few coordinates: add the squared differences one coordinate at a time, on the whole block (no (a, b, d) tensor);
* many: the expansion in float64, and then from differences those pairs that came out close.

Million pairs per second on two CPU cores, float32, blocks of 2 MB (and torch.cdist from differences, for comparison):

    coordinates       3     8    16    32    64   784
    one at a time  1836   924   485   177   108     8
    expansion       636   527   493   410   279    25
    torch.cdist     500   342   200   101    50     3

The derivative is written by hand. It is two matrix products, finite at coincident points, and itself differentiable.
"""

from typing import Any

import torch
from torch import Tensor

FEW_COORDINATES = 16
GATHERED_ENTRIES = 2**18  # coordinates of close pairs gathered at once: 2 MB


def squared_distances(X1: Tensor, X2: Tensor) -> Tensor:
    """The matrix (a, b) of |x_i - z_j|^2 for points X1 (a, d) and X2 (b, d); exactly 0 where two points coincide."""
    distances: Tensor = _SquaredDistances.apply(X1, X2)
    return distances


class _SquaredDistances(torch.autograd.Function):
    """D, and the gradient 2 sum_j G_ij (x_i - z_j) of sum_ij G_ij D_ij with its sum split into two matrix products."""

    @staticmethod
    def forward(X1: Tensor, X2: Tensor) -> Tensor:
        no_float64 = X1.device.type == "mps"
        return _by_coordinate(X1, X2) if X1.shape[1] <= FEW_COORDINATES or no_float64 else _by_expansion(X1, X2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        X1, X2 = ctx.saved_tensors
        (G,) = gradients  # (a, b)
        to_X1 = 2 * (G.sum(1)[:, None] * X1 - G @ X2) if ctx.needs_input_grad[0] else None
        to_X2 = 2 * (G.sum(0)[:, None] * X2 - G.T @ X1) if ctx.needs_input_grad[1] else None
        return to_X1, to_X2


def _by_coordinate(X1: Tensor, X2: Tensor) -> Tensor:
    total = X1.new_zeros(len(X1), len(X2))
    difference = torch.empty_like(total)
    for x, z in zip(X1.T.contiguous(), X2.T.contiguous(), strict=True):  # (a,), (b,)
        torch.sub(x[:, None], z, out=difference)
        total.addcmul_(difference, difference)
    return total


def _by_expansion(X1: Tensor, X2: Tensor) -> Tensor:
    x, z = X1.double(), X2.double()
    norms1, norms2 = x.square().sum(1), z.square().sum(1)
    total = torch.addmm(norms2, x, z.T, alpha=-2).add_(norms1[:, None])  # (a, b)
    if total.numel() == 0:
        return total.to(X1.dtype)
    # The expansion errs by about 1e-16 of the norms: pairs much closer than the norms are done again.
    fraction = 1e-2 if X1.dtype == torch.float64 else 1e-6
    close = (total <= fraction * (norms1.amax() + norms2.amax())).nonzero()  # (pairs, 2)
    if len(close) > total.numel() // 16 + sum(total.shape):  # points in tight groups far apart: too many to pick out
        return _by_coordinate(X1, X2)
    for pairs in close.split(1 + GATHERED_ENTRIES // X1.shape[1]):
        rows, columns = pairs.unbind(1)
        total[rows, columns] = (x[rows] - z[columns]).square_().sum(1)
    return total.to(X1.dtype)

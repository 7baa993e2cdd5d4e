"""Gram–Schmidt for tall matrices whose rows may be spread over processes, in the Euclidean metric or in a diagonal one.

In the metric of the noise, D = W⁺, orthonormal actions have SᵀW⁺S = I, however far the entries of D are apart: what a
column holds of a decided datum, whose noise is 1/π, is then as small as √π.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_iterncgp.runtime.parallel import Shard


def orthonormalised(
    block: Tensor, basis: Tensor, tolerance: float, shard: Shard, metric: Tensor | None = None
) -> Tensor:  # (n, k), (n, B), metric (n, 1) -> (n, k')
    """The part of a block that is orthogonal to an orthonormal basis, as orthonormal columns.

    A column of which less than `tolerance` is left is dropped. All is done twice: where little is left of a column, its
    rounding is no longer small beside it once it is scaled to unit length.
    """
    norms = norm(block, shard, metric)
    block = (block / torch.where(norms > 0, norms, 1.0)).to(basis.dtype)[:, norms > 0]
    weight = None if metric is None else metric.to(basis.dtype)

    def without(basis: Tensor, block: Tensor) -> Tensor:
        return block - basis @ shard.sum(basis.T @ (block if weight is None else weight * block))

    for _ in range(2):
        block = without(basis, block)
        kept = torch.zeros_like(block)
        keep = torch.zeros(block.shape[1], dtype=torch.bool, device=block.device)
        for j in range(block.shape[1]):  # over actions, never over data
            column = block[:, j : j + 1]
            for _ in range(2):
                column = without(kept[:, :j], column)
            length = norm(column, shard, metric)[0]
            keep[j] = length > tolerance
            kept[:, j] = torch.where(keep[j], column[:, 0] / length, 0.0)
        block = kept[:, keep]
    return block


def norm(block: Tensor, shard: Shard, metric: Tensor | None = None) -> Tensor:  # (n, k) -> (k,)
    """√(sᵀDs) of each column, in float64."""
    return shard.norm(block.double() if metric is None else metric.sqrt() * block)

"""AᵀB of tall matrices in float64, a slice of rows at a time, whatever they are stored in."""

from __future__ import annotations

import torch
from torch import Tensor

SLICE_ROWS, SLICE_BYTES = 2**14, 2**23  # rows at a time, in sums over all of them, and their memory in float64
SLICE_COLUMNS = 128  # columns at a time, where half of a symmetric matrix is enough


def rows_at_once(num_columns: int) -> int:
    """How many rows of images are held in float64 at a time."""
    return min(SLICE_ROWS, 1 + SLICE_BYTES // (8 * max(1, num_columns)))


def inner_products(left: Tensor, right: Tensor) -> Tensor:  # (p, B), (p, B′) -> (B, B′)
    """In float64, whatever the images are stored in: a Gram matrix that is that of the images to the last digits."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    is_symmetric = left is right
    step = rows_at_once(max(left.shape[1], right.shape[1]))
    for one, other in zip(left.split(step), right.split(step), strict=True):
        one = one.double()
        if not is_symmetric:
            total += one.T @ other.double()
            continue
        for start in range(0, one.shape[1], SLICE_COLUMNS):  # a triangle of blocks
            columns = slice(start, start + SLICE_COLUMNS)
            total[columns, start:] += one[:, columns].T @ one[:, start:]
    return total.triu() + total.triu(1).T if is_symmetric else total

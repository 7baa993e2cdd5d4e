"""Multiply by a kernel matrix without holding it: k(X1, X2) @ V, one tile of the matrix at a time.

This is the plain path: eager PyTorch, every kernel, every device. On the CPU a tile is kept small enough for the cache
whatever memory is allowed, because an elementwise formula on 1 to 4 MB runs several times faster than on 64 MB.
Million pairs per second on two cores (N = 5000, d = 3, ten columns), by the size of a tile:

                        0.25 MB   0.5 MB   1 MB   2 MB   4 MB   8 MB   over 50 MB
    RBF, float32            215      298    386    448    506    299          103
    Matern32, float32       171      237    271    302    277    167           57
    RBF, float64                     159    189    234    264    205           56
    Matern32, float64                110    121    148    134    114           30
"""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .base import Kernel, check_pair, check_same_kind

CPU_TILE_BYTES = 2**19  # below the best of the table: the allocator holds on to several tiles
LIVE_TILES = 6  # tiles alive at once in the costliest formula: five in a Matern, one more in a sum or product


def kernel_matmul(kernel: Kernel, X1: Tensor, X2: Tensor, V: Tensor, *, chunk_bytes: int = 64 * 2**20) -> Tensor:
    """k(X1, X2) @ V of shape (a, k), for X1 (a, d), X2 (b, d) and V (b, k).

    Args:
        chunk_bytes: memory for one tile of k(X1, X2) and the temporaries of its formula together. The tile is at least
            one entry. Under autograd tiles are recomputed in the backward pass, which takes up to twice as much.
    """
    _check(kernel, X1, X2, V, chunk_bytes)
    rows, columns = _tile_shape(len(X1), len(X2), X1.element_size(), X1.device.type, chunk_bytes)
    V = V.T.contiguous().T  # columns contiguous: twice as fast when there are few of them

    def multiply(x: Tensor, z: Tensor, v: Tensor) -> Tensor:
        return kernel(x, z) @ v

    differentiable = torch.is_grad_enabled() and any(
        t.requires_grad for t in (X1, X2, V, *kernel.hyperparameters().values())
    )
    strips = []
    for x in X1.split(rows):
        strip = V.new_zeros(len(x), V.shape[1])
        for z, v in zip(X2.split(columns), V.split(columns), strict=True):
            if differentiable:
                strip = strip + checkpoint(multiply, x, z, v, use_reentrant=False, preserve_rng_state=False)
            else:
                strip += multiply(x, z, v)
        strips.append(strip)
    return torch.cat(strips)


def _tile_shape(a: int, b: int, entry_bytes: int, device: str, chunk_bytes: int) -> tuple[int, int]:
    """Rows and columns of a tile: as square as the matrix allows, since every tile scales its points anew."""
    tile_bytes = chunk_bytes // LIVE_TILES
    if device == "cpu":
        tile_bytes = min(tile_bytes, CPU_TILE_BYTES)
    entries = max(1, tile_bytes // entry_bytes)
    columns = max(1, min(b, entries // max(1, min(a, math.isqrt(entries)))))
    rows = max(1, min(a, entries // columns))
    return rows, columns


def _check(kernel: Kernel, X1: Tensor, X2: Tensor, V: Tensor, chunk_bytes: int) -> None:
    check_pair(kernel, X1, X2)
    if not isinstance(V, Tensor):
        raise TypeError(f"Expected V to be a torch.Tensor, but got {type(V).__name__}. Use torch.as_tensor.")
    check_same_kind(X2, "X2", V, "V")
    if V.ndim != 2 or len(V) != len(X2):
        raise ValueError(
            f"Expected V to have shape ({len(X2)}, columns), one row per row of X2, but its shape is {tuple(V.shape)}. "
            "A single vector still needs a column: V[:, None]."
        )
    if chunk_bytes <= 0:
        raise ValueError(f"Expected chunk_bytes to be a positive number of bytes, but got {chunk_bytes}.")

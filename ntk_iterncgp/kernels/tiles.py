"""k(X1, X2) @ V one tile of the matrix at a time: the loops, and what supplies the tiles.

An *engine* knows a kernel and its points and makes tiles; the loops do not care how. `PlainEngine` is the reference:
eager PyTorch, every kernel, every device. On the CPU a tile is kept small enough for the cache whatever memory is
allowed, because an elementwise formula on 1 to 4 MB runs several times faster than on 64 MB. Million pairs per second
on two cores (N = 5000, d = 3, ten columns), by the size of a tile:

                        0.25 MB   0.5 MB   1 MB   2 MB   4 MB   8 MB   over 50 MB
    RBF, float32            215      298    386    448    506    299          103
    Matern32, float32       171      237    271    302    277    167           57
    RBF, float64                     159    189    234    264    205           56
    Matern32, float64                110    121    148    134    114           30

V and the result have their columns contiguous: with ten columns BLAS is twice to ten times as fast that way, above all
for the transposed tiles of a symmetric product.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .base import Kernel

CPU_TILE_BYTES = 2**19  # below the best of the table: the allocator holds on to several tiles
LIVE_TILES = 6  # tiles alive at once in the costliest formula: five in a Matern, one more in a sum or product

Index = slice | Tensor


class Part(NamedTuple):
    """Some of the tiles of a matrix, which is the sum of its parts: those whose turn it is."""

    number: int
    of: int

    def turns(self) -> Iterator[bool]:
        """For one tile after the other."""
        return (place % self.of == self.number for place in count())


WHOLE = Part(0, 1)


class Engine(ABC):
    """Makes tiles of k(X1, X2)."""

    cpu_tile_bytes: int = CPU_TILE_BYTES
    live_tiles: int = LIVE_TILES

    @abstractmethod
    def rows(self, index: Index) -> Any:
        """Some points of X1, in the form that `tile` takes."""

    @abstractmethod
    def columns(self, index: Index) -> Any:
        """Some points of X2, in the form that `tile` takes."""

    @abstractmethod
    def tile(self, rows: Any, columns: Any) -> Tensor:
        """The tile (a, b); valid until the next one is asked for."""


class PlainEngine(Engine):
    """Tiles by calling the kernel."""

    def __init__(self, kernel: Kernel, X1: Tensor, X2: Tensor) -> None:
        self.kernel, self.X1, self.X2 = kernel, X1, X2

    def rows(self, index: Index) -> Tensor:
        return self.X1[index]

    def columns(self, index: Index) -> Tensor:
        return self.X2[index]

    def tile(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.kernel._evaluate(rows, columns)


def dense_product(
    engine: Engine, a: int, V: Tensor, *, symmetric: bool, chunk_bytes: int, part: Part = WHOLE
) -> Tensor:  # (b, k)
    """Every tile; where the matrix is symmetric those on one side of the diagonal, each used twice."""
    V = V.T.contiguous().T
    result = V.new_zeros(V.shape[1], a).T  # (a, k)
    shape = tile_shape(a, len(V), V.element_size(), V.device.type, chunk_bytes, engine)
    if symmetric:
        shape = (min(shape),) * 2
    row_slices, column_slices = slices(a, shape[0]), slices(len(V), shape[1])
    columns = [engine.columns(j) for j in column_slices]
    turns = part.turns()
    for number, i in enumerate(row_slices):
        rows = engine.rows(i)
        for other in range(number if symmetric else 0, len(column_slices)):
            if not next(turns):
                continue
            j = column_slices[other]
            tile = engine.tile(rows, columns[other])
            result[i].addmm_(tile, V[j])
            if symmetric and other > number:
                result[j].addmm_(tile.T, V[i])
            del tile  # before the next one is made
    return result


def listed_product(
    engine: Engine,
    row_slices: list[slice],
    partners: list[Tensor],
    V: Tensor,
    num_own: list[int],
    *,
    tile_columns: int,
    part: Part = WHOLE,
) -> Tensor:
    """Only some tiles: the rows of each slice with the columns listed for it.

    In a symmetric product the first `num_own` columns of a list are those of the slice itself, and the tile of the
    others is used twice; where `num_own` is −1 no tile is.
    """
    VT = V.T.contiguous()  # (k, b)
    result = VT.new_zeros(VT.shape[0], row_slices[-1].stop)  # (k, a)
    turns = part.turns()
    for i, listed, own in zip(row_slices, partners, num_own, strict=True):
        rows = engine.rows(i)
        for start in range(0, len(listed), tile_columns):
            if not next(turns):
                continue
            index = listed[start : start + tile_columns]
            tile = engine.tile(rows, engine.columns(index))
            result.T[i].addmm_(tile, VT.index_select(1, index).T)
            skip = max(own - start, 0)
            if own >= 0 and skip < len(index):
                result.index_add_(1, index[skip:], VT[:, i] @ tile[:, skip:])
    return result.T


def differentiable_product(kernel: Kernel, X1: Tensor, X2: Tensor, V: Tensor, *, chunk_bytes: int) -> Tensor:
    """The plain product in the graph of autograd. Tiles are made again in the backward pass, not held until then."""
    rows, columns = tile_shape(len(X1), len(X2), X1.element_size(), X1.device.type, chunk_bytes)

    def multiply(x: Tensor, z: Tensor, v: Tensor) -> Tensor:
        return kernel._evaluate(x, z) @ v

    strips = []
    for x in X1.split(rows):
        strip = V.new_zeros(len(x), V.shape[1])
        for z, v in zip(X2.split(columns), V.split(columns), strict=True):
            strip = strip + checkpoint(multiply, x, z, v, use_reentrant=False, preserve_rng_state=False)
        strips.append(strip)
    return torch.cat(strips)


def tile_shape(
    a: int, b: int, entry_bytes: int, device: str, chunk_bytes: int, engine: Engine | type[Engine] = PlainEngine
) -> tuple[int, int]:
    """Rows and columns of a tile: as square as the matrix allows, since every tile scales its points anew."""
    tile_bytes = chunk_bytes // engine.live_tiles
    if device == "cpu":
        tile_bytes = min(tile_bytes, engine.cpu_tile_bytes)
    entries = max(1, tile_bytes // entry_bytes)
    columns = max(1, min(b, entries // max(1, min(a, math.isqrt(entries)))))
    rows = max(1, min(a, entries // columns))
    return rows, columns


def slices(length: int, step: int) -> list[slice]:
    """Cut a length into steps."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]

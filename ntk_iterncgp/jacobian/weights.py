"""Columns of weights that rows of J are multiplied by: V = diag(s) A, a slice at a time, in the dtype of the product.

A is the largest thing a posterior holds. So it is there once, as it is stored: the prior variances s, and the dtype
that products are taken in, come to a slice of it when that is needed.

Of a convolution at few places many weights see nothing but padding: where a 3×3 kernel meets a single pixel eight of
nine are never moved, and their rows of A are zero. They are left out of products (`without_zeros`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

FEW_ROWS = 32  # up to which a product takes its time for reading the columns
SLICE_ENTRIES = 2**22  # of V at once, where it is not what is stored
DENSE = 0.5  # the fraction of a layer's inputs that some action moves, from which on all are multiplied


@dataclass(frozen=True, eq=False)
class WeightColumns:
    """V = diag(s) A (P, k)."""

    matrix: Tensor  # A (P, k), as it is stored
    dtype: torch.dtype  # of products
    scale: Tensor | None = None  # s (P,), float64; None: one
    _compact: dict[int, LayerColumns | None] = field(default_factory=dict)  # of parameter tensors, by their address

    @classmethod
    def of(cls, weights: Tensor | WeightColumns, dtype: torch.dtype) -> WeightColumns:
        """A plain matrix of columns, in products of this dtype."""
        return weights if isinstance(weights, WeightColumns) else cls(weights, dtype)

    @property
    def number(self) -> int:
        """k."""
        return self.matrix.shape[1]

    def whole(self) -> Tensor:  # (P, k)
        """Return V itself."""
        return LayerColumns(self.matrix, self.dtype, self.scale, {}).rows(slice(None))

    def slices(self) -> Iterator[tuple[slice, Tensor]]:  # (p, k)
        """All of it, some weights at a time; at once where it is stored as it is multiplied by."""
        whole = LayerColumns(self.matrix, self.dtype, self.scale, {})
        at_once = self.scale is None and self.matrix.dtype == self.dtype
        size = len(self.matrix) if at_once else 1 + SLICE_ENTRIES // max(1, self.number)
        for start in range(0, len(self.matrix), max(1, size)):
            part = slice(start, min(start + size, len(self.matrix)))
            yield part, whole.rows(part)

    def layers(self, sizes: Sequence[int]) -> list[LayerColumns]:
        """By parameter tensor."""
        scales = [None] * len(sizes) if self.scale is None else self.scale.split(list(sizes))
        parts = zip(self.matrix.split(list(sizes)), scales, strict=True)
        return [LayerColumns(part, self.dtype, scale, self._compact) for part, scale in parts]


@dataclass(frozen=True, eq=False)
class LayerColumns:
    """The rows of V for one parameter tensor (P_l, k)."""

    matrix: Tensor
    dtype: torch.dtype
    scale: Tensor | None
    known: dict[int, LayerColumns | None]
    inputs: Tensor | None = None  # which of the layer's inputs these are the weights of (K',); None: all

    @property
    def number(self) -> int:
        """k."""
        return self.matrix.shape[1]

    def rows(self, part: slice) -> Tensor:  # (p, k)
        """Of some weights."""
        found = self.matrix[part].to(self.dtype)
        return found if self.scale is None else found * self.scale[part, None].to(self.dtype)

    def moved_by(self, rows: Tensor, part: slice) -> Tensor:  # (b, C, p) -> (b, C, k)
        """Rows of J for some weights, times V."""
        return product(rows, self.rows(part).T)

    def columns(self, part: slice, num_outputs: int) -> Tensor:  # (z, O, K')
        """Some columns, as weights of a layer with so many outputs."""
        found = self.matrix.T[part].to(self.dtype)
        if self.scale is not None:
            found = found * self.scale.to(self.dtype)
        by_output: Tensor = found.unflatten(1, (num_outputs, -1))
        return by_output

    def read(self, rows: Tensor, num_rows: int) -> Tensor:  # (b, T) -> (b, T, D, k)
        """Some rows of a table of weights."""
        found = self.matrix.unflatten(0, (num_rows, -1))[rows].to(self.dtype)
        if self.scale is not None:
            found = found * self.scale.unflatten(0, (num_rows, -1))[rows][..., None].to(self.dtype)
        values: Tensor = found
        return values

    def transposed(self, shape: tuple[int, int]) -> LayerColumns:
        """Of a weight matrix (K, O) that is stored as the transpose of a layer's."""
        matrix = self.matrix.T.unflatten(1, shape).transpose(1, 2).flatten(1).T
        scale = None if self.scale is None else self.scale.unflatten(0, shape).T.flatten()
        return LayerColumns(matrix, self.dtype, scale, {})

    def without_zeros(self, num_outputs: int) -> LayerColumns:
        """Without the inputs whose weights are zero in all columns, where these are many; looked for once."""
        address = self.matrix.data_ptr()
        if not self.number:
            return self
        if address not in self.known:
            self.known[address] = self._compacted(num_outputs)
        return self.known[address] or self

    def _compacted(self, num_outputs: int) -> LayerColumns | None:
        K, moved = len(self.matrix) // num_outputs, None
        for column in self.matrix.T.split(1):  # column by column: they are contiguous, and most need no more than one
            nonzero = (column.reshape(num_outputs, K) != 0).any(0)
            moved = nonzero if moved is None else moved | nonzero
            if int(moved.sum()) > DENSE * K:
                return None
        assert moved is not None
        inputs = moved.nonzero()[:, 0]
        compact = self.matrix.T.new_empty(self.number, num_outputs * len(inputs))
        for place, column in zip(compact, self.matrix.T, strict=True):
            place.copy_(column.reshape(num_outputs, K)[:, inputs].flatten())
        scale = None if self.scale is None else self.scale.view(num_outputs, K)[:, inputs].flatten()
        return LayerColumns(compact.T, self.dtype, scale, {}, inputs)


def product(rows: Tensor, columns: Tensor) -> Tensor:  # (…, p), (k, p) -> (…, k)
    """Multiply rows by columns that are given as rows.

    On a CPU by oneDNN, as convolutions are: on one of AMD it takes half of the time of the other library.
    """
    is_fast = rows.device.type == "cpu" and rows.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    has_many = rows.shape[:-1].numel() >= FEW_ROWS and columns.numel() > 0
    if not (is_fast and has_many) or torch.is_grad_enabled():
        return rows @ columns.T
    found: Tensor = F.linear(rows.flatten(0, -2).to_mkldnn(), columns.contiguous()).to_dense()
    return found.view(*rows.shape[:-1], len(columns))

"""The plain prior: a covariance matrix over a finite set of points, written out. The sibling the others are tested by.

The first N points are the training inputs; any point is named by its index, so `x` is a tensor of indices. Outputs may
be correlated in any way, as they are for a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from ntk_iterncgp.linalg.columns import Buffer, Columns, DenseColumns, Images
from ntk_iterncgp.priors.base import AtInputs, Prior
from ntk_iterncgp.runtime.parallel import Shard


class DensePrior(Prior):
    """`covariance` is (points·C, points·C), class index fastest; `mean` is (points, C)."""

    def __init__(self, covariance: Tensor, mean: Tensor, num_data: int) -> None:
        super().__init__(Shard.even(num_data))
        self.num_data, self.num_outputs = num_data, mean.shape[1]
        self.dtype, self.device = covariance.dtype, covariance.device
        self._covariance, self._mean = covariance, mean.double()
        self._num_rows = num_data * self.num_outputs

    @property
    def mean(self) -> Tensor:
        return self._mean[: self.num_data]

    def image(self, actions: Columns) -> DenseColumns:
        assert isinstance(actions, DenseColumns)
        self.num_products += actions.size
        rows = self.shard.take(self._covariance[: self._num_rows, : self._num_rows])
        return DenseColumns.of(rows @ actions.whole().matrix, self.num_outputs, self.shard)

    def gram(self, left: Buffer, right: Buffer) -> Tensor:
        return left.actions.gram(self.lift(right.images))

    def lift(self, images: Images) -> DenseColumns:
        assert isinstance(images, DenseColumns)
        return images

    def at(self, x: Tensor, buffer: Buffer, *, joint: bool = False) -> AtInputs:
        assert isinstance(buffer.actions, DenseColumns)
        rows = self._rows_of(x)
        cross = self._covariance[rows, : self._num_rows] @ buffer.actions.whole().matrix
        covariance = self._covariance[rows][:, rows] if joint else self._blocks_of(x)
        cross = cross.double().unflatten(0, (len(x), self.num_outputs))
        return AtInputs(self._mean[x], cross, covariance.double())

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        data = self.shard.mine
        yield data, self._blocks_of(torch.arange(data.start, data.stop, device=self.device)).double()

    def product_error(self, gram: Tensor) -> float:
        return self._error

    @cached_property
    def _error(self) -> float:
        return torch.finfo(self.dtype).eps * float(torch.linalg.matrix_norm(self._covariance.double(), torch.inf))

    def pick(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield rows, rows

    def _blocks_of(self, x: Tensor) -> Tensor:  # (b, C, C)
        rows = self._rows_of(x).reshape(len(x), self.num_outputs)
        return self._covariance[rows[:, :, None], rows[:, None, :]]

    def _rows_of(self, x: Tensor) -> Tensor:
        return (x[:, None] * self.num_outputs + torch.arange(self.num_outputs, device=x.device)).flatten()

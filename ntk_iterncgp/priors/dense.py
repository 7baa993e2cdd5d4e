"""The plain prior: a covariance matrix over a finite set of points, written out. The sibling the others are tested by.

The first N points are the training inputs; any point is named by its index, so `x` is a tensor of indices. Outputs may
be correlated in any way, as they are for a network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_iterncgp.columns import Buffer, Columns, DenseColumns
from ntk_iterncgp.priors.base import Prior


class DensePrior(Prior):
    """`covariance` is (points·C, points·C), class index fastest; `mean` is (points, C)."""

    def __init__(self, covariance: Tensor, mean: Tensor, num_data: int) -> None:
        super().__init__()
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
        n = self._num_rows
        return DenseColumns.of(self._covariance[:n, :n] @ actions.matrix, self.num_outputs)

    def gram(self, left: Buffer, right: Buffer) -> Tensor:
        return left.actions.gram(right.images)

    def lift(self, images: Columns) -> Columns:
        return images

    def cross(self, x: Tensor, buffer: Buffer) -> Tensor:
        assert isinstance(buffer.actions, DenseColumns)
        block = self._covariance[self._rows_of(x), : self._num_rows] @ buffer.actions.matrix
        return block.double().unflatten(0, (-1, self.num_outputs))

    def covariance(self, x: Tensor, *, joint: bool = False) -> Tensor:
        rows = self._rows_of(x)
        if joint:
            return self._covariance[rows][:, rows].double()
        rows = rows.reshape(-1, self.num_outputs)
        return self._covariance[rows[:, :, None], rows[:, None, :]].double()

    def mean_at(self, x: Tensor) -> Tensor:
        return self._mean[x]

    def data_covariance(self, data: slice) -> Tensor:
        return self.covariance(torch.arange(data.start, data.stop, device=self.device))

    def _rows_of(self, x: Tensor) -> Tensor:
        return (x[:, None] * self.num_outputs + torch.arange(self.num_outputs, device=x.device)).flatten()

"""The prior of an explicit kernel: independent outputs, f_c ~ GP(m_c, k_c), one kernel for all outputs or one for each.

K is block diagonal over the outputs and never formed; k(X, X) V runs over tiles (`kernels.reduction`). With one kernel
for all outputs a product is a single k(X, X) @ (N, C).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ntk_iterncgp.columns import Buffer, Columns, DenseColumns, Images, KroneckerColumns
from ntk_iterncgp.kernels import Kernel, kernel_matmul
from ntk_iterncgp.priors.base import AtInputs, Prior


class GramPrior(Prior):
    """`kernels` holds one kernel (shared by the outputs) or C; `mean` is one constant per output."""

    def __init__(
        self, kernels: Sequence[Kernel], inputs: Tensor, mean: Tensor, *, chunk_bytes: int = 64 * 2**20
    ) -> None:
        super().__init__()
        self.kernels, self.inputs, self.chunk_bytes = list(kernels), inputs, chunk_bytes
        self.num_data, self.num_outputs = inputs.shape[0], mean.shape[0]
        self.dtype, self.device = inputs.dtype, inputs.device
        self.shares_kernel = len(self.kernels) == 1
        self._mean = mean.double().to(inputs.device)  # (C,)

    @property
    def mean(self) -> Tensor:
        return self._mean.expand(self.num_data, -1)

    def image(self, actions: Columns) -> Columns:
        if isinstance(actions, KroneckerColumns):  # r single-output columns cost what r/C columns of K cost
            self.num_products += -(-actions.factor.size // self.num_outputs)
            product = kernel_matmul(
                self.kernels[0], self.inputs, self.inputs, actions.factor.matrix, chunk_bytes=self.chunk_bytes
            )
            return KroneckerColumns(DenseColumns.of(product, 1), actions.contrasts)
        self.num_products += actions.size
        return DenseColumns.of(self._product(self.inputs, actions).flatten(0, 1), self.num_outputs)

    def gram(self, left: Buffer, right: Buffer) -> Tensor:
        return left.actions.gram(self.lift(right.images))

    def lift(self, images: Images) -> Columns:
        assert isinstance(images, Columns)
        return images

    def at(self, x: Tensor, buffer: Buffer, *, joint: bool = False) -> AtInputs:
        if isinstance(buffer.actions, KroneckerColumns):
            factor = buffer.actions.factor.matrix
            block = kernel_matmul(self.kernels[0], x, self.inputs, factor, chunk_bytes=self.chunk_bytes).double()
            cross = torch.einsum("bi,cj->bcij", block, buffer.actions.contrasts).flatten(2)
        else:
            cross = self._product(x, buffer.actions).double()
        covariance = self._joint_covariance(x) if joint else self._blocks_of(x)
        return AtInputs(self._mean.expand(len(x), -1), cross, covariance)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        step = max(1, 2**16 // self.num_outputs**2)
        for start in range(0, self.num_data, step):
            data = slice(start, min(start + step, self.num_data))
            yield data, self._blocks_of(self.inputs[data])

    def _blocks_of(self, x: Tensor) -> Tensor:  # (b, C, C)
        return torch.diag_embed(torch.stack([k.diagonal(x) for k in self._per_output], 1).double())

    def _joint_covariance(self, x: Tensor) -> Tensor:  # (b·C, b·C)
        C = self.num_outputs
        full = torch.zeros(len(x), C, len(x), C, dtype=torch.float64, device=x.device)
        for c, kernel in enumerate(self._per_output):
            full[:, c, :, c] = kernel(x, x).double()
        return full.reshape(len(x) * C, len(x) * C)

    @property
    def _per_output(self) -> list[Kernel]:
        return self.kernels * self.num_outputs if self.shares_kernel else self.kernels

    def _product(self, x: Tensor, actions: Columns) -> Tensor:  # (b, C, B)
        """k(x, X) S for dense actions, each output under its own kernel."""
        assert isinstance(actions, DenseColumns)
        block = actions.matrix.unflatten(0, (-1, self.num_outputs))  # (N, C, B)
        if self.shares_kernel:
            flat = kernel_matmul(self.kernels[0], x, self.inputs, block.flatten(1), chunk_bytes=self.chunk_bytes)
            return flat.unflatten(1, (self.num_outputs, actions.size))
        parts = [
            kernel_matmul(kernel, x, self.inputs, block[:, c], chunk_bytes=self.chunk_bytes)
            for c, kernel in enumerate(self.kernels)
        ]
        return torch.stack(parts, 1)

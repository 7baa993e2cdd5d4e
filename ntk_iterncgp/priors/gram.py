"""The prior of an explicit kernel: independent outputs, f_c ~ GP(m_c, k_c), one kernel for all outputs or one for each.

K is block diagonal over the outputs and never formed; k(X, X) V is a `KernelMatrix`, which chooses how to multiply.
With one kernel for all outputs a product is a single k(X, X) @ (N, C).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ntk_iterncgp.columns import Buffer, Columns, DenseColumns, Images, KroneckerColumns
from ntk_iterncgp.kernels import Kernel, KernelMatrix
from ntk_iterncgp.kernels.choice import DEFAULT_TOLERANCE
from ntk_iterncgp.priors.base import AtInputs, Prior


class GramPrior(Prior):
    """`kernels` holds one kernel (shared by the outputs) or C; `mean` is one constant per output.

    `method` and `tolerance` are those of `KernelMatrix`.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        inputs: Tensor,
        mean: Tensor,
        *,
        chunk_bytes: int = 64 * 2**20,
        method: str = "auto",
        tolerance: float | None = None,
    ) -> None:
        super().__init__()
        self.kernels, self.inputs, self.chunk_bytes = list(kernels), inputs, chunk_bytes
        self.method, self.tolerance = method, tolerance
        self.num_data, self.num_outputs = inputs.shape[0], mean.shape[0]
        self.dtype, self.device = inputs.dtype, inputs.device
        self.shares_kernel = len(self.kernels) == 1
        self._mean = mean.double().to(inputs.device)  # (C,)

    @property
    def mean(self) -> Tensor:
        return self._mean.expand(self.num_data, -1)

    @cached_property
    def matrices(self) -> list[KernelMatrix]:
        """k(X, X) for each kernel."""
        return [self._matrix(kernel, self.inputs, self.method) for kernel in self.kernels]

    def _matrix(self, kernel: Kernel, x: Tensor, method: str) -> KernelMatrix:
        return KernelMatrix(
            kernel, x, self.inputs, method=method, tolerance=self.tolerance, chunk_bytes=self.chunk_bytes
        )

    def _matrices_at(self, x: Tensor) -> list[KernelMatrix]:
        """k(x, X), by the compiled formula of k(X, X) where there is one: x alone might not be worth compiling."""
        if x is self.inputs:
            return self.matrices
        methods = ("fused" if m.uses_compiled_tiles else self.method for m in self.matrices)
        return [self._matrix(kernel, x, method) for kernel, method in zip(self.kernels, methods, strict=True)]

    @property
    def how(self) -> str:
        """How products are computed, and why."""
        return "; ".join(dict.fromkeys(str(matrix.choice) for matrix in self.matrices))

    def image(self, actions: Columns) -> Columns:
        if isinstance(actions, KroneckerColumns):  # r single-output columns cost what r/C columns of K cost
            self.num_products += -(-actions.factor.size // self.num_outputs)
            product = self.matrices[0] @ actions.factor.matrix
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
            block = (self._matrices_at(x)[0] @ factor).double()
            cross = torch.einsum("bi,cj->bcij", block, buffer.actions.contrasts).flatten(2)
        else:
            cross = self._product(x, buffer.actions).double()
        covariance = self._joint_covariance(x) if joint else self.blocks_of(x)
        return AtInputs(self._mean.expand(len(x), -1), cross, covariance)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        step = max(1, 2**16 // self.num_outputs**2)
        for start in range(0, self.num_data, step):
            data = slice(start, min(start + step, self.num_data))
            yield data, self.blocks_of(self.inputs[data])

    def pick(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield rows, self.inputs[rows]

    @property
    def product_tolerance(self) -> float:
        if all(matrix.choice.pattern is None for matrix in self.matrices):
            return 0.0
        return DEFAULT_TOLERANCE if self.tolerance is None else self.tolerance

    def blocks_of(self, x: Tensor) -> Tensor:  # (b, C, C)
        """k(x, x) at each input, in float64."""
        variances = torch.stack([kernel.diagonal(x) for kernel in self.kernels], 1).double()
        return torch.diag_embed(variances.expand(-1, self.num_outputs))

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
        matrices = self._matrices_at(x)
        if self.shares_kernel:
            return (matrices[0] @ block.flatten(1)).unflatten(1, (self.num_outputs, actions.size))
        return torch.stack([matrix @ block[:, c] for c, matrix in enumerate(matrices)], 1)

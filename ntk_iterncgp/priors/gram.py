"""The prior of an explicit kernel: independent outputs, f_c ~ GP(m_c, k_c), one kernel for all outputs or one for each.

K is block diagonal over the outputs and never formed; k(X, X) V is a `KernelMatrix`, which chooses how to multiply.
With one kernel for all outputs a product is a single k(X, X) @ (N, C).

Several processes divide the work of a product by tiles, each of which serves twice since k(X, X) is symmetric, and sum
what they have; on GPUs by rows, where products do not know of symmetry. Either way the rows of the new actions are
gathered, and of them and their images each process keeps its own rows.

Products are computed in the dtype of the inputs, and how far that is from exact is measured (`product_error`), not
assumed. All else is computed in float64, whatever the dtype: float32 numbers are float64 numbers too, and a variance is
a small difference of k(x, x) and what the actions explain of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ntk_iterncgp.kernels import Kernel, KernelMatrix
from ntk_iterncgp.kernels.choice import DEFAULT_TOLERANCE
from ntk_iterncgp.kernels.tiles import WHOLE, Part
from ntk_iterncgp.linalg.columns import Buffer, Columns, DenseColumns, Images, KroneckerColumns
from ntk_iterncgp.priors.base import AtInputs, Prior
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.runtime.parallel import Shard

FEW_BYTES = 4 * 2**20  # of k(x, X), below which it is written out
MEASURED_ROWS = 32  # of k(X, X), by which the error of products is measured


class GramPrior(Prior):
    """`kernels` holds one kernel (shared by the outputs) or C; `mean` is one constant per output.

    `method` and `tolerance` are those of `KernelMatrix`. `shard` is that of this process unless another one is given.
    `data_dtype` is the dtype in which the inputs were given, where they are computed with in another one.
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
        shard: Shard | None = None,
        data_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shard or Shard.even(len(inputs)))
        self.kernels, self.inputs, self.chunk_bytes = list(kernels), inputs, chunk_bytes
        self.method, self.tolerance = method, tolerance
        self.num_data, self.num_outputs = inputs.shape[0], mean.shape[0]
        self.dtype, self.device = inputs.dtype, inputs.device
        self.data_dtype = data_dtype or inputs.dtype
        self.shares_kernel = len(self.kernels) == 1
        self._mean = mean.double().to(inputs.device)  # (C,)
        self._own_inputs = self.shard.take(inputs)

    @property
    def mean(self) -> Tensor:
        return self._mean.expand(self.num_data, -1)

    @cached_property
    def matrices(self) -> list[KernelMatrix]:
        """What this process multiplies by, for each kernel: k(X, X), a part of it, or some of its rows."""
        if self.shard.is_whole or self._by_rows:
            return [self._matrix(kernel, self._own_inputs, self.inputs, self.method) for kernel in self.kernels]
        part = Part(parallel.rank(), parallel.num_processes())
        return [self._matrix(kernel, self.inputs, self.inputs, self.method, part) for kernel in self.kernels]

    @property
    def _by_rows(self) -> bool:
        return self.device.type == "cuda"

    def _matrix(self, kernel: Kernel, x: Tensor, z: Tensor, method: str, part: Part = WHOLE) -> KernelMatrix:
        return KernelMatrix(
            kernel, x, z, method=method, tolerance=self.tolerance, chunk_bytes=self.chunk_bytes, part=part
        )

    def _matrices_at(self, x: Tensor) -> list[KernelMatrix]:
        """Return k(x, X) for the X of this process, by the compiled formula of k(X, X) where there is one.

        x alone might not be worth compiling.
        """
        if x is self.inputs and self.shard.is_whole:
            return self.matrices
        methods = ("fused" if m.uses_compiled_tiles else self.method for m in self.matrices)
        return [
            self._matrix(kernel, x, self._own_inputs, method)
            for kernel, method in zip(self.kernels, methods, strict=True)
        ]

    @property
    def how(self) -> str:
        """How products are computed, and why."""
        return "; ".join(dict.fromkeys(str(matrix.choice) for matrix in self.matrices))

    def image(self, actions: Columns) -> Columns:
        if isinstance(actions, KroneckerColumns):  # r single-output columns cost what r/C columns of K cost
            self.num_products += -(-actions.factor.size // self.num_outputs)
            product = self._own_rows(self.matrices[0] @ actions.factor.whole().matrix)
            return KroneckerColumns(DenseColumns.of(product, 1, self.shard), actions.contrasts)
        assert isinstance(actions, DenseColumns)
        self.num_products += actions.size
        per_output = actions.whole().matrix.unflatten(0, (-1, self.num_outputs))  # (N, C, B)
        product = self._own_rows(self._product(self.matrices, per_output))
        return DenseColumns.of(product.flatten(0, 1), self.num_outputs, self.shard)

    def extended(self, inputs: Tensor) -> GramPrior:
        """The same prior with more data, behind those there are."""
        return GramPrior(
            self.kernels,
            torch.cat([self.inputs, inputs.to(self.inputs.dtype)]),
            self._mean,
            chunk_bytes=self.chunk_bytes,
            method=self.method,
            tolerance=self.tolerance,
            data_dtype=self.data_dtype,
        )

    def images_at(self, x: Tensor, actions: Columns) -> Tensor:  # (b · outputs, stored columns)
        """k(x, X) S at inputs that are to become training inputs, as images are computed. In every process."""
        return self.shard.sum(self._cross(x, actions.factor)).flatten(0, 1)

    def _own_rows(self, product: Tensor) -> Tensor:
        """From what this process has multiplied."""
        return product if self.shard.is_whole or self._by_rows else self.shard.take(parallel.all_sum(product))

    def gram(self, left: Buffer, right: Buffer) -> Tensor:
        return left.actions.gram(self.lift(right.images))

    def lift(self, images: Images) -> Columns:
        assert isinstance(images, Columns)
        return images

    def at(self, x: Tensor, buffer: Buffer, *, joint: bool = False) -> AtInputs:
        x, actions = x.to(self._exact_dtype), buffer.actions
        cross = self._cross(x, actions.factor) if self.dtype == torch.float64 else self._exact_cross(x, actions.factor)
        cross = self.shard.sum(cross)  # (b, C, B), or (b, 1, r) of U ⊗ H
        if isinstance(actions, KroneckerColumns):
            cross = torch.einsum("bi,cj->bcij", cross[:, 0], actions.contrasts).flatten(2)
        return AtInputs(self._mean.expand(len(x), -1), cross, self.covariance_at(x, joint=joint))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        step, mine = max(1, 2**16 // self.num_outputs**2), self.shard.mine
        for start in range(mine.start, mine.stop, step):
            data = slice(start, min(start + step, mine.stop))
            yield data, self.blocks_of(self.inputs[data])

    def pick(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield rows, self.inputs[rows]

    def product_error(self, gram: Tensor) -> float:
        return self._measured_error

    @cached_property
    def _measured_error(self) -> float:
        """‖K̃ − K‖ from some of its rows, of all N with the same probability, beside the exact ones.

        √(N/m) times the norm of the part is on average no less than that of the whole. To it come the rounding of sums,
        and that of a close pair of points, of which there may be too few to be met.
        """
        generator = torch.Generator().manual_seed(0)
        rows = torch.randperm(self.num_data, generator=generator)[:MEASURED_ROWS].to(self.device)
        x, error = self.inputs[rows], torch.zeros((), dtype=torch.float64, device=self.device)
        unit = torch.eye(len(x), dtype=self.dtype, device=self.device)
        for kernel, matrix in zip(self.kernels, self.matrices, strict=True):
            outer, sums = torch.zeros_like(unit, dtype=torch.float64), error.new_zeros(len(x))
            for part in self.inputs.split(max(1, self.chunk_bytes // (64 * len(x)))):
                exact = self._exactly(kernel, part, x)  # (part, m)
                off = self._matrix(kernel, part, x, matrix.method) @ unit - exact
                outer += off.T @ off
                sums += exact.abs().sum(0)
            norm = torch.linalg.matrix_norm(outer, 2).sqrt() * (self.num_data / len(x)) ** 0.5
            pair = matrix.rounding_of_points * float(self._exactly(kernel, x[:1], x[:1]))
            total = norm + torch.finfo(self.dtype).eps * sums.max() + pair + matrix.left_out
            error = torch.maximum(error, total)
        return float(error if self.shard.is_whole else parallel.from_main(error))

    @property
    def product_tolerance(self) -> float:
        rounding = max(matrix.rounding_of_points for matrix in self.matrices)
        if all(matrix.choice.pattern is None for matrix in self.matrices):
            return rounding
        return rounding + (DEFAULT_TOLERANCE if self.tolerance is None else self.tolerance)

    def covariance_at(self, x: Tensor, *, joint: bool = False) -> Tensor:  # (b, C, C), or (b·C, b·C) if joint
        """k(x, x) in float64."""
        return self._joint_covariance(x) if joint else self.blocks_of(x)

    def blocks_of(self, x: Tensor) -> Tensor:  # (b, C, C)
        """k(x, x) at each input, in float64."""
        x = x.to(self._exact_dtype)
        variances = torch.stack([kernel.diagonal(x) for kernel in self.kernels], 1).double()
        return torch.diag_embed(variances.expand(-1, self.num_outputs))

    def between(self, x: Tensor, z: Tensor) -> Tensor:  # (1 or C, b, b')
        """k(x, z) written out in float64, once for all outputs or for each; some rows at a time, by `chunk_bytes`."""
        step = max(1, self.chunk_bytes // max(1, 64 * len(z)))
        if len(x) <= step:
            return torch.stack([self._exactly(kernel, x, z) for kernel in self.kernels])
        written = torch.empty(len(self.kernels), len(x), len(z), dtype=torch.float64, device=self.device)
        if torch.is_grad_enabled() and x.requires_grad:  # rows in a graph are put together at the end
            return torch.cat([self.between(part, z) for part in x.split(step)], 1)
        for start in range(0, len(x), step):
            for place, kernel in enumerate(self.kernels):
                rows = slice(start, start + step)
                written[place, rows] = self._exactly(kernel, x[rows], z).detach()
        return written

    def _joint_covariance(self, x: Tensor) -> Tensor:  # (b·C, b·C)
        C = self.num_outputs
        full = torch.zeros(len(x), C, len(x), C, dtype=torch.float64, device=x.device)
        for c, kernel in enumerate(self._per_output):
            full[:, c, :, c] = self._exactly(kernel, x, x)
        return full.reshape(len(x) * C, len(x) * C)

    @property
    def _per_output(self) -> list[Kernel]:
        return self.kernels * self.num_outputs if self.shares_kernel else self.kernels

    def _cross(self, x: Tensor, actions: DenseColumns) -> Tensor:  # (b, C, B)
        """k(x, X) S.

        Where k(x, X) is small it is written out once and meets the columns as they lie in memory: a product with all of
        them would first copy S, which is most of what a run holds.
        """
        if len(x) * len(self._own_inputs) * x.element_size() > min(FEW_BYTES, self.chunk_bytes):
            return self._product(self._matrices_at(x), actions.matrix.unflatten(0, (-1, actions.num_outputs)))
        written_out = [kernel(x, self._own_inputs) for kernel in self.kernels]
        columns: Tensor = actions.storage[: actions.size].unflatten(1, (-1, actions.num_outputs))  # (B, N, C)
        if self.shares_kernel:
            return (written_out[0] @ columns).permute(1, 2, 0)
        return torch.stack([k @ columns[:, :, c].T for c, k in enumerate(written_out)], 1)

    def _exact_cross(self, x: Tensor, actions: DenseColumns) -> Tensor:  # (b, C, B)
        """The same in float64 where inputs and actions are not: some data at a time, as both are copied."""
        cross = torch.zeros(len(x), actions.num_outputs, actions.size, dtype=torch.float64, device=x.device)
        for data in actions.slices():
            points, rows = self.inputs[data].to(x.dtype), actions.rows(data).to(x.dtype)
            matrices = [self._matrix(kernel, x, points, "plain") for kernel in self.kernels]
            cross = cross + self._product(matrices, rows)
        return cross

    def _exactly(self, kernel: Kernel, x: Tensor, z: Tensor) -> Tensor:
        """k(x, z) in float64."""
        return kernel(x.to(self._exact_dtype), z.to(self._exact_dtype)).double()

    @cached_property
    def _exact_dtype(self) -> torch.dtype:
        """float64, unless a kernel of the user's own computes in nothing but the dtype of the inputs."""
        return working_dtype(self.kernels, self.inputs)

    def _product(self, matrices: list[KernelMatrix], per_output: Tensor) -> Tensor:  # (b, N), (N, C, B) -> (b, C, B)
        """k(x, X) S for dense actions, each output under its own kernel."""
        if self.shares_kernel:
            product: Tensor = (matrices[0] @ per_output.flatten(1)).unflatten(1, per_output.shape[1:])
            return product
        return torch.stack([matrix @ per_output[:, c] for c, matrix in enumerate(matrices)], 1)


@torch.no_grad()
def working_dtype(kernels: Sequence[Kernel], inputs: Tensor) -> torch.dtype:
    """float64, or the dtype of the inputs where a kernel refuses another: one with a float32 network inside, say."""
    first = inputs[:1].double()
    try:
        for kernel in kernels:
            kernel(first, first)
    except (RuntimeError, TypeError):
        return inputs.dtype
    return torch.float64

"""The prior of a linearised network: f(x) = f(x; θ*) + J(x)(θ − θ*), θ ~ N(μ₀, Λ⁻¹), hence K = J Λ⁻¹ Jᵀ.

Products are linear in N: one sweep of the data with vector-Jacobian products gives A = JᵀS, another with
Jacobian-vector products gives T = K S = J Λ⁻¹ A. A lives in weight space, and the posterior needs nothing else:
k(x, X) S = J(x) Λ⁻¹ A at new inputs asks for no training data.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ntk_iterncgp.data.fixed_order import FixedOrderData, Inputs, slice_rows
from ntk_iterncgp.jacobian.rows import (
    NetworkJacobian,
    affordable_data,
    curvature_diagonal,
    plan_trace,
    rows_of_data,
)
from ntk_iterncgp.likelihoods.base import CurvatureAt
from ntk_iterncgp.linalg.columns import Buffer, Columns, DenseColumns, Images, Weight
from ntk_iterncgp.priors.base import AtInputs, Prior
from ntk_iterncgp.runtime import parallel


class NetworkImages(Images):
    """Images in weight space, A = JᵀS (P, B), and at the training inputs, T = K S (n, B)."""

    def __init__(self, weights: DenseColumns, outputs: DenseColumns) -> None:
        self.weights, self.outputs = weights, outputs
        self.size, self.dtype = weights.size, weights.dtype

    def append(self, other: Images) -> NetworkImages:
        assert isinstance(other, NetworkImages)
        return NetworkImages(self.weights.append(other.weights), self.outputs.append(other.outputs))

    def rotate(self, coefficients: Tensor) -> NetworkImages:
        return NetworkImages(self.weights.rotate(coefficients), self.outputs.rotate(coefficients))


class NTKPrior(Prior):
    """`outputs` (N, C) are the network's own, `prior_precision` is one number per weight.

    `shift` is θ* − μ₀ (P,), or None for a prior mean that is the network itself. Each process sweeps its shard of the
    data, which is where its rows of T are; A, summed over all, is in every process.

    `num_calls` says how many backward passes a fit makes for each W whose trace it asks for, and `curvature_stays` that
    it is always the same W.
    """

    sample_seed = 0  # of the data, and of the random signs, from which a large trace is estimated

    def __init__(
        self,
        jacobian: NetworkJacobian,
        data: FixedOrderData,
        outputs: Tensor,
        prior_precision: Tensor,
        *,
        shift: Tensor | None = None,
        chunk_bytes: int = 256 * 2**20,
        num_calls: int = 1,
        curvature_stays: bool = False,
    ) -> None:
        super().__init__(data.shard() or parallel.Shard.whole(len(outputs)))
        self.jacobian, self.data, self.chunk_bytes, self.shift = jacobian, data, chunk_bytes, shift
        self.num_data, self.num_outputs = outputs.shape
        self.dtype, self.device = jacobian.dtype, jacobian.device
        self.prior_variance = 1 / prior_precision.double()  # (P,)
        self.trace = plan_trace(jacobian, self.num_data, self.num_outputs, num_calls)
        self._curvature_stays = curvature_stays
        self._diagonal: Tensor | None = None
        self._mean = outputs.double()
        if shift is not None:
            moved = self.shard.gather(self.product(shift[:, None]).double(), self.num_outputs)
            self._mean = self._mean - moved.reshape(outputs.shape)

    @property
    def mean(self) -> Tensor:
        return self._mean

    # --- sweeps over the data -------------------------------------------------------------------------------------

    def transpose_product(self, actions: Columns) -> Tensor:  # (P, B)
        """A = JᵀS: one sweep, summed in float64, and one sum over all processes."""
        total = torch.zeros(self.jacobian.num_params, actions.size, dtype=torch.float64, device=self.device)
        for data, x, _ in self.data.sweep(self.shard):
            total += self.jacobian.vjp(x, actions.rows(data).to(self.dtype))
        return self.shard.sum(total)

    def product(self, weights: Tensor) -> Tensor:  # (P, k) -> (n, k)
        """J V, the rows of this process: one sweep."""
        weights = weights.to(self.dtype)
        parts = [self.jacobian.jvp(x, weights).flatten(0, 1) for _, x, _ in self.data.sweep(self.shard)]
        return torch.cat(parts) if parts else weights[:0]

    # --- the contract ---------------------------------------------------------------------------------------------

    def image(self, actions: Columns) -> NetworkImages:
        self.num_products += actions.size
        weights = self.transpose_product(actions)
        outputs = self.product(self.prior_variance[:, None] * weights)
        in_weights = DenseColumns.of(weights.to(self.dtype), 1)  # whole in every process
        return NetworkImages(in_weights, DenseColumns.of(outputs, self.num_outputs, self.shard))

    def empty_images(self, columns: Columns) -> NetworkImages:
        assert isinstance(columns, DenseColumns)
        capacity, params = columns.storage.shape[0], self.jacobian.num_params
        whole = parallel.Shard.whole(params)
        weights = DenseColumns.empty(whole, 1, capacity=capacity, dtype=self.dtype, device=self.device)
        return NetworkImages(weights, columns)

    def gram(self, left: Buffer, right: Buffer) -> Tensor:
        assert isinstance(left.images, NetworkImages) and isinstance(right.images, NetworkImages)
        return left.images.weights.diagonal_inner(self.prior_variance[:, None], right.images.weights)

    def lift(self, images: Images) -> DenseColumns:
        assert isinstance(images, NetworkImages)
        return images.outputs

    def at(self, x: Inputs, buffer: Buffer, *, joint: bool = False) -> AtInputs:
        assert isinstance(buffer.images, NetworkImages)
        with torch.no_grad():
            rows = self.jacobian.rows(x, self.data.num_rows(x))
            mean = rows.outputs.double()
            if self.shift is not None:
                mean = mean - rows.times(self.shift[:, None])[..., 0]
            cross = rows.times(self.prior_variance[:, None] * buffer.images.weights.matrix)
            return AtInputs(mean, cross, rows.covariance(self.prior_variance, joint=joint))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        with torch.no_grad():
            for data, rows in rows_of_data(self.jacobian, self.data, self.shard, self.num_outputs, self.chunk_bytes):
                yield data, rows.covariance(self.prior_variance)

    def pick(self, rows: Tensor) -> Iterator[tuple[Tensor, Inputs]]:
        at_once = max(1, self.chunk_bytes // self.jacobian.bytes_per_row(self.num_outputs))
        return self.data.pick(rows, self.num_data, at_once)

    def curvature_trace(self, curvature: Weight) -> float:
        assert isinstance(curvature, CurvatureAt)
        return float(self.curvature_diagonal(curvature) @ self.prior_variance)

    @property
    def trace_is_exact(self) -> bool:
        """Whether the trace is exact, not an estimate."""
        return self.trace.is_exact

    def curvature_diagonal(self, curvature: CurvatureAt) -> Tensor:  # (P,)
        """The diagonal of JᵀWJ (`rows.py`)."""
        if self._diagonal is not None:
            return self._diagonal
        diagonal = curvature_diagonal(
            self.jacobian, self.data, curvature, self.trace, chunk_bytes=self.chunk_bytes, seed=self.sample_seed
        )
        if self._curvature_stays:
            self._diagonal = diagonal
        return diagonal

    def checked_data(self, wanted: int) -> int:
        return affordable_data(self.jacobian, self.num_data, self.num_outputs, wanted)

    def variance_scale(self) -> float:
        """Of as few inputs as can be afforded: it is a scale."""
        largest = torch.zeros((), dtype=torch.float64, device=self.device)
        if parallel.is_main() or self.shard.is_whole:
            x = next(self.data.batches())[0]
            num_rows = self.data.num_rows(x)
            some = min(num_rows, self.checked_data(num_rows))
            first = slice_rows(x, slice(0, some), num_rows)
            with torch.no_grad():
                rows = next(self.jacobian.rows_in_parts(first, some, None, self.num_outputs, self.chunk_bytes))
                largest += rows.covariance(self.prior_variance).diagonal(dim1=1, dim2=2).max()
        return float(largest if self.shard.is_whole else parallel.from_main(largest))


def sweep_outputs(jacobian: NetworkJacobian, data: FixedOrderData) -> tuple[Tensor, Tensor]:  # (N, C), targets
    """The network's outputs and the targets at all training inputs: one forward sweep."""
    outputs, targets = zip(*data.each_batch(lambda x, y: (jacobian.forward(x), y)), strict=True)
    return torch.cat(outputs), torch.cat(targets)

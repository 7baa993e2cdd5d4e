"""The prior of a linearised network: f(x) = f(x; θ*) + J(x)(θ − θ*), θ ~ N(μ₀, Λ⁻¹), hence K = J Λ⁻¹ Jᵀ.

Products are linear in N: one sweep of the data with vector-Jacobian products gives A = JᵀS, another with
Jacobian-vector products gives T = K S = J Λ⁻¹ A. A lives in weight space, and the posterior needs nothing else:
k(x, X) S = J(x) Λ⁻¹ A at new inputs asks for no training data.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ntk_iterncgp import parallel
from ntk_iterncgp.columns import Buffer, Columns, DenseColumns, Images, Weight
from ntk_iterncgp.data import FixedOrderData, Inputs
from ntk_iterncgp.priors.base import AtInputs, Prior
from ntk_iterncgp.priors.jacobian import NetworkJacobian
from ntk_iterncgp.priors.rows import Rows

EXACT_TRACE_ROWS = 4096
"""Up to this many rows tr(W K) is computed from all rows of J; beyond, it is estimated from those of some data."""

SAMPLED_SHARE, MIN_SAMPLED, MAX_SAMPLED = 0.02, 32, 64
"""The sample: as many data as cost 2 % of an epoch, within limits."""

TRACE_ENTRIES = 2**20  # of blocks of W at once


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

    `shift` is θ* − μ₀ (P,), or None for a prior mean that is the network itself. Each process sweeps its share of the
    data, which is where its rows of T are; A, summed over all, is in every process.
    """

    sample_seed = 0  # of the data from which a large trace is estimated

    def __init__(
        self,
        jacobian: NetworkJacobian,
        data: FixedOrderData,
        outputs: Tensor,
        prior_precision: Tensor,
        *,
        shift: Tensor | None = None,
        chunk_bytes: int = 256 * 2**20,
    ) -> None:
        super().__init__(data.share() or parallel.Share.whole(len(outputs)))
        self.jacobian, self.data, self.chunk_bytes, self.shift = jacobian, data, chunk_bytes, shift
        self.num_data, self.num_outputs = outputs.shape
        self.dtype, self.device = jacobian.dtype, jacobian.device
        self.prior_variance = 1 / prior_precision.double()  # (P,)
        self.trace_is_exact = self.num_data * self.num_outputs <= EXACT_TRACE_ROWS
        self._mean = outputs.double()
        if shift is not None:
            moved = self.share.gather(self.product(shift[:, None]).double(), self.num_outputs)
            self._mean = self._mean - moved.reshape(outputs.shape)

    @property
    def mean(self) -> Tensor:
        return self._mean

    # --- sweeps over the data -------------------------------------------------------------------------------------

    def transpose_product(self, actions: Columns) -> Tensor:  # (P, B)
        """A = JᵀS: one sweep, summed in float64, and one sum over all processes."""
        total = torch.zeros(self.jacobian.num_params, actions.size, dtype=torch.float64, device=self.device)
        for data, x, _ in self.data.sweep(self.share):
            total += self.jacobian.vjp(x, actions.rows(data).to(self.dtype))
        return self.share.sum(total)

    def product(self, weights: Tensor) -> Tensor:  # (P, k) -> (n, k)
        """J V, the rows of this process: one sweep."""
        weights = weights.to(self.dtype)
        parts = [self.jacobian.jvp(x, weights).flatten(0, 1) for _, x, _ in self.data.sweep(self.share)]
        return torch.cat(parts) if parts else weights[:0]

    def rows(self) -> Iterator[tuple[slice, Rows]]:
        """The rows of J of this process's data, in parts that fit in `chunk_bytes`: one sweep."""
        for data, x, _ in self.data.sweep(self.share):
            start = data.start
            for part in in_parts(self.jacobian, self.data, x, self.num_outputs, self.chunk_bytes):
                size = self.data.num_rows(part)
                yield slice(start, start + size), self.jacobian.rows(part, size)
                start += size

    # --- the contract ---------------------------------------------------------------------------------------------

    def image(self, actions: Columns) -> NetworkImages:
        self.num_products += actions.size
        weights = self.transpose_product(actions)
        outputs = self.product(self.prior_variance[:, None] * weights)
        in_weights = DenseColumns.of(weights.to(self.dtype), 1)  # whole in every process
        return NetworkImages(in_weights, DenseColumns.of(outputs, self.num_outputs, self.share))

    def empty_images(self, columns: Columns) -> NetworkImages:
        assert isinstance(columns, DenseColumns)
        capacity, params = columns.storage.shape[0], self.jacobian.num_params
        whole = parallel.Share.whole(params)
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
            for data, rows in self.rows():
                yield data, rows.covariance(self.prior_variance)

    def pick(self, rows: Tensor) -> Iterator[tuple[Tensor, Inputs]]:
        return self.data.pick(rows, self.num_data, self._rows_at_once())

    def curvature_trace(self, curvature: Weight) -> float:
        return float(self.curvature_diagonal(curvature) @ self.prior_variance)

    def curvature_diagonal(self, curvature: Weight) -> Tensor:  # (P,)
        """The diagonal of JᵀWJ, of which tr(W K) = Σ_p diag_p / λ_p for any prior precision.

        Exact from all rows of J where these are few; else unbiased from a sample, each datum drawn with probability
        in proportion to tr(W_n) and counted by its inverse.
        """
        total = torch.zeros(self.jacobian.num_params, dtype=torch.float64, device=self.device)
        if self.trace_is_exact:
            with torch.no_grad():
                for data, rows in self.rows():
                    total += rows.curvature_diagonal(partial(curvature, data))
            return self.share.sum(total)
        sample, counts = self._sample(curvature)

        def counted(part: Tensor, block: Tensor) -> Tensor:
            return counts[part][:, None, None] * curvature(part, block)

        mine = parallel.Share.even(len(sample)).take(sample)
        with torch.no_grad():
            for part, x in self.data.pick(mine, self.num_data, self._rows_at_once()):
                total += self.jacobian.rows(x, len(part)).curvature_diagonal(partial(counted, part))
        return parallel.all_sum(total)

    def _sample(self, curvature: Weight) -> tuple[Tensor, Tensor]:
        """Which data are in the sample, and how much each datum of all counts (N,)."""
        probability = curvature_traces(curvature, self.num_data, self.num_outputs, self.device).clamp_min(1e-300)
        probability = probability / probability.sum()
        size = int(SAMPLED_SHARE * 3 * self.num_data / (1 + 2 * self.num_outputs))
        size = min(max(size, MIN_SAMPLED), MAX_SAMPLED)
        uniform = torch.rand(size, generator=torch.Generator().manual_seed(self.sample_seed), dtype=torch.float64)
        drawn = torch.searchsorted(probability.cumsum(0), uniform.to(self.device)).clamp_max(self.num_data - 1)
        counts = torch.bincount(drawn, minlength=self.num_data) / (size * probability)
        return drawn.unique(), counts

    def _rows_at_once(self) -> int:
        return max(1, self.chunk_bytes // self.jacobian.bytes_per_row(self.num_outputs))


def curvature_traces(curvature: Weight, num_data: int, num_outputs: int, device: torch.device) -> Tensor:  # (N,)
    """tr(W_n) of each datum: how undecided it is. A few data at a time, since C×C numbers for all would be many."""
    eye, size = torch.eye(num_outputs, dtype=torch.float64, device=device), 1 + TRACE_ENTRIES // num_outputs**2
    parts = []
    for start in range(0, num_data, size):
        rows = slice(start, min(start + size, num_data))
        block = curvature(rows, eye.expand(rows.stop - start, -1, -1))
        parts.append(block.diagonal(dim1=1, dim2=2).sum(1))
    return torch.cat(parts)


def in_parts(
    jacobian: NetworkJacobian, data: FixedOrderData, x: Inputs, num_outputs: int, chunk_bytes: int
) -> Iterator[Inputs]:
    """A batch in parts whose rows of J fit in `chunk_bytes`, or a sentence that names the sizes."""
    jacobian.prepare(x, data.num_rows(x))
    per_row = jacobian.bytes_per_row(num_outputs)
    if per_row > chunk_bytes:
        raise ValueError(
            f"chunk_bytes is expected to hold the rows of the Jacobian for one input, {num_outputs} outputs × "
            f"{jacobian.num_params:,} weights, which take {_size(per_row)}, but it is {_size(chunk_bytes)}. Raise "
            "chunk_bytes, or choose fewer weights."
        )
    return data.chunk(x, chunk_bytes // per_row)


def _size(num_bytes: int) -> str:
    """In MiB, or in bytes where that would read 0.0."""
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes:,} bytes"


def sweep_outputs(jacobian: NetworkJacobian, data: FixedOrderData) -> tuple[Tensor, Tensor]:  # (N, C), targets
    """The network's outputs and the targets at all training inputs: one forward sweep."""
    outputs, targets = zip(*data.each_batch(lambda x, y: (jacobian.forward(x), y)), strict=True)
    return torch.cat(outputs), torch.cat(targets)

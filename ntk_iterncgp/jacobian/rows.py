"""The contract of a network's Jacobian J: products on one batch at a time, rows at some inputs, and diag(JᵀWJ).

tr(W K) = Σ_p diag(JᵀWJ)_p / λ_p for any prior precision λ, and the meter needs it. One row of J for each output of each
datum is as much work as C epochs. So all of them are computed where they are few numbers; where they are not, those of
a sample of data, if these are few. Else single directions of single data are probed: with W_n = Σ_c h_c h_cᵀ, a pair
(n, c) drawn with probability |h_c|² / tr W, and h its direction of unit length,

    E[(J_nᵀh)²] tr W = diag(JᵀWJ),    weight by weight.

That is a backward pass at one datum. As many are made as a twentieth of those of the fit, and at least one. They differ
little in length from one pair to the next: on networks trained on digits the error of the trace is 20 % of one probe,
and 6 % of ten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ntk_iterncgp.data.fixed_order import FixedOrderData
from ntk_iterncgp.data.order import Inputs, slice_rows
from ntk_iterncgp.jacobian.blocks import WeightColumns, diagonal
from ntk_iterncgp.likelihoods.base import CurvatureAt
from ntk_iterncgp.runtime.parallel import Shard, all_sum

Contrasts = Tensor | Callable[[Tensor], Tensor]
"""Combinations of the outputs: H (C, r), the same at all inputs; (b, C, r), each input its own; or a function that
makes one of these of the outputs (b, C), so that contrasts may follow from the forward pass that is made anyway."""


class Rows(ABC):
    """The network at b inputs: its outputs, and products with the rows J(x) of its Jacobian."""

    outputs: Tensor  # f(x; θ*) (b, C)

    @abstractmethod
    def written_out(self) -> Tensor:  # (b, C, P)
        """The rows themselves."""

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype) -> Rows:
        """The same rows in another dtype, for products that are summed in it."""

    @abstractmethod
    def times(self, weights: Tensor | WeightColumns) -> Tensor:  # (P, k) -> (b, C, k)
        """J(x) V, in float64."""

    @abstractmethod
    def covariance(self, variance: Tensor, *, joint: bool = False) -> Tensor:  # (1,) or (P,)
        """J(x) diag(variance) J(x)ᵀ in float64: (b, C, C), or (b·C, b·C) if joint."""

    def products(
        self, weights: Tensor | WeightColumns, variance: Tensor, *, joint: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`times` and `covariance` together, in the dtype of the weights: what is not retained is computed once."""
        rows = self.in_dtype(weights.dtype)
        return rows.times(weights), rows.covariance(variance, joint=joint)

    def by_layer(self, weights: Tensor | WeightColumns, sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield J_l V_l (b, C, k) and J_l J_lᵀ (b, C, C) for each parameter tensor, in the dtype of the weights.

        Here from all rows, with zeros.
        """
        columns, start = WeightColumns.of(weights, weights.dtype), 0
        for size in sizes:
            only = torch.zeros(sum(sizes), dtype=torch.float64, device=self.outputs.device)
            only[start : start + size] = 1
            yield self.products(replace(columns, scale=only), only)
            start += size

    @abstractmethod
    def curvature_diagonal(self, curvature: Callable[[Tensor], Tensor]) -> Tensor:  # (P,)
        """The diagonal of Σ_n J_nᵀ W_n J_n, for products with W (b, C, k) -> (b, C, k) given by `curvature`."""


class DenseRows(Rows):
    """Rows that are written out, J (b, C, P)."""

    def __init__(self, outputs: Tensor, jacobian: Tensor) -> None:
        self.outputs, self.jacobian = outputs, jacobian

    def written_out(self) -> Tensor:
        return self.jacobian

    def in_dtype(self, dtype: torch.dtype) -> DenseRows:
        return DenseRows(self.outputs, self.jacobian.to(dtype))

    def times(self, weights: Tensor | WeightColumns) -> Tensor:
        columns = WeightColumns.of(weights, self.jacobian.dtype)
        return sum(
            ((self.jacobian[:, :, part] @ rows) for part, rows in columns.slices()),
            start=self.jacobian.new_zeros(*self.jacobian.shape[:2], columns.number),
        ).double()

    def covariance(self, variance: Tensor, *, joint: bool = False) -> Tensor:
        one = variance.numel() == 1  # for all weights: no second copy of J
        scaled = self.jacobian if one else self.jacobian * variance.sqrt().to(self.jacobian.dtype)
        if joint:
            scaled = scaled.flatten(0, 1)
        product = (scaled @ scaled.mT).double()
        return product * variance.double() if one else product

    def by_layer(self, weights: Tensor | WeightColumns, sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        columns = WeightColumns.of(weights, weights.dtype)
        for rows, part in zip(self.jacobian.to(weights.dtype).split(sizes, 2), columns.layers(sizes), strict=True):
            yield (rows @ part.rows(slice(None))).double(), (rows @ rows.mT).double()

    def curvature_diagonal(self, curvature: Callable[[Tensor], Tensor]) -> Tensor:
        return diagonal(self.jacobian, curvature_blocks(curvature, self.outputs.shape, self.jacobian)).double()


def contrasts_at(contrasts: Contrasts | None, outputs: Tensor) -> Tensor:  # (b, C) -> (C, r) or (b, C, r)
    """The contrasts at these outputs, in their dtype; of all outputs alone where none are given."""
    b, C = outputs.shape
    if contrasts is None:
        return torch.eye(C, dtype=outputs.dtype, device=outputs.device)
    found = contrasts if isinstance(contrasts, Tensor) else contrasts(outputs.detach())
    if found.ndim not in (2, 3) or found.shape[-2] != C or (found.ndim == 3 and len(found) != b):
        raise ValueError(
            f"`contrasts` must have shape ({C}, k), or ({b}, {C}, k) for each input its own; got "
            f"{tuple(found.shape)}. Try one row for each of the {C} outputs."
        )
    return found.to(outputs)


def curvature_blocks(curvature: Callable[[Tensor], Tensor], shape: torch.Size, like: Tensor) -> Tensor:  # (b, C, C)
    """W_n of each datum."""
    b, C = shape
    return curvature(torch.eye(C, dtype=torch.float64, device=like.device).expand(b, C, C)).to(like.dtype)


class NetworkJacobian(ABC):
    """Products with J, a batch at a time, for P weights in a fixed order."""

    num_params: int
    dtype: torch.dtype
    device: torch.device
    model: nn.Module | None = None  # whose J it is; None: that of a last layer, on its inputs
    num_tokens = 1  # places of a datum at which the outputs are those of one and the same classifier

    @abstractmethod
    def forward(self, x: Inputs) -> Tensor:  # (b, C)
        """The outputs."""

    @abstractmethod
    def forward_at(self, x: Inputs, change: Tensor) -> Tensor:  # (P,) -> (b, C)
        """The outputs of the network itself after a change of its weights."""

    @abstractmethod
    def vjp(self, x: Inputs, cotangents: Tensor) -> Tensor:  # (b, C, k) -> (P, k)
        """JᵀV summed over a batch."""

    @abstractmethod
    def vjp_each(self, x: Inputs, cotangents: Tensor) -> Tensor:  # (b, C, k) -> (b, k, P)
        """JᵀV of each datum of a batch."""

    @abstractmethod
    def jvp(self, x: Inputs, tangents: Tensor) -> Tensor:  # (P, k) -> (b, C, k)
        """J V on a batch."""

    @abstractmethod
    def rows(self, x: Inputs, num_rows: int, contrasts: Contrasts | None = None) -> Rows:
        """Return the network at each input of a batch, with the rows J(x), or HᵀJ(x) for contrasts H of its outputs.

        The contrasts are the same for all inputs, each input's own, or made of the outputs. Differentiable in x, at
        given contrasts.
        """

    @abstractmethod
    def prepare(self, x: Inputs, num_rows: int) -> None:
        """Look at some inputs, so that `bytes_per_row` knows."""

    @abstractmethod
    def bytes_per_row(self, num_outputs: int) -> int:
        """The memory that `rows` takes for each input."""

    def parts(self, x: Inputs, num_inputs: int, num_rows: int, chunk_bytes: int) -> Iterator[slice]:
        """A batch cut so that `num_rows` rows for each input fit in `chunk_bytes`, or an error that names the sizes."""
        self.prepare(x, num_inputs)
        each = self.bytes_per_row(num_rows)
        if each > chunk_bytes:
            raise ValueError(
                f"`chunk_bytes` must hold the rows of the Jacobian for one input, {num_rows} outputs × "
                f"{self.num_params:,} weights, {each:,} bytes; got {chunk_bytes:,}. Try chunk_bytes={each}, or fewer "
                "weights."
            )
        at_once = chunk_bytes // each
        size = -(-num_inputs // max(1, -(-num_inputs // at_once)))  # of parts that are equally large
        return (slice(start, min(start + size, num_inputs)) for start in range(0, num_inputs, size))

    def rows_in_parts(
        self, x: Inputs, num_inputs: int, contrasts: Contrasts | None, num_rows: int, chunk_bytes: int
    ) -> Iterator[Rows]:
        """`rows` of a batch in `parts`."""
        each = contrasts if isinstance(contrasts, Tensor) and contrasts.ndim == 3 else None  # each input has its own
        for part in self.parts(x, num_inputs, num_rows, chunk_bytes):
            some = slice_rows(x, part, num_inputs)
            yield self.rows(some, part.stop - part.start, contrasts if each is None else each[part])


# --- diag(JᵀWJ) ---

EXACT_TRACE_ROWS = 4096
"""Up to this many rows of J, if they are few numbers, tr(W K) is computed from all of them."""

SMALL_NETWORK, FEW_OUTPUTS = 2**14, 4  # weights, and outputs, up to which all rows at an input cost next to nothing

FEW_NUMBERS = 2**24  # of J: what a small network's rows take, some tenths of a second

SAMPLED_FRACTION, MIN_SAMPLED, MAX_SAMPLED = 0.02, 32, 64
"""A sample of data of which all rows are few: as many as cost 2 % of an epoch, within limits."""

FIT_FRACTION = 0.05  # of the backward passes of a fit: what probes, and rows for its check, may take
MAX_PROBES = 64


class TracePlan(NamedTuple):
    """Data of which all rows are computed; or backward passes at single data."""

    num_rows: int
    num_probes: int
    is_exact: bool


def plan_trace(jacobian: NetworkJacobian, num_data: int, num_outputs: int, num_calls: int) -> TracePlan:
    """How the trace is had, in a fit that makes `num_calls` backward passes."""
    per_datum = num_outputs * jacobian.num_params
    if num_data * num_outputs <= EXACT_TRACE_ROWS and num_data * per_datum <= FEW_NUMBERS:
        return TracePlan(num_data, 0, is_exact=True)
    if MAX_SAMPLED * per_datum <= FEW_NUMBERS:
        size = int(SAMPLED_FRACTION * num_data / row_epochs(num_outputs))
        return TracePlan(min(max(size, MIN_SAMPLED), MAX_SAMPLED), 0, is_exact=False)
    return TracePlan(0, max(1, min(MAX_PROBES, int(FIT_FRACTION * num_calls))), is_exact=False)


def affordable_data(jacobian: NetworkJacobian, num_data: int, num_outputs: int, wanted: int) -> int:
    """Return at how many data all rows may be computed beside a fit.

    As many as wanted where they are few numbers, else what costs a twentieth of an epoch, and at least one.
    """
    if wanted * num_outputs * jacobian.num_params <= FEW_NUMBERS:
        return wanted
    return max(1, min(wanted, int(FIT_FRACTION * num_data / row_epochs(num_outputs))))


def all_rows_are_cheap(num_outputs: int, num_params: int) -> bool:
    """Whether all rows at an input cost next to nothing: then a prediction takes no fewer, unless asked."""
    return num_outputs <= FEW_OUTPUTS or num_params <= SMALL_NETWORK


def row_epochs(num_outputs: float) -> float:
    """All rows of J, in epochs: a forward pass and a backward pass for each output, which is twice as much."""
    return (1 + 2 * num_outputs) / 3


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of_data(
    jacobian: NetworkJacobian, data: FixedOrderData, shard: Shard | None, num_outputs: int, chunk_bytes: int
) -> Iterator[tuple[slice, Rows]]:
    """The rows of J of this process's data, in parts that fit in `chunk_bytes`: one sweep."""
    for batch, x, _ in data.sweep(shard):
        start = batch.start
        for rows in jacobian.rows_in_parts(x, batch.stop - start, None, num_outputs, chunk_bytes):
            stop = start + len(rows.outputs)
            yield slice(start, stop), rows
            start = stop


# --- the diagonal of JᵀWJ ---------------------------------------------------------------------------------------------


def curvature_diagonal(
    jacobian: NetworkJacobian,
    data: FixedOrderData,
    curvature: CurvatureAt,
    plan: TracePlan,
    *,
    chunk_bytes: int,
    seed: int = 0,
) -> Tensor:  # (P,)
    """Compute the diagonal of JᵀWJ, exact or an unbiased estimate of it.

    Args:
        jacobian: the network's.
        data: the training data.
        curvature: W at the outputs of the network.
        plan: how it is had.
        chunk_bytes: memory for rows of J.
        seed: of the data and directions from which it is estimated.

    Returns:
        One number for each weight, the same in all processes.
    """
    num_data, C = curvature.shape
    total = torch.zeros(jacobian.num_params, dtype=torch.float64, device=jacobian.device)
    if plan.is_exact:
        with torch.no_grad():
            for part, rows in rows_of_data(jacobian, data, data.shard(), C, chunk_bytes):
                total += rows.curvature_diagonal(partial(curvature, part))
        return all_sum(total)
    traces = curvature.traces()
    if plan.num_rows:
        weights = traces.clamp_min(1e-300)
        drawn = _draw(weights, plan.num_rows, 2 * seed)
        counts = torch.bincount(drawn, minlength=num_data) / (plan.num_rows * weights / weights.sum())
        sample = drawn.unique()
        mine, at_once = Shard.even(len(sample)).take(sample), max(1, chunk_bytes // jacobian.bytes_per_row(C))

        def counted(part: Tensor, block: Tensor) -> Tensor:
            return counts[part][:, None, None] * curvature(part, block)

        with torch.no_grad():
            for some, x in data.pick(mine, num_data, at_once):
                total += jacobian.rows(x, len(some)).curvature_diagonal(partial(counted, some))
        return all_sum(total)
    return _of_probes(jacobian, data, curvature, traces, plan.num_probes, seed, total)


def _of_probes(
    jacobian: NetworkJacobian,
    data: FixedOrderData,
    curvature: CurvatureAt,
    traces: Tensor,
    number: int,
    seed: int,
    total: Tensor,
) -> Tensor:  # (P,)
    """Backward passes at single data, the same whatever the number of processes."""
    num_data, C = curvature.shape
    drawn = _draw(traces.clamp_min(1e-300), number, 2 * seed).sort().values
    uniform = _uniform(number, 2 * seed + 1).to(total.device)
    shard, eye = Shard.even(number), torch.eye(C, dtype=torch.float64, device=total.device)
    picked = data.pick(shard.take(drawn), num_data, 1)
    for (datum, x), chance in zip(picked, shard.take(uniform), strict=True):
        root = curvature.root(datum, eye[None])[0]  # (C, C)
        sizes = root.square().sum(0).cumsum(0)
        column = root[:, int(torch.searchsorted(sizes, chance * sizes[-1]).clamp_max(C - 1))]
        cotangent = column / column.norm().clamp_min(1e-300)
        total += jacobian.vjp(x, cotangent[None, :, None].to(jacobian.dtype))[:, 0].double().square()
    return all_sum(total) * traces.sum() / number


def _draw(weights: Tensor, size: int, seed: int) -> Tensor:  # (N,) -> (size,)
    """Data, each with probability in proportion to its weight."""
    sums = weights.cumsum(0)
    chosen = torch.searchsorted(sums / sums[-1], _uniform(size, seed).to(weights.device))
    return chosen.clamp_max(len(weights) - 1)


def _uniform(size: int, seed: int) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

"""The rows of the Jacobian for one parameter tensor, J (b, C, P_l), and the columns that they are multiplied by.

J is never there as a whole for a product.

The derivative of output c with respect to the weights of a linear or convolutional layer is a sum over the T places
where the layer is applied, of what went in there (K numbers) times the derivative by what came out (O numbers):

    J[c, o, k] = Σ_t g[c, o, t] u[k, t]

A product with columns V may write out J, some weights at a time, or pass V through the layer first, some columns at a
time, since Σ_k u[k, t] V[o, k] does not depend on the output c. J Jᵀ may be had from J, or place by place, from
Σ_ts g[c, o, t] (Σ_k u[k, t] u[k, s]) g[d, o, s]. Which takes least is counted (`_plan`): of a linear layer that each
datum passes once J is never written out, of a convolution at many places it is for few outputs.

The columns are V = diag(s) A. A is the largest thing a posterior holds. So it is there once, as it is stored: the prior
variances s, and the dtype that products are taken in, come to a slice of it when that is needed (`WeightColumns`).

Of a convolution at few places many weights see nothing but padding: where a 3×3 kernel meets a single pixel eight of
nine are never moved, and their rows of A are zero. They are left out of products (`without_zeros`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

FEW_ROWS = 32  # up to which a product takes its time for reading the columns
DENSE = 0.5  # the fraction of a layer's inputs that some action moves, from which on all are multiplied
MANY_PLACES = 128  # of a convolution, from which on its derivatives are those of another one
SLICE_NUMBERS = 2**22  # of J, of V, or of what is passed through a layer, at once: they stay in the cache
SUMMED_NUMBERS = 2**18  # of J at once, where a product with it is needed only to be summed
STORE = 16  # what it takes to write a number and to read it again, in multiplications


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
        size = len(self.matrix) if at_once else 1 + SLICE_NUMBERS // max(1, self.number)
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

    def summed(self, num_outputs: int) -> Tensor:  # (K, k)
        """Over the outputs of the layer."""
        columns = (self.columns(slice(i, i + 1), num_outputs)[0] for i in range(self.number))
        return torch.stack([column.sum(0) for column in columns], 1)  # in float64 it takes twenty times as long

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


def diagonal(jacobian: Tensor, weight: Tensor) -> Tensor:  # (b, C, P), (b, C, C) -> (P,)
    """The diagonal of Σ_n J_nᵀ W_n J_n, a slice of weights at a time."""
    b, C, _ = jacobian.shape
    parts = jacobian.split(1 + SUMMED_NUMBERS // max(1, b * C), 2)
    return torch.cat([((weight @ part) * part).sum((0, 1)) for part in parts])


class Block(ABC):
    """The rows of one parameter tensor."""

    @property
    @abstractmethod
    def matrix(self) -> Tensor:  # (b, C, P_l)
        """The rows, written out."""

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype) -> Block:
        """The same rows in another dtype."""

    @abstractmethod
    def slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of some weights after the others, (b, C, p)."""

    @property
    @abstractmethod
    def num_held(self) -> int:
        """How many numbers it consists of."""

    @property
    def num_needed(self) -> int:
        """How many more its products need for a time, beside slices."""
        return 0

    @abstractmethod
    def pull_back(self, cotangent: Tensor) -> Tensor:  # (b, C) -> (P_l,)
        """Jᵀc."""

    @abstractmethod
    def curvature_diagonal(self, weight: Tensor) -> Tensor:  # (b, C, C) -> (P_l,)
        """The diagonal of Σ_n J_nᵀ W_n J_n."""

    def times(self, columns: LayerColumns) -> Tensor:  # (b, C, k)
        """J V."""
        return _sum(columns.moved_by(rows, part) for part, rows in self.slices())

    def covariance(self, variance: Tensor, *, joint: bool) -> Tensor:  # (1,) or (P_l,)
        """J diag(variance) Jᵀ of each datum (b, C, C), or of all together (b·C, b·C)."""
        return _sum(_squared(rows, variance, part, joint) for part, rows in self.slices())

    def products(self, columns: LayerColumns, variance: Tensor, *, joint: bool) -> tuple[Tensor, Tensor]:
        """Both, from rows that are written out once."""
        cross = covariance = torch.zeros(())
        for part, rows in self.slices():
            cross = cross.to(rows) + columns.moved_by(rows, part)
            covariance = covariance.to(rows) + _squared(rows, variance, part, joint)
        return cross, covariance


def _sum(parts: Iterator[Tensor]) -> Tensor:
    total = next(parts)
    for part in parts:
        total += part
    return total


def _squared(rows: Tensor, variance: Tensor, part: slice, joint: bool) -> Tensor:  # (b, C, p)
    if variance.numel() > 1:
        rows = rows * variance[part].sqrt().to(rows.dtype)
    rows = rows.flatten(0, 1) if joint else rows
    product: Tensor = rows @ rows.mT
    return product if variance.numel() > 1 else product * variance.to(rows.dtype)


class WrittenOut(Block):
    """A block that is held as the matrix of its rows."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @property
    def matrix(self) -> Tensor:
        return self._matrix

    @property
    def num_held(self) -> int:
        return self._matrix.numel()

    def in_dtype(self, dtype: torch.dtype) -> Block:
        return WrittenOut(self._matrix.to(dtype))

    def slices(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self._matrix.shape[2]), self._matrix

    def pull_back(self, cotangent: Tensor) -> Tensor:
        return cotangent.flatten() @ self._matrix.flatten(0, 1)

    def curvature_diagonal(self, weight: Tensor) -> Tensor:
        return diagonal(self._matrix, weight)


class Contraction(Block):
    """Σ_t g u: the weights of a layer that is applied at T places, such as a convolution."""

    def __init__(self, cotangents: Tensor, inputs: Callable[[], Tensor], num_inputs: int) -> None:
        self.cotangents, self.inputs = cotangents, inputs  # g (b, C, O, T), u (b, K, T)
        self.num_inputs = num_inputs  # K

    @property
    def matrix(self) -> Tensor:
        b, C = self.cotangents.shape[:2]
        return (self.cotangents.flatten(1, 2) @ self.inputs().mT).view(b, C, -1)

    @property
    def num_held(self) -> int:
        return self.cotangents.numel()

    @property
    def num_needed(self) -> int:
        b, _, _, T = self.cotangents.shape
        return b * self.num_inputs * T  # u

    def in_dtype(self, dtype: torch.dtype) -> Block:
        return Contraction(self.cotangents.to(dtype), lambda: self.inputs().to(dtype), self.num_inputs)

    def slices(self, inputs: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        b, C, channels, _ = self.cotangents.shape
        u = self.inputs().mT if inputs is None else inputs.mT  # (b, T, K)
        for some in _in_slices(channels, b * C * u.shape[2]):
            rows = self.cotangents[:, :, some].flatten(1, 2) @ u
            yield slice(some.start * u.shape[2], some.stop * u.shape[2]), rows.view(b, C, -1)

    def times(self, columns: LayerColumns) -> Tensor:
        b, C, channels, T = self.cotangents.shape
        if not columns.number:
            return self.cotangents.new_zeros(b, C, 0)
        found = columns.without_zeros(channels)
        u = None if found.inputs is None else self.inputs()[:, found.inputs]
        if not self._plan(columns.number)[0]:
            return _sum(found.moved_by(rows, part) for part, rows in self.slices(u))
        u = self.inputs() if u is None else u
        places, g = u.mT.flatten(0, 1), self.cotangents.mT.flatten(2).mT  # (b·T, K), (b, T·O, C)
        parts = []
        for some in _in_slices(columns.number, channels * max(b * T, u.shape[1])):
            passed = product(places, found.columns(some, channels).flatten(0, 1))  # (b·T, z·O)
            by_column = passed.view(b, T, -1, channels).transpose(1, 2).reshape(b, -1, T * channels)
            parts.append((by_column @ g).mT)
        return torch.cat(parts, 2)

    def covariance(self, variance: Tensor, *, joint: bool) -> Tensor:
        if joint or variance.numel() > 1 or not self._plan(0)[1]:
            return super().covariance(variance, joint=joint)
        u = self.inputs()
        combined = self.cotangents.flatten(1, 2) @ (u.mT @ u)  # (b, C·O, T)
        found: Tensor = combined.view_as(self.cotangents).flatten(2) @ self.cotangents.flatten(2).mT
        return found * variance.to(self.cotangents.dtype)

    def products(self, columns: LayerColumns, variance: Tensor, *, joint: bool) -> tuple[Tensor, Tensor]:
        is_passed, by_places = self._plan(columns.number)
        if is_passed or (by_places and not joint and variance.numel() == 1):
            return self.times(columns), self.covariance(variance, joint=joint)
        return super().products(columns, variance, joint=joint)

    def pull_back(self, cotangent: Tensor) -> Tensor:
        combined = torch.einsum("bc,bcot->bot", cotangent, self.cotangents)
        return (combined @ self.inputs().mT).sum(0).flatten()

    def curvature_diagonal(self, weight: Tensor) -> Tensor:
        if self.cotangents.shape[3] > 1:
            return torch.cat([diagonal(rows, weight) for _, rows in self.slices()])
        pulled = ((weight @ self.cotangents[..., 0]) * self.cotangents[..., 0]).sum(1)  # (b, O)
        return (pulled.T @ self.inputs()[..., 0].square()).flatten()

    def _plan(self, number: int) -> tuple[bool, bool]:
        """Whether so many columns are passed through the layer, and whether J Jᵀ is had by places: what takes least."""
        _, C, channels, T = self.cotangents.shape
        K = self.num_inputs
        size, again = channels * K, C * channels * K * (T + STORE)  # rows that are written out for J Jᵀ alone
        written, passed = again + C * size * number, T * size * number + (C + STORE) * channels * T * number
        by_places, from_rows = T * T * (K + C * channels) + C * C * channels * T, C * C * size
        each = {
            (False, False): written + from_rows,
            (False, True): written + by_places,
            (True, False): passed + again + from_rows,
            (True, True): passed + by_places,
        }
        return min(each, key=lambda plan: each[plan])


def _in_slices(number: int, each: int) -> Iterator[slice]:
    """So many things in slices of at most `SLICE_NUMBERS` numbers, and at least one thing."""
    size = max(1, SLICE_NUMBERS // max(1, each))
    return (slice(start, min(start + size, number)) for start in range(0, number, size))


class Outer(Contraction):
    """g ⊗ u: the weight matrix of a linear layer that each datum passes once. Never written out for a product."""

    def __init__(self, cotangents: Tensor, inputs: Tensor) -> None:  # g (b, C, O, 1), u (b, K)
        super().__init__(cotangents, lambda: inputs[..., None], inputs.shape[1])


class Convolution(Contraction):
    """Σ_t g u of a convolution at many places.

    It is the derivative by the weights of a convolution with a group for each datum. On a CPU it takes an eighth of the
    time of patches and their products where a ResNet-20 begins.
    """

    def __init__(self, cotangents: Tensor, layer: nn.Conv2d, inputs: Tensor, out: torch.Size) -> None:
        super().__init__(cotangents, partial(patches, layer, inputs), layer.weight[0].numel())
        self._layer, self._images, self._out = layer, inputs, out  # u (b, I, H, W); the size of g's image

    @staticmethod
    def pays(inputs: Tensor, num_places: int) -> bool:
        """Whether it is faster than patches."""
        return inputs.device.type == "cpu" and inputs.dtype == torch.float32 and num_places >= MANY_PLACES

    @property
    def matrix(self) -> Tensor:
        return self._rows(slice(None))

    def _rows(self, some: slice) -> Tensor:  # (b, C, p)
        cotangents, layer = self.cotangents[:, :, some], self._layer
        b, C, channels, _ = cotangents.shape
        rows: Tensor = conv2d_weight(
            self._images.reshape(1, -1, *self._images.shape[2:]),
            torch.Size((b * C * channels, *layer.weight.shape[1:])),
            cotangents.reshape(1, -1, *self._out),
            layer.stride,
            layer.padding,
            layer.dilation,
            b,
        )
        return rows.view(b, C, -1)

    @property
    def num_needed(self) -> int:
        return 0

    def in_dtype(self, dtype: torch.dtype) -> Block:
        return self if dtype == self.cotangents.dtype else super().in_dtype(dtype)

    def slices(self, inputs: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        if inputs is not None:
            yield from super().slices(inputs)
            return
        b, C, channels, _ = self.cotangents.shape
        for some in _in_slices(channels, b * C * self.num_inputs):
            yield slice(some.start * self.num_inputs, some.stop * self.num_inputs), self._rows(some)


class Lookup(Block):
    """Σ_t g e_v(t)ᵀ: the weights of an embedding, of which each datum reads T rows. Never written out for a product.

    h_t = Σ_s [v(s) = v(t)] g_s is the derivative by the row that place t reads, so J Jᵀ = Σ_t g_t h_tᵀ.
    """

    def __init__(self, cotangents: Tensor, rows: Tensor, num_rows: int) -> None:
        self.cotangents, self.rows, self.num_rows = cotangents, rows, num_rows  # g (b, C, T, D), v (b, T), V

    @property
    def matrix(self) -> Tensor:
        b, C, _, D = self.cotangents.shape
        written = self.cotangents.new_zeros(b, C, self.num_rows, D)
        places = self.rows[:, None, :, None].expand_as(self.cotangents)
        return written.scatter_add_(2, places, self.cotangents).flatten(2)

    @property
    def num_held(self) -> int:
        return self.cotangents.numel()

    def in_dtype(self, dtype: torch.dtype) -> Block:
        return Lookup(self.cotangents.to(dtype), self.rows, self.num_rows)

    def slices(self) -> Iterator[tuple[slice, Tensor]]:
        matrix = self.matrix
        yield slice(0, matrix.shape[2]), matrix

    def times(self, columns: LayerColumns) -> Tensor:
        found: Tensor = self.cotangents.flatten(2) @ columns.read(self.rows, self.num_rows).flatten(1, 2)
        return found

    def covariance(self, variance: Tensor, *, joint: bool) -> Tensor:
        if joint or variance.numel() > 1:
            return super().covariance(variance, joint=joint)
        found: Tensor = self.cotangents.flatten(2) @ self._per_row().flatten(2).mT
        return found * variance.to(found.dtype)

    def products(self, columns: LayerColumns, variance: Tensor, *, joint: bool) -> tuple[Tensor, Tensor]:
        return self.times(columns), self.covariance(variance, joint=joint)

    def pull_back(self, cotangent: Tensor) -> Tensor:
        combined = torch.einsum("bc,bctd->btd", cotangent, self.cotangents).flatten(0, 1)
        return (
            combined.new_zeros(self.num_rows, combined.shape[1]).index_add_(0, self.rows.flatten(), combined).flatten()
        )

    def curvature_diagonal(self, weight: Tensor) -> Tensor:
        h = self._per_row()
        return self._summed((torch.einsum("bce,betd->bctd", weight, h) * self.cotangents).sum(1))

    def _summed(self, each: Tensor) -> Tensor:  # (b, T, D) -> (P_l,)
        table = each.new_zeros(self.num_rows, each.shape[2])
        return table.index_add_(0, self.rows.flatten(), each.flatten(0, 1)).flatten()

    def _per_row(self) -> Tensor:  # h (b, C, T, D)
        same = (self.rows[:, :, None] == self.rows[:, None]).to(self.cotangents)  # (b, T, T)
        return same[:, None] @ self.cotangents


class Transposed(Block):
    """The rows of a weight matrix (K, O) that is stored as the transpose of a linear layer's."""

    def __init__(self, block: Block, shape: tuple[int, int]) -> None:
        self.block, self.shape = block, shape  # of (O, K), and (K, O)

    @property
    def matrix(self) -> Tensor:
        matrix: Tensor = self.block.matrix.unflatten(2, self.shape[::-1])
        return matrix.mT.flatten(2)

    @property
    def num_held(self) -> int:
        return self.block.num_held

    @property
    def num_needed(self) -> int:
        return self.block.num_needed

    def in_dtype(self, dtype: torch.dtype) -> Block:
        return Transposed(self.block.in_dtype(dtype), self.shape)

    def slices(self) -> Iterator[tuple[slice, Tensor]]:
        matrix = self.matrix
        yield slice(0, matrix.shape[2]), matrix

    def times(self, columns: LayerColumns) -> Tensor:
        return self.block.times(columns.transposed(self.shape))

    def covariance(self, variance: Tensor, *, joint: bool) -> Tensor:
        return self.block.covariance(self._as_inside(variance), joint=joint)

    def products(self, columns: LayerColumns, variance: Tensor, *, joint: bool) -> tuple[Tensor, Tensor]:
        return self.block.products(columns.transposed(self.shape), self._as_inside(variance), joint=joint)

    def _as_inside(self, variance: Tensor) -> Tensor:  # (1,) or (P_l,)
        return variance if variance.numel() == 1 else variance.unflatten(0, self.shape).T.flatten()

    def pull_back(self, cotangent: Tensor) -> Tensor:
        return self._transposed(self.block.pull_back(cotangent))

    def curvature_diagonal(self, weight: Tensor) -> Tensor:
        return self._transposed(self.block.curvature_diagonal(weight))

    def _transposed(self, vector: Tensor) -> Tensor:  # (P_l,)
        matrix: Tensor = vector.unflatten(0, self.shape[::-1])
        return matrix.T.flatten()


def patches(layer: nn.Conv2d, inputs: Tensor) -> Tensor:  # (b, I, H, W) -> (b, K, T)
    """What a convolution sees at each place. As `unfold`, which takes eight times as long on a CPU."""
    assert not isinstance(layer.padding, str)
    (up, left), (down, right), (dy, dx), (h, w) = layer.padding, layer.stride, layer.dilation, layer.kernel_size
    padded = F.pad(inputs, (left, left, up, up))
    b, channels, height, width = padded.shape
    places = (height - dy * (h - 1) - 1) // down + 1, (width - dx * (w - 1) - 1) // right + 1
    datum, channel, row, column = padded.stride()
    strides = datum, channel, row * dy, column * dx, row * down, column * right
    return padded.as_strided((b, channels, h, w, *places), strides).reshape(b, channels * h * w, -1)

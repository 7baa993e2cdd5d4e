"""Tall matrices: how actions S and their images T = K S are stored.

Both have n = N·C rows (class index fastest) and B columns. The solver needs very little from them: combinations of
columns (S a), inner products (SᵀV), and inner products through a block-diagonal weight (SᵀW⁺S, TᵀWT). Two formats:

`DenseColumns`      any matrix; the columns lie contiguously in storage that is grown in place.
`KroneckerColumns`  S = U ⊗ H with U (N, r) and H (C, q): with one kernel for all outputs, r columns of k(X, X) U are
                    the images of r·q actions, and only the N×r factor is ever stored.

Columns may be float32; everything summed over rows is summed in float64, a slice of rows at a time.

Of several processes each stores the rows of its own data (`shard`). Vectors and blocks that go in and come out, and
sums over rows, are whole in all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_iterncgp.runtime.parallel import Shard

SLICE_BYTES = 2**20  # a float64 slice of rows: large enough for a GEMM, small enough to stay in cache
NARROW = 16  # columns that are this many times fewer may be held in float64 beside the others

Weight = Callable[[slice | Tensor, Tensor], Tensor]
"""Block-diagonal product on some data: (a slice or numbers of data, block (rows, C, k)) -> (rows, C, k)."""


class Images(ABC):
    """What a prior makes of actions: something with B columns that can be extended and recombined."""

    size: int
    dtype: torch.dtype

    @abstractmethod
    def append(self, other: Images) -> Images:
        """[T, T'], both of the same format."""

    @abstractmethod
    def rotate(self, coefficients: Tensor) -> Images:  # (r, R)
        """The stored columns times Q, as new columns."""


class Columns(Images):
    """A matrix with `num_data · num_outputs` rows and `size` columns. Never changed once made."""

    def __init__(self, shard: Shard, num_outputs: int, size: int, like: Tensor) -> None:
        self.shard, self.num_data = shard, shard.num_rows
        self.num_outputs, self.size = num_outputs, size
        self.dtype, self.device = like.dtype, like.device

    @property
    @abstractmethod
    def factor(self) -> DenseColumns:
        """What is stored and rotated: the columns themselves, or U of U ⊗ H."""

    @property
    def num_contrasts(self) -> int:
        """How many columns each stored column stands for: q of U ⊗ H."""
        return self.size // self.factor.size if self.factor.size else 1

    @abstractmethod
    def combine(self, coefficients: Tensor) -> Tensor:  # (B, k) -> (n, k)
        """S a, in float64."""

    @abstractmethod
    def inner(self, block: Tensor) -> Tensor:  # (n, k) -> (B, k)
        """SᵀV, in float64."""

    @abstractmethod
    def gram(self, other: Columns) -> Tensor:  # (B, B')
        """SᵀT for two matrices of the same format, in float64."""

    @abstractmethod
    def rows(self, data: slice) -> Tensor:  # (rows, C, B)
        """The rows of some data of this process, written out in float64."""

    def rows_of(self, data: Tensor) -> Tensor:  # (rows,) -> (rows, C, B)
        """The rows of any data, given by their numbers, in every process."""
        mine, first = self.shard.mine, self.shard.mine.start
        found = torch.zeros(len(data), self.num_outputs, self.size, dtype=torch.float64, device=self.device)
        for place, number in enumerate(data.tolist()):
            if first <= number < mine.stop:
                found[place] = self.rows(slice(number, number + 1))[0]
        return self.shard.sum(found)

    @abstractmethod
    def whole(self) -> Columns:
        """The same matrix with all of its rows in every process."""

    @abstractmethod
    def append(self, other: Images) -> Columns: ...

    @abstractmethod
    def rotate(self, coefficients: Tensor) -> Columns: ...

    @abstractmethod
    def orthonormalise(
        self, block: Tensor, project: Callable[[Tensor], Tensor], metric: Tensor | None = None
    ) -> Columns:  # (n, k)
        """The part of a block that is new: orthonormal columns, orthogonal to these; dependent ones are dropped.

        `project` is the projection onto the range of the curvature (zero sum over the classes, for softmax), of rows of
        this process. With a `metric`, a diagonal (n, 1) of these rows, orthonormal is SᵀDS = I.
        """

    @property
    def tolerance(self) -> float:
        """A column of which less than this fraction is left after orthogonalisation is dropped as dependent."""
        return 1e-8 if self.dtype == torch.float64 else 1e-4

    def slices(self, num_columns: int | None = None) -> Iterator[slice]:
        """Slices of this process's data whose rows, in float64, fill about `SLICE_BYTES`."""
        width = max(1, self.size if num_columns is None else num_columns)
        step = max(1, SLICE_BYTES // (8 * self.num_outputs * width))
        for start in range(self.shard.mine.start, self.shard.mine.stop, step):
            yield slice(start, min(start + step, self.shard.mine.stop))

    @abstractmethod
    def diagonal_inner(self, diagonal: Tensor, other: Columns) -> Tensor:  # (N, C) -> (B, B')
        """Sᵀ diag(d) S', in float64."""

    def weighted_inner(self, weight: Weight, other: Columns) -> Tensor:  # (B, B')
        """Sᵀ D S' for a block-diagonal D, in float64, without a second tall matrix."""
        total = torch.zeros(self.size, other.size, dtype=torch.float64, device=self.device)
        for data in self.slices(max(self.size, other.size)):
            right = other.rows(data)
            left = right if other is self else self.rows(data)
            total += left.flatten(0, 1).T @ weight(data, right).flatten(0, 1)
        return self.shard.sum(total)


class DenseColumns(Columns):
    """Columns written out; `storage` (capacity, n) holds one column per row so that a new one is a contiguous write.

    Without a `shard` the matrix is whole in every process.
    """

    def __init__(self, storage: Tensor, size: int, num_outputs: int, shard: Shard | None = None) -> None:
        super().__init__(shard or Shard.whole(storage.shape[1] // num_outputs), num_outputs, size, storage)
        self.storage = storage  # (capacity, n)

    @property
    def factor(self) -> DenseColumns:
        return self

    @classmethod
    def empty(
        cls, shard: Shard, num_outputs: int, *, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> DenseColumns:
        """No columns, with room for `capacity` of them."""
        return cls(torch.empty(capacity, shard.size * num_outputs, dtype=dtype, device=device), 0, num_outputs, shard)

    @classmethod
    def of(cls, block: Tensor, num_outputs: int, shard: Shard | None = None) -> DenseColumns:  # (n, k)
        """From the rows of this process."""
        return cls(block.T.contiguous(), block.shape[1], num_outputs, shard)

    @property
    def matrix(self) -> Tensor:  # (n, B)
        """The rows of this process."""
        return self.storage[: self.size].T

    def whole(self) -> DenseColumns:
        if self.shard.is_whole:
            return self
        return DenseColumns.of(self.shard.gather(self.matrix, self.num_outputs), self.num_outputs)

    def combine(self, coefficients: Tensor) -> Tensor:
        return self.shard.gather(self.matrix @ coefficients.to(self.dtype), self.num_outputs).double()

    def inner(self, block: Tensor) -> Tensor:
        return self._inner(self.shard.take(block))

    def _inner(self, block: Tensor) -> Tensor:
        """SᵀV, given the rows of this process."""
        if self.dtype == torch.float64:
            return self.shard.sum(self.matrix.T @ block.double())
        total = torch.zeros(self.size, block.shape[1], dtype=torch.float64, device=self.device)
        for data in self.slices():
            rows = self._stored(data)
            total += self.storage[: self.size, rows].double() @ block[rows].double()
        return self.shard.sum(total)

    def gram(self, other: Columns) -> Tensor:
        assert isinstance(other, DenseColumns)
        if self.dtype == torch.float64:
            return self.shard.sum(self.matrix.T @ other.matrix)
        return self.weighted_inner(lambda data, block: block, other)

    def diagonal_inner(self, diagonal: Tensor, other: Columns) -> Tensor:
        return self.weighted_inner(lambda data, block: diagonal[data, :, None] * block, other)

    def weighted_inner(self, weight: Weight, other: Columns) -> Tensor:
        if other.size > max(1, self.size // NARROW):
            return super().weighted_inner(weight, other)
        mine = self.shard.mine  # the few columns of one new block, weighted as a whole
        return self._inner(weight(mine, other.rows(mine)).flatten(0, 1))

    def rows(self, data: slice) -> Tensor:
        part = self.storage[: self.size, self._stored(data)]
        rows: Tensor = part.T.unflatten(0, (data.stop - data.start, self.num_outputs)).double()
        return rows

    def _stored(self, data: slice) -> slice:
        """Where the rows of some data of this process are."""
        first, C = self.shard.mine.start, self.num_outputs
        return slice((data.start - first) * C, (data.stop - first) * C)

    def append(self, other: Images) -> DenseColumns:
        """Writes behind the used columns where there is room.

        Earlier views see only their own columns. Two extensions of the *same* view would share room: the solver
        extends each state once, and drops a state it does not continue.
        """
        assert isinstance(other, DenseColumns)
        size, storage = self.size + other.size, self.storage
        if size > storage.shape[0]:
            storage = storage.new_empty(max(size, int(1.5 * self.size)), storage.shape[1])
            storage[: self.size] = self.storage[: self.size]
        storage[self.size : size] = other.storage[: other.size]
        return DenseColumns(storage, size, self.num_outputs, self.shard)

    def rotate(self, coefficients: Tensor) -> DenseColumns:
        rotated = coefficients.T.to(self.dtype) @ self.storage[: self.size]
        return DenseColumns(rotated, rotated.shape[0], self.num_outputs, self.shard)

    def orthonormalise(
        self, block: Tensor, project: Callable[[Tensor], Tensor], metric: Tensor | None = None
    ) -> DenseColumns:
        every = self.shard.take(block)
        inside = project(every)
        if metric is None:  # or else the smallest part is known to its own rounding
            inside = inside[:, self.shard.norm(inside) > self.tolerance * self.shard.norm(every)]
        new = orthonormalised(inside, self.matrix, self.tolerance, self.shard, metric)
        new = project(new)  # once more: rounding is no longer small after scaling
        new = new[:, norm(new, self.shard, metric) > 0.5]  # what was rounding alone may have left the range
        return DenseColumns.of(new, self.num_outputs, self.shard)


class KroneckerColumns(Columns):
    """U ⊗ H: column (i, j) is U[:, i] for the data times H[:, j] for the outputs; HᵀH = I."""

    def __init__(self, factor: DenseColumns, contrasts: Tensor) -> None:
        num_outputs, num_contrasts = contrasts.shape
        super().__init__(factor.shard, num_outputs, factor.size * num_contrasts, factor.storage)
        self._factor = factor  # (N, r)
        self.contrasts = contrasts  # (C, q), float64

    @property
    def factor(self) -> DenseColumns:
        return self._factor

    def whole(self) -> KroneckerColumns:
        return KroneckerColumns(self.factor.whole(), self.contrasts)

    def combine(self, coefficients: Tensor) -> Tensor:
        r, q, k = self.factor.size, self.contrasts.shape[1], coefficients.shape[1]
        data = self.factor.combine(coefficients.reshape(r, q * k)).reshape(self.num_data, q, k)
        return torch.einsum("cq,nqk->nck", self.contrasts, data).flatten(0, 1)

    def inner(self, block: Tensor) -> Tensor:
        k = block.shape[1]
        blocks = block.double().unflatten(0, (self.num_data, self.num_outputs))
        contrast = torch.einsum("cq,nck->nqk", self.contrasts, blocks)
        return self.factor.inner(contrast.flatten(1)).reshape(self.size, k)

    def gram(self, other: Columns) -> Tensor:
        assert isinstance(other, KroneckerColumns)
        return torch.kron(self.factor.gram(other.factor), self.contrasts.T @ other.contrasts)

    def rows(self, data: slice) -> Tensor:
        return torch.einsum("ni,cj->ncij", self.factor.rows(data).squeeze(1), self.contrasts).flatten(2)

    def diagonal_inner(self, diagonal: Tensor, other: Columns) -> Tensor:
        """Σ_c (Uᵀ diag(d_c) U') ⊗ (h_c h_cᵀ), h_c the rows of H: C products of N×r matrices instead of N·C×B ones."""
        assert isinstance(other, KroneckerColumns)
        shape = (self.num_outputs, self.factor.size, other.factor.size)
        grams = torch.zeros(shape, dtype=torch.float64, device=self.device)
        for data in self.slices(max(self.factor.size, other.factor.size)):
            left, right = self.factor.rows(data).squeeze(1), other.factor.rows(data).squeeze(1)
            for c in range(self.num_outputs):
                grams[c] += left.T @ (diagonal[data, c, None] * right)
        total = torch.einsum("crs,cj,ck->rjsk", self.shard.sum(grams), self.contrasts, other.contrasts)
        return total.reshape(self.size, other.size)

    def weighted_inner(self, weight: Weight, other: Columns) -> Tensor:
        """Σ_n (u_n u'_nᵀ) ⊗ (Hᵀ D_n H): the C×C blocks of D meet the contrasts once, not once per column of U."""
        assert isinstance(other, KroneckerColumns)
        q, r = self.contrasts.shape[1], other.factor.size
        total = torch.zeros(q, self.factor.size, r * q, dtype=torch.float64, device=self.device)
        for data in self.slices(max(1, r)):
            left, right = self.factor.rows(data).squeeze(1), other.factor.rows(data).squeeze(1)  # (rows, r), (rows, r')
            block = self.contrasts.T @ weight(data, other.contrasts.expand(len(left), -1, -1))  # (rows, q, q)
            for j in range(q):
                total[j] += left.T @ (right[:, :, None] * block[:, j, None, :]).flatten(1)
        return self.shard.sum(total).transpose(0, 1).reshape(self.size, other.size)

    def append(self, other: Images) -> KroneckerColumns:
        assert isinstance(other, KroneckerColumns)
        return KroneckerColumns(self.factor.append(other.factor), self.contrasts)

    def rotate(self, coefficients: Tensor) -> KroneckerColumns:  # (r, r'): rotates U, and with it U ⊗ H
        return KroneckerColumns(self.factor.rotate(coefficients), self.contrasts)

    def orthonormalise(
        self, block: Tensor, project: Callable[[Tensor], Tensor], metric: Tensor | None = None
    ) -> KroneckerColumns:
        assert metric is None, "a metric of the outputs does not leave U ⊗ H what it is"
        per_output = block.reshape(self.num_data, -1)  # (N, C·k): each class of each action becomes a column of U
        return KroneckerColumns(self.factor.orthonormalise(per_output, lambda u: u), self.contrasts)  # H projects


@dataclass(frozen=True, eq=False)
class Buffer:
    """The actions taken so far and what the prior made of them."""

    actions: Columns
    images: Images

    @property
    def size(self) -> int:
        """How many columns there are."""
        return self.actions.size

    def append(self, other: Buffer) -> Buffer:
        """Return both, with the columns of `other` after these."""
        return Buffer(self.actions.append(other.actions), self.images.append(other.images))

    def rotate(self, coefficients: Tensor) -> Buffer:  # (r, R)
        """Return actions and images times the coefficients."""
        return Buffer(self.actions.rotate(coefficients), self.images.rotate(coefficients))


# --- Gram–Schmidt -----------------------------------------------------------------------------------------------------


def orthonormalised(
    block: Tensor, basis: Tensor, tolerance: float, shard: Shard, metric: Tensor | None = None
) -> Tensor:  # (n, k), (n, B), metric (n, 1) -> (n, k')
    """The part of a block that is orthogonal to an orthonormal basis, as orthonormal columns.

    A column of which less than `tolerance` is left is dropped. All is done twice: where little is left of a column, its
    rounding is no longer small beside it once it is scaled to unit length.
    """
    norms = norm(block, shard, metric)
    block = (block / torch.where(norms > 0, norms, 1.0)).to(basis.dtype)[:, norms > 0]
    weight = None if metric is None else metric.to(basis.dtype)

    def without(basis: Tensor, block: Tensor) -> Tensor:
        return block - basis @ shard.sum(basis.T @ (block if weight is None else weight * block))

    for _ in range(2):
        block = without(basis, block)
        kept = torch.zeros_like(block)
        keep = torch.zeros(block.shape[1], dtype=torch.bool, device=block.device)
        for j in range(block.shape[1]):  # over actions, never over data
            column = block[:, j : j + 1]
            for _ in range(2):
                column = without(kept[:, :j], column)
            length = norm(column, shard, metric)[0]
            keep[j] = length > tolerance
            kept[:, j] = torch.where(keep[j], column[:, 0] / length, 0.0)
        block = kept[:, keep]
    return block


def norm(block: Tensor, shard: Shard, metric: Tensor | None = None) -> Tensor:  # (n, k) -> (k,)
    """√(sᵀDs) of each column, in float64."""
    return shard.norm(block.double() if metric is None else metric.sqrt() * block)

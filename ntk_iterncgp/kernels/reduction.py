"""Multiply by a kernel matrix without holding it: k(X1, X2) @ V.

`KernelMatrix` stands for the matrix: made once, it chooses how to multiply (`choice`), says why, and does it as often
as asked. `kernel_matmul` is the same for a single product. Every method computes the same formula, that of the kernel,
and all have the same gradient, that of the plain path: tile by tile, never more than a tile held.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from . import keops
from .base import Kernel, check_pair, check_same_kind
from .choice import Choice, choose
from .formula import Formula
from .fused import FusedEngine, missing_compiler, warn_once
from .gemm import GemmEngine
from .tiles import WHOLE, Engine, Part, PlainEngine, dense_product, differentiable_product

CHUNK_BYTES = 64 * 2**20


def kernel_matmul(
    kernel: Kernel,
    X1: Tensor,
    X2: Tensor,
    V: Tensor,
    *,
    method: str = "auto",
    tolerance: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """k(X1, X2) @ V of shape (a, k), for X1 (a, d), X2 (b, d) and V (b, k); settings as for `KernelMatrix`."""
    return KernelMatrix(kernel, X1, X2, method=method, tolerance=tolerance, chunk_bytes=chunk_bytes) @ V


class KernelMatrix:
    """k(X1, X2) for X1 (a, d) and X2 (b, d), to be multiplied by V (b, k) with `@`.

    It stands for the hyperparameters that the kernel has when it is made; make another when they change.

    X2           None: X1, and then the matrix is symmetric and half of it is computed
    method       "auto", "plain", "fused", "gemm", "sparse" or "keops"
    tolerance    what the sparse method may leave out, as a fraction of the kernel's largest value. None: 1e-6 where it
                 was asked for or where the data are float32; 0: nothing but exact zeros
    chunk_bytes  memory for one tile of k(X1, X2) and the temporaries of its formula together. The tile is at least one
                 entry. Under autograd tiles are recomputed in the backward pass, which takes up to twice as much
    part         Part(r, K): the r-th of K matrices whose sum is this one and which take as long as each other. A share
                 of the tiles, not of the rows, so that symmetry still saves half; without gradients
    """

    def __init__(
        self,
        kernel: Kernel,
        X1: Tensor,
        X2: Tensor | None = None,
        *,
        method: str = "auto",
        tolerance: float | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        part: Part = WHOLE,
    ) -> None:
        X2 = X1 if X2 is None or _same(X1, X2) else X2
        check_pair(kernel, X1, X2)
        if chunk_bytes <= 0:
            raise ValueError(f"`chunk_bytes` must be a positive number of bytes; got {chunk_bytes}. Try {CHUNK_BYTES}.")
        self.shape, self.chunk_bytes, self.part = (len(X1), len(X2)), chunk_bytes, part
        self.kernel, points = kernel.simplified(X1) if X2 is X1 else kernel.simplified(X1, X2)
        self.X1, self.X2 = points[0], points[-1]
        self._x1 = self.X1.detach()
        self._x2 = self._x1 if self.X2 is self.X1 else self.X2.detach()
        with torch.no_grad():
            self.choice = choose(self.kernel, self._x1, self._x2, method=method, tolerance=tolerance)
        self._engine: Engine | None = None

    @property
    def method(self) -> str:
        """The method that products use."""
        return self.choice.method

    @property
    def reason(self) -> str:
        """Why this method."""
        return self.choice.reason

    def __repr__(self) -> str:
        return f"KernelMatrix({self.kernel!r}, {self.shape[0]} x {self.shape[1]}, by {self.choice})"

    def __matmul__(self, V: Tensor) -> Tensor:
        _check_columns(V, self.X2)
        trainable = self.kernel.trainable()
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (self.X1, self.X2, V, *trainable))
        if not differentiable or self.part != WHOLE:
            with torch.no_grad():
                return self._product(V.detach())
        if self.method == "plain":
            return differentiable_product(self.kernel, self.X1, self.X2, V, chunk_bytes=self.chunk_bytes)
        result: Tensor = _WithPlainGradient.apply(self, self.X1, self.X2, V, *trainable)
        return result

    def _product(self, V: Tensor) -> Tensor:
        """Outside of autograd, by the method chosen."""
        if 0 in self.shape or V.shape[1] == 0:
            return V.new_zeros(self.shape[0], V.shape[1])
        pattern, symmetric = self.choice.pattern, self._x1 is self._x2
        if self.method == "keops":
            return self._keops_product(V)
        settings: dict[str, Any] = dict(symmetric=symmetric, chunk_bytes=self.chunk_bytes, part=self.part)
        if pattern is None:
            return dense_product(self.engine, self.shape[0], V, **settings)
        if V.device.type == "cuda" and keops.is_installed():
            pattern = pattern.of_rows(self.part)
            return keops.sparse_keops_product(Formula.of(self.kernel), pattern, self._x1, self._x2, V)
        return pattern.product(self.engine, V, **settings)

    def _keops_product(self, V: Tensor) -> Tensor:
        """KeOps has no tiles to divide: a part is some of the rows, and zeros."""
        number, of = self.part
        rows = slice(number * self.shape[0] // of, (number + 1) * self.shape[0] // of)
        product = keops.keops_product(Formula.of(self.kernel), self._x1[rows], self._x2, V)
        return product if self.part == WHOLE else _padded(product, rows, self.shape[0])

    @cached_property
    def rounding_of_points(self) -> float:
        """How far an entry may be off, as a fraction of k(x, x), since points are centred, scaled and rounded.

        No kernel of the distance is steeper than 1. Beyond other rounding only where the data spread over many
        lengthscales.
        """
        if not self.kernel.is_of_distance or 0 in self.shape:
            return 0.0
        geometries = Formula.of(self.kernel).geometries
        spread = max((geometry.spread(self._x1, self._x2) for geometry in geometries), default=0.0)
        return 4 * torch.finfo(self._x1.dtype).eps * spread

    @property
    def left_out(self) -> float:
        """A bound on the spectral norm of what the sparse method leaves out."""
        return 0.0 if self.choice.pattern is None else self.choice.pattern.left_out

    @property
    def uses_compiled_tiles(self) -> bool:
        """Whether the formula has been compiled for the tiles of this matrix."""
        return isinstance(self._engine, FusedEngine)

    @property
    def engine(self) -> Engine:
        """What makes the tiles, for the points as they are sorted; made when first needed."""
        if self._engine is None:
            pattern, x1, x2 = self.choice.pattern, self._x1, self._x2
            if pattern is not None:
                x1 = self._x1[pattern.rows.order]
                x2 = x1 if self._x2 is self._x1 else self._x2[pattern.columns.order]
            if self.method == "gemm":
                self._engine = GemmEngine(self.kernel, x1, x2)
            elif self.method == "fused" or (pattern is not None and x1.device.type == "cpu" and not missing_compiler()):
                self._engine = self._fused_or_plain(x1, x2)
            else:
                self._engine = PlainEngine(self.kernel, x1, x2)
        return self._engine

    def _fused_or_plain(self, x1: Tensor, x2: Tensor) -> Engine:
        """Compiling can fail for reasons that only trying shows; then one warning, and the plain path."""
        try:
            return FusedEngine(self.kernel, x1, x2)
        except Exception as error:
            if self.reason == "as asked" and self.method == "fused":
                raise
            first_line = (str(error).strip().splitlines() or ["no message"])[0]
            warn_once(
                f"torch.compile could not compile a kernel ({type(error).__name__}: {first_line}). "
                "Going on with the slower plain path."
            )
            self.choice = Choice(
                "plain" if self.choice.pattern is None else "sparse",
                f"torch.compile failed with {type(error).__name__}",
                self.choice.pattern,
            )
            return PlainEngine(self.kernel, x1, x2)


class _WithPlainGradient(torch.autograd.Function):
    """A product by any method, with the gradient of the plain one."""

    @staticmethod
    def forward(ctx: Any, matrix: KernelMatrix, X1: Tensor, X2: Tensor, V: Tensor, *trainable: Tensor) -> Tensor:
        ctx.matrix = matrix
        ctx.save_for_backward(X1, X2, V, *trainable)
        result = matrix._product(V.detach())
        matrix._engine = None  # its copies of the points are not needed in the backward pass
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        matrix, create_graph = ctx.matrix, torch.is_grad_enabled()
        with torch.enable_grad():
            X1, X2, V, *trainable = ctx.saved_tensors
            inputs = [X1.view_as(X1), X2.view_as(X2), V, *trainable]  # X1 may be X2: one gradient for each
            wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad[1:], strict=True) if needed]
            product = differentiable_product(matrix.kernel, *inputs[:3], chunk_bytes=matrix.chunk_bytes)
            found = torch.autograd.grad(product, wanted, gradients[0], create_graph=create_graph, allow_unused=True)
        remaining = iter(found)
        return None, *(next(remaining) if needed else None for needed in ctx.needs_input_grad[1:])


def _padded(block: Tensor, rows: slice, num_rows: int) -> Tensor:
    """Rows in their place, among zeros."""
    result = block.new_zeros(num_rows, block.shape[1])
    result[rows] = block
    return result


def _same(X1: Tensor, X2: Tensor) -> bool:
    """Whether two tensors are one and the same, so that k(X1, X2) is symmetric."""
    if X1 is X2:
        return True
    if not (isinstance(X1, Tensor) and isinstance(X2, Tensor)) or X1.requires_grad or X2.requires_grad:
        return False
    alike = X1.shape == X2.shape and X1.stride() == X2.stride() and X1.dtype == X2.dtype and X1.device == X2.device
    return alike and X1.device.type != "meta" and X1.data_ptr() == X2.data_ptr()


def _check_columns(V: Tensor, X2: Tensor) -> None:
    if not isinstance(V, Tensor):
        raise TypeError(f"`V` must be a torch.Tensor; got {type(V).__name__}. Try torch.as_tensor.")
    check_same_kind(X2, "X2", V, "V")
    if V.ndim != 2 or len(V) != len(X2):
        raise ValueError(
            f"`V` must have the shape ({len(X2)}, columns), one row per row of X2; got {tuple(V.shape)}. Try "
            "V[:, None] for a single vector."
        )

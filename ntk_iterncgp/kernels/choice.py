"""Which way to multiply by a kernel matrix: one function chooses, and says why.

plain    eager tiles; every kernel, every device, no compiler. The reference
fused    tiles from compiled loops; a CPU with a C++ compiler, few coordinates
gemm     tiles from a matrix product; many coordinates
sparse   only the tiles that matter, for kernels that are local in the data; on a GPU as KeOps' ranges
keops    one compiled reduction; GPUs, few coordinates
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from . import keops
from .base import Kernel, Product, Scaled, Sum
from .distance import FEW_COORDINATES
from .formula import Formula
from .fused import missing_compiler, warn_once
from .sparse import Pattern

METHODS = ("auto", "plain", "fused", "gemm", "sparse", "keops")
WORTH_COMPILING = 10**8  # pairs: fewer are done on the plain path before a compiler has started
MAX_KEOPS_COORDINATES = 64
MAX_SPARSE_COORDINATES = 8  # beyond, boxes are never far apart
WORTH_SKIPPING = 1 / 3  # the fraction of pairs left below which sorting pays
DEFAULT_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Choice:
    """A method, and the reason for it."""

    method: str
    reason: str
    pattern: Pattern | None = None  # of the sparse method

    def __str__(self) -> str:
        return f"{self.method} ({self.reason})"


def choose(kernel: Kernel, X1: Tensor, X2: Tensor, *, method: str = "auto", tolerance: float | None = None) -> Choice:
    """The method for k(X1, X2) @ V. `tolerance` is that of the sparse method; 0 for exact products only."""
    if method not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(map(repr, METHODS))}; got {method!r}. Try 'auto'.")
    tolerance = checked_tolerance(tolerance)
    if method == "auto":
        return _choose(kernel, X1, X2, tolerance)
    _check_possible(kernel, X1, method)
    pattern = None
    if method == "sparse" and len(X1) and len(X2):
        pattern = Pattern.of(Formula.of(kernel), X1, X2, DEFAULT_TOLERANCE if tolerance is None else tolerance)
    return Choice(method, "as asked", pattern)


def checked_tolerance(tolerance: float | None, name: str = "tolerance") -> float | None:
    """Check what the sparse method may leave out, as a fraction of the largest value."""
    is_number = isinstance(tolerance, Real) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and 0 <= tolerance < 1):
        raise ValueError(f"`{name}` must be a fraction from 0 to below 1; got {tolerance!r}. Try None.")
    return tolerance


def _choose(kernel: Kernel, X1: Tensor, X2: Tensor, tolerance: float | None) -> Choice:
    pairs, d = len(X1) * len(X2), X1.shape[1]
    if not kernel.is_of_distance:
        return Choice("plain", f"{type(_not_of_distance(kernel)).__name__} is not a formula of distances")
    if d == 0 or pairs == 0:
        return Choice("plain", "there is nothing to multiply")
    formula = Formula.of(kernel)
    if not formula.geometries:
        return Choice("plain", f"{kernel!r} depends on no distance")
    d = max(points[0].shape[1] for points in formula.points(X1[:1], X2[:1]))  # those that are active
    sparse = _sparse(kernel, X1, X2, tolerance)
    if sparse is not None:
        return sparse
    if _is_on_gpu(X1) and d <= MAX_KEOPS_COORDINATES and keops.is_installed():
        return Choice("keops", f"a GPU and {d} coordinates")
    if d > FEW_COORDINATES:
        return Choice("gemm", f"distances in {d} coordinates are a matrix product")
    if pairs < WORTH_COMPILING:
        return Choice("plain", f"{_count(pairs)} pairs are too few to be worth compiling")
    if X1.device.type != "cpu":
        return Choice("plain", f"no KeOps for a device of type {X1.device.type!r}")
    missing = missing_compiler()
    if missing:
        warn_once(
            f"Products with large kernel matrices would be several times faster with {missing}. Going on without."
        )
        return Choice("plain", f"torch.compile lacks {missing}")
    return Choice("fused", f"{_count(pairs)} pairs in {d} coordinates are worth compiling the formula once")


def _sparse(kernel: Kernel, X1: Tensor, X2: Tensor, tolerance: float | None) -> Choice | None:
    """The sparse method, where leaving tiles out is allowed and pays."""
    # In float32 an entry of 1e-6 is within the rounding of the product; in float64 only who asks gets less than exact.
    allowed = DEFAULT_TOLERANCE if tolerance is None and X1.dtype == torch.float32 else tolerance
    is_large = len(X1) * len(X2) >= WORTH_COMPILING
    if not (allowed and is_large and kernel.is_decreasing and X1.shape[1] <= MAX_SPARSE_COORDINATES):
        return None
    pattern = Pattern.of(Formula.of(kernel), X1, X2, allowed)
    if pattern.fraction > WORTH_SKIPPING:
        return None
    reason = f"{100 * pattern.fraction:.0f} % of the pairs have a kernel above {allowed:g} of its largest value"
    return Choice("sparse", reason, pattern)


def _not_of_distance(kernel: Kernel) -> Kernel:
    """The part of a kernel because of which it is no formula of distances."""
    if isinstance(kernel, Scaled):
        return _not_of_distance(kernel.kernel)
    parts = kernel.kernels if isinstance(kernel, (Sum, Product)) else ()
    return next((_not_of_distance(part) for part in parts if not part.is_of_distance), kernel)


def _is_on_gpu(X: Tensor) -> bool:
    return X.device.type == "cuda"


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**6 else f"{number / 1e6:,.0f} million"


def _check_possible(kernel: Kernel, X: Tensor, method: str) -> None:
    if method == "plain":
        return
    if not kernel.is_of_distance:
        raise ValueError(
            f"`kernel` must be a formula of distances for method={method!r}; got {kernel!r}. Try method='plain' or "
            "'auto'."
        )
    if not Formula.of(kernel).geometries:
        raise ValueError(
            f"`kernel` must have a distance in it for method={method!r}; got {kernel!r}. Try method='plain' or 'auto'."
        )
    if method == "sparse" and not kernel.is_decreasing:
        raise ValueError(
            f"`kernel` must fall with distance for method='sparse'; got {kernel!r}. Try is_decreasing = True in its "
            "class if it does, or another method."
        )
    if method == "keops" and not keops.is_installed():
        raise ValueError("The package pykeops must be installed for method='keops'; got none. Try pip install pykeops.")
    if method in ("fused", "keops") and X.device.type == "cpu" and missing_compiler():
        raise ValueError(f"method={method!r} must have {missing_compiler()}; got none. Try method='plain' or 'auto'.")

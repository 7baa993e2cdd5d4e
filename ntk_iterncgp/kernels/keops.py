"""Products by KeOps: the formula compiled for a whole reduction, on a GPU above all.

KeOps compiles anew for every number of columns, so that V goes through in blocks of one width (or a single column): two
formulas per kernel, number of coordinates and dtype. It is imported when first used, and keeps its messages to itself.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .formula import Formula
from .sparse import Pattern

WIDTH = 16  # columns of V at once


def is_installed() -> bool:
    """Whether the package pykeops is there; it is not imported."""
    return importlib.util.find_spec("pykeops") is not None


def keops_product(formula: Formula, X1: Tensor, X2: Tensor, V: Tensor) -> Tensor:
    """k(X1, X2) @ V."""
    return _product(formula, X1, X2, V, None)


def sparse_keops_product(formula: Formula, pattern: Pattern, X1: Tensor, X2: Tensor, V: Tensor) -> Tensor:
    """The same over the pairs of leaves that a pattern keeps, as KeOps' `ranges`."""
    with quiet_keops():
        from pykeops.torch.cluster import from_matrix

        bounds = [
            torch.tensor(list(zip(leaves.bounds, leaves.bounds[1:], strict=False)), dtype=torch.int, device=V.device)
            for leaves in (pattern.rows, pattern.columns)
        ]
        ranges = from_matrix(*bounds, pattern.keep)
    rows, columns = pattern.rows.order, pattern.columns.order
    result = torch.empty(len(X1), V.shape[1], dtype=V.dtype, device=V.device)
    result[rows] = _product(formula, X1[rows], X2[columns], V[columns], ranges)
    return result


def _product(formula: Formula, X1: Tensor, X2: Tensor, V: Tensor, ranges: Any) -> Tensor:
    with quiet_keops() as keops:

        def squared(x: Tensor, z: Tensor) -> Any:
            difference = keops.LazyTensor(x[:, None].contiguous()) - keops.LazyTensor(z[None].contiguous())
            return (difference**2).sum(-1)

        distances = [squared(x, z) for x, z in formula.points(X1, X2)]
        numbers = [keops.LazyTensor(number.reshape(1)) for number in formula.numbers_like(X1)]
        matrix = formula.evaluate(distances, numbers)
        if ranges is not None:
            matrix.ranges = ranges
        width = 1 if V.shape[1] == 1 else WIDTH
        parts = []
        for block in V.split(width, dim=1):
            padded = block if block.shape[1] == width else torch.nn.functional.pad(block, (0, width - block.shape[1]))
            try:
                product = matrix @ padded.contiguous()
            except ImportError as error:
                raise RuntimeError(
                    f"KeOps must load the formulas that it has compiled; got an error ({error}). A build may have been "
                    "interrupted. Try pykeops.clean_pykeops(), or another method."
                ) from error
            parts.append(product[:, : block.shape[1]])
    return torch.cat(parts, 1)


@contextmanager
def quiet_keops() -> Iterator[Any]:
    """`pykeops.torch`, silent inside the block; what the user chose for it holds again afterwards."""
    names = ("PYKEOPS_VERBOSE", "KEOPS_VERBOSE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "0"))
    try:
        import pykeops
        import pykeops.torch
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    verbose = pykeops.verbose
    pykeops.set_verbose(False)
    try:
        yield pykeops.torch
    finally:
        pykeops.set_verbose(verbose)

"""Tiles from code that the compiler has fused: distances and formula in one loop over the pairs, nothing in between.

The formula becomes a graph (torch.fx), the graph a loop (torch.compile). The compiled function knows the structure of
the kernel, the number of coordinates and the dtype; points, hyperparameters and the size of a tile are its arguments.
So each formula is compiled once: seconds to tens of seconds, cached by PyTorch in a folder of its own.

Coordinates lie contiguously, (d, points): a loop over pairs then reads without gaps, which is four times as fast.
Beyond a few coordinates distances come from a matrix product (`gemm`), and the profile alone is compiled.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from .base import Kernel
from .distance import FEW_COORDINATES
from .formula import Formula
from .gemm import ExpandedDistances, Norms
from .tiles import Engine, Index

_compiling = threading.Lock()  # one thread at a time: filters of warnings belong to all of them
_compiled: dict[tuple[str, tuple[int, ...], torch.dtype, str], Callable[..., Tensor]] = {}


class FusedEngine(Engine):
    """Tiles by a compiled function of coordinates, or of distances where there are many coordinates."""

    # Two cores, million pairs per second at 0.25, 0.5, 1, 2, 4 MB: 521, 572, 765, 813, 849. With five other programs on
    # the same cores, where threads wait for each other after every tile, at 2, 4, 8 MB: 17, 30, 46.
    cpu_tile_bytes = 2**23
    live_tiles = 2

    def __init__(self, kernel: Kernel, X1: Tensor, X2: Tensor) -> None:
        self.formula = Formula.of(kernel)
        self.numbers = self.formula.numbers_like(X1)
        points = self.formula.points(X1, X2)
        coordinates = tuple(x.shape[1] for x, _ in points)
        self.few = max(coordinates) <= FEW_COORDINATES
        if self.few:
            self.function = compiled_formula(self.formula, coordinates, X1.dtype, X1.device.type)
            self.left = [x.T.contiguous() for x, _ in points]  # (d, a)
            self.right = [x if z is p else z.T.contiguous() for (p, z), x in zip(points, self.left, strict=True)]
        else:
            self.function = compiled_formula(self.formula, (), X1.dtype, X1.device.type)
            self.distances = [ExpandedDistances(self.formula, i, *pair) for i, pair in enumerate(points)]

    def rows(self, index: Index) -> list[Tensor] | list[Norms]:
        if self.few:
            return [self._gather(x, index) for x in self.left]
        return [distances.rows(index) for distances in self.distances]

    def columns(self, index: Index) -> list[Tensor] | list[Norms]:
        if self.few:
            return [self._gather(z, index) for z in self.right]
        return [distances.columns(index) for distances in self.distances]

    def tile(self, rows: list[Any], columns: list[Any]) -> Tensor:
        if self.few:
            a, b = rows[0].shape[1], columns[0].shape[1]
            if min(a, b) < 2:  # a size of one would be compiled anew
                rows, columns = ([p.expand(-1, 2) if p.shape[1] == 1 else p for p in side] for side in (rows, columns))
                rows, columns = ([p.contiguous() for p in side] for side in (rows, columns))
            return self.function(*rows, *columns, *self.numbers)[:a, :b]
        squared = [d.tile(x, z) for d, x, z in zip(self.distances, rows, columns, strict=True)]
        a, b = squared[0].shape
        if min(a, b) < 2:
            squared = [d.expand(max(a, 2), max(b, 2)).contiguous() for d in squared]
        return self.function(*squared, *self.numbers)[:a, :b]

    @staticmethod
    def _gather(points: Tensor, index: Index) -> Tensor:  # (d, points)
        return points[:, index].contiguous() if isinstance(index, slice) else points.index_select(1, index)


def compiled_formula(
    formula: Formula, coordinates: tuple[int, ...], dtype: torch.dtype, device: str
) -> Callable[..., Tensor]:
    """The formula as one compiled function of as many coordinates as each distance has, and of numbers.

    Where none are given, it is a function of squared distances.
    """
    graph = _graph(formula, coordinates)
    key = (
        graph.code,
        coordinates,
        dtype,
        device,
    )  # the same code for kernels that differ in nothing but their hyperparameters
    with _compiling:
        if key not in _compiled:
            with without_messages():
                function = torch.compile(graph, dynamic=True)
                # unequal sizes, or one would be taken for both
                shapes = [(d, size) for size in (48, 80) for d in coordinates] or [(48, 80)] * len(formula.geometries)
                tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
                with torch.no_grad():
                    function(*tensors, *(torch.ones((), dtype=dtype, device=device) for _ in formula.numbers))
            _compiled[key] = torch.no_grad()(function)
        return _compiled[key]


def _graph(formula: Formula, coordinates: tuple[int, ...]) -> fx.GraphModule:
    graph, count = fx.Graph(), len(formula.geometries)

    def inputs(name: str, number: int) -> list[Any]:
        return [fx.Proxy(graph.placeholder(f"{name}{i}")) for i in range(number)]

    def squared(x: Any, z: Any, d: int) -> Any:
        differences = (x[c].unsqueeze(1) - z[c].unsqueeze(0) for c in range(d))
        return functools.reduce(lambda total, square: total + square, (e * e for e in differences))

    if coordinates:
        left, right = inputs("x", count), inputs("z", count)
        distances = [squared(x, z, d) for x, z, d in zip(left, right, coordinates, strict=True)]
    else:
        distances = inputs("squared", count)
    graph.output(formula.evaluate(distances, inputs("number", len(formula.numbers))).node)
    return fx.GraphModule({}, graph)


@functools.cache
def missing_compiler() -> str | None:
    """What torch.compile lacks on this machine to make loops for the CPU, as the end of a message; None if nothing."""
    compiler = os.environ.get("CXX") or "g++"
    if not any(shutil.which(name) for name in (compiler, "g++", "clang++")):
        return f"a C++ compiler ({compiler} is not on the path; on Debian or Ubuntu: apt install g++)"
    return None


@functools.cache
def warn_once(message: str) -> None:
    """Warn of this once per process."""
    warnings.warn(message, stacklevel=2)


@contextmanager
def without_messages() -> Iterator[None]:
    """PyTorch remarks on missing GPUs while it compiles for the CPU; other warnings and errors are not touched."""
    loggers = [logging.getLogger(name) for name in ("torch.utils.cpp_extension", "torch._inductor")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

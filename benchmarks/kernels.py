"""How fast products with kernel matrices are, by each method, side by side.

    ntk-iterncgp bench kernels [--quick] [--json FILE]

Float32, a Matern-3/2 kernel, ten columns, k(X, X) V; the smallest time of several repeats, the methods taking turns so
that what disturbs the machine disturbs all of them. Ratios, each with the bound it must keep:

    fused / KeOps       N = 20 000 in three dimensions: the compiled tiles against KeOps on the CPU, with a formula of
                        its own for ten columns at once
    fused / eager       the same against eager PyTorch in chunks of 64 MB, as one writes it first
    fused / plain       the same against our plain path, which keeps its tiles in the cache and uses each one twice; not
                        judged
    sparse / fused      the paper's Gaussian mixture (lengthscale 0.05), N = 50 000
    error of sparse     of that product, relative, on the first rows against dense float64
    gemm / bare         d = 784: our time over that of the bare matrix product with exp and the product with V, in
                        blocks over the whole matrix
    exponent            of the time per product in N, for fused and sparse; not judged
    memory              the peak of resident memory in GB; the largest problem is a product with d = 784, N = 60 000
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ntk_iterncgp.kernels import KernelMatrix, Matern32
from ntk_iterncgp.kernels.keops import quiet_keops

COLUMNS = 10


@dataclass(frozen=True)
class Size:
    """How much there is to do."""

    num_uniform: int = 20_000
    num_mixture: int = 50_000
    num_images: int = 10_000
    num_large: int = 60_000
    num_repeats: int = 3


QUICK = Size(num_uniform=600, num_mixture=2000, num_images=400, num_large=800, num_repeats=1)


@dataclass(frozen=True)
class Row:
    """One line of the table: a ratio, and the bound it must keep, from below or from above."""

    name: str
    measured: float
    target: float | None = None
    at_least: bool = True
    is_full_size: bool = True

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        if not self.is_full_size:
            return "too small to judge"
        met = self.measured >= self.target if self.at_least else self.measured <= self.target
        return "ok" if met else "MISSED"


def mixture(num_data: int, seed: int = 0) -> Tensor:
    """The paper's data: ten Gaussians in three dimensions, means in [−1, 1]³, variances from 0.001 to 0.1."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for _ in range(10):
        mean = 2 * torch.rand(3, generator=generator) - 1
        entries = torch.rand(3, 3, generator=generator)
        axes = torch.linalg.eigh(entries @ entries.T).eigenvectors
        deviations = (0.001 + 0.099 * torch.rand(3, generator=generator)).sqrt()
        groups.append(mean + (torch.randn(num_data // 10, 3, generator=generator) * deviations) @ axes.T)
    return torch.cat(groups)


def fastest(products: dict[str, Callable[[], object]], num_repeats: int) -> dict[str, float]:
    """The smallest time of each; once before, so that what is compiled is compiled."""
    for product in products.values():
        product()
    seconds = dict.fromkeys(products, math.inf)
    for _ in range(num_repeats):
        for name, product in products.items():
            started = time.perf_counter()
            product()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds


def columns(num_data: int) -> Tensor:
    return torch.randn(num_data, COLUMNS, generator=torch.Generator().manual_seed(1))


def eager_chunks(kernel: Matern32, X: Tensor, V: Tensor, chunk_bytes: int = 64 * 2**20) -> Tensor:
    rows = max(1, chunk_bytes // (X.element_size() * len(X)))
    return torch.cat([kernel(x, X) @ V for x in X.split(rows)])


def bare_keops(kernel: Matern32, X: Tensor, V: Tensor) -> Tensor:
    with quiet_keops() as keops:
        scaled = X / kernel.lengthscale.float()
        squared = ((keops.LazyTensor(scaled[:, None]) - keops.LazyTensor(scaled[None])) ** 2).sum(-1)
        return float(kernel.outputscale) * (kernel.profile(squared) @ V)


def bare_gemm(X: Tensor, V: Tensor, block: int = 1024) -> Tensor:
    result = torch.zeros_like(V)
    for x, total in zip(X.split(block), result.split(block), strict=True):
        for z, v in zip(X.split(block), V.split(block), strict=True):
            total += torch.mm(x, z.T).exp_() @ v
    return result


def measure_low_dimension(size: Size) -> list[Row]:
    full = size == Size()
    X = torch.rand(size.num_uniform, 3, generator=torch.Generator().manual_seed(0))
    V, kernel = columns(len(X)), Matern32(lengthscale=0.3)
    fused, plain = (KernelMatrix(kernel, X, method=method) for method in ("fused", "plain"))
    seconds = fastest(
        {
            "fused": lambda: fused @ V,
            "plain": lambda: plain @ V,
            "keops": lambda: bare_keops(kernel, X, V),
            "eager": lambda: eager_chunks(kernel, X, V),
        },
        size.num_repeats,
    )
    return [
        Row("fused / KeOps", seconds["keops"] / seconds["fused"], 2.0, is_full_size=full),
        Row("fused / eager", seconds["eager"] / seconds["fused"], 5.0, is_full_size=full),
        Row("fused / plain", seconds["plain"] / seconds["fused"]),
    ]


def measure_mixture(size: Size) -> list[Row]:
    full = size == Size()
    X, kernel = mixture(size.num_mixture), Matern32(lengthscale=0.05, outputscale=0.05)
    V, shuffled = columns(len(X)), X[torch.randperm(len(X), generator=torch.Generator().manual_seed(2))]
    small = shuffled[: len(X) // 2].contiguous()
    matrices = {
        (method, len(points)): KernelMatrix(kernel, points, method=method)
        for points in (small, shuffled)
        for method in ("fused", "sparse")
    }
    calls = {f"{m} {n}": (lambda K=K, n=n: K @ V[:n]) for (m, n), K in matrices.items()}
    seconds = fastest(calls, size.num_repeats)
    sparse = matrices["sparse", len(X)]
    rows = min(1000, len(X))
    exact = kernel(shuffled[:rows].double(), shuffled.double()) @ V.double()
    error = float(((sparse @ V)[:rows] - exact).norm() / exact.norm())
    n = len(X)
    return [
        Row("sparse / fused", seconds[f"fused {n}"] / seconds[f"sparse {n}"], 3.0, is_full_size=full),
        Row("error of sparse", error, 1e-5, at_least=False, is_full_size=full),
        Row("exponent, fused", math.log2(seconds[f"fused {n}"] / seconds[f"fused {n // 2}"])),
        Row("exponent, sparse", math.log2(seconds[f"sparse {n}"] / seconds[f"sparse {n // 2}"])),
    ]


def measure_high_dimension(size: Size) -> list[Row]:
    """Points like images: entries from 0 to 1, a tenth of them not 0."""
    full = size == Size()
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(size.num_large, 784, generator=generator) * (torch.rand(1, 784, generator=generator) < 0.2)
    V, kernel = columns(len(X)), Matern32(lengthscale=1.550934, outputscale=0.451591)
    some = X[: size.num_images].contiguous()
    matrix, scaled = KernelMatrix(kernel, some, method="gemm"), some / 28
    seconds = fastest(
        {"gemm": lambda: matrix @ V[: len(some)], "bare": lambda: bare_gemm(scaled, V[: len(some)])}, size.num_repeats
    )
    rows = [Row("gemm / bare", seconds["gemm"] / seconds["bare"], 1.5, at_least=False, is_full_size=full)]
    KernelMatrix(kernel, X, method="gemm") @ V
    unit = 1 if sys.platform == "darwin" else 1024
    peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [*rows, Row("memory", peak / 1e9, 4.0, at_least=False, is_full_size=full)]


def show(rows: list[Row]) -> None:
    for row in rows:
        target = "" if row.target is None else f"{'>=' if row.at_least else '<='} {row.target:g}"
        print(f"{row.name:18} {target:>9} {row.measured:10.3g}  {row.verdict}".rstrip(), flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="ntk-iterncgp bench kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small problems, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings and ratios here, too")
    arguments = parser.parse_args(argv)
    size = QUICK if arguments.quick else Size()
    rows: list[Row] = []
    print(f"{'':18} {'target':>9} {'measured':>10}", flush=True)
    for measure in (measure_low_dimension, measure_mixture, measure_high_dimension):
        found = measure(size)
        show(found)
        rows += found
    if arguments.json:
        settings = asdict(size) | {"columns": COLUMNS, "threads": torch.get_num_threads()}
        results = [asdict(row) | {"verdict": row.verdict} for row in rows]
        arguments.json.write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()

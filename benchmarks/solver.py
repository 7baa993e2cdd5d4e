"""What the solver costs beyond its products with the kernel matrix, in time and in memory.

    ntk-iterncgp bench solver [--quick] [--json FILE]

Classification with 5000 data, 10 classes and a Matern-3/2 kernel in three dimensions, float32, 50 products in ten
Newton steps. Three ratios, each with the bound it must keep:

    overhead   the fraction of a fit's time that is not spent in `prior.image`, timed within the same fit. The smallest
               of several fits: what disturbs a fit mostly disturbs the many small operations of the solver.
    held       the peak of memory held during a fit, above what the process held before it, over what must be there: the
               two n×B buffers and one chunk of the kernel matrix. In fresh processes that have fitted a small problem
               first, so that what torch loads when it is first needed is not counted. The median of several. Freed
               blocks go back to the system at once there, so that what is resident is what is in use.
    resident   the same where the allocator is left as it is: glibc keeps freed blocks of up to 32 MB for later, and how
               well they fit again differs from run to run. Both on Linux only.

All three are for joint actions, one per product. For Kronecker actions, many per product, the overhead is shown without
a bound: there it buys rank, and the products are a fifth of the number.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import ntk_iterncgp
from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.runtime.memory import peak_resident_bytes, resident_bytes, restart_peak

MAX_OVERHEAD = 0.15
MAX_MEMORY_RATIO = 1.3
CHUNK_BYTES = 16 * 2**20
RETURN_FREED_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}  # those of 64 kB and more, and without growing lenient
KRONECKER_SHARE = 5  # one product where joint actions get five


@dataclass(frozen=True)
class Size:
    """How much there is to do."""

    num_data: int = 5000
    num_classes: int = 10
    num_actions: int = 50  # B, one product each
    num_newton_steps: int = 10
    num_repeats: int = 3


QUICK = Size(num_data=400, num_actions=10, num_newton_steps=2, num_repeats=1)


@dataclass(frozen=True)
class Row:
    """One line of the table. Both numbers are ratios; without a target it is shown, not judged."""

    name: str
    actions: str
    rank: int
    num_products: int
    measured: float | None
    target: float | None
    is_full_size: bool = True

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        if self.target is None:
            return ""
        if not self.is_full_size:
            return "too small to judge"
        return "ok" if self.measured <= self.target else "MISSED"


def problem(size: Size) -> tuple[Tensor, Tensor]:
    """Inputs in a cube, and labels that are noisy but can be learnt."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(size.num_data, 3, generator=generator)
    centres = torch.rand(size.num_classes, 3, generator=generator)
    nearest = torch.cdist(X, centres).argmin(1)
    noisy = torch.rand(size.num_data, generator=generator) < 0.1
    return X, torch.where(noisy, torch.randint(size.num_classes, nearest.shape, generator=generator), nearest)


def make_gp(size: Size, actions: str) -> NonConjugateGP:
    """A GP that spends exactly its budget: it never takes the mean for converged."""
    num_products = size.num_actions if actions == "joint" else max(1, size.num_actions // KRONECKER_SHARE)
    return NonConjugateGP(
        kernels.Matern32(lengthscale=0.3),
        likelihoods.Softmax(size.num_classes),
        actions=actions,
        max_products=num_products,
        max_newton_steps=size.num_newton_steps,
        products_per_step=max(1, num_products // size.num_newton_steps),
        newton_tol=0.0,
        max_rank=None,
        chunk_bytes=CHUNK_BYTES,
    )


@contextmanager
def timed_images() -> Iterator[list[float]]:
    """Collects the seconds of every `prior.image` while open."""
    seconds: list[float] = []
    original = GramPrior.image

    def image(self, actions):  # type: ignore[no-untyped-def]
        started = time.perf_counter()
        images = original(self, actions)
        seconds.append(time.perf_counter() - started)
        return images

    GramPrior.image = image  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        GramPrior.image = original  # type: ignore[method-assign]


def measure_overhead(size: Size, actions: str) -> Row:
    X, y = problem(size)
    fractions = []
    for _ in range(size.num_repeats):
        with timed_images() as seconds:
            started = time.perf_counter()
            report = make_gp(size, actions).fit(X, y).report_
            total = time.perf_counter() - started
        fractions.append(1 - sum(seconds) / total)
    target = MAX_OVERHEAD if actions == "joint" else None
    return Row("overhead", actions, report.rank, report.num_products, min(fractions), target, size == Size())


def measure_memory(size: Size, name: str) -> Row:
    """In processes of their own, which are this file run as a script."""
    command = [sys.executable, __file__, "--memory-of", json.dumps(asdict(size))]
    package = str(Path(ntk_iterncgp.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path} | (RETURN_FREED_BLOCKS if name == "held" else {})
    peaks = []
    for _ in range(size.num_repeats):
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise RuntimeError(f"The process that measures memory ended with an error:\n{run.stderr}")
        found = json.loads(run.stdout)
        peaks.append(found["peak_bytes"])
    buffers = 2 * size.num_data * size.num_classes * size.num_actions * torch.float32.itemsize
    ratio = None if None in peaks else statistics.median(peaks) / (buffers + CHUNK_BYTES)
    return Row(name, "joint", found["rank"], found["num_products"], ratio, MAX_MEMORY_RATIO, size == Size())


def report_memory(size: Size) -> None:
    """What the fresh process does: fit, and print the peak above the start."""
    make_gp(QUICK, "joint").fit(*problem(QUICK))
    X, y = problem(size)
    start = resident_bytes() if restart_peak() else None
    report = make_gp(size, "joint").fit(X, y).report_
    peak = None if start is None else peak_resident_bytes() - start
    print(json.dumps({"peak_bytes": peak, "rank": report.rank, "num_products": report.num_products}))


def show(rows: list[Row]) -> None:
    print(f"{'':10} {'actions':10} {'products':>8} {'rank':>6} {'target':>8} {'measured':>9}")
    for row in rows:
        target = "" if row.target is None else f"<= {row.target:g}"
        measured = "" if row.measured is None else f"{row.measured:.3f}"
        columns = f"{row.name:10} {row.actions:10} {row.num_products:8d} {row.rank:6d} {target:>8} {measured:>9}"
        print(f"{columns}  {row.verdict}".rstrip())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="ntk-iterncgp bench solver", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a problem of a second, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings and ratios here, too")
    parser.add_argument("--memory-of", metavar="SIZE", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.memory_of:
        report_memory(Size(**json.loads(arguments.memory_of)))
        return
    size = QUICK if arguments.quick else Size()
    rows = [
        measure_overhead(size, "joint"),
        measure_memory(size, "held"),
        measure_memory(size, "resident"),
        measure_overhead(size, "kronecker"),
    ]
    show(rows)
    if arguments.json:
        settings = asdict(size) | {"chunk_bytes": CHUNK_BYTES, "threads": torch.get_num_threads()}
        results = [asdict(row) | {"verdict": row.verdict} for row in rows]
        arguments.json.write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What several processes gain and what they send: work and bytes for each, against their number.

    ntk-iterncgp bench scaling [--quick] [--json FILE]

torchrun starts 1, 2 and 3 processes of one thread each, which do the same work together under gloo:

    clusters    a network fitted by groups of data (LeNet, B = 200): one forward and one backward sweep
    product     four columns of the NTK, K S = J Λ⁻¹ (JᵀS): a sweep of each kind
    kernel      k(X, X) S for ten columns of an explicit kernel

Work is the CPU time of the busiest process, its messages included, over that of one process alone; the smallest of the
repeats. It does not ask whether the machine has idle cores: on a machine that has as many as there are processes it
is the time on the clock. Bytes are those that a process sends, counted by `parallel.py` with the formulas of ring
algorithms, and what they should be: for networks they do not depend on the number of data but for the outputs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from ntk_iterncgp import kernels
from ntk_iterncgp.clusters.grouping import groups_for
from ntk_iterncgp.data.fixed_order import FixedOrderData
from ntk_iterncgp.experiments.models import lenet
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.linalg.columns import DenseColumns
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.priors.ntk import NTKPrior, sweep_outputs
from ntk_iterncgp.runtime import parallel

CLASSES, FEATURES, COLUMNS = 10, 84, 4  # outputs of a LeNet, inputs of its last layer, columns of a product


@dataclass(frozen=True)
class Size:
    images: int
    points: int
    actions: int
    repeats: int
    processes: tuple[int, ...]


FULL = Size(images=4096, points=6000, actions=200, repeats=3, processes=(1, 2, 3))
QUICK = Size(images=96, points=200, actions=10, repeats=1, processes=(1, 2))


@dataclass(frozen=True)
class Row:
    """One kind of work by K processes."""

    name: str
    num_processes: int
    work: float  # of the busiest process, over that of one process
    bytes_sent: float  # by each process
    expected_bytes: float  # of what dominates
    calls: float

    @property
    def even_share(self) -> float:
        """What the work would be if nothing were done twice and nothing waited for."""
        return 1 / self.num_processes


# --- in each process --------------------------------------------------------------------------------------------------


def measure(size: Size) -> dict[str, dict[str, float]]:
    """CPU seconds of the busiest process, and what a process sent, for each kind of work."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = lenet().eval()
    images, labels = torch.randn(size.images, 1, 28, 28), torch.arange(size.images) % CLASSES
    loader = DataLoader(TensorDataset(images, labels), batch_size=32)
    jacobian, data = Jacobian(model), FixedOrderData(loader, device=images.device)
    outputs, _ = sweep_outputs(jacobian, data)
    P, K = jacobian.num_params, parallel.num_processes()
    prior = NTKPrior(jacobian, data, outputs, torch.ones(P))
    block = torch.randn(size.images * CLASSES, COLUMNS)
    actions = DenseColumns.of(prior.shard.take(block), CLASSES, prior.shard)
    points = torch.rand(size.points, 3)
    gram = GramPrior([kernels.Matern32(lengthscale=0.3)], points, torch.zeros(CLASSES), method="plain")
    columns = DenseColumns.of(gram.shard.take(torch.randn(size.points * CLASSES, 1)), CLASSES, gram.shard)
    once, twice = (K - 1) / K, 2 * (K - 1) / K  # what a process sends of a gathered and of a summed array
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=size.actions)
    gathered = size.images * 4 * (CLASSES + FEATURES)
    groups = groups_for(size.actions, size.images, 4 * P)
    jobs: dict[str, tuple[Callable[[], object], float]] = {
        "clusters": (lambda: la.fit(loader), twice * (4 * groups + 8) * P + once * gathered),
        "product": (lambda: prior.image(actions), twice * 8 * P * COLUMNS),
        "kernel": (lambda: gram.image(columns), (once + twice) * 4 * size.points * CLASSES),
    }
    return {name: _measured(work, size.repeats) | {"expected": bytes_} for name, (work, bytes_) in jobs.items()}


def _measured(work: Callable[[], object], repeats: int) -> dict[str, float]:
    work()  # once for what is prepared
    least, calls, sent = float("inf"), parallel.traffic.calls, parallel.traffic.bytes
    for _ in range(repeats):
        started = time.process_time()
        work()
        least = min(least, time.process_time() - started)
    calls, sent = parallel.traffic.calls - calls, parallel.traffic.bytes - sent
    seconds = parallel.Shard.even(parallel.num_processes()).gather(torch.tensor([least], dtype=torch.float64))
    return {"seconds": float(seconds.max()), "bytes": sent / repeats, "calls": calls / repeats}


# --- around them ------------------------------------------------------------------------------------------------------


def launch(num_processes: int, size: Size) -> dict[str, dict[str, float]]:
    """`measure` under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        root = Path(__file__).resolve().parent.parent
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        environment["PYTHONWARNINGS"] = "ignore"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={num_processes}", str(Path(__file__).resolve())]
        command += ["--measure", str(file), *(["--quick"] if size == QUICK else [])]
        subprocess.run(command, check=True, env=environment)
        return json.loads(file.read_text())  # type: ignore[no-any-return]


def rows(size: Size, launched: Callable[[int, Size], dict[str, dict[str, float]]] = launch) -> list[Row]:
    found = {number: launched(number, size) for number in size.processes}
    result = []
    for name, alone in found[1].items():
        for number, measured in found.items():
            here: Any = measured[name]
            work = here["seconds"] / max(alone["seconds"], 1e-9)
            row = Row(name, number, work, here["bytes"], here["expected"], here["calls"])
            result.append(row)
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench scaling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small problems, to try it out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # what torchrun starts
    options = parser.parse_args(argv)
    size = QUICK if options.quick else FULL
    if options.measure:
        with parallel.joined("cpu"):
            measured = measure(size)
            if parallel.is_main():
                options.measure.write_text(json.dumps(measured))
        return
    table = rows(size)
    print(f"{'':10}{'processes':>10}{'work':>8}{'even':>8}{'MB sent':>10}{'expected':>10}{'messages':>10}")
    for row in table:
        sent, expected = row.bytes_sent / 1e6, row.expected_bytes / 1e6
        print(
            f"{row.name:10}{row.num_processes:>10}{row.work:>8.2f}{row.even_share:>8.2f}{sent:>10.3f}{expected:>10.3f}"
            f"{row.calls:>10.0f}"
        )
    if options.json:
        results = [asdict(row) | {"even_share": row.even_share} for row in table]
        options.json.write_text(json.dumps({"results": results}, indent=2))


if __name__ == "__main__":
    main()

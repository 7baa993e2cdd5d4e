"""What a column of the NTK costs, in forward+backward epochs of the same network on the same data.

    ntk-iterncgp bench ntk [--quick] [--json FILE]

A column of K = J Λ⁻¹ Jᵀ is one sweep of vector-Jacobian and one of Jacobian-vector products. The epoch is the plain one
of training without its optimiser: forward, `.backward()`, in the same process and on the same batches. Columns computed
together share the forward pass. With k columns a k-th of the images is taken (1000 at least), for the columns and for
the epoch they are measured in: the ratio is the same, and so is the work for every k. CPU seconds on one thread, the
smallest of several runs: on a machine that others use too, the clock on the wall measures them.

Memory: peak of a fit and of a prediction for a network of a million weights with ten outputs, in a process of its own,
over what must be there (weights and images of the actions) plus `chunk_bytes`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.data.fixed_order import FixedOrderData
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.linalg.columns import DenseColumns
from ntk_iterncgp.priors.ntk import NTKPrior

if __package__:
    from benchmarks.models import cifar_images, cifar_resnet20, lenet
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from benchmarks.models import cifar_images, cifar_resnet20, lenet

TARGETS = {1: 2.2, 8: 1.8, 32: None}
MAX_MEMORY_RATIO = 1.3
FEWEST_IMAGES = 1000


def least_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def columns(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int, repeats: int) -> dict[str, float]:
    """Epochs per column for each number of columns, and its two halves."""

    def epoch(data: FixedOrderData) -> None:
        model.zero_grad(set_to_none=True)
        for x, y in data.batches():
            nn.functional.cross_entropy(model(x), y).backward()
        model.zero_grad(set_to_none=True)

    jacobian = Jacobian(model)
    result: dict[str, float] = {}
    for k in TARGETS:
        num_images = max(len(images) // k, min(FEWEST_IMAGES, len(images)))
        part = slice(0, num_images)
        data = FixedOrderData(DataLoader(TensorDataset(images[part], labels[part]), batch_size), device=images.device)
        prior = NTKPrior(jacobian, data, torch.zeros(num_images, 10), torch.ones(jacobian.num_params))
        actions = DenseColumns.of(torch.randn(num_images * 10, k), 10)
        weights = torch.randn(jacobian.num_params, k)
        one_epoch = least_seconds(partial(epoch, data), repeats + 1)
        transpose = least_seconds(partial(prior.transpose_product, actions), repeats) / k / one_epoch
        forward = least_seconds(partial(prior.product, weights), repeats) / k / one_epoch
        result |= {f"k={k}": transpose + forward, f"k={k} vjp": transpose, f"k={k} jvp": forward}
    return result


MEMORY_SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import ntk_iterncgp
from laplace import Laplace

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

what, chunk, hidden = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
def fit(hidden, rank, size):
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    loader = DataLoader(TensorDataset(torch.randn(size, 784), torch.randint(0, 10, (size,))), 64)
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=rank, chunk_bytes=chunk)
    la.fit(loader)
    return la
small = fit(8, 2, 64)
small(torch.randn(4, 784), pred_type="glm")
rank, size = 20, 256
before = peak()
la = fit(hidden, rank, size)
if what == "predict":
    la(torch.randn(64, 784), pred_type="glm")
params = la.n_params
needed = 4 * (2 * params + (2 if what == "predict" else 1) * params * rank + 3 * size * 10 * rank) + chunk
print((peak() - before) / needed, params)
"""


def memory(chunk_bytes: int, hidden: int) -> dict[str, float]:
    result: dict[str, float] = {}
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    for what in ("fit", "predict"):
        command = [sys.executable, "-W", "ignore", "-c", MEMORY_SCRIPT, what, str(chunk_bytes), str(hidden)]
        output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()
        result[what], result["weights"] = float(output[0]), float(output[1])
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench ntk", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small networks and few data, to try it out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    quick = options.quick
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nets: dict[str, tuple[nn.Module, Tensor, Tensor, int]] = {
        "LeNet": (
            lenet().eval(),
            torch.randn(64 if quick else 4096, 1, 28, 28),
            torch.arange(64 if quick else 4096) % 10,
            64,
        )
    }
    if not quick:
        nets["ResNet-20"] = (cifar_resnet20(), *cifar_images(int(os.environ.get("BENCH_IMAGES", "10000"))), 250)
    figures: dict[str, dict[str, float]] = {}
    print(f"{'':12}{'columns':>9}{'epochs per column':>20}{'vjp':>8}{'jvp':>8}{'target':>9}")
    for name, (model, images, labels, batch_size) in nets.items():
        figures[name] = columns(model, images, labels, batch_size, repeats=1 if quick else 2)
        for k, target in TARGETS.items():
            row = figures[name]
            bound = f"≤ {target}" if target else "–"
            print(f"{name:12}{k:>9}{row[f'k={k}']:>20.2f}{row[f'k={k} vjp']:>8.2f}{row[f'k={k} jvp']:>8.2f}{bound:>9}")
    torch.set_num_threads(threads)
    if Path("/proc/self/status").exists():
        chunk_bytes = (16 if quick else 256) * 2**20
        figures["memory"] = memory(chunk_bytes, hidden=20 if quick else 1260)
        for what in ("fit", "predict"):
            print(
                f"peak memory of {what}, {int(figures['memory']['weights']):,} weights: "
                f"{figures['memory'][what]:.2f} of what is needed plus chunk_bytes (≤ {MAX_MEMORY_RATIO})"
            )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

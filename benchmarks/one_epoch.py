"""What the posterior given all data costs: a fit in training epochs, a prediction in forward passes.

    ntk-iterncgp bench one_epoch [--quick] [--json FILE]

The unit is a forward+backward epoch of the same network over the same loader in the same process, without an optimiser;
for predictions a forward pass over the same images. CPU seconds on one thread, smallest of the repeats: on a machine
that others use too, the clock on the wall measures them.

    fit         policy="clusters", B = 200: MNIST with a LeNet-size CNN, CIFAR-10 with a ResNet-20
    growth      time against the number of data (10 k, 20 k, 40 k) and of groups (50, 500)
    predict     10 outputs, B = 200, and its parts: derivatives by activations, from these rows, times A and themselves
    grid        50 prior precisions after the validation set has been passed, in epochs
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import ntk_iterncgp  # noqa: F401  registers the flavours
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.laplace_torch import grid
from ntk_iterncgp.likelihoods import Softmax

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.models import cifar_images, cifar_resnet20, lenet, mnist_images

TARGETS = {"fit": 1.5, "groups": 1.2, "predict": 25.0, "grid": 0.05}
BATCH = 128
SQUARE = 1024  # rows of matrices whose product is as fast as arithmetic gets


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    least = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        work()
        least = min(least, time.process_time() - started)
    return least


@dataclass
class Table:
    """What was measured, printed line by line. Of few data nothing is judged, and nothing measured twice."""

    is_full_size: bool
    figures: dict[str, float] = field(default_factory=dict)

    def show(self, what: str, value: float, unit: str, target: float | None = None) -> None:
        bound = ""
        if target is not None:
            verdict = ("ok" if value <= target else "MISSED") if self.is_full_size else "too small to judge"
            bound = f"  (≤ {target:g}: {verdict})"
        print(f"{what:60}{value:8.2f} {unit}{bound}", flush=True)

    def in_turns(self, *works: Callable[[], object]) -> list[float]:
        """The least seconds of each: what disturbs the machine disturbs all of them."""
        times = [[seconds(work) for work in works] for _ in range(3 if self.is_full_size else 1)]
        return [min(column) for column in zip(*times, strict=True)]


def epoch(model: nn.Module, loader: DataLoader) -> None:
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        model.zero_grad(set_to_none=True)


def fitted(model: nn.Module, loader: DataLoader, groups: int) -> Any:
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=groups)
    la.fit(loader)
    return la


def loader_of(images: Tensor, labels: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(images, labels), BATCH)


def quickly_trained(model: nn.Module, images: Tensor, labels: Tensor) -> nn.Module:
    """Two epochs: the cost does not depend on the weights, but groups of an untrained network would mean nothing."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(2):
        for x, y in DataLoader(TensorDataset(images, labels), BATCH, shuffle=True):
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def fit_cost(name: str, model: nn.Module, images: Tensor, labels: Tensor, groups: int, table: Table) -> Any:
    loader = loader_of(images, labels)
    epoch(model, loader_of(images[:BATCH], labels[:BATCH]))
    fits: list[Any] = []
    unit, spent = table.in_turns(lambda: epoch(model, loader), lambda: fits.append(fitted(model, loader, groups)))
    ratio = spent / unit
    table.figures[f"fit {name}"], table.figures[f"epoch {name}"] = ratio, unit
    table.show(f"fit, {name}, {len(images):,} data, B = {groups}", ratio, "epochs", TARGETS["fit"])
    return fits[-1]


def growth(model: nn.Module, images: Tensor, labels: Tensor, sizes: list[int], table: Table) -> None:
    times = [seconds(lambda n=n: fitted(model, loader_of(images[:n], labels[:n]), 200)) for n in sizes]
    for size, spent in zip(sizes, times, strict=True):
        table.figures[f"time at {size}"] = spent / times[0]
        table.show(
            f"time at {size:,} data, over that at {sizes[0]:,}",
            spent / times[0],
            f"(linear: {size / sizes[0]:g})",
        )
    few, many = table.in_turns(*(lambda b=b: fitted(model, loader_of(images, labels), b) for b in (50, 500)))
    table.figures["groups"] = many / few
    table.show("time with 500 groups, over that with 50", many / few, "", TARGETS["groups"])


def predict_cost(model: nn.Module, la: Any, images: Tensor, table: Table) -> None:
    A, jacobian = la.posterior.images, Jacobian(model)
    contrasts = Softmax(la.n_outputs).contrasts(images.device)
    with torch.no_grad():
        jacobian.prepare(images, len(images))
        at_once = max(1, la.settings.chunk_bytes // jacobian.bytes_per_row(la.n_outputs))
        part = images[:at_once]
        rows, ones = jacobian.rows(part, len(part), contrasts), torch.ones(jacobian.num_params)
        dense = torch.randn(len(part) * la.n_outputs, jacobian.num_params)
        work: dict[str, Callable[[], object]] = {
            "forward": lambda: model(images),
            "predict": lambda: la(images, link_approx="quadrature"),
            "derivatives by activations": lambda: jacobian.rows(part, len(part), contrasts),
            "rows, times themselves": lambda: rows.products(A[:, :0], ones),
            "rows, times themselves and A": lambda: rows.products(A, ones),
            "(one product of the sizes of J and A, by itself)": lambda: dense @ A,
        }
        square = torch.randn(SQUARE, SQUARE)
        work["square"] = lambda: square @ square
        least = dict.fromkeys(work, float("inf"))
        for _ in range(4):  # in turns, since the machine's pace changes
            least = {name: min(least[name], seconds(run)) for name, run in work.items()}
    unit = least["forward"] / len(images)
    table.figures["predict"] = least["predict"] / len(images) / unit
    table.show("prediction of an image", table.figures["predict"], "forward passes", TARGETS["predict"])
    for name in list(work)[2:-1]:
        table.figures[f"predict {name}"] = least[name] / len(part) / unit
        table.show(f"  {name}", table.figures[f"predict {name}"], "forward passes")
    # What arithmetic alone would take: for each contrast a product with the weights and one for their gradient in every
    # layer, and one product with A, all as fast as the product of two square matrices.
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(part)
    outputs = contrasts.shape[1]
    operations = (1 + 2 * outputs) * counter.get_total_flops() / len(part) + 2 * outputs * A.numel()
    rate = 2 * SQUARE**3 / least["square"]
    table.figures["predict at peak"] = operations / rate / unit
    table.show(
        "  (all of its arithmetic at the pace of a product of squares)",
        table.figures["predict at peak"],
        "forward passes",
    )


def grid_cost(la: Any, images: Tensor, labels: Tensor, unit: float, table: Table) -> None:
    loader = loader_of(images, labels)
    passed = grid.pass_once(la, loader, progress_bar=False)
    with mock.patch.object(grid, "pass_once", lambda *args, **kwargs: passed):
        spent = seconds(
            lambda: la.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=50), repeats=3
        )
    table.figures["grid"] = spent / unit
    name = f"50 prior precisions, {len(images):,} validation data passed"
    table.show(name, table.figures["grid"], "epochs", TARGETS["grid"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench one_epoch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few data, to try it out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table(is_full_size=not options.quick)
    try:
        images, labels = mnist_images(600 if options.quick else 60_000)
        model = quickly_trained(lenet(), images[:10_000], labels[:10_000])
        la = fit_cost("MNIST, LeNet", model, images, labels, 20 if options.quick else 200, table)
        held_out = mnist_images(100 if options.quick else 1000, train=False)
        grid_cost(la, *held_out, table.figures["epoch MNIST, LeNet"], table)
        sizes = [200, 400] if options.quick else [10_000, 20_000, 40_000]
        growth(model, images[: sizes[-1]], labels[: sizes[-1]], sizes, table)
        resnet = cifar_resnet20()
        images, labels = cifar_images(64 if options.quick else 10_000)
        la = fit_cost("CIFAR-10, ResNet-20", resnet, images, labels, 8 if options.quick else 200, table)
        predict_cost(resnet, la, images[: 8 if options.quick else 64], table)
    finally:
        torch.set_num_threads(threads)
    if options.json:
        options.json.write_text(json.dumps(table.figures, indent=2))


if __name__ == "__main__":
    main()

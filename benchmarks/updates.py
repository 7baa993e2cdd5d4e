"""Twenty updates against one fit of all data: time, passes, and how good the posterior is. And four shards, merged.

    ntk-iterncgp bench updates [--quick] [--only updates|shards]

MNIST and a LeNet (noise for images where there are no data). One posterior is fitted to all of the data, the other is
updated with a part of them at a time and keeps as many actions; in turns, on one thread, and the least seconds of the
processor count. Beside these the data that were differentiated are counted.

Four shards of 8000 images are fitted by themselves, merged and compressed to as many actions as one fit of all has: how
much of the variance is contracted, the NLL on 2000 test images, and the AUROC of these against as many of Fashion-MNIST
by the score of a detector, which is calibrated on 1000 others.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from benchmarks.models import lenet, mnist_images
from ntk_iterncgp.jacobian.autograd import Jacobian

TARGET, BATCH, PRECISION = 1.3, 250, 100.0
SHARDS, RANKS = 4, (50, 100, 200)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How many data went forward, and how many backward with a number of cotangents."""
    found = {"forward": 0, "backward": 0, "batches": 0}
    forward, vjp = Jacobian.forward, Jacobian.vjp

    def counting_forward(self: Jacobian, x: Any, *rest: Any) -> Tensor:
        found["forward"] += len(x)
        return forward(self, x, *rest)

    def counting_vjp(self: Jacobian, x: Any, cotangents: Tensor) -> Tensor:
        found["backward"] += cotangents.shape[0] * cotangents.shape[2]
        found["batches"] += 1
        return vjp(self, x, cotangents)

    with mock.patch.object(Jacobian, "forward", counting_forward), mock.patch.object(Jacobian, "vjp", counting_vjp):
        yield found


def trained(images: Tensor, labels: Tensor) -> nn.Module:
    """Two short epochs."""
    torch.manual_seed(0)
    model = lenet()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(2):
        for x, y in DataLoader(TensorDataset(images, labels), 50, shuffle=True):
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def at_once(model: nn.Module, images: Tensor, labels: Tensor, rank: int) -> Any:
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=rank, prior_precision=PRECISION)
    la.fit(DataLoader(TensorDataset(images, labels), BATCH))
    return la


def in_parts(model: nn.Module, images: Tensor, labels: Tensor, rank: int, number: int) -> Any:
    la = Laplace(
        model, "classification", "all", "iterncgp", num_actions=2 * rank, max_rank=rank, prior_precision=PRECISION
    )
    for x, y in zip(images.chunk(number), labels.chunk(number), strict=True):
        la.update(DataLoader(TensorDataset(x, y), BATCH))
    la.posterior  # noqa: B018  which sums up what was added
    return la


def contraction(la: Any, x: Tensor) -> float:
    """How much of the prior's variance the data have removed, on average over inputs."""
    with torch.no_grad():
        left = la.latent(x, contrasts="all")[1].diagonal(dim1=1, dim2=2).sum(1)
        variance = 1 / la.prior_precision.double().expand(la.n_params)
        prior = torch.cat([rows.covariance(variance) for rows in la._rows_at(x)]).diagonal(dim1=1, dim2=2).sum(1)
    return float(1 - (left.double() / prior).mean())


def nll(la: Any, x: Tensor, y: Tensor) -> float:
    return float(nn.functional.nll_loss(la(x, link_approx="quadrature").log(), y))


def merged(model: nn.Module, images: Tensor, labels: Tensor, rank: int) -> Any:
    found, loader = None, DataLoader(TensorDataset(images, labels), BATCH)
    for k in range(1, SHARDS + 1):
        la = Laplace(model, "classification", "all", "iterncgp", num_actions=rank, prior_precision=PRECISION)
        la.fit(loader, shard=(k, SHARDS))
        if found is None:
            found = la
        else:
            found.merge(la, max_rank=rank)
    return found


def auroc(familiar: Tensor, others: Tensor) -> float:
    ranks = torch.cat([familiar, others]).double().argsort().argsort().double()
    n, m = len(familiar), len(others)
    return float((ranks[n:].sum() - m * (m - 1) / 2) / (n * m))


def shards(is_quick: bool) -> dict[str, float]:
    """The second table."""
    size, new = (400, 60) if is_quick else (8000, 2000)
    images, labels = mnist_images(size)
    model, (x, y) = trained(images, labels), mnist_images(new + new // 2, train=False)
    held_out, (x, y) = x[new:], (x[:new], y[:new])
    fashion = mnist_images(new, train=False, name="FashionMNIST")[0]
    figures: dict[str, float] = {}
    print(f"{size:,} data, {SHARDS} shards\n")
    print(f"{'actions':>7} {'':12}{'contraction':>13}{'NLL':>9}{'AUROC':>9}")
    for rank in (8,) if is_quick else RANKS:
        for name, way in (("one fit", at_once), (f"{SHARDS} shards", merged)):
            la = way(model, images, labels, rank)
            assert la.posterior.rank == rank
            detector = la.detector(held_out)
            found = {
                "contraction": contraction(la, x[: new // 5]),
                "NLL": nll(la, x, y),
                "AUROC": auroc(detector.score(x), detector.score(fashion)),
            }
            figures |= {f"{name} {rank} {what}": value for what, value in found.items()}
            print(
                f"{rank:7} {name:12}{100 * found['contraction']:12.1f}%{found['NLL']:9.4f}{found['AUROC']:9.4f}",
                flush=True,
            )
    return figures


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench updates", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few data, for a look at the output")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--rank", type=int, help="how many actions to keep (default: 50)")
    parser.add_argument("--only", choices=("updates", "shards"), help="one of the two tables (default: both)")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    try:
        if options.only != "shards":
            figures |= updates(options)
        if options.only != "updates":
            print()
            figures |= shards(options.quick)
    finally:
        torch.set_num_threads(threads)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def updates(options: argparse.Namespace) -> dict[str, float]:
    """The first table."""
    size, number = (400, 4) if options.quick else (10_000, 20)
    rank = options.rank or (8 if options.quick else 50)
    figures: dict[str, float] = {"rank": rank, "updates": number}
    images, labels = mnist_images(size)
    model = trained(images, labels)
    new = mnist_images(50 if options.quick else 300, train=False)
    ways: dict[str, Callable[[], Any]] = {
        "one fit": lambda: at_once(model, images, labels, rank),
        "updates": lambda: in_parts(model, images, labels, rank, number),
    }
    print(f"{size:,} data, {number} updates of {size // number}, rank {rank}\n")
    print(f"{'':10}{'seconds':>9}{'forward':>9}{'backward':>10}{'batches':>9}{'rank':>6}{'contraction':>13}{'NLL':>9}")
    for name, way in ways.items():
        with counted() as passes:
            la = way()
        figures |= {f"{name} {what}": value / size for what, value in passes.items()}
        figures |= {f"{name} contraction": contraction(la, new[0]), f"{name} NLL": nll(la, *new)}
        figures[f"{name} seconds"], figures[f"{name} rank"] = float("inf"), la.posterior.rank
    for _ in range(1 if options.quick else 3):
        for name, way in ways.items():
            started = time.process_time()
            way()
            figures[f"{name} seconds"] = min(figures[f"{name} seconds"], time.process_time() - started)
    for name in ways:
        shown = {what: figures[f"{name} {what}"] for what in ("seconds", "forward", "backward", "batches")}
        print(
            f"{name:10}{shown['seconds']:9.2f}{shown['forward']:9.2f}{shown['backward']:10.2f}"
            f"{shown['batches'] * size:9.0f}{figures[f'{name} rank']:6.0f}"
            f"{100 * figures[f'{name} contraction']:12.1f}%{figures[f'{name} NLL']:9.4f}"
        )
    figures["time"] = figures["updates seconds"] / figures["one fit seconds"]
    figures["quality"] = figures["updates contraction"] / figures["one fit contraction"]
    verdict = "" if options.quick else "  ok" if figures["time"] <= TARGET else "  MISSED"
    print("\nforward and backward: data that passed, over all data")
    print(f"time of the updates, over one fit: {figures['time']:.2f} (target: {TARGET}){verdict}")
    print(f"contraction of the variance at new inputs, over that of one fit: {figures['quality']:.3f}")
    return figures


if __name__ == "__main__":
    main()

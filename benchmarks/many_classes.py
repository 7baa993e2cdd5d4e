"""A fit to many data of many classes: time and memory, which must not grow as N·C.

    ntk-iterncgp bench many_classes [--num-data 1000000]

Synthetic: inputs of 16 numbers, a network 16-16-C that is not trained, targets drawn from what it says. The data are
read from one tensor. The most memory that the process ever had is counted, less what it had before there were data.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from pathlib import Path

import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours

WIDTH, ACTIONS, BATCH, LIMIT = 16, 50, 1000, 8.0


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def problem(num_data: int, num_classes: int) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, num_classes)).eval()
    model[2].weight.data *= 8  # so that some classes are much likelier than others
    x, labels = torch.randn(num_data, WIDTH), []
    with torch.no_grad():
        for part in x.split(BATCH):
            labels.append(torch.multinomial(model(part).softmax(1), 1)[:, 0])
    return model, TensorDataset(x, torch.cat(labels))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench many_classes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few data, for a look at the output")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--num-data", type=int, default=1_000_000)
    parser.add_argument("--num-classes", type=int, default=1000)
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    num_data = 20_000 if options.quick else options.num_data
    before = peak_bytes()
    model, data = problem(num_data, options.num_classes)
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=ACTIONS)
    loader, started = DataLoader(data, BATCH), time.process_time()
    with torch.no_grad():
        for x, _ in loader:
            model(x)
    forward, started = time.process_time() - started, time.process_time()
    estimated = la.estimate_cost(loader).fit_bytes
    la.fit(loader)
    seconds, gigabytes = time.process_time() - started, (peak_bytes() - before) / 1e9
    figures = {"data": num_data, "seconds": seconds, "forward passes": seconds / forward, "GB": gigabytes}
    figures |= {"estimated GB": estimated / 1e9, "one float64 vector, GB": 8e-9 * num_data * options.num_classes}
    figures["information"] = la.report_.information_captured
    for name, value in figures.items():
        print(f"{name:24}{value:14,.3f}")
    print(f"{'memory':24}{'ok' if gigabytes <= LIMIT else 'MISSED':>14} (target: {LIMIT} GB)")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

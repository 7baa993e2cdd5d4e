"""Are probabilities that were tuned on clean images still right on worse ones?

    ntk-iterncgp bench shift [--quick] [--networks mnist,fashion,cifar] [--inputs 200] [--columns NLL] [--json FILE]

The networks of `bench detection`, and test images with five strengths of each corruption (`CORRUPTIONS`, made here).
A temperature, and for IterNCGP the precision beside it (`la.calibrate`), are tuned on other test images, clean ones.
NLL, ECE and accuracy by strength over all corruptions, and the difference in NLL with a bootstrap interval, whose unit
is the image: an image counts with all of its corruptions.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import functional as images

import ntk_iterncgp  # noqa: F401  registers the flavours
from benchmarks.detection import NETWORKS, TRAINING, _generator, network, raw, scaled
from ntk_iterncgp.experiments.evaluation.metrics import classification_metrics
from ntk_iterncgp.experiments.evaluation.uncertainty import bootstrap_difference

TUNING = 1000  # clean images
STRENGTHS = range(1, 6)
COLUMNS = ("NLL", "ECE", "accuracy")
TEMPERATURES = torch.logspace(-1, 1, 161, dtype=torch.float64)

CORRUPTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "noise": lambda x, s: (x + 0.08 * s * torch.randn(x.shape, generator=_generator())).clamp(0, 1),
    "blur": lambda x, s: images.gaussian_blur(x, 9, 0.3 + 0.3 * s),
    "contrast": lambda x, s: (1 - 0.16 * s) * x + 0.16 * s * x.mean((1, 2, 3), keepdim=True),
    "rotation": lambda x, s: images.rotate(x, 9.0 * s, interpolation=images.InterpolationMode.BILINEAR),
    "brightness": lambda x, s: (x + 0.1 * s).clamp(0, 1),
    "pixels": lambda x, s: interpolate(
        interpolate(x, scale_factor=1 - 0.14 * s, mode="area"), x.shape[2:], mode="nearest"
    ),
}


def temperature_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Of least NLL."""
    losses = [torch.nn.functional.cross_entropy(outputs / T, y) for T in TEMPERATURES]
    return TEMPERATURES[int(torch.stack(losses).argmin())]


def measured(name: str, num_inputs: int, quick: bool) -> dict[str, Any]:
    """NLL, ECE and accuracy of each method at each strength, and differences with intervals."""
    data, _, epochs, _ = NETWORKS[name]
    (x, y), (test, labels) = raw(data, True), raw(data, False)
    x, y = scaled(data, x[:TRAINING]), y[:TRAINING]
    model = network(name, x, y, min(epochs, 20) if quick else epochs)
    la: Any = Laplace(model, "classification", "all", "iterncgp", num_actions=40 if quick else 200)
    la.fit(DataLoader(TensorDataset(x, y), 500))
    order = torch.randperm(len(test), generator=_generator())
    num_inputs = min(num_inputs, len(test) // 2)
    plain, tuning = order[:num_inputs], order[num_inputs : num_inputs + TUNING]
    print(f"\n{name}\n{la.calibrate(DataLoader(TensorDataset(scaled(data, test[tuning]), labels[tuning]), 100))}")
    with torch.no_grad():
        T = temperature_of(model(scaled(data, test[tuning])).double(), labels[tuning])
    found: dict[str, Any] = {"calibration": str(la.output_temperature), "temperature": float(T)}
    for strength in STRENGTHS:
        p: dict[str, list[Tensor]] = {"network": [], "temperature": [], "iterncgp": []}
        for corrupt in CORRUPTIONS.values():
            for part in scaled(data, corrupt(test[plain], strength)).split(50):
                with torch.no_grad():
                    outputs = model(part).double()
                p["network"].append(outputs.softmax(1))
                p["temperature"].append((outputs / T).softmax(1))
                p["iterncgp"].append(la(part, link_approx="quadrature").double())
        target = labels[plain].repeat(len(CORRUPTIONS))
        row: dict[str, Any] = {}
        losses = {}
        for method, parts in p.items():
            q = torch.cat(parts).detach()
            metrics = classification_metrics(q, target)
            row[method] = {"NLL": metrics.nll, "ECE": metrics.ece, "accuracy": metrics.accuracy}
            each = -q.gather(1, target[:, None])[:, 0].clamp_min(1e-38).log()
            losses[method] = each.unflatten(0, (len(CORRUPTIONS), -1)).mean(0)
        difference = bootstrap_difference(losses["iterncgp"], losses["temperature"], num_resamples=1000, seed=0)
        row["temperature less IterNCGP"] = [difference.lower, difference.upper]
        found[str(strength)] = row
    return found


def table(found: dict[str, Any], columns: list[str]) -> str:
    """Strengths in rows; in columns each method's NLL and what else is asked for, and the interval."""
    methods = ("network", "temperature", "iterncgp")
    lines = ["strength" + "".join(f"{f'{method} {column}':>22}" for column in columns for method in methods)]
    lines[0] += "    NLL of temperature less IterNCGP"
    for strength in map(str, STRENGTHS):
        row = found[strength]
        lower, upper = row["temperature less IterNCGP"]
        values = "".join(f"{row[method][column]:22.4f}" for column in columns for method in methods)
        lines.append(f"{strength:<8}{values}    {lower:+.4f} … {upper:+.4f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench shift", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="digits, a small fit: does it run?")
    parser.add_argument("--networks", default="mnist,fashion,cifar", help="some of them, with commas")
    parser.add_argument("--inputs", type=int, default=200, help="test images")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="of the table: some of NLL,ECE,accuracy")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    names = ["digits"] if options.quick else options.networks.split(",")
    columns = options.columns.split(",")
    if not set(columns) <= set(COLUMNS):
        parser.error(f"--columns must be some of {', '.join(COLUMNS)}; got {options.columns}")
    figures = {}
    for name in names:
        figures[name] = measured(name, 50 if options.quick else options.inputs, options.quick)
        print(table(figures[name], columns), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

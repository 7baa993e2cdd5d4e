"""One table in one run: post-hoc methods on the same network, the same inputs, the same link and the same tuning.

    ntk-iterncgp bench peers [--quick] [--json FILE]
    python -m benchmarks.peers --data mnist fashion --set data.train_limit=20000

Digits with a small CNN (where the exact posterior is known); MNIST with a LeNet-size CNN, Fashion-MNIST being what it
should not be sure about, and the other way round (where the data are there, NTK_ITERNCGP_DATA). The network as it is,
temperature scaling, the prior alone, laplace-torch's last layer, KFAC, SoD and ELLA, VaLLA, and IterNCGP after 1.3, 5
and 20 epochs. Each method has one number, chosen by two-fold cross-fit on the test inputs.

NLL       by quadrature, with the 95 % bootstrap interval of its difference to IterNCGP after 1.3 epochs
OOD       area under the ROC curve, by the entropy of the prediction, by its epistemic part where there is one, and by
          the variance of the difference between the two largest outputs, at the precision that the evidence prefers
epochs    CPU seconds of the fit over those of a forward+backward pass over the training data in the same process
MiB       the peak of memory in the fit, above what the process held before it
variance  the mean over inputs of its trace over that of the exact posterior, all at the same prior precision
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks.models import data_root
from ntk_iterncgp.experiments.config import RunConfig, load
from ntk_iterncgp.experiments.evaluation.baselines import BASELINES
from ntk_iterncgp.experiments.evaluation.compare import Result, compare_network
from ntk_iterncgp.experiments.evaluation.stopwatch import Stopwatch, peak_bytes, reset_peak
from ntk_iterncgp.experiments.runs.flavour import make_flavour
from ntk_iterncgp.experiments.runs.prepare import Setting, prepare, prepare_model
from ntk_iterncgp.posterior.weight_space import WeightPosterior

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PEERS = "map, temperature, prior, last_layer, kfac, sod, ella, valla"
WARM_UP = 50  # data
BUDGETS = (5.0, 20.0)  # epochs, after that of a plain fit
LENET = [  # some twenty minutes on one core, most of them for KFAC, ELLA and VaLLA
    f"evaluate.baselines=[{PEERS}]",
    "data.test_limit=2000",
    "data.ood_limit=1000",
    "data.batch_size=50",  # laplace-torch takes the rows of J of a whole batch at once
    "fit.max_rank=600",  # of the 4000 actions of 20 epochs: predictions with all of them would take longer than the fit
    "evaluate.ella_size=200",
    "evaluate.valla_steps=500",  # some 20 epochs
    "tuning.precision_min=0.1",
    "tuning.steps_per_decade=3",
]
SETTINGS: dict[str, tuple[str, str, list[str]]] = {  # title, configuration, what differs from it
    "digits": (
        "Digits, a CNN of 1446 weights",
        "digits.yaml",
        [f"evaluate.baselines=[{PEERS}, exact]", "evaluate.valla_steps=1000"],
    ),
    "mnist": (
        "MNIST, a LeNet of 61 706 weights",
        "mnist_lenet.yaml",
        LENET,
    ),
    "fashion": (
        "Fashion-MNIST, a LeNet of 61 706 weights",
        "fashion_lenet.yaml",
        LENET,
    ),
}
QUICK = ["data.train_limit=200", "data.test_limit=60", "data.ood_limit=60", "model.train_epochs=5"]
QUICK += ["data.batch_size=50", "fit.num_actions=20", "evaluate.valla_steps=20", "evaluate.link_samples=64"]


def epoch_seconds(model: nn.Module, loader: DataLoader) -> float:
    started = time.process_time()
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        model.zero_grad(set_to_none=True)
    return time.process_time() - started


def run(config: RunConfig) -> tuple[str, list[dict[str, Any]]]:
    """The sizes of the data sets, and a row for each method."""
    with prepare(config, "evaluate") as setting:
        return compared(config, setting)


def compared(config: RunConfig, setting: Setting) -> tuple[str, list[dict[str, Any]]]:
    model = prepare_model(setting)
    loader = DataLoader(setting.data.train, config.data.batch_size)
    unit = min(epoch_seconds(model, loader), epoch_seconds(model, loader))
    warm_up(config, model, setting.data.train)
    watch, first = Stopwatch(time.process_time), make_flavour(config, model)
    with watch("fit iterncgp", memory=True):
        first.fit(loader)
    setting.log(f"IterNCGP: {first.report_}")
    found = compare_network(
        first, model, setting.data, config, setting.log, watch=watch, more=refined(setting, model, loader, watch)
    )
    rows = [row_of(result, unit) for result in found.results]
    for row in rows:
        if row["method"] == "IterNCGP":
            row["method"] = f"IterNCGP, {first.report_.epochs:.1f} epochs"
    return sizes_of(setting), rows


def refined(setting: Setting, model: nn.Module, loader: DataLoader, watch: Stopwatch) -> dict[str, WeightPosterior]:
    """IterNCGP at larger budgets, the cost of each being that from the beginning."""
    la, held, posteriors = make_flavour(setting.config, model), reset_peak(), {}
    with watch("refine"):
        la.fit(loader)
    for budget in BUDGETS:
        with watch("refine"):
            la.refine(loader, epochs=budget - la.report_.epochs)
        name = f"IterNCGP, {budget:.1f} epochs"
        posteriors[name] = la.posterior
        watch.seconds[f"fit {name}"] = watch.seconds["refine"]
        if held is not None:
            watch.peak_bytes[f"fit {name}"] = peak_bytes() - held
        setting.log(f"{name}: {la.report_}")
    return posteriors


def warm_up(config: RunConfig, model: nn.Module, data: Dataset[Any]) -> None:
    """Every method once on few data: what is loaded when it is first needed shall not count as somebody's cost."""
    few = DataLoader(Subset(data, range(WARM_UP)), WARM_UP // 2)
    settings = replace(config.evaluate, valla_steps=1, sod_size=2, ella_size=WARM_UP, ella_rank=2)
    for name in config.evaluate.baselines:
        if name in BASELINES:
            BASELINES[name](model, few, settings, config.seed, torch.ones(1))
    la = make_flavour(config, model)
    la.fit(few)
    la.refine(few, epochs=1)


def row_of(result: Result, unit: float) -> dict[str, Any]:
    doubts = {kind: other.by_doubt for kind, other in result.ood.items()}
    margins = {kind: other.by_margin for kind, other in result.ood.items()}
    difference = result.difference
    return {
        "method": result.label,
        "nll": result.metrics.nll,
        "nll less IterNCGP": None if difference is None else [difference.lower, difference.upper],
        "ece": result.metrics.ece,
        "brier": result.metrics.brier,
        "ood by entropy": {kind: other.by_entropy.auroc for kind, other in result.ood.items()},
        "ood by doubt": {kind: None if doubt is None else doubt.auroc for kind, doubt in doubts.items()},
        "ood by margin": {kind: None if margin is None else margin.auroc for kind, margin in margins.items()},
        "epochs": result.fit_seconds / unit,
        "peak bytes": result.fit_bytes,
        "variance": {kind: float(ratio.mean()) for kind, ratio in result.exact_ratio.items()},
        "tuned to": result.values,
    }


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Headings, then one line for each method."""
    kinds = list(rows[0]["ood by entropy"])
    with_truth = [kind for kind in ("test", *kinds) if kind in rows[-1]["variance"]]
    headings = [
        "",
        "NLL",
        "less IterNCGP",
        "ECE",
        "Brier",
        *(f"{kind}: OOD by entropy / epistemic / margin" for kind in kinds),
    ]
    headings += ["epochs", "MiB", *(f"variance / exact, {kind}" for kind in with_truth)]
    lines = [headings]
    for row in rows:
        interval, peak = row["nll less IterNCGP"], row["peak bytes"]
        areas = [[row[f"ood by {score}"][kind] for score in ("entropy", "doubt", "margin")] for kind in kinds]
        lines.append(
            [
                row["method"],
                f"{row['nll']:.4f}",
                "" if interval is None else f"{interval[0]:+.4f} … {interval[1]:+.4f}",
                f"{row['ece']:.4f}",
                f"{row['brier']:.4f}",
                *(" / ".join("–" if area is None else f"{area:.3f}" for area in each) for each in areas),
                f"{row['epochs']:.1f}",
                "–" if peak is None else f"{peak / 2**20:.0f}",
                *(f"{row['variance'][kind]:.3g}" if row["variance"] else "–" for kind in with_truth),
            ]
        )
    return lines


def sizes_of(setting: Setting) -> str:
    """How much there was to learn from, and to be tested on."""
    data = setting.data
    counts = {"to learn from": data.train, "to be tested on": data.test, **{f"of {k}": v for k, v in data.ood.items()}}
    return ", ".join(f"{len(part):,} {name}" for name, part in counts.items())  # type: ignore[arg-type]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """As Markdown, with columns that line up on a screen, too."""
    lines = table(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    print(f"\n{title}\n")
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few digits, to try it out")
    parser.add_argument("--data", nargs="+", choices=SETTINGS, help="which tables (digits, and mnist if there)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings that differ, as of a run")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    chosen = options.data or (["digits", "mnist"] if data_root() is not None and not options.quick else ["digits"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that CPU seconds are comparable
    figures: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in chosen:
                title, file, changes = SETTINGS[name]
                changes = [*changes, *(QUICK if options.quick else []), *options.set, f"output_dir={folder}/{name}"]
                sizes, figures[name] = run(load(CONFIGS / file, changes))
                show(f"{title} ({sizes})", figures[name])
                if options.json:
                    options.json.write_text(json.dumps(figures, indent=2))
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()

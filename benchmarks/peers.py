"""One table in one run: post-hoc methods on the same network, the same inputs, the same link and the same tuning.

    ntk-iterncgp bench peers [--quick] [--json FILE]

Digits with a small CNN (where the exact posterior is known), and MNIST with a LeNet-size CNN (where the data are there,
NTK_ITERNCGP_DATA): the network as it is, temperature scaling, the prior alone, laplace-torch's last layer, KFAC, SoD
and ELLA, and ours after 1.3, 5 and 20 epochs. Each has one number, chosen by two-fold cross-fit on the test inputs. OOD
is the area under the ROC curve of the entropy, of Fashion-MNIST (digits: turned ones); cost is that of the fit in
forward+backward epochs of this run; variance is the mean over test inputs of the trace over that of the exact
posterior, at the same prior precision.
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

from torch import nn
from torch.utils.data import DataLoader

from benchmarks.models import data_root
from ntk_iterncgp.config import RunConfig, load
from ntk_iterncgp.evaluation.compare import Comparison, compare_network
from ntk_iterncgp.runs.fit import fit_network
from ntk_iterncgp.runs.prepare import prepare, prepare_model

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PEERS = "[map, temperature, prior, last_layer, kfac, sod, ella]"
EPOCHS = (5.0, 20.0)


def epoch_seconds(model: nn.Module, loader: DataLoader) -> float:
    started = time.perf_counter()
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        model.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def run(config: RunConfig) -> list[dict[str, Any]]:
    setting = prepare(config, "evaluate")
    model = prepare_model(setting)
    loader = DataLoader(setting.data.train, config.data.batch_size)
    unit = min(epoch_seconds(model, loader), epoch_seconds(model, loader))
    la = fit_network(setting, model).la
    rows = []

    def add(found: Comparison, *, ours_only: bool = False) -> None:
        for result in found.results:
            if ours_only and result.name != "ours":
                continue
            ratio = None
            if result.name == "ours" and found.exact_ratio is not None:
                ratio = float(found.exact_ratio.mean())
            name = f"ours, {la.report_.epochs:.1f} epochs" if result.name == "ours" else result.label
            rows.append(
                {
                    "method": name,
                    "nll": result.metrics.nll,
                    "ece": result.metrics.ece,
                    "brier": result.metrics.brier,
                    "ood": {kind: other.by_entropy.auroc for kind, other in result.ood.items()},
                    "ood by doubt": {
                        kind: other.by_doubt.auroc for kind, other in result.ood.items() if other.by_doubt is not None
                    },
                    "epochs": la.report_.seconds / unit if result.name == "ours" else result.fit_seconds / unit,
                    "variance": ratio,
                }
            )

    add(compare_network(la, model, setting.data, config, setting.log))
    only_exact = tuple(name for name in config.evaluate.baselines if name == "exact")
    alone = replace(config, evaluate=replace(config.evaluate, baselines=only_exact))
    for epochs in EPOCHS:
        la.refine(loader, epochs=epochs - la.report_.epochs)
        add(compare_network(la, model, setting.data, alone, setting.log), ours_only=True)
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    others = list(rows[0]["ood"])
    print(f"\n{title}\n{'':32}{'NLL':>8}{'ECE':>8}{'Brier':>8}" + "".join(f"{'OOD ' + o:>20}" for o in others), end="")
    print(f"{'epochs':>9}{'variance':>10}")
    for row in rows:
        areas = "".join(f"{row['ood'][o]:>20.3f}" for o in others)
        ratio = "" if row["variance"] is None else f"{row['variance']:.2f}"
        print(
            f"{row['method']:32}{row['nll']:8.4f}{row['ece']:8.4f}{row['brier']:8.4f}{areas}"
            f"{row['epochs']:9.1f}{ratio:>10}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few digits, for a look at the output")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"evaluate.baselines={PEERS[:-1]}, exact]", f"output_dir={folder}/digits"]
        if options.quick:
            changes += ["data.train_limit=200", "data.test_limit=60", "model.train_epochs=5", "fit.num_actions=20"]
        figures["digits"] = run(load(CONFIGS / "digits.yaml", changes))
        show("Digits, a small CNN", figures["digits"])
        if data_root() is not None and not options.quick:
            changes = [f"evaluate.baselines={PEERS}", "data.test_limit=2000", f"output_dir={folder}/mnist"]
            figures["mnist"] = run(load(CONFIGS / "mnist_lenet.yaml", changes))
            show("MNIST, a LeNet-size CNN, 2000 test images", figures["mnist"])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

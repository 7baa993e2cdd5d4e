"""What a prediction costs: milliseconds, forward passes and memory, and what few contrasts change.

    ntk-iterncgp bench prediction [--quick] [--only NAME …]
    python -m benchmarks.prediction --docs           # and the table into docs/scaling.md, with the commit

Networks trained briefly on images of MNIST and CIFAR-10 (noise where there are no data), and on noise that a random
linear map has labelled where there are more than ten classes. For each network, number of classes and number of actions
B: one posterior, and predictions by quadrature from one contrast, three, as many as each input needs ("auto"), and all;
and by the default link, probit, as many as each input needs. On one thread, in turns with forward passes over the same
inputs, in batches of 64 (of 32 for ResNet-18); the least seconds of the processor count. The batch matters: a forward
pass takes longer in small ones and in large ones, which changes its ratio to a prediction by up to a factor of two.
Memory is the most that the process held during a fit and during predictions, its libraries included.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

import ntk_iterncgp  # noqa: F401  registers the flavours
from benchmarks.models import cifar_images, cifar_resnet20, lenet, mnist_images
from benchmarks.tables import commit_of_tree, written
from ntk_iterncgp.experiments.evaluation.metrics import classification_metrics
from ntk_iterncgp.experiments.models import CifarResNet
from ntk_iterncgp.runtime.memory import mebibytes, peak_resident_bytes, restart_peak

ALL_NUMBERS = 2 * 10**7  # of J for one input, up to which all contrasts are computed
CONTRASTS: tuple[int | str, ...] = (1, 3, "auto", "all")
BATCH, FEW_INPUTS = 64, 32
PROBIT = "auto, probit"  # what la(x) does
PAGE, MARK = Path(__file__).resolve().parent.parent / "docs" / "scaling.md", "prediction"
Way = int | str


@dataclass(frozen=True)
class Setting:
    """A network, and how much of everything."""

    name: str
    make: Callable[[int], nn.Module]
    images: Callable[[int], tuple[Tensor, Tensor]]
    num_classes: int
    num_actions: int
    num_data: int = 2000
    num_inputs: int = 256
    epochs: int = 2
    repeats: int = 3
    storage: str | None = None
    subset: str = "all"  # of the weights
    precision: float = 100.0  # of the prior; for the trained ResNet-20 that of the lowest NLL

    def __str__(self) -> str:
        subset = "" if self.subset == "all" else ", last layer"
        return f"{self.name}{subset} C={self.num_classes} B={self.num_actions}{' bfloat16' if self.storage else ''}"


class Transformer(nn.Module):
    """Two layers of attention over the rows of an image."""

    def __init__(self, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(28, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.body(self.embed(x[:, 0]))
        logits: Tensor = self.head(tokens.mean(1))
        return logits


def mlp(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, num_classes))


def wide_mlp(num_classes: int) -> nn.Module:
    """With 512 features for the last layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, num_classes))


def resnet18_of(num_classes: int) -> nn.Module:
    return resnet18(num_classes=num_classes)


def resnet18_small_images(num_classes: int) -> nn.Module:
    """With the first layers that people give it for CIFAR: stride one, and no pooling."""
    model = resnet18(num_classes=num_classes)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def resnet20(num_classes: int) -> nn.Module:
    return cifar_resnet20() if num_classes == 10 else CifarResNet(num_classes=num_classes)


def settings() -> list[Setting]:
    few: dict[str, int] = {"num_data": 300, "num_inputs": FEW_INPUTS, "epochs": 1, "repeats": 1}
    return [
        *(Setting("LeNet", lambda _: lenet(), mnist_images, 10, B) for B in (50, 200, 1000)),
        *(Setting("MLP", mlp, mnist_images, C, 200) for C in (10, 100, 1000)),
        Setting("MLP D=512", wide_mlp, mnist_images, 1000, 200, subset="last_layer"),
        Setting("ResNet-18 D=512", resnet18_of, cifar_images, 1000, 200, subset="last_layer", **few),
        *(Setting("transformer", Transformer, mnist_images, C, 200) for C in (10, 100)),
        *(Setting("ResNet-20", resnet20, cifar_images, 10, B, epochs=0, precision=1e4) for B in (50, 200, 1000)),
        Setting("ResNet-20", resnet20, cifar_images, 100, 200, num_inputs=BATCH),
        *(Setting("ResNet-18", resnet18_of, cifar_images, C, 100, **few) for C in (10, 100, 1000)),
        Setting("ResNet-18", resnet18_of, cifar_images, 10, 100, storage="bfloat16", **few),
        Setting("ResNet-18, 3x3 first", resnet18_small_images, cifar_images, 10, 100, **few),
    ]


def quick_settings() -> list[Setting]:
    small: dict[str, int] = {"num_data": 60, "num_inputs": 8, "epochs": 1, "repeats": 1}
    return [
        Setting("MLP", mlp, mnist_images, 10, 5, **small),
        Setting("transformer", Transformer, mnist_images, 12, 5, storage="bfloat16", **small),
        Setting("MLP D=512", wide_mlp, mnist_images, 30, 5, subset="last_layer", **small),
    ]


def data_of(setting: Setting) -> tuple[Tensor, Tensor]:
    """Images and labels; of more than ten classes noise of that shape, with labels by a random linear map."""
    images, labels = setting.images(setting.num_data + setting.num_inputs)
    if setting.num_classes == 10:
        return images, labels
    drawn = torch.Generator().manual_seed(1)
    images = torch.randn(images.shape, generator=drawn)
    teacher = torch.randn(images[0].numel(), setting.num_classes, generator=drawn)
    return images, (images.flatten(1) @ teacher).argmax(1)


def trained(setting: Setting, images: Tensor, labels: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = setting.make(setting.num_classes).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(setting.epochs):
        for x, y in DataLoader(TensorDataset(images, labels), BATCH, shuffle=True, drop_last=True):
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval().requires_grad_(True)


def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def predicted(la: Any, x: Tensor, way: Way) -> Tensor:
    probabilities: Tensor = la(x) if way == PROBIT else la(x, link_approx="quadrature", contrasts=way)
    return probabilities


def measured(setting: Setting) -> dict[str, Any]:
    images, labels = data_of(setting)
    train, test = slice(0, setting.num_data), slice(setting.num_data, None)
    model = trained(setting, images[train], labels[train])
    settings: dict[str, Any] = {"num_actions": setting.num_actions, "prior_precision": setting.precision}
    la = Laplace(model, "classification", setting.subset, "iterncgp", storage=setting.storage, **settings)
    gc.collect()
    restart_peak()
    la.fit(DataLoader(TensorDataset(images[train], labels[train]), BATCH))
    found: dict[str, Any] = {"setting": str(setting), "weights": la.n_params, "fit bytes": peak_resident_bytes()}
    x, y = images[test], labels[test]
    ways: list[Way] = [*CONTRASTS, PROBIT]
    if la.n_params * setting.num_classes > ALL_NUMBERS:
        ways.remove("all")
    restart_peak()
    predictions = {way: predicted(la, x, way) for way in ways}
    found["predict bytes"] = peak_resident_bytes()
    least = dict.fromkeys(["forward", *ways], float("inf"))
    with torch.no_grad():
        for _ in range(setting.repeats):
            least["forward"] = min(least["forward"], seconds(lambda: [model(part) for part in x.split(BATCH)]))
            for way in ways:
                least[way] = min(least[way], seconds(partial(predicted, la, x, way)))
    found["rows"] = {
        str(way): {
            "milliseconds": 1000 * least[way] / len(x),
            "forwards": least[way] / least["forward"],
            "NLL": classification_metrics(probabilities, y).nll,
            "ECE": classification_metrics(probabilities, y).ece,
        }
        for way, probabilities in predictions.items()
    }
    return found


def show(found: dict[str, Any]) -> None:
    everything = found["rows"].get("all")
    print(
        f"{found['setting']}: {found['weights']:,} weights; fit {mebibytes(found['fit bytes'])}, "
        f"predictions {mebibytes(found['predict bytes'])}"
    )
    for way, row in found["rows"].items():
        beside = ["", ""]
        if everything is not None and way not in ("all", PROBIT):
            beside = [f"{row[what] - everything[what]:+.4f}" for what in ("NLL", "ECE")]
        print(
            f"  {way:>12}{row['milliseconds']:12.2f}{row['forwards']:10.1f}{row['NLL']:10.4f}{beside[0]:>9}"
            f"{row['ECE']:10.4f}{beside[1]:>9}",
            flush=True,
        )


def table(results: list[dict[str, Any]], commit: str) -> str:
    """A line for each setting, in forward passes; the milliseconds of "auto", and what it changes."""
    heads = ["", "weights", *map(str, CONTRASTS), PROBIT, '"auto", ms', "NLL, ECE to all", "fit, predictions"]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for found in results:
        rows = found["rows"]
        forwards = [f"{rows[way]['forwards']:.1f}" if way in rows else "" for way in [*map(str, CONTRASTS), PROBIT]]
        change = [f"{rows['auto'][what] - rows['all'][what]:+.4f}" for what in ("NLL", "ECE")] if "all" in rows else []
        memory = ", ".join(mebibytes(found[what]) for what in ("fit bytes", "predict bytes"))
        auto = f"{rows['auto']['milliseconds']:.2f}"
        lines.append([found["setting"], f"{found['weights']:,}", *forwards, auto, ", ".join(change), memory])
    caption = (
        f"`python -m benchmarks.prediction --docs` at commit `{commit}`, one thread: predictions with k = 1, 3, "
        '"auto" or all contrasts by quadrature and with "auto" by probit, in forward passes of the network in batches '
        f"of {BATCH} (of {FEW_INPUTS} for ResNet-18)."
    )
    return "\n".join([caption, "", *(f"| {' | '.join(line)} |" for line in lines)])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench prediction", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small networks, for a look at the output")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="settings that begin so, as 'ResNet-18 C=10 '")
    parser.add_argument("--docs", action="store_true", help="write the table of all settings into docs/scaling.md")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    chosen = quick_settings() if options.quick else settings()
    if options.docs and (options.quick or options.only):
        parser.error("--docs must come with all settings; got --quick or --only. Try --docs alone.")
    commit = commit_of_tree()  # of what runs, whatever happens to the folder meanwhile
    if options.only:
        chosen = [setting for setting in chosen if str(setting).startswith(tuple(options.only))]
    threads, results = torch.get_num_threads(), []
    torch.set_num_threads(1)
    print(f"{'contrasts':>14}{'ms/input':>11}{'forwards':>10}{'NLL':>10}{'to all':>9}{'ECE':>10}{'to all':>9}")
    try:
        for setting in chosen:
            results.append(measured(setting))
            show(results[-1])
            if options.docs:  # each time, so that what was measured is not lost
                page = written(PAGE.read_text(encoding="utf-8"), MARK, table(results, commit))
                PAGE.write_text(page, encoding="utf-8")
    finally:
        torch.set_num_threads(threads)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()

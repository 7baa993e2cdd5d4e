"""Does one score tell unfamiliar inputs from familiar ones on every network, without labels, outliers or tuning?

    ntk-iterncgp bench detection [--quick] [--networks digits,mnist,fashion,cifar] [--inputs 250] [--json FILE]
    ntk-iterncgp bench detection --checkpoint FILE --data fashion_mnist --model lenet

Networks: a CNN on digits, LeNet on MNIST and on Fashion-MNIST (trained here, on 20 000 images), and the public CIFAR-10
ResNet-20; or any network of these data sets whose weights are in a file. Images under NTK_ITERNCGP_DATA. Unfamiliar
inputs are made of test images (`UNFAMILIAR`), or are those of another data set. Other familiar inputs calibrate.
Methods, and what they cost for an input, in forward passes, of which a backward pass is two:

entropy, energy    of the network                                       1
mahalanobis, knn   on features of the last layer                        1; and one pass over the training data
last layer, KFAC   laplace-torch, entropy of the prediction by          1, and 1 + 2C for the rows of all outputs;
                   quadrature at the precision of least NLL on 200      about an epoch for the fit
                   calibrating inputs, with labels
prior              the margin over its prior standard deviation         3
detector           `la.detector`, 200 actions                           3; about one epoch for the fit
by …               its parts and other scores, alone                    3

AUROC in percent, FPR95 beside it: its mean and the worst AUROC over the sets, and the cost. Then how often alarms come
on other familiar inputs, and how far their p-values are from uniform (Kolmogorov–Smirnov).
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from laplace import Laplace
from safetensors.torch import load_file
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import functional as images

import ntk_iterncgp  # noqa: F401  registers the flavours
from ntk_iterncgp.experiments.config import DataConfig, EvaluateConfig
from ntk_iterncgp.experiments.datasets.known import KNOWN, data_root, digits, known
from ntk_iterncgp.experiments.evaluation.baselines import Baseline, Kfac, LastLayer, Unavailable
from ntk_iterncgp.experiments.evaluation.crossfit import nll_of
from ntk_iterncgp.experiments.evaluation.links import entropy
from ntk_iterncgp.experiments.evaluation.ood import ood_metrics
from ntk_iterncgp.experiments.models import build, load_checkpoint
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.jacobian.rows import DenseRows
from ntk_iterncgp.laplace_torch.detector import Detector, _prior_of, measured_at
from ntk_iterncgp.posterior.detection import Measured, Novelty, by_median
from ntk_iterncgp.posterior.scores import AUTO, SCORES, TYPICALITY, Latent, against_rest

NETWORKS = {  # data set, network, epochs of training, another data set
    "digits": ("digits", "cnn", 60, "fashion_mnist"),
    "mnist": ("mnist", "lenet", 10, "fashion_mnist"),
    "fashion": ("fashion_mnist", "lenet", 10, "mnist"),
    "cifar": ("cifar10", "cifar_resnet20", 0, "fashion_mnist"),
}
OTHERS = {"fashion_mnist": "mnist"}  # another data set for those of a checkpoint; else Fashion-MNIST
TRAINING, NEIGHBOURS, FEATURES = 20_000, 10, 5_000
CALIBRATING, HELD_OUT = 3_000, 5_000  # familiar inputs, at most
TUNING = 200  # of these, with labels, for the precision of laplace-torch's methods
LAPLACES = {"last layer": LastLayer, "KFAC": Kfac}
HALVES, DRAWS = (50, 100, 200, 400, 1000), 8  # inputs of each of two detectors, and how often these are drawn
PRECISIONS = torch.logspace(-2, 5, 15, dtype=torch.float64)
AT_ONCE = 20  # inputs whose rows of J are written out
PASSES = {"entropy": 1, "energy": 1, "mahalanobis": 1, "knn": 1, "last layer": 1, "KFAC": 21}  # of ten classes; else 3

UNFAMILIAR: dict[str, Callable[[Tensor], Tensor]] = {
    "quarter turn": lambda x: torch.rot90(x, 1, (2, 3)),
    "turned by 35°": lambda x: images.rotate(x, 35.0),
    "mirrored": lambda x: x.flip(3),
    "upside down": lambda x: x.flip(2),
    "noisy": lambda x: (x + 0.4 * torch.randn(x.shape, generator=_generator())).clamp(0, 1),
    "blurred": lambda x: images.gaussian_blur(x, 5 if x.shape[-1] < 28 else 9, 1.2 if x.shape[-1] < 28 else 2.0),
    "faint": lambda x: 0.25 * x + 0.75 * x.mean((1, 2, 3), keepdim=True),
    "uniform noise": lambda x: torch.rand(x.shape, generator=_generator()),
    "negative": lambda x: 1 - x,
}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def raw(name: str, train: bool) -> tuple[Tensor, Tensor]:
    """Images in [0, 1] and labels."""
    return digits(0)[0 if train else 1] if name == "digits" else known(name, train, DataConfig())


def scaled(name: str, x: Tensor) -> Tensor:
    """As the network takes them."""
    if name == "digits":
        return x
    scaling = KNOWN[name][2]
    mean, std = (torch.tensor(values)[:, None, None] for values in (scaling.mean, scaling.std))
    return (x - mean) / std


def network(name: str, x: Tensor, y: Tensor, epochs: int, checkpoint: Path | None = None) -> nn.Module:
    """The network, trained by Adam on a cosine schedule; or one whose weights are given."""
    data, kind, *_ = NETWORKS[name]
    torch.manual_seed(0)
    model = build(kind, 10, tuple(x.shape[1:]))
    if checkpoint is not None:
        load_checkpoint(model, checkpoint, kind)
        return model.eval()
    if not epochs:
        model.load_state_dict(
            load_file(data_root(DataConfig()) / "pretrained/cifar10_resnet20.safetensors"), strict=False
        )
        return model
    optimizer = torch.optim.Adam(model.parameters(), 1e-2 if data == "digits" else 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (1 + (len(x) - 1) // 100))
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.train()(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def features_of(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and what goes into the last linear layer."""
    seen: list[Tensor] = []
    last = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]
    handle = last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1)))
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in x.split(250)])
    handle.remove()
    return outputs.double(), torch.cat(seen).double()


class Baselines:
    """What asks for no posterior, from the features of some training inputs."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.model, (_, features) = model, features_of(model, x)
        self.means = torch.stack([features[y == c].mean(0) for c in range(10)])
        spread = features - self.means[y]
        covariance = spread.T @ spread / len(spread)
        self.precision = torch.linalg.pinv(
            covariance + 1e-6 * covariance.trace() * torch.eye(len(covariance)) / len(covariance)
        )
        unit = nn.functional.normalize(features, dim=1)
        self.neighbours = NearestNeighbors(n_neighbors=min(NEIGHBOURS, len(x))).fit(unit.numpy())

    def __call__(self, x: Tensor) -> dict[str, Tensor]:
        outputs, features = features_of(self.model, x)
        away = features[:, None] - self.means
        distances = self.neighbours.kneighbors(nn.functional.normalize(features, dim=1).numpy())[0][:, -1]
        log_p = outputs.log_softmax(1)
        return {
            "entropy": -(log_p.exp() * log_p).sum(1),
            "energy": -outputs.logsumexp(1),
            "mahalanobis": torch.einsum("bcd,de,bce->bc", away, self.precision, away).min(1).values,
            "knn": torch.from_numpy(distances),
        }


def by_laplace_torch(
    model: nn.Module, data: TensorDataset, tuning: tuple[Tensor, Tensor], sets: dict[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """The entropy of the predictions of `LAPLACES` at each set, at the precision of least NLL on the tuning inputs."""
    fitted: dict[str, Baseline] = {}
    for name, kind in LAPLACES.items():
        try:
            fitted[name] = kind(model, DataLoader(data, 250), EvaluateConfig(), 0, PRECISIONS)
        except Unavailable as error:
            print(f"{name}: not available here: {error}")
    jacobian, (x, y) = Jacobian(model.eval()), tuning
    with torch.no_grad():
        for part in torch.cat([x, *sets.values()]).split(AT_ONCE):
            for rows in jacobian.rows_in_parts(part, len(part), None, 10, 2**30):
                for baseline in fitted.values():
                    baseline.see(DenseRows(rows.outputs, rows.written_out()))
    found = {}
    for name, baseline in fitted.items():
        family = baseline.family(1.0, 512)
        losses = [
            nll_of(family.probabilities(i, torch.arange(len(x)), "quadrature"), y) for i in range(len(PRECISIONS))
        ]
        best, start = int(torch.stack(losses).mean(1).argmin()), len(x)
        found[name] = {}
        for kind, inputs in sets.items():
            chosen = torch.arange(start, start := start + len(inputs))
            found[name][kind] = entropy(family.probabilities(best, chosen, "quadrature"))
    return found


def prior_margin(la: Any, x: Tensor) -> Tensor:
    """−(margin over the rest) / √k(x, x): the posterior of no data at all."""
    with torch.no_grad():
        rows = list(la._rows_at(x, against_rest))
    variance = torch.cat([r.covariance(torch.ones(1, dtype=torch.float64))[:, 0, 0] for r in rows])
    outputs = torch.cat([r.outputs for r in rows]).double()
    return -(outputs[..., None] * against_rest(outputs)).sum((1, 2)) / variance.sqrt()


def latent_at(det: Detector, x: Tensor) -> Latent:
    """What the scores are asked about."""
    parts = [part.latent(det.prior) for part in measured_at(det.la, det.prior, x)]
    return Latent(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Latent)))


def alone(det: Detector, x: Tensor) -> dict[str, Tensor]:
    """The detector and each score alone, from one pass."""
    latent = latent_at(det, x)
    typical = det.novelty.typicality(latent.features(of_classes=True), latent.classes(of_classes=True))
    each = {f"by {name}": score(latent) for name, score in SCORES.items() if name not in ("energy", "entropy")}
    return {"detector": det.novelty.score(latent), f"by {TYPICALITY}": typical, **each}


def uniformity(det: Detector, x: Tensor) -> dict[str, float]:
    """Of the p-values of familiar inputs: the fraction of alarms, and the largest distance from their distribution."""
    p = det.p_value(x).sort().values
    places = torch.arange(len(p) + 1, dtype=torch.float64) / len(p)
    distance = max(float((places[1:] - p).max()), float((p - places[:-1]).max()))
    alarms = {f"alarms at {rate:g}": float((p <= rate).double().mean()) for rate in (0.01, 0.05)}
    return {"ranked": float(len(det.novelty)), "held out": float(len(p)), "KS": distance, **alarms}


def measured(
    name: str, num_inputs: int, quick: bool, checkpoint: Path | None = None, in_halves: bool = False
) -> tuple[dict[str, dict[str, tuple[float, float]]], Any]:
    """AUROC and FPR95 of each method on each set, and what p-values of familiar inputs look like."""
    data, _, epochs, other = NETWORKS[name]
    (x, y), (test, labels) = raw(data, True), raw(data, False)
    x, y = scaled(data, x[:TRAINING]), y[:TRAINING]
    model = network(name, x, y, min(epochs, 20) if quick else epochs, checkpoint)
    la: Any = Laplace(model, "classification", "all", "iterncgp", num_actions=40 if quick else 200)
    la.fit(DataLoader(TensorDataset(x, y), 500))
    order = torch.randperm(len(test), generator=_generator())
    num_inputs = min(num_inputs, len(test) // 2)
    plain, calibrating = test[order[:num_inputs]], test[order[num_inputs : num_inputs + CALIBRATING]]
    held_out = test[order[num_inputs + CALIBRATING :][:HELD_OUT]]
    made = {kind: make(plain) for kind, make in UNFAMILIAR.items()}
    if not quick:
        made[KNOWN[other][1]] = _like(raw(other, False)[0][:num_inputs], plain)
    det = la.detector(scaled(data, calibrating))
    print(det)
    baselines = Baselines(model, x[:FEATURES], y[:FEATURES])

    def scores(inputs: Tensor) -> dict[str, Tensor]:
        inputs = scaled(data, inputs)
        return {**baselines(inputs), "prior": prior_margin(la, inputs), **alone(det, inputs)}

    tuning = order[num_inputs : num_inputs + TUNING]
    every = {"own": plain, **made}
    entropies = by_laplace_torch(
        model,
        TensorDataset(x, y),
        (scaled(data, test[tuning]), labels[tuning]),
        {kind: scaled(data, inputs) for kind, inputs in every.items()},
    )
    all_scores = {
        kind: scores(inputs) | {method: of_kind[kind] for method, of_kind in entropies.items()}
        for kind, inputs in every.items()
    }
    if in_halves:
        halves(la, scaled(data, calibrating), {kind: scaled(data, inputs) for kind, inputs in every.items()})
    known_scores = all_scores.pop("own")
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for kind, of_kind in all_scores.items():
        for method, values in of_kind.items():
            metrics = ood_metrics(known_scores[method], values)
            found.setdefault(method, {})[kind] = (metrics.auroc, metrics.fpr95)
    return found, uniformity(det, scaled(data, held_out)) if len(held_out) else {}


def halves(la: Any, familiar: Tensor, sets: dict[str, Tensor]) -> dict[int, dict[str, float]]:
    """Detectors of n familiar inputs and of n others: their mean AUROC over the sets, and by how much the two differ.

    Args:
        la: The fitted posterior.
        familiar: Inputs to draw from, as the network takes them.
        sets: Unfamiliar ones by name, and other familiar ones, "own".
    """
    prior = _prior_of(la, balances=True)
    seen = {kind: Measured.cat(list(measured_at(la, prior, x.split(250)))) for kind, x in sets.items()}
    pool, found = Measured.cat(list(measured_at(la, prior, familiar.split(250)))), {}

    def area(chosen: Tensor) -> float:
        own = by_median(pool[chosen], prior, 1.75)
        novelty = Novelty.of(AUTO["classification"], pool[chosen].latent(own), None, of_classes=True)
        scores = {kind: novelty.score(part.latent(own)) for kind, part in seen.items()}
        return mean(ood_metrics(scores["own"], other).auroc for kind, other in scores.items() if kind != "own")

    for n in (n for n in HALVES if 2 * n <= len(familiar)):
        pairs = []
        for draw in range(DRAWS):
            order = torch.randperm(len(familiar), generator=torch.Generator().manual_seed(draw))
            pairs.append([area(order[:n]), area(order[n : 2 * n])])
        apart = [abs(one - other) for one, other in pairs]
        found[n] = {"AUROC": mean(map(mean, pairs)), "mean difference": mean(apart), "largest": max(apart)}
        shown = ", ".join(f"{what} {value:.4f}" for what, value in found[n].items())
        print(f"two detectors of {n} inputs each: {shown}", flush=True)
    return found


def _like(x: Tensor, others: Tensor) -> Tensor:
    """Images in the size and the number of channels of others."""
    resized = nn.functional.interpolate(x, others.shape[2:], mode="bilinear", antialias=True)
    return resized.expand(-1, others.shape[1], -1, -1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench detection", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="digits, a small fit: does it run?")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="some of them, with commas")
    parser.add_argument("--inputs", type=int, default=250, help="of each kind")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--halves", action="store_true", help="also how much two detectors of n inputs each differ")
    parser.add_argument("--checkpoint", type=Path, help="weights of any network for --data, of ten classes")
    parser.add_argument("--data", default="cifar10", choices=["digits", *KNOWN], help="what it was trained on")
    parser.add_argument("--model", default="cifar_resnet20", help="its architecture, or module:function that makes it")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    figures: dict[str, Any] = {}
    names = ["digits"] if options.quick else options.networks.split(",")
    if options.checkpoint is not None:
        other = OTHERS.get(options.data, "fashion_mnist")
        NETWORKS["checkpoint"], names = (options.data, options.model, 0, other), ["checkpoint"]
    for name in names:
        num_inputs = 100 if options.quick else options.inputs
        table, familiar = measured(name, num_inputs, options.quick, options.checkpoint, options.halves)
        figures[name] = {**table, "familiar": familiar}
        kinds = list(next(iter(table.values())))
        print(f"\n{name}: {', '.join(kinds)}")
        rows = {method: torch.tensor([found[kind] for kind in kinds]) for method, found in table.items()}
        for method, row in sorted(rows.items(), key=lambda item: -float(item[1][:, 0].mean())):
            shown = " ".join(f"{100 * value:5.1f}" for value in row[:, 0].tolist())
            average, worst, passing = 100 * row[:, 0].mean(), 100 * row[:, 0].min(), 100 * row[:, 1].mean()
            cost = f"cost {PASSES.get(method, 3)}"
            print(f"{method:22}{shown}   mean {average:.1f} worst {worst:.1f} FPR95 {passing:.1f} {cost}", flush=True)
        print("familiar inputs: " + ", ".join(f"{what} {value:.4g}" for what, value in familiar.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

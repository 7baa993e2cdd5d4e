"""Where does conditioning on the data beat the prior alone? Networks on digits, by how sure they are of themselves.

    ntk-iterncgp bench when_it_helps [--quick] [--json FILE]

Means of turning the same logits into probabilities, tuned by two-fold cross-fit on the test set: a temperature, the
prior alone (variance J Jᵀ/δ, no data), the posterior given all data (clusters, B = 200), and `la.calibrate`, which
tunes the temperature and the precision of that posterior together.
NLL by quadrature. Detection of digits turned by 90°, and of noise, by the epistemic part of the uncertainty: the
area under the ROC curve. The mean over seeds, and in how many of them the data beat the prior alone.

Then a regression (scikit-learn's diabetes), and the refined mean (Newton to the mode of the linearised model) against
the network's own at the same prior precisions.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from laplace import Laplace
from sklearn.datasets import load_diabetes, load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from ntk_iterncgp.laplace_torch.grid import pass_once
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.posterior.predictive import classification_uncertainty, expected_response
from ntk_iterncgp.posterior.tuning import Moments, ScalarPath

GRID = torch.logspace(-2, 4, 25, dtype=torch.float64)
TEMPERATURES = torch.logspace(-0.7, 0.7, 25, dtype=torch.float64)
METHODS = ("MAP", "temperature", "prior alone", "all data", "calibrate", "all data, refined")


@dataclass(frozen=True)
class Setting:
    name: str
    num_train: int
    epochs: int
    noisy_labels: float = 0.0


SETTINGS = [
    Setting("confident (60 epochs)", 1000, 60),
    Setting("less confident (6 epochs)", 1000, 6),
    Setting("small data (150 digits)", 150, 60),
    Setting("noisy labels (20 %)", 1000, 30, 0.2),
]


def digits(setting: Setting, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    X, y = torch.as_tensor(images / 16, dtype=torch.float32)[order], torch.as_tensor(labels)[order]
    train, test = slice(0, setting.num_train), slice(1097, None)
    noisy = torch.rand(setting.num_train, generator=generator) < setting.noisy_labels
    wrong = torch.randint(0, 10, (setting.num_train,), generator=generator)
    return X[train], torch.where(noisy, wrong, y[train]), X[test], y[test]


def trained(X: Tensor, y: Tensor, setting: Setting, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, weight_decay=1e-4)
    for _ in range(setting.epochs):
        for x, target in DataLoader(TensorDataset(X, y), 32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), target).backward()
            optimizer.step()
    return model.eval()


def nll(probabilities: Tensor, labels: Tensor) -> Tensor:
    return -probabilities.gather(1, labels[:, None])[:, 0].clamp_min(1e-38).log()


def cross_fitted(losses: list[Tensor]) -> tuple[float, int]:
    """Two halves: each scored with the candidate that is best on the other; and the best candidate on all."""
    table = torch.stack(losses)  # (candidates, inputs)
    half = table.shape[1] // 2
    first, second = table[:, :half], table[:, half:]
    total = first[second.mean(1).argmin()].sum() + second[first.mean(1).argmin()].sum()
    return float(total) / table.shape[1], int(table.mean(1).argmin())


def scores(la: Any, test: tuple[Tensor, Tensor], ood: list[Tensor], with_data: bool) -> tuple[float, list[float]]:
    """NLL, and AUROC for each set of other inputs, at the best precision of the grid."""

    def moments(X: Tensor, y: Tensor) -> Callable[[Tensor], Moments]:
        parts = pass_once(la, DataLoader(TensorDataset(X, y), 256), progress_bar=False)
        path = ScalarPath(la.posterior, parts, torch.ones(()))

        def at(precision: Tensor) -> Moments:
            if with_data:
                found = path.moments(precision)
            else:
                found = [(part.outputs, part.covariance[0] / precision, part.targets) for part in parts]
            means, covariances, targets = (torch.cat(items) for items in zip(*found, strict=True))
            return means, covariances, targets

        return at

    inside = moments(*test)
    losses = []
    for precision in GRID:
        latent, covariance, labels = inside(precision)
        losses.append(nll(expected_response(Softmax(10), latent, covariance, link="quadrature"), labels))
    value, best = cross_fitted(losses)
    known = classification_uncertainty(*inside(GRID[best])[:2]).epistemic
    areas = []
    for X in ood:
        other = moments(X, torch.zeros(len(X), dtype=torch.long))(GRID[best])
        epistemic = classification_uncertainty(*other[:2]).epistemic
        labels = torch.cat([torch.zeros(len(known)), torch.ones(len(epistemic))])
        areas.append(float(roc_auc_score(labels, torch.cat([known, epistemic]))))
    return value, areas


def calibrated(la: Any, test: tuple[Tensor, Tensor], ood: list[Tensor]) -> list[float]:
    """NLL, and AUROC for each set of other inputs, with `la.calibrate` on one half and scores on the other."""
    X, y = test
    first, second = slice(None, len(y) // 2), slice(len(y) // 2, None)
    losses, areas = [], []
    for tuning, rest in ((second, first), (first, second)):
        la.calibrate(DataLoader(TensorDataset(X[tuning], y[tuning]), 256))
        losses.append(nll(la(X[rest], link_approx="quadrature"), y[rest]))
        known = la.uncertainty(X[rest]).epistemic
        others = [la.uncertainty(other[rest]).epistemic for other in ood]
        labels = torch.cat([torch.zeros(len(known)), torch.ones(len(known))])
        areas.append([float(roc_auc_score(labels, torch.cat([known, other]))) for other in others])
    la.output_temperature, la.prior_precision = 1.0, 1.0
    return [float(torch.cat(losses).mean()), *(mean(pair) for pair in zip(*areas, strict=True))]


def compare(setting: Setting, seed: int) -> dict[str, list[float]]:
    X, y, X_test, y_test = digits(setting, seed)
    model = trained(X, y, setting, seed)
    turned = X_test.unflatten(1, (8, 8)).rot90(1, (1, 2)).flatten(1)
    noise = torch.rand(len(X_test), 64, generator=torch.Generator().manual_seed(seed))
    ood = [turned, noise]
    with torch.no_grad():
        logits, others = model(X_test), [model(x) for x in ood]

    def entropy_areas(temperature: float) -> list[float]:
        areas = []
        for other in others:
            both = torch.cat([logits, other]) / temperature
            entropy = torch.distributions.Categorical(logits=both).entropy()
            labels = torch.cat([torch.zeros(len(logits)), torch.ones(len(other))])
            areas.append(float(roc_auc_score(labels, entropy)))
        return areas

    tempered = [nll((logits / float(t)).softmax(1), y_test) for t in TEMPERATURES]
    value, best = cross_fitted(tempered)
    results = {
        "MAP": [float(nll(logits.softmax(1), y_test).mean()), *entropy_areas(1.0)],
        "temperature": [value, *entropy_areas(float(TEMPERATURES[best]))],
    }
    loader = DataLoader(TensorDataset(X, y), 64)
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=200)
    la.fit(loader)
    for name, with_data in (("prior alone", False), ("all data", True)):
        value, areas = scores(la, (X_test, y_test), ood, with_data)
        results[name] = [value, *areas]
    results["calibrate"] = calibrated(la, (X_test, y_test), ood)
    la.refine(loader, epochs=2)
    value, areas = scores(la, (X_test, y_test), ood, True)
    results["all data, refined"] = [value, *areas]
    return results


def regression(seed: int) -> dict[str, float]:
    """NLL on held-out patients: no variance but the noise, the prior alone, all data; precision by cross-fit."""
    X, y = (torch.as_tensor(a, dtype=torch.float32) for a in load_diabetes(return_X_y=True))
    X, y = X / X.std(0), ((y - y.mean()) / y.std())[:, None]
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    train, test = order[:242], order[242:]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-3)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X[train]), y[train]).backward()
        optimizer.step()
    noise = float((model(X[train]) - y[train]).std().detach())
    la = Laplace(model, "regression", "all", "iterncgp", num_actions=100, sigma_noise=noise)
    la.fit(DataLoader(TensorDataset(X[train], y[train]), 64))
    parts = pass_once(la, DataLoader(TensorDataset(X[test], y[test]), 200), progress_bar=False)
    path = ScalarPath(la.posterior, parts, la._noise_scale.detach())

    def losses(variance: Tensor) -> Tensor:
        spread = variance + noise**2
        return 0.5 * ((y[test][:, 0] - parts[0].outputs[:, 0]).square() / spread + (2 * torch.pi * spread).log())

    found = {"noise alone": float(losses(torch.zeros(len(test))).mean())}
    found["prior alone"] = cross_fitted([losses(parts[0].covariance[0, :, 0, 0] / d) for d in GRID])[0]
    found["all data"] = cross_fitted([losses(path.moments(d)[0][1][:, 0, 0]) for d in GRID])[0]
    return found


def refined_mean(seed: int) -> dict[str, float]:
    """NLL of the network's own mean and of the refined one, at three prior precisions."""
    X, y, X_test, y_test = digits(SETTINGS[0], seed)
    model, loader = trained(X, y, SETTINGS[0], seed), DataLoader(TensorDataset(X, y), 250)
    found = {}
    for precision in (1.0, 10.0, 100.0):
        for kind in ("network", "refined"):
            la = Laplace(
                model,
                "classification",
                "all",
                "iterncgp",
                mean=kind,
                policy="curvature_residual",
                num_actions=60,
                prior_precision=precision,
            )
            la.fit(loader)
            found[f"{kind}, {precision:g}"] = float(nll(la(X_test, link_approx="quadrature"), y_test).mean())
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench when_it_helps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed of the smallest setting")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    figures: dict[str, dict[str, list[float]]] = {}
    for setting in SETTINGS[2:3] if options.quick else SETTINGS:
        runs = [compare(setting, seed) for seed in range(1 if options.quick else 3)]
        figures[setting.name] = {m: [mean(run[m][i] for run in runs) for i in range(3)] for m in METHODS}
        wins = sum(run["all data"][0] < run["prior alone"][0] for run in runs)
        print(f"{setting.name}: the data beat the prior alone in NLL in {wins} of {len(runs)} seeds")
        print(f"  {'':20}{'NLL':>8}{'AUROC turned':>15}{'AUROC noise':>14}")
        for method in METHODS:
            loss, turned, noise = figures[setting.name][method]
            print(f"  {method:20}{loss:8.4f}{turned:15.3f}{noise:14.3f}", flush=True)
    for title, experiment in (("diabetes, NLL", regression), ("the mean, NLL at precisions", refined_mean)):
        if options.quick and experiment is refined_mean:
            continue
        many = [experiment(seed) for seed in range(1 if options.quick else 3)]
        figures[title] = {name: [mean(run[name] for run in many)] for name in many[0]}
        print(title + ": " + ", ".join(f"{name} {value[0]:.4f}" for name, value in figures[title].items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

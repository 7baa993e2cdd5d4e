"""`evaluate` for real targets: the methods of a network, or of a kernel, at the test inputs, set side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ntk_iterncgp.experiments.datasets import labels_of
from ntk_iterncgp.experiments.evaluation.baselines import rows_of
from ntk_iterncgp.experiments.evaluation.compare import precision_grid
from ntk_iterncgp.experiments.evaluation.crossfit import folds_of
from ntk_iterncgp.experiments.evaluation.regression import (
    LABELS,
    Fixed,
    GaussianFamily,
    IterNCGP,
    RegressionComparison,
    Spectral,
    Units,
    compare,
)
from ntk_iterncgp.experiments.evaluation.stopwatch import Stopwatch
from ntk_iterncgp.experiments.evaluation.sweep import rows_at
from ntk_iterncgp.experiments.progress import Say, reported, reporting
from ntk_iterncgp.experiments.runs.kernel import flat_inputs
from ntk_iterncgp.experiments.runs.predictor import NetworkPredictor, Predictor
from ntk_iterncgp.experiments.runs.prepare import Setting
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.posterior.tuning import ValidationPart

OFFERED = ("map", "prior", "exact")
ONLY_CLASSES = "It is offered for classification alone."
ONLY_NETWORKS = "It is about the weights of a network, and this run has a kernel in its place."
INPUTS_AT_ONCE = 500


def compare_targets(
    setting: Setting, predictor: Predictor, model: nn.Module | None, watch: Stopwatch
) -> RegressionComparison:
    """IterNCGP beside constant noise, the prior alone and the exact posterior, as the settings ask."""
    config, scaling = setting.config, setting.data.target_scaling
    assert scaling is not None
    unavailable = {_label(name): ONLY_CLASSES for name in config.evaluate.baselines if name not in OFFERED}
    if isinstance(predictor, NetworkPredictor):
        assert model is not None
        families, too_large = _of_network(setting, predictor.la, model, watch)
        unavailable |= too_large
        start = (float(predictor.la.prior_precision.reshape(-1)[0]), predictor.noise_variance)
    else:
        families, start = _of_kernel(setting, predictor, watch), (1.0, predictor.noise_variance)
        about_weights = [name for name in config.evaluate.baselines if name in OFFERED and name not in families]
        unavailable |= {_label(name): ONLY_NETWORKS for name in about_weights}
    wanted = {*config.evaluate.baselines, "iterncgp"}
    targets = labels_of(setting.data.test)[:, 0].double()
    found = compare(
        {name: family for name, family in families.items() if name in wanted},
        targets,
        folds_of(config, len(targets)),
        start=start,
        units=Units(scaling.mean[0], scaling.std[0]),
        watch=watch,
        config=config,
        unavailable=unavailable,
    )
    for result in found.results:
        _warn_of_ends(result.label, families[result.name].precisions.tolist(), result.values, setting.log)
    return found


def _warn_of_ends(label: str, grid: list[float], values: list[tuple[float, float]], log: Say) -> None:
    precisions = [precision for precision, _ in values]
    if len(grid) > 1 and {grid[0], grid[-1]} & set(precisions):
        chosen = " / ".join(f"{value:.3g}" for value in precisions)
        log(f"{label}: tuned to {chosen}, an end of the grid: at the upper one, its variance does not help here")


def _of_network(
    setting: Setting, la: Any, model: nn.Module, watch: Stopwatch
) -> tuple[dict[str, GaussianFamily], dict[str, str]]:
    config, data, grid = setting.config, setting.data, precision_grid(setting.config)
    unavailable: dict[str, str] = {}
    spectrum = None
    if "exact" in config.evaluate.baselines:
        weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if config.fit.subset_of_weights != "all" or weights > config.evaluate.exact_limit:
            unavailable[_label("exact")] = f"{weights:,} weights; it is computed for few of them, and all."
        else:
            with watch("fit exact", memory=True):
                spectrum = _eigenbasis(model, DataLoader(data.train, config.data.batch_size), setting.log)
    parts, Z = _seen(setting, la, None if spectrum is None else spectrum[0], watch)
    mean = torch.cat([part.outputs for part in parts])[:, 0].cpu()
    kernel = torch.cat([part.covariance.sum(0) for part in parts])[:, 0, 0].double().cpu()
    families: dict[str, GaussianFamily] = {
        "map": Fixed(mean, torch.zeros_like(kernel)),
        "prior": Spectral(mean, kernel.sqrt()[:, None], kernel.new_zeros(1), grid),
    }
    if spectrum is not None:
        families["exact"] = Spectral(mean, torch.cat(Z), spectrum[1].cpu(), grid)
    families["iterncgp"] = IterNCGP(la.posterior, parts, grid, refined=la.settings.mean == "refined")
    return families, unavailable


def _seen(
    setting: Setting, la: Any, basis: Tensor | None, watch: Stopwatch
) -> tuple[list[ValidationPart], list[Tensor]]:
    """The test inputs through the posterior, and in the eigenbasis of the exact one: one computation of J for both."""
    shift, parts, Z = la.mean - la.prior_mean, [], []
    loader: DataLoader[Any] = DataLoader(setting.data.test, setting.config.data.batch_size)
    rows: Any
    for rows, y in rows_at(la, loader, setting.log, written_out=basis is not None, watch=watch):
        with watch("see iterncgp"):
            parts.append(ValidationPart.of(rows, la.posterior, shift, y))
        if basis is not None:
            with watch("see exact"):
                Z.append((rows.jacobian[:, 0].double() @ basis).cpu())
    for name in ("iterncgp", *(["exact"] if basis is not None else [])):  # each would need them
        watch.seconds[f"see {name}"] = watch.seconds.get(f"see {name}", 0.0) + watch.seconds.get("rows", 0.0)
    return parts, Z


def _label(name: str) -> str:
    return LABELS.get(name, name.replace("_", " "))


def _eigenbasis(model: nn.Module, loader: DataLoader[Any], say: Say) -> tuple[Tensor, Tensor]:
    """Eigenvectors and eigenvalues of JᵀJ over the training data."""
    total: Tensor | None = None
    with reporting(f"Fitting: {_label('exact')}", say) as progress:
        for rows in rows_of(Jacobian(model), loader, progress):
            J = rows.jacobian[:, 0].double()
            total = J.T @ J if total is None else total + J.T @ J
    assert total is not None
    values, vectors = torch.linalg.eigh(total)
    return vectors, values


def latent_at(predictor: Predictor, x: Tensor, say: Say) -> list[tuple[Tensor, Tensor]]:
    """Latent moments at all inputs, some at a time."""
    parts = x.split(INPUTS_AT_ONCE)
    return [predictor.latent(part) for part in reported(parts, "Test inputs", say, total=len(parts), unit="parts")]


def _of_kernel(setting: Setting, predictor: Predictor, watch: Stopwatch) -> dict[str, GaussianFamily]:
    data = setting.data
    with watch("see iterncgp"):
        x = flat_inputs(data.test, data.scaling, data.input_shape)
        parts = latent_at(predictor, x, setting.log)
    mean, variance = torch.cat([m[:, 0] for m, _ in parts]), torch.cat([c[:, 0, 0] for _, c in parts]).clamp_min(0)
    return {"map": Fixed(mean, torch.zeros_like(variance)), "iterncgp": Fixed(mean, variance)}

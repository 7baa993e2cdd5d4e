"""`evaluate` for real targets: the methods of a network, or of a kernel, at the test inputs, set side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ntk_iterncgp.datasets import labels_of
from ntk_iterncgp.evaluation.baselines import rows_of
from ntk_iterncgp.evaluation.compare import Stopwatch, precision_grid
from ntk_iterncgp.evaluation.crossfit import folds_of
from ntk_iterncgp.evaluation.regression import (
    LABELS,
    Fixed,
    GaussianFamily,
    Ours,
    RegressionComparison,
    Spectral,
    Units,
    compare,
)
from ntk_iterncgp.laplace_addon.grid import pass_once
from ntk_iterncgp.priors.jacobian import Jacobian
from ntk_iterncgp.runs.kernel import flat_inputs
from ntk_iterncgp.runs.predictor import NetworkPredictor, Predictor
from ntk_iterncgp.runs.prepare import Setting

OFFERED = ("map", "prior", "exact")
ONLY_CLASSES = "It is offered for classification alone."
ONLY_NETWORKS = "It is about the weights of a network, and this run has a kernel in its place."
INPUTS_AT_ONCE = 500


def compare_targets(
    setting: Setting, predictor: Predictor, model: nn.Module | None, watch: Stopwatch
) -> RegressionComparison:
    """Ours beside constant noise, the prior alone and the exact posterior, as the settings ask."""
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
    wanted = {*config.evaluate.baselines, "ours"}
    targets = labels_of(setting.data.test)[:, 0].double()
    return compare(
        {name: family for name, family in families.items() if name in wanted},
        targets,
        folds_of(config, len(targets)),
        start=start,
        units=Units(scaling.mean[0], scaling.std[0]),
        watch=watch,
        config=config,
        unavailable=unavailable,
    )


def _of_network(
    setting: Setting, la: Any, model: nn.Module, watch: Stopwatch
) -> tuple[dict[str, GaussianFamily], dict[str, str]]:
    config, data, grid = setting.config, setting.data, precision_grid(setting.config)
    with watch("see ours"):
        parts = pass_once(la, DataLoader(data.test, config.data.batch_size), True)
    mean = torch.cat([part.outputs for part in parts])[:, 0].cpu()
    kernel = torch.cat([part.covariance.sum(0) for part in parts])[:, 0, 0].double().cpu()
    families: dict[str, GaussianFamily] = {
        "map": Fixed(mean, torch.zeros_like(kernel)),
        "prior": Spectral(mean, kernel.sqrt()[:, None], kernel.new_zeros(1), grid),
    }
    unavailable: dict[str, str] = {}
    if "exact" in config.evaluate.baselines:
        weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if config.fit.subset_of_weights != "all" or weights > config.evaluate.exact_limit:
            unavailable[_label("exact")] = f"{weights:,} weights; it is computed for few of them, and all."
        else:
            with watch("fit exact", memory=True):
                basis, eigenvalues = _eigenbasis(model, DataLoader(data.train, config.data.batch_size))
            with watch("see exact"):
                test = rows_of(Jacobian(model), DataLoader(data.test, config.data.batch_size))
                Z = torch.cat([(rows.jacobian[:, 0].double() @ basis).cpu() for rows in test])
            families["exact"] = Spectral(mean, Z, eigenvalues.cpu(), grid)
    families["ours"] = Ours(la.posterior, parts, grid, refined=la.settings.mean == "refined")
    return families, unavailable


def _label(name: str) -> str:
    return LABELS.get(name, name.replace("_", " "))


def _eigenbasis(model: nn.Module, loader: DataLoader) -> tuple[Tensor, Tensor]:
    """Eigenvectors and eigenvalues of JᵀJ over the training data."""
    total: Tensor | None = None
    for rows in rows_of(Jacobian(model), loader):
        J = rows.jacobian[:, 0].double()
        total = J.T @ J if total is None else total + J.T @ J
    assert total is not None
    values, vectors = torch.linalg.eigh(total)
    return vectors, values


def _of_kernel(setting: Setting, predictor: Predictor, watch: Stopwatch) -> dict[str, GaussianFamily]:
    data = setting.data
    with watch("see ours"):
        x = flat_inputs(data.test, data.scaling, data.input_shape)
        parts = [predictor.latent(part) for part in x.split(INPUTS_AT_ONCE)]
    mean, variance = torch.cat([m[:, 0] for m, _ in parts]), torch.cat([c[:, 0, 0] for _, c in parts]).clamp_min(0)
    return {"map": Fixed(mean, torch.zeros_like(variance)), "ours": Fixed(mean, variance)}

"""The prior precision that `fit` leaves behind, and the noise of a regression: never chosen on what is tested on.

held out    the NLL, by the accurate link, of data that the network was not trained on and the posterior not fitted to
evidence    where there are none (a checkpoint may have seen all training data): the lower bound, from small matrices

The evidence judges the linearised model, not its calibration, and tends to small precisions: the log says which it was.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ntk_iterncgp.evaluation import regression
from ntk_iterncgp.evaluation.compare import precision_grid
from ntk_iterncgp.evaluation.crossfit import crossfit
from ntk_iterncgp.evaluation.families import Ours
from ntk_iterncgp.laplace_addon.grid import pass_once
from ntk_iterncgp.runs.prepare import Setting


def tune(setting: Setting, la: Any) -> None:
    """Sets `prior_precision`, and `sigma_noise` of a regression, and says how they were found."""
    if setting.config.tuning.protocol == "none":
        return
    held_out, is_regression = setting.data.held_out, setting.data.task == "regression"
    if held_out is None:
        _by_evidence(setting, la, with_noise=is_regression)
        how = (
            "the evidence, since no data are held out. For calibrated probabilities name some that the network has not "
            "seen: data.held_out, data.held_out_from"
        )
    else:
        (_by_targets if is_regression else _by_labels)(setting, la, held_out)
        how = f"the NLL of {len(held_out):,} inputs held out"  # type: ignore[arg-type]
    noise = f" and noise {_own_units(setting, float(la.sigma_noise)):.3g}" if is_regression else ""
    setting.log(f"Prior precision {float(la.prior_precision):.3g}{noise}, by {how}.")


def _by_labels(setting: Setting, la: Any, held_out: Dataset[Any]) -> None:
    config = setting.config
    parts = pass_once(la, DataLoader(held_out, config.data.batch_size), True)
    family = Ours(
        la.posterior,
        parts,
        la._noise_scale.detach(),
        refined=config.fit.mean == "refined",
        grid=precision_grid(config),
        start=config.fit.prior_precision,
        num_samples=config.evaluate.link_samples,
    )
    labels = torch.cat([part.targets for part in parts]).cpu()
    everything = torch.arange(len(labels))
    la.prior_precision = crossfit(family, labels, [(everything, everything)], "accurate").values[0]


def _by_targets(setting: Setting, la: Any, held_out: Dataset[Any]) -> None:
    config = setting.config
    parts = pass_once(la, DataLoader(held_out, config.data.batch_size), True)
    family = regression.Ours(la.posterior, parts, precision_grid(config), refined=config.fit.mean == "refined")
    targets = torch.cat([part.targets for part in parts]).double().cpu()[:, 0]
    precision, noise = regression.tune(family, targets, torch.arange(len(targets)))
    la.prior_precision, la.sigma_noise = float(precision), math.sqrt(noise)


def _by_evidence(setting: Setting, la: Any, *, with_noise: bool) -> None:
    precisions = precision_grid(setting.config)
    noises = regression.NOISES.sqrt() if with_noise else None

    def loss(i: int, j: int) -> float:
        noise = None if noises is None else noises[j].to(la.mean)
        with torch.no_grad():
            return -float(la.log_marginal_likelihood(precisions[i].to(la.mean), noise))

    i, j = regression.best_pair(len(precisions), 1 if noises is None else len(noises), loss)
    la.prior_precision = float(precisions[i])
    if noises is not None:
        la.sigma_noise = float(noises[j])


def _own_units(setting: Setting, noise: float) -> float:
    scaling = setting.data.target_scaling
    return noise if scaling is None else noise * scaling.std[0]

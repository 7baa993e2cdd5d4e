"""The hyperparameters that `fit` leaves behind: never chosen on what is tested on.

held out    of a classifier output temperature and precision together (`la.calibrate`), of a regression precision and
            noise: by the NLL of data that the network was not trained on and the posterior not fitted to
evidence    where there are none, or too few of them: the lower bound, from small matrices

The evidence judges the linearised model, not its calibration, and tends to small precisions (CIFAR-10, ResNet-20: 56,
where 10 000 has the least NLL): the log says which of the two it was, and what to do.

The grid of the settings is widened, three decades at a time, while its best point is at an end. Where that goes on to
the limits there is no optimum: the NLL is least without any variance (a network that is too cautious by itself) or the
prior has no part in it. A precision there would be no uncertainty at all, so the one furthest inside is taken that
costs at most `TOLERANCE` nats per datum, and a warning says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ntk_iterncgp.experiments.config import RunConfig
from ntk_iterncgp.experiments.evaluation import regression
from ntk_iterncgp.experiments.evaluation.compare import precision_grid
from ntk_iterncgp.experiments.evaluation.sweep import validation_parts
from ntk_iterncgp.experiments.evaluation.uncertainty import gaussian_losses
from ntk_iterncgp.experiments.progress import reporting
from ntk_iterncgp.experiments.runs.prepare import LEAST_HELD_OUT, Setting

LIMITS = (1e-9, 1e12)  # of the precisions that are tried
DECADES = 3  # by which a grid is widened at a time
TOLERANCE = 0.01  # nats per datum

Loss = Callable[[int, int], float]
"""Nats per datum, at a place of the grid of precisions and one of the grid of noises."""


@dataclass(frozen=True)
class Search:
    """All precisions that may be tried, and which of them the settings name."""

    precisions: Tensor  # (g,), ascending
    first: int
    last: int

    @classmethod
    def of(cls, config: RunConfig) -> Search:
        """The grid of the settings, continued in its own steps up to the limits."""
        inner = precision_grid(config).log10()
        step = float(inner[-1] - inner[0]) / (len(inner) - 1)
        below = max(0, math.ceil((float(inner[0]) - math.log10(LIMITS[0])) / step - 1e-9))
        above = max(0, math.ceil((math.log10(LIMITS[1]) - float(inner[-1])) / step - 1e-9))
        places = torch.arange(-below, len(inner) + above, dtype=torch.float64)
        return cls(10 ** (inner[0] + step * places), below, below + len(inner) - 1)

    def best(self, num_noises: int, loss: Loss) -> Found:
        """The pair of least loss inside a grid that is widened as far as it takes; or what comes near it."""
        cached = cache(loss)
        first, last, end = self.first, self.last, len(self.precisions) - 1
        more = math.ceil(DECADES / float((self.precisions[1] / self.precisions[0]).log10()))
        while True:
            i, j = regression.best_pair(last - first + 1, num_noises, partial(_shifted, cached, first))
            i += first
            if i == first > 0:
                first = max(0, first - more)
            elif i == last < end:
                last = min(end, last + more)
            else:
                break
        if i not in (0, end):
            return Found(i, j, is_widened=not self.first <= i <= self.last)
        inwards = range(1, self.last + 1) if i == 0 else range(end - 1, self.first - 1, -1)
        worth = list(takewhile(lambda k: cached(k, j) <= cached(i, j) + TOLERANCE, inwards))
        return Found(worth[-1] if worth else i, j, limit="smaller" if i == 0 else "larger")


def _shifted(loss: Loss, first: int, i: int, j: int) -> float:
    return loss(first + i, j)


@dataclass(frozen=True)
class Found:
    """The places of a precision and a noise on their grids."""

    precision: int
    noise: int
    is_widened: bool = False
    limit: str | None = None  # "larger" or "smaller" is better without end


def tune(setting: Setting, la: Any) -> None:
    """Set `prior_precision`, and `output_temperature` or `sigma_noise`, and report how they were found."""
    held_out, is_regression = setting.data.held_out, setting.data.task == "regression"
    if setting.config.tuning.protocol == "none":
        return
    if setting.config.fit.mean == "refined" and not is_regression:
        setting.log(
            f"Prior precision {setting.config.fit.prior_precision:.3g}, as set (fit.prior_precision): a refined mean "
            "of a classifier is the mode under one prior, and another precision takes another fit."
        )
        return
    if held_out is not None and not is_regression:
        with reporting(f"Calibrating on {len(held_out):,} held-out inputs", setting.log):  # type: ignore[arg-type]
            loader = DataLoader(held_out, setting.config.data.batch_size)
            found = la.calibrate(loader, contrasts=setting.config.fit.contrasts)
        setting.log(str(found))
        return
    search = Search.of(setting.config)
    noises = regression.NOISES if is_regression else torch.ones(1)
    if held_out is None:
        loss, how = _of_evidence(setting, la, search, noises), _by_evidence(setting)
    else:
        loss = _of_targets(setting, la, search, held_out)
        how = f"the NLL of {len(held_out):,} inputs held out"  # type: ignore[arg-type]
    found = search.best(len(noises), loss)
    la.prior_precision = float(search.precisions[found.precision])
    if is_regression:
        la.sigma_noise = math.sqrt(noises[found.noise])
    noise = f" and noise {_own_units(setting, float(la.sigma_noise)):.3g}" if is_regression else ""
    setting.log(f"Prior precision {float(la.prior_precision):.3g}{noise}, by {how}.")
    _comment(setting, found, "the evidence" if held_out is None else "the NLL")


def _by_evidence(setting: Setting) -> str:
    why = "no data are held out"
    if setting.config.data.held_out is None and setting.config.model.epochs_here > 0:
        why = f"{LEAST_HELD_OUT} inputs to choose on would be more than a fifth of the training data"
    return (
        f"the evidence, since {why}: predictions may be far too cautious. Name some that the network has not seen, for "
        "instance data.held_out=1000 with data.held_out_from=test"
    )


def _comment(setting: Setting, found: Found, criterion: str) -> None:
    own = "or set a precision yourself: tuning=none with fit.prior_precision"
    if found.limit is not None:
        what = "a posterior without variance" if found.limit == "larger" else "a prior without a say"
        setting.log(
            f"Warning: {criterion} has no optimum, the {found.limit} the precision the better: it prefers {what}. The "
            f"precision above costs at most {TOLERANCE} nats per datum. Train the network until it fits its training "
            f"data, hold out more data, {own}."
        )
    elif found.is_widened:
        tuning = setting.config.tuning
        setting.log(
            f"  that is outside of tuning.precision_min and precision_max, {tuning.precision_min:g} and "
            f"{tuning.precision_max:g}, between which {criterion} has no optimum"
        )


def _of_targets(setting: Setting, la: Any, search: Search, held_out: Dataset[Any]) -> Loss:
    config = setting.config
    parts = validation_parts(la, DataLoader(held_out, config.data.batch_size), setting.log, "Held-out inputs")
    family = regression.IterNCGP(la.posterior, parts, search.precisions, refined=config.fit.mean == "refined")
    targets = torch.cat([part.targets for part in parts]).double().cpu()[:, 0]
    everything = torch.arange(len(targets))

    def loss(i: int, j: int) -> float:
        mean, variance = family.moments(search.precisions[i], regression.NOISES[j], everything)
        return float(gaussian_losses(mean, variance + regression.NOISES[j], targets).mean())

    return loss


def _of_evidence(setting: Setting, la: Any, search: Search, noises: Tensor) -> Loss:
    num_data, is_regression = int(la.n_data), setting.data.task == "regression"

    def loss(i: int, j: int) -> float:
        noise = noises[j].sqrt().to(la.mean) if is_regression else None
        with torch.no_grad():
            return -float(la.log_marginal_likelihood(search.precisions[i].to(la.mean), noise)) / num_data

    return loss


def _own_units(setting: Setting, noise: float) -> float:
    scaling = setting.data.target_scaling
    return noise if scaling is None else noise * scaling.std[0]

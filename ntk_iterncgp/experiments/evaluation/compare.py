"""All methods on the same footing: same network, same test inputs, same rows of J, same link, same tuning protocol.

One sweep over the test inputs (and the out-of-distribution ones) computes the rows of J, which every method uses. Then
each method's hyperparameter is chosen by cross-fitting (`crossfit.py`), its probabilities are scored, and the
difference of its NLL to that of IterNCGP gets a bootstrap interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from ntk_iterncgp.experiments.config import EvaluateConfig, RunConfig
from ntk_iterncgp.experiments.datasets import Data
from ntk_iterncgp.experiments.evaluation.baselines import BASELINES, Baseline, Unavailable
from ntk_iterncgp.experiments.evaluation.crossfit import Fold, Tuned, coarse_places, crossfit, folds_of, nll_of
from ntk_iterncgp.experiments.evaluation.families import Calibrated, Family, IterNCGP, Latent, Tempered
from ntk_iterncgp.experiments.evaluation.links import entropy
from ntk_iterncgp.experiments.evaluation.metrics import ClassificationMetrics, classification_metrics
from ntk_iterncgp.experiments.evaluation.ood import OODMetrics, ood_metrics
from ntk_iterncgp.experiments.evaluation.stopwatch import Stopwatch
from ntk_iterncgp.experiments.evaluation.sweep import rows_at
from ntk_iterncgp.experiments.evaluation.uncertainty import Difference, area_under_risk_curve, bootstrap_difference
from ntk_iterncgp.experiments.progress import Progress, Say, reporting
from ntk_iterncgp.jacobian.rows import DenseRows
from ntk_iterncgp.posterior.tuning import ValidationPart
from ntk_iterncgp.posterior.weight_space import WeightPosterior

LABELS = {"map": "network as it is (MAP)", "temperature": "temperature scaling", "iterncgp": "IterNCGP"}
LABELS |= {"calibrated": "IterNCGP, calibrated"}  # output temperature and precision together, as a fit does
LABELS |= {name: kind.label for name, kind in BASELINES.items()}
TEMPERATURES = torch.logspace(-1, 1, 161, dtype=torch.float64)  # steps of 3 %


@dataclass(frozen=True, eq=False)
class OtherKind:
    """Scores of out-of-distribution inputs, beside those of the test inputs."""

    by_entropy: OODMetrics
    by_doubt: OODMetrics | None
    by_margin: OODMetrics | None  # the variance of the top-two difference, all at the precision of the evidence
    test_scores: Tensor  # entropy (b,)
    other_scores: Tensor


@dataclass(frozen=True, eq=False)
class Result:
    """One method's line of the table, and what its figures are drawn from."""

    name: str
    label: str
    metrics: ClassificationMetrics
    probit: ClassificationMetrics | None  # by the diagonal link, where a method has variances
    aurc: float
    values: list[float]  # the hyperparameter of each fold
    fit_seconds: float
    predict_seconds: float
    probabilities: Tensor = field(repr=False)  # (b, C) at the scored inputs
    losses: Tensor = field(repr=False)  # NLL (b,)
    tuned: Tuned = field(repr=False)
    ood: dict[str, OtherKind] = field(default_factory=dict, repr=False)
    difference: Difference | None = None  # its NLL less that of IterNCGP
    output_temperatures: list[float] = field(default_factory=list)  # of each fold, beside these values
    fit_bytes: int | None = None  # the peak of memory, where it was measured
    exact_ratio: dict[str, Tensor] = field(default_factory=dict, repr=False)  # set -> its variance over the exact one


@dataclass(frozen=True, eq=False)
class Comparison:
    """Everything a report shows."""

    results: list[Result]
    labels: Tensor  # of the scored inputs (b,)
    scored: Tensor  # their places in the test set (b,)
    unavailable: dict[str, str]  # label -> why
    contraction: dict[str, Tensor]  # set -> posterior over prior variance at each input, by IterNCGP
    rows_seconds: float
    information: float | None = None  # captured, at the tuned prior precision
    evidence_precision: float | None = None  # of the grid, where our bound on the evidence is largest

    def __getitem__(self, name: str) -> Result:
        return next(result for result in self.results if result.name == name)

    @property
    def exact_ratio(self) -> Tensor | None:
        """Our variance over the exact one at each test input."""
        return self["iterncgp"].exact_ratio.get("test")


def precision_grid(config: RunConfig) -> Tensor:
    """Of the settings; two at least, its ends."""
    low, high = (math.log10(value) for value in (config.tuning.precision_min, config.tuning.precision_max))
    size = 1 + max(1, round((high - low) * config.tuning.steps_per_decade))
    return torch.logspace(low, high, size, dtype=torch.float64)


def compare_network(
    la: Any,
    model: nn.Module,
    data: Data,
    config: RunConfig,
    log: Say,
    *,
    watch: Stopwatch | None = None,
    more: Mapping[str, WeightPosterior] | None = None,
) -> Comparison:
    """IterNCGP as in `la`, beside the baselines of the settings; `more` are posteriors of `la` at other budgets."""
    watch, grid, start = watch or Stopwatch(), precision_grid(config), float(la.prior_precision.reshape(-1)[0])
    is_refined = la.settings.mean == "refined"  # and then has the precision of its fit, which must be on the grid
    if is_refined:
        grid = torch.cat([grid, torch.tensor([start], dtype=grid.dtype)]).unique()
    posteriors = {"iterncgp": la.posterior, **(more or {})}
    loader = DataLoader(data.train, config.data.batch_size)
    baselines, unavailable = _fit_baselines(model, loader, config, grid, watch, log, all_weights=_is_dense(la))
    sets: dict[str, Dataset[Any]] = {"test": data.test, **data.ood}
    sizes = {name: len(part) for name, part in sets.items()}  # type: ignore[arg-type]
    everything: DataLoader[Any] = DataLoader(ConcatDataset(list(sets.values())), config.data.batch_size)
    parts = _seen(la, everything, posteriors, baselines, watch, log)
    outputs = torch.cat([part.outputs for part in parts["iterncgp"]])
    labels = torch.cat([part.targets for part in parts["iterncgp"]])[: sizes["test"]]
    settings = config.evaluate
    families: dict[str, Family] = {}
    if "map" in settings.baselines:
        families["map"] = Tempered(outputs, torch.ones(1, dtype=torch.float64))
    if "temperature" in settings.baselines:
        families["temperature"] = Tempered(outputs, TEMPERATURES)
    families |= {name: kind.family(start, settings.link_samples) for name, kind in baselines.items()}
    iterncgp = {
        name: IterNCGP(
            posterior,
            parts[name],
            la._noise_scale.detach(),
            refined=is_refined,
            grid=grid,
            start=start,
            num_samples=settings.link_samples,
        )
        for name, posterior in posteriors.items()
    }
    families |= iterncgp
    if not is_refined:  # which has the precision of its fit
        families["calibrated"] = Calibrated(iterncgp["iterncgp"], (float(la.output_temperature), start))
        watch.seconds["fit calibrated"] = watch.seconds.get("fit iterncgp", 0.0)
        watch.seconds["see calibrated"] = watch.seconds.get("see iterncgp", 0.0) + watch.seconds.get("rows", 0.0)
    evident = iterncgp["iterncgp"].start if is_refined else _evident(la, grid)
    found = compare_families(
        families,
        labels,
        sizes,
        config,
        log,
        watch=watch,
        unavailable=unavailable,
        prior=iterncgp["iterncgp"],
        evident=evident,
    )
    found = replace(found, evidence_precision=None if is_refined else float(grid[evident]))
    tuned = torch.tensor([found["iterncgp"].values[0]], dtype=torch.float64, device=la.posterior.images.device)
    return replace(found, information=la.posterior.information_captured(tuned, la._noise_scale))


def compare_families(
    families: Mapping[str, Family],
    labels: Tensor,  # of the test inputs (N,)
    sizes: Mapping[str, int],  # of the sets, the test set first
    config: RunConfig,
    log: Say,
    *,
    watch: Stopwatch,
    unavailable: dict[str, str],
    prior: IterNCGP | None = None,
    evident: int | None = None,  # where in the grid of precisions detection by variances is scored
    names: Mapping[str, str] = LABELS,
) -> Comparison:
    """Tune, score and compare; `families` see the inputs of all sets, one after the other."""
    labels = labels.cpu()
    settings, all_folds = config.evaluate, folds_of(config, len(labels))
    others = _other_folds(sizes, len(all_folds))
    results = []
    for name, family in families.items():
        label = names.get(name, name)
        log(f"Tuning and scoring: {label}")
        with reporting(f"Tuning and scoring: {label}", log) as progress:
            results.append(_result(name, label, family, labels, all_folds, others, watch, evident, progress))
        if results[-1].tuned.at_edge:
            values = " / ".join(f"{value:.3g}" for value in results[-1].values)
            log(f"  tuned to {values}, an end of the grid: at the upper one, its variance does not help here")
    iterncgp = next(result for result in results if result.name == "iterncgp")
    compared = [_with_difference(result, iterncgp, settings, config.seed) for result in results]
    chosen = {"test": torch.arange(sizes["test"])} | {name: torch.cat(list(parts)) for name, parts in others.items()}
    index, contraction = iterncgp.tuned.indices[0], {}
    if prior is not None:
        contraction = {name: _contraction(prior, index, inputs) for name, inputs in chosen.items()}
    exact = families.get("exact")
    if isinstance(exact, Latent):
        truth = {name: _trace(exact, index, inputs) for name, inputs in chosen.items()}
        compared = [_with_ratio(result, families[result.name], index, chosen, truth) for result in compared]
    scored = iterncgp.tuned.scored
    return Comparison(compared, labels[scored], scored, unavailable, contraction, watch.seconds.get("rows", 0.0))


def _fit_baselines(
    model: nn.Module,
    loader: DataLoader[Any],
    config: RunConfig,
    grid: Tensor,
    watch: Stopwatch,
    log: Say,
    *,
    all_weights: bool,
) -> tuple[dict[str, Baseline], dict[str, str]]:
    fitted: dict[str, Baseline] = {}
    unavailable: dict[str, str] = {}
    for name in config.evaluate.baselines:
        kind = BASELINES.get(name)
        if kind is None:  # map and temperature need no fit
            continue
        if not all_weights:
            unavailable[kind.label] = "It needs rows of J for all weights, and this run is about the last layer."
            continue
        log(f"Fitting: {kind.label}")
        try:
            with reporting(f"Fitting: {kind.label}", log) as progress, watch(f"fit {name}", memory=True):
                fitted[name] = kind(model, loader, config.evaluate, config.seed, grid, progress)
        except Unavailable as error:
            unavailable[kind.label] = str(error)
            log(f"  not available here: {error}")
    return fitted, unavailable


def _evident(la: Any, grid: Tensor) -> int:
    """Where the bound on the evidence is largest."""
    precision, bounds = la.prior_precision, []
    for value in grid:
        bounds.append(float(la.log_marginal_likelihood(prior_precision=value.reshape(1).to(precision))))
    la.prior_precision = precision
    return int(torch.tensor(bounds).argmax())


def _is_dense(la: Any) -> bool:
    return type(la).__name__ == "IterNCGPAllLaplace"


def _seen(
    la: Any,
    loader: DataLoader[Any],
    posteriors: Mapping[str, WeightPosterior],
    baselines: Mapping[str, Baseline],
    watch: Stopwatch,
    log: Say,
) -> dict[str, list[ValidationPart]]:
    """What each posterior makes of all inputs; baselines keep what they need themselves."""
    shift = la.mean - la.prior_mean
    parts: dict[str, list[ValidationPart]] = {name: [] for name in posteriors}
    rows: Any
    for rows, y in rows_at(la, loader, log, written_out=bool(baselines), watch=watch):
        for name, posterior in posteriors.items():
            with watch(f"see {name}"):
                parts[name].append(ValidationPart.of(rows, posterior, shift, y))
        for name, baseline in baselines.items():
            with watch(f"see {name}"):
                baseline.see(DenseRows(rows.outputs, rows.jacobian))
    return parts


def _other_folds(sizes: Mapping[str, int], num_folds: int) -> dict[str, tuple[Tensor, ...]]:
    """Out-of-distribution inputs have no labels to tune on: each fold's hyperparameter scores its own part of them."""
    first, result = sizes["test"], {}
    for name, size in sizes.items():
        if name != "test":
            result[name] = torch.arange(first, first + size).tensor_split(num_folds)
            first += size
    return result


def _result(
    name: str,
    label: str,
    family: Family,
    labels: Tensor,
    all_folds: list[Fold],
    others: Mapping[str, tuple[Tensor, ...]],
    watch: Stopwatch,
    evident: int | None,
    progress: Progress,
) -> Result:
    most = len(coarse_places(len(family.grid))) + 4 * len(all_folds)  # values that are tried
    progress.start(most * (1 + isinstance(family, Latent)), "values of its hyperparameter")
    tuned = crossfit(family, labels, all_folds, "quadrature", evaluated=progress.advance)
    p, y = tuned.probabilities.cpu(), labels[tuned.scored]
    probit = None
    if isinstance(family, Latent):
        q = crossfit(family, labels, all_folds, "probit", evaluated=progress.advance)
        probit = classification_metrics(q.probabilities.cpu(), y)
    ood = {}
    doubt = _doubt(family, tuned, [score for _, score in all_folds])
    for other, parts in others.items():
        pairs = list(zip(tuned.indices, parts, strict=True))
        scores = entropy(torch.cat([family.probabilities(i, part, "quadrature") for i, part in pairs])).cpu()
        by_doubt = by_margin = None
        if doubt is not None:
            by_doubt = ood_metrics(doubt, _doubt(family, tuned, [part for _, part in pairs]))  # type: ignore[arg-type]
        if isinstance(family, Latent) and evident is not None:
            by_margin = ood_metrics(*(family.margin(evident, x).cpu() for x in (tuned.scored, torch.cat(list(parts)))))
        ood[other] = OtherKind(ood_metrics(entropy(p), scores), by_doubt, by_margin, entropy(p), scores)
    confidence, predicted = p.max(1)
    seconds = watch.seconds
    return Result(
        name=name,
        label=label,
        metrics=classification_metrics(p, y),
        probit=probit,
        aurc=area_under_risk_curve(confidence, predicted != y),
        values=tuned.values,
        output_temperatures=tuned.output_temperatures,
        fit_seconds=seconds.get(f"fit {name}", 0.0),
        predict_seconds=seconds.get(f"see {name}", 0.0) + (seconds.get("rows", 0.0) if probit is not None else 0.0),
        probabilities=p,
        losses=nll_of(p, y),
        tuned=tuned,
        ood=ood,
        fit_bytes=watch.peak_bytes.get(f"fit {name}"),
    )


def _doubt(family: Family, tuned: Tuned, parts: list[Tensor]) -> Tensor | None:
    found = [family.doubt(i, part) for i, part in zip(tuned.indices, parts, strict=True)]
    return torch.cat([part.cpu() for part in found if part is not None]) if found[0] is not None else None


def _with_difference(result: Result, iterncgp: Result, settings: EvaluateConfig, seed: int) -> Result:
    if result.name == "iterncgp":
        return result
    difference = bootstrap_difference(iterncgp.losses, result.losses, num_resamples=settings.bootstrap, seed=seed)
    return replace(result, difference=difference)


def _with_ratio(
    result: Result, family: Family, index: int, chosen: Mapping[str, Tensor], truth: Mapping[str, Tensor]
) -> Result:
    """With its variance over the exact one, all at the prior precision that IterNCGP was tuned to."""
    if not isinstance(family, Latent):
        return result
    return replace(result, exact_ratio={name: _trace(family, index, chosen[name]) / truth[name] for name in chosen})


def _trace(family: Latent, index: int, chosen: Tensor) -> Tensor:  # (b,)
    parts = [family.moments(index, part)[1] for part in chosen.split(2000)]
    return torch.cat([part.diagonal(dim1=1, dim2=2).sum(1) for part in parts]).cpu()


def _contraction(iterncgp: IterNCGP, index: int, chosen: Tensor) -> Tensor:  # (b,)
    """Our variance over the prior's at each input: one where the data say nothing."""
    return _trace(iterncgp, index, chosen) / iterncgp.prior_variance(index, chosen).cpu()

"""`ntk-iterncgp predict`: predictions and scores for new inputs, from a posterior file and nothing else.

Classes have probabilities, and

    entropy      of the probabilities, in nats: all doubt
    epistemic    the part of it that more training data would remove (mutual information)
    aleatoric    the rest
    variance     the trace of the latent covariance

Real targets have a mean and, for a new observation, in their own units

    std          its standard deviation, noise included
    epistemic    the part of it that more training data would remove
    lower, upper the ends of the central 95 % interval
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ntk_iterncgp.experiments import datasets, models
from ntk_iterncgp.experiments.config import RunConfig, flat, from_settings
from ntk_iterncgp.experiments.evaluation.links import entropy
from ntk_iterncgp.experiments.progress import reported
from ntk_iterncgp.experiments.runs.flavour import make_flavour
from ntk_iterncgp.experiments.runs.kernel import as_rows
from ntk_iterncgp.experiments.runs.predictor import KernelPredictor, NetworkPredictor, Predictor
from ntk_iterncgp.experiments.runs.prepare import chosen_device
from ntk_iterncgp.experiments.settings import ConfigError
from ntk_iterncgp.laplace_torch.detector import Detector
from ntk_iterncgp.likelihoods.quadrature import standard_normal_quantile
from ntk_iterncgp.persistence.files import load_posterior, write_atomically
from ntk_iterncgp.posterior.predictive import Uncertainty

MAX_LINK_SAMPLES = 2**16
SCORES = ("entropy", "epistemic", "aleatoric", "variance")


@dataclass(frozen=True, eq=False)
class Restored:
    """A posterior, ready for predictions."""

    predictor: Predictor
    model: nn.Module | None
    config: RunConfig
    scaling: datasets.Scaling
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    targets: tuple[float, float] | None  # mean and standard deviation of real targets


def restore(path: Path, device: torch.device, *, trusted_model: str | None = None) -> Restored:
    """The posterior as it was fitted, around the network as it was: whatever the file holds, that or a sentence.

    `trusted_model` is an import path that may be called.
    """
    state, weights, about = load_posterior(path)
    try:
        config = from_settings(dict(flat(about["config"])))
        names, shape = tuple(about["class_names"]), tuple(about["input_shape"])
        scaling = datasets.Scaling(tuple(about["scaling"]["mean"]), tuple(about["scaling"]["std"]))
        centre_and_unit = about.get("targets")
        targets = None if centre_and_unit is None else (float(centre_and_unit[0]), float(centre_and_unit[1]))
        _check_sizes(config, names, shape, (*scaling.mean, *scaling.std, *(targets or ())))
        if config.kernel.name != state.get("kernel"):
            raise ValueError(f"its kernel is {config.kernel.name} and {state.get('kernel')!r:.60}")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"'{path}' must say what it was fitted with; got a damaged file ({error}). Try fit again."
        ) from error
    try:
        if config.kernel.name is not None:
            predictor: Predictor = KernelPredictor.from_state(state, device)
            return Restored(predictor, None, config, scaling, names, shape, targets)
        num_outputs = 1 if targets else len(names)
        model = models.rebuild(config.model, num_outputs, shape, weights, trusted=trusted_model).to(device)
        la = make_flavour(config, model)
        la.load_state_dict(state)
    except ConfigError:
        raise
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError, ArithmeticError) as error:
        what, reason = config.kernel.name or config.model.name, str(error).partition("\n")[0][:300]
        raise ConfigError(
            f"'{path}' must fit its own model '{what}'; got: {reason.rstrip('.')}. Try fit again."
        ) from error
    return Restored(NetworkPredictor(la), model, config, scaling, names, shape, targets)


def _check_sizes(config: RunConfig, names: tuple[Any, ...], shape: tuple[Any, ...], scales: tuple[Any, ...]) -> None:
    """What is asked for by a file is of a size that a run may have written."""
    if not all(isinstance(name, str) for name in names):
        raise ValueError("class_names must be texts")
    if not all(type(side) is int and 0 < side < 2**31 for side in shape):
        raise ValueError("input_shape must be whole numbers")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in scales):
        raise ValueError("scaling must be finite")
    if config.evaluate.link_samples > MAX_LINK_SAMPLES:
        raise ValueError(f"evaluate.link_samples must be at most {MAX_LINK_SAMPLES}")


def predict(
    posterior: Path,
    inputs: Path,
    output: Path,
    *,
    device: str = "auto",
    link: str = "quadrature",
    contrasts: int | str | None = None,
    trusted_model: str | None = None,
) -> Path:
    """The whole command: a .csv with a line per input, or an .npz. The contrasts are those of the fit by default."""
    if output.suffix not in (".csv", ".npz"):
        raise ConfigError(f"--output must end in .csv or .npz; got '{output}'. Try predictions.csv.")
    restored = restore(posterior, chosen_device(device), trusted_model=trusted_model)
    x = datasets.inputs_for(inputs, restored.scaling, restored.input_shape)
    columns = columns_of(restored, x, link, restored.config.fit.contrasts if contrasts is None else contrasts)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".npz":
        write_atomically(output, lambda path: _write_npz(path, columns))
    else:
        rows = _as_rows(columns, restored.class_names)
        write_atomically(output, lambda path: _write_csv(path, rows))
    print(f"{len(x)} predictions: {output}")
    return output


def columns_of(restored: Restored, x: Tensor, link: str, contrasts: int | str = "auto") -> dict[str, Tensor]:
    """Each column of the file, (b,); probabilities are (b, C)."""
    config, targets, parts = restored.config, restored.targets, []
    batches = x.split(config.data.batch_size)
    for batch in reported(batches, "Predicting", print, total=len(batches), unit="batches"):
        if config.kernel.name is not None:
            batch = as_rows(batch, restored.scaling, restored.input_shape)
        if targets is None:
            found = restored.predictor.scored(batch, link, config.evaluate.link_samples, contrasts)
            parts.append(_of_classes(*found))
        else:
            mean, covariance = restored.predictor.latent(batch)
            parts.append(_of_targets(mean[:, 0], covariance[:, 0, 0], restored.predictor.noise_variance, *targets))
        if restored.predictor.detector is not None:
            parts[-1] |= _of_detector(restored.predictor.detector, batch)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _of_classes(p: Tensor, scores: Uncertainty) -> dict[str, Tensor]:
    total, doubt = entropy(p), scores.epistemic
    values = (p, total, doubt, (total - doubt).clamp_min(0), scores.variance)
    return dict(zip(("probabilities", *SCORES), values, strict=True))


def _of_detector(detector: Detector, x: Tensor) -> dict[str, Tensor]:
    scores = detector.score(x)
    return {"novelty": scores.cpu(), "p_value": detector.novelty.p_value(scores).cpu()}


def _of_targets(mean: Tensor, variance: Tensor, noise: float, centre: float, unit: float) -> dict[str, Tensor]:
    std, epistemic = unit * (variance.clamp_min(0) + noise).sqrt(), unit * variance.clamp_min(0).sqrt()
    value, spread = centre + unit * mean, standard_normal_quantile(0.95) * std
    return {"mean": value, "std": std, "epistemic": epistemic, "lower": value - spread, "upper": value + spread}


def _write_npz(path: Path, columns: dict[str, Tensor]) -> None:
    with path.open("wb") as file:
        arrays: dict[str, Any] = {name: value.numpy() for name, value in columns.items()}
        np.savez(file, **arrays)


def _write_csv(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _as_rows(columns: dict[str, Tensor], class_names: tuple[str, ...]) -> list[list[str]]:
    """A line of headings, and one per input."""
    numbers = {name: column for name, column in columns.items() if name != "probabilities"}
    first: dict[str, list[str]] = {"input": [str(i) for i in range(len(next(iter(columns.values()))))]}
    if "probabilities" in columns:
        p = columns["probabilities"]
        names = class_names if len(class_names) == p.shape[1] else tuple(map(str, range(p.shape[1])))
        confidence, predicted = p.max(1)
        first["class"] = [names[c] for c in predicted.tolist()]
        numbers = {"confidence": confidence, **numbers, **{f"p({name})": p[:, c] for c, name in enumerate(names)}}
    cells = [*first.values(), *([f"{value:.6g}" for value in column.tolist()] for column in numbers.values())]
    return [[*first, *numbers], *map(list, zip(*cells, strict=True))]

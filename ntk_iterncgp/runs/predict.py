"""`ntk-iterncgp predict`: class probabilities and scores for new inputs, from a posterior file and nothing else.

entropy      of the probabilities, in nats: all doubt
epistemic    the part of it that more training data would remove (mutual information)
aleatoric    the rest
variance     the trace of the latent covariance
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
from tqdm.auto import tqdm

from ntk_iterncgp import datasets, models
from ntk_iterncgp.config import ConfigError, RunConfig, flat, from_settings
from ntk_iterncgp.evaluation.links import class_probabilities, entropy, mutual_information
from ntk_iterncgp.files import load_posterior, write_atomically
from ntk_iterncgp.runs.flavour import make_flavour
from ntk_iterncgp.runs.prepare import chosen_device

MAX_LINK_SAMPLES = 2**16
SCORES = ("entropy", "epistemic", "aleatoric", "variance")


@dataclass(frozen=True, eq=False)
class Restored:
    """A posterior, ready for predictions."""

    la: Any
    model: nn.Module
    config: RunConfig
    scaling: datasets.Scaling
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]


def restore(path: Path, device: torch.device, *, trusted_model: str | None = None) -> Restored:
    """The flavour as it was fitted, around the network as it was. `trusted_model` is an import path that may be called.

    Whatever the file holds, it is a posterior or a sentence.
    """
    state, weights, about = load_posterior(path)
    try:
        config = from_settings(dict(flat(about["config"])))
        names, shape = tuple(about["class_names"]), tuple(about["input_shape"])
        scaling = datasets.Scaling(tuple(about["scaling"]["mean"]), tuple(about["scaling"]["std"]))
        _check_sizes(config, names, shape, scaling)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"'{path}' is damaged: it does not say what it was fitted with ({error}).") from error
    try:
        model = models.rebuild(config.model, len(names), shape, weights, trusted=trusted_model).to(device)
        la = make_flavour(config, model)
        la.load_state_dict(state)
    except ConfigError:
        raise
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError, ArithmeticError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise ConfigError(f"'{path}' does not fit its own model '{config.model.name}': {reason}") from error
    return Restored(la, model, config, scaling, names, shape)


def _check_sizes(config: RunConfig, names: tuple[Any, ...], shape: tuple[Any, ...], scaling: datasets.Scaling) -> None:
    """What is asked for by a file is of a size that a run may have written."""
    if not all(isinstance(name, str) for name in names) or not names:
        raise ValueError("class_names expects texts")
    if not all(type(side) is int and 0 < side < 2**31 for side in shape):
        raise ValueError("input_shape expects whole numbers")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in (*scaling.mean, *scaling.std)):
        raise ValueError("scaling expects finite numbers")
    if config.evaluate.link_samples > MAX_LINK_SAMPLES:
        raise ValueError(f"evaluate.link_samples expects at most {MAX_LINK_SAMPLES}")


def predict(
    posterior: Path,
    inputs: Path,
    output: Path,
    *,
    device: str = "auto",
    link: str = "accurate",
    trusted_model: str | None = None,
) -> Path:
    """The whole command: a .csv with a line per input, or an .npz."""
    if output.suffix not in (".csv", ".npz"):
        raise ConfigError(f"--output expects a file that ends in .csv or .npz, but got '{output}'.")
    restored = restore(posterior, chosen_device(device), trusted_model=trusted_model)
    x = datasets.inputs_for(inputs, restored.scaling, restored.input_shape)
    columns = scores_of(restored, x, link)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".npz":
        write_atomically(output, lambda path: _write_npz(path, columns))
    else:
        write_atomically(output, lambda path: _write_csv(path, columns, restored.class_names))
    print(f"{len(x)} predictions: {output}")
    return output


def scores_of(restored: Restored, x: Tensor, link: str) -> dict[str, Tensor]:
    """Probabilities (b, C), and each score (b,)."""
    la, samples, parts = restored.la, restored.config.evaluate.link_samples, []
    for batch in tqdm(x.split(restored.config.data.batch_size), desc="Predicting", leave=False, disable=None):
        mean, covariance = (part.double().cpu() for part in la._glm_predictive_distribution(batch.to(la._device)))
        p = class_probabilities(mean, covariance, link=link, num_samples=samples)
        doubt = mutual_information(mean, covariance, num_samples=samples)
        total = entropy(p)
        variance = covariance.diagonal(dim1=1, dim2=2).sum(1)
        parts.append((p, total, doubt, (total - doubt).clamp_min(0), variance))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return dict(zip(("probabilities", *SCORES), columns, strict=True))


def _write_npz(path: Path, columns: dict[str, Tensor]) -> None:
    with path.open("wb") as file:
        arrays: dict[str, Any] = {name: value.numpy() for name, value in columns.items()}
        np.savez(file, **arrays)


def _write_csv(path: Path, columns: dict[str, Tensor], class_names: tuple[str, ...]) -> None:
    p = columns["probabilities"]
    names = class_names if len(class_names) == p.shape[1] else tuple(map(str, range(p.shape[1])))
    confidence, predicted = p.max(1)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["input", "class", "confidence", *SCORES, *(f"p({name})" for name in names)])
        for i in range(len(p)):
            numbers = [confidence[i], *(columns[score][i] for score in SCORES), *p[i]]
            writer.writerow([i, names[int(predicted[i])], *(f"{float(value):.6g}" for value in numbers)])

"""Choosing a hyperparameter without looking at what it will be scored on, by one protocol for all methods.

crossfit     two halves of the test set: each is scored with the value that is best on the other
validation   a part of the test set is put aside for the choice, and the rest is scored
none         the value that was set

The criterion is the NLL. It is evaluated on every fourth point of the grid, then around the best one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_iterncgp.experiments.config import RunConfig
from ntk_iterncgp.experiments.evaluation.families import Family
from ntk_iterncgp.experiments.settings import ConfigError

COARSE = 4
MOST_VALIDATION = 1000
Fold = tuple[Tensor, Tensor]  # indices to choose on, indices to score


@dataclass(frozen=True, eq=False)
class Tuned:
    """Predictions at all scored inputs, in the order of `scored`, and the hyperparameter of each fold."""

    scored: Tensor  # (b,)
    probabilities: Tensor  # (b, C)
    values: list[float]
    indices: list[int]
    at_edge: bool  # a value lies at the end of the grid: the grid should be wider
    output_temperatures: list[float]  # of each fold, where a method has one beside it


def folds(protocol: str, num_inputs: int, *, validation_size: int | None, seed: int) -> list[Fold]:
    """Two inputs are scored at least, for an interval of differences; `validation_size` None is half, at most 1000."""
    if num_inputs < 2:
        raise ConfigError(f"data.test must hold at least two test inputs; got {num_inputs}. Try a larger file.")
    order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(seed))
    if protocol == "none":
        return [(order[:0], order.sort().values)]
    if protocol == "validation":
        size = min(MOST_VALIDATION, num_inputs // 2) if validation_size is None else validation_size
        if not 0 < size <= num_inputs - 2:
            raise ConfigError(
                f"tuning.validation_size must be at least two inputs fewer than the {num_inputs} of the test set; got "
                f"{size}. Try {num_inputs // 2}."
            )
        return [(order[:size].sort().values, order[size:].sort().values)]
    first, second = (part.sort().values for part in order.tensor_split(2))
    return [(second, first), (first, second)]


def folds_of(config: RunConfig, num_inputs: int) -> list[Fold]:
    """As the settings say."""
    tuning = config.tuning
    return folds(tuning.protocol, num_inputs, validation_size=tuning.validation_size, seed=config.seed)


def crossfit(
    family: Family,
    labels: Tensor,
    all_folds: Sequence[Fold],
    link: str,
    *,
    evaluated: Callable[[], object] = lambda: None,
) -> Tuned:
    """The family's predictions at all scored inputs; `evaluated` is called after each value of the hyperparameter."""
    known: dict[int, Tensor] = {}  # index of the grid -> loss of each input, in the order of `seen`
    seen = torch.cat([tune for tune, _ in all_folds]).unique()  # sorted
    place = torch.full((int(labels.shape[0]),), -1).index_put((seen,), torch.arange(len(seen)))

    def loss(index: int, chosen: Tensor) -> float:
        if index not in known:
            known[index] = nll_of(family.probabilities(index, seen, link), labels[seen])
            evaluated()
        return float(known[index][place[chosen]].mean())

    indices, parts, last, ends = [], [], len(family.grid) - 1, []
    for tune, score in all_folds:
        index = family.start if len(tune) == 0 or family.is_fixed else family.choose(tune)
        if index is None:
            index = _best(len(family.grid), lambda i, t=tune: loss(i, t))
            ends.append(index in (0, last))
        indices.append(index)
        parts.append(family.probabilities(index, score, link))
    scored = torch.cat([score for _, score in all_folds])
    order = scored.argsort()
    return Tuned(
        scored=scored[order],
        probabilities=torch.cat(parts)[order],
        values=[float(family.grid[i]) for i in indices],
        indices=indices,
        at_edge=last > 0 and any(ends),
        output_temperatures=[T for i in indices if (T := family.output_temperature(i)) is not None],
    )


def nll_of(probabilities: Tensor, labels: Tensor) -> Tensor:  # (b, C), (b,) -> (b,)
    """−log p of the label, a probability of zero counting as the smallest normal number."""
    of_label = probabilities.gather(1, labels[:, None].to(probabilities.device))[:, 0]
    return -of_label.clamp_min(torch.finfo(of_label.dtype).tiny).log()


def coarse_places(size: int) -> list[int]:
    """Where a grid is evaluated first."""
    return sorted({*range(0, size, COARSE), size - 1})


def _best(size: int, loss: object) -> int:
    """The index of the least loss: every fourth, then the neighbours of the best, by halves."""
    assert callable(loss)
    values = {i: loss(i) for i in coarse_places(size)}
    step = COARSE
    while step > 1:
        step //= 2
        centre = min(values, key=lambda i: (values[i], i))
        for i in (centre - step, centre + step):
            if 0 <= i < size and i not in values:
                values[i] = loss(i)
    return min(values, key=lambda i: (values[i], i))

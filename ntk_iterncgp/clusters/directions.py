"""In which directions of the outputs data are looked at: u of W u, and which of them are worth a derivative.

The likelihood has an order of its own, the most informative first, orthogonal in W; after these they are random. In
the first pass a datum has as many as its curvature is worth, up to `DIRECTIONS_EACH`, and a decided one has none.

In regression all outputs of all data are equally curved, so there is no choice by size: each datum is differentiated in
every output, or, where these are more than a pass takes, in some of them in turn. With one output for each datum the
variance would be as many times the exact one as there are outputs, since each output would see that share of the data.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.priors.ntk import curvature_traces

OUTPUTS_EACH = 8  # of a regression, for each datum of one pass: from one forward pass, 2/3 of an epoch for each
DIRECTIONS_EACH = 4  # at most, of one datum in the first pass: all nine of digits get 0.2 percentage points more
LOOKS, LOOKS_PER_ACTION = 0.6, 2
"""Where data have several directions, the first pass takes so many for each datum, on average; more, up to one, where
all are about as curved, as in regression, and where groups would run out. 0.75 get 0.2 to 0.9 percentage points more
(digits), and take a tenth of an epoch more."""
DECIDED, UNDECIDED = 0.01, 0.1
"""Decided are the data, or directions of data, with the least tr(W) that together hold 1 % of the curvature, if each
has less than a tenth of the mean over data. What they would add to the contraction of the variance was at most 0.4
percentage points (digits, four networks, 20 and 100 actions). They are 25 % of MNIST for a LeNet after two short
epochs, 61 % after two more, 71 % of CIFAR-10 for a ResNet-20."""


def cotangents_each(likelihood: Likelihood, asked: int | None, max_epochs: float | None = None) -> int:
    """How many directions of each datum one pass takes: as many as asked for; or one, and of a regression each output,
    as far as the epochs go, of which q directions take (1 + 2q)/3."""
    if asked is not None or not likelihood.is_quadratic:
        return asked or 1
    most = min(likelihood.num_outputs, OUTPUTS_EACH)
    return most if max_epochs is None else max(1, min(most, int((3 * max_epochs + 1e-9 - 1) / 2)))


def next_directions(
    likelihood: Likelihood, outputs: Tensor, first: int, number: int, generator: torch.Generator
) -> Tensor:  # (q, N, C)
    """Of all data, from the `first` on: the likelihood's own, in order, and random ones when these are used up."""
    chosen, in_turn = [], likelihood.is_quadratic and number < likelihood.num_outputs
    for index in range(first, first + number):
        if index < likelihood.curvature_rank and in_turn:
            drawn = torch.randperm(len(outputs), generator=torch.Generator().manual_seed(0)).to(outputs.device)
            chosen.append(one_hot((drawn + index) % likelihood.num_outputs, likelihood.num_outputs).to(outputs))
        elif index < likelihood.curvature_rank:
            chosen.append(likelihood.cotangent(outputs, index))
        else:
            drawn = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
            chosen.append(likelihood.project(drawn.to(outputs.device)[..., None])[..., 0])
    return torch.stack(chosen)


def along(likelihood: Likelihood, outputs: Tensor, u: Tensor) -> Tensor:  # (m, C), (m, C) -> (m,)
    """The part of tr(W_n) that is along u, |Wu|² / uᵀWu: over directions orthogonal in W these add up to it."""
    curved = likelihood.curvature(outputs, u[..., None])[..., 0]
    noise = (u * curved).sum(1)
    return torch.where(noise > 0, curved.square().sum(1) / noise.clamp_min(1e-300), 0.0)


def has_choice(likelihood: Likelihood, number: int, num_actions: int, num_data: int) -> bool:
    """Whether the first pass may look where the curvature is. Not where there is an action for each datum and nothing
    else to choose: then all data are looked at."""
    return num_actions < num_data or (number == 1 and likelihood.curvature_rank > 1)


def worth_looking(
    likelihood: Likelihood, outputs: Tensor, number: int, num_actions: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:  # (m,), (number, m, C)
    """Data and directions of the first pass. A datum is there as often as it has directions that are worth it, compared
    with those of others; where several come from one forward pass, each datum that is not decided has these."""
    num_data = len(outputs)
    if number > 1 or likelihood.is_quadratic:
        traces = curvature_traces(
            lambda some, block: likelihood.curvature(outputs[some], block), num_data, outputs.shape[1], outputs.device
        )
        rows, _ = most_curved(traces[:, None], num_data, num_data)
        return rows, next_directions(likelihood, outputs, 0, number, generator)[:, rows]
    each = min(likelihood.curvature_rank, DIRECTIONS_EACH)
    parts = [along(likelihood, outputs, likelihood.cotangent(outputs, j)) for j in range(each)]
    limit = max(int(LOOKS * num_data), LOOKS_PER_ACTION * num_actions) if each > 1 else num_data
    rows, index = most_curved(torch.stack(parts, 1), limit, max(num_data, num_actions))
    directions = torch.empty(1, len(rows), outputs.shape[1], dtype=torch.float64, device=outputs.device)
    for j in range(each):
        directions[0, index == j] = likelihood.cotangent(outputs[rows[index == j]], j)
    return rows, directions


def most_curved(along: Tensor, limit: int, most: int) -> tuple[Tensor, Tensor]:  # (N, k) -> (m,), (m,)
    """Data and numbers of their directions, those with the most curvature, in the order of the data: at most so many,
    none that is next to nothing, and beyond `limit` none that has less than half of what the first has."""
    num_data = len(along)
    ordered, order = along.T.flatten().sort(descending=True, stable=True)
    alike = int((ordered >= 0.5 * ordered[0]).sum())
    number = min(most, len(ordered) - num_decided(ordered, num_data), max(limit, alike))
    direction, row = order[:number] // num_data, order[:number] % num_data
    in_order = (row * along.shape[1] + direction).argsort()
    return row[in_order], direction[in_order]


def num_decided(weights: Tensor, num_data: int) -> int:
    """How many of the least are next to nothing."""
    ordered = weights.sort().values
    few = ordered.cumsum(0) < DECIDED * ordered.sum()
    return int((few & (ordered < UNDECIDED * ordered.sum() / num_data)).sum())

"""What `policy="clusters"` chooses: in which directions of the outputs data are differentiated, and their groups.

The likelihood has an order of its own for the directions u of W u, the most informative first, orthogonal in W; after
these they are random. In the first pass a datum has as many as its curvature is worth, up to `DIRECTIONS_EACH`, and a
saturated one has none. In regression all outputs of all data are equally curved: each datum is differentiated in every
output, or, where these are more than a pass takes, in some of them in turn. With one output for each datum the variance
would be as many times the exact one as there are outputs.

One action per group sums gradients, so a group should hold data whose gradients agree: the same direction in the
outputs (W u, a contrast between classes) and similar features of the last layer, of which the gradient is the product.
Weighted k-means on both, the weight being how uncertain the datum is along u, |Wu|² / uᵀWu. On digits (two networks,
three seeds, one direction each) 100 groups made this way get 83.6 % of the exact contraction of the variance, k-means
without the weights 81.8 %, groups at random 78.5 %.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ntk_iterncgp.data.fixed_order import Inputs
from ntk_iterncgp.jacobian.rows import NetworkJacobian
from ntk_iterncgp.likelihoods.base import Likelihood

ITERATIONS = 5  # ten get nothing more
SAMPLE, SAMPLE_PER_GROUP = 2**13, 16  # data that the centres are found on: 64 for each of 500 gave as good ones
MAX_FEATURES = 128  # longer features are projected at random, which keeps their distances
DISTANCE_ENTRIES = 2**22  # of the matrix of distances between data and centres, at once
GROUPS_PER_ACTION, MANY_GROUPS, MANY_ACTIONS, MANY_BYTES = 8, 384, 1536, 2**29
"""More of them fill no batches, and no memory is asked for. With 20 actions on digits four times as many groups get
60.6 %, eight times 61.4, nineteen times 61.7 % (tanh 64-32-10), and 56.4, 57.7 and 58.5 % (tanh 64-64-32-10)."""


def groups_for(num_actions: int, num_data: int, bytes_each: int, cotangents: int = 1) -> int:
    """How many groups the first pass makes for so many actions, each of which gives `cotangents` of them."""
    many = min(GROUPS_PER_ACTION * num_actions // cotangents, MANY_GROUPS, MANY_ACTIONS // cotangents)
    many = min(many, MANY_BYTES // max(1, cotangents * bytes_each))
    return min(max(-(-num_actions // cotangents), many), num_data)


def group(
    features: Tensor,  # (N, D)
    directions: Tensor,  # W u (N, C)
    weights: Tensor,  # (N,)
    num_groups: int,
    generator: torch.Generator,
) -> Tensor:  # (N,)
    """The number of each datum's group, from 0 without gaps; the groups are in order of their weight, largest first."""
    unit = directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True).clamp_min(1e-300)
    features = features.float()
    size = torch.linalg.vector_norm(features, dim=1).mean()
    points = torch.cat([features, size * unit.float()], 1)
    weights = weights.float() / weights.max().clamp_min(1e-300)
    labels = _kmeans(points, weights.clamp_min(1e-12), num_groups, generator)
    total = weights.new_zeros(num_groups).index_add_(0, labels, weights)
    counts = torch.bincount(labels, minlength=num_groups)
    order = torch.where(counts > 0, total, -1.0).argsort(descending=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(num_groups, device=order.device)
    return rank[labels]


def _kmeans(points: Tensor, weights: Tensor, num_groups: int, generator: torch.Generator) -> Tensor:  # (N,)
    """Lloyd's iteration from centres drawn in proportion to the weights."""
    if num_groups >= len(points):
        return torch.arange(len(points), device=points.device)
    centres = points[_draw(weights, num_groups, generator)].clone()
    some, of_some = points, weights
    size = max(SAMPLE, SAMPLE_PER_GROUP * num_groups)
    if len(points) > size:  # the centres are found on a sample, the groups are of all data
        chosen = torch.randperm(len(points), generator=generator)[:size].to(points.device)
        some, of_some = points[chosen], weights[chosen]
    for _ in range(ITERATIONS):
        labels = _nearest(some, centres)
        mass = of_some.new_zeros(num_groups).index_add_(0, labels, of_some)
        sums = torch.zeros_like(centres).index_add_(0, labels, of_some[:, None] * some)
        centres = torch.where(mass[:, None] > 0, sums / mass.clamp_min(1e-38)[:, None], centres)
    return _nearest(points, centres)


def _draw(weights: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Without replacement in proportion to the weights (by exponential clocks: `multinomial` stops at 2^24 data)."""
    clocks = torch.empty(len(weights), dtype=torch.float32).exponential_(generator=generator).to(weights.device)
    return (weights.log() - clocks.log()).topk(number).indices


def _nearest(points: Tensor, centres: Tensor) -> Tensor:  # (N,)
    norms = centres.square().sum(1)
    parts = points.split(1 + DISTANCE_ENTRIES // len(centres))
    return torch.cat([torch.addmm(norms, part, centres.T, alpha=-2).argmin(1) for part in parts])


# --- features --------------------------------------------------------------------------------------------------


@contextmanager
def batch_features(jacobian: NetworkJacobian) -> Iterator[Callable[[Inputs, Tensor], Tensor]]:
    """While open, how to get the features (b, ≤ 128) of a batch after its forward pass.

    They are the inputs of the model's last linear layer; of a layer applied at many places, as to each token, the mean
    over these. Where there is no such layer, or its input does not have one row per datum, outputs and inputs stand for
    them. Features of more than `MAX_FEATURES` numbers are projected at random.
    """
    latest: list[Tensor] = []
    projections: dict[int, Tensor] = {}
    warned, thread = False, threading.get_ident()  # another thread may be using the model too
    model = jacobian.model

    def remember(module: nn.Module, inputs: tuple[Inputs, ...], named: dict[str, Inputs]) -> None:
        given = (*inputs, *named.values())  # a model may call its layers by keyword
        if threading.get_ident() == thread and given and isinstance(given[0], Tensor):
            latest[:] = [given[0].detach()]

    def features_of(x: Inputs, outputs: Tensor) -> Tensor:
        nonlocal warned
        if model is None:  # a last layer, whose inputs these are
            found: Tensor = x
        elif latest and latest[0].ndim > 1 and len(latest[0]) == len(outputs):
            found = latest.pop()
            found = found if found.ndim == 2 else found.flatten(1, -2).mean(1)
        else:
            if not warned:
                warned = True
                warnings.warn(
                    "The model has no last linear layer with one row of inputs per datum, by which data could be "
                    "grouped; they are grouped by outputs and inputs instead.",
                    stacklevel=2,
                )
            tensors = [t for t in (x.values() if isinstance(x, Mapping) else [x]) if isinstance(t, Tensor)]
            flat = [t.flatten(1).float() for t in tensors if t.ndim > 1 and len(t) == len(outputs)]
            found = torch.cat([outputs.float(), *flat], 1)
        size = found.shape[1]
        if size <= MAX_FEATURES:
            return found.float()
        if size not in projections:
            drawn = torch.randn(size, MAX_FEATURES, generator=torch.Generator().manual_seed(0)) / MAX_FEATURES**0.5
            projections[size] = drawn.to(found.device)
        return found.float() @ projections[size]

    linear = [] if model is None else [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(remember, with_kwargs=True) for module in linear]
    try:
        yield features_of
    finally:
        for hook in hooks:
            hook.remove()


# --- directions -------------------------------------------------------------------------------------------------------


OUTPUTS_EACH = 8  # of a regression, for each datum of one pass: from one forward pass, 2/3 of an epoch for each
DIRECTIONS_EACH = 4  # at most, of one datum in the first pass: all nine of digits get 0.2 percentage points more
LOOKS, LOOKS_PER_ACTION = 0.6, 2
"""Where data have several directions, the first pass takes so many for each datum, on average; more, up to one, where
all are about as curved, as in regression, and where groups would run out. 0.75 get 0.2 to 0.9 percentage points more
(digits), and take a tenth of an epoch more."""
SATURATED, UNCERTAIN = 0.01, 0.1
"""Saturated are the data, or directions of data, with the least tr(W) that together hold 1 % of the curvature, if each
has less than a tenth of the mean over data. What they would add to the contraction of the variance was at most 0.4
percentage points (digits, four networks, 20 and 100 actions). They are 25 % of MNIST for a LeNet after two short
epochs, 61 % after two more, 71 % of CIFAR-10 for a ResNet-20."""


def cotangents_each(likelihood: Likelihood, asked: int | None, max_epochs: float | None = None) -> int:
    """Return how many directions of each datum one pass takes.

    As many as asked for; or else one, and of a regression one for each output as far as the epochs go, of which q
    directions take (1 + 2q)/3.
    """
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
            chosen.append(likelihood.direction(outputs, drawn.to(outputs.device)))
    return torch.stack(chosen)


def along(likelihood: Likelihood, outputs: Tensor, u: Tensor) -> Tensor:  # (m, C), (m, C) -> (m,)
    """The part of tr(W_n) that is along u, |Wu|² / uᵀWu: over directions orthogonal in W these add up to it."""
    curved = likelihood.curvature(outputs, u[..., None])[..., 0]
    noise = (u * curved).sum(1)
    return torch.where(noise > 0, curved.square().sum(1) / noise.clamp_min(1e-300), 0.0)


def has_choice(likelihood: Likelihood, number: int, num_actions: int, num_data: int) -> bool:
    """Whether the first pass may go where the curvature is.

    Not where there is an action for each datum and nothing else to choose: then all data are visited.
    """
    return num_actions < num_data or (number == 1 and likelihood.curvature_rank > 1)


def first_directions(
    likelihood: Likelihood, outputs: Tensor, number: int, num_actions: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:  # (m,), (number, m, C)
    """Return data and directions of the first pass.

    A datum is there as often as it has directions that are worth it, compared with those of others; where several come
    from one forward pass, each datum that is not saturated has these.
    """
    num_data = len(outputs)
    if number > 1 or likelihood.is_quadratic:
        traces = likelihood.curvature_traces(outputs)
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
    """Return data and numbers of their directions, those with the most curvature, in the order of the data.

    At most so many, none that is next to nothing, and beyond `limit` none that has less than half of what the first
    has.
    """
    num_data = len(along)
    ordered, order = along.T.flatten().sort(descending=True, stable=True)
    alike = int((ordered >= 0.5 * ordered[0]).sum())
    least = ordered.flip(0)
    saturated = (least.cumsum(0) < SATURATED * least.sum()) & (least < UNCERTAIN * least.sum() / num_data)
    number = min(most, len(ordered) - int(saturated.sum()), max(limit, alike))
    direction, row = order[:number] // num_data, order[:number] % num_data
    in_order = (row * along.shape[1] + direction).argsort()
    return row[in_order], direction[in_order]

"""What a fit with twice the actions would have been made of, as far as the groups of this one show it.

From 48 to 192 actions are combinations of the same groups as twice as many would be, and nothing is missing.
Else there would be more groups. How much these bring shows in a half and a quarter of them: groups of groups, by the
same k-means, whose sums are A' = A P and R' = PᵀR P with P ≥ 0 of disjoint columns. It takes no data and no gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_iterncgp.clusters.clusters import Clusters, Pass
from ntk_iterncgp.clusters.grouping import along, first_directions, group, groups_for, has_choice

FEWEST = 16  # groups, of which a quarter can be made


@dataclass(frozen=True, eq=False)
class Doubling:
    """The groups of a fit, what its actions are of them, and what those of coarser and of larger fits would be."""

    images: Tensor  # A of the groups (P, G)
    noise_gram: Tensor  # R of the groups (G, G)
    combinations: Tensor  # of the groups, that are the actions (G, B)
    sums: tuple[Tensor, ...]  # of the groups, into a quarter and a half as many (G, g); none if they would be the same
    num_actions: int  # of the larger fit
    growth: float  # how many times as many groups the larger fit has


def doubling(clusters: Clusters) -> Doubling | None:
    """Compare a fit with one of twice the actions.

    Returns:
        None where the larger one is not of the same kind: after a further pass or an unfinished one, where it would
        look at other data, or where the groups are too few.
    """
    done = clusters.passes[0]
    if len(clusters.passes) > 1 or not done.is_complete:
        return None
    asked = len(done.images) if done.num_kept is None else done.num_kept
    if not torch.equal(_items(clusters, done, 2 * asked), done.rows):
        return None
    sums: tuple[Tensor, ...] = ()
    now, later = (_num_groups(done, num_actions) for num_actions in (asked, 2 * asked))
    if later > now:
        if done.num_groups < FEWEST:
            return None
        sums = tuple(_sums(clusters, done, done.num_groups // part) for part in (4, 2))
    images, noise_gram = clusters.group_images(), clusters.noise_gram()
    return Doubling(images, noise_gram, clusters.combinations(), sums, 2 * asked, later / now)


def _num_groups(done: Pass, num_actions: int) -> int:
    """How many a pass like this one would ask for; some may turn out to be empty."""
    number = len(done.directions)
    found = -(-num_actions // number)
    if done.num_kept is not None:
        num_bytes = done.images.shape[1] * done.images.element_size()
        found = max(found, groups_for(num_actions, len(done.rows), num_bytes, number))
    return min(found, len(done.rows))


def _items(clusters: Clusters, done: Pass, num_actions: int) -> Tensor:  # (m,)
    """The data that a pass like this one would look at for so many actions."""
    number = len(done.directions)
    if not has_choice(clusters.likelihood, number, num_actions // number, len(clusters.outputs)):
        return torch.arange(len(clusters.outputs), device=clusters.outputs.device)
    groups = -(-num_actions // number)
    return first_directions(clusters.likelihood, clusters.outputs, number, groups, torch.Generator())[0]


def _sums(clusters: Clusters, done: Pass, number: int) -> Tensor:  # (q·G, q·number)
    """Group the groups, each as one datum that is the mean of its own.

    Actions are scaled to unit noise, by which they are multiplied again: the largest entry of a direction was 1.
    """
    outputs = clusters.outputs[done.rows]
    weights = torch.stack([along(clusters.likelihood, outputs, u) for u in done.directions]).sum(0)
    curved = clusters.compared(done.directions[0], done.rows)
    curved = curved / torch.linalg.vector_norm(curved, dim=1, keepdim=True).clamp_min(1e-300)
    total = weights.new_zeros(done.num_groups).index_add_(0, done.labels, weights)

    def mean(values: Tensor) -> Tensor:
        sums = weights.new_zeros(done.num_groups, values.shape[1])
        return sums.index_add_(0, done.labels, weights[:, None] * values.double()) / total[:, None].clamp_min(1e-300)

    features = mean(clusters.features[done.rows])
    labels = group(features, mean(curved), total, number, torch.Generator().manual_seed(0))
    blocks = []
    for u in done.directions:
        largest = weights.new_zeros(done.num_groups)
        largest.scatter_reduce_(0, done.labels, u.abs().amax(1), "amax")
        size = torch.where(largest > 0, 1 / largest.clamp_min(1e-300), 0.0)
        blocks.append(torch.nn.functional.one_hot(labels).to(size) * size[:, None])
    sums: Tensor = torch.block_diag(*blocks)
    return sums

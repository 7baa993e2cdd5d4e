"""How much the variance would still fall with twice the actions, from small matrices.

With the cross-covariances z of the groups of data and M = AᵀΛ⁻¹A + τR + D between them, actions that are combinations T
of groups take zᵀT (TᵀM T)⁻¹Tᵀz off the variance. A fit with twice the actions keeps the best 2B combinations: of the
same groups, whose contraction is known, or of more. What more groups bring goes on as from a quarter of them to a half,
and from that to all (`clusters/doubling.py`): each doubling adds a constant part of what the last one did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntk_iterncgp.clusters.doubling import Doubling
from ntk_iterncgp.jacobian.blocks import WeightColumns
from ntk_iterncgp.jacobian.rows import Rows
from ntk_iterncgp.linalg.factor import Factor, best_combinations
from ntk_iterncgp.posterior.weight_space import WeightPosterior
from ntk_iterncgp.runtime.threads import full_precision

LITTLE, MUCH = 0.02, 0.2  # of the variance
MOST = 0.95  # of the prior variance, that is left
ALL = 1 - 1e-6  # of the information: nothing is to come


@dataclass(frozen=True)
class Convergence:
    """The mean variance at some inputs: of the prior, with the actions, and an estimate of it with twice as many.

    Prints as a sentence. The estimate is between zero and the variance, and None where there is no ground for one.
    """

    prior_variance: float
    variance: float
    doubled_variance: float | None
    num_actions: int

    @property
    def fall(self) -> float | None:
        """By how much twice the actions would lower the variance, as a fraction of it; None: not known."""
        if self.doubled_variance is None:
            return None
        return 1 - self.doubled_variance / self.variance if self.variance > 0 else 0.0

    @property
    def advice(self) -> str:
        """One sentence."""
        if self.fall is None:
            return (
                "What twice as many would bring cannot be estimated here: the groups of data are not known (after "
                "refine, load, compress, merge or update, with `storage`, or with a policy other than 'clusters'), or "
                "twice as many actions would visit other data. Fit with twice as many and compare."
            )
        if self.fall < LITTLE and self.variance > MOST * self.prior_variance:
            return (
                "More actions would change little here, since the data have next to no say at this prior precision. "
                "Ask at that of a detector, too: prior_precision=la.detector().prior_precision."
            )
        if self.fall < LITTLE:
            return "More actions would change little here."
        if self.fall < MUCH:
            return "refine(train_loader, epochs=1) would get some of it."
        return f"It is far from converged here: fit with num_actions={2 * self.num_actions}, or refine."

    def __str__(self) -> str:
        left = 100 * self.variance / self.prior_variance
        found = f"{self.num_actions} actions leave {left:.3g} % of the prior variance"
        if self.fall is None:
            return f"{found}. {self.advice}"
        return f"{found}; twice as many would lower it by about {100 * self.fall:.3g} %. {self.advice}"

    __repr__ = __str__


def convergence_at(
    rows: Iterable[Rows],
    posterior: WeightPosterior,
    prior_precision: Tensor,
    noise_scale: Tensor,
    doubling: Doubling | None = None,
) -> Convergence:
    """Compare the actions with twice as many at some inputs.

    Args:
        rows: The rows of J there, of all outputs or of some contrasts.
        posterior: Of the fit.
        prior_precision: Λ, (1,), (L,) or (P,).
        noise_scale: τ = σ²·T.
        doubling: What is known of a fit with twice the actions.
    """
    parts = posterior if doubling is None else _of_groups(posterior, doubling)
    gram, variance = parts.gram(prior_precision), 1 / parts.precision_of_weights(prior_precision)
    matrix = gram + parts.noise(gram, noise_scale)
    columns = WeightColumns(parts.images, parts.dtype, variance)
    prior_variance, second, count = 0.0, torch.zeros_like(gram), 0
    for some in rows:
        with torch.no_grad(), full_precision(variance.device):
            cross, prior = some.products(columns, variance)
        flat = cross.double().flatten(0, 1)
        second += flat.T @ flat
        prior_variance, count = prior_variance + float(prior.diagonal(dim1=1, dim2=2).sum()), count + len(prior)
    prior_variance, second = prior_variance / count, second / count

    def taken(T: Tensor | None) -> float:  # (G, B)
        if T is None:
            return float(Factor(matrix).solve(second).trace())
        return float(Factor(T.T @ matrix @ T).solve(T.T @ second @ T).trace())

    own = taken(None if doubling is None else doubling.combinations)
    left = max(prior_variance - own, 0.0)
    if doubling is None:
        captured = posterior.information_captured(prior_precision, noise_scale) if posterior.trace_is_exact else 0.0
        return Convergence(prior_variance, left, left if captured > ALL else None, posterior.rank)
    sums: list[Tensor | None] = [*doubling.sums, None]
    series = [taken(_best(parts, T, doubling.num_actions)) for T in sums]
    sizes = [len(gram) if T is None else T.shape[1] for T in sums]
    fall = min(max(continued(sizes, series, sizes[-1] * doubling.growth) - own, 0.0), left)
    return Convergence(prior_variance, left, left - fall, posterior.rank)


def continued(sizes: list[int], values: list[float], size: float) -> float:
    """Continue a series at three sizes to a larger one; a single value stays.

    Args:
        sizes: Ascending.
        values: What each has, ascending.
        size: The next one.

    Returns:
        What that would have, if each doubling adds a constant part r ≤ 1 of what the one before it did.
    """
    if len(values) < 3:
        return values[-1]
    first, second = ((values[i + 1] - values[i]) / math.log2(sizes[i + 1] / sizes[i]) for i in (0, 1))
    if min(first, second) <= 0:
        return values[-1]
    r, steps = min(second / first, 1.0), math.log2(size / sizes[-1])
    return values[-1] + second * r * (steps if r > 1 - 1e-9 else (1 - r**steps) / (1 - r))


def _of_groups(posterior: WeightPosterior, doubling: Doubling) -> WeightPosterior:
    """With an action for each group."""
    return replace(
        posterior,
        images=doubling.images,
        noise_gram=doubling.noise_gram,
        right_hand_side=doubling.noise_gram.new_zeros(len(doubling.noise_gram)),
        rounding_gram=None,
        storage_gram=None,
        num_actions=None,
        reference=None,
    )


def _best(groups: WeightPosterior, sums: Tensor | None, number: int) -> Tensor | None:  # (G, g) -> (G, ≤ number)
    """What a fit would keep of the groups, or of their sums; None: all groups."""
    if sums is None:
        return best_combinations(groups.noise_gram, groups.unit_gram, number)
    best = best_combinations(sums.T @ groups.noise_gram @ sums, sums.T @ groups.unit_gram @ sums, number)
    return sums if best is None else sums @ best

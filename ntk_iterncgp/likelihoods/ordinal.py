"""Ordered levels 0 < 1 < … < K−1, p(y = k | f) = F(b_{k+1} − f) − F(b_k − f), with b_0 = −∞ and b_K = ∞.

F is the logistic ("logit") or the normal ("probit") distribution function. Its density is log-concave, hence so is the
probability of an interval as a function of where it lies. With u and l the upper and lower end of the level, less f,

    logit     ∇ = σ(l) − σ(−u)                             W = σ(u)σ(−u) + σ(l)σ(−l)
    probit    ∇ = (φ(l) − φ(u)) / p                        W = ∇² + (u φ(u) − l φ(l)) / p,  in (0, 1)

W depends on the level that was seen, and there is one latent function whatever the number of levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ntk_iterncgp.likelihoods.base import OneLatent, one_dimensional, require
from ntk_iterncgp.likelihoods.quadrature import line_points

LINKS = ("logit", "probit")
FAR = 1e6  # what is further than that from its level has no probability that a number could hold
OUTSIDE = 1e7  # in place of infinity, whose derivatives are not numbers


class Ordinal(OneLatent):
    """Ordered levels; one latent function, cut into levels by thresholds.

    Args:
        num_levels: How many levels there are, numbered from 0.
        thresholds: The K − 1 cuts between them, rising. None: at f = 0 all levels are equally likely.
        link: "logit" (proportional odds) or "probit".
    """

    has_monotone_response = False  # a level in the middle is likeliest in the middle
    per_datum = ("targets",)

    def __init__(
        self, num_levels: int, *, thresholds: Sequence[float] | Tensor | None = None, link: str = "logit"
    ) -> None:
        if isinstance(num_levels, bool) or num_levels != int(num_levels) or num_levels < 2:
            raise ValueError(f"`num_levels` must be a whole number of at least 2; got {num_levels}. Try 3.")
        if link not in LINKS:
            raise ValueError(f"`link` must be one of {', '.join(map(repr, LINKS))}; got {link!r}. Try 'logit'.")
        self.num_levels, self.link = int(num_levels), link
        if thresholds is None:
            fractions = torch.arange(1, self.num_levels, dtype=torch.float64) / self.num_levels
            thresholds = torch.logit(fractions) if link == "logit" else torch.special.ndtri(fractions)
        self.thresholds = torch.as_tensor(thresholds, dtype=torch.float64).detach()
        rising = self.thresholds.ndim == 1 and bool((self.thresholds.diff() > 0).all())
        if not rising or len(self.thresholds) != num_levels - 1 or not bool(self.thresholds.isfinite().all()):
            raise ValueError(
                f"`thresholds` must be {num_levels - 1} rising, finite numbers for {num_levels} levels; got "
                f"{self.thresholds.tolist()}. Try thresholds=None."
            )
        self.targets: Tensor | None = None

    def __repr__(self) -> str:
        return f"Ordinal({self.num_levels}, link={self.link!r})"

    def settings(self) -> dict[str, Any]:
        return {"num_levels": self.num_levels, "thresholds": self.thresholds, "link": self.link}

    def given(self, targets: Tensor) -> Self:
        bound = copy(self)
        bound.targets = targets
        return super(Ordinal, bound).given(targets)

    def check_targets(self, targets: Tensor) -> Tensor:
        targets = one_dimensional(targets, "Ordinal", "each a level")
        message = f"`y` must be whole-number levels from 0 to {self.num_levels - 1} for Ordinal({self.num_levels})"
        require((targets == targets.long()) & (targets >= 0) & (targets < self.num_levels), targets, message)
        return targets.long()

    def log_prob(self, latent: Tensor, targets: Tensor) -> Tensor:
        return self._log_interval(*self._ends(latent, targets))[:, 0]

    def score(self, latent: Tensor, targets: Tensor) -> Tensor:
        upper, lower = self._ends(latent, targets)
        if self.link == "logit":
            return torch.sigmoid(lower) - torch.sigmoid(-upper)
        at_upper, at_lower = self._densities(upper, lower)
        return at_lower - at_upper

    def response(self, latent: Tensor) -> Tensor:  # (..., 1) -> (..., K)
        """The probabilities of all levels."""
        edges = self.thresholds.to(latent)
        outside = edges.new_full((1,), OUTSIDE)
        ends = torch.cat([-outside, edges, outside]) - latent
        return self._log_interval(ends[..., 1:], ends[..., :-1]).exp()

    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:  # (b, 1), (b, 1) -> (b, K)
        """By quadrature on the line: right to ten digits."""
        points, weights = line_points(mean[:, 0], variance[:, 0].sqrt())
        latent = mean + variance.sqrt() * points  # (b, q)
        return (weights[..., None] * self.response(latent[..., None])).sum(1)

    def weight(self, latent: Tensor) -> Tensor:  # (N, 1)
        if self.targets is None:
            raise RuntimeError(
                "The curvature of Ordinal must be asked of one bound to its levels, on which it depends; got one "
                "without targets. Try given(targets).weight(latent)."
            )
        upper, lower = self._ends(latent, self.targets)
        if self.link == "logit":
            weight = torch.sigmoid(upper) * torch.sigmoid(-upper) + torch.sigmoid(lower) * torch.sigmoid(-lower)
        else:
            at_upper, at_lower = self._densities(upper, lower)
            slope = upper * at_upper - lower * at_lower
            weight = ((at_lower - at_upper).square() + slope).clamp_max(1)  # rounding, far from the level
        return weight.clamp_min(self.curvature_floor)

    def _ends(self, latent: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # (N, 1), (N, 1)
        """u and l."""
        edges = self.thresholds.to(latent)
        outside = edges.new_full((1,), OUTSIDE)
        edges = torch.cat([-outside, edges, outside])
        latent = latent.clamp(-FAR, FAR)
        return edges[targets + 1][:, None] - latent, edges[targets][:, None] - latent

    def _log_interval(self, upper: Tensor, lower: Tensor) -> Tensor:
        """log(F(u) − F(l)), from the tail in which both lie: nothing cancels but what the interval is short of."""
        if self.link == "logit":  # F(u) − F(l) = σ(u) σ(−l) (1 − e^{l−u})
            both: Tensor = logsigmoid(upper) + logsigmoid(-lower)
            return both + (-torch.expm1(lower - upper)).log()
        above = lower > 0
        right, left = torch.where(above, -lower, upper), torch.where(above, -upper, lower)
        log_right: Tensor = torch.special.log_ndtr(right)
        return log_right + (-torch.expm1(torch.special.log_ndtr(left) - log_right)).log()

    def _densities(self, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
        """φ(u)/p and φ(l)/p."""
        log_p = self._log_interval(upper, lower) + 0.5 * math.log(2 * math.pi)
        return (-0.5 * upper.square() - log_p).exp(), (-0.5 * lower.square() - log_p).exp()

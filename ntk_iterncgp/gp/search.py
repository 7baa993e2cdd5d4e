"""Choosing hyperparameters by the exact Laplace evidence: L-BFGS on their logarithms, from a few places.

An evaluation costs a few factorizations, and starts from the mode of the last one. What has been evaluated is
remembered by its number, so that a search that was stopped is repeated up to there without computing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor

from ntk_iterncgp.gp.evidence import ExactEvidence
from ntk_iterncgp.gp.hyperparameters import MEAN
from ntk_iterncgp.persistence.checkpoint import CheckpointSession, unusable
from ntk_iterncgp.posterior.exact import ExactPosterior

MAX_LOG_MOVE = 9.0  # θ stays within a factor of e⁹ of where a descent began
MIN_GAIN = 0.01  # of log Z, below which a step does not pay; only ratios of evidences of e or so mean anything
PATIENCE = 2  # such steps
MAX_LINE_SEARCH = 12
SHRINK = math.log(4.0)  # of an outputscale, at a time
MAX_SHRINKS, SHRINK_STEPS = 8, 4
UNUSABLE = -1e12  # what stands for the evidence where K cannot be factored


class Evaluations:
    """log Z and its gradient at all places so far, computed once; those of a checkpoint are not computed again."""

    def __init__(
        self,
        evidence: ExactEvidence,
        values: Mapping[str, Tensor],
        names: Sequence[str],
        session: CheckpointSession | None,
        *,
        mean_unit: float = 1.0,
    ) -> None:
        """For the named hyperparameters; the mean, where it is one, is counted in units of the targets' spread."""
        self.evidence, self.values, self.names, self.session = evidence, dict(values), list(names), session
        self.mean_unit = mean_unit
        self.places: list[Tensor] = []  # log θ (p,)
        self.results: list[tuple[float, Tensor]] = []
        self.number = 0  # of those that this search has asked for
        if session is not None and session.saved is not None:
            try:
                self._take(session.saved)
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise unusable("evaluations of this search", error) from error
            session.forget()

    def start(self) -> Tensor:  # (p,)
        """log θ where the search begins."""
        return self.flat(self.values)

    def flat(self, values: Mapping[str, Tensor]) -> Tensor:  # (p,)
        """The logarithms of the free hyperparameters, and the mean, one after the other."""
        flat = {name: values[name].detach().double().reshape(-1).cpu() for name in self.names}
        return torch.cat([x / self.mean_unit if name == MEAN else x.log() for name, x in flat.items()])

    def named(self, place: Tensor) -> dict[str, Tensor]:
        """All hyperparameters at a place."""
        found, start = dict(self.values), 0
        for name in self.names:
            size = self.values[name].numel()
            part = place[start : start + size].detach()
            part = part * self.mean_unit if name == MEAN else part.exp()
            found[name] = part.reshape(self.values[name].shape).to(self.values[name])
            start += size
        return found

    def __call__(self, place: Tensor) -> tuple[float, Tensor]:
        """log Z and its gradient; a place that was asked for last is not computed twice."""
        for number in range(self.number, max(-1, self.number - 3), -1):
            if number < len(self.places) and torch.equal(self.places[number], place):
                self.number = max(self.number, number + 1)
                return self.results[number]
        del self.places[self.number :], self.results[self.number :]
        try:
            value, gradient = self.evidence(self.named(place), self.names)
            gradient = gradient * self._units
        except ArithmeticError:
            value, gradient = math.nan, torch.zeros_like(place)
        if not (math.isfinite(value) and bool(torch.isfinite(gradient).all())):
            value, gradient = UNUSABLE, torch.zeros_like(place)
        self.places.append(place.clone())
        self.results.append((value, gradient.double().cpu()))
        self.number += 1
        if self.session is not None:
            self.session.offer(self.to_content)
        return self.results[-1]

    @property
    def _units(self) -> Tensor:  # (p,)
        sizes = {name: torch.ones(self.values[name].numel(), dtype=torch.float64) for name in self.names}
        return torch.cat([x * self.mean_unit if name == MEAN else x for name, x in sizes.items()])

    @property
    def best(self) -> tuple[float, Tensor]:
        """The largest evidence, and where."""
        number = max(range(len(self.results)), key=lambda i: self.results[i][0])
        return self.results[number][0], self.places[number]

    def best_since(self, number: int) -> Tensor:  # (p,)
        """Where the evidence was largest, from the `number`-th evaluation on."""
        return self.places[max(range(number, self.number), key=lambda i: self.results[i][0])]

    def value_at(self, place: Tensor) -> float:
        """The evidence at a place that was visited."""
        return next(v for known, (v, _) in zip(self.places, self.results, strict=True) if torch.equal(known, place))

    def elbo(self, place: Tensor) -> float:
        """The evidence lower bound of Laplace's Gaussian there."""
        with torch.no_grad():
            return ExactPosterior(self.evidence.mode(self.named(place))).elbo()

    def mask(self, names: Sequence[str]) -> Tensor:  # (p,)
        """One for the coordinates of some hyperparameters, zero for the others."""
        parts = [torch.full((self.values[n].numel(),), float(n in names), dtype=torch.float64) for n in self.names]
        return torch.cat(parts)

    def to_content(self) -> dict[str, Any]:
        """For a checkpoint: all evaluations, and the mode from which the next one starts."""
        return {
            "places": torch.stack(self.places),
            "values": torch.tensor([value for value, _ in self.results], dtype=torch.float64),
            "gradients": torch.stack([gradient for _, gradient in self.results]),
            "weights": self.evidence.weights,
        }

    def _take(self, saved: Mapping[str, Any]) -> None:
        places, values, gradients = (saved[name] for name in ("places", "values", "gradients"))
        p = len(self.start())
        if places.shape != (len(values), p) or gradients.shape != places.shape or places.dtype != torch.float64:
            raise ValueError(f"there must be {p} hyperparameters")
        self.places = list(places)
        self.results = [(float(value), gradient) for value, gradient in zip(values, gradients, strict=True)]
        weights = saved["weights"]
        self.evidence.weights = None if weights is None else weights.to(self.evidence.inputs.device)


def climb_evidence(
    evaluations: Evaluations, starts: Sequence[Tensor], *, max_steps: int, tolerance: float, restarts: int
) -> Iterator[str]:
    """Climb from the best start, and then from `restarts` others.

    Args:
        evaluations: of log Z.
        starts: places (p,).
        max_steps: of L-BFGS from each start.
        tolerance: stop when log θ moves by no more, and no evidence is gained.
        restarts: how many more starts to climb from.

    Yields:
        How each climb ended: "converged" or "max_steps".
    """
    ranked = sorted(starts, key=lambda place: -evaluations(place)[0])
    for start in ranked[: 1 + restarts]:
        yield _climb(evaluations, start, max_steps, tolerance)


def shrink_while(
    evaluations: Evaluations,
    names: Sequence[str],
    score: Callable[[Tensor], float],
    *,
    max_steps: int,
    tolerance: float,
) -> Iterator[tuple[Tensor, float]]:
    """Shrink the named hyperparameters together from the largest evidence on, while a score of the fit rises.

    All others follow by the evidence. At last the top of a parabola through the best three.

    Args:
        evaluations: of log Z.
        names: of what is shrunk.
        score: of a place (p,).
        max_steps: of L-BFGS at each size.
        tolerance: as in `climb_evidence`.

    Yields:
        Each place with its score.
    """
    held = evaluations.mask(names)

    def from_here(place: Tensor, max_steps: int) -> tuple[Tensor, float]:
        begin = evaluations.number
        _climb(evaluations, place, max_steps, tolerance, held)
        found = evaluations.best_since(begin)
        return found, score(found)

    trail = [(evaluations.best[1], score(evaluations.best[1]))]
    yield trail[0]
    while len(trail) <= MAX_SHRINKS and (len(trail) < 2 or trail[-1][1] > trail[-2][1]):
        # The others go on as they went, and then a few steps: what counts is the score, not the last digit of log Z.
        step = trail[-1][0] - trail[-2][0] if len(trail) > 1 else -SHRINK * held
        trail.append(from_here(trail[-1][0] + step, min(max_steps, SHRINK_STEPS)))
        yield trail[-1]
    if len(trail) > 2:
        (_, a), (middle, b), (last, c) = trail[-3:]
        if b > max(a, c):
            yield from_here(middle + 0.5 * (a - c) / (2 * b - a - c) * (middle - last), max_steps)


def _climb(
    evaluations: Evaluations, start: Tensor, max_steps: int, tolerance: float, held: Tensor | None = None
) -> str:
    """L-BFGS; `held` is one where a coordinate stays."""
    before, value = start.numpy(), evaluations(start)[0]
    idle = 0

    def loss(place: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = evaluations(torch.from_numpy(place.copy()))
        return -value, -gradient.numpy()

    def watch(intermediate_result: OptimizeResult) -> None:
        """After each step; to raise StopIteration is how this minimiser is stopped."""
        nonlocal before, value, idle
        gained = -float(intermediate_result.fun) - value
        moved = float(np.abs(intermediate_result.x - before).max())
        before, value = intermediate_result.x.copy(), value + gained
        idle = idle + 1 if gained < MIN_GAIN else 0
        if idle >= PATIENCE or (idle and moved <= tolerance):
            raise StopIteration

    room = torch.full_like(start, MAX_LOG_MOVE) if held is None else MAX_LOG_MOVE * (1 - held)
    bounds = list(zip((start - room).tolist(), (start + room).tolist(), strict=True))
    options = {"maxiter": max_steps, "maxls": MAX_LINE_SEARCH}
    # Not torch.optim, whose first use imports a compiler: seconds, where the search takes less than one.
    result = minimize(loss, start.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, callback=watch, options=options)
    return "max_steps" if result.nit >= max_steps and not idle else "converged"

"""Output temperature and prior precision together, p = E softmax(f/T): the least NLL on held-out data.

A variance can only make predictions less sure, so a network that is too cautious needs T < 1; one temperature cannot
tell inputs apart, so one that is sure of unfamiliar inputs needs the variance. T alone is δ = ∞, precision alone T = 1.

Held-out data are familiar, and often cannot tell one pair from another: a temperature does there what the variance
does. Elsewhere, under shift, it does not. So the pair is that of **the most variance that costs at most `TOLERANCE`
nats** beside the best. With few data a pair is overfitted more than a single number, so families are compared by
cross-fitting, each datum judged by what the others chose, and the pair gives way to the temperature alone, or another,
that is better by `MARGIN` nats and by a standard error.

Few data of which the network has none wrong ask for T → 0. So log T has a prior, N(0, s²): of the order of 1/N nats per
datum, it decides nothing where there are enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.likelihoods.quadrature import gaussian_points
from ntk_iterncgp.posterior.predictive import POINT_ENTRIES
from ntk_iterncgp.posterior.tuning import ScalarPath, ValidationPart
from ntk_iterncgp.posterior.weight_space import WeightPosterior

TEMPERATURES = tuple(2 ** (k / 3) for k in range(-7, 10))  # 0.2 to 8
SPREADS = tuple(10 ** (k / 1.5) for k in range(-5, 9))  # prior standard deviations of an output
FINER = (-0.5, -0.25, 0.0, 0.25, 0.5)  # steps of these grids, around the best of each family
POINTS = 128  # of the link
NUM_FOLDS = 5
LEAST_DATA = 20
TOLERANCE = 5e-4  # nats per datum, that more variance may cost
MARGIN = 1e-3  # nats per datum, by which another family must be better than the pair
DOUBT = 0.5  # of log T before any data: standard deviations from T = 1
NEGLIGIBLE = 3e-4  # nats, by which a variance may change the mean datum's loss where none is wanted
MOST_STEPS = 20  # of the grid, from its smallest precision to that
HALVINGS = 3  # of the last one: to a factor of one and a half

Pair = tuple[float, float]
"""An output temperature and a prior precision, which may be infinite: no variance."""

FAMILIES = ("both", "temperature", "precision", "neither")  # in order of preference


@dataclass(frozen=True)
class Calibration:
    """What was chosen for p = E softmax(f/T), and why; prints as a table."""

    output_temperature: float
    prior_precision: float
    family: str  # one of `FAMILIES`
    num_data: int
    losses: Mapping[str, float]  # cross-fitted NLL of each family, nats per datum
    errors: Mapping[str, float]  # standard error of its difference from temperature scaling

    def __str__(self) -> str:
        lines = [
            f"Output temperature {self.output_temperature:.3g} and prior precision {self.prior_precision:.3g}: "
            f"{_MEANING[self.family]}, by the cross-fitted NLL of {self.num_data:,} inputs."
        ]
        for name in FAMILIES:
            difference = self.losses[name] - self.losses["temperature"]
            beside = "" if name == "temperature" else f"  {difference:+.4f} ± {self.errors[name]:.4f}"
            lines.append(f"  {name:<12} {self.losses[name]:.4f}{beside}{'  (chosen)' if name == self.family else ''}")
        return "\n".join(lines)

    __repr__ = __str__


_MEANING = {
    "neither": f"the network is calibrated as it is, with a variance that moves a loss by {NEGLIGIBLE:g} nats",
    "temperature": "temperature scaling, since more variance beside it costs too much on these data",
    "precision": "the posterior variance alone",
    "both": "the posterior variance and a temperature",
}


class Losses:
    """−log p(y) of each datum for pairs of temperature and precision, each computed once.

    The points of the link are those of the covariance, so all temperatures share them.
    """

    def __init__(self, parts: Sequence[ValidationPart], posterior: WeightPosterior, noise_scale: Tensor) -> None:
        self._parts, self._noise_scale = parts, noise_scale
        self._path = ScalarPath(posterior, parts, noise_scale) if posterior.rank else None
        self._outputs = torch.cat([part.outputs for part in parts])
        self._targets = torch.cat([part.targets for part in parts])
        self._known: dict[Pair, Tensor] = {}

    def __call__(self, pairs: Sequence[Pair]) -> Tensor:  # (pairs, N)
        wanted: dict[float, list[float]] = {}
        for T, precision in dict.fromkeys(pairs):
            if (T, precision) not in self._known:
                wanted.setdefault(precision, []).append(T)
        for precision, temperatures in wanted.items():
            table = self._at(precision, temperatures)
            self._known |= {(T, precision): loss for T, loss in zip(temperatures, table, strict=True)}
        return torch.stack([self._known[pair] for pair in pairs])

    def _at(self, precision: float, temperatures: Sequence[float]) -> Tensor:  # (temperatures, N)
        if math.isinf(precision):
            return torch.stack([_log_loss(self._outputs / T, self._targets) for T in temperatures])
        N, C = self._outputs.shape
        covariance, contrasts = self._covariance(precision), Softmax(C).contrasts(self._outputs.device)
        tables = []
        for rows in torch.arange(N, device=self._outputs.device).split(1 + POINT_ENTRIES // (POINTS * C)):
            mean, targets = self._outputs[rows], self._targets[rows]
            if C == 2:  # the points of a line depend on the temperature
                scaled = [gaussian_points(mean / T, covariance[rows] / T**2, contrasts, POINTS) for T in temperatures]
                latents = [(mean / T)[:, None] + z @ R.mT for T, (R, z, _) in zip(temperatures, scaled, strict=True)]
                weights = [w for _, _, w in scaled]
            else:
                R, z, w = gaussian_points(mean, covariance[rows], contrasts, POINTS)
                latent = mean[:, None] + z @ R.mT  # (b, q, C)
                latents, weights = [latent / T for T in temperatures], [w] * len(temperatures)
            log_p = [_log_loss(f, targets[:, None].expand(f.shape[:2])) for f in latents]  # −log p, (b, q)
            tables.append(torch.stack([-(w.log() - p).logsumexp(1) for w, p in zip(weights, log_p, strict=True)]))
        return torch.cat(tables, 1)

    def _covariance(self, precision: float) -> Tensor:  # (N, C, C)
        scalar = torch.full((1,), precision, dtype=torch.float64, device=self._outputs.device)
        if self._path is None:
            return torch.cat([part.prior(scalar) for part in self._parts])
        return torch.cat([covariance for _, covariance, _ in self._path.moments(scalar[0])])

    def mean(self, pair: Pair) -> float:
        """Nats per datum."""
        return float(self([pair]).mean())

    def best(self, pairs: Sequence[Pair]) -> Pair:
        """The pair with the most variance among those that are as good as the best, a priori doubt included."""
        N = len(self._targets)
        return pairs[_most_variance(pairs, (self(pairs).sum(1) + self.doubts(pairs)) / N)]

    def doubts(self, pairs: Sequence[Pair]) -> Tensor:  # (pairs,)
        """½(log T/s)²: what a temperature far from one must be worth in all."""
        logs = torch.tensor([math.log(T) for T, _ in pairs], dtype=torch.float64, device=self._outputs.device)
        return 0.5 * (logs / DOUBT).square()

    @property
    def precisions(self) -> list[float]:
        """A grid, for which the prior standard deviation of a typical output is one of `SPREADS`."""
        one, parts = self._outputs.new_ones(1), self._parts  # of contrasts, each part may have another number
        variance = torch.cat([part.prior(one).diagonal(dim1=1, dim2=2).mean(1) for part in parts])
        typical = float(variance.double().median())
        return [typical / spread**2 for spread in SPREADS] if typical > 0 else []


def _log_loss(outputs: Tensor, targets: Tensor) -> Tensor:  # (…, C), (…) -> (…)
    return outputs.logsumexp(-1) - outputs.gather(-1, targets[..., None])[..., 0]


def calibrate(parts: Sequence[ValidationPart], posterior: WeightPosterior, noise_scale: Tensor) -> Calibration:
    """Choose the output temperature and the prior precision from held-out data.

    Args:
        parts: The held-out data, with labels.
        posterior: Of the fit.
        noise_scale: τ = σ²·T of the likelihood.

    Returns:
        The pair of the family that was chosen, tuned on all of the data, and the cross-fitted losses of all families.
    """
    losses = Losses(parts, posterior, noise_scale)
    candidates = _candidates(losses)
    fitted = {name: _crossfitted(losses, pairs) for name, pairs in candidates.items()}
    means = {name: float(loss.mean()) for name, loss in fitted.items()}
    errors = {n: float((fitted["temperature"] - x).std() / math.sqrt(len(x))) for n, x in fitted.items()}
    chosen = next(name for name in FAMILIES if not any(_is_better(other, fitted[name]) for other in fitted.values()))
    temperature, precision = losses.best(candidates[chosen])
    if math.isinf(precision):  # no variance
        precision = _without_variance(losses, temperature)
    return Calibration(temperature, precision, chosen, len(fitted[chosen]), means, errors)


def _is_better(one: Tensor, other: Tensor) -> bool:  # (N,), (N,)
    """Whether one is better than the other by more than `MARGIN` and a standard error of the paired difference."""
    gain = other - one
    return float(gain.mean()) > max(MARGIN, float(gain.std()) / math.sqrt(len(gain)))


def _most_variance(pairs: Sequence[Pair], loss: Tensor) -> int:  # (pairs,) per datum
    """The place of the best pair of the smallest precision at which one is as good as the best of all."""
    near = (loss <= loss.min() + TOLERANCE).tolist()
    return min((i for i, is_near in enumerate(near) if is_near), key=lambda i: (pairs[i][1], float(loss[i])))


def _candidates(losses: Losses) -> dict[str, list[Pair]]:
    """The pairs of each family: on a grid, and on a finer one around its best pair."""
    none, precisions = math.inf, losses.precisions
    grids: dict[str, list[Pair]] = {
        "neither": [(1.0, none)],
        "temperature": [(T, none) for T in TEMPERATURES],
        "precision": [(1.0, precision) for precision in precisions] + [(1.0, none)],
        "both": [(T, precision) for precision in precisions for T in TEMPERATURES],
    }
    for name in ("temperature", "precision", "both"):
        if not grids[name]:  # no weight has a say at these inputs
            grids[name] = grids["temperature"]
        T, precision = losses.best(grids[name])
        finer_T = [T * (TEMPERATURES[1] / TEMPERATURES[0]) ** step for step in FINER]
        finer_precision = [precision * (SPREADS[1] / SPREADS[0]) ** (2 * step) for step in FINER]
        grids[name] += [
            (one, other)
            for other in (finer_precision if not math.isinf(precision) else [precision])
            for one in (finer_T if name != "precision" else [T])
        ]
    grids["both"] += grids["temperature"]
    return grids


def _crossfitted(losses: Losses, pairs: Sequence[Pair]) -> Tensor:  # (N,)
    """The loss of each datum at the pair that is best for the other folds."""
    table = losses(pairs)
    N = table.shape[1]
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0)).to(table.device)
    result, total = torch.empty_like(table[0]), table.sum(1) + losses.doubts(pairs)
    for fold in order.tensor_split(min(NUM_FOLDS, N)):
        best = _most_variance(pairs, (total - table[:, fold].sum(1)) / max(1, N - len(fold)))
        result[fold] = table[best, fold]
    return result


def _without_variance(losses: Losses, temperature: float) -> float:
    """The smallest precision, and so the most variance, that changes the loss of the mean datum by next to nothing.

    Not the mean loss, which may gain at some data what it loses at others, and will elsewhere.
    """
    plain = losses([(temperature, math.inf)])

    def is_negligible(precision: float) -> bool:
        return float((losses([(temperature, precision)]) - plain).abs().mean()) <= NEGLIGIBLE

    precision, step = min(losses.precisions, default=1.0), (SPREADS[1] / SPREADS[0]) ** 2
    if is_negligible(precision):
        return precision
    for _ in range(MOST_STEPS):
        precision *= step
        if is_negligible(precision):
            break
    for _ in range(HALVINGS):  # the step before it changes too much
        step = math.sqrt(step)
        if is_negligible(precision / step):
            precision /= step
    return precision

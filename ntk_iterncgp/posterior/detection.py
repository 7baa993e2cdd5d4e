"""Calibrate scores of unfamiliar inputs on familiar ones: no labels, no outliers.

precision   What suits probabilities is too little variance for detection, where every familiar input is many standard
            deviations sure. Here the layers get the precisions at which all of them have a say (tr A_lᵀΛ_l⁻¹A_l is the
            same for each parameter tensor l), times the number at which the median evidence hᵀf / √(hᵀΣh) of familiar
            inputs is z posterior standard deviations
combined    Scores are standardised by the median and the 90 % point of familiar inputs and summed. A distance from
            what is typical counts where it is above the median: to be typical is no evidence of anything
ranks       p = (1 + #{s_i ≥ s}) / (n + 1) is uniform for another familiar input if the n had no say in what the score
            is (conformal). So of many inputs some fix the score, and the others are ranked. A part of a few hundred
            would leave the score to the luck of the draw: there all of them fix it, and s_i is what input i would score
            if the nine tenths without it did (cross-conformal; Vovk 2015), for which p is uniform as far as these agree
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.jacobian.blocks import WeightColumns
from ntk_iterncgp.jacobian.rows import Rows
from ntk_iterncgp.posterior.scores import SCORES, TYPICALITY, Latent
from ntk_iterncgp.posterior.typicality import Typicality
from ntk_iterncgp.posterior.weight_space import WeightPosterior, downdate_rounding

PRECISIONS = (1e-12, 1e18)  # between which the median rule looks
HALVINGS = 18  # of these thirty decades: the precision to 0.03 %
LEAST_PART = 1e-4  # of the largest layer's images, below which one counts no more
ENOUGH = 2000  # inputs, of which some fix the score and others are ranked
FITTING = 500  # of these; more of them change next to nothing
RANKING_FOLDS = 10  # of fewer
HIGH = 0.9  # the quantile that is one above the median


@dataclass(frozen=True, eq=False)
class Measured:
    """Small matrices at some inputs for two unit priors: one that balances the layers, and one for all weights."""

    outputs: Tensor  # f (b, C)
    layers: Tensor  # hᵀJ_l J_lᵀh, or the trace over outputs (b, L)
    cross: Tensor  # hᵀJ Λ⁻¹ A for both (2, b, r, B)
    rounding: float  # of what is removed from the variance, as a fraction of it

    @classmethod
    def of(cls, rows: Rows, posterior: WeightPosterior, variances: Tensor, dtype: torch.dtype) -> Measured:  # (2, L)
        """From the rows of one contrast, or of all outputs."""
        layers, cross = [], torch.zeros((), dtype=torch.float64, device=variances.device)
        for variance, (product, own) in zip(
            variances.T, rows.by_layer(WeightColumns(posterior.images, dtype), posterior.layer_sizes), strict=True
        ):
            layers.append(own.diagonal(dim1=1, dim2=2).sum(1))
            cross = cross + variance[:, None, None, None] * product
        rounding = downdate_rounding(posterior.dtype, dtype)
        return cls(rows.outputs.double(), torch.stack(layers, 1), cross.to(dtype), rounding)

    @classmethod
    def cat(cls, parts: Sequence[Measured]) -> Measured:
        """Several batches as one."""
        outputs, layers = (torch.cat([getattr(part, name) for part in parts]) for name in ("outputs", "layers"))
        return cls(outputs, layers, torch.cat([part.cross for part in parts], 1), parts[0].rounding)

    def __getitem__(self, chosen: Tensor) -> Measured:
        """Some of the inputs."""
        return Measured(self.outputs[chosen], self.layers[chosen], self.cross[:, chosen], self.rounding)

    def latent(self, prior: Prior) -> Latent:
        """What scores are asked about, at two precisions."""
        (own, total), (flat, _) = self._variances(prior, 0), self._variances(prior, 1)
        return Latent(self.outputs, own, total, self.layers, flat)

    def _variances(self, prior: Prior, which: int) -> tuple[Tensor, Tensor]:  # (b,), (b,)
        precision, tiny = prior.scales[which], torch.finfo(torch.float64).tiny
        total = (1 + self.rounding) * (self.layers @ prior.variances[which]) / precision
        factor = prior.posterior.factor(precision / prior.variances[which], prior.noise_scale)
        cross = self.cross[which].double() / precision
        removed = factor.half_solve(cross.flatten(0, 1).T).square().sum(0).unflatten(0, cross.shape[:2]).sum(1)
        return (total - removed).clamp_min(tiny), total.clamp_min(tiny)


@dataclass(frozen=True, eq=False)
class Prior:
    """The two priors of a detector: variances of the layers in proportion, and the precision that scales them."""

    posterior: WeightPosterior
    noise_scale: Tensor  # τ = σ²·T
    variances: Tensor  # (2, L)
    scales: Tensor  # (2,)

    @property
    def precision(self) -> Tensor:  # (L,)
        """Of each layer, for the one that balances them."""
        return self.scales[0] / self.variances[0]

    def at(self, which: int, precision: float) -> Prior:
        """With another scale for one of the two."""
        scales = self.scales.clone()
        scales[which] = precision
        return Prior(self.posterior, self.noise_scale, self.variances, scales)


def balancing(posterior: WeightPosterior) -> Tensor:  # (2, L)
    """Variances in inverse proportion to the layers' squared images, and all the same."""
    squares = torch.stack([part.double().square().sum() for part in posterior.images.split(posterior.layer_sizes)])
    largest = squares.max() if bool(squares.any()) else torch.ones_like(squares[0])
    balanced = largest / squares.clamp_min(LEAST_PART * largest)
    return torch.stack([balanced, torch.ones_like(balanced)])


def by_median(familiar: Measured, prior: Prior, z: float) -> Prior:
    """Find the scales at which the median evidence is z posterior standard deviations, by bisection.

    Args:
        familiar: Inputs, with the contrast of the likeliest class against the rest.
        prior: Whose scales are to be found.
        z: How many standard deviations.

    Returns:
        The prior with scales between 1e-12 and 1e18.
    """
    evidence = familiar.latent(prior).evidence
    for which in (0, 1):
        lower, upper = map(math.log, PRECISIONS)
        for _ in range(HALVINGS):
            middle = 0.5 * (lower + upper)
            variance, _ = familiar._variances(prior.at(which, math.exp(middle)), which)
            if float((evidence / variance.sqrt()).median()) < z:
                lower = middle
            else:
                upper = middle
        prior = prior.at(which, math.exp(0.5 * (lower + upper)))
    return prior


def split(count: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Which inputs fix the score, and which are ranked, at random, always the same; None: all of them, cross-fitted."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device)
    return (order, None) if count < ENOUGH else (order[:FITTING], order[FITTING:])


@dataclass(frozen=True, eq=False)
class Novelty:
    """One score from one or several, and what it is at familiar inputs: its rank among them."""

    names: tuple[str, ...]
    of_classes: bool
    location: Tensor  # (k,), of each score
    scale: Tensor  # (k,)
    lowest: Tensor  # (k,), standardised, at a familiar input
    typicality: Typicality
    ranked: Tensor  # (n,), ascending

    @classmethod
    def of(cls, names: Sequence[str], fitting: Latent, ranked: Latent | None, *, of_classes: bool) -> Novelty:
        """Calibrate scores on familiar inputs.

        Args:
            names: Of the scores, keys of `SCORES` or "typicality".
            fitting: What the scores are asked about, at the inputs that fix how they are combined.
            ranked: The same at n other inputs. None: the former are ranked, a tenth of them by what the others fix.
            of_classes: Whether the outputs are those of a classifier.
        """
        fixed = cls._fixed(names, fitting, of_classes)
        if ranked is not None:
            return replace(fixed, ranked=fixed.score(ranked).sort().values)
        every = torch.arange(len(fitting.variance), device=fitting.variance.device)
        scores = torch.empty_like(fitting.variance)
        for own in every.tensor_split(RANKING_FOLDS):
            others = torch.ones_like(every, dtype=torch.bool).index_fill(0, own, value=False)
            scores[own] = cls._fixed(names, fitting[others], of_classes).score(fitting[own])
        return replace(fixed, ranked=scores.sort().values)

    @classmethod
    def _fixed(cls, names: Sequence[str], fitting: Latent, of_classes: bool) -> Novelty:
        """With nothing to rank among."""
        features, classes = fitting.features(of_classes=of_classes), fitting.classes(of_classes=of_classes)
        num_classes = fitting.outputs.shape[1] if of_classes else 1
        typicality = Typicality.of(features, classes, num_classes)
        distances = Typicality.of_others(features, classes, num_classes)
        values = torch.stack([distances if name == TYPICALITY else SCORES[name](fitting) for name in names])
        location = values.median(1).values
        scale = values.quantile(HIGH, dim=1) - location
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # ties
        lowest = ((values - location[:, None]) / scale[:, None]).amin(1)
        return cls(tuple(names), of_classes, location, scale, lowest, typicality, location[:0])

    def __len__(self) -> int:
        """n, the number of familiar inputs that are ranked."""
        return len(self.ranked)

    def score(self, latent: Latent) -> Tensor:  # (b,)
        """The score of new inputs, higher for less familiar ones: the only one, or a weighted sum of several.

        In a sum, no score speaks for an input more than for the most familiar ones: far from all data a network may
        have any amount of evidence.
        """
        if len(self.names) == 1:
            return self._value(self.names[0], latent)
        total = torch.zeros_like(latent.variance)
        calibrated = zip(self.names, self.location, self.scale, self.lowest, strict=True)
        for name, location, scale, lowest in calibrated:
            standard = ((self._value(name, latent) - location) / scale).maximum(lowest)
            total += standard.clamp_min(0) if name == TYPICALITY else SCORES[name].weight * standard
        return total

    def _value(self, name: str, latent: Latent) -> Tensor:  # (b,)
        if name != TYPICALITY:
            return SCORES[name](latent)
        classes = latent.classes(of_classes=self.of_classes)
        return self.typicality(latent.features(of_classes=self.of_classes), classes)

    def p_value(self, scores: Tensor) -> Tensor:  # (b,) -> (b,)
        """Rank scores among those of the familiar inputs, p = (1 + #{s_i ≥ s}) / (n + 1).

        Where several are equal the place among them is drawn, always the same for the same scores, so that p is
        uniform for familiar inputs.
        """
        above = (len(self) - torch.searchsorted(self.ranked, scores, right=True)).double()
        equal = (len(self) - torch.searchsorted(self.ranked, scores.contiguous())).double() - above
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(len(scores), generator=generator, dtype=torch.float64).to(scores.device)
        return (1 + above + (drawn * (equal + 1)).floor()) / (len(self) + 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain tensors and strings."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return found | {"names": list(self.names), "typicality": self.typicality.to_dict()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], device: torch.device) -> Novelty:
        """What `to_dict` made, on a device; a `ValueError` where its parts do not fit together."""
        names: Any = saved.get("names")
        tensors: list[Any] = [saved.get(name) for name in ("location", "scale", "lowest", "ranked")]
        is_whole = (
            isinstance(names, (list, tuple))
            and len(names) > 0
            and all(isinstance(name, str) and (name in SCORES or name == TYPICALITY) for name in names)
            and all(isinstance(t, Tensor) and t.dtype == torch.float64 and t.ndim == 1 for t in tensors)
            and [len(t) for t in tensors[:3]] == 3 * [len(names)]
            and all(bool(torch.isfinite(t).all()) for t in tensors)
            and len(tensors[3]) > 0
            and bool((tensors[1] > 0).all() and (tensors[3].diff() >= 0).all())
            and isinstance(saved.get("of_classes"), bool)
        )
        if not is_whole:
            raise ValueError(
                f"The scores of a saved detector must be known, sorted and finite; got {names!r}. Try to save it "
                "again, or la.detector(inputs)."
            )
        location, scale, lowest, ranked = (t.to(device) for t in tensors)
        typicality = Typicality.from_dict(saved.get("typicality"), device)
        return cls(tuple(names), saved["of_classes"], location, scale, lowest, typicality, ranked)

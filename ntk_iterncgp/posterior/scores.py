"""Scores of how unfamiliar an input is, from one contrast of its outputs. Higher scores mean less familiar.

    h = e_c − (1 − e_c)/(C − 1)      the likeliest class c against the mean of the others
    evidence hᵀf                     how much the network has for its answer, whatever is added to all outputs
    variance hᵀΣh of it, under the posterior, and under the prior hᵀKh, in all and of each parameter tensor

That is one row hᵀJ(x) for each input, whatever the number of classes. The next class alone is the usual contrast of a
prediction. For detection it is the weaker one: an unfamiliar input may well be far from *one* of the classes that were
not chosen, and near all others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import final

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods.quadrature import line_points


@dataclass(frozen=True, eq=False)
class Latent:
    """The outputs at b inputs and one contrast of them; a regression has no contrast, and the trace over outputs."""

    outputs: Tensor  # f (b, C)
    variance: Tensor  # hᵀΣh (b,)
    prior_variance: Tensor  # hᵀKh (b,)
    layers: Tensor  # hᵀK_l h for each parameter tensor (b, L)
    flat_variance: Tensor  # hᵀΣh where all weights have one precision (b,)

    def __getitem__(self, chosen: Tensor) -> Latent:
        """Some of the inputs."""
        return Latent(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @property
    def evidence(self) -> Tensor:  # (b,)
        """hᵀf: zero where all classes are as likely."""
        return (self.outputs[..., None] * against_rest(self.outputs)).sum((1, 2))

    def features(self, *, of_classes: bool) -> Tensor:  # (b, d)
        """What typicality looks at: logarithms of variances, and evidence and energy of a classifier."""
        variances = torch.cat([self.layers, self.variance[:, None], self.flat_variance[:, None]], 1)
        logs = variances.clamp_min(torch.finfo(torch.float64).tiny).log()
        own = [self.evidence[:, None], self.outputs.logsumexp(1)[:, None]] if of_classes else []
        return torch.cat([logs, *own], 1)

    def classes(self, *, of_classes: bool) -> Tensor:  # (b,)
        """The likeliest class; a regression has one for all."""
        return self.outputs.argmax(1) if of_classes else torch.zeros_like(self.variance, dtype=torch.long)


def against_rest(outputs: Tensor) -> Tensor:  # (b, C) -> (b, C, 1)
    """Contrast the likeliest class with the mean of the others.

    Args:
        outputs: The network's outputs f.

    Returns:
        h = e_c − (1 − e_c)/(C − 1) for each input; with two classes the difference of the two.
    """
    C = outputs.shape[1]
    contrasts = torch.full_like(outputs, -1 / max(1, C - 1))
    return contrasts.scatter(1, outputs.argmax(1, keepdim=True), 1.0)[..., None]


class Score(ABC):
    """How unfamiliar inputs are, higher for less familiar ones. Monotone transformations change nothing."""

    name: str
    needs_classes: bool = True  # or it has a meaning for regression too
    weight: float = 1.0  # beside others

    @abstractmethod
    def __call__(self, latent: Latent) -> Tensor:  # (b,)
        """The score at each input."""


def softened(latent: Latent) -> Tensor:  # (b, C)
    """The outputs, each input's divided by √(1 + π v/8)."""
    return latent.outputs / (1 + math.pi / 8 * latent.variance).sqrt()[:, None]


@final
class Evidence(Score):
    """−hᵀf / √(hᵀΣh): minus the evidence for the likeliest class, in posterior standard deviations."""

    name = "evidence"

    def __call__(self, latent: Latent) -> Tensor:
        return -latent.evidence / latent.variance.sqrt()


@final
class Energy(Score):
    """The network's own: how little evidence there is for any class. It needs no posterior."""

    name, weight = "energy", 0.5

    def __call__(self, latent: Latent) -> Tensor:
        return -latent.outputs.logsumexp(1)


@final
class PosteriorEnergy(Score):
    """−log Σ_c exp f̃_c, with f̃ the outputs less their mean, divided by √(1 + π v/8)."""

    name = "posterior_energy"

    def __call__(self, latent: Latent) -> Tensor:
        outputs = softened(latent)
        return -(outputs - outputs.mean(1, keepdim=True)).logsumexp(1)


def entropy_of(outputs: Tensor) -> Tensor:  # (b, C) -> (b,)
    """H[softmax(f)], which keeps its order where a probability of the likeliest class rounds to one."""
    log_p = outputs.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


@final
class Entropy(Score):
    """The network's own doubt, in nats. It needs no posterior."""

    name = "entropy"

    def __call__(self, latent: Latent) -> Tensor:
        return entropy_of(latent.outputs)


@final
class PosteriorEntropy(Score):
    """That of softmax(f / √(1 + π v/8)), v = hᵀΣh: the probit approximation with one variance for all classes."""

    name = "posterior_entropy"

    def __call__(self, latent: Latent) -> Tensor:
        return entropy_of(softened(latent))


@final
class MutualInformation(Score):
    """H[E p] − E H[p] for p = σ(hᵀf): what whether the answer is right would say about the weights."""

    name = "mutual_information"

    def __call__(self, latent: Latent) -> Tensor:
        mean, deviation = latent.evidence, latent.variance.sqrt()
        points, weights = line_points(mean, deviation)
        p = torch.sigmoid(mean[:, None] + deviation[:, None] * points)  # (b, q)
        expected = (weights * p).sum(1)
        return _binary_entropy(expected) - (weights * _binary_entropy(p)).sum(1)


def _binary_entropy(p: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(p) + torch.special.entr(1 - p)
    return entropy


@final
class VarianceRatio(Score):
    """ρ = hᵀΣh / hᵀKh: one where no action has anything in common with the input, near zero where it is settled.

    It sees inputs that share no direction of the weights with the training data, however sure the network is. Where the
    actions know only a part of the data (a network that fits them to 99.9 % has curvature at few of them) it ranks the
    familiar inputs by how alike they are to that part, and is not to be used alone.
    """

    name, needs_classes = "ratio", False

    def __call__(self, latent: Latent) -> Tensor:
        return latent.variance / latent.prior_variance


@final
class Variance(Score):
    """hᵀΣh, or the trace over the outputs of a regression, for which it is the right score.

    Not for classifiers, whose Jacobians are larger where they are sure.
    """

    name, needs_classes = "variance", False

    def __call__(self, latent: Latent) -> Tensor:
        return latent.variance


SCORES: dict[str, Score] = {
    score.name: score
    for score in (
        Evidence(),
        Energy(),
        VarianceRatio(),
        Entropy(),
        PosteriorEntropy(),
        PosteriorEnergy(),
        MutualInformation(),
        Variance(),
    )
}
"""All scores by name."""

TYPICALITY = "typicality"
"""The name of the score that is fitted to familiar inputs (`typicality.py`)."""

AUTO = {
    "classification": ("evidence", "energy", TYPICALITY),
    "regression": ("variance", TYPICALITY),
}
"""What "auto" combines: the posterior's doubt, the network's own, and how far from typical the posterior is."""

"""What a score is asked about, and the contrast it looks at.

    h = e_c − (1 − e_c)/(C − 1)      the likeliest class c against the mean of the others
    evidence hᵀf                     how much the network has for its answer, whatever is added to all outputs
    variance hᵀΣh of it, under the posterior, and under the prior hᵀKh

The next class alone is the usual contrast of a prediction. For detection it is the weaker one: an unfamiliar input may
well be far from *one* of the classes that were not chosen, and near all others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ntk_iterncgp.posterior.tuning import ValidationPart
from ntk_iterncgp.posterior.weight_space import WeightPosterior


@dataclass(frozen=True, eq=False)
class Latent:
    """The outputs at b inputs and one contrast of them; a regression has no contrast, and the trace over outputs."""

    outputs: Tensor  # f (b, C)
    variance: Tensor  # hᵀΣh (b,)
    prior_variance: Tensor  # hᵀKh (b,)

    @property
    def evidence(self) -> Tensor:  # (b,)
        """hᵀf: zero where all classes are as likely."""
        return (self.outputs[..., None] * against_rest(self.outputs)).sum((1, 2))

    @classmethod
    def cat(cls, parts: list[Latent]) -> Latent:
        """Several batches as one."""
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)))


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


def latent_of(part: ValidationPart, posterior: WeightPosterior, precision: Tensor, noise_scale: Tensor) -> Latent:
    """The moments at some inputs for a scalar prior precision, from the small matrices of a unit one."""
    outputs, covariance = part.moments(posterior, precision, noise_scale, refined=False)
    variances = (values.diagonal(dim1=1, dim2=2).sum(1) for values in (covariance, part.prior(precision)))
    return Latent(outputs, *(variance.clamp_min(torch.finfo(torch.float64).tiny) for variance in variances))


class Score(ABC):
    """How unfamiliar inputs are, higher for less familiar ones. Monotone transformations change nothing."""

    name: str
    needs_classes: bool = True  # or it has a meaning for regression too

    @abstractmethod
    def __call__(self, latent: Latent) -> Tensor:  # (b,)
        """The score at each input."""


def softened(latent: Latent) -> Tensor:  # (b, C)
    """The outputs, each input's divided by √(1 + π v/8)."""
    return latent.outputs / (1 + math.pi / 8 * latent.variance).sqrt()[:, None]

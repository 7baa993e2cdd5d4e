"""The posterior variance itself, hᵀΣh, or the trace over the outputs of a regression."""

from typing import final

from torch import Tensor

from ntk_iterncgp.posterior.scores.base import Latent, Score


@final
class Variance(Score):
    """The right score for regression. Not for classifiers, whose Jacobians are larger where they are sure."""

    name, needs_classes = "variance", False

    def __call__(self, latent: Latent) -> Tensor:
        return latent.variance

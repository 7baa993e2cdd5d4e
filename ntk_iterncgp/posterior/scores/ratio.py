"""What the data left of the prior's variance: ρ = hᵀΣh / hᵀKh."""

from typing import final

from torch import Tensor

from ntk_iterncgp.posterior.scores.base import Latent, Score


@final
class VarianceRatio(Score):
    """One where no action has anything in common with the input, near zero where the data have settled it.

    It sees inputs that share no direction of the weights with the training data, however sure the network is. Where the
    actions know only a part of the data (a network that fits them to 99.9 % has curvature at few of them) it ranks the
    familiar inputs by how alike they are to that part, and is not to be used alone.
    """

    name, needs_classes = "ratio", False

    def __call__(self, latent: Latent) -> Tensor:
        return latent.variance / latent.prior_variance

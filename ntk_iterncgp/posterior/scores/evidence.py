"""How few posterior standard deviations of evidence there are: −hᵀf / √(hᵀΣh)."""

from typing import final

from torch import Tensor

from ntk_iterncgp.posterior.scores.base import Latent, Score


@final
class Evidence(Score):
    """Minus the evidence for the likeliest class, in posterior standard deviations."""

    name = "evidence"

    def __call__(self, latent: Latent) -> Tensor:
        return -latent.evidence / latent.variance.sqrt()

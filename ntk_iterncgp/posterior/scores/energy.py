"""The energy −log Σ_c exp f_c: of the network's own outputs, and of those that the posterior has softened."""

from typing import final

from torch import Tensor

from ntk_iterncgp.posterior.scores.base import Latent, Score, softened


@final
class Energy(Score):
    """The network's own: how little evidence there is for any class. It needs no posterior."""

    name = "energy"

    def __call__(self, latent: Latent) -> Tensor:
        return -latent.outputs.logsumexp(1)


@final
class PosteriorEnergy(Score):
    """−log Σ_c exp f̃_c, with f̃ the outputs less their mean, divided by √(1 + π v/8)."""

    name = "posterior_energy"

    def __call__(self, latent: Latent) -> Tensor:
        outputs = softened(latent)
        return -(outputs - outputs.mean(1, keepdim=True)).logsumexp(1)

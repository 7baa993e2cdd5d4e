"""Log-concave observation models: four questions each, all in products that cost O(n·k)."""

from typing import Any

from ntk_iterncgp.likelihoods.base import Likelihood
from ntk_iterncgp.likelihoods.bernoulli import Bernoulli
from ntk_iterncgp.likelihoods.fixed_noise import FixedNoiseGaussian
from ntk_iterncgp.likelihoods.gaussian import Gaussian
from ntk_iterncgp.likelihoods.ordinal import Ordinal
from ntk_iterncgp.likelihoods.poisson import Poisson
from ntk_iterncgp.likelihoods.softmax import Softmax
from ntk_iterncgp.likelihoods.successes import Binomial, NegativeBinomial

__all__ = [
    "Bernoulli",
    "Binomial",
    "FixedNoiseGaussian",
    "Gaussian",
    "Likelihood",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "Softmax",
]

WITHOUT_HEAVY_TAILS = (
    "There is no likelihood `StudentT`: heavy tails are not log-concave, so that there may be several modes, and "
    "outliers would have a negative curvature. Use Gaussian(noise), FixedNoiseGaussian(noises) with a large variance "
    "for data that are in doubt; NegativeBinomial(dispersion) for counts."
)


def __getattr__(name: str) -> Any:
    if name in ("StudentT", "StudentsT", "Cauchy"):
        raise AttributeError(WITHOUT_HEAVY_TAILS.replace("StudentT", name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

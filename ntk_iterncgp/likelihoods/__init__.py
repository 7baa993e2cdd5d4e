"""Log-concave observation models: four questions each, all in products that cost O(n·k)."""

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

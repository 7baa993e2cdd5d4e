"""Log-concave observation models: four questions each, all in products that cost O(n·k)."""

from ntk_iterncgp.likelihoods.base import Likelihood
from ntk_iterncgp.likelihoods.bernoulli import Bernoulli
from ntk_iterncgp.likelihoods.gaussian import Gaussian
from ntk_iterncgp.likelihoods.poisson import Poisson
from ntk_iterncgp.likelihoods.softmax import Softmax

__all__ = ["Bernoulli", "Gaussian", "Likelihood", "Poisson", "Softmax"]

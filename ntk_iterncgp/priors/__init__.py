"""Gaussian priors over latent functions, known to the solver only through the questions of `Prior`."""

from ntk_iterncgp.priors.base import Prior
from ntk_iterncgp.priors.dense import DensePrior
from ntk_iterncgp.priors.gram import GramPrior

__all__ = ["DensePrior", "GramPrior", "Prior"]

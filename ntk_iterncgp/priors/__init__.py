"""Gaussian priors over latent functions, known to the solver only through the questions of `Prior`."""

from ntk_iterncgp.priors.base import Prior
from ntk_iterncgp.priors.dense import DensePrior
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.priors.jacobian import Jacobian
from ntk_iterncgp.priors.last_layer import LastLayerJacobian
from ntk_iterncgp.priors.ntk import NTKPrior

__all__ = ["DensePrior", "GramPrior", "Jacobian", "LastLayerJacobian", "NTKPrior", "Prior"]

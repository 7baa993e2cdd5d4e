"""Function-space Laplace posteriors over the full training set, and non-conjugate GPs, by IterNCGP.

Importing this package registers the flavours `hessian_structure="iterncgp"` with laplace-torch.
"""

from ntk_iterncgp import kernels, likelihoods
from ntk_iterncgp.checkpoint import Checkpoint
from ntk_iterncgp.gp import NonConjugateGP
from ntk_iterncgp.laplace_addon import IterNCGPAllLaplace, IterNCGPLastLayerLaplace
from ntk_iterncgp.posterior import Evidence
from ntk_iterncgp.self_check import SelfCheckError
from ntk_iterncgp.solver.report import FitReport

__all__ = [
    "Checkpoint",
    "Evidence",
    "FitReport",
    "IterNCGPAllLaplace",
    "IterNCGPLastLayerLaplace",
    "NonConjugateGP",
    "SelfCheckError",
    "kernels",
    "likelihoods",
]
__version__ = "0.1.0"

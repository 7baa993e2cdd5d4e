"""Function-space Laplace posteriors over the full training set, and non-conjugate GPs, by IterNCGP."""

from ntk_iterncgp import kernels, likelihoods
from ntk_iterncgp.gp import NonConjugateGP
from ntk_iterncgp.posterior import Evidence
from ntk_iterncgp.solver.report import FitReport

__all__ = ["Evidence", "FitReport", "NonConjugateGP", "kernels", "likelihoods"]
__version__ = "0.1.0"

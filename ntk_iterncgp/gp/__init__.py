"""The front door for Gaussian processes with an explicit kernel."""

from ntk_iterncgp.gp.non_conjugate import NonConjugateGP

__all__ = ["NonConjugateGP"]

"""The laplace-torch front door: `Laplace(model, likelihood, subset_of_weights, hessian_structure="iterncgp")`.

Importing this package is enough: laplace-torch finds its flavours among the subclasses of its base class, by key.
"""

from ntk_iterncgp.laplace_addon.flavours import IterNCGPAllLaplace, IterNCGPLastLayerLaplace

__all__ = ["IterNCGPAllLaplace", "IterNCGPLastLayerLaplace"]

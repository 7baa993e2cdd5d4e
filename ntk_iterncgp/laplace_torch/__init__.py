"""The laplace-torch front door: `Laplace(model, likelihood, subset_of_weights, hessian_structure="iterncgp")`.

Importing this package is enough: laplace-torch finds its flavours among the subclasses of its base class, by key.
"""

import warnings

with warnings.catch_warnings():  # laplace-torch scripts a function when imported, which torch now discourages
    warnings.filterwarnings("ignore", message="`torch.jit.script`", category=FutureWarning)
    import laplace  # noqa: F401

from ntk_iterncgp.laplace_torch.flavours import IterNCGPAllLaplace, IterNCGPLastLayerLaplace

__all__ = ["IterNCGPAllLaplace", "IterNCGPLastLayerLaplace"]

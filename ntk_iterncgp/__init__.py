"""Function-space Laplace posteriors over the full training set, and non-conjugate GPs, by IterNCGP.

The method is that of Tatzel, Wenger, Schneider and Hennig (TMLR 2025).

Importing this package registers the flavours `hessian_structure="iterncgp"` with laplace-torch: at once where
laplace-torch has been imported, else at the moment when it is. PyTorch and laplace-torch take seconds to import, so
public names are looked up when they are first used (PEP 562), and `ntk-iterncgp --help` needs neither of them.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ntk_iterncgp import kernels, likelihoods
    from ntk_iterncgp.fitting.report import FitReport, SelfCheckError
    from ntk_iterncgp.gp import NonConjugateGP
    from ntk_iterncgp.laplace_torch import IterNCGPAllLaplace, IterNCGPLastLayerLaplace
    from ntk_iterncgp.persistence.checkpoint import Checkpoint
    from ntk_iterncgp.posterior.function_space import Evidence

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

_DEFINED_IN = {
    "Checkpoint": "persistence.checkpoint",
    "Evidence": "posterior.function_space",
    "FitReport": "fitting.report",
    "IterNCGPAllLaplace": "laplace_torch",
    "IterNCGPLastLayerLaplace": "laplace_torch",
    "NonConjugateGP": "gp",
    "SelfCheckError": "fitting.report",
}


def __getattr__(name: str) -> Any:
    if name in _DEFINED_IN:
        value = getattr(importlib.import_module(f"ntk_iterncgp.{_DEFINED_IN[name]}"), name)
    elif name in __all__:  # a subpackage
        value = importlib.import_module(f"ntk_iterncgp.{name}")
    else:
        raise AttributeError(f"module 'ntk_iterncgp' has no attribute {name!r}")
    globals()[name] = value  # so that it is looked up once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _RegisterWithLaplace(MetaPathFinder):
    """Finds `laplace` as the other finders do, and has the flavours imported once it has been executed.

    laplace-torch finds its flavours among the subclasses of its base class, so to import them is to register them.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "laplace":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                with warnings.catch_warnings():  # laplace-torch scripts a function, which torch now discourages
                    warnings.filterwarnings("ignore", message="`torch.jit.script`", category=FutureWarning)
                    execute(module)
                importlib.import_module("ntk_iterncgp.laplace_torch")
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if "laplace" in sys.modules:
    importlib.import_module("ntk_iterncgp.laplace_torch")
else:
    sys.meta_path.insert(0, _RegisterWithLaplace())

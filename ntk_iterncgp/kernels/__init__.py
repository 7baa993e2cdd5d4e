"""Closed-form covariance functions, and how to multiply by their matrices without holding them."""

from typing import Any

from .adapters import Deep, FromGPyTorch
from .base import Kernel, Product, Scaled, Sum
from .choice import METHODS
from .description import kernel_from_dict, kernel_to_dict
from .linear import Constant, Linear
from .reduction import KernelMatrix, kernel_matmul
from .stationary import RBF, Matern12, Matern32, Matern52, Periodic, RationalQuadratic, Stationary

__all__ = [
    "METHODS",
    "RBF",
    "Constant",
    "Deep",
    "FromGPyTorch",
    "Kernel",
    "KernelMatrix",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "Product",
    "RationalQuadratic",
    "Scaled",
    "Stationary",
    "Sum",
    "kernel_from_dict",
    "kernel_matmul",
    "kernel_to_dict",
]

WITHOUT_WHITE = (
    "There is no kernel `White`: noise belongs to the data, not to pairs of points, and two data at one point would "
    "share it. Use likelihoods.Gaussian(noise), FixedNoiseGaussian(noises), or NegativeBinomial(dispersion) for counts."
)


def __getattr__(name: str) -> Any:
    if name in ("White", "WhiteKernel", "WhiteNoise"):
        raise AttributeError(WITHOUT_WHITE)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

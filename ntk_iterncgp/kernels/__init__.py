"""Closed-form covariance functions, and how to multiply by their matrices without holding them."""

from .adapters import Deep, FromGPyTorch
from .base import Kernel, Product, Scaled, Sum
from .choice import METHODS
from .reduction import KernelMatrix, kernel_matmul
from .stationary import RBF, Matern12, Matern32, Matern52, Stationary

__all__ = [
    "METHODS",
    "RBF",
    "Deep",
    "FromGPyTorch",
    "Kernel",
    "KernelMatrix",
    "Matern12",
    "Matern32",
    "Matern52",
    "Product",
    "Scaled",
    "Stationary",
    "Sum",
    "kernel_matmul",
]

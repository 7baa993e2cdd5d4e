"""The contract of a prior f ~ GP(m, K) at N data with C outputs: five questions, of which only `image` is expensive.

    image(S)       push actions through the prior                 K S, or JᵀS for a network; counted in products
    gram(S, S')    SᵀK S'                                         float64
    lift(images)   K S a at the training inputs                   float64
    cross(x, S)    k(x, X) S at new inputs
    covariance(x)  k(x, x)

A *product* is K applied to one n-vector. Solver and posterior know nothing else about where the covariance comes from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ntk_iterncgp.columns import Buffer, Columns


class Prior(ABC):
    """A Gaussian prior, and the training inputs it is asked about."""

    num_data: int
    num_outputs: int
    dtype: torch.dtype
    device: torch.device
    shares_kernel: bool = False  # the outputs are independent with one kernel: Kronecker actions are possible

    def __init__(self) -> None:
        self.num_products = 0

    @property
    @abstractmethod
    def mean(self) -> Tensor:  # (N, C)
        """m at the training inputs, in float64."""

    @abstractmethod
    def image(self, actions: Columns) -> Columns:
        """Push actions through the prior. The only expensive call; adds to `num_products`."""

    @abstractmethod
    def gram(self, left: Buffer, right: Buffer) -> Tensor:  # (B, B')
        """SᵀK S' in float64."""

    @abstractmethod
    def lift(self, images: Columns) -> Columns:
        """K S at the training inputs, as columns."""

    @abstractmethod
    def cross(self, x: Tensor, buffer: Buffer) -> Tensor:  # (b, C, B)
        """k(x, X) S at new inputs, in float64."""

    @abstractmethod
    def covariance(self, x: Tensor, *, joint: bool = False) -> Tensor:  # (b, C, C), or (b·C, b·C) if joint
        """k(x, x) at new inputs, in float64."""

    @abstractmethod
    def mean_at(self, x: Tensor) -> Tensor:  # (b, C)
        """m at new inputs, in float64."""

    @abstractmethod
    def data_covariance(self, data: slice) -> Tensor:  # (rows, C, C)
        """The diagonal blocks of K at some training inputs, in float64."""

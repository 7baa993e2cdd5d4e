"""The contract of a network's Jacobian J: products on one batch at a time, and rows at new inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ntk_iterncgp.data.order import Inputs
from ntk_iterncgp.jacobian.rows import Contrasts, Rows


class NetworkJacobian(ABC):
    """Products with J, a batch at a time, for P weights in a fixed order."""

    num_params: int
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def forward(self, x: Inputs) -> Tensor:  # (b, C)
        """The outputs."""

    @abstractmethod
    def vjp(self, x: Inputs, cotangents: Tensor) -> Tensor:  # (b, C, k) -> (P, k)
        """JᵀV summed over a batch."""

    @abstractmethod
    def vjp_each(self, x: Inputs, cotangents: Tensor) -> Tensor:  # (b, C, k) -> (b, k, P)
        """JᵀV of each datum of a batch."""

    @abstractmethod
    def jvp(self, x: Inputs, tangents: Tensor) -> Tensor:  # (P, k) -> (b, C, k)
        """J V on a batch."""

    @abstractmethod
    def rows(self, x: Inputs, num_rows: int, contrasts: Contrasts | None = None) -> Rows:
        """The network at each input of a batch, with the rows J(x), or HᵀJ(x) for contrasts H of its outputs: the same
        for all, each input its own, or made of the outputs. Differentiable in x, at given contrasts."""

    @abstractmethod
    def prepare(self, x: Inputs, num_rows: int) -> None:
        """Look at some inputs, so that `bytes_per_row` knows."""

    @abstractmethod
    def bytes_per_row(self, num_outputs: int) -> int:
        """The memory that `rows` takes for each input."""

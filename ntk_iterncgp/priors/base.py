"""The contract of a prior f ~ GP(m, K) at N data with C outputs: five questions, of which only `image` is expensive.

    image(S)       push actions through the prior         K S, and JᵀS for a network; counted in products
    gram(S, S')    SᵀK S'                                 float64
    lift(images)   K S at the training inputs
    at(x, S)       m(x), k(x, X) S and k(x, x)            at new inputs, float64; asked together since a network answers
                                                          all three from the same rows of its Jacobian
    blocks()       the C×C diagonal blocks of K           in sweeps over the data; for the evidence
    pick(rows)     some training inputs, as `at` takes them: by asking about these a run is checked

A *product* is K applied to one n-vector. Solver and posterior know nothing else about where the covariance comes from.

With several processes `shard` says which data are this one's: its rows of actions and images, and the blocks it gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ntk_iterncgp.linalg.columns import Buffer, Columns, Images, Weight
from ntk_iterncgp.runtime import parallel


class AtInputs(NamedTuple):
    """The prior at b new inputs, in float64."""

    mean: Tensor  # m(x) (b, C)
    cross: Tensor  # k(x, X) S (b, C, B)
    covariance: Tensor  # k(x, x) (b, C, C), or (b·C, b·C) if joint


class Prior(ABC):
    """A Gaussian prior, and the training inputs it is asked about."""

    num_data: int
    num_outputs: int
    dtype: torch.dtype
    device: torch.device
    shares_kernel: bool = False  # the outputs are independent with one kernel: Kronecker actions are possible

    def __init__(self, shard: parallel.Shard) -> None:
        self.shard, self.num_products = shard, 0

    @property
    @abstractmethod
    def mean(self) -> Tensor:  # (N, C)
        """m at the training inputs, in float64."""

    @abstractmethod
    def image(self, actions: Columns) -> Images:
        """Push actions through the prior. The only expensive call; adds to `num_products`."""

    def empty_images(self, columns: Columns) -> Images:
        """The images of no actions, given empty columns of the actions' format."""
        return columns

    @abstractmethod
    def gram(self, left: Buffer, right: Buffer) -> Tensor:  # (B, B')
        """SᵀK S' in float64."""

    @abstractmethod
    def lift(self, images: Images) -> Columns:
        """K S at the training inputs, as columns."""

    @abstractmethod
    def at(self, x: Any, buffer: Buffer, *, joint: bool = False) -> AtInputs:
        """Mean, cross-covariance with the actions, and covariance at new inputs."""

    @abstractmethod
    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The diagonal blocks of K: slices of this process's data, each with its (rows, C, C) in float64."""

    @abstractmethod
    def pick(self, rows: Tensor) -> Iterator[tuple[Tensor, Any]]:
        """The training inputs with these numbers (ascending), in parts that can be asked about at once."""

    def checked_data(self, wanted: int) -> int:
        """At how many data a run may be checked, if so many are wanted: fewer where asking about one is dear."""
        return wanted

    def product_error(self, gram: Tensor) -> float:  # SᵀKS (B, B)
        """How far SᵀKS may be off for orthonormal S, in the spectral norm: what the rounding of products amounts to.

        A prior that knows a number for all actions gives that one, so that no action raises the noise of another.
        """
        return torch.finfo(self.dtype).eps * float(torch.linalg.matrix_norm(gram, torch.inf)) if gram.numel() else 0.0

    @property
    def product_tolerance(self) -> float:
        """How far entries of K may be off in a product, beyond the rounding of sums, as a fraction of k(x, x)."""
        return 0.0

    def variance_scale(self) -> float:
        """The largest prior variance among the first training inputs."""
        largest = torch.zeros((), dtype=torch.float64, device=self.device)
        if parallel.is_main() or self.shard.is_whole:  # who always has some
            largest += next(self.blocks())[1].diagonal(dim1=1, dim2=2).max()
        return float(largest if self.shard.is_whole else parallel.from_main(largest))

    def curvature_trace(self, curvature: Weight) -> float:
        """tr(W K), for products with W; exact here, a prior may estimate it."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for data, block in self.blocks():
            total += curvature(data, block).diagonal(dim1=1, dim2=2).sum()
        return float(self.shard.sum(total))

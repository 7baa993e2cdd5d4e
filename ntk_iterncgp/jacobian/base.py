"""The contract of a network's Jacobian J: products on one batch at a time, and rows at new inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from ntk_iterncgp.data.order import Inputs, slice_rows
from ntk_iterncgp.jacobian.rows import Contrasts, Rows, contrasts_of


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
        """Return the network at each input of a batch, with the rows J(x), or HᵀJ(x) for contrasts H of its outputs.

        The contrasts are the same for all inputs, each input's own, or made of the outputs. Differentiable in x, at
        given contrasts.
        """

    @abstractmethod
    def prepare(self, x: Inputs, num_rows: int) -> None:
        """Look at some inputs, so that `bytes_per_row` knows."""

    @abstractmethod
    def bytes_per_row(self, num_outputs: int) -> int:
        """The memory that `rows` takes for each input."""

    def parts(self, x: Inputs, num_inputs: int, num_rows: int, chunk_bytes: int) -> Iterator[slice]:
        """A batch cut so that `num_rows` rows for each input fit in `chunk_bytes`, or an error that names the sizes."""
        self.prepare(x, num_inputs)
        each = self.bytes_per_row(num_rows)
        if each > chunk_bytes:
            raise ValueError(
                f"`chunk_bytes` must hold the rows of the Jacobian for one input, {num_rows} outputs × "
                f"{self.num_params:,} weights, {each:,} bytes; got {chunk_bytes:,}. Try chunk_bytes={each}, or fewer "
                "weights."
            )
        at_once = chunk_bytes // each
        size = -(-num_inputs // max(1, -(-num_inputs // at_once)))  # of parts that are equally large
        return (slice(start, min(start + size, num_inputs)) for start in range(0, num_inputs, size))

    def rows_in_parts(
        self, x: Inputs, num_inputs: int, contrasts: Contrasts | None, num_rows: int, chunk_bytes: int
    ) -> Iterator[Rows]:
        """`rows` of a batch in `parts`."""
        for part in self.parts(x, num_inputs, num_rows, chunk_bytes):
            some = slice_rows(x, part, num_inputs)
            yield self.rows(some, part.stop - part.start, contrasts_of(contrasts, part))

"""The rows of the Jacobian for one parameter tensor, J (b, C, P_l), written out only while a product needs them.

The derivative of output c with respect to the weights of a linear or convolutional layer is a sum over the T places
where the layer is applied, of what went in there (K numbers) times the derivative by what came out (O numbers):

    J[c, o, k] = Σ_t g[c, o, t] u[k, t]

For many columns V it is cheapest to write J out, and for few to pass them through the layer first: Σ_k u[k, t] V[o, k]
does not depend on the output c.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from ntk_iterncgp.jacobian.rows import diagonal

MANY_PLACES = 128  # of a convolution, from which on its derivatives are those of another one


class Block(ABC):
    """The rows of one parameter tensor."""

    @property
    @abstractmethod
    def matrix(self) -> Tensor:  # (b, C, P_l)
        """The rows, written out."""

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype) -> Block:
        """The same rows in another dtype."""

    @abstractmethod
    def formed(self, space: Tensor) -> Block:
        """Return itself, ready for several products that are better done with the rows written out.

        They are written to `space`, a vector of at least `size` numbers that the next block may overwrite.
        """

    @property
    def size(self) -> int:
        """How many numbers `formed` writes."""
        return 0

    @property
    @abstractmethod
    def num_held(self) -> int:
        """How many numbers it consists of."""

    @property
    def num_needed(self) -> int:
        """How many more its products need for a time."""
        return 0

    @abstractmethod
    def times(self, weights: Tensor) -> Tensor:  # (P_l, k) -> (b, C, k)
        """J V."""

    @abstractmethod
    def pull_back(self, cotangent: Tensor) -> Tensor:  # (b, C) -> (P_l,)
        """Jᵀc."""

    @abstractmethod
    def gram(self) -> Tensor:  # (b, C, C)
        """J Jᵀ of each datum."""

    @abstractmethod
    def curvature_diagonal(self, weight: Tensor) -> Tensor:  # (b, C, C) -> (P_l,)
        """The diagonal of Σ_n J_nᵀ W_n J_n."""


class WrittenOut(Block):
    """A block that is held as the matrix of its rows."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @property
    def matrix(self) -> Tensor:
        return self._matrix

    @property
    def num_held(self) -> int:
        return self._matrix.numel()

    def in_dtype(self, dtype: torch.dtype) -> Block:
        return WrittenOut(self._matrix.to(dtype))

    def formed(self, space: Tensor) -> Block:
        return self

    def times(self, weights: Tensor) -> Tensor:
        return self._matrix @ weights

    def pull_back(self, cotangent: Tensor) -> Tensor:
        return cotangent.flatten() @ self._matrix.flatten(0, 1)

    def gram(self) -> Tensor:
        return self._matrix @ self._matrix.mT

    def curvature_diagonal(self, weight: Tensor) -> Tensor:
        return diagonal(self._matrix, weight)


class Outer(Block):
    """g ⊗ u: the weight matrix of a linear layer that each datum passes once. Never written out for a product."""

    def __init__(self, cotangents: Tensor, inputs: Tensor) -> None:
        self.cotangents, self.inputs = cotangents, inputs  # g (b, C, O), u (b, K)

    @property
    def matrix(self) -> Tensor:
        return torch.einsum("bco,bk->bcok", self.cotangents, self.inputs).flatten(2)

    @property
    def num_held(self) -> int:
        return self.cotangents.numel()

    @property
    def num_needed(self) -> int:
        return 2 * self.cotangents.numel() * self.inputs.shape[1]  # where each weight has a prior of its own

    def in_dtype(self, dtype: torch.dtype) -> Block:
        return Outer(self.cotangents.to(dtype), self.inputs.to(dtype))

    def formed(self, space: Tensor) -> Block:
        return self

    def times(self, weights: Tensor) -> Tensor:
        per_output: Tensor = self.inputs @ weights.unflatten(0, (self.cotangents.shape[2], -1))  # (O, b, k)
        return self.cotangents @ per_output.transpose(0, 1)

    def pull_back(self, cotangent: Tensor) -> Tensor:
        return (torch.einsum("bc,bco->ob", cotangent, self.cotangents) @ self.inputs).flatten()

    def gram(self) -> Tensor:
        norms = self.inputs.square().sum(1)
        return self.cotangents @ self.cotangents.mT * norms[:, None, None]

    def curvature_diagonal(self, weight: Tensor) -> Tensor:
        pulled = ((weight @ self.cotangents) * self.cotangents).sum(1)  # (b, O)
        return (pulled.T @ self.inputs.square()).flatten()


class Contraction(Block):
    """Σ_t g u: the weights of a layer that is applied at T places, such as a convolution."""

    def __init__(self, cotangents: Tensor, inputs: Callable[[], Tensor], num_inputs: int) -> None:
        self.cotangents, self.inputs = cotangents, inputs  # g (b, C, O, T), u (b, K, T)
        self.num_inputs = num_inputs  # K

    @property
    def matrix(self) -> Tensor:
        b, C = self.cotangents.shape[:2]
        return (self.cotangents.flatten(1, 2) @ self.inputs().mT).view(b, C, -1)

    @property
    def size(self) -> int:
        return self.cotangents.shape[:3].numel() * self.num_inputs

    @property
    def num_held(self) -> int:
        return self.cotangents.numel()

    @property
    def num_needed(self) -> int:
        b, _, _, T = self.cotangents.shape
        return 2 * self.size + b * self.num_inputs * T  # the rows, these by the prior's deviations, and u

    def in_dtype(self, dtype: torch.dtype) -> Block:
        return Contraction(self.cotangents.to(dtype), lambda: self.inputs().to(dtype), self.num_inputs)

    def formed(self, space: Tensor) -> Block:
        b, C, channels, _ = self.cotangents.shape
        rows = space[: self.size].view(b, C * channels, -1)
        torch.bmm(self.cotangents.flatten(1, 2), self.inputs().mT, out=rows)
        return WrittenOut(rows.view(b, C, -1))

    def times(self, weights: Tensor) -> Tensor:
        (_, C, channels, T), k = self.cotangents.shape, weights.shape[1]
        if T * k >= C * (T + k):  # multiplications, over O·K: first those by the columns, or first Σ_t
            return self.matrix @ weights
        columns = weights.unflatten(0, (channels, -1)).transpose(1, 2).flatten(0, 1)  # (O·k, K)
        passed: Tensor = (columns @ self.inputs()).unflatten(1, (channels, k)).transpose(2, 3)  # (b, O, T, k)
        return self.cotangents.flatten(2) @ passed.flatten(1, 2)

    def pull_back(self, cotangent: Tensor) -> Tensor:
        combined = torch.einsum("bc,bcot->bot", cotangent, self.cotangents)
        return (combined @ self.inputs().mT).sum(0).flatten()

    def gram(self) -> Tensor:
        return WrittenOut(self.matrix).gram()

    def curvature_diagonal(self, weight: Tensor) -> Tensor:
        return WrittenOut(self.matrix).curvature_diagonal(weight)


class Convolution(Contraction):
    """Σ_t g u of a convolution at many places.

    It is the derivative by the weights of a convolution with a group for each datum. On a CPU it takes an eighth of the
    time of patches and their products where a ResNet-20 begins.
    """

    def __init__(self, cotangents: Tensor, layer: nn.Conv2d, inputs: Tensor, out: torch.Size) -> None:
        super().__init__(cotangents, partial(patches, layer, inputs), layer.weight[0].numel())
        self._layer, self._images, self._out = layer, inputs, out  # u (b, I, H, W); the size of g's image

    @staticmethod
    def pays(inputs: Tensor, num_places: int) -> bool:
        """Whether it is faster than patches."""
        return inputs.device.type == "cpu" and inputs.dtype == torch.float32 and num_places >= MANY_PLACES

    @property
    def matrix(self) -> Tensor:
        (b, C, channels, _), layer = self.cotangents.shape, self._layer
        rows: Tensor = conv2d_weight(
            self._images.reshape(1, -1, *self._images.shape[2:]),
            torch.Size((b * C * channels, *layer.weight.shape[1:])),
            self.cotangents.reshape(1, -1, *self._out),
            layer.stride,
            layer.padding,
            layer.dilation,
            b,
        )
        return rows.view(b, C, -1)

    @property
    def num_needed(self) -> int:
        return 2 * self.size

    def in_dtype(self, dtype: torch.dtype) -> Block:
        return self if dtype == self.cotangents.dtype else super().in_dtype(dtype)

    def formed(self, space: Tensor) -> Block:
        return WrittenOut(self.matrix)


class Lookup(Block):
    """Σ_t g e_v(t)ᵀ: the weights of an embedding, of which each datum reads T rows. Never written out for a product.

    h_t = Σ_s [v(s) = v(t)] g_s is the derivative by the row that place t reads, so J Jᵀ = Σ_t g_t h_tᵀ.
    """

    def __init__(self, cotangents: Tensor, rows: Tensor, num_rows: int) -> None:
        self.cotangents, self.rows, self.num_rows = cotangents, rows, num_rows  # g (b, C, T, D), v (b, T), V

    @property
    def matrix(self) -> Tensor:
        b, C, _, D = self.cotangents.shape
        written = self.cotangents.new_zeros(b, C, self.num_rows, D)
        places = self.rows[:, None, :, None].expand_as(self.cotangents)
        return written.scatter_add_(2, places, self.cotangents).flatten(2)

    @property
    def num_held(self) -> int:
        return self.cotangents.numel()

    @property
    def num_needed(self) -> int:
        b, C, _, D = self.cotangents.shape
        return 2 * b * C * self.num_rows * D  # where each weight has a prior of its own

    def in_dtype(self, dtype: torch.dtype) -> Block:
        return Lookup(self.cotangents.to(dtype), self.rows, self.num_rows)

    def formed(self, space: Tensor) -> Block:
        return self

    def times(self, weights: Tensor) -> Tensor:
        read = weights.unflatten(0, (self.num_rows, -1))[self.rows]  # (b, T, D, k)
        product: Tensor = self.cotangents.flatten(2) @ read.flatten(1, 2)
        return product

    def pull_back(self, cotangent: Tensor) -> Tensor:
        combined = torch.einsum("bc,bctd->btd", cotangent, self.cotangents).flatten(0, 1)
        return (
            combined.new_zeros(self.num_rows, combined.shape[1]).index_add_(0, self.rows.flatten(), combined).flatten()
        )

    def gram(self) -> Tensor:
        return self.cotangents.flatten(2) @ self._per_row().flatten(2).mT

    def curvature_diagonal(self, weight: Tensor) -> Tensor:
        h = self._per_row()
        return self._summed((torch.einsum("bce,betd->bctd", weight, h) * self.cotangents).sum(1))

    def _summed(self, each: Tensor) -> Tensor:  # (b, T, D) -> (P_l,)
        table = each.new_zeros(self.num_rows, each.shape[2])
        return table.index_add_(0, self.rows.flatten(), each.flatten(0, 1)).flatten()

    def _per_row(self) -> Tensor:  # h (b, C, T, D)
        same = (self.rows[:, :, None] == self.rows[:, None]).to(self.cotangents)  # (b, T, T)
        return same[:, None] @ self.cotangents


class Transposed(Block):
    """The rows of a weight matrix (K, O) that is stored as the transpose of a linear layer's."""

    def __init__(self, block: Block, shape: tuple[int, int]) -> None:
        self.block, self.shape = block, shape  # of (O, K), and (K, O)

    @property
    def matrix(self) -> Tensor:
        matrix: Tensor = self.block.matrix.unflatten(2, self.shape[::-1])
        return matrix.mT.flatten(2)

    @property
    def num_held(self) -> int:
        return self.block.num_held

    @property
    def num_needed(self) -> int:
        return self.block.num_needed

    @property
    def size(self) -> int:
        return self.block.size

    def in_dtype(self, dtype: torch.dtype) -> Block:
        return Transposed(self.block.in_dtype(dtype), self.shape)

    def formed(self, space: Tensor) -> Block:
        return Transposed(self.block.formed(space), self.shape)

    def times(self, weights: Tensor) -> Tensor:
        return self.block.times(weights.unflatten(0, self.shape).transpose(0, 1).flatten(0, 1))

    def pull_back(self, cotangent: Tensor) -> Tensor:
        return self._transposed(self.block.pull_back(cotangent))

    def gram(self) -> Tensor:
        return self.block.gram()

    def curvature_diagonal(self, weight: Tensor) -> Tensor:
        return self._transposed(self.block.curvature_diagonal(weight))

    def _transposed(self, vector: Tensor) -> Tensor:  # (P_l,)
        matrix: Tensor = vector.unflatten(0, self.shape[::-1])
        return matrix.T.flatten()


def patches(layer: nn.Conv2d, inputs: Tensor) -> Tensor:  # (b, I, H, W) -> (b, K, T)
    """What a convolution sees at each place. As `unfold`, which takes eight times as long on a CPU."""
    assert not isinstance(layer.padding, str)
    (up, left), (down, right), (dy, dx), (h, w) = layer.padding, layer.stride, layer.dilation, layer.kernel_size
    padded = F.pad(inputs, (left, left, up, up))
    b, channels, height, width = padded.shape
    places = (height - dy * (h - 1) - 1) // down + 1, (width - dx * (w - 1) - 1) // right + 1
    datum, channel, row, column = padded.stride()
    strides = datum, channel, row * dy, column * dx, row * down, column * right
    return padded.as_strided((b, channels, h, w, *places), strides).reshape(b, channels * h * w, -1)

"""Rows of the Jacobian layer by layer, for networks whose weights all sit in plain layers.

The derivative of output c with respect to the weights of a layer is a contraction of what went into the layer with the
derivative of output c by what came out of it. Vectorised autograd repeats the first for each output, and on a CPU its
per-datum convolutions are slow. Here one forward pass keeps the inputs, C backward passes stop at the layers' outputs,
and matrix products do the rest: about half the time on a ResNet-20.

A linear layer that each datum passes once is not even written out: its rows are the outer products g ⊗ u, and a
product with them needs u first, which all outputs share.

Layers of another kind, weights used twice, or activations larger than the weights: `layer_rows` says None, and
the rows come from `torch.func`. Weights used behind a layer's back are found by `agrees_with`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ntk_iterncgp.priors.rows import DenseRows, Rows, diagonal, written_out

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Block(ABC):
    """The rows of one parameter tensor: J (b, C, P_l), written out or not."""

    @property
    @abstractmethod
    def matrix(self) -> Tensor:  # (b, C, P_l)
        """The rows, written out."""

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
    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @property
    def matrix(self) -> Tensor:
        return self._matrix

    def times(self, weights: Tensor) -> Tensor:
        return self._matrix @ weights

    def pull_back(self, cotangent: Tensor) -> Tensor:
        return cotangent.flatten() @ self._matrix.flatten(0, 1)

    def gram(self) -> Tensor:
        return self._matrix @ self._matrix.mT

    def curvature_diagonal(self, weight: Tensor) -> Tensor:
        return diagonal(self._matrix, weight)


class Outer(Block):
    """g ⊗ u: the weight matrix of a linear layer that each datum passes once."""

    def __init__(self, cotangents: Tensor, inputs: Tensor) -> None:
        self.cotangents, self.inputs = cotangents, inputs  # g (b, C, O), u (b, K)

    @property
    def matrix(self) -> Tensor:
        return torch.einsum("bco,bk->bcok", self.cotangents, self.inputs).flatten(2)

    def times(self, weights: Tensor) -> Tensor:
        per_output = self.inputs @ weights.unflatten(0, (self.cotangents.shape[2], -1))  # (O, b, k)
        return self.cotangents @ per_output.transpose(0, 1)

    def pull_back(self, cotangent: Tensor) -> Tensor:
        return (torch.einsum("bc,bco->ob", cotangent, self.cotangents) @ self.inputs).flatten()

    def gram(self) -> Tensor:
        norms = self.inputs.square().sum(1)
        return self.cotangents @ self.cotangents.mT * norms[:, None, None]

    def curvature_diagonal(self, weight: Tensor) -> Tensor:
        pulled = ((weight @ self.cotangents) * self.cotangents).sum(1)  # (b, O)
        return (pulled.T @ self.inputs.square()).flatten()


class LayerRows(Rows):
    """J as one block for each parameter tensor, in the order of the weights."""

    def __init__(self, outputs: Tensor, blocks: list[Block], sizes: list[int]) -> None:
        self.outputs, self.blocks, self.sizes = outputs, blocks, sizes

    @property
    def jacobian(self) -> Tensor:  # (b, C, P)
        """The rows, written out."""
        return torch.cat([block.matrix for block in self.blocks], 2)

    def times(self, weights: Tensor) -> Tensor:
        parts = zip(self.blocks, weights.to(self.outputs.dtype).split(self.sizes), strict=True)
        return sum((block.times(part) for block, part in parts), start=self._zeros(weights.shape[1])).double()

    def covariance(self, variance: Tensor, *, joint: bool = False) -> Tensor:
        if joint:
            return DenseRows(self.outputs, self.jacobian).covariance(variance, joint=True)
        total = self._zeros(self.outputs.shape[1])
        for block, part in zip(self.blocks, variance.expand(sum(self.sizes)).split(self.sizes), strict=True):
            if bool((part == part[0]).all()):  # one prior variance for the whole layer
                total = total + part[0].to(total.dtype) * block.gram()
            else:
                total = total + DenseRows(self.outputs, block.matrix).covariance(part).to(total.dtype)
        return total.double()

    def by_layer(self, weights: Tensor, sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        if list(sizes) != self.sizes:
            yield from super().by_layer(weights, sizes)
            return
        for block, part in zip(self.blocks, weights.to(self.outputs.dtype).split(self.sizes), strict=True):
            yield block.times(part).double(), block.gram().double()

    def curvature_diagonal(self, curvature: Callable[[Tensor], Tensor]) -> Tensor:
        weight = written_out(curvature, self.outputs.shape, self.outputs)
        return torch.cat([block.curvature_diagonal(weight) for block in self.blocks]).double()

    def agrees_with(self, pull_back: Callable[[Tensor], Tensor]) -> bool:
        """Whether these are the rows of the J whose products JᵀV, (b, C) -> (P,), are given, by a random one."""
        generator = torch.Generator().manual_seed(0)
        cotangent = torch.randn(self.outputs.shape, generator=generator).to(self.outputs)
        expected = pull_back(cotangent)
        found = torch.cat([block.pull_back(cotangent) for block in self.blocks])
        tolerance = torch.finfo(found.dtype).eps ** 0.5
        return bool((found - expected).norm() <= tolerance * expected.norm())

    def _zeros(self, k: int) -> Tensor:
        return self.outputs.new_zeros(*self.outputs.shape, k)


def layers_of(model: nn.Module, chosen: Mapping[str, Tensor]) -> dict[str, tuple[str, str]] | None:
    """For each parameter the names of its layer and of its place there; None unless all are in layers known here."""
    modules, found = dict(model.named_modules()), {}
    for name in chosen:
        owner, _, place = name.rpartition(".")
        if not _is_plain(modules.get(owner), place):
            return None
        found[name] = owner, place
    return found


def _is_plain(layer: nn.Module | None, place: str) -> bool:
    if place not in ("weight", "bias"):
        return False
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if type(layer) in BATCH_NORMS:
        return getattr(layer, "running_mean", None) is not None
    return type(layer) in (nn.Linear, nn.LayerNorm)


def layer_rows(
    model: nn.Module,
    forward: Callable[[], Tensor],
    places: Mapping[str, tuple[str, str]],
    sizes: list[int],
) -> LayerRows | None:
    """The rows at the inputs that `forward` puts through the model, or None where they cannot be had this way."""
    modules = dict(model.named_modules())
    layers = {owner: modules[owner] for owner, _ in places.values()}
    seen: dict[str, tuple[Tensor, Tensor]] = {}  # by layer: its inputs, and zeros that were added to its outputs
    calls: list[str] = []

    def watch(owner: str) -> Callable[..., Tensor]:
        def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            calls.append(owner)
            seen[owner] = inputs[0].detach(), torch.zeros_like(output, requires_grad=True)
            return (
                output + seen[owner][1]
            )  # the derivative by these zeros is that by the output, also if it is overwritten

        return hook

    with ExitStack() as stack:
        for owner, layer in layers.items():
            stack.callback(layer.register_forward_hook(watch(owner)).remove)
        with torch.enable_grad():
            outputs = forward()
    b, C = outputs.shape
    sizes_seen = [zeros.numel() for _, zeros in seen.values()]
    once = sorted(calls) == sorted(layers) and all(len(x) == len(z) == b for x, z in seen.values())
    if not once or sum(sizes_seen) > 2 * b * sum(sizes):  # more memory than the rows themselves are granted
        return None
    zeros = [zeros for _, zeros in seen.values()]
    eye = torch.eye(C, dtype=outputs.dtype, device=outputs.device)
    pulled = [
        torch.autograd.grad(outputs, zeros, eye[c].expand(b, C), retain_graph=c + 1 < C, materialize_grads=True)
        for c in range(C)  # each stops at the outputs of layers; all at once by vmap takes longer
    ]
    cotangents = dict(zip(seen, (torch.stack(each, 1) for each in zip(*pulled, strict=True)), strict=True))
    outputs = outputs.detach()
    del pulled, zeros
    blocks = [_block(layers[owner], place, seen[owner][0], cotangents[owner]) for owner, place in places.values()]
    return LayerRows(outputs, blocks, sizes)


def _block(layer: nn.Module, place: str, inputs: Tensor, cotangents: Tensor) -> Block:  # (b, …), (b, C, …)
    b, C = cotangents.shape[:2]
    if isinstance(layer, nn.Linear):
        if cotangents.ndim == 3:
            return Outer(cotangents, inputs) if place == "weight" else WrittenOut(cotangents)
        g = cotangents.flatten(2, -2).transpose(2, 3)  # (b, C, O, T)
        if place == "bias":
            return WrittenOut(g.sum(3))
        rows = g.flatten(1, 2) @ inputs.flatten(1, -2)  # over the T places where the layer is applied
        return WrittenOut(rows.reshape(b, C, -1))
    if isinstance(layer, nn.Conv2d):
        g = cotangents.flatten(3)  # (b, C, O, T)
        if place == "bias":
            return WrittenOut(g.sum(3))
        settings = layer.kernel_size, layer.dilation, layer.padding, layer.stride
        patches = F.unfold(inputs, *settings)  # type: ignore[arg-type]  # (b, K, T)
        return WrittenOut((g.flatten(1, 2) @ patches.mT).reshape(b, C, -1))
    if isinstance(layer, nn.LayerNorm):
        g = cotangents.reshape(b, C, -1, layer.weight.numel())
        if place == "bias":
            return WrittenOut(g.sum(2))
        standard = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps).reshape(b, 1, -1, layer.weight.numel())
        return WrittenOut((g * standard).sum(2))
    assert isinstance(layer, BATCH_NORMS)
    g = cotangents.flatten(3) if cotangents.ndim > 3 else cotangents[..., None]  # (b, C, O, T)
    if place == "bias":
        return WrittenOut(g.sum(3))
    standard = F.batch_norm(inputs, layer.running_mean, layer.running_var, eps=layer.eps)
    standard = standard.reshape(b, 1, g.shape[2], -1)
    return WrittenOut((g * standard).sum(3))

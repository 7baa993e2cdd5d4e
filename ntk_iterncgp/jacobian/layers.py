"""Rows of the Jacobian layer by layer, for networks whose weights all sit in plain layers.

Vectorised autograd repeats for each output what all of them share, and on a CPU its per-datum convolutions are slow.
Here one forward pass retains the layer inputs, C backward passes leave behind the derivatives by the layer outputs, and
matrix products do the rest (`blocks.py`), one layer at a time: J as a whole is nowhere, since on a CPU
fresh memory for it costs half as much as computing it. Half of the time on a ResNet-20, with all products that a
prediction needs.

Layers of another kind, weights used twice, or activations larger than the weights: `layer_rows` says None, and
the rows come from `torch.func`. Weights used behind a layer's back, maybe for some data only, are found in the graph of
every batch (`_goes_round`). What else a model may do is found by `agrees_with`, at a few data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional as F

from ntk_iterncgp.jacobian.blocks import (
    Block,
    Contraction,
    Convolution,
    Lookup,
    Outer,
    Transposed,
    WeightColumns,
    WrittenOut,
    patches,
)
from ntk_iterncgp.jacobian.rows import Contrasts, Rows, contrasts_at, curvature_blocks
from ntk_iterncgp.runtime.threads import exclusively

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = (*BATCH_NORMS, nn.LayerNorm)


class LayerRows(Rows):
    """J, or HᵀJ, as one block for each parameter tensor, in the order of the weights."""

    def __init__(
        self, outputs: Tensor, num_rows: int, blocks: list[Block], sizes: list[int], num_shared: int = 0
    ) -> None:
        self.outputs, self.blocks, self.sizes = outputs, blocks, sizes
        self.num_shared = num_shared  # how many numbers went through the layers, whatever the number of rows
        self.shape = len(outputs), num_rows  # (b, r): of J r is C

    def written_out(self) -> Tensor:
        return self.jacobian

    def in_dtype(self, dtype: torch.dtype) -> LayerRows:
        if dtype == self.outputs.dtype:
            return self
        blocks = [block.in_dtype(dtype) for block in self.blocks]
        return LayerRows(self.outputs.to(dtype), self.shape[1], blocks, self.sizes, self.num_shared)

    @cached_property
    def jacobian(self) -> Tensor:  # (b, C, P)
        """The rows, written out."""
        return torch.cat([block.matrix for block in self.blocks], 2)

    def times(self, weights: Tensor | WeightColumns) -> Tensor:
        columns = WeightColumns.of(weights, self.outputs.dtype)
        total = self.outputs.new_zeros(*self.shape, columns.number)
        for block, part in zip(self.blocks, columns.layers(self.sizes), strict=True):
            total += block.times(part)
        return total.double()

    def covariance(self, variance: Tensor, *, joint: bool = False) -> Tensor:
        total = self.outputs.new_zeros(self._square(joint))
        for block, each in zip(self.blocks, self._variances(variance), strict=True):
            total += block.covariance(each, joint=joint)
        return total.double()

    def products(
        self, weights: Tensor | WeightColumns, variance: Tensor, *, joint: bool = False
    ) -> tuple[Tensor, Tensor]:
        if weights.dtype != self.outputs.dtype:
            return self.in_dtype(weights.dtype).products(weights, variance, joint=joint)
        columns = WeightColumns.of(weights, weights.dtype)
        cross = self.outputs.new_zeros(*self.shape, columns.number)
        covariance = self.outputs.new_zeros(self._square(joint))
        layers = zip(self.blocks, columns.layers(self.sizes), self._variances(variance), strict=True)
        for block, part, each in layers:
            both = block.products(part, each, joint=joint)
            cross += both[0]
            covariance += both[1]
        return cross.double(), covariance.double()

    def by_layer(self, weights: Tensor | WeightColumns, sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        one = torch.ones(1, dtype=torch.float64, device=self.outputs.device)
        if len(sizes) == 1:  # all weights as one layer
            yield self.products(weights, one)
        elif list(sizes) != self.sizes:
            yield from super().by_layer(weights, sizes)
        else:
            rows, columns = self.in_dtype(weights.dtype), WeightColumns.of(weights, weights.dtype)
            for block, part in zip(rows.blocks, columns.layers(self.sizes), strict=True):
                cross, covariance = block.products(part, one, joint=False)
                yield cross.double(), covariance.double()

    def _square(self, joint: bool) -> tuple[int, ...]:
        b, r = self.shape
        return (b * r, b * r) if joint else (b, r, r)

    def _variances(self, variance: Tensor) -> list[Tensor]:
        """By parameter tensor; one number for a tensor whose weights all have the same."""
        if variance.numel() == 1:
            return [variance.reshape(1)] * len(self.sizes)
        parts = variance.split(self.sizes)
        return [each[:1] if bool((each == each[0]).all()) else each for each in parts]

    def curvature_diagonal(self, curvature: Callable[[Tensor], Tensor]) -> Tensor:
        weight = curvature_blocks(curvature, self.outputs.shape, self.outputs)
        return torch.cat([block.curvature_diagonal(weight) for block in self.blocks]).double()

    def agrees_with(self, pull_back: Callable[[Tensor], Tensor]) -> bool:
        """Whether these are the rows of the J whose products Jᵀc, (b, C) -> (P,), are given, by a random one."""
        cotangent = torch.randn(self.shape, generator=torch.Generator().manual_seed(0)).to(self.outputs)
        expected = pull_back(cotangent)
        found = torch.cat([block.pull_back(cotangent) for block in self.blocks])
        if found.shape != expected.shape:  # one number as the bias of all outputs
            return False
        tolerance = torch.finfo(found.dtype).eps ** 0.5
        return bool((found - expected).norm() <= tolerance * expected.norm())

    @property
    def num_numbers(self) -> int:
        """What is held at once: inputs of the layers, derivatives, and what one layer sees at all of its places."""
        held = self.num_shared + sum(block.num_held for block in self.blocks)
        return held + max(block.num_needed for block in self.blocks)


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
    if type(layer) is nn.Embedding:
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    return type(layer) in (nn.Linear, nn.LayerNorm) or _is_transposed(layer)


def _is_transposed(layer: nn.Module | None) -> bool:
    """Whether it is the linear layer of GPT-2, whose weights are those of `nn.Linear` transposed."""
    return type(layer).__module__ == "transformers.pytorch_utils" and type(layer).__name__ == "Conv1D"


def aliases_of(model: nn.Module, chosen: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return all places where each parameter is used.

    Tied weights have several; a module used twice counts once, since exchanging its parameter twice would leave the
    exchanged one behind.
    """
    places: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, value in module.named_parameters(prefix, recurse=False):
            places.setdefault(id(value), []).append(name)
    return {name: places.get(id(value), [name]) for name, value in chosen.items()}


def padding_rows(model: nn.Module, chosen: Mapping[str, Tensor]) -> dict[str, int]:
    """The constant row of each embedding that has one."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    rows = {id(e.weight): e.padding_idx for e in embeddings if e.padding_idx is not None}
    return {name: rows[id(value)] for name, value in chosen.items() if id(value) in rows}


class LayerCall(NamedTuple):
    """A layer in the forward pass."""

    inputs: Tensor
    shape: torch.Size  # of what came out
    dtype: torch.dtype
    edge: GradientEdge  # where the derivative by that is to be had, also if it is overwritten later
    before: Node | None  # what made the inputs, if they have a derivative


def layer_rows(
    model: nn.Module,
    forward: Callable[[], Tensor],
    source: Tensor | None,
    places: Mapping[str, tuple[str, str]],
    leaves: Mapping[str, Tensor],
    num_rows: int,
    contrasts: Contrasts | None = None,
) -> LayerRows | None:
    """The rows at the inputs that `forward` puts through the model, or None where they cannot be had this way.

    `forward` is to give the model its weights as `leaves`, which require gradients, and inputs made of `source`, which
    requires one too; None where inputs have no derivative.
    """
    modules = dict(model.named_modules())
    layers = {owner: modules[owner] for owner, _ in places.values()}
    with exclusively(model):  # hooks watch it; the backward passes below are those of this thread's own graph
        outputs, calls = _watched(layers, forward, num_rows)
    seen, b = dict(calls), len(outputs)
    if len(calls) != len(layers) or len(seen) != len(layers):
        return None  # called twice, never, or as a constant
    if any(len(call.inputs) != b or call.shape[0] != b for call in seen.values()):
        return None
    if _goes_round(outputs, leaves.values(), seen.values()):
        return None
    sizes = [leaf.numel() for leaf in leaves.values()]
    activations = sum(call.shape.numel() for owner, call in seen.items() if not isinstance(layers[owner], NORMS))
    if activations > 2 * b * sum(sizes):  # more memory than the rows themselves are granted
        return None
    cotangents = contrasts_at(contrasts, outputs).unbind(-1)  # r of (C,), or (b, C)
    retained: dict[str, OutputGradients] = {}
    for owner, call in seen.items():
        kind = Sums if isinstance(layers[owner], NORMS) else Places
        retained[owner] = kind(layers[owner], call, len(cotangents))
    for c, cotangent in enumerate(cotangents):  # all at once by vmap takes longer
        is_last = c + 1 == len(cotangents)
        _differentiate(outputs, cotangent.expand_as(outputs), seen, source, retained, c, is_last=is_last)
    blocks = [retained[owner].block(place) for owner, place in places.values()]
    num_shared = sum(call.inputs.numel() + call.shape.numel() for call in seen.values())
    return LayerRows(outputs.detach(), len(cotangents), blocks, sizes, num_shared)


def _watched(
    layers: Mapping[str, nn.Module], forward: Callable[[], Tensor], num_rows: int
) -> tuple[Tensor, list[tuple[str, LayerCall]]]:
    """A forward pass: the outputs, and the calls of the layers in their order."""
    calls: list[tuple[str, LayerCall]] = []

    def watch(owner: str, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
        x = (*inputs, *named.values())[0]  # a model may call its layers by keyword
        if isinstance(layer, BATCH_NORMS) and not layer.training and len(layer._forward_hooks) == 1:  # this one
            output = _affine(layer, x)
        if isinstance(layer, nn.Embedding) and len(x) == 1 < num_rows:  # of positions, the same for all data
            x, output = x.expand(num_rows, *x.shape[1:]), output.expand(num_rows, *output.shape[1:])
        if output.requires_grad:  # else the model holds this layer for constant
            before = get_gradient_edge(x).node if x.requires_grad else None
            calls.append((owner, LayerCall(x.detach(), output.shape, output.dtype, get_gradient_edge(output), before)))
        return output

    with ExitStack() as stack:
        for owner, layer in layers.items():
            # before other hooks, so that what these make of the output is not taken for the layer
            hook = layer.register_forward_hook(partial(watch, owner), prepend=True, with_kwargs=True)
            stack.callback(hook.remove)
        with torch.enable_grad():
            return forward(), calls


def _goes_round(outputs: Tensor, leaves: Iterable[Tensor], calls: Iterable[LayerCall]) -> bool:
    """Whether a derivative of the outputs comes to a weight by another way than through its layer.

    What is in the graph counts, also if it is zero at these data: a gate that is shut here is open elsewhere.
    """
    weights = {get_gradient_edge(leaf).node for leaf in leaves}
    before = {call.edge.node: call.before for call in calls}
    ahead, visited = [outputs.grad_fn], set()
    while ahead:
        node = ahead.pop()
        if node is None or node in visited:
            continue
        if node in weights:
            return True
        visited.add(node)
        ahead += [before[node]] if node in before else [function for function, _ in node.next_functions]
    return False


def _differentiate(
    outputs: Tensor,
    cotangent: Tensor,
    calls: Mapping[str, LayerCall],
    source: Tensor | None,
    retained: Mapping[str, OutputGradients],
    c: int,
    *,
    is_last: bool,
) -> None:
    """One backward pass, for the c-th contrast: what each layer retains of the derivative by what came out of it.

    On its way to the `source`, so that it can be freed at once: on a CPU, memory that is asked for anew costs nearly as
    much as what is done in it. Without a source, all together in the end.
    """
    keep, missing = not is_last, set(calls)

    def take(owner: str, number: int, gradients: Sequence[Tensor | None]) -> None:
        gradient = gradients[number]
        if gradient is not None:
            retained[owner].take(c, gradient)
            missing.discard(owner)

    if source is None:
        edges = [call.edge for call in calls.values()]
        gradients = torch.autograd.grad(outputs, edges, cotangent, retain_graph=keep, allow_unused=True)
        for number, owner in enumerate(calls):
            take(owner, number, gradients)
    else:
        with ExitStack() as stack:
            for owner, call in calls.items():
                stack.callback(call.edge.node.register_prehook(partial(take, owner, call.edge.output_nr)).remove)
            torch.autograd.grad(outputs, source, cotangent, retain_graph=keep, allow_unused=True)
    for owner in missing:
        retained[owner].take(c, outputs.new_zeros(calls[owner].shape))


def _affine(layer: nn.Module, x: Tensor) -> Tensor:
    """Batch normalisation by known moments, as a product and a sum: its own derivative takes three times as long."""
    scale = layer.weight * (layer.running_var + layer.eps).rsqrt()  # type: ignore[operator]
    shift = layer.bias - layer.running_mean * scale  # type: ignore[operator]
    channels = (-1,) + (1,) * (x.ndim - 2)
    return x * scale.view(channels) + shift.view(channels)


class OutputGradients(ABC):
    """What is retained of the derivatives by what came out of a layer, one network output after the other."""

    @abstractmethod
    def take(self, c: int, gradient: Tensor) -> None:  # as the layer's output
        """The derivative of output c."""

    @abstractmethod
    def block(self, place: str) -> Block:
        """The rows of the layer's weight or bias."""


class Places(OutputGradients):
    """All of it, for a layer that is applied at T places."""

    def __init__(self, layer: nn.Module, call: LayerCall, num_outputs: int) -> None:
        self.layer, self.inputs, self.out = layer, call.inputs, call.shape[2:]
        channels_last = not isinstance(layer, nn.Conv2d)
        b, channels = call.shape[0], call.shape[-1 if channels_last else 1]
        places = call.shape[1:].numel() // channels
        self.cotangents = call.inputs.new_empty(b, num_outputs, channels, places, dtype=call.dtype)  # (b, C, O, T)
        as_output = self.cotangents.mT if channels_last else self.cotangents
        self.slots = as_output.view(b, num_outputs, *call.shape[1:]).unbind(1)

    def take(self, c: int, gradient: Tensor) -> None:
        self.slots[c].copy_(gradient)

    def block(self, place: str) -> Block:
        if place == "bias":
            return WrittenOut(self.cotangents.sum(3))
        if isinstance(self.layer, nn.Conv2d):
            if Convolution.pays(self.inputs, self.cotangents.shape[3]):
                return Convolution(self.cotangents, self.layer, self.inputs, self.out)
            return Contraction(self.cotangents, partial(patches, self.layer, self.inputs), self.layer.weight[0].numel())
        if isinstance(self.layer, nn.Embedding):
            rows, padding = (
                self.inputs.flatten(1) if self.inputs.ndim > 1 else self.inputs[:, None],
                self.layer.padding_idx,
            )
            read = self.cotangents.mT if padding is None else self.cotangents.mT * (rows != padding)[:, None, :, None]
            return Lookup(read, rows, self.layer.num_embeddings)
        if self.inputs.ndim == 2:
            linear: Block = Outer(self.cotangents, self.inputs)
        else:
            linear = Contraction(self.cotangents, lambda: self.inputs.flatten(1, -2).mT, self.inputs.shape[-1])
        shape = self.inputs.shape[-1], self.cotangents.shape[2]
        return Transposed(linear, shape) if _is_transposed(self.layer) else linear


class Sums(OutputGradients):
    """Sums over places, for a normalisation: Σ_t g s for its weight, with s standardised, and Σ_t g for its bias."""

    def __init__(self, layer: nn.Module, call: LayerCall, num_outputs: int) -> None:
        b = call.shape[0]
        if isinstance(layer, nn.LayerNorm):
            standard = F.layer_norm(call.inputs, layer.normalized_shape, eps=layer.eps)
            self.standard, self.over = standard.reshape(b, -1, layer.weight.numel()), 1
        else:
            mean, variance = (getattr(layer, name).to(call.inputs) for name in ("running_mean", "running_var"))
            standard = F.batch_norm(call.inputs, mean, variance, eps=layer.eps)  # type: ignore[arg-type]
            self.standard, self.over = standard.reshape(b, call.shape[1], -1), 2
        self.sums = standard.new_empty(2, b, num_outputs, self.standard.shape[3 - self.over])  # of g s, of g
        self.slots = self.sums.unbind(2)

    def take(self, c: int, gradient: Tensor) -> None:
        gradient = gradient.reshape(self.standard.shape)
        torch.sum(gradient * self.standard, self.over, out=self.slots[c][0])
        torch.sum(gradient, self.over, out=self.slots[c][1])

    def block(self, place: str) -> Block:
        return WrittenOut(self.sums[0 if place == "weight" else 1])

"""The model and its data on the first batch: what must be the same on every sweep is checked before the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ntk_iterncgp.data.fixed_order import FixedOrderData
from ntk_iterncgp.data.inputs import Inputs, equal, slice_rows
from ntk_iterncgp.data.order import warn_once
from ntk_iterncgp.runtime import parallel


@dataclass(frozen=True, eq=False)
class FirstBatch:
    """The first inputs, the network's outputs there (b, C), and the number of all data, if known.

    By these a later call recognises the data of the fit.
    """

    inputs: Inputs
    outputs: Tensor
    num_items: int | None

    def check_same(self, other: FirstBatch) -> None:
        """Actions are sums over numbered data: other data, or another order, would make nonsense of them."""
        rows = min(len(self.outputs), len(other.outputs))
        same = torch.allclose(self.outputs[:rows], other.outputs[:rows], rtol=1e-3, atol=1e-4)
        if not same or (None not in (self.num_items, other.num_items) and self.num_items != other.num_items):
            found = f"{other.num_items} data instead of {self.num_items}" if same else "other data, or another order"
            raise ValueError(
                f"refine must be given the data of the fit in the same order; got {found}. Try the loader of the fit; "
                "where it draws its data at random, fit again with shuffle=False."
            )


FEW = 16  # data of the first batch that show that a known model is still what it was


class Probe:
    """Checks data and model in eval mode, then what the model returns for the first batch."""

    def __init__(self, model: nn.Module, data: FixedOrderData, *, is_known: bool = False) -> None:
        self.model, self.data = model, data
        self.inputs = _first_inputs(data)
        if is_known and (rows := data.num_rows(self.inputs)) > FEW:
            self.inputs = slice_rows(self.inputs, slice(0, FEW), rows)
        training = [name or type(module).__name__ for name, module in model.named_modules() if module.training]
        if training:
            raise ValueError(
                f"The model must be in eval mode after model.eval(); got modules that stay in train mode: "
                f"{', '.join(training[:5])}. Try a train() method that obeys."
            )
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def check(self, forward: Callable[[Inputs], Tensor], outputs: Tensor | None = None) -> FirstBatch:
        """Pass the first batch twice, and its first row alone.

        Args:
            forward: the function whose outputs are checked.
            outputs: what it has returned for the first batch, if it was asked before.

        Returns:
            The first batch, with its outputs.
        """
        outputs = forward(self.inputs) if outputs is None else outputs
        repeated = forward(self.inputs)
        try:
            alone = forward(slice_rows(self.inputs, slice(0, 1), self.data.num_rows(self.inputs)))
        except ValueError:  # batch statistics of a single datum
            alone = torch.full_like(outputs[:1], torch.inf)
        self._check_buffers()
        if not bool(torch.isfinite(outputs).all()):
            raise ValueError(
                "The model must return finite outputs; got NaN or infinity on the first batch. Try smaller inputs, and "
                "look at its weights."
            )
        if not torch.equal(outputs, repeated):
            raise ValueError(
                "Two forward passes on the same batch must agree; got outputs that differ by up to "
                f"{float((outputs - repeated).abs().max()):.2g}. Try it without dropout and other noise in eval mode."
            )
        error = float((outputs[:1] - alone).abs().max())
        if error > 1e-3 * float(outputs.abs().max()) + 1e-6:
            raise ValueError(
                f"Each output must depend on its own input alone; got a first one that changed by {error:.2g} when the "
                "rest of its batch was left out. Try BatchNorm with running statistics."
            )
        return FirstBatch(self.inputs, outputs, self.data.num_items)

    def _check_buffers(self) -> None:
        changed = [name for name, buffer in self.model.named_buffers() if not torch.equal(buffer, self._buffers[name])]
        if changed:
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
            raise ValueError(
                f"A forward pass in eval mode must leave the model as it is; got changed buffers: "
                f"{', '.join(changed[:5])}. Try BatchNorm in eval mode."
            )


def _first_inputs(data: FixedOrderData) -> Inputs:
    """Those of the first batch, if it can be had again. Reports random augmentation, which is then frozen."""
    first = next(data.batches(), None)
    if first is None:
        raise ValueError(
            "The training data must give their batches on every sweep; got none. Try a dataset that can be walked more "
            "than once."
        )
    found = data.findings
    again = next(data.batches(), None) if found.batch is None else data.split(found.batch)
    if not found.repeats or again is None or not equal(first, again):
        raise ValueError(
            "The training data must be the same on every sweep; got a first batch that came out different the second "
            "time. Random augmentation is frozen where it draws from the global generators of torch (on the CPU), "
            "numpy and Python's random; here it draws from a generator of its own, or something else changes. Try "
            "the global generators, data without augmentation, or, for a stream, a fixed order."
        )
    if found.mixes:
        raise ValueError(
            "Each row of a batch must depend on its own datum alone; got other rows for the same data when the rest of "
            "their batch was exchanged. Try a collate_fn that does not mix data, as mixup, cutmix and statistics of a "
            "batch do."
        )
    if found.is_random and parallel.rank() == 0:
        warn_once(
            data.dataset,
            "The training data are drawn at random (augmentation, or the order of a stream). The draw is frozen: every "
            "sweep, also that of `refine`, sees the same one copy of each datum, whatever the workers. Try data "
            "without augmentation for the posterior of the data as they are; to silence this, filter the category "
            "ntk_iterncgp.data.fixed_order.TrainingDataWarning.",
        )
    return first[0]

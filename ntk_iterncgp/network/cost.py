"""What a fit will take, before any of it is done: seconds from timing one batch, epochs, and memory by counting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ntk_iterncgp import parallel
from ntk_iterncgp.data import Inputs
from ntk_iterncgp.memory import available_bytes, mebibytes, require_memory
from ntk_iterncgp.network.directions import DIRECTIONS_EACH, worth_looking
from ntk_iterncgp.network.grouping import MAX_FEATURES, groups_for
from ntk_iterncgp.network.linearised import PRODUCT_EPOCHS, Budget, LinearisedNetwork, NetworkFit, NetworkSettings
from ntk_iterncgp.network.passes import epochs_of
from ntk_iterncgp.priors.jacobian import JVP_COLUMNS, Jacobian, NetworkJacobian

TIMED_COLUMNS = 16  # of the actions, when a prediction is timed: all of them may not fit in memory
KEEP_BYTES = 2**30
WORKSPACE_BYTES = 64 * 2**20  # what PyTorch takes beside the arrays counted here


@dataclass(frozen=True)
class Cost:
    """Seconds are those of this machine as it is now, epochs those of data that are all as decided as the first batch;
    a budget (`max_epochs`) is not taken into account."""

    num_data: int
    num_params: int
    num_actions: int
    epochs: float
    fit_seconds: float | None
    predict_seconds: float | None  # for 1000 inputs
    fit_bytes: int
    predict_bytes: int
    available_bytes: int | None
    fixed_bytes: int = 0  # of fit_bytes, what does not depend on the number of actions
    action_bytes: int = 0  # what one more action takes

    def __str__(self) -> str:
        def seconds(value: float | None) -> str:
            return "–" if value is None else f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"

        return (
            f"{self.num_data:,} data, {self.num_params:,} weights, {self.num_actions:,} actions\n"
            f"{'':12}{'time':>12}{'memory':>14}\n"
            f"{'fit':12}{seconds(self.fit_seconds):>12}{mebibytes(self.fit_bytes):>14}   {self.epochs:.1f} epochs\n"
            f"{'predict':12}{seconds(self.predict_seconds):>12}{mebibytes(self.predict_bytes):>14}   per 1000 inputs\n"
            f"{'available':24}{mebibytes(self.available_bytes):>14}"
        )


def estimate_cost(network: LinearisedNetwork, settings: NetworkSettings, *, timed: bool) -> Cost:
    """Counted from sizes; the first batch is timed if asked, and looked at in any case."""
    jacobian, data = network.jacobian, network.data
    x, _ = next(data.batches())
    with torch.no_grad():
        outputs = jacobian.forward(x)
    rows, num_outputs = outputs.shape
    num_data = data.num_data(rows)
    in_groups = settings.policy is None
    per_number = torch.empty(0, dtype=jacobian.dtype).element_size()
    actions = groups = settings.num_actions
    activations = activation_bytes(jacobian, x)
    if in_groups:
        bytes_each = _image_bytes(jacobian, settings.cotangents)
        groups = groups_for(actions, num_data, bytes_each) * settings.cotangents
        actions = min(actions, num_data) * settings.cotangents
        looks = _looks(network, settings, outputs, num_data)
        epochs = 1 / 3 + epochs_of(looks, settings.cotangents, rows)
        per_datum = 8 * num_outputs * (3 + 3 * settings.cotangents) + 2 * 4 * (MAX_FEATURES + num_outputs)
        per_datum += 3 * 8 * (DIRECTIONS_EACH + 1)  # curvature along each direction, in two orders
        of_actions = 0
    else:
        epochs = 1 / 3 + PRODUCT_EPOCHS * actions
        per_datum = 8 * num_outputs * 8
        of_actions = 2 * per_number * num_outputs * num_data * actions  # S and T
    if timed:
        jacobian.prepare(x, rows)
    at_once = max(1, min(rows, settings.chunk_bytes // jacobian.bytes_per_row(num_outputs)))
    for_rows = at_once * (jacobian.bytes_per_row(num_outputs) + 2 * num_outputs * activations // rows)
    images = _image_bytes(jacobian, actions)
    # A backward pass holds gradients beside activations; rows of J are taken at another time than sweeps are made.
    sweep = 2 * activations if in_groups else (1 + JVP_COLUMNS) * activations  # as many tangents beside each other
    fixed_bytes = max(sweep, for_rows) + WORKSPACE_BYTES + num_data * per_datum + 6 * 8 * jacobian.num_params
    of_groups = _image_bytes(jacobian, groups) + 5 * 8 * groups**2 if groups > actions else 0
    fit_bytes = fixed_bytes + images + of_actions + 5 * 8 * actions**2 + of_groups
    fit_seconds = predict_seconds = None
    if timed:
        cotangents = torch.ones(rows, num_outputs, 1, dtype=jacobian.dtype, device=jacobian.device)
        epoch = in_groups_epoch = _seconds(lambda: jacobian.vjp(x, cotangents)) * num_data / rows
        if in_groups and data.can_jump(num_data):  # group by group, in batches that may be much smaller
            size = max(1, min(rows, looks * num_data * settings.cotangents // (rows * groups)))
            some = next(data.chunk(x, size))
            in_groups_epoch = max(epoch, _seconds(lambda: jacobian.vjp(some, cotangents[:size])) * num_data / size)
        fit_seconds = (epoch / 3 + in_groups_epoch * (epochs - 1 / 3)) / parallel.num_processes()
        part = next(data.chunk(x, at_once))
        columns = min(actions, TIMED_COLUMNS)
        drawn = torch.Generator(jacobian.device)  # of its own: the user's random numbers are not ours
        shape = (jacobian.num_params, columns)
        numbers = torch.randn(shape, generator=drawn, dtype=jacobian.dtype, device=jacobian.device)
        num_rows = data.num_rows(part)
        with torch.no_grad():
            kept = jacobian.rows(part, num_rows)
            seconds = _seconds(lambda: jacobian.rows(part, num_rows))
            unit = torch.ones((), device=jacobian.device).expand(jacobian.num_params)
            alone = _seconds(lambda: kept.products(numbers[:, :0], unit))
            both = _seconds(lambda: kept.products(numbers, unit))
            seconds += alone + max(0.0, both - alone) * actions / columns  # rows may be written out for all columns
        predict_seconds = 1000 * seconds / num_rows
    return Cost(
        num_data,
        jacobian.num_params,
        actions,
        epochs,
        fit_seconds,
        predict_seconds,
        fit_bytes,
        settings.chunk_bytes + WORKSPACE_BYTES + 2 * images,
        available_bytes(jacobian.device),
        fixed_bytes + of_groups,
        (images + of_actions + 5 * 8 * actions**2) // actions,
    )


def check_memory(cost: Cost) -> int:
    """Refuse what cannot fit, before it starts; else how much it takes."""
    advice = "Use fewer actions (num_actions), less for rows of the Jacobian (chunk_bytes), or fewer weights."
    require_memory(cost.fit_bytes, cost.available_bytes, f"{advice}\n{cost}")
    return cost.fit_bytes


def room_for_data(needed: int) -> int:
    """Half of what a fit leaves of the machine's memory, within reason, may hold data that it would read again."""
    available = available_bytes(torch.device("cpu"))
    return 0 if available is None else max(0, min(KEEP_BYTES, (available - needed) // 2))


def check_memory_to_refine(
    fitted: NetworkFit, network: LinearisedNetwork, settings: NetworkSettings, budget: Budget
) -> int:
    """The same for what is added to a fit: new actions, and copies in which they lie beside those that are there."""
    cost = estimate_cost(network, settings, timed=False)
    per_action = cost.action_bytes
    most = fitted.num_data * fitted.num_outputs
    epochs = min(1.0 if budget.epochs is None else budget.epochs, float(most))
    if settings.policy is None:
        more = min(most, cost.num_actions * math.ceil(epochs / epochs_of(1, settings.cotangents, 1)))
        needed = per_action * (fitted.posterior.rank + 2 * more)
    else:
        more = min(most, max(1, round(epochs / PRODUCT_EPOCHS)))
        needed = int(2.5 * per_action * (fitted.posterior.rank + more))  # columns grow by half, into another place
    advice = "Ask for fewer epochs at once, fit with max_rank, or use less for rows of the Jacobian (chunk_bytes)."
    require_memory(cost.fixed_bytes + needed, cost.available_bytes, advice)
    return cost.fixed_bytes + needed


def _looks(network: LinearisedNetwork, settings: NetworkSettings, outputs: Tensor, num_data: int) -> int:
    """How often data of the first batch are looked at, if it is a sample of all."""
    if settings.num_actions >= num_data or not bool(torch.isfinite(outputs).all()):
        return len(outputs)
    likelihood = network.likelihood(outputs, 1.0).for_prior_variance(1e20)
    share = settings.num_actions * len(outputs) // num_data
    return len(worth_looking(likelihood, outputs.double(), settings.cotangents, share, torch.Generator())[0])


def _image_bytes(jacobian: NetworkJacobian, actions: int) -> int:
    return actions * jacobian.num_params * torch.empty(0, dtype=jacobian.dtype).element_size()


def activation_bytes(jacobian: NetworkJacobian, x: Inputs) -> int:
    """What a forward pass over a batch keeps for its backward pass, beside inputs and weights."""
    if not isinstance(jacobian, Jacobian):
        return 0
    leaves = {name: value.detach().requires_grad_() for name, value in jacobian.params.items()}
    inputs = x.values() if hasattr(x, "values") and not isinstance(x, Tensor) else [x]
    known = {t.untyped_storage().data_ptr() for t in (*leaves.values(), *inputs) if isinstance(t, Tensor)}
    kept: dict[int, Tensor] = {}  # alive until all are counted: no address is used twice

    def pack(tensor: Tensor) -> None:
        """The graph gets nothing: a layer that saves its own output would hold itself alive for ever."""
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            kept[address] = tensor.detach()

    def unpack(nothing: Any) -> Any:
        raise AssertionError("No backward pass is expected where only memory is counted.")

    with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
        outputs = jacobian.forward(x, leaves)
    del outputs
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _seconds(work: Callable[[], object]) -> float:
    """The smaller of two runs: the first may load what later ones find loaded."""
    least = math.inf
    for _ in range(2):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():  # a GPU returns before it has done the work
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - started)
    return least

"""What a fit will take, before any of it is done: seconds from timing one batch, epochs, and memory by counting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ntk_iterncgp.data import Inputs
from ntk_iterncgp.memory import available_bytes, mebibytes, require_memory
from ntk_iterncgp.network.directions import DIRECTIONS_EACH
from ntk_iterncgp.network.grouping import MAX_FEATURES
from ntk_iterncgp.network.linearised import PRODUCT_EPOCHS, Budget, LinearisedNetwork, NetworkFit, NetworkSettings
from ntk_iterncgp.network.passes import epochs_of
from ntk_iterncgp.network.plan import Plan, image_bytes, number_bytes
from ntk_iterncgp.network.timing import fit_seconds, prediction_seconds, row_seconds
from ntk_iterncgp.priors.jacobian import JVP_COLUMNS, Jacobian, NetworkJacobian
from ntk_iterncgp.weight_posterior import SLICE_BYTES

KEEP_BYTES = 2**30
WORKSPACE_BYTES = 64 * 2**20 + 8 * SLICE_BYTES  # what PyTorch takes beside the arrays counted here


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
    jacobian, plan = network.jacobian, Plan.of(network, settings, prepared=timed)
    fixed, of_actions = _fixed_bytes(plan, jacobian), _action_bytes(plan, jacobian)
    rows = row_seconds(plan, jacobian) if timed else None
    return Cost(
        plan.num_data,
        jacobian.num_params,
        plan.actions,
        plan.epochs,
        None if rows is None else fit_seconds(plan, network, rows),
        None if rows is None else 1000 * prediction_seconds(plan, rows),
        fixed + of_actions,
        settings.chunk_bytes + WORKSPACE_BYTES + 2 * image_bytes(jacobian, plan.actions),
        available_bytes(jacobian.device),
        fixed,
        of_actions // plan.actions,
    )


def _fixed_bytes(plan: Plan, jacobian: NetworkJacobian) -> int:
    """What a fit takes whatever the number of actions."""
    activations, C, q = activation_bytes(jacobian, plan.x), plan.num_outputs, plan.cotangents
    outputs, at_once = C, plan.at_once
    if plan.checked_outputs < C:  # rows of all outputs are computed only where they are few numbers
        outputs = plan.checked_outputs
        at_once = max(1, min(plan.checked_data, plan.chunk_bytes // jacobian.bytes_per_row(outputs)))
    for_rows = at_once * (jacobian.bytes_per_row(outputs) + 2 * outputs * activations // plan.rows)
    of_groups = 0
    if plan.in_groups:
        sweep = 2 * activations  # gradients beside them
        per_datum = 8 * C * (3 + 3 * q) + 2 * 4 * (MAX_FEATURES + C)
        per_datum += 3 * 8 * (DIRECTIONS_EACH + 1)  # curvature along each direction, in two orders
        if plan.groups > plan.actions:
            of_groups = image_bytes(jacobian, plan.groups) + 5 * 8 * plan.groups**2
    else:
        sweep = (1 + JVP_COLUMNS) * activations  # as many tangents beside each other
        per_datum = 8 * C * 8
    # Rows of J are taken at another time than sweeps are made.
    return max(sweep, for_rows) + WORKSPACE_BYTES + plan.num_data * per_datum + 6 * 8 * jacobian.num_params + of_groups


def _action_bytes(plan: Plan, jacobian: NetworkJacobian) -> int:
    """What all actions take: their images, small matrices, and S and T where they are vectors over the data."""
    in_outputs = 0 if plan.in_groups else 2 * plan.num_outputs * plan.num_data * plan.actions * number_bytes(jacobian)
    return image_bytes(jacobian, plan.actions) + 5 * 8 * plan.actions**2 + in_outputs


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
        more = min(most, cost.num_actions * math.ceil(epochs / epochs_of(1, settings.cotangents or 1, 1)))
        needed = per_action * (fitted.posterior.rank + 2 * more)
    else:
        more = min(most, max(1, round(epochs / PRODUCT_EPOCHS)))
        needed = int(2.5 * per_action * (fitted.posterior.rank + more))  # columns grow by half, into another place
    advice = "Ask for fewer epochs at once, fit with max_rank, or use less for rows of the Jacobian (chunk_bytes)."
    require_memory(cost.fixed_bytes + needed, cost.available_bytes, advice)
    return cost.fixed_bytes + needed


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

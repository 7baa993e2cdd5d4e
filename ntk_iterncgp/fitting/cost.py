"""What a fit will take, counted before it starts: epochs, flops and bytes; and whether an exact one takes less.

`Plan` says what an iterative fit is going to do, from sizes and the first batch.

Exact: r = rank(W_n) rows of J at each datum, the QR decomposition of n' = N r whitened rows, and predictions with
min(P, n') actions. Iterative: a pass over the data in groups, the algebra of the groups, and predictions with
`num_actions`. Predictions are counted at as many inputs as there are training data, with all rows. A pass in groups
makes at least one backward pass for each of them, and for a small network that is the time of a call, not of its
arithmetic: `CALL_FLOPS`. Nobody waits for what takes fewer than `FREE_FLOPS`: then the exact posterior is preferred,
whatever the other costs.

Seconds are those of `timing.py`, which no fit needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ntk_iterncgp.clusters.clusters import epochs_of
from ntk_iterncgp.clusters.grouping import (
    DIRECTIONS_EACH,
    MAX_FEATURES,
    cotangents_each,
    first_directions,
    groups_for,
    has_choice,
)
from ntk_iterncgp.data.fixed_order import Inputs, slice_rows
from ntk_iterncgp.fitting.drive import Budget
from ntk_iterncgp.fitting.network import (
    AUTO,
    CLUSTERS,
    EXACT,
    FOLD_FACTOR,
    PRODUCT_EPOCHS,
    LinearisedNetwork,
    NetworkFit,
    NetworkSettings,
)
from ntk_iterncgp.fitting.network_check import MAX_CHECKED_OUTPUTS
from ntk_iterncgp.fitting.report import MIN_DATA, ROWS
from ntk_iterncgp.jacobian.autograd import JVP_COLUMNS, Jacobian
from ntk_iterncgp.jacobian.last_layer import LastLayerJacobian
from ntk_iterncgp.jacobian.rows import (
    SMALL_NETWORK,
    NetworkJacobian,
    TracePlan,
    affordable_data,
    plan_trace,
    row_epochs,
)
from ntk_iterncgp.likelihoods.base import ANY_VARIANCE, Likelihood
from ntk_iterncgp.likelihoods.leading import NUM_LEADING, SKETCH
from ntk_iterncgp.linalg.factor import SLICE_BYTES
from ntk_iterncgp.posterior.contrasts import reference_size
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.runtime.memory import available_bytes, mebibytes, require_memory


@dataclass(frozen=True, eq=False)
class Plan:
    """Numbers of data, actions, groups, and of what is visited."""

    x: Inputs  # of the first batch
    rows: int  # in it
    num_outputs: int
    num_data: int
    in_groups: bool
    cotangents: int
    actions: int
    groups: int  # as many as actions, or more of which combinations are retained
    items: int  # data and directions that the pass in groups goes through
    at_once: int  # inputs whose rows of J are held together
    trace: TracePlan  # for the meter
    checked_data: int  # at which the result is checked
    checked_outputs: int  # of them, or combinations of these
    chunk_bytes: int

    @classmethod
    def of(cls, network: LinearisedNetwork, settings: NetworkSettings, *, prepared: bool) -> Plan:
        """From sizes and the first batch; `prepared` also finds out what rows of J take."""
        jacobian, data = network.jacobian, network.data
        x, outputs = network.first_batch.inputs, network.first_batch.outputs
        rows, num_outputs = outputs.shape
        num_data, in_groups = data.num_data(rows), settings.in_groups
        actions = groups = settings.num_actions
        items, cotangents = num_data, 1
        if in_groups:
            cotangents = cotangents_each(network.likelihood, settings.cotangents)
            actions *= settings.cotangents or 1
            items = _visits(network, settings, outputs, num_data, cotangents) * num_data // rows
            groups = groups_for(actions, items, image_bytes(jacobian, 1), cotangents) * cotangents
            actions = min(actions, items * cotangents)
        if prepared:
            jacobian.prepare(x, rows)
        at_once = max(1, min(rows, settings.chunk_bytes // jacobian.bytes_per_row(num_outputs)))
        num_calls = max(len(data), min(settings.num_actions, num_data)) if in_groups else 2 * actions * len(data)
        checked_outputs = min(num_outputs, MAX_CHECKED_OUTPUTS) if in_groups else num_outputs
        checked_data = affordable_data(jacobian, num_data, checked_outputs, max(MIN_DATA, -(-ROWS // num_outputs)))
        return cls(
            x=x,
            rows=rows,
            num_outputs=num_outputs,
            num_data=num_data,
            in_groups=in_groups,
            cotangents=cotangents,
            actions=actions,
            groups=groups,
            items=items,
            at_once=at_once,
            trace=plan_trace(jacobian, num_data, num_outputs, num_calls),
            checked_data=min(num_data, checked_data),
            checked_outputs=checked_outputs,
            chunk_bytes=settings.chunk_bytes,
        )

    @property
    def epochs(self) -> float:
        """A forward pass, and then one pass in groups, or products."""
        if self.in_groups:
            return 1 / 3 + epochs_of(self.items, self.cotangents, self.num_data)
        return 1 / 3 + PRODUCT_EPOCHS * self.actions


def _visits(
    network: LinearisedNetwork, settings: NetworkSettings, outputs: Tensor, num_data: int, cotangents: int
) -> int:
    """How often data of the first batch are visited, if it is a sample of all."""
    likelihood = network.likelihood.for_prior_variance(ANY_VARIANCE)
    has_a_choice = has_choice(likelihood, cotangents, settings.num_actions, num_data)
    if not has_a_choice or not bool(torch.isfinite(outputs).all()):
        return len(outputs)
    number = settings.num_actions * len(outputs) // num_data
    return len(first_directions(likelihood, outputs.double(), cotangents, number, torch.Generator())[0])


def image_bytes(jacobian: NetworkJacobian, actions: int) -> int:
    """Of the images of so many actions."""
    return actions * jacobian.num_params * jacobian.dtype.itemsize


def reference_inputs(network: LinearisedNetwork) -> int:
    """At how many of the first inputs the shape of the covariance of a classifier's outputs is learnt; 0: at none."""
    jacobian, (num_rows, C) = network.jacobian, network.first_batch.outputs.shape
    if not network.classification or jacobian.num_tokens > 1:
        return 0
    is_small = jacobian.num_params <= SMALL_NETWORK or isinstance(jacobian, LastLayerJacobian)
    return min(num_rows, reference_size(network.data.num_data(num_rows), C, is_small=is_small))


# --- exact, or not ----------------------------------------------------------------------------------------------------

CALL_FLOPS = 1e7  # a backward pass over a few data, in flops of a factorization: .4 ms at 25 Gflop/s
FREE_FLOPS = 1e11  # some seconds of one core
MEMORY_FRACTION = 0.25  # of what is available, that the exact posterior takes without being asked


@dataclass(frozen=True)
class Sizes:
    """What the exact posterior costs depends on."""

    num_data: int
    num_outputs: int
    num_params: int
    num_rows: int  # n' = N rank(W_n)

    @classmethod
    def of(cls, network: LinearisedNetwork) -> Sizes:
        """Of a fit of this network."""
        rows, outputs = network.first_batch.outputs.shape
        num_data = network.data.num_data(rows)
        rank = network.likelihood.curvature_rank
        return cls(num_data, outputs, network.jacobian.num_params, num_data * rank)

    @property
    def rank(self) -> int:
        """Of the posterior: how many actions there are."""
        return min(self.num_params, self.num_rows)

    @property
    def factor_flops(self) -> float:
        """Of the QR decompositions; each folds (`FOLD_FACTOR` − 1) P new rows into P old ones."""
        if self.num_rows <= self.num_params:
            return 0.0
        each = (2 * FOLD_FACTOR - 2 / 3) / (FOLD_FACTOR - 1)
        return each * self.num_rows * self.num_params**2

    @property
    def factor_bytes(self) -> int:
        """Of the rows before and after they are folded, the images, and the small matrices of a posterior."""
        rows = min(self.num_rows, (2 * FOLD_FACTOR + 2) * self.num_params)
        return 8 * (rows * self.num_params + self.num_params * self.rank + 6 * self.rank**2)

    def predict_flops(self, num_actions: int) -> float:
        """Of the products of J with all actions, at as many inputs as there are data."""
        return 2.0 * self.num_data * self.num_outputs * self.num_params * num_actions


def resolved(network: LinearisedNetwork, settings: NetworkSettings) -> NetworkSettings:
    """The settings with policy "auto" resolved: "exact" or "clusters"; "exact" is refused where it does not fit.

    "auto" is exact where that costs less than the budget, and where no smaller budget was asked for: num_actions,
    max_rank, cotangents and max_epochs are all bounds on what a fit may hold or spend. All processes agree.
    """
    if settings.policy not in (AUTO, EXACT):
        return settings
    sizes, available = Sizes.of(network), available_bytes(network.jacobian.device)
    if settings.policy == EXACT:
        _require_float64(network.jacobian)
        advice = (
            f"The exact posterior has min({sizes.num_params:,} weights, {sizes.num_rows:,} rows) = {sizes.rank:,} "
            "actions. Try policy='auto', which fits groups of data where these are too many."
        )
        require_memory(sizes.factor_bytes, available, advice)
        return settings
    rank, max_rank = sizes.rank, settings.options.max_rank
    has_fewer = (settings.is_bounded and settings.num_actions < rank) or (max_rank is not None and max_rank < rank)
    is_bounded = has_fewer or settings.max_epochs is not None or settings.cotangents is not None
    may = network.jacobian.dtype == torch.float64 and not is_bounded
    fits = available is None or sizes.factor_bytes <= MEMORY_FRACTION * available
    is_exact = not parallel.any_of(not (may and fits and _is_cheaper(network, settings, sizes)))
    return replace(settings, policy=EXACT if is_exact else CLUSTERS)


def _require_float64(jacobian: NetworkJacobian) -> None:
    if jacobian.dtype != torch.float64:
        raise ValueError(
            f"`dtype` must be torch.float64 for policy='exact', and the model must be able to compute in it; got "
            f"{jacobian.dtype}. Try dtype=None, or policy='clusters'."
        )


def _is_cheaper(network: LinearisedNetwork, settings: NetworkSettings, sizes: Sizes) -> bool:
    factor, predict = sizes.factor_flops, sizes.predict_flops(sizes.rank)
    plan = Plan.of(network, replace(settings, policy=CLUSTERS), prepared=False)
    algebra = 2.0 * sizes.num_params * (plan.groups**2 + plan.groups * plan.actions)
    calls = CALL_FLOPS * (plan.groups / plan.cotangents + plan.num_data / plan.rows)
    iterative = algebra + calls + sizes.predict_flops(plan.actions)
    forward = forward_flops(network) * sizes.num_data
    exact = factor + predict + (1 + 2 * sizes.num_rows / sizes.num_data) * forward
    return exact <= max(FREE_FLOPS, iterative + 3 * plan.epochs * forward)


def forward_flops(network: LinearisedNetwork) -> float:
    """Of the network at one datum, counted; at least a multiplication and an addition for each weight."""
    first = network.first_batch
    one = slice_rows(first.inputs, slice(0, 1), len(first.outputs))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network.jacobian.forward(one)
    return max(float(counter.get_total_flops()), 2.0 * network.jacobian.num_params)


# --- bytes ------------------------------------------------------------------------------------------------------------

KEEP_BYTES = 2**30
WORKSPACE_BYTES = 64 * 2**20 + 8 * SLICE_BYTES  # what PyTorch takes beside the arrays counted here


@dataclass(frozen=True)
class Cost:
    """What a fit is expected to cost.

    Seconds are those of this machine as it is now, epochs those of data that are all as saturated as the first batch; a
    budget (`max_epochs`) is not taken into account.
    """

    num_data: int
    num_params: int
    num_actions: int
    epochs: float
    fit_bytes: int
    predict_bytes: int
    available_bytes: int | None
    fixed_bytes: int = 0  # of fit_bytes, what does not depend on the number of actions
    action_bytes: int = 0  # what one more action takes
    fit_seconds: float | None = None  # None: not timed, and so for predictions
    predict_seconds: float | None = None  # for 1000 inputs
    predict_rows: float | None = None  # of J at each input, by default: all outputs, or as many contrasts as it needs

    def __str__(self) -> str:
        def seconds(value: float | None) -> str:
            return "–" if value is None else f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"

        each = "per 1000 inputs"
        if self.predict_rows is not None:
            each += f", {self.predict_rows:.3g} backward passes for each"
        return (
            f"{self.num_data:,} data, {self.num_params:,} weights, {self.num_actions:,} actions\n"
            f"{'':12}{'time':>12}{'memory':>14}\n"
            f"{'fit':12}{seconds(self.fit_seconds):>12}{mebibytes(self.fit_bytes):>14}   {self.epochs:.1f} epochs\n"
            f"{'predict':12}{seconds(self.predict_seconds):>12}{mebibytes(self.predict_bytes):>14}   {each}\n"
            f"{'available':24}{mebibytes(self.available_bytes):>14}"
        )


def estimated_cost(network: LinearisedNetwork, settings: NetworkSettings, *, prepared: bool = False) -> Cost:
    """What `fit` will cost, which is exact where that is cheaper. Counted from sizes and the first batch.

    `prepared` also finds out what rows of J take.
    """
    settings = resolved(network, settings)
    if settings.policy != EXACT:
        return _iterative_cost(network, settings, prepared=prepared)
    sizes, jacobian = Sizes.of(network), network.jacobian
    needed = sizes.factor_bytes + settings.chunk_bytes + WORKSPACE_BYTES
    return Cost(
        num_data=sizes.num_data,
        num_params=sizes.num_params,
        num_actions=sizes.rank,
        epochs=row_epochs(sizes.num_rows // sizes.num_data),
        fit_bytes=needed,
        predict_bytes=settings.chunk_bytes + WORKSPACE_BYTES + 2 * image_bytes(jacobian, sizes.rank),
        available_bytes=available_bytes(jacobian.device),
        fixed_bytes=needed,
    )


def _iterative_cost(network: LinearisedNetwork, settings: NetworkSettings, *, prepared: bool = False) -> Cost:
    jacobian, plan = network.jacobian, Plan.of(network, settings, prepared=prepared)
    images = image_bytes(jacobian, plan.actions)
    stored = images if settings.storage is None else images * settings.storage.itemsize // jacobian.dtype.itemsize
    # Of all actions: their images, small matrices, and S and T where they are vectors over the data.
    in_outputs = 0 if plan.in_groups else 2 * plan.num_outputs * plan.num_data * plan.actions * jacobian.dtype.itemsize
    of_actions = images + 5 * 8 * plan.actions**2 + in_outputs
    of_actions += 0 if settings.storage is None else stored  # beside the sums
    fixed = _fixed_bytes(plan, jacobian, network.likelihood)
    return Cost(
        num_data=plan.num_data,
        num_params=jacobian.num_params,
        num_actions=plan.actions,
        epochs=plan.epochs,
        fit_bytes=fixed + of_actions,
        predict_bytes=settings.chunk_bytes + WORKSPACE_BYTES + 3 * stored // 2,  # up to half of A without its zeros
        available_bytes=available_bytes(jacobian.device),
        fixed_bytes=fixed,
        action_bytes=of_actions // plan.actions,
    )


def _fixed_bytes(plan: Plan, jacobian: NetworkJacobian, likelihood: Likelihood) -> int:
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
        if likelihood.keeps_leading(plan.num_data):
            held = NUM_LEADING + 1
            per_datum = 8 * held * (5 + 3 * q) + 2 * 4 * (MAX_FEATURES + 3 * SKETCH)
        per_datum += 3 * 8 * (DIRECTIONS_EACH + 1)  # curvature along each direction, in two orders
        if plan.groups > plan.actions:
            of_groups = image_bytes(jacobian, plan.groups) + 5 * 8 * plan.groups**2
    else:
        sweep = (1 + JVP_COLUMNS) * activations  # as many tangents beside each other
        per_datum = 8 * C * 8
    # Rows of J are taken at another time than sweeps are made.
    return max(sweep, for_rows) + WORKSPACE_BYTES + plan.num_data * per_datum + 6 * 8 * jacobian.num_params + of_groups


def check_memory(cost: Cost) -> int:
    """Refuse what cannot fit, before it starts; else how much it takes."""
    advice = "Use fewer actions (num_actions), less for rows of the Jacobian (chunk_bytes), or fewer weights."
    require_memory(cost.fit_bytes, cost.available_bytes, advice, cost)
    return cost.fit_bytes


def room_for_data(needed: int) -> int:
    """Half of what a fit leaves of the machine's memory, within reason, may hold data that it would read again."""
    available = available_bytes(torch.device("cpu"))
    return 0 if available is None else max(0, min(KEEP_BYTES, (available - needed) // 2))


def check_memory_to_refine(
    fitted: NetworkFit, network: LinearisedNetwork, settings: NetworkSettings, budget: Budget
) -> int:
    """The same for what is added to a fit: new actions, and copies in which they lie beside those that are there."""
    cost = _iterative_cost(network, settings)
    per_action = cost.action_bytes
    most = fitted.num_data * fitted.num_outputs
    epochs = min(1.0 if budget.epochs is None else budget.epochs, float(most))
    if settings.in_groups:
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
    saved: dict[int, Tensor] = {}  # alive until all are counted: no address is used twice

    def pack(tensor: Tensor) -> None:
        """The graph gets nothing: a layer that saves its own output would hold itself alive for ever."""
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            saved[address] = tensor.detach()

    def unpack(nothing: Any) -> Any:
        raise AssertionError("there is no backward pass where only memory is counted")

    with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
        outputs = jacobian.forward(x, leaves)
    del outputs
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())

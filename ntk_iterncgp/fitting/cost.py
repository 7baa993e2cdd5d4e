"""What a fit will take, before any of it is done: seconds from timing one batch, epochs, and memory by counting.

`Plan` says what a fit is going to do, from sizes and the first batch. A backward pass over b data takes α + βb seconds,
where α is what weights cost and β what data cost. It is timed with as many data as fit in `PATIENCE`, of the first
batch at the most, and the rest is a line through the last two: no more than that, or a few data, for each thing timed,
whatever the network and the number of its outputs. What goes through all images is timed on a slice of them. All rows
of J at an input are C backward passes; no more than a few contrasts of the outputs are timed, and the rest is scaled:

    derivatives  (1 + 2C)/3 epochs of one datum         products with actions  C         their own covariance  P C²
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ntk_iterncgp.clusters.clusters import epochs_of, padded_size
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
from ntk_iterncgp.fitting.network import PRODUCT_EPOCHS, LinearisedNetwork, NetworkFit, NetworkSettings
from ntk_iterncgp.fitting.network_check import MAX_CHECKED_OUTPUTS, max_group_data
from ntk_iterncgp.fitting.report import MIN_DATA, ROWS
from ntk_iterncgp.jacobian.autograd import JVP_COLUMNS, Jacobian
from ntk_iterncgp.jacobian.rows import NetworkJacobian, TracePlan, affordable_data, plan_trace, row_epochs
from ntk_iterncgp.likelihoods.base import ANY_VARIANCE, Likelihood
from ntk_iterncgp.likelihoods.leading import NUM_LEADING, SKETCH, keeps_leading
from ntk_iterncgp.linalg.factor import SLICE_BYTES, SLICE_COLUMNS, SLICE_ROWS, inner_products
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


TIMED_COLUMNS = 16  # of the actions, when a prediction is timed: all of them may not fit in memory
TIMED_OUTPUTS, TIMED_DATA = 2, 4  # of which rows of J are timed: those of all outputs may take minutes
READS = 12  # how often all images are gone through beside products: rounding, checksums, finite numbers
START_BATCHES = 5  # forward passes over the first batch before and beside the sweeps: probing, planning, the check
PATIENCE = 0.75  # seconds that are spent on one line through times, but for what one datum takes


class RowSeconds(NamedTuple):
    """Seconds for all rows of J at one input, as one of as many as are taken together.

    For the rows themselves, their covariance, and their products with each action.
    """

    derivatives: float
    covariance: float
    each_action: float


def fit_seconds(plan: Plan, network: LinearisedNetwork, rows: RowSeconds) -> float:
    """Return the seconds of a fit.

    Count a forward pass over all data, the sweep, the small matrices of the groups, the trace for the meter, and the
    rows at which the result is checked.
    """
    jacobian, processes = network.jacobian, parallel.num_processes()
    backward = backward_seconds(plan, jacobian)
    epoch = backward(plan.rows) * plan.num_data / plan.rows
    beside = _trace_seconds(plan, backward, rows) + _check_seconds(plan, jacobian, backward, rows)
    if not plan.in_groups:
        return epoch * plan.epochs / processes + beside
    sweep = _sweep_seconds(plan, network, epoch, backward)
    start = START_BATCHES * backward(plan.rows) / 3
    return start + (epoch / 3 + sweep) / processes + _matrix_seconds(plan, jacobian) + beside


def backward_seconds(plan: Plan, jacobian: NetworkJacobian) -> Callable[[int], float]:
    """Of a backward pass over any number of data."""

    def work(size: int) -> Tensor:
        some, cotangents = _some(plan, size), torch.ones(size, plan.num_outputs, 1, device=jacobian.device)
        return jacobian.vjp(some, cotangents.to(jacobian.dtype))

    return seconds_by_size(work, plan.rows)


def _trace_seconds(plan: Plan, backward: Callable[[int], float], rows: RowSeconds) -> float:
    """Shared out over processes."""
    trace = plan.trace
    seconds = trace.num_rows * (rows.derivatives + rows.covariance)
    if trace.num_probes:
        seconds += trace.num_probes * backward(1)
    return seconds / parallel.num_processes()


def _check_seconds(plan: Plan, jacobian: NetworkJacobian, backward: Callable[[int], float], rows: RowSeconds) -> float:
    """Return the seconds of the check of the result.

    Count rows of some outputs, twice: their products with weights, and the variance; and the groups that are computed
    anew.
    """
    fraction = row_epochs(plan.checked_outputs) / row_epochs(plan.num_outputs)
    at_rows = plan.checked_data * (rows.derivatives * fraction + rows.covariance * fraction**2)
    products = plan.checked_data * rows.each_action * fraction * plan.actions
    smallest = max(max_group_data(jacobian, plan.num_data), plan.items // plan.groups) if plan.in_groups else 0
    return 2 * at_rows + products + (backward(padded_size(smallest, plan.rows)) if smallest else 0.0)


def _sweep_seconds(plan: Plan, network: LinearisedNetwork, epoch: float, backward: Callable[[int], float]) -> float:
    """A map-style dataset comes group by group, in batches that may be much smaller than the user's."""
    jacobian, data = network.jacobian, network.data
    in_order = epoch * (plan.epochs - 1 / 3)
    if not data.can_jump(plan.num_data):
        return in_order
    num_groups = plan.groups // plan.cotangents
    num_batches = num_groups * math.ceil(plan.items / (num_groups * plan.rows))
    size = padded_size(math.ceil(plan.items / num_batches), plan.rows)
    each = row_epochs(plan.cotangents)  # backward passes share a forward pass
    sums = torch.zeros(plan.cotangents, jacobian.num_params, dtype=jacobian.dtype, device=jacobian.device)
    added = sums.T.clone()
    adding = seconds_of(lambda: sums.add_(added.T))
    return max(in_order, num_batches * (each * backward(size) + adding))


def _matrix_seconds(plan: Plan, jacobian: NetworkJacobian) -> float:
    """Return the seconds of the small matrices.

    Count AᵀA of the groups, that of half of them on the way, and the combinations that are retained; and what goes
    through all images number by number.
    """
    squares = 5 / 8 * plan.groups**2 + plan.groups * plan.actions * (plan.groups > plan.actions)
    part = torch.zeros(min(jacobian.num_params, SLICE_ROWS), dtype=jacobian.dtype, device=jacobian.device)
    each = seconds_of(lambda: part.double().square().sum()) / len(part)  # of one number
    products = _product_seconds(jacobian, plan.groups) * squares
    return jacobian.num_params * (products + READS * plan.groups * each)


def _product_seconds(jacobian: NetworkJacobian, columns: int) -> float:
    """Of one multiplication and addition in a product of tall matrices with so many columns: some are timed."""
    rows, columns = min(jacobian.num_params, SLICE_ROWS), min(columns, SLICE_COLUMNS)
    drawn = torch.Generator(jacobian.device)
    shape = (2, rows, columns)
    left, right = torch.randn(shape, generator=drawn, dtype=jacobian.dtype, device=jacobian.device)
    return seconds_of(lambda: inner_products(left, right)) / (rows * columns**2)


def prediction_seconds(plan: Plan, rows: RowSeconds) -> float:
    """Of one input."""
    return rows.derivatives + rows.covariance + rows.each_action * plan.actions


def row_seconds(plan: Plan, jacobian: NetworkJacobian) -> RowSeconds:
    """From the rows of a few outputs, where those of all may take long."""
    C = plan.num_outputs
    r = min(C, TIMED_OUTPUTS) if isinstance(jacobian, Jacobian) else C
    contrasts = None if r == C else torch.eye(C, r, dtype=torch.float64, device=jacobian.device)
    columns = min(plan.actions, TIMED_COLUMNS)
    drawn = torch.Generator(jacobian.device)  # of its own: the user's random numbers stay as they are
    shape = (jacobian.num_params, columns)
    images = torch.randn(shape, generator=drawn, dtype=jacobian.dtype, device=jacobian.device)
    unit = torch.ones((), device=jacobian.device).expand(jacobian.num_params)
    with torch.no_grad():
        derivatives = seconds_by_size(lambda n: jacobian.rows(_some(plan, n), n, contrasts), plan.at_once)
        few = min(plan.at_once, TIMED_DATA)
        rows = jacobian.rows(_some(plan, few), few, contrasts)
        alone = seconds_of(lambda: rows.products(images[:, :0], unit)) / few
        both = seconds_of(lambda: rows.products(images, unit)) / few
    squares = _product_seconds(jacobian, C) * jacobian.num_params * C**2 if r < C else 0.0
    return RowSeconds(
        derivatives(plan.at_once) / plan.at_once * row_epochs(C) / row_epochs(r),
        alone * C / r + squares,
        max(0.0, both - alone) / columns * C / r,  # rows may be written out once for all columns
    )


def _some(plan: Plan, size: int) -> Inputs:
    """So many data of the first batch, some of them twice if it has fewer."""
    return slice_rows(plan.x, torch.arange(size).remainder(plan.rows), plan.rows)


def seconds_by_size(work: Callable[[int], object], largest: int) -> Callable[[int], float]:
    """Fit a line through the times of the two largest sizes that were tried.

    From one datum on four times as many each time, while all of it takes no longer than `PATIENCE`; of a slow network
    two after one, of a very slow one none.
    """
    known = [(1, seconds_of(lambda: work(1)))]
    spent = 2 * known[0][1]
    while known[-1][0] < largest:
        last, took = known[-1]
        if spent + 8 * took <= PATIENCE:
            size = min(4 * last, largest)
        elif len(known) == 1 and took <= 2 * PATIENCE:
            size = 2
        else:
            break
        known.append((size, seconds_of(lambda size=size: work(size))))  # type: ignore[misc]
        spent += 2 * known[-1][1]
    if len(known) == 1:
        return lambda size: known[0][1] * size
    (less, before), (more, after) = known[-2:]
    slope = max(0.0, (after - before) / (more - less))
    return lambda size: max(0.0, after + slope * (size - more)) if size > more else _between(known, size)


def _between(known: list[tuple[int, float]], size: int) -> float:
    """By the sizes below and above."""
    for (less, before), (more, after) in pairwise(known):
        if size <= more:
            return before + (after - before) * (size - less) / (more - less)
    return known[-1][1]


def seconds_of(work: Callable[[], object]) -> float:
    """The smaller of two runs, since the first may load what later ones find loaded; of one where that takes long."""
    least = math.inf
    for _ in range(2):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():  # a GPU returns before it has done the work
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - started)
        if least > PATIENCE / 2:
            break
    return least


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
    """Counted from sizes; the first batch is evaluated in any case, and timed if asked."""
    jacobian, plan = network.jacobian, Plan.of(network, settings, prepared=timed)
    fixed, of_actions = _fixed_bytes(plan, jacobian, network.likelihood), _action_bytes(plan, jacobian)
    rows = row_seconds(plan, jacobian) if timed else None
    images = image_bytes(jacobian, plan.actions)
    stored = images if settings.storage is None else images * settings.storage.itemsize // jacobian.dtype.itemsize
    of_actions += 0 if settings.storage is None else stored  # beside the sums
    return Cost(
        plan.num_data,
        jacobian.num_params,
        plan.actions,
        plan.epochs,
        None if rows is None else fit_seconds(plan, network, rows),
        None if rows is None else 1000 * prediction_seconds(plan, rows),
        fixed + of_actions,
        settings.chunk_bytes + WORKSPACE_BYTES + 3 * stored // 2,  # up to half of A without the zeros in it
        available_bytes(jacobian.device),
        fixed,
        of_actions // plan.actions,
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
        if keeps_leading(likelihood, plan.num_data):
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


def _action_bytes(plan: Plan, jacobian: NetworkJacobian) -> int:
    """What all actions take: their images, small matrices, and S and T where they are vectors over the data."""
    in_outputs = 0 if plan.in_groups else 2 * plan.num_outputs * plan.num_data * plan.actions * jacobian.dtype.itemsize
    return image_bytes(jacobian, plan.actions) + 5 * 8 * plan.actions**2 + in_outputs


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
    cost = estimate_cost(network, settings, timed=False)
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

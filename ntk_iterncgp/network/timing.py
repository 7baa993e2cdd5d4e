"""How long a fit and its predictions will take, from timing the first batch: little of it where that takes long.

A backward pass over b data takes α + βb seconds, where α is what weights cost and β what data cost. It is timed with as
many data as fit in a second, of the first batch at the most, and the rest is a line through the last two. All rows of J
at an input are C backward passes; no more than a few contrasts of the outputs are timed, and the rest is scaled:

    derivatives  (1 + 2C)/3 epochs of one datum         products with actions  C         their own covariance  P C²
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ntk_iterncgp import parallel
from ntk_iterncgp.data import Inputs, slice_rows
from ntk_iterncgp.network.linearised import LinearisedNetwork
from ntk_iterncgp.network.passes import padded_size
from ntk_iterncgp.network.plan import Plan
from ntk_iterncgp.priors.jacobian import Jacobian, NetworkJacobian
from ntk_iterncgp.priors.trace import row_epochs
from ntk_iterncgp.weight_posterior import SLICE_COLUMNS, SLICE_ROWS, inner_products

TIMED_COLUMNS = 16  # of the actions, when a prediction is timed: all of them may not fit in memory
TIMED_OUTPUTS, TIMED_DATA = 2, 4  # of which rows of J are timed: those of all outputs may take minutes
PATIENCE = 0.5  # seconds, beyond which no larger part is timed


class RowSeconds(NamedTuple):
    """Of all rows of J at one input, as one of as many as are taken together: to have them, their covariance, and their
    products with each action."""

    derivatives: float
    covariance: float
    each_action: float


def fit_seconds(plan: Plan, network: LinearisedNetwork, rows: RowSeconds) -> float:
    """Of a forward pass over all data, the sweep, the small matrices of the groups, the trace for the meter, and the
    rows at which the result is checked."""
    jacobian, processes = network.jacobian, parallel.num_processes()
    backward = backward_seconds(plan, jacobian, 1)
    epoch = backward(plan.rows) * plan.num_data / plan.rows
    beside = _trace_seconds(plan, backward, rows) + _check_seconds(plan, rows)
    if not plan.in_groups:
        return epoch * plan.epochs / processes + beside
    sweep = _sweep_seconds(plan, network, epoch, backward)
    return (epoch / 3 + sweep) / processes + _matrix_seconds(plan, jacobian) + beside


def backward_seconds(plan: Plan, jacobian: NetworkJacobian, number: int) -> Callable[[int], float]:
    """Of a backward pass with `number` cotangents, over any number of data."""

    def work(size: int) -> Tensor:
        some, cotangents = _some(plan, size), torch.ones(size, plan.num_outputs, number, device=jacobian.device)
        return jacobian.vjp(some, cotangents.to(jacobian.dtype))

    return seconds_by_size(work, plan.rows)


def _trace_seconds(plan: Plan, backward: Callable[[int], float], rows: RowSeconds) -> float:
    """Shared out over processes."""
    trace = plan.trace
    seconds = trace.num_rows * (rows.derivatives + rows.covariance)
    if trace.num_probes:
        seconds += trace.num_probes * backward(1)
    return seconds / parallel.num_processes()


def _check_seconds(plan: Plan, rows: RowSeconds) -> float:
    """Of rows of the outputs at which the result is checked, which may not be all."""
    share = row_epochs(plan.checked_outputs) / row_epochs(plan.num_outputs)
    return plan.checked_data * (rows.derivatives * share + rows.covariance * share**2)


def _sweep_seconds(plan: Plan, network: LinearisedNetwork, epoch: float, backward: Callable[[int], float]) -> float:
    """A map-style dataset comes group by group, in batches that may be much smaller than the user's."""
    jacobian, data = network.jacobian, network.data
    in_order = epoch * (plan.epochs - 1 / 3)
    if not data.can_jump(plan.num_data):
        return in_order
    num_groups = plan.groups // plan.cotangents
    num_batches = num_groups * math.ceil(plan.items / (num_groups * plan.rows))
    size = padded_size(math.ceil(plan.items / num_batches), plan.rows)
    if plan.cotangents > 1:
        backward = backward_seconds(plan, jacobian, plan.cotangents)
    sums = torch.zeros(plan.cotangents, jacobian.num_params, dtype=jacobian.dtype, device=jacobian.device)
    added = sums.T.clone()
    adding = seconds_of(lambda: sums.add_(added.T))
    return max(in_order, num_batches * (backward(size) + adding))


def _matrix_seconds(plan: Plan, jacobian: NetworkJacobian) -> float:
    """AᵀA of the groups, of half of them on the way, and the combinations that are kept."""
    squares = 5 / 8 * plan.groups**2 + plan.groups * plan.actions * (plan.groups > plan.actions)
    return _product_seconds(jacobian, plan.groups) * jacobian.num_params * squares


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
    drawn = torch.Generator(jacobian.device)  # of its own: the user's random numbers are not ours
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
    """A line through the times of the two largest sizes that were tried: from one datum on twice as many each time,
    while that takes no longer than a fraction of a second."""
    known = [(1, seconds_of(lambda: work(1)))]
    while known[-1][0] < largest and (len(known) == 1 or known[-1][1] < PATIENCE / 4):
        size = min(2 * known[-1][0], largest)
        known.append((size, seconds_of(lambda size=size: work(size))))  # type: ignore[misc]
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
        if least > PATIENCE:
            break
    return least

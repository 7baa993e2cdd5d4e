"""How long a fit and its predictions will take, from timing the first batch in parts as large as those of all data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from ntk_iterncgp import parallel
from ntk_iterncgp.data import slice_rows
from ntk_iterncgp.network.linearised import LinearisedNetwork
from ntk_iterncgp.network.passes import padded_size
from ntk_iterncgp.network.plan import Plan
from ntk_iterncgp.priors.jacobian import NetworkJacobian
from ntk_iterncgp.weight_posterior import SLICE_COLUMNS, SLICE_ROWS, inner_products

TIMED_COLUMNS = 16  # of the actions, when a prediction is timed: all of them may not fit in memory


def fit_seconds(plan: Plan, network: LinearisedNetwork) -> float:
    """Of a forward pass over all data, the sweep, and the small matrices of the groups."""
    jacobian, processes = network.jacobian, parallel.num_processes()
    cotangents = torch.ones(plan.rows, plan.num_outputs, 1, dtype=jacobian.dtype, device=jacobian.device)
    epoch = seconds_of(lambda: jacobian.vjp(plan.x, cotangents)) * plan.num_data / plan.rows
    if not plan.in_groups:
        return epoch * plan.epochs / processes
    return (epoch / 3 + _sweep_seconds(plan, network, epoch)) / processes + _matrix_seconds(plan, jacobian)


def _sweep_seconds(plan: Plan, network: LinearisedNetwork, epoch: float) -> float:
    """A map-style dataset comes group by group, in batches that may be much smaller than the user's."""
    jacobian, data = network.jacobian, network.data
    in_order = epoch * (plan.epochs - 1 / 3)
    if not data.can_jump(plan.num_data):
        return in_order
    num_groups = plan.groups // plan.cotangents
    num_batches = num_groups * math.ceil(plan.items / (num_groups * plan.rows))
    size = padded_size(math.ceil(plan.items / num_batches), plan.rows)
    some = slice_rows(plan.x, torch.arange(size).remainder(plan.rows), plan.rows)
    sums = torch.zeros(plan.cotangents, jacobian.num_params, dtype=jacobian.dtype, device=jacobian.device)
    cotangents = sums.new_ones(size, plan.num_outputs, plan.cotangents)
    one_batch = seconds_of(lambda: sums.add_(jacobian.vjp(some, cotangents).T))
    return max(in_order, num_batches * one_batch)


def _matrix_seconds(plan: Plan, jacobian: NetworkJacobian) -> float:
    """AᵀA of the groups, of half of them on the way, and the combinations that are kept: products of columns, of which
    some are timed."""
    rows, columns = min(jacobian.num_params, SLICE_ROWS), min(plan.groups, SLICE_COLUMNS)
    drawn = torch.Generator(jacobian.device)
    shape = (2, rows, columns)
    left, right = torch.randn(shape, generator=drawn, dtype=jacobian.dtype, device=jacobian.device)
    squares = 5 / 8 * plan.groups**2 + plan.groups * plan.actions * (plan.groups > plan.actions)
    share = rows * columns**2 / (jacobian.num_params * squares)
    return seconds_of(lambda: inner_products(left, right)) / share


def prediction_seconds(plan: Plan, network: LinearisedNetwork) -> float:
    """Of one input, as one of as many as are taken together."""
    jacobian, data = network.jacobian, network.data
    part = next(data.chunk(plan.x, plan.at_once))
    num_rows, columns = data.num_rows(part), min(plan.actions, TIMED_COLUMNS)
    drawn = torch.Generator(jacobian.device)  # of its own: the user's random numbers are not ours
    shape = (jacobian.num_params, columns)
    images = torch.randn(shape, generator=drawn, dtype=jacobian.dtype, device=jacobian.device)
    unit = torch.ones((), device=jacobian.device).expand(jacobian.num_params)
    with torch.no_grad():
        rows = jacobian.rows(part, num_rows)
        derivatives = seconds_of(lambda: jacobian.rows(part, num_rows))
        alone = seconds_of(lambda: rows.products(images[:, :0], unit))
        both = seconds_of(lambda: rows.products(images, unit))
    # Rows may be written out once for all columns.
    return (derivatives + alone + max(0.0, both - alone) * plan.actions / columns) / num_rows


def seconds_of(work: Callable[[], object]) -> float:
    """The smaller of two runs: the first may load what later ones find loaded."""
    least = math.inf
    for _ in range(2):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():  # a GPU returns before it has done the work
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - started)
    return least

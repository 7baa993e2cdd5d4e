"""The seconds of a fit and of predictions, from timing one batch before any of it is done.

A backward pass over b data takes α + βb seconds, where α is what weights cost and β what data cost. It is timed with as
many data as fit in `PATIENCE`, of the first batch at the most, and the rest is a line through the last two: no more
than that, or a few data, for each thing timed, whatever the network and the number of its outputs. What goes through
all images is timed on a slice of them. All rows of J at an input are C backward passes; no more than a few contrasts of
the outputs are timed, and the rest is on a line:

    derivatives  (1 + 2C)/3 epochs of one datum         products with actions  C         their own covariance  P C²

A prediction takes as many rows as it does by default (`prediction_rows`), which may be far fewer than C.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ntk_iterncgp.clusters.clusters import padded_size
from ntk_iterncgp.data.fixed_order import Inputs, slice_rows
from ntk_iterncgp.fitting.cost import Cost, Plan, Sizes, estimated_cost, reference_inputs, resolved
from ntk_iterncgp.fitting.network import CLUSTERS, EXACT, FOLD_FACTOR, LinearisedNetwork, NetworkSettings
from ntk_iterncgp.fitting.network_check import max_group_data
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.jacobian.rows import NetworkJacobian, Rows, all_rows_are_cheap, row_epochs
from ntk_iterncgp.linalg.factor import SLICE_COLUMNS, SLICE_ROWS, inner_products
from ntk_iterncgp.posterior.contrasts import Shape, softest_variance
from ntk_iterncgp.posterior.predictive import KnownContrasts
from ntk_iterncgp.runtime import parallel

TIMED_COLUMNS = 16  # of the actions, when a prediction is timed: all of them may not fit in memory
TIMED_OUTPUTS, TIMED_DATA = 2, 4  # of which rows of J are timed, of a slow network: those of all may take minutes
FACTOR_COLUMNS = 256  # of the matrix whose QR decomposition is timed
MORE_OUTPUTS = 12  # of a quick one
READS = 12  # how often all images are gone through beside products: rounding, checksums, finite numbers
START_BATCHES = 5  # forward passes over the first batch before and beside the sweeps: probing, planning, the check
PATIENCE = 0.75  # seconds that are spent on one line through times, but for what one datum takes


def timed_cost(network: LinearisedNetwork, settings: NetworkSettings) -> Cost:
    """What `fit` will cost, with its seconds and those of a prediction on this machine as it is now."""
    settings = resolved(network, settings)
    cost, is_exact = estimated_cost(network, settings, prepared=True), settings.policy == EXACT
    planned = replace(settings, policy=CLUSTERS, num_actions=cost.num_actions) if is_exact else settings
    plan = Plan.of(network, planned, prepared=True)
    number = prediction_rows(network, settings)
    rows = in_prediction = row_seconds(plan, network.jacobian, plan.at_once)
    if bool((number < plan.num_outputs).any()):  # of fewer rows more inputs are held together
        most = settings.chunk_bytes // network.jacobian.bytes_per_row(int(number.max()))
        at_once = max(1, min(plan.rows, most))
        in_prediction = row_seconds(plan, network.jacobian, at_once)
    return replace(
        cost,
        fit_seconds=exact_seconds(plan, network, rows) if is_exact else fit_seconds(plan, network, rows),
        predict_seconds=1000 * prediction_seconds(network, in_prediction, number, cost.num_actions),
        predict_rows=float(number.mean()),
    )


@dataclass(frozen=True)
class RowSeconds:
    """Seconds for rows of J at one input, as one of as many inputs as are taken together.

    Products of few rows and of more are timed. What passes the columns through a layer is shared by all rows, so those
    with actions are on a line; a covariance is a r + b r² of r rows.
    """

    derivatives: float  # of one epoch of one datum
    few: Products
    more: Products  # the same as of few, where more would take long
    each_pair: float = 0.0  # of two rows in a covariance, where it does not follow from these

    def of(self, number: float) -> RowsOf:
        """The seconds of so many rows."""
        few, more, derivatives = self.few, self.more, self.derivatives * row_epochs(number)
        if few.number == more.number:
            pairs = self.each_pair * number**2 if number > few.number else 0.0
            scale = number / few.number
            return RowsOf(derivatives, few.covariance * scale + pairs, few.each_action * scale)
        apart = more.number - few.number
        b = max(0.0, more.covariance / more.number - few.covariance / few.number) / apart
        a = max(0.0, more.covariance / more.number - b * more.number)
        slope = max(0.0, more.each_action - few.each_action) / apart
        each_action = max(0.0, more.each_action + slope * (number - more.number))
        return RowsOf(derivatives, a * number + b * number**2, each_action)


class Products(NamedTuple):
    """Seconds of products with some rows: for their covariance, and for each action."""

    number: int  # of rows
    covariance: float
    each_action: float


class RowsOf(NamedTuple):
    """Seconds for a number of rows: for the rows themselves, their covariance, and their products with each action."""

    derivatives: float
    covariance: float
    each_action: float


# --- a fit ------------------------------------------------------------------------------------------------------------


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


def exact_seconds(plan: Plan, network: LinearisedNetwork, rows: RowSeconds) -> float:
    """Of an exact fit: rows of J at all data, and their QR decompositions."""
    sizes, jacobian = Sizes.of(network), network.jacobian
    columns = min(jacobian.num_params, FACTOR_COLUMNS)
    drawn = torch.Generator(jacobian.device)
    matrix = torch.randn(FOLD_FACTOR * columns, columns, generator=drawn, dtype=torch.float64, device=jacobian.device)
    flops = (2 * FOLD_FACTOR - 2 / 3) * columns**3
    of_flop = seconds_of(lambda: torch.linalg.qr(matrix, mode="r")) / flops
    each = rows.of(sizes.num_rows // sizes.num_data).derivatives
    return plan.num_data * each / parallel.num_processes() + sizes.factor_flops * of_flop


def backward_seconds(plan: Plan, jacobian: NetworkJacobian) -> Callable[[int], float]:
    """Of a backward pass over any number of data."""

    def work(size: int) -> Tensor:
        some, cotangents = _some(plan, size), torch.ones(size, plan.num_outputs, 1, device=jacobian.device)
        return jacobian.vjp(some, cotangents.to(jacobian.dtype))

    return seconds_by_size(work, plan.rows)


def _trace_seconds(plan: Plan, backward: Callable[[int], float], rows: RowSeconds) -> float:
    """Shared out over processes."""
    trace, of_all = plan.trace, rows.of(plan.num_outputs)
    seconds = trace.num_rows * (of_all.derivatives + of_all.covariance)
    if trace.num_probes:
        seconds += trace.num_probes * backward(1)
    return seconds / parallel.num_processes()


def _check_seconds(plan: Plan, jacobian: NetworkJacobian, backward: Callable[[int], float], rows: RowSeconds) -> float:
    """Return the seconds of the check of the result.

    Count rows of some outputs, twice: their products with weights, and the variance; and the groups that are computed
    anew.
    """
    checked = rows.of(plan.checked_outputs)
    at_rows = plan.checked_data * (checked.derivatives + checked.covariance)
    products = plan.checked_data * checked.each_action * plan.actions
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


# --- predictions ------------------------------------------------------------------------------------------------------


def prediction_rows(network: LinearisedNetwork, settings: NetworkSettings) -> Tensor:  # (b,)
    """Count the rows of J that a prediction takes by default at each input of the first batch.

    All C, or as many contrasts as "auto" takes: of a margin that is as uncertain as makes a difference to it, since
    its variance is not known before the fit. At a prior that leaves less variance they may be fewer.
    """
    outputs = network.first_batch.outputs.double()
    (b, C), learnt = outputs.shape, reference_inputs(network)
    if not learnt or settings.mean == "refined" or all_rows_are_cheap(C, network.jacobian.num_params):
        return torch.full((b,), float(C), dtype=torch.float64)
    expected, shape = _expected(outputs, learnt)
    return expected.more_needed(shape).clamp_min(1).double()


def _expected(outputs: Tensor, learnt: int) -> tuple[KnownContrasts, Shape]:
    """The outputs of the first batch, of which some are learnt from, as before any contrast is known."""
    top = outputs[:learnt].topk(2, 1).values
    softest = softest_variance(top[:, 0] - top[:, 1])
    everywhere = torch.arange(len(outputs), device=outputs.device)
    known = KnownContrasts(everywhere, outputs, torch.full_like(outputs[:, :1, None], softest))
    return known, Shape.independent(outputs.shape[1], outputs.device)


def prediction_seconds(network: LinearisedNetwork, rows: RowSeconds, number: Tensor, num_actions: int) -> float:
    """Of one input, on average; where contrasts are fewer than outputs, with the choice of their number."""
    outputs = network.first_batch.outputs.double()
    taken = [rows.of(k) for k in number.tolist()]
    seconds = sum(each.derivatives + each.covariance + each.each_action * num_actions for each in taken) / len(taken)
    if bool((number == outputs.shape[1]).all()):
        return seconds
    few = outputs[:TIMED_DATA]
    expected, shape = _expected(few, len(few))

    def beside() -> None:
        expected.more_needed(shape)
        expected.filled(shape)

    forward = rows.derivatives / 3  # by which the classes are ranked
    return seconds + forward + seconds_of(beside) / len(few)


def row_seconds(plan: Plan, jacobian: NetworkJacobian, at_once: int) -> RowSeconds:
    """From the rows of a few outputs, where those of all may take long, of as many inputs as are taken at once."""
    C = plan.num_outputs
    is_network = isinstance(jacobian, Jacobian)
    r, most = (min(C, number) if is_network else C for number in (TIMED_OUTPUTS, MORE_OUTPUTS))
    columns = min(plan.actions, TIMED_COLUMNS)
    drawn = torch.Generator(jacobian.device)  # of its own: the user's random numbers stay as they are
    shape = (jacobian.num_params, columns)
    images = torch.randn(shape, generator=drawn, dtype=jacobian.dtype, device=jacobian.device)
    unit = torch.ones((), device=jacobian.device).expand(jacobian.num_params)

    def rows_at(size: int, number: int) -> Rows:
        contrasts = None if number == C else torch.eye(C, number, dtype=torch.float64, device=jacobian.device)
        return jacobian.rows(_some(plan, size), size, contrasts)

    def products(size: int, number: int) -> Products:
        rows = rows_at(size, number)
        alone = seconds_of(lambda: rows.products(images[:, :0], unit)) / size
        both = seconds_of(lambda: rows.products(images, unit)) / size
        return Products(number, alone, max(0.0, both - alone) / columns)  # rows may be written out once for all columns

    with torch.no_grad():
        derivatives = seconds_by_size(lambda size: rows_at(size, r), at_once)
        each = derivatives(at_once) / at_once
        size = min(at_once, max(TIMED_DATA, int(PATIENCE / 8 / max(each, 1e-9))))
        few = products(size, r)
        more = products(size, most) if most > r and each * size * most / r <= PATIENCE else few
    pair = _product_seconds(jacobian, C) * jacobian.num_params if more is few else 0.0
    return RowSeconds(each / row_epochs(r), few, more, pair)


# --- a line through times ---------------------------------------------------------------------------------------------


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

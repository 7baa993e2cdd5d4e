"""Whether the exact posterior of a network costs less than the budget of an iterative one: flops and bytes, counted.

Exact: r = rank(W_n) rows of J at each datum, the QR decomposition of n' = N r whitened rows, and predictions with
min(P, n') actions. Iterative: a pass over the data in groups, the algebra of the groups, and predictions with
`num_actions`. Predictions are counted at as many inputs as there are training data. A pass in groups makes at least one
backward pass for each of them, and for a small network that is the time of a call, not of its arithmetic: `CALL_FLOPS`.
Nobody waits for what takes fewer than `FREE_FLOPS`: then the exact posterior is preferred, whatever the other costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from ntk_iterncgp.data.fixed_order import slice_rows
from ntk_iterncgp.fitting.cost import (
    WORKSPACE_BYTES,
    Cost,
    Plan,
    estimate_cost,
    image_bytes,
    prediction_seconds,
    row_seconds,
    seconds_of,
)
from ntk_iterncgp.fitting.network import AUTO, CLUSTERS, EXACT, FOLD_FACTOR, LinearisedNetwork, NetworkSettings
from ntk_iterncgp.jacobian.rows import NetworkJacobian, row_epochs
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.runtime.memory import available_bytes, require_memory

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
    """The settings with policy "auto" decided: "exact" or "clusters"; "exact" is refused where it does not fit.

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
    may = network.jacobian.dtype == torch.float64 and not settings.bounds_actions(sizes.rank)
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


def estimated_cost(network: LinearisedNetwork, settings: NetworkSettings, *, timed: bool) -> Cost:
    """What `fit` will cost, which is exact where that is cheaper. Counted from sizes; one batch is timed if asked."""
    settings = resolved(network, settings)
    if settings.policy != EXACT:
        return estimate_cost(network, settings, timed=timed)
    sizes, jacobian = Sizes.of(network), network.jacobian
    as_actions = replace(settings, policy=CLUSTERS, num_actions=sizes.rank)
    plan = Plan.of(network, as_actions, prepared=timed)
    rows = row_seconds(plan, jacobian) if timed else None
    epochs, fit, predict = row_epochs(sizes.num_rows // sizes.num_data), None, None
    if rows is not None:
        each = rows.derivatives * epochs / row_epochs(plan.num_outputs)
        fit = plan.num_data * each / parallel.num_processes() + sizes.factor_flops / _factor_rate(jacobian)
        predict = 1000 * prediction_seconds(replace(plan, actions=sizes.rank), rows)
    needed = sizes.factor_bytes + settings.chunk_bytes + WORKSPACE_BYTES
    return Cost(
        num_data=plan.num_data,
        num_params=sizes.num_params,
        num_actions=sizes.rank,
        epochs=epochs,
        fit_seconds=fit,
        predict_seconds=predict,
        fit_bytes=needed,
        predict_bytes=settings.chunk_bytes + WORKSPACE_BYTES + 2 * image_bytes(jacobian, sizes.rank),
        available_bytes=available_bytes(jacobian.device),
        fixed_bytes=needed,
    )


TIMED_COLUMNS = 256  # of the matrix whose QR decomposition is timed


def _factor_rate(jacobian: NetworkJacobian) -> float:
    """Flops a second of a QR decomposition."""
    columns = min(jacobian.num_params, TIMED_COLUMNS)
    drawn = torch.Generator(jacobian.device)
    matrix = torch.randn(FOLD_FACTOR * columns, columns, generator=drawn, dtype=torch.float64, device=jacobian.device)
    return (2 * FOLD_FACTOR - 2 / 3) * columns**3 / seconds_of(lambda: torch.linalg.qr(matrix, mode="r"))

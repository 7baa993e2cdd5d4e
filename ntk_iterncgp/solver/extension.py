"""More data for a run that has ended: its actions and its point serve again in the larger problem.

With S extended by zero rows, SᵀKS and SᵀW⁺S stay what they are, and of the images only the new rows are new,

    T ← [K S; k(X_new, X) S],

one rectangular product. The point keeps v, which is zero at the new data, and g = K v is a combination of the images
there too. Newton's method continues from it: ∇ at the new data is what the next actions are made of.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ntk_iterncgp.linalg.columns import Buffer, Columns, DenseColumns, KroneckerColumns
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver.problem import Problem
from ntk_iterncgp.solver.state import Iterate, State


def with_more_data(state: State, problem: Problem, *, capacity: int = 0) -> State:
    """Extend a state to a problem that has more data behind those of its own.

    Args:
        state: at the end of a run.
        problem: the same prior and likelihood at more data, of which the first are the old ones.
        capacity: how many more columns to reserve memory for.

    Returns:
        The state of the larger problem, with the same actions and the same representer weights.
    """
    old, prior = state.problem.prior, problem.prior
    assert isinstance(old, GramPrior) and isinstance(prior, GramPrior)
    actions, more = state.buffer.actions, prior.num_data - old.num_data
    new_images = old.images_at(prior.inputs[old.num_data :], actions)  # (more · outputs, stored columns)
    stored = actions.factor.size // (prior.num_outputs if isinstance(actions, KroneckerColumns) else 1)
    fraction = more * old.num_data / prior.num_data**2
    prior.num_products = old.num_products + math.ceil(stored * fraction)
    zeros = torch.zeros_like(new_images)
    images = old.lift(state.buffer.images)
    buffer = Buffer(_extended(actions, zeros, prior, capacity), _extended(images, new_images, prior, capacity))
    iterate = state.iterate
    offset = prior.lift(buffer.images).combine(iterate.coefficients[:, None])[:, 0]
    padding = torch.zeros(problem.num_rows - len(iterate.offset), dtype=torch.float64, device=offset.device)
    point = Iterate(
        iterate.coefficients,
        torch.cat([iterate.representer_weights, padding]),
        torch.cat([iterate.offset, offset[len(iterate.offset) :]]),
    )
    larger = replace(
        state, problem=problem, iterate=point, buffer=buffer, num_products=prior.num_products, position=None
    )
    return larger.linearise(point)


def _extended(columns: Columns, rows: Tensor, prior: GramPrior, capacity: int) -> Columns:  # (rows, stored columns)
    """More rows below those there are."""
    stored = columns.factor.whole()
    matrix = torch.cat([stored.matrix, rows.to(stored.dtype)])
    storage = torch.empty(stored.size + capacity, prior.shard.size * stored.num_outputs, dtype=stored.dtype)
    storage = storage.to(stored.device)
    storage[: stored.size] = prior.shard.take(matrix).T
    dense = DenseColumns(storage, stored.size, stored.num_outputs, prior.shard)
    return KroneckerColumns(dense, columns.contrasts) if isinstance(columns, KroneckerColumns) else dense

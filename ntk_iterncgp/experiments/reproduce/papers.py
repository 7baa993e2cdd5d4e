"""Algorithms 1 to 3 as the paper lists them, on this library's small matrices: conjugate gradients, undamped, recycled.

Without compression this is `NonConjugateGP(policy="residual", damped=False, actions="joint")`. With compression it is
not `compression="eigen"`, and hence this file: the paper takes the top eigenvectors of M for actions *as long as the
residuals they were*, where the library's have length one, and it leaves Newton's point alone, where the library moves
it into the span that is kept. Both matter: see docs/reproduction.md.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from ntk_iterncgp.solver import State, Status, Stopping
from ntk_iterncgp.solver.inner import inner_loop
from ntk_iterncgp.solver.policies import residual


def papers_newton(
    state: State, stopping: Stopping, max_rank: int | None
) -> Generator[State, None, tuple[State, Status]]:
    """Yields a state after each action and each Newton step, as `solver.newton` does."""
    prior = state.problem.prior
    limit = prior.num_products + stopping.max_products
    lengths = torch.zeros(0, 0, dtype=torch.float64)  # L with (the paper's actions) = (orthonormal actions) L
    for _ in range(stopping.max_newton_steps):  # Alg. 1, line 5
        budget = min(stopping.products_per_step, limit - prior.num_products)
        run = inner_loop(state, residual, max_products=budget, residual_tol=stopping.residual_tol)  # line 8
        for following in run:
            # The residual is orthogonal to all earlier actions: as an action it only has another length than one.
            lengths = torch.block_diag(lengths, state.residual.norm().cpu())
            state = following
            yield state
        before, solution = state.iterate, state.solution
        if not math.isfinite(state.problem.log_prob(state.problem.latent(solution.offset))):
            return state, Status.DIVERGED
        state = replace(state, newton_step=state.newton_step + 1).linearise(solution)  # line 9: f ← K v + m
        if max_rank is not None and state.buffer.size > max_rank:
            state, lengths = _compress(state, lengths, max_rank)
        yield state
        if (solution.offset - before.offset).norm() <= stopping.newton_tol * solution.offset.norm():
            return state, Status.CONVERGED
        if prior.num_products >= limit:
            return state, Status.BUDGET
    return state, Status.NEWTON_STEPS


def _compress(state: State, lengths: Tensor, max_rank: int) -> tuple[State, Tensor]:
    """Alg. 3, lines 4 to 7: S ← S U for the top eigenvectors U of M, all in the paper's lengths."""
    lengths = lengths.to(state.gram.device)
    matrix = lengths.T @ (state.gram + state.noise_gram) @ lengths
    top = torch.linalg.eigh(matrix).eigenvectors[:, -max_rank:]
    orthonormal, rest = torch.linalg.qr(lengths @ top)
    return state.rotate(orthonormal), rest.cpu()

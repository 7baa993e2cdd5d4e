"""Algorithm 1, the outer loop: Newton's method for the mode, each step a GP regression problem (Alg. 2).

A departure from the paper: Newton's steps are damped. Ψ(v) = log p(y | m + K v) − ½ vᵀK v never falls, because

1.  the step from the current point towards the solution of the linear system is shortened until Ψ rises, and
2.  where that direction does not ascend (a coarse solution may not), Newton's method is run on Ψ *within the span*
    of the actions: (G + TᵀWT) d = Tᵀ(∇ − v) always ascends and never inverts W.

Neither costs a product: g = K v is linear along a step, so a trial costs O(n). `damped=False` is the paper's listing.
A small step alone does not mean convergence. A poor policy makes small steps too, so the residual must be small as
well; and with informative data a small fraction of ‖g‖ is many posterior standard deviations (counts of 1e6: 1 % of
g = 14 is 140 of them), so the Newton decrement, in those units, must be small too. Once the products are spent, further
Newton steps within the span are free, and are taken until the mean converges there.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace

import torch

from ntk_iterncgp.linalg.columns import Buffer, Columns, DenseColumns, KroneckerColumns
from ntk_iterncgp.solver.inner import inner_loop
from ntk_iterncgp.solver.policies import Policy, RandomSubspace
from ntk_iterncgp.solver.problem import Problem
from ntk_iterncgp.solver.recycling import virtual_solver_run
from ntk_iterncgp.solver.state import Iterate, State
from ntk_iterncgp.solver.stopping import NewtonOptions, Position, Status, Stopping

MAX_PRIMAL_STEPS = 3
MAX_HALVINGS = 40


def initial_state(problem: Problem, *, seed: int, capacity: int, kronecker: bool = False) -> State:
    """Start at f = m, or at the anchor where there is one, without actions (Alg. 1, lines 2 to 4).

    Args:
        problem: the prior, the likelihood and the targets.
        seed: of the random numbers that policies draw.
        capacity: how many columns to reserve memory for; more can be added.
        kronecker: whether each product gives an action for every contrast between outputs.

    Returns:
        The state that `newton` starts from.
    """
    prior, anchor = problem.prior, problem.anchor
    device = prior.device
    zeros = torch.zeros(problem.num_rows, dtype=torch.float64, device=device)
    empty = torch.zeros(0, 0, dtype=torch.float64, device=device)
    contrasts = problem.likelihood.contrasts(device) if kronecker else None

    def columns() -> Columns:
        outputs = 1 if kronecker else prior.num_outputs
        dense = DenseColumns.empty(prior.shard, outputs, capacity=capacity, dtype=prior.dtype, device=device)
        return dense if contrasts is None else KroneckerColumns(dense, contrasts)

    return State(
        problem=problem,
        iterate=Iterate(empty.diagonal(), zeros, zeros if anchor is None else anchor.offset, float(anchor is not None)),
        buffer=Buffer(columns(), prior.empty_images(columns())),
        gram=empty,
        noise_gram=empty,
        generator=torch.Generator(device=device).manual_seed(seed),
    )


def newton(
    state: State, policy: Policy, stopping: Stopping, options: NewtonOptions, *, stage: int = 0
) -> Generator[State, None, tuple[State, Status]]:
    """Find the mode by Newton's method (Alg. 1).

    Args:
        state: where to start. A run is resumed from any state that it has yielded.
        policy: proposes the actions of the inner loop.
        stopping: the budget and the tolerances.
        options: the other settings.
        stage: which of the stages of `refine` this is.

    Yields:
        The state after each block of actions and after each Newton step.

    Returns:
        The last state, and why the run stopped.
    """
    prior, quadratic = state.problem.prior, state.problem.likelihood.is_quadratic
    max_steps = stopping.max_products if stopping.spend_all else stopping.max_newton_steps
    at = state.position or Position(prior.num_products + stopping.max_products, max_steps, stage=stage)
    tolerance = max(10 * stopping.newton_tol, 1e-4)  # of the residual, and of the mean in posterior standard deviations
    while at.status is None and at.steps_left > 0:  # Alg. 1, line 5
        start = prior.num_products if at.step_start is None else at.step_start
        at, left = replace(at, step_start=start), at.limit - start
        budget = left if quadratic else min(left, stopping.products_per_step)
        state, inner_status = yield from inner_loop(  # line 8
            state.with_counters(position=at),
            policy,
            max_products=start + budget - prior.num_products,
            residual_tol=0.0 if stopping.spend_all else stopping.residual_tol,
            max_error=tolerance,
        )
        damped = options.damped and not quadratic
        iterate = ascend(state) if damped else state.solution  # line 9: f ← K v + m
        if not damped and not math.isfinite(state.problem.log_prob(state.problem.latent(iterate.offset))):
            return state.with_counters(position=None), Status.DIVERGED
        is_close = _is_close(iterate, state.iterate, stopping.newton_tol)
        solved = state.relative_residual <= tolerance
        last, state = state, replace(state, newton_step=state.newton_step + 1)
        state = virtual_solver_run(state, iterate, max_rank=options.max_rank, compression=options.compression)
        if not damped and not _is_finite(state):
            return last.with_counters(position=None), Status.DIVERGED
        if quadratic:
            converged = state.relative_residual < stopping.residual_tol and state.solution_error <= tolerance
        else:
            solved = not options.damped or (solved and state.newton_decrement <= tolerance)
            converged = solved and is_close and left > 0
        ends = quadratic or (prior.num_products >= at.limit and (stopping.spend_all or is_close))
        status = _ending(inner_status, converged=converged, ends=ends, spend_all=stopping.spend_all)
        at = replace(at, steps_left=at.steps_left - 1, step_start=None, status=status)
        state = state.with_counters(position=at)
        yield state  # line 6: the noise at the new point, for the actions there are
    out_of_steps = Status.BUDGET if prior.num_products >= at.limit else Status.NEWTON_STEPS
    return state.with_counters(position=None), at.status or out_of_steps


def _ending(inner_status: Status, *, converged: bool, ends: bool, spend_all: bool) -> Status | None:
    """How the run ends with this Newton step, or None. `ends`: no products are left, or nothing is left to do."""
    if inner_status is Status.EXHAUSTED and (spend_all or ends):
        return Status.EXHAUSTED
    if converged and (ends or not spend_all):
        return Status.CONVERGED
    return inner_status if ends else None


def refine(
    state: State, policy: Policy, stopping: Stopping, options: NewtonOptions
) -> Generator[State, None, tuple[State, Status]]:
    """Spend all of `max_products` from where a run stopped; with random probes once the policy has nothing new.

    After the mean has converged, the next direction of the Krylov space still contracts the variance more per product
    than random probes do. Arguments, states and result are those of `newton`.
    """
    prior = state.problem.prior
    limit = prior.num_products + stopping.max_products if state.position is None else state.position.limit
    probing, status = state.position is not None and state.position.stage == 2, Status.EXHAUSTED
    if not probing:
        state, status = yield from newton(state, policy, replace(stopping, spend_all=True), options, stage=1)
    if probing or (status is Status.EXHAUSTED and prior.num_products < limit):
        rest = replace(stopping, spend_all=True, max_products=max(1, limit - prior.num_products))
        state, status = yield from newton(state, RandomSubspace(), rest, options, stage=2)
    return state, status


def ascend(state: State) -> Iterate:
    """Take the next step of Newton's method, such that Ψ does not fall."""
    iterate, moved = line_search(state.problem, state.iterate, state.solution)
    rounding = torch.finfo(state.buffer.images.dtype).eps ** 0.5
    if moved or _is_close(state.solution, state.iterate, rounding):
        return iterate
    images = state.problem.prior.lift(state.buffer.images)
    unsure = state.problem.prior.product_error(state.gram)
    for _ in range(MAX_PRIMAL_STEPS):
        latent = state.problem.latent(iterate.offset)
        slope = images.inner((state.problem.score(latent) - iterate.representer_weights)[:, None])
        if state.problem.anchor is not None:
            slope -= iterate.anchor_share * state.buffer.actions.inner(state.problem.anchor.offset[:, None])
        hessian = state.gram + state.problem.curvature_inner(latent, images)
        # Where two data are the same, SᵀKS is singular, and what rounding has made of it need not be positive.
        hessian.diagonal().add_(unsure + 1e-14 * float(hessian.diagonal().mean()))
        direction = torch.linalg.solve(hessian, slope)
        target = Iterate(
            iterate.coefficients + direction[:, 0],
            iterate.representer_weights + state.buffer.actions.combine(direction)[:, 0],
            iterate.offset + images.combine(direction)[:, 0],
            iterate.anchor_share,
        )
        iterate, moved = line_search(state.problem, iterate, target)
        if not moved:
            break
    return iterate


def _is_finite(state: State) -> bool:
    """Whether the linear system at a point can be written down: a finite log p does not make its curvature finite."""
    return bool(torch.isfinite(state.noise_gram).all()) and math.isfinite(state.relative_residual)


def _is_close(new: Iterate, old: Iterate, tolerance: float) -> bool:
    """‖g_i − g_{i−1}‖ ≤ δ ‖g_i‖."""
    return bool((new.offset - old.offset).norm() <= tolerance * new.offset.norm())


def line_search(problem: Problem, start: Iterate, target: Iterate) -> tuple[Iterate, bool]:
    """Halve the step until Ψ rises enough (Armijo); where Ψ is flat to rounding, until its slope falls."""
    value, slope = objective_and_slope(problem, start, start, target)
    if not slope > 0:
        return start, False
    rounding = 1e-14 * (1 + abs(value))
    step = 1.0
    for _ in range(MAX_HALVINGS):
        trial = start.towards(target, step)
        trial_value, trial_slope = objective_and_slope(problem, trial, start, target)
        if trial_value >= value + max(1e-4 * step * slope, rounding):
            return trial, True
        if trial_value >= value - rounding and abs(trial_slope) <= 0.9 * slope:
            return trial, True
        step /= 2
    return start, False


def objective_and_slope(problem: Problem, point: Iterate, start: Iterate, target: Iterate) -> tuple[float, float]:
    """Evaluate Ψ at a point between `start` and `target`, and its derivative in that direction: (∇ − v)ᵀΔg."""
    latent, anchor = problem.latent(point.offset), problem.anchor
    value = problem.log_prob(latent) - 0.5 * point.penalty(anchor)
    slope = float((problem.score(latent) - point.representer_weights) @ (target.offset - start.offset))
    if anchor is not None and point.anchor_share:
        change = float((target.representer_weights - start.representer_weights) @ anchor.offset)
        change += (target.anchor_share - start.anchor_share) * anchor.penalty
        slope -= point.anchor_share * change
    return value, slope

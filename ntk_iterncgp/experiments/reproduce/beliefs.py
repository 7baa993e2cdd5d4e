"""The beliefs on the way: what a method would answer if it were stopped after iteration j of Newton step i.

In the paper a belief GP(m_{i,j}, K_{i,j}) holds the *current solution of the linear system*, v_j = C_j(ŷ − m); a state
of this library holds Newton's point, which moves only when the step is done. `in_between` makes the one from the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from ntk_iterncgp.kernels import Kernel
from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.posterior.function_space import Posterior
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver import NewtonOptions, Problem, State, Status, Stopping, initial_state, newton, resolve_policy
from ntk_iterncgp.solver.inner import inner_loop
from ntk_iterncgp.solver.newton import ascend

Run = Generator[State, None, tuple[State, Status]]
Belief = Callable[[State], Posterior]


@dataclass(frozen=True)
class Moment:
    """A state on the way: Newton step i, iteration j within it, seconds of work so far."""

    newton_step: int
    iteration: int
    seconds: float
    state: State


def make_problem(kernel: Kernel, likelihood: Likelihood, inputs: Tensor, targets: Tensor) -> Problem:  # (N, d), (N,)
    """A zero prior mean, as in all of the paper's experiments."""
    prior = GramPrior([kernel], inputs, inputs.new_zeros(likelihood.num_outputs))
    return Problem(prior, likelihood, likelihood.check_targets(targets))


def in_between(state: State) -> Posterior:
    """GP(m_{i,j}, K_{i,j}): the solution of the linear system so far, and the covariance that goes with it."""
    return Posterior(replace(state, iterate=state.solution))


def if_stopped(state: State) -> Posterior:
    """What `NonConjugateGP` answers if its budget ends here: a damped step, then the posterior where it led."""
    return Posterior(state.linearise(ascend(state)))


def start(problem: Problem, stopping: Stopping) -> State:
    """The prior."""
    return initial_state(problem, seed=0, capacity=stopping.max_products)


def ours(problem: Problem, stopping: Stopping, max_rank: int | None = None) -> Run:
    """The library's default for one latent function."""
    return newton(start(problem, stopping), resolve_policy("curvature_residual"), stopping, NewtonOptions(max_rank))


def moments(run: Run, first: State) -> Iterator[Moment]:
    """A run with a clock that stands still while the caller looks. The end of step i is iteration 0 of step i + 1."""
    yield Moment(0, 0, 0.0, first)
    seconds, iteration, newton_step = 0.0, 0, 0
    while True:
        called = time.perf_counter()
        state = next(run, None)
        seconds += time.perf_counter() - called
        if state is None:
            return
        iteration = iteration + 1 if state.newton_step == newton_step else 0
        newton_step = state.newton_step
        yield Moment(newton_step, iteration, seconds, state)


def without_recycling(problem: Problem, policy: str, stopping: Stopping) -> Run:
    """Algorithm 1 without its blue lines: every Newton step starts from the prior, undamped."""
    state = initial_state(problem, seed=0, capacity=stopping.products_per_step)
    for step in range(1, stopping.max_newton_steps + 1):
        inner = inner_loop(state, resolve_policy(policy), max_products=stopping.products_per_step, residual_tol=0.0)
        for following in inner:
            state = following
            yield state
        solution, before = state.solution, state.iterate
        fresh = initial_state(problem, seed=0, capacity=stopping.products_per_step)
        point = replace(solution, coefficients=fresh.iterate.coefficients)  # f stays, the actions go
        state = replace(fresh, newton_step=step).linearise(point)
        yield state
        if (solution.offset - before.offset).norm() <= stopping.newton_tol * solution.offset.norm():
            return state, Status.CONVERGED
    return state, Status.NEWTON_STEPS

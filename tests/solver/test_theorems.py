"""What the paper proves, on numbers; and its listings, written out densely, against the solver that departs from them.

The listings below are the paper's line by line (dense matrices, actions as they come, search directions by recursion),
so that "the paper's algorithm" of docs/reproduction.md is a claim that can fail: `policy="residual", damped=False`.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ntk_iterncgp.kernels import RBF
from ntk_iterncgp.likelihoods import Gaussian
from ntk_iterncgp.posterior.function_space import Posterior
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver import NewtonOptions, Problem, State, Stopping, initial_state, newton, virtual_solver_run
from tests import oracles
from tests.cases import Case, exhaust, make_case, solve

NON_CONJUGATE = ["bernoulli", "poisson", "softmax"]


class Belief(NamedTuple):
    """After iteration j of Newton step i: representer weights v (n,) and approximate precision C (n, n)."""

    newton_step: int
    weights: Tensor
    precision: Tensor


def papers_itergp(
    K: Tensor, noise: Tensor, b: Tensor, S: Tensor, T: Tensor, policy: Callable[[int, Tensor], Tensor], steps: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Algorithm 2 with the virtual solver run of Algorithm 3, without compression."""
    Q = S @ torch.linalg.cholesky(torch.linalg.inv(S.T @ (T + noise @ S))) if S.shape[1] else S  # Alg. 3
    v = Q @ (Q.T @ b)  # line 3
    yield v, Q @ Q.T, S, T
    for j in range(steps):  # line 4
        r = b - K @ v - noise @ v  # line 5
        s = policy(j, r)  # line 6
        t = K @ s  # line 9
        z = t + noise @ s  # line 11
        d = s - Q @ (Q.T @ z)  # line 12
        eta = z @ d  # line 13
        Q = torch.cat([Q, (d / eta.sqrt())[:, None]], 1)  # line 14
        v = v + (s @ r) / eta * d  # line 16
        S, T = torch.cat([S, s[:, None]], 1), torch.cat([T, t[:, None]], 1)  # lines 7 and 10
        yield v, Q @ Q.T, S, T


def papers_iterncgp(case: Case, policy: Callable[[int, Tensor], Tensor], steps: int, newton_steps: int) -> list[Belief]:
    """Algorithm 1."""
    f, shape = case.m.clone(), (case.num_data, -1)
    S = T = torch.zeros(case.num_rows, 0, dtype=torch.float64)
    beliefs = []
    for i in range(newton_steps):  # line 5
        latent = f.reshape(shape)
        noise = oracles.noise_matrix(case.name, latent, case.noise)  # line 6
        score = oracles.score(case.name, latent, case.targets, case.noise).flatten()
        b = f + noise @ score - case.m  # line 7: ŷ − m
        run = list(papers_itergp(case.K, noise, b, S, T, policy, steps))  # line 8
        beliefs += [Belief(i, v, C) for v, C, _, _ in run]
        v, _, S, T = run[-1]
        f = case.K @ v + case.m  # line 9
    return beliefs


def residual(j: int, r: Tensor) -> Tensor:
    return r


def papers_states(case: Case, steps: int, newton_steps: int) -> list[State]:
    """The solver with the settings that docs/reproduction.md calls the paper's."""
    states, _, _ = solve(
        case,
        "residual",
        options=NewtonOptions(damped=False),
        max_products=steps * newton_steps,
        products_per_step=steps,
        max_newton_steps=newton_steps,
        newton_tol=0.0,
        residual_tol=0.0,
    )
    return states


def precision_of(state: State) -> Tensor:
    """C = S M⁻¹ Sᵀ."""
    S = state.buffer.actions.combine(torch.eye(state.buffer.size, dtype=torch.float64))
    return S @ state.factor.solve(S.T)


@pytest.mark.parametrize("name", NON_CONJUGATE)
def test_the_papers_settings_follow_the_papers_listings_iteration_by_iteration(name: str) -> None:
    case = make_case(name, "shared", num_data=12)
    steps, newton_steps = 2, 3
    # The listing shows each Newton step before its first action too; the solver shows that one as the end of the last.
    expected = papers_iterncgp(case, residual, steps, newton_steps)[1:]
    states = papers_states(case, steps, newton_steps)
    assert len(states) == len(expected) + 1 == newton_steps * (steps + 1)
    for state, belief in zip(states, expected, strict=False):
        assert state.newton_step == belief.newton_step
        torch.testing.assert_close(state.solution.representer_weights, belief.weights, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(precision_of(state), belief.precision, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("policy", ["residual", "unit"])
def test_theorem_1_with_a_gaussian_likelihood_it_is_itergp(policy: str) -> None:
    case = make_case("gaussian", "shared", num_data=8)
    states, last, _ = solve(case, policy, options=NewtonOptions(damped=False), max_products=5, residual_tol=0.0)
    noise, b = case.noise * torch.eye(case.num_rows, dtype=torch.float64), case.targets.flatten() - case.m
    eye = torch.eye(case.num_rows, dtype=torch.float64)
    none = torch.zeros(case.num_rows, 0, dtype=torch.float64)
    listing = papers_itergp(case.K, noise, b, none, none, residual if policy == "residual" else lambda j, r: eye[j], 5)
    for state, (v, C, _, _) in zip(states, list(listing)[1:], strict=False):
        torch.testing.assert_close(state.solution.representer_weights, v, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(precision_of(state), C, rtol=1e-8, atol=1e-10)
    assert last.newton_step == 1  # one step, and it arrives: f₁ is what the solver found
    torch.testing.assert_close(last.iterate.offset, case.K @ v, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [*NON_CONJUGATE, "gaussian"])
def test_marginal_variances_fall_in_the_inner_loop(name: str) -> None:
    case = make_case(name, "shared", num_data=12)
    states = papers_states(case, 4, 2)
    variances = [(s.newton_step, Posterior(s).latent(case.new_inputs)[1].diagonal(dim1=1, dim2=2)) for s in states]
    pairs = [(a, b) for (i, a), (j, b) in pairwise(variances) if i == j]
    assert len(pairs) >= 3
    for before, after in pairs:
        assert (after <= before + 1e-12).all()
        assert (after < before - 1e-9).any()  # an action that changes nothing would not be a fall


@pytest.mark.parametrize("name", NON_CONJUGATE)
@pytest.mark.parametrize("max_rank", [None, 3])
def test_after_a_virtual_run_residual_and_error_have_no_part_in_the_span(name: str, max_rank: int | None) -> None:
    case = make_case(name, "shared", num_data=12)
    before = papers_states(case, 5, 1)[-2]  # five actions, and the Newton step not yet taken
    state = virtual_solver_run(before, before.solution, max_rank=max_rank, compression="eigen")
    S = state.buffer.actions.combine(torch.eye(state.buffer.size, dtype=torch.float64))
    noise = oracles.noise_matrix(name, state.latent)
    b, v = state.right_hand_side, state.solution.representer_weights
    system = case.K + noise
    r = b - system @ v
    assert r.norm() > 1e-4 * b.norm()  # there is something left to do,
    assert (S.T @ r).norm() < 1e-9 * b.norm()  # but not in the span of the actions (Proposition: P_S r₀ = 0)
    exact = torch.linalg.lstsq(system, b).solution
    assert (S @ state.factor.solve(S.T @ (system @ (exact - v)))).norm() < 1e-8 * exact.norm()  # P̂_S (v − v₀) = 0


def test_with_eigenvectors_as_actions_and_no_noise_the_total_variance_is_tr_k_less_tr_m() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(12, 1, generator=generator, dtype=torch.float64)
    kernel = RBF(lengthscale=0.3, outputscale=2.0)
    K = kernel(X, X)
    vectors = torch.linalg.eigh(K).eigenvectors[:, [11, 9, 8]]  # a subset, not the largest in a row
    likelihood = Gaussian(1e-13)  # (A1): W⁻¹ = 0, as near as a noise can be
    problem = Problem(GramPrior([kernel], X, torch.zeros(1)), likelihood, torch.zeros(12, 1, dtype=torch.float64))
    start = initial_state(problem, seed=0, capacity=3)
    run = newton(start, lambda state: vectors, Stopping(max_products=3, residual_tol=0.0), NewtonOptions())
    states, _, _ = exhaust(run)
    variance = Posterior(states[0]).latent(X)[1].sum()
    M = states[0].gram + states[0].noise_gram
    torch.testing.assert_close(variance, K.trace() - M.trace(), rtol=1e-9, atol=1e-9)
    assert variance < 0.5 * K.trace()

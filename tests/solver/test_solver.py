"""The solver against the dense truth: exact when all actions are taken, never over-confident before."""

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from ntk_iterncgp import kernels
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.linalg.columns import Buffer, DenseColumns
from ntk_iterncgp.posterior.function_space import Posterior
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver import (
    Problem,
    RandomSubspace,
    State,
    Status,
    Unit,
    initial_state,
    newton,
    refine,
    resolve_policy,
)
from ntk_iterncgp.solver.inner import inner_loop
from ntk_iterncgp.solver.stopping import NewtonOptions, Stopping
from tests import oracles
from tests.cases import POLICIES, PRECISE, Case, exhaust, make_case, solve

LIKELIHOODS = oracles.LIKELIHOODS


def joint(state: State, case: Case) -> tuple[Tensor, Tensor]:
    """Mean and covariance at the new inputs, flat."""
    x = case.new_inputs if not case.new_inputs.is_floating_point() else case.new_inputs.to(state.buffer.images.dtype)
    mean, covariance = Posterior(state).latent(x, joint=True)
    return mean.flatten(), covariance


def inner_states(start: State, policy: str, num_products: int) -> list[State]:
    """The states of one linear system, without a stop before the budget."""
    return exhaust(inner_loop(start, resolve_policy(policy), max_products=num_products, residual_tol=0.0))[0]


def at_random_point(case: Case, seed: int, scale: float = 1.0) -> State:
    """The linear system at a point that is not the mode: g = K v for a random v in the range of W."""
    state = case.start()
    generator = torch.Generator().manual_seed(seed)
    v = state.problem.project(torch.randn(case.num_rows, generator=generator, dtype=torch.float64)) * scale
    return state.linearise(replace(state.iterate, representer_weights=v, offset=case.K @ v))


# --- 1. all actions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prior", ["kernels", "network"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_with_all_actions_mean_and_covariance_equal_the_dense_oracle(name: str, prior: str, policy: str) -> None:
    case = make_case(name, prior)
    _, state, _ = solve(case, policy)
    if policy != "unit":  # where the mean is solved before all actions are taken, take the others too
        _, state, _ = exhaust(refine(state, resolve_policy(policy), Stopping(**PRECISE), NewtonOptions()))
    mean, covariance = joint(state, case)
    exact_mean, exact_covariance = case.exact()
    torch.testing.assert_close(mean, exact_mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(covariance, exact_covariance, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["softmax", "gaussian"])
def test_kronecker_actions_lead_to_the_same_posterior(name: str) -> None:
    case = make_case(name, "shared", num_classes=4)
    _, state, _ = solve(case, kronecker=True)
    _, state, _ = exhaust(refine(state, resolve_policy("curvature_residual"), Stopping(**PRECISE), NewtonOptions()))
    mean, covariance = joint(state, case)
    exact_mean, exact_covariance = case.exact()
    torch.testing.assert_close(mean, exact_mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(covariance, exact_covariance, rtol=0, atol=1e-8)


def test_with_correlated_outputs_the_pseudo_inverse_alone_would_be_wrong() -> None:
    """Why actions are zero-sum: the paper's (K + W⁺)⁻¹ conditions on Σ_c f_c, about which the data say nothing."""
    case = make_case("softmax", "network")
    latent, _ = oracles.mode("softmax", case.K, case.m, case.targets)
    noise = oracles.noise_matrix("softmax", latent)
    papers = case.Kxx - case.Kx @ torch.linalg.solve(case.K + noise, case.Kx.T)
    exact = case.exact()[1]
    assert (exact - papers).diagonal().max() > 0.05 * exact.diagonal().max()


# --- 2. the guarantee -------------------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(LIKELIHOODS),
    prior=st.sampled_from(["kernels", "shared", "network"]),
    policy=st.sampled_from(POLICIES),
    num_data=st.integers(2, 12),
    num_classes=st.integers(2, 5),
    log_scale=st.floats(-3, 3),
    seed=st.integers(0, 2**16),
)
def test_variance_never_falls_below_the_exact_one_and_never_rises(
    name: str, prior: str, policy: str, num_data: int, num_classes: int, log_scale: float, seed: int
) -> None:
    """At a fixed linear system, at every rank: the whole covariance, of which variances are the diagonal."""
    scale = 10**log_scale
    case = make_case(name, prior, num_data=num_data, num_classes=num_classes, scale=scale, seed=seed)
    start = at_random_point(case, seed, scale=min(1.0, 1 / scale))
    exact = case.exact_covariance_at(start.latent)
    tolerance = 1e-8 * max(1.0, scale)
    previous = joint(start, case)[1]
    torch.testing.assert_close(previous, case.Kxx, rtol=1e-12, atol=1e-12)
    for state in inner_states(start, policy, num_products=3 * case.num_rows):
        covariance = joint(state, case)[1]
        assert torch.linalg.eigvalsh(covariance - exact).min() >= -tolerance
        assert torch.linalg.eigvalsh(previous - covariance).min() >= -tolerance
        previous = covariance


@given(num_data=st.integers(3, 10), num_classes=st.integers(3, 5), seed=st.integers(0, 2**16))
def test_kronecker_actions_keep_the_guarantee(num_data: int, num_classes: int, seed: int) -> None:
    case = make_case("softmax", "shared", num_data=num_data, num_classes=num_classes, seed=seed)
    start = case.start(kronecker=True)
    exact, previous = case.exact_covariance_at(start.latent), case.Kxx
    for state in inner_states(start, "curvature_residual", num_products=num_data):
        covariance = joint(state, case)[1]
        assert torch.linalg.eigvalsh(covariance - exact).min() >= -1e-8
        assert torch.linalg.eigvalsh(previous - covariance).min() >= -1e-8
        previous = covariance
        mean, variance = Posterior(state).marginals(case.new_inputs)
        assert (variance.flatten() - exact.diagonal()).min() >= -1e-8
        torch.testing.assert_close(variance.flatten(), covariance.diagonal(), rtol=0, atol=1e-9)
        torch.testing.assert_close(mean, Posterior(state).latent(case.new_inputs)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kronecker", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_marginals_are_the_diagonal_of_the_covariance_where_small_matrices_are_nearly_singular(
    dtype: torch.dtype, kronecker: bool
) -> None:
    """A smooth kernel, each datum twice, and variances of 10⁴."""
    kernel = kernels.RBF(lengthscale=3.0, outputscale=1e4)
    X = torch.linspace(0, 1, 20, dtype=dtype).repeat(2)[:, None]
    labels, x = torch.arange(40) % 3, torch.linspace(-0.5, 1.5, 30, dtype=dtype)[:, None]
    prior = GramPrior([kernel], X, torch.zeros(3))
    start = initial_state(Problem(prior, Softmax(3), labels), seed=0, capacity=4, kronecker=kronecker)
    options, stopping = NewtonOptions(), Stopping(30, 5, 6, 0.0)
    for state in exhaust(newton(start, resolve_policy("curvature_residual"), stopping, options))[0]:
        (mean, variance), (full_mean, covariance) = Posterior(state).marginals(x), Posterior(state).latent(x)
        torch.testing.assert_close(mean, full_mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(variance, covariance.diagonal(dim1=1, dim2=2), rtol=0, atol=1e-8)


def test_without_actions_marginals_are_those_of_the_prior() -> None:
    case = make_case("softmax", "shared")
    for kronecker in (False, True):
        mean, variance = Posterior(case.start(kronecker=kronecker)).marginals(case.new_inputs)
        torch.testing.assert_close(mean.flatten(), case.mx)
        torch.testing.assert_close(variance.flatten(), case.Kxx.diagonal())


@pytest.mark.parametrize("max_rank", [3, 8, 20])
@pytest.mark.parametrize("compression", ["mean+trace", "eigen"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_guarantee_holds_through_newton_recycling_and_compression(
    name: str, compression: str, max_rank: int
) -> None:
    case = make_case(name, "network", num_data=20)
    states, _, _ = solve(
        case,
        options=NewtonOptions(max_rank=max_rank, compression=compression),
        max_products=40,
        products_per_step=5,
        newton_tol=1e-3,
    )
    for state in states:
        slack = joint(state, case)[1] - case.exact_covariance_at(state.latent)
        assert torch.linalg.eigvalsh(slack).min() >= -1e-8


@pytest.mark.parametrize("policy", POLICIES)
def test_float32_storage_keeps_the_guarantee_to_its_rounding(policy: str) -> None:
    case = make_case("softmax", "network", num_data=20, scale=30.0)
    states, _, _ = solve(case, policy, dtype=torch.float32, max_products=60, products_per_step=10, newton_tol=1e-2)
    for state in states:
        variance = joint(state, case)[1].diagonal()
        exact = case.exact_covariance_at(state.latent).diagonal()
        assert (variance >= exact * (1 - 1e-4)).all()


def test_results_do_not_depend_on_the_scale_of_actions() -> None:
    case = make_case("softmax", "network")

    def scaled(factor: float) -> State:
        policy = resolve_policy("curvature_residual")
        run = inner_loop(case.start(), lambda s: factor * policy(s), max_products=6, residual_tol=0.0)
        return exhaust(run)[1]

    torch.testing.assert_close(joint(scaled(1e6), case)[1], joint(scaled(1e-6), case)[1], rtol=0, atol=1e-10)


# --- 3. special cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson"])
def test_residual_actions_are_textbook_conjugate_gradients(name: str) -> None:
    case = make_case(name, "network")
    start = at_random_point(case, seed=1)
    noisy = case.K + oracles.noise_matrix(name, start.latent, noise=case.noise)
    b = start.iterate.offset + oracles.noise_matrix(name, start.latent, noise=case.noise) @ oracles.score(
        name, start.latent, case.targets, noise=case.noise
    )
    iterates = oracles.conjugate_gradients(noisy, b, 6)
    for j, state in enumerate(inner_states(start, "residual", num_products=6), start=1):
        torch.testing.assert_close(state.solution.representer_weights, iterates[j], rtol=1e-6, atol=1e-8)


def test_unit_actions_are_the_exact_gp_on_a_subset() -> None:
    """For classification: the first 7 data with all their contrasts, at the curvature of the given point."""
    case = make_case("softmax", "network")
    start = at_random_point(case, seed=2)
    subset, rows = 7, 7 * 3
    state = inner_states(start, "unit", num_products=subset * 2)[-1]
    exact = oracles.posterior_at("softmax", start.latent[:subset], case.K[:rows, :rows], case.Kx[:, :rows], case.Kxx)
    torch.testing.assert_close(joint(state, case)[1], exact, rtol=0, atol=1e-9)


def test_unit_actions_go_on_where_they_stopped_after_recycling() -> None:
    case = make_case("bernoulli", "network", num_data=12)
    states, state, _ = solve(case, "unit", products_per_step=4, max_newton_steps=3, newton_tol=0.0)
    touched = state.buffer.actions.rows(slice(0, 12)).squeeze(1)
    torch.testing.assert_close(touched.abs(), torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-12)
    assert [s.buffer.size for s in states][-2] == 12


@pytest.mark.parametrize("policy", POLICIES)
def test_gaussian_likelihood_takes_one_newton_step_and_equals_the_closed_form(policy: str) -> None:
    case = make_case("gaussian", "kernels")
    _, state, _ = solve(case, policy)
    mean, covariance, _ = oracles.exact_gp_regression(
        case.K, case.Kx, case.Kxx, case.m, case.mx, case.targets.flatten(), case.noise
    )
    assert state.newton_step == 1
    torch.testing.assert_close(joint(state, case)[0], mean, rtol=0, atol=1e-8)
    if policy == "unit":
        torch.testing.assert_close(joint(state, case)[1], covariance, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "softmax"])
def test_recycling_with_enough_room_changes_nothing(name: str) -> None:
    case = make_case(name, "network")
    budget = dict(max_products=15, products_per_step=3, newton_tol=0.0, max_newton_steps=8)
    _, kept, _ = solve(case, **budget)
    _, recycled, _ = solve(case, options=NewtonOptions(max_rank=15), **budget)
    torch.testing.assert_close(joint(recycled, case), joint(kept, case), rtol=0, atol=0)


def test_a_callable_is_a_policy() -> None:
    case = make_case("softmax", "network")
    seen = []

    def everything_at_once(state: State) -> Tensor:
        seen.append(state.buffer.size)
        return torch.eye(case.num_rows, dtype=torch.float64)

    _, state, _ = solve(case, everything_at_once)
    assert state.buffer.size == case.num_data * 2 and seen[0] == 0
    torch.testing.assert_close(joint(state, case)[1], case.exact()[1], rtol=0, atol=1e-8)


def test_an_unknown_policy_is_named_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"`policy` must be one of 'unit', .*got 'magic'"):
        resolve_policy("magic")


# --- 4. what it costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["unit", "residual", "curvature_residual"])
@pytest.mark.parametrize("prior", ["kernels", "network"])
def test_each_action_costs_one_product_and_nothing_else_costs_any(prior: str, policy: str) -> None:
    case = make_case("softmax", prior)
    states, state, _ = solve(case, policy, max_products=17, products_per_step=4, newton_tol=0.0, max_newton_steps=9)
    assert state.newton_step > 5 and state.num_products == 17 == state.buffer.size
    Posterior(state).log_evidence()
    Posterior(state).elbo()
    assert state.problem.prior.num_products == 17
    for before, after in pairwise(states):
        assert after.num_products - before.num_products == after.buffer.size - before.buffer.size <= 1


def test_compression_costs_no_product() -> None:
    case = make_case("softmax", "network")
    _, state, _ = solve(
        case,
        options=NewtonOptions(max_rank=5),
        max_products=17,
        products_per_step=4,
        newton_tol=0.0,
        max_newton_steps=9,
    )
    assert state.problem.prior.num_products == 17 and state.buffer.size == 5


def test_power_steps_of_random_probes_are_counted() -> None:
    case = make_case("bernoulli", "network", num_data=30)
    _, state, status = solve(case, RandomSubspace(block_size=4, power_steps=1), max_products=16, products_per_step=8)
    assert state.num_products == 16 and state.buffer.size == 8 and status is Status.BUDGET


@pytest.mark.parametrize("num_classes", [3, 6])
def test_a_kronecker_product_gives_many_actions(num_classes: int) -> None:
    case = make_case("softmax", "shared", num_data=60, num_classes=num_classes)
    state = inner_states(case.start(kronecker=True), "curvature_residual", num_products=2)[-1]
    assert state.num_products == 2
    assert state.buffer.size == 2 * (num_classes - 1) ** 2  # a zero-sum residual has C − 1 independent classes


def test_dependent_actions_are_dropped_and_cost_nothing() -> None:
    case = make_case("bernoulli", "network")
    ones = torch.ones(case.num_rows, 1, dtype=torch.float64)
    repeated = torch.cat([ones, 2 * ones, 0 * ones, torch.eye(case.num_rows, 1, dtype=torch.float64)], 1)
    state, status = exhaust(inner_loop(case.start(), lambda s: repeated, max_products=10, residual_tol=0.0))[1:]
    assert state.num_products == 2 == state.buffer.size and status is Status.EXHAUSTED


def test_the_budget_is_never_exceeded_by_a_block() -> None:
    case = make_case("bernoulli", "network", num_data=30)
    _, state, status = solve(case, Unit(block_size=8), max_products=13, products_per_step=5, newton_tol=0.0)
    assert state.num_products == 13 and status is Status.BUDGET


# --- refining ---------------------------------------------------------------------------------------------------------


def test_refining_spends_its_budget_and_contracts_the_variance() -> None:
    case = make_case("softmax", "network", num_data=30)
    _, state, _ = solve(case, max_products=20, products_per_step=5, newton_tol=1e-2)
    before = joint(state, case)[1].diagonal()
    budget = Stopping(max_products=12, products_per_step=5)
    _, refined, _ = exhaust(refine(state, resolve_policy("curvature_residual"), budget, NewtonOptions()))
    assert refined.num_products == state.num_products + 12
    assert joint(refined, case)[1].diagonal().sum() < before.sum()


def test_refining_past_the_last_action_says_exhausted() -> None:
    case = make_case("bernoulli", "network", num_data=8)
    _, state, _ = solve(case)
    _, refined, status = exhaust(refine(state, resolve_policy("unit"), Stopping(max_products=50), NewtonOptions()))
    assert refined.buffer.size == 8 and status is Status.EXHAUSTED


# --- the state --------------------------------------------------------------------------------------------------------


def test_small_matrices_agree_with_the_tall_ones() -> None:
    case = make_case("softmax", "kernels")
    _, state, _ = solve(case, max_products=9, products_per_step=3, newton_tol=0.0, max_newton_steps=4)
    S = state.buffer.actions.rows(slice(0, case.num_data)).flatten(0, 1)
    noise = oracles.noise_matrix("softmax", state.latent)
    torch.testing.assert_close(state.gram, S.T @ case.K @ S, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state.noise_gram, S.T @ noise @ S, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(S.T @ S, torch.eye(9, dtype=torch.float64), rtol=0, atol=1e-12)
    sums = S.reshape(case.num_data, 3, 9).sum(1)
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-13)


def test_the_residual_has_no_part_in_the_span_of_the_actions() -> None:
    """After a virtual solver run the solution within the span is already found."""
    case = make_case("poisson", "network")
    _, state, _ = solve(case, max_products=9, products_per_step=3, newton_tol=0.0, max_newton_steps=4)
    S = state.buffer.actions.rows(slice(0, case.num_data)).flatten(0, 1)
    assert (S.T @ state.residual).abs().max() <= 1e-10 * state.right_hand_side.norm()


def test_curvature_residual_is_the_residual_seen_through_the_curvature() -> None:
    case = make_case("softmax", "network")
    _, state, _ = solve(case, max_products=9, products_per_step=3, newton_tol=0.0, max_newton_steps=4)
    W = oracles.curvature_matrix("softmax", state.latent)
    torch.testing.assert_close(state.curvature_residual, W @ state.residual, rtol=0, atol=1e-10)


def test_extending_a_state_leaves_the_earlier_one_as_it_was() -> None:
    case = make_case("bernoulli", "network")
    states = inner_states(case.start(capacity=20), "curvature_residual", num_products=5)
    fresh = inner_states(case.start(capacity=20), "curvature_residual", num_products=3)[-1]
    torch.testing.assert_close(joint(states[2], case), joint(fresh, case), rtol=0, atol=0)


def test_a_buffer_of_given_actions_equals_solving_with_them() -> None:
    case = make_case("bernoulli", "network")
    start = case.start()
    actions = start.propose(torch.eye(case.num_rows, dtype=torch.float64)[:, :4])
    assert isinstance(actions, DenseColumns)
    state = start.extend(Buffer(actions, start.problem.prior.image(actions)))
    torch.testing.assert_close(joint(state, case), joint(inner_states(start, "unit", 4)[-1], case), rtol=0, atol=1e-12)

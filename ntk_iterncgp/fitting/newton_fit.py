"""A network fit by products with the NTK: the solver and its policies, on the prior of a linearised network."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ntk_iterncgp.fitting.drive import Budget, Trajectory, drive
from ntk_iterncgp.fitting.network import (
    ADVICE,
    MORE,
    PRODUCT_EPOCHS,
    LinearisedNetwork,
    NetworkFit,
    NetworkSettings,
)
from ntk_iterncgp.fitting.network_check import check_posterior, checked_targets
from ntk_iterncgp.fitting.self_check import checked
from ntk_iterncgp.fitting.solver_run import SolverRun, Steps, solver_report
from ntk_iterncgp.likelihoods.base import CurvatureAt, Likelihood
from ntk_iterncgp.likelihoods.output_noise import OutputNoise
from ntk_iterncgp.persistence.checkpoint import CheckpointSession
from ntk_iterncgp.persistence.fingerprint import checked_digests, data_digests, data_fingerprint
from ntk_iterncgp.posterior.weight_space import WeightPosterior
from ntk_iterncgp.priors.ntk import NetworkImages, NTKPrior, sweep_outputs
from ntk_iterncgp.solver.inner import inner_loop
from ntk_iterncgp.solver.newton import initial_state, newton, refine
from ntk_iterncgp.solver.policies import RandomSubspace
from ntk_iterncgp.solver.problem import Anchor, Problem
from ntk_iterncgp.solver.recycling import compress
from ntk_iterncgp.solver.state import State
from ntk_iterncgp.solver.stopping import Position, Status

ROUNDINGS = 4  # of a sum over all data, in units of eps: a slice of rows at a time, each by pairs


def fit_by_products(
    network: LinearisedNetwork,
    settings: NetworkSettings,
    *,
    progress_bar: bool,
    session: CheckpointSession | None = None,
) -> NetworkFit:
    """One action per product with the NTK, from the outputs of the network."""
    outputs, targets = sweep_outputs(network.jacobian, network.data)
    noise_scale = float(network.noise_scale)
    likelihood = network.likelihood
    if isinstance(likelihood, OutputNoise):
        likelihood = likelihood.scaled(noise_scale)
    targets = checked_targets(likelihood, outputs, targets)
    prior_precision = network.weight_precision
    if network.classification:  # tempering the likelihood by T is the same as multiplying the prior precision by T
        prior_precision = noise_scale * prior_precision
    refined = settings.mean == "refined"
    stays = likelihood.is_quadratic or not refined
    num_products = settings.stopping.max_products if stays else settings.stopping.products_per_step
    prior = NTKPrior(
        network.jacobian,
        network.data,
        outputs,
        prior_precision,
        shift=network.shift if refined else None,
        chunk_bytes=settings.chunk_bytes,
        num_calls=2 * num_products * len(network.data),
        curvature_stays=stays,
    )
    anchor = None
    if refined:
        anchor = Anchor(
            (outputs.double() - prior.mean).flatten(), float(prior_precision.double() @ network.shift.double() ** 2)
        )
    problem = Problem(prior, likelihood, targets, anchor, whitened=network.classification and not refined)
    capacity = min(settings.stopping.max_products, problem.curvature_rank)
    start = initial_state(problem, seed=settings.seed, capacity=capacity)
    digests = checked_digests(session, network.data)
    run = SolverRun(lambda state: _run(state, settings), start, settings.stopping.max_products, digests)
    trajectory = drive(run, start, progress_bar=progress_bar, session=session)
    seen = data_fingerprint(data_digests(network.data) if digests is None else digests)
    return _finish(trajectory, network, settings, seen)


def refine_by_products(
    fitted: NetworkFit,
    network: LinearisedNetwork,
    settings: NetworkSettings,
    budget: Budget,
    *,
    progress_bar: bool,
    session: CheckpointSession | None = None,
) -> NetworkFit:
    """More products from where the last run stopped."""
    state, report = _with_data(fitted.state, network), fitted.report
    products = 10**9 if budget.epochs is None else max(1, round(min(budget.epochs, 1e9) / PRODUCT_EPOCHS))
    left = state.problem.curvature_rank - state.buffer.size
    stopping = replace(settings.stopping, max_products=max(1, min(products, left)))
    more, digests = replace(settings, stopping=stopping), checked_digests(session, network.data)
    run = SolverRun(lambda state: _run(state, more, go_on=True), state, stopping.max_products, digests)
    trajectory = drive(
        run,
        state,
        budget=Budget(seconds=budget.seconds),  # epochs are counted in products
        history=report.history,
        seconds=report.seconds,
        progress_bar=progress_bar,
        session=session,
    )
    return _finish(trajectory, network, more, fitted.data_seen)


def _with_data(state: object, network: LinearisedNetwork) -> State:
    """The state with its sweeps going over the data at hand, which must be those of the fit."""
    assert isinstance(state, State)
    prior = state.problem.prior
    assert isinstance(prior, NTKPrior)
    prior.jacobian, prior.data = network.jacobian, network.data
    return state


def _run(state: State, settings: NetworkSettings, *, go_on: bool = False) -> Steps:
    if settings.mean == "refined":
        return _refined_run(state, settings, go_on)
    return _linear_run(state, settings)


def _finish(
    trajectory: Trajectory[State], network: LinearisedNetwork, settings: NetworkSettings, data_seen: Tensor
) -> NetworkFit:
    """Check the last state, mend or refuse it, and make the posterior of it."""
    report = solver_report(trajectory)
    ascends = settings.mean == "refined" and settings.options.keeps_mean and network.classification
    state = checked(trajectory.state, report.history, ascends=ascends)
    posterior = check_posterior(
        _weight_posterior(state, network, settings.mean == "refined"), network.prior_precision, network.noise_scale
    )
    report = replace(
        report,
        advice=ADVICE.get(Status(report.status), MORE),
        history=[replace(record, epochs=_epochs(record.num_products)) for record in report.history],
        num_products=state.problem.prior.num_products,  # with those that mending took
        epochs=_epochs(state.problem.prior.num_products),
        trace_is_exact=posterior.trace_is_exact,
    )
    loss = _loss(state, network.likelihood, settings.mean == "refined")
    num_data, num_outputs = state.latent.shape
    return NetworkFit(posterior, loss, num_data, num_outputs, report, state, network.first_batch, data_seen)


def _epochs(num_products: int) -> float:
    return 1 / 3 + PRODUCT_EPOCHS * num_products


def _loss(state: State, likelihood: Likelihood, refined: bool) -> float:
    """−log p(y | f) for unit noise without constants.

    Of a refined regression ½ rᵀWr, what bᵀ(K + W⁺)⁻¹b has at most beyond the span of the actions: the rest depends on
    the prior, and is computed where the evidence is.
    """
    if not isinstance(likelihood, OutputNoise):
        return -state.problem.log_prob(state.latent)
    missed = state.residual.view_as(state.latent) if refined else state.problem.targets - state.latent
    return likelihood.misfit(missed)


def _linear_run(state: State, settings: NetworkSettings) -> Steps:
    """One linear system at the network's outputs: all products go into the variance."""
    prior, resumed = state.problem.prior, state.position is not None
    at = state.position or Position(prior.num_products + settings.stopping.max_products)
    status, policies = Status.EXHAUSTED, (settings.product_policy, RandomSubspace())
    for stage in range(at.stage, len(policies)):
        left, is_first = at.limit - prior.num_products, resumed and stage == at.stage
        if is_first or (status is Status.EXHAUSTED and left > 0):
            state = state.with_counters(position=replace(at, stage=stage))
            state, status = yield from inner_loop(state, policies[stage], max_products=left, residual_tol=0.0)
    max_rank = settings.options.max_rank
    if max_rank is not None and state.buffer.size > max_rank:
        state = replace(compress(state, max_rank, settings.options.compression), position=None)
        yield state
    return state, status


def _refined_run(state: State, settings: NetworkSettings, go_on: bool) -> Steps:
    """Newton to the mode, then what is left of the products into the variance."""
    prior, at = state.problem.prior, state.position
    limit = prior.num_products + settings.stopping.max_products if at is None else at.limit
    is_refining, status = at is not None and at.stage > 0, Status.CONVERGED
    if not go_on and not is_refining:
        state, status = yield from newton(state, settings.product_policy, settings.stopping, settings.options)
    left = limit - prior.num_products
    if left > 0 or is_refining:
        rest = replace(settings.stopping, max_products=max(1, left))
        state, status = yield from refine(state, settings.product_policy, rest, settings.options)
    return state, status


def _weight_posterior(state: State, network: LinearisedNetwork, refined: bool) -> WeightPosterior:
    noise_scale = 1.0 if network.classification else float(network.noise_scale)
    prior, images = state.problem.prior, state.buffer.images
    assert isinstance(prior, NTKPrior) and isinstance(images, NetworkImages)
    capacity = len(images.weights.storage)
    diagonal = prior.curvature_diagonal(CurvatureAt(state.problem.likelihood, state.latent))
    posterior = WeightPosterior(
        images=images.weights.matrix.clone() if images.size < capacity else images.weights.matrix,
        noise_gram=(_with_rounding(state.noise_gram) if refined else state.noise_gram) / noise_scale,
        right_hand_side=torch.zeros_like(state.iterate.coefficients),
        anchor_share=state.iterate.anchor_share,
        prior_mean=network.prior_mean.detach().reshape(-1).clone(),
        curvature_diagonal=diagonal * noise_scale,
        curvature_rank=state.problem.curvature_rank,
        layer_sizes=network.layer_sizes,
        trace_is_exact=prior.trace_is_exact,
    )
    if not refined:
        return posterior
    return replace(posterior, right_hand_side=_right_hand_side(posterior, state, network))


def _with_rounding(noise_gram: Tensor) -> Tensor:  # (B, B)
    """SᵀW⁺S with what its sums may have lost to rounding, which is eps √(R_bb R_cc) in each entry.

    Actions of an earlier Newton step are nearly dependent where data have become saturated since: there R is no more
    than rounding, need not be positive definite, and would pass for information.
    """
    rounding = ROUNDINGS * len(noise_gram) * torch.finfo(torch.float64).eps
    return noise_gram + (rounding * noise_gram.diagonal()).diag()


def _right_hand_side(posterior: WeightPosterior, state: State, network: LinearisedNetwork) -> Tensor:  # (B,)
    """M w, with the very M by which predictions will divide, so that their mean is Newton's point."""
    factor = posterior.factor(network.prior_precision, network.noise_scale)
    w = state.iterate.coefficients / factor.scale
    product: Tensor = factor.lower @ (factor.lower.T @ w) / factor.scale
    # The solver has tempered the prior instead of the likelihood: its M is smaller by T.
    return product / network.noise_scale.double() if network.classification else product

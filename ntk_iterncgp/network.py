"""Fitting a linearised network: from a Jacobian and data to a `WeightPosterior`, by the same solver as any other prior.

mean="network"   The predictive mean is the network's own output. W is taken there, and there is one linear system.
mean="refined"   Newton's method, from the network's outputs to the mode of the linearised model under the given prior.
                 Actions are recycled from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ntk_iterncgp.data import FixedOrderData
from ntk_iterncgp.likelihoods import Gaussian, Likelihood, Softmax
from ntk_iterncgp.priors.jacobian import NetworkJacobian
from ntk_iterncgp.priors.ntk import NetworkImages, NTKPrior, sweep_outputs
from ntk_iterncgp.solver import (
    Anchor,
    NewtonOptions,
    Policy,
    Problem,
    RandomSubspace,
    Status,
    Stopping,
    compress,
    initial_state,
    newton,
    refine,
)
from ntk_iterncgp.solver.inner import inner_loop
from ntk_iterncgp.solver.report import FitReport, Run, drive
from ntk_iterncgp.solver.state import State
from ntk_iterncgp.weight_posterior import WeightPosterior

MEANS = ("network", "refined")


@dataclass(frozen=True)
class NetworkSettings:
    """How to fit; none of it changes what is being fitted."""

    mean: str
    policy: Policy
    stopping: Stopping
    options: NewtonOptions
    chunk_bytes: int
    seed: int


@dataclass(frozen=True, eq=False)
class NetworkFit:
    """What a fit gives: the posterior, the loss −log p(y | f) for unit noise without constants, and the report."""

    posterior: WeightPosterior
    loss: float
    num_data: int
    num_outputs: int
    report: FitReport


def fit_network(
    jacobian: NetworkJacobian,
    data: FixedOrderData,
    classification: bool,
    *,
    prior_precision: Tensor,  # (P,)
    noise_scale: float,
    shift: Tensor,  # θ* − μ₀ (P,)
    prior_mean: Tensor,  # μ₀, (1,) or (P,)
    layer_sizes: tuple[int, ...],
    settings: NetworkSettings,
    progress_bar: bool = False,
) -> NetworkFit:
    """`noise_scale` is τ = σ²·T: it scales the noise of a Gaussian likelihood, and stands for temperature otherwise."""
    outputs, targets = sweep_outputs(jacobian, data)
    likelihood = _likelihood(classification, outputs, noise_scale)
    targets = _checked_targets(likelihood, outputs, targets)
    if classification:  # tempering the likelihood by T is the same as multiplying the prior precision by T
        prior_precision = noise_scale * prior_precision
    refined = settings.mean == "refined"
    prior = NTKPrior(
        jacobian,
        data,
        outputs,
        prior_precision,
        shift=shift if refined else None,
        chunk_bytes=settings.chunk_bytes,
    )
    anchor = None
    if refined:
        anchor = Anchor(
            (outputs.double() - prior.mean).flatten(), float(prior_precision.double() @ shift.double() ** 2)
        )
    problem = Problem(prior, likelihood, targets, anchor)
    capacity = min(settings.stopping.max_products, problem.curvature_rank)
    start = initial_state(problem, seed=settings.seed, capacity=capacity)
    run = _refined_run(start, settings) if refined else _linear_run(start, settings)
    state, report = drive(
        run,
        start,
        max_products=settings.stopping.max_products,
        progress_bar=progress_bar,
        callback=None,
        history=[],
    )
    posterior = _weight_posterior(state, layer_sizes, prior_mean, refined, 1.0 if classification else noise_scale)
    report = replace(report, advice=_advice(report.status))
    return NetworkFit(posterior, _loss(state, classification, refined), len(outputs), outputs.shape[1], report)


def _loss(state: State, classification: bool, refined: bool) -> float:
    """−log p(y | f) for unit noise without constants. For a refined mean it is that of the Gaussian to which the
    likelihood is expanded, less its quadratic part, −log p − ½∇ᵀW⁺∇: the rest, bᵀ(K + W⁺)⁻¹b, depends on the prior."""
    problem = state.problem
    if not classification:
        return 0.0 if refined else 0.5 * float((state.latent - problem.targets).square().sum())
    loss = -problem.log_prob(state.latent)
    return loss - 0.5 * float(state.score @ problem.noise(state.latent, state.score)) if refined else loss


def _advice(status: str) -> str:
    if status == Status.EXHAUSTED:
        return "There is no new action: all that the data say has been used."
    if status == Status.NEWTON_STEPS:
        return "The mean had not converged when the Newton steps ran out. Use more actions per step."
    return "More actions (num_actions=…) contract the variance further."


def _linear_run(state: State, settings: NetworkSettings) -> Run:
    """One linear system at the network's outputs: all products go into the variance."""
    prior = state.problem.prior
    limit = prior.num_products + settings.stopping.max_products
    status = Status.EXHAUSTED
    for policy in (settings.policy, RandomSubspace()):
        left = limit - prior.num_products
        if status is Status.EXHAUSTED and left > 0:
            state, status = yield from inner_loop(state, policy, max_products=left, residual_tol=0.0)
    max_rank = settings.options.max_rank
    if max_rank is not None and state.buffer.size > max_rank:
        state = compress(state, max_rank, settings.options.compression)
        yield state
    return state, status


def _refined_run(state: State, settings: NetworkSettings) -> Run:
    """Newton to the mode, then what is left of the products into the variance."""
    prior = state.problem.prior
    limit = prior.num_products + settings.stopping.max_products
    state, status = yield from newton(state, settings.policy, settings.stopping, settings.options)
    left = limit - prior.num_products
    if left > 0:
        rest = replace(settings.stopping, max_products=left)
        state, status = yield from refine(state, settings.policy, rest, settings.options)
    return state, status


def _weight_posterior(
    state: State, layer_sizes: tuple[int, ...], prior_mean: Tensor, refined: bool, noise_scale: float
) -> WeightPosterior:
    prior, images = state.problem.prior, state.buffer.images
    assert isinstance(prior, NTKPrior) and isinstance(images, NetworkImages)
    capacity = len(images.weights.storage)
    matrix = state.gram + state.noise_gram
    matrix.diagonal().add_(state.rounding)
    right_hand_side = matrix @ state.iterate.coefficients
    diagonal = prior.curvature_diagonal(*state.problem.curvature_products(state.latent))
    return WeightPosterior(
        images=images.weights.matrix.clone() if images.size < capacity else images.weights.matrix,
        noise_gram=state.noise_gram / noise_scale,
        right_hand_side=right_hand_side if refined else torch.zeros_like(right_hand_side),
        anchor_share=state.iterate.anchor_share,
        prior_mean=prior_mean.detach().reshape(-1).clone(),
        curvature_diagonal=diagonal * noise_scale,
        curvature_rank=state.problem.curvature_rank,
        layer_sizes=layer_sizes,
        trace_is_exact=prior.trace_is_exact,
    )


def _likelihood(classification: bool, outputs: Tensor, noise_scale: float) -> Likelihood:
    if not bool(torch.isfinite(outputs).all()):
        bad = int((~torch.isfinite(outputs)).any(1).sum())
        raise ValueError(
            f"The model is expected to return finite outputs, but {bad} of {len(outputs)} training inputs gave NaN or "
            "infinity. Check its weights and the scale of its inputs."
        )
    return Softmax(outputs.shape[1]) if classification else Gaussian(noise_scale, num_outputs=outputs.shape[1])


def _checked_targets(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    if len(targets) != len(outputs):
        raise ValueError(f"Expected one target for each of the {len(outputs)} training inputs, but got {len(targets)}.")
    if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
        raise ValueError("Expected finite targets, but they hold NaN or infinity. Remove those data.")
    return likelihood.check_targets(targets)

"""Running `clusters` on a user's behalf: one forward sweep, the groups, one backward sweep; then as many as are asked.

The meter needs tr(W K), which is known before the backward sweep begins, so it can be read on the way. Stopped at any
time, by Ctrl-C or by a budget, the posterior is that of the data swept so far, and `refine` goes on with the rest.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ntk_iterncgp.data import Inputs
from ntk_iterncgp.interrupt import Interrupt, interruptible
from ntk_iterncgp.network.clusters import Clusters, Pass, sweep_features
from ntk_iterncgp.network.grouping import Sketch, last_features
from ntk_iterncgp.network.linearised import (
    Budget,
    LinearisedNetwork,
    NetworkFit,
    NetworkSettings,
    advice_after,
    checked_targets,
)
from ntk_iterncgp.priors.jacobian import Jacobian
from ntk_iterncgp.priors.ntk import NTKPrior
from ntk_iterncgp.solver.report import FitReport, Record
from ntk_iterncgp.solver.stopping import Status
from ntk_iterncgp.weight_posterior import WeightPosterior

METER_READINGS = 2  # in the first sweep: each costs P·B² operations


@dataclass(eq=False)
class Progress:
    """Where a fit stands."""

    clusters: Clusters
    curvature_diagonal: Tensor  # of JᵀWJ (P,)
    trace_is_exact: bool
    epochs: float
    seconds: float
    history: list[Record] = field(default_factory=list)


def fit_by_clusters(network: LinearisedNetwork, settings: NetworkSettings, *, progress_bar: bool) -> NetworkFit:
    started = time.perf_counter()
    clusters = _look(network, settings, progress_bar)
    prior = NTKPrior(
        network.jacobian,
        network.data,
        clusters.outputs,
        network.weight_precision,
        chunk_bytes=settings.chunk_bytes,
    )
    diagonal = prior.curvature_diagonal(lambda rows, block: clusters.curvature(block, rows))
    progress = Progress(clusters, diagonal, prior.trace_is_exact, 1 / 3, time.perf_counter() - started)
    budget = Budget(settings.max_epochs if settings.max_epochs is not None else math.inf)
    return _spend(progress, network, settings, budget, 1, progress_bar)


def refine_clusters(
    fitted: NetworkFit, network: LinearisedNetwork, settings: NetworkSettings, budget: Budget, *, progress_bar: bool
) -> NetworkFit:
    """Finish a pass that was cut short, then passes in other directions and other groups."""
    progress: Progress = fitted.progress
    progress = replace(
        progress,
        clusters=progress.clusters.copy(),
        history=[*progress.history],
    )
    if budget.epochs is not None:
        budget = replace(budget, epochs=progress.epochs + budget.epochs)
    return _spend(progress, network, settings, budget, None, progress_bar)


def _look(network: LinearisedNetwork, settings: NetworkSettings, progress_bar: bool) -> Clusters:
    """The forward sweep: outputs, targets and features of all data."""
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    features: list[Tensor] = []
    with _features(network) as features_of:
        sweep = sweep_features(network.jacobian, network.data, features_of)
        for batch in tqdm(sweep, total=len(network.data), desc="Outputs", disable=not progress_bar, leave=False):
            for collected, part in zip((outputs, targets, features), batch, strict=True):
                collected.append(part)
    latent = torch.cat(outputs).double()
    likelihood = network.likelihood(latent, noise=1.0)
    checked = checked_targets(likelihood, latent, torch.cat(targets))
    generator = torch.Generator().manual_seed(settings.seed)
    same_width = len({part.shape[1] for part in features}) == 1  # or else batches are padded, each to its own length
    return Clusters(likelihood, latent, checked, torch.cat(features) if same_width else latent.float(), generator)


@contextmanager
def _features(network: LinearisedNetwork) -> Iterator[Callable[[Inputs, Tensor], Tensor]]:
    """How to get the features of a batch after its forward pass."""
    jacobian, sketch = network.jacobian, Sketch()
    model = jacobian.model if isinstance(jacobian, Jacobian) else nn.Identity()
    said: list[bool] = []
    with last_features(model) as latest:

        def features_of(x: Inputs, outputs: Tensor) -> Tensor:  # (b, D)
            found = latest(len(outputs)) if isinstance(jacobian, Jacobian) else x
            if found is None:
                if not said:
                    said.append(True)
                    warnings.warn(
                        "This model has no linear last layer whose inputs could tell which data belong together. They "
                        "are grouped by outputs and inputs instead.",
                        stacklevel=2,
                    )
                tensors = [t for t in (x.values() if isinstance(x, Mapping) else [x]) if isinstance(t, Tensor)]
                flat = [t.flatten(1).float() for t in tensors if t.ndim > 1 and len(t) == len(outputs)]
                found = torch.cat([outputs.float(), *flat], 1)
            return sketch(found)

        yield features_of


def _spend(
    progress: Progress,
    network: LinearisedNetwork,
    settings: NetworkSettings,
    budget: Budget,
    max_passes: int | None,
    progress_bar: bool,
) -> NetworkFit:
    """Passes until the budget is spent; the posterior of what was swept."""
    started, before = time.perf_counter(), progress.seconds
    clusters, status, passes = progress.clusters, Status.BUDGET, 0
    rank = clusters.rank if clusters.passes else 0
    meter = Meter(progress, network, started)
    with interruptible() as interrupt:
        while not budget.is_spent(progress.epochs, started) and (max_passes is None or passes < max_passes):
            resumed = bool(clusters.passes) and not clusters.passes[-1].is_complete
            target = _next_pass(clusters, network, settings)
            finished = _sweep(target, progress, network, settings, budget, meter, interrupt, progress_bar, started)
            passes += 1
            if interrupt.requested:
                status = Status.INTERRUPTED
                break
            if not finished:
                break
            known, rank = rank, clusters.rank
            if rank == clusters.max_rank or (rank == known and not resumed):
                status = Status.EXHAUSTED
                break
    if status is Status.INTERRUPTED:
        share = float(clusters.passes[-1].counted().double().mean())
        warnings.warn(
            f"The run was interrupted with {100 * share:.0f} % of the data of this pass in the posterior, which is "
            "valid for them. refine(train_loader, …) goes on with the rest.",
            stacklevel=4,
        )
    progress.seconds = before + time.perf_counter() - started
    return _result(progress, network, settings, status)


def _next_pass(clusters: Clusters, network: LinearisedNetwork, settings: NetworkSettings) -> Pass:
    """The one that was cut short, or a new one."""
    if clusters.passes and not clusters.passes[-1].is_complete:
        last = clusters.passes[-1]
        clusters.passes[-1] = replace(last, images=last.images.clone(), swept=last.swept.clone())
    else:
        like = torch.empty(0, dtype=network.jacobian.dtype, device=network.jacobian.device)
        directions = clusters.directions(settings.cotangents)
        target = clusters.new_pass(directions, settings.num_actions, like, network.jacobian.num_params)
        clusters.passes.append(target)
    return clusters.passes[-1]


def _sweep(
    target: Pass,
    progress: Progress,
    network: LinearisedNetwork,
    settings: NetworkSettings,
    budget: Budget,
    meter: Meter,
    interrupt: Interrupt,
    progress_bar: bool,
    started: float,
) -> bool:
    """Whether the pass was finished."""
    num_data, missing = len(target.labels), int((~target.swept).sum())
    per_datum = (1 + 2 * len(target.directions)) / 3 / num_data
    done, readings, first = 0, 0, len(progress.clusters.passes) == 1
    sweep = progress.clusters.sweep(target, network.jacobian, network.data, settings.chunk_bytes)
    with closing(sweep), tqdm(total=missing, desc="IterNCGP", unit="data", disable=not progress_bar) as bar:
        try:
            for size in sweep:
                done += size
                progress.epochs += size * per_datum
                bar.update(size)
                if first and done * METER_READINGS >= (readings + 1) * missing and done < missing:
                    readings += 1
                    bar.set_postfix_str(meter.read())
                if interrupt.requested or budget.is_spent(progress.epochs, started):
                    break
        except KeyboardInterrupt:
            if interrupt.requested:  # asked for a second time: a batch may have been cut in two, so nothing is kept
                raise
            interrupt.requested = True
        if done and (not progress.history or progress.history[-1].epochs != progress.epochs):
            bar.set_postfix_str(meter.read())
    return done == missing


class Meter:
    """Reads the information captured so far, and keeps the history."""

    def __init__(self, progress: Progress, network: LinearisedNetwork, started: float) -> None:
        self.progress, self.network, self.started = progress, network, started

    def read(self) -> str:
        progress = self.progress
        posterior = weight_posterior(progress, self.network)
        information = posterior.information_captured(self.network.prior_precision, self.network.noise_scale)
        progress.history.append(
            Record(
                num_products=0,
                newton_step=0,
                rank=posterior.rank,
                objective=math.nan,
                relative_residual=math.nan,
                information_captured=information,
                seconds=progress.seconds + time.perf_counter() - self.started,
                epochs=progress.epochs,
            )
        )
        return f"information {'≥' if progress.trace_is_exact else '≈'} {100 * information:.1f} %"


def weight_posterior(progress: Progress, network: LinearisedNetwork) -> WeightPosterior:
    clusters = progress.clusters
    images, noise_gram, kept = clusters.actions()
    posterior = WeightPosterior(
        images=images,
        noise_gram=noise_gram,
        right_hand_side=torch.zeros(len(noise_gram), dtype=torch.float64, device=images.device),
        anchor_share=0.0,
        prior_mean=network.prior_mean.detach().reshape(-1).clone(),
        curvature_diagonal=progress.curvature_diagonal,
        curvature_rank=clusters.max_rank,
        layer_sizes=network.layer_sizes,
        trace_is_exact=progress.trace_is_exact,
    )
    if posterior.rank <= len(images):
        return posterior.knowing(clusters.image_gram()[kept][:, kept])
    return folded(posterior)


def folded(posterior: WeightPosterior) -> WeightPosterior:
    """More actions than weights as just so many: for every prior the posterior knows A R⁻¹Aᵀ alone, a P×P matrix."""
    num_params = len(posterior.images)
    lower = torch.linalg.cholesky(posterior.noise_gram)
    whitened = torch.linalg.solve_triangular(lower, posterior.images.T.double(), upper=False)  # (B, P)
    triangle = torch.linalg.qr(whitened, mode="r").R  # TᵀT = A R⁻¹Aᵀ
    return replace(
        posterior,
        images=triangle.T.to(posterior.images.dtype),
        noise_gram=torch.eye(num_params, dtype=lower.dtype, device=lower.device),
        right_hand_side=lower.new_zeros(num_params),
    )


def unfolded(posterior: WeightPosterior, clusters: Clusters) -> WeightPosterior:
    """The same with one action for each group, of which it was made."""
    images, noise_gram, kept = clusters.actions()
    return replace(posterior, images=images, noise_gram=noise_gram, right_hand_side=noise_gram.new_zeros(len(kept)))


def _result(progress: Progress, network: LinearisedNetwork, settings: NetworkSettings, status: Status) -> NetworkFit:
    clusters = progress.clusters
    posterior = weight_posterior(progress, network)
    if settings.options.max_rank is not None:
        posterior = posterior.compress(settings.options.max_rank, network.prior_precision, network.noise_scale)
    if network.classification:
        loss = -float(clusters.likelihood.log_prob(clusters.outputs, clusters.targets).sum())
    else:
        loss = 0.5 * float((clusters.outputs - clusters.targets).square().sum())
    information = progress.history[-1].information_captured if progress.history else 0.0
    report = FitReport(
        status=status.value,
        advice=advice_after(status),
        num_products=0,
        num_newton_steps=0,
        rank=posterior.rank,
        information_captured=information,
        seconds=progress.seconds,
        history=progress.history,
        epochs=progress.epochs,
        trace_is_exact=progress.trace_is_exact,
    )
    return NetworkFit(posterior, loss, *clusters.shape, report, progress)

"""Running `clusters` on a user's behalf: one forward sweep, the groups, one backward sweep; then as many as are asked.

The meter needs tr(W K), which is known before the backward sweep begins, so it can be read on the way. Stopped at any
time, by Ctrl-C or by a budget, the posterior is that of the data swept so far, and `refine` goes on with the rest.

Several processes take turns with the batches. What the clock, Ctrl-C and the checkpoint say is agreed upon after each
round, when all have done as many.
"""

from __future__ import annotations

import time
import warnings
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ntk_iterncgp import parallel
from ntk_iterncgp.checkpoint import UNSAVED, Call
from ntk_iterncgp.data import Inputs
from ntk_iterncgp.interrupt import Interrupt, interruptible
from ntk_iterncgp.likelihoods.base import CurvatureAt
from ntk_iterncgp.network.clusters import Clusters
from ntk_iterncgp.network.grouping import batch_features
from ntk_iterncgp.network.linearised import (
    Budget,
    LinearisedNetwork,
    NetworkFit,
    NetworkSettings,
    advice_after,
    checked_targets,
)
from ntk_iterncgp.network.passes import Pass, epochs_of
from ntk_iterncgp.network.progress import (
    Progress,
    Turn,
    batch_digests,
    check_data,
    data_digests,
    from_content,
    seen_batches,
    to_content,
)
from ntk_iterncgp.network.reading import Meter, weight_posterior
from ntk_iterncgp.network.self_check import checked_passes, each_rows
from ntk_iterncgp.priors.ntk import NTKPrior
from ntk_iterncgp.solver.report import FitReport
from ntk_iterncgp.solver.stopping import Status
from ntk_iterncgp.weight_check import check_posterior

METER_READINGS = 2  # in the first sweep: each costs P·B² operations


def fit_by_clusters(
    network: LinearisedNetwork, settings: NetworkSettings, *, progress_bar: bool, call: Call = UNSAVED
) -> NetworkFit:
    started = time.perf_counter()
    check_data(call, network.data)
    if call.saved is not None and "look" not in call.saved:
        return _taken_up(call, network, settings, Budget(), progress_bar)
    clusters, data = _look(network, settings, progress_bar, call)
    prior = NTKPrior(
        network.jacobian,
        network.data,
        clusters.outputs,
        network.weight_precision,
        chunk_bytes=settings.chunk_bytes,
        num_calls=max(len(network.data), min(settings.num_actions, len(clusters.outputs))),
    )
    diagonal = prior.curvature_diagonal(CurvatureAt(clusters.likelihood, clusters.outputs))
    progress = Progress(clusters, diagonal, prior.trace_is_exact, 1 / 3, time.perf_counter() - started)
    turn = Turn(settings.max_epochs, max_passes=1)
    return Spending(progress, turn, network, settings, Budget(), call, data, progress_bar).run()


def refine_clusters(
    fitted: NetworkFit,
    network: LinearisedNetwork,
    settings: NetworkSettings,
    budget: Budget,
    *,
    progress_bar: bool,
    call: Call = UNSAVED,
) -> NetworkFit:
    """Finish a pass that was cut short, then passes in other directions and other groups."""
    check_data(call, network.data)
    if call.saved is not None:
        return _taken_up(call, network, settings, budget, progress_bar)
    progress: Progress = fitted.progress
    progress = replace(
        progress,
        clusters=progress.clusters.copy(),
        history=[*progress.history],
    )
    checked_passes(progress.clusters, float(progress.curvature_diagonal.sum()), network, settings, visit=False)
    turn = Turn(None if budget.epochs is None else progress.epochs + budget.epochs, max_passes=None)
    data = data_digests(network.data) if call.is_kept else None
    return Spending(progress, turn, network, settings, budget, call, data, progress_bar).run()


def _taken_up(
    call: Call, network: LinearisedNetwork, settings: NetworkSettings, budget: Budget, progress_bar: bool
) -> NetworkFit:
    """Where it was saved, or its result if it had ended."""
    progress, turn = from_content(call.saved, network)
    data, ended = call.saved["data"], call.saved["status"]
    call.forget()
    if ended is None:
        return Spending(progress, turn, network, settings, budget, call, data, progress_bar).run()
    call.end(dict)
    return _result(progress, network, settings, Status(ended))


def _look(
    network: LinearisedNetwork, settings: NetworkSettings, progress_bar: bool, call: Call
) -> tuple[Clusters, Tensor | None]:
    """The forward sweep: outputs, targets and features of all data; and digests, where these are saved."""
    data, device = network.data, network.jacobian.device
    seen = seen_batches(call, device)
    with batch_features(network.jacobian) as features_of:

        def look(x: Inputs, y: Tensor) -> tuple[Tensor, ...]:
            outputs = network.jacobian.forward(x)
            digests = (batch_digests(data, x, y).to(device),) if call.is_kept else ()
            return outputs, y, features_of(x, outputs), *digests

        bar = tqdm(
            data.each_batch(look, skip=len(seen)),
            initial=len(seen),
            total=len(data),
            desc="Outputs",
            disable=not (progress_bar and parallel.is_main()),
            leave=False,
        )
        for batch in bar:
            seen.append(batch)
            call.offer(lambda: {"look": seen, "data": torch.cat([batch[3].cpu() for batch in seen])})
    columns = list(zip(*seen, strict=True))
    latent, targets, features = torch.cat(columns[0]).double(), torch.cat(columns[1]), columns[2]
    likelihood = network.likelihood(latent, noise=1.0)
    checked = checked_targets(likelihood, latent, targets)
    generator = torch.Generator().manual_seed(settings.seed)
    same_width = len({part.shape[1] for part in features}) == 1  # or else batches are padded, each to its own length
    clusters = Clusters(likelihood, latent, checked, torch.cat(features) if same_width else latent.float(), generator)
    return clusters, torch.cat([part.cpu() for part in columns[3]]) if call.is_kept else None


@dataclass(eq=False)
class Spending:
    """One call of fit or refine: passes until the budget is spent, saved as they go."""

    progress: Progress
    turn: Turn
    network: LinearisedNetwork
    settings: NetworkSettings
    budget: Budget  # of which the seconds count here; epochs are counted in `turn`, from the first
    call: Call
    data: Tensor | None  # digests (N,)
    progress_bar: bool
    interrupt: Interrupt = field(default_factory=Interrupt)

    def run(self) -> NetworkFit:
        """The posterior of what was swept."""
        progress, turn, clusters = self.progress, self.turn, self.progress.clusters
        self.started = time.perf_counter() - turn.seconds
        self.meter = Meter(progress, self.network, self.started)
        if turn.missing is None:
            turn.rank = clusters.rank if clusters.passes else 0
        with interruptible() as self.interrupt:
            status = self._passes()
        progress.seconds += time.perf_counter() - self.started
        if status is Status.INTERRUPTED:
            share = float(clusters.passes[-1].counted().double().mean())
            warnings.warn(
                f"The run was interrupted with {100 * share:.0f} % of the data of this pass in the posterior, which is "
                "valid for them. refine(train_loader, …) goes on with the rest.",
                stacklevel=4,
            )
        else:
            self.call.end(lambda: to_content(progress, turn, status, self.data))
        return _result(progress, self.network, self.settings, status)

    def _passes(self) -> Status:
        turn, clusters = self.turn, self.progress.clusters
        while turn.missing is not None or not (self._is_spent() or turn.passes == turn.max_passes):
            if turn.missing is None:
                turn.was_cut_short = bool(clusters.passes) and not clusters.passes[-1].is_complete
                self._begin_pass()
            is_finished = self._sweep(clusters.passes[-1])
            turn.passes, turn.missing = turn.passes + 1, None
            if parallel.any_of(self.interrupt.requested):
                return Status.INTERRUPTED
            if not is_finished:
                return Status.BUDGET
            known, turn.rank = turn.rank, clusters.rank
            added_nothing = turn.rank == known and not turn.was_cut_short and clusters.last_is_random
            # Sums on a GPU may differ in the last bit from one process to the next, and what is independent with them.
            if parallel.any_of(turn.rank == clusters.max_rank or added_nothing):
                return Status.EXHAUSTED
        return Status.BUDGET

    def _begin_pass(self) -> None:
        """The one that was cut short, or a new one."""
        clusters, network = self.progress.clusters, self.network
        if self.turn.was_cut_short:
            last = clusters.passes[-1]
            copies = {name: getattr(last, name).clone() for name in ("images", "swept", "checksums")}
            clusters.passes[-1] = replace(last, **copies)
        else:
            like = torch.empty(0, dtype=network.jacobian.dtype, device=network.jacobian.device)
            left = None if self.turn.max_epochs is None else self.turn.max_epochs - self.progress.epochs
            left = left if self.budget.seconds is None else 0.0  # nobody knows how many that will be
            target = clusters.new_pass(
                self.settings.cotangents,
                self.settings.num_actions,
                like,
                network.jacobian.num_params,
                max_epochs=left,
            )
            clusters.passes.append(target)
        self.turn.missing = int((~clusters.passes[-1].swept).sum())
        self.turn.done = self.turn.readings = 0

    def _sweep(self, target: Pass) -> bool:
        """Whether the pass was finished."""
        progress, turn, network = self.progress, self.turn, self.network
        missing = turn.missing or 0
        per_item = epochs_of(1, len(target.directions), len(progress.clusters.outputs))
        processes = parallel.num_processes()
        # On the way only one process can read: the images of several are not summed before the end.
        has_readings = len(progress.clusters.passes) == 1 and processes == 1
        sweep = progress.clusters.sweep(target, network.jacobian, network.data, self.settings.chunk_bytes)
        visible = self.progress_bar and parallel.is_main()
        bar = tqdm(initial=turn.done, total=missing, desc="IterNCGP", unit="data", disable=not visible)
        with closing(sweep), bar:
            try:
                for batch, size in enumerate(sweep, 1):
                    turn.done += size
                    progress.epochs += size * per_item
                    bar.update(size)
                    is_due = turn.done * METER_READINGS >= (turn.readings + 1) * missing and turn.done < missing
                    if has_readings and is_due:
                        turn.readings += 1
                        bar.set_postfix_str(self.meter.read())
                    if batch % processes and not self._has_spent_epochs():
                        continue  # until all have done as many
                    if self._is_spent():
                        break
                    if parallel.any_of(self.interrupt.requested):
                        if self.call.is_kept:
                            self.call.save(self._content())
                        break
                    self.call.offer(self._content)
            except KeyboardInterrupt:
                # Asked a second time, a batch may have been cut in two, so nothing is kept; nor where others go on.
                if self.interrupt.requested or processes > 1:
                    raise
                self.interrupt.requested = True
            progress.clusters.finish(target)
            self._check()  # before the meter and the rank are made of it
            if 0 < turn.done < missing:
                progress.clusters.keep_all()
            if turn.done and (not progress.history or progress.history[-1].epochs != progress.epochs):
                bar.set_postfix_str(self.meter.read())
        return turn.done == missing

    def _check(self) -> None:
        trace = float(self.progress.curvature_diagonal.sum())
        checked_passes(self.progress.clusters, trace, self.network, self.settings, visit=False)

    def _has_spent_epochs(self) -> bool:
        return Budget(self.turn.max_epochs).is_spent_in_epochs(self.progress.epochs)

    def _is_spent(self) -> bool:
        return replace(self.budget, epochs=self.turn.max_epochs).is_spent(self.progress.epochs, self.started)

    def _content(self) -> dict[str, Any]:
        """On the way: of several processes, with the images of all of them."""
        self.turn.seconds = time.perf_counter() - self.started
        summed = replace(self.progress, clusters=self.progress.clusters.summed())
        return to_content(summed, self.turn, None, self.data)


def _result(progress: Progress, network: LinearisedNetwork, settings: NetworkSettings, status: Status) -> NetworkFit:
    clusters = progress.clusters
    with interruptible():  # what is about to be checked would be lost
        found = checked_passes(clusters, float(progress.curvature_diagonal.sum()), network, settings)
        posterior = check_posterior(
            weight_posterior(progress, network),
            network.prior_precision,
            network.noise_scale,
            each_rows(network, found.visited),
        )
    whole = posterior
    if settings.options.max_rank is not None:
        posterior = posterior.compress(settings.options.max_rank, network.prior_precision, network.noise_scale)
    if (found.were_mended or posterior is not whole) and progress.history:  # the meter was read before
        captured = posterior.information_captured(network.prior_precision, network.noise_scale)
        progress.history[-1] = replace(progress.history[-1], rank=posterior.rank, information_captured=captured)
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

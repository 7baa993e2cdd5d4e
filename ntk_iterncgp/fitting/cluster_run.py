"""The one-epoch posterior as a run: a forward sweep, the groups, one backward sweep; then as many passes as are asked.

The meter needs tr(W K), which is known before the backward sweep begins, so it can be read on the way. Stopped at any
time, by Ctrl-C or by a budget, the posterior is that of the data swept so far, and `refine` goes on with the rest.

Several processes take turns with the batches. States come after each round, when all have done as many.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.clusters.clusters import Clusters
from ntk_iterncgp.clusters.grouping import batch_features
from ntk_iterncgp.clusters.passes import epochs_of
from ntk_iterncgp.data.fixed_order import Inputs
from ntk_iterncgp.fitting.cluster_state import ClusterState, ForwardState, PassPosition, read_meter, weight_posterior
from ntk_iterncgp.fitting.drive import Budget, Run, Stage, Trajectory, drive
from ntk_iterncgp.fitting.fingerprints import batch_digests, checked_digests, data_fingerprint
from ntk_iterncgp.fitting.linearised import (
    LinearisedNetwork,
    NetworkFit,
    NetworkSettings,
    advice_after,
    checked_targets,
)
from ntk_iterncgp.fitting.network_check import check_posterior, checked_passes, each_rows
from ntk_iterncgp.fitting.report import FitReport, Record, from_table, to_table
from ntk_iterncgp.likelihoods.base import CurvatureAt
from ntk_iterncgp.persistence.checkpoint import UNSAVED, CheckpointSession
from ntk_iterncgp.priors.ntk import NTKPrior
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.runtime.interrupt import interruptible
from ntk_iterncgp.solver.stopping import Status

METER_READINGS = 2  # in the first pass: each costs P·B² operations

AnyState = ForwardState | ClusterState


def fit_by_clusters(
    network: LinearisedNetwork, settings: NetworkSettings, *, progress_bar: bool, session: CheckpointSession = UNSAVED
) -> NetworkFit:
    """One pass over the data."""
    if session.saved is not None:
        checked_digests(session, network.data)
    budget = Budget(settings.max_epochs)
    run = ClusterRun(network, settings, budget, max_passes=1)
    return _finish(
        drive(run, ForwardState(), budget=budget, progress_bar=progress_bar, session=session), network, settings
    )


def refine_by_clusters(
    fitted: NetworkFit,
    network: LinearisedNetwork,
    settings: NetworkSettings,
    budget: Budget,
    *,
    progress_bar: bool,
    session: CheckpointSession = UNSAVED,
) -> NetworkFit:
    """Finish a pass that was cut short, then passes in other directions and other groups."""
    state, report = fitted.state, fitted.report
    assert isinstance(state, ClusterState)
    digests = checked_digests(session, network.data)
    digests = state.digests if digests is None else digests
    if budget.epochs is not None:
        budget = replace(budget, epochs=state.epochs + budget.epochs)
    run = ClusterRun(network, settings, budget, max_passes=None)
    trajectory = drive(
        run,
        replace(state, clusters=state.clusters.copy(), digests=digests, passes=0),
        budget=budget,
        history=report.history,
        seconds=report.seconds,
        progress_bar=progress_bar,
        session=session,
    )
    return _finish(trajectory, network, settings)


class ClusterRun(Run[AnyState]):
    """The forward sweep and `max_passes` passes, or passes until nothing is new."""

    waits = True

    def __init__(
        self,
        network: LinearisedNetwork,
        settings: NetworkSettings,
        budget: Budget,
        *,
        max_passes: int | None,
    ) -> None:
        self.network, self.settings, self.budget = network, settings, budget
        self.max_passes = max_passes
        self.has_own_sums = False  # the images of the current pass are those of this process, not yet of all

    # --- the algorithm ------------------------------------------------------------------------------------------------

    def steps(self, state: AnyState) -> Generator[AnyState, None, tuple[AnyState, Status]]:
        """The forward sweep, then pass after pass."""
        if isinstance(state, ForwardState):
            state = yield from self._forward(state)
        while state.passes != self.max_passes:
            if state.position is None or state.position.is_complete:
                state = self._begin_pass(state)
                yield state
            position = state.position
            assert position is not None
            state = yield from self._sweep(state, position)
            rank = state.clusters.rank
            adds_nothing = rank == position.rank and not position.was_cut_short and state.clusters.last_is_random
            # Sums on a GPU may differ in the last bit from one process to the next, and what is independent with them.
            if parallel.any_of(rank == state.clusters.max_rank or adds_nothing):
                return state, Status.EXHAUSTED
            if state.passes != self.max_passes:
                yield state
        return state, Status.BUDGET

    def _forward(self, state: ForwardState) -> Generator[AnyState, None, ClusterState]:
        """Outputs, targets, features and digests of all data. Then the trace."""
        network, data, device = self.network, self.network.data, self.network.jacobian.device
        with batch_features(network.jacobian) as features_of:

            def look(x: Inputs, y: Tensor) -> tuple[Tensor, ...]:
                outputs = network.jacobian.forward(x)
                return outputs, y, features_of(x, outputs), batch_digests(data, x, y).to(device)

            for batch in data.each_batch(look, skip=len(state.batches)):
                state.batches.append(batch)
                yield state
        columns = list(zip(*state.batches, strict=True))
        outputs, targets, features = torch.cat(columns[0]).double(), torch.cat(columns[1]), columns[2]
        likelihood = network.likelihood(outputs, noise=1.0)
        checked = checked_targets(likelihood, outputs, targets)
        generator = torch.Generator().manual_seed(self.settings.seed)
        same_width = len({part.shape[1] for part in features}) == 1  # or batches are padded, each to its own length
        clusters = Clusters(
            likelihood, outputs, checked, torch.cat(features) if same_width else outputs.float(), generator
        )
        prior = NTKPrior(
            network.jacobian,
            data,
            outputs,
            network.weight_precision,
            chunk_bytes=self.settings.chunk_bytes,
            num_calls=max(len(data), min(self.settings.num_actions, len(outputs))),
        )
        diagonal = prior.curvature_diagonal(CurvatureAt(clusters.likelihood, outputs))
        digests = torch.cat([part.cpu() for part in columns[3]])
        return ClusterState(clusters, diagonal, prior.trace_is_exact, epochs=1 / 3, digests=digests)

    def _begin_pass(self, state: ClusterState) -> ClusterState:
        """The one that was cut short, or a new one."""
        clusters, jacobian = state.clusters, self.network.jacobian
        rank = clusters.rank if clusters.passes else 0
        was_cut_short = bool(clusters.passes) and not clusters.passes[-1].is_complete
        if was_cut_short:
            last = clusters.passes[-1]
            copies = {name: getattr(last, name).clone() for name in ("images", "swept", "checksums")}
            clusters.passes[-1] = replace(last, **copies)
        else:
            like = torch.empty(0, dtype=jacobian.dtype, device=jacobian.device)
            left = None if self.budget.epochs is None else self.budget.epochs - state.epochs
            left = left if self.budget.seconds is None else 0.0  # nobody knows how many that will be
            target = clusters.new_pass(
                self.settings.cotangents,
                self.settings.num_actions,
                like,
                jacobian.num_params,
                max_epochs=left,
                combines=self.settings.combines,
            )
            clusters.passes.append(target)
        missing = int((~clusters.passes[-1].swept).sum())
        return replace(state, position=PassPosition(rank, was_cut_short, missing), is_reading_due=False)

    def _sweep(self, state: ClusterState, position: PassPosition) -> Generator[AnyState, None, ClusterState]:
        """What is missing of the pass."""
        clusters, network, processes = state.clusters, self.network, parallel.num_processes()
        target = clusters.passes[-1]
        per_item = epochs_of(1, len(target.directions), len(clusters.outputs))
        # On the way only one process can read: the images of several are not summed before the end.
        has_readings = len(clusters.passes) == 1 and processes == 1 and not self.settings.is_known
        sweep = clusters.sweep(target, network.jacobian, network.data, self.settings.chunk_bytes)
        with closing(sweep):
            for batch, size in enumerate(sweep, 1):
                self.has_own_sums = True
                done = position.done + size
                is_due = has_readings and done * METER_READINGS >= (position.readings + 1) * position.missing
                position = replace(position, done=done, readings=position.readings + is_due)
                epochs = state.epochs + size * per_item
                state = replace(state, epochs=epochs, position=position, is_reading_due=is_due)
                is_round = batch % processes == 0 or self.budget.has_spent_epochs(epochs)
                if is_round and done < position.missing:
                    yield state
        self._sum(state)
        return replace(state, passes=state.passes + 1, position=position, is_reading_due=True)

    def stop(self, state: AnyState) -> ClusterState:
        """With the sums of all processes; of a pass that was cut short each group stays an action."""
        if isinstance(state, ForwardState):
            raise KeyboardInterrupt  # there is no posterior of anything yet
        self._sum(state)
        last = state.clusters.passes[-1]
        if state.position is not None and not state.position.is_complete and bool(last.swept.any()):
            state.clusters.keep_all()
        return replace(state, position=None, is_reading_due=False)

    def _sum(self, state: ClusterState) -> None:
        """Over processes, once after a sweep or a part of one."""
        if self.has_own_sums:
            state.clusters.finish(state.clusters.passes[-1])
        self.has_own_sums = False

    # --- what is told -------------------------------------------------------------------------------------------------

    def epochs(self, state: AnyState) -> float:
        """Of the fit and all that followed."""
        return 0.0 if isinstance(state, ForwardState) else state.epochs

    def stage(self, state: AnyState) -> Stage:
        """Batches of the forward sweep, then data of the current pass."""
        if isinstance(state, ForwardState):
            return Stage("Outputs", len(self.network.data), "batch", len(state.batches), stays=False)
        if state.position is not None:
            return Stage("IterNCGP", state.position.missing, "data", state.position.done)
        return Stage("IterNCGP", len(state.clusters.outputs), "data")

    def record(self, state: AnyState, last: Record | None, seconds: float) -> Record | None:
        """After a pass, and once on the way through the first."""
        if isinstance(state, ForwardState) or not state.is_reading_due:
            return None
        return read_meter(state, self.network, seconds)

    def last_record(self, state: AnyState, last: Record | None, seconds: float) -> Record | None:
        """If anything was swept since the last reading."""
        assert isinstance(state, ClusterState)
        if last is not None and last.epochs == state.epochs:
            return None
        is_empty = last is None and not bool(state.clusters.passes[-1].swept.any())
        return None if is_empty else read_meter(state, self.network, seconds)

    def shown(self, record: Record) -> str:
        """The meter."""
        return f"information {100 * record.information_captured:.1f} %"

    def advice_when_interrupted(self, state: AnyState) -> str:
        """How much of the pass is in the posterior."""
        assert isinstance(state, ClusterState)
        share = float(state.clusters.passes[-1].counted().double().mean())
        return (
            f"The run was interrupted with {100 * share:.0f} % of the data of this pass in the posterior, which is "
            "valid for them. refine(train_loader, …) goes on with the rest."
        )

    # --- what is saved ------------------------------------------------------------------------------------------------

    def to_dict(self, trajectory: Trajectory[AnyState]) -> dict[str, Any]:
        """State, history and clock."""
        state = trajectory.state
        if isinstance(state, ForwardState):
            return state.to_dict()
        clusters = state.clusters.summed() if self.has_own_sums else state.clusters
        content = replace(state, clusters=clusters).to_dict()
        content["turn"] |= {"seconds": trajectory.seconds}
        return content | {
            "seconds": trajectory.before,
            "history": to_table(trajectory.history),
            "status": trajectory.status,
        }

    def from_dict(self, saved: Mapping[str, Any], start: Trajectory[AnyState]) -> Trajectory[AnyState]:
        """In the forward sweep, or in a pass."""
        if "look" in saved:
            return replace(start, state=ForwardState.from_dict(saved, self.network.jacobian.device))
        state, status, spent = ClusterState.from_dict(saved, self.network), saved["status"], saved["turn"]["seconds"]
        before, history = float(saved["seconds"]), from_table(saved["history"])
        if not (type(spent) is float and spent >= 0 and math.isfinite(before)):
            raise ValueError("a clock that does not count")
        return Trajectory(state, history, before, spent, None if status is None else Status(status))


def _finish(trajectory: Trajectory[AnyState], network: LinearisedNetwork, settings: NetworkSettings) -> NetworkFit:
    """Check what was swept, mend or refuse it, and make the posterior of it."""
    state, status, history = trajectory.state, trajectory.status, trajectory.history
    assert isinstance(state, ClusterState) and status is not None
    clusters = state.clusters
    with interruptible():  # what is about to be checked would be lost
        found = checked_passes(clusters, float(state.curvature_diagonal.sum()), network, settings)
        whole = posterior = check_posterior(
            weight_posterior(state, network),
            network.prior_precision,
            network.noise_scale,
            each_rows(network, found.visited),
        )
    if settings.options.max_rank is not None:
        posterior = whole.compress(settings.options.max_rank, network.prior_precision, network.noise_scale)
    if (found.were_mended or posterior is not whole) and history:  # the meter was read before
        captured = posterior.information_captured(network.prior_precision, network.noise_scale)
        history[-1] = replace(history[-1], rank=posterior.rank, information_captured=captured)
    if network.classification:
        loss = -float(clusters.likelihood.log_prob(clusters.outputs, clusters.targets).sum())
    else:
        loss = 0.5 * float((clusters.outputs - clusters.targets).square().sum())
    report = FitReport(
        status=status.value,
        advice=advice_after(status),
        num_products=0,
        num_newton_steps=0,
        rank=posterior.rank,
        information_captured=history[-1].information_captured if history else 0.0,
        seconds=trajectory.before + trajectory.seconds,
        history=history,
        epochs=state.epochs,
        trace_is_exact=state.trace_is_exact,
    )
    seen = data_fingerprint(state.digests)
    return NetworkFit(posterior, loss, *clusters.shape, report, state, network.first_batch, seen)

"""The one-epoch posterior as a run: a forward sweep, the groups, one backward sweep; then as many passes as are asked.

The meter needs tr(W K), which is known before the backward sweep begins, so it can be read on the way. Stopped at any
time, by Ctrl-C or by a budget, the posterior is that of the data swept so far, and `refine` resumes with the rest.

Several processes take turns with the batches. States come after each round, when all have done as many.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_iterncgp.clusters.clusters import Clusters, Pass, epochs_of
from ntk_iterncgp.clusters.grouping import batch_features
from ntk_iterncgp.data.fixed_order import Inputs
from ntk_iterncgp.fitting.drive import Budget, Run, Stage, Trajectory, drive, interruptible
from ntk_iterncgp.fitting.network import (
    ADVICE,
    MORE,
    LinearisedNetwork,
    NetworkFit,
    NetworkSettings,
)
from ntk_iterncgp.fitting.network_check import check_posterior, checked_passes, checked_targets, rows_at
from ntk_iterncgp.fitting.report import FitReport, Record, from_table, to_table
from ntk_iterncgp.jacobian.rows import curvature_diagonal, plan_trace
from ntk_iterncgp.likelihoods.base import ANY_VARIANCE, CurvatureAt
from ntk_iterncgp.likelihoods.leading import CurvatureOfMany, Leading, LeadingSoftmax
from ntk_iterncgp.persistence.checkpoint import CheckpointSession
from ntk_iterncgp.persistence.fingerprint import batch_digests, checked_digests, data_fingerprint
from ntk_iterncgp.posterior.merging import folded
from ntk_iterncgp.posterior.weight_space import WeightPosterior
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.solver.stopping import Status


@dataclass(frozen=True, eq=False)
class ForwardState:
    """What the forward sweep has seen: outputs, targets, features and digests of each batch, one by one."""

    batches: list[tuple[Tensor, ...]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Batch by batch."""
        return {"look": self.batches, "data": torch.cat([batch[3].cpu() for batch in self.batches])}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], device: torch.device) -> ForwardState:
        """What was saved, after a check of its shapes."""
        parts = [(batch, len(batch[0])) for batch in saved["look"]]
        seen = [tuple(_checked(part, "a batch", None, device, rows) for part in batch) for batch, rows in parts]
        if any(len(batch) not in (4, 6) or batch[0].ndim != 2 or batch[2].ndim != 2 for batch in seen):
            raise ValueError("batches of other things")
        return cls(seen)


UNFINISHED = "was_cut_short"  # as files name it


@dataclass(frozen=True)
class PassPosition:
    """How far a call is in its current pass."""

    rank: int  # of the posterior when the pass began
    is_unfinished: bool  # the pass was begun in an earlier call
    missing: int  # of its data, when this call began
    done: int = 0  # of these
    readings: int = 0  # of the meter, on the way

    @property
    def is_complete(self) -> bool:
        """Whether the pass is done, and the next one may begin."""
        return self.done == self.missing

    def to_dict(self) -> dict[str, Any]:
        """Numbers, by the names that they have in files."""
        found = asdict(self)
        found[UNFINISHED] = found.pop("is_unfinished")
        return found


@dataclass(frozen=True, eq=False)
class ClusterState:
    """The groups with what has been swept of them, and counters. The images of the current pass are summed in place."""

    clusters: Clusters
    curvature_diagonal: Tensor  # of JᵀWJ (P,)
    trace_is_exact: bool
    epochs: float  # of the fit and all that followed
    digests: Tensor  # of the data (N,)
    passes: int = 0  # done in this call
    position: PassPosition | None = None  # None: at the start of a call, and after its end
    is_reading_due: bool = False  # of the meter

    def to_dict(self) -> dict[str, Any]:
        """All but what can be computed again without the data."""
        clusters, position = self.clusters, {} if self.position is None else self.position.to_dict()
        return {
            "outputs": clusters.outputs,
            "targets": clusters.targets,
            "features": clusters.features,
            "generator": clusters.generator.get_state(),
            "passes": [{f.name: getattr(done, f.name) for f in fields(Pass)} for done in clusters.passes],
            "noise_blocks": _listed(clusters.noise_blocks),
            "curvature_diagonal": self.curvature_diagonal,
            "trace_is_exact": self.trace_is_exact,
            "epochs": self.epochs,
            "turn": {"passes": self.passes, "missing": None, **position},
            "data": self.digests,
            **(
                {}
                if clusters.leading is None
                else {"classes": clusters.leading.classes, "traces": clusters.leading.traces}
            ),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], network: LinearisedNetwork) -> ClusterState:
        """What was saved, after a check that it can be of this network."""
        device = network.jacobian.device
        outputs = _checked(saved["outputs"], "outputs", torch.float64, device)
        N, C = outputs.shape
        generator = torch.Generator()
        generator.set_state(saved["generator"])
        targets = _checked(saved["targets"], "targets", None, device, N)
        leading = _leading(saved, network, N, C) if "classes" in saved else None
        likelihood = network.likelihood if leading is None else LeadingSoftmax(C - 1)
        clusters = Clusters(
            likelihood,
            outputs,
            checked_targets(likelihood, outputs, targets),
            _checked(saved["features"], "features", torch.float32, device, N),
            generator,
            [_pass(done, network, (N, C)) for done in saved["passes"]],
            _blocks(saved["noise_blocks"], device),
            leading=leading,
        )
        return cls(
            clusters,
            _checked(saved["curvature_diagonal"], "the diagonal", torch.float64, device, network.jacobian.num_params),
            bool(saved["trace_is_exact"]),
            float(saved["epochs"]),
            saved["data"],
            _count(saved["turn"]["passes"]),
            _position(saved["turn"]),
        )


def _leading(saved: Mapping[str, Any], network: LinearisedNetwork, N: int, C: int) -> Leading:
    device, num_classes = network.jacobian.device, network.likelihood.num_outputs
    classes = _checked(saved["classes"], "classes", torch.int32, device, N, C - 1)
    if not bool(((classes >= 0) & (classes < num_classes)).all()):
        raise ValueError("a class that does not exist")
    return Leading(classes, _checked(saved["traces"], "traces", torch.float64, device, N), num_classes)


def _position(saved: Mapping[str, Any]) -> PassPosition | None:
    if saved["missing"] is None:
        return None
    counts = {name: _count(saved[name]) for name in ("rank", "missing", "done", "readings")}
    return PassPosition(is_unfinished=bool(saved[UNFINISHED]), **counts)


def _pass(saved: Mapping[str, Any], network: LinearisedNetwork, shape: tuple[int, int]) -> Pass:
    device, dtype = network.jacobian.device, network.jacobian.dtype
    moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in saved.items()}
    N, C = shape
    done = Pass(**{"rows": torch.arange(N, device=device), **moved})  # before version 2 a pass had all data, each once
    m = len(done.rows)
    _checked(done.rows, "rows", torch.int64, device, m)
    _checked(done.labels, "labels", torch.int64, device, m)
    _checked(done.swept, "swept", torch.bool, device, m)
    _checked(done.directions, "directions", torch.float64, device, len(done.directions), m, C)
    _checked(done.images, "images", dtype, device, len(done.images), network.jacobian.num_params)
    _checked(done.checksums, "checksums", torch.float64, device, len(done.images))
    if not bool(((done.labels >= 0) & (done.labels < done.num_groups)).all()):
        raise ValueError("a group that does not exist")
    if not bool(((done.rows >= 0) & (done.rows < N)).all() & (done.rows.diff() >= 0).all()):
        raise ValueError("data that do not exist, or in another order")
    if type(done.by_group) is not bool or not (done.num_kept is None or _count(done.num_kept) >= 1):
        raise ValueError("a number of actions that cannot be")
    return done


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("counters that do not count")
    return value


def _listed(blocks: Mapping[tuple[int, int], Tensor]) -> list[dict[str, Any]]:
    """Blocks of a small matrix. Computed anew from the same images they might differ in the last bit."""
    return [{"i": i, "j": j, "block": block} for (i, j), block in blocks.items()]


def _blocks(saved: list[Mapping[str, Any]], device: torch.device) -> dict[tuple[int, int], Tensor]:
    return {(int(b["i"]), int(b["j"])): _checked(b["block"], "a block", torch.float64, device) for b in saved}


def _checked(value: Tensor, name: str, dtype: torch.dtype | None, device: torch.device, *shape: int) -> Tensor:
    if tuple(value.shape[: len(shape)]) != shape or (dtype is not None and value.dtype != dtype):
        raise ValueError(f"{name} of shape {tuple(value.shape)} in {value.dtype}")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise ValueError(f"NaN or infinity in {name}")
    return value.to(device)


def read_meter(state: ClusterState, network: LinearisedNetwork, seconds: float) -> Record:
    """The information captured so far, as a line of the history."""
    posterior, last = weight_posterior(state, network), state.clusters.passes[-1]
    if last.num_kept is not None and not last.is_complete:  # not more than combinations of all will say
        posterior = posterior.leading(last.num_kept)
    try:
        information = posterior.information_captured(network.prior_precision, network.noise_scale)
    except (torch.linalg.LinAlgError, ArithmeticError):  # type: ignore[attr-defined]  # images that are no numbers
        information = math.nan
    return Record(
        num_products=0,
        newton_step=0,
        rank=posterior.rank,
        objective=math.nan,
        relative_residual=math.nan,
        information_captured=information,
        seconds=seconds,
        epochs=state.epochs,
    )


def weight_posterior(state: ClusterState, network: LinearisedNetwork) -> WeightPosterior:
    """Of all groups that have been swept."""
    clusters = state.clusters
    images, noise_gram = clusters.actions()
    posterior = WeightPosterior(
        images=images,
        noise_gram=noise_gram,
        right_hand_side=torch.zeros(len(noise_gram), dtype=torch.float64, device=images.device),
        anchor_share=0.0,
        prior_mean=network.prior_mean.detach().reshape(-1).clone(),
        curvature_diagonal=state.curvature_diagonal,
        curvature_rank=clusters.max_rank,
        layer_sizes=network.layer_sizes,
        trace_is_exact=state.trace_is_exact,
        rounding_gram=clusters.rounding_gram(),
    )
    if posterior.rank > len(images):
        return folded(posterior)
    if len(clusters.passes) == 1 and not clusters.passes[0].is_complete:
        return posterior  # most images may still be zero: not worth the products of all
    return posterior.with_gram(clusters.image_gram())


def unfolded(posterior: WeightPosterior, clusters: Clusters) -> WeightPosterior:
    """The same with the actions of which it was made."""
    images, noise_gram = clusters.actions()
    right_hand_side = noise_gram.new_zeros(len(noise_gram))
    return replace(
        posterior,
        images=images,
        noise_gram=noise_gram,
        right_hand_side=right_hand_side,
        rounding_gram=clusters.rounding_gram(),
        num_actions=None,
    )


METER_READINGS = 2  # in the first pass: each costs P·B² operations

AnyState = ForwardState | ClusterState


def fit_by_clusters(
    network: LinearisedNetwork,
    settings: NetworkSettings,
    *,
    progress_bar: bool,
    session: CheckpointSession | None = None,
) -> NetworkFit:
    """One pass over the data."""
    if session is not None and session.saved is not None:
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
    session: CheckpointSession | None = None,
) -> NetworkFit:
    """Finish an unfinished pass, then passes in other directions and other groups."""
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


@dataclass(eq=False)
class ClusterRun(Run[AnyState]):
    """The forward sweep and `max_passes` passes, or passes until nothing is new."""

    waits: ClassVar[bool] = True

    network: LinearisedNetwork
    settings: NetworkSettings
    budget: Budget
    max_passes: int | None
    has_own_sums: bool = False  # the images of the current pass are those of this process, not yet of all

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
            adds_nothing = rank == position.rank and not position.is_unfinished and state.clusters.last_is_random
            # Sums on a GPU may differ in the last bit from one process to the next, and what is independent with them.
            if parallel.any_of(rank == state.clusters.max_rank or adds_nothing):
                return state, Status.EXHAUSTED
            if state.passes != self.max_passes:
                yield state
        return state, Status.BUDGET

    def _forward(self, state: ForwardState) -> Generator[AnyState, None, ClusterState]:
        """Outputs, targets, features and digests of all data. Then the trace."""
        network, data, device = self.network, self.network.data, self.network.jacobian.device
        has_many = network.likelihood.keeps_leading(data.num_data(len(network.first_batch.outputs)))
        with batch_features(network.jacobian) as features_of:

            def visit(x: Inputs, y: Tensor) -> tuple[Tensor, ...]:
                outputs = network.jacobian.forward(x)
                features, digests = features_of(x, outputs), batch_digests(data, x, y).to(device)
                if not has_many:
                    return outputs, y, features, digests
                logs, places, *others = Leading.of_batch(outputs, checked_targets(network.likelihood, outputs, y))
                return logs, places, features, digests, *others

            for batch in data.each_batch(visit, skip=len(state.batches)):
                state.batches.append(batch)
                yield state
        columns = list(zip(*state.batches, strict=True))
        outputs, targets, features = torch.cat(columns[0]).double(), torch.cat(columns[1]), columns[2]
        leading, likelihood, C = None, network.likelihood, network.likelihood.num_outputs
        if has_many:
            leading = Leading(torch.cat(columns[4]), torch.cat(columns[5]), C)
            likelihood = LeadingSoftmax(outputs.shape[1] - 1)
        checked = checked_targets(likelihood, outputs, targets)
        generator = torch.Generator().manual_seed(self.settings.seed)
        same_width = len({part.shape[1] for part in features}) == 1  # or batches are padded, each to its own length
        found = torch.cat(features) if same_width else outputs.float()
        clusters = Clusters(likelihood, outputs, checked, found, generator, leading=leading)
        num_calls = max(len(data), min(self.settings.num_actions, len(outputs)))
        plan = plan_trace(network.jacobian, len(outputs), C, num_calls)
        curvature = CurvatureAt(clusters.likelihood, outputs)
        if leading is not None:
            whole = network.likelihood.for_prior_variance(ANY_VARIANCE)
            curvature = CurvatureOfMany(whole, leading.traces, lambda rows: self._outputs_at(rows, len(outputs)))
        diagonal = curvature_diagonal(network.jacobian, data, curvature, plan, chunk_bytes=self.settings.chunk_bytes)
        digests = torch.cat([part.cpu() for part in columns[3]])
        return ClusterState(clusters, diagonal, plan.is_exact, epochs=1 / 3, digests=digests)

    def _outputs_at(self, rows: Tensor, num_data: int) -> Tensor:  # (r, C)
        """Computed again, of few data."""
        forward, data = self.network.jacobian.forward, self.network.data
        with torch.no_grad():
            return torch.cat([forward(x) for _, x in data.pick(rows, num_data, max(1, len(rows)))]).double()

    def _begin_pass(self, state: ClusterState) -> ClusterState:
        """The unfinished one, or a new one."""
        clusters, jacobian = state.clusters, self.network.jacobian
        rank = clusters.rank if clusters.passes else 0
        is_unfinished = bool(clusters.passes) and not clusters.passes[-1].is_complete
        if is_unfinished:
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
        return replace(state, position=PassPosition(rank, is_unfinished, missing), is_reading_due=False)

    def _sweep(self, state: ClusterState, position: PassPosition) -> Generator[AnyState, None, ClusterState]:
        """What is missing of the pass."""
        clusters, network, processes = state.clusters, self.network, parallel.num_processes()
        target = clusters.passes[-1]
        per_item = epochs_of(1, len(target.directions), len(clusters.outputs))
        # On the way only one process can read: the images of several are not summed before the end.
        has_readings = len(clusters.passes) == 1 and processes == 1
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
        """With the sums of all processes; of an unfinished pass each group stays an action."""
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

    # --- what is reported ---------------------------------------------------------------------------------------------

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
        """After a pass, and once on the way through the first; of a part of an update, when it is in the sum."""
        if isinstance(state, ForwardState) or not state.is_reading_due or self.settings.is_known:
            return None
        return read_meter(state, self.network, seconds)

    def last_record(self, state: AnyState, last: Record | None, seconds: float) -> Record | None:
        """If anything was swept since the last reading."""
        assert isinstance(state, ClusterState)
        if self.settings.is_known or (last is not None and last.epochs == state.epochs):
            return None
        is_empty = last is None and not bool(state.clusters.passes[-1].swept.any())
        return None if is_empty else read_meter(state, self.network, seconds)

    def shown(self, record: Record) -> str:
        """The meter."""
        return f"information {100 * record.information_captured:.1f} %"

    def advice_when_interrupted(self, state: AnyState) -> str:
        """How much of the pass is in the posterior."""
        assert isinstance(state, ClusterState)
        fraction = float(state.clusters.passes[-1].counted().double().mean())
        return (
            f"The run was interrupted with {100 * fraction:.0f} % of the data of this pass in the posterior, which is "
            "valid for them. refine(train_loader, …) resumes with the rest."
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
    with interruptible() as interrupt:  # what is about to be checked would be lost
        found = checked_passes(clusters, float(state.curvature_diagonal.sum()), network, settings)
        whole = posterior = check_posterior(
            weight_posterior(state, network),
            network.prior_precision,
            network.noise_scale,
            (rows_at(network, x) for x in found.visited),
        )
    if parallel.any_of(interrupt.requested) and status != Status.INTERRUPTED:
        warnings.warn("The run was interrupted while its posterior was checked, which is complete.", stacklevel=3)
        status = Status.INTERRUPTED
    if settings.options.max_rank is not None:
        posterior = whole.compress(settings.options.max_rank, network.prior_precision, network.noise_scale)
    if (found.were_mended or posterior is not whole) and history:  # the meter was read before
        captured = posterior.information_captured(network.prior_precision, network.noise_scale)
        history[-1] = replace(history[-1], rank=posterior.rank, information_captured=captured)
    loss = clusters.likelihood.loss(clusters.outputs, clusters.targets)
    advice = ADVICE.get(status, MORE)
    if len(clusters.passes) == 1 and clusters.passes[0].is_complete and posterior is whole:
        advice += " convergence(inputs) estimates what twice the actions would bring."
    report = FitReport(
        status=status.value,
        advice=advice,
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
    N, C = len(clusters.outputs), network.likelihood.num_outputs
    return NetworkFit(posterior, loss, N, C, report, state, network.first_batch, seen)

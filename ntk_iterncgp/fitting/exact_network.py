"""The exact posterior of a linearised network with few weights or few data: one sweep, and a QR decomposition.

With W_n = H_n H_nᵀ, r = rank(W_n) columns each, the whitened rows of all data, H_nᵀ J_n, are the images of n' = N r
actions with noise R = I. What they say about the weights is the GGN JᵀWJ alone, and that of their triangular factor,

    JᵀWJ = Σ_n J_nᵀ H_n H_nᵀ J_n = TᵀT,      T (min(P, n') × P),

so A = Tᵀ with R = I is a full-rank set of actions: a `WeightPosterior` like any other, but exact. Rows are folded into
T by QR decompositions, batch by batch. JᵀWJ itself, whose condition number is the square, is never formed.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.data.fixed_order import Inputs
from ntk_iterncgp.fitting.drive import Run, Stage, Trajectory, drive
from ntk_iterncgp.fitting.network import FOLD_FACTOR, LinearisedNetwork, NetworkFit, NetworkSettings
from ntk_iterncgp.fitting.network_check import check_posterior, checked_targets, rows_at
from ntk_iterncgp.fitting.report import FitReport, Record, SelfCheckError, from_table, refusal, to_table
from ntk_iterncgp.jacobian.rows import row_epochs
from ntk_iterncgp.likelihoods.base import ANY_VARIANCE, Likelihood
from ntk_iterncgp.persistence.checkpoint import CheckpointSession
from ntk_iterncgp.persistence.fingerprint import batch_digests, checked_digests, data_fingerprint
from ntk_iterncgp.posterior.weight_space import WeightPosterior
from ntk_iterncgp.runtime.parallel import Shard, all_sum, num_processes
from ntk_iterncgp.solver.stopping import Status

CHECK_TOLERANCE = 1e-9  # of ‖T h‖², relative
CHECKED_INPUTS = 16
ADVICE = "Computed with all data: nothing is left to refine. update(loader) conditions on more data."


@dataclass(frozen=True, eq=False)
class FactorState:
    """What the sweep has seen: outputs, targets and digests of each batch; T, and rows not folded in yet."""

    factor: Tensor  # (k, P), float64
    checksum: float = 0.0  # Σ (a h)² over all whitened rows a, for a fixed h
    batches: list[tuple[Tensor, ...]] = field(default_factory=list)
    is_complete: bool = False  # of all data


class FactorRun(Run[FactorState]):
    """One sweep over the data, after each batch a state."""

    def __init__(self, network: LinearisedNetwork, settings: NetworkSettings) -> None:
        self.network, self.chunk_bytes = network, settings.chunk_bytes
        self.likelihood = network.likelihood.for_prior_variance(ANY_VARIANCE)  # no probability is divided by
        drawn = torch.randn(network.jacobian.num_params, generator=torch.Generator().manual_seed(0))
        self.probe = drawn.to(network.jacobian.device, torch.float64)

    def start(self) -> FactorState:
        """Nothing seen yet."""
        return FactorState(self.probe.new_zeros(0, self.network.jacobian.num_params))

    def steps(self, state: FactorState) -> Generator[FactorState, None, tuple[FactorState, Status]]:
        """Batch by batch; several processes sweep a shard each, and put their factors together."""
        data = self.network.data
        shard = data.shard()
        if shard is None:
            for x, y in islice(data.batches(), len(state.batches), None):
                state = self._visited(state, x, y)
                yield state
        else:
            for _, x, y in data.sweep(shard):
                state = self._visited(state, x, y)
            state = self._together(state, shard)
        return replace(state, factor=folded(state.factor), is_complete=True), Status.EXACT

    @torch.no_grad()
    def _visited(self, state: FactorState, x: Inputs, y: Tensor) -> FactorState:
        network, jacobian = self.network, self.network.jacobian
        factor, checksum, outputs, size = state.factor, state.checksum, [], network.data.num_rows(x)
        for rows in jacobian.rows_in_parts(x, size, self._whitened, self.likelihood.curvature_rank, self.chunk_bytes):
            block = rows.written_out().flatten(0, 1).double()
            factor, checksum = torch.cat([factor, block]), checksum + float((block @ self.probe).square().sum())
            outputs.append(rows.outputs.double())
            if len(factor) > FOLD_FACTOR * factor.shape[1]:
                factor = folded(factor)
        seen = torch.cat(outputs), y, batch_digests(network.data, x, y).to(jacobian.device)
        return FactorState(factor, checksum, [*state.batches, seen])

    def _whitened(self, outputs: Tensor) -> Tensor:  # (b, C) -> (b, C, r)
        return whitening(self.likelihood, outputs.double())

    def _together(self, state: FactorState, shard: Shard) -> FactorState:
        """Of all processes; one that has no data takes part with no rows."""
        if not state.batches:
            empty = self._visited(state, *next(iter(self.network.data.batches())))
            state = FactorState(state.factor, 0.0, [tuple(part[:0] for part in empty.batches[0])])
        columns = (torch.cat(parts) for parts in zip(*state.batches, strict=True))
        whole = tuple(shard.gather(column) for column in columns)
        own = folded(state.factor)
        counts = Shard.even(num_processes()).gather(torch.tensor([len(own)], device=own.device)).tolist()
        factor = Shard((0, *accumulate(counts))).gather(own)
        checksum = float(all_sum(torch.tensor([state.checksum], dtype=torch.float64, device=own.device)))
        return FactorState(factor, checksum, [whole])

    # --- what is reported and saved -----------------------------------------------------------------------------------

    def epochs(self, state: FactorState) -> float:
        """A forward pass, and a backward pass for each whitened row."""
        return row_epochs(self.likelihood.curvature_rank) * len(state.batches) / max(1, len(self.network.data))

    def stage(self, state: FactorState) -> Stage:
        """Batches of the sweep."""
        return Stage("Exact", max(len(self.network.data), len(state.batches)), "batch", len(state.batches))

    def record(self, state: FactorState, last: Record | None, seconds: float) -> Record | None:
        """Only the end is worth a line."""
        return None

    def last_record(self, state: FactorState, last: Record | None, seconds: float) -> Record | None:
        """All of the information."""
        epochs = row_epochs(self.likelihood.curvature_rank)
        return Record(0, 0, len(state.factor), math.nan, 0.0, 1.0, seconds, epochs)

    def shown(self, record: Record) -> str:
        """The meter."""
        return "information 100 %"

    def stop(self, state: FactorState) -> FactorState:
        """As it is; what has seen a part of the data is not their posterior."""
        if not state.is_complete:
            raise KeyboardInterrupt
        return state

    def to_dict(self, trajectory: Trajectory[FactorState]) -> dict[str, Any]:
        """T and the batches."""
        state = trajectory.state
        return {
            "factor": state.factor,
            "checksum": state.checksum,
            "look": state.batches,
            "data": torch.cat([batch[2].cpu() for batch in state.batches]),
            "history": to_table(trajectory.history),
            "seconds": trajectory.seconds,
            "status": trajectory.status,
        }

    def from_dict(self, saved: Mapping[str, Any], start: Trajectory[FactorState]) -> Trajectory[FactorState]:
        """What was saved, after a check of its sizes."""
        device, num_params = self.network.jacobian.device, self.network.jacobian.num_params
        factor, status = saved["factor"], saved["status"]
        if factor.dtype != torch.float64 or factor.shape[1:] != (num_params,) or not bool(factor.isfinite().all()):
            raise ValueError("a factor of the GGN in float64")
        batches = [tuple(part.to(device) for part in batch) for batch in saved["look"]]
        if any(len(batch) != 3 or len({len(part) for part in batch}) != 1 for batch in batches):
            raise ValueError("batches of other things")
        state = FactorState(factor.to(device), float(saved["checksum"]), batches, is_complete=status is not None)
        ended = None if status is None else Status(status)
        return Trajectory(state, from_table(saved["history"]), start.before, float(saved["seconds"]), ended)


def whitening(likelihood: Likelihood, outputs: Tensor) -> Tensor:  # (b, C) -> (b, C, r)
    """H with H Hᵀ = W: the columns W u / √(uᵀWu) for the likelihood's own directions u, orthogonal in W."""
    columns = []
    for index in range(likelihood.curvature_rank):
        u = likelihood.cotangent(outputs, index)
        curved = likelihood.curvature(outputs, u[..., None])[..., 0]
        noise = (u * curved).sum(1, keepdim=True)
        columns.append(torch.where(noise > 0, curved * noise.clamp_min(1e-300).rsqrt(), 0.0))
    return torch.stack(columns, 2)


def folded(rows: Tensor) -> Tensor:  # (k, P) -> (min(k, P), P)
    """T with TᵀT = rowsᵀ rows, where that are fewer rows."""
    return torch.linalg.qr(rows, mode="r").R if len(rows) > rows.shape[1] else rows


def fit_exactly(
    network: LinearisedNetwork,
    settings: NetworkSettings,
    *,
    progress_bar: bool,
    session: CheckpointSession | None = None,
) -> NetworkFit:
    """The posterior given all data, in one sweep."""
    if session is not None and session.saved is not None:
        checked_digests(session, network.data)
    run = FactorRun(network, settings)
    trajectory = drive(run, run.start(), progress_bar=progress_bar, session=session)
    state = trajectory.state
    outputs, targets, digests = map(torch.cat, zip(*state.batches, strict=True))
    targets = checked_targets(run.likelihood, outputs, targets)
    posterior = _checked(state, run, outputs)
    if settings.options.max_rank is not None:
        posterior = posterior.compress(settings.options.max_rank, network.prior_precision, network.noise_scale)
    loss = run.likelihood.loss(outputs, targets)
    report = FitReport(
        status=Status.EXACT.value,
        advice=ADVICE,
        num_products=0,
        num_newton_steps=0,
        rank=posterior.rank,
        information_captured=1.0,
        seconds=trajectory.before + trajectory.seconds,
        history=trajectory.history,
        epochs=row_epochs(run.likelihood.curvature_rank),
        products_by=f"a QR decomposition of {posterior.curvature_rank:,} whitened rows of J",
        variance_ratio=1.0 if posterior.rank == len(state.factor) else None,
    )
    seen, (num_data, num_outputs) = data_fingerprint(digests.cpu()), outputs.shape
    return NetworkFit(posterior, loss, num_data, num_outputs, report, None, network.first_batch, seen)


def _checked(state: FactorState, run: FactorRun, outputs: Tensor) -> WeightPosterior:
    """The posterior, or a `SelfCheckError` where T is not that of the rows that were summed."""
    network, factor = run.network, state.factor
    found = float((factor @ run.probe).square().sum())
    if not abs(found - state.checksum) <= CHECK_TOLERANCE * (state.checksum + 1e-300):
        told = f"a factor of the GGN with ‖T h‖² = {state.checksum:.6g}, but it is {found:.6g}"
        raise SelfCheckError(refusal([told]))
    number = len(outputs) * run.likelihood.curvature_rank
    posterior = WeightPosterior(
        images=factor.contiguous().T,  # laid out as those of a file: the same bits after it is loaded
        noise_gram=torch.eye(len(factor), dtype=torch.float64, device=factor.device),
        right_hand_side=factor.new_zeros(len(factor)),
        anchor_share=0.0,
        prior_mean=network.prior_mean.detach().reshape(-1).clone(),
        curvature_diagonal=factor.square().sum(0),
        curvature_rank=number,
        layer_sizes=network.layer_sizes,
        trace_is_exact=True,
        num_actions=None if len(factor) == number else number,
    )
    some = next(iter(network.data.chunk(network.first_batch.inputs, CHECKED_INPUTS)))
    return check_posterior(posterior, network.prior_precision, network.noise_scale, [rows_at(network, some)])

"""Where a fit by clusters stands; as plain tensors and numbers, and back, since that is what its checkpoint holds.

Batches are only ever saved whole, so the sums of a run that is taken up again are taken in the same order. The data are
known again by a digest of each of them, for which they are read over, but not computed with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.checkpoint import Call, unusable
from ntk_iterncgp.data import FixedOrderData, Inputs
from ntk_iterncgp.digests import digest_rows
from ntk_iterncgp.network.clusters import Clusters
from ntk_iterncgp.network.linearised import LinearisedNetwork, checked_targets
from ntk_iterncgp.network.passes import Pass
from ntk_iterncgp.solver.report import Record, from_table, to_table


@dataclass(eq=False)
class Progress:
    """What has been done of a fit, in one call or several."""

    clusters: Clusters
    curvature_diagonal: Tensor  # of JᵀWJ (P,)
    trace_is_exact: bool
    epochs: float
    seconds: float
    history: list[Record] = field(default_factory=list)


@dataclass
class Turn:
    """Where one call of fit or refine stands: what its loops count."""

    max_epochs: float | None  # of the fit and all that followed; None: no limit
    max_passes: int | None
    passes: int = 0  # done in this call
    rank: int = 0  # when the current pass began
    was_cut_short: bool = False  # the current pass was begun in an earlier call
    missing: int | None = None  # of its data, when this call began or took it up; None: between two passes
    done: int = 0  # of these
    readings: int = 0  # of the meter, on the way
    seconds: float = 0.0  # spent in this call


def to_content(progress: Progress, turn: Turn, status: str | None, data: Tensor | None) -> dict[str, Any]:
    clusters = progress.clusters
    return {
        "outputs": clusters.outputs,
        "targets": clusters.targets,
        "features": clusters.features,
        "generator": clusters.generator.get_state(),
        "passes": [{f.name: getattr(done, f.name) for f in fields(Pass)} for done in clusters.passes],
        "noise_blocks": _listed(clusters.noise_blocks),
        "curvature_diagonal": progress.curvature_diagonal,
        "trace_is_exact": progress.trace_is_exact,
        "epochs": progress.epochs,
        "seconds": progress.seconds,
        "history": to_table(progress.history),
        "turn": asdict(turn),
        "status": status,
        "data": data,
    }


def from_content(saved: Mapping[str, Any], network: LinearisedNetwork) -> tuple[Progress, Turn]:
    """What was saved, after a look whether it can be of this network."""
    device = network.jacobian.device
    try:
        outputs = _checked(saved["outputs"], "outputs", torch.float64, device)
        N, C = outputs.shape
        generator = torch.Generator()
        generator.set_state(saved["generator"])
        likelihood = network.likelihood(outputs, noise=1.0)
        targets = _checked(saved["targets"], "targets", None, device, N)
        clusters = Clusters(
            likelihood,
            outputs,
            checked_targets(likelihood, outputs, targets),
            _checked(saved["features"], "features", torch.float32, device, N),
            generator,
            [_pass(done, network, (N, C)) for done in saved["passes"]],
            _blocks(saved["noise_blocks"], device),
        )
        P = network.jacobian.num_params
        progress = Progress(
            clusters,
            _checked(saved["curvature_diagonal"], "the diagonal", torch.float64, device, P),
            bool(saved["trace_is_exact"]),
            float(saved["epochs"]),
            float(saved["seconds"]),
            from_table(saved["history"]),
        )
        return progress, _turn(saved["turn"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise unusable("a fit by clusters", error) from error


def seen_batches(call: Call, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Outputs, targets, features and digests of the batches that a forward sweep had seen."""
    if call.saved is None:
        return []
    try:
        batches = call.saved["look"]
        seen = [tuple(_checked(part, "a batch", None, device, len(batch[0])) for part in batch) for batch in batches]
        if any(len(batch) != 4 or batch[0].ndim != 2 or batch[2].ndim != 2 for batch in seen):
            raise ValueError("batches of other things")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise unusable("a forward sweep", error) from error
    call.forget()
    return seen


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
    if type(done.by_group) is not bool or not (done.num_kept is None or _is_count(done.num_kept, least=1)):
        raise ValueError("actions that cannot be kept")
    return done


def _turn(saved: Mapping[str, Any]) -> Turn:
    turn = Turn(**saved)
    counts = (turn.passes, turn.rank, turn.done, turn.readings, turn.missing or 0, turn.max_passes or 0)
    amounts = (turn.seconds, turn.max_epochs or 0)
    if not all(map(_is_count, counts)) or not all(type(value) in (int, float) and value >= 0 for value in amounts):
        raise ValueError("counters that do not count")
    return turn


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


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


# --- the data -----------------------------------------------------------------------------------------------------


def batch_digests(data: FixedOrderData, x: Inputs, y: Tensor) -> Tensor:  # (b,)
    """A number for each datum of a batch, of its inputs and its target."""
    rows = data.num_rows(x)
    values = [x[key] for key in sorted(x, key=str)] if isinstance(x, Mapping) else [x]
    columns = [value for value in (*values, y) if isinstance(value, Tensor) and value.ndim and len(value) == rows]
    return digest_rows(*columns).cpu() if columns else torch.zeros(rows, dtype=torch.int64)


def data_digests(data: FixedOrderData) -> Tensor:  # (N,)
    """Of all data: they are read over once."""
    parts = data.each_batch(lambda x, y: (batch_digests(data, x, y).to(data.device),))
    return torch.cat([part.cpu() for (part,) in parts])


def check_data(call: Call, data: FixedOrderData) -> None:
    """See that the data are those that were saved; of a forward sweep in part, those it had seen."""
    if call.saved is not None:
        found, known = data_digests(data), call.saved["data"]
        seen = len(known) if "look" in call.saved and isinstance(known, Tensor) else len(found)
        call.check_data(found[:seen])

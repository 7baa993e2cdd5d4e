"""Where a fit by clusters stands: in its forward sweep or in its passes; as tensors and numbers, and back.

Beside it the posterior of what has been swept so far, and the meter that says how much of the information it has.
Batches are only ever saved whole, so the sums of a run that is resumed are taken in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.clusters.clusters import Clusters
from ntk_iterncgp.clusters.passes import Pass
from ntk_iterncgp.fitting.linearised import LinearisedNetwork, checked_targets
from ntk_iterncgp.fitting.report import Record
from ntk_iterncgp.posterior.merging import folded
from ntk_iterncgp.posterior.weight_space import WeightPosterior


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
        if any(len(batch) != 4 or batch[0].ndim != 2 or batch[2].ndim != 2 for batch in seen):
            raise ValueError("batches of other things")
        return cls(seen)


@dataclass(frozen=True)
class PassPosition:
    """How far a call is in its current pass."""

    rank: int  # of the posterior when the pass began
    was_cut_short: bool  # the pass was begun in an earlier call
    missing: int  # of its data, when this call began
    done: int = 0  # of these
    readings: int = 0  # of the meter, on the way

    @property
    def is_complete(self) -> bool:
        """Whether the pass is done, and the next one may begin."""
        return self.done == self.missing


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
        clusters, position = self.clusters, {} if self.position is None else asdict(self.position)
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
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], network: LinearisedNetwork) -> ClusterState:
        """What was saved, after a look whether it can be of this network."""
        device = network.jacobian.device
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
        return cls(
            clusters,
            _checked(saved["curvature_diagonal"], "the diagonal", torch.float64, device, network.jacobian.num_params),
            bool(saved["trace_is_exact"]),
            float(saved["epochs"]),
            saved["data"],
            _count(saved["turn"]["passes"]),
            _position(saved["turn"]),
        )


def _position(saved: Mapping[str, Any]) -> PassPosition | None:
    if saved["missing"] is None:
        return None
    counts = {name: _count(saved[name]) for name in ("rank", "missing", "done", "readings")}
    return PassPosition(was_cut_short=bool(saved["was_cut_short"]), **counts)


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
        raise ValueError("actions that cannot be kept")
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
    except (torch.linalg.LinAlgError, ArithmeticError):  # images that are no numbers: the self-check mends or refuses
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

"""More data without the old, and fits of other machines: posteriors of disjoint data add up (`posterior/merging.py`).

`update` is a fit of the new data alone, and a merge. With mean="network" that is exact, and with a refined mean in
regression, where W and b of a datum depend on it alone. A refined mean of a classifier is refused: it is the mode given
all data at once, and W is the curvature there.

Parts are summed, and compressed, when the posterior is asked for, or when they have more than twice the actions that it
keeps: a stream of small updates costs what fits to its parts cost.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from laplace.baselaplace import BaseFunctionalLaplace
from laplace.utils.enums import Likelihood
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ntk_iterncgp.data.order import FixedBatches, map_style
from ntk_iterncgp.fitting.network import LinearisedNetwork, NetworkFit, NetworkSettings
from ntk_iterncgp.fitting.report import FitReport, Record
from ntk_iterncgp.laplace_torch.hyperparameters import noise_parts, same_ratios
from ntk_iterncgp.laplace_torch.saving import checked_posterior, seen_by
from ntk_iterncgp.persistence.fingerprint import MIXING, digest_rows
from ntk_iterncgp.posterior.merging import bounded, merge_posteriors
from ntk_iterncgp.posterior.weight_space import WeightPosterior
from ntk_iterncgp.runtime.memory import available_bytes, require_memory
from ntk_iterncgp.solver.stopping import Status

if TYPE_CHECKING:
    from ntk_iterncgp.laplace_torch.fitting import FittedNetwork

AT_FIRST, DATA_PER_ACTION = 1, 25
"""With `max_rank` R, the first data take so many times R actions, later ones their share of R, and all at least one for
so many data: batches of few data take as long as larger ones. Each action is then a group of data, and combined with
all others at once."""
ADVICE = "update(loader) conditions on more data, merge(other) on those of another fit; refine is for a single fit."
INTERRUPTED = "The run was interrupted"  # how the warning of a fit begins of which nothing is kept here


@dataclass(frozen=True, eq=False)
class PartialFit:
    """The posterior of some data, in parts that add up, and what else does."""

    parts: tuple[WeightPosterior, ...]
    loss: float
    num_data: int
    data_seen: Tensor  # fingerprints, one for each data set (k,)
    shards_seen: Tensor  # which part of what each of these is (k, 3): `whole_of`
    report: FitReport | None  # None: of another process

    @classmethod
    def of(cls, la: FittedNetwork) -> PartialFit:
        """What la has been fitted to so far."""
        return cls(la._parts, float(la.loss), la.n_data, la.data_seen, la.shards_seen, la._report)

    @classmethod
    def of_fit(cls, found: NetworkFit, shard: Tensor) -> PartialFit:
        """A fit by itself, of this part (1, 3)."""
        return cls((found.posterior,), found.loss, found.num_data, found.data_seen, shard, found.report)

    @property
    def rank(self) -> int:
        """How many actions the parts have together."""
        return sum(part.rank for part in self.parts)


def check_may_add(la: FittedNetwork) -> None:
    """Raise where the posterior of some data is not a part of that of more."""
    if la.settings.mean == "refined" and la.likelihood != Likelihood.REGRESSION:
        raise ValueError(
            "`mean` must be 'network' to add data to a classifier, since a refined mean is the mode given all data at "
            "once, and the curvature moves with it; got 'refined'. Try mean='network', or fit(loader) with all data."
        )


# --- new data -----------------------------------------------------------------------------------------------------


@contextmanager
def without_interruption() -> Iterator[None]:
    """A part of an update is no update: what a fit says about a part that is kept does not hold."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=INTERRUPTED)
        yield


def check_new_data(la: FittedNetwork, found: NetworkFit, shard: Tensor) -> None:
    """Raise `KeyboardInterrupt` after Ctrl-C, and warn of data that are in the posterior already."""
    if found.report.status == Status.INTERRUPTED.value:
        raise KeyboardInterrupt
    if count_twice(la.data_seen, found.data_seen) or overlap(la.shards_seen, shard):
        warnings.warn(
            "These data, or some of them, are in the posterior already, and count twice now. Try fit(loader) for a "
            "posterior that has them once.",
            stacklevel=5,
        )


PROBES = 64  # data by which the whole is recognised of which another shard was fitted


def whole_of(loader: Any, shard: tuple[int, int] | None) -> Tensor:  # (1, 3)
    """(k, K, a hash of the data that were shared out), by which overlapping shards are told from disjoint ones.

    The hash is of a few data at given places of the fixed order: two loaders that give the same data in another order
    are not recognised. It is zero where that is not known, as of a stream, or would take reading a file for a fit that
    is of all data.
    """
    is_stream = isinstance(loader, DataLoader) and (
        isinstance(loader.dataset, IterableDataset) or type(loader).__iter__ is not DataLoader.__iter__
    )
    rows, number = list[Tensor](), 0
    if isinstance(loader, DataLoader) and not is_stream:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fit has told, or will
            source = map_style(loader)
        number = len(source.indices)
        if number and (shard is not None or source.tensors is not None):
            alone = replace(source, settings=source.settings | {"num_workers": 0, "pin_memory": False})
            batches = [[source.indices[i]] for i in _places(number)]
            with suppress(Exception):  # of a collate_fn that will not have one datum: then it is not known
                rows = [_digest_of(batch) for batch in FixedBatches(alone.read(batches), len(batches), alone)]
    elif isinstance(loader, (list, tuple)):
        number = len(loader)
        rows = [_digest_of(loader[i]) for i in _places(number)]
    if not rows:
        return torch.zeros(1, 3, dtype=torch.int64)
    found = torch.stack(rows)
    for shift, factor in MIXING:
        found = (found ^ (found >> shift)) * factor
    places = torch.arange(1, 2 * len(found), 2)  # odd: the order counts
    return torch.tensor([[*(shard or (1, 1)), int((found * places).sum() + number)]])


def _places(number: int) -> list[int]:
    """Some of so many places, the first and the last among them."""
    return sorted({round(place) for place in torch.linspace(0, number - 1, min(number, PROBES)).tolist()})


def _digest_of(batch: Any) -> Tensor:
    """Of all tensors with rows in it, inputs and targets."""
    if isinstance(batch, Tensor):
        return digest_rows(batch).sum().cpu() if batch.ndim else torch.zeros((), dtype=torch.int64)
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    total = torch.zeros((), dtype=torch.int64)
    for place, part in enumerate(parts):
        total += (2 * place + 1) * _digest_of(part)
    return total


def overlap(one: Tensor, other: Tensor) -> bool:  # (a, 3), (b, 3)
    """Whether a datum is in two shards of one whole: rows k + K·i and j + J·i' meet where gcd(K, J) divides k − j."""
    (k, K, whole), (j, J, same) = one[:, None].unbind(2), other[None].unbind(2)
    return bool(((whole == same) & (whole != 0) & ((k - j) % torch.gcd(K, J).clamp_min(1) == 0)).any())


def count_twice(one: Tensor, other: Tensor) -> bool:  # (a,), (b,)
    """Whether a data set is in both, or one is all of the other: fingerprints of disjoint data add up."""
    if not len(one) or not len(other):
        return False
    return bool(torch.isin(other, torch.cat([one, one.sum()[None]])).any() | torch.isin(one, other.sum()).any())


def update_settings(la: FittedNetwork, network: LinearisedNetwork) -> NetworkSettings:
    """Return the settings of la for an update.

    Without compression, which is for all actions together; and with fewer actions where the rank is bounded.
    """
    settings, max_rank, before = la.settings, la.settings.options.max_rank, 0
    if la._fitted:
        options, before = replace(settings.options, max_rank=None), la.n_data
        settings = replace(settings, options=options, is_known=la.has_fitted)
    if max_rank is None or not settings.in_groups:
        return settings
    new = network.data.num_data(len(network.first_batch.outputs))
    share = max(math.ceil(max_rank * new / (before + new)) if before else AT_FIRST * max_rank, new // DATA_PER_ACTION)
    return replace(settings, num_actions=min(settings.num_actions, share), combines=False)


@contextmanager
def derivatives_as_before(la: FittedNetwork) -> Iterator[None]:
    """Derivatives in the dtype of the posterior, whatever they would be in for the new data alone."""
    before, la.dtype = la.dtype, la._parts[0].dtype if la._fitted else la.dtype
    try:
        yield
    finally:
        la.dtype = before


# --- another fit --------------------------------------------------------------------------------------------------


def other_fit(la: FittedNetwork, other: Any) -> PartialFit:
    """Another fit of this network, of other data.

    Args:
        la: Whose network it must be.
        other: A fitted Laplace object, or its `state_dict()`.

    Raises:
        TypeError: for anything else.
        ValueError: for a fit of another model, likelihood or prior mean, or of data that la has seen.
    """
    state = getattr(other, "state_dict")() if isinstance(other, BaseFunctionalLaplace) else other  # noqa: B009
    if not isinstance(state, Mapping):
        raise TypeError(
            f"`other` must be a fitted Laplace object or its state_dict(); got {type(other).__name__}. Try "
            "torch.load(file, weights_only=True), or the command `ntk-iterncgp merge` for files that it fitted."
        )
    posterior = checked_posterior(la, state)
    for name, own in (("n_outputs", la.n_outputs), ("prior_mean", la.prior_mean)):
        if not _same(own, state[name]):
            raise ValueError(
                f"`other` must have the {name} {_shown(own)}; got {_shown(state[name])}. Try a Laplace object made as "
                "this one."
            )
    if not same_ratios(noise_parts(la.sigma_noise)[1], noise_parts(state["sigma_noise"])[1]):
        raise ValueError(
            "`other` must have the ratios of sigma_noise between outputs of this fit, "
            f"{la.sigma_noise.detach().tolist()}; got {state['sigma_noise'].tolist()}. Try fits with one sigma_noise."
        )
    seen, shards = seen_by(state)
    if count_twice(la.data_seen, seen) or overlap(la.shards_seen, shards):
        raise ValueError(
            "`other` must be a fit of other data; got one of data that are in this posterior already, and would count "
            "twice. Try to merge each shard once, and shards (k, K) with one K."
        )
    return PartialFit((posterior,), float(state["loss"]), int(state["n_data"]), seen, shards, None)


def _shown(value: Any) -> str:
    value = torch.as_tensor(value)
    return f"{value.item():.6g}" if value.numel() == 1 else f"a tensor of {value.numel()}"


def _same(one: Any, other: Any) -> bool:
    """Of numbers or vectors, where one number may stand for a vector of it."""
    a, b = (torch.as_tensor(value).detach().double().cpu().reshape(-1) for value in (one, other))
    return 1 in (len(a), len(b), len(a) / len(b)) and bool((a == b).all())


# --- both ---------------------------------------------------------------------------------------------------------


def added(la: FittedNetwork, new: PartialFit) -> PartialFit:
    """All that la has been fitted to and the new, not yet summed; la itself stays as it is.

    Raises:
        MemoryError: where the sum will not fit.
        ValueError: for a refined mean that cannot be added to.
    """
    own = PartialFit.of(la)
    parts, images, rank = (*own.parts, *new.parts), own.parts[0].images, own.rank + new.rank
    require_memory(
        2 * rank * len(images) * images.element_size(),
        available_bytes(images.device),
        f"Use max_rank, which bounds the number of actions; this would be {rank:,} of {len(images):,} weights.",
    )
    if la.settings.mean == "refined":
        parts = tuple(_about(part, la.prior_mean) for part in parts)
    return PartialFit(
        parts,
        own.loss + new.loss,
        own.num_data + new.num_data,
        torch.cat([own.data_seen, new.data_seen]),
        torch.cat([own.shards_seen, new.shards_seen]),
        _report(own, new),
    )


def is_crowded(found: PartialFit, max_rank: int | None) -> bool:
    """Whether the parts have more than twice the actions that their sum has at most."""
    num_weights = len(found.parts[0].images)
    return found.rank > 2 * (num_weights if max_rank is None else min(max_rank, num_weights))


def summed(la: FittedNetwork, found: PartialFit, max_rank: int | None) -> PartialFit:
    """What adds up to `found`, as one posterior.

    Args:
        la: Whose hyperparameters decide which combinations are kept.
        found: The parts.
        max_rank: How many actions to keep; None for all, or for as many as there are weights.
    """
    started, precision, noise_scale = perf_counter(), la.prior_precision.detach(), la._noise_scale.detach()
    posterior = bounded(merge_posteriors(found.parts), max_rank, precision, noise_scale)
    report = found.report
    if report is not None:
        information = posterior.information_captured(precision, noise_scale)
        line = Record(
            num_products=report.num_products,
            newton_step=report.num_newton_steps,
            rank=posterior.rank,
            objective=math.nan,
            relative_residual=math.nan,
            information_captured=information,
            seconds=report.seconds + perf_counter() - started,
            epochs=report.epochs,
        )
        report = replace(
            report,
            rank=line.rank,
            information_captured=information,
            seconds=line.seconds,
            history=[*report.history, line],
            trace_is_exact=posterior.trace_is_exact,
        )
    return replace(found, parts=(posterior,), report=report)


def _about(part: WeightPosterior, prior_mean: Tensor) -> WeightPosterior:
    """With the right-hand side for this prior mean."""
    if part.anchor_share:
        raise ValueError(
            "A refined mean must come from a full Newton step to be added to; got one from a shorter step. Try more "
            "num_actions, or mean='network'."
        )
    right_hand_side = part.right_hand_side_for(prior_mean)
    return replace(part, right_hand_side=right_hand_side, prior_mean=prior_mean.detach().reshape(-1).clone())


def _report(own: PartialFit, new: PartialFit) -> FitReport | None:
    """Return the counts of both; the history gets its next line when they are summed.

    Epochs are passes over all data: each datum counts those that it took part in. None where nothing was fitted in this
    process.
    """
    reports = [part.report for part in (own, new) if part.report is not None]
    if not reports:
        return None
    epochs = None
    if all(report.epochs is not None for report in reports):
        counted = [(part.report.epochs, part.num_data) for part in (own, new) if part.report is not None]
        epochs = sum((e or 0.0) * n for e, n in counted) / sum(n for _, n in counted)
    return replace(
        reports[-1],
        status=next((report.status for report in reports if report.status != Status.EXACT.value), reports[-1].status),
        advice=ADVICE,
        num_products=sum(report.num_products for report in reports),
        seconds=sum(report.seconds for report in reports),
        history=reports[0].history,
        epochs=epochs,
        products_by="",
        variance_ratio=None,
    )

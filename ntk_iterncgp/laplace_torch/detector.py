"""`la.detector(inputs)`: which inputs are unlike those the network was trained for, from one fit.

A detector has a prior precision of its own, beside that of predictions, chosen without labels or outliers
(`posterior/detection.py`). It is frozen: the posterior, precision and temperature are those of the moment it was made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from ntk_iterncgp.clusters.doubling import doubling
from ntk_iterncgp.data.fixed_order import Inputs
from ntk_iterncgp.jacobian.rows import Contrasts, Rows
from ntk_iterncgp.laplace_torch.hyperparameters import check_follows_fit, check_positive, follows_prior
from ntk_iterncgp.posterior.convergence import Convergence, convergence_at
from ntk_iterncgp.posterior.detection import Measured, Novelty, Prior, balancing, by_median, split
from ntk_iterncgp.posterior.scores import AUTO, SCORES, TYPICALITY, against_rest
from ntk_iterncgp.posterior.weight_space import WeightPosterior
from ntk_iterncgp.runtime.threads import evaluating, full_precision

if TYPE_CHECKING:
    from ntk_iterncgp.laplace_torch.base import IterNCGPLaplace

LEAST_INPUTS = 20  # familiar inputs, below which a rank says nothing


@dataclass(frozen=True, eq=False)
class Detector:
    """Scores, conformal p-values and alarms for new inputs. Made by `la.detector(inputs)`; prints as one line."""

    la: IterNCGPLaplace
    prior: Prior
    novelty: Novelty
    z: float | None  # None: the precision of predictions
    _told: list[str] = field(default_factory=list, repr=False)  # so that it is told once

    @property
    def prior_precision(self) -> Tensor:  # (L,)
        """Of the detector, for each parameter tensor."""
        return self.prior.precision

    def score(self, x: Inputs) -> Tensor:  # (b,)
        """Compute how unlike the familiar inputs each input is, higher for less familiar ones.

        Args:
            x: Inputs as the model takes them: a tensor, a mapping, or a loader of batches.

        Returns:
            The score of each input: the weighted sum of those that are combined, or the only one.
        """
        self._warn_of_new_data()
        parts = measured_at(self.la, self.prior, x)
        return torch.cat([self.novelty.score(part.latent(self.prior)) for part in parts])

    def _warn_of_new_data(self) -> None:
        """Posteriors of more data have a W of larger rank; to be refined or compressed leaves it as it is."""
        now = sum(part.curvature_rank for part in self.la._parts)
        if now != self.prior.posterior.curvature_rank and not self._told:
            self._told.append(
                "This detector was made before update or merge added data, and does not know them: it scores by the "
                "posterior of that time. Try la.detector(inputs) again."
            )
            warnings.warn(self._told[0], stacklevel=3)

    def p_value(self, x: Inputs) -> Tensor:  # (b,)
        """Compute the conformal p-value of each input, p = (1 + #{s_i ≥ s}) / (n + 1).

        It is uniform on inputs like those that the detector was calibrated on, on average over the draw of the n that
        are ranked (for one draw it is off by about 1/√n). These had no say in what the score is; fewer than 2000 are
        cross-fitted, so that each had none in what it scores itself.

        Args:
            x: Inputs as the model takes them: a tensor, a mapping, or a loader of batches.

        Returns:
            The chance that a familiar input scores as high.
        """
        return self.novelty.p_value(self.score(x))

    def alarm(self, x: Inputs, rate: float = 0.01) -> Tensor:  # (b,) of bool
        """Raise an alarm where an input is less familiar than all but a fraction `rate` of the familiar ones.

        Args:
            x: Inputs as the model takes them: a tensor, a mapping, or a loader of batches.
            rate: The fraction of alarms among familiar inputs. It takes at least 1/rate − 1 of these.

        Returns:
            Whether p ≤ rate.
        """
        if not 0 < rate < 1:
            raise ValueError(f"`rate` must be between 0 and 1; got {rate}. Try 0.01.")
        if rate * (len(self.novelty) + 1) < 1:
            raise ValueError(
                f"`rate` must be at least 1/(n + 1) = {1 / (len(self.novelty) + 1):.3g} for a detector of n = "
                f"{len(self.novelty)} inputs; got {rate}. Try more inputs: la.detector(inputs)."
            )
        return self.p_value(x) <= rate

    def __str__(self) -> str:
        precision = self.prior_precision.double().log().mean().exp()
        rule = "that of predictions" if self.z is None else f"median evidence {self.z:g} standard deviations"
        return (
            f"Detector by {' + '.join(self.novelty.names)}, calibrated on {len(self.novelty):,} inputs, at prior "
            f"precision {float(precision):.3g} ({rule})."
        )

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings; the posterior is saved beside them."""
        return {
            **self.novelty.to_dict(),
            "variances": self.prior.variances,
            "scales": self.prior.scales,
            "noise_scale": self.prior.noise_scale,
            "z": self.z,
        }

    @classmethod
    def from_dict(cls, saved: Any, la: IterNCGPLaplace, posterior: WeightPosterior) -> Detector:
        """What `to_dict` made, for a posterior of `la`; a `ValueError` where it is damaged."""
        if not isinstance(saved, Mapping):
            raise _damaged("detector", saved)
        novelty, numbers = Novelty.from_dict(saved, la._device), {}
        for name, shape in (("variances", (2, len(la._layer_sizes()))), ("scales", (2,)), ("noise_scale", (1,))):
            value: Any = saved.get(name)
            is_number = isinstance(value, Tensor) and value.dtype == torch.float64 and tuple(value.shape) == shape
            if not is_number or not bool((torch.isfinite(value) & (value > 0)).all()):
                raise _damaged(name, value)
            numbers[name] = value.to(la._device)
        z: Any = saved.get("z")
        if not (z is None or (isinstance(z, (int, float)) and 0 < z < float("inf"))):
            raise _damaged("z", z)
        if la.likelihood != Likelihood.CLASSIFICATION and not set(novelty.names) <= set(_possible("regression")):
            raise _damaged("names", novelty.names)
        return cls(la, Prior(posterior, **numbers), novelty, z)


def _damaged(name: str, found: object) -> ValueError:
    return ValueError(
        f"The {name} of a saved detector must be whole; got {found!r:.60}. Try to save it again, or to make it again."
    )


def rows_at(la: IterNCGPLaplace, x: Inputs | DataLoader[Any]) -> Iterator[Rows]:
    """Rows in parts that fit in `chunk_bytes`: one contrast of a classifier, all outputs of a regression."""
    contrasts = against_rest if la.likelihood == Likelihood.CLASSIFICATION else None
    la._refresh_posterior()
    for batch in batches_of(x):
        la._check_nonempty_inputs(batch)
        yield from _computed(la, batch, contrasts)


def _computed(la: IterNCGPLaplace, batch: Inputs, contrasts: Contrasts | None) -> Iterator[Rows]:
    """The rows of a batch, part by part. What the caller does with them is outside: other threads need not wait."""
    parts: Iterator[Rows] | None = None
    while True:
        try:
            with evaluating(la.model), torch.no_grad(), full_precision(la._device):
                parts = la._rows_at(batch, contrasts) if parts is None else parts
                found = [*islice(parts, 1)]
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or (shapes := _other_shapes(la, batch)) is None:
                raise
            raise ValueError(
                f"`x` must hold inputs as those of the fit, of shape {shapes[0]}; got {shapes[1]}. Try the same "
                "preprocessing."
            ) from error
        if not found:
            return
        yield found.pop()


def _other_shapes(la: IterNCGPLaplace, batch: Inputs) -> tuple[str, str] | None:
    """The shape of an input of the fit, and that of another one, if both are known and not the same."""
    first = None if la._fit is None else la._fit.first_batch.inputs
    if not isinstance(first, Tensor) or not isinstance(batch, Tensor) or first.shape[1:] == batch.shape[1:]:
        return None
    return str((*"N", *first.shape[1:])).replace("'", ""), str(tuple(batch.shape))


def measured_at(la: IterNCGPLaplace, prior: Prior, x: Inputs | DataLoader[Any]) -> Iterator[Measured]:
    """The small matrices of these rows; no row is held longer."""
    dtype = prior.posterior.dtype if la.likelihood == Likelihood.CLASSIFICATION else torch.float64

    def measured(rows: Rows) -> Measured:
        with torch.no_grad(), full_precision(la._device):
            return Measured.of(rows, prior.posterior, prior.variances, dtype)

    return map(measured, rows_at(la, x))  # by `map`, no name holds the rows of one part while the next are computed


def batches_of(x: Inputs | DataLoader[Any]) -> Iterator[Inputs]:
    """One batch of inputs, or those of a loader: of pairs (x, y), of inputs alone, or mappings."""
    if isinstance(x, (Tensor, Mapping)):
        yield x
        return
    if not isinstance(x, Iterable) or hasattr(x, "__array__"):
        advice = "torch.as_tensor(x)" if hasattr(x, "__array__") else "a tensor"
        raise ValueError(f"`x` must be a tensor, a mapping or a loader; got {type(x).__name__}. Try {advice}.")
    for batch in x:
        inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if not isinstance(inputs, (Tensor, Mapping)):
            raise ValueError(
                f"`x` must be a loader of batches of tensors or mappings; got {type(inputs).__name__}. Try "
                "DataLoader(TensorDataset(x), batch_size=100)."
            )
        yield inputs


def make_detector(la: IterNCGPLaplace, x: Inputs | DataLoader[Any], score: str | Sequence[str], z: float) -> Detector:
    """One pass over familiar inputs: the precision by the median rule, and their scores to rank others among."""
    names = _names(la, score)
    if not (isinstance(z, (int, float)) and 0 < z < float("inf")):
        raise ValueError(f"`z` must be a positive number of standard deviations; got {z!r}. Try 1.75.")
    if draws_from(la, x):
        warnings.warn(
            "`x` must be inputs that the network was not trained on, since it is surer of those that it was, and "
            "others would raise too many alarms; got the training data. Try a validation set.",
            stacklevel=3,
        )
    of_classes = la.likelihood == Likelihood.CLASSIFICATION
    is_own = of_classes and follows_prior(la)
    prior = _prior_of(la, balances=is_own)
    parts = list(measured_at(la, prior, x))
    count = sum(len(part.outputs) for part in parts)
    if count < LEAST_INPUTS:
        raise ValueError(f"`x` must hold at least {LEAST_INPUTS} inputs to rank others among; got {count}. Try 1000.")
    familiar = Measured.cat(parts)
    chosen, others = split(count, la._device)
    if is_own:
        prior = by_median(familiar[chosen], prior, z)
    ranked = None if others is None else familiar[others].latent(prior)
    novelty = Novelty.of(names, familiar[chosen].latent(prior), ranked, of_classes=of_classes)
    return Detector(la, prior, novelty, float(z) if is_own else None)


def _prior_of(la: IterNCGPLaplace, *, balances: bool) -> Prior:
    """One that balances the layers beside a flat one, their scales to be found; or that of predictions."""
    posterior, noise_scale = la.posterior, la._noise_scale.detach().double().reshape(1).clone()
    if balances:
        variances = balancing(posterior)
    else:
        precision, num_layers = la.prior_precision.detach().double().reshape(-1), len(la._layer_sizes())
        if len(precision) not in (1, num_layers):
            raise ValueError(
                f"`prior_precision` must be one number, or one for each layer, for a detector at the precision of "
                f"predictions; got {len(precision)}. Try la.prior_precision = 1.0 before la.detector(inputs)."
            )
        variances = (1 / precision).expand(2, num_layers).contiguous()
    return Prior(posterior, noise_scale, variances, variances.new_ones(2))


def draws_from(la: IterNCGPLaplace, x: Any) -> bool:
    """Whether `x`, a tensor or a loader, holds data of the last fit. False where it cannot be seen."""
    fitted = la._training_data[la]() if la in la._training_data else None
    return fitted is not None and _overlap(fitted, getattr(x, "dataset", x))


def _overlap(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Subset) and isinstance(other, Subset):
        same = one.dataset is other.dataset
        return same and not set(map(int, one.indices)).isdisjoint(map(int, other.indices))
    if isinstance(other, Subset):
        return one is other.dataset
    if isinstance(one, Subset):  # of a larger set, all of which is given
        return one.dataset is other
    inputs = [data.tensors[0] if isinstance(data, TensorDataset) else data for data in (one, other)]
    return all(isinstance(value, Tensor) and value.numel() for value in inputs) and (
        inputs[0].data_ptr() == inputs[1].data_ptr()
    )


def _names(la: IterNCGPLaplace, score: str | Sequence[str]) -> tuple[str, ...]:
    task = str(Likelihood(la.likelihood).value)
    names = AUTO[task] if score == "auto" else (score,) if isinstance(score, str) else tuple(score)
    possible = _possible(task)
    if not names or not all(name in possible for name in names):
        raise ValueError(
            f"`score` must be 'auto' or one or several of {', '.join(map(repr, possible))} for {task}; got {score!r}. "
            "Try 'auto'."
        )
    return names


def _possible(task: str) -> list[str]:
    """The names of the scores that have a meaning for this task."""
    return [n for n in SCORES if task == "classification" or not SCORES[n].needs_classes] + [TYPICALITY]


class Detecting:
    """What a flavour has of detection: a mixin before `FittedNetwork`."""

    _detector: Detector | None = None
    posterior: WeightPosterior

    def detector(
        self, x: Inputs | DataLoader[Any] | None = None, *, score: str | Sequence[str] = "auto", z: float = 1.75
    ) -> Detector:
        """Make a detector of unfamiliar inputs, from familiar ones without labels; or return the one that is there.

        Its prior precision balances the layers, and is such that the median evidence of familiar inputs is `z`
        posterior standard deviations; that of predictions stays. It costs a forward and a backward pass for each
        input, here and later, and is saved with the posterior, as long as this is not fitted, refined or compressed
        again. All inputs fix the score and are ranked, by cross-fitting; of 2000 or more, 500 do, and the others are.

        Args:
            x: Held-out inputs of the kind that the network was trained for, not those that it was trained on: a tensor,
                a mapping, or a loader (labels are ignored). A thousand are enough; alarms at rate r are off by
                about √(r/n). None: the detector that was made or loaded before.
            score: A name in `ntk_iterncgp.posterior.scores.SCORES`, "typicality", or several of them, which are
                standardised and summed; "auto" combines those that hold up across networks.
            z: The number of posterior standard deviations; detection is flat between 1 and 3. Regression has no such
                rule, and a refined mean of a classifier no other precision: they keep that of predictions.

        Returns:
            The detector: `score(x)`, `p_value(x)`, `alarm(x, rate)`.
        """
        la: Any = self
        check_follows_fit(la, "detector")
        if x is not None:
            self._detector = make_detector(la, x, score, z)
        elif self._detector_now() is None:
            raise RuntimeError(
                "la.detector() must follow la.detector(inputs) for this posterior; got none. Try la.detector(inputs) "
                "with some hundred held-out inputs."
            )
        assert self._detector is not None
        return self._detector

    def convergence(self, x: Inputs | DataLoader[Any], *, prior_precision: float | Tensor | None = None) -> Convergence:
        """Estimate how much the variance at some inputs would still fall with twice the actions.

        Of a classifier it is the variance of the likeliest class against the rest, of a regression that of all outputs;
        on average over the inputs. It costs a forward and a backward pass for each, and no training data.

        Args:
            x: Inputs: a tensor, a mapping, or a loader (labels are ignored).
            prior_precision: At which precision; None: the current one. That of a detector is its `prior_precision`.

        Returns:
            Variances of the prior, with the actions, and with twice as many (None where that cannot be told: it can
            after one pass with policy="clusters" in this process); prints as a sentence with advice.
        """
        la: Any = self
        check_follows_fit(la, "convergence")
        if prior_precision is None:
            precision = la.prior_precision.detach()
        else:
            check_positive("prior_precision", prior_precision)
            precision = torch.as_tensor(prior_precision).detach().to(la._device).reshape(-1)
        twice = None if (clusters := la._clusters_now()) is None else doubling(clusters)
        return convergence_at(rows_at(la, x), la.posterior, precision.double(), la._noise_scale.detach(), twice)

    def _saved_detector(self, saved: Any, posterior: WeightPosterior) -> Detector:
        la: Any = self
        return Detector.from_dict(saved, la, posterior)

    def _detector_now(self) -> Detector | None:
        """The detector that was made for this posterior, if there is one."""
        made = self._detector
        return made if made is not None and made.prior.posterior is self.posterior else None

"""Counts that are logistic in f: successes in a number of trials, and overdispersed counts.

With the shifted latent value z = f + s and t "trials" both are, but for a constant,

    log p(y | f) = y log σ(z) + (t − y) log σ(−z)

    ∇ = y − tσ(z) = y σ(−z) − (t − y) σ(z)            W = t σ(z) σ(−z) ≥ 0            W⁺ = 1/W

so both are log-concave in f.

    Binomial            t trials, s = 0
    NegativeBinomial    t = y + 1/α and s = log(α e), with dispersion α and exposure e: W depends on y
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ntk_iterncgp.likelihoods.base import (
    OneLatent,
    column,
    described_per_datum,
    is_one,
    one_dimensional,
    positive_per_datum,
    require,
)


class _Logistic(OneLatent):
    """What the two have in common: one latent function and the formulas above."""

    @abstractmethod
    def _failures(self, targets: Tensor) -> Tensor:  # (N,)
        """t − y."""

    @abstractmethod
    def _trials(self, latent: Tensor) -> Tensor:  # (N, 1)
        """t."""

    @abstractmethod
    def _shifted(self, latent: Tensor) -> Tensor:  # (N, 1)
        """z."""

    @abstractmethod
    def _log_constant(self, targets: Tensor) -> Tensor:  # (N,)
        """What does not depend on f."""

    def log_prob(self, latent: Tensor, targets: Tensor) -> Tensor:
        z = self._shifted(latent)[:, 0]
        return (
            targets * logsigmoid(z) + self._failures(targets).to(z) * logsigmoid(-z) + self._log_constant(targets).to(z)
        )

    def score(self, latent: Tensor, targets: Tensor) -> Tensor:
        z = self._shifted(latent)  # no cancellation where σ(z) is all but 0 or 1
        return targets[:, None] * torch.sigmoid(-z) - self._failures(targets)[:, None] * torch.sigmoid(z)

    def weight(self, latent: Tensor) -> Tensor:  # (N, 1)
        z = self._shifted(latent)
        return (self._trials(latent) * torch.sigmoid(z) * torch.sigmoid(-z)).clamp_min(self.curvature_floor)


class Binomial(_Logistic):
    """Successes in a known number of trials; one latent function, the logit of the probability p = σ(f) of a success.

    Predictions are probabilities of a success, hence the same for any number of trials.

    Args:
        trials: How often each datum was tried: one whole number for all, or (N,).
    """

    per_datum = per_datum_arguments = ("trials",)

    def __init__(self, trials: float | Sequence[float] | Tensor) -> None:
        self.trials = positive_per_datum(trials, "trials", "Try trials=10, or a tensor with one number for each datum.")
        if not bool((self.trials == self.trials.round()).all()):
            raise ValueError("`trials` must be whole numbers; got a fraction. Try to round them.")

    def __repr__(self) -> str:
        return f"Binomial(trials={described_per_datum(self.trials)})"

    def settings(self) -> dict[str, Any]:
        return {"trials": self.trials}

    def check_targets(self, targets: Tensor) -> Tensor:
        targets = one_dimensional(targets, "Binomial", "each a number of successes").double()
        self.check_length(len(targets))
        message = "`y` must be counts of successes for Binomial, from 0 to the number of trials"
        is_count = (targets >= 0) & (targets == targets.round())
        require(is_count & (targets <= self.trials.to(targets.device)), targets, message)
        return targets

    def response(self, latent: Tensor) -> Tensor:
        return torch.sigmoid(latent)

    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:
        return torch.sigmoid(mean / torch.sqrt(1 + math.pi / 8 * variance))

    def _failures(self, targets: Tensor) -> Tensor:
        return self.trials.to(targets.device) - targets

    def _trials(self, latent: Tensor) -> Tensor:
        return column(self.trials, latent)

    def _shifted(self, latent: Tensor) -> Tensor:
        return latent

    def _log_constant(self, targets: Tensor) -> Tensor:
        failures = self._failures(targets)
        return (targets + failures + 1).lgamma() - (targets + 1).lgamma() - (failures + 1).lgamma()


class NegativeBinomial(_Logistic):
    """Counts with mean μ = e·eᶠ and variance μ + αμ², more than a Poisson's; one latent function, log(μ/e).

    W depends on the counts, so a likelihood is bound to them (`given`) before it is asked for W. Predictions are means
    per unit of exposure: multiply them by the exposure of a new datum.

    Args:
        dispersion: α > 0. As it falls to 0 the likelihood becomes Poisson's.
        exposure: For how long, or over how large an area, each datum was counted: one number for all, or (N,).
    """

    has_exact_response = True
    per_datum = ("exposure", "targets")
    per_datum_arguments = ("exposure",)

    def __init__(self, dispersion: float, *, exposure: float | Sequence[float] | Tensor = 1.0) -> None:
        if isinstance(dispersion, bool) or not (math.isfinite(dispersion) and dispersion > 0):
            raise ValueError(
                f"`dispersion` must be a positive, finite number; got {dispersion}. Try 0.5, or Poisson() for none."
            )
        self.dispersion = float(dispersion)
        self.exposure = positive_per_datum(exposure, "exposure", "Try exposure=1.0.")
        self.targets: Tensor | None = None

    def __repr__(self) -> str:
        shown = "" if is_one(self.exposure) else f", exposure={described_per_datum(self.exposure)}"
        return f"NegativeBinomial(dispersion={self.dispersion:g}{shown})"

    def settings(self) -> dict[str, Any]:
        return {"dispersion": self.dispersion, "exposure": self.exposure}

    def given(self, targets: Tensor) -> Self:
        bound = copy(self)
        bound.targets = targets
        return super(NegativeBinomial, bound).given(targets)

    def check_targets(self, targets: Tensor) -> Tensor:
        targets = one_dimensional(targets, "NegativeBinomial", "each a count").double()
        message = "`y` must be counts 0, 1, 2, … for NegativeBinomial, no negative and no fractional numbers"
        require((targets >= 0) & (targets == targets.round()), targets, message)
        self.check_length(len(targets))
        return targets

    def response(self, latent: Tensor) -> Tensor:
        return latent.exp()

    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:
        return (mean + variance / 2).exp()  # the mean of a log-normal: exact

    def _failures(self, targets: Tensor) -> Tensor:
        return torch.full_like(targets, 1 / self.dispersion)

    def _trials(self, latent: Tensor) -> Tensor:
        if self.targets is None:
            raise RuntimeError(
                "The curvature of NegativeBinomial must be asked of one bound to its counts, on which it depends; got "
                "one without targets. Try given(targets).weight(latent)."
            )
        return column(self.targets + 1 / self.dispersion, latent)

    def _shifted(self, latent: Tensor) -> Tensor:
        return latent + (column(self.exposure, latent) * self.dispersion).log()

    def _log_constant(self, targets: Tensor) -> Tensor:
        size = 1 / self.dispersion
        return (targets + size).lgamma() - math.lgamma(size) - (targets + 1).lgamma()

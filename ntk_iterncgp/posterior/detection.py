"""Calibrate scores of unfamiliar inputs on familiar ones: no labels, no outliers.

precision   the prior precision at which the median evidence of familiar inputs is z posterior standard deviations: the
            median of hᵀf / √(hᵀΣh) falls with the variance, so there is one. What suits probabilities is too little
            variance for detection, where every familiar input is many standard deviations sure
ranks       a score counts by how many familiar inputs have as high a one, p = (1 + #{s_i ≥ s}) / (n + 1), which is
            uniform for another familiar input (conformal). Several scores are combined by Fisher's rule, −Σ log p, and
            the sum is ranked again, since they are not independent
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.posterior.scores import SCORES, Latent, latent_of
from ntk_iterncgp.posterior.tuning import ValidationPart
from ntk_iterncgp.posterior.weight_space import WeightPosterior

PRECISIONS = (1e-12, 1e18)  # between which the median rule looks
HALVINGS = 18  # of these thirty decades: the precision to 0.03 %


@dataclass(frozen=True, eq=False)
class Novelty:
    """Scores, and what they are at familiar inputs: a score for new inputs and its rank."""

    names: tuple[str, ...]
    references: Tensor  # (scores, n), each ascending
    combined: Tensor  # (n,), ascending

    @classmethod
    def of(cls, names: Sequence[str], familiar: Latent) -> Novelty:
        """Calibrate scores on familiar inputs.

        Args:
            names: Of the scores, keys of `SCORES`; several are combined by their ranks.
            familiar: What the scores are asked about, at n familiar inputs.
        """
        values = torch.stack([SCORES[name](familiar) for name in names])
        references = values.sort(1).values
        # Each familiar input is ranked among all n, itself included, as a new one is among n + 1.
        ranks = torch.stack([_as_high(r, v) for r, v in zip(references, values, strict=True)]) / values.shape[1]
        combined = values[0] if len(names) == 1 else -ranks.log().sum(0)
        return cls(tuple(names), references, combined.sort().values)

    def __len__(self) -> int:
        """n, the number of familiar inputs."""
        return len(self.combined)

    def score(self, latent: Latent) -> Tensor:  # (b,)
        """The score of new inputs, higher for less familiar ones: the only one, or −Σ log p over several."""
        values = [SCORES[name](latent) for name in self.names]
        if len(values) == 1:
            return values[0]
        pairs = zip(self.references, values, strict=True)
        ranks = torch.stack([(1 + _as_high(reference, value)) / (len(self) + 1) for reference, value in pairs])
        return -ranks.log().sum(0)

    def p_value(self, scores: Tensor) -> Tensor:  # (b,) -> (b,)
        """Rank scores among those of the familiar inputs, p = (1 + #{s_i ≥ s}) / (n + 1).

        Where several are equal the place among them is drawn, always the same for the same scores, so that p is
        uniform for familiar inputs.
        """
        above = (len(self) - torch.searchsorted(self.combined, scores, right=True)).double()
        equal = _as_high(self.combined, scores) - above
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(len(scores), generator=generator, dtype=torch.float64).to(scores.device)
        return (1 + above + (drawn * (equal + 1)).floor()) / (len(self) + 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain tensors and strings."""
        return {"names": list(self.names), "references": self.references, "combined": self.combined}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], device: torch.device) -> Novelty:
        """What `to_dict` made, on a device; a `ValueError` where its parts do not fit together."""
        names: Any = saved.get("names")
        references: Any = saved.get("references")
        combined: Any = saved.get("combined")
        is_whole = (
            isinstance(names, (list, tuple))
            and len(names) > 0
            and all(isinstance(name, str) and name in SCORES for name in names)
            and all(isinstance(t, Tensor) and t.dtype == torch.float64 for t in (references, combined))
            and combined.ndim == 1
            and len(combined) > 0
            and references.shape == (len(names), len(combined))
            and bool(torch.isfinite(references).all() and torch.isfinite(combined).all())
            and bool((references.diff(dim=1) >= 0).all() and (combined.diff() >= 0).all())
        )
        if not is_whole:
            raise ValueError(
                f"The scores of a saved detector must be known, sorted and finite; got {names!r}. Try to save it "
                "again, or la.detector(inputs)."
            )
        return cls(tuple(names), references.to(device), combined.to(device))


def _as_high(reference: Tensor, values: Tensor) -> Tensor:  # (n,) ascending, (b,) -> (b,)
    """#{s_i ≥ s}."""
    return (len(reference) - torch.searchsorted(reference, values.contiguous())).double()


def latents_of(
    parts: Sequence[ValidationPart], posterior: WeightPosterior, precision: Tensor, noise_scale: Tensor
) -> Latent:
    """The moments of several batches at one prior precision."""
    return Latent.cat([latent_of(part, posterior, precision, noise_scale) for part in parts])


def precision_of_median(
    parts: Sequence[ValidationPart], posterior: WeightPosterior, noise_scale: Tensor, z: float
) -> float:
    """Find the prior precision at which the median evidence is z posterior standard deviations, by bisection.

    Args:
        parts: Familiar inputs, with the contrast of the likeliest class against the rest.
        posterior: Of the fit.
        noise_scale: τ = σ²·T.
        z: How many standard deviations.

    Returns:
        The precision, between 1e-12 and 1e18.
    """
    lower, upper = map(math.log, PRECISIONS)
    for _ in range(HALVINGS):
        middle = 0.5 * (lower + upper)
        precision = torch.full((1,), math.exp(middle), dtype=torch.float64, device=noise_scale.device)
        latent = latents_of(parts, posterior, precision, noise_scale)
        if float((latent.evidence / latent.variance.sqrt()).median()) < z:
            lower = middle
        else:
            upper = middle
    return math.exp(0.5 * (lower + upper))

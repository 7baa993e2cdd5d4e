"""Whether a saved posterior belongs to the model at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def flatten(parameters: Mapping[str, Tensor]) -> Tensor:  # (P,)
    """The weights as one vector."""
    return torch.cat([value.detach().flatten() for value in parameters.values()])


def check_matches(saved: Mapping[str, Any], expected: Mapping[str, Any], weights: Tensor) -> None:
    """Raise a sentence that names the first thing in which a saved posterior differs."""
    for key, value in expected.items():
        if saved.get(key) != value:
            raise ValueError(
                f"The saved posterior is expected to match this one, but its {key} is {_short(saved.get(key))} and "
                f"here it is {_short(value)}. Make the Laplace object as it was made for the fit."
            )
    if not torch.equal(saved["weights"].to(weights), weights):
        raise ValueError(
            "The saved posterior is expected to belong to this model, but its weights have other values. Load the "
            "weights that the posterior was fitted with."
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"

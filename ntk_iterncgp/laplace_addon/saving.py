"""A fitted posterior as plain tensors and numbers, and whether a saved one belongs to the model at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor, nn

from ntk_iterncgp.weight_check import check_posterior
from ntk_iterncgp.weight_posterior import WeightPosterior

if TYPE_CHECKING:
    from ntk_iterncgp.laplace_addon.base import IterNCGPLaplace


def flatten(parameters: Mapping[str, Tensor]) -> Tensor:  # (P,)
    """The weights as one vector."""
    return torch.cat([value.detach().flatten() for value in parameters.values()])


def fingerprint(model: nn.Module) -> Tensor:  # (tensors, 2)
    """Two sums over each parameter and buffer, on the CPU: what a model is, in a few numbers."""
    rows = []
    for value in (*model.parameters(), *model.buffers()):
        flat = value.detach().double().flatten()
        ramp = torch.linspace(1, 2, max(1, len(flat)), dtype=torch.float64, device=flat.device)[: len(flat)]
        rows.append(torch.stack([flat.abs().sum(), flat @ ramp]))
    return torch.stack(rows).cpu()


def same_fingerprint(one: Tensor, other: Tensor) -> bool:
    """Up to the rounding of sums in another order."""
    return one.shape == other.shape and torch.allclose(one, other.to(one), rtol=1e-9, atol=1e-12)


def to_state_dict(la: IterNCGPLaplace) -> dict[str, Any]:
    return {
        **_identity(la),
        "weights": la.mean,
        "fingerprint": la._fingerprint,
        "posterior": la.posterior.to_dict(),
        "prior_precision": la.prior_precision.detach(),
        "prior_mean": la.prior_mean,
        "sigma_noise": la.sigma_noise.detach(),
        "temperature": float(la.temperature),
        "loss": float(la.loss),
        "n_data": la.n_data,
        "n_outputs": la.n_outputs,
    }


def from_state_dict(la: IterNCGPLaplace, state: Mapping[str, Any]) -> None:
    _check(la, state)
    posterior = WeightPosterior.from_dict(state["posterior"], la._layer_sizes(), la._device)
    la.posterior = check_posterior(posterior, state["prior_precision"], state["sigma_noise"])
    la.mean, la._fingerprint = state["weights"].to(la._device), state["fingerprint"]
    la.prior_precision, la.prior_mean = state["prior_precision"], state["prior_mean"]
    la.sigma_noise, la.temperature = state["sigma_noise"], float(state["temperature"])
    la.loss, la.n_data, la.n_outputs = float(state["loss"]), int(state["n_data"]), int(state["n_outputs"])
    la._fitted, la._conditioned, la._report, la._fit = True, None, None, None


def _identity(la: IterNCGPLaplace) -> dict[str, Any]:
    """What a saved posterior must agree in."""
    return {
        "format": 1,
        "flavour": type(la).__name__,
        "likelihood": str(Likelihood(la.likelihood).value),
        "mean_mode": la.settings.mean,
        "parameters": {name: list(value.shape) for name, value in la._parameters().items()},
    }


def _check(la: IterNCGPLaplace, saved: Mapping[str, Any]) -> None:
    """Raise a sentence that names the first thing in which a saved posterior differs."""
    for key, value in _identity(la).items():
        if saved.get(key) != value:
            raise ValueError(
                f"The saved posterior is expected to match this one, but its {key} is {_short(saved.get(key))} and "
                f"here it is {_short(value)}. Make the Laplace object as it was made for the fit."
            )
    weights = flatten(la._parameters())
    same_weights = torch.equal(saved["weights"].to(weights), weights)
    if not (same_weights and same_fingerprint(saved["fingerprint"], fingerprint(la.model))):
        raise ValueError(
            "The saved posterior is expected to belong to this model, but its weights have other values. Load the "
            "weights that the posterior was fitted with."
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"

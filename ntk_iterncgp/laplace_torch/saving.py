"""A fitted posterior as plain tensors and numbers, and whether a saved one is of this model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor

from ntk_iterncgp.fitting.network_check import check_posterior
from ntk_iterncgp.laplace_torch.hyperparameters import hyperparameters, kept_on_failure
from ntk_iterncgp.persistence.fingerprint import fingerprint, flatten, same_fingerprint
from ntk_iterncgp.posterior.contrasts import Reference
from ntk_iterncgp.posterior.weight_space import WeightPosterior

if TYPE_CHECKING:
    from ntk_iterncgp.laplace_torch.base import IterNCGPLaplace
    from ntk_iterncgp.laplace_torch.fitting import FittedNetwork


def to_state_dict(la: IterNCGPLaplace) -> dict[str, Any]:
    """All that predictions need, and by what the model is recognised."""
    detector = la._detector_now()
    return {
        **_identity(la),
        "cls_name": type(la).__name__,  # by which laplace-torch refuses what is of another flavour
        **({} if detector is None else {"detector": detector.to_dict()}),
        "weights": la.mean,
        "fingerprint": la._fingerprint,
        "posterior": la.posterior.to_dict(),
        "prior_precision": la.prior_precision.detach(),
        "prior_mean": la.prior_mean,
        "sigma_noise": la.sigma_noise.detach(),
        "temperature": float(la.temperature),
        "output_temperature": float(la.output_temperature),
        "loss": float(la.loss),
        "n_data": la.n_data,
        "n_outputs": la.n_outputs,
        **({"num_tokens": la._num_tokens} if la._num_tokens > 1 else {}),
        "data_seen": la.data_seen,
        "shards_seen": la.shards_seen,
    }


def from_state_dict(la: IterNCGPLaplace, state: Mapping[str, Any]) -> None:
    """Take over a saved posterior, all of it or, where anything about it is wrong, none."""
    posterior = checked_posterior(la, state)
    detector = la._saved_detector(state["detector"], posterior) if "detector" in state else None
    with kept_on_failure(la, "prior_precision", "prior_mean", "sigma_noise", "temperature", "output_temperature"):
        la.prior_precision, la.prior_mean = state["prior_precision"], state["prior_mean"]
        la.sigma_noise, la.temperature = state["sigma_noise"], float(state["temperature"])
        la.output_temperature = float(state.get("output_temperature", 1.0))
    la.posterior, la._detector = posterior, detector
    la.mean, la._fingerprint = state["weights"].to(la._device), state["fingerprint"]
    la.loss, la.n_data, la.n_outputs = float(state["loss"]), int(state["n_data"]), int(state["n_outputs"])
    la._num_tokens = int(state.get("num_tokens", 1))
    la._prior_of_fit = hyperparameters(la)
    la.data_seen, la.shards_seen = seen_by(state)
    la._fitted, la._conditioned, la._report, la._fit = True, None, None, None


def checked_posterior(la: FittedNetwork, state: Mapping[str, Any]) -> WeightPosterior:
    """What is saved as the posterior of this model, if it is that and whole."""
    _check(la, state)
    _check_numbers(state, sum(la._layer_sizes()))
    posterior = WeightPosterior.from_dict(state["posterior"], la._layer_sizes(), la._device)
    return check_posterior(posterior, state["prior_precision"], state["sigma_noise"])


def _identity(la: FittedNetwork) -> dict[str, Any]:
    """What a saved posterior must agree in."""
    return {
        "format": 1,
        "flavour": type(la).__name__,
        "likelihood": str(Likelihood(la.likelihood).value),
        "mean_mode": la.settings.mean,
        "parameters": {name: list(value.shape) for name, value in la._parameters().items()},
        "modules": {name: type(module).__name__ for name, module in la.model.named_modules()},
    }


def _check(la: FittedNetwork, saved: Mapping[str, Any]) -> None:
    """Raise an error that names the first thing in which a saved posterior differs."""
    for key, value in _identity(la).items():
        if key == "modules" and key not in saved:
            continue  # saved by an earlier version
        if saved.get(key) != value:
            raise ValueError(
                f"The saved posterior must have the {key} {_short(value)}; got {_short(saved.get(key))}. Try a Laplace "
                "object made as for the fit."
            )
    weights, found = flatten(la._parameters()), _part(saved, "weights", Tensor)
    same_weights = found.shape == weights.shape and torch.equal(found.to(weights), weights)
    if not (same_weights and same_fingerprint(_part(saved, "fingerprint", Tensor), fingerprint(la.model))):
        raise ValueError(
            "The saved posterior must belong to this model; got one of other weights. Try the weights that it was "
            "fitted with."
        )


def _check_numbers(state: Mapping[str, Any], num_weights: int) -> None:
    """A posterior may come from a file, and a file may hold anything: each part has its type, shape, and numbers."""
    posterior, P = _part(state, "posterior", Mapping), num_weights
    images = _part(posterior, "images", Tensor)
    B = images.shape[1] if images.ndim == 2 else -1
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "images": ((P, B),),
        "noise_gram": ((B, B),),
        "right_hand_side": ((B,),),
        "prior_mean": ((1,), (P,)),
        "curvature_diagonal": ((P,),),
    }
    shapes |= {name: ((B, B),) for name in ("rounding_gram", "storage_gram") if name in posterior}
    for name, allowed in shapes.items():
        value = _finite(posterior, name)
        is_small = name not in ("images", "prior_mean")  # which are in the precision of the model
        if tuple(value.shape) not in allowed or (is_small and value.dtype != torch.float64):
            raise _damaged(name, f"{value.dtype} of shape {tuple(value.shape)}")
    if B and float(posterior["noise_gram"].diagonal().min()) <= 0:
        raise _damaged("noise_gram", "a matrix that is not positive definite")
    _part(posterior, "anchor_share", float, int)
    _part(posterior, "curvature_rank", int)
    _part(posterior, "trace_is_exact", bool)
    if "num_actions" in posterior and _part(posterior, "num_actions", int) < 1:
        raise _damaged("num_actions", _short(posterior["num_actions"]))
    _check_reference(posterior, B)
    if not posterior.keys() <= {f.name for f in fields(WeightPosterior)} - {"layer_sizes"}:
        raise _damaged("posterior", f"made of {_short(sorted(map(str, posterior)))}")
    layers, outputs = len(state["parameters"]), state.get("n_outputs")
    for name, sizes in (("prior_precision", (1, layers, P)), ("sigma_noise", (1, outputs))):
        if not bool((_finite(state, name) > 0).all()) or state[name].numel() not in sizes:
            raise _damaged(name, _short(state[name]))
    if _finite(state, "prior_mean").numel() not in (1, P):
        raise _damaged("prior_mean", _short(state["prior_mean"]))
    optional = [name for name in ("output_temperature", "num_tokens") if name in state]  # not of earlier versions
    for name in ("temperature", "loss", "n_data", "n_outputs", *optional):
        if not math.isfinite(_part(state, name, float, int)) or (name != "loss" and state[name] <= 0):
            raise _damaged(name, _short(state[name]))
    _check_data_seen(state)


def seen_by(state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:  # (k,), (k, 3)
    """Which data a saved posterior has seen, and which shards these are, as far as its version says."""
    if "data_seen" not in state:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64)
    seen = state["data_seen"].cpu()
    return seen, state["shards_seen"].cpu() if "shards_seen" in state else seen.new_zeros(len(seen), 3)


def _check_data_seen(state: Mapping[str, Any]) -> None:
    """Fingerprints, of which earlier versions saved none."""
    seen = _part(state, "data_seen", Tensor) if "data_seen" in state else None
    if seen is not None and (seen.dtype, seen.ndim) != (torch.int64, 1):
        raise _damaged("data_seen", str(seen.dtype))
    shards = _part(state, "shards_seen", Tensor) if "shards_seen" in state else None
    if seen is None or shards is None:
        return
    if shards.dtype != torch.int64 or shards.shape != (len(seen), 3):
        raise _damaged("shards_seen", f"{shards.dtype} of shape {tuple(shards.shape)}")


def _check_reference(posterior: Mapping[str, Any], rank: int) -> None:
    """What the shape of the covariance is made of, where the posterior has it."""
    if "reference" not in posterior:
        return
    reference = _part(posterior, "reference", Mapping)
    if reference.keys() != {f.name for f in fields(Reference)}:
        raise _damaged("reference", f"made of {_short(sorted(map(str, reference)))}")
    M, h = len(_finite(reference, "margins")), Reference.num_rows(_part(reference, "num_outputs", int))
    if _part(reference, "is_of_part", bool):
        rank = len(_finite(reference, "gram"))
    square = (rank, rank)
    shapes = {"prior": (M, h, h), "cross": (M, h, rank), "gram": square, "noise": square, "margins": (M,)}
    for name, shape in shapes.items():
        if tuple(_finite(reference, name).shape) != shape or M == 0:
            raise _damaged(name, f"a tensor of shape {tuple(reference[name].shape)}")


def _part(state: Mapping[str, Any], name: str, *kinds: type) -> Any:
    if not isinstance(state.get(name), kinds):
        raise _damaged(name, type(state[name]).__name__ if name in state else "nothing")
    return state[name]


def _finite(state: Mapping[str, Any], name: str) -> Tensor:
    value: Tensor = _part(state, name, Tensor)
    if not value.is_floating_point() or not bool(torch.isfinite(value).all()):
        raise _damaged(name, "NaN or infinity" if value.is_floating_point() else str(value.dtype))
    return value


def _damaged(name: str, found: str) -> ValueError:
    return ValueError(
        f"The {name} of a saved posterior must be whole; got {found}. Try to save it again, or fit again."
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"

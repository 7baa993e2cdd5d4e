"""The hyperparameters that laplace-torch takes, looked at first: each mistake a sentence about what was expected."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def check_hyperparameters(*, prior_precision: Any, prior_mean: Any, sigma_noise: Any, temperature: Any) -> None:
    """Raise where one of them is no finite number or has a sign or a size that makes no sense."""
    _check("prior_precision", prior_precision, "a positive number, or a tensor of one for each layer or weight")
    _check("prior_mean", prior_mean, "a number, or a tensor of one for each weight", positive=False)
    _check("sigma_noise", sigma_noise, "a positive number", max_size=1)
    _check("temperature", temperature, "a positive number", max_size=1)


def _check(name: str, value: Any, expected: str, *, positive: bool = True, max_size: int | None = None) -> None:
    if isinstance(value, Tensor) and not value.is_complex():
        numbers = value.detach()
    elif isinstance(value, Real):
        numbers = torch.tensor(_as_float(value), dtype=torch.float64)
    else:
        raise TypeError(f"{name} expects {expected}, but got {value!r}.")
    if numbers.ndim > 1 or numbers.numel() == 0 or (max_size is not None and numbers.numel() > max_size):
        raise ValueError(f"{name} expects {expected}, but got a tensor of shape {tuple(numbers.shape)}.")
    if not bool(torch.isfinite(numbers).all()) or (positive and not bool((numbers > 0).all())):
        shown = numbers.item() if numbers.numel() == 1 else "one that holds others"
        raise ValueError(f"{name} expects {expected}, finite, but got {shown}.")


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf

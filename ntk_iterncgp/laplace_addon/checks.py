"""The hyperparameters that laplace-torch takes, looked at first: each mistake a sentence about what was expected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def check_hyperparameters(*, prior_precision: Any, prior_mean: Any, sigma_noise: Any, temperature: Any) -> None:
    """Raise where one of them is no finite number or has a sign or a size that makes no sense."""
    check_positive("prior_precision", prior_precision)
    _check("prior_mean", prior_mean, "a number, or a tensor of one for each weight", positive=False)
    _check("sigma_noise", sigma_noise, "a positive number", max_size=1)
    _check("temperature", temperature, "a positive number", max_size=1)


def check_positive(name: str, value: Any) -> None:
    _check(name, value, "a positive number, or a tensor of one for each layer or weight")


@contextmanager
def kept_on_failure(thing: object, *names: str) -> Iterator[None]:
    """What these attributes were before comes back if something is raised, Ctrl-C too."""
    before = {name: getattr(thing, name) for name in names}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            setattr(thing, name, value)
        raise


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

"""Validation of the hyperparameters that laplace-torch takes, when they are given and whenever they are set.

laplace-torch stores what it is given, NaN too, and fails at a prediction much later. Like its own setters, the checks
here raise ValueError for a value of the wrong type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor

# What each hyperparameter must be, and the further arguments of `_check`.
HYPERPARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {
    "prior_precision": ("a positive number, or a tensor of one for each layer or weight", {}),
    "prior_mean": ("a number, or a tensor of one for each weight", {"positive": False}),
    "sigma_noise": ("a positive number", {"max_size": 1}),
    "temperature": ("a positive number", {"max_size": 1}),
    "output_temperature": ("a positive number", {"max_size": 1}),
}


class CheckedHyperparameters:
    """Mixin that validates a hyperparameter where it is set, in the precision it is stored in."""

    likelihood: Likelihood | str

    def __setattr__(self, name: str, value: Any) -> None:
        if name in HYPERPARAMETERS:
            self._check_hyperparameter(name, value)
        super().__setattr__(name, value)

    def _check_hyperparameter(self, name: str, value: Any) -> None:
        expected, settings = HYPERPARAMETERS[name]
        dtype = torch.float64 if name in ("temperature", "output_temperature") else self._dtype  # type: ignore[attr-defined]
        _check(name, value, expected, dtype=dtype, **settings)
        if name == "sigma_noise" and self.likelihood != Likelihood.REGRESSION and float(value) != 1:
            raise ValueError(
                f"sigma_noise must be 1 for classification, which has no noise; got {float(value)}. Try temperature."
            )


def check_hyperparameters(**values: Any) -> None:
    """Raise ValueError where one of them is no finite number or has a sign or a size that makes no sense."""
    for name, value in values.items():
        expected, settings = HYPERPARAMETERS[name]
        _check(name, value, expected, **settings)


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a positive number, or a tensor of one for each layer or weight."""
    _check(name, value, HYPERPARAMETERS["prior_precision"][0])


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


def _check(
    name: str,
    value: Any,
    expected: str,
    *,
    dtype: torch.dtype | None = None,
    positive: bool = True,
    max_size: int | None = None,
) -> None:
    if isinstance(value, Tensor) and not value.is_complex():
        numbers = value.detach()
    elif isinstance(value, Real):
        numbers = torch.tensor(_as_float(value), dtype=torch.float64)
    else:
        raise ValueError(f"{name} expects {expected}, but got {value!r}.")
    if numbers.ndim > 1 or numbers.numel() == 0 or (max_size is not None and numbers.numel() > max_size):
        raise ValueError(f"{name} expects {expected}, but got a tensor of shape {tuple(numbers.shape)}.")
    stored = numbers if dtype is None else numbers.to(dtype)
    if not bool(torch.isfinite(stored).all()) or (positive and not bool((stored > 0).all())):
        shown = numbers.item() if numbers.numel() == 1 else "one that holds others"
        where = "" if dtype is None else f" in {dtype}"
        raise ValueError(f"{name} expects {expected}, finite{where}, but got {shown}.")


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf

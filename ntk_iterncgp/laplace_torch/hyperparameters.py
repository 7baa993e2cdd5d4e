"""The hyperparameters that laplace-torch takes: what they must be, and which may change after a fit.

laplace-torch stores what it is given, NaN too, and fails at a prediction much later. So they are checked when they are
given and whenever they are set; like its own setters, the checks raise ValueError for a value of the wrong type.

With mean="network" and in every regression all of them may change: W does not depend on the prior. A refined mean of a
classifier is the mode under one prior, and W is the curvature there. Under another prior both move (with three times
the precision means by 13 to 16 % and variances by up to 58 %, on six small networks): that takes a refit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor

from ntk_iterncgp.posterior.weight_space import precision_of_weights

if TYPE_CHECKING:
    from ntk_iterncgp.laplace_torch.fitting import FittedNetwork

SAME = 1e-6  # relative: a number may have passed through float32

# What each hyperparameter must be, and the further arguments of `_check`.
HYPERPARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {
    "prior_precision": ("a positive number, or a tensor of one for each layer or weight", {}),
    "prior_mean": ("a number, or a tensor of one for each weight", {"positive": False}),
    "sigma_noise": ("a positive number, or a tensor of one for each output", {}),
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
        if name == "sigma_noise" and self.likelihood != Likelihood.REGRESSION:
            given = torch.as_tensor(value).detach().reshape(-1)
            if given.tolist() != [1]:
                shown = float(given) if len(given) == 1 else f"a tensor of {len(given)}"
                raise ValueError(
                    f"`sigma_noise` must be 1 for classification, which has no noise; got {shown}. Try temperature."
                )
        if name == "output_temperature" and self.likelihood == Likelihood.REGRESSION and float(value) != 1:
            raise ValueError(
                f"`output_temperature` must be 1 for regression, whose mean it would divide; got {float(value):g}. Try "
                "sigma_noise or temperature."
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
    example = 1.0 if positive else 0.0
    if isinstance(value, Tensor) and not value.is_complex():
        numbers = value.detach()
    elif isinstance(value, Real) and not isinstance(value, bool):
        try:
            numbers = torch.tensor(float(value), dtype=torch.float64)
        except OverflowError:  # an integer of more than 308 digits
            numbers = torch.tensor(math.inf, dtype=torch.float64)
    else:
        is_list = isinstance(value, (list, tuple)) and max_size is None
        advice = f"torch.tensor({list(value)})" if is_list else example
        raise ValueError(f"`{name}` must be {expected}; got {value!r}. Try {name}={advice}.")
    if numbers.ndim > 1 or numbers.numel() == 0 or (max_size is not None and numbers.numel() > max_size):
        raise ValueError(
            f"`{name}` must be {expected}; got a tensor of shape {tuple(numbers.shape)}. Try {name}={example}."
        )
    stored = numbers if dtype is None else numbers.to(dtype)
    if not bool(torch.isfinite(stored).all()) or (positive and not bool((stored > 0).all())):
        wrong = numbers[~torch.isfinite(stored) | ((stored <= 0) & positive)]
        shown = f"{wrong[0].item():.6g}{' among them' if numbers.numel() > 1 else ''}"
        where = "" if dtype is None else f" in {dtype}"
        raise ValueError(f"`{name}` must be {expected}, finite{where}; got {shown}. Try {name}={example}.")


# --- which of them may change after a fit -----------------------------------------------------------------------------


def follows_prior(la: FittedNetwork) -> bool:
    """Whether the posterior holds for other hyperparameters than those of the fit."""
    return la.settings.mean == "network" or la.likelihood == Likelihood.REGRESSION


def hyperparameters(la: FittedNetwork) -> dict[str, Tensor]:
    """Those on which a mode depends, as they are now, in float64."""
    noise, relative = noise_parts(la.sigma_noise.detach())
    tau = noise * float(la.temperature)  # and σ is 1 for classification
    return {
        "prior_precision": la.prior_precision.detach().double().reshape(-1).clone(),
        "prior_mean": torch.as_tensor(la.prior_mean).detach().double().reshape(-1).clone(),
        "temperature": tau.reshape(-1).clone(),
        "relative_noise": relative,
    }


def noise_parts(sigma_noise: Tensor) -> tuple[Tensor, Tensor]:  # (), (1,) or (C,)
    """Return σ², of several outputs the geometric mean of theirs, and each over that: (1,) where all are the same."""
    variances = sigma_noise.double().square()
    if variances.numel() == 1:
        return variances.reshape(()), variances.new_ones(1)
    common = variances.log().mean().exp()
    relative = (variances / common).detach()
    return common, relative.new_ones(1) if bool(((relative - 1).abs() <= SAME).all()) else relative


def check_relative_noise(la: FittedNetwork) -> None:
    """Raise where the noises of the outputs have other ratios than in the fit, on which its actions depend."""
    fitted, sigma = la._prior_of_fit["relative_noise"], la.sigma_noise.detach()
    if sigma.numel() not in (1, la.n_outputs) or not same_ratios(noise_parts(sigma)[1], fitted):
        given = (
            fitted.to(sigma.device) * la._prior_of_fit["temperature"].to(sigma.device) / float(la.temperature)
        ).sqrt()
        raise ValueError(
            f"`sigma_noise` must have the ratios between outputs that it had in the fit, which was given "
            f"{_listed(given)}; got {_listed(sigma)}. Try a multiple of the former, or fit(train_loader) again."
        )


def same_ratios(one: Tensor, other: Tensor) -> bool:
    """Whether noises relative to their geometric mean are the same, but for rounding."""
    other = other.to(one.device)
    return one.shape == other.shape and bool(((one - other).abs() <= SAME * other).all())


def check_prior(la: FittedNetwork) -> None:
    """Raise where a posterior that does not follow its hyperparameters is asked about others than those of its fit."""
    check_relative_noise(la)
    if follows_prior(la):
        return
    now, sizes = hyperparameters(la), la._layer_sizes()
    for name, fitted in la._prior_of_fit.items():
        one, other = now[name], fitted.to(now[name].device)
        if name == "prior_precision":
            one, other = precision_of_weights(one, sizes), precision_of_weights(other, sizes)
        if not bool(((one - other).abs() <= SAME * other.abs()).all()):
            raise ValueError(
                f"`{name}` must be that of the fit, {_shown(fitted)}, for a refined mean of a classifier: under "
                f"another prior the mode moves, and the curvature with it; got {_shown(now[name])}. Try "
                "fit(train_loader) again with it, or mean='network', which follows any prior."
            )


def check_follows_fit(la: FittedNetwork, method: str) -> None:
    """Raise where there is no fit yet."""
    if not la._fitted:
        raise RuntimeError(f"{method} must follow a fit; got none. Try fit(train_loader) before it.")
    la._check_fitted()


def check_may_be_tuned(la: FittedNetwork, method: str = "optimize_prior_precision") -> None:
    """Raise where each candidate would need a fit of its own."""
    if not follows_prior(la):
        raise ValueError(
            f"`mean` must be 'network' for {method} of a classifier, since a refined mean needs a fit "
            "for every candidate; got 'refined'. Try to tune with mean='network' and to fit with mean='refined' at "
            "the precision found, or compare log_marginal_likelihood() of fits at several precisions."
        )


def _listed(values: Tensor) -> str:
    numbers = [float(f"{value:.6g}") for value in values.reshape(-1).tolist()]
    return str(numbers if len(numbers) > 1 else numbers[0])


def _shown(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.numel() == 1 else f"a tensor of {value.numel()}"

"""Which hyperparameters may change after a fit.

With mean="network" and in every regression all of them: W does not depend on the prior. A refined mean of a classifier
is the mode under one prior, and W is the curvature there. Under another prior both move (with three times the precision
means by 13 to 16 % and variances by up to 58 %, on six small networks), which takes the training data: a refit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor

from ntk_iterncgp.posterior.weight_space import precision_of_weights

if TYPE_CHECKING:
    from ntk_iterncgp.laplace_torch.base import IterNCGPLaplace

SAME = 1e-6  # relative: a number may have passed through float32


def follows_prior(la: IterNCGPLaplace) -> bool:
    """Whether the posterior holds for other hyperparameters than those of the fit."""
    return la.settings.mean == "network" or la.likelihood == Likelihood.REGRESSION


def hyperparameters(la: IterNCGPLaplace) -> dict[str, Tensor]:
    """Those on which a mode depends, as they are now, in float64."""
    return {
        "prior_precision": la.prior_precision.detach().double().reshape(-1).clone(),
        "prior_mean": torch.as_tensor(la.prior_mean).detach().double().reshape(-1).clone(),
        "temperature": la._noise_scale.detach().double().reshape(-1).clone(),  # σ²·T, and σ is 1
    }


def check_prior(la: IterNCGPLaplace) -> None:
    """Raise where a posterior that does not follow its hyperparameters is asked about others than those of its fit."""
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


def check_may_be_tuned(la: IterNCGPLaplace) -> None:
    """Raise where each candidate would need a fit of its own."""
    if not follows_prior(la):
        raise ValueError(
            "`mean` must be 'network' for optimize_prior_precision of a classifier, since a refined mean needs a fit "
            "for every candidate; got 'refined'. Try to tune with mean='network' and to fit with mean='refined' at "
            "the precision found, or compare log_marginal_likelihood() of fits at several precisions."
        )


def _shown(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.numel() == 1 else f"a tensor of {value.numel()}"

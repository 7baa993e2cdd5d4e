"""`la.calibrate(val_loader)`: the output temperature, and with it the prior precision (`posterior/calibration.py`).

The output temperature T divides what goes into the link, p = E softmax(f/T): the latent mean by T and its covariance by
T². It is not laplace-torch's `temperature`, which scales the curvature of the likelihood, and so the variance alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laplace.utils.enums import Likelihood
from torch import Tensor
from torch.utils.data import DataLoader

from ntk_iterncgp.laplace_torch.grid import pass_once
from ntk_iterncgp.laplace_torch.hyperparameters import check_may_be_tuned
from ntk_iterncgp.posterior.calibration import LEAST_DATA, Calibration, calibrate

if TYPE_CHECKING:
    from ntk_iterncgp.laplace_torch.base import IterNCGPLaplace


class Calibrating:
    """What a flavour has of calibration: a mixin before `FittedNetwork`."""

    output_temperature: float = 1.0

    def calibrate(self, val_loader: DataLoader[Any], *, progress_bar: bool = False) -> Calibration:
        """Set the output temperature T and the prior precision by the NLL of held-out data, p = E softmax(f/T).

        Where these data cannot tell that the variance adds to temperature scaling, this is temperature scaling, with a
        precision at which the variance is next to nothing. It costs one pass over the data, with all outputs' rows.

        Args:
            val_loader: Labelled data that the network was not trained on, at least twenty; some hundred are enough.
            progress_bar: Whether to show one.

        Returns:
            What was chosen and why; prints as a table.
        """
        la: IterNCGPLaplace = self  # type: ignore[assignment]
        la._check_fitted()
        if la.likelihood != Likelihood.CLASSIFICATION:
            raise ValueError(
                "`likelihood` must be 'classification' for calibrate, since the noise of a regression is its "
                "temperature; got 'regression'. Try optimize_prior_precision(method='gridsearch')."
            )
        check_may_be_tuned(la)
        la._refresh_posterior()
        parts = pass_once(la, val_loader, progress_bar)
        count = sum(len(part.outputs) for part in parts)
        if count < LEAST_DATA:
            raise ValueError(f"`val_loader` must hold at least {LEAST_DATA} data; got {count}. Try some hundred.")
        found = calibrate(parts, la.posterior, la._noise_scale.detach())
        la.prior_precision, la.output_temperature = found.prior_precision, found.output_temperature
        return found

    def _tempered(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """The moments of f/T."""
        T: Any = self.output_temperature
        return (mean, covariance) if T == 1 else (mean / T, covariance / T**2)

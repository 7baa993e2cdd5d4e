"""The prior precision from a validation set, which is passed once in all: by a grid, or by the gradient.

And with it the output temperature T, which divides what goes into the link, p = E softmax(f/T): the latent mean by T
and its covariance by T² (`posterior/calibration.py`). It is not laplace-torch's `temperature`, which scales the
curvature of the likelihood, and so the variance alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from laplace.utils.enums import Likelihood, PredType
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ntk_iterncgp.data.fixed_order import FixedOrderData, Inputs
from ntk_iterncgp.jacobian.rows import Rows
from ntk_iterncgp.laplace_torch.detector import draws_from
from ntk_iterncgp.laplace_torch.hyperparameters import (
    check_follows_fit,
    check_may_be_tuned,
    check_positive,
    kept_on_failure,
)
from ntk_iterncgp.likelihoods import Gaussian, Softmax
from ntk_iterncgp.posterior.calibration import LEAST_DATA, Calibration, calibrate
from ntk_iterncgp.posterior.contrasts import Shape
from ntk_iterncgp.posterior.predictive import expected_response
from ntk_iterncgp.posterior.tuning import (
    Moments,
    ValidationPart,
    categorical_nll,
    gaussian_nll,
    metric_value,
    starting_precision,
    tune_by_evidence,
    tune_by_gradient,
    tune_by_validation,
)
from ntk_iterncgp.runtime.threads import evaluating
from ntk_iterncgp.runtime.validate import checked_contrasts

if TYPE_CHECKING:
    from ntk_iterncgp.laplace_torch.base import IterNCGPLaplace
    from ntk_iterncgp.laplace_torch.fitting import FittedNetwork
else:
    FittedNetwork = object

TUNING_POINTS = 128  # fixed points of the link where it is evaluated many times


class GivenMoments(NamedTuple):
    """Latent moments in the place of inputs, so that laplace-torch's links can be asked about them."""

    mean: Tensor
    covariance: Tensor


class Tuning(FittedNetwork):
    """What a flavour has of tuning: a mixin before `FittedNetwork`."""

    def optimize_prior_precision(
        self,
        pred_type: PredType | str = PredType.GLM,
        method: str = "marglik",
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: DataLoader[Any] | None = None,
        loss: Any = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str = "probit",
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
        tune_temperature: bool = False,
        contrasts: int | str = "auto",
    ) -> None:
        """Set the prior precision by the evidence or by a validation set.

        By the evidence ("marglik"), or by the loss on a validation set, on a scalar grid ("gridsearch") or by its
        gradient ("validation"; scalar or layerwise, and the temperature with it if asked).

        Neither touches the training data; the grid passes the validation set once in all, with as many `contrasts` of a
        classifier's outputs as in a prediction (of "auto", as many as any precision of the grid asks for).
        """
        la: Any = self
        checked_contrasts(contrasts)
        self._check_fitted()
        check_may_be_tuned(self)
        check_positive("init_prior_prec", init_prior_prec)
        with kept_on_failure(self, "prior_precision", "temperature"):
            if method == "marglik":
                self.prior_precision = tune_by_evidence(
                    lambda precision: self.log_marginal_likelihood(prior_precision=precision),
                    len(self._layer_sizes()),
                    self.mean,
                    start=init_prior_prec,
                    structure=prior_structure,
                    num_steps=n_steps,
                    learning_rate=lr,
                    progress_bar=progress_bar,
                )
            elif method == "gridsearch":
                grid = torch.logspace(log_prior_prec_min, log_prior_prec_max, grid_size, base=log_prior_prec_base)
                self.prior_precision = search_grid(
                    la,
                    val_loader,
                    grid.to(self._device),
                    loss=loss,
                    link=link_approx,
                    num_samples=n_samples,
                    contrasts=contrasts,
                    progress_bar=progress_bar,
                )
            elif method == "validation":
                start = torch.as_tensor(init_prior_prec, dtype=self._dtype, device=self._device).reshape(-1)
                self.prior_precision, self.temperature = descend(
                    la,
                    val_loader,
                    starting_precision(start, prior_structure, len(self._layer_sizes())),
                    tune_temperature=tune_temperature,
                    num_steps=n_steps,
                    learning_rate=lr,
                    contrasts=contrasts,
                    progress_bar=progress_bar,
                )
            else:
                raise ValueError(
                    f"`method` must be 'marglik', 'gridsearch' or 'validation'; got {method!r}. Try 'marglik'."
                )
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")

    def calibrate(
        self, val_loader: DataLoader[Any], *, contrasts: int | str = "auto", progress_bar: bool = False
    ) -> Calibration:
        """Set the output temperature T and the prior precision by the NLL of held-out data, p = E softmax(f/T).

        Where these data cannot tell that the variance adds to temperature scaling, this is temperature scaling, with a
        precision at which the variance is next to nothing. It costs one pass over the data.

        Args:
            val_loader: Labelled data that the network was not trained on, at least twenty; some hundred are enough.
            contrasts: As in a prediction; of "auto", as many as any precision of the search asks for.
            progress_bar: Whether to show one.

        Returns:
            What was chosen and why; prints as a table.
        """
        la: Any = self
        found = calibrated(la, val_loader, checked_contrasts(contrasts), progress_bar)
        self.prior_precision, self.output_temperature = found.prior_precision, found.output_temperature
        return found


def search_grid(
    la: IterNCGPLaplace,
    loader: DataLoader[Any] | None,
    grid: Tensor,
    *,
    loss: Any,
    link: str,
    num_samples: int,
    contrasts: int | str,
    progress_bar: bool,
) -> Tensor:
    """The precision with the least loss on the validation set: the negative log-likelihood, or one of the user's.

    Where the loss is the same at all of them, the precision stays as it is, with a warning.
    """
    scores: list[float] = []

    def score(moments: list[Moments]) -> float:
        scores.append(value(moments))
        return scores[-1]

    def value(moments: list[Moments]) -> float:
        if la.likelihood == Likelihood.REGRESSION:
            if loss is None:
                return float(gaussian_nll(moments, la.sigma_noise.detach().double().square()))
            return metric_value(loss, moments)
        predictions = []
        for mean, covariance, targets in moments:
            given: Any = GivenMoments(  # copies, since laplace-torch's bridge works in place
                *la._tempered(mean.to(la._dtype, copy=True), covariance.to(la._dtype, copy=True))
            )
            predictions.append((la._glm_forward_call(given, la.likelihood, False, link, num_samples), targets))
        return float(categorical_nll(predictions)) if loss is None else metric_value(loss, predictions)

    best = tune_by_validation(
        la.posterior,
        pass_once(la, loader, progress_bar, contrasts=contrasts),
        grid,
        la._noise_scale.detach(),
        score,
        refined=la.settings.mean == "refined",
        progress_bar=progress_bar,
    )
    if len(scores) > 1 and len(set(scores)) == 1:
        warnings.warn(
            "The loss must depend on the prior precision; got the same value for all of the grid, as with an error of "
            "the mean alone where the mean is the network's. The precision stays as it was. Try loss=None.",
            stacklevel=3,
        )
        return la.prior_precision.detach()
    return best


def descend(
    la: IterNCGPLaplace,
    loader: DataLoader[Any] | None,
    start: Tensor,
    *,
    tune_temperature: bool,
    num_steps: int,
    learning_rate: float,
    contrasts: int | str,
    progress_bar: bool,
) -> tuple[Tensor, float]:
    """The precision (one, or one per layer) and temperature with the least validation loss, by its gradient."""

    def loss(moments: Sequence[Moments], scale: Tensor) -> Tensor:
        if la.likelihood == Likelihood.REGRESSION:
            return gaussian_nll(moments, scale / la.temperature)
        predictions = []
        for mean, covariance, y in moments:
            given = la._tempered(mean, covariance)
            predictions.append(
                (expected_response(Softmax(mean.shape[1]), *given, link="quadrature", num_samples=TUNING_POINTS), y)
            )
        return categorical_nll(predictions)

    if tune_temperature and la.likelihood == Likelihood.REGRESSION:
        raise ValueError(
            "`tune_temperature` must be False for regression, whose noise is its temperature; got True. Try to tune "
            "sigma_noise by log_marginal_likelihood."
        )
    precision, factor = tune_by_gradient(
        la.posterior,
        pass_once(la, loader, progress_bar, layerwise=len(start) > 1, contrasts=contrasts),
        loss,
        start,
        la._noise_scale.detach(),
        tune_temperature=tune_temperature,
        refined=la.settings.mean == "refined",
        num_steps=num_steps,
        learning_rate=learning_rate,
        progress_bar=progress_bar,
    )
    return precision.to(la._dtype), float(la.temperature) * factor


def calibrated(la: IterNCGPLaplace, loader: DataLoader[Any], contrasts: int | str, progress_bar: bool) -> Calibration:
    """The output temperature and the prior precision with the least NLL on the validation set; la stays as it is."""
    if la.likelihood != Likelihood.CLASSIFICATION:
        raise ValueError(
            "`likelihood` must be 'classification' for calibrate, since the noise of a regression is its "
            "temperature; got 'regression'. Try optimize_prior_precision(method='gridsearch')."
        )
    check_follows_fit(la, "calibrate")
    check_may_be_tuned(la, "calibrate")
    if not isinstance(loader, (DataLoader, Sequence)):
        raise TypeError(
            f"`val_loader` must be a DataLoader of inputs and labels, or a list of batches; got "
            f"{type(loader).__name__}. Try DataLoader(TensorDataset(x, y), batch_size=100)."
        )
    if draws_from(la, loader):
        warnings.warn(
            "`val_loader` must hold data that the network was not trained on, since it is surer of those that it was, "
            "and would be made too sure of all; got the training data. Try a validation set.",
            stacklevel=3,
        )
    la._refresh_posterior()
    parts = pass_once(la, loader, progress_bar, contrasts=contrasts)
    count = sum(len(part.outputs) for part in parts)
    if count < LEAST_DATA:
        raise ValueError(f"`val_loader` must hold at least {LEAST_DATA} data; got {count}. Try some hundred.")
    return calibrate(parts, la.posterior, la._noise_scale.detach())


def pass_once(
    la: IterNCGPLaplace,
    loader: DataLoader[Any] | None,
    progress_bar: bool,
    *,
    layerwise: bool = False,
    contrasts: int | str = "all",
) -> list[ValidationPart]:
    """Evaluate the network and its Jacobian on a validation set.

    Args:
        la: A fitted posterior.
        loader: The validation set. Its targets must be such as `fit` takes.
        progress_bar: Whether to show one.
        layerwise: Whether to separate the parameter tensors, for one precision for each.
        contrasts: As in a prediction; "auto" takes as many as any precision asks for.

    Returns:
        The validation set in parts that fit in `chunk_bytes`, from which the moments at any precision follow.
    """
    if loader is None:
        raise ValueError(
            "`val_loader` must hold data that the network was not trained on; got None. Try method='marglik', which "
            "takes none."
        )
    data = FixedOrderData(loader, device=la._device, dict_key_x=la.dict_key_x, dict_key_y=la.dict_key_y)
    shift, parts, takes_few = la.mean - la.prior_mean, [], la._takes_few(contrasts)
    # With little noise a regression's variance is a small difference, at least at some precision of a grid.
    dtype = torch.float64 if la.likelihood == Likelihood.REGRESSION else la.posterior.dtype
    with evaluating(la.model), torch.no_grad():
        for x, y in tqdm(data.batches(), total=len(data), desc="Validation set", disable=not progress_bar):
            targets, num_inputs = _checked_targets(la, y), data.num_rows(x)
            if num_inputs != len(targets):
                raise ValueError(
                    f"val_loader must hold one target for each input; got {len(targets)} for {num_inputs}."
                )
            for where, rows in _rows_to_tune(la, x, contrasts):
                part = ValidationPart.of(
                    rows,
                    la.posterior,
                    shift,
                    targets[where],
                    layerwise=layerwise,
                    is_of_contrasts=takes_few,
                    dtype=dtype,
                )
                parts.append(part)
    return parts


def _rows_to_tune(la: IterNCGPLaplace, x: Inputs, contrasts: int | str) -> Iterator[tuple[Tensor, Rows]]:
    """As many rows as any prior precision asks for, and where among the inputs they are."""
    if la._takes_few(contrasts):
        jacobian, inputs = la._jacobian_at(x)
        number: int | Tensor
        if isinstance(contrasts, int):
            number = contrasts
        else:
            shape = la._posterior_now().shape
            assert shape is not None and la.posterior.reference is not None
            softest = Shape(shape.matrix, la.posterior.reference.softest)
            number = la._expected(jacobian, inputs, softest).more_needed(softest).clamp_min(1)
        yield from la._rows_of_few(jacobian, inputs, number)
        return
    start = 0
    for rows in la._rows_at(x):
        yield torch.arange(start, start + len(rows.outputs), device=la._device), rows
        start += len(rows.outputs)


def _checked_targets(la: IterNCGPLaplace, y: Tensor) -> Tensor:
    """As in a fit: labels (b,) or values (b, C). A loss would broadcast other shapes or skip a label of −100."""
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise ValueError("The targets of val_loader must be finite; got NaN or infinity. Remove those data.")
    is_classification = la.likelihood == Likelihood.CLASSIFICATION
    if is_classification and y.is_floating_point() and y.ndim == 2 and y.shape[1] > 1:
        raise ValueError(
            f"A validation set must have one label for each input; got probabilities of shape {tuple(y.shape)}. Try "
            "their likeliest class, or optimize_prior_precision(method='marglik'), which needs no validation set."
        )
    if la._num_tokens > 1:
        raise ValueError(
            f"A validation set must have one label for each input; got a classifier of {la._num_tokens} places. "
            "Try optimize_prior_precision(method='marglik'), which needs none."
        )
    return (Softmax(la.n_outputs) if is_classification else Gaussian(1.0, la.n_outputs)).check_targets(y)

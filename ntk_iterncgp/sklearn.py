"""Gaussian processes as scikit-learn estimators, thin on `NonConjugateGP`.

    from ntk_iterncgp.sklearn import GPClassifier, GPPoissonRegressor, GPRegressor

    GPClassifier().fit(X, labels).predict_proba(X_new)
    GPRegressor().fit(X, y).predict(X_new, return_std=True)
    GPPoissonRegressor().fit(X, counts).predict(X_new)

They can be cloned, scored, searched over and put in pipelines. `gp_` is the fitted `NonConjugateGP`, with all that it
offers. Without a kernel they take Matérn-5/2 with data-driven lengthscales, and choose its hyperparameters.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.metrics import d2_tweedie_score
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        "ntk_iterncgp.sklearn needs scikit-learn 1.6 or later: pip install 'ntk-iterncgp[sklearn]'."
    ) from error

from ntk_iterncgp.gp.non_conjugate import NonConjugateGP
from ntk_iterncgp.kernels import Constant, Kernel, Linear, Matern52
from ntk_iterncgp.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson, Softmax
from ntk_iterncgp.likelihoods.base import positive_per_datum

MEDIAN_POINTS = 500  # of the data, by whose distances lengthscales start
ARD_DIMENSIONS = 10  # up to which the default kernel has one lengthscale for each feature
CLASS_OUTPUTSCALE = 16.0  # of logits: a standard deviation of 4, where one class of two has 98 %
MAX_TREND_DATA = 2000  # of counts, up to which their default kernel has a linear trend
ARD_DATA = 10  # for each feature, at least


class _GPEstimator(BaseEstimator):  # type: ignore[misc]
    """What the three have in common: settings, the default kernel, and the fit."""

    gp_: NonConjugateGP
    n_features_in_: int

    def __init__(
        self,
        kernel: Kernel | list[Kernel] | None = None,
        *,
        optimize: bool = True,
        max_products: int = 100,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.kernel = kernel
        self.optimize = optimize
        self.max_products = max_products
        self.random_state = random_state

    @abstractmethod
    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit to data."""

    def _fit(
        self,
        X: Any,
        y: Tensor,
        likelihood: Likelihood,
        mean: float,
        outputscale: float,
    ) -> None:
        """Fit `gp_`, at the hyperparameters that its evidence prefers if it is asked to choose them."""
        if not isinstance(self.optimize, (bool, np.bool_)):
            raise TypeError(f"`optimize` must be True or False; got {self.optimize!r}. Try True.")
        inputs = torch.tensor(X)
        kernel = self._default_kernel(inputs, outputscale) if self.kernel is None else self.kernel
        if isinstance(kernel, Kernel):
            kernel = kernel.with_hyperparameters({})  # which `set_params` does not change
        gp = NonConjugateGP(kernel, likelihood, mean=mean, max_products=self.max_products, seed=self._seed())
        if self.optimize:
            gp.optimize(inputs, y)
        else:
            gp.fit(inputs, y)
        self.gp_ = gp
        self.kernel_ = gp.kernels[0] if len(gp.kernels) == 1 else gp.kernels

    def _default_kernel(self, X: Tensor, outputscale: float) -> Kernel:
        return default_kernel(X, outputscale)

    def _seed(self) -> int:
        if self.random_state is None:
            return 0  # two fits to the same data give the same answer
        if isinstance(self.random_state, np.random.RandomState):
            return int(self.random_state.randint(2**31 - 1))
        return int(self.random_state)

    def _checked(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        dtype = _numpy_dtype(self.gp_)
        return torch.tensor(validate_data(self, X, reset=False, dtype=dtype))

    @property
    def _is_fitted(self) -> bool:
        return hasattr(self, "gp_")

    def log_marginal_likelihood(self) -> float:
        """A lower bound on the logarithm of the evidence at the hyperparameters of the fit."""
        check_is_fitted(self)
        return self.gp_.elbo()


class GPClassifier(ClassifierMixin, _GPEstimator):  # type: ignore[misc]
    """Gaussian process classification: Bernoulli for two classes, softmax for more.

    Args:
        kernel: A kernel of `ntk_iterncgp.kernels`; None: Matérn-5/2 with lengthscales from the data.
        optimize: Whether to choose its hyperparameters by the evidence.
        max_products: Products with the kernel matrix that a fit may spend.
        random_state: Of what is random; None: always the same.

    Attributes:
        gp_: The fitted NonConjugateGP.
        kernel_: Its kernel.
        classes_: The labels, in the order of the columns of `predict_proba`.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit to inputs (N, d) and labels (N,)."""
        return self._fit_classes(X, y, None)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> Self:
        """Condition on more data, without the old; the first call is a fit, and chooses the hyperparameters.

        Args:
            X: The inputs (N, d).
            y: The labels (N,).
            classes: All labels that will ever come, for the first call; None: those in y.

        Returns:
            This estimator.
        """
        if not self._is_fitted:
            return self._fit_classes(X, y, classes)
        X, y = validate_data(self, X, y, reset=False, dtype=_numpy_dtype(self.gp_))
        self.gp_.update(torch.tensor(X), torch.tensor(self._numbers(y)))
        return self

    def _fit_classes(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None) -> Self:
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        self.classes_ = np.unique(y if classes is None else np.asarray(classes))
        if len(self.classes_) < 2:
            raise ValueError(f"GPClassifier needs labels of at least two classes; got one class, '{self.classes_[0]}'.")
        likelihood = Bernoulli() if len(self.classes_) == 2 else Softmax(len(self.classes_))
        self._fit(X, torch.tensor(self._numbers(y)), likelihood, 0.0, CLASS_OUTPUTSCALE)
        return self

    def _numbers(self, y: ArrayLike) -> NDArray[Any]:
        """The place of each label among `classes_`."""
        labels = np.asarray(y)
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise ValueError(
                f"`y` must hold labels among {list(self.classes_)}; got {unknown[0]!r}. Try all `classes` in the first "
                "call of partial_fit."
            )
        return np.searchsorted(self.classes_, labels)

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:
        """The probability of each class (b, C), averaged over the posterior."""
        x = self._checked(X)
        p = self.gp_.predict(x, link="quadrature").double()
        if len(self.classes_) == 2:
            p = torch.cat([1 - p, p], 1)
        return (p / p.sum(1, keepdim=True)).numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable label of each input."""
        best = self.predict_proba(X).argmax(1)
        labels: NDArray[Any] = self.classes_[best]
        return labels


class GPRegressor(RegressorMixin, _GPEstimator):  # type: ignore[misc]
    """Gaussian process regression with Gaussian noise, of one output or several.

    Args:
        kernel: A kernel of `ntk_iterncgp.kernels`; None: Matérn-5/2 with lengthscales from the data.
        noise: The variance of the noise, in units of the variance of y if `normalize_y`; where to start if `optimize`.
        normalize_y: Whether to shift and scale y to mean 0 and variance 1 for the fit.
        optimize: Whether to choose hyperparameters and noise by the evidence.
        max_products: Products with the kernel matrix that a fit may spend.
        random_state: Of what is random; None: always the same.

    Attributes:
        gp_: The fitted NonConjugateGP, of normalised targets.
        kernel_: Its kernel.
    """

    def __init__(
        self,
        kernel: Kernel | list[Kernel] | None = None,
        *,
        noise: float = 0.1,
        normalize_y: bool = True,
        optimize: bool = True,
        max_products: int = 100,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        super().__init__(kernel, optimize=optimize, max_products=max_products, random_state=random_state)
        self.noise = noise
        self.normalize_y = normalize_y

    def __sklearn_tags__(self) -> Any:
        """Several outputs are welcome."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit to inputs (N, d) and values (N,) or (N, C)."""
        X, y = validate_data(
            self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        values = np.asarray(y, dtype=np.float64)
        self._y_ndim = values.ndim
        values = values.reshape(len(values), -1)
        shape = values.shape[1:]
        self._y_mean = values.mean(0) if self.normalize_y else np.zeros(shape)
        scale = values.std(0) if self.normalize_y else np.ones(shape)
        self._y_scale = np.where(scale > 0, scale, 1.0)
        targets = torch.tensor((values - self._y_mean) / self._y_scale)
        variance = 1.0 if self.normalize_y else float(values.var()) or 1.0
        self._fit(X, targets, Gaussian(self.noise, values.shape[1]), 0.0, variance)
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Condition on more data, without the old; the first call is a fit, and chooses scales and hyperparameters."""
        if not self._is_fitted:
            return self.fit(X, y)
        X, y = validate_data(
            self, X, y, reset=False, dtype=_numpy_dtype(self.gp_), multi_output=self._y_ndim > 1, y_numeric=True
        )
        values = np.asarray(y, dtype=np.float64)
        values = values.reshape(len(values), -1)
        self.gp_.update(torch.tensor(X), torch.tensor((values - self._y_mean) / self._y_scale))
        return self

    def predict(self, X: ArrayLike, return_std: bool = False, return_cov: bool = False) -> Any:
        """Predict values.

        Args:
            X: the inputs (b, d).
            return_std: whether to return the standard deviations of observations too, of the shape of the mean: noise
                is a part of them. Those of the noise-free function are in `gp_.latent`.
            return_cov: whether to return the covariance of observations (b, b) instead; for C > 1 outputs (b, b, C).

        Returns:
            The means (b,) or (b, C); with one of the two options, a pair.
        """
        if return_std and return_cov:
            raise ValueError("`return_std` and `return_cov` must not both be True; got both. Try one of them.")
        x = self._checked(X)
        likelihood = self.gp_.likelihood
        assert isinstance(likelihood, Gaussian)
        C = likelihood.num_outputs
        if return_cov:
            mean, covariance = self.gp_.latent(x, joint=True)
            blocks = covariance.reshape(len(x), C, len(x), C).diagonal(dim1=1, dim2=3).double()
            noise = likelihood.variance * torch.eye(len(x), dtype=torch.float64)[..., None]
            spread = (blocks + noise).numpy() * self._y_scale**2
        elif return_std:
            mean, covariance = self.gp_.latent(x)
            variance = covariance.diagonal(dim1=1, dim2=2).double() + likelihood.variance
            spread = variance.sqrt().numpy() * self._y_scale
        else:
            mean = self.gp_.predict(x)
        found = mean.reshape(len(x), C).double().numpy() * self._y_scale + self._y_mean
        found = found[:, 0] if self._y_ndim == 1 else found
        if not (return_std or return_cov):
            return found
        return found, spread[..., 0] if self._y_ndim == 1 else spread

    def sample_y(
        self, X: ArrayLike, n_samples: int = 1, random_state: int | np.random.RandomState | None = 0
    ) -> NDArray[Any]:
        """Draw observations from the posterior, jointly at all inputs: functions with noise.

        Args:
            X: the inputs (b, d).
            n_samples: how many draws.
            random_state: of the draws.

        Returns:
            The draws (b, n_samples), or (b, C, n_samples) for several outputs, as scikit-learn's.
        """
        x = self._checked(X)
        likelihood = self.gp_.likelihood
        assert isinstance(likelihood, Gaussian)
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        generator = torch.Generator().manual_seed(seed)
        functions = self.gp_.sample(x, n_samples, generator=generator).double()  # (n_samples, b, C)
        noise = torch.randn(functions.shape, generator=generator, dtype=torch.float64)
        values = (functions + likelihood.variance**0.5 * noise).numpy() * self._y_scale + self._y_mean
        drawn: NDArray[Any] = values.transpose(1, 2, 0)
        return drawn[:, 0] if self._y_ndim == 1 else drawn


class GPPoissonRegressor(RegressorMixin, _GPEstimator):  # type: ignore[misc]
    """Gaussian process regression of counts, with Poisson's likelihood and the rate's logarithm as latent function.

    The prior mean is the logarithm of the mean count. As in scikit-learn's PoissonRegressor targets may be fractional
    (rates), and the score is D², the share of the deviance that is explained.

    Args:
        kernel: A kernel of `ntk_iterncgp.kernels`; None: Matérn-5/2 with lengthscales from the data, and a trend.
        optimize: Whether to choose its hyperparameters by the evidence.
        max_products: Products with the kernel matrix that a fit may spend.
        random_state: Of what is random; None: always the same.

    Attributes:
        gp_: The fitted NonConjugateGP.
        kernel_: Its kernel.
    """

    def __sklearn_tags__(self) -> Any:
        """Counts are not negative, and small ones scatter: a fit to targets around 2 explains little of them."""
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        tags.regressor_tags.poor_score = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike, exposure: ArrayLike | None = None) -> Self:
        """Fit to inputs (N, d) and counts (N,).

        Args:
            X: the inputs.
            y: the counts.
            exposure: for how long each was counted (N,); None: one unit.

        Returns:
            This estimator.
        """
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], y_numeric=True, ensure_min_samples=2)
        counts = np.asarray(y, dtype=np.float64)
        if (counts < 0).any():
            raise ValueError(f"`y` must hold counts of at least 0; got {counts.min():g}. Try GPRegressor.")
        lengths = _checked_exposure(exposure, len(counts))
        mean = math.log(max(counts.sum(), 0.5) / lengths.sum())
        likelihood = Poisson(1.0 if exposure is None else torch.tensor(lengths), fractional=True)
        self._fit(X, torch.tensor(counts), likelihood, mean, 1.0)
        return self

    def partial_fit(self, X: ArrayLike, y: ArrayLike, exposure: ArrayLike | None = None) -> Self:
        """Condition on more counts, without the old; the first call is a fit, and chooses the hyperparameters.

        Args:
            X: the inputs (N, d).
            y: the counts (N,).
            exposure: for how long each was counted (N,); None: one unit.

        Returns:
            This estimator.
        """
        if not self._is_fitted:
            return self.fit(X, y, exposure)
        X, y = validate_data(self, X, y, reset=False, dtype=_numpy_dtype(self.gp_), y_numeric=True)
        counts = torch.tensor(np.asarray(y, dtype=np.float64))
        likelihood = self.gp_.likelihood
        assert isinstance(likelihood, Poisson)
        if exposure is None and likelihood.exposure.ndim == 0:
            self.gp_.update(torch.tensor(X), counts)
        else:
            self.gp_.update(torch.tensor(X), counts, exposure=_checked_exposure(exposure, len(counts)))
        return self

    def _default_kernel(self, X: Tensor, outputscale: float) -> Kernel:
        """With a linear trend, which the evidence may shrink to nothing: a log-linear model is one of its limits.

        Not of many data, where there is no need of it, and products with it take the plain path.
        """
        smooth = default_kernel(X, outputscale)
        if len(X) > MAX_TREND_DATA:
            return smooth
        size = float(X.double().square().mean()) or 1.0
        return smooth + Linear(1 / size) + Constant(1.0)

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Predict rates per unit of exposure.

        Args:
            X: the inputs (b, d).
            return_std: whether to return the standard deviations of counts at one unit of exposure too.

        Returns:
            The mean rates (b,), or a pair with the standard deviations.
        """
        x = self._checked(X)
        rate = self.gp_.predict(x)[:, 0].double().numpy()
        if not return_std:
            return rate
        variance = self.gp_.latent(x)[1][:, 0, 0].double().numpy()
        return rate, np.sqrt(rate + rate**2 * np.expm1(variance))  # E[λ] + Var[λ], λ log-normal

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        exposure: ArrayLike | None = None,
    ) -> float:
        """D², the fraction of Poisson's deviance that is explained: 1 at best, 0 for the mean rate.

        Args:
            X: the inputs (b, d).
            y: the counts (b,).
            sample_weight: how much each counts (b,); None: all the same.
            exposure: for how long each was counted (b,); None: one unit.

        Returns:
            D² of the counts. The deviance of y from exposure · rate is `exposure` times that of y / exposure from rate.
        """
        rate = self.predict(X)
        if exposure is not None:
            lengths = _checked_exposure(exposure, len(rate))
            y = np.asarray(y, dtype=np.float64) / lengths
            sample_weight = lengths if sample_weight is None else lengths * np.asarray(sample_weight)
        return float(d2_tweedie_score(y, rate, sample_weight=sample_weight, power=1))


def default_kernel(X: Tensor, outputscale: float) -> Matern52:
    """Make a kernel with hyperparameters to start from.

    Args:
        X: the inputs (N, d).
        outputscale: its variance.

    Returns:
        Matérn-5/2: for few features of many data one lengthscale for each, the median distance in this feature times
        √d; else the median distance.
    """
    some = X.double()[:: -(-len(X) // MEDIAN_POINTS)]
    N, d = X.shape
    if 1 < d <= ARD_DIMENSIONS and ARD_DATA * d <= N:
        return Matern52([math.sqrt(d) * _median(some[:, [c]]) for c in range(d)], outputscale)
    return Matern52(_median(some), outputscale)


def _median(X: Tensor) -> float:
    """The median distance of two points that do not coincide; 1 where all do."""
    distances = torch.pdist(X)
    apart = distances[distances > 0]
    return float(apart.median()) if len(apart) else 1.0


def _checked_exposure(exposure: ArrayLike | None, num_data: int) -> NDArray[Any]:  # (N,)
    """Positive numbers, one for each datum; ones for None."""
    lengths: NDArray[Any] = np.ones(num_data) if exposure is None else np.asarray(exposure)
    if lengths.shape != (num_data,):
        raise ValueError(f"`exposure` must hold one number for each of the {num_data} data; got {lengths.shape}.")
    return positive_per_datum(lengths.tolist(), "exposure", "Try to leave out data that were not observed.").numpy()


def _numpy_dtype(gp: NonConjugateGP) -> type[np.floating]:
    prior: Any = gp.posterior_.prior
    return np.float32 if prior.data_dtype == torch.float32 else np.float64

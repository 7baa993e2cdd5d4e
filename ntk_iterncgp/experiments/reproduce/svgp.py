"""gpytorch's SVGP as a baseline: C independent latent functions, fixed kernel, Adam on the ELBO with batches of 1024.

As in the paper: U/C inducing points for each class, at first a random subset of the training data.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.experiments.reproduce.quadratic import quadratic_forms
from ntk_iterncgp.experiments.reproduce.race import Classes, Clock, Predict
from ntk_iterncgp.experiments.settings import ConfigError
from ntk_iterncgp.kernels import Matern32

BATCH = 1024


def require_gpytorch() -> Any:
    """The package, or a sentence; what it prints when imported stays out of the user's way."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module("gpytorch")
    except ImportError as error:
        raise ConfigError(
            "The package gpytorch must be installed for SVGP; got none. Try pip install gpytorch, or --set svgp=false."
        ) from error


def label(num_inducing: int, learning_rate: float) -> str:
    """Name a run by its settings."""
    return f"SVGP {num_inducing}, {learning_rate:g}"


def race(
    classes: Classes,
    kernel: Matern32,
    num_inducing: int,
    learning_rate: float,
    seconds: float,
    seed: int,
    *,
    num_scores: int = 8,
) -> Clock:
    """Train for `seconds` of its own time, scored at times that grow by a factor, and at the end."""
    gpytorch = require_gpytorch()
    torch.manual_seed(seed)  # gpytorch draws from the global generator
    X, y = classes.train_inputs, classes.train_labels
    clock = Clock(label(num_inducing, learning_rate), "svgp", classes)
    model, likelihood = _model(gpytorch, classes, kernel, num_inducing)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    times = [seconds * 0.6**k for k in reversed(range(1, num_scores))]
    step = 0
    try:
        while clock.pause() < seconds:
            for batch in torch.randperm(len(y), device=X.device).split(BATCH):
                optimizer.zero_grad()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # gpytorch reports each jitter that it adds
                    loss = -objective(model(X[batch]), y[batch])
                loss.backward()
                optimizer.step()
                step += 1
                if not math.isfinite(float(loss.detach())):
                    raise _errors()[0](f"The ELBO is {float(loss.detach())}.")
                if clock.pause() >= seconds:
                    break
                if times and clock.seconds >= times[0]:
                    clock.score(_predict(gpytorch, model), step=step)
                    times = [t for t in times if t > clock.seconds]
        clock.score(_predict(gpytorch, model), step=step)
    except _errors():  # diverged: the last scores stand, or those of the prior if there are none
        if not clock.rows:
            clock.score(lambda x: _prior(x, kernel, classes.num_classes), step=step)
    return clock.finish()


def _errors() -> tuple[type[Exception], ...]:
    errors = importlib.import_module("linear_operator.utils.errors")
    return errors.NanError, errors.NotPSDError


def _prior(x: Tensor, kernel: Matern32, num_classes: int) -> tuple[Tensor, Tensor]:
    variance = kernel.diagonal(x).double()[:, None].expand(-1, num_classes)
    return torch.zeros_like(variance), variance


def _model(gpytorch: Any, classes: Classes, kernel: Matern32, num_inducing: int) -> tuple[Any, Any]:
    C, X = classes.num_classes, classes.train_inputs
    each = max(1, num_inducing // C)
    inducing = torch.stack([X[torch.randperm(len(X), device=X.device)[:each]] for _ in range(C)])  # (C, U/C, d)

    class SVGP(gpytorch.models.ApproximateGP):  # type: ignore[misc]  # gpytorch has no types
        def __init__(self) -> None:
            distribution = gpytorch.variational.CholeskyVariationalDistribution(each, batch_shape=torch.Size([C]))
            strategy = gpytorch.variational.VariationalStrategy(self, inducing, distribution)
            super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=C))
            self.mean_module = gpytorch.means.ZeroMean(batch_shape=torch.Size([C]))
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
            self.covar_module.base_kernel.lengthscale = float(kernel.lengthscale)
            self.covar_module.outputscale = float(kernel.outputscale)
            self.covar_module.requires_grad_(False)  # the same fixed hyperparameters for all methods

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = SVGP().to(X)
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=C, mixing_weights=False)
    model.train()
    return model, likelihood.to(X)


def _predict(gpytorch: Any, model: Any) -> Predict:
    """What gpytorch's model answers, by its own kernel, jitter and variational distribution, several times faster.

    It solves with L, K_ZZ = LLᵀ, for every batch of inputs; here L⁻ᵀ(I − S)L⁻¹ and L⁻ᵀm are computed once.
    """
    model.eval()  # forgets the distribution that it kept before the last step of Adam
    strategy = model.variational_strategy.base_variational_strategy
    psd_safe_cholesky = importlib.import_module("linear_operator.utils.cholesky").psd_safe_cholesky
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inducing, kernel = strategy.inducing_points, model.covar_module  # (C, U/C, d)
        values = strategy.variational_distribution  # of L⁻¹u
        L = psd_safe_cholesky(kernel(inducing).add_jitter(strategy.jitter_val).to_dense().double())
        weights = torch.linalg.solve_triangular(L.mT, values.mean.double()[..., None], upper=True)[..., 0]
        less = torch.eye(L.shape[1], dtype=L.dtype, device=L.device) - values.covariance_matrix.double()
        less = torch.linalg.solve_triangular(L, less, upper=False, left=False)
        matrices = torch.linalg.solve_triangular(L.mT, less, upper=True).to(inducing.dtype)
    model.train()

    @torch.no_grad()
    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        means, variances = [], []
        for part in x.split(BATCH):
            prior = kernel(part, diag=True).double() + strategy.jitter_val
            crosses = [kernel(points, part).to_dense() for points in inducing]  # (U/C, b)
            means.append(torch.stack([w @ cross.double() for w, cross in zip(weights, crosses, strict=True)], 1))
            removed = [quadratic_forms(A, cross).double() for A, cross in zip(matrices, crosses, strict=True)]
            variances.append(prior[:, None] - torch.stack(removed, 1))
        return torch.cat(means), torch.cat(variances).clamp_min(gpytorch.settings.min_variance.value(inducing.dtype))

    return predict

"""A Gaussian process with a kernel in the place of the network, as the settings describe it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ntk_iterncgp import kernels
from ntk_iterncgp.experiments.config import RunConfig
from ntk_iterncgp.experiments.datasets import Scaling, labels_of
from ntk_iterncgp.experiments.progress import reporting
from ntk_iterncgp.experiments.runs.prepare import Setting
from ntk_iterncgp.experiments.settings import config_errors
from ntk_iterncgp.gp.non_conjugate import NonConjugateGP
from ntk_iterncgp.likelihoods import Gaussian, Likelihood, Softmax


def make_gp(config: RunConfig, num_outputs: int) -> NonConjugateGP:
    """Make the Gaussian process that the settings describe."""
    k = config.kernel
    is_regression = config.data.task == "regression"
    likelihood: Likelihood = Gaussian(k.noise) if is_regression else Softmax(num_outputs)
    return NonConjugateGP(
        getattr(kernels, str(k.name))(lengthscale=k.lengthscale, outputscale=k.outputscale),
        likelihood,
        policy=k.policy,
        max_products=k.max_products,
        products_per_step=k.max_products if is_regression else k.products_per_step,  # one Newton step is exact
        max_rank=k.max_rank,
        seed=config.seed,
    )


def fit_gp(setting: Setting) -> NonConjugateGP:
    """Fitted to all training data; its hyperparameters are those of the settings, or better ones if asked for."""
    config, data = setting.config, setting.data
    with config_errors():
        gp = make_gp(config, data.num_outputs)
    X = flat_inputs(data.train, data.scaling, data.input_shape).to(setting.device)
    y = labels_of(data.train).to(setting.device)
    setting.log(f"Fitting: {gp!r} to {len(X):,} data")
    with (
        config_errors(),
        warnings.catch_warnings(),
        reporting("Fitting", setting.log),
        setting.watch("fit", memory=True),
    ):
        warnings.filterwarnings("ignore", message=".*nterrupt")  # said by the exit code
        if config.kernel.optimize_steps:
            gp.optimize(X, y, max_steps=config.kernel.optimize_steps, progress_bar=True)
            setting.log(f"Hyperparameters: {gp.kernels[0]!r}, {gp.likelihood!r}; {gp.optimization_}")
            if gp.optimization_ is not None and gp.optimization_.status == "interrupted":
                raise KeyboardInterrupt
        else:
            gp.fit(X, y, progress_bar=True, checkpoint=setting.checkpoint)
        if config.kernel.refine_products and gp.report_.status != "interrupted":
            gp.refine(config.kernel.refine_products, progress_bar=True, checkpoint=setting.checkpoint)
    if gp.report_.status == "interrupted":
        raise KeyboardInterrupt
    setting.log(str(gp.report_))
    return gp


def flat_inputs(data: Dataset[Any], scaling: Scaling, input_shape: tuple[int, ...]) -> Tensor:  # (N, d)
    """All inputs as rows."""
    return torch.cat([as_rows(x, scaling, input_shape) for x, _ in DataLoader(data, 1000)])


def as_rows(x: Tensor, scaling: Scaling, input_shape: tuple[int, ...]) -> Tensor:  # (b, …) -> (b, d)
    """Kernels measure distances: between pixels as they are, in [0, 1], and between columns of equal spread."""
    return scaling.undo(x).flatten(1) if len(input_shape) == 3 else x.flatten(1)

"""The two searches of `NonConjugateGP.optimize`: of how many data, of which data, and with which fits."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.gp.affordable import searches_exactly, subset_size
from ntk_iterncgp.gp.evidence import ExactEvidence
from ntk_iterncgp.gp.hyperparameters import MEAN
from ntk_iterncgp.gp.optimize import OptimizationReport, SearchOptions, maximise_elbo, maximise_evidence
from ntk_iterncgp.kernels import Kernel
from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.persistence.checkpoint import CheckpointSession
from ntk_iterncgp.priors.gram import working_dtype
from ntk_iterncgp.solver import Status

# `gp` is a NonConjugateGP, which comes after this file.


def num_searched(gp: Any, inputs: Tensor, *, is_exact: bool) -> int:
    """How many data a search begins with, or ends with where the fit is exact; 0 where none have an evidence."""
    sizes = gp._sizes(inputs)
    if is_exact and (gp.mode == "exact" or searches_exactly(sizes)):
        return len(inputs)
    return subset_size(sizes, gp.likelihood, inputs.device) or (len(inputs) if is_exact else 0)


def search_exactly(
    gp: Any,
    inputs: Tensor,
    targets: Tensor,
    values: dict[str, Tensor],
    options: SearchOptions,
    session: CheckpointSession | None,
    *,
    num_data: int,
) -> tuple[dict[str, Tensor], OptimizationReport]:
    """By the exact evidence, of all data or of `num_data` of them."""
    likelihood = gp.likelihood
    if num_data < len(inputs):
        some = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(gp.seed))[:num_data]
        some = some.to(inputs.device)
        inputs, targets, likelihood = inputs[some], targets[some], likelihood.given(targets).on(some)
    inputs = inputs.to(working_dtype(gp.kernels, inputs))
    evidence = ExactEvidence(inputs, targets, gp.kernels, likelihood, gp.mean, chunk_bytes=gp.chunk_bytes)
    return maximise_evidence(evidence, values, options, session)


def search_by_bound(
    gp: Any, X: Tensor, y: Tensor, values: dict[str, Tensor], options: SearchOptions, session: CheckpointSession | None
) -> tuple[Any, OptimizationReport]:
    """By the evidence lower bound of iterative fits."""
    mean, values = values.get(MEAN, gp.mean), {name: x for name, x in values.items() if name != MEAN}
    options = options.without(MEAN)

    def fit(kernels: list[Kernel], likelihood: Likelihood) -> Any:
        fitted = copy(gp)  # this one stays as it is until there is a result
        fitted.kernels, fitted.likelihood, fitted.mean = kernels, likelihood, mean
        left = gp.stopping.max_products - fitted.fit(X, y).report_.num_products
        if left > 0 and fitted.report_.status != Status.INTERRUPTED:
            fitted.refine(left)  # a loose bound prefers smooth kernels
        return fitted

    return maximise_elbo(fit, gp.kernels, gp.likelihood, values, options, session)

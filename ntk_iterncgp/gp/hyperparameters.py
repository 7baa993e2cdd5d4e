"""The hyperparameters of kernels and likelihood by name, and where a search for them begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ntk_iterncgp.kernels import Kernel
from ntk_iterncgp.likelihoods import Gaussian, Likelihood

NOISE, MEAN = "noise", "mean"  # beside the names of the kernels
SAMPLED_DATA = 500  # of which distances are taken
MEAN_STEPS = 100
MAX_MEAN = 20.0  # of a latent constant; e²⁰ counts
DEFAULT_VARIANCE = 4.0  # of logits, and of log-rates
NOISE_FRACTION = 0.1  # of the variance of the targets


def hyperparameters(kernels: Sequence[Kernel], likelihood: Likelihood) -> dict[str, Tensor]:
    """The hyperparameters of kernels and likelihood by name.

    Such as `lengthscale`; with a kernel for each output `0.lengthscale`; and `noise` for a Gaussian likelihood.
    """
    found: dict[str, Tensor] = {}
    for place, kernel in enumerate(kernels):
        prefix = f"{place}." if len(kernels) > 1 else ""
        found |= {f"{prefix}{name}": value for name, value in kernel.hyperparameters().items()}
    if isinstance(likelihood, Gaussian):
        found[NOISE] = torch.tensor(likelihood.variance, dtype=torch.float64)
    return found


def free_names(values: Mapping[str, Tensor], fixed: Sequence[str]) -> list[str]:
    """The names that are not fixed."""
    if isinstance(fixed, str) or not isinstance(fixed, Iterable):
        raise TypeError(f"`fixed` must be a list of names; got {fixed!r}. Try fixed={list(values)[:1]}.")
    fixed = list(fixed)
    unknown = [name for name in fixed if name not in values]
    if unknown:
        raise ValueError(f"`fixed` must hold names among {list(values)}; got {unknown}.")
    free = [name for name in values if name not in fixed]
    if not free:
        raise ValueError(f"`fixed` must leave something to optimise; got all of {list(values)}.")
    return free


def with_values(
    kernels: Sequence[Kernel], likelihood: Likelihood, values: Mapping[str, Tensor]
) -> tuple[list[Kernel], Likelihood]:
    """Copies of the kernels and the likelihood with other hyperparameters."""
    if NOISE in values and isinstance(likelihood, Gaussian):
        likelihood = Gaussian(float(values[NOISE]), likelihood.num_outputs)
    return kernels_with(kernels, values), likelihood


def kernels_with(kernels: Sequence[Kernel], values: Mapping[str, Tensor]) -> list[Kernel]:
    """Copies of the kernels alone, in the graph of the values."""
    values = {name: value for name, value in values.items() if name not in (NOISE, MEAN)}
    if len(kernels) == 1:
        return [kernels[0].with_hyperparameters(values)]
    parts: list[dict[str, Tensor]] = [{} for _ in kernels]
    for name, value in values.items():
        place, inner = name.split(".", 1)
        parts[int(place)][inner] = value
    return [kernel.with_hyperparameters(part) for kernel, part in zip(kernels, parts, strict=True)]


def values_from_data(
    values: Mapping[str, Tensor], free: Sequence[str], inputs: Tensor, targets: Tensor, likelihood: Likelihood
) -> dict[str, Tensor]:
    """Where a search may begin: lengthscales at the median distance, variances at that of the targets.

    Args:
        values: the hyperparameters as they are.
        free: the names of those that may change; known by how they end: lengthscale, outputscale, noise.
        inputs: (N, d).
        targets: as the likelihood has checked them.
        likelihood: with a Gaussian one targets have the scale of latent values.

    Returns:
        All hyperparameters, some of them changed.
    """
    generator = torch.Generator().manual_seed(0)
    some = torch.randperm(len(inputs), generator=generator)[:SAMPLED_DATA].to(inputs.device)
    x = inputs[some].double()
    distances = _median_distances(x)  # along each coordinate (d,)
    joint = torch.pdist(x).median() if len(x) > 1 else torch.zeros(())
    is_gaussian = isinstance(likelihood, Gaussian)
    variance = float(targets.double().var(0, correction=0).mean()) if is_gaussian else DEFAULT_VARIANCE
    found = dict(values)
    for name in free:
        last, value = name.rsplit(".", 1)[-1], values[name]
        if last == "lengthscale" and value.ndim == 1 and len(value) == x.shape[1]:
            changed = distances.to(value) * x.shape[1] ** 0.5
        elif last == "lengthscale":
            changed = joint.to(value).expand_as(value).clone()
        elif last == "outputscale":
            changed = torch.full_like(value, variance)
        elif name == NOISE and is_gaussian:
            changed = torch.full_like(value, NOISE_FRACTION * variance)
        else:
            continue
        found[name] = torch.where(changed > 0, changed, value)
    return found


def _median_distances(x: Tensor) -> Tensor:  # (b, d) -> (d,)
    """Half of all pairs of points are further apart along each coordinate; where most are equal, their spread."""
    spread = x.std(0, correction=0)
    if len(x) < 2:
        return spread
    medians = torch.stack([torch.pdist(column[:, None]).median() for column in x.T])
    return torch.where(medians > 0, medians, spread)


def mean_from_data(likelihood: Likelihood, targets: Tensor) -> Tensor:  # (C,)
    """The constant latent value that explains the targets best: their mean, log(mean y) for counts, log-odds.

    Zero for several classes, of which only differences count.
    """
    likelihood, outputs = likelihood.given(targets), likelihood.num_outputs
    constant = torch.zeros(1, outputs, dtype=torch.float64, device=targets.device)
    if likelihood.curvature_rank < outputs:
        return constant[0]
    for _ in range(MEAN_STEPS):
        latent = constant.expand(len(targets), -1)
        slope = likelihood.score(latent, targets).sum(0)
        curvature = likelihood.curvature(latent, torch.ones_like(latent)[..., None])[..., 0].sum(0)
        step = slope / curvature.clamp_min(1e-300)
        if not likelihood.is_quadratic:
            step = step.clamp(-1, 1)
        constant = (constant + step).clamp(-MAX_MEAN, MAX_MEAN) if not likelihood.is_quadratic else constant + step
        if float(step.abs().max()) <= 1e-9 * (1 + float(constant.abs().max())):
            break
    return constant[0]

"""What a `NonConjugateGP` is made of and fitted to, checked before any work: each mistake a sentence about it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ntk_iterncgp.kernels import Kernel
from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.solver import Policy

ACTIONS = ("auto", "joint", "kronecker")


def checked_likelihood(likelihood: Likelihood) -> Likelihood:
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"likelihood expects an instance such as Softmax(10), Bernoulli(), Poisson() or Gaussian(0.1), "
            f"but got {likelihood!r}."
        )
    return likelihood


def checked_kernels(kernel: Kernel | Sequence[Kernel], likelihood: Likelihood) -> list[Kernel]:
    if isinstance(kernel, Kernel):
        return [kernel]
    kernels = list(kernel) if isinstance(kernel, Sequence) else [kernel]
    for item in kernels:
        if not isinstance(item, Kernel):
            raise TypeError(
                f"kernel expects a kernel such as Matern32(lengthscale=0.5), or a list of them; got {item!r}."
            )
    if len(kernels) != likelihood.num_outputs:
        raise ValueError(
            f"{likelihood!r} has {likelihood.num_outputs} output(s) and expects as many kernels, but got "
            f"{len(kernels)}. Pass one kernel for each output, or a single kernel (not in a list) for all of them."
        )
    return kernels


def checked_mean(mean: float | Sequence[float] | Tensor, likelihood: Likelihood) -> Tensor:  # (C,)
    values = torch.as_tensor(mean, dtype=torch.float64)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != likelihood.num_outputs):
        raise ValueError(
            f"mean expects one number, or one for each of the {likelihood.num_outputs} output(s), "
            f"but got shape {tuple(values.shape)}."
        )
    if not bool(torch.isfinite(values).all()):
        raise ValueError("mean expects finite numbers, but got NaN or infinity.")
    return values.expand(likelihood.num_outputs).clone()


def choose_kronecker(
    actions: str, policy: str | Policy, likelihood: Likelihood, kernels: list[Kernel], max_rank: int | None
) -> bool:
    """Whether each product is used as many actions, and whether it can be."""
    if actions not in ACTIONS:
        raise ValueError(f"actions expects one of {', '.join(map(repr, ACTIONS))}, but got {actions!r}.")
    rank = likelihood.curvature_rank
    if actions == "auto":
        dense_residual = policy in ("curvature_residual", "random_subspace")
        affordable = rank**2 <= 100 and (max_rank is None or max_rank >= 4 * rank**2)
        return dense_residual and affordable and rank > 1 and len(kernels) == 1 and not likelihood.is_quadratic
    if actions == "kronecker":
        if len(kernels) > 1:
            raise ValueError(
                f"Kronecker actions expect one kernel shared by all outputs, but got {len(kernels)}. "
                "Use actions='joint'."
            )
        if policy == "unit":
            raise ValueError(
                "Kronecker actions expect a policy that spreads over the data, but got 'unit'. Use 'joint'."
            )
        if max_rank is not None and max_rank < rank**2:
            raise ValueError(
                f"Kronecker actions of {likelihood!r} expect a max_rank of at least {rank**2}, to hold the mean, but "
                f"got {max_rank}. Raise it, or use actions='joint'."
            )
    return actions == "kronecker"


def checked_inputs(
    X: Tensor, name: str, dtype: torch.dtype | None, device: torch.device | str | None, *, may_be_empty: bool
) -> Tensor:  # (N, d)
    X = torch.as_tensor(X, device=device)
    if dtype is not None:
        X = X.to(dtype)
    if X.ndim != 2:
        raise ValueError(
            f"{name} expects shape (N, d), one row per input, but got {tuple(X.shape)}. "
            f"Reshape it, for instance {name}[:, None] for one-dimensional inputs."
        )
    if not X.is_floating_point():
        raise TypeError(f"{name} expects floating-point inputs, but got {X.dtype}. Convert it, or set dtype.")
    if X.numel() == 0 and not (may_be_empty and X.shape[0] == 0):
        raise ValueError(f"{name} expects at least one input with at least one dimension, but got {tuple(X.shape)}.")
    if not bool(torch.isfinite(X).all()):
        bad = int((~torch.isfinite(X)).any(1).sum())
        raise ValueError(f"{name} expects finite numbers, but {bad} of its rows hold NaN or infinity. Remove them.")
    return X


def checked_like(X: Tensor, name: str, trained: Tensor) -> Tensor:  # (b, d), (N, d)
    """New inputs, which go with the training inputs."""
    if X.shape[1] != trained.shape[1]:
        raise ValueError(f"{name} expects {trained.shape[1]} dimensions, as the training inputs, but got {X.shape[1]}.")
    if X.dtype != trained.dtype or X.device != trained.device:
        raise TypeError(
            f"{name} expects {trained.dtype} on {trained.device}, as the training inputs, but got {X.dtype} on "
            f"{X.device}. Convert it, or set dtype and device when making the GP."
        )
    return X


def checked_targets(y: Tensor, inputs: Tensor, likelihood: Likelihood) -> Tensor:
    y = torch.as_tensor(y, device=inputs.device)
    if y.ndim == 0 or len(y) != len(inputs):
        got = "a single number" if y.ndim == 0 else f"{len(y)}"
        raise ValueError(f"y expects one target for each of the {len(inputs)} rows of X, but got {got}.")
    if y.is_complex() or (y.is_floating_point() and not bool(torch.isfinite(y).all())):
        raise ValueError("y expects finite real numbers, but holds NaN, infinity or complex numbers. Remove them.")
    return likelihood.check_targets(y)

"""What a `NonConjugateGP` is made of and fitted to, checked before any work: each mistake a sentence about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.kernels import Kernel
from ntk_iterncgp.kernels.choice import WORTH_COMPILING
from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.memory import available_bytes, require_memory
from ntk_iterncgp.priors.gram import working_dtype
from ntk_iterncgp.solver import Policy, Problem

ACTIONS = ("auto", "joint", "kronecker")
WORKSPACE_BYTES = 32 * 2**20  # what PyTorch takes beside the arrays counted here
VECTORS = 48  # over the data, in float64: Newton's point and the trials of a line search, blocks of random probes
SMALL_MATRICES = 10  # B×B at once, in float64
SMALL_BYTES = 256 * 2**20  # of actions, below which float64 costs next to nothing


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
    values = as_tensor(mean, "mean", None, None if isinstance(mean, Tensor) else torch.float64).double()
    if values.ndim > 1 or (values.ndim == 1 and len(values) != likelihood.num_outputs):
        raise ValueError(
            f"mean expects one number, or one for each of the {likelihood.num_outputs} output(s), "
            f"but got shape {tuple(values.shape)}."
        )
    if not bool(torch.isfinite(values).all()):
        raise ValueError("mean expects finite numbers, but got NaN or infinity.")
    return values.expand(likelihood.num_outputs).clone()


def as_tensor(value: Any, name: str, device: torch.device | None, dtype: torch.dtype | None = None) -> Tensor:
    """Whatever can be read as a tensor of numbers."""
    try:
        tensor = torch.as_tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(value, Tensor):  # the device is full, or gone
            raise
        raise TypeError(f"{name} expects a tensor of numbers, but got {type(value).__name__}.") from error
    if tensor.is_complex():
        raise ValueError(f"{name} expects finite real numbers, but holds NaN, infinity or complex numbers.")
    return tensor


def checked_inputs(
    X: Any, name: str, dtype: torch.dtype | None, device: torch.device | None, *, trained: Tensor | None = None
) -> Tensor:  # (N, d)
    """Inputs to fit to; or, given those, new ones, of which there may be none."""
    X = as_tensor(X, name, device)
    if dtype is not None:
        X = X.to(dtype)
    if X.ndim != 2:
        raise ValueError(
            f"{name} expects shape (N, d), one row per input, but got {tuple(X.shape)}. "
            f"Reshape it, for instance {name}[:, None] for one-dimensional inputs."
        )
    if not X.is_floating_point():
        raise TypeError(f"{name} expects floating-point inputs, but got {X.dtype}. Convert it, or set dtype.")
    if X.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} expects float32 or float64, but its dtype is {X.dtype}. Convert it, or set dtype.")
    if X.numel() == 0 and not (trained is not None and X.shape[0] == 0):
        raise ValueError(f"{name} expects at least one input with at least one dimension, but got {tuple(X.shape)}.")
    if not bool(torch.isfinite(X).all()):
        bad = int((~torch.isfinite(X)).any(1).sum())
        raise ValueError(f"{name} expects finite numbers, but {bad} of its rows hold NaN or infinity. Remove them.")
    largest, limit = float(X.detach().abs().max()) if X.numel() else 0.0, 1e-2 * torch.finfo(X.dtype).max ** 0.5
    if largest > limit:  # squares of distances are summed
        raise ValueError(
            f"{name} expects numbers of at most {limit:.0e} in {X.dtype}, but the largest is {largest:.0e}. Scale them."
        )
    if trained is None:
        return X
    if X.shape[1] != trained.shape[1]:
        raise ValueError(f"{name} expects {trained.shape[1]} dimensions, as the training inputs, but got {X.shape[1]}.")
    if X.dtype != trained.dtype or X.device != trained.device:
        raise TypeError(
            f"{name} expects {trained.dtype} on {trained.device}, as the training inputs, but got {X.dtype} on "
            f"{X.device}. Convert it, or set dtype and device when making the GP."
        )
    return X


def checked_targets(y: Any, inputs: Tensor, likelihood: Likelihood) -> Tensor:
    y = as_tensor(y, "y", inputs.device)
    if y.ndim == 0 or len(y) != len(inputs):
        got = "a single number" if y.ndim == 0 else f"{len(y)}"
        raise ValueError(f"y expects one target for each of the {len(inputs)} rows of X, but got {got}.")
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise ValueError("y expects finite real numbers, but holds NaN, infinity or complex numbers. Remove them.")
    return likelihood.check_targets(y)


def checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"dtype expects None, torch.float32 or torch.float64, but got {dtype!r}.")
    return dtype


def computing_dtype(kernels: Sequence[Kernel], inputs: Tensor, num_columns: int) -> torch.dtype:
    """float64 for small problems, whose actions have up to so many columns of N numbers; else that of the inputs.

    Numbers in float32 are numbers in float64 too, so this is the same problem with less rounding: with little noise
    float32 cannot tell what the data say from what rounding has made of it.
    """
    for kernel in kernels:
        kernel.diagonal(inputs[:1])  # checks the dimension
    is_small = len(inputs) ** 2 < WORTH_COMPILING and 8 * len(inputs) * num_columns <= SMALL_BYTES
    return working_dtype(kernels, inputs) if is_small else inputs.dtype


def checked_device(device: torch.device | str | None) -> torch.device | None:
    """A device that is there."""
    if device is None:
        return None
    try:
        return torch.zeros((), device=device).device
    except (AssertionError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"device expects None or a device of this machine, such as 'cpu' or 'cuda:0', but got {device!r}."
        ) from error


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


def check_memory(problem: Problem, columns: int, max_rank: int | None, kronecker: bool, chunk_bytes: int) -> None:
    """Refuse, before it starts, a run that takes more memory than can be had."""
    advice = "Use fewer products (max_products), keep fewer actions (max_rank), or use float32 inputs."
    needed = needed_bytes(problem, columns, max_rank, kronecker, chunk_bytes)
    require_memory(needed, available_bytes(problem.prior.device), advice)


def needed_bytes(problem: Problem, columns: int, max_rank: int | None, kronecker: bool, chunk_bytes: int) -> int:
    """S and T with room for `columns` stored columns each, of which a compressed copy is made where there is a
    `max_rank`; vectors, small matrices and one block of the kernel matrix."""
    prior, contrasts = problem.prior, problem.likelihood.curvature_rank if kronecker else 1
    rows = prior.num_data * (1 if kronecker else prior.num_outputs)
    copied = 0 if max_rank is None else min(columns, max_rank // contrasts)
    stored = 2 * (columns + copied) * rows * torch.empty(0, dtype=prior.dtype).element_size()
    rank = columns * contrasts if max_rank is None else min(columns * contrasts, 2 * max_rank)
    return stored + VECTORS * 8 * problem.num_rows + SMALL_MATRICES * 8 * rank**2 + chunk_bytes + WORKSPACE_BYTES

"""What a `NonConjugateGP` is made of and fitted to, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.kernels import Kernel
from ntk_iterncgp.kernels.choice import WORTH_COMPILING
from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.priors.gram import working_dtype
from ntk_iterncgp.runtime.memory import available_bytes, require_memory
from ntk_iterncgp.solver import Policy, Problem

ACTIONS = ("auto", "joint", "kronecker")
WORKSPACE_BYTES = 32 * 2**20  # what PyTorch takes beside the arrays counted here
VECTORS = 48  # over the data, in float64: Newton's point and the trials of a line search, blocks of random probes
SMALL_MATRICES = 10  # B×B at once, in float64
SMALL_BYTES = 256 * 2**20  # of actions, below which float64 costs next to nothing


def checked_likelihood(likelihood: Likelihood) -> Likelihood:
    """The likelihood, if it is one; a class or a name is not."""
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            "`likelihood` must be an instance such as Softmax(10), Bernoulli(), Poisson() or Gaussian(0.1); "
            f"got {likelihood!r}."
        )
    return likelihood


def checked_kernels(kernel: Kernel | Sequence[Kernel], likelihood: Likelihood) -> list[Kernel]:
    """One kernel for all outputs of the likelihood, or one for each, as a list."""
    if isinstance(kernel, Kernel):
        return [kernel]
    kernels = list(kernel) if isinstance(kernel, Sequence) and not isinstance(kernel, str) else [kernel]
    for item in kernels:
        if not isinstance(item, Kernel):
            raise TypeError(
                f"`kernel` must be a kernel such as Matern32(lengthscale=0.5), or a list of them; got {item!r}."
            )
    if len(kernels) != likelihood.num_outputs:
        raise ValueError(
            f"`kernel` must be one kernel, or a list of {likelihood.num_outputs} for the output(s) of {likelihood!r}; "
            f"got a list of {len(kernels)}. Try a single kernel, not in a list, for all outputs."
        )
    return kernels


def checked_mean(mean: float | Sequence[float] | Tensor, likelihood: Likelihood) -> Tensor:  # (C,)
    """The constant prior mean of each output."""
    if isinstance(mean, bool):
        raise TypeError(f"`mean` must be a number, or one for each output; got {mean}. Try mean=0.0.")
    values = as_tensor(mean, "mean", None, None if isinstance(mean, Tensor) else torch.float64).double()
    if values.ndim > 1 or (values.ndim == 1 and len(values) != likelihood.num_outputs):
        raise ValueError(
            f"`mean` must be one number, or one for each of the {likelihood.num_outputs} output(s); got the shape "
            f"{tuple(values.shape)}. Try mean=0.0."
        )
    if not bool(torch.isfinite(values).all()):
        raise ValueError("`mean` must be finite; got NaN or infinity. Try mean=0.0.")
    return values.expand(likelihood.num_outputs).clone()


def as_tensor(value: Any, name: str, device: torch.device | None, dtype: torch.dtype | None = None) -> Tensor:
    """Convert what can be read as a tensor of real numbers; `name` is for the error message."""
    try:
        tensor = torch.as_tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(value, Tensor):  # the device is full, or gone
            raise
        raise TypeError(f"`{name}` must be a tensor of numbers; got {type(value).__name__}.") from error
    if tensor.is_complex():
        raise ValueError(f"`{name}` must hold real numbers; got {tensor.dtype}. Try {name}.real.")
    return tensor


def checked_inputs(
    X: Any, name: str, dtype: torch.dtype | None, device: torch.device | None, *, trained: Tensor | None = None
) -> Tensor:  # (N, d)
    """Check inputs to fit to, or to predict at.

    Args:
        X: the inputs.
        name: what to call them in an error message.
        dtype: to convert them to; None: theirs.
        device: to move them to; None: theirs.
        trained: the inputs of the fit, which new ones must match. There may be no new ones.

    Returns:
        The inputs as a tensor of finite numbers.
    """
    x: Tensor = as_tensor(X, name, device)
    if dtype is not None:
        x = x.to(dtype)
    if x.ndim != 2:
        raise ValueError(
            f"`{name}` must have the shape (N, d), one row for each input; got {tuple(x.shape)}. Try to reshape it, "
            f"for instance to {name}[:, None] for one-dimensional inputs."
        )
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"`{name}` must be float32 or float64; got {x.dtype}. Try {name}.float(), or set dtype.")
    if x.numel() == 0 and not (trained is not None and x.shape[0] == 0):
        raise ValueError(f"`{name}` must hold at least one input of at least one dimension; got {tuple(x.shape)}.")
    if not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).any(1).sum())
        raise ValueError(f"`{name}` must be finite; got NaN or infinity in {bad} of its rows. Try to remove them.")
    largest, limit = float(x.detach().abs().max()) if x.numel() else 0.0, 1e-2 * torch.finfo(x.dtype).max ** 0.5
    if largest > limit:  # squares of distances are summed
        raise ValueError(
            f"`{name}` must hold numbers of at most {limit:.0e} in {x.dtype}; got {largest:.0e}. Try to scale them."
        )
    if trained is None:
        return x
    if x.shape[1] != trained.shape[1]:
        raise ValueError(f"`{name}` must have {trained.shape[1]} columns, as the training inputs; got {x.shape[1]}.")
    if x.dtype != trained.dtype or x.device != trained.device:
        raise TypeError(
            f"`{name}` must be {trained.dtype} on {trained.device}, as the training inputs; got {x.dtype} on "
            f"{x.device}. Try to convert it, or set dtype and device when making the GP."
        )
    return x


def checked_targets(y: Any, inputs: Tensor, likelihood: Likelihood) -> Tensor:
    """Targets that the likelihood accepts, one for each input."""
    y = as_tensor(y, "y", inputs.device)
    if y.ndim == 0 or len(y) != len(inputs):
        got = "a single number" if y.ndim == 0 else f"{len(y)}"
        raise ValueError(f"`y` must hold one target for each of the {len(inputs)} rows of X; got {got}.")
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise ValueError("`y` must be finite; got NaN or infinity. Try to remove those data.")
    return likelihood.check_targets(y)


def checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """A dtype that answers can have; None: that of the data."""
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"`dtype` must be None, torch.float32 or torch.float64; got {dtype!r}. Try dtype=None.")
    return dtype


def computing_dtype(kernels: Sequence[Kernel], inputs: Tensor, num_columns: int) -> torch.dtype:
    """float64 for small problems, whose actions take up to `num_columns` of N numbers; else that of the inputs.

    Numbers in float32 are numbers in float64 too, so this is the same problem with less rounding: with little noise
    float32 cannot tell the information in the data from rounding.
    """
    for kernel in kernels:
        kernel.diagonal(inputs[:1])  # checks the dimension
    is_small = len(inputs) ** 2 < WORTH_COMPILING and 8 * len(inputs) * num_columns <= SMALL_BYTES
    return working_dtype(kernels, inputs) if is_small else inputs.dtype


def checked_device(device: torch.device | str | None) -> torch.device | None:
    """A device that this machine has; None: that of the data."""
    if device is None:
        return None
    try:
        return torch.zeros((), device=device).device
    except (AssertionError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"`device` must be None or a device of this machine, such as 'cpu' or 'cuda:0'; got {device!r}."
        ) from error


def choose_kronecker(
    actions: str, policy: str | Policy, likelihood: Likelihood, kernels: list[Kernel], max_rank: int | None
) -> bool:
    """Decide whether actions are Kronecker, and check that they can be.

    Args:
        actions: "auto", "joint" or "kronecker", as the user asked.
        policy: as the user gave it.
        likelihood: of rank r in each datum; Kronecker actions are up to r² for each product.
        kernels: one for all outputs, or one for each.
        max_rank: how many actions may be retained; None: all.

    Returns:
        Whether each product gives many actions.
    """
    if actions not in ACTIONS:
        raise ValueError(f"`actions` must be one of {', '.join(map(repr, ACTIONS))}; got {actions!r}. Try 'auto'.")
    rank = likelihood.curvature_rank
    if actions == "auto":
        dense_residual = policy in ("curvature_residual", "random_subspace")
        affordable = rank**2 <= 100 and (max_rank is None or max_rank >= 4 * rank**2)
        return dense_residual and affordable and rank > 1 and len(kernels) == 1 and not likelihood.is_quadratic
    if actions == "kronecker":
        if len(kernels) > 1:
            raise ValueError(
                f"`kernel` must be one for all outputs where actions='kronecker'; got {len(kernels)}. "
                "Try actions='joint'."
            )
        if policy == "unit":
            raise ValueError(
                "`policy` must spread over the data where actions='kronecker'; got 'unit'. Try actions='joint'."
            )
        if max_rank is not None and max_rank < rank**2:
            raise ValueError(
                f"`max_rank` must be at least {rank**2} for Kronecker actions of {likelihood!r}, to hold the mean; "
                f"got {max_rank}. Try a larger one, or actions='joint'."
            )
    return actions == "kronecker"


def check_memory(problem: Problem, columns: int, max_rank: int | None, kronecker: bool, chunk_bytes: int) -> None:
    """Raise MemoryError, before a run starts, if it needs more memory than is available."""
    advice = "Use fewer products (max_products), retain fewer actions (max_rank), or use float32 inputs."
    needed = needed_bytes(problem, columns, max_rank, kronecker, chunk_bytes)
    require_memory(needed, available_bytes(problem.prior.device), advice)


def needed_bytes(problem: Problem, columns: int, max_rank: int | None, kronecker: bool, chunk_bytes: int) -> int:
    """How much memory a run needs at its peak.

    S and T with room for `columns` stored columns each, of which a compressed copy is made where there is a `max_rank`;
    vectors, small matrices and one block of the kernel matrix.
    """
    prior, contrasts = problem.prior, problem.likelihood.curvature_rank if kronecker else 1
    rows = prior.num_data * (1 if kronecker else prior.num_outputs)
    copied = 0 if max_rank is None else min(columns, max_rank // contrasts)
    stored = 2 * (columns + copied) * rows * torch.empty(0, dtype=prior.dtype).element_size()
    rank = columns * contrasts if max_rank is None else min(columns * contrasts, 2 * max_rank)
    return stored + VECTORS * 8 * problem.num_rows + SMALL_MATRICES * 8 * rank**2 + chunk_bytes + WORKSPACE_BYTES

"""Kernels from elsewhere: gpytorch's, and a network's features with a kernel on top.

    FromGPyTorch(gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=3)))
    Deep(network, Matern32(lengthscale=1.0))          k(x, z) = kernel(network(x), network(z))

A gpytorch kernel that is one of those here (RBF, Matern, rational quadratic, periodic, linear, constant, also its KeOps
ones, of some coordinates, scaled, added, multiplied) becomes that one, and with it gets every method of multiplication
that it has. Any other stationary one is called as it is, tile by tile.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from .base import Kernel
from .linear import Constant, Linear
from .stationary import RBF, Matern12, Matern32, Matern52, Periodic, RationalQuadratic, Stationary

MATERN: dict[float, type[Stationary]] = {0.5: Matern12, 1.5: Matern32, 2.5: Matern52}
KEOPS = ("RBFKernel", "MaternKernel", "PeriodicKernel")  # the kernels that gpytorch has twice


@final
class FromGPyTorch(Kernel):
    """A gpytorch kernel, stationary or one that there is here, with the hyperparameters that it has now."""

    def __init__(self, kernel: Any) -> None:
        try:
            import gpytorch
        except ImportError as error:
            raise ImportError(
                "The package gpytorch must be installed for FromGPyTorch; got none. Try pip install gpytorch."
            ) from error
        if not isinstance(kernel, gpytorch.kernels.Kernel):
            raise TypeError(
                f"`kernel` must be a kernel of gpytorch's; got {kernel!r}. Try gpytorch.kernels.RBFKernel()."
            )
        kernel = _without_keops(kernel)
        translated = None if len(kernel.batch_shape) else _translated(kernel)
        if translated is None and not kernel.is_stationary:
            raise ValueError(
                f"`kernel` must be stationary; got {type(kernel).__name__}, which says that it is not. Try a Kernel "
                "of your own: docs/extending.md shows how."
            )
        if len(kernel.batch_shape):
            raise ValueError(
                f"`kernel` must be a single kernel; got a batch of shape {tuple(kernel.batch_shape)}. Try a list of "
                "kernels, one for each output."
            )
        self.kernel = translated or _Called(kernel)
        self.is_of_distance, self.is_decreasing = self.kernel.is_of_distance, self.kernel.is_decreasing

    @property
    def input_dimension(self) -> int | None:
        return self.kernel.input_dimension

    @property
    def least_dimension(self) -> int:
        return self.kernel.least_dimension

    def hyperparameters(self) -> dict[str, Tensor]:
        return self.kernel.hyperparameters()

    def with_hyperparameters(self, values: Mapping[str, Tensor]) -> Self:
        changed = copy.copy(self)
        changed.kernel = self.kernel.with_hyperparameters(values)
        return changed

    def simplified(self, *inputs: Tensor) -> tuple[Kernel, tuple[Tensor, ...]]:
        return self.kernel, inputs

    def on_distances(self, squared: Callable[[Any], Any], number: Callable[[Tensor], Any]) -> Any:
        return self.kernel.on_distances(squared, number)

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        return self.kernel._evaluate(X1, X2)

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return self.kernel._evaluate_diagonal(X)

    def __repr__(self) -> str:
        return f"FromGPyTorch({self.kernel!r})"


def _without_keops(kernel: Any) -> Any:
    """A copy in which gpytorch's KeOps kernels are its ordinary ones.

    The same parameters and values, but matrices that can be differentiated tile by tile. Products go through this
    library's own KeOps formula.
    """
    from gpytorch import kernels as theirs

    ordinary = {getattr(theirs.keops, name): getattr(theirs, name) for name in KEOPS}
    kernel = copy.deepcopy(kernel)
    for part in kernel.modules():
        part.__class__ = ordinary.get(type(part), type(part))
    return kernel


def _translated(kernel: Any) -> Kernel | None:
    """The same kernel in our own words, or None where there are none."""
    from gpytorch import kernels as theirs

    if type(kernel) is theirs.ScaleKernel:
        inner, is_of_some = _translated(kernel.base_kernel), kernel.active_dims is not None
        if inner is None or (is_of_some and kernel.base_kernel.active_dims is None):
            return None
        scale: Tensor = kernel.outputscale.detach().double()
        return scale * inner
    if type(kernel) in (theirs.AdditiveKernel, theirs.ProductKernel):
        parts = [_translated(part) for part in kernel.kernels]
        combine = operator.add if type(kernel) is theirs.AdditiveKernel else operator.mul
        return None if None in parts or kernel.active_dims is not None else functools.reduce(combine, parts)
    active_dims = None if kernel.active_dims is None else kernel.active_dims.tolist()

    def value(name: str) -> Tensor:
        found: Tensor = getattr(kernel, name).detach().double().flatten()
        return found if kernel.ard_num_dims else found[0]

    if type(kernel) is theirs.ConstantKernel:
        return Constant(kernel.constant.detach().double().reshape(()))
    if type(kernel) is theirs.LinearKernel:
        return Linear(value("variance"), active_dims=active_dims)
    if type(kernel) is theirs.PeriodicKernel:  # whose lengthscale is not squared
        return Periodic(value("lengthscale").sqrt(), 1.0, value("period_length"), active_dims=active_dims)
    if type(kernel) is theirs.RQKernel:
        return RationalQuadratic(value("lengthscale"), 1.0, kernel.alpha.detach().double()[0], active_dims=active_dims)
    if type(kernel) not in (theirs.RBFKernel, theirs.MaternKernel):
        return None
    kind: type[Stationary] = RBF if type(kernel) is theirs.RBFKernel else MATERN[kernel.nu]
    return kind(value("lengthscale"), active_dims=active_dims)


@final
class _Called(Kernel):
    """A gpytorch kernel without a formula here: its raw parameters are held, and cast to the data at each call."""

    def __init__(self, kernel: Any) -> None:
        self.module = _Matrix(kernel.requires_grad_(False))
        self._input_dimension: int | None = kernel.ard_num_dims

    @property
    def input_dimension(self) -> int | None:
        return self._input_dimension

    def hyperparameters(self) -> dict[str, Tensor]:
        """None that can be replaced: gpytorch holds them unconstrained, behind constraints of its own."""
        return {}

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        return self._call(X1, X2, diagonal=False)

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return self._call(X, X, diagonal=True)

    def _call(self, X1: Tensor, X2: Tensor, *, diagonal: bool) -> Tensor:
        state = {
            name: value.to(X1) if value.is_floating_point() else value.to(X1.device)
            for name, value in self.module.state_dict().items()
        }
        # A scaled kernel shares the `active_dims` of the one inside: each name gets its own cast copy.
        result: Tensor = torch.func.functional_call(self.module, state, (X1, X2, diagonal), tie_weights=False)
        expected = (len(X1),) if diagonal else (len(X1), len(X2))
        if result.shape != expected:
            raise ValueError(
                f"`kernel` must have one value for each pair of inputs, of shape {expected} here; got "
                f"{tuple(result.shape)} from {self!r}. Try one kernel for each output; those of several outputs, such "
                "as derivatives, have no place here."
            )
        return result

    def __repr__(self) -> str:
        return f"{type(self.module.kernel).__name__} of gpytorch"


class _Matrix(nn.Module):
    """A gpytorch kernel as a function that returns a tensor."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, X1: Tensor, X2: Tensor, diagonal: bool) -> Tensor:
        result: Tensor = self.kernel(X1, X2, diag=True) if diagonal else self.kernel(X1, X2).to_dense()
        return result


@final
class Deep(Kernel):
    """k(x, z) = kernel(features(x), features(z)), with a network from (N, d) to (N, p) for the features.

    Weights that require a gradient get one from every product. In a product the features are computed once, not once
    for every tile. Where inputs have another dtype than the weights, the weights are cast for them. The network is used
    as it is: put it in eval() mode if it has dropout or batch normalisation.
    """

    def __init__(self, features: nn.Module, kernel: Kernel) -> None:
        if not isinstance(features, nn.Module):
            raise TypeError(
                f"`features` must be a torch.nn.Module; got {type(features).__name__}. Try a subclass of it."
            )
        if not isinstance(kernel, Kernel):
            raise TypeError(f"`kernel` must be a Kernel, on top of the features; got {kernel!r}. Try RBF().")
        self.features = features
        self.kernel = kernel

    @property
    def input_dimension(self) -> int | None:
        return None

    def hyperparameters(self) -> dict[str, Tensor]:
        """Those of the kernel on top; the weights belong to the network."""
        return self.kernel.hyperparameters()

    def with_hyperparameters(self, values: Mapping[str, Tensor]) -> Self:
        changed = copy.copy(self)
        changed.kernel = self.kernel.with_hyperparameters(values)
        return changed

    def trainable(self) -> list[Tensor]:
        return [*self.kernel.trainable(), *self.features.parameters()]

    def simplified(self, *inputs: Tensor) -> tuple[Kernel, tuple[Tensor, ...]]:
        return self.kernel.simplified(*(self._features(X) for X in inputs))

    def _features(self, X: Tensor) -> Tensor:  # (N, d) -> (N, p)
        dtype = next((p.dtype for p in self.features.parameters()), X.dtype)
        found: Tensor = self.features(X) if dtype == X.dtype else self._cast_features(X)
        if found.ndim != 2 or len(found) != len(X):
            raise ValueError(
                f"`features` must give one row for each of the {len(X)} inputs; got {tuple(found.shape)}. Try to "
                "flatten the features of each input."
            )
        return found

    def _cast_features(self, X: Tensor) -> Tensor:
        """By the same network with its weights in the dtype of X, which it keeps in its own."""
        weights = {
            name: value.to(X.dtype) if value.is_floating_point() else value
            for name, value in (*self.features.named_parameters(), *self.features.named_buffers())
        }
        found: Tensor = torch.func.functional_call(self.features, weights, (X,))
        return found

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        return self.kernel(self._features(X1), self._features(X2))

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return self.kernel.diagonal(self._features(X))

    def __repr__(self) -> str:
        return f"Deep({type(self.features).__name__}, {self.kernel!r})"

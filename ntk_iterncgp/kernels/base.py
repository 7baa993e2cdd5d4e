"""What a covariance function is: a matrix k(X1, X2), its diagonal, and how two of them combine.

    (k1 + k2)(x, z) = k1(x, z) + k2(x, z),    (k1 * k2)(x, z) = k1(x, z) k2(x, z),    (s * k)(x, z) = s k(x, z)

Sums, products and positive multiples of covariance functions are covariance functions. Hyperparameters are float64
tensors, cast at each call to the dtype and device of the data; one that requires a gradient stays in its graph.

A kernel of distances can also be asked for its *formula*, `on_distances`, in whatever algebra the caller computes:
eager tensors, the nodes of a graph that is compiled, KeOps' symbolic tensors. So each formula is written once.
"""

import copy
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor

Positive = float | Sequence[float] | Tensor


class Kernel(ABC):
    """A covariance function. A subclass writes the five abstract members; checks and arithmetic are here."""

    @property
    @abstractmethod
    def input_dimension(self) -> int | None:
        """The number of coordinates d that inputs must have, or None when any will do."""

    @abstractmethod
    def hyperparameters(self) -> dict[str, Tensor]:
        """The hyperparameters by name, as held; in sums and products the names are dotted: `0.lengthscale`."""

    @abstractmethod
    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        """The matrix (a, b) for inputs that have been checked."""

    @abstractmethod
    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        """The diagonal (N,) for inputs that have been checked."""

    @abstractmethod
    def __repr__(self) -> str: ...

    @property
    def least_dimension(self) -> int:
        """The number of coordinates that inputs must have at least, where it depends on some of them alone."""
        return 0

    def settings(self) -> dict[str, Any]:
        """The arguments with which an equal kernel can be made."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is made: it lacks `settings`.")

    is_of_distance: bool = False  # k(x, z) depends on scaled distances alone, and `on_distances` is written
    is_decreasing: bool = False  # and it falls as points move apart, so that far tiles may be skipped

    def on_distances(self, squared: Callable[[Any], Any], number: Callable[[Tensor], Any]) -> Any:
        """The formula, given r² for a `Geometry` and the value of a hyperparameter in the caller's algebra."""
        raise NotImplementedError(f"{type(self).__name__} is not written as a formula of distances.")

    def simplified(self, *inputs: Tensor) -> tuple["Kernel", tuple[Tensor, ...]]:
        """An equal kernel on transformed inputs, where that saves transforming them again for every tile."""
        return self, inputs

    def trainable(self) -> list[Tensor]:
        """What a product may have to be differentiated by: the hyperparameters, and weights where there are any."""
        return list(self.hyperparameters().values())

    def with_hyperparameters(self, values: Mapping[str, Tensor]) -> Self:
        """The same kernel with some of its hyperparameters replaced, by the names of `hyperparameters()`."""
        changed = copy.copy(self)
        for name, value in values.items():
            if name not in self.hyperparameters():
                raise ValueError(f"{self!r} has no hyperparameter {name!r}; it has {list(self.hyperparameters())}.")
            setattr(changed, name, value)
        return changed

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the settings by name, for the searches of scikit-learn.

        Args:
            deep: has no effect; it is there for scikit-learn.

        Returns:
            The arguments that make the kernel; of sums, products and multiples the hyperparameters, with two
            underscores for each dot: `0__lengthscale`.
        """
        settings = self._own_settings()
        return (
            {name.replace(".", "__"): x for name, x in self.hyperparameters().items()} if settings is None else settings
        )

    def set_params(self, **params: Any) -> Self:
        """Change settings in place, by the names of `get_params`.

        Args:
            params: what to change, checked as where a kernel is made.

        Returns:
            This kernel.
        """
        known, settings = self.get_params(), self._own_settings()
        unknown = [name for name in params if name not in known]
        if unknown:
            raise ValueError(f"`{unknown[0]}` must be a setting of {self!r}; it has {list(known)}. Try one of these.")
        if settings is None:
            numbers = {n.replace("__", "."): positive(x, n, per_dimension=True) for n, x in params.items()}
            changed: Kernel = self.with_hyperparameters(numbers)
        else:
            changed = type(self)(**settings | params)
        self.__dict__.update(changed.__dict__)
        return self

    def _own_settings(self) -> dict[str, Any] | None:
        try:
            return self.settings()
        except NotImplementedError:
            return None

    def __sklearn_clone__(self) -> Self:
        """A copy: a search may set its parameters."""
        return copy.deepcopy(self)

    def __call__(self, X1: Tensor, X2: Tensor) -> Tensor:
        """The matrix k(X1, X2) of shape (a, b) for inputs X1 (a, d) and X2 (b, d)."""
        check_pair(self, X1, X2)
        return self._evaluate(X1, X2)

    def diagonal(self, X: Tensor) -> Tensor:
        """The variances k(x, x) of shape (N,) for inputs X (N, d)."""
        check_inputs(self, X, "X")
        return self._evaluate_diagonal(X)

    def __add__(self, other: "Kernel") -> "Sum":
        if not isinstance(other, Kernel):
            raise TypeError(
                f"The other summand must be a kernel; got {type(other).__name__}. Try Constant(c) for a constant c."
            )
        return Sum(*_parts(self, Sum), *_parts(other, Sum))

    def __mul__(self, other: "Kernel | float | Tensor") -> "Product | Scaled":
        if isinstance(other, Kernel):
            return Product(*_parts(self, Product), *_parts(other, Product))
        return Scaled(other, self)

    def __rmul__(self, other: float | Tensor) -> "Scaled":
        return Scaled(other, self)


@final
class Scaled(Kernel):
    """k(x, z) = scale * kernel(x, z)."""

    def __init__(self, scale: float | Tensor, kernel: Kernel) -> None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float, Tensor)):
            raise TypeError(
                f"The factor of a kernel must be a kernel or a positive number; got {type(scale).__name__}. Try "
                "2.0 * kernel."
            )
        self.scale = positive(scale, "the factor of a kernel")
        self.kernel = kernel
        self.is_of_distance, self.is_decreasing = kernel.is_of_distance, kernel.is_decreasing

    @property
    def input_dimension(self) -> int | None:
        return self.kernel.input_dimension

    @property
    def least_dimension(self) -> int:
        return self.kernel.least_dimension

    def hyperparameters(self) -> dict[str, Tensor]:
        return {"scale": self.scale} | _dotted("kernel", self.kernel)

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        return cast_like(self.scale, X1) * self.kernel._evaluate(X1, X2)

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return cast_like(self.scale, X) * self.kernel._evaluate_diagonal(X)

    def trainable(self) -> list[Tensor]:
        return [self.scale, *self.kernel.trainable()]

    def on_distances(self, squared: Callable[[Any], Any], number: Callable[[Tensor], Any]) -> Any:
        return number(self.scale) * self.kernel.on_distances(squared, number)

    def with_hyperparameters(self, values: Mapping[str, Tensor]) -> Self:
        changed = super().with_hyperparameters({n: v for n, v in values.items() if not n.startswith("kernel.")})
        changed.kernel = self.kernel.with_hyperparameters(_under("kernel", values))
        return changed

    def __repr__(self) -> str:
        return f"{written(self.scale)} * {_bracketed(self.kernel)}"


class _Combination(Kernel):
    """Two or more kernels on the same inputs, combined entry by entry."""

    def __init__(self, *kernels: Kernel) -> None:
        if not kernels or not all(isinstance(kernel, Kernel) for kernel in kernels):
            names = ", ".join(type(kernel).__name__ for kernel in kernels) or "nothing"
            raise TypeError(f"{type(self).__name__} must be made of one or more kernels; got {names}. Try two.")
        dimensions = {kernel.input_dimension for kernel in kernels} - {None}
        if len(dimensions) > 1:
            raise ValueError(
                f"{type(self).__name__} must be made of kernels for inputs of one dimension; got lengthscales for "
                f"{sorted(d for d in dimensions if d is not None)} coordinates. Try the same number for all."
            )
        self.kernels = kernels
        self.is_of_distance = all(kernel.is_of_distance for kernel in kernels)
        self.is_decreasing = all(kernel.is_decreasing for kernel in kernels)
        self._input_dimension = dimensions.pop() if dimensions else None

    @property
    def input_dimension(self) -> int | None:
        return self._input_dimension

    @property
    def least_dimension(self) -> int:
        return max(kernel.least_dimension for kernel in self.kernels)

    def hyperparameters(self) -> dict[str, Tensor]:
        dotted = (_dotted(str(i), kernel) for i, kernel in enumerate(self.kernels))
        return functools.reduce(operator.or_, dotted)

    def with_hyperparameters(self, values: Mapping[str, Tensor]) -> Self:
        super().with_hyperparameters({n: v for n, v in values.items() if n not in self.hyperparameters()})  # refuses
        return type(self)(*(k.with_hyperparameters(_under(str(i), values)) for i, k in enumerate(self.kernels)))

    def trainable(self) -> list[Tensor]:
        return [tensor for kernel in self.kernels for tensor in kernel.trainable()]


@final
class Sum(_Combination):
    """k(x, z) = Σ kᵢ(x, z) of the `kernels` kᵢ."""

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        return functools.reduce(operator.add, (kernel._evaluate(X1, X2) for kernel in self.kernels))

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return functools.reduce(operator.add, (kernel._evaluate_diagonal(X) for kernel in self.kernels))

    def on_distances(self, squared: Callable[[Any], Any], number: Callable[[Tensor], Any]) -> Any:
        return functools.reduce(operator.add, (kernel.on_distances(squared, number) for kernel in self.kernels))

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.kernels))


@final
class Product(_Combination):
    """k(x, z) = Π kᵢ(x, z) of the `kernels` kᵢ."""

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        return functools.reduce(operator.mul, (kernel._evaluate(X1, X2) for kernel in self.kernels))

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return functools.reduce(operator.mul, (kernel._evaluate_diagonal(X) for kernel in self.kernels))

    def on_distances(self, squared: Callable[[Any], Any], number: Callable[[Tensor], Any]) -> Any:
        return functools.reduce(operator.mul, (kernel.on_distances(squared, number) for kernel in self.kernels))

    def __repr__(self) -> str:
        return " * ".join(map(_bracketed, self.kernels))


def positive(value: Positive, name: str, *, per_dimension: bool = False) -> Tensor:
    """The hyperparameter as a float64 tensor of positive finite numbers, still attached to the graph it came from."""
    try:
        kind = torch.as_tensor(value).dtype
    except (TypeError, ValueError, RuntimeError):
        kind = None
    if kind is None or kind == torch.bool or kind.is_complex:
        raise TypeError(f"{name} must be a positive number; got {kind or type(value).__name__}. Try 1.0.")
    tensor = torch.as_tensor(value, dtype=torch.float64)
    if tensor.ndim > per_dimension or tensor.numel() == 0:
        or_several = " or a 1-D list of one number per input dimension" if per_dimension else ""
        raise ValueError(f"{name} must be one number{or_several}; got the shape {tuple(tensor.shape)}. Try 1.0.")
    wrong = tensor.detach()[~(tensor.isfinite() & (tensor > 0))]
    if wrong.numel():
        raise ValueError(f"{name} must be positive and finite; got {wrong[0].item()}. Try 1.0.")
    return tensor


def cast_like(hyperparameter: Tensor, X: Tensor) -> Tensor:
    """The hyperparameter in the dtype and on the device of the data."""
    return hyperparameter.to(X.dtype).to(X.device)


def written(value: Tensor) -> str:
    """A hyperparameter as one reads it: 0.5, or [0.5, 1.0], or [0.5, 0.5, 0.5, ..., 0.5] (784 of them)."""
    numbers = [f"{x:.6g}" for x in value.detach().flatten().tolist()]
    if value.ndim == 0:
        return numbers[0]
    if len(numbers) > 6:
        return f"[{', '.join(numbers[:3])}, ..., {numbers[-1]}] ({len(numbers)} of them)"
    return f"[{', '.join(numbers)}]"


def check_inputs(kernel: Kernel, X: Tensor, name: str) -> None:
    """Raise unless X is a float32 or float64 matrix with as many columns as the kernel has lengthscales."""
    if not isinstance(X, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor; got {type(X).__name__}. Try torch.as_tensor.")
    if X.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"`{name}` must be float32 or float64; got {X.dtype}. Try .float() or .double().")
    if X.ndim != 2:
        raise ValueError(
            f"`{name}` must have the shape (points, coordinates); got {tuple(X.shape)}. Try X.flatten(1), or "
            "X[:, None] for a single coordinate."
        )
    expected = kernel.input_dimension
    if expected is not None and X.shape[1] != expected:
        raise ValueError(
            f"`{name}` must have {expected} coordinates, one for each lengthscale; got {X.shape[1]}. Try one "
            "lengthscale per coordinate, or a single number for all."
        )
    if X.shape[1] < kernel.least_dimension:
        raise ValueError(
            f"The kernel has active_dims up to coordinate {kernel.least_dimension - 1}, counted from 0, but {name} has "
            f"{X.shape[1]} coordinates. Give it coordinates that there are."
        )


def check_pair(kernel: Kernel, X1: Tensor, X2: Tensor) -> None:
    """Raise unless k(X1, X2) makes sense."""
    check_inputs(kernel, X1, "X1")
    check_inputs(kernel, X2, "X2")
    check_same_kind(X1, "X1", X2, "X2")
    if X1.shape[1] != X2.shape[1]:
        raise ValueError(
            "`X1` and `X2` must have the same number of coordinates; "
            f"got {X1.shape[1]} and {X2.shape[1]}. Try the same columns."
        )


def check_same_kind(A: Tensor, name_a: str, B: Tensor, name_b: str) -> None:
    """Raise unless two tensors have the same dtype and device."""
    if A.dtype != B.dtype:
        raise TypeError(
            f"`{name_a}` and `{name_b}` must have the same dtype; got {A.dtype} and {B.dtype}. Try .to(dtype)."
        )
    if A.device != B.device:
        raise ValueError(
            f"`{name_a}` and `{name_b}` must be on the same device; got {A.device} and {B.device}. Try .to(device)."
        )


def _parts(kernel: Kernel, kind: type[_Combination]) -> tuple[Kernel, ...]:
    return kernel.kernels if isinstance(kernel, kind) else (kernel,)


def _dotted(prefix: str, kernel: Kernel) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in kernel.hyperparameters().items()}


def _under(prefix: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(f"{prefix}."): v for n, v in values.items() if n.startswith(f"{prefix}.")}


def _bracketed(kernel: Kernel) -> str:
    return f"({kernel!r})" if isinstance(kernel, Sum) else repr(kernel)

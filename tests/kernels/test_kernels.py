"""Kernels: against gpytorch, against their formula in dense float64, and against their own defining properties."""

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gpytorch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ntk_iterncgp.kernels import (
    RBF,
    Kernel,
    Matern12,
    Matern32,
    Matern52,
    Product,
    Scaled,
    Stationary,
    Sum,
    kernel_matmul,
)
from ntk_iterncgp.kernels.distance import squared_distances
from ntk_iterncgp.kernels.tiles import LIVE_TILES, tile_shape

STATIONARY: list[type[Stationary]] = [RBF, Matern12, Matern32, Matern52]
DIMENSIONS = [1, 3, 40]  # both ways of computing distances
COMBINED: list[Callable[[], Kernel]] = [
    lambda: RBF(0.7, 2.0) + Matern12(1.3, 0.5),
    lambda: RBF(0.7, 2.0) * Matern32(1.3, 0.5),
    lambda: 0.3 * (RBF(0.7) + Matern52(2.0)) * Matern12(3.0),
]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(kernel: Stationary, X1: Tensor, X2: Tensor) -> Tensor:
    """The formulas of the docstrings in float64, from all differences at once."""
    difference = (X1.double()[:, None] - X2.double()) / kernel.lengthscale  # (a, b, d)
    r = difference.norm(dim=2)
    s3, s5 = 3**0.5 * r, 5**0.5 * r
    formula = {
        RBF: torch.exp(-(r**2) / 2),
        Matern12: torch.exp(-r),
        Matern32: (1 + s3) * torch.exp(-s3),
        Matern52: (1 + s5 + s5**2 / 3) * torch.exp(-s5),
    }
    return kernel.outputscale * formula[type(kernel)]


def close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol)


# The formulas


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("per_dimension", [False, True])
@pytest.mark.parametrize(
    ("kind", "nu"),
    [(RBF, None), (Matern12, 0.5), (Matern32, 1.5), (Matern52, 2.5)],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_a_kernel_agrees_with_gpytorch(kind: type[Stationary], nu: float | None, per_dimension: bool, d: int) -> None:
    X1, X2 = draw(11, d), draw(9, d, seed=1)
    lengthscale = draw(d, seed=2).exp() * d**0.5 if per_dimension else torch.tensor(0.8 * d**0.5, dtype=torch.float64)
    settings = {"ard_num_dims": d if per_dimension else None}
    peer = gpytorch.kernels.RBFKernel(**settings) if nu is None else gpytorch.kernels.MaternKernel(nu=nu, **settings)
    peer = gpytorch.kernels.ScaleKernel(peer).double()
    peer.base_kernel.lengthscale, peer.outputscale = lengthscale, torch.tensor(1.7, dtype=torch.float64)
    with torch.no_grad():
        close(kind(lengthscale, 1.7)(X1, X2), peer(X1, X2).to_dense())


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("kind", STATIONARY)
def test_a_kernel_agrees_with_its_formula_at_near_and_coincident_points(kind: type[Stationary], d: int) -> None:
    X = draw(12, d)
    X = torch.cat([X, X, X + 1e-9 * draw(12, d, seed=1), X + 1e-3 * draw(12, d, seed=1)])
    kernel = kind(d**0.5, 2.0)
    close(kernel(X, X), dense(kernel, X, X))


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("kind", STATIONARY)
def test_float32_is_accurate_far_from_the_origin(kind: type[Stationary], d: int) -> None:
    X = (10_000 + draw(20, d)).float()
    X = torch.cat([X, X + 1e-2 * draw(20, d, seed=1).float()])
    kernel = kind(0.7 * d**0.5, 2.0)
    values = kernel(X, X)
    assert values.dtype == torch.float32
    close(values.double(), dense(kernel, X, X), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("kind", STATIONARY)
def test_the_variance_is_exactly_the_outputscale(kind: type[Stationary], d: int, dtype: torch.dtype) -> None:
    X = 1000 * draw(50, d, dtype=dtype)
    kernel = kind(0.3, 1.7)
    expected = torch.full((50,), 1.7, dtype=dtype)
    assert torch.equal(kernel(X, X.clone()).diagonal(), expected)
    assert torch.equal(kernel.diagonal(X), expected)


def test_distances_are_right_when_points_lie_in_tight_groups_far_apart() -> None:
    groups = 1e6 * draw(4, 30).repeat_interleave(25, 0)
    X = groups + torch.arange(100).double()[:, None] / 64  # differences within a group are exact
    expected = (X[:, None] - X).square().sum(2)
    torch.testing.assert_close(squared_distances(X, X), expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("make", COMBINED)
def test_the_diagonal_is_the_diagonal_of_the_matrix(make: Callable[[], Kernel]) -> None:
    X = draw(15, 2)
    close(make().diagonal(X), make()(X, X).diagonal(), atol=1e-15)


@given(
    kind=st.sampled_from(STATIONARY),
    lengthscale=st.floats(0.05, 20.0),
    outputscale=st.floats(0.01, 100.0),
    d=st.sampled_from(DIMENSIONS),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_a_kernel_matrix_is_symmetric_positive_semidefinite_and_bounded(
    kind: type[Stationary], lengthscale: float, outputscale: float, d: int, seed: int
) -> None:
    X = draw(20, d, seed=seed)
    K = kind(lengthscale, outputscale)(X, X)
    close(K, K.T, atol=1e-13 * outputscale)
    assert torch.linalg.eigvalsh((K + K.T) / 2).min() > -1e-12 * outputscale
    assert K.max() <= outputscale and K.min() >= 0


@pytest.mark.parametrize("make", COMBINED)
def test_sums_and_products_are_positive_semidefinite(make: Callable[[], Kernel]) -> None:
    X = draw(30, 2)
    assert torch.linalg.eigvalsh(make()(X, X)).min() > -1e-13


def test_a_lengthscale_per_dimension_is_a_rescaling_of_the_inputs() -> None:
    X1, X2 = draw(6, 3), draw(5, 3, seed=1)
    lengthscales = [0.5, 2.0, 1.0]
    expected = Matern32(1.0)(X1 / torch.tensor(lengthscales), X2 / torch.tensor(lengthscales))
    close(Matern32(lengthscales)(X1, X2), expected)
    close(Matern32(tuple(lengthscales))(X1, X2), expected)
    assert Matern32(lengthscales).input_dimension == 3
    assert Matern32(1.0).input_dimension is None


def test_the_profiles_need_only_arithmetic_sqrt_and_exp() -> None:
    """So that a symbolic backend can evaluate the same formula."""

    class Symbol:
        def __init__(self, value: Tensor) -> None:
            self.value = value

        def sqrt(self) -> "Symbol":
            return Symbol(self.value.sqrt())

        def exp(self) -> "Symbol":
            return Symbol(self.value.exp())

        def __neg__(self) -> "Symbol":
            return Symbol(-self.value)

        def __add__(self, other: Any) -> "Symbol":
            return Symbol(self.value + getattr(other, "value", other))

        def __mul__(self, other: Any) -> "Symbol":
            return Symbol(self.value * getattr(other, "value", other))

        def __truediv__(self, other: float) -> "Symbol":
            return Symbol(self.value / other)

        __radd__, __rmul__ = __add__, __mul__

    squared = draw(10).square()
    for kind in STATIONARY:
        profile: Callable[[Any], Any] = kind.profile
        close(profile(Symbol(squared)).value, kind.profile(squared), atol=1e-15)


# Sums, products, multiples


def test_sums_products_and_multiples_act_entry_by_entry() -> None:
    X1, X2 = draw(6, 2), draw(5, 2, seed=1)
    first, second, third = RBF(0.7, 2.0), Matern12(1.3, 0.5), Matern52([1.0, 2.0])
    a, b, c = first(X1, X2), second(X1, X2), third(X1, X2)
    close((first + second + third)(X1, X2), a + b + c)
    close((first * second * third)(X1, X2), a * b * c)
    close((first * (second + third))(X1, X2), a * (b + c))
    close((3 * first)(X1, X2), 3 * a)
    close((first * 0.5)(X1, X2), 0.5 * a)
    close((torch.tensor(0.5) * first)(X1, X2), 0.5 * a)
    assert (first + third).input_dimension == (third * first).input_dimension == (2.0 * third).input_dimension == 2
    assert (first + second).input_dimension is None


def test_hyperparameters_are_named_by_their_place() -> None:
    first, second, third = RBF(0.7, 2.0), Matern12(1.3, 0.5), Matern52([1.0, 2.0])
    kernel = first + second + 4.0 * third
    assert isinstance(kernel, Sum) and len(kernel.kernels) == 3
    named = {name: value.tolist() for name, value in kernel.hyperparameters().items()}
    assert named == {
        "0.lengthscale": 0.7,
        "0.outputscale": 2.0,
        "1.lengthscale": 1.3,
        "1.outputscale": 0.5,
        "2.scale": 4.0,
        "2.kernel.lengthscale": [1.0, 2.0],
        "2.kernel.outputscale": 1.0,
    }
    assert list((first * (second + third)).hyperparameters())[:3] == [
        "0.lengthscale",
        "0.outputscale",
        "1.0.lengthscale",
    ]


def test_a_kernel_reads_as_it_is_written() -> None:
    assert repr(RBF(0.5)) == "RBF(lengthscale=0.5, outputscale=1)"
    assert repr(RBF([0.5, 1.0])) == "RBF(lengthscale=[0.5, 1], outputscale=1)"
    assert repr(RBF(torch.ones(784))) == "RBF(lengthscale=[1, 1, 1, ..., 1] (784 of them), outputscale=1)"
    assert repr(2.0 * (RBF() + Matern12())) == (
        "2 * (RBF(lengthscale=1, outputscale=1) + Matern12(lengthscale=1, outputscale=1))"
    )
    assert repr(RBF() * Matern12()) == "RBF(lengthscale=1, outputscale=1) * Matern12(lengthscale=1, outputscale=1)"


def test_hyperparameters_are_kept_in_float64_and_follow_the_data() -> None:
    assert RBF(0.1).lengthscale.item() == RBF([0.1]).lengthscale[0].item() == 0.1
    kernel = RBF(torch.tensor(0.1, dtype=torch.float32), 1)
    assert kernel.lengthscale.dtype == kernel.outputscale.dtype == torch.float64
    for dtype in (torch.float32, torch.float64):
        X = draw(3, 2, dtype=dtype)
        assert (2.0 * kernel + kernel)(X, X).dtype == (2.0 * kernel + kernel).diagonal(X).dtype == dtype
    given = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    assert RBF(given).lengthscale is given


# Gradients


@pytest.mark.parametrize("d", [2, 20])
@pytest.mark.parametrize("kind", STATIONARY)
def test_gradients_agree_with_finite_differences(kind: type[Stationary], d: int) -> None:
    def matrix(lengthscale: Tensor, outputscale: Tensor, X1: Tensor, X2: Tensor) -> Tensor:
        return kind(lengthscale, outputscale)(X1, X2)

    for lengthscale in (torch.tensor(d**0.5).double(), d**0.5 * draw(d, seed=2).exp()):
        inputs = (lengthscale, torch.tensor(1.7).double(), draw(3, d), draw(4, d, seed=1))
        assert torch.autograd.gradcheck(matrix, [x.clone().requires_grad_() for x in inputs])


@pytest.mark.parametrize("d", [2, 20])
@pytest.mark.parametrize("kind", STATIONARY)
def test_gradients_are_finite_at_coincident_points(kind: type[Stationary], d: int) -> None:
    X = draw(5, d)
    X1, X2 = X.clone().requires_grad_(), torch.cat([X, X]).requires_grad_()
    lengthscale = torch.full((d,), d**0.5, dtype=torch.float64, requires_grad=True)
    outputscale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    K = kind(lengthscale, outputscale)(X1, X2)
    gradients = torch.autograd.grad(K.sum(), [X1, X2, lengthscale, outputscale])
    assert all(gradient.isfinite().all() for gradient in gradients)
    at_zero = torch.autograd.grad(kind(lengthscale, outputscale)(X1, X2)[0, 0], [X1, X2, lengthscale, outputscale])
    for gradient in at_zero[:3]:
        close(gradient, torch.zeros_like(gradient), atol=1e-15)
    assert at_zero[3] == 1.0


def test_second_derivatives_of_the_smooth_kernel_are_right_even_at_coincident_points() -> None:
    X1, X2 = draw(3, 2), torch.cat([draw(1, 2), draw(2, 2, seed=1)])  # the first points coincide
    inputs = [torch.tensor(0.8).double().requires_grad_(), X1.requires_grad_(), X2.requires_grad_()]
    assert torch.autograd.gradgradcheck(lambda scale, x, z: RBF(scale)(x, z), inputs)


@pytest.mark.parametrize("make", COMBINED)
def test_products_with_a_matrix_have_the_gradient_of_the_dense_product(make: Callable[[], Kernel]) -> None:
    kernel = make()
    X1, X2, V = (draw(*shape, seed=i).requires_grad_() for i, shape in enumerate([(9, 2), (7, 2), (7, 3)]))
    leaves = [X1, X2, V, *(h.requires_grad_() for h in kernel.hyperparameters().values())]
    weights = draw(9, 3, seed=5)
    expected = torch.autograd.grad((weights * (kernel(X1, X2) @ V)).sum(), leaves)
    actual = torch.autograd.grad((weights * kernel_matmul(kernel, X1, X2, V, chunk_bytes=1000)).sum(), leaves)
    for a, e in zip(actual, expected, strict=True):
        close(a, e, atol=1e-13)


# Products with a matrix


@pytest.mark.parametrize("chunk_bytes", [1, 8 * 100, 8 * 10_000, 64 * 2**20])
@pytest.mark.parametrize("kind", STATIONARY)
def test_a_product_does_not_depend_on_the_chunks(kind: type[Stationary], chunk_bytes: int) -> None:
    kernel, X1, X2, V = kind(0.9, 1.3), draw(23, 3), draw(31, 3, seed=1), draw(31, 4, seed=2)
    close(kernel_matmul(kernel, X1, X2, V, chunk_bytes=chunk_bytes), dense(kernel, X1, X2) @ V)


def test_a_product_of_several_tiles_is_the_dense_product_at_the_default_size() -> None:
    kernel, X, V = Matern32(0.9), draw(1100, 2), draw(1100, 3, seed=1)
    rows, columns = tile_shape(1100, 1100, 8, "cpu", 64 * 2**20)
    assert rows < 1100 and columns < 1100
    close(kernel_matmul(kernel, X, X, V), kernel(X, X) @ V)


@pytest.mark.parametrize("chunk_bytes", [1, 10_000])
def test_a_product_with_nothing_is_empty_or_zero(chunk_bytes: int) -> None:
    for kernel in (RBF(), RBF() + Matern12()):
        for d in (0, 2, 40):
            for a, b, k in [(0, 4, 2), (4, 0, 2), (4, 3, 0), (0, 0, 0)]:
                result = kernel_matmul(kernel, draw(a, d), draw(b, d), draw(b, k), chunk_bytes=chunk_bytes)
                assert torch.equal(result, torch.zeros(a, k, dtype=torch.float64))


@given(a=st.integers(0, 10**6), b=st.integers(0, 10**6), chunk_bytes=st.integers(1, 10**9))
def test_a_tile_is_never_larger_than_the_memory_allowed(a: int, b: int, chunk_bytes: int) -> None:
    for device in ("cpu", "cuda"):
        rows, columns = tile_shape(a, b, 4, device, chunk_bytes)
        assert rows >= 1 and columns >= 1
        assert rows * columns == 1 or rows * columns * 4 * LIVE_TILES <= chunk_bytes


@pytest.mark.parametrize("d", [3, 40])
@pytest.mark.parametrize("make", [RBF, Matern52, lambda: RBF() + Matern52(), lambda: RBF() * Matern52()])
@pytest.mark.parametrize("differentiate", [False, True])
def test_a_product_keeps_to_its_memory(make: Callable[[], Kernel], d: int, differentiate: bool) -> None:
    kernel, X, V = make(), draw(1500, d), draw(1500, 2, seed=1)
    chunk_bytes = 2**20
    outside = 3 * X.nbytes  # the points and the result, scaled, centred and differentiated
    if differentiate:
        X.requires_grad_()
    with peak_of_new_memory() as peak:
        result = kernel_matmul(kernel, X, X, V, chunk_bytes=chunk_bytes)
        if differentiate:
            result.sum().backward()
    assert peak() <= (2 if differentiate else 1) * chunk_bytes + 2 * outside
    assert peak() < X.shape[0] ** 2 * 8 / 4


@contextmanager
def peak_of_new_memory() -> Iterator[Callable[[], int]]:
    """The largest number of bytes that were alive at once in tensors made inside the block."""

    class Ledger(TorchDispatchMode):
        live, peak = 0, 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor):
                    self.enter(tensor)
            return result

        def enter(self, tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
            if size and key not in keys:
                keys.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.leave, key, size)

        def leave(self, key: int, size: int) -> None:
            keys.discard(key)
            self.live -= size

    keys: set[int] = set()
    ledger = Ledger()
    with ledger:
        yield lambda: ledger.peak


# Misuse


@pytest.mark.parametrize("name", ["lengthscale", "outputscale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", STATIONARY)
def test_a_scale_that_is_not_positive_is_refused(kind: type[Stationary], value: float, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} must be positive and finite; got {value}.")):
        kind(**{name: value})


def test_one_wrong_lengthscale_among_many_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lengthscale must be positive and finite; got -2\.0\."):
        RBF([1.0, -2.0, 3.0])


@pytest.mark.parametrize("shape", [(2, 2), (1, 1), (0,)])
def test_a_lengthscale_with_a_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    message = f"one number or a 1-D list of one number per input dimension; got the shape {shape}."
    with pytest.raises(ValueError, match=re.escape(message)):
        RBF(torch.ones(shape))


def test_more_than_one_outputscale_is_refused() -> None:
    with pytest.raises(ValueError, match=r"outputscale must be one number; got the shape \(2,\)\."):
        RBF(1.0, torch.ones(2))


@pytest.mark.parametrize(
    ("value", "came"), [("long", "str"), (None, "NoneType"), (True, "torch.bool"), (1j, "torch.complex64")]
)
def test_a_lengthscale_that_is_no_number_is_refused(value: Any, came: str) -> None:
    with pytest.raises(TypeError, match=f"lengthscale must be a positive number; got {came}"):
        RBF(value)


def test_inputs_of_different_dimension_are_refused() -> None:
    message = "`X1` and `X2` must have the same number of coordinates; got 2 and 3. Try the same columns."
    with pytest.raises(ValueError, match=re.escape(message)):
        RBF()(draw(4, 2), draw(4, 3))


@pytest.mark.parametrize(
    "kernel", [RBF([1.0, 2.0, 3.0]), RBF() + Matern12([1.0, 2.0, 3.0]), 2.0 * RBF([1.0, 2.0, 3.0])]
)
def test_inputs_that_do_not_fit_the_lengthscales_are_refused(kernel: Kernel) -> None:
    message = r"`{}` must have 3 coordinates, one for each lengthscale; got 2\. Try one lengthscale per coordinate"
    with pytest.raises(ValueError, match=message.format("X1")):
        kernel(draw(4, 2), draw(4, 2))
    with pytest.raises(ValueError, match=message.format("X2")):
        kernel(draw(4, 3), draw(4, 2))
    with pytest.raises(ValueError, match=message.format("X")):
        kernel.diagonal(draw(4, 2))


def test_inputs_of_different_dtype_are_refused() -> None:
    message = "`X1` and `X2` must have the same dtype; got torch.float64 and torch.float32. Try .to(dtype)."
    with pytest.raises(TypeError, match=re.escape(message)):
        RBF()(draw(4, 2), draw(4, 2).float())


def test_inputs_on_different_devices_are_refused() -> None:
    message = "`X1` and `X2` must be on the same device; got cpu and meta. Try .to(device)."
    with pytest.raises(ValueError, match=re.escape(message)):
        RBF()(draw(4, 2), draw(4, 2).to("meta"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float16, torch.bfloat16])
def test_inputs_that_are_not_float32_or_float64_are_refused(dtype: torch.dtype) -> None:
    X = torch.ones(4, 2, dtype=dtype)
    message = rf"`X1` must be float32 or float64; got {dtype}\. Try \.float\(\)"
    with pytest.raises(TypeError, match=message):
        RBF()(X, X)
    with pytest.raises(TypeError, match="`X` must be float32 or float64"):
        RBF().diagonal(X)


def test_inputs_that_are_not_matrices_are_refused() -> None:
    message = r"`X1` must have the shape \(points, coordinates\); got \(4,\)\. .*X\[:, None\]"
    with pytest.raises(ValueError, match=message):
        RBF()(draw(4), draw(4))
    not_a_tensor: Any = [[1.0]]
    with pytest.raises(TypeError, match=r"`X1` must be a torch\.Tensor; got list\. Try torch\.as_tensor\."):
        RBF()(not_a_tensor, draw(4, 1))


def test_kernels_combine_only_with_what_makes_sense() -> None:
    anything: Any = 1.0
    with pytest.raises(TypeError, match="The other summand must be a kernel; got float"):
        RBF() + anything
    text: Any = "two"
    with pytest.raises(TypeError, match="must be a kernel or a positive number; got str"):
        RBF() * text
    with pytest.raises(ValueError, match=r"the factor of a kernel must be positive and finite; got -2\.0"):
        -2.0 * RBF()
    with pytest.raises(ValueError, match=r"the factor of a kernel must be one number; got the shape \(2,\)"):
        Scaled(torch.ones(2), RBF())
    with pytest.raises(TypeError, match="Sum must be made of one or more kernels; got nothing"):
        Sum()
    with pytest.raises(TypeError, match="Product must be made of one or more kernels; got RBF, float"):
        Product(RBF(), anything)
    with pytest.raises(
        ValueError, match=r"Sum must be made of kernels for inputs of one dimension; got lengthscales for \[2, 3\]"
    ):
        RBF([1.0, 2.0]) + RBF([1.0, 2.0, 3.0])


def test_a_product_with_a_matrix_that_does_not_fit_is_refused() -> None:
    X = draw(4, 2)
    for shape in [(3, 1), (4,)]:
        message = f"`V` must have the shape (4, columns), one row per row of X2; got {shape}."
        with pytest.raises(ValueError, match=re.escape(message)):
            kernel_matmul(RBF(), X, X, draw(*shape))
    with pytest.raises(
        TypeError, match=r"`X2` and `V` must have the same dtype; got torch\.float64 and torch\.float32"
    ):
        kernel_matmul(RBF(), X, X, draw(4, 1).float())
    text: Any = "V"
    with pytest.raises(TypeError, match=r"`V` must be a torch\.Tensor; got str"):
        kernel_matmul(RBF(), X, X, text)
    with pytest.raises(ValueError, match="number of coordinates; got 2 and 3"):
        kernel_matmul(RBF(), X, draw(4, 3), draw(4, 1))
    with pytest.raises(ValueError, match="`chunk_bytes` must be a positive number of bytes; got 0"):
        kernel_matmul(RBF(), X, X, draw(4, 1), chunk_bytes=0)

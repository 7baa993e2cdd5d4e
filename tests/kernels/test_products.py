"""Products with kernel matrices: every method against dense float64, its gradients against the plain path, the choice.

Compiled formulas take seconds each the first time, so the methods that compile are tried on few of them here: each
kernel once, each number of coordinates once. More of them are marked slow.
"""

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ntk_iterncgp.kernels import (
    METHODS,
    RBF,
    Kernel,
    KernelMatrix,
    Matern12,
    Matern32,
    Matern52,
    Stationary,
    choice,
    fused,
    kernel_matmul,
    reduction,
)
from ntk_iterncgp.kernels.formula import Formula
from ntk_iterncgp.kernels.gemm import reach
from ntk_iterncgp.kernels.sparse import Leaves, Pattern
from ntk_iterncgp.kernels.tiles import WHOLE, Part, PlainEngine
from tests.kernels.test_kernels import close, dense, draw

STATIONARY: list[type[Stationary]] = [RBF, Matern12, Matern32, Matern52]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
DTYPES = [torch.float32, torch.float64]
needs_compiler = pytest.mark.skipif(fused.missing_compiler() is not None, reason="needs a C++ compiler")


def points(a: int, d: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """With duplicated points and points that nearly coincide."""
    X = draw(a, d, seed=seed)
    third = a // 3
    X[third : 2 * third] = X[:third]
    X[2 * third : 2 * third + third // 2] = X[: third // 2] + 1e-4 * draw(third // 2, d, seed=seed + 7)
    return X.to(dtype)


def agree(method: str, kernel: Kernel, d: int, dtype: torch.dtype, *, widths: tuple[int, ...] = (1, 10, 50)) -> None:
    """A method agrees with the dense product in float64, relative to its largest entry: rectangular and symmetric."""
    X = points(120, d, dtype=dtype)
    for X2 in (X, torch.cat([X[:40], points(57, d, seed=3, dtype=dtype)])):
        exact = dense(kernel, X, X2) if isinstance(kernel, Stationary) else kernel(X.double(), X2.double())
        matrix = KernelMatrix(kernel, X, X2, method=method, tolerance=0.0 if method == "sparse" else None)
        for k in widths:
            V = draw(len(X2), k, seed=5).to(dtype)
            found, expected = matrix @ V, exact @ V.double()
            assert found.shape == (len(X), k) and found.dtype == dtype
            error = (found.double() - expected).abs().max() / expected.abs().max()
            assert error <= TOLERANCE[dtype], f"{method} errs by {error:.1e}"


# Every method computes the same matrix


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 3, 20, 784])
@pytest.mark.parametrize("kind", STATIONARY)
@pytest.mark.parametrize("method", ["plain", "gemm"])
def test_methods_without_a_compiler_agree_with_the_dense_product(
    method: str, kind: type[Stationary], d: int, dtype: torch.dtype
) -> None:
    agree(method, kind(0.8 * d**0.5, 1.7), d, dtype)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "d", "dtype"),
    [
        (RBF(0.9, 1.7), 3, torch.float32),
        (Matern12(0.9, 1.7), 3, torch.float32),
        (Matern32([0.9, 0.5, 2.0], 1.7), 3, torch.float32),
        (Matern52(0.9, 1.7), 3, torch.float32),
        (Matern32(0.9, 1.7), 3, torch.float64),
        (Matern12(20.0, 1.7), 784, torch.float32),  # the profile alone is compiled
    ],
)
@pytest.mark.parametrize("method", ["fused", "sparse"])
def test_compiled_tiles_agree_with_the_dense_product(method: str, kernel: Kernel, d: int, dtype: torch.dtype) -> None:
    agree(method, kernel, d, dtype)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "d", "dtype"),  # each two of them together once
    [(kind, d, DTYPES[(i + j) % 2]) for i, kind in enumerate(STATIONARY) for j, d in enumerate((1, 3, 20, 784))],
)
@pytest.mark.parametrize("method", ["fused", "sparse"])
def test_compiled_tiles_agree_with_the_dense_product_for_each_kernel_and_dimension(
    method: str, kind: type[Stationary], d: int, dtype: torch.dtype
) -> None:
    agree(method, kind(0.8 * d**0.5, 1.7), d, dtype)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "d", "dtype", "widths"),
    [
        (RBF, 20, torch.float64, (10, 50)),
        (Matern12, 3, torch.float32, (1,)),
        (Matern32, 784, torch.float32, (10, 50)),
        (Matern52, 1, torch.float32, (10, 50)),
    ],
)
def test_keops_agrees_with_the_dense_product_for_each_kernel_and_each_dimension(
    kind: type[Stationary], d: int, dtype: torch.dtype, widths: tuple[int, ...]
) -> None:
    """Each line is a formula of its own to KeOps, and takes ten seconds to compile."""
    agree("keops", kind(0.8 * d**0.5, 1.7), d, dtype, widths=widths)


@needs_compiler
@pytest.mark.slow
def test_keops_agrees_with_the_dense_product_and_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Two formulas: a single column, and blocks of 16 columns, of which ten fill one and fifty four."""
    agree("keops", Matern32([0.9, 0.5, 2.0], 1.7), 3, torch.float64)
    assert capfd.readouterr() == ("", "")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fused", "gemm", "sparse"])
def test_sums_and_products_of_kernels_have_one_formula(method: str) -> None:
    kernel = 0.3 * (RBF(0.7) + Matern52([2.0, 1.0])) * Matern12(3.0)
    agree(method, kernel, 2, torch.float64)


@needs_compiler
@pytest.mark.parametrize("method", METHODS)
def test_nothing_times_something_is_empty_or_zero_by_every_method(method: str) -> None:
    for a, b, k in [(0, 4, 2), (4, 0, 2), (4, 3, 0), (0, 0, 0)]:
        result = kernel_matmul(RBF(), draw(a, 2), draw(b, 2), draw(b, k), method=method)
        assert torch.equal(result, torch.zeros(a, k, dtype=torch.float64))


@needs_compiler
@pytest.mark.parametrize("method", ["plain", "fused", "gemm", "sparse"])
def test_single_points_and_strided_tensors_are_as_good_as_any(method: str) -> None:
    wide, V = draw(40, 6).float(), draw(6, 40, seed=1).float().T
    X = wide[:, ::2]  # not contiguous
    kernel = RBF(0.9)
    for a, b in [(40, 40), (1, 40), (40, 1), (1, 1)]:
        expected = kernel(X[:a].contiguous(), X[:b].contiguous()) @ V[:b]
        close(kernel_matmul(kernel, X[:a], X[:b], V[:b], method=method), expected, atol=1e-5)


def test_a_symmetric_product_makes_half_of_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from ntk_iterncgp.kernels.tiles import PlainEngine

    made: list[int] = []
    original = PlainEngine.tile

    def counted(self: PlainEngine, rows: Tensor, columns: Tensor) -> Tensor:
        made.append(len(rows) * len(columns))
        return original(self, rows, columns)

    monkeypatch.setattr(PlainEngine, "tile", counted)
    kernel, X, V = Matern32(0.4), draw(300, 2), draw(300, 3, seed=1)
    half = kernel_matmul(kernel, X, X, V, chunk_bytes=50_000)
    pairs = sum(made)
    made.clear()
    close(half, kernel_matmul(kernel, X, X.clone(), V, chunk_bytes=50_000), atol=1e-12)
    assert sum(made) == 300**2 and pairs < 0.6 * 300**2


# Distances from a matrix product


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", STATIONARY)
def test_far_from_the_origin_and_close_together_the_expansion_is_corrected(
    kind: type[Stationary], dtype: torch.dtype
) -> None:
    groups = (3.0 * draw(5, 40)).repeat_interleave(30, 0) + 50
    for spread in (0.0, 1e-6, 1e-3, 0.1):
        X = (groups + spread * draw(150, 40, seed=1)).to(dtype)
        kernel, V = kind(2.0), draw(150, 3, seed=2).to(dtype)
        actual = kernel_matmul(kernel, X, X, V, method="gemm").double()
        expected = kernel(X.double(), X.double()) @ V.double()
        assert (actual - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def test_the_reach_is_where_an_error_in_the_distance_stops_to_matter() -> None:
    for kernel in (Matern12(0.5, 3.0), Matern32(0.5, 3.0), RBF(0.5, 3.0)):
        error, tolerance = 1e-5, 3e-6
        limit = reach(Formula.of(kernel), 0, error, tolerance)
        squared = torch.logspace(-12, 3, 1000, dtype=torch.float64)
        squared = squared[squared > limit]
        change = kernel.profile((squared - error).clamp_min(0)) - kernel.profile(squared + error)
        assert len(squared) > 100 and change.max() <= tolerance
        assert error <= limit < 10


# Leaving tiles out


@pytest.mark.parametrize("tolerance", [1e-3, 1e-6])
@pytest.mark.parametrize("kernel", [Matern32(0.02, 3.0), RBF([0.03, 0.06], 2.0) + Matern12(0.01)])
def test_what_is_left_out_is_below_the_tolerance_and_symmetric(kernel: Kernel, tolerance: float) -> None:
    X = torch.rand(3000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = KernelMatrix(kernel, X, method="sparse", tolerance=tolerance)
    assert matrix.choice.pattern is not None and matrix.choice.pattern.fraction < 0.8
    matrix._engine = KernelMatrix(kernel, X[matrix.choice.pattern.rows.order], method="plain").engine  # no compiler
    exact = kernel(X, X)
    columns = torch.arange(0, 3000, 50)
    found = matrix @ torch.eye(3000, dtype=torch.float64)[:, columns]
    largest = float(kernel.diagonal(X[:1]))
    assert (found - exact[:, columns]).abs().max() <= tolerance * largest
    assert (found == 0).any()
    close(found[columns], found[columns].T, atol=1e-13)


def test_a_tree_keeps_every_point_once_in_a_box_that_holds_it() -> None:
    X = points(1000, 3)
    leaves = Leaves.of(X, leaf_size=50)
    assert torch.equal(leaves.order.sort().values, torch.arange(1000)) and max(leaves.sizes) <= 50
    for leaf, lower, upper in zip(leaves.slices, leaves.lower, leaves.upper, strict=True):
        members = X[leaves.order[leaf]]
        assert (members >= lower).all() and (members <= upper).all()


def test_with_tolerance_zero_only_exact_zeros_are_left_out() -> None:
    X = torch.cat([draw(400, 2), 1e4 + draw(400, 2, seed=1)])
    pattern = Pattern.of(Formula.of(RBF()), X, X, 0.0)
    assert pattern.fraction == 0.5  # exp(−5e7) is zero
    assert Pattern.of(Formula.of(RBF(1e5)), X, X, 0.0).fraction == 1.0


@needs_compiler
@pytest.mark.slow
def test_keops_leaves_out_the_same_tiles(capfd: pytest.CaptureFixture[str]) -> None:
    from ntk_iterncgp.kernels.keops import sparse_keops_product

    X = draw(900, 3) + 100 * torch.arange(900).double()[:, None].fmod(2)  # two groups, far apart
    kernel = Matern32([0.5, 0.5, 0.5], 1.7)  # the formula of the other KeOps test
    pattern = Pattern.of(Formula.of(kernel), X, X, 1e-3)
    V = draw(900, 10, seed=1)
    ours = KernelMatrix(kernel, X, method="sparse", tolerance=1e-3)
    ours._engine = KernelMatrix(kernel, X[pattern.rows.order], method="plain").engine
    assert pattern.fraction < 0.9

    def product(kept: Pattern) -> Tensor:
        return sparse_keops_product(Formula.of(kernel), kept, X, X, V)

    close(product(pattern), ours @ V)
    thirds = [product(pattern.of_rows(Part(number, 3))) for number in range(3)]
    assert all((third == 0).any() for third in thirds)
    close(sum(thirds), ours @ V)
    assert capfd.readouterr() == ("", "")


# Gradients


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("method", ["plain", "fused", "gemm", "sparse", "keops"])
def test_gradients_of_every_method_are_those_of_the_dense_product(method: str, same: bool) -> None:
    kernel = Matern32([0.9, 0.5, 2.0], 1.7)
    X1 = points(30, 3).requires_grad_()
    X2 = X1 if same else torch.cat([X1.detach()[:10], draw(13, 3, seed=2)]).requires_grad_()
    V = draw(len(X2), 10, seed=3).requires_grad_()  # ten: KeOps has compiled that already
    leaves = [X1, *([] if same else [X2]), V, *(h.requires_grad_() for h in kernel.hyperparameters().values())]
    weights = draw(30, 10, seed=5)
    expected = torch.autograd.grad((weights * (kernel(X1, X2) @ V)).sum(), leaves)
    tolerance = 0.0 if method == "sparse" else None
    product = kernel_matmul(kernel, X1, X2, V, method=method, tolerance=tolerance, chunk_bytes=5000)
    for found, wanted in zip(torch.autograd.grad((weights * product).sum(), leaves), expected, strict=True):
        assert found.isfinite().all()  # at coincident points, too
        close(found, wanted, atol=1e-11)


def test_second_derivatives_pass_through_a_fast_product() -> None:
    X, V = draw(8, 3), draw(8, 2, seed=1)
    values = []
    for method in ("gemm", "plain"):
        lengthscale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        total = kernel_matmul(RBF(lengthscale), X, X, V, method=method).square().sum()
        (slope,) = torch.autograd.grad(total, lengthscale, create_graph=True)
        values.append(torch.autograd.grad(slope, lengthscale)[0])
    close(values[0], values[1], atol=1e-10)


# The choice


class Flat(Kernel):
    """k(x, z) = 1: not written as a formula of distances."""

    input_dimension = None

    def hyperparameters(self) -> dict[str, Tensor]:
        return {}

    def _evaluate(self, X1: Tensor, X2: Tensor) -> Tensor:
        return X1.new_ones(len(X1), len(X2))

    def _evaluate_diagonal(self, X: Tensor) -> Tensor:
        return X.new_ones(len(X))

    def __repr__(self) -> str:
        return "Flat()"


class Wave(Stationary):
    """Does not fall with distance, and does not say so."""

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        return 1 / (1 + squared * squared)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if five hundred points were many."""
    monkeypatch.setattr(choice, "WORTH_COMPILING", 500**2)


def chosen(kernel: Kernel, X: Tensor, **settings: Any) -> str:
    return repr(KernelMatrix(kernel, X, **settings))


def test_the_choice_says_which_and_why(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "missing_compiler", lambda: None)
    X = draw(500, 2).float()
    assert "by plain (160,000 pairs are too few to be worth compiling)" in chosen(RBF(), X[:400])
    assert "by fused (250,000 pairs in 2 coordinates are worth compiling" in chosen(RBF(), X)
    assert "by gemm (distances in 40 coordinates are a matrix product)" in chosen(RBF(), draw(10, 40))
    assert "by plain (Flat is not a formula of distances)" in chosen(Flat(), X)
    assert "by plain (Flat is not a formula of distances)" in chosen(RBF() + Flat(), X)
    assert "by plain (as asked)" in chosen(RBF(), X, method="plain")
    assert "by plain (there is nothing to multiply)" in chosen(RBF(), X[:0])


def test_local_kernels_are_multiplied_tile_by_tile_only_where_that_is_within_rounding(
    large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "missing_compiler", lambda: None)
    X = 100 * draw(3000, 2)
    local = Matern32(0.1)
    assert "by sparse (" in chosen(local, X.float()) and "above 1e-06 of its largest value)" in chosen(local, X.float())
    assert "by fused (" in chosen(local, X)  # float64: exact unless asked
    assert "by sparse (" in chosen(local, X, tolerance=1e-9)
    assert "by fused (" in chosen(local, X.float(), tolerance=0.0)
    assert "by fused (" in chosen(Wave(0.1), X.float())


def test_on_a_gpu_local_kernels_are_sparse_too_and_all_others_go_to_keops(
    large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_is_on_gpu", lambda X: True)
    monkeypatch.setattr(choice.keops, "is_installed", lambda: True)
    X = 100 * draw(3000, 2).float()
    assert "by sparse (" in chosen(Matern32(0.1), X)
    assert "by keops (a GPU and 2 coordinates)" in chosen(Matern32(0.1), X, tolerance=0.0)
    assert "by keops (a GPU and 2 coordinates)" in chosen(Matern32(0.1), X.double())  # float64: exact unless asked
    assert "by keops (a GPU and 2 coordinates)" in chosen(Matern32(100.0), X)
    assert "by keops (a GPU and 2 coordinates)" in chosen(Matern32(0.1), X[:100])  # too few to be sorted
    assert "by gemm (" in chosen(Matern32(0.1), draw(10, 100))


def test_without_a_compiler_the_plain_path_is_taken_and_one_warning_says_what_is_missing(
    large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused.shutil, "which", lambda name: None)
    monkeypatch.setattr(fused, "missing_compiler", fused.missing_compiler.__wrapped__)
    for module in (choice, sys.modules["ntk_iterncgp.kernels.reduction"]):
        monkeypatch.setattr(module, "missing_compiler", fused.missing_compiler)
    fused.warn_once.cache_clear()
    X, V = draw(500, 2), draw(500, 2, seed=1)
    with pytest.warns(UserWarning, match=r"several times faster with a C\+\+ compiler \(g\+\+ is not on the path"):
        matrix = KernelMatrix(RBF(), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = KernelMatrix(Matern12(), X)  # no second warning
    assert matrix.method == again.method == "plain"
    assert matrix.reason.startswith("torch.compile lacks a C++ compiler (g++ is not on the path")
    close(matrix @ V, RBF()(X, X) @ V)
    close(kernel_matmul(RBF(0.1), X, X, V, method="sparse", tolerance=0.0), RBF(0.1)(X, X) @ V)
    with pytest.raises(ValueError, match=r"method='fused' must have a C\+\+ compiler .* Try method='plain' or 'auto'"):
        KernelMatrix(RBF(), X, method="fused")


def test_a_compiler_that_fails_leaves_the_plain_path_and_a_warning(
    large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **settings: Any) -> Callable[..., Tensor]:
        raise RuntimeError("no headers\nand a long log")

    monkeypatch.setattr(choice, "missing_compiler", lambda: None)
    monkeypatch.setattr(sys.modules["ntk_iterncgp.kernels.reduction"], "missing_compiler", lambda: None)
    monkeypatch.setattr(fused, "compiled_formula", broken)
    fused.warn_once.cache_clear()
    X, V = draw(500, 2), draw(500, 2, seed=1)
    matrix = KernelMatrix(RBF(), X)
    with pytest.warns(UserWarning, match=r"could not compile a kernel \(RuntimeError: no headers\)\. Going on"):
        result = matrix @ V
    close(result, RBF()(X, X) @ V)
    assert (matrix.method, matrix.reason) == ("plain", "torch.compile failed with RuntimeError")
    with pytest.raises(RuntimeError, match="no headers"):
        KernelMatrix(RBF(), X, method="fused") @ V


@needs_compiler
def test_a_formula_is_compiled_once_whatever_the_hyperparameters_and_sizes(caplog: pytest.LogCaptureFixture) -> None:
    def product(kernel: Kernel, a: int, b: int) -> None:
        kernel_matmul(kernel, draw(a, 3).float(), draw(b, 3, seed=1).float(), torch.ones(b, 2), method="fused")

    product(RBF(0.9, 1.7), 50, 60)
    count = len(fused._compiled)
    counters = torch._dynamo.utils.counters
    frames = counters["stats"]["unique_graphs"]
    with caplog.at_level(logging.WARNING):
        for kernel, a, b in [(RBF(0.1), 33, 7), (RBF([1.0, 2.0, 3.0], 0.2), 700, 900), (RBF(2.0), 1, 2)]:
            product(kernel, a, b)
    assert len(fused._compiled) == count and counters["stats"]["unique_graphs"] == frames
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.process
def test_neither_keops_nor_the_compiler_is_loaded_before_it_is_needed() -> None:
    code = (
        "import sys, torch; from ntk_iterncgp import kernels; X = torch.rand(50, 2)\n"
        "kernels.kernel_matmul(kernels.RBF(), X, X, X)\n"
        "sys.exit(' '.join(m for m in ('pykeops', 'keopscore', 'torch._inductor.compile_fx') if m in sys.modules) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# Misuse


def test_a_method_or_tolerance_that_makes_no_sense_is_refused() -> None:
    X = draw(5, 2)
    with pytest.raises(ValueError, match=r"`method` must be one of 'auto', 'plain', .*; got 'fast'\."):
        KernelMatrix(RBF(), X, method="fast")
    for tolerance in (-1e-6, 1.0, float("nan"), "nonsense", [0.1]):
        with pytest.raises(ValueError, match="`tolerance` must be a fraction from 0 to below 1; got"):
            KernelMatrix(RBF(), X, tolerance=tolerance)
    with pytest.raises(ValueError, match=r"must be a formula of distances .*; got Flat\(\)\."):
        KernelMatrix(Flat(), X, method="gemm")
    with pytest.raises(ValueError, match=r"must fall with distance .*; got Wave"):
        KernelMatrix(Wave(), X, method="sparse")


def test_hyperparameters_are_replaced_by_name() -> None:
    kernel = RBF(0.7, 2.0) + 4.0 * Matern52([1.0, 2.0])
    new = torch.tensor(3.0, dtype=torch.float64)
    changed = kernel.with_hyperparameters({"1.scale": new, "0.lengthscale": new})
    assert repr(changed) == (
        "RBF(lengthscale=3, outputscale=2) + 3 * Matern52(lengthscale=[1, 2], outputscale=1)"
    ) and repr(kernel).startswith("RBF(lengthscale=0.7")
    for wrong in ("lengthscale", "1.kernel.noise", "2.scale"):
        with pytest.raises(ValueError, match="has no hyperparameter"):
            kernel.with_hyperparameters({wrong: new})


def test_a_broken_build_of_keops_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pykeops = pytest.importorskip("pykeops.torch")

    def cut_short(self: object, other: object) -> object:
        raise ImportError("file too short")

    monkeypatch.setattr(pykeops.LazyTensor, "__matmul__", cut_short)
    with pytest.raises(RuntimeError, match=r"got an error \(file too short\).*clean_pykeops"):
        KernelMatrix(RBF(), torch.rand(4, 2), torch.rand(5, 2), method="keops") @ torch.rand(5, 1)


@pytest.mark.parametrize("method", ["plain", "gemm", "sparse"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("of", [2, 3, 50])
def test_the_parts_of_a_matrix_sum_to_the_matrix(method: str, symmetric: bool, of: int) -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(150, 3, generator=generator, dtype=torch.float64)
    V = torch.randn(150, 4, generator=generator, dtype=torch.float64)
    kernel, rows = Matern32(lengthscale=0.1), X if symmetric else X[:70] + 0.01
    settings: dict[str, Any] = dict(method=method, tolerance=1e-6, chunk_bytes=6 * 8 * 20**2)  # tiles of 20 by 20
    whole = KernelMatrix(kernel, rows, X, **settings) @ V
    parts = [KernelMatrix(kernel, rows, X, **settings, part=Part(number, of)) @ V for number in range(of)]
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", ["plain", "sparse"])
def test_the_parts_of_a_symmetric_matrix_share_its_tiles_evenly(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    tile = PlainEngine.tile
    monkeypatch.setattr(PlainEngine, "tile", lambda *given: made.append(1) or tile(*given))
    monkeypatch.setattr(reduction, "missing_compiler", lambda: "a compiler")
    X = torch.rand(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def tiles(part: Part) -> int:
        made.clear()
        kernel, chunk_bytes = Matern32(lengthscale=0.01), 6 * 8 * 20**2
        KernelMatrix(kernel, X, method=method, tolerance=1e-6, chunk_bytes=chunk_bytes, part=part) @ X
        return len(made)

    numbers = [tiles(Part(number, 3)) for number in range(3)]
    assert sum(numbers) == tiles(WHOLE) and max(numbers) - min(numbers) <= 1
    if method == "plain":
        assert sum(numbers) == 15 * 16 // 2  # half of them

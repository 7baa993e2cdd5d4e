"""Tall matrices in both formats, against the matrices they stand for, written out in float64.

Slices are made tiny throughout, so that every sum runs over many of them with a ragged one at the end.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.linalg import columns as module
from ntk_iterncgp.linalg.columns import Buffer, Columns, DenseColumns, KroneckerColumns
from ntk_iterncgp.runtime.parallel import Shard

N, C = 22, 4
TINY_SLICE = 8 * C * 5 * 3  # three data of five columns
DTYPES = [torch.float64, torch.float32]
FORMATS = ["dense", "kronecker"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_BYTES", TINY_SLICE)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def contrasts() -> Tensor:
    return Softmax(C).contrasts(CPU)


def make(form: str, size: int, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Columns, Tensor]:
    """Columns with `size` stored ones, and the matrix (n, B) that they stand for."""
    if form == "dense":
        matrix = draw(N * C, size, seed=seed, dtype=dtype)
        return DenseColumns.of(matrix, C), matrix.double()
    factor = draw(N, size, seed=seed, dtype=dtype)
    return KroneckerColumns(DenseColumns.of(factor, 1), contrasts()), torch.kron(factor.double(), contrasts())


def empty(form: str, *, dtype: torch.dtype = torch.float64, capacity: int = 2) -> Columns:
    dense = DenseColumns.empty(Shard.whole(N), C if form == "dense" else 1, capacity=capacity, dtype=dtype, device=CPU)
    return dense if form == "dense" else KroneckerColumns(dense, contrasts())


def written_out(columns: Columns) -> Tensor:
    return columns.rows(slice(0, columns.num_data)).flatten(0, 1)


def project(block: Tensor) -> Tensor:  # (n, k), zero sum over the classes of each datum
    blocks = block.reshape(N, C, -1)
    return (blocks - blocks.mean(1, keepdim=True)).reshape(block.shape)


def close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol)


# What they answer


@pytest.mark.parametrize("form", FORMATS)
def test_the_slices_cover_all_data_once_and_the_last_is_ragged(form: str) -> None:
    columns, _ = make(form, 5)
    slices = list(columns.slices(5))
    assert [s.start for s in slices] == list(range(0, N, 3))
    assert slices[-1] == slice(21, 22)
    assert [s.stop for s in slices[:-1]] == [s.start for s in slices[1:]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_combinations_of_columns_are_products_with_the_matrix(form: str, dtype: torch.dtype) -> None:
    columns, matrix = make(form, 5, dtype=dtype)
    coefficients = draw(columns.size, 3, seed=1)
    close(columns.combine(coefficients), matrix @ coefficients, atol=1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_inner_products_with_a_block_are_products_with_the_transpose(form: str, dtype: torch.dtype) -> None:
    columns, matrix = make(form, 5, dtype=dtype)
    block = draw(N * C, 3, seed=1)
    close(columns.inner(block), matrix.T @ block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_the_gram_of_two_sets_of_columns_is_the_product_of_their_matrices(form: str, dtype: torch.dtype) -> None:
    (left, S), (right, T) = make(form, 5, dtype=dtype), make(form, 3, dtype=dtype, seed=1)
    close(left.gram(right), S.T @ T)
    close(left.gram(left), S.T @ S)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_inner_products_through_a_diagonal_are_those_of_the_matrices(form: str, dtype: torch.dtype) -> None:
    (left, S), (right, T) = make(form, 5, dtype=dtype), make(form, 3, dtype=dtype, seed=1)
    diagonal = draw(N, C, seed=2)
    close(left.diagonal_inner(diagonal, right), S.T @ diagonal.flatten().diag() @ T)
    close(right.diagonal_inner(diagonal, left), T.T @ diagonal.flatten().diag() @ S)
    close(left.diagonal_inner(diagonal, left), S.T @ diagonal.flatten().diag() @ S)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_inner_products_through_symmetric_blocks_are_those_of_the_matrices(form: str, dtype: torch.dtype) -> None:
    (left, S), (right, T) = make(form, 5, dtype=dtype), make(form, 3, dtype=dtype, seed=1)
    blocks = draw(N, C, C, seed=2)
    blocks = blocks + blocks.mT
    D = torch.block_diag(*blocks)

    def weight(data: slice, block: Tensor) -> Tensor:
        return blocks[data] @ block

    close(left.weighted_inner(weight, right), S.T @ D @ T)
    close(right.weighted_inner(weight, left), T.T @ D @ S)
    close(left.weighted_inner(weight, left), S.T @ D @ S)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_the_rows_of_some_data_are_rows_of_the_matrix(form: str, dtype: torch.dtype) -> None:
    columns, matrix = make(form, 5, dtype=dtype)
    for data in (slice(0, N), slice(4, 9), slice(21, 22)):
        close(columns.rows(data), matrix.reshape(N, C, -1)[data], atol=0.0 if form == "dense" else 1e-15)


@pytest.mark.parametrize("form", FORMATS)
def test_no_columns_answer_with_nothing_and_never_fail(form: str) -> None:
    none, (some, matrix) = empty(form), make(form, 3)
    assert none.size == 0
    close(none.combine(draw(0, 2)), torch.zeros(N * C, 2, dtype=torch.float64))
    assert none.inner(draw(N * C, 2)).shape == (0, 2)
    assert none.gram(some).shape == (0, some.size) and some.gram(none).shape == (some.size, 0)
    assert none.diagonal_inner(draw(N, C), some).shape == (0, some.size)
    assert none.weighted_inner(lambda data, block: block, some).shape == (0, some.size)
    assert none.rows(slice(0, 2)).shape == (2, C, 0)
    close(written_out(none.append(some)), matrix)


def test_kronecker_columns_tell_how_many_actions_a_stored_column_stands_for() -> None:
    columns, _ = make("kronecker", 5)
    assert (columns.factor.size, columns.num_contrasts, columns.size) == (5, C - 1, 5 * (C - 1))
    dense, _ = make("dense", 5)
    assert (dense.factor.size, dense.num_contrasts, dense.size) == (5, 1, 5)


# How they grow and turn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_columns_appended_within_and_beyond_the_capacity_stand_behind_the_others(form: str, dtype: torch.dtype) -> None:
    grown, parts = empty(form, dtype=dtype, capacity=3), []
    for seed, size in enumerate([2, 1, 3, 4]):  # fills the room exactly, then exceeds it twice
        more, matrix = make(form, size, dtype=dtype, seed=seed)
        before, seen = grown, written_out(grown)
        grown = grown.append(more)
        parts.append(matrix)
        assert grown.dtype == dtype
        close(written_out(grown), torch.cat(parts, 1), atol=1e-15)
        assert torch.equal(written_out(before), seen)  # an earlier view sees its own columns, unchanged


@pytest.mark.parametrize("form", FORMATS)
def test_columns_that_fit_in_the_capacity_are_written_without_a_copy(form: str) -> None:
    start = empty(form, capacity=5)
    grown = start.append(make(form, 3)[0]).append(make(form, 2, seed=1)[0])
    assert grown.factor.storage.data_ptr() == start.factor.storage.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_rotating_multiplies_the_stored_columns(form: str, dtype: torch.dtype) -> None:
    columns, matrix = make(form, 5, dtype=dtype)
    Q = torch.linalg.qr(draw(5, 3, seed=1)).Q.contiguous()
    rotated = columns.rotate(Q)
    small = Q if form == "dense" else torch.kron(Q, torch.eye(C - 1, dtype=torch.float64))
    assert rotated.dtype == dtype and rotated.size == small.shape[1]
    close(written_out(rotated), matrix @ small, atol=1e-12 if dtype == torch.float64 else 1e-6)
    close(written_out(columns), matrix, atol=1e-15)


def test_a_buffer_appends_and_rotates_actions_and_images_together() -> None:
    (S, _), (T, _), (more_S, _), (more_T, _) = (make("dense", 2, seed=seed) for seed in range(4))
    buffer = Buffer(S, T).append(Buffer(more_S, more_T))
    assert buffer.size == 4
    A = draw(N * C, N * C, seed=9)
    pair = Buffer(S, DenseColumns.of(A @ S.matrix, C)).append(Buffer(more_S, DenseColumns.of(A @ more_S.matrix, C)))
    turned = pair.rotate(torch.linalg.qr(draw(4, 3, seed=5)).Q)
    assert turned.size == 3
    close(written_out(turned.images), A @ written_out(turned.actions))


# What is new in a block


def width(form: str, num_columns: int) -> int:
    """How many stored columns a block gives: in the Kronecker format each class of each column is one."""
    return num_columns if form == "dense" else num_columns * C


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_new_columns_are_orthonormal_zero_sum_and_orthogonal_to_the_old(form: str, dtype: torch.dtype) -> None:
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    old = empty(form, dtype=dtype).orthonormalise(draw(N * C, 2, seed=1), project)
    new = old.orthonormalise(draw(N * C, 2, seed=2), project)
    assert new.dtype == dtype and new.factor.size == width(form, 2)
    matrix = written_out(new)
    close(matrix.T @ matrix, torch.eye(new.size, dtype=torch.float64), atol=tolerance)
    close(matrix.T @ written_out(old), torch.zeros(new.size, old.size, dtype=torch.float64), atol=tolerance)
    sums = matrix.reshape(N, C, -1).sum(1)
    close(sums, torch.zeros_like(sums), atol=tolerance)


@pytest.mark.parametrize("form", FORMATS)
def test_old_and_new_columns_together_hold_the_projected_block(form: str) -> None:
    block = draw(N * C, 2, seed=2)
    old = empty(form).orthonormalise(draw(N * C, 2, seed=1), project)
    basis = torch.cat([written_out(old), written_out(old.orthonormalise(block, project))], 1)
    close(basis @ (basis.T @ block), project(block))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_of_which_only_rounding_is_in_the_range_is_dropped(dtype: torch.dtype) -> None:
    constant = draw(N, 1, seed=1).repeat_interleave(C, 0)  # nothing of it has zero sum over the classes
    constant += 4 * torch.finfo(dtype).eps * draw(N * C, 1, seed=3)
    for block in (constant, torch.cat([constant, draw(N * C, 1, seed=2)], 1)):
        new = empty("dense", dtype=dtype).orthonormalise(block.to(dtype), project)
        assert new.size == block.shape[1] - 1
        matrix = written_out(new)
        close(matrix.T @ matrix, torch.eye(new.size, dtype=torch.float64), atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_dependent_columns_are_dropped(form: str, dtype: torch.dtype) -> None:
    a, b, c = draw(N * C, 3, seed=1).unbind(1)
    old = empty(form, dtype=dtype).orthonormalise(c[:, None], project)
    new = old.orthonormalise(torch.stack([a, a, b, 3 * a - b, c, 0 * a, a + b + c], 1), project)
    assert new.factor.size == width(form, 2)
    assert old.append(new).orthonormalise(torch.stack([a, b], 1), project).size == 0


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "share", "is_new"),
    [
        (torch.float64, 1e-10, False),
        (torch.float64, 1e-6, True),
        (torch.float32, 1e-5, False),
        (torch.float32, 1e-3, True),
    ],
)
def test_a_nearly_dependent_column_is_dropped_or_made_orthogonal_to_rounding(
    form: str, dtype: torch.dtype, share: float, is_new: bool
) -> None:
    """1e-8 of what it was is the limit in float64, 1e-4 in float32; above it, one Gram-Schmidt pass is not enough."""
    a, b = draw(N * C, 2, seed=1).unbind(1)
    near, none = (a + share * b)[:, None], empty(form, dtype=dtype)
    for old, block in [
        (none.orthonormalise(a[:, None], lambda v: v), near),  # against the basis
        (none, torch.cat([a[:, None], near], 1)),  # within the block
    ]:
        total = old.append(old.orthonormalise(block, lambda v: v))
        assert total.factor.size == width(form, 1 + is_new)
        matrix, eye = written_out(total), torch.eye(total.size, dtype=torch.float64)
        close(matrix.T @ matrix, eye, atol=1e-14 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float64, 1e-7), (torch.float32, 1e-3)])
@pytest.mark.parametrize("form", FORMATS)
def test_a_nearly_dependent_column_stays_zero_sum_to_rounding(form: str, dtype: torch.dtype, share: float) -> None:
    """Scaled up from a small remainder, the rounding of the first projection would be seen."""
    a, b = draw(N * C, 2, seed=1).split(1, 1)
    old = empty(form, dtype=dtype).orthonormalise(a, project)
    new = old.orthonormalise(a + share * b, project)
    assert new.factor.size == width(form, 1)
    sums = written_out(new).reshape(N, C, -1).sum(1)
    close(sums, torch.zeros_like(sums), atol=1e-15 if dtype == torch.float64 else 3e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_block_of_zeros_or_of_no_columns_adds_nothing(form: str, dtype: torch.dtype) -> None:
    for old in (empty(form, dtype=dtype), empty(form, dtype=dtype).orthonormalise(draw(N * C, 1), project)):
        assert old.orthonormalise(torch.zeros(N * C, 3, dtype=torch.float64), project).size == 0
        assert old.orthonormalise(torch.zeros(N * C, 0, dtype=torch.float64), project).size == 0


def test_a_block_in_the_null_space_of_the_curvature_adds_nothing() -> None:
    same_in_every_class = draw(N, 2, seed=1).repeat_interleave(C, 0)
    for dtype in DTYPES:
        assert empty("dense", dtype=dtype).orthonormalise(same_in_every_class, project).size == 0


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_the_scale_of_a_block_does_not_matter(form: str, dtype: torch.dtype, scale: float) -> None:
    """A residual may be tiny where all is decided, and huge under the noise of decided points."""
    block = draw(N * C, 2, seed=1)
    expected = empty(form, dtype=dtype).orthonormalise(block, project)
    actual = empty(form, dtype=dtype).orthonormalise(scale * block, project)
    assert actual.size == expected.size
    close(written_out(actual), written_out(expected), atol=1e-12 if dtype == torch.float64 else 1e-5)


# Precision


def cancelling_columns(form: str) -> tuple[Columns, Columns, Tensor]:
    """Float32 columns S and T, and the exact SᵀT of their stored parts, in which all large terms cancel."""
    rows = 40_000
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(5))
    a, b = (draw(rows // 2, 2, seed=seed, dtype=torch.float32) for seed in (1, 2))
    left, right = torch.cat([a, a])[order], torch.cat([b, -b])[order]
    left[0], right[0] = 1.0, 2.0**-6  # what is left over, in place of one term
    exact = left.double().T @ right.double()
    if form == "dense":
        return DenseColumns.of(left, C), DenseColumns.of(right, C), exact
    H = contrasts()
    return KroneckerColumns(DenseColumns.of(left, 1), H), KroneckerColumns(DenseColumns.of(right, 1), H), exact


@pytest.mark.parametrize("form", FORMATS)
def test_sums_over_rows_of_float32_columns_are_taken_in_float64(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_BYTES", 2**20)
    S, T, exact = cancelling_columns(form)
    single = (S.factor.matrix.T @ T.factor.matrix).double()
    assert (single - exact).abs().max() > 1e-6  # otherwise this test says nothing
    expected = exact if form == "dense" else torch.kron(exact, torch.eye(C - 1, dtype=torch.float64))
    ones = torch.ones(S.num_data, S.num_outputs, dtype=torch.float64)
    sums: dict[str, Callable[[], Tensor]] = {
        "gram": lambda: S.gram(T),
        "diagonal_inner": lambda: S.diagonal_inner(ones, T),
        "weighted_inner": lambda: S.weighted_inner(lambda data, block: block, T),
        "inner": lambda: S.inner(written_out(T)),
    }
    for name, compute in sums.items():
        error = (compute() - expected).abs().max()
        assert error < 1e-10, f"{name} errs by {error:.1e}"

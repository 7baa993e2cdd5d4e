"""Solves with the small matrix M = SᵀKS + SᵀW⁺S, in float64.

Departure from the paper's eigendecomposition, and from a cut of small eigenvalues: M is scaled to a unit diagonal
(Jacobi) and Cholesky-factored, which is some twenty times cheaper. Rounding is paid for like any other missing
computation, with more noise: what it amounts to is added to the diagonal of SᵀW⁺S, and the variance can then only come
out larger.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Factor:
    """The Cholesky factor of a positive definite B×B matrix, scaled to a unit diagonal."""

    def __init__(self, matrix: Tensor) -> None:  # (B, B)
        self.scale = matrix.diagonal().clamp_min(torch.finfo(matrix.dtype).tiny).rsqrt()
        scaled = matrix * self.scale[:, None] * self.scale
        eye, jitter = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device), 0.0
        self.lower, info = torch.linalg.cholesky_ex(scaled)
        while int(info) != 0:  # not positive definite in rounding: more noise, until it is
            jitter = max(10 * jitter, 1e-15)
            if jitter > 1:
                raise ArithmeticError("Small matrices must have finite entries; got NaN or infinity. Try float64.")
            self.lower, info = torch.linalg.cholesky_ex(scaled + jitter * eye)

    def half_solve(self, block: Tensor) -> Tensor:  # (B, k)
        """H with HᵀH = VᵀM⁻¹V."""
        half: Tensor = torch.linalg.solve_triangular(self.lower, self.scale[:, None] * block, upper=False)
        return half

    def solve(self, block: Tensor) -> Tensor:  # (B, k)
        """M⁻¹V."""
        return self.scale[:, None] * torch.cholesky_solve(self.scale[:, None] * block, self.lower)

    def root(self) -> Tensor:  # (B, B)
        """A₀ with A₀A₀ᵀ = M⁻¹."""
        eye = torch.eye(len(self.lower), dtype=self.lower.dtype, device=self.lower.device)
        inverse: Tensor = torch.linalg.solve_triangular(self.lower.T, eye, upper=True)
        return self.scale[:, None] * inverse

    @property
    def log_determinant(self) -> float:
        """log det M."""
        return float(2 * (self.lower.diagonal().log() - self.scale.log()).sum())


def rounding_noise(gram: Tensor, noise_gram: Tensor, dtype: torch.dtype) -> float:
    """The noise that stands for the rounding error of images held in `dtype` and of sums taken in float64."""
    if gram.numel() == 0:
        return 0.0
    image_error = torch.finfo(dtype).eps * float(torch.linalg.matrix_norm(gram, torch.inf))
    return image_error + torch.finfo(torch.float64).eps * float(torch.linalg.matrix_norm(noise_gram, torch.inf))


SLICE_ROWS, SLICE_BYTES = 2**14, 2**23  # rows at a time, in sums over all of them, and their memory in float64
SLICE_COLUMNS = 128  # columns at a time, where half of a symmetric matrix is enough


def rows_at_once(num_columns: int) -> int:
    """How many rows of images are held in float64 at a time."""
    return min(SLICE_ROWS, 1 + SLICE_BYTES // (8 * max(1, num_columns)))


def inner_products(left: Tensor, right: Tensor) -> Tensor:  # (p, B), (p, B′) -> (B, B′)
    """In float64, whatever the images are stored in: a Gram matrix that is that of the images to the last digits."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    is_symmetric = left is right
    step = rows_at_once(max(left.shape[1], right.shape[1]))
    for one, other in zip(left.split(step), right.split(step), strict=True):
        one = one.double()
        if not is_symmetric:
            total += one.T @ other.double()
            continue
        for start in range(0, one.shape[1], SLICE_COLUMNS):  # a triangle of blocks
            columns = slice(start, start + SLICE_COLUMNS)
            total[columns, start:] += one[:, columns].T @ one[:, start:]
    return total.triu() + total.triu(1).T if is_symmetric else total


# --- which actions ----------------------------------------------------------------------------------------------------


PIVOT_BLOCK = 128  # columns that are visited one by one; all others by products of matrices
DEFINITE = 1e-12  # the least eigenvalue, beside ones on the diagonal: pivots alone do not tell how small it is
TIE = 1e-4  # what an output is given before the next one
DEPENDENT = 1e-6  # an action of which less than this fraction is new, in the metric of W⁺, is dropped


def block_matrix(
    known: dict[tuple[int, int], Tensor], complete: list[bool], block: Callable[[tuple[int, int]], Tensor]
) -> Tensor:
    """A symmetric matrix from its blocks; those between complete passes are computed once, and cached in `known`."""
    found: dict[tuple[int, int], Tensor] = {}
    for i in range(len(complete)):
        for j in range(i + 1):
            found[i, j] = known[i, j] if (i, j) in known else block((i, j))
            found[j, i] = found[i, j].T
            if complete[i] and complete[j]:
                known[i, j] = found[i, j]
    return torch.cat([torch.cat([found[i, j] for j in range(len(complete))], 1) for i in range(len(complete))])


def combined_gram(gram: Tensor, sizes: list[int], combinations: list[Tensor | None]) -> Tensor:
    """Between combinations of the groups of each pass, (groups, actions), instead of the groups; None: as they are."""
    if all(best is None for best in combinations):
        return gram

    for _ in range(2):  # rows, then columns
        parts = zip(gram.split(sizes), combinations, strict=True)
        gram = torch.cat([part if best is None else best.T @ part for part, best in parts]).T
    return gram.T


def independent_columns(gram: Tensor) -> Tensor:  # (B, B) -> (B',)
    """Return which columns to keep so that their Gram matrix is safely positive definite.

    Leave out those that are empty, and those of which the squared pivot of a Cholesky factor says that they are nearly
    in the span of those before them.
    """
    there = (gram.diagonal() > 0).nonzero()[:, 0]
    scale = gram.diagonal()[there].rsqrt()
    scaled = gram[there][:, there] * scale[:, None] * scale
    if _is_definite(scaled, DEPENDENT):
        return there
    least = DEPENDENT
    while True:
        kept = _kept(scaled, least)
        if _is_definite(scaled[kept][:, kept], 0.5 * least):
            return there[kept]
        least *= 10  # many small pivots, one after another, have left a matrix that is not definite to rounding


def _is_definite(matrix: Tensor, least: float) -> bool:
    """With a Cholesky factor whose squared pivots are above `least`, also after another rounding."""
    lower, info = torch.linalg.cholesky_ex(matrix - DEFINITE * torch.eye(len(matrix)).to(matrix))
    return int(info) == 0 and bool((lower.diagonal().square() > least).all())


def _kept(scaled: Tensor, least: float) -> Tensor:  # (B, B) -> (B',)
    kept, lower = torch.arange(0, device=scaled.device), scaled[:0, :0]
    for block in torch.arange(len(scaled), device=scaled.device).split(PIVOT_BLOCK):
        cross = torch.linalg.solve_triangular(lower, scaled[kept][:, block], upper=False)
        new, corner = _pivots(scaled[block][:, block] - cross.T @ cross, least)
        lower = torch.cat(
            [torch.cat([lower, lower.new_zeros(len(lower), len(new))], 1), torch.cat([cross[:, new].T, corner], 1)]
        )
        kept = torch.cat([kept, block[new]])
    return kept


def best_combinations(
    noise: Tensor, gram: Tensor, number: int, num_outputs: int = 1
) -> Tensor | None:  # R, AᵀA (B, B) -> (B, number)
    """Return the combinations with unit noise that contract the variance of the weights most.

    For one prior precision of all weights they are the same ones, whatever it is. None where there are no more than
    `number` independent actions.

    Of several outputs, whose actions follow one another, ties go to the first: outputs of the same features have the
    same eigenvalues, and rounding would decide how they mix and who is left out.
    """
    there = independent_columns(noise)
    if len(there) <= number:
        return None
    output = torch.arange(num_outputs, dtype=noise.dtype, device=noise.device)
    preference = (1 - TIE * output).repeat_interleave(len(gram) // num_outputs)
    gram = preference[:, None] * gram * preference
    lower = torch.linalg.cholesky(noise[there][:, there])
    half = torch.linalg.solve_triangular(lower, gram[there][:, there], upper=False)
    whitened = torch.linalg.solve_triangular(lower, half.T, upper=False)
    vectors = torch.linalg.eigh(0.5 * (whitened + whitened.T)).eigenvectors[:, -number:]
    combinations = noise.new_zeros(len(noise), number)
    combinations[there] = torch.linalg.solve_triangular(lower.T, vectors, upper=True)
    return combinations


def _pivots(matrix: Tensor, least: float) -> tuple[Tensor, Tensor]:  # (b, b) -> (k,), (k, k)
    """Those to keep and their Cholesky factor, column by column, since what is left out must not stay in it."""
    kept: list[int] = []
    lower = torch.zeros_like(matrix)
    for j in range(len(matrix)):
        k = len(kept)
        row = torch.linalg.solve_triangular(lower[:k, :k], matrix[kept, j, None], upper=False)[:, 0]
        pivot = float(matrix[j, j] - row @ row)
        if pivot > least:
            lower[k, :k], lower[k, k] = row, pivot**0.5
            kept.append(j)
    k = len(kept)
    return torch.tensor(kept, dtype=torch.long, device=matrix.device), lower[:k, :k]

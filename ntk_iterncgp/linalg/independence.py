"""Gram matrices of actions from many passes: put together from blocks, which actions are independent in them, and which
combinations of them are the best."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PIVOT_BLOCK = 128  # columns that are looked at one by one; all others are dealt with by products of matrices
DEFINITE = 1e-12  # the least eigenvalue, beside ones on the diagonal: pivots alone do not tell how small it is
TIE = 1e-4  # what an output is given before the next one
DEPENDENT = 1e-6  # an action of which less than this share is new, in the metric of W⁺, is dropped


def block_matrix(
    known: dict[tuple[int, int], Tensor], complete: list[bool], block: Callable[[int, int], Tensor]
) -> Tensor:
    """A symmetric matrix from its blocks; those between complete passes are computed once, and kept in `known`."""
    found: dict[tuple[int, int], Tensor] = {}
    for i in range(len(complete)):
        for j in range(i + 1):
            found[i, j] = known[i, j] if (i, j) in known else block(i, j)
            found[j, i] = found[i, j].T
            if complete[i] and complete[j]:
                known[i, j] = found[i, j]
    return torch.cat([torch.cat([found[i, j] for j in range(len(complete))], 1) for i in range(len(complete))])


def combined_gram(gram: Tensor, sizes: list[int], combinations: list[Tensor | None]) -> Tensor:
    """Between combinations of the groups of each pass, (groups, actions), instead of the groups; None: as they are."""
    if all(best is None for best in combinations):
        return gram

    def of_rows(matrix: Tensor) -> Tensor:
        parts = zip(matrix.split(sizes), combinations, strict=True)
        return torch.cat([part if best is None else best.T @ part for part, best in parts])

    return of_rows(of_rows(gram).T)


def independent_columns(gram: Tensor) -> Tensor:  # (B, B) -> (B',)
    """Which columns to keep so that their Gram matrix is safely positive definite: none that is empty, and none of
    which the squared pivot of a Cholesky factor says that it is nearly in the span of those kept before it."""
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
    """Those with unit noise that contract the variance of the weights most: for one prior precision of all weights the
    same ones, whatever it is. None where there are no more than `number` independent actions.

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

"""Algorithm 3: the same actions in a new linear system (a virtual solver run), and in less memory (compression).

K does not change between Newton steps, so the images of all actions taken so far serve again: only SᵀW⁺S is computed
anew. Recycling costs no product.

Compression retains R combinations of the B actions:

`"mean+trace"`  (default, not the paper's) preserves the current mean exactly, and with it the R − 1 directions that
                contract the variance at the training inputs most. With A₀A₀ᵀ = M⁻¹ and u ∝ A₀⁻¹w these are A₀u and A₀
                times the top eigenvectors of (I − uuᵀ) A₀ᵀ(TᵀT)A₀ (I − uuᵀ).
`"eigen"`       the top eigenvectors of M, as the paper keeps them. They depend on how actions are scaled (here to
                length one, there not at all) and lose the mean: Newton's point moves into the retained span, where the
                paper leaves it. The paper's own version is in experiments/reproduce/papers.py.

Kronecker actions U ⊗ H stay Kronecker: the columns of U are combined, by the average of M over the contrasts, and the
mean is a block w (r, q) of which all columns are retained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntk_iterncgp.linalg.factor import Factor
from ntk_iterncgp.solver.state import Iterate, State


def virtual_solver_run(state: State, iterate: Iterate, *, max_rank: int | None, compression: str) -> State:
    """Set up the linear system at `iterate` with the actions there are, compressed to `max_rank`. No product."""
    state = state.linearise(iterate)  # Alg. 3, line 2: M = Sᵀ(T + W⁺S)
    if max_rank is not None and state.buffer.size > max_rank:
        state = compress(state, max_rank, compression)  # lines 4 to 7
    return state


def compress(state: State, max_rank: int, compression: str = "mean+trace") -> State:
    """Retain at most `max_rank` combinations of the actions."""
    q = state.buffer.actions.num_contrasts
    matrix = (state.gram + state.noise_gram).unflatten(0, (-1, q)).unflatten(2, (-1, q))
    matrix = matrix.diagonal(dim1=1, dim2=3).mean(-1)  # M, averaged over the contrasts (r, r)
    keep = min(max_rank // q, len(matrix))
    if compression == "eigen":
        return _project_point(state, torch.linalg.eigh(matrix).eigenvectors[:, len(matrix) - keep :])
    images = state.problem.prior.lift(state.buffer.images).factor
    w = state.iterate.coefficients.reshape(len(matrix), q)
    coefficients = _mean_and_trace(Factor(matrix).root(), images.gram(images), w, keep)
    return state.rotate(torch.linalg.qr(coefficients).Q)


def _mean_and_trace(root: Tensor, images_gram: Tensor, w: Tensor, keep: int) -> Tensor:  # (r, r), (r, r), (r, q)
    contraction = root.T @ images_gram @ root  # A₀ᵀ(TᵀT)A₀
    vectors, values, _ = torch.linalg.svd(w, full_matrices=False)
    mean = vectors[:, values > 1e-14 * values.max().clamp_min(1e-300)]  # a basis of the columns of w
    if mean.shape[1] > keep:
        raise ValueError(
            f"`max_rank` must leave room for the mean, which takes {mean.shape[1]} combinations of Kronecker actions; "
            f"got room for {keep}. Try a larger max_rank, or actions='joint'."
        )
    u = torch.linalg.qr(torch.linalg.solve(root, mean)).Q
    deflate = torch.eye(len(root), dtype=root.dtype, device=root.device) - u @ u.T
    top = torch.linalg.eigh(deflate @ contraction @ deflate).eigenvectors
    return torch.cat([mean, root @ top[:, len(root) - keep + mean.shape[1] :]], 1)


def _project_point(state: State, coefficients: Tensor) -> State:  # (r, R)
    """Rotate to a span that need not hold Newton's point, which moves to the nearest one (in the K-norm) in it."""
    rotated = state.rotate(coefficients)
    eye = torch.eye(state.buffer.actions.num_contrasts, dtype=coefficients.dtype, device=coefficients.device)
    target = torch.kron(coefficients.contiguous(), eye).T @ (state.gram @ state.iterate.coefficients)
    w = torch.linalg.lstsq(rotated.gram, target[:, None]).solution
    offset = state.problem.prior.lift(rotated.buffer.images).combine(w)[:, 0]
    if state.problem.anchor is not None:
        offset = offset + state.iterate.anchor_share * state.problem.anchor.offset
    v = rotated.buffer.actions.combine(w)[:, 0]
    return rotated.linearise(Iterate(w[:, 0], v, offset, state.iterate.anchor_share))

"""Newton's method with K written out: the exact answer, where it costs less than an approximate one.

K is block diagonal over the outputs, W over the data. Where W⁺ acts as a diagonal D⁻¹ within the range of W, and all
that W does not see is one direction z for each datum (softmax: z = 1/√C; elsewhere none),

    (K + W⁺)⁻¹ = E − E z (Σ_c z_c² E_c)⁻¹ zᵀ E        E_c = D_c^½ B_c⁻¹ D_c^½        B_c = I + D_c^½ K_c D_c^½
    log|I + W^½ K W^½| = Σ_c log|B_c| + log|Σ_c z_c² E_c| − Σ_n log zᵀD_n z

on the range of W: C + 1 Cholesky factors of N×N matrices for C classes, no 1/π, and every B_c ≥ I. These are Algorithms
3.1 and 3.3 of Rasmussen and Williams (R&W), 2006, for any likelihood; its Algorithm 3.3 leaves out the second
determinant. Steps are shortened until Ψ rises, as in the solver that iterates, so that Newton's method always ascends.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver.newton import line_search
from ntk_iterncgp.solver.problem import Problem
from ntk_iterncgp.solver.state import Iterate
from ntk_iterncgp.solver.stopping import Status

MAX_STEPS = 200
TOLERANCE = 1e-10  # of the relative change of g; Newton's steps converge quadratically
ROUNDING = 1e-6  # below which a change that no longer falls is rounding


class ExactSystem:
    """(K + W⁺)⁻¹ on the range of W, factored: R&W, Alg. 3.3, lines 3 to 10."""

    def __init__(self, matrices: Tensor, weights: Tensor, unseen: Tensor | None) -> None:
        """Factor it for K (1 or C, N, N), D (N, C) and z (C,), or None where W has full rank."""
        roots = weights.sqrt().T[..., None]  # D^½ (C, N, 1)
        if len(matrices) == 1 and bool((roots == roots[:1]).all()):
            roots = roots[:1]  # one factor for all outputs
        self.roots, self.unseen = roots, unseen
        self.lower = torch.stack([_cholesky_of_noisy(matrix, root) for matrix, root in _pairs(matrices, roots)])
        log_determinant = 2 * self.lower.diagonal(dim1=1, dim2=2).log().sum(1).expand(weights.shape[1]).sum()
        self.unseen_lower: Tensor | None = None
        if unseen is not None:
            total = torch.zeros_like(matrices[0])
            for c, weight in enumerate(unseen.square()):
                total += weight * self.inverse_of_output(c)  # line 8: Σ_c E_c
            self.unseen_lower = _cholesky(total)
            log_determinant = log_determinant + 2 * self.unseen_lower.diagonal().log().sum()
            log_determinant = log_determinant - (weights @ unseen.square()).log().sum()
        self.log_determinant = float(log_determinant)

    def inverse_of_output(self, output: int) -> Tensor:  # (N, N)
        """E_c."""
        place = output if len(self.lower) > 1 else 0
        return self.roots[place] * torch.cholesky_inverse(self.lower[place]) * self.roots[place].T

    def solve(self, block: Tensor) -> Tensor:  # (N, C) -> (N, C)
        """(K + W⁺)⁻¹ b."""
        return self._without_unseen(self._inverse(self.roots * block.T[..., None]))  # line 12: c = E b

    def solve_noise(self, block: Tensor) -> Tensor:  # (N, C) -> (N, C)
        """(K + W⁺)⁻¹ W⁺ u = (I + W K)⁻¹ u, for u in the range of W."""
        return self._without_unseen(self._inverse(block.T[..., None] / self.roots))

    def _inverse(self, scaled: Tensor) -> Tensor:  # (C, N, 1)
        """D^½ B⁻¹ b."""
        if len(self.lower) == 1:
            return (self.roots[0] * _solved(scaled[..., 0].T, self.lower[0])).T[..., None]
        return self.roots * _solved(scaled, self.lower)

    def _without_unseen(self, solved: Tensor) -> Tensor:  # (C, N, 1) -> (N, C)
        """c − E z (Σ_c z_c² E_c)⁻¹ zᵀ c: line 13."""
        if self.unseen is not None and self.unseen_lower is not None:
            z = self.unseen[:, None, None]
            inner = _solved((z * solved).sum(0), self.unseen_lower)
            solved = solved - self._inverse(self.roots * z * inner)
        return solved[..., 0].T

    def halves(self, cross: Tensor) -> tuple[Tensor, Tensor | None]:  # (1 or C, b, N) -> (1 or C, N, b), (C, N, b)
        """H and V with K* (K + W⁺)⁻¹ K*ᵀ = HᵀH for each output, less VᵀV between all of them."""
        half = torch.linalg.solve_triangular(self.lower, self.roots * cross.mT, upper=False)
        if self.unseen is None or self.unseen_lower is None:
            return half, None
        spread = self.roots * torch.linalg.solve_triangular(self.lower.mT, half, upper=True)  # E K*ᵀ
        return half, torch.linalg.solve_triangular(self.unseen_lower, self.unseen[:, None, None] * spread, upper=False)


@dataclass(frozen=True, eq=False)
class ExactState:
    """Newton's point, K and the factored linear system there. What it can compute it computes once, when asked."""

    problem: Problem
    matrices: Tensor  # K (1 or C, N, N)
    iterate: Iterate  # v and g; there are no actions
    newton_step: int = 0
    num_products: int = 0  # none: K is written out

    @cached_property
    def latent(self) -> Tensor:  # (N, C)
        """f = m + g."""
        return self.problem.latent(self.iterate.offset)

    @cached_property
    def score(self) -> Tensor:  # (n,)
        """∇ = ∂ log p(y | f) / ∂f."""
        return self.problem.score(self.latent)

    @cached_property
    def objective(self) -> float:
        """Ψ = log p(y | f) − ½ vᵀK v."""
        return self.problem.log_prob(self.latent) - 0.5 * self.iterate.penalty(None)

    @cached_property
    def system(self) -> ExactSystem:
        """(K + W⁺)⁻¹ at this point."""
        likelihood = self.problem.likelihood
        weights = diagonal_weights(likelihood, self.latent)
        assert weights is not None, "asked by `is_solvable` before the run"
        return ExactSystem(self.matrices, weights, unseen_direction(likelihood, self.latent.device))

    @cached_property
    def solution(self) -> Iterate:
        """Newton's next point, v + (I + W K)⁻¹ (∇ − v), and K times it.

        R&W, Alg. 3.3, lines 11 to 14, as a change: it vanishes with ∇ − v, so that nothing cancels near the mode.
        """
        rest = (self.score - self.iterate.representer_weights).reshape(self.latent.shape)
        v = self.iterate.representer_weights + self.system.solve_noise(rest).flatten()
        return Iterate(self.iterate.coefficients, v, self.multiply(v))

    @property
    def log_evidence(self) -> float:
        """Laplace's: log p(y | f) − ½ vᵀg − ½ log|I + W^½ K W^½|."""
        return self.objective - 0.5 * self.system.log_determinant

    def multiply(self, vector: Tensor) -> Tensor:  # (n,)
        """K v."""
        per_output = vector.reshape(self.latent.shape).T[..., None]  # (C, N, 1)
        if len(self.matrices) == 1:
            return (self.matrices[0] @ per_output[..., 0].T).flatten()
        return (self.matrices @ per_output)[..., 0].T.flatten()

    def moved(self, iterate: Iterate) -> ExactState:
        """The state at another point; where W is the same everywhere, its factors still hold."""
        state = replace(self, iterate=iterate, newton_step=self.newton_step + 1)
        if self.problem.likelihood.is_quadratic:
            state.__dict__["system"] = self.system
        return state


def exact_state(problem: Problem, matrices: Tensor, weights: Tensor | None = None) -> ExactState:
    """Start at f = m, or where given representer weights lead.

    Args:
        problem: the prior, the likelihood and the targets.
        matrices: K, one matrix for all outputs or one for each: (1 or C, N, N).
        weights: v (n,), those of a mode nearby.

    Returns:
        The state that `exact_newton` starts from.
    """
    zeros = torch.zeros(problem.num_rows, dtype=torch.float64, device=matrices.device)
    state = ExactState(problem, matrices, Iterate(zeros[:0], zeros, zeros))
    if weights is None:
        return state
    warm = replace(state, iterate=Iterate(zeros[:0], weights, state.multiply(weights)))
    return warm if warm.objective > state.objective else state  # also where it is NaN or −∞


def exact_newton(state: ExactState) -> Generator[ExactState, None, tuple[ExactState, Status]]:
    """Find the mode to rounding.

    Args:
        state: where to start; at the mode there is nothing to do.

    Yields:
        The state after each Newton step.

    Returns:
        The last state, and why it stopped.
    """
    before = math.inf
    for _ in range(MAX_STEPS):
        target = state.solution
        change = float((target.offset - state.iterate.offset).norm())
        size = float(target.offset.norm())
        if change <= TOLERANCE * size or (change <= ROUNDING * size and change >= 0.5 * before):
            return state, Status.EXACT
        before = change
        if state.problem.likelihood.is_quadratic:  # and once more, which removes rounding
            iterate, moved = state.moved(target).solution, True
        else:
            iterate, moved = line_search(state.problem, state.iterate, target)
        if not moved:  # Ψ is flat to rounding
            return state, Status.EXACT if change <= ROUNDING**0.5 * size else Status.NEWTON_STEPS
        state = state.moved(iterate)
        yield state
        if state.problem.likelihood.is_quadratic:
            return state, Status.EXACT
    return state, Status.NEWTON_STEPS


# --- which likelihoods, and what of them -----------------------------------------------------------------------------


def is_solvable(likelihood: Likelihood) -> bool:
    """Whether W is diagonal but for at most one direction of each datum: the linear system then has this structure."""
    probe = torch.zeros(1, likelihood.num_outputs, dtype=torch.float64)
    if likelihood.num_outputs == 1:
        return True
    if likelihood.curvature_rank < likelihood.num_outputs - 1:
        return False
    try:
        return likelihood.noise_diagonal(probe) is not None
    except (IndexError, RuntimeError):  # one that knows its own data
        return False


def diagonal_weights(likelihood: Likelihood, latent: Tensor) -> Tensor | None:  # (N, C)
    """D, where W⁺ acts as D⁻¹ within its range."""
    if likelihood.num_outputs == 1:
        return likelihood.curvature(latent, torch.ones_like(latent)[..., None])[..., 0]
    noise = likelihood.noise_diagonal(latent)
    return None if noise is None else 1 / noise


def unseen_direction(likelihood: Likelihood, device: torch.device) -> Tensor | None:  # (C,)
    """z, of length one, orthogonal to the range of W; None where W has full rank."""
    if likelihood.curvature_rank == likelihood.num_outputs:
        return None
    contrasts = likelihood.contrasts(device)  # (C, C − 1)
    basis: Tensor = torch.linalg.qr(contrasts, mode="complete").Q
    return basis[:, -1]


def written_out(prior: GramPrior) -> Tensor:  # (1 or C, N, N)
    """K at the training inputs."""
    return prior.between(prior.inputs, prior.inputs)


def _pairs(matrices: Tensor, roots: Tensor) -> list[tuple[Tensor, Tensor]]:
    """K_c and D_c^½ of each output; of one that stands for all, once."""
    return [(matrices[c if len(matrices) > 1 else 0], root) for c, root in enumerate(roots)]


def _cholesky_of_noisy(matrix: Tensor, root: Tensor) -> Tensor:  # (N, N), (N, 1)
    """The factor of B_c = I + D^½ K D^½."""
    scaled = matrix * root * root.T
    scaled.diagonal().add_(1.0)
    return _cholesky(scaled)


def _solved(block: Tensor, lower: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ V, for few columns many times as fast as `cholesky_solve`, which copies L."""
    half = torch.linalg.solve_triangular(lower, block, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(lower.mT, half, upper=True)
    return solved


def _cholesky(matrix: Tensor) -> Tensor:
    """The Cholesky factor; where K is not positive semidefinite in rounding, with as much more noise as it takes."""
    lower: Tensor
    lower, info = torch.linalg.cholesky_ex(matrix)
    jitter = 1e-15
    while int(info) != 0:
        if not jitter < 1:
            raise ArithmeticError("The kernel matrix must be finite and positive semidefinite; got one that is not.")
        noisy = matrix.clone()
        noisy.diagonal().mul_(1 + jitter)
        lower, info = torch.linalg.cholesky_ex(noisy)
        jitter *= 10
    return lower

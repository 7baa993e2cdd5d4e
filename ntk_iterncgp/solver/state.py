"""The state of the solver: where Newton stands, the linear system there, and what is known about its solution.

At Newton's point f = m + g (with g = K v and v = S w always in the span of the actions) the linear system is

    (K + W⁺) v = b,    b = g + W⁺∇,

and the actions S turn it into B equations: M a = Sᵀb with M = SᵀKS + SᵀW⁺S. Everything below follows from S, its images
and small float64 matrices; the paper's Q is not stored. A state is frozen; what it can compute it computes once, when
asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.linalg.columns import Buffer, Columns
from ntk_iterncgp.linalg.factor import Factor
from ntk_iterncgp.solver.problem import Anchor, Problem
from ntk_iterncgp.solver.stopping import Position

OF_THE_POINT = (
    "latent",
    "score",
    "noise_diagonal",
    "objective",
    "right_hand_side",
    "curvature_scale",
    "curvature_trace",
)


@dataclass(frozen=True, eq=False)
class Iterate:
    """Newton's point: v = S w, g = K v (and, until the first full step from an anchor, β times the anchor)."""

    coefficients: Tensor  # w (B,)
    representer_weights: Tensor  # v (n,)
    offset: Tensor  # g (n,)
    anchor_share: float = 0.0  # β

    def towards(self, other: Iterate, step: float) -> Iterate:
        """The point a fraction `step` of the way to another."""
        return Iterate(
            self.coefficients + step * (other.coefficients - self.coefficients),
            self.representer_weights + step * (other.representer_weights - self.representer_weights),
            self.offset + step * (other.offset - self.offset),
            self.anchor_share + step * (other.anchor_share - self.anchor_share),
        )

    def penalty(self, anchor: Anchor | None) -> float:
        """The square of the prior norm of g: vᵀK v, with the anchor's part (vᵀg holds one of its two cross terms)."""
        penalty = float(self.representer_weights @ self.offset)
        if anchor is not None and self.anchor_share:
            penalty += self.anchor_share * float(self.representer_weights @ anchor.offset)
            penalty += self.anchor_share**2 * anchor.penalty
        return max(0.0, penalty)  # no rounding shall pay for a step to nowhere


@dataclass(frozen=True, eq=False)
class State:
    """One Newton step's linear system and its solution in the span of the actions."""

    problem: Problem
    iterate: Iterate
    buffer: Buffer
    gram: Tensor  # SᵀKS (B, B)
    noise_gram: Tensor  # SᵀW⁺S (B, B)
    generator: torch.Generator
    newton_step: int = 0
    num_products: int = 0
    num_proposals: int = 0  # columns proposed by the policy so far, accepted or not
    products_left: int = 1  # what the current Newton step may still spend
    position: Position | None = None  # where its run stands; None: at the beginning or at the end of one

    # --- Newton's point -------------------------------------------------------------------------------------------

    @cached_property
    def latent(self) -> Tensor:  # (N, C)
        """f = m + g."""
        return self.problem.latent(self.iterate.offset)

    @cached_property
    def score(self) -> Tensor:  # (n,)
        """∇ = ∂ log p(y | f) / ∂f."""
        return self.problem.score(self.latent)

    @cached_property
    def noise_diagonal(self) -> Tensor | None:  # (N, C)
        """The diagonal of W⁺, where the likelihood gives one."""
        return self.problem.likelihood.noise_diagonal(self.latent)

    @cached_property
    def objective(self) -> float:
        """Ψ = log p(y | f) − ½ ‖g‖²_K, what Newton's method maximises."""
        return self.problem.log_prob(self.latent) - 0.5 * self.iterate.penalty(self.problem.anchor)

    # --- the linear system there ----------------------------------------------------------------------------------

    @cached_property
    def right_hand_side(self) -> Tensor:  # b (n,)
        """b = ŷ − m = g + W⁺∇."""
        return self.iterate.offset + self.problem.noise(self.latent, self.score)

    @cached_property
    def projected_right_hand_side(self) -> Tensor:  # (B, 1)
        """Sᵀb."""
        return self.buffer.actions.inner(self.right_hand_side[:, None])

    @cached_property
    def rounding(self) -> float:
        """ρ with ‖G̃ − G‖ ≤ ρ for the computed small matrices: rounding of products, and of sums in float64."""
        if self.buffer.size == 0:
            return 0.0
        sums = torch.finfo(torch.float64).eps * float(torch.linalg.matrix_norm(self.noise_gram, torch.inf))
        return self.problem.prior.product_error(self.gram) + sums

    @cached_property
    def factor(self) -> Factor:
        """M = G̃ + R + ρI, factored: that of exact products under a noise between R = SᵀW⁺S and R + 2ρI."""
        return Factor(_shifted(self.gram + self.noise_gram, self.rounding))

    @cached_property
    def solution(self) -> Iterate:
        """a = M⁻¹Sᵀb, v = S a, and K v = T a: no product."""
        coefficients = self.factor.solve(self.projected_right_hand_side)
        representer_weights = self.buffer.actions.combine(coefficients)
        offset = self.problem.prior.lift(self.buffer.images).combine(coefficients)
        return Iterate(coefficients[:, 0], representer_weights[:, 0], offset[:, 0])

    @cached_property
    def residual(self) -> Tensor:  # r (n,)
        """r = b − K v − W⁺v, projected onto the range of W."""
        v = self.solution.representer_weights
        residual = self.right_hand_side - self.solution.offset - self.problem.noise(self.latent, v)
        return self.problem.project(residual)

    @cached_property
    def curvature_residual(self) -> Tensor:  # W r (n,)
        """W r = ∇ + W(g − K v) − v: no 1/π, and next to nothing at saturated points."""
        change = self.iterate.offset - self.solution.offset
        return self.score + self.problem.curvature(self.latent, change) - self.solution.representer_weights

    @cached_property
    def solution_error(self) -> float:
        """How far the exact solution's mean is at most, at any input, in standard deviations of the exact posterior.

        It differs by cov(x, X) W r.
        """
        return self._deviations(self.curvature_residual)

    @cached_property
    def newton_decrement(self) -> float:
        """How far an exact Newton step moves the mean at most, in the same units.

        It moves by cov(x, X)(∇ − v), and by what is left of the anchor.
        """
        anchor = self.problem.anchor
        left = 0.0 if anchor is None else abs(self.iterate.anchor_share) * math.sqrt(max(0.0, anchor.penalty))
        return self._deviations(self.score - self.iterate.representer_weights) + left

    def _deviations(self, u: Tensor) -> float:  # (n,)
        """An upper bound on √(uᵀΣ*u), and with it on |cov(x, X) u| in standard deviations at x.

        Σ* is at most W⁺, and within the span of the actions, where W⁺ may be many times K, at most K − T M⁻¹Tᵀ.
        """
        z = self.buffer.actions.inner(u[:, None])
        outside = u - self.buffer.actions.combine(z)[:, 0]
        inside = float((z * (self.gram @ z)).sum() - self.factor.half_solve(self.gram @ z).square().sum())
        whole, rest = (float(part @ self.problem.noise(self.latent, part)) for part in (u, outside))
        return min(math.sqrt(max(whole, 0.0)), math.sqrt(max(inside, 0.0)) + math.sqrt(max(rest, 0.0)))

    @cached_property
    def relative_residual(self) -> float:
        """‖W r‖ / ‖W b‖."""
        return float(self.curvature_residual.norm() / self.curvature_scale)

    @cached_property
    def curvature_scale(self) -> Tensor:
        """‖W b‖, and W b = ∇ + W g."""
        start = self.score + self.problem.curvature(self.latent, self.iterate.offset)
        norm: Tensor = start.norm()
        return norm.clamp_min(1e-300)

    # --- how much is known ----------------------------------------------------------------------------------------

    @cached_property
    def curvature_trace(self) -> float:
        """tr(W K)."""
        return self.problem.curvature_trace(self.latent)

    @cached_property
    def span_bounds(self) -> tuple[float, float, float]:
        """lo ≤ log|R + G| − log|R| ≤ hi within the span of the actions, and a lower bound on tr(R⁻¹G).

        They hold for any G with G̃ − ρI ≤ G ≤ G̃ + ρI.
        """
        if self.buffer.size == 0:
            return 0.0, 0.0, 0.0
        noise, matrix = Factor(self.noise_gram), self.factor.log_determinant
        lower = matrix - Factor(_shifted(self.noise_gram, 2 * self.rounding)).log_determinant
        upper = matrix - noise.log_determinant
        captured = float(noise.solve(_shifted(self.gram, -self.rounding)).trace())
        return max(lower, 0.0), max(upper, 0.0), captured

    @cached_property
    def log_determinant_bounds(self) -> tuple[float, float]:
        """lo ≤ log|I + W^{½}KW^{½}| ≤ hi, from the small matrices and tr(W K) alone."""
        lower, upper, captured = self.span_bounds
        free = self.problem.curvature_rank - self.buffer.size  # directions not acted on
        missing = max(self.curvature_trace - captured, 0.0)
        return lower, upper + free * math.log1p(missing / free) if free > 0 else upper

    @cached_property
    def removed_traces(self) -> tuple[float, float]:
        """Lower bounds on tr(M⁻¹TᵀWT) and tr(M⁻¹G), where T and G are known to ρ: O(nB²), when asked."""
        if self.buffer.size == 0:
            return 0.0, 0.0
        images = self.problem.prior.lift(self.buffer.images)
        weighted = self.factor.solve(self.problem.curvature_inner(self.latent, images)).trace().clamp_min(0)
        inverse = float(self.factor.root().square().sum())  # tr(M⁻¹)
        unsure = self.rounding * math.sqrt(self._steepest_curvature * inverse)
        captured = float(self.factor.solve(self.gram).trace()) - self.rounding * inverse
        return max(float(weighted.sqrt()) - unsure, 0.0) ** 2, max(captured, 0.0)

    @property
    def _steepest_curvature(self) -> float:
        """An upper bound on ‖W‖. Where the likelihood gives none, rounding in float64 is neglected."""
        if self.noise_diagonal is not None:
            return 1 / float(self.noise_diagonal.min())
        return 0.0 if self.buffer.images.dtype == torch.float64 else math.inf

    @cached_property
    def tight_log_determinant_bounds(self) -> tuple[float, float]:
        """The same, with another upper bound that needs TᵀWT and is tighter at high rank."""
        lower, upper = self.log_determinant_bounds
        by_images = self.span_bounds[1] + self.curvature_trace - sum(self.removed_traces)
        return lower, max(min(upper, by_images), lower)

    @property
    def variance_ratio(self) -> float:
        """An upper bound on tr(W Σ) / tr(W Σ*): the variance over the exact one, on average at the training inputs.

        Less noise never lowers tr(W Σ*), so that it is at least tr(M⁻¹G).
        """
        weighted, captured = self.removed_traces
        least = max(captured, self.curvature_trace / (1 + self.curvature_trace))
        return max(1.0, (self.curvature_trace - weighted) / least) if least > 0 else 1.0

    @property
    def information_captured(self) -> float:
        """A lower bound on the fraction of the information in the data that the actions have used, lo / hi."""
        lower, upper = self.log_determinant_bounds
        return lower / upper if upper > 0 else 1.0

    @property
    def tight_information_captured(self) -> float:
        """The same from the tighter bound, for the end of a run."""
        lower, upper = self.tight_log_determinant_bounds
        return lower / upper if upper > 0 else 1.0

    # --- the next state -------------------------------------------------------------------------------------------

    def with_counters(self, **counters: Any) -> State:
        """The same state with other counters; what has been computed stays computed."""
        changed = replace(self, **counters)
        changed.__dict__.update({name: v for name, v in self.__dict__.items() if name not in changed.__dict__})
        return changed

    def propose(self, block: Tensor) -> Columns:  # (n, k)
        """The actions that a block of proposals adds: in the range of W, orthonormal, new."""
        return self.problem.orthonormalise(block, self.buffer.actions, self.noise_diagonal)

    def extend(self, new: Buffer) -> State:
        """The same linear system with more actions: O(nBk), no product."""
        buffer = self.buffer.append(new)
        noise_columns = self.problem.noise_inner(self.latent, self.noise_diagonal, buffer.actions, new.actions)
        padding = self.iterate.coefficients.new_zeros(new.size)
        extended = self._keep_point(
            replace(
                self,
                iterate=replace(self.iterate, coefficients=torch.cat([self.iterate.coefficients, padding])),
                buffer=buffer,
                gram=_bordered(self.gram, self.problem.prior.gram(buffer, new)),
                noise_gram=_bordered(self.noise_gram, noise_columns),
                num_products=self.problem.prior.num_products,
            )
        )
        if "projected_right_hand_side" in self.__dict__:  # b stays: only the new actions meet it
            more = new.actions.inner(self.right_hand_side[:, None])
            extended.__dict__["projected_right_hand_side"] = torch.cat([self.projected_right_hand_side, more])
        return extended

    def rotate(self, coefficients: Tensor) -> State:  # (r, R), orthonormal columns
        """The same linear system in a smaller span that still holds Newton's point."""
        q = self.buffer.actions.num_contrasts

        def rotated_rows(matrix: Tensor) -> Tensor:  # (Q ⊗ I)ᵀ matrix
            return (coefficients.T @ matrix.reshape(len(coefficients), -1)).reshape(-1, *matrix.shape[1:])

        def both_sides(matrix: Tensor) -> Tensor:
            return _symmetric(rotated_rows(rotated_rows(matrix).T.contiguous()))

        rotated = replace(
            self,
            iterate=replace(
                self.iterate, coefficients=rotated_rows(self.iterate.coefficients.reshape(-1, q)).flatten()
            ),
            buffer=self.buffer.rotate(coefficients),
            gram=both_sides(self.gram),
            noise_gram=both_sides(self.noise_gram),
        )
        return self._keep_point(rotated)

    def linearise(self, iterate: Iterate) -> State:
        """The linear system at another point, for the actions there are (Alg. 3, line 2). No product."""
        moved, actions = replace(self, iterate=iterate), self.buffer.actions
        noise_gram = self.problem.noise_inner(moved.latent, moved.noise_diagonal, actions, actions)
        return moved._keep_point(replace(moved, noise_gram=_symmetric(noise_gram)))

    def _keep_point(self, state: State) -> State:
        """Carry over what depends on Newton's point alone."""
        for name in OF_THE_POINT:
            if name in self.__dict__:
                state.__dict__[name] = self.__dict__[name]
        return state


def _shifted(matrix: Tensor, shift: float) -> Tensor:  # (B, B)
    """With a number added to its diagonal."""
    return matrix + shift * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _symmetric(matrix: Tensor) -> Tensor:
    return (0.5 * (matrix + matrix.T)).contiguous()  # in one layout, as it comes back from a checkpoint


def _bordered(matrix: Tensor, columns: Tensor) -> Tensor:  # (B, B), (B + k, k)
    side, corner = columns[: len(matrix)], columns[len(matrix) :]
    return torch.cat([torch.cat([matrix, side], 1), torch.cat([side.T, _symmetric(corner)], 1)])

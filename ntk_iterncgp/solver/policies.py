"""Policies choose the next actions: any callable from a state to a block of columns (n, k) is one.

    unit                Π e_i, datum after datum                       a subset of the data
    residual            Π r, later Π (K + W⁺) s                        conjugate gradients on K + W⁺ (the paper's)
    curvature_residual  W r = ∇ + W(g − K v) − v, later W K s          conjugate gradients on I + W^{½}KW^{½}
    random_subspace     W (Σ W)ᵖ ξ, Σ the current covariance           blocks that contract the variance

What a policy returns need be neither orthogonal nor normalised, nor new: the solver sees to that and drops the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ntk_iterncgp.linalg.columns import DenseColumns
from ntk_iterncgp.solver.state import State

Policy = Callable[[State], Tensor]

CONVERGED, CONVERGED_IN_FLOAT32 = 1e-6, 1e-5
"""Below this relative residual the rounding of what it is computed from is no longer small beside it."""


def residual(state: State) -> Tensor:  # (n, 1)
    """Propose Π r, the residual of the linear system; once that has converged, (K + W⁺) s of the latest action."""
    latest = _latest_if_converged(state)
    if latest is None:
        return state.residual[:, None]
    problem = state.problem
    noise = problem.noise(state.latent, state.buffer.actions.combine(latest))
    return problem.prior.lift(state.buffer.images).combine(latest) + noise


def curvature_residual(state: State) -> Tensor:  # (n, 1)
    """Propose W r; once the solution has converged, W K s of the latest action."""
    latest = _latest_if_converged(state)
    if latest is None:
        return state.curvature_residual[:, None]
    return state.problem.curvature(state.latent, state.problem.prior.lift(state.buffer.images).combine(latest))


def _latest_if_converged(state: State) -> Tensor | None:  # (B, 1)
    """The coefficients of the latest action, once the residual is nearly zero.

    In exact arithmetic the image of that action adds the same direction to the Krylov space. Of the residual only
    rounding is left, which differs from one order of summation to the next and contracts the variance less.
    """
    converged = CONVERGED if state.buffer.images.dtype == torch.float64 else CONVERGED_IN_FLOAT32
    if state.buffer.size == 0 or not state.relative_residual <= converged:
        return None
    latest = torch.zeros(state.buffer.size, 1, dtype=torch.float64, device=state.latent.device)
    latest[-1] = 1.0
    return latest


class Unit:
    """Proposes the next `block_size` unit vectors; after recycling it continues where it stopped."""

    def __init__(self, block_size: int = 1) -> None:
        self.block_size = block_size

    def __call__(self, state: State) -> Tensor:  # (n, k)
        """Propose the next columns of the identity, one for each direction in the range of W."""
        outputs, rank = state.problem.prior.num_outputs, state.problem.likelihood.curvature_rank
        width = min(self.block_size, state.products_left)
        last = min(state.num_proposals + width, state.problem.curvature_rank)
        index = torch.arange(min(state.num_proposals, last), last, device=state.latent.device)
        block = torch.zeros(state.problem.num_rows, len(index), dtype=torch.float64, device=state.latent.device)
        output = index % rank
        if state.problem.whitened and rank < outputs:  # all but the likeliest, which the others determine
            output = output + (output >= state.latent[index // rank].argmax(1)).long()
        block[(index // rank) * outputs + output, torch.arange(len(index), device=index.device)] = 1.0
        return block


class RandomSubspace:
    """Proposes random probes pushed towards what is still uncertain: W (Σ W)ᵖ ξ with Σ = K − T M⁻¹Tᵀ.

    Each power step costs one product per column on top of the one that every action costs.
    """

    def __init__(self, block_size: int = 8, power_steps: int = 1) -> None:
        self.block_size, self.power_steps = block_size, power_steps

    def __call__(self, state: State) -> Tensor:  # (n, k)
        """Propose a block of new probes; draws from the state's generator."""
        problem, prior = state.problem, state.problem.prior
        power_steps = self.power_steps if state.products_left > self.power_steps else 0  # else nothing would be left
        width = max(1, min(self.block_size, state.products_left // (1 + power_steps)))
        probes = torch.randn(
            problem.num_rows, width, generator=state.generator, dtype=torch.float64, device=state.latent.device
        )
        block = problem.curvature(state.latent, probes)
        images = prior.lift(state.buffer.images)
        for _ in range(power_steps):
            pushed = prior.lift(prior.image(DenseColumns.of(block.to(prior.dtype), prior.num_outputs)))
            product = pushed.combine(torch.eye(width, dtype=torch.float64, device=block.device))
            if state.buffer.size:
                product -= images.combine(state.factor.solve(images.inner(block)))
            block = problem.curvature(state.latent, product)
        return block


def check_actions(block: object, num_rows: int) -> Tensor:  # (n, k)
    """What a policy returned, if it is a finite block of actions; else raise ValueError."""
    if not isinstance(block, Tensor) or block.ndim != 2 or len(block) != num_rows:
        found = f"shape {tuple(block.shape)}" if isinstance(block, Tensor) else type(block).__name__
        raise ValueError(
            f"`policy` must return a block of actions of shape ({num_rows}, k), one row for each output of each "
            f"datum; got {found}. Try a reshape, such as state.residual[:, None]."
        )
    if not bool(torch.isfinite(block).all()):
        raise ValueError("`policy` must return finite actions; got NaN or infinity.")
    return block


POLICIES: dict[str, Callable[[], Policy]] = {
    "unit": Unit,
    "residual": lambda: residual,
    "curvature_residual": lambda: curvature_residual,
    "random_subspace": RandomSubspace,
}


def resolve_policy(policy: str | Policy, *, others: Sequence[str] = ()) -> Policy:
    """Look up a policy by its name; a callable is returned as it is. `others` are names that the caller handles."""
    if callable(policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        names = ", ".join(repr(name) for name in (*POLICIES, *others))
        raise ValueError(
            f"`policy` must be one of {names}, or a callable from a state to actions (n, k); got {policy!r}."
        )
    return POLICIES[policy]()

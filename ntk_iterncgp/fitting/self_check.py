"""Numbers that cannot mislead: what a run leaves behind is checked before anybody may use it.

A posterior that is wrong looks like one that is right. So after every fit and refine, at some random data (64 rows of K
or more) and for random combinations z of the actions, what is stored is compared with what it stands for:

    images     T = K S on these rows, computed anew the way a prediction does
    actions    S z lies in the range of W
    gram       SᵀKS z = Sᵀ(T z): for a network, whose SᵀKS is AᵀΛ⁻¹A, this is the adjoint identity of J and Jᵀ
    noise      SᵀW⁺S z = SᵀW⁺(S z)
    prior      m on these rows
    point      v = S w, g = T w, f = m + g
    matrix     M = SᵀKS + SᵀW⁺S is symmetric and positive definite
    variance   between zero and the prior's, on these rows
    objective  Ψ never fell where Newton's steps were damped

Any column that is off changes T z for almost every z, so a few combinations stand for all columns at O(nB) operations.
A check that fails is mended by computing the images and the small matrices again, with a warning, and made again; what
still fails is raised as a `SelfCheckError`. What cannot be mended is the point itself, which nothing else determines.

Tolerances are rounding errors times a margin. A sum of n products held in a dtype errs by eps·Σ|k_i||s_i|, and with
unit actions that is at most eps·√(k_ii tr K); a combination with coefficients w by that times Σ|w|. The margin covers
kernels that cancel, networks that amplify, and rotations of columns, which add up over Newton steps.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ntk_iterncgp.fitting.report import ELSEWHERE, MIN_DATA, ROWS, Record, SelfCheckError, refusal
from ntk_iterncgp.linalg.columns import Buffer
from ntk_iterncgp.priors.base import AtInputs, Prior
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.solver.newton import ascend
from ntk_iterncgp.solver.state import Iterate, State

PROBES = 2
MARGIN = 250.0  # in units of rounding
FLOOR = 1e-11  # what is asked of float64: kernels of many coordinates are computed to 2e-13 of k(x, x)
MAX_SETTLING_STEPS = 20
UNMENDABLE = {"actions", "point", "prior"}  # from which all else follows


def checked(state: State, history: Sequence[Record], *, ascends: bool) -> State:
    """The state, mended where that is possible. `ascends` says whether every step had to raise Ψ."""
    found = problems(state)
    if parallel.any_of(bool(found.keys() - UNMENDABLE)):  # several processes mend together
        named = "; and ".join(found.values()) or ELSEWHERE
        warnings.warn(f"The self-check expected {named}. It is computed again.", stacklevel=4)
        state = recomputed(state, with_images=parallel.any_of(bool(found.keys() & {"images", "gram"})))
        found = problems(state)
    found |= falls(history) if ascends else {}
    if parallel.any_of(bool(found)):
        raise SelfCheckError(refusal(found.values() or [ELSEWHERE]))
    return state


def problems(state: State) -> dict[str, str]:
    """What is wrong with a state, by the name of the check: the end of a message that begins with 'Expected'."""
    if state.buffer.size == 0:
        return _point(state, torch.ones((), dtype=torch.float64, device=state.iterate.offset.device))
    for name, tensors, problem in (
        ("point", _vectors(state.iterate), "a finite point, but it holds NaN or infinity"),
        ("gram", (state.gram, state.noise_gram), "finite small matrices, but they hold NaN or infinity"),
    ):
        is_finite = _finite(*tensors)
        if parallel.any_of(not is_finite):  # all processes continue with the products, or none
            return {} if is_finite else {name: problem}
    generator = torch.Generator().manual_seed(state.num_products + state.newton_step)
    prior = state.problem.prior
    asked = [(rows, prior.at(x, state.buffer)) for rows, x in prior.pick(_some_data(prior, generator))]
    variance = torch.cat([at.covariance.diagonal(dim1=1, dim2=2) for _, at in asked])  # of the prior, (b, C)
    found = _small_matrices(state, variance, generator) | _point(state, variance.max())
    for rows, at in asked:
        found |= _images(state, rows, at)
        if not found:  # or else M may not be what it should be
            found |= _variance(state, at)
    return found


def falls(history: Sequence[Record]) -> dict[str, str]:
    """Whether Ψ ever fell by more than rounding."""
    values = [record.objective for record in history]
    for before, after in itertools.pairwise(values):
        if not after >= before - 1e-9 * (1 + abs(before)):
            return {"objective": f"an objective that never falls, but it went from {before:.10g} to {after:.10g}"}
    return {}


def recomputed(state: State, *, with_images: bool) -> State:
    """The same actions and coefficients, with everything that follows from them computed again."""
    prior, old = state.problem.prior, state.iterate
    buffer = Buffer(state.buffer.actions, prior.image(state.buffer.actions) if with_images else state.buffer.images)
    gram = prior.gram(buffer, buffer)
    state = replace(state, buffer=buffer, gram=0.5 * (gram + gram.T), num_products=prior.num_products)
    if not with_images:
        return state.linearise(old)
    iterate = _point_of(state)
    state = state.linearise(iterate)
    if _all_close(iterate.offset, old.offset, 1e-6):
        return state
    for _ in range(MAX_SETTLING_STEPS):  # the mean was that of other images: Newton's steps in the span are free
        before = state.iterate
        state = state.linearise(state.solution if state.problem.likelihood.is_quadratic else ascend(state))
        if _all_close(state.iterate.offset, before.offset, 1e-3):
            break
    return state


# --- the checks ---------------------------------------------------------------------------------------------------


def _images(state: State, rows: Tensor, at: AtInputs) -> dict[str, str]:
    """Images and prior mean at some training inputs, where the prior was asked as if they were new."""
    prior, anchor, found = state.problem.prior, state.problem.anchor, {}
    variance = at.covariance.diagonal(dim1=1, dim2=2)  # (b, C)
    size = 1 + float(prior.mean.abs().max()) + float(variance.max() * (anchor.penalty if anchor else 0)) ** 0.5
    if not float((at.mean - prior.mean[rows]).abs().max()) <= _rounding(state) * size:
        found["prior"] = "the prior mean to be that of the fit, but at some data it has changed"
    images = prior.lift(state.buffer.images)
    stored = images.rows_of(rows)  # (b, C, B)
    total = prior.num_data * float(variance.sum(1).mean())  # tr K
    scale = (variance.clamp_min(0) * total).sqrt()[..., None]
    error = float(((stored - at.cross).abs() / scale.clamp_min(1e-300)).max())
    allowed = _rounding(state) + prior.product_tolerance
    if not error <= allowed:
        found["images"] = (
            f"images equal to K S at random data, but they differ by {error:.1e} of the largest they can be, where "
            f"rounding explains {allowed:.1e}"
        )
    return found


def _variance(state: State, at: AtInputs) -> dict[str, str]:
    prior = state.problem.prior
    variance = at.covariance.diagonal(dim1=1, dim2=2).flatten()  # (b·C,)
    half = state.factor.half_solve(at.cross.flatten(0, 1).T)  # (B, b·C)
    left = 1 - half.square().sum(0) / variance.clamp_min(1e-300)  # of the prior variance
    slack = _rounding(state) ** 0.5 + (prior.product_tolerance * prior.num_data) ** 0.5
    if bool((left >= -slack).all()):
        return {}
    worst = float(left.nan_to_num(nan=-torch.inf).min())
    return {"variance": f"variances between zero and the prior's, but one is {worst:.1e} times the prior's"}


def _small_matrices(state: State, variance: Tensor, generator: torch.Generator) -> dict[str, str]:
    problem, actions, found = state.problem, state.buffer.actions, {}
    G, R = state.gram, state.noise_gram
    images = problem.prior.lift(state.buffer.images)
    z = torch.randn(state.buffer.size, PROBES, generator=generator, dtype=torch.float64).to(G.device)
    Sz, Tz = actions.combine(z), images.combine(z)
    rounding = _rounding(state)
    size = z.abs().sum(0)

    outside = float(((Sz - problem.project(Sz)).abs() / size).max())
    if not outside <= rounding:
        found["actions"] = f"actions in the range of the curvature, but {outside:.1e} of one is outside"

    trace = problem.prior.num_data * float(variance.sum(1).mean())  # tr K
    allowed = rounding + problem.prior.product_tolerance
    # Where K S is nearly zero, as for the difference of two equal inputs, it is rounding of the size of K.
    scale = (trace * (Sz * Tz).sum(0).abs()).sqrt() + _absolute(state) / allowed * trace
    error = float(((G @ z - actions.inner(Tz)).abs() / scale).max())
    if not error <= allowed:
        found["gram"] = f"SᵀKS to be that of the images, but it differs by {error:.1e}, where {allowed:.1e} is rounding"

    each = R.diagonal().clamp_min(0).sqrt()
    scale = each[:, None] * (each @ z.abs())
    noisy = _noise(state, Sz)
    # Of an unlikely class the noise is large and the action small, a difference of others: what is left is rounding.
    eps = torch.finfo(state.buffer.images.dtype).eps
    lost = eps * float(torch.linalg.vector_norm(noisy)) * (1 + z.abs().sum(0))
    error = float(((R @ z - actions.inner(noisy)).abs() / (scale + lost / rounding).clamp_min(1e-300)).max())
    if not error <= rounding:
        found["noise"] = f"SᵀW⁺S to be that of the actions, but it differs by {error:.1e}"

    for name, matrix in (("gram", G), ("noise", R)):
        sides = matrix.diagonal().clamp_min(0).sqrt()
        skew = float((matrix - matrix.T).abs().max() / sides.max().square().clamp_min(1e-300))
        if not skew <= rounding:
            found[name] = f"symmetric small matrices, but one is off by {skew:.1e}"
    if not found and not _is_positive_definite(state):
        found["matrix"] = "a matrix M that is positive definite up to rounding, but it is not"
    if not found and not _is_solved(state, z):
        found["matrix"] = "M⁻¹ to undo M, but its stored factor does not"
    return found


def _noise(state: State, block: Tensor) -> Tensor:  # (n, k)
    """W⁺V for V in its range.

    By the diagonal where there is one, since what rounding has put outside of the range would be multiplied by the
    largest noise of a datum.
    """
    if state.noise_diagonal is None:
        return state.problem.noise(state.latent, block)
    return state.noise_diagonal.reshape(-1, 1) * block


def _is_positive_definite(state: State) -> bool:
    """M, with as much on its diagonal as rounding may have taken away, scaled to a unit diagonal."""
    matrix = state.gram + state.noise_gram
    eps = torch.finfo(state.buffer.images.dtype).eps
    matrix.diagonal().add_(MARGIN * eps * float(torch.linalg.matrix_norm(state.gram, torch.inf)))
    diagonal = matrix.diagonal()
    if not bool((diagonal > 0).all()):
        return False
    scale = diagonal.rsqrt()
    scaled = matrix * scale[:, None] * scale
    scaled.diagonal().add_(MARGIN * len(matrix) * torch.finfo(torch.float64).eps)
    return int(torch.linalg.cholesky_ex(scaled)[1]) == 0


def _is_solved(state: State, z: Tensor) -> bool:
    """M M⁻¹z = z, both scaled to a unit diagonal: to rounding, and to the jitter that a factor may have needed."""
    scale = state.factor.scale[:, None]
    solved = state.factor.solve(z / scale)
    again = scale * ((state.gram + state.noise_gram) @ solved + state.rounding * solved)
    error = torch.linalg.vector_norm(again - z, dim=0)
    return bool((error <= 1e-6 * torch.linalg.vector_norm(solved / scale, dim=0) + 1e-9 * z.norm()).all())


def _point(state: State, prior_variance: Tensor) -> dict[str, str]:
    """v = S w, g = T w, f = m + g; what is cached of it included."""
    iterate, expected = state.iterate, _point_of(state)
    sides = state.gram.diagonal().clamp_min(0).sqrt()
    size = iterate.coefficients.abs()
    allowed = _rounding(state) + state.problem.prior.product_tolerance
    nearly_zero = _absolute(state) / allowed * float(prior_variance) * float(size.sum())  # K S may be rounding alone
    scale = {
        "v": float(size.sum()),
        "g": float((sides * size).sum()) * float(prior_variance) ** 0.5
        + float(iterate.offset.abs().max())
        + nearly_zero,
    }
    pairs = {
        "v": (iterate.representer_weights, expected.representer_weights),
        "g": (iterate.offset, expected.offset),
    }
    for name, (stored, direct) in pairs.items():
        if not float((stored - direct).abs().max()) <= allowed * scale[name] + 1e-12:
            return {"point": f"Newton's point to follow from its coefficients, but its {name} does not"}
    if not torch.equal(state.latent, state.problem.latent(iterate.offset)):
        return {"latent": "latent values to be those of Newton's point, but they are others"}
    return {}


# --- small things -------------------------------------------------------------------------------------------------


def _rounding(state: State) -> float:
    """The relative rounding of a stored column, with a margin; rotations in Newton steps add to it."""
    return (1 + state.newton_step / 10) * max(FLOOR, MARGIN * torch.finfo(state.buffer.images.dtype).eps)


def _absolute(state: State) -> float:
    """The rounding of K s for an s of length one, as a fraction of the size of K."""
    return 8 * torch.finfo(state.buffer.images.dtype).eps


def _some_data(prior: Prior, generator: torch.Generator) -> Tensor:
    """All of few data, else a sample; in ascending order."""
    number = prior.checked_data(max(MIN_DATA, -(-ROWS // prior.num_outputs)))
    if prior.num_data <= number:
        return torch.arange(prior.num_data, device=prior.device)
    drawn: Tensor = torch.randint(prior.num_data, (number,), generator=generator).unique()
    return drawn.to(prior.device)


def _point_of(state: State) -> Iterate:
    """Newton's point from its coefficients."""
    iterate, anchor = state.iterate, state.problem.anchor
    w = iterate.coefficients[:, None]
    offset = state.problem.prior.lift(state.buffer.images).combine(w)[:, 0]
    if anchor is not None:
        offset = offset + iterate.anchor_share * anchor.offset
    return replace(iterate, representer_weights=state.buffer.actions.combine(w)[:, 0], offset=offset)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _vectors(iterate: Iterate) -> tuple[Tensor, Tensor, Tensor]:
    return iterate.coefficients, iterate.representer_weights, iterate.offset


def _all_close(new: Tensor, old: Tensor, tolerance: float) -> bool:
    """In all processes, of which one may have had other numbers."""
    return not parallel.any_of(not bool((new - old).norm() <= tolerance * new.norm()))

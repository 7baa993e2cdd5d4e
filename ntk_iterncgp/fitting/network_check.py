"""The self-check of a network's posterior: of its passes, after every fit and refine by `clusters`, and of itself.

For passes with labels, directions u and images A_b = Σ_{n∈b} J_nᵀ W_n u_n,

    checksums  A h for a random h, which was summed beside A while the data were swept: all groups at O(PB)
    outputs    f(x; θ*) at some data: neither data nor weights have changed
    groups     A_b computed anew for a few whole groups of the latest pass
    adjoint    (Jᵀv)ᵀt = vᵀ(J t) for random v and t, where Jᵀ is that of the sweep and J that of predictions
    noise      UᵀWU has 1 on its diagonal for every whole group, as the directions were scaled
    blocks     G z = Aᵀ(A z) and R z = UᵀW(U z) for a random z and what is kept of the small matrices

Groups whose checksum is off are swept again, and all of them where a group computed anew differs; small matrices are
computed again; with a warning, and then all is checked again. What still fails is raised. Rounding is measured against
√tr(JᵀWJ), which bounds the sum of the norms of all gradients of a group, since its directions have unit noise.

Every posterior of weights, however it was made, and when it is loaded:

    numbers    finite, of the right sizes; the diagonal of JᵀWJ not negative
    noise      R symmetric and positive definite
    bound      tr(R⁻¹AᵀA) ≤ tr(JᵀWJ), where that is known exactly: nobody knows more than all data say
    variance   between zero and the prior's, at a few inputs
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ntk_iterncgp.clusters.clusters import Clusters, Pass, checksum_vector
from ntk_iterncgp.data.fixed_order import Inputs, slice_rows
from ntk_iterncgp.fitting.network import LinearisedNetwork, NetworkSettings
from ntk_iterncgp.fitting.report import ELSEWHERE, MIN_DATA, ROWS, SelfCheckError, refusal
from ntk_iterncgp.jacobian.blocks import WeightColumns
from ntk_iterncgp.jacobian.rows import FEW_NUMBERS, NetworkJacobian, Rows, affordable_data
from ntk_iterncgp.likelihoods.base import Likelihood
from ntk_iterncgp.likelihoods.tokens import TokenSoftmax
from ntk_iterncgp.linalg.factor import block_matrix, inner_products, rounding_noise
from ntk_iterncgp.posterior.weight_space import WeightPosterior
from ntk_iterncgp.runtime import parallel

MARGIN = 500.0  # in units of rounding: a network amplifies it, and other batches are summed in another order
FLOOR = 1e-10  # what is asked of float64
SMALL = 1e-6  # a curvature that says nothing


def network_rounding(dtype: torch.dtype) -> float:
    """The relative error that a product with J may have."""
    return max(FLOOR, MARGIN * torch.finfo(dtype).eps)


def checked_targets(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """One finite target for each output, which is finite too, as the likelihood takes them."""
    if not bool(torch.isfinite(outputs).all()):
        bad = int((~torch.isfinite(outputs)).any(1).sum())
        raise ValueError(
            f"The model must return finite outputs; got NaN or infinity for {bad} of {len(outputs)} training inputs. "
            "Try smaller inputs, and check its weights."
        )
    if len(targets) != len(outputs):
        raise ValueError(
            f"There must be one target for each of the {len(outputs)} training inputs; got {len(targets)}. Try a "
            "loader whose batches are pairs (x, y)."
        )
    if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
        raise ValueError("Targets must be finite; got NaN or infinity. Try it without those data.")
    checked = likelihood.check_targets(targets)
    if isinstance(likelihood, TokenSoftmax):
        likelihood.check_ignored(outputs, checked)
    return checked


def check_posterior(
    posterior: WeightPosterior, prior_precision: Tensor, noise_scale: Tensor, at: Iterable[Rows] = ()
) -> WeightPosterior:
    """The same posterior, or a `SelfCheckError`."""
    problems = list(_sizes(posterior, prior_precision, noise_scale)) or list(_matrices(posterior))
    if not problems and posterior.rank:
        problems = [problem for rows in at for problem in _variance(posterior, prior_precision, noise_scale, rows)]
    if problems:
        raise SelfCheckError(refusal(problems))
    return posterior


def _sizes(posterior: WeightPosterior, prior_precision: Tensor, noise_scale: Tensor) -> Iterator[str]:
    P, B = sum(posterior.layer_sizes), posterior.images.shape[-1]
    shapes = {
        "images": (P, B),
        "noise_gram": (B, B),
        "right_hand_side": (B,),
        "curvature_diagonal": (P,),
    }
    for name, shape in shapes.items():
        value = getattr(posterior, name)
        if tuple(value.shape) != shape:
            yield f"{name} of shape {shape}, but got {tuple(value.shape)}"
            continue
        # With its rows next to each other, as images are stored by columns: a reduction then makes no copy.
        stored = value.mT if value.ndim == 2 and value.mT.is_contiguous() else value
        if value.numel() and not all(map(math.isfinite, map(float, stored.aminmax()))):
            yield f"finite numbers in {name}, but it holds NaN or infinity"
    diagonal = posterior.curvature_diagonal  # of saturated data it is a difference of numbers that are nearly the same
    if len(diagonal) and float(diagonal.min()) < -1e-3 * max(float(diagonal.max()), SMALL):
        yield "a curvature of the weights that is nowhere negative, but it is"
    for name, value in (("prior_precision", prior_precision), ("the noise scale", noise_scale)):
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            yield f"{name} to be positive and finite, but it is not"


def _matrices(posterior: WeightPosterior) -> Iterator[str]:
    R = posterior.noise_gram
    if posterior.rank == 0:
        return
    sides = R.diagonal().clamp_min(1e-300).rsqrt()
    scaled = R * sides[:, None] * sides
    if not float((scaled - scaled.T).abs().max()) <= FLOOR:
        yield "a symmetric noise of the actions, but it is not"
        return
    info = torch.linalg.cholesky_ex(scaled).info
    if int(info) != 0 or bool((R.diagonal() <= 0).any()):
        yield "a positive definite noise of the actions, but it is not"
        return
    if posterior.trace_is_exact:
        gram, known = posterior.unit_gram * sides[:, None] * sides, float(posterior.curvature_diagonal.sum())
        # Nearly dependent actions would make information of rounding; of right images AᵀA has no more than B tr(JᵀWJ).
        rounding = rounding_noise(gram, scaled, posterior.dtype)
        limit = torch.finfo(posterior.dtype).eps * posterior.rank * known
        scaled.diagonal().add_(min(rounding, limit))
        said = float(torch.linalg.solve(scaled, gram).trace())
        slack = 0.5 if posterior.dtype != torch.float64 else 1e-3
        if not said <= (1 + slack) * known + SMALL:
            yield f"actions that say no more than all data do ({known:.4g}), but they say {said:.4g}"


def _variance(posterior: WeightPosterior, prior_precision: Tensor, noise_scale: Tensor, rows: Rows) -> Iterator[str]:
    variance = 1 / posterior.precision_of_weights(prior_precision)
    prior = rows.covariance(variance).diagonal(dim1=1, dim2=2)  # (b, C)
    cross = rows.times(WeightColumns(posterior.images, posterior.dtype, variance))  # (b, C, B)
    half = posterior.factor(prior_precision, noise_scale).half_solve(cross.flatten(0, 1).T)
    left = 1 - half.square().sum(0) / prior.flatten().clamp_min(1e-300)
    if not bool((left >= -(network_rounding(posterior.dtype) ** 0.5)).all()):
        worst = float(left.nan_to_num(nan=-torch.inf).min())
        yield f"variances between zero and the prior's, but one is {worst:.1e} times the prior's"


MAX_CHECKED_OUTPUTS = 16  # or as many combinations of them
GROUP_FRACTION, MAX_GROUPS = 0.01, 4  # what is computed anew: groups with at most this fraction of all data, or few


@dataclass
class Findings:
    """What is wrong, each the end of a sentence, and what is to be mended.

    Which actions of each pass to sweep again, and whether small matrices are to be computed again; some inputs; and
    whether anything was mended before.
    """

    problems: list[str] = field(default_factory=list)
    stale: list[Tensor] = field(default_factory=list)  # (q·B,) each
    stale_blocks: bool = False
    visited: list[Inputs] = field(default_factory=list)
    were_mended: bool = False


def checked_passes(
    clusters: Clusters,
    curvature_trace: float,
    network: LinearisedNetwork,
    settings: NetworkSettings,
    *,
    visit: bool = True,
) -> Findings:
    """Check the passes, sweep again what is not as it should be, in place.

    `visit=False` leaves the data alone: enough to see, before more is made of the sums, that they are what was summed.
    """
    found = _problems(clusters, curvature_trace, network, settings, visit)
    swept_again = any(bool(stale.any()) for stale in found.stale)
    if found.problems and (swept_again or found.stale_blocks):
        mending = "These groups are swept again." if swept_again else "They are computed again."
        warnings.warn(f"The self-check expected {'; and '.join(found.problems)}. {mending}", stacklevel=4)
        for done, stale in zip(clusters.passes, found.stale, strict=True):
            _sweep_again(clusters, done, stale, network, settings.chunk_bytes)
        clusters.forget()
        found = replace(_problems(clusters, curvature_trace, network, settings, visit), were_mended=True)
    if found.problems:
        raise SelfCheckError(refusal(found.problems))
    return found


def _sweep_again(clusters: Clusters, done: Pass, stale: Tensor, network: LinearisedNetwork, chunk_bytes: int) -> None:
    groups = stale.view(len(done.directions), -1).any(0)  # all directions of a group come from one sweep
    if not bool(groups.any()):
        return
    for sums in (done.images, done.checksums):
        sums.view(len(done.directions), len(groups), -1)[:, groups] = 0
    again = replace(done, swept=~(groups[done.labels] & done.swept))
    for _ in clusters.sweep(again, network.jacobian, network.data, chunk_bytes):
        pass
    clusters.finish(again)  # in place: `done` has the same sums


# --- the checks ---------------------------------------------------------------------------------------------------


def _problems(
    clusters: Clusters, curvature_trace: float, network: LinearisedNetwork, settings: NetworkSettings, visit: bool
) -> Findings:
    found = Findings(stale=[torch.zeros_like(done.checksums, dtype=torch.bool) for done in clusters.passes])
    size = max(curvature_trace, 0.0) ** 0.5
    for done, stale in zip(clusters.passes, found.stale, strict=True):
        allowed = 10 * network_rounding(done.images.dtype) * size
        off = ~((done.images @ checksum_vector(done.images) - done.checksums).abs() <= allowed)
        if bool(off.any()):
            stale |= off
            found.problems.append(f"images that are what was summed on the way, but {int(off.sum())} are not")
        for u in done.directions:  # or no direction at all, for a group that the data say nothing about
            noise, eps = clusters.group_noise(done, u), torch.finfo(torch.float64).eps
            length = torch.zeros_like(noise).index_add_(0, done.labels, u.square().sum(1))
            # Of saturated data W is known to eps alone.
            if not bool((((noise - 1).abs() <= 1e-6 + 16 * eps * length) | (length == 0)).all()):
                found.problems.append("directions with unit noise in every group, but some have another")
                break
    if not found.problems and not (_gram_is_right(clusters) and _noise_is_right(clusters)):
        found.problems.append("small matrices to be those of the actions, but they are others")
        found.stale_blocks = True
    if visit and not found.problems:
        _visit(clusters, size, network, settings, found)
    if parallel.any_of(bool(found.problems)):  # several processes mend together, whatever one of them has found
        found.problems = found.problems or [ELSEWHERE]
        found.stale_blocks = parallel.any_of(found.stale_blocks)
        for stale in found.stale:
            stale |= parallel.all_sum(stale.int()).bool()
    return found


def _gram_is_right(clusters: Clusters) -> bool:
    """Of the passes whose blocks are cached, all at once: two products with their images."""
    images = clusters.actions_now().images[: _num_known(clusters.gram_blocks)]
    if not images:
        return True
    gram = block_matrix(clusters.gram_blocks, [True] * len(images), clusters.gram_blocks.__getitem__)
    z = _signs(gram)
    parts = zip(images, z.split([len(block) for block in images]), strict=True)
    total = torch.stack([inner_products(block, part[:, None]) for block, part in parts]).sum(0)  # A z (P, 1)
    off = torch.cat([inner_products(block.T, total)[:, 0] for block in images]) - gram @ z
    lengths = torch.cat([torch.linalg.vector_norm(block, dim=1).double() for block in images])
    return bool((off.abs() <= network_rounding(images[0].dtype) * lengths * lengths.sum()).all())


def _noise_is_right(clusters: Clusters) -> bool:
    """The same with directions, and one product with W. Of saturated data W is known to eps alone."""
    parts = [(done, u) for done in clusters.passes for u in done.directions][: _num_known(clusters.noise_blocks)]
    if not parts:
        return True
    noise = block_matrix(clusters.noise_blocks, [True] * len(parts), clusters.noise_blocks.__getitem__)
    z, v = _signs(noise), torch.zeros_like(clusters.outputs)
    for part, (done, u) in zip(z.split([done.num_groups for done, _ in parts]), parts, strict=True):
        v.index_add_(0, done.rows, part[done.labels, None] * u)
    curved, length, eps = clusters.curvature(v), torch.linalg.vector_norm(v, dim=1), torch.finfo(torch.float64).eps
    sums = []
    for done, u in parts:
        each = torch.stack([(u * curved[done.rows]).sum(1), torch.linalg.vector_norm(u, dim=1) * length[done.rows]])
        sums.append(each.new_zeros(2, done.num_groups).index_add_(1, done.labels, each))
    direct, size = torch.cat(sums, 1)
    return bool(((direct - noise @ z).abs() <= 1e-9 * len(z) + 16 * eps * size).all())


def _num_known(blocks: dict[tuple[int, int], Tensor]) -> int:
    """For how many, from the first, all blocks between them are there."""
    return 1 + max((i for i, _ in blocks), default=-1)


def _signs(matrix: Tensor) -> Tensor:  # (B, B) -> (B,)
    generator = torch.Generator().manual_seed(0)
    return (2.0 * torch.randint(2, (len(matrix),), generator=generator) - 1).to(matrix)


def _visit(
    clusters: Clusters, size: float, network: LinearisedNetwork, settings: NetworkSettings, found: Findings
) -> None:
    """Evaluate some data again, all in one go."""
    jacobian, num_data, num_outputs = network.jacobian, len(clusters.outputs), network.likelihood.num_outputs
    latest, device = clusters.passes[-1], clusters.outputs.device
    generator = torch.Generator().manual_seed(len(clusters.passes))
    groups = _some_groups(latest, max_group_data(jacobian, num_data), generator).to(device)
    groups = groups[:1] if settings.is_known else groups
    outputs = min(num_outputs, MAX_CHECKED_OUTPUTS)
    number = affordable_data(jacobian, num_data, outputs, max(MIN_DATA, -(-ROWS // num_outputs)))
    few = torch.randint(num_data, (1 if settings.is_known else number,), generator=generator).to(device)
    rows = torch.cat([few, latest.rows[torch.isin(latest.labels, groups)]]).unique()
    sums = latest.images.new_zeros(len(latest.directions), len(groups), jacobian.num_params)
    error, at_once = 0.0, max(1, settings.chunk_bytes // jacobian.bytes_per_row(outputs))
    with torch.no_grad():
        for part, x in network.data.pick(rows, num_data, num_data):
            now = jacobian.forward(x).double()
            now = now if clusters.leading is None else clusters.leading.reduced(now, part)  # as they were stored
            error = max(error, float((now - clusters.outputs[part]).abs().max()))
            for g, group in enumerate(groups.tolist()):
                items = ((latest.labels == group) & torch.isin(latest.rows, part)).nonzero()[:, 0]
                if len(items):
                    here = torch.searchsorted(part, latest.rows[items])
                    curved = [clusters.curvature(u[items], latest.rows[items]) for u in latest.directions]
                    block = clusters.outward(torch.stack(curved, 2), latest.rows[items])
                    cotangents = block.to(jacobian.dtype)
                    sums[:, g] += jacobian.vjp(slice_rows(x, here, len(part)), cotangents).T
            here = torch.isin(part, few).nonzero()[:, 0][:at_once]
            if len(here) and not settings.is_known:
                found.visited.append(slice_rows(x, here, len(part)))
    allowed = network_rounding(jacobian.dtype)
    if not error <= 10 * allowed * (1 + float(clusters.outputs.abs().max())):
        found.problems.append(
            f"the model's outputs to be those of the fit, but at some data they differ by {error:.1e}"
        )
        return
    stored = latest.images.view(len(latest.directions), latest.num_groups, -1)[:, groups]
    off = torch.linalg.vector_norm((sums - stored).double(), dim=2)  # (q, groups)
    if not bool((off <= allowed * size).all()):
        found.problems.append(
            f"images that are sums of gradients, but of {len(groups)} computed again one differs by "
            f"{float(off.max()):.1e}, where rounding explains {allowed * size:.1e}"
        )
        for stale in found.stale:
            stale.fill_(True)
    error = max((_adjoint_error(network, x) for x in found.visited), default=0.0)
    if not error <= allowed:
        found.problems.append(_derivatives_differ(error, jacobian.dtype))


def max_group_data(jacobian: NetworkJacobian, num_data: int) -> int:
    """How many data the groups that are computed anew may have together: more where a backward pass is cheap."""
    few = ROWS if ROWS * jacobian.num_params <= FEW_NUMBERS else 1
    return max(few, int(GROUP_FRACTION * num_data))


def _some_groups(done: Pass, max_data: int, generator: torch.Generator) -> Tensor:
    """Random groups that have been swept as a whole, a few, and not too large together."""
    counts = torch.bincount(done.labels, minlength=done.num_groups).cpu()
    swept = torch.bincount(done.labels[done.swept], minlength=done.num_groups).cpu()
    whole = ((swept == counts) & (counts > 0)).nonzero()[:, 0]
    if not len(whole):
        return whole
    max_data = max(max_data, int(counts[whole].min()))  # one of them in any case
    shuffled = whole[torch.randperm(len(whole), generator=generator)]
    shuffled = shuffled[counts[shuffled] <= max_data][:MAX_GROUPS]
    return shuffled[counts[shuffled].cumsum(0) <= max_data].sort().values


def _adjoint_error(network: LinearisedNetwork, x: Inputs) -> float:
    """Reverse mode summed over a batch, as in sweeps, against rows of J, as in predictions: the relative error."""
    jacobian, generator = network.jacobian, torch.Generator().manual_seed(1)
    with torch.no_grad():
        rows = rows_at(network, x)
        t = torch.randn(jacobian.num_params, generator=generator).to(rows.outputs)
        product = rows.times(t[:, None])[..., 0]  # (b, C), or (b, r) for r combinations of the outputs
        v = torch.randn(product.shape, generator=generator).to(rows.outputs)
        contrasts = _contrasts(network)
        cotangents = v if contrasts is None else v @ contrasts.T.to(v)
        left = float(jacobian.vjp(x, cotangents[..., None])[:, 0].double() @ t.double())
        right = float((v.double() * product).sum())
        unit = torch.ones(jacobian.num_params, dtype=torch.float64, device=v.device)
        scale = float(v.double().norm() * rows.covariance(unit).diagonal(dim1=1, dim2=2).sum().sqrt())
    return abs(left - right) / scale if left != right else 0.0


def _derivatives_differ(error: float, dtype: torch.dtype) -> str:
    """A message of its own, for what no second fit would mend."""
    is_single = dtype == torch.float64 and error <= network_rounding(torch.float32)
    advice = ". Try it without operations whose gradient is not that of their value (a custom autograd.Function)."
    if is_single:
        advice = ", as if it computed in float32 inside. Try dtype=torch.float32."
    return (
        f"`model` must have derivatives that agree to {network_rounding(dtype):.0e} between sweeps (reverse mode of a "
        f"batch) and predictions (input by input); got a relative difference of {error:.0e}{advice}"
    )


@torch.no_grad()
def rows_at(network: LinearisedNetwork, x: Inputs) -> Rows:
    """Of all outputs, or of some random combinations where there are many: what is wrong with one is in all of them."""
    return network.jacobian.rows(x, network.data.num_rows(x), _contrasts(network))


def _contrasts(network: LinearisedNetwork) -> Tensor | None:  # (C, r)
    """Orthonormal, and always the same."""
    outputs = network.first_batch.outputs
    C = outputs.shape[1]
    if C <= MAX_CHECKED_OUTPUTS:
        return None
    drawn = torch.randn(C, MAX_CHECKED_OUTPUTS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    orthonormal: Tensor = torch.linalg.qr(drawn).Q.to(outputs.device)
    return orthonormal

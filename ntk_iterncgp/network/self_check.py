"""The self-check of the one-epoch posterior, after every fit and refine by `clusters`.

For passes with labels, directions u and images A_b = Σ_{n∈b} J_nᵀ W_n u_n,

    checksums  A h for a random h, which was summed beside A while the data were swept: all groups at O(PB)
    outputs    f(x; θ*) at some data: neither data nor weights have changed
    groups     A_b computed anew for a few whole groups of the latest pass
    adjoint    (Jᵀv)ᵀt = vᵀ(J t) for random v and t, where Jᵀ is that of the sweep and J that of predictions
    noise      UᵀWU has 1 on its diagonal for every whole group, as the directions were scaled
    blocks     G z = Aᵀ(A z) and R z = UᵀW(U z) for a random z and what is kept of the small matrices

Groups whose checksum is off are swept again, and all of them where a group computed anew differs; small matrices are
computed again; with a warning, and then all is checked again. What still fails is raised. Rounding is measured against
√tr(JᵀWJ), which bounds the sum of the norms of all gradients of a group, since its directions have unit noise. The
posterior made of the passes is then looked at as `weight_check.py` says, at a few data of those above.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ntk_iterncgp import parallel
from ntk_iterncgp.data import Inputs, slice_rows
from ntk_iterncgp.network.clusters import Clusters
from ntk_iterncgp.network.linearised import LinearisedNetwork, NetworkSettings
from ntk_iterncgp.network.passes import Pass, checksum_vector
from ntk_iterncgp.priors.jacobian import Rows
from ntk_iterncgp.priors.trace import affordable_data
from ntk_iterncgp.self_check import ELSEWHERE, MIN_DATA, ROWS, SelfCheckError, refusal
from ntk_iterncgp.weight_check import network_rounding
from ntk_iterncgp.weight_posterior import inner_products, rows_at_once

MAX_CHECKED_OUTPUTS = 16  # or as many combinations of them
GROUP_SHARE, MAX_GROUPS = 0.01, 4  # what is computed anew: groups with at most this share of all data, or 64


@dataclass
class Findings:
    """What is wrong, each the end of a sentence; which actions of each pass to sweep again, and whether small matrices
    are to be computed again; some inputs; and whether anything was mended before."""

    told: list[str] = field(default_factory=list)
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
    """Check the passes, sweep again what is not as it should be, in place. `visit=False` leaves the data alone: enough
    to see, before more is made of the sums, that they are what was summed."""
    found = _problems(clusters, curvature_trace, network, settings, visit)
    swept_again = any(bool(stale.any()) for stale in found.stale)
    if found.told and (swept_again or found.stale_blocks):
        mending = "These groups are swept again." if swept_again else "They are computed again."
        warnings.warn(f"The self-check expected {'; and '.join(found.told)}. {mending}", stacklevel=4)
        for done, stale in zip(clusters.passes, found.stale, strict=True):
            _sweep_again(clusters, done, stale, network, settings.chunk_bytes)
        clusters.forget()
        found = replace(_problems(clusters, curvature_trace, network, settings, visit), were_mended=True)
    if found.told:
        raise SelfCheckError(refusal(found.told))
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
            found.told.append(f"images that are what was summed on the way, but {int(off.sum())} are not")
        if not _has_unit_noise(clusters, done):
            found.told.append("directions with unit noise in every group, but some have another")
    if not found.told and not (_gram_is_right(clusters) and _noise_is_right(clusters)):
        found.told.append("small matrices to be those of the actions, but they are others")
        found.stale_blocks = True
    if visit and not found.told:
        _visit(clusters, size, network, settings, found)
    if parallel.any_of(bool(found.told)):  # several processes mend together, whatever one of them has found
        found.told = found.told or [ELSEWHERE]
        found.stale_blocks = parallel.any_of(found.stale_blocks)
        for stale in found.stale:
            stale |= parallel.all_sum(stale.int()).bool()
    return found


def _has_unit_noise(clusters: Clusters, done: Pass) -> bool:
    """Or no direction at all, for a group that the data say nothing about. Of decided data W is known to eps alone."""
    eps = torch.finfo(torch.float64).eps
    for u in done.directions:
        noise = clusters.group_noise(done, u)
        length = torch.zeros_like(noise).index_add_(0, done.labels, u.square().sum(1))
        if not bool((((noise - 1).abs() <= 1e-6 + 16 * eps * length) | (length == 0)).all()):
            return False
    return True


def _gram_is_right(clusters: Clusters) -> bool:
    """Of the passes whose blocks are cached, all at once: two products with their images."""
    known = _num_known(clusters.gram_blocks)
    images = clusters.action_images()[:known] if known else []
    z = _signs(images)
    lengths = [torch.linalg.vector_norm(block, dim=1).double() for block in images]
    products = [_combined(block, part) for block, part in zip(images, z, strict=True)]
    for i, block in enumerate(images):
        total = torch.stack(products).sum(0)[:, None]
        off = inner_products(block.T, total)[:, 0] - _row_of_blocks(clusters.gram_blocks, i, z)
        allowed = network_rounding(block.dtype) * lengths[i] * float(torch.cat(lengths).sum())
        if not bool((off.abs() <= allowed).all()):
            return False
    return True


def _combined(images: Tensor, z: Tensor) -> Tensor:  # (B, P), (B,) -> (P,)
    """A z in float64, a slice of weights at a time: no second copy of the images."""
    total = torch.empty(images.shape[1], dtype=torch.float64, device=images.device)
    step = rows_at_once(len(images))
    for place, part in zip(total.split(step), images.split(step, 1), strict=True):
        place.copy_(z @ part.double())
    return total


def _noise_is_right(clusters: Clusters) -> bool:
    """The same with directions, and one product with W. Of decided data W is known to eps alone."""
    parts = [(done, u) for done in clusters.passes for u in done.directions][: _num_known(clusters.noise_blocks)]
    z = _signs([done.checksums[: done.num_groups] for done, _ in parts])
    if not parts:
        return True
    v = torch.zeros_like(clusters.outputs)
    for part, (done, u) in zip(z, parts, strict=True):
        v.index_add_(0, done.rows, part[done.labels, None] * u)
    curved, length, eps = clusters.curvature(v), torch.linalg.vector_norm(v, dim=1), torch.finfo(torch.float64).eps
    for i, (done, u) in enumerate(parts):
        sums = torch.zeros(2, done.num_groups, dtype=torch.float64, device=v.device)
        each = torch.stack([(u * curved[done.rows]).sum(1), torch.linalg.vector_norm(u, dim=1) * length[done.rows]])
        direct, size = sums.index_add_(1, done.labels, each)
        off = direct - _row_of_blocks(clusters.noise_blocks, i, z)
        if not bool((off.abs() <= 1e-9 * sum(map(len, z)) + 16 * eps * size).all()):
            return False
    return True


def _num_known(blocks: dict[tuple[int, int], Tensor]) -> int:
    """For how many, from the first, all blocks between them are there."""
    number = 0
    while all((number, j) in blocks for j in range(number + 1)):
        number += 1
    return number


def _signs(like: list[Tensor]) -> list[Tensor]:  # (B, …) each -> (B,) each
    generator = torch.Generator().manual_seed(0)
    return [(2.0 * torch.randint(2, (len(t),), generator=generator) - 1).double().to(t.device) for t in like]


def _row_of_blocks(blocks: dict[tuple[int, int], Tensor], i: int, z: list[Tensor]) -> Tensor:
    """One row of blocks of a symmetric matrix, of which the lower triangle is kept, times z."""
    return torch.cat([blocks[i, j] if j <= i else blocks[j, i].T for j in range(len(z))], 1) @ torch.cat(z)


def _visit(
    clusters: Clusters, size: float, network: LinearisedNetwork, settings: NetworkSettings, found: Findings
) -> None:
    """Look at some data again, all in one go."""
    jacobian, (num_data, num_outputs) = network.jacobian, clusters.shape
    latest, device = clusters.passes[-1], clusters.outputs.device
    generator = torch.Generator().manual_seed(len(clusters.passes))
    groups = _some_groups(latest, max(ROWS, int(GROUP_SHARE * num_data)), generator).to(device)
    outputs = min(num_outputs, MAX_CHECKED_OUTPUTS)
    number = affordable_data(jacobian, num_data, outputs, max(MIN_DATA, -(-ROWS // num_outputs)))
    few = torch.randint(num_data, (number,), generator=generator).to(device)
    rows = torch.cat([few, latest.rows[torch.isin(latest.labels, groups)]]).unique()
    sums = latest.images.new_zeros(len(latest.directions), len(groups), jacobian.num_params)
    error, at_once = 0.0, max(1, settings.chunk_bytes // jacobian.bytes_per_row(outputs))
    with torch.no_grad():
        for part, x in network.data.pick(rows, num_data, num_data):
            error = max(error, float((jacobian.forward(x).double() - clusters.outputs[part]).abs().max()))
            for g, group in enumerate(groups.tolist()):
                items = ((latest.labels == group) & torch.isin(latest.rows, part)).nonzero()[:, 0]
                if len(items):
                    here = torch.searchsorted(part, latest.rows[items])
                    curved = [clusters.curvature(u[items], latest.rows[items]) for u in latest.directions]
                    cotangents = torch.stack(curved, 2).to(jacobian.dtype)
                    sums[:, g] += jacobian.vjp(slice_rows(x, here, len(part)), cotangents).T
            here = torch.isin(part, few).nonzero()[:, 0][:at_once]
            if len(here):
                found.visited.append(slice_rows(x, here, len(part)))
    allowed = network_rounding(jacobian.dtype)
    if not error <= 10 * allowed * (1 + float(clusters.outputs.abs().max())):
        found.told.append(f"the model's outputs to be those of the fit, but at some data they differ by {error:.1e}")
        return
    stored = latest.images.view(len(latest.directions), latest.num_groups, -1)[:, groups]
    off = torch.linalg.vector_norm((sums - stored).double(), dim=2)  # (q, groups)
    if not bool((off <= allowed * size).all()):
        found.told.append(
            f"images that are sums of gradients, but of {len(groups)} computed again one differs by "
            f"{float(off.max()):.1e}, where rounding explains {allowed * size:.1e}"
        )
        for stale in found.stale:
            stale.fill_(True)
    for x in found.visited:
        _check_adjoint(network, x, found)


def _some_groups(done: Pass, max_data: int, generator: torch.Generator) -> Tensor:
    """Random groups that have been swept as a whole, a few, and not too large together."""
    counts = torch.bincount(done.labels, minlength=done.num_groups).cpu()
    swept = torch.bincount(done.labels[done.swept], minlength=done.num_groups).cpu()
    whole = ((swept == counts) & (counts > 0) & (counts <= max_data)).nonzero()[:, 0]
    shuffled = whole[torch.randperm(len(whole), generator=generator)][:MAX_GROUPS]
    return shuffled[counts[shuffled].cumsum(0) <= max_data].sort().values


def _check_adjoint(network: LinearisedNetwork, x: Inputs, found: Findings) -> None:
    """Reverse mode summed over a batch, as in sweeps, against rows of J, as in predictions."""
    jacobian, generator = network.jacobian, torch.Generator().manual_seed(1)
    with torch.no_grad():
        rows = rows_at(network, x)
        t = torch.randn(jacobian.num_params, generator=generator).to(rows.outputs)
        product = rows.times(t[:, None])[..., 0]  # (b, C), or (b, r) for r combinations of the outputs
        v = torch.randn(product.shape, generator=generator).to(rows.outputs)
        contrasts = _contrasts(rows.outputs)
        cotangents = v if contrasts is None else v @ contrasts.T.to(v)
        left = float(jacobian.vjp(x, cotangents[..., None])[:, 0].double() @ t.double())
        right = float((v.double() * product).sum())
        unit = torch.ones(jacobian.num_params, dtype=torch.float64, device=v.device)
        scale = float(v.double().norm() * rows.covariance(unit).diagonal(dim1=1, dim2=2).sum().sqrt())
    if not abs(left - right) <= network_rounding(jacobian.dtype) * scale:
        found.told.append(
            f"the model's derivatives to agree between sweeps and predictions, but (Jᵀv)ᵀt = {left:.6g} and "
            f"vᵀ(J t) = {right:.6g}"
        )


def rows_at(network: LinearisedNetwork, x: Inputs) -> Rows:
    """Of all outputs, or of some random combinations where there are many: what is wrong with one is in all of them."""
    contrasts = _contrasts(network.jacobian.forward(x))
    return network.jacobian.rows(x, network.data.num_rows(x), contrasts)


def _contrasts(outputs: Tensor) -> Tensor | None:  # (b, C) -> (C, r)
    """Orthonormal, and always the same."""
    C = outputs.shape[1]
    if C <= MAX_CHECKED_OUTPUTS:
        return None
    drawn = torch.randn(C, MAX_CHECKED_OUTPUTS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return torch.linalg.qr(drawn).Q.to(outputs.device)


def each_rows(network: LinearisedNetwork, visited: list[Inputs]) -> Iterator[Rows]:
    with torch.no_grad():
        yield from (rows_at(network, x) for x in visited)

"""Posteriors of disjoint data add up to that of all data: against the joint system, written out densely."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from ntk_iterncgp.posterior.merging import bounded, merge_posteriors
from ntk_iterncgp.posterior.weight_space import TOLERANCE, WeightPosterior, relative_rounding
from tests.clusters_helpers import PRIOR_PRECISION, Net, digits, make_net
from tests.network_cases import dense_jacobian

NETS = {
    "several classes": make_net(0, num_data=24),
    "two classes": make_net(1, num_outputs=2, num_data=24),
    "several outputs": make_net(2, num_data=24, likelihood="regression"),
}
nets = pytest.mark.parametrize("net", NETS.values(), ids=NETS.keys())
THIRDS = (range(0, 11), range(11, 16), range(16, 24))
PRECISION, NOISE = torch.tensor([PRIOR_PRECISION], dtype=torch.float64), torch.ones(1, dtype=torch.float64)


def fitted(net: Net, rows: range, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    la = net.laplace(dtype, **{"policy": "clusters", "num_actions": 3, **settings})
    la.dtype = dtype  # of derivatives, too
    la.fit(DataLoader(Subset(net.dataset(dtype), rows), batch_size=4))
    return la


def actions(la: Any, rows: range, num_data: int) -> Tensor:  # (n, B)
    """S = W U Q of a fit of some rows, as columns over all data."""
    clusters = la._fit.state.clusters
    C, columns = clusters.outputs.shape[1], []
    for done in clusters.passes:
        for u in done.directions:
            block = torch.zeros(num_data, C, done.num_groups, dtype=torch.float64)
            for item, (row, group) in enumerate(zip(done.rows.tolist(), done.labels.tolist(), strict=True)):
                block[rows[row], :, group] += clusters.curvature(u[item][None], torch.tensor([row]))[0]
            columns.append(block.flatten(0, 1))
    return torch.cat(columns, 1) @ clusters.combinations()


def weight_covariance(posterior: WeightPosterior, noise_scale: Tensor = NOISE) -> Tensor:  # (P, P)
    conditioned = posterior.conditioned(PRECISION, noise_scale)
    A = conditioned.scale * conditioned.columns.whole().double()
    return conditioned.variance.expand(len(A)).diag() - A @ conditioned.factor.solve(A.T)


def scale(net: Net) -> Tensor:
    return NOISE * (net.sigma**2 if net.likelihood == "regression" else 1.0)


@nets
def test_merged_posteriors_are_the_joint_system_of_all_their_actions(net: Net) -> None:
    fits = [fitted(net, rows) for rows in THIRDS]
    S = torch.cat([actions(la, rows, 24) for la, rows in zip(fits, THIRDS, strict=True)], 1)
    J, W = dense_jacobian(net.model, net.x).flatten(0, 1), net.curvature()
    A, noise = J.T @ S, S.T @ torch.linalg.pinv(W, hermitian=True) @ S
    M = A.T @ A / PRIOR_PRECISION + noise
    expected = torch.eye(len(A)).double() / PRIOR_PRECISION - A @ torch.linalg.solve(M, A.T) / PRIOR_PRECISION**2
    joint = merge_posteriors([la.posterior for la in fits])
    assert joint.rank == S.shape[1] == 9
    torch.testing.assert_close(weight_covariance(joint, scale(net)), expected, rtol=0, atol=1e-10)


@nets
def test_with_every_direction_of_every_datum_the_parts_make_up_the_exact_posterior(net: Net) -> None:
    settings = {"num_actions": 1000, "cotangents": 2 if net.likelihood == "classification" else None}
    joint = merge_posteriors([fitted(net, rows, **settings).posterior for rows in THIRDS])
    torch.testing.assert_close(
        weight_covariance(bounded(joint, None, PRECISION, scale(net)), scale(net)),
        net.weight_covariance(),
        rtol=0,
        atol=1e-8,
    )


@nets
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("max_rank", [None, 5])
def test_variance_never_falls_below_the_exact_posterior_of_all_data(
    net: Net, dtype: torch.dtype, max_rank: int | None
) -> None:
    joint = merge_posteriors([fitted(net, rows, dtype).posterior for rows in THIRDS])
    found = weight_covariance(bounded(joint, max_rank, PRECISION, scale(net)), scale(net))
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.linalg.eigvalsh(found - net.weight_covariance()).min() >= -rounding


@nets
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_with_a_bounded_rank_the_trace_never_rises_and_no_variance_by_more_than_is_dropped(
    net: Net, dtype: torch.dtype
) -> None:
    parts = [fitted(net, rows, dtype).posterior for rows in THIRDS]
    rounding = 1e-9 if dtype == torch.float64 else 1e-5
    kept, has_risen = parts[0], False
    for new in (*parts[1:], parts[0]):
        whole = merge_posteriors([kept, new])
        found = bounded(whole, 3, PRECISION, scale(net))
        before, joint, after = (PRIOR_PRECISION * weight_covariance(p, scale(net)) for p in (kept, whole, found))
        assert float(after.trace()) <= float(before.trace()) + rounding
        removed = torch.linalg.eigvalsh(torch.eye(len(joint)).double() - joint).flip(0)
        assert float(removed[3]) > 1e-3
        assert float(torch.linalg.eigvalsh(after - joint).max()) <= float(removed[3]) + rounding
        assert float(torch.linalg.eigvalsh(after - before).max()) <= float(removed[3]) + rounding
        has_risen |= float(torch.linalg.eigvalsh(after - before).max()) > 1e-3
        kept = found
    assert has_risen, "which is why nothing better is promised"


@nets
def test_the_order_does_not_matter(net: Net) -> None:
    parts = [fitted(net, rows).posterior for rows in THIRDS]
    a, b, c = parts
    one, other = merge_posteriors([merge_posteriors([a, b]), c]), merge_posteriors([c, merge_posteriors([b, a])])
    for made in (other, merge_posteriors([b, c, a])):
        torch.testing.assert_close(weight_covariance(one), weight_covariance(made), rtol=0, atol=1e-12)
        for ours, theirs in zip(
            one.log_determinant_bounds(PRECISION, NOISE), made.log_determinant_bounds(PRECISION, NOISE), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


@nets
def test_bounds_on_the_log_determinant_hold_for_all_data(net: Net) -> None:
    joint = merge_posteriors([fitted(net, rows).posterior for rows in THIRDS])
    exact = net.information()
    for posterior in (joint, bounded(joint, 4, PRECISION, scale(net)), bounded(joint, None, PRECISION, scale(net))):
        lower, upper = posterior.log_determinant_bounds(PRECISION, scale(net))
        assert float(lower) <= exact <= float(upper)


def test_the_gram_matrix_is_that_of_the_stored_images() -> None:
    joint = merge_posteriors([fitted(NETS["several classes"], rows, torch.float32).posterior for rows in THIRDS])
    A = joint.images.double()
    torch.testing.assert_close(joint.unit_gram, A.T @ A, rtol=1e-14, atol=1e-14)


def test_more_actions_than_weights_fold_into_as_many_as_there_are_weights() -> None:
    net = make_net(3, num_outputs=2, num_data=40, width=1)  # 8 weights
    parts = [fitted(net, range(start, start + 10), num_actions=5).posterior for start in range(0, 40, 10)]
    joint = merge_posteriors(parts)
    folded = bounded(joint, None, PRECISION, NOISE)
    assert (joint.rank, folded.rank, folded.num_actions) == (20, 8, 20)
    torch.testing.assert_close(weight_covariance(folded), weight_covariance(joint), rtol=0, atol=1e-10)
    again = bounded(merge_posteriors([folded, parts[0]]), None, PRECISION, NOISE)
    assert (again.rank, again.num_actions) == (8, 25)


def test_images_in_single_precision_bring_the_rounding_of_single_precision() -> None:
    net = NETS["several classes"]
    coarse, fine = fitted(net, THIRDS[0], torch.float32).posterior, fitted(net, THIRDS[1]).posterior
    joint = merge_posteriors([fine, coarse])
    assert joint.images.dtype == torch.float32
    lost = (joint.images[:, : fine.rank].double() - fine.images).norm(dim=0)
    noise = relative_rounding(torch.float32) * joint.unit_rounding().diagonal()[: fine.rank]
    assert bool((lost > 0).all()) and bool((lost.square() < TOLERANCE * noise).all())


def test_unknown_and_known_rounding_are_both_kept() -> None:
    part = fitted(NETS["several classes"], THIRDS[0]).posterior
    plain = replace(part, rounding_gram=None)
    assert merge_posteriors([plain, plain]).rounding_gram is None
    both = merge_posteriors([part, plain]).unit_rounding()
    torch.testing.assert_close(both, torch.block_diag(part.unit_rounding(), part.unit_gram.diagonal().diag()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_four_shards_merged_and_compressed_get_nearly_what_one_fit_does(seed: int) -> None:
    problem, number = digits(seed), 50
    one = problem.laplace(num_actions=number)
    one.fit(problem.loader())
    merged = problem.laplace(num_actions=number)
    merged.fit(problem.loader(), shard=(1, 4))
    for k in (2, 3, 4):
        other = problem.laplace(num_actions=number)
        other.fit(problem.loader(), shard=(k, 4))
        merged.merge(other, max_rank=number)
    assert merged.posterior.rank == number
    assert problem.fraction(merged) >= 0.95 * problem.fraction(one)

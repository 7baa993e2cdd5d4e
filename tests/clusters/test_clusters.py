"""The one-epoch posterior: never below the exact one, equal to it with all actions, most of it with few."""

import itertools
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, jacrev, vmap

from ntk_iterncgp.clusters import clusters, grouping
from ntk_iterncgp.clusters.grouping import along, group, groups_for, most_curved
from ntk_iterncgp.fitting import cluster_run
from ntk_iterncgp.fitting.cluster_run import unfolded
from ntk_iterncgp.jacobian import rows as rows_of_prior
from ntk_iterncgp.jacobian.rows import DenseRows
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.linalg import factor
from ntk_iterncgp.linalg.factor import independent_columns
from tests.clusters_helpers import PRIOR_PRECISION, digits, joint_variance, make_net
from tests.laplace_helpers import MLP, ONE, SEVERAL, close, fitted, full_laplace, near_and_far, not_below, written_out
from tests.network_cases import NetworkCase, dense_jacobian

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
kinds = st.sampled_from([("classification", 2), ("classification", 4), ("regression", 1), ("regression", 3)])


# The guarantee


@pytest.mark.slow
@dtypes
@given(
    kind=kinds,
    seed=st.integers(0, 10**6),
    num_data=st.integers(2, 20),
    num_actions=st.integers(1, 25),
    cotangents=st.integers(1, 5),
    scale=st.sampled_from([0.3, 2.0, 8.0]),
    in_order=st.booleans(),
    max_epochs=st.sampled_from([None, 0.5, 0.9]),
)
def test_the_variance_is_never_below_the_exact_one_and_never_rises(
    dtype: torch.dtype,
    kind: tuple[str, int],
    seed: int,
    num_data: int,
    num_actions: int,
    cotangents: int,
    scale: float,
    in_order: bool,
    max_epochs: float | None,
) -> None:
    """Jointly over training inputs, new and far ones, for any number of groups and directions, through refinement."""
    net = make_net(seed, likelihood=kind[0], num_outputs=kind[1], num_data=num_data, scale=scale)
    x = net.near_and_far()
    exact = net.exact(x)
    la = net.laplace(dtype, num_actions=num_actions, cotangents=cotangents, max_epochs=max_epochs)
    loader = list(net.loader(dtype)) if in_order else net.loader(dtype)
    la.fit(loader)
    tolerance = (
        TOLERANCE[dtype]
        * float(la.prior_precision.reciprocal())
        * float(dense_jacobian(net.model, x).square().sum((1, 2)).max())
    )
    before, was_complete = joint_variance(la, x), max_epochs is None
    not_below(before, exact, tolerance / float(exact.abs().max()))
    for epochs in (0.4, 1.0, 2.0):
        la.refine(loader, epochs=epochs)
        after = joint_variance(la, x)
        not_below(after, exact, tolerance / float(exact.abs().max()))
        if was_complete or not in_order:  # of data that come in order, an unfinished sum may say more than a finished
            not_below(before, after, tolerance / float(after.abs().max()))
        before, was_complete = after, la._fit.state.clusters.passes[-1].is_complete


@dtypes
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("num_outputs", [2, 3, 7])
def test_contrasts_which_probabilities_are_made_of_have_no_less_variance_than_the_exact_ones(
    dtype: torch.dtype, subset: str, num_outputs: int
) -> None:
    """The accurate link asks for these C − 1 alone, and not for the outputs."""
    net = make_net(3, num_outputs=num_outputs, num_data=40)
    la, x = net.laplace(dtype, subset, num_actions=5), net.near_and_far()
    la.fit(net.loader(dtype))
    H = Softmax(num_outputs).contrasts(torch.device("cpu"))
    moments = (la._of_moments(x.to(dtype), lambda *of_some: of_some, h) for h in (H, None))
    contrasts, outputs = (torch.cat([covariance for _, covariance in parts]).double() for parts in moments)
    assert contrasts.shape == (len(x), num_outputs - 1, num_outputs - 1)
    close(contrasts, H.T @ outputs @ H, TOLERANCE[dtype])
    if subset == "all":
        blocks = net.exact(x).unflatten(0, (len(x), -1)).unflatten(2, (len(x), -1))
        for n in range(len(x)):
            not_below(contrasts[n], H.T @ blocks[n, :, n] @ H, TOLERANCE[dtype])


@pytest.mark.parametrize("case", [MLP, ONE, SEVERAL], ids=str)
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_with_an_action_for_each_datum_and_direction_it_is_the_exact_posterior(case: NetworkCase, subset: str) -> None:
    directions = case.num_outputs - (case.likelihood == "classification")
    la = fitted(case, subset, policy="clusters", cotangents=directions)
    exact, x = full_laplace(case, subset), near_and_far(case)
    close(la.predictive_moments(x)[1], exact.functional_variance(written_out(case, subset, x=x).new_J))
    assert la.report_.status == "exhausted" and la.report_.information_captured > 1 - 1e-9
    close(la.log_marginal_likelihood(), exact.log_marginal_likelihood())


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_refining_reaches_the_exact_posterior_and_then_stops(subset: str) -> None:
    case = MLP
    loader = case.loader(num_data=14, batch_size=7)
    la = fitted(case, subset, policy="clusters", num_actions=4, loader=loader)
    la.refine(loader, epochs=50)
    x = near_and_far(case)
    close(
        la.predictive_moments(x)[1],
        full_laplace(case, subset).functional_variance(written_out(case, subset, x=x).new_J),
    )
    assert la.report_.status == "exhausted" and la.report_.epochs < 30
    assert "no new action beyond rounding" in la.report_.advice and la.report_.information_captured > 1 - 1e-6


@dtypes
def test_more_actions_than_weights_are_kept_as_so_many_and_say_the_same(dtype: torch.dtype) -> None:
    net = make_net(2, num_data=40)
    la, loader = net.laplace(dtype, num_actions=30), net.loader(dtype)
    la.fit(loader)
    la.refine(loader, epochs=1)
    num_params, x = len(la.mean), net.near_and_far().to(dtype)
    groups = la._fit.state.clusters
    assert groups.rank > num_params == la.posterior.rank == la.report_.rank
    rows = torch.cat([rows.jacobian for rows in la._rows_at(x)])
    for precision in (0.05, 0.7, 30.0):
        la.prior_precision = precision
        found = la.functional_variance(rows).double()
        plain = unfolded(la.posterior, groups).conditioned(la.prior_precision, la._noise_scale)
        close(found, plain.covariance(DenseRows(rows[..., 0], rows)), 1e-9 if dtype == torch.float64 else 5e-4)
    la.prior_precision = PRIOR_PRECISION
    not_below(joint_variance(la, x), net.exact(x.double()), TOLERANCE[dtype])


def test_confident_networks_lose_nothing_to_tiny_probabilities() -> None:
    """Nothing is divided by a probability."""
    net = make_net(3, scale=25.0, num_data=12)
    with torch.no_grad():
        assert net.model(net.x).softmax(1).min() < 1e-12
    la = net.laplace(num_actions=12, cotangents=2)
    la.fit(net.loader())
    x = net.near_and_far()
    close(joint_variance(la, x), net.exact(x), 1e-4)
    not_below(joint_variance(la, x), net.exact(x))


# How much of it, for what


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "hidden", "activation", "least"),
    [
        (0, 16, nn.ReLU, {20: 0.72, 50: 0.81, 100: 0.89, 500: 0.95}),
        (3, 16, nn.ReLU, {20: 0.70, 50: 0.80, 100: 0.885, 500: 0.95}),
        (1, 32, nn.Tanh, {20: 0.60, 50: 0.715, 100: 0.83, 500: 0.93}),
    ],
)
def test_few_actions_get_most_of_the_exact_contraction_on_digits(
    seed: int, hidden: int, activation: type[nn.Module], least: dict[int, float]
) -> None:
    """About one epoch, whatever the number of actions."""
    net, fractions = digits(seed, hidden, activation), {}
    for B in least:
        la = net.laplace(num_actions=B)
        la.fit(net.loader())
        assert la.report_.epochs <= 4 / 3 + 1e-9 and la.report_.rank <= B  # less by those that are saturated
        fractions[B] = net.fraction(la)
    assert all(fractions[B] >= least[B] for B in least), fractions


@pytest.mark.parametrize("seed", range(4))
def test_more_actions_than_data_say_more_than_as_many(seed: int) -> None:
    """There are several directions of each datum to spend them on, and so many epochs as that takes are told before."""
    net = make_net(seed, num_data=20, num_outputs=6, width=8, scale=1.0)
    x = net.near_and_far()
    exact, variances = net.exact(x), []
    for B in (19, 20, 40, 80):
        la = net.laplace(num_actions=B)
        told = la.estimate_cost(net.loader())
        la.fit(net.loader())
        assert 0.8 * B <= la.report_.rank <= B == told.num_actions
        assert la.report_.epochs == pytest.approx(told.epochs, rel=0.1)
        variances.append(float(joint_variance(la, x).trace()))
        not_below(joint_variance(la, x), exact)
    assert variances[1] <= variances[0] + 1e-9
    assert variances[2] < 0.95 * variances[1] and variances[3] < variances[2]


@dtypes
@pytest.mark.parametrize("cotangents", [1, 2])
def test_combinations_of_many_groups_say_more_than_as_many_groups(dtype: torch.dtype, cotangents: int) -> None:
    """As many actions, of unit noise, in the span of the groups': less variance in all, and not below the exact one."""
    net = make_net(6, num_data=120)
    x = net.near_and_far()
    settings = {"num_actions": 6, "cotangents": cotangents}
    few, many = net.laplace(dtype, **settings), net.laplace(dtype, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "GROUPS_PER_ACTION", 1)
        few.fit(net.loader(dtype))
    many.fit(net.loader(dtype))
    assert few.posterior.rank == many.posterior.rank == 6 * cotangents
    groups = many._fit.state.clusters
    assert groups.passes[0].num_groups == 48
    close(many.posterior.noise_gram, torch.eye(6 * cotangents, dtype=torch.float64), 1e-9)
    all_groups = replace(groups, passes=[replace(groups.passes[0], num_kept=None)], latest=None)
    whole = unfolded(many.posterior, all_groups)
    assert whole.rank > many.posterior.rank
    traces = [
        float((p.factor(many.prior_precision, many._noise_scale).solve(p.gram(many.prior_precision))).trace())
        for p in (few.posterior, many.posterior, whole)
    ]
    assert traces[0] < traces[1] < traces[2]
    variances = [joint_variance(la, x) for la in (few, many)]
    for variance in variances:
        not_below(variance, net.exact(x), TOLERANCE[dtype])
    rows = torch.cat([rows.jacobian for rows in many._rows_at(x.to(dtype))])
    more = whole.conditioned(many.prior_precision, many._noise_scale).covariance(DenseRows(rows[..., 0], rows))
    not_below(variances[1].diagonal().diag(), torch.cat([block.diagonal() for block in more]).diag(), TOLERANCE[dtype])


def test_how_many_groups_there_are_depends_on_data_and_memory() -> None:
    assert groups_for(20, 10**6, 1000) == 160
    assert groups_for(200, 10**6, 1000) == 384
    assert groups_for(1000, 10**6, 1000) == 1000
    assert groups_for(20, 50, 1000) == 50
    assert groups_for(20, 10**6, 2**24) == 32
    assert groups_for(20, 10**6, 2**30) == 20


def test_a_budget_for_a_part_of_the_pass_gets_as_many_groups_as_actions() -> None:
    net = make_net(6, num_data=120)
    whole = net.laplace(num_actions=6)
    whole.fit(net.loader())
    enough = whole.report_.epochs
    assert 1 / 3 + grouping.LOOKS <= enough < 4 / 3
    for max_epochs, groups in ((enough - 0.1, 6), (enough, 48), (4 / 3, 48)):
        la = net.laplace(num_actions=6, max_epochs=max_epochs)
        la.fit(net.loader())
        assert la._fit.state.clusters.passes[0].num_groups == groups and la.report_.rank <= 6


@pytest.mark.slow
def test_refining_clusters_is_cheaper_than_products_from_nothing() -> None:
    net, loader = digits(0), digits(0).loader()
    la = net.laplace(num_actions=500)
    la.fit(loader)
    while net.fraction(la) < 0.97:
        la.refine(loader, epochs=1.0)
    assert la.report_.epochs < 5
    products = net.laplace(policy="curvature_residual", num_actions=8)
    products.fit(loader)
    assert products.report_.epochs > 2 * la.report_.epochs and net.fraction(products) < 0.97


def test_saturated_data_are_left_out_of_the_first_sweep_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are hundreds here, and hardly change the variance, which stays above the exact one."""
    net, loader = digits(0), digits(0).loader()
    with torch.no_grad():
        net = replace(net, model=deepcopy(net.model))
        net.model[2].weight *= 3
        net.model[2].bias *= 3
    variances, epochs = [], []
    for threshold in (0.0, grouping.SATURATED):
        monkeypatch.setattr(grouping, "SATURATED", threshold)
        la = net.laplace(num_actions=100)
        la.fit(loader)
        variances.append(la.functional_variance(net.new_J.float()))
        epochs.append(la.report_.epochs)
    assert epochs[0] == pytest.approx(1 / 3 + grouping.LOOKS, abs=1e-3) and epochs[1] < epochs[0] - 0.1
    whole, spared = (v.diagonal(dim1=1, dim2=2).sum() for v in variances)
    assert 0.999 * whole < spared < 1.02 * whole
    la.refine(loader, epochs=1.0)
    assert la.report_.epochs == pytest.approx(epochs[1] + 1)


def test_regression_differentiates_every_output_of_every_datum() -> None:
    net = make_net(3, likelihood="regression", num_data=200)
    la = net.laplace(num_actions=5)
    la.fit(net.loader())
    outputs = net.model(net.x).shape[1]
    assert outputs == 3 and la.report_.epochs == pytest.approx(1 / 3 + (1 + 2 * outputs) / 3)
    assert la.posterior.rank == 5


# The meter


@pytest.mark.parametrize("case", [("classification", 3), ("regression", 2)], ids=["classification", "regression"])
def test_the_meter_is_a_lower_bound_on_the_fraction_of_the_information(case: tuple[str, int]) -> None:
    for seed in range(5):
        net = make_net(seed, likelihood=case[0], num_outputs=case[1])
        la, loader = net.laplace(num_actions=4), net.loader()
        la.fit(loader)
        for _ in range(3):
            lower = float(la.posterior.log_determinant_bounds(la.prior_precision, la._noise_scale)[0])
            assert 0 < la.report_.information_captured <= lower / net.information() + 1e-12 <= 1 + 1e-9
            assert la.report_.trace_is_exact and "at least" in str(la.report_)
            la.refine(loader, epochs=1)


def test_the_meter_is_of_what_max_rank_leaves() -> None:
    net = make_net(0, num_data=40)
    la, loader = net.laplace(num_actions=20, max_rank=3), net.loader()
    la.fit(loader)
    la.refine(loader, epochs=2)
    lower = float(la.posterior.log_determinant_bounds(la.prior_precision, la._noise_scale)[0])
    assert la.report_.rank == 3 and la.report_.information_captured <= lower / net.information() < 0.9


@pytest.mark.parametrize("max_epochs", [None, 0.6])
def test_the_history_rises_in_epochs_and_information(max_epochs: float | None) -> None:
    net = make_net(1, num_data=40)
    la, loader = net.laplace(num_actions=9, max_epochs=max_epochs), net.loader(batch_size=3)
    la.fit(loader)
    for _ in range(3):
        la.refine(loader, epochs=0.7)
    history = la.report_.history
    assert len(history) >= 5
    for earlier, later in itertools.pairwise(history):
        assert later.epochs > earlier.epochs and later.seconds >= earlier.seconds
        assert later.information_captured >= earlier.information_captured - 1e-12
    assert history[-1].information_captured == pytest.approx(la.report_.information_captured, rel=1e-12)
    assert history[-1].epochs == la.report_.epochs


@pytest.mark.slow
def test_a_large_trace_is_estimated_to_fifteen_percent_on_digits_and_said_to_be() -> None:
    for seed in (0, 3):
        net = digits(seed)
        la = net.laplace(num_actions=5)
        la.fit(net.loader())
        assert float(la.posterior.curvature_diagonal.sum()) == pytest.approx(net.curvature_trace, rel=0.15)
        assert not la.report_.trace_is_exact and "an estimated" in str(la.report_)
        assert 0 < la.report_.information_captured < 1


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [False, True], ids=["visited", "in order"])
def test_the_estimated_trace_is_unbiased(monkeypatch: pytest.MonkeyPatch, in_order: bool) -> None:
    net = make_net(2, num_data=200)
    loader = list(net.loader(batch_size=50)) if in_order else net.loader(batch_size=50)
    exact = net.laplace(num_actions=1)
    exact.fit(loader)
    monkeypatch.setattr(rows_of_prior, "EXACT_TRACE_ROWS", 0)
    monkeypatch.setattr(rows_of_prior, "MAX_SAMPLED", 20)
    monkeypatch.setattr(rows_of_prior, "MIN_SAMPLED", 20)
    estimates = []
    for seed in range(60):
        of_seed = partial(rows_of_prior.curvature_diagonal, seed=seed)
        monkeypatch.setattr(cluster_run, "curvature_diagonal", of_seed)
        la = net.laplace(num_actions=1)
        la.fit(loader)
        estimates.append(float(la.posterior.curvature_diagonal.sum()))
    values = torch.tensor(estimates)
    truth, error = float(exact.posterior.curvature_diagonal.sum()), float(values.std() / 60**0.5)
    assert 0 < error < 0.05 * truth
    assert abs(float(values.mean()) - truth) < 3 * error


# The parts


@pytest.mark.parametrize("cotangents", [1, 2])
@pytest.mark.parametrize("in_order", [False, True], ids=["visited", "in order"])
def test_images_and_noise_are_those_of_the_directions_where_data_are_in_several_groups(
    cotangents: int, in_order: bool
) -> None:
    """A = JᵀWU and R = UᵀWU with U written out, between all groups of all passes."""
    net = make_net(4, num_data=40, num_outputs=5)
    la, loader = net.laplace(num_actions=3, cotangents=cotangents), net.loader()
    loader = list(loader) if in_order else loader
    la.fit(loader)
    la.refine(loader, epochs=(1 + 2 * cotangents) / 3)
    clusters = la._fit.state.clusters
    assert len(clusters.passes) == 2
    first = clusters.passes[0]
    in_groups = {(int(row), int(place)) for row, place in zip(first.rows, first.labels, strict=True)}
    assert (len({row for row, _ in in_groups}) < len(in_groups)) == (cotangents == 1)
    columns = []
    for done in clusters.passes:
        for u in done.directions:
            U = torch.zeros(40, 5, done.num_groups, dtype=torch.float64)
            for row, place, direction in zip(done.rows.tolist(), done.labels.tolist(), u, strict=True):
                U[row, :, place] += direction
            columns.append(U.flatten(0, 1))
    U, W = torch.cat(columns, 1), net.curvature()
    close(clusters.noise_gram(), U.T @ W @ U, 1e-9)
    close(clusters.group_images(), dense_jacobian(net.model, net.x).flatten(0, 1).T @ W @ U, 1e-9)


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_directions_are_orthogonal_in_the_curvature_and_their_parts_of_it_add_up(scale: float) -> None:
    latent = scale * torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    likelihood = Softmax(6).for_prior_variance(1e20)
    U = torch.stack([likelihood.cotangent(latent, j) for j in range(5)], 2)
    gram = U.mT @ likelihood.curvature(latent, U)
    size = gram.diagonal(dim1=1, dim2=2).sqrt()
    assert float((gram / size[:, None] / size[..., None] - torch.eye(5)).abs().max()) < 1e-6
    parts = torch.stack([along(likelihood, latent, U[..., j]) for j in range(5)])
    traces = likelihood.curvature(latent, torch.eye(6, dtype=torch.float64).expand(20, -1, -1))
    close(parts.sum(0), traces.diagonal(dim1=1, dim2=2).sum(1), 1e-9)


def test_directions_go_where_the_curvature_is() -> None:
    """An uncertain datum may have several, another none, and what is next to nothing is left out below the limit."""
    parts = torch.tensor([[0.5, 0.4, 0.3], [0.6, 0.1, 0.0], [0.2, 0.1, 0.1], [0.15, 0.1, 0.01]])
    rows, directions = most_curved(parts, 4, 4)
    assert list(zip(rows.tolist(), directions.tolist(), strict=True)) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    saturated = torch.cat([parts[:2], 1e-6 * parts[2:].repeat(4, 1)])
    rows, directions = most_curved(saturated, 10, 10)
    assert list(zip(rows.tolist(), directions.tolist(), strict=True)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    rows, directions = most_curved(torch.ones(5, 3), 2, 5)  # all are alike
    assert rows.tolist() == list(range(5)) and directions.tolist() == [0] * 5


def test_the_same_datum_is_found_in_two_lists_as_often_as_it_is_there() -> None:
    left, right = torch.tensor([0, 2, 2, 5, 7]), torch.tensor([1, 2, 2, 2, 5, 8])
    i, j = clusters.same_datum(left, right)
    expected = [(a, b) for a in range(5) for b in range(6) if left[a] == right[b]]
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == expected


def test_grouping_is_a_partition_without_gaps_largest_weight_first() -> None:
    generator = torch.Generator().manual_seed(0)
    features, directions = torch.randn(50, 4, generator=generator), torch.randn(50, 3, generator=generator)
    weights = torch.rand(50, generator=generator)
    for number in (1, 2, 7, 49, 50, 80):
        labels = group(features, directions, weights, number, torch.Generator().manual_seed(1))
        assert labels.shape == (50,) and labels.unique().tolist() == list(range(int(labels.max()) + 1))
        assert int(labels.max()) < min(number, 50)
        totals = torch.zeros(int(labels.max()) + 1).index_add_(0, labels, weights)
        assert bool((totals.diff() <= 1e-6).all())


def test_data_that_are_alike_are_in_one_group_and_saturated_ones_get_none_of_their_own() -> None:
    corners = torch.tensor([[0.0, 5.0], [5.0, 0.0], [-5.0, -5.0]]).repeat(10, 1)
    labels = group(corners, torch.ones(30, 2), torch.ones(30), 3, torch.Generator().manual_seed(2))
    for corner in range(3):
        assert len(labels[corner::3].unique()) == 1
    spread = torch.cat([corners[:20], 100 * torch.randn(10, 2, generator=torch.Generator().manual_seed(0))])
    weights = torch.cat([torch.ones(20), torch.full((10,), 1e-9)])
    labels = group(spread, torch.ones(30, 2), weights, 3, torch.Generator().manual_seed(2))
    assert set(labels[20:].tolist()) <= set(labels[:20].tolist())


@pytest.mark.parametrize("block", [2, 128])
def test_dependent_and_empty_columns_are_left_out(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factor, "PIVOT_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    columns[:, 2], columns[:, 3] = 0, 1e-9 * (columns[:, 0] - 2 * columns[:, 1])
    kept = independent_columns(columns.T @ columns)
    assert kept.tolist() == [0, 1, 4]


def test_gradients_of_each_datum_are_those_of_plain_differentiation() -> None:
    from ntk_iterncgp.jacobian.autograd import Jacobian

    net = make_net(4)
    params = {name: p.detach() for name, p in net.model.named_parameters()}
    rows = vmap(jacrev(lambda p, x: functional_call(net.model, p, (x[None],))[0]), (None, 0))(params, net.x)
    J = torch.cat([rows[name].flatten(2) for name in params], 2)
    cotangents = torch.randn(len(net.x), 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    each = Jacobian(net.model).vjp_each(net.x, cotangents)
    close(each, torch.einsum("nck,ncp->nkp", cotangents, J), 1e-12)
    assert PRIOR_PRECISION != 1  # so that a forgotten prior shows

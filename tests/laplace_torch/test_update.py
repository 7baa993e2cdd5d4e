"""`update` and `merge`: more data without the old, against the exact posterior of all data; and what is refused."""

import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from ntk_iterncgp.data.sharding import shard_of
from ntk_iterncgp.laplace_torch import updating
from ntk_iterncgp.persistence.checkpoint import Checkpoint
from tests.clusters_helpers import PRIOR_PRECISION, Net, digits, joint_variance, make_net
from tests.laplace_helpers import BY_NAME, ENOUGH, MLP, SEVERAL, close, fitted, not_below, training, unfitted
from tests.network_cases import NetworkCase, dense_jacobian

NETS = {
    "several classes": make_net(0, num_data=24),
    "one output": make_net(1, num_outputs=1, num_data=24, likelihood="regression"),
    "several outputs": make_net(2, num_data=24, likelihood="regression"),
}
nets = pytest.mark.parametrize("net", NETS.values(), ids=NETS.keys())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
OLD, NEW = range(14), range(14, 24)


def part(net: Net, rows: range, dtype: torch.dtype = torch.float64) -> DataLoader:
    return DataLoader(Subset(net.dataset(dtype), rows), batch_size=4)


def laplace_of(net: Net, dtype: torch.dtype = torch.float64, rows: range = OLD, **settings: Any) -> Any:
    la = net.laplace(dtype, **{"num_actions": 4, **settings})
    la.dtype = dtype
    la.fit(part(net, rows, dtype))
    return la


def updated(net: Net, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    la = laplace_of(net, dtype, **settings)
    la.update(part(net, NEW, dtype))
    return la


# --- what it must be ----------------------------------------------------------------------------------------------


@nets
@dtypes
@pytest.mark.parametrize("max_rank", [None, 5])
def test_variance_never_falls_below_the_exact_posterior_of_all_data(
    net: Net, dtype: torch.dtype, max_rank: int | None
) -> None:
    la, x = updated(net, dtype, max_rank=max_rank), net.near_and_far()
    assert la.posterior.rank == (8 if max_rank is None else 5)
    not_below(joint_variance(la, x), net.exact(x), 1e-9 if dtype == torch.float64 else 1e-5)


@nets
@dtypes
def test_an_update_lowers_the_variance_at_every_input(net: Net, dtype: torch.dtype) -> None:
    la, x = laplace_of(net, dtype), net.near_and_far()
    before = joint_variance(la, x)
    la.update(part(net, NEW, dtype))
    after = joint_variance(la, x)
    not_below(before, after, 1e-9 if dtype == torch.float64 else 1e-5)
    assert bool((after.diagonal() < before.diagonal()).all())


def test_with_max_rank_the_variance_of_the_weights_never_rises_on_average_and_the_docstring_promises_no_more() -> None:
    net = make_net(5, num_data=60, likelihood="regression", width=8)
    la, largest = net.laplace(num_actions=12, max_rank=6), 0.0
    everywhere = torch.eye(la.n_params).double()[:, None]  # (P, 1, P)
    before = torch.full((la.n_params,), torch.inf).double()
    for start in range(0, 60, 6):
        la.update(part(net, range(start, start + 6)))
        variances = la.functional_variance(everywhere)[:, 0, 0]
        assert la.posterior.rank == 6 and float(variances.sum()) <= float(before.sum()) * (1 + 1e-9)
        largest, before = max(largest, float((variances / before).max())), variances
    assert largest > 1.001
    assert "may, where what was known about it made room" in (type(la).update.__doc__ or "")


@nets
def test_with_actions_for_all_data_update_is_the_exact_posterior_of_a_fit_from_scratch(net: Net) -> None:
    settings = {"num_actions": 1000, "cotangents": 2 if net.likelihood == "classification" else None}
    la, x = updated(net, **settings), net.near_and_far()
    close(joint_variance(la, x), net.exact(x), 1e-6)
    assert la.report_.information_captured == pytest.approx(1, abs=1e-4)


@nets
def test_evidence_and_meter_are_those_of_all_data(net: Net) -> None:
    la, whole = updated(net), net.laplace(num_actions=8)
    whole.fit(net.loader())
    assert (la.n_data, la.loss) == (24, pytest.approx(whole.loss))
    lower, upper = la.posterior.log_determinant_bounds(la.prior_precision, la._noise_scale)
    assert float(lower) <= net.information() <= float(upper)
    assert la.report_.information_captured == pytest.approx(float(lower / upper))
    assert float(la.log_likelihood) == pytest.approx(float(whole.log_likelihood))


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("policy", ["clusters", "curvature_residual"])
def test_all_flavours_and_policies_can_be_updated(subset: str, policy: str) -> None:
    net = NETS["several classes"]
    settings = {"subset": subset, "policy": policy, "num_actions": 4}
    la, first, second = (net.laplace(**settings) for _ in range(3))
    la.fit(part(net, OLD))
    la.update(part(net, NEW))
    first.fit(part(net, OLD))
    second.fit(part(net, NEW))
    second.merge(first.state_dict())
    x = net.near_and_far()
    close(joint_variance(la, x), joint_variance(second, x), 1e-9)
    assert la.posterior.rank == 8


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize(
    "case", [BY_NAME["regression with one output"], SEVERAL], ids=["one output", "several outputs"]
)
def test_a_refined_mean_of_a_regression_is_that_of_all_data(case: NetworkCase, subset: str) -> None:
    data = case.dataset(14, 1, torch.float64)
    settings = {"mean": "refined", "num_actions": ENOUGH, "prior_mean": 0.1}
    whole = fitted(case, subset, loader=DataLoader(data, 7), **settings)
    la = fitted(case, subset, loader=DataLoader(Subset(data, range(5)), 7), **settings)
    la.update(DataLoader(Subset(data, range(5, 14)), 7))
    x = case.new_inputs()
    for precision in (1.0, 3.0):
        la.prior_precision = whole.prior_precision = precision
        for ours, theirs in zip(la.predictive_moments(x), whole.predictive_moments(x), strict=True):
            close(ours, theirs, 1e-6)
        close(la.log_marginal_likelihood(), whole.log_marginal_likelihood(), 1e-6)


def test_fit_without_override_is_an_update_and_an_update_without_a_fit_is_one() -> None:
    net, x = NETS["several classes"], NETS["several classes"].near_and_far()
    one, other = net.laplace(num_actions=4), net.laplace(num_actions=4)
    one.fit(part(net, OLD), override=False)
    one.fit(part(net, NEW), override=False)
    other.update(part(net, OLD))
    other.update(part(net, NEW))
    assert torch.equal(joint_variance(one, x), joint_variance(other, x)) and one.n_data == 24


def test_the_order_of_merging_does_not_matter() -> None:
    net, thirds = NETS["several classes"], (range(9), range(9, 12), range(12, 24))
    fits = [laplace_of(net, rows=rows) for rows in thirds]
    states, found = [la.state_dict() for la in fits], []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        la = net.laplace()
        la.load_state_dict(states[order[0]])
        for i in order[1:]:
            la.merge(states[i])
        found.append(joint_variance(la, net.near_and_far()))
        assert la.n_data == 24 and set(la.data_seen.tolist()) == {int(s["data_seen"]) for s in states}
    for other in found[1:]:
        close(other, found[0], 1e-12)


def test_a_mapping_can_be_updated() -> None:
    case = BY_NAME["mapping with keys of its own"]
    data = case.dataset(12, 1, torch.float64)
    loaders = [DataLoader(Subset(data, rows), 3, collate_fn=case.collate) for rows in (range(6), range(6, 12))]
    la = fitted(case, loader=loaders[0], policy="clusters", num_actions=4)
    before = la.predictive_moments(case.new_inputs())[1]
    la.update(loaders[1])
    assert bool((la.predictive_moments(case.new_inputs())[1] < before).diagonal(dim1=1, dim2=2).all())


def test_the_rank_stays_bounded_and_each_update_takes_its_share_of_the_actions() -> None:
    problem = digits(0)
    la = problem.laplace(num_actions=20, max_rank=20)
    asked = []
    for start in range(0, 400, 100):
        rows = slice(start, start + 100)
        la.update(DataLoader(TensorDataset(problem.x[rows], problem.y[rows]), 50))
        asked.append((la.n_data, la.posterior.rank))
    assert asked == [(100, 20), (200, 20), (300, 20), (400, 20)]


@pytest.mark.parametrize("max_rank", [None, 6])
def test_parts_are_summed_when_somebody_looks_or_they_are_many(max_rank: int | None) -> None:
    net = NETS["several classes"]
    la, watched = (net.laplace(num_actions=6, max_rank=max_rank) for _ in range(2))
    number_of_parts = []
    for start in range(0, 24, 2):
        for each in (la, watched):
            each.update(part(net, range(start, start + 2)))
        most = max_rank or len(watched.posterior.images)
        assert watched.posterior.rank <= most and sum(each.rank for each in la._parts) <= 2 * most
        number_of_parts.append(len(la._parts))
    assert max(number_of_parts) > 2
    assert la.report_.rank == la.report_.history[-1].rank == la.posterior.rank == watched.posterior.rank
    assert len(la.report_.history) < len(watched.report_.history)
    if max_rank is None:
        close(joint_variance(la, net.near_and_far()), joint_variance(watched, net.near_and_far()), 1e-9)


def test_new_data_are_differentiated_in_the_dtype_of_the_old() -> None:
    net = NETS["several classes"]
    la = laplace_of(net, torch.float32)
    assert la.posterior.images.dtype == torch.float32
    la.dtype = None  # few data alone would be differentiated in float64
    la.update(part(net, NEW, torch.float32))
    assert la.posterior.images.dtype == torch.float32 and la.dtype is None


# --- what it says -------------------------------------------------------------------------------------------------


def test_the_report_goes_on() -> None:
    net = NETS["several classes"]
    la = laplace_of(net)
    first = la.report_
    la.update(part(net, NEW))
    report = la.report_
    assert report.history[: len(first.history)] == first.history and len(report.history) == len(first.history) + 1
    assert report.rank == 8 and report.seconds > first.seconds and 0.3 < report.epochs < 2
    assert report.history[-1].information_captured == report.information_captured
    assert "update(loader)" in report.advice


def test_a_merged_posterior_is_saved_with_what_it_has_seen(tmp_path: Path) -> None:
    net = NETS["several classes"]
    la = updated(net)
    torch.save(la.state_dict(), tmp_path / "posterior.pt")
    other = net.laplace()
    other.load_state_dict(torch.load(tmp_path / "posterior.pt", weights_only=True))
    close(joint_variance(other, net.near_and_far()), joint_variance(la, net.near_and_far()), 1e-12)
    assert torch.equal(other.data_seen, la.data_seen) and len(la.data_seen) == 2
    with pytest.raises(ValueError, match="one of data that are in this posterior already"):
        other.merge(laplace_of(net, rows=NEW))
    other.update(part(net, range(3)))  # a loaded posterior can be updated, and then has a report of that
    assert other.n_data == 27 and other.report_.rank == other.posterior.rank


def test_data_given_twice_count_twice_and_a_warning_says_so() -> None:
    net = NETS["several classes"]
    la = laplace_of(net)
    with pytest.warns(UserWarning, match="in the posterior already, and count twice"):
        la.update(DataLoader(Subset(net.dataset(), OLD), batch_size=7, shuffle=True))
    assert la.n_data == 28


def test_data_are_known_in_any_order_and_by_every_label() -> None:
    net = NETS["several classes"]
    data = net.dataset()
    exchanged = data.tensors[1].clone()
    first, second = next((i, j) for i in range(24) for j in range(24) if exchanged[i] != exchanged[j])
    exchanged[[first, second]] = exchanged[[second, first]]
    loaders = [
        DataLoader(data, 5),
        DataLoader(Subset(data, range(23, -1, -1)), 4),
        DataLoader(TensorDataset(net.x, exchanged), 5),
        DataLoader(Subset(data, range(23)), 5),
    ]
    seen = []
    for loader in loaders:
        la = net.laplace(num_actions=2)
        la.fit(loader)
        seen.append(int(la.data_seen))
    assert seen[0] == seen[1] and len(set(seen)) == 3
    by_products = net.laplace(num_actions=2, policy="curvature_residual")
    by_products.fit(loaders[0])
    assert int(by_products.data_seen) == seen[0]
    by_products.refine(loaders[0], epochs=2)
    assert int(by_products.data_seen) == seen[0]


# --- what is refused, and leaves everything as it was -------------------------------------------------------------


def test_refine_and_attribution_are_for_a_single_fit() -> None:
    net = NETS["several classes"]
    la = updated(net)
    with pytest.raises(RuntimeError, match=r"refine must follow a fit in this process; got .* or an updated one"):
        la.refine(part(net, NEW), epochs=1)
    with pytest.raises(RuntimeError, match="attribution must follow a fit with policy='clusters'"):
        la.attribution(net.x[:2])


@pytest.mark.parametrize("call", [lambda la, net: la.update(part(net, NEW)), lambda la, net: la.merge(la)])
def test_a_refined_mean_of_a_classifier_is_refused_before_any_work(call: Callable[[Any, Net], None]) -> None:
    net = NETS["several classes"]
    la = laplace_of(net, mean="refined")
    with pytest.raises(ValueError, match="`mean` must be 'network' to add data to a classifier"):
        call(la, net)


def test_a_model_that_has_changed_is_refused() -> None:
    net = NETS["several classes"]
    la = laplace_of(net)
    with torch.no_grad():
        la.model[0].weight += 1
    for call in (lambda: la.update(part(net, NEW)), lambda: la.merge(la.state_dict())):
        with pytest.raises(RuntimeError, match="must have the weights it was fitted with"):
            call()


@pytest.mark.parametrize("settings", [{}, {"policy": "exact"}], ids=["clusters", "exact"])
def test_inputs_of_the_wrong_width_are_refused_with_the_model_s_own_words(settings: dict[str, Any]) -> None:
    net = NETS["several outputs"]
    la = net.laplace(torch.float32, num_actions=4, **settings)
    la.fit(part(net, OLD, torch.float32))
    assert la.posterior.images.dtype == torch.float64  # in which the model itself does not compute
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(4x5 and 3x4\)"):
        la.update([(torch.randn(4, 5), torch.randn(4, 3))])
    assert la.n_data == 14


def test_fits_of_another_model_likelihood_or_prior_mean_are_refused() -> None:
    net = NETS["several classes"]
    la, x = laplace_of(net), net.near_and_far()
    before = joint_variance(la, x)
    others: list[tuple[Any, str]] = [
        (laplace_of(make_net(7, num_data=24), rows=NEW), "must belong to this model; got one of other weights"),
        (laplace_of(make_net(0, num_data=24, width=5), rows=NEW), "must have the parameters"),
        (laplace_of(NETS["several outputs"], rows=NEW), "must have the likelihood 'classification'; got 'regression'"),
        (laplace_of(net, rows=NEW, subset="last_layer"), "must have the flavour"),
        (laplace_of(net, rows=NEW, mean="refined"), "must have the mean_mode"),
        (laplace_of(net, rows=NEW, prior_mean=0.2), r"must have the prior_mean 0; got 0\.2"),
        (la, "one of data that are in this posterior already, and would count twice"),
    ]
    for other, message in others:
        with pytest.raises(ValueError, match=message):
            la.merge(other)
    assert torch.equal(joint_variance(la, x), before) and la.n_data == 14


@pytest.mark.parametrize("other", ["posterior.safetensors", None, 3, nn.Linear(1, 1)], ids=str)
def test_what_is_no_posterior_is_refused(other: object) -> None:
    with pytest.raises(TypeError, match="`other` must be a fitted Laplace object or its state_dict"):
        laplace_of(NETS["several classes"]).merge(other)


def test_an_unfitted_posterior_and_a_damaged_one_are_refused() -> None:
    net = NETS["several classes"]
    la = laplace_of(net)
    with pytest.raises((RuntimeError, AttributeError), match="fit"):
        la.merge(net.laplace())
    with pytest.raises((RuntimeError, AttributeError), match="fit"):
        net.laplace().merge(la)
    damaged = laplace_of(net, rows=NEW).state_dict()
    damaged["posterior"] = {**damaged["posterior"], "noise_gram": torch.eye(2).double()}
    with pytest.raises(ValueError, match="The noise_gram of a saved posterior must be whole"):
        la.merge(damaged)
    with pytest.raises(ValueError, match="data_seen of a saved posterior must be whole"):
        la.merge({**laplace_of(net, rows=NEW).state_dict(), "data_seen": torch.zeros(1)})
    with pytest.raises(ValueError, match="`max_rank` must be a whole number"):
        la.merge(laplace_of(net, rows=NEW), max_rank=0)
    assert la.n_data == 14


def test_a_posterior_of_an_earlier_version_does_not_say_what_it_has_seen_and_is_merged() -> None:
    net = NETS["several classes"]
    la, other = laplace_of(net), laplace_of(net, rows=NEW).state_dict()
    del other["data_seen"]
    la.merge(other)
    assert la.n_data == 24 and len(la.data_seen) == 1


class Interrupting(TensorDataset):
    """Sends Ctrl-C at the reading of which the number is given."""

    reading, at = 0, -1

    @staticmethod
    def raise_at_once(*_: object) -> None:
        raise KeyboardInterrupt

    def __getitem__(self, i: int) -> Any:
        Interrupting.reading += 1
        if Interrupting.reading == Interrupting.at:
            signal.raise_signal(signal.SIGINT)
        return super().__getitem__(i)


@pytest.mark.parametrize("when", ["at the first batch", "in the forward sweep", "in the backward sweep"])
def test_after_ctrl_c_the_earlier_posterior_stays(when: str) -> None:
    net = NETS["several classes"]
    la, x = laplace_of(net), net.near_and_far()
    before, report, data = joint_variance(la, x), la.report_, Interrupting(net.x[14:], net.y[14:])
    Interrupting.reading, Interrupting.at = 0, -1
    counting = laplace_of(net)
    counting.update(DataLoader(data, 2))
    total = Interrupting.reading
    Interrupting.reading = 0
    Interrupting.at = {"at the first batch": 1, "in the forward sweep": 16, "in the backward sweep": total - 6}[when]
    with warnings.catch_warnings(), pytest.raises(KeyboardInterrupt):
        warnings.simplefilter("error")
        la.update(DataLoader(data, 2))
    assert torch.equal(joint_variance(la, x), before) and la.n_data == 14 and la.report_ == report
    Interrupting.at = -1
    la.update(DataLoader(data, 2))
    assert torch.equal(joint_variance(la, x), joint_variance(counting, x))


@pytest.mark.parametrize("broken", ["bounded", "merge_posteriors", "_report"])
def test_on_failure_the_earlier_posterior_stays(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = NETS["several classes"]
    la, other, x = laplace_of(net), laplace_of(net, rows=NEW), net.near_and_far()
    before = joint_variance(la, x)

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(updating, broken, fail)
    with pytest.raises(RuntimeError, match="no"):
        la.merge(other)
    assert torch.equal(joint_variance(la, x), before) and la.n_data == 14 and len(la.data_seen) == 1
    assert la._fit is not None


def test_what_fails_when_parts_are_summed_is_summed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = NETS["several classes"], NETS["several classes"].near_and_far()
    la = updated(net)
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(updating, "bounded", Interrupting.raise_at_once)
        la(x)
    assert torch.equal(joint_variance(la, x), joint_variance(updated(net), x)) and la.n_data == 24


def test_what_does_not_fit_in_memory_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    net = NETS["several classes"]
    la, other = laplace_of(net), laplace_of(net, rows=NEW)
    monkeypatch.setattr(updating, "available_bytes", lambda device: 100)
    with pytest.raises(MemoryError, match="Use max_rank, which bounds the number of actions; this would be 8 of 31"):
        la.merge(other)


def test_an_update_that_was_stopped_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    net, data = NETS["several classes"], Interrupting(NETS["several classes"].x[14:], NETS["several classes"].y[14:])
    said: list[str] = []
    whole, la, x = updated(net), laplace_of(net), net.near_and_far()
    Interrupting.reading, Interrupting.at = 0, -1
    counting = laplace_of(net)
    counting.update(DataLoader(data, 4))
    total, Interrupting.reading = Interrupting.reading, 0
    Interrupting.at = total - 4
    checkpoint = Checkpoint(tmp_path / "saved", every_seconds=0, say=said.append)
    with pytest.raises(KeyboardInterrupt):
        la.update(DataLoader(data, 4), checkpoint=checkpoint)
    Interrupting.at = -1
    la.update(DataLoader(data, 4), checkpoint=checkpoint)
    assert said and "Going on with 'update'" in said[-1]
    close(joint_variance(la, x), joint_variance(whole, x), 1e-12)


# --- shards -------------------------------------------------------------------------------------------------------


def rows_of(loader: Any) -> list[float]:
    return torch.cat([batch[0][:, 0] for batch in loader]).tolist()


LOADERS: dict[str, Callable[[Tensor], Any]] = {
    "in order": lambda x: DataLoader(TensorDataset(x, x), 4),
    "shuffled": lambda x: DataLoader(TensorDataset(x, x), 4, shuffle=True),
    "a part": lambda x: DataLoader(Subset(TensorDataset(torch.cat([x, x + 99]), torch.cat([x, x])), range(11)), 4),
    "drawn": lambda x: DataLoader(
        TensorDataset(x, x), 4, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 11, 11, replacement=False)
    ),
    "batches of its own": lambda x: DataLoader(TensorDataset(x, x), batch_sampler=[[i] for i in range(11)]),
    "a list": lambda x: [(part, part) for part in x.split(4)],
    "a list of mappings": lambda x: [{0: part, "labels": part, "mode": "plain"} for part in x.split(3)],
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("number", [1, 2, 3, 11])
def test_shards_are_disjoint_and_all_of_the_data(kind: str, number: int) -> None:
    x = torch.arange(11.0)[:, None]
    shards = [rows_of(shard_of(LOADERS[kind](x), (k, number))) for k in range(1, number + 1)]
    assert sorted(row for shard in shards for row in shard) == x[:, 0].tolist()
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert shards == [rows_of(shard_of(LOADERS[kind](x), (k, number))) for k in range(1, number + 1)]


def test_fits_of_all_shards_are_the_exact_posterior_with_enough_actions() -> None:
    net, x = NETS["several classes"], NETS["several classes"].near_and_far()
    settings = {"num_actions": 1000, "cotangents": 2}
    la = net.laplace(**settings)
    la.fit(net.loader(), shard=(1, 3))
    for k in (2, 3):
        other = net.laplace(**settings)
        other.fit(net.loader(), shard=(k, 3))
        la.merge(other)
    close(joint_variance(la, x), net.exact(x), 1e-6)


def shard_fit(net: Net, shard: tuple[int, int] | None, loader: Any = None) -> Any:
    la = net.laplace(num_actions=3)
    la.fit(net.loader() if loader is None else loader, shard=shard)
    return la


LISTED = {"a loader": lambda net: net.loader(), "shuffled": lambda net: net.loader(batch_size=7, shuffle=True)}
LISTED["a list"] = lambda net: list(net.loader())


@pytest.mark.parametrize("kind", LISTED)
def test_overlapping_shards_are_refused_and_disjoint_ones_are_not(kind: str) -> None:
    net = NETS["several classes"]
    half = shard_fit(net, (1, 2), LISTED[kind](net))
    for shard in ((1, 4), (3, 4), (2, 3), (1, 1)):
        with pytest.raises(ValueError, match="got one of data that are in this posterior already, and would count"):
            half.merge(shard_fit(net, shard, LISTED[kind](net)).state_dict())
    half.merge(shard_fit(net, (2, 4), LISTED[kind](net)))
    saved = half.state_dict()
    half.merge(shard_fit(make_net(0, num_data=23), (1, 4)))  # other data: there is one less of them
    assert half.n_data == 24 // 2 + 24 // 4 + 6
    other = net.laplace()
    other.load_state_dict(saved)
    with pytest.raises(ValueError, match="shards \\(k, K\\) with one K"):
        other.merge(shard_fit(net, (2, 8), LISTED[kind](net)))
    with pytest.warns(UserWarning, match="in the posterior already, and count twice"):
        other.fit(LISTED[kind](net), shard=(2, 8), override=False)


def test_all_of_the_data_after_their_shards_count_twice_and_a_warning_says_so() -> None:
    net = NETS["several classes"]
    la = shard_fit(net, (1, 3))
    for k in (2, 3):
        la.merge(shard_fit(net, (k, 3)))
    with pytest.raises(ValueError, match="would count twice"):
        la.merge(shard_fit(net, None))
    la.shards_seen = torch.zeros_like(la.shards_seen)  # as of an earlier version: fingerprints of disjoint data add up
    with pytest.warns(UserWarning, match="in the posterior already, and count twice"):
        la.update(net.loader(batch_size=9))
    whole = shard_fit(net, None)
    assert int(whole.data_seen) == int(la.data_seen[:3].sum())


def test_a_file_of_an_earlier_version_does_not_know_of_shards_and_a_damaged_one_is_refused() -> None:
    net = NETS["several classes"]
    la, state = shard_fit(net, (1, 2)), shard_fit(net, (2, 2)).state_dict()
    with pytest.raises(ValueError, match="shards_seen of a saved posterior must be whole"):
        la.merge({**state, "shards_seen": torch.zeros(2, 3, dtype=torch.int64)})
    del state["shards_seen"]
    la.merge(state)
    assert la.shards_seen.shape == (2, 3) and bool((la.shards_seen[1] == 0).all())
    other = net.laplace()
    other.load_state_dict(state)
    assert other.shards_seen.shape == (1, 3)


def test_reading_what_is_shared_out_leaves_random_numbers_alone_and_asks_for_no_datum_of_a_fit_of_all() -> None:
    net, before = NETS["several classes"], torch.get_rng_state()
    Interrupting.reading, Interrupting.at = 0, -1
    data = Interrupting(net.x, net.y)
    assert bool((updating.whole_of(DataLoader(data, 4, shuffle=True), None) == 0).all()) and Interrupting.reading == 0
    found = updating.whole_of(DataLoader(data, 4, shuffle=True), (2, 5))
    assert found[0, :2].tolist() == [2, 5] and Interrupting.reading == 24
    assert torch.equal(found[0, 2], updating.whole_of(net.loader(), (1, 5))[0, 2])
    assert torch.equal(torch.get_rng_state(), before)


def test_refine_goes_on_with_the_shard_of_the_fit() -> None:
    net = NETS["several classes"]
    la = net.laplace(num_actions=2)
    la.fit(net.loader(), shard=(2, 3))
    seen, rank = la.data_seen, la.posterior.rank
    la.refine(net.loader(), epochs=1)
    assert la.n_data == 8 and torch.equal(la.data_seen, seen) and la.posterior.rank > rank


@pytest.mark.parametrize("shard", [(0, 3), (4, 3), (1.0, 2), "1/2", 3, (1, 2, 3), (True, 2)], ids=str)
def test_a_shard_that_is_none_is_refused(shard: Any) -> None:
    with pytest.raises(ValueError, match=r"`shard` must be \(k, K\) with 1 ≤ k ≤ K; got"):
        unfitted(MLP).fit(training(MLP), shard=shard)


def test_a_shard_of_a_stream_or_without_data_is_refused() -> None:
    class Stream(IterableDataset):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return iter(range(4))

    with pytest.raises(ValueError, match="`shard` must be of data that can be visited in any order; got a stream"):
        shard_of(DataLoader(Stream()), (1, 2))
    with pytest.raises(ValueError, match="`shard` must hold data; got part 15 of 20 of fewer data"):
        unfitted(MLP).fit(training(MLP), shard=(15, 20))
    with pytest.raises(TypeError, match="`shard` must be of a DataLoader or a list of batches; got generator"):
        shard_of((batch for batch in training(MLP)), (1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_twenty_updates_stay_above_the_exact_posterior(dtype: torch.dtype) -> None:
    """Compression after compression, each of which stores its images anew."""
    net = make_net(5, num_data=60)
    la, x = net.laplace(dtype, num_actions=6, max_rank=6), net.near_and_far()
    la.dtype = dtype
    for start in range(0, 60, 3):
        la.update(part(net, range(start, start + 3), dtype))
    assert la.posterior.rank == 6 and la.n_data == 60
    J = dense_jacobian(net.model, x).flatten(0, 1)
    prior, found = J @ J.T / PRIOR_PRECISION, joint_variance(la, x)
    not_below(found, net.exact(x), 1e-9 if dtype == torch.float64 else 1e-5)
    assert float(found.trace()) < 0.7 * float(prior.trace())

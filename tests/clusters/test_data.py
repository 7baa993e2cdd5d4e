"""The one-epoch posterior on the data and the models that people have."""

import warnings
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset, WeightedRandomSampler, default_collate

from ntk_iterncgp.clusters.clusters import Clusters
from ntk_iterncgp.data.fixed_order import FixedOrderData, TrainingDataWarning
from tests.clusters_helpers import Net, Stream, joint_variance, make_net
from tests.laplace_helpers import BATCH, close, not_below, written_out
from tests.network_cases import BY_NAME, CASES, NetworkCase, untouched

CPU = torch.device("cpu")
NUM_DATA = 22


def net() -> Net:
    return make_net(8, num_data=NUM_DATA)


def fitted_on(case: Net, loader: Any, **settings: Any) -> Any:
    la = case.laplace(**{"num_actions": 5, **settings})
    la.fit(loader)
    return la


@contextmanager
def sweeps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collects the passes that were swept."""
    seen: list[Any] = []
    original = Clusters.sweep

    def sweep(self: Clusters, target: Any, *rest: Any) -> Any:
        seen.append(target)
        return original(self, target, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Clusters, "sweep", sweep)
        yield seen


def drop_the_last(items: list[Any]) -> Any:
    return default_collate(items[:-1] if len(items) > 2 else items)


def sort_by_first_entry(items: list[Any]) -> Any:
    return default_collate(sorted(items, key=lambda item: float(item[0][0])))


# Order


@pytest.mark.parametrize("cotangents", [1, 2])
def test_visited_data_and_data_in_order_give_the_same_posterior(
    cotangents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, x = net(), net().near_and_far()
    with sweeps(monkeypatch) as seen:
        visited = fitted_on(case, case.loader(), cotangents=cotangents)
        in_order = [
            fitted_on(case, DataLoader(Stream(case.dataset()), batch_size=4), cotangents=cotangents),
            fitted_on(case, list(case.loader()), cotangents=cotangents),
        ]
    assert [target.by_group for target in seen] == [True, False, False]
    for la in in_order:
        close(joint_variance(la, x), joint_variance(visited, x), 1e-10)
        la.refine(list(case.loader()), epochs=(1 + 2 * cotangents) / 3)
    visited.refine(case.loader(), epochs=(1 + 2 * cotangents) / 3)
    close(joint_variance(in_order[1], x), joint_variance(visited, x), 1e-10)


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 3},
        {"batch_size": 22},
        {"shuffle": True},
        pytest.param({"num_workers": 1}, marks=pytest.mark.process),
    ],
)
def test_batches_order_and_workers_do_not_change_the_posterior(settings: dict[str, Any]) -> None:
    case, x = net(), net().near_and_far()
    state = torch.get_rng_state()
    la = fitted_on(case, case.loader(**settings))
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are their own"
    close(joint_variance(la, x), joint_variance(fitted_on(case, case.loader()), x), 1e-10)


def test_data_are_visited_group_by_group_in_batches_no_larger_than_the_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    case, sizes, read, sweeping, original = make_net(8, num_data=60), [], [], [], Clusters.sweep

    def sweep(self: Clusters, *rest: Any) -> Iterator[int]:
        sweeping.append(True)
        yield from original(self, *rest)
        sweeping.clear()

    monkeypatch.setattr(Clusters, "sweep", sweep)

    class Reading(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            if sweeping:
                read.append(x.detach())
            return self.body(x)

    la = fitted_on(Net(Reading(case.model), "classification", case.x, case.y), case.loader(batch_size=6), num_actions=3)
    assert max(sizes) <= 6
    done = la._fit.state.clusters.passes[0]
    where = [[int((case.x == row).all(1).nonzero()) for row in batch] for batch in read]
    members = [set(done.rows[done.labels == group].tolist()) for group in range(done.num_groups)]
    seen: list[set[int]] = [set() for _ in members]
    group = 0
    for batch in where:  # some twice, to fill it
        while not set(batch) <= members[group] - seen[group]:
            group += 1
        seen[group] |= set(batch)
    assert seen == members


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"batch_size": 4, "sampler": SequentialSampler(range(9))}, list(range(9))),
        ({"batch_size": 4, "collate_fn": drop_the_last}, [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18, 20, 21]),
        ({"batch_size": 4, "collate_fn": sort_by_first_entry}, list(range(22))),
    ],
    ids=["sampler", "collate_fn that drops", "collate_fn that sorts"],
)
def test_the_posterior_is_that_of_the_data_the_loader_gives(settings: dict[str, Any], rows: list[int]) -> None:
    case, x = net(), net().near_and_far()
    la = fitted_on(case, DataLoader(case.dataset(), **settings), num_actions=NUM_DATA, cotangents=2)
    given = Net(case.model, "classification", case.x[rows], case.y[rows])
    assert la.n_data == len(rows)
    close(joint_variance(la, x), given.exact(x))


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_posterior_is_that_of_all_data_also_with_drop_last(shuffle: bool) -> None:
    case, x = net(), net().near_and_far()
    loader = DataLoader(case.dataset(), batch_size=4, shuffle=shuffle, drop_last=True)
    with pytest.warns(TrainingDataWarning, match="would leave 2 of 22 data out of the posterior; it is overruled"):
        la = fitted_on(case, loader, num_actions=NUM_DATA, cotangents=2)
    la.refine(loader, epochs=1)
    assert la.n_data == NUM_DATA
    close(joint_variance(la, x), case.exact(x))


def test_data_can_be_visited_only_where_each_item_is_one_row_in_its_place() -> None:
    case = net()

    def can_jump(loader: Any, num_data: int = NUM_DATA) -> bool:
        return FixedOrderData(loader, device=CPU).can_jump(num_data)

    assert can_jump(case.loader()) and can_jump(case.loader(shuffle=True))
    assert can_jump(case.loader(collate_fn=lambda items: default_collate(items)))
    assert not can_jump(case.loader(collate_fn=drop_the_last), 17)
    assert not can_jump(case.loader(collate_fn=sort_by_first_entry))
    assert not can_jump(list(case.loader()))
    assert not can_jump(DataLoader(Stream(case.dataset()), batch_size=4))
    assert not can_jump(DataLoader(case.dataset(), batch_size=None), NUM_DATA)


@pytest.mark.parametrize("in_order", [False, True], ids=["visited", "in order"])
def test_chosen_rows_are_picked_with_their_numbers(in_order: bool) -> None:
    case, chosen = net(), torch.tensor([17, 3, 4, 21, 0])
    data = FixedOrderData(list(case.loader()) if in_order else case.loader(), device=CPU)
    parts = list(data.pick(chosen, NUM_DATA, 2))
    assert torch.cat([rows for rows, _ in parts]).tolist() == [0, 3, 4, 17, 21]
    assert all(len(rows) <= 2 and torch.equal(x, case.x[rows]) for rows, x in parts)
    assert data.num_data(5) == (25 if in_order else NUM_DATA)


def test_a_sampler_that_repeats_data_counts_them_as_often() -> None:
    case, x = net(), net().near_and_far()
    sampler = WeightedRandomSampler([1.0] * NUM_DATA, 40, generator=torch.Generator().manual_seed(3))
    drawn = list(WeightedRandomSampler([1.0] * NUM_DATA, 40, generator=torch.Generator().manual_seed(3)))
    la = fitted_on(case, case.loader(sampler=sampler), num_actions=40, cotangents=2)
    close(joint_variance(la, x), Net(case.model, "classification", case.x[drawn], case.y[drawn]).exact(x))


# Models


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kind_of_model_is_fitted_and_left_as_it_was(case: NetworkCase) -> None:
    model = case.model()
    la = Laplace(model, case.likelihood, "all", "iterncgp", num_actions=3, cotangents=1, **case.keys)
    loader = case.loader(num_data=14, batch_size=BATCH)
    with untouched(model), warnings.catch_warnings():
        # Layers of its own in place of a last linear one: that it says so is a test below.
        warnings.filterwarnings("ignore", message="The model has no last linear layer")
        la.fit(loader)
        la.refine(loader, epochs=1.5)
        variance = la.predictive_moments(case.new_inputs())[1]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    dense = written_out(case)
    not_below(variance, dense.at_new(dense.covariance(1.0)))
    assert not bool((variance == dense.at_new(torch.eye(dense.J.shape[1], dtype=torch.float64))).all())


@pytest.mark.parametrize("name", ["scalar parameters", "scalar bias"])
@pytest.mark.parametrize("policy", ["clusters", "unit", "curvature_residual"])
@pytest.mark.parametrize("prior", ["one precision", "one for each parameter tensor"])
def test_models_with_parameters_of_no_dimension_have_the_exact_variance(name: str, policy: str, prior: str) -> None:
    case, dense = BY_NAME[name], written_out(BY_NAME[name])
    sizes = torch.tensor([p.numel() for p in case.model().parameters()])
    precision = 0.5 + torch.rand(len(sizes), generator=torch.Generator().manual_seed(7)).double()
    if prior == "one precision":
        precision = precision[:1]
    settings: dict[str, Any] = {"prior_precision": precision, "policy": policy, "num_actions": 60, "cotangents": 2}
    la = Laplace(case.model(), "classification", "all", "iterncgp", **settings)
    loader = case.loader(num_data=14, batch_size=BATCH)
    la.fit(loader)
    la.refine(loader, epochs=1)
    per_weight = precision.repeat_interleave(sizes) if len(precision) > 1 else precision.expand(int(sizes.sum()))
    close(la.predictive_moments(case.new_inputs())[1], dense.at_new(dense.covariance(per_weight)))


class NoLinearLayer(nn.Module):
    """Takes a mapping with items of several shapes, one of them shared by all data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3))

    def forward(self, x: Any) -> Tensor:
        return torch.tanh(x["x"]).sum(1) @ self.weight + x["table"].sum()


def padded(x: Tensor, y: Tensor, widths: list[int]) -> list[UserDict]:
    """Batches of sequences, each as long as its longest."""
    batches = []
    for rows, width in zip(torch.arange(len(x)).split(5), widths, strict=True):
        sequence = torch.zeros(len(rows), width, 3, dtype=torch.float64)
        sequence[:, 0] = x[rows]
        batches.append(UserDict(x=sequence, labels=y[rows], table=torch.ones(2, 2, dtype=torch.float64)))
    return batches


@pytest.mark.parametrize("widths", [[2, 2, 2, 2], [2, 3, 1, 4]], ids=["of one length", "padded"])
def test_a_model_without_a_last_linear_layer_says_so_once_and_works(widths: list[int]) -> None:
    case = make_net(1, num_data=20)
    model = NoLinearLayer()
    la = Net(model, "classification", case.x, case.y).laplace(num_actions=20, cotangents=2, dict_key_x="x")
    with pytest.warns(UserWarning) as caught:
        la.fit(padded(case.x, case.y, widths))
    assert [str(w.message) for w in caught if "no last linear layer" in str(w.message)] == [str(caught[0].message)]
    assert len(caught) == 1 and "grouped by outputs and inputs instead" in str(caught[0].message)
    linear = nn.Linear(3, 3, bias=False).double()
    linear.weight.data = model.weight.data.T.clone()
    flat = Net(linear, "classification", torch.tanh(case.x), case.y)
    new = padded(case.x[:5], case.y[:5], [2])[0]
    with torch.no_grad():
        constant = float(new["table"].sum())
        torch.testing.assert_close(model(new), flat.model(torch.tanh(case.x[:5])) + constant)
    close(la.predictive_moments(new, joint=True)[1], flat.exact(torch.tanh(case.x[:5])))


def test_a_head_applied_to_every_token_is_known_by_the_mean_over_them() -> None:
    """Batches padded to different lengths give features of one length."""

    class PerToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).mean(1)

    case = make_net(1, num_data=20)
    model = PerToken()
    batches = [(b["x"], b["labels"]) for b in padded(case.x, case.y, [2, 3, 1, 4])]
    la = Net(model, "classification", case.x, case.y).laplace(num_actions=4)
    la.fit(batches)
    assert la._fit.state.clusters.features.shape == (20, 3)
    close(la._fit.state.clusters.features[:5].double(), case.x[:5] / 2)


def test_long_features_are_shortened() -> None:
    case = make_net(1, num_data=12, width=150)
    la = fitted_on(case, case.loader(), num_actions=7)
    assert la._fit.state.clusters.features.shape == (12, 128) and la.report_.rank == 7
    x = case.near_and_far()
    assert float((joint_variance(la, x) - case.exact(x)).diagonal().min()) > 0


def test_a_data_set_of_one() -> None:
    case = Net(net().model, "classification", net().x[:1], net().y[:1])
    la = fitted_on(case, DataLoader(TensorDataset(case.x, case.y)), cotangents=2)
    close(joint_variance(la, net().near_and_far()), case.exact(net().near_and_far()))

"""Spending more, and stopping at any time: budgets, Ctrl-C, and going on from there."""

import signal
import threading
import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from ntk_iterncgp.clusters import clusters
from ntk_iterncgp.fitting import cluster_run, cost
from ntk_iterncgp.fitting.drive import interruptible
from ntk_iterncgp.fitting.network_check import Findings
from tests.clusters_helpers import Net, Stream, joint_variance, make_net
from tests.laplace_helpers import close, differ, not_below

NUM_DATA, GROUPS = 24, 6


class Watched(Dataset):
    """Calls `on_item` with how many items have been read before each."""

    def __init__(self, net: Net, on_item: Any) -> None:
        self.data, self.on_item, self.count = net.dataset(), on_item, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        self.on_item(self.count)
        self.count += 1
        return self.data[i]


@pytest.fixture(autouse=True)
def every_item_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each sweep, so that reads can be counted: no batch is filled up with copies, and none is kept in memory."""
    monkeypatch.setattr(clusters, "PADDING", 1)
    monkeypatch.setattr(cost, "KEEP_BYTES", 0)


def net() -> Net:
    return make_net(5, num_data=NUM_DATA)


def ctrl_c_at(*items: int) -> Any:
    def press(count: int) -> None:
        for _ in range(items.count(count)):
            signal.raise_signal(signal.SIGINT)

    return press


def reads_before_the_sweep() -> int:
    """How many items are read before groups are swept: batches for a look, the outputs, the trace."""
    case = net()
    watched = Watched(case, lambda count: None)
    la = case.laplace(num_actions=GROUPS)
    with mock.patch.object(cluster_run, "checked_passes", return_value=Findings()):  # which reads some items again
        la.fit(DataLoader(watched, batch_size=4))
    return watched.count - NUM_DATA - 4  # the sweep, and the first batch once more to know the data again


# Ctrl-C


@pytest.mark.parametrize("streamed", [False, True], ids=["visited", "in order"])
def test_ctrl_c_leaves_a_valid_posterior_and_refine_ends_no_less_certain_than_the_fit_would_have(
    streamed: bool,
) -> None:
    case, x = net(), net().near_and_far()
    whole = case.laplace(num_actions=GROUPS)
    whole.fit(case.loader(batch_size=4))
    # Another item is read when the batch is complete, so this one is in the middle of the sweep.
    watched = Watched(case, ctrl_c_at(reads_before_the_sweep() + 13))
    la = case.laplace(num_actions=GROUPS)
    loader = DataLoader(Stream(watched) if streamed else watched, batch_size=4)
    with pytest.warns(UserWarning, match=r"interrupted with \d+ % of the data of this pass .* refine\(train_loader"):
        la.fit(loader)
    assert la.report_.status == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert 1 / 3 < la.report_.epochs < 4 / 3 and (information := la.report_.information_captured) > 0
    half = joint_variance(la, x)
    not_below(half, case.exact(x))
    assert differ(half, joint_variance(whole, x))
    la.refine(loader, epochs=4 / 3 - la.report_.epochs)
    after = joint_variance(la, x)
    not_below(after, case.exact(x))
    not_below(joint_variance(whole, x), after)  # combinations of these groups
    if not streamed:
        not_below(half, after)
    assert information < whole.report_.information_captured <= la.report_.information_captured
    assert la.report_.epochs == pytest.approx(4 / 3) and la.report_.status == "budget"


def test_the_warning_names_the_share_of_the_data_that_is_in_the_posterior() -> None:
    case = net()
    la = case.laplace(num_actions=GROUPS)
    with pytest.warns(UserWarning) as caught:
        la.fit(DataLoader(Watched(case, ctrl_c_at(reads_before_the_sweep() + 13)), batch_size=4))
    counted = la._fit.state.clusters.passes[-1].counted()
    assert 0 < int(counted.sum()) < NUM_DATA
    assert f"with {100 * float(counted.double().mean()):.0f} % of the data" in str(caught[0].message)


def test_a_second_ctrl_c_gives_up_and_an_earlier_fit_survives() -> None:
    case, x = net(), net().near_and_far()
    la = case.laplace(num_actions=GROUPS)
    la.fit(case.loader())
    before, first = joint_variance(la, x), reads_before_the_sweep() + 13
    with pytest.raises(KeyboardInterrupt):
        la.fit(DataLoader(Watched(case, ctrl_c_at(first, first)), batch_size=4))
    assert torch.equal(joint_variance(la, x), before) and la.report_.status == "budget"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("item", [NUM_DATA + 3, NUM_DATA + 10], ids=["last batch", "check"])
def test_ctrl_c_at_the_end_of_a_fit_is_not_forgotten(item: int) -> None:
    """Else what a program does next, such as a refine, would go on. The first batch of four is read once more."""
    case, x = net(), net().near_and_far()
    whole = case.laplace(num_actions=GROUPS)
    whole.fit(case.loader(batch_size=4))
    la = case.laplace(num_actions=GROUPS)
    watched = Watched(case, ctrl_c_at(reads_before_the_sweep() + item))
    with pytest.warns(UserWarning, match="The run was interrupted"):
        la.fit(DataLoader(watched, batch_size=4))
    assert la.report_.status == "interrupted"
    assert torch.equal(joint_variance(la, x), joint_variance(whole, x))


class Tired(nn.Module):
    """Raises once in its forward pass, after some calls that gradients by the weights are taken of, not by layers."""

    def __init__(self, body: nn.Module, error: type[BaseException], calls: int) -> None:
        super().__init__()
        self.body, self.error, self.calls = body, error, calls

    def forward(self, x: Tensor) -> Tensor:
        by_weights = torch.is_grad_enabled() and any(p.requires_grad for p in self.body.parameters())
        by_layers = any(module._forward_hooks for module in self.body.modules())
        if by_weights and not by_layers and not torch._C._functorch.maybe_current_level():
            self.calls -= 1
            if self.calls == -1:
                raise self.error
        return self.body(x)


@pytest.mark.parametrize("calls", [2, 7])  # the first two estimate memory and prove the rows
def test_a_keyboard_interrupt_in_the_model_is_caught_too(calls: int) -> None:
    case, x = net(), net().near_and_far()
    tired = Tired(case.model, KeyboardInterrupt, calls)
    la = Net(tired, "classification", case.x, case.y).laplace(num_actions=GROUPS)
    with pytest.warns(UserWarning, match="interrupted with"):
        la.fit(case.loader(batch_size=4))
    assert la.report_.status == "interrupted" and (la.report_.rank > 0) == (calls > 2)
    la.model.calls = 10**6
    not_below(joint_variance(la, x), case.exact(x))
    la.refine(case.loader(batch_size=4), epochs=4 / 3 - la.report_.epochs)
    whole = case.laplace(num_actions=GROUPS)
    whole.fit(case.loader(batch_size=4))
    not_below(joint_variance(whole, x), joint_variance(la, x))
    if calls == 3:  # nothing had been handed out
        close(joint_variance(la, x), joint_variance(whole, x), 1e-10)


def test_an_error_in_the_middle_of_a_fit_or_refine_leaves_what_was_there() -> None:
    case, x = net(), net().near_and_far()
    la = Net(Tired(case.model, ArithmeticError, 10**6), "classification", case.x, case.y).laplace(num_actions=GROUPS)
    la.fit(case.loader(batch_size=4))
    before, report = joint_variance(la, x), la.report_
    for again in (la.fit, lambda loader: la.refine(loader, epochs=1)):
        la.model.calls = 3
        with pytest.raises(ArithmeticError):
            again(case.loader(batch_size=4))
        la.model.calls = 10**6
        assert torch.equal(joint_variance(la, x), before) and la.report_ == report
        assert not any(module._forward_pre_hooks for module in la.model.modules())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    la.refine(case.loader(batch_size=4), epochs=1)
    not_below(before, joint_variance(la, x))


def test_ctrl_c_is_handled_in_the_main_thread_only_and_only_for_a_while() -> None:
    with interruptible() as interrupt:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    seen = []

    def elsewhere() -> None:
        with interruptible() as interrupt:
            seen.append((signal.getsignal(signal.SIGINT), interrupt.requested))
        case = net()
        la = case.laplace(num_actions=GROUPS)
        la.fit(case.loader())
        seen.append(la.report_.status)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [(signal.default_int_handler, False), "budget"]


def test_ctrl_c_stays_ignored_where_it_is_ignored() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as interrupt:
            signal.raise_signal(signal.SIGINT)
        assert not interrupt.requested and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


# Budgets


def test_refine_spends_the_epochs_it_is_given() -> None:
    case = make_net(6, num_data=60)
    la, loader = case.laplace(num_actions=15, max_epochs=0.5), case.loader(batch_size=2)
    la.fit(loader)
    one_batch, spent = 2 / 60, 0.5
    assert spent - 1e-9 <= la.report_.epochs <= spent + one_batch
    for epochs in (0.25, 0.1, 1.0):
        before = la.report_.epochs
        la.refine(loader, epochs=epochs)
        assert before + epochs - 1e-9 <= la.report_.epochs <= before + epochs + one_batch


class Slow(nn.Module):
    def __init__(self, body: nn.Module, seconds: float) -> None:
        super().__init__()
        self.body, self.seconds = body, seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.body(x)


def test_refine_stops_when_its_seconds_are_over() -> None:
    case = make_net(6, num_data=60)
    la = Net(Slow(case.model, 0.0), "classification", case.x, case.y).laplace(num_actions=20)
    loader = case.loader(batch_size=3)
    la.fit(loader)
    before = la.report_
    la.model.seconds = 0.02
    la.refine(loader, seconds=0.1)
    taken = la.report_.seconds - before.seconds  # without the checks that follow
    assert 0.1 <= taken < 0.4, "a whole pass would take more"
    assert before.epochs < la.report_.epochs < before.epochs + 0.5
    assert la.report_.status == "budget"


@pytest.mark.parametrize("mean", ["network", "refined"])
@pytest.mark.parametrize("policy", ["curvature_residual", "random_subspace"])
def test_refining_a_fit_by_products_only_lowers_the_variance(mean: str, policy: str) -> None:
    """Where the mean moves, the curvature of the likelihood has to stay: that of regression does."""
    case = net() if mean == "network" else make_net(5, num_data=NUM_DATA, likelihood="regression")
    x = case.near_and_far()
    la, loader = case.laplace(policy=policy, mean=mean, num_actions=6), case.loader()
    la.fit(loader)
    before, products = joint_variance(la, x), la.report_.num_products
    for budget in ({"epochs": 5.0}, {"seconds": 0.05}, {"epochs": 5.0, "seconds": 100.0}):
        mean_before = la.predictive_moments(x)[0]
        la.refine(loader, **budget)
        after = joint_variance(la, x)
        not_below(before, after, 1e-8)
        not_below(after, case.exact(x))
        if mean == "network":
            close(la.predictive_moments(x)[0], mean_before)
        if "seconds" not in budget:
            assert differ(before, after)
            assert products < la.report_.num_products <= products + 3
        assert la.report_.epochs == pytest.approx(1 / 3 + 5 / 3 * la.report_.num_products)
        assert [r.epochs for r in la.report_.history] == sorted(r.epochs for r in la.report_.history)
        before, products = after, la.report_.num_products


def test_refining_brings_a_refined_mean_closer_to_the_mode() -> None:
    case, x = net(), net().near_and_far()
    exact = case.laplace(mean="refined", num_actions=60, actions_per_step=20, newton_tol=1e-12)
    exact.fit(case.loader())
    la = case.laplace(mean="refined", num_actions=4)
    la.fit(case.loader())
    errors = []
    for _ in range(3):
        errors.append(float((la.predictive_moments(x)[0] - exact.predictive_moments(x)[0]).norm()))
        la.refine(case.loader(), epochs=10)
    assert errors[0] > errors[1] > errors[2]


def test_max_epochs_bounds_a_fit_by_products_too() -> None:
    case = net()
    la = case.laplace(policy="curvature_residual", num_actions=50, max_epochs=8.0)
    la.fit(case.loader())
    assert la.report_.epochs <= 8.0 and la.report_.num_products == 4


# What is refused


def test_refine_says_what_it_needs() -> None:
    case, loader = net(), net().loader()
    la = case.laplace(num_actions=GROUPS)
    with pytest.raises(RuntimeError, match="Call fit before"):
        la.refine(loader, epochs=1)
    la.fit(loader)
    with pytest.raises(ValueError, match=r"refine must be given epochs or seconds; got neither"):
        la.refine(loader)
    for nonsense in (0, -1.0, float("nan"), "two"):
        with pytest.raises(ValueError, match="`epochs` must be a positive number; got"):
            la.refine(loader, epochs=nonsense)
        with pytest.raises(ValueError, match="`seconds` must be a positive number; got"):
            la.refine(loader, seconds=nonsense)
    loaded = case.laplace(num_actions=GROUPS)
    loaded.load_state_dict(la.state_dict())
    with pytest.raises(RuntimeError, match=r"got a loaded or merged posterior.* Try fit\(train_loader\)"):
        loaded.refine(loader, epochs=1)
    with torch.no_grad():
        la.model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="weights it was fitted with"):
        la.refine(loader, epochs=1)


@pytest.mark.parametrize("policy", ["clusters", "curvature_residual"])
def test_refine_refuses_other_data(policy: str) -> None:
    case = net()
    la = case.laplace(num_actions=GROUPS, policy=policy)
    la.fit(case.loader())
    others = [
        TensorDataset(case.x.flip(0), case.y.flip(0)),
        TensorDataset(case.x[:-5], case.y[:-5]),
        TensorDataset(torch.cat([case.x, case.x]), torch.cat([case.y, case.y])),
    ]
    for other in others:
        with pytest.raises(ValueError, match="refine must be given the data of the fit in the same order"):
            la.refine(DataLoader(other, batch_size=5), epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.refine(case.loader(batch_size=7, shuffle=True), epochs=1)  # batches and order do not matter


def test_a_random_part_of_the_data_is_the_same_part_in_the_same_order_again() -> None:
    case, x = net(), net().near_and_far()
    part = torch.randperm(NUM_DATA, generator=torch.Generator().manual_seed(0))[:15]
    la = case.laplace(num_actions=GROUPS)
    la.fit(case.loader(sampler=SubsetRandomSampler(part.tolist())))
    torch.rand(7)  # the caller goes on drawing random numbers
    la.refine(case.loader(sampler=SubsetRandomSampler(part.tolist())), epochs=1)
    chosen = Net(case.model, "classification", case.x[part], case.y[part])
    not_below(joint_variance(la, x), chosen.exact(x))
    assert la.n_data == 15


@pytest.mark.parametrize("max_epochs", [0.2, 1 / 3, -1, "all"])
def test_max_epochs_must_leave_something_for_the_groups(max_epochs: Any) -> None:
    with pytest.raises(ValueError, match=r"epochs` must be (more than 1/3|a positive number)"):
        net().laplace(max_epochs=max_epochs)


def test_clusters_say_that_they_leave_the_mean_alone() -> None:
    with pytest.raises(ValueError, match="policy='clusters' must be combined with mean='network'"):
        net().laplace(policy="clusters", mean="refined")

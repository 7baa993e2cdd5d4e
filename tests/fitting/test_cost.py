"""What a fit will take, told before it starts, and refused where it cannot be had."""

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.clusters.clusters import PADDING, Clusters, padded_size
from ntk_iterncgp.fitting import cost as cost_module
from ntk_iterncgp.fitting import timing
from ntk_iterncgp.fitting.cost import activation_bytes
from ntk_iterncgp.jacobian.autograd import Jacobian
from tests.clusters_helpers import joint_variance, make_net
from tests.network_cases import untouched

ROOT = Path(__file__).resolve().parents[2]

MEASURE = """
import warnings
warnings.filterwarnings("ignore")
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ntk_iterncgp.jacobian import rows as rows_room

def status(name):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(name))

torch.set_num_threads(1)
rows_room.EXACT_TRACE_ROWS = 0  # as with more data
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(500, 1500), nn.ReLU(), nn.Linear(1500, 170), nn.ReLU(), nn.Linear(170, 4))
loader = DataLoader(TensorDataset(torch.randn(200, 500), torch.randint(4, (200,))), batch_size=100)
la = Laplace(model, "classification", "all", "iterncgp", num_actions=10, cotangents=2, chunk_bytes=2**27)
before = status("VmRSS")
cost = la.estimate_cost(loader)
la.fit(loader)
print(cost.num_params, cost.fit_bytes, status("VmHWM") - before)
"""


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_the_memory_of_a_fit_is_what_was_said() -> None:
    command = [sys.executable, "-c", MEASURE]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    num_params, said, peak = map(int, result.stdout.split())
    assert num_params > 10**6
    assert said / 1.6 < peak < 1.3 * said, (said / 2**20, peak / 2**20)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("policy", ["clusters", "curvature_residual"])
@pytest.mark.parametrize("in_order", [False, True])
def test_the_cost_is_told_as_a_table_and_nothing_is_fitted(subset: str, policy: str, in_order: bool) -> None:
    net = make_net(2, num_data=30)
    la = net.laplace(subset=subset, policy=policy, num_actions=8)
    loader = list(net.loader()) if in_order else net.loader()
    with untouched(la.model):
        cost = la.estimate_cost(loader)
    assert not la._fitted
    with pytest.raises(RuntimeError):
        la.report_  # noqa: B018
    assert cost.num_data == 30 and cost.num_actions == 8
    assert cost.num_params == (31 if subset == "all" else 15)
    for name in ("epochs", "fit_seconds", "predict_seconds", "fit_bytes", "predict_bytes", "available_bytes"):
        assert getattr(cost, name) > 0, name
    first, header, fit, predict, available = str(cost).splitlines()
    assert first == f"30 data, {cost.num_params} weights, 8 actions"
    assert header.split() == ["time", "memory"] and available.startswith("available")
    assert f"{cost.epochs:.1f} epochs" in fit and " MiB" in fit and "per 1000 inputs" in predict


@pytest.mark.parametrize("cotangents", [1, 2, 3])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_epochs_told_are_those_spent(cotangents: int, likelihood: str) -> None:
    net = make_net(2, num_data=30, likelihood=likelihood)
    la = net.laplace(num_actions=8, cotangents=cotangents)
    cost = la.estimate_cost(net.loader())
    la.fit(net.loader())
    assert la.report_.epochs == pytest.approx(cost.epochs) and la.report_.rank <= cost.num_actions
    products = net.laplace(policy="curvature_residual", num_actions=5)
    cost = products.estimate_cost(net.loader())
    products.fit(net.loader())
    assert products.report_.epochs == pytest.approx(cost.epochs)


def test_more_actions_than_data_are_not_counted() -> None:
    net = make_net(2, num_data=30)
    assert net.laplace(num_actions=500, cotangents=2).estimate_cost(net.loader()).num_actions == 60


def test_the_cost_of_what_does_not_fit_is_told_without_making_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the images nor anything as large is allocated for the answer."""
    net = make_net(2, num_data=30)
    loader = DataLoader(TensorDataset(net.x, net.y), batch_size=5)
    la = net.laplace(num_actions=25, cotangents=1)
    sizes: list[int] = []
    original = torch.randn

    def randn(*shape: Any, **settings: Any) -> torch.Tensor:
        made = original(*shape, **settings)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(timing, "SLICE_ROWS", 4)
    monkeypatch.setattr(timing, "SLICE_COLUMNS", 3)
    cost = la.estimate_cost(loader)
    assert cost.predict_seconds is not None and max(sizes) == timing.TIMED_COLUMNS * cost.num_params


@pytest.mark.parametrize("num_data", [60, 1500])
def test_the_seconds_told_are_those_of_batches_as_small_as_groups(
    num_data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few data for each group most of a fit is the number of its batches, however few data each of them holds."""
    net = make_net(2, num_data=num_data)
    loader = DataLoader(TensorDataset(net.x, net.y), batch_size=50)
    la = net.laplace(num_actions=20, cotangents=1)
    for beside in ("_matrix_seconds", "_trace_seconds", "_check_seconds"):
        monkeypatch.setattr(timing, beside, lambda *whatever: 0.0)
    monkeypatch.setattr(timing, "seconds_of", lambda work: 0.0)
    monkeypatch.setattr(timing, "seconds_by_size", lambda work, largest: lambda size: 1.0)  # whatever its size
    told = la.estimate_cost(loader).fit_seconds
    batches: list[int] = []
    original = Clusters.sweep

    def sweep(self: Clusters, *arguments: Any) -> Iterator[int]:
        for size in original(self, *arguments):
            batches.append(size)
            yield size

    monkeypatch.setattr(Clusters, "sweep", sweep)
    la.fit(loader)
    assert told == pytest.approx(num_data / 50 / 3 + len(batches), rel=0.15)


def classifier(num_outputs: int, width: int = 170) -> tuple[nn.Module, DataLoader, Tensor]:
    """More weights than are few where the width is not small, and data that it is sure of here and there."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 100, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(100, width), nn.Tanh(), nn.Linear(width, num_outputs))
    with torch.no_grad():
        model[2].weight.mul_(20)
    return model, DataLoader(TensorDataset(x, model(x).argmax(1)), batch_size=100), x[:100]


def counting_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of J that each call computes, and at how many inputs."""
    found: list[int] = []
    original = Jacobian.rows

    def rows(self: Jacobian, *arguments: Any) -> Any:
        made = original(self, *arguments)
        found.append(made.shape[0] * made.shape[1])
        return made

    monkeypatch.setattr(Jacobian, "rows", rows)
    return found


@pytest.mark.parametrize("num_outputs", [3, 10, 40])
def test_the_backward_passes_counted_are_those_of_a_prediction(
    num_outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many classes a few contrasts, as the inputs need; a little more or less, since no variance is known yet."""
    model, loader, x = classifier(num_outputs)
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=10)
    cost = la.estimate_cost(loader)
    la.fit(loader)
    found = counting_rows(monkeypatch)
    la(x)
    taken = sum(found) / len(x)
    assert cost.predict_rows == pytest.approx(taken, rel=0 if num_outputs == 3 else 0.2)
    assert taken == 3 if num_outputs == 3 else taken < num_outputs / 1.4
    assert f"{cost.predict_rows:.3g} backward passes for each" in str(cost)


@pytest.mark.parametrize(
    ("width", "settings"), [(20, {}), (170, {"mean": "refined"})], ids=["a small network", "a refined mean"]
)
def test_all_rows_are_counted_where_a_prediction_takes_them(
    width: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loader, x = classifier(10, width)
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=5, **settings)
    assert la.estimate_cost(loader).predict_rows == 10
    la.fit(loader)
    found = counting_rows(monkeypatch)
    la(x)
    assert sum(found) == 10 * len(x)


@pytest.mark.slow
def test_the_seconds_told_for_a_prediction_are_of_the_size_of_those_taken() -> None:
    model, loader, x = classifier(100, 500)
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=20)
    expected = la.estimate_cost(loader).predict_seconds
    la.fit(loader)
    la(x)  # what is computed once
    started = time.perf_counter()
    la(x)
    taken = (time.perf_counter() - started) * 1000 / len(x)
    assert taken / 10 < expected < 10 * taken, (expected, taken)  # with all rows it would be some hundred times as much


def test_a_fit_that_cannot_fit_is_refused_with_the_table_and_leaves_what_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, x = make_net(2), make_net(2).near_and_far()
    la, fresh = net.laplace(num_actions=4), net.laplace(num_actions=4)
    la.fit(net.loader())
    before, report = joint_variance(la, x), la.report_
    monkeypatch.setattr(cost_module, "available_bytes", lambda device: 10 * 2**20)
    with pytest.raises(
        MemoryError, match=r"at most 10 MiB, the memory available; got [\d,]+ MiB. Use fewer actions"
    ) as error:
        la.fit(net.loader())
    assert "per 1000 inputs" in str(error.value) and "17 data, 31 weights, 4 actions" in str(error.value)
    assert torch.equal(joint_variance(la, x), before) and la.report_ == report
    with untouched(fresh.model), pytest.raises(MemoryError):
        fresh.fit(net.loader())
    assert not fresh._fitted
    monkeypatch.setattr(cost_module, "available_bytes", lambda device: None)
    fresh.fit(net.loader())  # where nobody knows, it is tried
    assert "unknown" in str(fresh.estimate_cost(net.loader()))


def test_counting_activations_leaves_none_of_them_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Sigmoid())  # each saves its own output

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    jacobian, x = Jacobian(model), torch.randn(5, 4)
    expected = activation_bytes(jacobian, x)
    before = alive()
    assert [activation_bytes(jacobian, x) for _ in range(3)] == [expected] * 3
    assert expected >= 4 * 5 * (6 + 3) and alive() == before


def test_small_groups_are_padded_to_few_sizes_and_cost_no_more_than_twice() -> None:
    sizes = [padded_size(size, 64) for size in range(1, 65)]
    assert all(size <= padded < max(2 * size, size + PADDING) for size, padded in enumerate(sizes, 1))
    assert len(set(sizes)) <= 4 + 64 // PADDING
    assert padded_size(5, 6) == 6  # not beyond the user's batches


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_the_first_batch_passes_the_model_three_times_before_the_sweep(subset: str) -> None:
    """To see what comes out, that it comes out again, and how much memory it takes; its first row once more alone."""
    passed: list[Tensor] = []
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    model.register_forward_pre_hook(lambda module, inputs: passed.append(inputs[0].detach()))
    x = torch.randn(24, 3)
    loader = DataLoader(TensorDataset(x, torch.randint(2, (24,))), batch_size=6)
    la = Laplace(model, "classification", subset, "iterncgp", num_actions=4)
    passed.clear()
    la.fit(loader)
    second = next(i for i, inputs in enumerate(passed) if torch.equal(inputs.float(), x[6:12]))
    before = [len(inputs) for inputs in passed[: second - 1]]  # the sweep begins with the first batch
    assert [size for size in sorted(before) if size > 1] in ([6, 6, 6], [6, 6]) and before.count(1) <= 2

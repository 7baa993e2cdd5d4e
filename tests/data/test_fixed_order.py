"""The training data in a fixed order whatever the loader does, and the probe that names what would still change."""

from collections import UserDict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ntk_iterncgp.data.fixed_order import FixedOrderData, Probe, TrainingDataWarning, slice_rows, to_device
from ntk_iterncgp.data.order import in_fixed_order
from ntk_iterncgp.runtime.threads import evaluating

CPU = torch.device("cpu")
N = 10
X = torch.arange(N, dtype=torch.float64)[:, None] * torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
y = torch.arange(N) % 3
ROWS = TensorDataset(X, y)


def fixed(loader: Any, **keys: str) -> FixedOrderData:
    return FixedOrderData(loader, device=CPU, **keys)


def order(data: FixedOrderData) -> list[list[int]]:
    """Which rows of X each batch of one sweep holds; x and y are checked to belong together."""
    batches = []
    for x, targets in data.batches():
        rows = [int(v) for v in x[:, 0]]
        assert torch.equal(targets, y[rows]) and torch.equal(x, X[rows])
        batches.append(rows)
    return batches


def rows_of(data: FixedOrderData) -> list[int]:
    return [row for batch in order(data) for row in batch]


class CountsTo(IterableDataset):
    """A stream of the same rows every time; `__len__` only where it is told to have one."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ROWS


class CountsToKnown(CountsTo):
    def __len__(self) -> int:
        return N


class Doubled(TensorDataset):
    """Reads its tensors in a way of its own."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class WholeBatches(Dataset):
    """Each item is a batch already."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2]


class InPairs:
    """A batch sampler of the user's own, random on every sweep."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        for i in torch.randperm(5).tolist():
            yield [2 * i, 2 * i + 1]


def random_loaders() -> dict[str, DataLoader]:
    weights = torch.arange(1.0, N + 1)
    return {
        "shuffle": DataLoader(ROWS, batch_size=3, shuffle=True),
        "shuffle with a generator": DataLoader(ROWS, 3, shuffle=True, generator=torch.Generator().manual_seed(1)),
        "RandomSampler with replacement": DataLoader(ROWS, 3, sampler=RandomSampler(ROWS, replacement=True)),
        "RandomSampler of few": DataLoader(ROWS, 3, sampler=RandomSampler(ROWS, num_samples=4)),
        "SubsetRandomSampler": DataLoader(ROWS, 3, sampler=SubsetRandomSampler([1, 3, 5, 7, 9])),
        "WeightedRandomSampler": DataLoader(ROWS, 3, sampler=WeightedRandomSampler(weights, 12, replacement=True)),
        "a batch sampler of the user's": DataLoader(ROWS, batch_sampler=InPairs()),
        "torch's BatchSampler over a random one": DataLoader(
            ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), batch_size=3, drop_last=False)
        ),
        "whole batches shuffled": DataLoader(WholeBatches(), batch_size=None, shuffle=True),
        "data without batches shuffled": DataLoader(WholeBatches(), batch_size=None, sampler=RandomSampler(range(5))),
    }


# Order


@pytest.mark.parametrize("name", random_loaders())
def test_a_random_loader_has_one_order_on_all_sweeps(name: str) -> None:
    loader = random_loaders()[name]
    data = fixed(loader)
    first = order(data)
    assert len(data) == len(first) == len(loader)
    for _ in range(3):
        assert order(data) == first


@pytest.mark.parametrize("name", random_loaders())
def test_fixing_the_order_leaves_the_random_numbers_of_the_caller_alone(name: str) -> None:
    loader = random_loaders()[name]
    before = torch.get_rng_state()
    fixed(loader)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shuffle", [False, True], ids=["sequential", "shuffle"])
def test_a_sweep_leaves_the_random_numbers_of_the_caller_alone(shuffle: bool) -> None:
    """torch draws a seed for workers whenever a loader is walked, workers or not."""
    data = fixed(DataLoader(ROWS, batch_size=3, shuffle=shuffle))
    before = torch.get_rng_state()
    order(data)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sequential_loader_keeps_its_order() -> None:
    data = fixed(DataLoader(ROWS, batch_size=4))
    assert order(data) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_shuffling_loader_holds_every_row_once() -> None:
    data = fixed(DataLoader(ROWS, batch_size=4, shuffle=True))
    assert sorted(rows_of(data)) == list(range(N))
    assert [len(batch) for batch in order(data)] == [4, 4, 2]


def dropping(dataset: Dataset, batch_size: int = 3) -> dict[str, DataLoader]:
    weighted = WeightedRandomSampler([1.0] * N, 11, generator=torch.Generator().manual_seed(0))
    return {
        "sequential": DataLoader(dataset, batch_size, drop_last=True),
        "shuffle": DataLoader(dataset, batch_size, shuffle=True, drop_last=True),
        "sampler": DataLoader(dataset, batch_size, sampler=weighted, drop_last=True),
        "stream": DataLoader(CountsToKnown(), batch_size, drop_last=True),
        "stream with workers": DataLoader(CountsToKnown(), batch_size, drop_last=True, num_workers=1),
    }


@pytest.mark.parametrize(
    "kind",
    ["sequential", "shuffle", "sampler", "stream", pytest.param("stream with workers", marks=pytest.mark.process)],
)
def test_drop_last_is_overruled_and_the_user_is_told_once(kind: str) -> None:
    loader, size = dropping(Doubled(X, y))[kind], 11 if kind == "sampler" else N
    with pytest.warns(TrainingDataWarning, match=rf"would leave {size % 3} of {size} data out.*all data are used"):
        data = fixed(loader)
    batches = [len(targets) for _, targets in data.batches()]
    assert len(data) == len(batches) == 4 and sum(batches) == size
    fixed(loader)  # a second warning would be an error


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "stream"])
def test_drop_last_that_leaves_nothing_out_is_not_worth_a_word(kind: str) -> None:
    assert len(fixed(dropping(Doubled(X, y), 5)[kind])) == 2


def test_fewer_data_than_a_batch_are_read_although_drop_last_leaves_nothing() -> None:
    with pytest.warns(TrainingDataWarning, match=f"{N} of {N} data"):
        assert rows_of(fixed(DataLoader(TensorDataset(X, y), batch_size=N + 1, drop_last=True))) == list(range(N))


def test_drop_last_of_a_batch_sampler_or_a_loader_of_the_users_own_cannot_be_overruled_and_that_is_told() -> None:
    class Own(BatchSampler):
        pass

    class Walked(DataLoader):
        def __iter__(self) -> Any:
            yield from super().__iter__()

    own = DataLoader(Doubled(X, y), batch_sampler=Own(range(N), 4, drop_last=True))
    for loader in (own, Walked(Doubled(X, y), 4, drop_last=True)):
        with pytest.warns(TrainingDataWarning, match=r"leaves .* data out of the posterior\. Try drop_last=False"):
            assert sum(len(targets) for _, targets in fixed(loader).batches()) == 8


def test_a_subset_sampler_is_respected() -> None:
    data = fixed(random_loaders()["SubsetRandomSampler"])
    assert sorted(rows_of(data)) == [1, 3, 5, 7, 9]


def test_a_sampler_with_replacement_may_repeat_rows() -> None:
    sampler = WeightedRandomSampler([1.0] + [0.0] * (N - 1), 5, replacement=True)
    assert order(fixed(DataLoader(ROWS, batch_size=3, sampler=sampler))) == [[0, 0, 0], [0, 0]]


def test_the_batches_of_a_batch_sampler_are_respected() -> None:
    data = fixed(DataLoader(ROWS, batch_sampler=InPairs()))
    assert sorted(order(data)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_a_loader_that_does_not_batch_hands_on_the_items_of_its_data_set() -> None:
    assert order(fixed(DataLoader(WholeBatches(), batch_size=None))) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("part", [None, [8, 1, 6, 3, 0, 2]])
@pytest.mark.parametrize("sampler", [None, [4, 0, 3, 3, 5]])
def test_tensors_read_a_batch_at_a_time_are_what_the_loader_gives(part: Any, sampler: Any) -> None:
    tensors = TensorDataset(torch.randn(10, 2, 3), torch.arange(10), torch.randn(10, 1))
    dataset = tensors if part is None else Subset(tensors, part)
    loader = DataLoader(dataset, 4, sampler=sampler)
    with mock.patch.object(TensorDataset, "__getitem__", side_effect=AssertionError("read datum by datum")):
        found = list(in_fixed_order(loader))
    expected = list(loader)
    assert [type(batch) for batch in found] == [type(batch) for batch in expected]
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_dataset_that_only_inherits_from_tensors_is_read_in_its_own_way() -> None:
    for dataset in (Doubled(torch.ones(6, 2), torch.ones(6)), Subset(Doubled(torch.ones(6, 2), torch.ones(6)), [5, 0])):
        (x, y), *_ = FixedOrderData(DataLoader(dataset, 2), device=CPU).batches()
        assert bool((x == 2).all()) and bool((y == 2).all())


def test_the_collate_function_is_kept() -> None:
    def halves(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x / 2 for x, _ in items]), torch.stack([t for _, t in items])

    data = fixed(DataLoader(ROWS, batch_size=N, shuffle=True, collate_fn=halves))
    ((x, targets),) = data.batches()
    assert torch.equal(2 * x, X[[int(2 * v) for v in x[:, 0]]]) and len(targets) == N


@pytest.mark.parametrize("batches", [list, tuple])
def test_a_sequence_of_batches_is_walked_as_it_is(batches: type) -> None:
    data = fixed(batches([(X[:3], y[:3]), (X[3:4], y[3:4])]))
    assert len(data) == 2 and order(data) == order(data) == [[0, 1, 2], [3]]


def test_a_stream_that_knows_its_length_is_walked_as_it_is() -> None:
    data = fixed(DataLoader(CountsToKnown(), batch_size=4))
    assert len(data) == 3 and order(data) == order(data) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.process)])
def test_a_stream_without_length_is_counted_once(num_workers: int) -> None:
    data = fixed(DataLoader(CountsTo(), batch_size=4, num_workers=num_workers))
    assert len(data) == 3 and order(data) == order(data) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class Batches:
    """As a loader of WebDataset's: no DataLoader, no sequence, the same batches on every walk."""

    def __init__(self) -> None:
        self.num_walks = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.num_walks += 1
        return zip(X.split(4), y.split(4), strict=True)


class CountedBatches(Batches):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(("kind", "walks_to_count"), [(Batches, 1), (CountedBatches, 0)])
def test_any_iterable_that_can_be_walked_again_is_a_loader(kind: type[Batches], walks_to_count: int) -> None:
    loader = kind()
    data = fixed(loader)
    assert len(data) == 3 and loader.num_walks == walks_to_count
    assert order(data) == order(data) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    "empty",
    [
        [],
        DataLoader(TensorDataset(X[:0], y[:0]), batch_size=3),
        DataLoader(ROWS, batch_size=3, sampler=SubsetRandomSampler([])),
    ],
    ids=["list", "data set", "sampler"],
)
def test_a_loader_with_no_data_is_refused(empty: Any) -> None:
    with pytest.raises(ValueError, match="at least one batch; got an empty loader"):
        fixed(empty)


@pytest.mark.parametrize(
    "given",
    [(batch for batch in [(X, y)]), iter([(X, y)]), 3, X, {}],
    ids=["generator", "iterator", "int", "rows", "map"],
)
def test_what_can_be_walked_only_once_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"gives the same batches each time .* Try list\(batches\)"):
        fixed(given)


# Batches


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_mapping_is_handed_on_whole_with_its_targets(kind: type) -> None:
    batch = kind({"input_ids": X, "labels": y, "note": "unchanged"})
    ((x, targets),) = fixed([batch]).batches()
    assert type(x) is kind and x["note"] == "unchanged"
    assert torch.equal(x["input_ids"], X) and torch.equal(targets, y)


def test_keys_of_a_mapping_may_be_chosen() -> None:
    data = fixed([{"image": X, "target": y, "extra": X[:2]}], dict_key_x="image", dict_key_y="target")
    ((x, targets),) = data.batches()
    assert torch.equal(targets, y) and data.num_rows(x) == N
    parts = list(data.chunk(x, 4))
    assert [data.num_rows(part) for part in parts] == [4, 4, 2]
    assert all(len(part["extra"]) == 2 for part in parts)  # not one entry per datum: handed on whole
    assert torch.equal(torch.cat([part["image"] for part in parts]), X)


def test_a_mapping_without_targets_is_refused_by_its_keys() -> None:
    data = fixed([{"input_ids": X, "target": y}])
    with pytest.raises(ValueError, match=r"targets under 'labels' \(dict_key_y\).*\['input_ids', 'target'\]"):
        next(data.batches())


@pytest.mark.parametrize(
    ("batch", "found"), [(X, "Tensor"), ((X, y, y), "tuple of length 3"), ([X], "list of length 1")]
)
def test_a_batch_that_is_no_pair_is_refused(batch: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"a pair \(x, y\) or a mapping; got {found}"):
        next(fixed([batch]).batches())


def test_chunks_of_a_tensor_hold_its_rows_in_order() -> None:
    data = fixed([(X, y)])
    parts = list(data.chunk(X, 3))
    assert [len(part) for part in parts] == [3, 3, 3, 1] and torch.equal(torch.cat(parts), X)


def test_a_row_of_a_mapping_keeps_its_type_and_shared_items() -> None:
    x = UserDict(input_ids=X, scale=torch.tensor(2.0), name="n")
    row = slice_rows(x, slice(1, 2), N)
    assert type(row) is UserDict and row["name"] == "n" and float(row["scale"]) == 2.0
    assert torch.equal(row["input_ids"], X[1:2])


def test_moving_to_a_device_leaves_what_is_no_tensor() -> None:
    meta = torch.device("meta")
    moved = to_device({"a": X, "b": "text"}, meta)
    assert moved["a"].device == meta and moved["b"] == "text"
    assert to_device(X, meta).device == meta


# Eval mode, for a while


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def mixed() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)))
    model.double().train()
    model[1].eval()
    model[2][0].eval()
    return model


def test_evaluating_restores_each_modules_own_flag() -> None:
    model = mixed()
    before = flags(model)
    assert True in before and False in before
    with evaluating(model):
        assert not any(flags(model))
    assert flags(model) == before


def test_evaluating_restores_the_flags_after_an_exception() -> None:
    model = mixed()
    before = flags(model)
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert flags(model) == before


# The probe


def look(model: nn.Module, loader: Any = None) -> None:
    with evaluating(model):
        Probe(model, fixed(DataLoader(ROWS, batch_size=4) if loader is None else loader)).check(model)


class Wrapped(nn.Module):
    """A hidden layer with something done to it by a function."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.change = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), change
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self.norm, self.first(x / 100)))


def test_a_sound_model_passes_the_probe() -> None:
    look(mixed())
    look(mixed(), DataLoader(ROWS, batch_size=4, shuffle=True))


def test_dropout_left_on_in_eval_mode_is_found() -> None:
    model = Wrapped(lambda norm, h: nn.functional.dropout(norm(h), 0.5, training=True))
    with pytest.raises(ValueError, match=r"Two forward passes on the same batch.*differ by up to.*without dropout"):
        look(model)


def test_dropout_that_ignores_eval_mode_is_named() -> None:
    class Always(nn.Dropout):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(True)

    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(Always(0.5)), nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match=r"modules that stay in train mode: 1\.0\. Try a train\(\) method that obeys"):
        look(model)


def test_batchnorm_that_stays_in_train_mode_is_named_and_its_statistics_are_left_alone() -> None:
    class Stays(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(True)

    model = nn.Sequential(nn.Linear(3, 4), Stays(4), nn.Linear(4, 3)).double()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(ValueError, match=r"must be in eval mode.*stay in train mode: 1\."):
        look(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_running_statistics_that_change_in_eval_mode_are_named_and_put_back() -> None:
    def in_train_mode(norm: nn.BatchNorm1d, h: Tensor) -> Tensor:
        h = torch.cat([h, h + 1])  # two rows at least, as batch statistics need
        return nn.functional.batch_norm(h, norm.running_mean, norm.running_var, training=True)[: len(h) // 2]

    model = Wrapped(in_train_mode)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(ValueError, match=r"changed buffers: norm\.running_mean, norm\.running_var.*BatchNorm in eval"):
        look(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_batch_statistics_of_a_convolution_are_found() -> None:
    images = torch.randn(N, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    with pytest.raises(ValueError, match=r"depend on its own input alone.*BatchNorm with running statistics"):
        look(model, [(images, y)])


def test_batch_statistics_of_a_linear_layer_are_found() -> None:
    """torch itself refuses a batch of one row here; the probe still says what is wrong."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match=r"BatchNorm with running statistics"):
        look(model)


def test_outputs_that_lean_on_their_neighbours_are_found() -> None:
    model = Wrapped(lambda norm, h: h - h.mean(0))
    with pytest.raises(ValueError, match=r"depend on its own input alone; got a first one that changed by"):
        look(model)


@pytest.mark.parametrize("batch_size", [4, N])
def test_a_stream_that_runs_dry_is_found(batch_size: int) -> None:
    class Once(CountsToKnown):
        def __init__(self) -> None:
            self.left = iter(list(ROWS))

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield from self.left

    with pytest.raises(ValueError, match="came out different the second time"):
        look(mixed(), DataLoader(Once(), batch_size=batch_size))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_are_found(value: float) -> None:
    model = mixed()
    with torch.no_grad():
        model[2][1].bias[0] = value
    with pytest.raises(ValueError, match="return finite outputs; got NaN or infinity"):
        look(model)


@pytest.mark.parametrize("breaks", [ArithmeticError, KeyboardInterrupt])
def test_the_probe_leaves_the_flags_alone_when_the_model_breaks_off(breaks: type[BaseException]) -> None:
    def fail(norm: nn.Module, h: Tensor) -> Tensor:
        raise breaks

    model = Wrapped(fail)
    model.last.eval()
    before = flags(model)
    with pytest.raises(breaks):
        look(model)
    assert flags(model) == before

"""Random augmentation is frozen: one draw for each datum, whatever reads it; and what cannot be frozen is refused."""

import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from laplace import Laplace
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torchvision import transforms

from ntk_iterncgp.data.fixed_order import FixedOrderData, Probe, TrainingDataWarning
from ntk_iterncgp.data.order import random_state
from ntk_iterncgp.persistence.fingerprint import data_digests
from ntk_iterncgp.runtime.threads import evaluating
from tests.parallel_work import Failed, in_processes
from tests.processes import CONTEXT

CPU, ROOT = torch.device("cpu"), Path(__file__).resolve().parents[2]
N, SIDE, CLASSES = 30, 6, 3
PIXELS = np.random.default_rng(0).integers(0, 256, (N, SIDE, SIDE, 3), dtype=np.uint8)
LABELS = torch.arange(N) % CLASSES

both = pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])
quiet = pytest.mark.filterwarnings("ignore::ntk_iterncgp.data.fixed_order.TrainingDataWarning")


class Images(Dataset):
    """As torchvision's data sets are: an image and a transform. Draws from all three global generators."""

    def __init__(self, transform: Callable[[Image.Image], Tensor] | None = None) -> None:
        self.transform = transform or transforms.Compose(
            [
                transforms.RandomCrop(SIDE, padding=2),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                lambda image: image + 0.1 * random.random() + 0.1 * np.random.rand(),
            ]
        )

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.transform(Image.fromarray(PIXELS[i])).float(), LABELS[i]


class Vectors(Dataset):
    """A vector for each datum, and something drawn."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(i), self.draw()]), LABELS[i]


class Stream(IterableDataset):
    """The same as a stream, of which each worker has every other part."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.dataset[i] for i in range(first, N, step))


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * (SIDE - 2) ** 2, CLASSES)
        return nn.Sequential(*layers)


def laplace(**settings: Any) -> Any:
    return Laplace(network(), "classification", "all", "iterncgp", **{"num_actions": 12, **settings})


def fixed(loader: Any) -> FixedOrderData:
    return FixedOrderData(loader, device=CPU)


def swept(loader: Any) -> Tensor:
    return torch.cat([x for x, _ in fixed(loader).batches()])


def look(loader: Any, num_inputs: int = 2) -> None:
    model = nn.Linear(num_inputs, CLASSES)
    with evaluating(model):
        Probe(model, fixed(loader)).check(model)


# The draw


def test_a_frozen_image_is_an_augmentation_of_its_own_and_they_differ() -> None:
    crop = transforms.Compose(
        [transforms.RandomCrop(SIDE, padding=2), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    places = []
    for i, image in enumerate(swept(DataLoader(Images(crop), batch_size=7))):
        padded = np.pad(PIXELS[i], ((2, 2), (2, 2), (0, 0)))
        possible = {
            (top, left, flip): transforms.functional.to_tensor(part[:, ::-1].copy() if flip else part)
            for top in range(5)
            for left in range(5)
            for part in [padded[top : top + SIDE, left : left + SIDE]]
            for flip in (False, True)
        }
        places.append([place for place, other in possible.items() if torch.equal(image, other)])
    assert all(places)
    tops, lefts, flips = ({place[0][k] for place in places} for k in range(3))
    assert len(tops) == len(lefts) == 5 and len(flips) == 2


@both
def test_workers_batches_order_and_sweeps_do_not_change_the_draw(num_workers: int) -> None:
    data = Images()
    expected = swept(DataLoader(data, batch_size=4))
    fixed_data = fixed(DataLoader(data, batch_size=7, shuffle=True, num_workers=num_workers))
    torch.manual_seed(99)
    for _ in range(2):
        assert torch.equal(torch.cat([x for x, _ in fixed_data.batches()]), expected)
    rows = torch.tensor([17, 3, 29, 0, 3])
    ((x, y),) = fixed_data.visit([rows])
    assert torch.equal(x, expected[rows]) and torch.equal(y, LABELS[rows])
    ((part, x),) = fixed_data.pick(torch.tensor([5, 2]), N, 7)
    assert torch.equal(x, expected[part])


@both
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_samplers_pinned_memory_and_persistent_workers_do_not_change_the_draw(num_workers: int) -> None:
    data, expected = Images(), swept(DataLoader(Images(), batch_size=4))
    keep = {"num_workers": num_workers, "persistent_workers": num_workers > 0, "pin_memory": True}
    chosen = [4, 4, 21, 0]
    tensors, numbers = [torch.tensor(i) for i in chosen], [np.int64(i) for i in chosen]
    for sampler in (chosen, tensors, numbers):
        assert torch.equal(swept(DataLoader(data, 3, sampler=sampler, **keep)), expected[chosen])
    assert torch.equal(swept(DataLoader(data, batch_sampler=[[4, 4], [21, 0]], **keep)), expected[chosen])
    assert torch.equal(swept(DataLoader(data, 3, **keep)), expected)


class Own(BatchSampler):
    """Draws from numpy's and Python's generators."""

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(N)
        for start in random.sample(range(0, N, 5), 6):
            yield order[start : start + 5].tolist()


def samplers(data: Dataset) -> dict[str, DataLoader]:
    return {
        "weighted": DataLoader(data, 5, sampler=WeightedRandomSampler([1.0] * N, 40)),
        "with replacement": DataLoader(data, 5, sampler=RandomSampler(data, replacement=True)),
        "generator": DataLoader(data, 5, sampler=RandomSampler(data, num_samples=11, generator=torch.Generator())),
        "own": DataLoader(data, batch_sampler=Own(RandomSampler(data), 5, False)),
    }


@pytest.mark.parametrize("kind", samplers(Images()))
def test_a_random_sampler_gives_a_refine_what_it_gave_the_fit_and_is_left_as_it_was(kind: str) -> None:
    loader = samplers(Images())[kind]
    generator = getattr(loader.sampler, "generator", None)
    states = [random_state([generator] if generator is not None else [])]
    first = swept(loader)
    states.append(random_state([generator] if generator is not None else []))
    assert states[0].is_that_of(states[1])
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    assert torch.equal(swept(loader), first)


def frozen_digests() -> list[int]:
    return data_digests(fixed(DataLoader(Images(), batch_size=9, shuffle=True))).tolist()


@pytest.mark.process
@pytest.mark.slow
def test_the_draw_is_the_same_in_another_process_with_other_hashes() -> None:
    code = "from tests.data.test_augmentation import frozen_digests; print(hash('datum'), frozen_digests())"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    hashed, _, digests = done.stdout.strip().partition(" ")
    assert digests == str(frozen_digests()) and hashed != str(hash("datum")), done.stderr


def test_indices_of_any_kind_have_a_draw_of_their_own() -> None:
    class Named(Dataset):
        def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
            return torch.rand(2), LABELS[0]

        def __len__(self) -> int:
            return 3

    def drawn(names: list[str], size: int) -> dict[str, list[float]]:
        return dict(zip(names, swept(DataLoader(Named(), size, sampler=names)).tolist(), strict=True))

    one, other = drawn(["a", "b", "c"], 2), drawn(["c", "a", "b"], 3)
    assert one == other and len({tuple(row) for row in one.values()}) == 3


@both
def test_parts_and_chains_of_datasets_and_whole_batches_are_frozen(num_workers: int) -> None:
    for data in (Subset(Images(), [3, 1, 4, 15]), ConcatDataset([Images(), Images()])):
        one = swept(DataLoader(data, 3, num_workers=num_workers))
        assert torch.equal(one, swept(DataLoader(data, 2, shuffle=True)))
    whole = DataLoader(Images(), batch_size=None, sampler=[3, 1, 4], num_workers=num_workers)
    one, other = ([x for x, _ in data.batches()] for data in (fixed(whole), fixed(whole)))
    assert all(map(torch.equal, one, other))


# Datasets that read several items at once


class AtOnce(Images):
    def __init__(self, transform: Any = None) -> None:
        super().__init__(transform)
        self.asked: list[list[int]] = []

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("to be read by __getitems__")

    def __getitems__(self, batch: list[int]) -> Any:
        self.asked.append(list(batch))
        return [super(AtOnce, self).__getitem__(i) for i in batch]


@pytest.mark.parametrize("part", [None, list(range(N))])
def test_a_dataset_that_reads_batches_does_so_unless_it_is_random(part: Any) -> None:
    def given(data: AtOnce) -> Dataset:
        return data if part is None else Subset(data, part)

    plain, augmented = AtOnce(transforms.ToTensor()), AtOnce()
    swept(DataLoader(given(plain), 10))
    assert [len(batch) for batch in plain.asked] == [10, 10, 10]
    assert torch.equal(swept(DataLoader(given(augmented), 10)), swept(DataLoader(Images(), 10)))
    assert [len(batch) for batch in augmented.asked] == [10] + [1] * N


def test_batches_that_cannot_be_taken_apart_are_refused_if_they_are_random() -> None:
    class Stacked(Images):
        def __getitems__(self, batch: list[int]) -> Any:
            return {"x": torch.rand(len(batch), 2)}

    with pytest.raises(ValueError, match=r"`__getitems__` .* must return a list with one item.*got dict"):
        swept(DataLoader(Stacked(), 4, collate_fn=lambda batch: (batch["x"], batch["x"])))


# Fits


def materialised() -> TensorDataset:
    return TensorDataset(swept(DataLoader(Images(), batch_size=1)), LABELS)


@pytest.mark.process
@quiet
@both
@pytest.mark.parametrize("settings", [{}, {"policy": "unit"}, {"mean": "refined"}], ids=str)
def test_fit_and_refine_are_those_of_the_frozen_images(num_workers: int, settings: dict[str, Any]) -> None:
    loader = DataLoader(Images(), 8, shuffle=True, num_workers=num_workers)
    la, expected = laplace(**settings), laplace(**settings)
    before = random_state()
    la.fit(loader)
    assert before.is_that_of(random_state()), "the caller's random numbers are their own"
    expected.fit(DataLoader(materialised(), 8))
    assert la.n_data == N
    new = torch.randn(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    assert torch.equal(la.predictive_moments(new)[1], expected.predictive_moments(new)[1])
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    before = random_state()
    la.refine(DataLoader(Images(), 8, num_workers=2 - num_workers), epochs=2)
    assert before.is_that_of(random_state())
    expected.refine(DataLoader(materialised(), 8), epochs=2)
    assert torch.equal(la.predictive_moments(new)[1], expected.predictive_moments(new)[1])


@quiet
@both
def test_a_last_layer_is_fitted_on_the_frozen_images(num_workers: int) -> None:
    variances, new = [], torch.randn(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    for loader in (DataLoader(Images(), 8, shuffle=True, num_workers=num_workers), DataLoader(materialised(), 8)):
        la = Laplace(network(), "classification", "last_layer", "iterncgp", num_actions=12)
        la.fit(loader)
        la.refine(loader, epochs=1)
        variances.append(la.predictive_moments(new)[1])
    assert torch.equal(*variances)


@quiet
def test_what_is_cached_of_the_first_sweep_is_the_frozen_draw() -> None:
    data = fixed(DataLoader(Images(), 8, shuffle=True))
    data.keep_bytes = 2**30
    first = torch.cat([x for x, _ in data.batches()])
    assert type(data._source.dataset) is TensorDataset  # type: ignore[union-attr]
    assert torch.equal(first, torch.cat([x for x, _ in data.batches()]))
    assert torch.equal(first, swept(DataLoader(Images(), 8)))


def fit_on_images() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingDataWarning)
        torch.manual_seed(int(os.environ.get("RANK", "0")) + os.getpid() % 1000)
        la = laplace()
        la.fit(DataLoader(Images(), 8, shuffle=True))
    return la.predictive_moments(torch.ones(1, 3, SIDE, SIDE))[1]


@pytest.mark.process
def test_several_processes_see_the_same_draw() -> None:
    found, _ = in_processes(2, fit_on_images)
    for one in found:
        assert not isinstance(one, Failed), one
        np.testing.assert_allclose(one, fit_on_images(), rtol=1e-4)


@pytest.mark.process
def test_with_workers_the_main_process_reads_nothing() -> None:
    """A file that it opened would be shared with all workers, and some formats do not survive that."""

    class InWorkersOnly(Images):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            assert get_worker_info() is not None
            return super().__getitem__(i)

    la, loader = laplace(), DataLoader(InWorkersOnly(), 8, num_workers=2)
    with pytest.warns(TrainingDataWarning, match="The draw is frozen"):
        la.fit(loader)
    la.refine(loader, epochs=1)


def open_file(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.file = torch.ones(2)  # type: ignore[attr-defined]


class Opened(Vectors):
    """Its file is opened by `worker_init_fn`."""

    file: Tensor

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        worker = get_worker_info()
        assert worker is not None and isinstance(worker.dataset, Opened | Stream)
        return i * worker.dataset.file, LABELS[i]


@pytest.mark.process
@pytest.mark.parametrize("kind", [lambda data: data, Stream], ids=["map-style", "stream"])
def test_worker_init_fn_finds_the_dataset_of_the_user(kind: Any) -> None:
    loader = DataLoader(kind(Opened(lambda: 0.0)), 4, num_workers=2, worker_init_fn=open_file)
    look(loader)
    assert sorted(swept(loader)[:, 0].tolist()) == list(range(N))


def test_threads_do_not_disturb_each_other() -> None:
    expected, found = swept(DataLoader(Images(), 4)), []

    def sweep() -> None:
        found.append(all(torch.equal(swept(DataLoader(Images(), size)), expected) for size in (2, 3, 4, 5)))

    before = random_state()
    threads = [threading.Thread(target=sweep) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4 and before.is_that_of(random_state())


@pytest.mark.process
@pytest.mark.slow
def test_workers_that_inherit_nothing_see_the_same_draw() -> None:
    """To which the dataset is sent, instead of being inherited."""
    data = Images(transforms.Compose([transforms.RandomCrop(SIDE, padding=2), transforms.ToTensor()]))
    loader = DataLoader(data, 8, num_workers=1, multiprocessing_context=CONTEXT)
    assert torch.equal(swept(loader), swept(DataLoader(data, 5)))
    assert fixed(loader).findings.is_random


# The notice


@both
def test_the_user_is_told_once_and_can_filter_it(num_workers: int) -> None:
    la, loader = laplace(), DataLoader(Images(), 8, shuffle=True, num_workers=num_workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.estimate_cost(loader)
        la.fit(loader)
        la.refine(loader, epochs=1)
    assert [w.category for w in caught] == [TrainingDataWarning]
    assert "The draw is frozen" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", TrainingDataWarning)
        la.fit(DataLoader(Images(), 8, num_workers=num_workers))


@both
def test_augmentation_that_seldom_changes_a_datum_is_noticed(num_workers: int) -> None:
    """By what it draws: of these eight data none is changed."""
    seldom = Vectors(lambda: float(random.random() < 1e-9))
    with pytest.warns(TrainingDataWarning, match="The draw is frozen"):
        look(DataLoader(seldom, 8, num_workers=num_workers))


@both
def test_data_that_are_not_random_are_read_without_a_word(num_workers: int) -> None:
    look(DataLoader(Vectors(lambda: 1.0), 8, shuffle=True, num_workers=num_workers))
    look(DataLoader(Vectors(lambda: 1.0), 8, num_workers=num_workers, collate_fn=lambda items: default_collate(items)))
    look(DataLoader(Stream(Vectors(lambda: 1.0)), 8, num_workers=num_workers))


# What cannot be frozen


def drawing_by_themselves() -> dict[str, Callable[[], float]]:
    own, other, third = torch.Generator().manual_seed(0), np.random.default_rng(0), random.Random(0)
    return {
        "torch.Generator": lambda: float(torch.rand((), generator=own)),
        "numpy.random.Generator": lambda: float(other.random()),
        "random.Random": third.random,
        "the clock": lambda: time.perf_counter_ns() % 1e6,
        "os.urandom": lambda: float(os.urandom(1)[0]),
    }


refused = pytest.raises(ValueError, match=r"must be the same on every sweep.*draws from a generator of its own")


@both
@pytest.mark.parametrize("kind", drawing_by_themselves())
def test_what_draws_from_a_generator_of_its_own_is_refused(kind: str, num_workers: int) -> None:
    with refused:
        look(DataLoader(Vectors(drawing_by_themselves()[kind]), 8, num_workers=num_workers))
    with refused:
        look(DataLoader(Stream(Vectors(drawing_by_themselves()[kind])), 8, num_workers=num_workers))


@both
def test_a_collate_function_with_a_generator_of_its_own_is_refused(num_workers: int) -> None:
    draw = drawing_by_themselves()["numpy.random.Generator"]

    def collate(items: list[Any]) -> Any:
        x, y = default_collate(items)
        return x + draw(), y

    with refused:
        look(DataLoader(Vectors(lambda: 0.0), 8, num_workers=num_workers, collate_fn=collate))


@pytest.mark.process
def test_what_depends_on_the_seed_of_a_worker_is_refused() -> None:
    def seed() -> float:
        worker = get_worker_info()
        assert worker is not None
        return float(worker.seed % 1000)

    with refused:
        look(DataLoader(Vectors(seed), 8, num_workers=2))


# Collate functions


def noisy(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x + torch.rand(x.shape), y


def mixup(items: list[Any]) -> Any:
    x, y = default_collate(items)
    share = np.random.beta(1.0, 1.0)
    return share * x + (1 - share) * x[torch.randperm(len(x))], y


def mixup_now_and_then(items: list[Any]) -> Any:
    return mixup(items) if random.random() < 0.5 else default_collate(items)


def centred(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x - x.mean(0), y


@both
@quiet
def test_a_random_collate_function_is_frozen_by_batches(num_workers: int) -> None:
    loader = DataLoader(Vectors(random.random), 8, collate_fn=noisy, num_workers=num_workers)
    look(loader)
    data = fixed(loader)
    first = torch.cat([x for x, _ in data.batches()])
    assert torch.equal(first, torch.cat([x for x, _ in data.batches()]))
    assert torch.equal(first, swept(DataLoader(Vectors(random.random), 8, shuffle=True, collate_fn=noisy)))
    assert not data.can_jump(N), "other batches would have other draws"
    ((rows, x),) = data.pick(torch.tensor([3, 1]), N, 4)
    assert torch.equal(x, first[rows])


@both
@pytest.mark.parametrize("collate_fn", [mixup, mixup_now_and_then, centred])
@pytest.mark.parametrize("batch_size", [2, 3, 8])
def test_a_collate_function_that_mixes_data_is_refused(collate_fn: Any, batch_size: int, num_workers: int) -> None:
    loader = DataLoader(Vectors(lambda: 0.0), batch_size, collate_fn=collate_fn, num_workers=num_workers)
    with pytest.raises(ValueError, match=r"must depend on its own datum alone.*does not mix data"):
        look(loader)
    assert not fixed(loader).can_jump(N)


def test_a_collate_function_that_pads_to_the_longest_of_a_batch_does_not_mix() -> None:
    def pad(items: list[Any]) -> Any:
        rows = [x.repeat(1 + int(x[0]) % 4) for x, _ in items]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.stack([y for _, y in items])

    data = fixed(DataLoader(Vectors(lambda: 1.0), 4, collate_fn=pad))
    assert len({x.shape[1] for x, _ in data.visit([torch.arange(2), torch.arange(4)])}) == 2
    assert data.can_jump(N) and data.findings.repeats and not data.findings.mixes


class Masked(Vectors):
    """Mappings, as for language models."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return {"input_ids": x, "mask": torch.rand(2), "labels": y}


def masked_by_batch(items: list[Any]) -> Any:
    batch = default_collate(items)
    return {**batch, "mask": batch["mask"] - batch["mask"].mean(0), "table": torch.ones(8, 2)}


@both
@quiet
def test_mappings_are_frozen_and_not_mixed(num_workers: int) -> None:
    loader = DataLoader(Masked(random.random), 8, num_workers=num_workers)
    one, other = (torch.cat([x["mask"] for x, _ in fixed(loader).batches()]) for _ in range(2))
    assert torch.equal(one, other) and len(one.unique()) == 2 * N
    assert fixed(loader).findings.is_random and fixed(loader).findings.repeats
    mixed = DataLoader(Masked(random.random), 8, num_workers=num_workers, collate_fn=masked_by_batch)
    assert fixed(mixed).findings.mixes and fixed(mixed).findings.repeats


# Streams


@both
@pytest.mark.parametrize(
    "settings",
    [{}, {"persistent_workers": True}, {"generator": torch.Generator()}],
    ids=["plain", "persistent workers", "generator"],
)
def test_a_random_stream_is_the_same_on_every_sweep(num_workers: int, settings: dict[str, Any]) -> None:
    if settings.get("persistent_workers") and not num_workers:
        settings = {}
    loader = DataLoader(Stream(Images()), 5, num_workers=num_workers, **settings)
    before = random_state([loader.generator] if loader.generator else [])
    data = fixed(loader)
    first = torch.cat([x for x, _ in data.batches()])
    assert before.is_that_of(random_state([loader.generator] if loader.generator else []))
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    assert torch.equal(first, torch.cat([x for x, _ in data.batches()]))
    assert torch.equal(first, swept(loader)) and len(first) == N and len({float(x.sum()) for x in first}) == N


@both
def test_a_fit_on_a_random_stream_is_that_of_the_frozen_images(num_workers: int) -> None:
    loader = DataLoader(Stream(Images()), 5, num_workers=num_workers)
    batches = list(fixed(loader).batches())
    la, expected = laplace(), laplace()
    with pytest.warns(TrainingDataWarning, match="The draw is frozen"):
        la.fit(loader)
    expected.fit(batches)
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    la.refine(loader, epochs=1)
    expected.refine(batches, epochs=1)
    assert torch.equal(la.posterior.images, expected.posterior.images)


@quiet
@both
def test_a_shuffled_stream_has_one_order(num_workers: int) -> None:
    class Shuffled(Stream):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            items = list(super().__iter__())
            return (items[i] for i in torch.randperm(len(items)).tolist())

    loader = DataLoader(Shuffled(Vectors(lambda: 0.0)), 4, num_workers=num_workers)
    look(loader)
    assert torch.equal(swept(loader), swept(loader))
    assert sorted(swept(loader)[:, 0].tolist()) == list(range(N))


@both
def test_a_loader_with_a_way_of_its_own_is_walked_as_it_is(num_workers: int) -> None:
    class Tripled(DataLoader):
        def __iter__(self) -> Iterator[Any]:
            for x, y in super().__iter__():
                yield 3 * x + torch.rand(()), y

    loader = Tripled(Vectors(random.random), 4, shuffle=True, num_workers=num_workers)
    before, data = random_state(), fixed(loader)
    first = torch.cat([x for x, _ in data.batches()])
    assert before.is_that_of(random_state()) and not data.can_jump(N)
    assert torch.equal(first, torch.cat([x for x, _ in data.batches()]))
    assert sorted((first[:, 0] / 3).int().tolist()) == list(range(N))
    look(loader)

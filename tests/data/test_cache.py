"""Data that are loaded one by one are loaded once, where there is room for them; and nothing else changes."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ntk_iterncgp.data.fixed_order import Cache, FixedOrderData
from ntk_iterncgp.fitting import cost

N = 50
X, y = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3


class Decoded(Dataset):
    """Counts what is read of it."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return X[index], y[index]


def fitted(dataset: Dataset, shuffle: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=6)
    la.fit(DataLoader(dataset, batch_size=8, shuffle=shuffle))
    return la


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_fit_reads_each_datum_once_and_is_that_of_tensors(shuffle: bool) -> None:
    dataset = Decoded()
    la, plain = fitted(dataset, shuffle), fitted(TensorDataset(X, y), shuffle)
    assert dataset.reads <= N + 5 * 8  # and the first batch a few times: probes, costs
    assert torch.equal(la.posterior.images, plain.posterior.images)


def test_without_room_nothing_is_kept_and_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "KEEP_BYTES", 10)
    dataset = Decoded()
    la = fitted(dataset)
    assert dataset.reads >= 2 * N
    assert torch.equal(la.posterior.images, fitted(TensorDataset(X, y)).posterior.images)


def test_a_sweep_that_ends_early_keeps_nothing() -> None:
    data = FixedOrderData(DataLoader(Decoded(), batch_size=8), device=torch.device("cpu"))
    data.keep_bytes = 2**20
    sweep = data.batches()
    next(sweep), next(sweep)
    sweep.close()
    source = data._source
    assert source is not None and isinstance(source.dataset, Decoded)
    assert [len(targets) for _, targets in data.batches()] == [8] * 6 + [2]
    assert data._source is not None and isinstance(data._source.dataset, TensorDataset)
    assert [len(targets) for _, targets in data.batches()] == [8] * 6 + [2]


@pytest.mark.parametrize(
    "batches",
    [
        [{"x": X}],
        [(X, "text")],
        [(X[:8], y[:8]), (X[:8], y[:7])],
        [(X[:8], y[:8]), (X[:8, :2], y[:8])],  # padded, each batch to its own width
        [(X, y), (X, y)],  # more than there were said to be
    ],
    ids=["mapping", "text", "lengths", "widths", "too many"],
)
def test_what_is_not_one_row_per_datum_is_not_kept(batches: list[Any]) -> None:
    kept = Cache(N, 2**20)
    assert not all([kept.add(batch) for batch in batches])


def test_no_more_is_kept_than_may_be() -> None:
    size = N * (3 * 4 + 8)
    assert Cache(N, size).add((X[:8], y[:8])) and not Cache(N, size - 1).add((X[:8], y[:8]))

"""Digests: what is the same has the same, and any one thing that changes changes them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ntk_iterncgp import kernels, likelihoods
from ntk_iterncgp.persistence.fingerprint import described, digest, digest_rows

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def rows(dtype: torch.dtype, *shape: int) -> Tensor:
    drawn = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=8)
@given(row=st.integers(0, 4), column=st.integers(0, 17_000))
def test_one_entry_that_changes_changes_the_digest_of_its_row_alone(dtype: torch.dtype, row: int, column: int) -> None:
    x, y = rows(dtype, 5, 17_001), torch.arange(5)
    changed = x.clone()
    changed[row, column] = 1 - changed[row, column].long()
    differ = digest_rows(x, y) != digest_rows(changed, y)
    assert differ.tolist() == [i == row for i in range(5)]
    assert digest(x) != digest(changed)


def test_rows_that_trade_places_or_columns_that_do_are_noticed() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert (digest_rows(x, x[:, :1]) != digest_rows(x, x[:, 1:2])).all()
    assert (digest_rows(x) != digest_rows(x.flip(1))).all()
    assert (digest_rows(x, torch.zeros(4, 3)) != digest_rows(torch.zeros(4, 3), x)).all()
    assert digest(x) != digest(x.flip(0)) and digest(x) != digest(x.reshape(3, 4))


def test_how_rows_come_in_batches_does_not_matter() -> None:
    x = torch.randn(7, 20_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(digest_rows(x), torch.cat([digest_rows(part) for part in x.split(3)]))


def test_a_change_in_the_last_digit_of_a_setting_is_noticed() -> None:
    def all_of(kernel: kernels.Kernel) -> object:
        return described(kernel.trainable())

    assert all_of(kernels.RBF(1.0)) == all_of(kernels.RBF(1.0)) != all_of(kernels.RBF(1.0 + 2e-16))
    assert described(likelihoods.Gaussian(0.1)) != described(likelihoods.Gaussian(0.1 + 1e-17 * 2))
    assert described(likelihoods.Softmax(3)) != described(likelihoods.Softmax(4)) != described(likelihoods.Poisson())
    assert described(digest_rows) == "ntk_iterncgp.persistence.fingerprint.digest_rows"

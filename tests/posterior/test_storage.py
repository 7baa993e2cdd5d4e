"""A stored in bfloat16: half of the memory, and what its rounding loses is in the variance."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laplace import Laplace
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.posterior.weight_space import TOLERANCE
from tests.clusters_helpers import Net, joint_variance, make_net
from tests.network_cases import dense_jacobian


def fitted(net: Net, dtype: torch.dtype = torch.float32, **given: Any) -> Any:
    la = net.laplace(dtype, storage="bfloat16", **given)
    la.dtype = dtype  # of derivatives
    la.fit(net.loader(dtype))
    return la


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    likelihood=st.sampled_from(["classification", "regression"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    precision=st.sampled_from([1e-3, 1.0, 1e2]),
    num_actions=st.integers(1, 40),
    copies=st.integers(1, 3),
)
def test_variance_is_never_below_the_exact_one(
    seed: int, likelihood: str, dtype: torch.dtype, precision: float, num_actions: int, copies: int
) -> None:
    """Also where data come several times, so that the errors of their actions are the same."""
    net = make_net(seed, likelihood=likelihood, num_data=12)
    net = Net(net.model, likelihood, net.x.repeat(copies, 1), net.y.repeat(*[copies] + [1] * (net.y.ndim - 1)), 0.1)
    la = fitted(net, dtype, num_actions=num_actions, prior_precision=precision)
    J = dense_jacobian(net.model, net.near_and_far()).flatten(0, 1)
    exact = J @ net.weight_covariance(precision) @ J.T
    found = joint_variance(la, net.near_and_far())
    values = torch.linalg.eigvalsh((1 + 2 * TOLERANCE) * found - exact) / (J @ J.T).diagonal().max() * precision
    assert float(values.min()) >= -2e-6


@pytest.mark.parametrize("kind", ["each layer", "each weight"])
def test_nor_with_a_precision_for(kind: str) -> None:
    net = make_net(3, num_data=20)
    la = fitted(net, num_actions=12)
    number = len(la._layer_sizes()) if kind == "each layer" else la.n_params
    la.prior_precision = precision = torch.logspace(-2, 2, number)
    per_weight = la.posterior.precision_of_weights(precision)
    x = net.near_and_far()
    train, J = (dense_jacobian(net.model, at).flatten(0, 1) for at in (net.x, x))
    exact = J @ torch.linalg.inv(per_weight.diag() + train.T @ net.curvature() @ train) @ J.T
    scaled = joint_variance(la, x) * (1 + 2 * TOLERANCE) - exact
    prior = (J / per_weight @ J.T).diagonal()
    assert float((scaled.diagonal() / prior).min()) >= -2e-6


def test_it_takes_half_of_the_memory_says_nearly_as_much_and_is_saved(tmp_path: Any) -> None:
    net = make_net(1, num_data=30)
    whole = net.laplace(torch.float32, num_actions=10)
    whole.fit(net.loader(torch.float32))
    la = fitted(net, num_actions=10)
    assert la.posterior.images.dtype == torch.bfloat16
    assert la.posterior.images.nbytes == 2 * la.posterior.images.numel()
    x = net.near_and_far().float()
    variances = [model.predictive_moments(x)[1].diagonal(dim1=1, dim2=2) for model in (whole, la)]
    torch.testing.assert_close(*variances, rtol=0.05, atol=1e-6)
    torch.save(la.state_dict(), tmp_path / "posterior.pt")
    other = net.laplace(torch.float32)
    other.load_state_dict(torch.load(tmp_path / "posterior.pt", weights_only=True))
    assert torch.equal(other(x), la(x)) and other.posterior.images.dtype == torch.bfloat16


def test_it_may_be_updated_merged_and_compressed_and_stays_above_the_exact_one() -> None:
    net = make_net(2, num_data=24)
    halves = [TensorDataset(net.x[part].float(), net.y[part]) for part in (slice(0, 12), slice(12, 24))]
    first, second = (net.laplace(torch.float32, storage="bfloat16", policy="clusters") for _ in range(2))
    for la, half in zip((first, second), halves, strict=True):
        la.fit(DataLoader(half, 4))
    first.merge(second)
    x = net.near_and_far()
    merged = joint_variance(first, x)
    first.compress(6)
    assert first.posterior.images.dtype == torch.bfloat16
    for found in (merged, joint_variance(first, x)):
        assert float(((1 + 2 * TOLERANCE) * found - net.exact(x)).diagonal().min()) >= 0
    with pytest.raises(RuntimeError, match="with `storage`"):
        second.refine(DataLoader(halves[1], 4), epochs=1)


def test_another_storage_is_refused() -> None:
    net = make_net(0)
    with pytest.raises(ValueError, match="`storage` must be None or 'bfloat16'; got 'int8'"):
        Laplace(net.model, "classification", "all", "iterncgp", storage="int8")

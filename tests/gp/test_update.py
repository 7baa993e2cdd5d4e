"""Conditioning on more data: equal to a refit with all of them, by products for what is new alone."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ntk_iterncgp import NonConjugateGP
from ntk_iterncgp.kernels import KernelMatrix
from tests import oracles
from tests.checkpoint_helpers import Killed, checkpoint_in, die_at_save
from tests.gp.test_exact import LIKELIHOODS, NOISE, N, X, dense, made, truth, x

OLD = 15
NAMES = pytest.mark.parametrize("name", LIKELIHOODS)
ALL_ACTIONS: dict[str, Any] = dict(max_products=1000, newton_tol=1e-9, max_newton_steps=100)


def updated(name: str, **settings: Any) -> NonConjugateGP:
    y = LIKELIHOODS[name][1]
    return made(name, **settings).fit(X[:OLD], y[:OLD]).update(X[OLD:], y[OLD:])


@pytest.mark.parametrize("shared", [True, False], ids=["one kernel", "a kernel each"])
@NAMES
def test_an_exact_update_is_the_posterior_of_all_data(name: str, shared: bool) -> None:
    gp = updated(name, shared=shared)
    assert gp.report_.status == "exact"
    mean, covariance, evidence = truth(gp, name, X, LIKELIHOODS[name][1], x)
    found_mean, found = gp.latent(x, joint=True)
    torch.testing.assert_close(found_mean.flatten(), mean, rtol=0.0, atol=1e-8)
    torch.testing.assert_close(found, covariance, rtol=0.0, atol=1e-8)
    assert gp.log_evidence().value == pytest.approx(evidence, abs=1e-8)


@pytest.mark.parametrize("actions", ["joint", "kronecker", "a kernel each"])
@NAMES
def test_an_iterative_update_with_all_actions_is_the_posterior_of_all_data(name: str, actions: str) -> None:
    if actions == "kronecker" and name != "softmax":
        pytest.skip("one output")
    settings = ALL_ACTIONS | {"policy": "curvature_residual", "shared": actions != "a kernel each"}
    settings["actions"] = actions if settings["shared"] else "joint"
    gp = updated(name, **settings).refine(1000)
    mean, covariance, _ = truth(gp, name, X, LIKELIHOODS[name][1], x)
    found_mean, found = gp.latent(x, joint=True)
    torch.testing.assert_close(found_mean.flatten(), mean, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(found, covariance, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("policy", ["curvature_residual", "residual", "unit", "random_subspace"])
@NAMES
def test_the_variance_is_never_below_the_exact_one(name: str, policy: str, dtype: torch.dtype) -> None:
    y, inputs = LIKELIHOODS[name][1], X.to(dtype)
    gp = made(name, policy=policy, max_products=6, products_per_step=3).fit(inputs[:OLD], y[:OLD])
    for start, products in ((OLD, 1), (OLD + 4, 5)):
        gp.update(inputs[start : start + 4], y[start : start + 4], max_products=products)
    state = gp.posterior_.state
    assert state.problem.prior.num_data == OLD + 8
    seen = inputs[: OLD + 8].double()
    exact = oracles.posterior_at(
        name, state.latent, dense(gp, seen, seen), dense(gp, x, seen), dense(gp, x, x), noise=NOISE
    )
    found = gp.latent(x.to(dtype))[1].diagonal(dim1=1, dim2=2).flatten().double()
    assert bool((found >= exact.diagonal() * (1 - 1e-5) - 1e-10).all())


@NAMES
def test_new_points_shrink_the_variance_there_at_once(name: str) -> None:
    y, far = LIKELIHOODS[name][1], X[OLD:] + 5.0
    gp = made(name, policy="curvature_residual", max_products=20).fit(X[:OLD], y[:OLD])
    before = gp.latent(far)[1].diagonal(dim1=1, dim2=2).sum()
    gp.update(far, y[OLD:], max_products=4)
    assert float(gp.latent(far)[1].diagonal(dim1=1, dim2=2).sum()) < 0.95 * float(before)


def test_products_are_spent_on_what_is_new_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, pairs = KernelMatrix.__matmul__, [0]

    def counted(self: KernelMatrix, block: Tensor) -> Tensor:
        pairs[0] += len(self.X1) * len(self.X2) * block.shape[1]
        return multiply(self, block)

    monkeypatch.setattr(KernelMatrix, "__matmul__", counted)
    y = LIKELIHOODS["poisson"][1]
    gp = made("poisson", policy="curvature_residual", max_products=8).fit(X[:OLD], y[:OLD])
    rank, before = gp.report_.rank, gp.report_.num_products
    pairs[0] = 0
    gp.update(X[OLD:], y[OLD:], max_products=3)
    rectangular = math.ceil(rank * (N - OLD) * OLD / N**2)
    assert gp.report_.num_products <= before + rectangular + 3
    assert pairs[0] <= 3 * N**2 + (rank + 64) * N * OLD  # of which 64 columns are those of the check


@pytest.mark.parametrize("policy", ["auto", "curvature_residual"])
@NAMES
def test_an_update_that_was_killed_goes_on_with_the_same_numbers(
    name: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = LIKELIHOODS[name][1]

    def run(checkpoint: Any = None) -> NonConjugateGP:
        gp = made(name, policy=policy, max_products=9).fit(X[:OLD], y[:OLD])
        return gp.update(X[OLD:], y[OLD:], checkpoint=checkpoint)

    whole = run()
    with monkeypatch.context() as patch:
        die_at_save(1, patch)
        with pytest.raises(Killed):
            run(checkpoint_in(tmp_path))
    resumed = run(checkpoint_in(tmp_path))
    for one, other in zip(resumed.latent(x), whole.latent(x), strict=True):
        assert torch.equal(one, other)


def test_unfit_data_are_refused_and_change_nothing() -> None:
    y = LIKELIHOODS["softmax"][1]
    with pytest.raises(RuntimeError, match="must be fitted first; got one that has not been"):
        made("softmax").update(X, y)
    gp = made("softmax").fit(X[:OLD], y[:OLD])
    before = gp.predict(x)
    for inputs, targets, error, sentence in (
        (X[:2, :1], y[:2], ValueError, r"`X` must have 2 columns, as the training inputs; got 1"),
        (X[:2].float(), y[:2], TypeError, r"`X` must be torch\.float64 on cpu, as the training inputs"),
        (X[:2], y[:3], ValueError, r"`y` must hold one target for each of the 2 rows of X; got 3"),
        (X[:2], y[:2] + 5, ValueError, r"whole numbers from 0 to 2"),
    ):
        with pytest.raises(error, match=sentence):
            gp.update(inputs, targets)
    with pytest.raises(ValueError, match=r"`max_products` must be .*; got 0"):
        gp.update(X[:2], y[:2], max_products=0)
    assert torch.equal(gp.predict(x), before)
    assert gp.update(X[:0], y[:0]) is gp and torch.equal(gp.predict(x), before)


def test_many_small_updates_are_one_fit() -> None:
    y = LIKELIHOODS["bernoulli"][1]
    gp = made("bernoulli").fit(X[:6], y[:6])
    for start in range(6, N, 3):
        gp.update(X[start : start + 3], y[start : start + 3])
    whole = made("bernoulli").fit(X, y)
    for one, other in zip(gp.latent(x), whole.latent(x), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-8)


def test_an_exact_fit_that_outgrows_memory_goes_on_by_iterating(monkeypatch: pytest.MonkeyPatch) -> None:
    y = LIKELIHOODS["poisson"][1]
    gp = made("poisson").fit(X[:OLD], y[:OLD])
    monkeypatch.setattr("ntk_iterncgp.gp.affordable.available_bytes", lambda device: 2**10)
    gp.update(X[OLD:], y[OLD:])
    assert gp.report_.status != "exact" and gp.posterior_.prior.num_data == N

"""Two fits in two threads of one process give what each gives alone, and leave nothing behind."""

import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.jacobian.layers import LayerRows
from ntk_iterncgp.posterior.detection import Measured
from ntk_iterncgp.posterior.weight_space import ConditionedPosterior
from ntk_iterncgp.runtime.threads import evaluating, plain_attention, together
from tests.clusters_helpers import joint_variance, make_net
from tests.network_cases import untouched

REPEATS = 3


def in_threads(*runs: Callable[[], Any]) -> list[Any]:
    """All at once, and started at the same moment."""
    barrier = threading.Barrier(len(runs))

    def started(run: Callable[[], Any]) -> Any:
        barrier.wait()
        return run()

    with ThreadPoolExecutor(len(runs)) as pool:
        return [future.result() for future in [pool.submit(started, run) for run in runs]]


def gp_moments(seed: int, policy: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(80, 2, generator=generator, dtype=torch.float64)
    gp = NonConjugateGP(kernels.Matern32(0.5, 2.0), likelihoods.Softmax(3), policy=policy, max_products=12, seed=seed)
    gp.fit(X, torch.randint(3, (80,), generator=generator))
    gp.refine(4)
    return gp.latent(X[:9])


def test_two_gps_do_not_disturb_each_other() -> None:
    runs = [lambda: gp_moments(0, "random_subspace"), lambda: gp_moments(1, "curvature_residual")]
    alone = [run() for run in runs]
    for _ in range(REPEATS):
        for found, expected in zip(in_threads(*runs), alone, strict=True):
            assert all(map(torch.equal, found, expected))


class Dropping(nn.Module):
    """A network with dropout, of which eval mode alone makes a function."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.dropout = body, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.body[2](self.dropout(self.body[1](self.body[0](x))))


def laplace_variance(model: nn.Module, seed: int, **settings: Any) -> Tensor:
    net = make_net(seed, num_data=40)
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=6, seed=seed, **settings)
    loader = DataLoader(TensorDataset(net.x, net.y), batch_size=8)
    la.fit(loader)
    la.refine(loader, epochs=1)
    return joint_variance(la, net.x[:3])


@pytest.mark.parametrize("policy", ["clusters", "curvature_residual"])
@pytest.mark.parametrize("shared", [False, True], ids=["two models", "one model"])
def test_two_networks_or_one_do_not_disturb_each_other(shared: bool, policy: str) -> None:
    first = Dropping(deepcopy(make_net(0).model)).train()
    second = first if shared else deepcopy(first)
    runs = [lambda: laplace_variance(first, 0, policy=policy), lambda: laplace_variance(second, 1, policy=policy)]
    alone = [run() for run in runs]
    with untouched(first), untouched(second):
        for _ in range(REPEATS):
            for found, expected in zip(in_threads(*runs), alone, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert all(isinstance(p, nn.Parameter) for p in first.parameters()) and first.training


def test_a_network_beside_a_gp() -> None:
    model = deepcopy(make_net(0).model)
    runs = [lambda: laplace_variance(model, 0), lambda: gp_moments(0, "residual")[1]]
    alone = [run() for run in runs]
    for found, expected in zip(in_threads(*runs), alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


CALLS: dict[str, tuple[Callable[[Any, Tensor], Any], type, str]] = {  # and where their products are
    "prediction": (lambda la, x: la(x), ConditionedPosterior, "covariance"),
    "attribution": (lambda la, x: la.attribution(x), ConditionedPosterior, "contributions"),
    "score": (lambda la, x: la.detector().score(x), LayerRows, "by_layer"),
    "p-value": (lambda la, x: la.detector().p_value(x), Measured, "latent"),
    "convergence": (lambda la, x: la.convergence(x).variance, LayerRows, "products"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_prediction_does_not_wait_for_the_products_of_another_call(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads wait for each other while weights are exchanged in the model they share, and no longer."""
    net = make_net(0, num_data=20)
    la, x = net.laplace(torch.float32, num_actions=6, policy="clusters"), net.near_and_far().float()
    la.fit(net.loader(torch.float32))
    la.detector(x.repeat(20, 1) + 0.1)
    ask, owner, name = CALLS[call]
    expected, of_call, plain = la(x), ask(la, x), getattr(owner, name)
    is_inside, other_is_done = threading.Event(), threading.Event()

    def slow(self: Any, *arguments: Any, **settings: Any) -> Any:
        if not is_inside.is_set():  # the first to come
            is_inside.set()
            assert other_is_done.wait(30)
        return plain(self, *arguments, **settings)

    def second() -> Tensor:
        assert is_inside.wait(30)
        found: Tensor = la(x)
        other_is_done.set()
        return found

    monkeypatch.setattr(owner, name, slow)
    first, other = in_threads(lambda: ask(la, x), second)
    assert torch.equal(torch.as_tensor(first), torch.as_tensor(of_call)) and torch.equal(other, expected)


def test_what_belongs_to_all_threads_is_as_before() -> None:
    def settings() -> tuple[Any, ...]:
        return (
            signal.getsignal(signal.SIGINT),
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            list(warnings.filters),
            torch.is_grad_enabled(),
        )

    before = settings()
    in_threads(*(lambda seed=seed: laplace_variance(deepcopy(make_net(0).model), seed) for seed in range(3)))
    assert settings() == before


@pytest.mark.parametrize("order", ["first out first", "first out last"])
def test_eval_mode_lasts_until_the_last_has_gone(order: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout()).train()
    model[1].eval()
    contexts = [evaluating(model), evaluating(model)]
    for context in contexts:
        context.__enter__()
    for context in contexts if order == "first out first" else contexts[::-1]:
        assert not model.training
        context.__exit__(None, None, None)
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def test_the_plain_attention_lasts_until_the_last_has_gone() -> None:
    contexts = [plain_attention(), plain_attention()]
    for context in contexts:
        context.__enter__()
    for context in contexts:
        assert not torch.backends.mha.get_fastpath_enabled() and not torch.backends.cuda.flash_sdp_enabled()
        context.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled() and torch.backends.cuda.flash_sdp_enabled()


def test_an_error_inside_leaves_nothing_behind() -> None:
    thing, seen = object(), []
    with pytest.raises(ZeroDivisionError), together(thing, lambda: 5, seen.append):
        raise ZeroDivisionError
    assert seen == [5]
    with together(thing, lambda: 6, seen.append), together(thing, lambda: 7, seen.append):
        pass
    assert seen == [5, 6]

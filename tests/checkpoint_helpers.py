"""What the tests of checkpoints share: runs at both front doors, and what is the same about two of them."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ntk_iterncgp import Checkpoint, NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.persistence.checkpoint import CheckpointSession
from tests.clusters_helpers import Net, Stream, make_net


class Killed(BaseException):
    """Ends a run wherever it is, as a signal would."""


@dataclass(frozen=True)
class Run:
    """A program: what it makes, and the calls it makes on it with a checkpoint."""

    make: Callable[[], Any]
    calls: tuple[Callable[[Any, Checkpoint | None], object], ...]

    def __call__(self, checkpoint: Checkpoint | None = None) -> Any:
        made = self.make()
        for call in self.calls:
            call(made, checkpoint)
        return made


def points(number: int = 14, seed: int = 0) -> Tensor:
    return torch.randn(number, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(num_classes: int, number: int = 14) -> Tensor:
    return torch.arange(number) % num_classes


def gp(likelihood: Any = None, kernel: Any = None, **settings: Any) -> NonConjugateGP:
    kernel = kernel or kernels.Matern32(lengthscale=0.8, outputscale=2.0)
    settings = {"max_products": 9, "products_per_step": 3, "newton_tol": 1e-6, "seed": 3} | settings
    return NonConjugateGP(kernel, likelihood or likelihoods.Softmax(3), **{"policy": "curvature_residual"} | settings)


def gp_run(targets: Tensor, refine: int = 0, **settings: Any) -> Run:
    def fit(made: Any, checkpoint: Checkpoint | None) -> None:
        made.fit(points(len(targets)), targets, checkpoint=checkpoint)

    def more(made: Any, checkpoint: Checkpoint | None) -> None:
        made.refine(refine, checkpoint=checkpoint)

    return Run(lambda: gp(**settings), (fit, more) if refine else (fit,))


def net_run(net: Net, refine: float = 0, *, streamed: bool = False, subset: str = "all", **settings: Any) -> Run:
    def loader() -> DataLoader:
        return DataLoader(Stream(net.dataset()) if streamed else net.dataset(), batch_size=4)

    def fit(made: Any, checkpoint: Checkpoint | None) -> None:
        made.fit(loader(), checkpoint=checkpoint)

    def more(made: Any, checkpoint: Checkpoint | None) -> None:
        made.refine(loader(), epochs=refine, checkpoint=checkpoint)

    return Run(lambda: net.laplace(subset=subset, **settings), (fit, more) if refine else (fit,))


def small_net(**settings: Any) -> Net:
    return make_net(5, **{"num_data": 21, **settings})


three, counts = labels(3), labels(5).double()
RUNS: dict[str, Run] = {
    "softmax, Kronecker": gp_run(three),
    "softmax, joint": gp_run(three, actions="joint"),
    "softmax, compressed": gp_run(three, actions="joint", max_rank=4),
    "softmax, eigen": gp_run(three, actions="joint", max_rank=4, compression="eigen"),
    "softmax, Kronecker, compressed": gp_run(three, max_rank=16),
    "softmax, random": gp_run(three, policy="random_subspace", actions="joint"),
    "softmax, a kernel each": gp_run(three, kernel=[kernels.RBF(0.5), kernels.RBF(0.7), kernels.Matern12(0.9)]),
    "softmax, undamped": gp_run(three, damped=False, policy="residual"),
    "poisson": gp_run(counts, likelihood=likelihoods.Poisson()),
    "bernoulli, unit": gp_run(labels(2).double(), likelihood=likelihoods.Bernoulli(), policy="unit"),
    "gaussian": gp_run(counts, likelihood=likelihoods.Gaussian(0.1)),
    "gaussian, enough": gp_run(counts, likelihood=likelihoods.Gaussian(0.1), max_products=30),
    "softmax, float32": gp_run(three, dtype=torch.float32),
    "refine": gp_run(three, refine=5, actions="joint"),
    "refine, exhausted": gp_run(three, refine=19, policy="unit", max_products=20, actions="joint"),
    "clusters": net_run(small_net(), num_actions=5),
    "clusters, streamed": net_run(small_net(), streamed=True, num_actions=5),
    "clusters, two directions": net_run(small_net(), num_actions=4, cotangents=2),
    "clusters, cut short": net_run(small_net(), num_actions=5, max_epochs=0.9),
    "clusters, last layer": net_run(small_net(), subset="last_layer", num_actions=5),
    "clusters, regression": net_run(small_net(likelihood="regression"), num_actions=5),
    "clusters, refined": net_run(small_net(), 2.5, num_actions=5, max_epochs=0.9),
    "clusters, streamed, refined": net_run(small_net(), 2.5, streamed=True, num_actions=5, max_epochs=0.9),
    "clusters, exhausted": net_run(small_net(num_data=6), 60, num_actions=6),
    "products": net_run(small_net(), policy="curvature_residual", num_actions=6),
    "products, random": net_run(small_net(), policy="random_subspace", num_actions=6, max_rank=4),
    "products, exhausted": net_run(small_net(num_data=5), policy="unit", num_actions=12),
    "products, refined": net_run(small_net(), 5, policy="curvature_residual", num_actions=4),
    "refined mean": net_run(small_net(), mean="refined", num_actions=8, actions_per_step=3, prior_mean=0.1),
    "refined mean, refined": net_run(small_net(), 5, mean="refined", num_actions=5, actions_per_step=3),
}


def numbers(made: Any) -> dict[str, Any]:
    """Everything that a run computed, but for the clock."""
    history = [astuple(replace(record, seconds=0.0)) for record in made.report_.history]
    found: dict[str, Any] = {"history": repr(history), "report": repr(replace(made.report_, seconds=0.0))}
    if isinstance(made, NonConjugateGP):
        state = made.posterior_.state
        found |= {"gram": state.gram, "noise gram": state.noise_gram, "w": state.iterate.coefficients}
        found |= {"actions": state.buffer.actions.factor.matrix, "offset": state.iterate.offset}
        x = points(5, seed=1)
        found |= dict(zip(("mean", "covariance"), made.latent(x.to(made.dtype or x.dtype)), strict=True))
        return found
    state = made.state_dict()
    reference = state["posterior"].pop("reference", {})  # numbers of a few inputs, one level deeper
    found |= {f"reference {name}": value for name, value in reference.items()}
    return found | {**state.pop("posterior"), **state, "random": made._fit.state.__class__.__name__}


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit."""
    mine, theirs = numbers(one), numbers(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value == theirs[name]
        assert same, f"{name} differs"


def die_at_save(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many saves the process is gone."""
    save, count = CheckpointSession.save, [0]

    def counted(session: CheckpointSession, *arguments: Any, **settings: Any) -> None:
        save(session, *arguments, **settings)
        count[0] += 1
        if count[0] == number:
            raise Killed

    monkeypatch.setattr(CheckpointSession, "save", counted)


def checkpoint_in(folder: Path, said: list[str] | None = None, **settings: Any) -> Checkpoint:
    return Checkpoint(folder, **{"every_seconds": 0.0, "say": (said if said is not None else []).append} | settings)

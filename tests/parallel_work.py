"""What the processes of test_parallel.py do. Importable, since they are started afresh.

`in_processes(K, work)` runs `work()` in K processes under gloo and returns what each returned, or how it failed.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.data.fixed_order import FixedOrderData
from ntk_iterncgp.fitting.self_check import problems
from ntk_iterncgp.jacobian import rows as rows_of_prior
from ntk_iterncgp.persistence import checkpoint as checkpoint_module
from ntk_iterncgp.persistence.checkpoint import Checkpoint
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.solver import State
from tests.processes import CONTEXT

torch.set_num_threads(1)
NUM_DATA, CLASSES = 41, 3

Results = dict[str, dict[str, Tensor]]


class Failed(str):
    """How a process failed: the last line of its traceback."""


def in_processes(
    num_processes: int, work: Callable[..., Any], *arguments: Any, seconds: float = 60
) -> tuple[list[Any], float]:
    """What each process returned, None for one that was killed, and how long it all took after they had started."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(num_processes)]
        processes = [
            CONTEXT.Process(target=_run, args=(rank, num_processes, folder, pipe[1], work, arguments), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        deadline, found, started = time.monotonic() + seconds, [], 0.0
        for receiver, _ in pipes:
            found.append(_received(receiver, deadline))
            started = max(started, found[-1][0]) if found[-1] is not None else started
        ended = time.time()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            hung = process.is_alive()
            process.kill()
            assert not hung, "a process was still there when its time was over"
    return [None if one is None else one[1] for one in found], ended - started


def _received(receiver: Connection, deadline: float) -> tuple[float, Any] | None:
    try:
        assert receiver.poll(max(0.0, deadline - time.monotonic())), "a process did not end in time"
        return receiver.recv()
    except EOFError:
        return None


def _run(
    rank: int, num_processes: int, folder: str, sender: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_processes)
    dist.barrier()
    started = time.time()
    try:
        found = work(*arguments)
    except BaseException as error:
        found = Failed(traceback.format_exception_only(error)[-1].strip())
    sender.send((started, plain(found)))
    os._exit(0)  # without waiting for messages of a group that has failed


def plain(found: Any) -> Any:
    """Arrays in the place of tensors: those would be sent as shared memory, of which the sender takes leave."""
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    if isinstance(found, tuple | list):
        return [plain(value) for value in found]
    return found.detach().numpy() if isinstance(found, Tensor) else found


# --- problems -------------------------------------------------------------------------------------------------------


def inputs_and_labels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(NUM_DATA, 2, generator=generator, dtype=torch.float64)
    return X, (X.sum(1) * 2.9).long() % CLASSES


def network(seed: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


class Stream(IterableDataset):
    """The same pairs, one after the other."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*inputs_and_labels(), strict=True)

    def __len__(self) -> int:
        return NUM_DATA


def laplace(seed: int = 1, subset: str = "all", likelihood: str = "classification", **settings: Any) -> Any:
    return Laplace(network(seed), likelihood, subset, "iterncgp", **settings)


def of_network(la: Any) -> dict[str, Tensor]:
    """What a fit leaves: posterior, predictions and report."""
    mean, covariance = la.predictive_moments(inputs_and_labels()[0][:5] + 0.01)
    report, posterior = la.report_, la.posterior
    numbers = [report.information_captured, report.epochs, report.rank, report.num_products, report.num_newton_steps]
    return {
        "images": posterior.images,
        "noise_gram": posterior.noise_gram,
        "right_hand_side": posterior.right_hand_side,
        "curvature_diagonal": posterior.curvature_diagonal,
        "mean": mean,
        "covariance": covariance,
        "report": torch.tensor(numbers, dtype=torch.float64),
        "evidence": la.log_marginal_likelihood().detach().reshape(1),
        "loss": torch.tensor([float(la.loss)], dtype=torch.float64),
    }


def network_results() -> Results:
    """Clusters and products; map-style, streamed and listed data; more processes than batches; both subsets."""
    X, y = inputs_and_labels()
    small, large = (DataLoader(TensorDataset(X, y), size, shuffle=True) for size in (4, 30))
    listed = list(zip(X.split(9), y.split(9), strict=True))
    found: Results = {}

    def add(name: str, la: Any, loader: Any, epochs: float | None = None) -> None:
        la.fit(loader)
        if epochs is not None:
            la.refine(loader, epochs=epochs)
        found[name] = of_network(la)

    add("clusters", laplace(num_actions=7), small)
    add("clusters, few large batches", laplace(num_actions=7, cotangents=2), large)
    add("clusters, streamed", laplace(num_actions=7), DataLoader(Stream(), 6))
    add("clusters, listed, refined", laplace(num_actions=7), listed, epochs=2)
    add("clusters, cut short and refined", laplace(num_actions=7, max_epochs=0.9), small, epochs=0.4)
    with mock.patch.object(rows_of_prior, "FEW_NUMBERS", 0):
        add("clusters, probed trace", laplace(policy="clusters", num_actions=60), small)
    add("clusters, last layer", laplace(subset="last_layer", num_actions=7), small)
    add("products", laplace(policy="random_subspace", num_actions=8), small, epochs=4)
    add("products, few large batches", laplace(policy="random_subspace", num_actions=8), large)
    add("products, newton", laplace(mean="refined", num_actions=6), DataLoader(Stream(), 6))
    # Long past the convergence of the mean: which actions are left is a matter of rounding, what they say is not.
    whatever_actions = ("mean", "covariance", "evidence", "loss")
    for name, settings in {
        "products, past convergence": {"policy": "curvature_residual", "num_actions": 20},
        "products, past the last action": {"policy": "curvature_residual", "num_actions": 80},
        "products, newton, past convergence": {"mean": "refined", "num_actions": 20},
        "products, newton, refined": {"mean": "refined", "num_actions": 6},
    }.items():
        add(name, laplace(**settings), small, epochs=20)
        found[name] = {key: found[name][key] for key in whatever_actions}
    targets = torch.stack([X[:, 0], X[:, 1], X.sum(1)], 1)
    regression = laplace(likelihood="regression", mean="refined", num_actions=6, sigma_noise=0.3)
    add("products, regression", regression, DataLoader(TensorDataset(X, targets), 5))
    return found


def kernel_results() -> Results:
    """Joint and Kronecker actions, one kernel and several, both precisions of links; all five questions."""
    X, y = inputs_and_labels()
    matern = kernels.Matern32(lengthscale=0.4, outputscale=4.0)
    different = [kernels.RBF(lengthscale=0.3 + 0.1 * c, outputscale=2.0) for c in range(CLASSES)]
    softmax, found = likelihoods.Softmax(CLASSES), {}
    gps = {
        "joint": NonConjugateGP(matern, softmax, max_products=8, actions="joint", policy="curvature_residual"),
        "kronecker": NonConjugateGP(matern, softmax, max_products=6, actions="kronecker", policy="curvature_residual"),
        "several kernels, compressed": NonConjugateGP(
            different, softmax, max_products=8, max_rank=5, policy="curvature_residual"
        ),
        "many coordinates": NonConjugateGP(
            kernels.Matern12(lengthscale=2.0), softmax, max_products=6, policy="curvature_residual"
        ),
        "random subspace": NonConjugateGP(matern, softmax, policy="random_subspace", max_products=8),
        "by rows, as on a GPU": NonConjugateGP(matern, softmax, max_products=4, policy="curvature_residual"),
    }
    for name, gp in gps.items():
        inputs = X if name != "many coordinates" else torch.cat([X, X.sin(), X.cos(), X.exp(), X**2, X**3], 1)
        with mock.patch.object(GramPrior, "_by_rows", "rows" in name):
            gp.fit(inputs, y)
        mean, covariance = gp.latent(inputs[:5] + 0.01)
        evidence, report = gp.log_evidence(), gp.report_
        numbers = [report.information_captured, report.rank, report.num_products, report.num_newton_steps]
        history = [[r.objective, r.relative_residual, r.information_captured] for r in report.history]
        found[name] = {
            "mean": mean,
            "covariance": covariance,
            "probabilities": gp.predict(inputs[:5] + 0.01, link="quadrature"),
            "evidence": torch.tensor([evidence.lower, evidence.upper, gp.elbo()], dtype=torch.float64),
            "actions": gp.posterior_.state.buffer.actions.whole().factor.matrix,
            "some rows": gp.posterior_.state.buffer.actions.rows_of(torch.tensor([40, 3, 17])),
            "report": torch.tensor(numbers, dtype=torch.float64),
            "history": torch.tensor(history, dtype=torch.float64),
        }
    return found


def all_results() -> tuple[Results, Results, int]:
    return network_results(), kernel_results(), parallel.traffic.calls


def optimised() -> list[float]:
    X, _ = inputs_and_labels()
    gp = NonConjugateGP(
        kernels.RBF(lengthscale=0.3, outputscale=1.0),
        likelihoods.Gaussian(0.1),
        max_products=6,
        policy="curvature_residual",
    )
    gp.optimize(X, X.sin().sum(1), max_steps=2)
    assert gp.optimization_ is not None
    return [*gp.optimization_.hyperparameters.values(), gp.optimization_.elbo]


def ragged_batches() -> list[list[tuple[int, ...]]]:
    """The shapes of what all processes get of batches that are padded, each to its own length."""
    batches = [(torch.ones(rows, width), torch.ones(rows)) for rows, width in ((3, 2), (3, 2), (3, 4), (1, 4))]
    data = FixedOrderData(batches, device=torch.device("cpu"))
    found = data.each_batch(lambda x, y: (x, y, x[:, :1]))
    return [[tuple(block.shape) for block in batch] for batch in found]


# --- killed and resumed ---------------------------------------------------------------------------------------------


def saving(folder: str, said: list[str]) -> Checkpoint:
    """Saved whenever it can be."""
    checkpoint_module.SAVING_SHARE = 1e9
    return Checkpoint(folder, every_seconds=0, say=said.append)


Taken = tuple[list[str], dict[str, Tensor]]  # what was said, and the result


def fit_network_saving(folder: str, die_at: int | None, settings: dict[str, Any]) -> Taken:
    """A fit of which the last process dies when it has read so many data after the first save; or all of it."""
    la, said = laplace(**settings), list[str]()
    last = parallel.num_processes() - 1
    data: Any = TensorDataset(*inputs_and_labels())
    if die_at is not None:
        data = Troubled(last, die_at, die, lambda: any(Path(folder).glob("*.safetensors")))
    la.fit(DataLoader(data, 4), checkpoint=saving(folder, said))
    return said, of_network(la)


def fit_kernel_saving(folder: str, die_at: int | None, settings: dict[str, Any]) -> Taken:
    """The same for a kernel, by the number of products."""
    X, y = inputs_and_labels()
    gp, said = (
        NonConjugateGP(
            kernels.Matern32(lengthscale=0.4),
            likelihoods.Softmax(CLASSES),
            **{"policy": "curvature_residual"} | settings,
        ),
        list[str](),
    )

    def watch(state: State) -> None:
        if state.num_products == die_at and parallel.rank() == parallel.num_processes() - 1:
            die()

    gp.fit(X, y, checkpoint=saving(folder, said), callback=watch)
    mean, covariance = gp.latent(X[:5] + 0.01)
    return said, {"mean": mean, "covariance": covariance, "gram": gp.posterior_.state.gram}


# --- bad days -------------------------------------------------------------------------------------------------------


class Troubled(Dataset):
    """Does something on the way, in one process alone."""

    def __init__(
        self, rank: int, at: int, trouble: Callable[[], None], counts: Callable[[], bool] = lambda: True
    ) -> None:
        self.pairs, self.rank, self.at, self.trouble, self.read = inputs_and_labels(), rank, at, trouble, 0
        self.counts = counts

    def __len__(self) -> int:
        return NUM_DATA

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += self.counts()
        if parallel.rank() == self.rank and self.read == self.at:
            self.trouble()
        return self.pairs[0][index], self.pairs[1][index]


def fit_with_trouble(at: int, trouble: Callable[[], None], settings: dict[str, Any]) -> None:
    """The second process gets into trouble when it has read so many data."""
    laplace(**settings).fit(DataLoader(Troubled(1, at, trouble), 4))


def raise_disk_error() -> None:
    raise OSError(5, "the disk is gone")


def die() -> None:
    os.kill(os.getpid(), 9)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), 2)


def interrupt_and_go_on(
    at: int, settings: dict[str, Any], rank: int = 1
) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """The status and the posterior after Ctrl-C in one process, and the posterior after the rest of the epoch."""
    la = laplace(**settings)
    la.fit(DataLoader(Troubled(rank, at, press_ctrl_c), 4))
    status, stopped = la.report_.status, of_network(la)
    if "policy" not in settings:
        la.refine(DataLoader(TensorDataset(*inputs_and_labels()), 4), epochs=4 / 3 - la.report_.epochs)
    return status, stopped, of_network(la)


def refine_by_the_clock() -> int:
    """One process's clock jumps ahead when it has been looked at twenty times; all stop there."""
    X, y = inputs_and_labels()
    la, loader = laplace(num_actions=7), DataLoader(TensorDataset(X, y), 4)
    la.fit(loader)
    if parallel.rank() == 1:
        times = iter([0.0] * 20)
        time.perf_counter = lambda: next(times, 1e6)
    la.refine(loader, seconds=1000.0)
    return int(la.posterior.rank)


def fail_alike_then_fit() -> list[float]:
    """The same mistake everywhere, caught; then a fit."""
    X, y = inputs_and_labels()
    gp = NonConjugateGP(
        kernels.RBF(lengthscale=0.3), likelihoods.Softmax(CLASSES), max_products=3, policy="curvature_residual"
    )
    try:
        gp.fit(X, y + 5)
    except ValueError:
        gp.fit(X, y)
    return gp.predict(X[:2]).flatten().tolist()


def fit_different_models() -> None:
    X, y = inputs_and_labels()
    laplace(seed=parallel.rank()).fit(DataLoader(TensorDataset(X, y), 4))


def fit_different_data() -> None:
    X, y = inputs_and_labels()
    sampler = torch.utils.data.distributed.DistributedSampler(TensorDataset(X, y))
    laplace().fit(DataLoader(TensorDataset(X, y), 4, sampler=sampler))


def fit_different_inputs() -> None:
    X, y = inputs_and_labels()
    NonConjugateGP(kernels.RBF(), likelihoods.Softmax(CLASSES), policy="curvature_residual").fit(X + parallel.rank(), y)


def traffic_of_a_fit(num_actions: int) -> tuple[int, int, int]:
    """Bytes sent, bytes of the groups' images, and how many groups there were: more than actions."""
    X, y = inputs_and_labels()
    la, before = laplace(num_actions=num_actions), parallel.traffic.bytes
    la.fit(DataLoader(TensorDataset(X, y), 4))
    swept = la._fit.state.clusters.passes[0]
    return parallel.traffic.bytes - before, swept.images.nbytes, swept.num_groups


# --- broken on purpose ----------------------------------------------------------------------------------------------


def break_image(la: Any) -> None:
    la._fit.state.clusters.passes[0].images[2] *= 1.1


def break_small_matrix(la: Any) -> None:
    la._fit.state.clusters.gram_blocks[0, 0][1, 1] *= 0.5


def break_directions(la: Any) -> None:
    la._fit.state.clusters.passes[0].directions[0, :10] *= 1.5


def break_kernel_image(gp: Any) -> None:
    gp.posterior_.state.buffer.images.factor.storage[3] *= 1.01


def put_nan_in_point(gp: Any) -> None:
    gp.posterior_.state.iterate.coefficients[0] = torch.nan


def refine_broken(corrupt: Callable[[Any], None] | None) -> tuple[list[str], list[str], list[Tensor]]:
    """Corrupted in the last process alone, between a fit and a refine: warnings, what is still wrong, and moments."""
    X, y = inputs_and_labels()
    is_kernel = corrupt in (break_kernel_image, put_nan_in_point)
    matern = kernels.Matern32(lengthscale=0.4, outputscale=4.0)
    gp, la = (
        NonConjugateGP(matern, likelihoods.Softmax(CLASSES), max_products=8, policy="curvature_residual"),
        laplace(num_actions=7),
    )
    loader = DataLoader(TensorDataset(X, y), 4)
    gp.fit(X, y) if is_kernel else la.fit(loader)
    if corrupt is not None and parallel.rank() == parallel.num_processes() - 1:
        corrupt(gp if is_kernel else la)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gp.refine(2) if is_kernel else la.refine(loader, epochs=1)
    wrong = list(problems(gp.posterior_.state).values()) if is_kernel else []
    moments = gp.latent(X[:5] + 0.01) if is_kernel else la.predictive_moments(X[:5] + 0.01)
    return [str(warning.message) for warning in told], wrong, list(moments)

"""Several processes that work as one, under torchrun or any initialised process group.

The rows of the data are divided, one contiguous block to each process, and with them all that is expensive: sweeps
over a network's data, products with a kernel, matrices of n = N·C rows. Weight space, small matrices and the handful of
vectors over all data are the same in every process, bit for bit, so that every process takes the same decisions. What
goes over the wire is listed in docs/scaling.md.

With one process everything here is the identity. Tensors are sent from the device they are on, so NCCL and gloo run the
same code. This is the only file that knows torch.distributed.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")

LOOK_SECONDS = 0.2  # how often a process that waits asks whether another one has failed
TIMEOUT = timedelta(days=7)  # others may wait for as long as one trains a network: a failure is noticed in other ways


class ProcessFailed(RuntimeError):
    """Another process has failed, so this one cannot continue."""


@dataclass
class Traffic:
    """What this process has sent since it began, by the formulas of ring algorithms."""

    calls: int = 0
    bytes: int = 0

    def add(self, num_bytes: float) -> None:
        """Count one more call, of so many bytes."""
        self.calls, self.bytes = self.calls + 1, self.bytes + round(num_bytes)


traffic = Traffic()


# --- who is there ---------------------------------------------------------------------------------------------------


def num_processes() -> int:
    """Return how many processes work together: 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if num_processes() > 1 else 0


def is_main() -> bool:
    """The process that writes files, shows progress and warns."""
    return rank() == 0


def launched_rank() -> int | None:
    """The number of this process where torchrun, or something like it, started several; else None."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    return int(os.environ["RANK"]) if several else None


@contextmanager
def joined(device_type: str) -> Iterator[None]:
    """In a process that torchrun started: a process group for the time of a run, and a GPU of its own."""
    if launched_rank() is None or num_processes() > 1:
        yield
        return
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timeout=TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise ProcessFailed(
            f"This process must be one of {os.environ['WORLD_SIZE']} (WORLD_SIZE); got no connection to the others "
            f"({str(error).partition(chr(10))[0]}). Try to start all of them with torchrun."
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def main_first() -> Iterator[None]:
    """What the main process does before the others, which then find it done: downloads."""
    if not is_main():
        any_of(False)
    yield
    if is_main():
        any_of(False)


# --- what they tell each other --------------------------------------------------------------------------------------


def all_sum(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place where memory is contiguous: use what is returned."""
    K = num_processes()
    if K == 1:
        return tensor
    tensor = tensor.contiguous()
    traffic.add(2 * (K - 1) / K * tensor.nbytes)
    _finish(dist.all_reduce(tensor, async_op=True))
    return tensor


def from_main(tensor: Tensor) -> Tensor:
    """The main process's values, in place where memory is contiguous: use what is returned."""
    if num_processes() == 1:
        return tensor
    tensor = tensor.contiguous()
    traffic.add(tensor.nbytes)
    _finish(dist.broadcast(tensor, src=0, async_op=True))
    return tensor


def same_model(model: nn.Module) -> nn.Module:
    """The model, with the main process's weights and buffers."""
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.copy_(from_main(value.clone()))
    return model


def any_of(flag: bool) -> bool:
    """Whether it is so in any process: the clock and Ctrl-C do not reach all of them at the same moment."""
    if num_processes() == 1:
        return flag
    return bool(all_sum(torch.tensor([int(flag)], device=_control_device())))


def extremes(numbers: Iterable[int]) -> tuple[int, int]:
    """The least and the largest of all processes' numbers, of which each has at least one."""
    mine = list(numbers)
    ends = torch.tensor([[min(mine), max(mine)]], device="cpu" if num_processes() == 1 else _control_device())
    ends = Shard.even(num_processes()).gather(ends)
    return int(ends[:, 0].min()), int(ends[:, 1].max())


def take_turns(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is this process's turn."""
    return ((item, place % num_processes() == rank()) for place, item in enumerate(items))


def check_same(tensors: Sequence[Tensor], what: str) -> None:
    """Refuse to work as one on what is not the same in all processes."""
    if num_processes() == 1:
        return
    mine = torch.stack([_fingerprint(tensor) for tensor in tensors]).nan_to_num(0.5).to(_control_device())
    if any_of(not torch.equal(mine, from_main(mine.clone()))):
        raise ValueError(
            f"{what} must be the same in all {num_processes()} processes, which work on one problem together; got "
            "different ones. Try to load or seed them alike in every process."
        )


def _fingerprint(tensor: Tensor) -> Tensor:  # (3,)
    flat = tensor.detach().reshape(-1).double()
    place = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device).reciprocal()
    return torch.stack([flat.new_tensor(len(flat)), flat.sum(), flat @ place])


def _control_device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


# --- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """Which of N rows are this process's: `starts` is where the block of each process begins, and N at the end.

    One block of all rows is a matrix that every process has whole.
    """

    starts: tuple[int, ...]

    @classmethod
    def whole(cls, num_rows: int) -> Shard:
        """One block of all rows, which every process has whole."""
        return cls((0, num_rows))

    @classmethod
    def even(cls, num_rows: int) -> Shard:
        """Blocks of nearly the same size, as many as there are processes; the first is never empty."""
        K = num_processes()
        return cls(tuple(-(-k * num_rows // K) for k in range(K + 1)))

    @classmethod
    def of_batches(cls, sizes: Sequence[int]) -> Shard:
        """Blocks of whole batches, nearly the same number in each; some are empty where batches are few."""
        ends = [0, *accumulate(sizes)]
        return cls(tuple(ends[batch] for batch in cls.even(len(sizes)).starts))

    @property
    def num_rows(self) -> int:
        """Of all processes."""
        return self.starts[-1]

    @property
    def is_whole(self) -> bool:
        """Whether every process has all rows."""
        return len(self.starts) == 2

    @property
    def mine(self) -> slice:
        """The rows of this process."""
        place = 0 if self.is_whole else rank()
        return slice(self.starts[place], self.starts[place + 1])

    @property
    def size(self) -> int:
        """Of this process."""
        size: int = self.mine.stop - self.mine.start
        return size

    def take(self, block: Tensor) -> Tensor:  # (rows · m, …) -> (size · m, …)
        """This process's rows of something that is there whole, with any number m of entries per row."""
        if self.is_whole:
            return block
        m = len(block) // max(1, self.num_rows)
        return block[self.mine.start * m : self.mine.stop * m]

    def gather(self, block: Tensor, per_row: int = 1) -> Tensor:  # (size · m, …) -> (rows · m, …)
        """All rows, from every process's own."""
        if self.is_whole:
            return block
        if block.dtype == torch.bool:
            return self.gather(block.byte(), per_row).bool()
        if 0 in block.shape[1:]:
            return block.new_zeros(per_row * self.num_rows, *block.shape[1:])
        sizes = [per_row * (stop - start) for start, stop in pairwise(self.starts)]
        sent = block.new_zeros(max(sizes), *block.shape[1:])  # the same size from every process, as gloo wants it
        sent[: len(block)] = block
        parts = [torch.empty_like(sent) for _ in sizes]
        traffic.add((len(sizes) - 1) * sent.nbytes)
        _finish(dist.all_gather(parts, sent, async_op=True))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def sum(self, tensor: Tensor) -> Tensor:
        """What each process summed over its own rows, summed over all rows."""
        return tensor if self.is_whole else all_sum(tensor)

    def norm(self, block: Tensor) -> Tensor:  # (size · m, …) -> (…)
        """The norm of each column over all rows."""
        norms = torch.linalg.vector_norm(block, dim=0)
        return norms if self.is_whole else all_sum(norms.square()).sqrt()


# --- failing together -------------------------------------------------------------------------------------------------

_tasks: list[str] = []  # what is going on, innermost last
_num_tasks = 0


@contextmanager
def together() -> Iterator[None]:
    """Enclose something that all processes do at the same time.

    One that fails tells the others, which then stop with its error instead of waiting for it; only the main process
    warns.

    Processes that failed for the same reason may continue together. Where one alone failed, they are out of step, and
    the group is of no further use.
    """
    global _num_tasks
    if num_processes() == 1:
        yield
        return
    _num_tasks += 1
    _tasks.append(f"ntk_iterncgp/failure/{_num_tasks}")
    try:
        with warnings.catch_warnings():
            if not is_main():
                warnings.simplefilter("ignore")
            yield
    except ProcessFailed:
        raise
    except BaseException as error:
        with suppress(RuntimeError):  # the store may be gone as well
            store = dist.distributed_c10d._get_default_store()
            store.set(_tasks[-1], f"process {rank()} failed with {type(error).__name__}: {error}")
        raise
    finally:
        _tasks.pop()


def _finish(work: dist.Work | None) -> None:
    """Wait for the others, and ask from time to time whether one of them will never come."""
    assert work is not None
    pause, next_look = 2e-5, time.monotonic() + LOOK_SECONDS
    try:
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
            if _tasks and time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK_SECONDS
                failure = _failure()
                if failure is not None:
                    raise ProcessFailed(f"This process stops, since {failure}")
        work.wait()
    except ProcessFailed:
        raise
    except RuntimeError as error:  # the connection is gone, and with it the process at its other end
        reason = _failure() or f"another one ended without an error message ({error})."
        raise ProcessFailed(f"This process stops, since {reason}") from error


def _failure() -> str | None:
    """What another process said when it failed, if one did."""
    store = dist.distributed_c10d._get_default_store()
    try:
        return next((store.get(task).decode() for task in _tasks if store.check([task])), None)
    except RuntimeError as error:  # the store is in a process that is gone
        return f"the main process ended without an error message ({error})."

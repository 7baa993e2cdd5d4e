"""kill -9 at random moments, then the same program again: does it end with the numbers of a run left alone?

    ntk-iterncgp bench kill_and_resume [--quick] [--kills 20] [--seed 0] [--door network] [--json FILE]

Three programs of about a minute, slowed down on purpose: a network by clusters (a fit and a refine), a
network's refined mean, and a Gaussian process with a kernel. Each is killed 20 times, mostly some time after it has
saved, now and then at any moment of its life, and must end with the same bits as once undisturbed. Shown is what the
worst kill lost: how old the last save was, in save intervals; a save is due when one has passed, and comes with the
next batch or product.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp import Checkpoint, NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.digests import digest


@dataclass(frozen=True)
class Pace:
    """How long a program takes, how often it saves, and when it is killed; in seconds."""

    num_data: int = 2400
    per_batch: float = 0.2
    per_state: float = 1.4
    every: float = 1.0
    latest_kill: float = 2.0


QUICK = Pace(num_data=200, per_batch=0.02, per_state=0.01, every=0.02, latest_kill=0.1)
ANY_MOMENT = 0.2  # the share of kills that do not wait for a save


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    door: str
    kills: int
    resumed: int  # starts that went on from a save
    same: bool  # bit for bit
    lost: float  # by the worst kill, in save intervals
    seconds: float


class Slow(nn.Module):
    """Takes its time for every batch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


def _data(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (number,), generator=generator)
    return torch.randn(number, 8, generator=generator) + torch.nn.functional.one_hot(y, 8), y


def _network(pace: Pace, **settings: Any) -> tuple[Any, DataLoader]:
    x, y = _data(pace.num_data)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)]
    model = nn.Sequential(Slow(pace.per_batch), *layers)
    return Laplace(model, "classification", "all", "iterncgp", **settings), DataLoader(TensorDataset(x, y), 40)


def network(pace: Pace, checkpoint: Checkpoint) -> dict[str, Any]:
    la, loader = _network(pace, num_actions=pace.num_data // 40)
    with checkpoint:
        la.fit(loader, checkpoint=checkpoint)
        la.refine(loader, epochs=2, checkpoint=checkpoint)
        return _numbers(la.report_, la.state_dict()["posterior"])


def refined_mean(pace: Pace, checkpoint: Checkpoint) -> dict[str, Any]:
    faster = replace(pace, per_batch=pace.per_batch / 10)
    la, loader = _network(faster, mean="refined", num_actions=min(30, pace.num_data // 40), actions_per_step=3)
    with checkpoint:
        la.fit(loader, checkpoint=checkpoint)
        return _numbers(la.report_, la.state_dict()["posterior"])


def kernel(pace: Pace, checkpoint: Checkpoint) -> dict[str, Any]:
    x, y = _data(pace.num_data // 5)
    gp = NonConjugateGP(kernels.Matern32(lengthscale=3.0), likelihoods.Softmax(4), max_products=100, actions="joint")

    def slowly(state: object) -> None:
        time.sleep(pace.per_state)

    with checkpoint:
        gp.fit(x.double(), y, callback=slowly, checkpoint=checkpoint)
        gp.refine(20, callback=slowly, checkpoint=checkpoint)
        state = gp.posterior_.state
        found = {"gram": state.gram, "noise": state.noise_gram, "offset": state.iterate.offset}
        return _numbers(gp.report_, found | {"actions": state.buffer.actions.factor.matrix})


def _numbers(report: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """All of a result but the clock."""
    found = {name: digest(value) if isinstance(value, Tensor) else repr(value) for name, value in tensors.items()}
    found["history"] = [repr(astuple(replace(record, seconds=0.0))) for record in report.history]
    return found | {"status": report.status}


DOORS: dict[str, Callable[[Pace, Checkpoint], dict[str, Any]]] = {
    "network": network,
    "refined mean": refined_mean,
    "kernel": kernel,
}


def _start(door: str, pace: Pace, folder: Path) -> int:
    """The program in a process of its own, which can be killed; returns its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:

        def say(sentence: str) -> None:
            with (folder / "said.txt").open("a") as file:
                file.write(sentence + "\n")

        found = DOORS[door](pace, Checkpoint(folder / "checkpoint", every_seconds=pace.every, say=say))
        (folder / "result.json").write_text(json.dumps(found))
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def survive(door: str, kills: int, pace: Pace, seed: int = 0) -> Outcome:
    """Kill a program again and again, let it end, and compare."""
    started, rng = time.perf_counter(), random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        undisturbed, disturbed = Path(name) / "undisturbed", Path(name) / "disturbed"
        for folder in (undisturbed, disturbed):
            folder.mkdir()
        alone = _start(door, pace, undisturbed)  # beside the other, since it does little but wait
        killed, ages = 0, [0.0]
        while True:
            born, child = time.time(), _start(door, pace, disturbed)
            ended = None if killed < kills else _wait(child)
            if ended is None and rng.random() > ANY_MOMENT:
                ended = _wait(child, until=lambda born=born: (_last_save(disturbed) or 0) > born)
            if ended is None:
                ended = _wait(child, until=_clock(rng.uniform(0, pace.latest_kill)))
            if ended is not None:
                break
            os.kill(child, signal.SIGKILL)
            ages += [time.time() - last for last in [_last_save(disturbed)] if last is not None]
            os.waitpid(child, 0)
            killed += 1
        if ended != 0 or _wait(alone) != 0:
            raise RuntimeError("A program is expected to end by itself, but it failed; what it said is above.")
        results = [json.loads((folder / "result.json").read_text()) for folder in (undisturbed, disturbed)]
        said = disturbed / "said.txt"
        resumed = said.read_text().count("Going on") if said.exists() else 0
    return Outcome(
        door, killed, resumed, results[0] == results[1], max(ages) / pace.every, time.perf_counter() - started
    )


def _wait(child: int, until: Callable[[], bool] = lambda: False) -> int | None:
    """How a process ended, or None if something else came first."""
    while not until():
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _clock(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def _last_save(folder: Path) -> float | None:
    times = [path.stat().st_mtime for path in folder.glob("checkpoint/[0-9]*.safetensors")]
    return max(times) if times else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench kill_and_resume", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes, and five kills")
    parser.add_argument("--kills", type=int, help="of each program (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--door", choices=tuple(DOORS), action="append", help="one program; repeatable (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write the results here, too")
    arguments = parser.parse_args(argv)
    kills = arguments.kills if arguments.kills is not None else (5 if arguments.quick else 20)
    torch.set_num_threads(1)  # a forked process has none of the threads of its parent
    warnings.filterwarnings("ignore", message="`torch.jit.script`")  # of laplace-torch, in every process
    outcomes = []
    print(f"{'':14}{'killed':>8}{'resumed':>9}{'same bits':>11}{'lost at most':>22}")
    for door in arguments.door or DOORS:
        found = survive(door, kills, QUICK if arguments.quick else Pace(), arguments.seed)
        outcomes.append(found)
        verdict = "yes" if found.same else "NO"
        print(f"{door:14}{found.kills:8}{found.resumed:9}{verdict:>11}{found.lost:10.1f} intervals", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(found) for found in outcomes], indent=2) + "\n")
    return 0 if all(found.same for found in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

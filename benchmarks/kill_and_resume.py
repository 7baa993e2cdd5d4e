"""kill -9 at random moments, then the same program again: does it end with the numbers of a run left alone?

    ntk-iterncgp bench kill_and_resume [--quick] [--kills 20] [--seed 0] [--door network] [--json FILE]

Five programs of about a minute, slowed down on purpose: a network by clusters (a fit and a refine), a network's refined
mean, a Gaussian process with a kernel, and updates of a network and of a Gaussian process with more data. Each is
killed 20 times, mostly some time after it has saved, now and then at any moment of its life, and must end with the same
bits as once undisturbed.

Nothing is to be lost beyond the last save interval. Every life keeps a journal of the pieces of its work (calls of the
network, states of a solver), of its chances to save (after each batch or product, which is saved whole) and of its
saves. An interval is what was asked for, or ten times what the last save took. Judged is, of every kill and by counts,
which a busy machine does not change:

    late     pieces lost that were done after the interval had passed: at most those between two chances (`Door.unit`)
    missed   chances that came after the interval had passed and were not taken: none
    anew     lives that began from nothing where something was saved: none
    again    pieces that were saved and done again: none. Those of all lives together, from where each took up a call to
             its last save, are no more than those of the undisturbed run, beside what every start does (`Door.opening`)

Shown beside them is how old the last save was when the worst kill came, in intervals.
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
from ntk_iterncgp.persistence.checkpoint import SAVING_SHARE, CheckpointSession
from ntk_iterncgp.persistence.fingerprint import digest


@dataclass(frozen=True)
class Pace:
    """How long a program takes, how often it saves, and when it is killed; in seconds."""

    num_data: int = 2400
    per_batch: float = 0.2
    per_state: float = 1.4
    every: float = 1.0
    latest_kill: float = 2.0


QUICK = Pace(num_data=200, per_batch=0.02, per_state=0.01, every=0.02, latest_kill=0.1)
BATCH = 40
ANY_MOMENT = 0.2  # the fraction of kills that do not wait for a save


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    door: str
    kills: int
    resumed: int  # starts that went on from a save
    same: bool  # bit for bit
    lost: float  # by the worst kill, in save intervals
    late: int  # pieces of work, of the worst kill
    unit: int  # how many they may be
    missed: int  # chances to save, of all lives
    anew: int  # lives
    again: int  # pieces of work that had been saved
    seconds: float

    @property
    def nothing_lost(self) -> bool:
        """Beyond the last save interval."""
        return self.late <= self.unit and self.missed == self.anew == self.again == 0


# --- the journal of a life --------------------------------------------------------------------------------------------

Event = tuple[str, float, float]  # what, when by the clock of the machine, and for how many seconds


class Journal:
    """One line for each event, which a kill does not take back."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, started: float | None = None) -> None:
        now = time.monotonic()
        os.write(self.file, f"{json.dumps([what, now, now - (started or now)])}\n".encode())

    def watch(self) -> None:
        """From now on, all calls that save. A chance that was not taken is told from one that was by the save after."""
        is_due, save, begin = CheckpointSession.is_due, CheckpointSession.save, Checkpoint.session

        def chance(session: CheckpointSession) -> bool:
            self.write("chance")
            return is_due(session)

        def saved(session: CheckpointSession, *arguments: Any, **settings: Any) -> None:
            started = time.monotonic()
            save(session, *arguments, **settings)
            self.write("saved", started)

        def begun(checkpoint: Checkpoint, *arguments: Any) -> CheckpointSession:
            session = begin(checkpoint, *arguments)
            self.write("begun")
            return session

        for owner, name, function in (
            (CheckpointSession, "is_due", chance),
            (CheckpointSession, "save", saved),
            (Checkpoint, "session", begun),
        ):
            setattr(owner, name, function)


def read(path: Path) -> list[Event]:
    if not path.exists():  # killed before its first word
        return []
    return [
        (str(what), float(when), float(took)) for what, when, took in map(json.loads, path.read_text().splitlines())
    ]


def late_and_missed(life: list[Event], every: float) -> tuple[int, int]:
    """Pieces of work that were not saved, and done when the interval had passed; and chances to save them in all."""
    late = missed = 0
    due, is_overdue = float("inf"), False  # nothing can be saved before a call has begun
    for what, when, took in life:
        if what in ("begun", "saved"):
            due, late, is_overdue = when + max(every, took / SAVING_SHARE), 0, False
        elif what == "work" and when > due:
            late += 1
        elif what == "chance":
            missed += is_overdue  # the one before came too late, and no save followed it
            is_overdue = when > due
    return late, missed


def is_anew(life: list[Event]) -> bool:
    """Whether a call has begun, and nothing was resumed."""
    what = {event[0] for event in life}
    return "begun" in what and "resumed" not in what


def kept(life: list[Event], opening: int) -> int:
    """Pieces of work up to the last save, from where the call had begun that was resumed."""
    what = [event[0] for event in life]
    if "chance" not in what or "saved" not in what:
        return 0
    first = what.index("chance")
    begun = first - what[first::-1].index("begun")
    return max(0, what[begun : len(what) - what[::-1].index("saved")].count("work") - opening)


journal: Journal | None = None


def work(seconds: float) -> None:
    time.sleep(seconds)
    if journal is not None:
        journal.write("work")


# --- the programs -----------------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Takes its time for every batch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        work(self.seconds)
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
    return Laplace(model, "classification", "all", "iterncgp", **settings), DataLoader(TensorDataset(x, y), BATCH)


def network(pace: Pace, checkpoint: Checkpoint) -> dict[str, Any]:
    la, loader = _network(pace, num_actions=pace.num_data // BATCH)
    with checkpoint:
        la.fit(loader, checkpoint=checkpoint)
        la.refine(loader, epochs=2, checkpoint=checkpoint)
        return _numbers(la.report_, la.state_dict()["posterior"])


def refined_mean(pace: Pace, checkpoint: Checkpoint) -> dict[str, Any]:
    faster = replace(pace, per_batch=pace.per_batch / 10)
    la, loader = _network(faster, mean="refined", num_actions=min(30, pace.num_data // BATCH), actions_per_step=3)
    with checkpoint:
        la.fit(loader, checkpoint=checkpoint)
        return _numbers(la.report_, la.state_dict()["posterior"])


def kernel(pace: Pace, checkpoint: Checkpoint) -> dict[str, Any]:
    x, y = _data(pace.num_data // 5)
    gp = NonConjugateGP(kernels.Matern32(lengthscale=3.0), likelihoods.Softmax(4), max_products=100, actions="joint")

    def slowly(state: object) -> None:
        work(pace.per_state)

    with checkpoint:
        gp.fit(x.double(), y, callback=slowly, checkpoint=checkpoint)
        gp.refine(20, callback=slowly, checkpoint=checkpoint)
        return _numbers_of(gp)


def update(pace: Pace, checkpoint: Checkpoint) -> dict[str, Any]:
    """Most kills are in the update: the fit is of a fifth of the data."""
    (x, y), old = _data(pace.num_data), pace.num_data // 5
    la, _ = _network(pace, num_actions=pace.num_data // BATCH, max_rank=pace.num_data // BATCH // 2)
    with checkpoint:
        la.fit(DataLoader(TensorDataset(x[:old], y[:old]), BATCH), checkpoint=checkpoint)
        la.update(DataLoader(TensorDataset(x[old:], y[old:]), BATCH), checkpoint=checkpoint)
        return _numbers(la.report_, la.state_dict()["posterior"])


def kernel_update(pace: Pace, checkpoint: Checkpoint) -> dict[str, Any]:
    x, y = _data(pace.num_data // 5)
    old = len(x) // 5
    gp = NonConjugateGP(kernels.Matern32(lengthscale=3.0), likelihoods.Softmax(4), max_products=40, actions="joint")

    def slowly(state: object) -> None:
        work(pace.per_state)

    with checkpoint:
        gp.fit(x[:old].double(), y[:old], callback=slowly, checkpoint=checkpoint)
        gp.update(x[old:].double(), y[old:], callback=slowly, checkpoint=checkpoint)
        return _numbers_of(gp)


def _numbers_of(gp: NonConjugateGP) -> dict[str, Any]:
    state = gp.posterior_.state
    found = {"gram": state.gram, "noise": state.noise_gram, "offset": state.iterate.offset}
    return _numbers(gp.report_, found | {"actions": state.buffer.actions.factor.matrix})


def _numbers(report: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """All of a result but the clock."""
    found = {name: digest(value) if isinstance(value, Tensor) else repr(value) for name, value in tensors.items()}
    found["history"] = [repr(astuple(replace(record, seconds=0.0))) for record in report.history]
    return found | {"status": report.status}


@dataclass(frozen=True)
class Door:
    """A program; how many pieces of its work may lie between two chances to save, and are done at every start."""

    program: Callable[[Pace, Checkpoint], dict[str, Any]]
    unit: Callable[[Pace], int]
    opening: Callable[[Pace], int]


DOORS = {
    # A batch; but between fit and refine there are two self-checks, of some 24 batches whatever the number of data.
    # Every start passes the first batch once to count memory, and three times a few rows to prove those by layers.
    "network": Door(network, lambda pace: 30, lambda pace: 4),
    # A product is two sweeps; before the first, and at every start, come outputs and trace, which are two more, and
    # what every start does, and one pass for the scale of the variance.
    "refined mean": Door(
        refined_mean, lambda pace: 4 * pace.num_data // BATCH + 12, lambda p: 2 * p.num_data // BATCH + 5
    ),
    "kernel": Door(kernel, lambda pace: 1, lambda pace: 0),
    "update": Door(update, lambda pace: 30, lambda pace: 4),
    "kernel update": Door(kernel_update, lambda pace: 1, lambda pace: 0),
}


# --- killing ----------------------------------------------------------------------------------------------------------


def _start(door: str, pace: Pace, folder: Path, life: int = 0) -> int:
    """The program in a process of its own, which can be killed; returns its number."""
    global journal
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        journal = Journal(folder / f"life{life}.txt")
        journal.watch()

        def say(message: str) -> None:
            with (folder / "said.txt").open("a") as file:
                file.write(message + "\n")
            if journal is not None:
                journal.write("resumed")

        found = DOORS[door].program(pace, Checkpoint(folder / "checkpoint", every_seconds=pace.every, say=say))
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
        killed, ages, has_saved = 0, [0.0], list[bool]()
        while True:
            has_saved.append(_last_save(disturbed) is not None)
            born, child = time.time(), _start(door, pace, disturbed, killed)
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
        lives = [read(disturbed / f"life{life}.txt") for life in range(killed + 1)]
        late, missed = zip(*(late_and_missed(life, pace.every) for life in lives), strict=True)
        whole, opening = read(undisturbed / "life0.txt"), DOORS[door].opening(pace)
    return Outcome(
        door,
        killed,
        resumed,
        same=results[0] == results[1],
        lost=max(ages) / pace.every,
        late=max(late[:killed], default=0),
        unit=DOORS[door].unit(pace),
        missed=sum(missed),
        anew=sum(has and is_anew(life) for has, life in zip(has_saved, lives, strict=True)),
        again=max(0, sum(kept(life, opening) for life in lives) - kept(whole, opening)),
        seconds=time.perf_counter() - started,
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
    print(
        f"{'':14}{'killed':>8}{'resumed':>9}{'same bits':>11}{'late (at most)':>16}{'missed':>8}{'anew':>6}{'again':>7}"
        f"{'nothing lost':>14}{'last save':>16}"
    )
    for door in arguments.door or DOORS:
        found = survive(door, kills, QUICK if arguments.quick else Pace(), arguments.seed)
        outcomes.append(found)
        same, nothing_lost = ("yes" if holds else "NO" for holds in (found.same, found.nothing_lost))
        late = f"{found.late} ({found.unit})"
        print(
            f"{door:14}{found.kills:8}{found.resumed:9}{same:>11}{late:>16}{found.missed:8}{found.anew:6}{found.again:7}"
            f"{nothing_lost:>14}{found.lost:6.1f} intervals",
            flush=True,
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(found) for found in outcomes], indent=2) + "\n")
    return 0 if all(found.same and found.nothing_lost for found in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

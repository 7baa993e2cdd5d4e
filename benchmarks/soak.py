"""Half an hour of everything, over and over: does memory stay flat, and is every file what was put into it?

    ntk-iterncgp bench soak [--quick] [--json FILE]
    make soak SOAK_MINUTES=30

Fit, refine, save, load and predict in a loop, on both front doors, always the same few problems; each round must give
the numbers of the first one, and a loaded posterior those of the saved one. After each round the resident memory is
read. Judged is its slope: a line through all rounds but the first third, in which caches fill. A leak of one page per
round would show. Then the programs of `kill_and_resume` are killed and resumed, where there is that benchmark.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.experiments.runs.predictor import KernelPredictor
from ntk_iterncgp.persistence.files import load_posterior, save_posterior
from ntk_iterncgp.runtime.memory import resident_bytes

MAX_SLOPE = 0.25  # MiB per minute, beyond twice the error of the slope itself
KILLS = 20
FILES = 5  # that one round leaves: two of kernels, three of networks


@dataclass(frozen=True)
class Outcome:
    """What came of it. `slope` and `error` in MiB per minute."""

    rounds: int
    minutes: float
    first_mib: float
    last_mib: float
    slope: float
    error: float
    files: int
    kills: str

    @property
    def verdict(self) -> str:
        if self.rounds < 12:
            return "too short to judge"
        return "ok" if self.slope - 2 * self.error <= MAX_SLOPE else "MISSED"


def one_round(folder: Path) -> Iterator[Tensor]:
    """Numbers of both front doors, which are to be the same in every round."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(300, 2, generator=generator)
    y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
    for policy, max_rank in (("curvature_residual", None), ("random_subspace", 20)):
        gp = NonConjugateGP(
            kernels.Matern32(0.5, 2.0), likelihoods.Softmax(3), policy=policy, max_products=15, max_rank=max_rank
        )
        gp.fit(X, y)
        gp.refine(5)
        file = folder / f"kernel_{policy}.safetensors"
        save_posterior(file, KernelPredictor.of(gp).state(), {}, {"policy": policy})
        state, _, _ = load_posterior(file)
        again = KernelPredictor.from_state(state, torch.device("cpu"))
        same = all(torch.equal(state[name], value) for name, value in tensors_of(gp).items())
        before = gp.latent(X[:50])
        if not same or not all(map(nearly, again.latent(X[:50]), before)):
            raise AssertionError(f"A loaded posterior is expected to be the saved one, but '{file}' is another.")
        yield from (gp.predict(X[:50], link="quadrature"), *before)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
    for p in model.parameters():
        p.data = 0.5 * torch.randn(p.shape, generator=generator)
    loader = DataLoader(TensorDataset(X, y), batch_size=64)
    for subset, policy in (("all", "clusters"), ("last_layer", "clusters"), ("all", "curvature_residual")):
        settings = {"num_actions": 10, "policy": policy}
        la = Laplace(model, "classification", subset, "iterncgp", **settings)
        la.fit(loader)
        la.refine(loader, epochs=2)
        before = la(X[:50], link_approx="quadrature")
        file = folder / f"{subset}_{policy}.safetensors"
        save_posterior(file, la.state_dict(), model.state_dict(), settings)
        state, weights, about = load_posterior(file)
        other = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
        other.load_state_dict(weights)
        loaded = Laplace(other, "classification", subset, "iterncgp", **about)
        loaded.load_state_dict(state)
        saved, found = la.posterior.to_dict(), loaded.posterior.to_dict()
        same = all(torch.equal(found[name], value) for name, value in saved.items() if isinstance(value, Tensor))
        if not same or not nearly(loaded(X[:50], link_approx="quadrature"), before):
            raise AssertionError(f"A loaded posterior is expected to be the saved one, but '{file}' is another.")
        yield before


def tensors_of(gp: NonConjugateGP) -> dict[str, Tensor]:
    return {name: value for name, value in KernelPredictor.of(gp).state().items() if isinstance(value, Tensor)}


def nearly(one: Tensor, other: Tensor) -> bool:
    """Not bit for bit: products with columns that lie elsewhere in memory are summed in another order."""
    return torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-5)


def soak(minutes: float, *, kills: int) -> Outcome:
    started, readings, first, files = time.monotonic(), [], None, 0
    with tempfile.TemporaryDirectory() as folder:
        while not readings or time.monotonic() - started < 60 * minutes:
            numbers = list(one_round(Path(folder)))
            first = numbers if first is None else first
            if not all(map(torch.equal, numbers, first)):
                raise AssertionError(f"Round {len(readings) + 1} is expected to give the numbers of the first.")
            left = sorted(path.name for path in Path(folder).iterdir())
            if len(left) != FILES:
                raise AssertionError(f"{FILES} files are expected after each round, but there are: {', '.join(left)}.")
            files += len(left)
            del numbers
            gc.collect()
            readings.append(((time.monotonic() - started) / 60, resident_bytes() / 2**20))
    settled = readings[len(readings) // 3 :]
    slope, error = slope_of(settled)
    return Outcome(
        len(readings), readings[-1][0], readings[0][1], readings[-1][1], slope, error, files, kill_and_resume(kills)
    )


def slope_of(readings: list[tuple[float, float]]) -> tuple[float, float]:
    """Of a line through them, and its standard error."""
    if len(readings) < 3:
        return 0.0, float("inf")
    x, y = zip(*readings, strict=True)
    slope, start = statistics.linear_regression(x, y)
    residual = sum((b - start - slope * a) ** 2 for a, b in readings) / (len(x) - 2)
    return slope, (residual / (statistics.pvariance(x) * len(x))) ** 0.5


def kill_and_resume(kills: int) -> str:
    """The other benchmark, where there is one."""
    if not kills or importlib.util.find_spec("benchmarks.kill_and_resume") is None:
        return "not run"
    if importlib.import_module("benchmarks.kill_and_resume").main(["--kills", str(kills)]) != 0:
        raise AssertionError(
            "A run that was killed is expected to end with the bits of one left alone, but it did not."
        )
    return f"{kills} of each program"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="two rounds or so: does it run?")
    parser.add_argument("--json", metavar="FILE", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    outcome = soak(0.02 if chosen.quick else chosen.minutes, kills=0 if chosen.quick else KILLS)
    print(
        f"{outcome.rounds} rounds in {outcome.minutes:.1f} min, {outcome.files} files; resident "
        f"{outcome.first_mib:.1f} MiB after the first and {outcome.last_mib:.1f} MiB after the last, slope "
        f"{outcome.slope:+.3f} ± {outcome.error:.3f} MiB/min (at most {MAX_SLOPE}): {outcome.verdict}; kills: "
        f"{outcome.kills}"
    )
    if chosen.json:
        chosen.json.write_text(json.dumps({**asdict(outcome), "verdict": outcome.verdict}, indent=2) + "\n")
    if outcome.verdict == "MISSED":
        raise SystemExit(1)


if __name__ == "__main__":
    main()

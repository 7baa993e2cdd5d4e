"""Does the library run on this machine's GPU, how fast, and does it say the same as on the CPU? In about a minute.

    python -m ntk_iterncgp.experiments.gpu_check

A convolutional network and a Gaussian process, both on random data, are fitted on the CPU in float64 and, in float32,
on the CPU and on the GPU if there is one: seconds of a fit and a prediction, memory, and the largest deviation from
float64 of standard deviations, relative to them. The exit code is 1 where a deviation is larger than `TOLERANCE`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.gp import NonConjugateGP
from ntk_iterncgp.kernels import RBF
from ntk_iterncgp.likelihoods import Poisson

TOLERANCE = 0.02  # of a standard deviation: rounding in float32, and what little it changes in the choice of actions
CLASSES, IMAGES, POINTS, NEW = 10, 256, 500, 32

Fit = Callable[[torch.device, torch.dtype], Callable[[], Tensor]]


@dataclass(frozen=True)
class Result:
    """One fit on one device."""

    name: str
    device: torch.device
    dtype: torch.dtype
    fit_seconds: float
    predict_seconds: float
    megabytes: float | None  # at most at once; None where torch does not count them
    deviations: Tensor  # standard deviations, in float64 on the CPU


def network(device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Fit a classifier of images; the function returned predicts standard deviations of its logits."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 49, CLASSES)).eval().to(device, dtype)
    images, labels = torch.randn(IMAGES + NEW, 3, 32, 32).to(device, dtype), torch.arange(IMAGES) % CLASSES
    la: Any = Laplace(model, "classification", "all", "iterncgp", num_actions=32, dtype=dtype)
    la.fit(DataLoader(TensorDataset(images[:IMAGES], labels.to(device)), batch_size=64))
    return lambda: la.latent(images[IMAGES:], contrasts="all")[1].diagonal(dim1=1, dim2=2).sqrt()


def gaussian_process(device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Fit a Gaussian process that counts; the function returned predicts standard deviations of the latent function."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(POINTS + NEW, 2, generator=generator, dtype=torch.float64).to(device, dtype)
    y = torch.poisson(torch.exp(torch.sin(6 * X[:POINTS, 0].cpu())), generator=generator)
    gp = NonConjugateGP(RBF(0.3, 1.0), Poisson(), max_products=100)
    gp.fit(X[:POINTS], y.to(device, dtype))
    return lambda: gp.latent(X[POINTS:])[1].sqrt()


TASKS: dict[str, Fit] = {"network": network, "Gaussian process": gaussian_process}


def measured(name: str, device: torch.device, dtype: torch.dtype) -> Result:
    """Fit and predict once, after a first time that warms up."""
    on_gpu = device.type == "cuda"
    TASKS[name](device, dtype)()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    start = _now(device)
    predict = TASKS[name](device, dtype)
    middle = _now(device)
    found = predict()
    end = _now(device)
    megabytes = torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else None
    return Result(name, device, dtype, middle - start, end - middle, megabytes, found.detach().double().cpu())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def results() -> Iterator[tuple[Result, float]]:
    """Each fit, with its largest deviation from that in float64 on the CPU."""
    cpu = torch.device("cpu")
    devices = [cpu, torch.device("cuda")] if torch.cuda.is_available() else [cpu]
    for name in TASKS:
        truth = measured(name, cpu, torch.float64)
        yield truth, 0.0
        for device in devices:
            found = measured(name, device, torch.float32)
            yield found, float((found.deviations / truth.deviations - 1).abs().max())


def main() -> int:
    """Print the table; 1 where float32 or the GPU says something else."""
    if torch.cuda.is_available():
        print(f"GPU: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    else:
        print(f"torch {torch.__version__} finds no GPU here: the half of the check that needs one is left out.")
    print(f"{'':<18}{'device':<8}{'dtype':<10}{'fit':>9}{'predict':>11}{'memory':>11}{'deviation':>11}")
    worst = 0.0
    for r, deviation in results():
        memory = "" if r.megabytes is None else f"{r.megabytes:.0f} MiB"
        times = f"{r.fit_seconds:>7.2f} s{1000 * r.predict_seconds:>8.1f} ms"
        dtype = str(r.dtype).removeprefix("torch.")
        print(f"{r.name:<18}{r.device.type:<8}{dtype:<10}{times}{memory:>11}{deviation:>11.1e}", flush=True)
        worst = max(worst, deviation)
    print(f"Largest deviation {worst:.1e}, at most {TOLERANCE:g}: {'passed' if worst <= TOLERANCE else 'FAILED'}.")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())

"""What a fit will take, before any of it is done: seconds from timing one batch, epochs, and memory by counting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ntk_iterncgp import parallel
from ntk_iterncgp.network.grouping import MAX_FEATURES
from ntk_iterncgp.network.linearised import PRODUCT_EPOCHS, LinearisedNetwork, NetworkSettings

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

TIMED_COLUMNS = 16  # of the actions, when a prediction is timed: all of them may not fit in memory
WORKSPACE_BYTES = 64 * 2**20  # what PyTorch and a batch of activations take beside the arrays counted here


@dataclass(frozen=True)
class Cost:
    """Seconds are those of this machine as it is now; a budget (`max_epochs`) is not taken into account."""

    num_data: int
    num_params: int
    num_actions: int
    epochs: float
    fit_seconds: float | None
    predict_seconds: float | None  # for 1000 inputs
    fit_bytes: int
    predict_bytes: int
    available_bytes: int | None

    def __str__(self) -> str:
        def seconds(value: float | None) -> str:
            return "–" if value is None else f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"

        def size(value: int | None) -> str:
            return "unknown" if value is None else f"{value / 2**20:,.0f} MiB"

        return (
            f"{self.num_data:,} data, {self.num_params:,} weights, {self.num_actions:,} actions\n"
            f"{'':12}{'time':>12}{'memory':>14}\n"
            f"{'fit':12}{seconds(self.fit_seconds):>12}{size(self.fit_bytes):>14}   {self.epochs:.1f} epochs\n"
            f"{'predict':12}{seconds(self.predict_seconds):>12}{size(self.predict_bytes):>14}   per 1000 inputs\n"
            f"{'available':24}{size(self.available_bytes):>14}"
        )


def estimate_cost(network: LinearisedNetwork, settings: NetworkSettings, *, timed: bool) -> Cost:
    """Counted from sizes; the first batch is timed if asked, and looked at in any case."""
    jacobian, data = network.jacobian, network.data
    x, _ = next(data.batches())
    with torch.no_grad():
        outputs = jacobian.forward(x)
    rows, num_outputs = outputs.shape
    num_data = data.num_data(rows)
    in_groups = settings.policy is None
    per_number = torch.empty(0, dtype=jacobian.dtype).element_size()
    actions = settings.num_actions
    if in_groups:
        actions = min(actions, num_data) * settings.cotangents
        epochs = 1 / 3 + (1 + 2 * settings.cotangents) / 3
        per_datum = 8 * num_outputs * (3 + 3 * settings.cotangents) + 2 * 4 * (MAX_FEATURES + num_outputs)
    else:
        epochs = 1 / 3 + PRODUCT_EPOCHS * actions
        per_datum = 8 * num_outputs * 8 + 2 * per_number * num_outputs * actions
    images = per_number * actions * jacobian.num_params
    shared = images + settings.chunk_bytes + WORKSPACE_BYTES + 3 * 8 * actions**2
    fit_bytes = shared + num_data * per_datum + 4 * 8 * jacobian.num_params
    fit_seconds = predict_seconds = None
    if timed:
        cotangents = torch.ones(rows, num_outputs, 1, dtype=jacobian.dtype, device=jacobian.device)
        epoch = _seconds(lambda: jacobian.vjp(x, cotangents)) * num_data / rows
        fit_seconds = epoch * epochs / parallel.num_processes()
        at_once = max(1, min(rows, settings.chunk_bytes // jacobian.bytes_per_row(num_outputs)))
        part = next(data.chunk(x, at_once))
        columns = min(actions, TIMED_COLUMNS)
        random = torch.randn(jacobian.num_params, columns, dtype=jacobian.dtype, device=jacobian.device)
        num_rows = data.num_rows(part)
        with torch.no_grad():
            kept = jacobian.rows(part, num_rows)
            seconds = _seconds(lambda: jacobian.rows(part, num_rows))
            seconds += _seconds(lambda: kept.times(random)) * actions / columns
        predict_seconds = 1000 * seconds / num_rows
    return Cost(
        num_data,
        jacobian.num_params,
        actions,
        epochs,
        fit_seconds,
        predict_seconds,
        fit_bytes,
        shared + images,
        available_bytes(jacobian.device),
    )


def check_memory(cost: Cost) -> None:
    """Refuse what cannot fit, before it starts."""
    if cost.available_bytes is not None and cost.fit_bytes > cost.available_bytes:
        raise MemoryError(
            f"The fit is expected to fit in memory, but it takes {cost.fit_bytes / 2**20:,.0f} MiB of "
            f"{cost.available_bytes / 2**20:,.0f} MiB available. Use fewer actions (num_actions), less for rows of the "
            f"Jacobian (chunk_bytes), or fewer weights.\n{cost}"
        )


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be had: of the GPU, or of the machine within the limits of this process."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = []
    meminfo, status = _table("/proc/meminfo"), _table("/proc/self/status")
    if "MemAvailable" in meminfo:
        found.append(meminfo["MemAvailable"])
    if resource is not None and "VmSize" in status:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            found.append(limit - status["VmSize"])
    limits = [Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current")]  # of a container
    if all(file.exists() for file in limits):
        allowed, used = (file.read_text().strip() for file in limits)
        if allowed != "max":
            found.append(int(allowed) - int(used))
    return min(found) if found else None


def _table(path: str) -> dict[str, int]:
    """Lines such as `MemAvailable:  123 kB`, in bytes; nothing where there is no such file."""
    file = Path(path)
    if not file.exists():
        return {}
    lines = [line.split() for line in file.read_text().splitlines()]
    return {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if len(line) == 3 and line[2] == "kB"}


def _seconds(work: Callable[[], object]) -> float:
    """The smaller of two runs: the first may load what later ones find loaded."""
    least = math.inf
    for _ in range(2):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():  # a GPU returns before it has done the work
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - started)
    return least

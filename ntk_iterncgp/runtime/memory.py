"""How much memory can still be had, so that what does not fit is refused before it starts.

The least of: what the machine has left, what this process may still map (RLIMIT_AS and RLIMIT_DATA, `ulimit -v -d`),
and what its container may still use (cgroups, of which version 2 nests: every level has a limit of its own).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_highest = 0  # as far as it has been asked for
CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Memory of the GPU, or of the machine within the limits of this process; None where nobody knows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by PyTorch for reuse
        return int(free + unused)
    found = [*_limits_of_process(), *_limits_of_container()]
    meminfo = _table(Path("/proc/meminfo"))
    if "MemAvailable" in meminfo:
        found.append(meminfo["MemAvailable"])
    return max(0, min(found)) if found else None


def resident_bytes() -> int:
    """What this process holds in memory, as Linux counts it."""
    return _process()["VmRSS"]


def peak_resident_bytes() -> int:
    """The most it has held since it began, or since `restart_peak`."""
    return _process()["VmHWM"]


def restart_peak() -> bool:
    """Let the peak start from what is held now; False where there is no such thing."""
    highest_bytes()  # remembered, since the system forgets it
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def highest_bytes() -> int:
    """The most this process has held since it began, whether or not the peak was restarted; 0 where nobody knows."""
    global _highest
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        _highest = max(_highest, unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return _highest


def require_memory(needed: int, available: int | None, advice: str) -> None:
    """Raise a `MemoryError` that names both sizes, unless it fits or nobody knows."""
    if available is not None and needed > available:
        raise MemoryError(
            f"The fit is expected to fit in memory, but it takes {mebibytes(needed)} of {mebibytes(available)} "
            f"available. {advice}"
        )


def mebibytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**20:,.0f} MiB"


def _limits_of_process() -> Iterator[int]:
    used = _process()
    if resource is None:
        return
    for limit, size in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY and size in used:
            yield soft - used[size]


def _limits_of_container() -> Iterator[int]:
    for folder in _cgroups(Path("/proc/self/cgroup")):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            allowed, used = _number(folder / limit), _number(folder / usage)
            if allowed is not None and used is not None and allowed < 2**60:  # version 1 says "none" as a huge number
                yield allowed - used + _reclaimable(folder / "memory.stat")


def _cgroups(table: Path) -> Iterator[Path]:
    """The folders of this process's cgroup and of those that it lies in."""
    for line in _text(table).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers in ("", "memory"):
            root = CGROUPS / controllers if controllers else CGROUPS
            inner = root / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _reclaimable(file: Path) -> int:
    """Files in the page cache, which are given up when memory is needed."""
    stat = dict(line.split()[:2] for line in _text(file).splitlines() if len(line.split()) >= 2)
    return int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _process() -> dict[str, int]:
    return _table(Path("/proc/self/status"))


def _table(file: Path) -> dict[str, int]:
    """Lines such as `MemAvailable:  123 kB`, in bytes; nothing where there is no such file."""
    lines = [line.split() for line in _text(file).splitlines()]
    return {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if len(line) == 3 and line[2] == "kB"}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not there, or not ours to read
        return ""

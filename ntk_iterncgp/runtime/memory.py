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
    found, used = [*_limits_of_container()], _table(Path("/proc/self/status"))
    for name, size in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")) if resource is not None else ():
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft != resource.RLIM_INFINITY and size in used:
            found.append(soft - used[size])
    meminfo = _table(Path("/proc/meminfo"))
    if "MemAvailable" in meminfo:
        found.append(meminfo["MemAvailable"])
    return max(0, min(found)) if found else None


def resident_bytes() -> int:
    """What this process holds in memory, as Linux counts it."""
    return _table(Path("/proc/self/status"))["VmRSS"]


def peak_resident_bytes() -> int:
    """The most it has held since it began, or since `restart_peak`."""
    return _table(Path("/proc/self/status"))["VmHWM"]


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


def require_memory(needed: int, available: int | None, *advice: object) -> None:
    """Raise a `MemoryError` that names both sizes and ends with the advice, unless it fits or nobody knows."""
    if available is not None and needed > available:
        raise MemoryError(
            f"The fit must take at most {mebibytes(available)}, the memory available; got {mebibytes(needed)}. "
            + "\n".join(map(str, advice))
        )


def mebibytes(size: int | None) -> str:
    """Return a number of bytes in MiB, as text."""
    return "unknown" if size is None else f"{size / 2**20:,.0f} MiB"


def _limits_of_container() -> Iterator[int]:
    """Of this process's cgroup, and of those that it lies in."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in ("", "memory"):
            continue
        root = CGROUPS / controllers if controllers else CGROUPS
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(root):
                break
            for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
                allowed, used = _text(folder / limit).strip(), _text(folder / usage).strip()
                # "max" is no limit, and version 1 writes a huge number for it
                if allowed.isdigit() and used.isdigit() and int(allowed) < 2**60:
                    yield int(allowed) - int(used) + _reclaimable(folder / "memory.stat")


def _reclaimable(file: Path) -> int:
    """Files in the page cache, which are given up when memory is needed."""
    stat = dict(line.split()[:2] for line in _text(file).splitlines() if len(line.split()) >= 2)
    return int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))


def _table(file: Path) -> dict[str, int]:
    """Lines such as `MemAvailable:  123 kB`, in bytes; nothing where there is no such file."""
    lines = [line.split() for line in _text(file).splitlines()]
    return {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if len(line) == 3 and line[2] == "kB"}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not there, or not readable
        return ""

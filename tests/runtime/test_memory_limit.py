"""A run that needs more memory than there is, is refused before it starts; one that needs a little less finishes."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.fitting import cost as cost_module
from ntk_iterncgp.gp import checks as gp_checks
from ntk_iterncgp.runtime import memory
from tests.clusters_helpers import joint_variance, make_net
from tests.laplace_helpers import not_below

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30

# Above and below what was said, after whatever is loaded on first use has been loaded.
LIMITED = """
import ctypes, gc, resource, warnings
warnings.filterwarnings("ignore")
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.gp import checks as gp_checks

torch.set_num_threads(1)
torch.manual_seed(0)


def mapped():
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmSize"))


def attempt(name, said, run, share):
    gc.collect()  # earlier attempts, which would be given back on the way
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    resource.setrlimit(resource.RLIMIT_AS, (mapped() + int(share * said), resource.RLIM_INFINITY))
    try:
        run()
        print(name, share, "finished")
    except MemoryError as error:
        print(name, share, "refused" if "the memory available" in str(error) else error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Counted(TensorDataset):
    reads = 0

    def __getitem__(self, i):
        Counted.reads += 1
        return super().__getitem__(i)


mlp = nn.Sequential(nn.Linear(784, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 10))
lenet = nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
    nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
)
for name, model, x in (("mlp", mlp, torch.randn(120, 784)), ("lenet", lenet, torch.randn(120, 1, 28, 28))):
    data = Counted(x, torch.randint(10, (120,)))
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=100, chunk_bytes=2**26)
    loader = DataLoader(data, batch_size=60)
    said = la.estimate_cost(loader).fit_bytes
    Counted.reads = 0
    attempt(name, said, lambda: la.fit(loader), 0.97)
    print(name, "read", Counted.reads)
    attempt(name, said, lambda: la.fit(loader), 1.03)

X, y = torch.randn(600, 2), torch.randint(10, (600,))
kernel, softmax = kernels.Matern32(0.5), likelihoods.Softmax(10)
NonConjugateGP(kernel, softmax, max_products=2, actions="joint").fit(X[:20], y[:20])
gp, sizes = NonConjugateGP(kernel, softmax, max_products=400, max_newton_steps=1, actions="joint"), []
original = gp_checks.needed_bytes


def remembered(*args):
    sizes.append(original(*args))
    return sizes[-1]


gp_checks.needed_bytes = remembered
attempt("gp", 0, lambda: gp.fit(X, y), 1.0)
attempt("gp", sizes[0], lambda: gp.fit(X, y), 0.97)
attempt("gp", sizes[0], lambda: gp.fit(X, y), 1.03)
attempt("refine", 0, lambda: gp.refine(2), 1.0)
attempt("refine", sizes[-1], lambda: gp.refine(2), 0.97)
attempt("refine", sizes[-1], lambda: gp.refine(2), 1.03)
"""


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the mapped memory is read from /proc")
def test_a_fit_under_a_limit_is_refused_before_it_starts_or_finishes() -> None:
    result = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    reads = {line.split()[0]: int(line.split()[2]) for line in lines if " read " in line}
    assert reads.keys() == {"mlp", "lenet"} and all(count <= 5 * 60 for count in reads.values())  # looks at one batch
    outcomes = [line for line in lines if " read " not in line]
    assert outcomes == [
        "mlp 0.97 refused",
        "mlp 1.03 finished",
        "lenet 0.97 refused",
        "lenet 1.03 finished",
        "gp 1.0 refused",
        "gp 0.97 refused",
        "gp 1.03 finished",
        "refine 1.0 refused",
        "refine 0.97 refused",
        "refine 1.03 finished",
    ]


# Where the limits are read


class System:
    """Files of a made-up system, and its limits."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.limits = folder, {}
        monkeypatch.setattr(memory, "CGROUPS", folder / "cgroup")
        original = memory._text
        monkeypatch.setattr(memory, "_text", lambda path: original(self._moved(path)))
        infinity, kinds = -1, {"RLIMIT_AS": 9, "RLIMIT_DATA": 2}
        fake = SimpleNamespace(
            RLIM_INFINITY=infinity, getrlimit=lambda kind: (self.limits.get(kind, infinity), infinity), **kinds
        )
        monkeypatch.setattr(memory, "resource", fake)
        self.write("/proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB // 1024} kB\nHugePages_Total:  0\n")
        self.write("/proc/self/status", f"VmSize: {GIB // 1024} kB\nVmData: {GIB // 2048} kB\n")

    def _moved(self, path: Path) -> Path:
        return self.folder / str(path).lstrip("/") if str(path).startswith("/proc") else path

    def write(self, path: str, text: str) -> None:
        file = self.folder / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def available(self) -> int | None:
        return memory.available_bytes(torch.device("cpu"))


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    return System(tmp_path, monkeypatch)


def test_without_limits_it_is_what_the_machine_has_left(system: System) -> None:
    assert system.available() == 8 * GIB


def test_limits_of_the_process_count_less_what_is_mapped(system: System) -> None:
    system.limits[9] = 4 * GIB
    assert system.available() == 3 * GIB
    system.limits[2] = 2 * GIB
    assert system.available() == 3 * GIB // 2
    system.limits[2] = GIB // 4
    assert system.available() == 0


def test_the_tightest_of_nested_containers_counts_without_its_page_cache(system: System) -> None:
    system.write("/proc/self/cgroup", "0::/slice/job\n")
    system.write("/cgroup/slice/job/memory.max", "max\n")
    system.write("/cgroup/slice/job/memory.current", f"{GIB}\n")
    assert system.available() == 8 * GIB
    system.write("/cgroup/slice/memory.max", f"{6 * GIB}\n")
    system.write("/cgroup/slice/memory.current", f"{5 * GIB}\n")
    assert system.available() == GIB
    system.write("/cgroup/slice/memory.stat", f"anon 5\ninactive_file {2 * GIB}\n")
    assert system.available() == 3 * GIB


def test_containers_of_the_first_version_are_read_too(system: System) -> None:
    system.write("/proc/self/cgroup", "5:cpu:/\n4:memory:/box\n")
    system.write("/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    system.write("/cgroup/memory/memory.usage_in_bytes", "1\n")
    assert system.available() == 8 * GIB
    system.write("/cgroup/memory/box/memory.limit_in_bytes", f"{2 * GIB}\n")
    system.write("/cgroup/memory/box/memory.usage_in_bytes", f"{GIB}\n")
    assert system.available() == GIB


def test_where_nobody_knows_nothing_is_refused(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resource", None)
    system.write("/proc/meminfo", "")
    assert system.available() is None
    memory.require_memory(2**60, None, "")


def test_this_machine_tells_something_or_nothing() -> None:
    found = memory.available_bytes(torch.device("cpu"))
    assert found is None or 0 <= found < 2**50


# Both front doors


@pytest.mark.parametrize("policy", ["clusters", "curvature_residual"])
def test_refine_is_refused_too_and_leaves_the_fit(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = make_net(2), make_net(2).near_and_far()
    la = net.laplace(num_actions=4, policy=policy)
    la.fit(net.loader())
    before, report = joint_variance(la, x), la.report_
    with monkeypatch.context() as patch:
        patch.setattr(cost_module, "available_bytes", lambda device: 10 * 2**20)
        with pytest.raises(
            MemoryError, match=r"at most 10 MiB, the memory available; got [\d,]+ MiB. Ask for fewer epochs"
        ):
            la.refine(net.loader(), epochs=3)
    assert torch.equal(joint_variance(la, x), before) and la.report_ == report
    la.refine(net.loader(), epochs=3)
    not_below(before, joint_variance(la, x))


@pytest.mark.parametrize("settings", [{}, {"max_rank": 9}, {"actions": "kronecker"}], ids=str)
def test_a_gp_that_cannot_fit_is_refused(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = torch.randn(30, 2, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3
    gp = NonConjugateGP(
        kernels.RBF(1.0), likelihoods.Softmax(3), max_products=5, **{"policy": "curvature_residual"} | settings
    )
    asked: list[int] = []
    monkeypatch.setattr(gp_checks, "available_bytes", lambda device: asked.append(1))  # None: nobody knows
    gp.fit(X, y)
    report = gp.report_
    monkeypatch.setattr(gp_checks, "available_bytes", lambda device: 2**20)
    for run in (lambda: gp.fit(X, y), lambda: gp.refine(3)):
        with pytest.raises(
            MemoryError, match=r"at most 1 MiB, .* MiB. Use fewer products \(max_products\), retain fewer"
        ):
            run()
    assert gp.report_ is report and asked

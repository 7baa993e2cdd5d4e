"""The wheel without extras: both front doors run where nothing but its own dependencies is installed.

The environment is new. Of the packages of this one it gets links to those that the wheel's metadata ask for, directly
or through others, and none of the extra `experiments`; so a dependency that is not declared is missing there.

The wheel is built from the source here. Of a release, in the folder NTK_ITERNCGP_DIST, its own wheel is installed, and
in another environment its source archive.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ntk_iterncgp.__main__ import NEEDED
from tests.test_readme import README, ROOT, python_blocks

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.cli]

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
EXPERIMENTS = {canonicalize_name(Requirement(text).name) for text in EXTRAS["experiments"]}
QUIET = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def pip(*arguments: str | Path) -> None:
    outcome = run(sys.executable, "-m", "pip", *arguments)
    assert outcome.returncode == 0, outcome.stderr


def with_their_own(names: Iterable[str]) -> dict[str, Distribution]:
    """The installed packages of these names and, in turn, of what they require, without extras."""
    found: dict[str, Distribution] = {}
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or name in EXPERIMENTS:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # another build of torch may do without, say, CUDA's libraries
            continue
        waiting += required(found[name].requires)
    return found


def required(requirements: Iterable[str] | None) -> list[str]:
    """The names of those requirements that hold here when no extra is asked for."""
    parsed = [Requirement(text) for text in requirements or ()]
    return [canonicalize_name(r.name) for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def link(package: Distribution, site: Path) -> None:
    for name in {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}:
        if not (site / name).exists():  # packages of one namespace share a folder
            (site / name).symlink_to(Path(str(package.locate_file(name))))


RELEASE = os.environ.get("NTK_ITERNCGP_DIST")


def wheel_of(kind: str, folder: Path) -> Path:
    """The wheel to install: of a release, of its source archive, or of the source here."""
    source = folder / "source"
    if RELEASE is None:
        shutil.copytree(ROOT / "ntk_iterncgp", source / "ntk_iterncgp", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
    else:
        (source,) = (ROOT / RELEASE).glob(kind)
        if source.suffix == ".whl":
            return source
    pip("wheel", *QUIET, "--no-build-isolation", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module", params=["source"] if RELEASE is None else ["*.whl", "*.tar.gz"])
def bin_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs of the new environment are."""
    folder = tmp_path_factory.mktemp("wheel")
    environment, wheel = folder / "environment", wheel_of(request.param, folder)

    assert run(sys.executable, "-m", "venv", "--without-pip", environment).returncode == 0
    pip("--python", environment / "bin" / "python", "install", *QUIET, wheel)
    (site,) = environment.glob("lib/python*/site-packages")
    (installed,) = Distribution.discover(name="ntk-iterncgp", path=[str(site)])
    names = required(installed.requires)
    assert "torch" in names and not EXPERIMENTS.intersection(names)
    for package in with_their_own(names).values():
        link(package, site)
    return environment / "bin"


def test_the_readme_runs_without_the_extra(bin_folder: Path, tmp_path: Path) -> None:
    blocks = [block for _, block in python_blocks(README)]
    shown = "print(ntk_iterncgp.__file__)\nprint(type(la).__name__, type(gp).__name__, tuple(probabilities.shape))\n"
    (tmp_path / "readme.py").write_text("\n".join([*blocks, shown]), encoding="utf-8")
    outcome = run(bin_folder / "python", "readme.py", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    file, kinds = outcome.stdout.splitlines()[-2:]
    assert Path(file).is_relative_to(bin_folder.parent)
    assert kinds == "IterNCGPAllLaplace NonConjugateGP (300, 2)"


def test_the_template_of_the_report_is_installed(bin_folder: Path) -> None:
    package = "lib/python*/site-packages/ntk_iterncgp"
    assert [file.name for file in bin_folder.parent.glob(f"{package}/**/*.jinja")] == ["report.html.jinja"]


@pytest.mark.parametrize("module", [*NEEDED, "gpytorch"])
def test_no_module_of_the_extra_is_there(module: str, bin_folder: Path) -> None:
    assert f"No module named '{module}'" in run(bin_folder / "python", "-c", f"import {module}").stderr


def test_the_command_names_the_extra_in_one_line(bin_folder: Path) -> None:
    for command in ([bin_folder / "ntk-iterncgp"], [bin_folder / "python", "-m", "ntk_iterncgp"]):
        outcome = run(*command, "--help")
        assert outcome.returncode == 2 and not outcome.stdout
        assert outcome.stderr == (
            f"ntk-iterncgp: the command needs {', '.join(NEEDED.values())}; not installed. "
            "Try pip install 'ntk-iterncgp[experiments]'.\n"
        )


def test_the_command_asks_for_what_the_extra_installs() -> None:
    optional = {"gpytorch"}  # only SVGP, among the paper's experiments, needs it, and says so itself
    assert {canonicalize_name(name) for name in NEEDED.values()} | optional == EXPERIMENTS

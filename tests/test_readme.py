"""What the documentation shows runs, names what exists, and links to what is there."""

import re
import shutil
import struct
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ntk_iterncgp.experiments import cli
from ntk_iterncgp.experiments.config import KERNELS
from ntk_iterncgp.likelihoods import __all__ as LIKELIHOODS
from ntk_iterncgp.posterior.predictive import LINKS
from ntk_iterncgp.solver import POLICIES, Status
from tests.test_repository import ORDER

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Each fenced block of Python with the line it starts on."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_in_order(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for line, block in python_blocks(page.read_text(encoding="utf-8")):
        exec(compile("\n" * line + block, str(page), "exec"), namespace)  # the page's own line numbers in a traceback


def test_there_is_python_to_run() -> None:
    with_code = {page.name for page in PAGES if python_blocks(page.read_text(encoding="utf-8"))}
    assert with_code >= {"README.md", "api.md", "extending.md", "gp.md", "kernels.md"}


TOY = ("data.train_limit=150", "data.test_limit=40", "data.ood_limit=20", "model.train_epochs=1", "fit.num_actions=4")
TOY += ("evaluate.link_samples=32", "evaluate.bootstrap=50", "evaluate.baselines=[map, temperature, prior]")


def write_idx(path: Path, values: np.ndarray) -> None:
    path.write_bytes(struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes())


def small_official_data(root: Path) -> None:
    """Files of the official form with a few random images in them."""
    draw = np.random.default_rng(0)
    for name in ("MNIST", "FashionMNIST"):
        folder = root / name / "raw"
        folder.mkdir(parents=True)
        for part, size in (("train", 200), ("t10k", 50)):
            write_idx(folder / f"{part}-images-idx3-ubyte", draw.integers(0, 255, (size, 28, 28), dtype=np.uint8))
            write_idx(folder / f"{part}-labels-idx1-ubyte", (np.arange(size) % 10).astype(np.uint8))


@pytest.mark.cli
def test_the_commands_of_the_readme_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.partition("#")[0].split() for line in re.findall(r"^    ntk-iterncgp (.*)$", README, re.MULTILINE)]
    assert {line[0] for line in lines} == {"fit", "predict", "evaluate"}
    small_official_data(tmp_path / "data")
    np.savez(tmp_path / "new.npz", x=np.random.default_rng(0).random((3, 8, 8)))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NTK_ITERNCGP_DATA", raising=False)
    for line in lines:
        toy = [text for setting in TOY for text in ("--set", setting)] if line[0] != "predict" else []
        assert cli.main([*line, *toy]) == 0, line
    written = {str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").rglob("*")}
    assert written >= {f"runs/digits/{name}" for name in ("posterior.safetensors", "predictions.csv", "report.html")}


def test_the_commands_of_the_readme_to_make_are_targets() -> None:
    targets = re.findall(r"^    make (\w+)", README, re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}: ", makefile, re.MULTILINE) for target in targets)


def test_the_readme_is_read_in_five_minutes() -> None:
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 700
    assert len(re.findall(r"!\[", README)) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if not link.startswith("https://") and not (page.parent / link).exists()]
    assert broken == []


@pytest.mark.parametrize("name", [*POLICIES, *LINKS, *KERNELS, *sorted(set(LIKELIHOODS) - {"Likelihood"}), *Status])
def test_the_page_of_the_interface_names_every_choice(name: str) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert f"`{name}" in page or f'`"{name}"' in page


def test_the_architecture_names_files_and_names_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?)`", page))
    assert len(files) > 20 and not [
        file for file in files if not ((ROOT / "ntk_iterncgp" / file).exists() or (ROOT / file).exists())
    ]
    named = re.findall(r"`([a-z_/]+\.py)`: `([\w.]+)`", page)
    assert len(named) > 12
    for file, name in named:
        source = (ROOT / "ntk_iterncgp" / file).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b", source), f"{name} is not in {file}"


def test_the_rooms_of_the_architecture_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = page.split("```text\n")[1].split("```")[0]
    assert {room for rooms in ORDER for room in rooms} - {"__main__"} <= set(re.findall(r"[a-z_]+", picture))


def test_the_citation_is_of_this_version_and_of_the_paper() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert found["version"] == version("ntk-iterncgp") and found["license"] == "MIT"
    assert found["references"][0]["authors"][0]["family-names"] == "Tatzel"

"""The tutorials run as they stand, make the figures they show, and are on the site."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_readme import python_blocks

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
WITH_CODE = [page for page in TUTORIALS if '--8<-- "examples/' not in page.read_text(encoding="utf-8")]


@pytest.mark.cli
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_tutorial_runs_and_makes_its_figures(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    for line, block in python_blocks(text):
        exec(compile("\n" * line + block, str(page), "exec"), namespace)
    shown = set(re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text))
    assert {path.name for path in tmp_path.iterdir()} == shown
    assert all((page.parent / name).exists() for name in shown)


@pytest.mark.parametrize("page", sorted(set(TUTORIALS) - set(WITH_CODE)), ids=lambda page: page.stem)
def test_the_tutorial_shows_an_example_and_its_command(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    example = re.findall(r'--8<-- "(examples/\w+\.py)"', text)
    assert len(example) == 1 and (ROOT / example[0]).exists()  # which tests/test_examples.py runs
    assert f"    .venv/bin/python {example[0]}" in text


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert menu == pages
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["strict"] is True

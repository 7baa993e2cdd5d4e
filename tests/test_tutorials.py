"""The tutorials run as they stand, make the figures they show, and are on the site."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_readme import python_blocks

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
WITH_CODE = [page for page in TUTORIALS if '--8<-- "examples/' not in page.read_text(encoding="utf-8")]


def outputs(text: str) -> dict[str, str]:
    """What the page shows below blocks of Python: block → output."""
    return dict(re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def first_words(printed: str) -> list[list[str]]:
    """Of each line; numbers differ from machine to machine."""
    return [re.findall(r"[A-Za-z]+", line)[:1] for line in printed.splitlines()]


def check_quickstart(page: dict[str, Any]) -> None:
    """The orders of magnitude that the text speaks of; they hold for each of the seeds 0 to 4."""
    alone, groups, detector, test, y = (page[name] for name in ("alone", "groups", "detector", "test", "y"))
    assert float(alone["turned digits"].amax(1).median()) > 0.9
    assert float((alone["turned digits"].argmax(1) == y[test]).double().mean()) < 0.4
    by_confidence = {name: float((p.amax(1) < page["threshold"]).double().mean()) for name, p in alone.items()}
    with pytest.warns(UserWarning, match="made before update"):
        raised = {name: float(detector.alarm(inputs, rate=0.05).double().mean()) for name, inputs in groups.items()}
    assert 0.01 < raised["test digits"] < 0.1
    assert raised["turned digits"] > 2 * by_confidence["turned digits"] and raised["noise"] > by_confidence["noise"]
    assert float((page["after"] / page["before"]).median()) < 0.95
    losses = [page["scores"](way["test digits"])[0] for way in (alone, page["posterior"])]
    assert losses[1] < losses[0]


PROMISES = {"quickstart": check_quickstart}


@pytest.mark.cli
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_tutorial_runs_and_makes_its_figures(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    promised = outputs(text)
    for line, block in python_blocks(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + block, str(page), "exec"), namespace)
        if block in promised:
            assert first_words(printed.getvalue()) == first_words(promised[block])
    if page.stem in PROMISES:
        PROMISES[page.stem](namespace)
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

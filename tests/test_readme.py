"""What the documentation shows runs, names what exists, and links to what is there."""

import re
from pathlib import Path
from typing import Any

import pytest

from ntk_iterncgp.config import KERNELS
from ntk_iterncgp.evaluation.report import COLUMNS
from ntk_iterncgp.likelihoods import __all__ as LIKELIHOODS
from ntk_iterncgp.predictive import LINKS
from ntk_iterncgp.solver import POLICIES, Status

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
    assert with_code >= {"README.md", "extending.md", "kernels.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if not link.startswith("https://") and not (page.parent / link).exists()]
    assert broken == []


@pytest.mark.parametrize("name", [*POLICIES, *LINKS, *KERNELS, *set(LIKELIHOODS) - {"Likelihood"}, *Status])
def test_the_readme_names_every_choice(name: str) -> None:
    assert f"`{name}" in README or f'`"{name}"' in README


def test_the_table_of_the_readme_has_the_columns_of_the_demo() -> None:
    headings = "   ".join(heading for heading, _, _ in COLUMNS)
    assert headings.split() in [line.split() for line in README.splitlines()]

"""What the documentation shows runs, names what exists, and links to what is there."""

import re
from pathlib import Path
from typing import Any

import pytest

from ntk_iterncgp import cli
from ntk_iterncgp.config import KERNELS, load
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
    assert with_code >= {"README.md", "api.md", "extending.md", "kernels.md"}


def test_the_commands_of_the_readme_are_those_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"^    ntk-iterncgp (\w+) (\S+)", README, re.MULTILINE)
    assert {command for command, _ in shown} >= {"fit", "predict", "evaluate"}
    for command, argument in shown:
        with pytest.raises(SystemExit, match="0"):
            cli.main([command, "--help"])
        if argument.startswith("configs/"):
            load(ROOT / argument)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if not link.startswith("https://") and not (page.parent / link).exists()]
    assert broken == []


@pytest.mark.parametrize("name", [*POLICIES, *LINKS, *KERNELS, *set(LIKELIHOODS) - {"Likelihood"}, *Status])
def test_the_readme_names_every_choice(name: str) -> None:
    assert f"`{name}" in README or f'`"{name}"' in README

"""Each example runs as it stands and says what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {
    "standalone_matern.py": r"wines: accuracy (0\.9\d|1\.0)\d+, NLL .*\nfar from the data: \['0.33', '0.33', '0.33'\]",
    "poisson_counts.py": r"inside its 95 % interval at (9\d|100) % of 601 places",
    "own_policy.py": r"unit +30 .*\nworst_explained +30 .*\nsplit_residual +30 .*\ncurvature_residual +30 ",
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} >= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_from_any_folder_and_prints_its_result(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # for a package that is not installed
    command = [sys.executable, str(ROOT / "examples" / name)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert re.search(EXAMPLES[name], run.stdout), run.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_short_and_starts_with_its_command(name: str) -> None:
    source = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 60
    assert f".venv/bin/python examples/{name}" in source.split('"""')[1]

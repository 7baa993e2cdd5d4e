"""Each example runs as it stands, at toy size where it is long, and says what it promises."""

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOY = "data.train_limit=200 data.test_limit=60 data.ood_limit=30 data.download=false"
TOY += " model.train_epochs=2 fit.num_actions=2"
EXAMPLES: dict[str, tuple[str, str]] = {  # arguments, and what is printed
    "quickstart_laplace.py": ("", r"200 new points +\d+\.\d % .*\n\(3, 3\), without data +100.0 % +[5-8]\d\.\d %"),
    "mnist_lenet.py": (TOY, r"NLL: IterNCGP \d\.\d+, temperature scaling \d\.\d+"),
    "cifar_resnet.py": ("--toy", r"network as it is  : accuracy .*\nwith its posterior: accuracy "),
    "huggingface_style_dict_batches.py": ("", r"163 of 963 weights are uncertain.*\n[89]\d % of the first batch right"),
    "lora_text_classifier.py": (
        "--toy",
        r"NLL +ECE +OOD\nthe model as it is .*\ntemperature .*\nkron.*\niterncgp.*\n1123 of 23718 weights are",
    ),
    "active_learning.py": ("--toy", r"digits, labels +20 +30\nby posterior .*%\nat random .*%\ndifference .*%\n95 %"),
    "bayesian_optimisation.py": ("--toy", r"rounds +0 +1 +2\nby posterior +\d.*\nat random +\d"),
    "streaming.py": ("", r"\n1600 +30 +\d+\.\d+\none fit +30 +\d+\.\d+"),
    "standalone_matern.py": (
        "",
        r"wines: accuracy (0\.9\d|1\.0)\d+, NLL .*\n.* later: the same to \de-1\d\n"
        r"far from the data: \['0.33', '0.33', '0.33'\]",
    ),
    "poisson_counts.py": ("", r"inside its 95 % interval at (9\d|100) % of 601 places"),
    "own_policy.py": ("", r"unit +30 .*\nworst_explained +30 .*\nsplit_residual +30 .*\ncurvature_residual +30 "),
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys()


@pytest.mark.cli
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_from_any_folder_and_prints_its_result(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, printed = EXAMPLES[name]
    script = str(ROOT / "examples" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    monkeypatch.delenv("NTK_ITERNCGP_DATA", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of laplace-torch's backends
        runpy.run_path(script, run_name="__main__")  # in this process: importing torch takes longer than most of them
    shown = capsys.readouterr().out
    assert re.search(printed, shown), shown
    assert {path.name for path in tmp_path.iterdir()} <= {"runs"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_short_and_starts_with_its_command(name: str) -> None:
    source = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 125
    assert f".venv/bin/python examples/{name}" in source.split('"""')[1]

"""The command line: what users get wrong is one sentence and exit code 2, before any work is done."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import ntk_iterncgp
from ntk_iterncgp import cli, config, demo

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's mistake must be found before anything is fitted."""

    def fail(*arguments: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(demo, "compare", fail)


def outcome(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and stderr."""
    try:
        code = cli.main(argv)
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["demo", "--set", "lenghtscale=2"], "There is no setting 'lenghtscale'; did you mean 'lengthscale'?"),
        (["demo", "--set", "zzz=2"], "There is no setting 'zzz'; the settings are kernel, lengthscale"),
        (["demo", "--set", "max_products"], "--set expects key=value, for instance max_products=200"),
        (["demo", "--set", "max_products=many"], "max_products expects a whole number, but got 'many'."),
        (["demo", "--set", "max_products=0"], "max_products expects a whole number of at least 1, but got 0."),
        (["demo", "--set", "max_products=true"], "max_products expects a whole number, but got True."),
        (["demo", "--set", "max_rank=2.5"], "max_rank expects a whole number or null, but got 2.5."),
        (["demo", "--set", "lengthscale=-1"], "lengthscale expects a positive, finite number, but got -1.0."),
        (["demo", "--set", "lengthscale=.nan"], "lengthscale expects a positive, finite number, but got nan."),
        (["demo", "--set", "lengthscale=[1, 2]"], "lengthscale expects a number, but got [1, 2]."),
        (["demo", "--set", "lengthscale=[1"], "the value of lengthscale is not valid YAML"),
        (
            ["demo", "--set", "kernel=matern"],
            "kernel expects one of RBF, Matern12, Matern32, Matern52, but got 'matern'",
        ),
        (["demo", "--set", "policy=residuals"], "but got 'residuals'; did you mean 'residual'?"),
        (["demo", "--set", "link=probits"], "link expects one of probit, quadrature, mc"),
        (["demo", "--set", "num_train=5"], "at least 10 each and at most 1797 together, but got 5 and 450."),
        (["demo", "--set", "num_test=1797"], "at least 10 each and at most 1797 together, but got 0 and 1797."),
        (
            ["demo", "--config", "missing.yaml"],
            "Cannot read the configuration 'missing.yaml' (no such file or directory).",
        ),
        (["demo", "--config", "."], "Cannot read the configuration '.' (is a directory)."),
        (["demo", "--config", "list.yaml"], "'list.yaml' expects lines of the form 'key: value'"),
        (["demo", "--config", "broken.yaml"], "'broken.yaml' is not valid YAML (line 2)"),
        (["demo", "--config", "figure.png"], "'figure.png' is not a text file"),
        (["demo", "--output-dir", "list.yaml/runs"], "Cannot write to the folder 'list.yaml/runs' (not a directory)"),
        (["demo", "--output-dir", ""], "output_dir expects the name of a folder, but got an empty text."),
        (["bench"], "Benchmarks are part of the repository, not of the package; run this inside a checkout of it."),
    ],
)
@pytest.mark.usefixtures("no_work")
def test_a_mistake_is_one_sentence_and_exit_code_2(
    argv: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    (tmp_path / "broken.yaml").write_text("kernel: RBF\nseed: a: b\n")
    (tmp_path / "figure.png").write_bytes(b"\x89PNG\xff\xfe")
    code, error = outcome(argv, capsys)
    assert code == 2
    assert sentence in error
    assert error.startswith("ntk-iterncgp: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "the following arguments are required"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["demo", "--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_an_unknown_command_or_option_is_one_sentence(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = outcome(argv, capsys)
    assert code == 2
    assert sentence in error and "--help" in error and error.count("\n") == 1


def test_interrupting_gives_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "compare", interrupt)
    assert outcome(["demo"], capsys) == (130, "\nntk-iterncgp: interrupted.\n")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"ntk-iterncgp {ntk_iterncgp.__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "ntk_iterncgp", "demo", "--set", "sed=1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2
    assert "did you mean 'seed'?" in run.stderr and "Traceback" not in run.stderr


def checkout(folder: Path, **benchmarks: str) -> Path:
    """A folder that looks like the repository, and a folder inside it."""
    for name in ("ntk_iterncgp", "benchmarks", "docs"):
        (folder / name).mkdir()
    for name, source in benchmarks.items():
        (folder / "benchmarks" / f"{name}.py").write_text(source)
    return folder / "docs"


BENCHMARK = '"""Counts {0}.\n\nMore."""\nfrom benchmarks.shared import show\n\ndef main(argv):\n    show("{0}", argv)\n'
SHARED = "def show(name, argv):\n    print(name, argv)\n"


def test_a_benchmark_is_found_from_inside_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout(tmp_path, apples=BENCHMARK.format("apples"), shared=SHARED))
    for module in ("benchmarks", "benchmarks.apples", "benchmarks.shared"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert cli.main(["bench", "apples", "--quick", "--json", "out.json"]) == 0
    assert capsys.readouterr().out == "apples ['--quick', '--json', 'out.json']\n"
    assert cli.main(["bench", "apples"]) == 0
    assert capsys.readouterr().out == "apples []\n"
    code, error = outcome(["bench", "pears"], capsys)
    assert code == 2 and "There is no benchmark 'pears'; there are: apples." in error


def test_without_a_name_all_benchmarks_run_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {name: BENCHMARK.format(name).replace("from benchmarks.shared import show", SHARED) for name in "ba"}
    monkeypatch.chdir(checkout(tmp_path, **sources))
    for name in "ab":
        monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    assert cli.main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == ["a: Counts a.", "a ['--quick']", "", "b: Counts b.", "b ['--quick']"]
    code, error = outcome(["bench", "--json", "out.json"], capsys)
    assert code == 2 and "--json expects the name of one benchmark" in error


def test_settings_come_from_defaults_then_file_then_command_line(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("# a reason\nlengthscale: 1e-1\nmax_products: 7\n")
    settings = config.load(file, ["max_products=9", "max_rank=null", "outputscale=2"])
    assert settings == config.RunConfig(lengthscale=0.1, max_products=9, outputscale=2.0)
    file.write_text("# nothing differs\n")
    assert config.load(file) == config.load() == config.RunConfig()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_lists_only_differences(path: Path) -> None:
    settings, defaults = config.load(path), config.RunConfig()
    for key in config._read(path):
        assert getattr(settings, key) != getattr(defaults, key), f"{key} is the default"

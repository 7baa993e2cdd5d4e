"""The command line: what users get wrong is one sentence and a non-zero exit, with nothing half-written."""

import errno
import importlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ntk_iterncgp
from ntk_iterncgp.experiments import cli, config, models
from ntk_iterncgp.fitting.report import SelfCheckError
from tests.processes import started_command

pytestmark = pytest.mark.cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NTK_ITERNCGP_DATA", raising=False)
    return tmp_path


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's mistake must be found before anything is trained or fitted."""

    def fail(*arguments: object, **settings: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(models, "train", fail)
    monkeypatch.setattr(importlib.import_module("ntk_iterncgp.experiments.runs.fit"), "fit_network", fail)


def outcome(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and stderr."""
    try:
        code = cli.main(argv)
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    return code, capsys.readouterr().err


def fit(*settings: str) -> list[str]:
    return ["fit", "empty.yaml", *(text for setting in settings for text in ("--set", setting))]


def own(name: str) -> list[str]:
    """A model by its import path, whose weights are used unchanged."""
    return fit(f"model.name={name}", "model.train_epochs=0")


MINE = """
import warnings
import torch

def fails():
    raise ValueError("no such width")

class asserts(torch.nn.Module):
    def forward(self, x):
        assert False, "too small"

class Linear(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

class detaches(Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)).detach()

def empty():
    with warnings.catch_warnings():  # torch's own
        warnings.simplefilter("ignore")
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 0), torch.nn.Linear(0, 10))

class sums(Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)).sum(0, keepdim=True)
"""


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (fit("fit.num_action=2"), "A setting must be one that there is; got 'fit.num_action'. Try 'fit.num_actions'."),
        (fit("train_limt=2"), "got 'train_limt'. Try 'data.train_limit'."),
        (fit("zzz=2"), "got 'zzz'. Try one of data.name, data.task"),
        (
            fit("data.train_limit"),
            "--set must be given as key=value; got 'data.train_limit'. Try data.train_limit=5000.",
        ),
        (
            fit("data.train_limit=many"),
            "data.train_limit must be a whole number or null; got 'many'. Try null, the default.",
        ),
        (
            fit("data.train_limit=1"),
            "data.train_limit must be a whole number of at least 2 or null; got 1. Try null, the default.",
        ),
        (fit("fit.num_actions=true"), "fit.num_actions must be a whole number or null; got True."),
        (
            fit("fit.prior_precision=-1"),
            "fit.prior_precision must be a positive, finite number; got -1.0. Try 1.0, the",
        ),
        (fit("fit.prior_precision=.nan"), "fit.prior_precision must be a positive, finite number; got nan."),
        (fit("fit.prior_precision=[1"), "the value of fit.prior_precision must be valid YAML"),
        (fit("tuning.protocol=crossfits"), "got 'crossfits'. Try 'crossfit'."),
        (
            fit("tuning=crossfits"),
            "tuning.protocol must be one of crossfit, validation, none; got 'crossfits'. Try 'crossfit'.",
        ),
        (fit("tuning=3"), "tuning must be a section of settings; got 3. Try"),
        (
            fit("checkpoint.every_seconds=-1"),
            "checkpoint.every_seconds must be a finite number of at least 0 or null; got",
        ),
        (fit("checkpoint.every_seconds=.nan"), "must be a finite number of at least 0 or null; got nan."),
        (
            fit("model.weight_decay=-1"),
            "model.weight_decay must be a finite number of at least 0; got -1.0. Try 1e-05,",
        ),
        (fit("seed=99999999999999999999999"), "seed must be a whole number of at most 4294967295; got 9999999999"),
        (fit(f"fit.prior_precision=1{400 * '0'}"), "fit.prior_precision must be a number; got 1000"),
        (fit("fit.refine_epochs=0"), "fit.refine_epochs must be a positive, finite number or null; got 0.0."),
        (fit("fit.policy=clustres"), "The settings under fit: `policy` must be one of"),
        (fit("fit.options={cotangents: 0}"), "`cotangents` must be a whole number of at least 1; got 0."),
        (
            fit("fit.subset_of_weights=last_layer", "fit.options={last_layer_name: head}"),
            "last_layer_name (fit.options) must be a layer of the network; got 'head'.",
        ),
        (fit("tuning.precision_max=0.0001"), "must be below tuning.precision_max; got 0.001 and 0.0001. Try"),
        (
            fit("tuning.steps_per_decade=1000000"),
            "tuning.steps_per_decade must be a whole number of at most 100; got 1000000. Try 4,",
        ),
        (fit("tuning.precision_max=1e300"), "precision_max must be a number of at most 1e+20; got 1e+300. Try"),
        (fit("evaluate.baselines=[kfca]"), "evaluate.baselines must be one of map, temperature, prior"),
        (
            fit("data.ood={a: 1}"),
            "data.ood must be a list of names, for instance [a, b]; got {'a': 1}. Try [], the default.",
        ),
        (
            fit("fit.options=3"),
            "fit.options must be names with values, for instance {key: 1}; got 3. Try {}, the default.",
        ),
        (
            fit("fit.options={cotangent: 2}"),
            "fit.options must be settings of the flavour; got 'cotangent'. Try 'cotangents'.",
        ),
        (
            fit("data.task=regresion"),
            "data.task must be one of classification, regression; got 'regresion'. Try 'regression'.",
        ),
        (
            fit("data.task=regression"),
            "data.task must be 'classification' unless data.name is 'arrays' and data.ood empty; got",
        ),
        (
            fit("data.held_out=1346"),
            "data.held_out must be at least two inputs fewer than the 1347 of the train set; got 1346.",
        ),
        (fit("data.name=digit"), "got 'digit'. Try 'digits'."),
        (fit("data.name=arrays"), "data.train must be a file where data.name is 'arrays'; got null."),
        (
            fit("data.name=arrays", "data.train=no.npz"),
            "data.train must be a file that exists; got 'no.npz'. Try an .npz",
        ),
        (fit("data.name=image_folder", "data.train=absent"), "data.train must be a folder with a folder of images"),
        (fit("data.name=arrays", "data.train=one_class.csv"), "must have at least two classes; got one."),
        (
            fit("data.name=arrays", "data.train=one_class.csv", "kernel.name=RBF"),
            "must have at least two classes; got one.",
        ),
        (
            fit("data.name=arrays", "data.train=two_lines.csv"),
            "must hold three x, one to be tested on; got 2. Try a data.test.",
        ),
        (["evaluate", *fit("tuning.validation_size=449", "tuning=validation")[1:]], "two inputs fewer than the 450 of"),
        (fit("data.ood=[rotatd]"), "got 'rotatd'. Try 'rotated'."),
        (fit("model.name=lenett"), "model.name must be a model; got 'lenett'. Try 'lenet', one of"),
        (fit("model.name=lenet"), "'lenet' must be square images with sides of at least 12; got"),
        (fit("model.name=cifar_resnet20"), "must be square images with 3 channels"),
        (own("no_such_module:make"), "The module of 'no_such_module:make' must be importable; got ModuleNotFoundError"),
        (fit("model.arguments={size: 3}"), "model.arguments must suit 'cnn'; got"),
        (
            fit("model.name=mlp", "model.arguments={width: 0}"),
            "width must be a whole number of at least 1; got 0.",
        ),
        (
            fit("model.arguments={width: -3}"),
            "must suit 'cnn'; got TypeError: width must be a whole number of at least 1",
        ),
        (fit("model.name=resnet18", "model.arguments={weights: nope}"), "must suit 'resnet18'; got KeyError: 'nope'."),
        (fit("model.name=alexnet"), "'alexnet' must take inputs of shape (1, 8, 8); got RuntimeError: "),
        (own("mine_cli:fails"), "must make a model of model.arguments {}; got ValueError: no such width."),
        (
            own("mine_cli:asserts"),
            "must take inputs of shape (1, 8, 8); got AssertionError: too small.",
        ),
        (own("mine_cli:detaches"), "shape (1, 8, 8); got RuntimeError: element 0 of tensors does not require"),
        (own("mine_cli:empty"), "'mine_cli:empty' must have weights in every layer; got none in 1.weight, 1.bias"),
        (own("mine_cli:sums"), "two inputs must have two rows of outputs; got 1."),
        (own("broken_cli:make"), "The module of 'broken_cli:make' must be importable; got SyntaxError"),
        (own("mine_cli:absent"), "'mine_cli:absent' must be a function of its module; got no 'absent'"),
        (
            fit("model.name=mine_cli:Linear"),
            "model.train_epochs must be set for 'mine_cli:Linear' without a checkpoint; got null. Try 50 to train",
        ),
        (fit("model.checkpoint=no.safetensors"), "model.checkpoint must be a file that exists; got 'no.safetensors'."),
        (fit("model.checkpoint=figure.png"), "'figure.png' must hold weights only; got other objects."),
        (
            fit("model.checkpoint=other.safetensors"),
            "must be a checkpoint of 'cnn'; got another architecture: it lacks",
        ),
        (fit("model.checkpoint=twenty.safetensors"), "has 7.weight as (20, 48), not (10, 48)"),
        (fit("model.checkpoint=objects.pt"), "must hold weights only; got other objects. Try torch.save("),
        (fit("device=cuda:99"), "where torch finds no GPU" if not torch.cuda.is_available() else "ntk-iterncgp"),
        (fit("device=gpu"), "device must be auto, cpu or cuda; got 'gpu'. Try auto."),
        (
            ["fit", "missing.yaml"],
            "'missing.yaml' must be a file that can be read; got: no such file or directory. Try",
        ),
        (["evaluate", "."], "'.' must be a file that can be read; got: is a directory."),
        (["evaluate", "list.yaml"], "'list.yaml' must have lines of the form 'key: value'; got [1, 2]."),
        (["evaluate", "flat.yaml"], "flat.yaml, line 1: data must be a section of settings; got 3."),
        (["evaluate", "broken.yaml"], "'broken.yaml' must be valid YAML (line 2); got: "),
        (["evaluate", "figure.png"], "'figure.png' must be a text file"),
        (["evaluate", "deep.yaml"], "'deep.yaml' must nest at most some hundred brackets; got more."),
        (fit(f"fit.options={5_000 * '['}"), "the value of fit.options must nest at most some hundred brackets"),
        (fit("seed=2024-13-45"), "must be valid YAML; got a value that cannot be read (month must"),
        (fit(f"seed={5000 * '1'}"), "must be valid YAML; got a value that cannot be read (Exceeds"),
        (fit(f"seed=0x{5000 * 'f'}"), "seed must be a whole number of at most 4294967295; got a number of"),
        (["evaluate", "aliases.yaml"], "got [[[[...], [...], [...], [...], [...], [...], ...], [[...], [...], "),
        (
            ["fit", "empty.yaml", "--output-dir", "list.yaml/runs"],
            "The folder 'list.yaml/runs' must be writable; got: ",
        ),
        (["fit", "empty.yaml", "--output-dir", ""], "output_dir must be the name of a folder; got an empty text."),
        (["demo", "--set", "sed=1"], "got 'sed'. Try 'seed'."),
        (["predict", "no.safetensors", "--input", "x.npz"], "There is no posterior at 'no.safetensors'"),
        (["predict", "other.safetensors", "--input", "x.npz"], "'other.safetensors' holds tensors, but no posterior"),
        (["predict", "figure.png", "--input", "x.npz"], "'figure.png' is not a posterior file, or is damaged"),
        (["predict", "no", "--input", "x", "--output", "o.txt"], "--output must end in .csv or .npz; got 'o.txt'."),
        (["bench"], "Benchmarks must be run inside a checkout of the repository; got"),
    ],
)
@pytest.mark.usefixtures("no_work")
def test_a_mistake_is_one_sentence_and_exit_code_2(
    argv: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing differs\n")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    (tmp_path / "flat.yaml").write_text("data: 3\n")
    (tmp_path / "broken.yaml").write_text("seed: 1\ndevice: a: b\n")
    (tmp_path / "deep.yaml").write_text("fit: " + 5_000 * "[")
    aliases = "".join(f"    x{i + 1}: &x{i + 1} [{', '.join(10 * [f'*x{i}'])}]\n" for i in range(9))
    (tmp_path / "aliases.yaml").write_text(f"fit:\n  options:\n    x: &x0 [1]\n{aliases}  num_actions: *x9\n")
    (tmp_path / "figure.png").write_bytes(b"\x89PNG\xff\xfe")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    save_file(models.cnn(20, (1, 8, 8)).state_dict(), tmp_path / "twenty.safetensors")
    torch.save({"model": Path("x")}, tmp_path / "objects.pt")
    (tmp_path / "one_class.csv").write_text("1,2,0\n" * 10)
    (tmp_path / "two_lines.csv").write_text("1,2,0\n1,3,1\n")
    (tmp_path / "mine_cli.py").write_text(MINE)
    (tmp_path / "broken_cli.py").write_text("1 +\n")
    code, error = outcome(argv, capsys)
    assert (code, error.count("\n")) == (2, 1), error
    assert sentence in error and error.startswith("ntk-iterncgp: ")
    assert not list(tmp_path.rglob("posterior*")) and not list(tmp_path.rglob("*.html"))


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "the following arguments are required"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["demo", "--colour"], "unrecognized arguments: --colour"),
        (["fit"], "the following arguments are required: CONFIG"),
    ],
)
def test_an_unknown_command_or_option_is_one_sentence(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = outcome(argv, capsys)
    assert code == 2
    assert sentence in error and "--help" in error and error.count("\n") == 1


@pytest.mark.usefixtures("no_work")
def test_without_a_network_the_sentence_says_which_files_go_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*arguments: object, **settings: object) -> None:
        raise URLError("Name or service not known")

    known = importlib.import_module("ntk_iterncgp.experiments.datasets.known")
    for name, files in (("MNIST", "train-images-idx3-ubyte.gz"), ("CIFAR10", "data_batch_1.bin"), ("SVHN", ".mat")):
        monkeypatch.setattr(known.torchvision.datasets, name, unreachable)
        (tmp_path / "empty.yaml").touch()
        code, error = outcome(fit(f"data.name={name.lower()}", "data.root=here"), capsys)
        assert code == 2 and error.count("\n") == 1
        assert f"{name} must be under 'here' or be downloadable; got: " in error and files in error
        assert "NTK_ITERNCGP_DATA" in error


@pytest.mark.usefixtures("no_work")
def test_a_model_with_another_number_of_classes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "made_here.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 7))\n"
    )
    code, error = outcome(own("made_here:net"), capsys)
    assert code == 2
    assert "must have 10 outputs, one for each class of the data; got 7." in error


def test_a_full_disk_ends_in_a_sentence_and_leaves_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(tensor: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ntk_iterncgp.persistence.files._bytes_of", full)
    (tmp_path / "empty.yaml").touch()
    small = ("model.train_epochs=1", "fit.num_actions=2", "tuning.protocol=none", "data.train_limit=60")
    code, error = outcome([*fit(*small), "--output-dir", "out"], capsys)
    assert code == 1 and "No space left on device" in error and "Traceback" not in error
    assert not list((tmp_path / "out").glob("*posterior*"))


def test_a_file_system_that_takes_no_more_ends_in_a_sentence_and_leaves_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is patched here: the system itself refuses to write more than 32 KiB to one file."""
    (tmp_path / "empty.yaml").touch()
    small = ("model.train_epochs=1", "fit.num_actions=20", "tuning.protocol=none", "data.train_limit=60")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, limits[1]))
    try:
        code, error = outcome([*fit(*small), "--output-dir", "out"], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    last = error.splitlines()[-1]
    assert code == 1 and last.startswith("ntk-iterncgp: cannot read or write") and "File too large" in last
    assert "Traceback" not in error
    left = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert left == ["checkpoint", "model.safetensors", "run.log"]  # the next time it goes on


@pytest.mark.process
@pytest.mark.parametrize(
    ("settings", "sign"),
    [
        (("model.train_epochs=1000000",), "trained here"),
        (("model.train_epochs=1", "fit.num_actions=100", "fit.refine_epochs=1000000"), "Fitting: IterNCGPAllLaplace"),
    ],
    ids=["training", "fitting"],
)
def test_a_real_interrupt_gives_130_and_no_result(tmp_path: Path, settings: tuple[str, ...], sign: str) -> None:
    (tmp_path / "empty.yaml").touch()
    run = started_command([*fit(*settings), "--output-dir", "out"], tmp_path)
    try:
        log, deadline = tmp_path / "out" / "run.log", time.monotonic() + 120
        while not (log.exists() and sign in log.read_text(encoding="utf-8")):
            assert run.is_alive() and time.monotonic() < deadline, (tmp_path / "stderr").read_text()
            time.sleep(0.1)
        time.sleep(0.5)  # into the loop
        assert run.pid is not None
        os.kill(run.pid, signal.SIGINT)
        run.join(60)
    finally:
        run.kill()
    error = (tmp_path / "stderr").read_text()
    assert run.exitcode == 130 and error.endswith("\nntk-iterncgp: interrupted.\n"), error
    assert "Traceback" not in error and not list((tmp_path / "out").glob("*posterior*"))


@pytest.mark.parametrize("kind", ["kernel.name=RBF", "model.train_epochs=0"], ids=["kernel", "network"])
def test_too_little_memory_is_one_sentence_and_leaves_no_result(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for room in ("gp.checks", "fitting.cost"):
        monkeypatch.setattr(f"ntk_iterncgp.{room}.available_bytes", lambda device: 2**20)
    (tmp_path / "empty.yaml").touch()
    code, error = outcome([*fit(kind), "--output-dir", "out"], capsys)
    last = error.splitlines()[-1]
    assert code == 1 and "The fit must take at most" in last and "Traceback" not in error
    assert last.startswith("ntk-iterncgp: ") and not list((tmp_path / "out").glob("*posterior*"))


def test_what_the_machine_refuses_is_a_sentence_and_a_defect_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(text: str, kind: type[Exception] = RuntimeError) -> None:
        raise kind(text)

    (tmp_path / "empty.yaml").touch()
    runs = importlib.import_module("ntk_iterncgp.experiments.runs")
    monkeypatch.setattr(runs, "fit", lambda config: fail("DefaultCPUAllocator: can't allocate memory: 9 bytes\nmore"))
    code, error = outcome(fit(), capsys)
    assert (code, error.count("\n")) == (1, 1) and "there is too little memory (DefaultCPUAllocator" in error
    monkeypatch.setattr(runs, "fit", lambda config: fail("a posterior contradicts itself.", SelfCheckError))
    assert outcome(fit(), capsys) == (1, "ntk-iterncgp: a posterior contradicts itself.\n")
    monkeypatch.setattr(runs, "fit", lambda config: fail("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(fit())


@pytest.mark.parametrize(
    ("settings", "stage", "other"),
    [
        (
            ("model.train_epochs=1", "fit.num_actions=2"),
            "ntk_iterncgp.experiments.runs.fit.fit_network",
            "data.train_limit=50",
        ),
        (("model.train_epochs=1", "fit.num_actions=2"), "ntk_iterncgp.experiments.runs.fit.tune", "fit.num_actions=3"),
        (
            ("kernel.name=RBF", "kernel.max_products=2"),
            "ntk_iterncgp.experiments.runs.fit.save",
            "kernel.max_products=3",
        ),
    ],
    ids=["training", "network", "kernel"],
)
def test_what_a_killed_run_left_is_not_taken_by_another_run(
    settings: tuple[str, ...],
    stage: str,
    other: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "empty.yaml").touch()
    command = [*fit("data.train_limit=60", *settings), "--output-dir", "out"]
    with monkeypatch.context() as patch:
        room, _, name = stage.rpartition(".")
        patch.setattr(importlib.import_module(room), name, interrupt)
        assert outcome(command, capsys)[0] == 130
    code, error = outcome([*command, "--set", other], capsys)
    setting, _, value = other.partition("=")
    last, name = error.splitlines()[-1], setting.rpartition(".")[2]
    assert code == 2 and "must be of this run; got another" in last and "Traceback" not in error
    assert name in last and f"and here it is {value}" in last
    assert not list((tmp_path / "out").glob("*posterior*"))


def test_interrupting_a_search_for_hyperparameters_gives_130_and_says_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(state: object, *settings: object) -> Iterator[object]:
        yield state
        raise KeyboardInterrupt

    monkeypatch.setattr("ntk_iterncgp.gp.non_conjugate.newton", interrupted)
    (tmp_path / "empty.yaml").touch()
    settings = ("data.train_limit=40", "kernel.name=RBF", "kernel.optimize_steps=9", "kernel.refine_products=3")
    code, error = outcome([*fit(*settings), "--output-dir", "out"], capsys)
    assert code == 130 and error.endswith("\nntk-iterncgp: interrupted.\n") and "Traceback" not in error
    log = (tmp_path / "out" / "run.log").read_text(encoding="utf-8")
    assert "Hyperparameters: RBF" in log and "interrupted: ELBO" in log and "in 1 fit," in log
    assert not list((tmp_path / "out").glob("*posterior*"))


def test_interrupting_gives_130_and_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ntk_iterncgp.laplace_torch.base.fit_network", interrupt, raising=False)
    monkeypatch.setattr(models, "train", interrupt)
    (tmp_path / "empty.yaml").touch()
    code, error = outcome([*fit(), "--output-dir", "out"], capsys)
    assert code == 130 and error.endswith("\nntk-iterncgp: interrupted.\n")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["run.log"]


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"ntk-iterncgp {ntk_iterncgp.__version__}\n"


@pytest.mark.parametrize("command", ["fit", "predict", "evaluate", "demo", "bench"])
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    assert f"example:\n  ntk-iterncgp {command} " in capsys.readouterr().out


def test_reproduce_hands_its_arguments_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Module:
        @staticmethod
        def main(argv: list[str]) -> int:
            assert argv == ["figure1", "--quick"]
            return 3

    monkeypatch.setitem(sys.modules, "ntk_iterncgp.experiments.reproduce", Module)
    assert cli.main(["reproduce", "figure1", "--quick"]) == 3


@pytest.mark.process
def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "ntk_iterncgp", "demo", "--set", "sed=1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2
    assert "Try 'seed'." in run.stderr and "Traceback" not in run.stderr


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
    heading = "apples: Counts apples.\n"  # said before the benchmark's imports, which take seconds
    assert capsys.readouterr().out == f"{heading}apples ['--quick', '--json', 'out.json']\n"
    assert cli.main(["bench", "apples"]) == 0
    assert capsys.readouterr().out == f"{heading}apples []\n"
    assert cli.main(["bench", "apples", "--list", "--quick", "--seeds", "3"]) == 0  # flags of its own
    assert capsys.readouterr().out == f"{heading}apples ['--quick', '--list', '--seeds', '3']\n"
    code, error = outcome(["bench", "pears"], capsys)
    assert code == 2 and "NAME must be a benchmark; got 'pears'. Try one of apples." in error


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
    assert code == 2 and "--json must follow the name of one benchmark" in error
    code, error = outcome(["bench", "--list"], capsys)
    assert code == 2 and "--list must follow the name of one benchmark" in error
    code, error = outcome(["demo", "--list"], capsys)
    assert code == 2 and "unrecognized arguments: --list" in error


def test_settings_come_from_defaults_then_file_then_command_line(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("# a reason\nfit:\n  prior_precision: 1e-1\n  num_actions: 7\n")
    settings = config.load(file, ["fit.num_actions=9", "fit.max_rank=null", "data.ood=noise"])
    assert (settings.fit.prior_precision, settings.fit.num_actions, settings.data.ood) == (0.1, 9, ("noise",))
    assert settings.output_dir == "runs/some"
    file.write_text("tuning: none\n")  # short for the section with its protocol
    assert config.load(file).tuning.protocol == "none"
    assert config.load(file, ["tuning=crossfit"]) == config.load(file, ["tuning.protocol=crossfit"])
    settings = config.load(file, ["tuning=validation", "tuning.validation_size=7"])
    assert (settings.tuning.protocol, settings.tuning.validation_size) == ("validation", 7)
    file.write_text(config.as_yaml(settings))  # what a run writes beside its results is the same run
    assert config.load(file) == settings


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_lists_only_differences(path: Path) -> None:
    settings, defaults = config.load(path), config.RunConfig()
    for key, _ in config.flat(config.read_settings(path)):
        assert settings[key] != defaults[key], f"{key} is the default"


def test_a_csv_of_words_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "words.csv").write_text("a,b\nx,y\n")
    np.savez(tmp_path / "no_labels.npz", x=np.zeros((3, 2)))
    for file, sentence in (("words.csv", "numbers with commas"), ("no_labels.npz", "hold the arrays x and y")):
        code, error = outcome(fit("data.name=arrays", f"data.train={file}"), capsys)
        assert code == 2 and sentence in error

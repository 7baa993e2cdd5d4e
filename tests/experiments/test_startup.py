"""What is imported when: the command line answers before PyTorch is there, and laplace-torch always knows the flavours.

Each case is a process of its own, since an import happens once.
"""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import ntk_iterncgp
from ntk_iterncgp import kernels, solver
from ntk_iterncgp.experiments import config

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "laplace", "numpy", "matplotlib")
FLAVOURS = """
import torch
for subset in ("all", "last_layer"):
    la = Laplace(torch.nn.Linear(2, 3), "classification", subset_of_weights=subset, hessian_structure="iterncgp")
    assert type(la).__module__ == "ntk_iterncgp.laplace_torch.flavours"
"""


def python(source: str, *flags: str) -> str:
    """What a program of its own prints; a failure raises with its stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *flags, "-c", textwrap.dedent(source)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.cli
@pytest.mark.parametrize(
    "argv",
    [
        ["--version"],
        ["--help"],
        ["fit", "--help"],
        ["reproduce", "--help"],
        ["fit", "missing.yaml"],
        ["demo", "--set", "sed=1"],
        ["evaluate", "missing.yaml", "--set", "kernel.policy=residul"],
    ],
    ids=" ".join,
)
def test_help_and_mistakes_in_the_settings_are_answered_without_pytorch(argv: list[str]) -> None:
    shown = python(
        f"""
        import sys
        from ntk_iterncgp.experiments import cli
        try:
            code = cli.main({argv!r})
        except SystemExit as end:
            code = end.code
        print([name for name in {HEAVY!r} if name in sys.modules], code)
        """
    )
    assert shown.splitlines()[-1] == ("[] 0" if "help" in argv[-1] or argv == ["--version"] else "[] 2")


@pytest.mark.parametrize("argv", [["--version"], ["--help"]], ids=" ".join)
def test_help_and_version_take_less_than_a_second(argv: list[str]) -> None:
    best = float("inf")
    for _ in range(3):  # a busy machine may be late once
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ntk_iterncgp", *argv], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        best = min(best, time.perf_counter() - started)
    assert best < 1.0


@pytest.mark.cli
@pytest.mark.parametrize("command", ["fit", "evaluate"])
def test_the_first_line_comes_before_the_imports(command: str, tmp_path: Path) -> None:
    (tmp_path / "some.yaml").touch()
    shown = python(
        f"""
        import builtins, sys
        from ntk_iterncgp.experiments import cli
        plain, before = builtins.print, []
        def watched(*arguments, **settings):
            before.append((arguments[0], "torch" in sys.modules))
            sys.exit(plain(before[0]))
        builtins.print = watched
        cli.main(["{command}", r"{tmp_path / "some.yaml"}", "--set", "data.name=absent"])
        """
    )
    expected = (f"ntk-iterncgp {ntk_iterncgp.__version__}: {command} {tmp_path / 'some.yaml'}", False)
    assert shown.splitlines()[-1].startswith(f"({expected[0]!r}"[:-1]) and shown.endswith("False)\n")


IMPORTS = (
    "import ntk_iterncgp; from laplace import Laplace",
    "from laplace import Laplace; import ntk_iterncgp",
    "import ntk_iterncgp; import laplace.baselaplace; from laplace import Laplace",
    "from ntk_iterncgp import NonConjugateGP, IterNCGPAllLaplace; from laplace import Laplace",
    "import ntk_iterncgp, importlib.util; assert importlib.util.find_spec('laplace'); from laplace import Laplace",
)
HOOK = """
import sys
before = list(sys.meta_path)
import ntk_iterncgp
assert len(sys.meta_path) == len(before) + 1
import laplace, inspect
from importlib.machinery import SourceFileLoader
from importlib.resources import files
assert not any(type(finder).__module__ == "ntk_iterncgp" for finder in sys.meta_path)
assert type(laplace.__spec__.loader) is SourceFileLoader and inspect.getsource(laplace)
assert (files("laplace") / "__init__.py").is_file()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")
def test_in_any_order_of_imports_the_flavours_are_registered_and_the_hook_goes_away() -> None:
    """Every program is forked from one that has imported what laplace-torch needs, but neither of the two packages."""
    programs = [HOOK, *(f"{imports}\n{FLAVOURS}" for imports in IMPORTS)]
    shown = python(
        f"""
        import os, sys, traceback, warnings
        warnings.simplefilter("ignore")
        import laplace
        for name in [name for name in sys.modules if name.partition(".")[0] == "laplace"]:
            del sys.modules[name]
        for program in {programs!r}:
            child = os.fork()
            if child == 0:
                try:
                    assert not any(name in sys.modules for name in ("laplace", "ntk_iterncgp"))
                    exec(program, {{}})
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, program
            print("ended")
        """
    )
    assert shown.split() == ["ended"] * len(programs)


def test_the_package_is_imported_without_pytorch() -> None:
    python("import sys, ntk_iterncgp; assert 'torch' not in sys.modules")


def test_importing_both_says_nothing() -> None:
    """laplace-torch scripts a function when imported, which torch discourages: no concern of a user's."""
    flags = ("-W", "error::FutureWarning")
    python(f"import ntk_iterncgp; from laplace import Laplace\n{FLAVOURS}", *flags)


def test_every_public_name_is_found_and_others_are_not() -> None:
    for name in ntk_iterncgp.__all__:
        assert getattr(ntk_iterncgp, name) is not None and name in dir(ntk_iterncgp)
    with pytest.raises(AttributeError, match="module 'ntk_iterncgp' has no attribute 'NonConjugateGp'"):
        ntk_iterncgp.NonConjugateGp  # noqa: B018


def test_the_names_repeated_in_the_settings_are_those_of_the_solver_and_the_kernels() -> None:
    assert tuple(solver.POLICIES) == config.POLICIES
    own = [kind for kind in kernels.Stationary.__subclasses__() if kind.__module__.startswith("ntk_iterncgp.")]
    assert {kind.__name__ for kind in own} >= set(config.KERNELS)

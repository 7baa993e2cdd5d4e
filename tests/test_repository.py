"""The house rules that a reader relies on and a linter does not know: import order, paths, safe loading, markers
of tests. Files are cut by idea, so no ruler is laid on their lines: ruff limits how complex a function may be.

Each rule is a function from source text to a list of offences, so that it can be tried on planted offences as well.
"""

import ast
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ntk_iterncgp"

# Rooms from the foundations up. A room may import from lines above its own, and from itself.
ORDER = [
    {"runtime"},
    {"linalg"},
    {"data", "kernels", "likelihoods"},
    {"jacobian"},
    {"priors"},
    {"solver", "clusters"},
    {"posterior"},
    {"persistence"},
    {"fitting"},
    {"gp", "laplace_torch"},
    {"botorch", "huggingface", "sklearn"},
    {"experiments"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}

# Top-level folders that are made by tools or runs and never committed, as in .gitignore.
NOT_OURS = {"build", "dist", "site", "data", "runs", "results"}
FOREIGN_PATH = re.compile(r"(?<![\w.~/}-])/(?:home|root|Users|work|mnt|scratch)(?![\w-])|[A-Za-z]:\\+Users\b")
# What a test with the marker does. Every command has a `main`; examples are run by runpy.
MARKED = {
    "process": re.compile(
        r"\b(subprocess|multiprocessing|in_processes|started_command|lock_held_elsewhere|os\.fork)\b"
    ),
    "cli": re.compile(r"\bmain\(|\brunpy\b"),
}
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"}


parsed = cache(ast.parse)  # of a source, for all rules


def our_files() -> Iterator[Path]:
    def is_ours(folder: Path) -> bool:
        if folder.parent == ROOT and folder.name in NOT_OURS:
            return False
        return folder.name == ".ci" or not re.match(r"\.|__pycache__$|.*\.egg-info$", folder.name)

    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if is_ours(Path(folder, name))]
        yield from (Path(folder, name) for name in names if name != ".git")  # a file in a linked worktree


def python_files() -> list[Path]:
    return [path for path in our_files() if path.suffix == ".py"]


def package_files() -> list[Path]:
    return [path for path in python_files() if path.is_relative_to(ROOT / PACKAGE)]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")


def imported_names(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """Every import in `source`, also inside functions, as (line, dotted name), relative ones made absolute.

    `from a import b` counts as `a.b`, since b may be a module.
    """
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = [*path.relative_to(ROOT).parts[: -node.level], *base]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def imports_against_the_order(source: str, path: Path) -> list[str]:
    room = room_of(path)
    if room == "__init__":
        return []
    if room not in LEVEL:
        return [f"'{room}' is not a room of the package: give it a place in ORDER"]
    offences = []
    for line, name in imported_names(source, path):
        top, *rest = name.split(".")
        if top != PACKAGE:
            continue
        target = rest[0] if rest else PACKAGE
        if target not in LEVEL:
            offences.append(f"line {line}: '{name}' is no room; import a public name from the room that defines it")
        elif target != room and LEVEL[target] >= LEVEL[room]:
            offences.append(f"line {line}: {room} imports {target}, which does not come before it")
    return offences


def uses_of_torch_distributed(source: str, path: Path) -> list[str]:
    imports = [line for line, name in imported_names(source, path) if f"{name}.".startswith("torch.distributed.")]
    attributes = [
        node.lineno
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]
    return [f"line {line}: torch.distributed; ask {PACKAGE}.runtime.parallel instead" for line in imports + attributes]


def paths_of_one_machine(source: str, path: Path) -> list[str]:
    lines = enumerate(source.splitlines(), start=1)
    return [f"line {number}: {line.strip()[:100]}" for number, line in lines if FOREIGN_PATH.search(line)]


def unsafe_loading(source: str, path: Path) -> list[str]:
    offences = []
    for line, name in imported_names(source, path):
        if name.split(".")[0] in PICKLES:
            offences.append(f"line {line}: {name} runs code from the file it reads; use safetensors")
        elif name in ("torch.load", "torch.serialization.load"):
            offences.append(f"line {line}: write torch.load(...) in full, so that weights_only can be checked")
    tree = parsed(source)
    imports = (alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names)
    torch_names = {"torch"} | {alias.asname for alias in imports if alias.name == "torch" and alias.asname}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        is_torch_load = any(function in (f"{name}.load", f"{name}.serialization.load") for name in torch_names)
        if is_torch_load and settings.get("weights_only") != "True":
            offences.append(f"line {node.lineno}: torch.load without weights_only=True")
        if settings.get("allow_pickle", "False") != "False":
            offences.append(f"line {node.lineno}: {function} with allow_pickle")
    return offences


def missing_markers(source: str, path: Path) -> list[str]:
    """Tests that start processes or run a command, themselves or through what their module defines, and do not say so.

    The fast lane leaves tests out by their markers.
    """
    definitions: dict[str, ast.stmt] = {}
    for node in parsed(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign):
            definitions |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}

    def reached_from(*names: str) -> str:
        """The source of these and of all that they name: helpers, decorators and, as arguments, fixtures."""
        found: dict[str, ast.stmt] = {}
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in definitions and name not in found:
                found[name] = definitions[name]
                waiting += [node.id for node in ast.walk(found[name]) if isinstance(node, ast.Name)]
                waiting += [node.arg for node in ast.walk(found[name]) if isinstance(node, ast.arg)]
        return "\n".join(ast.unparse(node) for node in found.values())

    offences = []
    for name in definitions:
        if name.startswith("test_"):
            text = reached_from(name, "pytestmark")
            missing = [m for m, work in MARKED.items() if work.search(text) and f"pytest.mark.{m}" not in text]
            offences += [f"{name} lacks @pytest.mark.{marker}" for marker in missing]
    return offences


def offences_in(paths: list[Path], rule: Callable[[str, Path], list[str]]) -> list[str]:
    assert paths, "found no file to check"
    found = []
    for path in paths:
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a figure, not text
            continue
        found += [f"{path.relative_to(ROOT)}: {offence}" for offence in rule(source, path)]
    return found


def test_imports_inside_the_package_go_one_way() -> None:
    assert offences_in(package_files(), imports_against_the_order) == []


def test_only_parallel_imports_torch_distributed() -> None:
    others = [path for path in package_files() if path != ROOT / PACKAGE / "runtime" / "parallel.py"]
    assert offences_in(others, uses_of_torch_distributed) == []


def test_no_file_holds_a_path_of_one_machine() -> None:
    assert offences_in(list(our_files()), paths_of_one_machine) == []


def test_nothing_is_loaded_that_could_run_code() -> None:
    assert offences_in(python_files(), unsafe_loading) == []


def test_every_test_that_starts_processes_or_runs_a_command_is_marked() -> None:
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]  # which plants offences
    assert offences_in(tests, missing_markers) == []


@pytest.mark.parametrize(
    ("rule", "file", "source", "is_offence"),
    [
        (imports_against_the_order, "solver/inner.py", "from ntk_iterncgp.gp import NonConjugateGP", True),
        (imports_against_the_order, "solver/inner.py", "def f():\n    from ..posterior import mean", True),
        (imports_against_the_order, "solver/inner.py", "import ntk_iterncgp.experiments.cli", True),
        (imports_against_the_order, "solver/inner.py", "from ntk_iterncgp import NonConjugateGP", True),
        (imports_against_the_order, "gp/checks.py", "from .. import laplace_torch", True),
        (imports_against_the_order, "utils.py", "", True),
        (imports_against_the_order, "solver/inner.py", "from ..priors.base import Prior\nfrom . import state", False),
        (
            imports_against_the_order,
            "gp/checks.py",
            "from ntk_iterncgp import kernels\nfrom ..solver import newton",
            False,
        ),
        (imports_against_the_order, "__init__.py", "from .gp import NonConjugateGP", False),
        (uses_of_torch_distributed, "data.py", "import torch.distributed as dist", True),
        (uses_of_torch_distributed, "data.py", "from torch import distributed", True),
        (uses_of_torch_distributed, "data.py", "import torch\ntorch.distributed.barrier()", True),
        (uses_of_torch_distributed, "data.py", "import torch.distributions", False),
        (paths_of_one_machine, "data.py", "root = '/" + "home/someone/data'", True),
        (paths_of_one_machine, "data.py", "cd /" + "work", True),
        (paths_of_one_machine, "data.py", "https://example.org/home/ and src/work/ and /usr/bin/env", False),
        (unsafe_loading, "checkpoint.py", "import pickle", True),
        (unsafe_loading, "checkpoint.py", "import torch as t\nt.load('x')", True),
        (unsafe_loading, "checkpoint.py", "torch.load('x', weights_only=False)", True),
        (unsafe_loading, "checkpoint.py", "from torch import load", True),
        (unsafe_loading, "checkpoint.py", "np.load('x', allow_pickle=True)", True),
        (unsafe_loading, "checkpoint.py", "torch.load('x', weights_only=True)\nyaml.safe_load('x')", False),
        (missing_markers, "test_a.py", "def test_a():\n    subprocess.run([])", True),
        (missing_markers, "test_a.py", "def run():\n    cli.main([])\n\ndef test_a():\n    run()", True),
        (missing_markers, "test_a.py", "def child():\n    os.fork()\n\ndef test_a(child):\n    pass", True),
        (missing_markers, "test_a.py", "@pytest.mark.cli\ndef test_a():\n    subprocess.run([])", True),
        (missing_markers, "test_a.py", "@pytest.mark.process\ndef test_a():\n    subprocess.run([])", False),
        (missing_markers, "test_a.py", "pytestmark = pytest.mark.cli\n\ndef test_a():\n    main([])", False),
        (missing_markers, "test_a.py", "def run():\n    cli.main([])\n\ndef test_a():\n    pass", False),
    ],
)
def test_each_rule_tells_an_offence_from_good_code(
    rule: Callable[[str, Path], list[str]], file: str, source: str, is_offence: bool
) -> None:
    assert bool(rule(source, ROOT / PACKAGE / file)) == is_offence

"""How far is it from `Laplace(...).fit(loader)` to the sweep and back? Files and functions that a toy fit runs through.

    ntk-iterncgp bench walk [--quick] [--list] [--json FILE]

A network of two layers on 40 data is fitted in one epoch, then asked for one prediction, while `sys.setprofile` notes
every function of the package that is called. Beside it stand what importing the package takes: the longest chain of
modules that import each other, and what the network's front door needs; and the sizes of functions, from the source.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp

PACKAGE = Path(ntk_iterncgp.__file__).parent
DOOR = "laplace_torch/__init__.py"
MAX_LINES, MAX_BRANCHES = 60, 12


@dataclass(frozen=True)
class Row:
    """One figure, and the largest that is wanted; None: whatever it is."""

    what: str
    found: int
    target: int | None

    @property
    def is_met(self) -> bool:
        return self.target is None or self.found <= self.target


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """The functions of the package that were called, and how deep they called each other."""

    functions: dict[CodeType, int]
    depth: int = 0

    @property
    def files(self) -> set[str]:
        return {str(Path(code.co_filename).relative_to(PACKAGE)) for code in self.functions}


def traced(work: Callable[[], object]) -> Walk:
    """Do some work, and note what is called; comprehensions and lambdas belong to the function they are written in."""
    walk, depth = Walk({}), 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)) or code.co_name.startswith("<"):
            return
        if event == "call":
            depth += 1
            walk.functions[code] = walk.functions.get(code, 0) + 1
            walk.depth = max(walk.depth, depth)
        elif event == "return":
            depth -= 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return walk


def toy() -> tuple[Any, DataLoader, Tensor]:
    """A classifier, its data, and a new input."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, generator=generator), torch.randint(3, (40,), generator=generator)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=10)
    return la, DataLoader(TensorDataset(x, y), batch_size=10), torch.randn(1, 3, generator=generator)


# --- reading ----------------------------------------------------------------------------------------------------------


def sources() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(file: str, tree: ast.Module, files: dict[str, ast.Module]) -> set[str]:
    """Files of the package that a file imports when it is imported itself."""
    found = set()
    for node in _at_import(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.split(".")[0] == PACKAGE.name:
                stem = "/".join(name.split(".")[1:])
                found |= {path for path in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")) if path in files}
    return found - {file}


def _at_import(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Not those inside functions, nor those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _at_import(node)


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the next."""

    @cache
    def from_here(file: str) -> tuple[str, ...]:
        return (file, *max((from_here(other) for other in graph[file]), key=len, default=()))

    return list(max(map(from_here, graph), key=len))


def closure(graph: dict[str, set[str]], start: str) -> set[str]:
    found, left = set(), [start]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += graph[file]
    return found


def oversized(files: dict[str, ast.Module]) -> list[str]:
    """Functions of more lines than 60, without signature and docstring, or more branches than 12."""
    found = []
    for file, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                if lines > MAX_LINES or branches(node) > MAX_BRANCHES:
                    found.append(f"{file}::{node.name} ({lines} lines, {branches(node)} branches)")
    return found


def branches(function: ast.AST) -> int:
    """Cyclomatic complexity, as ruff's C901 counts it."""
    kinds = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.comprehension, ast.FunctionDef, ast.match_case)
    return sum(isinstance(node, kinds) for node in ast.walk(function) if not isinstance(node, ast.comprehension))


def lines_of_library() -> int:
    paths = [path for path in PACKAGE.rglob("*.py") if "experiments" not in path.parts]
    return sum(len(path.read_text().splitlines()) for path in paths)


# --- the table --------------------------------------------------------------------------------------------------------


def measure() -> tuple[list[Row], dict[str, list[str]]]:
    la, loader, x = toy()
    fit = traced(lambda: la.fit(loader))
    prediction = traced(lambda: la(x))
    files = sources()
    graph = {file: imports_of(file, tree, files) for file, tree in files.items() if not file.startswith("experiments")}
    graph = {file: {other for other in others if other in graph} for file, others in graph.items()}
    chain, door, large = longest_chain(graph), closure(graph, DOOR), oversized(files)
    kernels = sorted(file for file in door if file.startswith("kernels"))
    rows = [
        Row("files of a fit", len(fit.files), 20),
        Row("functions of a fit", len(fit.functions), 200),
        Row("calls deep", fit.depth, None),
        Row("files of a prediction", len(prediction.files), 10),
        Row("functions of a prediction", len(prediction.functions), None),
        Row("longest chain of imports", len(chain), 15),
        Row("files of kernels/ that laplace_torch imports", len(kernels), 0),
        Row(f"functions over {MAX_LINES} lines or {MAX_BRANCHES} branches", len(large), 0),
        Row("lines without experiments", lines_of_library(), 11_000),
    ]
    lists = {
        "fit": sorted(_named(fit)),
        "prediction": sorted(_named(prediction)),
        "chain": chain,
        "kernels": kernels,
        "large functions": large,
    }
    return rows, lists


def _named(walk: Walk) -> list[str]:
    return [f"{Path(c.co_filename).relative_to(PACKAGE)}::{c.co_qualname} ×{n}" for c, n in walk.functions.items()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench walk", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same: it is a toy already")
    parser.add_argument("--list", action="store_true", help="name the functions, too")
    parser.add_argument("--json", metavar="FILE", help="write the figures here, too")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    rows, lists = measure()
    print(f"{'':52}{'found':>8}{'at most':>10}")
    for row in rows:
        target = "" if row.target is None else f"{row.target:,}"
        print(f"{row.what:52}{row.found:>8,}{target:>10}{'' if row.is_met else '   MISSED'}")
    for name, entries in lists.items() if arguments.list else ():
        print(f"\n{name}\n  " + "\n  ".join(entries))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

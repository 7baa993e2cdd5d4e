"""The command `ntk-iterncgp`, also `python -m ntk_iterncgp`.

    ntk-iterncgp demo [--config FILE] [--set key=value ...] [--output-dir DIR]
    ntk-iterncgp bench [NAME] [--quick] [--json FILE]

What a user got wrong is one sentence on stderr and exit code 2; Ctrl-C is 130. A traceback is a defect of the package.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ntk_iterncgp.config import ConfigError, load

USER_ERROR = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: {message}; '{self.prog} --help' shows what is possible.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _demo(arguments) if arguments.command == "demo" else _bench(arguments)
    except ConfigError as error:
        print(f"ntk-iterncgp: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("\nntk-iterncgp: interrupted.", file=sys.stderr)
        return INTERRUPTED


def _parser() -> _Parser:
    parser = _Parser(prog="ntk-iterncgp", description="Non-conjugate Gaussian processes from all of the training data.")
    parser.add_argument("--version", action="version", version=f"ntk-iterncgp {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{demo,bench}")
    demo = commands.add_parser("demo", help="classify scikit-learn's digits: a table and a figure, in about a minute")
    demo.add_argument("--config", metavar="FILE", help="YAML file with what differs from the defaults")
    demo.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one setting; repeatable",
    )
    demo.add_argument("--output-dir", metavar="DIR", help="where figure and results go (default: runs/demo)")
    bench = commands.add_parser("bench", help="run a benchmark of the repository, or all of them at small size")
    bench.add_argument("name", metavar="NAME", nargs="?", help="a file of benchmarks/ without .py; none: all, quickly")
    bench.add_argument("--quick", action="store_true", help="small problems: does it run?")
    bench.add_argument("--json", metavar="FILE", help="write the results here, too")
    return parser


def _version() -> str:
    return str(importlib.import_module("ntk_iterncgp").__version__)


def _demo(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    if arguments.output_dir is not None:
        config = replace(config, output_dir=arguments.output_dir)
    from ntk_iterncgp.demo import run  # brings matplotlib and scikit-learn, which nothing else needs

    run(config)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    folder = _benchmarks_folder()
    headings = {path: _heading(path) for path in sorted(folder.glob("*.py"))}
    paths = {path.stem: path for path, heading in headings.items() if heading is not None}
    if arguments.name is not None:
        if arguments.name not in paths:
            raise ConfigError(f"There is no benchmark '{arguments.name}'; there are: {', '.join(paths)}.")
        flags = ["--quick"] * arguments.quick + (["--json", arguments.json] if arguments.json else [])
        return _run(paths[arguments.name], flags)
    if arguments.json:
        raise ConfigError("--json expects the name of one benchmark before it, for instance: bench solver --json FILE.")
    for name, path in paths.items():
        print(f"{name}: {headings[path]}", flush=True)
        code = _run(path, ["--quick"])
        if code:
            return code
        print(flush=True)
    print("These were small problems; 'ntk-iterncgp bench NAME' runs one at full size.")
    return 0


def _benchmarks_folder() -> Path:
    """benchmarks/ of the checkout that the current folder is in."""
    here = Path.cwd()
    for root in (here, *here.parents):
        if (root / "benchmarks").is_dir() and (root / "ntk_iterncgp").is_dir():
            return root / "benchmarks"
    raise ConfigError("Benchmarks are part of the repository, not of the package; run this inside a checkout of it.")


def _run(path: Path, flags: list[str]) -> int:
    """`main(flags)` of a benchmark. From its file, since an installed package may be called `benchmarks` as well."""
    spec = importlib.util.spec_from_file_location(f"benchmarks.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.parent))
    try:
        spec.loader.exec_module(module)
        return module.main(flags) or 0
    finally:
        sys.path.remove(str(path.parent.parent))


def _heading(path: Path) -> str | None:
    """The first line of a benchmark's docstring; None for a file without `main`, which others import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
        return None
    return (ast.get_docstring(tree) or "").partition("\n")[0]

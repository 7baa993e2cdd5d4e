"""From the command line to files: read the settings, run one experiment, write and name what came out."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ntk_iterncgp.experiments.reproduce.settings import Settings, as_yaml, assignment, load
from ntk_iterncgp.experiments.settings import ConfigError

if TYPE_CHECKING:
    from ntk_iterncgp.experiments.reproduce.outcome import Outcome

USER_ERROR = 2
INTERRUPTED = 130

EXPERIMENTS = {
    "visual-abstract": "variance over Newton steps and solver iterations, with and without recycling; seconds",
    "pseudo-targets": "Newton's method as a sequence of GP regressions; seconds",
    "policies": "which data the first iterations look at; seconds",
    "compression": "what a recycled belief keeps at rank 0, 1, 3 and 10; seconds",
    "poisson": "how to divide 100 iterations among Newton steps; minutes",
    "gmm": "ten Gaussians, against subsets of the data and SVGP; an hour, two minutes with --n 10000",
    "mnist": "MNIST, against SVGP; hours, minutes with --quick --n 2000",
}
SHORTHANDS = {"n": "num_train", "seeds": "num_seeds"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: {message}; '{self.prog} --help' shows what is possible.\n")


def main(argv: Sequence[str]) -> int:
    """Run one experiment; returns the exit code. A user's mistake is one sentence on stderr and exit code 2."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except ConfigError as error:
        print(f"ntk-iterncgp: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("\nntk-iterncgp: interrupted; nothing was written.", file=sys.stderr)
        return INTERRUPTED


def experiment(name: str) -> Any:
    """The module of an experiment: `SETTINGS` and `run`."""
    return importlib.import_module(f"ntk_iterncgp.experiments.reproduce.{name.replace('-', '_')}")


def _parser() -> _Parser:
    listing = "\n".join(f"  {name:16} {what}" for name, what in EXPERIMENTS.items())
    parser = _Parser(
        prog="ntk-iterncgp reproduce",
        description=f"Reproduce an experiment of the paper.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=EXPERIMENTS, help="one of the above")
    parser.add_argument("--quick", action="store_true", help="scaled to two cores")
    parser.add_argument("--n", type=int, metavar="N", help="training data (gmm, mnist)")
    parser.add_argument("--seeds", type=int, metavar="K", help="repetitions with other data (gmm)")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; configs/paper/ has the paper's")
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[], help="one setting")
    parser.add_argument("--output-dir", metavar="DIR", help="where files go (default: runs/paper/NAME)")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    print(f"{arguments.name}: {EXPERIMENTS[arguments.name]}", flush=True)  # before imports that take seconds
    module = experiment(arguments.name)
    from ntk_iterncgp.persistence.locks import FolderLock

    settings = load(module.SETTINGS, quick=arguments.quick, path=arguments.config, changes=_changes(arguments, module))
    folder = _writable(Path(arguments.output_dir or f"runs/paper/{arguments.name}"))
    with FolderLock(folder, f"ntk-iterncgp reproduce {arguments.name}"):
        return _run_in(folder, arguments, module, settings)


def _run_in(folder: Path, arguments: argparse.Namespace, module: Any, settings: Settings) -> int:
    from ntk_iterncgp.persistence.files import text_writer, write_atomically

    print(f"Settings: {_listed(settings)}", flush=True)
    started = time.perf_counter()
    outcome: Outcome = module.run(settings)
    for claim in outcome.claims:
        print(claim)
    paths = [*outcome.write(folder), folder / "config.yaml"]
    listing = f"# ntk-iterncgp reproduce {arguments.name}: all settings of this run\n{as_yaml(settings)}"
    write_atomically(paths[-1], text_writer(listing))
    for path in paths:
        print(f"wrote {path}")
    print(f"Took {time.perf_counter() - started:.0f} s.")
    return 0


def _changes(arguments: argparse.Namespace, module: Any) -> dict[str, Any]:
    changes = dict(assignment(text) for text in arguments.overrides)
    names = [field.name for field in fields(module.SETTINGS)]
    for flag, name in SHORTHANDS.items():
        value = getattr(arguments, flag)
        if value is None:
            continue
        if name not in names:
            raise ConfigError(
                f"--{flag} must be left out for '{arguments.name}', whose size is fixed; got {value}. Try without."
            )
        changes[name] = value
    return changes


def _listed(settings: Settings) -> str:
    return ", ".join(f"{field.name}={getattr(settings, field.name)}" for field in fields(settings))


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigError(
            f"The folder '{folder}' must be writable; got: {reason}. Try another one with --output-dir."
        ) from error
    return folder

"""The command `ntk-iterncgp`, also `python -m ntk_iterncgp`.

    ntk-iterncgp fit CONFIG                         network or kernel, and data -> posterior.safetensors
    ntk-iterncgp merge POSTERIOR … --output FILE    fits of different data -> the posterior of all of them
    ntk-iterncgp predict POSTERIOR --input FILE     -> probabilities or intervals, and scores, as CSV or npz
    ntk-iterncgp evaluate CONFIG                    -> metrics, baselines, report.html
    ntk-iterncgp demo                               the same on scikit-learn's digits, in three minutes
    ntk-iterncgp bench [NAME]                       benchmarks of the repository
    ntk-iterncgp reproduce NAME                     the paper's experiments

    torchrun --nproc_per_node=K -m ntk_iterncgp fit CONFIG    the same on K GPUs, or in K processes

What a user got wrong is one sentence on stderr and exit code 2; what the machine refused (a full disk, too little
memory) is 1; Ctrl-C is 130. A traceback is a defect of the package. Results are written under a temporary name and
renamed when complete.

PyTorch and what is built on it take 5 to 20 seconds to import. So this file imports nothing heavy: `--help`,
`--version` and mistakes in the settings are answered at once, and the first line comes before the rest is imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ntk_iterncgp.experiments.config import RunConfig, load
from ntk_iterncgp.experiments.settings import ConfigError

FAILURE, USER_ERROR, INTERRUPTED = 1, 2, 130
GRACE_SECONDS = 5.0
COMMANDS = "{fit,merge,predict,evaluate,demo,bench,reproduce}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: {message}; '{self.prog} --help' shows what is possible.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] == ["reproduce"]:  # it parses its own arguments
            _check_alone("reproduce")
            return _reproduce(given[1:])
        parser = _parser()
        arguments, others = parser.parse_known_args(given)
        if arguments.command == "bench":
            arguments.others = others  # each benchmark has flags of its own
        elif others:
            parser.error(f"unrecognized arguments: {' '.join(others)}")
        if arguments.command != "fit":
            _check_alone(arguments.command)
        return int(arguments.run(arguments))
    except (Exception, KeyboardInterrupt) as error:
        code, message = _explained(error)
        if code is None:  # a defect
            raise
        return _end(code, message)


def _check_alone(command: str) -> None:
    if _launched_rank() is not None:
        raise ConfigError(f"Several processes together must 'fit'; got '{command}'. Try it in one process.")


def _explained(error: BaseException) -> tuple[int | None, str]:
    """Exit code and message; no code for what is neither the user's mistake nor the machine's."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "\nntk-iterncgp: interrupted."
    if isinstance(error, ConfigError):
        return USER_ERROR, f"ntk-iterncgp: {error}"
    if isinstance(error, OSError):  # a full disk, a folder that went away
        where = f" '{error.filename}'" if error.filename else ""
        return FAILURE, f"ntk-iterncgp: cannot read or write{where} ({error.strerror or error})."
    from ntk_iterncgp.fitting.report import SelfCheckError
    from ntk_iterncgp.persistence.files import FileError  # whoever raised such an error has imported PyTorch
    from ntk_iterncgp.runtime.parallel import ProcessFailed

    if isinstance(error, FileError):
        return USER_ERROR, f"ntk-iterncgp: {error}"
    first_line = str(error).partition("\n")[0]
    if isinstance(error, (ProcessFailed, SelfCheckError, MemoryError)):  # the last two before anything is harmed
        return FAILURE, f"ntk-iterncgp: {first_line or 'there is too little memory.'}"
    if isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "out of memory" in str(error)):
        return FAILURE, f"ntk-iterncgp: there is too little memory ({first_line})."  # torch's own word for it
    return None, ""


def _end(code: int, message: str) -> int:
    """Of several processes the first speaks and ends, and torchrun then ends the others."""
    if _launched_rank():
        time.sleep(GRACE_SECONDS)
    print(message, file=sys.stderr)
    return code


def _launched_rank() -> int | None:
    """As `parallel.launched_rank`, which takes seconds to import: this process's number among those of torchrun."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    return int(os.environ["RANK"]) if several else None


def _announce(what: str) -> None:
    """The first line of a command, before the long imports."""
    if not _launched_rank():
        print(f"ntk-iterncgp {_version()}: {what}", flush=True)


def _parser() -> _Parser:
    description = "Uncertainty for trained networks and Gaussian processes, from all of the training data."
    parser = _Parser(prog="ntk-iterncgp", description=description)
    parser.add_argument("--version", action="version", version=f"ntk-iterncgp {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=COMMANDS)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, example: str) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        described, epilog = f"{text[0].upper()}{text[1:]}.", f"example:\n  ntk-iterncgp {example}"
        command = commands.add_parser(name, help=text, description=described, epilog=epilog, formatter_class=raw)
        command.set_defaults(run=run)
        return command

    text = "compute the posterior of a network or a kernel: a file that predictions need and nothing else"
    fit = add("fit", _fit, text, "fit configs/digits.yaml --set fit.num_actions=50")
    text = "compare with temperature scaling, the prior alone and laplace-torch: table and report.html"
    evaluate = add("evaluate", _evaluate, text, "evaluate configs/cifar10_resnet20.yaml --set data.train_limit=10000")
    for command in (fit, evaluate):
        command.add_argument("config", metavar="CONFIG", help="YAML file with what differs from the defaults")
        _add_settings(command)
    fit.add_argument("--shard", metavar="k/K", help="only the k-th of K parts of the training data, for 'merge'")
    text = "add up posteriors of the same network and different data"
    example = "merge runs/*/posterior.safetensors --output runs/all/posterior.safetensors"
    _add_merge(add("merge", _merge, text, example))
    text = "probabilities, or intervals of real targets, and scores for new inputs"
    example = "predict runs/digits/posterior.safetensors --input new.npz --output new.csv"
    _add_prediction(add("predict", _predict, text, example))
    text = "train a small network on scikit-learn's digits, fit it, compare it with the exact posterior"
    _add_settings(add("demo", _demo, text, "demo --output-dir runs/mine"))
    bench = add("bench", _bench, "run a benchmark of the repository, or all of them at small size", "bench ntk --quick")
    bench.add_argument("name", metavar="NAME", nargs="?", help="a file of benchmarks/ without .py; none: all, quickly")
    bench.add_argument("--quick", action="store_true", help="small problems: does it run?")
    bench.add_argument("--json", metavar="FILE", help="write the results here, too; other flags are the benchmark's")
    commands.add_parser("reproduce", help="the paper's experiments; 'reproduce --help' lists them")
    return parser


def _add_prediction(command: argparse.ArgumentParser) -> None:
    command.add_argument("posterior", metavar="POSTERIOR", help="the file that 'fit' wrote")
    inputs = ".npz with x, .npy, .csv, an image, or a folder of images"
    command.add_argument("--input", metavar="FILE", required=True, help=inputs)
    outputs = ".csv or .npz (default: predictions.csv beside the posterior)"
    command.add_argument("--output", metavar="FILE", help=outputs)
    links = ("quadrature", "probit")
    command.add_argument("--link", type=_link, choices=links, default=links[0], help="default: quadrature")
    numbers = "of a network, how many contrasts of its outputs to compute: k, all or auto (default: as in the fit)"
    command.add_argument("--contrasts", type=_contrasts, help=numbers)
    _add_model(command)


def _add_merge(command: argparse.ArgumentParser) -> None:
    command.add_argument("posteriors", metavar="POSTERIOR", nargs="+", help="files that 'fit' or 'merge' wrote")
    command.add_argument("--output", metavar="FILE", required=True, help="the .safetensors to write")
    command.add_argument("--max-rank", metavar="R", type=int, help="how many actions to keep (default: all)")
    _add_model(command)


def _add_model(command: argparse.ArgumentParser) -> None:
    trusted = "what makes your own network; the file's word is not enough"
    command.add_argument("--model", metavar="MODULE:FUNCTION", help=trusted)
    command.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")


def _link(text: str) -> str:
    return "quadrature" if text == "accurate" else text  # its former name


def _contrasts(text: str) -> int | str:
    if text in ("all", "auto"):
        return text
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a positive whole number, all or auto; got {text!r}. Try auto.")
    return int(text)


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one setting, for instance data.train_limit=5000; repeatable",
    )
    command.add_argument("--output-dir", metavar="DIR", help="where results go (default: runs/ and the config's name)")


def _version() -> str:
    return str(importlib.import_module("ntk_iterncgp").__version__)


def _settings(arguments: argparse.Namespace) -> RunConfig:
    config = load(arguments.config, arguments.overrides)
    return config if arguments.output_dir is None else with_output_dir(config, arguments.output_dir)


def with_output_dir(config: RunConfig, folder: str) -> RunConfig:
    """Put the results elsewhere."""
    if not folder:
        raise ConfigError("output_dir must be the name of a folder; got an empty text. Try runs/mine.")
    return replace(config, output_dir=folder)


def _fit(arguments: argparse.Namespace) -> int:
    if arguments.shard is not None:
        arguments.overrides.append(f"fit.shard={arguments.shard}")
    config = _settings(arguments)
    _announce(f"fit {arguments.config}, results go to {config.output_dir}")
    from ntk_iterncgp.experiments.runs import fit

    fit(config)
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    config = _settings(arguments)
    _announce(f"evaluate {arguments.config}, results go to {config.output_dir}")
    from ntk_iterncgp.experiments.runs import evaluate

    evaluate(config)
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    files, output = [Path(name) for name in arguments.posteriors], Path(arguments.output)
    if arguments.max_rank is not None and arguments.max_rank < 1:
        raise ConfigError(f"--max-rank must be a whole number of at least 1; got {arguments.max_rank}. Try 200.")
    _announce(f"merge {len(files)} posteriors into {output}")
    from ntk_iterncgp.experiments.runs import merge

    merge(files, output, max_rank=arguments.max_rank, device=arguments.device, trusted_model=arguments.model)
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    posterior = Path(arguments.posterior)
    output = Path(arguments.output) if arguments.output else posterior.with_name("predictions.csv")
    _announce(f"predict for {arguments.input} from {posterior}")
    from ntk_iterncgp.experiments.runs import predict

    predict(
        posterior,
        Path(arguments.input),
        output,
        device=arguments.device,
        link=arguments.link,
        contrasts=arguments.contrasts,
        trusted_model=arguments.model,
    )
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from ntk_iterncgp.experiments import demo  # which is light until it runs

    config = demo.settings(arguments.overrides)
    demo.run(config if arguments.output_dir is None else with_output_dir(config, arguments.output_dir))
    return 0


def _reproduce(arguments: list[str]) -> int:
    try:
        module = importlib.import_module("ntk_iterncgp.experiments.reproduce")
    except ModuleNotFoundError as error:
        if error.name != "ntk_iterncgp.experiments.reproduce":
            raise
        raise ConfigError(
            "'reproduce' must be part of the installation; got one without it. Try a checkout of the repository."
        ) from error
    return int(module.main(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    folder = _benchmarks_folder()
    headings = {path: _heading(path) for path in sorted(folder.glob("*.py"))}
    paths = {path.stem: path for path, heading in headings.items() if heading is not None}
    flags = ["--quick"] * arguments.quick + (["--json", arguments.json] if arguments.json else []) + arguments.others
    if arguments.name is not None:
        if arguments.name not in paths:
            raise ConfigError(f"NAME must be a benchmark; got '{arguments.name}'. Try one of {', '.join(paths)}.")
        print(f"{arguments.name}: {headings[paths[arguments.name]]}", flush=True)
        return _run(paths[arguments.name], flags)
    if flags := flags[arguments.quick :]:
        raise ConfigError(
            f"{flags[0]} must follow the name of one benchmark; got none. Try: bench solver {' '.join(flags)}."
        )
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
    raise ConfigError("Benchmarks must be run inside a checkout of the repository; got a folder that is not. Try cd.")


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

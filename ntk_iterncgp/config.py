"""The settings of a run: defaults in code, differences in a YAML file, last words on the command line.

    config = load("configs/digits_matern.yaml", ["max_products=200"])

A file lists only what differs from the defaults. Whatever cannot be right is a `ConfigError` with one sentence, before
any work is done.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import yaml

from ntk_iterncgp.predictive import LINKS
from ntk_iterncgp.solver import POLICIES

KERNELS = ("RBF", "Matern12", "Matern32", "Matern52")
_KINDS = {int: "a whole number", float: "a number", str: "text", type(None): "null"}


class ConfigError(ValueError):
    """A setting that cannot be right, in one sentence."""


@dataclass(frozen=True)
class RunConfig:
    """A Gaussian process with an explicit kernel, on the digits."""

    # The largest evidence lower bound (`gp.elbo()`, training data alone) of Matérn-3/2 and -5/2 with lengthscales 4, 8,
    # 16 and outputscales 16, 32, 64, 128. Not the largest Laplace evidence, which is no bound: it goes on rising with
    # the outputscale, past the point where the variance spoils the predictions.
    kernel: str = "Matern52"
    lengthscale: float = 8.0
    outputscale: float = 32.0

    policy: str = "curvature_residual"
    max_products: int = 100
    products_per_step: int = 3  # each brings up to 81 actions, so few of them make a Newton step worth taking
    refine_products: int = 12  # spent on the variance once the mean has converged; 0: none
    max_rank: int | None = None

    # Softmax needs the whole 10×10 covariance: what all classes share does not matter, and the probit link, which sees
    # variances alone, takes it for doubt.
    link: str = "quadrature"

    num_train: int | None = None  # null: all that are not for testing
    num_test: int = 450
    seed: int = 0  # of the split into training and test data, and of policies that draw random numbers
    output_dir: str = "runs/demo"

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            object.__setattr__(self, field.name, _typed(field.name, getattr(self, field.name), hints[field.name]))
        for name, choices in (("kernel", KERNELS), ("policy", POLICIES), ("link", LINKS)):
            _require_choice(name, getattr(self, name), choices)
        for name in ("lengthscale", "outputscale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} expects a positive, finite number, but got {getattr(self, name)!r}.")
        smallest = {"max_products": 1, "products_per_step": 1, "max_rank": 1, "num_train": 1, "num_test": 1}
        for name, least in (smallest | {"refine_products": 0, "seed": 0}).items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} expects a whole number of at least {least}, but got {value}.")
        if not self.output_dir:
            raise ConfigError("output_dir expects the name of a folder, but got an empty text.")


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """The defaults, changed by a YAML file and then by `key=value` texts."""
    settings = {} if path is None else _read(Path(path))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set expects key=value, for instance max_products=200, but got {override!r}.")
        settings[key.strip()] = _parsed(text, f"the value of {key.strip()}")
    names = [field.name for field in fields(RunConfig)]
    for key in settings:
        if key not in names:
            nearest = _nearest(str(key), names)
            hint = f"did you mean '{nearest}'?" if nearest else f"the settings are {', '.join(names)}."
            raise ConfigError(f"There is no setting '{key}'; {hint}")
    return replace(RunConfig(), **settings)


def prepare_output_dir(config: RunConfig) -> Path:
    """The output folder, made and seen to be writable."""
    folder = Path(config.output_dir)
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"Cannot write to the folder '{folder}' ({reason.lower()}); name another one with --output-dir."
        ) from error
    return folder


def _read(path: Path) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{path}' is not a text file; --config expects a YAML file of settings.") from error
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigError(f"Cannot read the configuration '{path}' ({reason}).") from error
    settings = _parsed(text, f"'{path}'")
    if settings is None:  # a file of comments: nothing differs from the defaults
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"'{path}' expects lines of the form 'key: value', but holds {settings!r}.")
    return settings


def _parsed(text: str, name: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise ConfigError(f"{name} is not valid YAML{where}: {getattr(error, 'problem', None) or error}.") from error


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value as the type of its field, or a sentence."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if float in kinds and not isinstance(value, bool):
        if isinstance(value, int):
            return float(value)
        if isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
            try:
                return float(value)
            except ValueError:
                pass
    if type(value) not in kinds:
        expected = " or ".join(_KINDS[kind] for kind in kinds)
        raise ConfigError(f"{name} expects {expected}, but got {value!r}.")
    return value


def _require_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        nearest = _nearest(value, choices)
        hint = f"; did you mean '{nearest}'?" if nearest else "."
        raise ConfigError(f"{name} expects one of {', '.join(choices)}, but got '{value}'{hint}")


def _nearest(word: str, choices: Collection[str]) -> str | None:
    folded = {choice.casefold(): choice for choice in choices}
    found = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
    return folded[found[0]] if found else None

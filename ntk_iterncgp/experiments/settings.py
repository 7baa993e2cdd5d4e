"""Settings as text: YAML files and `key=value` read into typed values, or a sentence about what is wrong with them."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml

_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 80, 80, 80


class ConfigError(ValueError):
    """Something a user can put right, in one sentence."""


@contextmanager
def own_sentences() -> Iterator[None]:
    """What the library refuses with a `ValueError`, data or models, is something a user can put right."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def shown(value: Any) -> str:
    """A value inside a message: shortened, since a few lines of YAML (aliases of aliases) can stand for gigabytes."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # a number with more digits than Python writes out
        return "a number of thousands of digits"


def read_settings(path: Path) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{path}' is not a text file; a YAML file of settings is expected.") from error
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigError(f"Cannot read the configuration '{path}' ({reason}).") from error
    settings = parsed(text, f"'{path}'")
    if settings is None:  # a file of comments: nothing differs from the defaults
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"'{path}' expects lines of the form 'key: value', but holds {shown(settings)}.")
    return settings


def parsed(text: str, name: str) -> Any:
    """YAML as plain Python values; whatever is wrong with the text is a `ConfigError`."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        problem = (getattr(error, "problem", None) or str(error)).partition("\n")[0]
        raise ConfigError(f"{name} is not valid YAML{where}: {problem}.") from error
    except RecursionError as error:
        raise ConfigError(
            f"{name} must nest at most some hundred brackets; got more. Settings need three levels."
        ) from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        # PyYAML's constructors let these through, for instance for a thirteenth month.
        reason = str(error).partition("\n")[0][:100]
        raise ConfigError(f"{name} is not valid YAML: it holds a value that cannot be read ({reason}).") from error


def typed_value(name: str, value: Any, hint: Any) -> Any:
    """The value as the type of its field, or a sentence."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if get_origin(hint) is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{name} expects a list of names, for instance [a, b], but got {shown(value)}.")
        return tuple(items)
    if get_origin(hint) is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise ConfigError(f"{name} expects names with values, for instance {{key: 1}}, but got {shown(value)}.")
        return value
    if float in kinds and type(value) in (int, str):  # YAML 1.1 reads 1e-3 as text
        with suppress(ValueError, OverflowError):
            return float(value)
    if type(value) not in kinds:
        expected = " or ".join(_KINDS[kind] for kind in kinds)
        raise ConfigError(f"{name} expects {expected}, but got {shown(value)}.")
    return value


def require_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        near = nearest(value, choices)
        hint = f"; did you mean '{near}'?" if near else "."
        raise ConfigError(f"{name} expects one of {', '.join(choices)}, but got '{value}'{hint}")


def suggestion(key: str, names: Collection[str]) -> str:
    """The setting that was meant: by its last part, since a section is often left out."""
    by_last = {name.rpartition(".")[2]: name for name in names}
    last = key.rpartition(".")[2]
    found = nearest(key, names) if "." in key else by_last.get(nearest(last, by_last) or "")
    return f"did you mean '{found}'?" if found else f"the settings are {', '.join(names)}."


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that was probably meant."""
    folded = {choice.casefold(): choice for choice in choices}
    found = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
    return folded[found[0]] if found else None

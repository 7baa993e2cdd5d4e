"""Settings as text: YAML files and `key=value` read into typed values, or an error message.

A field's annotation says all that is checked: `Annotated[int, Range(1)] | None`, `Literal["a", "b"]`,
`tuple[str, ...]`.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 80, 80, 80


class ConfigError(ValueError):
    """Something that a user can put right, in one line."""


class SettingError(ConfigError):
    """One setting is wrong: it must be `expected`."""

    def __init__(self, name: str, expected: str, got: str, advice: str) -> None:
        super().__init__(f"{name} must be {expected}; got {got}. Try {advice}.")
        self.name = name


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`; without `least` itself where `is_open`."""

    least: float
    most: float = inf
    is_open: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.least < value if self.is_open else self.least <= value) and value <= self.most and value != inf

    def expected(self, kind: type, value: float) -> str:
        """What a value outside of the range should have been."""
        if value > self.most:
            return f"{_KINDS[kind]} of at most {self.most:.12g}"
        if kind is float and self.is_open and self.least == 0:
            return "a positive, finite number"
        finite = "a finite number" if kind is float and self.most == inf else _KINDS[kind]
        return f"{finite} {'above' if self.is_open else 'of at least'} {self.least:.12g}"


@contextmanager
def config_errors() -> Iterator[None]:
    """Turn what the library refuses with a `ValueError`, data or models, into a `ConfigError`."""
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
    """Read a YAML file of settings; an empty one has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{path}' must be a text file; got other bytes. Try one of configs/.") from error
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigError(f"'{path}' must be a file that can be read; got: {reason}. Try one of configs/.") from error
    settings = parsed(text, f"'{path}'")
    if settings is None:  # a file of comments: nothing differs from the defaults
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"'{path}' must have lines of the form 'key: value'; got {shown(settings)}. Try 'seed: 0'.")
    return settings


def parsed(text: str, name: str) -> Any:
    """YAML as plain Python values; whatever is wrong with the text is a `ConfigError`."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        problem = (getattr(error, "problem", None) or str(error)).partition("\n")[0]
        raise ConfigError(f"{name} must be valid YAML{where}; got: {problem}. Try quotes around texts.") from error
    except RecursionError as error:
        raise ConfigError(
            f"{name} must nest at most some hundred brackets; got more. Try three levels, which is what settings need."
        ) from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        # PyYAML's constructors let these through, for instance for a thirteenth month.
        reason = str(error).partition("\n")[0][:100]
        raise ConfigError(
            f"{name} must be valid YAML; got a value that cannot be read ({reason}). Try quotes around it."
        ) from error


def line_of(path: Path, name: str) -> int | None:
    """The line of a YAML file that sets this dotted name, or else its section."""
    node, line = yaml.compose(path.read_text(encoding="utf-8")), None
    for part in name.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next((pair for pair in pairs if pair[0].value == part), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def typed_value(name: str, value: Any, hint: Any, default: Any = None) -> Any:
    """Check a value against the annotation of its field.

    Args:
        name: The setting, for the message.
        value: As YAML reads it.
        hint: A type, a `Literal`, `Annotated` with a `Range`, a tuple of names or a dict; or one of these `| None`, or
            a number `|` a `Literal` of words.
        default: What the message recommends.

    Returns:
        The value as that type.
    """
    kind, *null = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [word for part in null if get_origin(part) is Literal for word in get_args(part)]
    if (value is None and type(None) in null) or (isinstance(value, str) and value in words):
        return value
    advice = f"{json.dumps(default)}, the default"
    if get_origin(kind) is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            raise SettingError(name, "a list of names, for instance [a, b]", shown(value), advice)
        return tuple(typed_value(name, item, get_args(kind)[0], default) for item in items)
    if get_origin(kind) is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise SettingError(name, "names with values, for instance {key: 1}", shown(value), advice)
        return value
    if get_origin(kind) is Literal:
        return require_choice(name, value, get_args(kind), advice)
    others = [*words, *(["null"] if type(None) in null else [])]
    return _number_or_text(name, value, kind, "".join(f" or {other}" for other in others), advice)


def _number_or_text(name: str, value: Any, kind: Any, or_null: str, advice: str) -> Any:
    kind, allowed = get_args(kind) if get_origin(kind) is Annotated else (kind, None)
    if kind is float and type(value) in (int, str):  # YAML 1.1 reads 1e-3 as text
        with suppress(ValueError, OverflowError):
            value = float(value)
    if type(value) is not kind:
        raise SettingError(name, f"{_KINDS[kind]}{or_null}", shown(value), advice)
    if allowed is not None and value not in allowed:
        raise SettingError(name, f"{allowed.expected(kind, value)}{or_null}", shown(value), advice)
    return value


def require_choice(name: str, value: Any, choices: Collection[str], advice: str = "") -> Any:
    """Return one of the choices, or name the one that was probably meant."""
    if value not in choices:
        near = nearest(str(value), choices)
        advice = f"'{near}'" if near else advice or "one of these"
        raise SettingError(name, f"one of {', '.join(choices)}", shown(value), advice)
    return value


def unknown_setting(key: str, names: Collection[str]) -> SettingError:
    """An error that recommends the setting that was meant: by its last part, since a section is often left out."""
    by_last = {name.rpartition(".")[2]: name for name in names}
    last = key.rpartition(".")[2]
    found = nearest(key, names) if "." in key else by_last.get(nearest(last, by_last) or "")
    advice = f"'{found}'" if found else f"one of {', '.join(names)}"
    error = SettingError("A setting", "one that there is", f"'{key}'", advice)
    error.name = key
    return error


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that was probably meant."""
    folded = {choice.casefold(): choice for choice in choices}
    found = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
    return folded[found[0]] if found else None

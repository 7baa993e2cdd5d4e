"""The settings of an experiment: the paper's own as defaults, smaller ones for `--quick`, the user's last.

    settings = load(PoissonSettings, quick=True, path=None, changes={"num_redraws": 3})

`configs/paper/NAME.yaml` lists the defaults in full, beside the sentence of the paper that each comes from; a test
holds the two together. A setting that does not exist is a `ConfigError` that names the nearest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from ntk_iterncgp.settings import ConfigError, nearest, parsed, read_settings, typed_value


@dataclass(frozen=True)
class Settings:
    """What every experiment has. Numbers are checked for their type here; a subclass adds fields and `QUICK`."""

    QUICK: ClassVar[Mapping[str, Any]] = {}  # what `--quick` changes, so that two cores do it in minutes
    seed: int = 0

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value = _checked(field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)


S = TypeVar("S", bound=Settings)


def load(kind: type[S], *, quick: bool, path: str | Path | None = None, changes: Mapping[str, Any]) -> S:
    """The paper's settings, changed by `--quick`, then by a YAML file, then by the command line."""
    names = [field.name for field in fields(kind)]
    settings: dict[str, Any] = {}
    for source in (kind.QUICK if quick else {}, {} if path is None else read_settings(Path(path)), changes):
        for key in source:
            if key not in names:
                closest = nearest(str(key), names)
                hint = f"did you mean '{closest}'?" if closest else f"its settings are {', '.join(names)}."
                raise ConfigError(f"This experiment has no setting '{key}'; {hint}")
        settings |= source
    return replace(kind(), **settings)


def assignment(text: str) -> tuple[str, Any]:
    """`key=value` of the command line; the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set expects key=value, for instance num_redraws=3, but got {text!r}.")
    return key.strip(), parsed(value, f"the value of {key.strip()}")


def _checked(name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        if isinstance(value, str) or not isinstance(value, (list, tuple)) or not value:
            raise ConfigError(f"{name} expects a list such as [1, 2], but got {value!r}.")
        return tuple(_checked(name, item, get_args(hint)[0]) for item in value)
    if hint is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} expects true or false, but got {value!r}.")
        return value
    value = typed_value(name, value, hint)
    if isinstance(value, (int, float)) and not 0 <= value < float("inf"):
        raise ConfigError(f"{name} expects a finite number of at least 0, but got {value!r}.")
    if isinstance(value, int) and value == 0 and name != "seed":
        raise ConfigError(f"{name} expects a whole number of at least 1, but got 0.")
    return value

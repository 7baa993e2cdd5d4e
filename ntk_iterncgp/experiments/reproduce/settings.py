"""The settings of an experiment: the paper's own as defaults, smaller ones for `--quick`, the user's last.

    settings = load(PoissonSettings, quick=True, path=None, changes={"num_redraws": 3})

`configs/paper/NAME.yaml` lists the defaults in full, beside the sentence of the paper that each comes from; a test
holds the two together. A setting that does not exist is a `ConfigError` that names the nearest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import yaml

from ntk_iterncgp.experiments.settings import (
    ConfigError,
    SettingError,
    parsed,
    read_settings,
    shown,
    typed_value,
    unknown_setting,
)


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
MAY_BE_ZERO = ("seed", "newton_tol", "residual_tol")
LEAST = {"resolution": 2, "num_newton_steps": 2}  # of what is drawn as a map, or compared from step to step


def load(kind: type[S], *, quick: bool, path: str | Path | None = None, changes: Mapping[str, Any]) -> S:
    """The paper's settings, changed by `--quick`, then by a YAML file, then by the command line."""
    names = [field.name for field in fields(kind)]
    settings: dict[str, Any] = {}
    for source in (kind.QUICK if quick else {}, {} if path is None else read_settings(Path(path)), changes):
        for key in source:
            if key not in names:
                raise unknown_setting(str(key), names)
        settings |= source
    return replace(kind(), **settings)


def as_yaml(settings: Settings) -> str:
    """All settings; `--config` with the text gives the same run."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def assignment(text: str) -> tuple[str, Any]:
    """`key=value` of the command line; the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set must be given as key=value; got {text!r}. Try num_redraws=3.")
    return key.strip(), parsed(value, f"the value of {key.strip()}")


def _checked(name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        if isinstance(value, str) or not isinstance(value, (list, tuple)) or not value:
            raise SettingError(name, "a list", shown(value), "one such as [1, 2]")
        return tuple(_checked(name, item, get_args(hint)[0]) for item in value)
    if hint is bool:
        if not isinstance(value, bool):
            raise SettingError(name, "true or false", shown(value), "true")
        return value
    value = typed_value(name, value, hint)
    if name.endswith("_tol") and not 0 <= value < 1:
        raise SettingError(name, "a fraction from 0 to below 1", shown(value), "0.01")
    if isinstance(value, int) and value < LEAST.get(name, name not in MAY_BE_ZERO):
        least = LEAST.get(name, 1)
        raise SettingError(name, f"a whole number of at least {least}", shown(value), str(least))
    if isinstance(value, float) and (not 0 <= value < float("inf") or (value == 0 and name not in MAY_BE_ZERO)):
        raise SettingError(name, "a finite number above 0", shown(value), "1.0")
    return value

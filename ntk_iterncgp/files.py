"""Writing results so that a reader never sees half of one, and the posterior file.

A file is written under a temporary name in its own folder, flushed to the disk, and renamed. Whatever goes wrong on the
way (a full disk, Ctrl-C) leaves the old file, or none.

The posterior file is one `.safetensors`: tensors under dotted names, everything else as JSON in its header. Reading it
runs no code. `state_dict` of the flavour is a tree of tensors, numbers and texts, and is stored leaf by leaf.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ntk_iterncgp.config import ConfigError

FORMAT = "ntk-iterncgp posterior 1"
HEADER = "ntk_iterncgp"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Numbers that are not finite become null: JSON has no other word for them."""
    text = json.dumps(_finite(content), indent=2, allow_nan=False, ensure_ascii=False)
    write_text(path, text + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda target: target.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name in the same folder, flush, then rename."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        try:
            write(temporary)
        except SafetensorError as error:  # which wraps the system's error in a text
            full = "No space left" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # safetensors lets its owner alone read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save_posterior(path: Path, state: Mapping[str, Any], model_state: Mapping[str, Tensor], about: Any) -> None:
    """`state` of a flavour, the network's own weights and buffers, and `about`: what is needed to use them again."""
    tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in model_state.items()}
    plain = _without_tensors(state, "posterior", tensors)
    header = json.dumps({"format": FORMAT, "about": _finite(about), "state": plain}, allow_nan=False)
    # Tied weights share memory, which safetensors refuses; and slices would drag their whole storage along.
    separate = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_atomically(path, lambda target: save_file(separate, target, metadata={HEADER: header}))


def load_posterior(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], Any]:
    """State, model weights and `about`, after checking that the file is what it should be."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER)
            if header is None:
                raise ConfigError(
                    f"'{path}' holds tensors, but no posterior; the file that 'ntk-iterncgp fit' wrote is expected."
                )
            content = json.loads(header)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError as error:
        raise ConfigError(f"There is no posterior at '{path}'; 'ntk-iterncgp fit CONFIG' makes one.") from error
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise ConfigError(f"'{path}' is not a posterior file, or is damaged ({error}).") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise ConfigError(f"'{path}' is expected to have the format '{FORMAT}', but has {found!r}. Fit again.")
    missing = [name for name in _references(content["state"]) if name not in tensors]
    if missing:
        raise ConfigError(f"'{path}' is damaged: it lacks the tensors {', '.join(missing[:3])}. Fit again.")
    model_state = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    return _with_tensors(content["state"], tensors), model_state, content["about"]


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with each tensor replaced by the name it is stored under."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        items = {str(key): _without_tensors(item, f"{name}.{key}", tensors) for key, item in value.items()}
        return {"items": items}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {key: _with_tensors(item, tensors) for key, item in value["items"].items()}
    return [_with_tensors(item, tensors) for item in value] if isinstance(value, list) else value


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        if "tensor" in value:
            return [value["tensor"]]
        return [name for item in value["items"].values() for name in _references(item)]
    return [name for item in value for name in _references(item)] if isinstance(value, list) else []

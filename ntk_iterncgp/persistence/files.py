"""Files that can be trusted: written whole or not at all, read without running anything, damage noticed.

A file is written under a temporary name in its own folder, flushed to the disk, and renamed. Whatever goes wrong on the
way (a full disk, Ctrl-C, kill -9) leaves the old file, or none.

Posteriors and checkpoints are one `.safetensors` each: tensors under dotted names, everything else as JSON in its
header. The last tensor, `sha256`, is the digest of all that comes before it, so a file of which one bit has changed is
refused before it is looked into. What the digest cannot promise is that the file means well: names are never used as
paths, declared sizes are compared with what is there, and nothing in a file is called.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

HEADER, DIGEST = "ntk_iterncgp", "sha256"
POSTERIOR, POSTERIOR_VERSION = "ntk-iterncgp posterior", 2
MAX_HEADER_BYTES = 64 * 2**20
CHUNK_BYTES = 2**24  # of a tensor or a file, at once
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


Writer = Callable[[Path], object]
"""Writes a file of that name."""


class FileError(ValueError):
    """A file that cannot be used, with a message of one line."""


# --- writing ------------------------------------------------------------------------------------------------------


def as_json(content: Mapping[str, Any]) -> str:
    """Numbers that are not finite become null: JSON has no numbers for them."""
    return json.dumps(_finite(content), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def text_writer(text: str) -> Writer:
    """Return what writes a text, in UTF-8."""
    return lambda target: target.write_text(text, encoding="utf-8")


def write_atomically(path: Path, write: Writer) -> None:
    """Write under a temporary name in the same folder, flush, rename, and flush the folder too."""
    write_together({path: write})


def write_together(writers: Mapping[Path, Writer]) -> None:
    """Files that belong together: none is renamed before all are on the disk."""
    temporaries = {path: path.with_name(f"{temporary_prefix(path)}{os.getpid()}{path.suffix}") for path in writers}
    try:
        for path, temporary in temporaries.items():
            try:
                writers[path](temporary)
            except SafetensorError as error:  # which wraps the system's error in a text
                full = "No space left" in str(error)
                raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error
            _flush(temporary, os.O_RDWR)
            os.chmod(temporary, 0o666 & ~_umask())  # safetensors lets its owner alone read
        for path, temporary in temporaries.items():
            temporary.replace(path)
        if os.name == "posix":  # a renamed file may be forgotten in a power cut until its folder is on the disk
            for folder in {path.parent for path in writers}:
                _flush(folder, os.O_RDONLY)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def temporary_prefix(path: Path) -> str:
    """How the names begin under which `path` is written before it is renamed."""
    return f".{path.stem}."


def _flush(path: Path, mode: int) -> None:
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and JSON to one file, whole or not at all."""
    write_atomically(path, tensor_writer(path, tensors, about))


def tensor_writer(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Writer:
    """Tensors and JSON as one file, a chunk at a time: writing takes no memory beside that of the tensors."""
    sizes = {name: value.numel() * value.element_size() for name, value in tensors.items()}
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": {HEADER: json.dumps(about, allow_nan=False)}}
    end = 0
    for name in names:
        start, end, value = end, end + sizes[name], tensors[name]
        if value.dtype not in DTYPES:
            raise FileError(
                f"'{path}' cannot hold '{name}': it is {value.dtype}, which files of this format do not have."
            )
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    header[DIGEST] = {"dtype": "U8", "shape": [32], "data_offsets": [end, end + 32]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()

    def write(target: Path) -> None:
        with target.open("wb") as file:
            beginning = iter([memoryview(struct.pack("<Q", len(text))), memoryview(text)])
            for part in chain(beginning, *(_bytes_of(tensors[name]) for name in names)):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())

    return write


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, some rows at a time and on the CPU."""
    tensor = tensor.detach()
    rows = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.flatten(1)
    if rows.numel():
        for part in rows.split(max(1, CHUNK_BYTES // (rows.shape[1] * rows.element_size()))):
            # A copy: one number that was expanded counts as contiguous, with a stride of zero.
            whole = part.cpu().clone(memory_format=torch.contiguous_format)
            yield memoryview(whole.view(-1).view(torch.uint8).numpy())


# --- reading ------------------------------------------------------------------------------------------------------


def read_tensors(path: Path, kind: str, newest: int, *, unsigned: int = 0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON and the tensors of a file of a kind, in any version up to `newest`; up to `unsigned` without digest."""
    name = kind.partition(" ")[2]
    if not path.is_file():  # nor is a folder, or a pipe that would be waited for
        raise FileError(f"'{path}' is not a {name} file: there is no such file.")
    try:
        intact = _check_digest(path)
        with safe_open(path, framework="np") as file:
            text = (file.metadata() or {}).get(HEADER)
            if text is None:
                raise FileError(f"'{path}' holds tensors, but no {name}.")
            about = json.loads(text, parse_constant=_no_constant)
            tensors = {key: _tensor(path, file, key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except FileError:
        raise
    except (SafetensorError, OSError, ValueError, RecursionError, TypeError, KeyError, RuntimeError) as error:
        reason = str(error).partition("\n")[0][:120]
        raise FileError(f"'{path}' is not a {name} file, or is damaged ({reason}).") from error
    found = about.get("format") if isinstance(about, dict) else None
    version = _version(found, kind)
    if version is None:
        raise FileError(f"'{path}' must have the format '{kind} {newest}'; got {found!r:.80}. Try a file of this kind.")
    if version > newest:
        raise FileError(
            f"'{path}' has the format '{found}', which is newer than '{kind} {newest}'. Use the version of "
            "ntk-iterncgp that wrote it, or a later one."
        )
    if not intact and version > unsigned:
        raise FileError(f"'{path}' is not a {name} file, or is damaged (it lacks its digest).")
    tensors.pop(DIGEST, None)
    return about, tensors


def _tensor(path: Path, file: Any, name: str) -> Tensor:
    """Read one tensor, by way of numpy.

    safetensors 0.8 loses 64 bytes with each tensor that it makes for torch, which adds up in a process that reads files
    for days. A clone lies where torch puts its own tensors, which decides how sums round.
    """
    try:
        return torch.from_numpy(file.get_tensor(name)).clone()
    except TypeError:  # numpy has no bfloat16
        with safe_open(path, framework="pt") as for_torch:
            tensor: Tensor = for_torch.get_tensor(name).clone()
            return tensor


def _check_digest(path: Path) -> bool:
    """Whether the file ends in its digest; damage raises. Files of an old format have none."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size, MAX_HEADER_BYTES):
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        text = file.read(length)
        if f'"{DIGEST}"'.encode() not in text:
            return False
        digest = hashlib.sha256(start + text)
        left = size - 8 - length - 32
        while left > 0:
            part = file.read(min(left, CHUNK_BYTES))
            if not part:
                break
            digest.update(part)
            left -= len(part)
        if file.read(33) != digest.digest():
            raise ValueError("its digest is that of other content")
    return True


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} in its header")


def _version(found: Any, kind: str) -> int | None:
    if not isinstance(found, str) or not found.startswith(f"{kind} "):
        return None
    number = found.removeprefix(f"{kind} ")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 6 else None


# --- trees --------------------------------------------------------------------------------------------------------


def without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A tree of mappings, lists, numbers and texts, with each tensor replaced by the name it is stored under."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        items = {str(key): without_tensors(item, f"{name}.{key}", tensors) for key, item in value.items()}
        return {"items": items}
    if isinstance(value, (list, tuple)):
        return [without_tensors(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    return value


def with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree with its tensors; raises where it is none."""
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            name = value["tensor"]
            if name not in tensors:
                raise ValueError(f"it lacks the tensor {str(name)[:60]!r}")
            return tensors[name]
        return {key: with_tensors(item, tensors) for key, item in value["items"].items()}
    return [with_tensors(item, tensors) for item in value] if isinstance(value, list) else value


# --- posteriors ---------------------------------------------------------------------------------------------------


def save_posterior(
    path: Path,
    state: Mapping[str, Any],
    model_state: Mapping[str, Tensor],
    about: Any,
    *,
    beside: Mapping[Path, str] | None = None,
) -> None:
    """`state` of a flavour, the network's own weights and buffers, and `about`: what is needed to use them again.

    `beside` are texts about it, which are replaced with it or not at all.
    """
    tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in model_state.items()}
    plain = without_tensors(state, "posterior", tensors)
    header = {"format": f"{POSTERIOR} {POSTERIOR_VERSION}", "about": _finite(about), "state": plain}
    texts = {name: text_writer(text) for name, text in (beside or {}).items()}
    write_together({path: tensor_writer(path, tensors, header), **texts})


def peek_posterior(path: Path, name: str) -> tuple[dict[str, Any], Tensor | None]:
    """Return `about`, and one small tensor of the state or None, without reading the rest.

    What does not fit together is refused sooner. Whether the file is whole is for `load_posterior` to say.
    """
    if not path.is_file():
        raise FileError(f"There is no posterior at '{path}'; 'ntk-iterncgp fit CONFIG' makes one.")
    try:
        with safe_open(path, framework="np") as file:
            content = json.loads((file.metadata() or {})[HEADER], parse_constant=_no_constant)
            key = f"posterior.{name}"
            found = _tensor(path, file, key) if key in file.keys() else None  # noqa: SIM118 (no mapping)
        if _version(content["format"], POSTERIOR) is None or not isinstance(content["about"], dict):
            raise ValueError("it is another kind of file")
    except (SafetensorError, OSError, ValueError, RecursionError, TypeError, KeyError, RuntimeError) as error:
        reason = str(error).partition("\n")[0][:120]
        raise FileError(f"'{path}' is not a posterior file, or is damaged ({reason}).") from error
    return content["about"], found


def load_posterior(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], Any]:
    """State, model weights and `about`, after checking that the file is what it should be."""
    if not path.exists():
        raise FileError(f"There is no posterior at '{path}'; 'ntk-iterncgp fit CONFIG' makes one.")
    content, tensors = read_tensors(path, POSTERIOR, POSTERIOR_VERSION, unsigned=1)
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise FileError(f"'{path}' is damaged: its tensor '{name:.60}' holds NaN or infinity. Fit again.")
    try:
        state, about = with_tensors(content["state"], tensors), content["about"]
        if not isinstance(state, dict) or not isinstance(about, dict):
            raise TypeError("no posterior in it")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FileError(f"'{path}' is damaged ({error}). Fit again.") from error
    model_state = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    return state, model_state, about

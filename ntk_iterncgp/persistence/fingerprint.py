"""Fingerprints of settings, models and data: short numbers that change when anything in them does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ntk_iterncgp.data.fixed_order import FixedOrderData, Inputs
from ntk_iterncgp.persistence.checkpoint import CheckpointSession

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDTH = 2**14
_PLAIN = (bool, int, float, str, Tensor)


def digest_rows(*columns: Tensor) -> Tensor:  # (b, …), … -> (b,)
    """Return a number for each row: sums of its bits times odd numbers, modulo 2^64.

    Hence the same in any order and on any device. Any one entry that changes changes it.
    """
    total = torch.zeros(len(columns[0]), dtype=torch.int64, device=columns[0].device)
    for place, column in enumerate(columns):
        flat = column.detach().reshape(len(column), -1)
        flat = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
        bits = flat.contiguous().view(_BITS[flat.element_size()]) if flat.is_floating_point() else flat
        for start in range(0, bits.shape[1], _WIDTH):
            part = bits[:, start : start + _WIDTH].long()
            total += (part * _odd(part.shape[1], place + 1000 * start).to(part.device)).sum(1)
    return total


def digest(tensor: Tensor) -> str:
    """Of one tensor, with its shape."""
    flat = tensor.detach().reshape(-1)
    parts = [int(digest_rows(part[None])) for part in flat.split(2**20)]
    return f"{list(tensor.shape)} {int(digest_rows(torch.tensor(parts or [0])[None])) % 2**64:016x}"


def described(value: Any) -> Any:
    """Return the fingerprint of an object, as JSON.

    Plain values as they are, tensors by their digest, functions by their name, other objects by their class and what
    plain values and tensors they hold.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Tensor):
        return described(value.tolist()) if value.numel() <= 4 else digest(value)
    if isinstance(value, Mapping):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    held = {k: described(v) for k, v in getattr(value, "__dict__", {}).items() if isinstance(v, _PLAIN)}
    return {"class": f"{type(value).__module__}.{type(value).__qualname__}", **held}


@lru_cache(maxsize=128)
def _odd(number: int, seed: int) -> Tensor:  # (number,)
    drawn = torch.randint(-(2**62), 2**62, (number,), generator=torch.Generator().manual_seed(seed))
    return 2 * drawn + 1


def flatten(parameters: Mapping[str, Tensor]) -> Tensor:  # (P,)
    """The weights as one vector."""
    return torch.cat([value.detach().flatten() for value in parameters.values()])


def fingerprint(model: nn.Module) -> Tensor:  # (tensors, 2)
    """Two sums over each parameter and buffer, on the CPU: what a model is, in a few numbers."""
    rows = []
    for value in (*model.parameters(), *model.buffers()):
        flat = value.detach().double().flatten()
        ramp = torch.linspace(1, 2, max(1, len(flat)), dtype=torch.float64, device=flat.device)[: len(flat)]
        rows.append(torch.stack([flat.abs().sum(), flat @ ramp]))
    return torch.stack(rows).cpu()


def same_fingerprint(one: Tensor, other: Tensor) -> bool:
    """Up to the rounding of sums in another order."""
    return one.shape == other.shape and torch.allclose(one, other.to(one), rtol=1e-9, atol=1e-12)


# --- data -------------------------------------------------------------------------------------------------------------


MIXING = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))  # of splitmix64: shifts and odd factors


def batch_digests(data: FixedOrderData, x: Inputs, y: Tensor) -> Tensor:  # (b,)
    """Of the inputs and targets of one batch."""
    rows = data.num_rows(x)
    values = [x[key] for key in sorted(x, key=str)] if isinstance(x, Mapping) else [x]
    columns = [value for value in (*values, y) if isinstance(value, Tensor) and value.ndim and len(value) == rows]
    return digest_rows(*columns).cpu() if columns else torch.zeros(rows, dtype=torch.int64)


def data_digests(data: FixedOrderData) -> Tensor:  # (N,)
    """Of all data: they are read over once."""
    parts = data.each_batch(lambda x, y: (batch_digests(data, x, y).to(data.device),))
    return torch.cat([part.cpu() for (part,) in parts])


def data_fingerprint(digests: Tensor) -> Tensor:  # (N,) -> (1,)
    """One number for a data set: the same in any order, another if any datum or their number is another.

    Digests are linear in the bits of a datum, so what two data exchange would cancel in the sum: they are mixed first.
    """
    mixed = digests
    for shift, factor in MIXING:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)).sum().reshape(1) + len(digests)


def checked_digests(session: CheckpointSession | None, data: FixedOrderData) -> Tensor | None:  # (N,)
    """Of all data, after a check that they are those of what was saved; None where nothing is saved.

    Of a forward sweep that was saved in part, the data it had seen are compared.
    """
    if session is None:
        return None
    found = data_digests(data)
    if session.saved is not None:
        known = session.saved["data"]
        seen = len(known) if "look" in session.saved and isinstance(known, Tensor) else len(found)
        session.check_data(found[:seen])
    return found

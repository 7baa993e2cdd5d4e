"""A number for each training datum, by which a checkpoint knows its data again; read over, but not computed with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ntk_iterncgp.data.fixed_order import FixedOrderData, Inputs
from ntk_iterncgp.persistence.checkpoint import CheckpointSession
from ntk_iterncgp.persistence.fingerprint import digest_rows


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


def checked_digests(session: CheckpointSession, data: FixedOrderData) -> Tensor | None:  # (N,)
    """Of all data, after a check that they are those of what was saved; None where nothing is saved.

    Of a forward sweep that was saved in part, the data it had seen are compared.
    """
    if not session.is_kept:
        return None
    found = data_digests(data)
    if session.saved is not None:
        known = session.saved["data"]
        seen = len(known) if "look" in session.saved and isinstance(known, Tensor) else len(found)
        session.check_data(found[:seen])
    return found

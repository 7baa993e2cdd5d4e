"""A number for each training datum, by which a checkpoint knows its data again, and one for all of them, by which a
posterior does; read over, but not computed with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ntk_iterncgp.data.fixed_order import FixedOrderData, Inputs
from ntk_iterncgp.persistence.checkpoint import CheckpointSession
from ntk_iterncgp.persistence.fingerprint import digest_rows

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

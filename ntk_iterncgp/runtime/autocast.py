"""All products in the precision of their numbers, also where the caller has asked for less."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Without autocast: a variance is a difference of numbers that are nearly the same, and half of their digits, which
    is enough for a forward pass, leaves one that is far too small."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)

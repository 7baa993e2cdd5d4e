"""Does a model compute in float32 inside? Llama's RMSNorm, and that of its relatives, does in any dtype of the model.

Derivatives of such a model in float64 have the digits of float32 alone, and by that much they differ from one way to
compute them to another. Inputs, weights and outputs do not show it; the casts on the way do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Narrowing(TorchDispatchMode):
    """Watches a forward pass for casts from float64 to a narrower floating dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_seen = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute what was asked for."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            to = kwargs.get("dtype") or torch.float64
            self.is_seen |= to.is_floating_point and to.itemsize < torch.float64.itemsize
        return func(*args, **kwargs)

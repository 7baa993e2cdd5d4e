"""A kernel as plain numbers, texts and tensors, and back: what a file holds of it.

    {"kernel": "Sum", "parts": [{"kernel": "RBF", "lengthscale": …, "outputscale": …, "active_dims": …}, …]}

Names are looked up in a fixed table; nothing in a description is called or imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .adapters import FromGPyTorch
from .base import Kernel, Product, Scaled, Sum
from .linear import Constant, Linear
from .stationary import RBF, Matern12, Matern32, Matern52, Periodic, RationalQuadratic

SIMPLE: dict[str, type[Kernel]] = {
    kind.__name__: kind for kind in (RBF, Matern12, Matern32, Matern52, RationalQuadratic, Periodic, Linear, Constant)
}
COMBINED: dict[str, type[Sum] | type[Product]] = {"Sum": Sum, "Product": Product}


def kernel_to_dict(kernel: Kernel) -> dict[str, Any]:
    """Describe a kernel.

    Args:
        kernel: made of kernels of this package; gpytorch's are translated where they can be.

    Returns:
        A tree from which `kernel_from_dict` makes an equal kernel.

    Raises:
        ValueError: for a kernel of your own, or one with a network inside.
    """
    if isinstance(kernel, Scaled):
        return {"kernel": "Scaled", "scale": kernel.scale.detach(), "parts": [kernel_to_dict(kernel.kernel)]}
    if isinstance(kernel, (Sum, Product)):
        return {"kernel": type(kernel).__name__, "parts": [kernel_to_dict(part) for part in kernel.kernels]}
    if isinstance(kernel, FromGPyTorch):
        return kernel_to_dict(kernel.kernel)
    if SIMPLE.get(type(kernel).__name__) is type(kernel):
        settings = {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in kernel.settings().items()}
        return {"kernel": type(kernel).__name__, **settings}
    raise ValueError(
        f"`kernel` must be made of kernels of this package to be described; got {kernel!r}. Try to keep it beside the "
        "file, and to pass it when loading: kernel=..."
    )


def kernel_from_dict(described: Mapping[str, Any]) -> Kernel:
    """Make the kernel that was described.

    Args:
        described: as `kernel_to_dict` returns it.

    Returns:
        An equal kernel.

    Raises:
        ValueError: if it describes none.
    """
    settings = dict(described)
    name, parts = settings.pop("kernel", None), [kernel_from_dict(part) for part in settings.pop("parts", ())]
    if name == "Scaled" and len(parts) == 1 and set(settings) == {"scale"}:
        return Scaled(settings["scale"], parts[0])
    if name in COMBINED and parts and not settings:
        return COMBINED[name](*parts)
    if name in SIMPLE and not parts:
        return SIMPLE[name](**settings)
    raise ValueError(f"it describes no kernel of this package: {name!r:.60}")

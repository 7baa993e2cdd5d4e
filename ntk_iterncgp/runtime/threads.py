"""Two fits in two threads of one process must not disturb each other, also where they share a model.

Putting a model in eval mode and back, or switching a backend of PyTorch, changes something that all threads see: the
first to come sets it, and the last to go puts it back (`together`). A forward pass with exchanged weights puts them
into the model for its duration: fits of one model wait for each other (`exclusively`). And PyTorch's forward mode has
one level of tangents for the whole process, which whoever leaves it clears for all: one at a time (`FORWARD_MODE`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.backends import cuda, mha

T = TypeVar("T")

ATTENTION: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "mem_efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}  # the ways to compute attention, on any device, and their switches

FORWARD_MODE = threading.RLock()

_lock = threading.RLock()
_inside: dict[int, tuple[int, Any]] = {}  # how many are inside, and what to put back
_models: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


@contextmanager
def together(thing: object, enter: Callable[[], T], leave: Callable[[T], object]) -> Iterator[None]:
    """`enter` before the first of all threads comes in, and `leave`, with what it returned, after the last has gone."""
    with _lock:
        users, kept = _inside.get(id(thing), (0, None))
        _inside[id(thing)] = (users + 1, enter() if users == 0 else kept)
    try:
        yield
    finally:
        with _lock:
            users, kept = _inside.pop(id(thing))
            if users == 1:
                leave(kept)
            else:
                _inside[id(thing)] = (users - 1, kept)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, in full precision; each module's own flag comes back afterwards, whatever happens."""

    def enter() -> list[tuple[nn.Module, bool]]:
        flags = [(module, module.training) for module in model.modules()]
        model.eval()
        return flags

    def leave(flags: list[tuple[nn.Module, bool]]) -> None:
        for module, training in flags:
            module.training = training

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with together(model, enter, leave), full_precision(device):
        yield


def exclusively(model: nn.Module) -> threading.RLock:
    """A lock to hold while the weights of a model are exchanged."""
    with _lock:
        return _models.setdefault(model, threading.RLock())


@contextmanager
def plain_attention() -> Iterator[None]:
    """Fused attention kernels have no forward-mode derivative; the plain formula has."""

    def enter() -> tuple[bool, ...]:
        before = (mha.get_fastpath_enabled(), *(enabled() for enabled, _ in ATTENTION.values()))
        mha.set_fastpath_enabled(False)
        for name, (_, enable) in ATTENTION.items():
            enable(name == "math")
        return before

    def leave(before: tuple[bool, ...]) -> None:
        mha.set_fastpath_enabled(before[0])
        for (_, enable), value in zip(ATTENTION.values(), before[1:], strict=True):
            enable(value)

    with together(ATTENTION, enter, leave):  # and not `sdpa_kernel`, which the thread that entered it must leave
        yield


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Turn off autocast.

    A variance is a difference of numbers that are nearly the same, and half of their digits, which is enough for a
    forward pass, leaves one that is far too small.
    """
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)

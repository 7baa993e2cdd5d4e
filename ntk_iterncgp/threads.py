"""Two fits in two threads of one process must not disturb each other, also where they share a model.

Putting a model in eval mode and back, or switching a backend of PyTorch, changes something that all threads see: the
first to come sets it, and the last to go puts it back (`together`). A forward pass with exchanged weights puts them
into the model for its duration: one at a time for each model (`exclusively`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

T = TypeVar("T")

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


def exclusively(model: nn.Module) -> threading.RLock:
    """A lock to hold while the weights of a model are exchanged."""
    with _lock:
        return _models.setdefault(model, threading.RLock())

"""A state as plain tensors and numbers, and back: what a checkpoint of a run by products holds.

Actions, images, the small matrices, Newton's point, counters and the random numbers to come. What a state has computed
and hands on to the next one is saved with it: computed again it might differ in the last bit, and a run that is taken
up again shall end with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.linalg.columns import Buffer, Columns, DenseColumns, Images, KroneckerColumns
from ntk_iterncgp.priors.ntk import NetworkImages
from ntk_iterncgp.solver.position import Position
from ntk_iterncgp.solver.state import Iterate, State
from ntk_iterncgp.solver.stopping import Status

COUNTERS = ("newton_step", "num_products", "num_proposals", "products_left")


def to_content(state: State) -> dict[str, Any]:
    """All that the next states are made of."""
    buffer, iterate = state.buffer, state.iterate
    return {
        "actions": _columns(buffer.actions),
        "images": _images(buffer.images),
        "coefficients": iterate.coefficients,
        "representer_weights": iterate.representer_weights,
        "offset": iterate.offset,
        "anchor_share": iterate.anchor_share,
        "gram": state.gram,
        "noise_gram": state.noise_gram,
        "generator": state.generator.get_state(),
        "counters": {name: getattr(state, name) for name in COUNTERS},
        "products_of_prior": state.problem.prior.num_products,
        "position": None if state.position is None else asdict(state.position),
        "computed": {name: value for name, value in state.__dict__.items() if _is_handed_on(name, value)},
    }


def from_content(saved: Mapping[str, Any], like: State) -> State:
    """The state that was saved; `like` is one of the same problem, in the same formats."""
    problem, device = like.problem, like.gram.device
    actions = _filled(like.buffer.actions, saved["actions"])
    images = _with_images(like.buffer.images, saved["images"])
    B, n = actions.size, problem.num_rows

    def checked(name: str, *shape: int) -> Tensor:
        value = saved[name]
        if not isinstance(value, Tensor) or value.dtype != torch.float64 or value.shape != shape:
            raise ValueError(f"{name} must be a float64 tensor of shape {shape}")
        return _finite(value.to(device), name)

    iterate = Iterate(
        checked("coefficients", B),
        checked("representer_weights", n),
        checked("offset", n),
        float(saved["anchor_share"]),
    )
    position = saved["position"]
    if position is not None:
        status = position["status"]
        position = Position(**{**position, "status": None if status is None else Status(status)})
    like.generator.set_state(saved["generator"])
    problem.prior.num_products = int(saved["products_of_prior"])
    state = replace(
        like,
        iterate=iterate,
        buffer=Buffer(actions, images),
        gram=checked("gram", B, B),
        noise_gram=checked("noise_gram", B, B),
        position=position,
    ).with_counters(**{name: int(saved["counters"][name]) for name in COUNTERS})
    handed_on = {}
    for name, value in saved["computed"].items():
        if not _is_handed_on(name, value):
            raise ValueError(f"{name[:60]!r} is nothing that a state computes")
        if isinstance(value, Tensor):
            anew = getattr(state, name)
            if value.shape != anew.shape or value.dtype != anew.dtype:
                raise ValueError(f"{name} must be {anew.dtype} of shape {tuple(anew.shape)}")
            value = _finite(value.to(device), name)
        handed_on[name] = value
    state = replace(state)  # without what was computed anew
    state.__dict__.update(handed_on)
    return state


def _is_handed_on(name: str, value: Any) -> bool:
    return isinstance(getattr(State, name, None), cached_property) and isinstance(value, (Tensor, float))


def _columns(columns: Columns) -> Tensor:  # (columns, rows)
    """With all rows, however many processes share them."""
    stored = columns.factor.whole()
    return stored.storage[: stored.size]


def _images(images: Images) -> dict[str, Tensor]:
    if isinstance(images, NetworkImages):
        return {"weights": _columns(images.weights), "outputs": _columns(images.outputs)}
    assert isinstance(images, Columns)
    return {"outputs": _columns(images)}


def _with_images(like: Images, saved: Mapping[str, Tensor]) -> Images:
    if isinstance(like, NetworkImages):
        weights, outputs = (_filled(getattr(like, name), saved[name]) for name in ("weights", "outputs"))
        assert isinstance(weights, DenseColumns) and isinstance(outputs, DenseColumns)
        return NetworkImages(weights, outputs)
    assert isinstance(like, Columns)
    return _filled(like, saved["outputs"])


def _filled(like: Columns, saved: Tensor) -> Columns:  # (columns, rows)
    """Columns of the same format and room, with other content; of its rows those of this process."""
    stored = like.factor
    num_rows = stored.num_data * stored.num_outputs
    if not isinstance(saved, Tensor) or saved.ndim != 2 or saved.shape[1] != num_rows:
        raise ValueError(f"columns must have {num_rows} rows")
    if saved.dtype != stored.dtype:
        raise ValueError(f"columns must be {stored.dtype}")
    storage = stored.storage.new_empty(max(len(stored.storage), len(saved)), stored.storage.shape[1])
    storage[: len(saved)] = stored.shard.take(_finite(saved, "columns").T).T
    dense = DenseColumns(storage, len(saved), stored.num_outputs, stored.shard)
    return KroneckerColumns(dense, like.contrasts) if isinstance(like, KroneckerColumns) else dense


def _finite(value: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} holds NaN or infinity")
    return value

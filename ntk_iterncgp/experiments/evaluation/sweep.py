"""One sweep over the inputs that methods are compared at: the rows of J there are computed once, and shown to all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ntk_iterncgp.experiments.evaluation.stopwatch import Stopwatch
from ntk_iterncgp.experiments.progress import Say, reporting, silent
from ntk_iterncgp.jacobian.blocks import Block, Outer, WrittenOut
from ntk_iterncgp.jacobian.layers import LayerRows
from ntk_iterncgp.jacobian.rows import DenseRows, Rows
from ntk_iterncgp.posterior.tuning import ValidationPart
from ntk_iterncgp.runtime.threads import evaluating


def rows_at(
    la: Any,
    loader: DataLoader[Any],
    say: Say = silent,
    *,
    what: str = "Test inputs",
    written_out: bool = False,
    watch: Stopwatch | None = None,
) -> Iterator[tuple[Rows, Tensor]]:
    """The rows of J at all inputs of a loader, in parts that fit in memory, with the targets there.

    Args:
        la: A fitted flavour.
        loader: Pairs of inputs and targets.
        say: Gets reports of progress, where stderr is no terminal.
        what: What these inputs are.
        written_out: With J itself, as `jacobian` (b, C, P), for methods that need it.
        watch: Gets the time that the rows took, as "rows".

    Returns:
        Rows and targets (b, …), part by part.
    """
    watch = watch or Stopwatch()
    total = len(loader.dataset)  # type: ignore[arg-type]
    with reporting(what, say, total=total, unit="inputs") as progress, evaluating(la.model), torch.no_grad():
        for x, y in loader:
            start, parts = 0, iter(la._rows_at(x))
            while True:
                with watch("rows"):
                    rows: Any = next(parts, None)
                    if rows is not None and written_out:
                        rows = with_jacobian(rows)
                if rows is None:
                    break
                size = len(rows.outputs)
                yield rows, y[start : start + size]
                del rows  # so that two parts are never held at once
                progress.advance(size)
                start += size


def with_jacobian(rows: Any) -> Any:
    """The same rows, whose `jacobian` is there and whose products are taken with it: nothing is computed twice.

    A linear layer that each datum passes once keeps its product form, with which products are far cheaper.
    """
    if not isinstance(rows, LayerRows):
        return DenseRows(rows.outputs, rows.jacobian)
    J = rows.jacobian
    views = zip(rows.blocks, J.split(rows.sizes, 2), strict=True)
    blocks: list[Block] = [block if isinstance(block, Outer) else WrittenOut(part) for block, part in views]
    same = LayerRows(rows.outputs, rows.shape[1], blocks, rows.sizes)
    same.jacobian = J
    return same


def validation_parts(la: Any, loader: DataLoader[Any], say: Say, what: str) -> list[ValidationPart]:
    """Inputs as `la` sees them at unit prior precision: what every precision is then computed from."""
    shift = la.mean - la.prior_mean
    rows = rows_at(la, loader, say, what=what)
    return [ValidationPart.of(part, la.posterior, shift, y.to(la._device)) for part, y in rows]

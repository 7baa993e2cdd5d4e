"""What a fit reports: a history, one record after each block of actions or pass over the data, and how it ended.

Or, where the self-check finds that the posterior contradicts itself, an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Record:
    """One line of the history: after a block of actions, or after a Newton step."""

    num_products: int
    newton_step: int
    rank: int
    objective: float
    relative_residual: float
    information_captured: float
    seconds: float
    epochs: float | None = None  # of a network: sweeps over its data, in forward+backward passes


@dataclass(frozen=True)
class FitReport:
    """How a fit ended, what it cost and how much it used of what the data say.

    `status` speaks of the mean. How far the variance is, `variance_ratio` says: at most so many times that of the exact
    posterior it is, on average over the training inputs (weighted by W). None: not known.
    """

    status: str
    advice: str
    num_products: int
    num_newton_steps: int
    rank: int
    information_captured: float
    seconds: float
    history: list[Record] = field(repr=False)
    epochs: float | None = None
    trace_is_exact: bool = True  # or else tr(W K) was estimated, and with it the information captured
    products_by: str = ""  # how products with an explicit kernel were computed, and why
    variance_ratio: float | None = None

    def __str__(self) -> str:
        costs = [] if self.epochs is None else [f"{self.epochs:.1f} epochs"]
        if self.num_products:
            costs.append(f"{self.num_products} products")
        if self.num_products or self.num_newton_steps:
            costs.append(f"{self.num_newton_steps} Newton step{'s' * (self.num_newton_steps != 1)}")
        least, most = ("at least", "at most") if self.trace_is_exact else ("an estimated", "an estimated")
        variance = "" if self.variance_ratio is None else f", {most} {self.variance_ratio:.3g} times the exact variance"
        products = f", {'products ' if self.num_products else ''}by {self.products_by}" if self.products_by else ""
        known = f"{least} {100 * self.information_captured:.1f} % of the information captured{variance}"
        if self.status == "exact" and self.information_captured > 1 - 1e-6:
            known = "all of the information captured"
        return (
            f"{self.status}: {', '.join(costs)}, rank {self.rank}, {known}, {self.seconds:.1f} s{products}. "
            f"{self.advice}"
        )


def to_table(history: Sequence[Record]) -> Tensor:  # (records, 8)
    """The history in float64, which holds all of its numbers; NaN stands for no epochs."""
    rows = [[math.nan if value is None else float(value) for value in astuple(record)] for record in history]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(fields(Record)))


def from_table(table: Tensor) -> list[Record]:
    """The history again."""
    names = [f.name for f in fields(Record)]
    if not isinstance(table, Tensor) or table.dtype != torch.float64 or table.shape != (len(table), len(names)):
        raise ValueError("a history must have a column for each of its numbers, in float64")
    if not bool(torch.isfinite(table[:, :3]).all()):
        raise ValueError("a history must count in whole numbers")

    def record(values: list[float]) -> Record:
        row: dict[str, Any] = dict(zip(names, values, strict=True))
        row |= {name: int(row[name]) for name in ("num_products", "newton_step", "rank")}
        return Record(**row | {"epochs": None if math.isnan(row["epochs"]) else row["epochs"]})

    return [record(values) for values in table.tolist()]


# --- a posterior that is not handed out ---

ROWS = 64  # of K
MIN_DATA = 8
ELSEWHERE = "the same in all processes, but another one has found something wrong"


class SelfCheckError(RuntimeError):
    """A posterior that contradicts itself; it was not handed out."""


def refusal(problems: Iterable[str]) -> str:
    """What to say of a posterior that is not handed out; a problem that names its own remedy is the message."""
    problems = list(problems)
    named = [problem for problem in problems if problem.endswith(".")]
    if named:
        return named[0]
    return (
        f"The self-check expected {'; and '.join(problems)}. This posterior is not to be trusted, and was not kept. "
        "See that data, kernel and model stay as they are while a fit runs and that products have their full "
        "precision, then fit again."
    )

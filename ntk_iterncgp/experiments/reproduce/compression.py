"""What is left of a belief that is recycled at rank R: m₁,₀ and K₁,₀ at the start of the second Newton step.

The first step is solved by conjugate gradients to convergence; then its actions are compressed by the paper's criterion
(top eigenvectors of M) and by this library's ("mean+trace").
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from matplotlib.figure import Figure
from torch import Tensor

from ntk_iterncgp.experiments.reproduce.beliefs import in_between, start
from ntk_iterncgp.experiments.reproduce.binary import BinaryData, draw, plane
from ntk_iterncgp.experiments.reproduce.outcome import Claim, Outcome
from ntk_iterncgp.experiments.reproduce.papers import papers_newton
from ntk_iterncgp.experiments.reproduce.settings import Settings
from ntk_iterncgp.experiments.reproduce.style import (
    BLACK,
    MEAN,
    METHODS,
    VARIANCE,
    new_figure,
    scatter_classes,
    show_map,
    style,
)
from ntk_iterncgp.posterior.function_space import Posterior
from ntk_iterncgp.solver import State, Stopping, virtual_solver_run


@dataclass(frozen=True)
class CompressionSettings(Settings):
    """As the paper: R ∈ {0, 1, 3, 10}."""

    QUICK: ClassVar[dict[str, Any]] = {"resolution": 30}
    num_data: int = 100
    outputscale: float = 10.0
    ranks: tuple[int, ...] = (1, 3, 10)  # 0 is the prior
    residual_tol: float = 1e-5
    resolution: int = 60


SETTINGS = CompressionSettings
CRITERIA = {"eigen": "paper", "mean+trace": "ours", 'the library\'s "eigen"': "unit"}  # and whose colour each has


def run(settings: CompressionSettings) -> Outcome:
    """Run the experiment: its table, figures and claims."""
    data = draw(settings.num_data, 2, settings.outputscale, settings.seed)
    stopping = Stopping(settings.num_data, settings.num_data, 1, newton_tol=0.0, residual_tol=settings.residual_tol)
    solved = list(papers_newton(start(data.problem, stopping), stopping, None))[-2]  # the Newton step not yet taken
    full = _recycled(data, settings, stopping, solved, "eigen", None)
    beliefs: dict[str, dict[int, Posterior]] = {
        criterion: {
            0: Posterior(start(data.problem, stopping)),
            **{rank: _recycled(data, settings, stopping, solved, criterion, rank) for rank in settings.ranks},
        }
        for criterion in CRITERIA
    }
    rows = [
        {"criterion": criterion, "rank": rank} | _distance(belief, full, data, settings)
        for criterion, of_rank in beliefs.items()
        for rank, belief in of_rank.items()
    ]
    with style():
        figure = _figure(settings, data, beliefs, full, solved.buffer.size)
    return Outcome({"compression": figure}, {"compression": rows}, _claims(rows, solved.buffer.size))


def _recycled(
    data: BinaryData, settings: CompressionSettings, stopping: Stopping, solved: State, criterion: str, rank: int | None
) -> Posterior:
    """The belief at the start of the second Newton step."""
    if criterion == "eigen":
        *_, state = papers_newton(start(data.problem, stopping), stopping, rank)
        return in_between(state)
    compression = "mean+trace" if criterion == "mean+trace" else "eigen"
    state = virtual_solver_run(solved, solved.solution, max_rank=rank, compression=compression)
    return in_between(state)


def _distance(belief: Posterior, full: Posterior, data: BinaryData, settings: CompressionSettings) -> dict[str, float]:
    """At the training inputs, from the belief without compression; as fractions of what recycling brings."""
    mean, covariance = belief.latent(data.inputs)
    best_mean, best = full.latent(data.inputs)
    prior = settings.outputscale * len(data.inputs)
    return {
        "mean_error": float((mean - best_mean).norm() / best_mean.norm()),
        "variance_excess": float((covariance.sum() - best.sum()) / (prior - best.sum())),
    }


def _claims(rows: list[dict[str, Any]], size: int) -> list[Claim]:
    claims = []
    for criterion in CRITERIA:
        chosen = [row for row in rows if row["criterion"] == criterion]
        falls = all(b["variance_excess"] <= a["variance_excess"] + 1e-9 for a, b in pairwise(chosen))
        closer = all(b["mean_error"] <= a["mean_error"] + 1e-9 for a, b in pairwise(chosen))
        numbers = "; ".join(
            f"R = {r['rank']}: mean off {100 * r['mean_error']:.3g} %, variance {100 * r['variance_excess']:.3g} %"
            for r in chosen
        )
        sentence = f"the larger the rank, the more expressive the belief: {criterion}, from {size} actions"
        claims.append(Claim(sentence, falls and closer, numbers))
    last = {row["criterion"]: row["variance_excess"] for row in rows if row["rank"] == max(r["rank"] for r in rows)}
    better = Claim(
        "ours: at the largest rank mean+trace leaves no more variance than the paper's criterion",
        last["mean+trace"] <= last["eigen"],
        ", ".join(f"{criterion} {100 * value:.3g} %" for criterion, value in last.items()),
    )
    return [*claims, better]


def _figure(
    settings: CompressionSettings,
    data: BinaryData,
    beliefs: dict[str, dict[int, Posterior]],
    full: Posterior,
    size: int,
) -> Figure:
    points, extent = plane(settings.resolution)
    shown = [criterion for criterion in CRITERIA if "library" not in criterion]
    limit = float(full.latent(data.inputs)[0].abs().max())
    figure = new_figure(3.5)
    columns = [0, *settings.ranks]
    grid = figure.subplots(2 * len(shown), len(columns) + 1, squeeze=False)
    for row, (what, criterion) in enumerate([(w, c) for w in ("mean", "variance") for c in shown]):
        colours, limits = (MEAN, (-limit, limit)) if what == "mean" else (VARIANCE, (0.0, settings.outputscale))
        images = []
        for column, belief in enumerate([*(beliefs[criterion][rank] for rank in columns), full]):
            axes = grid[row, column]
            mean, covariance = belief.latent(points)
            values: Tensor = mean[:, 0] if what == "mean" else covariance[:, 0, 0]
            images.append(show_map(axes, values, extent, colours, limits))
            if what == "mean" and column > 0:
                side = settings.resolution
                lines = values.reshape(side, side).numpy()
                axes.contour(lines, [0.0], extent=extent, colors=BLACK, linewidths=0.5, linestyles="--")
            scatter_classes(axes, data.inputs, data.labels, size=3.0)
            if row == 0:
                axes.set_title(f"R = {columns[column]}" if column < len(columns) else f"all {size} actions")
        figure.colorbar(images[0], ax=grid[row, :], shrink=0.9, aspect=12, pad=0.01)
        name = {"eigen": "paper", "mean+trace": "ours"}[criterion]
        grid[row, 0].set_ylabel(f"{what}\n{name}", fontsize=7, color=METHODS[CRITERIA[criterion]][0])
    return figure

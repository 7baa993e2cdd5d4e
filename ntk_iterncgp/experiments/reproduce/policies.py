"""Which data the first iterations look at: unit vectors, the residual, and the residual seen through the curvature.

Maps of mean and variance in the first Newton step after 1, 10 and 19 iterations; data are sized by their weight in the
action. In that step W = ¼ everywhere, so that both residuals choose the same actions; at the mode W differs from datum
to datum, and so do they. The curves show both linear systems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from torch import Tensor

from ntk_iterncgp.experiments.reproduce.beliefs import in_between, start
from ntk_iterncgp.experiments.reproduce.binary import BinaryData, draw, plane
from ntk_iterncgp.experiments.reproduce.outcome import Claim, Outcome
from ntk_iterncgp.experiments.reproduce.settings import Settings
from ntk_iterncgp.experiments.reproduce.style import (
    BLACK,
    MEAN,
    METHODS,
    PAGE,
    VARIANCE,
    new_figure,
    scatter_classes,
    show_map,
    style,
)
from ntk_iterncgp.experiments.settings import ConfigError
from ntk_iterncgp.solver import Iterate, NewtonOptions, State, Stopping, newton, resolve_policy
from ntk_iterncgp.solver.inner import inner_loop

POLICIES = {"unit": "unit", "residual": "paper", "curvature_residual": "ours"}  # and whose colour each has
LABELS = {"unit": "unit\n(Cholesky)", "residual": "residual\n(CG)", "curvature_residual": "curvature\nresidual"}


@dataclass(frozen=True)
class PoliciesSettings(Settings):
    """As the paper: j ∈ {1, 10, 19}."""

    QUICK: ClassVar[dict[str, Any]] = {"resolution": 30}
    num_data: int = 100
    outputscale: float = 10.0
    iterations: tuple[int, ...] = (1, 10, 19)
    max_iterations: int = 60  # of the curves
    resolution: int = 60  # of the maps


SETTINGS = PoliciesSettings


@dataclass(frozen=True, eq=False)
class Walk:
    """One policy in one linear system: the states after 0, 1, 2, … actions."""

    states: list[State]

    def after(self, j: int) -> State:
        """The state after j actions; the last one where there was nothing left to look at."""
        return self.states[min(j, len(self.states) - 1)]

    def before(self, j: int) -> State:
        """The state that the j-th action was chosen in."""
        return self.states[min(j, len(self.states) - 1) - 1]


def run(settings: PoliciesSettings) -> Outcome:
    """Run the experiment: its table, figures and claims."""
    if max(settings.iterations) > settings.num_data:
        raise ConfigError(
            f"iterations must be at most the number of data, {settings.num_data}; got "
            f"{max(settings.iterations)}. Try a larger num_data."
        )
    data = draw(settings.num_data, 2, settings.outputscale, settings.seed)
    stopping = Stopping(settings.num_data, settings.num_data, 50, newton_tol=1e-10)
    first = start(data.problem, stopping)
    *_, mode = newton(first, resolve_policy("unit"), stopping, NewtonOptions())
    points = {"first": first.iterate, "mode": mode.iterate}
    walks = {(name, p): _walk(data, point, p, stopping) for name, point in points.items() for p in POLICIES}
    rows = [
        row for (name, p), walk in walks.items() for row in _errors(name, p, walk, walks[name, "unit"], data, settings)
    ]
    figures = {}
    with style():
        mean_limit = float(walks["first", "unit"].states[-1].solution.offset.abs().max())
        for name, what, colours, limits in (
            ("policies_mean", _mean, MEAN, (-mean_limit, mean_limit)),
            ("policies_variance", _variance, VARIANCE, (0.0, settings.outputscale)),
        ):
            figures[name] = _maps(settings, data, walks, what, colours, limits)
        figures["policies_curves"] = _curves(rows)
    return Outcome(figures, {"policies": rows}, _claims(settings, rows))


def _walk(data: BinaryData, point: Iterate, policy: str, stopping: Stopping) -> Walk:
    """Solve the linear system at `point` from nothing. A state of its own for each: extensions share storage."""
    state = start(data.problem, stopping)
    state = state.linearise(replace(point, coefficients=state.iterate.coefficients))
    run = inner_loop(state, resolve_policy(policy), max_products=stopping.max_products, residual_tol=0.0)
    return Walk([state, *run])


def _errors(
    name: str, policy: str, walk: Walk, exact: Walk, data: BinaryData, settings: PoliciesSettings
) -> list[dict[str, Any]]:
    """Distance of mean and total variance at the training inputs from the exact ones, as fractions of what there is."""
    points = data.inputs
    best_mean, best = in_between(exact.states[-1]).latent(points)
    prior = settings.outputscale * len(points)
    rows = []
    for j in range(min(max(settings.max_iterations, *settings.iterations) + 1, len(walk.states))):
        mean, covariance = in_between(walk.states[j]).latent(points)
        excess = float((covariance.sum() - best.sum()) / (prior - best.sum()))
        error = float((mean - best_mean).norm() / best_mean.norm())
        rows.append({"system": name, "policy": policy, "j": j, "mean_error": error, "variance_excess": excess})
    return rows


def _claims(settings: PoliciesSettings, rows: list[dict[str, Any]]) -> list[Claim]:
    j = settings.iterations[-1]

    def at(system: str, policy: str, key: str) -> float:
        """After j iterations, or fewer where the linear system was solved before."""
        chosen = [r for r in rows if (r["system"], r["policy"]) == (system, policy) and r["j"] <= j]
        return float(chosen[-1][key])

    def numbers(system: str, key: str) -> str:
        return ", ".join(f"{p} {100 * at(system, p, key):.2g} %" for p in POLICIES)

    return [
        Claim(
            f"CG targets the data globally: after {j} iterations its mean is closer than that of unit vectors",
            at("first", "residual", "mean_error") < at("first", "unit", "mean_error"),
            f"error of the mean: {numbers('first', 'mean_error')}",
        ),
        Claim(
            f"and so is its variance after {j} iterations",
            at("first", "residual", "variance_excess") < at("first", "unit", "variance_excess"),
            f"variance left that exact inference removes: {numbers('first', 'variance_excess')}",
        ),
        Claim(
            f"ours: at the mode the curvature residual leaves less variance after {j} iterations than the residual",
            at("mode", "curvature_residual", "variance_excess") < at("mode", "residual", "variance_excess"),
            f"{numbers('mode', 'variance_excess')}; error of the mean: {numbers('mode', 'mean_error')}",
        ),
    ]


def _mean(state: State, points: Tensor) -> Tensor:
    return in_between(state).latent(points)[0][:, 0]


def _variance(state: State, points: Tensor) -> Tensor:
    return in_between(state).latent(points)[1][:, 0, 0]


def _maps(
    settings: PoliciesSettings,
    data: BinaryData,
    walks: dict[tuple[str, str], Walk],
    what: Callable[[State, Tensor], Tensor],
    colours: Colormap,
    limits: tuple[float, float],
) -> Figure:
    figure = new_figure(3.0)
    halves = figure.add_gridspec(1, 2, width_ratios=[1, 3])
    left, right = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])
    points, extent = plane(settings.resolution)
    axes = left.subplots()
    image = show_map(axes, what(walks["first", "unit"].states[-1], points), extent, colours, limits)
    scatter_classes(axes, data.inputs, data.labels, size=7.0)
    axes.set_title("exact, first Newton step")
    left.colorbar(image, ax=axes, location="bottom", shrink=0.9, aspect=20).set_label(
        "mean" if what is _mean else "variance", fontsize=7
    )
    grid = right.subplots(len(POLICIES), len(settings.iterations), squeeze=False)
    for row, policy in enumerate(POLICIES):
        walk = walks["first", policy]
        for column, j in enumerate(settings.iterations):
            axes = grid[row, column]
            values = what(walk.after(j), points)
            show_map(axes, values, extent, colours, limits)
            if what is _mean:
                side = settings.resolution
                axes.contour(
                    values.reshape(side, side).numpy(),
                    [0.0],
                    extent=extent,
                    colors=BLACK,
                    linewidths=0.5,
                    linestyles="--",
                )
            weight = np.abs(resolve_policy(policy)(walk.before(j))[:, 0].numpy())
            spread = weight.max() - weight.min()
            weight = (weight - weight.min()) / spread if spread > 1e-9 else np.ones_like(weight)
            scatter_classes(axes, data.inputs, data.labels, size=18.0 * weight)
            if policy == "unit" and j > 1:
                used = data.inputs[: j - 1].numpy()
                axes.scatter(
                    used[:, 0], used[:, 1], s=6, facecolors="none", edgecolors="white", linewidths=0.7, zorder=2
                )
            if row == 0:
                axes.set_title(f"j = {j}")
        grid[row, 0].set_ylabel(LABELS[policy], fontsize=7, color=METHODS[POLICIES[policy]][0])
    return figure


def _curves(rows: list[dict[str, Any]]) -> Figure:
    figure = new_figure(1.9, PAGE)
    panels = figure.subplots(1, 4, sharey=True)
    titles = {"first": "first step", "mode": "at the mode"}
    kinds = {"mean_error": "error of mean", "variance_excess": "excess variance"}
    for axes, (system, key) in zip(panels, [(s, k) for s in titles for k in kinds], strict=True):
        for policy, method in POLICIES.items():
            chosen = [row for row in rows if row["system"] == system and row["policy"] == policy]
            dashes = "--" if policy == "curvature_residual" and system == "first" else "-"
            values = [max(row[key], 1e-6) for row in chosen]
            axes.plot([row["j"] for row in chosen], values, dashes, color=METHODS[method][0], label=policy)
        axes.set(yscale="log", xlabel="iterations j", ylim=(1e-4, 1.5))
        axes.set_title(f"{kinds[key]}, {titles[system]}", fontsize=7)
    panels[0].set_ylabel("fraction")
    panels[-1].legend(loc="lower left", fontsize=6.5)
    return figure

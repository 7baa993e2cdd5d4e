"""Newton's method as a sequence of GP regressions: pseudo-targets, their noise, and the posterior of each step.

Precise Newton steps, by unit vectors for all data: at f_i the Laplace approximation is GP regression on ŷ = f + W⁻¹∇
with noise W⁻¹.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from ntk_iterncgp.experiments.reproduce.beliefs import in_between, start
from ntk_iterncgp.experiments.reproduce.binary import HIGH, LOW, BinaryData, draw
from ntk_iterncgp.experiments.reproduce.outcome import Claim, Outcome
from ntk_iterncgp.experiments.reproduce.settings import Settings
from ntk_iterncgp.experiments.reproduce.style import BLACK, CLASSES, GREY, new_figure, style
from ntk_iterncgp.gp.non_conjugate import NonConjugateGP
from ntk_iterncgp.likelihoods import Bernoulli
from ntk_iterncgp.solver import NewtonOptions, State, Stopping, newton, resolve_policy


@dataclass(frozen=True)
class PseudoTargetsSettings(Settings):
    """As the paper: N = 50 inputs in [−3, 5]."""

    QUICK: ClassVar[dict[str, Any]] = {"resolution": 80}
    num_data: int = 50
    outputscale: float = 5.0
    num_newton_steps: int = 4
    resolution: int = 300  # of the curves


SETTINGS = PseudoTargetsSettings


@dataclass(frozen=True, eq=False)
class Regression:
    """One Newton step as a regression problem and its posterior on the grid."""

    targets: Tensor  # ŷ (N,)
    noise: Tensor  # W⁻¹ (N,)
    mean: Tensor
    deviation: Tensor


def run(settings: PseudoTargetsSettings) -> Outcome:
    """Run the experiment: its table, figures and claims."""
    data = draw(settings.num_data, 1, settings.outputscale, settings.seed)
    grid = torch.linspace(LOW[0] - 1, HIGH[0] + 1, settings.resolution, dtype=torch.float64)
    steps = [_regression(state, grid) for state in _precise_newton(settings, data)]
    changes = [float((b.mean - a.mean).norm() / b.mean.norm()) for a, b in pairwise(steps)]
    rows = [
        {"i": i, "largest_noise": float(step.noise.max()), "change_of_mean": changes[i - 1] if i else float("nan")}
        for i, step in enumerate(steps)
    ]
    gp = NonConjugateGP(
        data.kernel,
        Bernoulli(),
        policy="curvature_residual",
        max_products=settings.num_data,
        products_per_step=10,
        newton_tol=1e-6,
    )
    mean, covariance = gp.fit(data.inputs, data.labels).latent(grid[:, None])
    difference = float((mean[:, 0] - steps[-1].mean).norm() / steps[-1].mean.norm())
    deviation = float((covariance[:, 0, 0].sqrt() / steps[-1].deviation - 1).abs().max())
    falling = all(later < earlier for earlier, later in pairwise(changes))
    numbers = ", ".join(f"{100 * change:.2g} %" for change in changes)
    claims = [
        Claim(
            "posteriors are similar between Newton steps", changes[-1] < 0.05 and falling, f"mean moves by {numbers}"
        ),
        Claim(
            "our default ends at the same posterior",
            difference < 0.01 and deviation < 0.01,
            f"mean differs by {difference:.1e}, deviation by {deviation:.1e}, {gp.report_.num_products} products",
        ),
    ]
    with style():
        figure = new_figure(2.1)
        panels = figure.subplots(1, len(steps), sharey=True)
        for i, (axes, step) in enumerate(zip(panels, steps, strict=True)):
            _draw(axes, step, data, grid)
            axes.set_title(f"Newton step i = {i}")
        panels[0].set_ylabel("latent function")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Outcome({"pseudo_targets": figure}, {"pseudo_targets": rows}, claims)


def _precise_newton(settings: PseudoTargetsSettings, data: BinaryData) -> list[State]:
    """The state of each step with all unit vectors taken."""
    stopping = Stopping(settings.num_data, settings.num_data, settings.num_newton_steps, 0.0, residual_tol=0.0)
    first = start(data.problem, stopping)
    states = newton(first, resolve_policy("unit"), stopping, NewtonOptions(damped=False))
    last = {state.newton_step: state for state in states}
    return [last[i] for i in range(len(last) - 1)]  # the last one begins a step that is not taken


def _regression(state: State, grid: Tensor) -> Regression:  # (resolution,)
    noise = state.problem.likelihood.noise_diagonal(state.latent)
    assert noise is not None
    mean, covariance = in_between(state).latent(grid[:, None])
    return Regression(state.right_hand_side, noise.flatten(), mean[:, 0], covariance[:, 0, 0].sqrt())


def _draw(axes: Axes, step: Regression, data: BinaryData, grid: Tensor) -> None:
    x, mean, deviation = grid.numpy(), step.mean.numpy(), step.deviation.numpy()
    axes.fill_between(x, mean - 2 * deviation, mean + 2 * deviation, color=GREY, alpha=0.25, linewidth=0)
    axes.plot(x, mean, color=BLACK, linewidth=1.0, label="posterior, ± 2 sd")
    order = data.inputs[:, 0].argsort()
    axes.plot(data.inputs[order, 0].numpy(), data.latent[order].numpy(), ":", color=BLACK, linewidth=0.9, label="truth")
    for label, colour in enumerate(CLASSES):
        chosen = (data.labels == label).numpy()
        spread = np.sqrt(step.noise.numpy()[chosen])
        place, target = data.inputs[chosen, 0].numpy(), step.targets.numpy()[chosen]
        axes.errorbar(
            place, target, spread, fmt="o", ms=2, color=colour, elinewidth=0.4, alpha=0.9, label=f"ŷ, class {label}"
        )
    axes.set(xlabel="x", xlim=(x[0], x[-1]), ylim=(-8.5, 6.5))

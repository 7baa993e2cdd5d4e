"""The paper's first figure: the variance of the latent function on the way, and the test NLL over time.

Three rows: unit vectors without recycling (a subset of the data, each Newton step from scratch), the paper's conjugate
gradients with recycling and rank 10, and this library's default with the same rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from matplotlib.figure import Figure

from ntk_iterncgp.experiments.reproduce.beliefs import (
    Belief,
    Moment,
    Run,
    if_stopped,
    in_between,
    moments,
    ours,
    start,
    without_recycling,
)
from ntk_iterncgp.experiments.reproduce.binary import BinaryData, draw, plane, probit_nll
from ntk_iterncgp.experiments.reproduce.outcome import Claim, Outcome
from ntk_iterncgp.experiments.reproduce.papers import papers_newton
from ntk_iterncgp.experiments.reproduce.settings import Settings
from ntk_iterncgp.experiments.reproduce.style import (
    GREY,
    METHODS,
    VARIANCE,
    new_figure,
    scatter_classes,
    show_map,
    style,
)
from ntk_iterncgp.experiments.settings import ConfigError
from ntk_iterncgp.solver import Problem, Stopping


@dataclass(frozen=True)
class VisualAbstractSettings(Settings):
    """The paper gives N, the kernel and R; it shows but does not state the iterations per Newton step."""

    QUICK: ClassVar[dict[str, Any]] = {"num_repeats": 1, "resolution": 30}
    num_data: int = 100
    outputscale: float = 20.0
    max_rank: int = 10
    iterations_per_step: int = 10
    num_newton_steps: int = 3
    resolution: int = 60  # of the maps
    num_repeats: int = 5  # of the timing; the fastest counts


SETTINGS = VisualAbstractSettings


@dataclass(frozen=True, eq=False)
class Variant:
    """A method: how to run it, what its belief is on the way, and whether it has a row of maps or a curve alone."""

    name: str
    label: str
    moments: Callable[[], Iterator[Moment]]
    belief: Belief
    has_maps: bool = True


def run(settings: VisualAbstractSettings) -> Outcome:
    """Run the experiment: its table, figures and claims."""
    if settings.iterations_per_step > settings.num_data:
        raise ConfigError(
            f"iterations_per_step must be at most the number of data, {settings.num_data}; got "
            f"{settings.iterations_per_step}. Try a larger num_data."
        )
    data = draw(settings.num_data, 2, settings.outputscale, settings.seed)
    variants = _variants(settings, data)
    curves = {variant.name: _curve(variant, data, settings) for variant in variants}
    with style():
        figure = _figure(settings, data, variants, curves)
    rows = [{"method": name} | row for name, curve in curves.items() for row in curve]
    return Outcome({"visual_abstract": figure}, {"visual_abstract": rows}, _claims(curves, settings.max_rank))


def _variants(settings: VisualAbstractSettings, data: BinaryData) -> list[Variant]:
    steps, j, rank = settings.num_newton_steps, settings.iterations_per_step, settings.max_rank
    stopping = Stopping(steps * j, j, steps, newton_tol=0.0, residual_tol=0.0)

    def timed(run: Callable[[Problem], Run]) -> Callable[[], Iterator[Moment]]:
        def fresh() -> Iterator[Moment]:
            problem = data.problem
            return moments(run(problem), start(problem, stopping))

        return fresh

    def papers(max_rank: int | None) -> Callable[[], Iterator[Moment]]:
        return timed(lambda problem: papers_newton(start(problem, stopping), stopping, max_rank))

    unit = timed(lambda problem: without_recycling(problem, "unit", stopping))
    default = timed(lambda problem: ours(problem, stopping, rank))
    return [
        Variant("unit", "unit vectors\nfrom scratch", unit, in_between),
        Variant("paper", "CG, recycled\nR = ∞", papers(None), in_between, has_maps=False),
        Variant("paper, compressed", f"CG, recycled\nR = {rank}", papers(rank), in_between),
        Variant("ours", f"ours, recycled\nR = {rank}", default, if_stopped),
    ]


def _curve(variant: Variant, data: BinaryData, settings: VisualAbstractSettings) -> list[dict[str, Any]]:
    """Test NLL after each iteration; the clock of the fastest repetition of each."""
    rows = []
    for moment in variant.moments():
        if moment.newton_step < settings.num_newton_steps:  # the last step's outcome starts a step that is not taken
            mean, covariance = variant.belief(moment.state).latent(data.test_inputs)
            nll = probit_nll(mean[:, 0], covariance[:, 0, 0], data.test_labels)
            variance = float(covariance.mean())
            rows.append({"i": moment.newton_step, "j": moment.iteration, "test_nll": nll, "mean_variance": variance})
    clocks = [[m.seconds for m in variant.moments()] for _ in range(settings.num_repeats)]
    steps = [min(b - a for a, b in each) for each in zip(*(list(pairwise(clock)) for clock in clocks), strict=True)]
    for row, seconds in zip(rows, accumulate(steps, initial=0.0), strict=False):
        row["seconds"] = seconds
    return rows


def _claims(curves: dict[str, list[dict[str, Any]]], rank: int) -> list[Claim]:
    claims = []
    labels = {"paper": "CG, R = ∞", "paper, compressed": f"CG, R = {rank}", "ours": f"our default, R = {rank}"}
    for name, label in labels.items():
        worst = max(_jumps(curves[name]))
        sentence = f"recycling propagates the belief between Newton steps without performance drops: {label}"
        claims.append(Claim(sentence, worst < 1.02, f"largest ratio of test NLL after and before: {worst:.3f}"))
    jump = min(_jumps(curves["unit"]))
    claims.append(Claim("without recycling performance drops", jump > 1.02, f"smallest ratio: {jump:.3f}"))
    last = {name: curve[-1]["test_nll"] for name, curve in curves.items()}
    numbers = ", ".join(f"{name} {value:.3f}" for name, value in last.items())
    better = last["paper, compressed"] < last["unit"]
    claims.append(Claim("CG with recycling ends below unit vectors in test NLL", better, numbers))
    return claims


def _jumps(curve: list[dict[str, Any]]) -> list[float]:
    """NLL at the start of a Newton step over NLL at the end of the step before."""
    return [after["test_nll"] / before["test_nll"] for before, after in pairwise(curve) if after["i"] > before["i"]]


def _figure(
    settings: VisualAbstractSettings, data: BinaryData, variants: list[Variant], curves: dict[str, list[dict[str, Any]]]
) -> Figure:
    j = settings.iterations_per_step
    shown = [(0, 1), (0, j), (1, 0), (1, j), (settings.num_newton_steps - 1, j)]
    rows = [variant for variant in variants if variant.has_maps]
    figure = new_figure(2.7)
    halves = figure.add_gridspec(1, 2, width_ratios=[2.6, 1])
    maps, right = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])
    grid = maps.subplots(len(rows), len(shown), squeeze=False)
    points, extent = plane(settings.resolution)
    for row, variant in enumerate(rows):
        states = {(m.newton_step, m.iteration): m.state for m in variant.moments()}
        for column, key in enumerate(shown):
            axes = grid[row, column]
            reached = max(moment for moment in states if moment <= key)  # a step may be solved before its end
            variance = variant.belief(states[reached]).latent(points)[1][:, 0, 0]
            image = show_map(axes, variance, extent, VARIANCE, limits=(0.0, settings.outputscale))
            scatter_classes(axes, data.inputs, data.labels, size=3.0)
            if row == 0:
                axes.set_title(f"i = {key[0]}, j = {key[1]}")
        grid[row, 0].set_ylabel(variant.label, fontsize=6.5, color=METHODS[variant.name][0])
    bar = maps.colorbar(image, ax=grid, location="bottom", shrink=0.5, aspect=40, pad=0.02)
    bar.set_label("variance of the latent function", fontsize=7)
    axes = right.subplots()
    for variant in variants:
        colour, dashes = METHODS[variant.name]
        curve = curves[variant.name]
        milliseconds = [1e3 * row["seconds"] for row in curve]
        axes.plot(
            milliseconds,
            [row["test_nll"] for row in curve],
            dashes,
            color=colour,
            label=variant.label.replace("\n", ", "),
        )
        starts = [k for k, row in enumerate(curve) if row["j"] == 0 and row["i"] > 0]
        axes.plot([milliseconds[k] for k in starts], [curve[k]["test_nll"] for k in starts], "o", ms=2.5, color=colour)
    axes.axhline(0.6931, color=GREY, linewidth=0.6, linestyle=":")
    axes.set(xlabel="milliseconds", ylabel="test NLL (nats)")
    axes.set_title("● a new Newton step", fontsize=7)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22))
    return figure

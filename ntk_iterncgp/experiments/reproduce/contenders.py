"""Who races: IterNCGP as the paper lists it, this library as it comes, subsets of the data, and a grid of SVGPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ntk_iterncgp.experiments.reproduce import svgp
from ntk_iterncgp.experiments.reproduce.beliefs import if_stopped, in_between, make_problem, start
from ntk_iterncgp.experiments.reproduce.papers import papers_newton
from ntk_iterncgp.experiments.reproduce.race import Classes, Clock, marginals
from ntk_iterncgp.gp.non_conjugate import NonConjugateGP
from ntk_iterncgp.kernels import Matern32
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.solver import State, Status, Stopping

Grid = list[tuple[int, float]]  # inducing points and learning rate
HEAT = 1 / 8


def papers(classes: Classes, kernel: Matern32, stopping: Stopping, max_rank: int | None, group: str) -> Clock:
    """Conjugate gradients as the paper lists them, scored after each iteration and each Newton step."""
    clock = Clock(f"paper, j ≤ {stopping.products_per_step}, R = {max_rank or '∞'}", group, classes)
    problem = make_problem(kernel, Softmax(classes.num_classes), classes.train_inputs, classes.train_labels)
    with torch.no_grad():
        for state in papers_newton(start(problem, stopping), stopping, max_rank):
            clock.score(marginals(in_between(state)), **_work(state))
    return clock.finish()


def ours(classes: Classes, kernel: Matern32, stopping: Stopping, max_rank: int | None = None) -> Clock:
    """`NonConjugateGP` as it comes, scored after each product: what it would answer if its budget ended there.

    With a small `max_rank`, one action per product: the mean alone takes C − 1 combinations of Kronecker actions, each
    of rank C − 1.
    """
    clock = Clock("ours", "ours", classes)
    if max_rank is not None:
        clock = Clock(f"ours, R = {max_rank}", "ours, compressed", classes)

    def look(state: State) -> None:
        clock.score(marginals(if_stopped(state)), **_work(state))

    gp = NonConjugateGP(
        kernel,
        Softmax(classes.num_classes),
        policy="curvature_residual",
        max_products=stopping.max_products,
        products_per_step=stopping.products_per_step,
        newton_tol=stopping.newton_tol,
        max_rank=max_rank,
        actions="auto" if max_rank is None else "joint",
    )
    gp.fit(classes.train_inputs, classes.train_labels, callback=look)
    if gp.report_.status == Status.INTERRUPTED:  # Ctrl-C ends the experiment, not this fit alone
        raise KeyboardInterrupt
    return clock.finish()


def svgps(
    classes: Classes, kernel: Matern32, grid: Grid, seconds: float, seed: int, number: int
) -> tuple[Grid, list[Clock], list[Clock]]:
    """The best settings of a grid, each trained for `seconds`, found in heats of an eighth of that; and the heats.

    Every run finishes the step that it is in. Where a single step takes `seconds`, the heat has been the race already:
    the same seed would take the same step again.
    """

    def race(setting: tuple[int, float], time: float) -> Clock:
        return svgp.race(classes, kernel, *setting, time, seed)

    heats = [race(setting, HEAT * seconds) for setting in grid] if len(grid) > number else []
    chosen = best_settings(heats, grid, number) if heats else grid
    raced = {setting: heat for setting, heat in zip(grid, heats, strict=False) if heat.seconds >= seconds}
    return chosen, [raced.get(setting) or race(setting, seconds) for setting in chosen], heats


def best_settings(clocks: Sequence[Clock], grid: Grid, number: int) -> Grid:
    """The settings that come first or second in one of the paper's six scores, the most frequent first."""
    runs = dict(zip(grid, clocks, strict=True))
    scores: list[Callable[[Clock], float]] = []
    for data in ("test", "train"):
        scores += [
            lambda clock, key=f"{data}_nll": min(row[key] for row in clock.rows),  # type: ignore[misc]
            lambda clock, key=f"{data}_accuracy": -max(row[key] for row in clock.rows),  # type: ignore[misc]
            lambda clock, key=f"{data}_ece": clock.rows[-1][key],  # type: ignore[misc]
        ]
    votes = [setting for score in scores for setting in sorted(runs, key=lambda s: score(runs[s]))[:2]]
    return sorted(dict.fromkeys(votes), key=lambda s: -votes.count(s))[:number]


def _work(state: State) -> dict[str, Any]:
    return {"step": state.newton_step, "products": state.num_products, "rank": state.buffer.size}

"""The paper's large problem: ten Gaussians in three dimensions, against subsets of the data and SVGP over time.

IterNCGP sees all N data: the paper's algorithm and ours, each with R = ∞ and R = 10, at most five iterations per Newton
step. SVGP is trained for as long as the slowest of these took, with the best settings of shorter heats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ntk_iterncgp.experiments.reproduce import race_figures, subset, svgp
from ntk_iterncgp.experiments.reproduce.contenders import ours, papers, svgps
from ntk_iterncgp.experiments.reproduce.outcome import Outcome
from ntk_iterncgp.experiments.reproduce.race import Classes
from ntk_iterncgp.experiments.reproduce.race_claims import claims
from ntk_iterncgp.experiments.reproduce.settings import Settings
from ntk_iterncgp.experiments.reproduce.style import style
from ntk_iterncgp.kernels import Matern32
from ntk_iterncgp.solver import Stopping

MAX_NEWTON_STEPS = 20
DIMENSION, NUM_CLASSES = 3, 10


@dataclass(frozen=True)
class GmmSettings(Settings):
    """As the paper, but for the budget of products, which it does not state, and the time of SVGP (it gives 10⁴ s)."""

    QUICK: ClassVar[dict[str, Any]] = {
        "num_test": 2000,
        "num_seen": 1000,
        "learning_rates": (0.01, 0.05),
        "inducing_points": (1000,),
        "subset_sizes": (250, 1000, 2000),
    }
    num_train: int = 100_000
    num_test: int = 10_000
    num_seen: int = 10_000  # training data on which methods are scored
    lengthscale: float = 0.05
    outputscale: float = 0.05
    num_seeds: int = 1  # the paper: 5
    iterations_per_step: int = 5
    max_rank: int = 10
    max_products: int = 50
    newton_tol: float = 0.01
    subset_sizes: tuple[int, ...] = (250, 500, 1000, 2000)
    learning_rates: tuple[float, ...] = (0.001, 0.01, 0.05)
    inducing_points: tuple[int, ...] = (1000, 2500, 5000, 10_000)
    num_best: int = 3  # settings of SVGP that are repeated with other seeds
    svgp: bool = True
    svgp_time: float = 1.0  # of SVGP, in times of the slowest IterNCGP run


SETTINGS = GmmSettings


def run(settings: GmmSettings) -> Outcome:
    """Run the experiment: its table, figures and claims."""
    if settings.svgp:
        svgp.require_gpytorch()  # before any work is done
    kernel = Matern32(lengthscale=settings.lengthscale, outputscale=settings.outputscale)
    stopping = Stopping(settings.max_products, settings.iterations_per_step, MAX_NEWTON_STEPS, settings.newton_tol)
    grid = [(U, rate) for U in settings.inducing_points for rate in settings.learning_rates] if settings.svgp else []
    rows: list[dict[str, Any]] = []
    trials: list[dict[str, Any]] = []
    for seed in range(settings.seed, settings.seed + settings.num_seeds):
        classes = draw(settings, seed)
        iterncgp = [
            papers(classes, kernel, stopping, None, "paper"),
            papers(classes, kernel, stopping, settings.max_rank, "paper, compressed"),
            ours(classes, kernel, stopping),
            ours(classes, kernel, stopping, settings.max_rank),
        ]
        generator = torch.Generator().manual_seed(seed)
        sizes = [size for size in settings.subset_sizes if size < settings.num_train]
        subsets = [subset.race(classes, kernel, size, settings.newton_tol, generator) for size in sizes]
        seconds = settings.svgp_time * max(clock.seconds for clock in iterncgp)
        grid, variational, heats = svgps(classes, kernel, grid, seconds, seed, settings.num_best)  # searched once
        rows += [{"seed": seed} | row for clock in (*iterncgp, *subsets, *variational) for row in clock.rows]
        trials += [{"seed": seed} | row for clock in heats for row in clock.rows]
    summary = race_figures.summary(rows)
    with style():
        figures = {"gmm": race_figures.curves(rows), "gmm_data": race_figures.data(draw(settings, settings.seed))}
    tables = {"gmm": rows, "gmm_summary": summary} | ({"gmm_heats": trials} if trials else {})
    return Outcome(figures, tables, claims(summary))


def draw(settings: GmmSettings, seed: int) -> Classes:
    """The Gaussians depend on `settings.seed` alone, the data on `seed`."""
    generator = torch.Generator().manual_seed(settings.seed)
    means = 2 * torch.rand(NUM_CLASSES, DIMENSION, generator=generator, dtype=torch.float64) - 1
    roots = []
    for _ in range(NUM_CLASSES):
        square = torch.rand(DIMENSION, DIMENSION, generator=generator, dtype=torch.float64)
        vectors = torch.linalg.eigh(square @ square.T).eigenvectors
        values = 0.001 + 0.099 * torch.rand(DIMENSION, generator=generator, dtype=torch.float64)
        roots.append(vectors * values.sqrt())
    generator = torch.Generator().manual_seed(1000 + seed)

    def sample(number: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(NUM_CLASSES).repeat_interleave(-(-number // NUM_CLASSES))
        labels = labels[torch.randperm(len(labels), generator=generator)][:number]
        noise = torch.randn(number, DIMENSION, generator=generator, dtype=torch.float64)
        inputs = means[labels] + torch.einsum("nij,nj->ni", torch.stack(roots)[labels], noise)
        return inputs.float(), labels

    train, test = sample(settings.num_train), sample(settings.num_test)
    return Classes(*train, *test, NUM_CLASSES, min(settings.num_seen, settings.num_train))

"""The acts of the demo: each gives a line to remember, the first a figure as well."""

from __future__ import annotations

import time
from typing import Any

import torch
from laplace import Laplace
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.experiments.evaluation.compare import Comparison
from ntk_iterncgp.experiments.evaluation.figures import in_bounds, svg
from ntk_iterncgp.experiments.evaluation.html import Opening
from ntk_iterncgp.experiments.evaluation.novelty import TEST, Novelty
from ntk_iterncgp.experiments.runs.evaluate import price_of
from ntk_iterncgp.experiments.runs.fit import Fitted
from ntk_iterncgp.experiments.runs.predictor import NetworkPredictor
from ntk_iterncgp.experiments.runs.prepare import Setting

BLUE = "#0072B2"
GAP = (-0.9, 0.9)  # of the curve's inputs

Panel = tuple[str, str, str]  # title, one sentence, SVG


def opening(setting: Setting, fitted: Fitted, comparison: Comparison, found: Novelty | None) -> Opening:
    """Five lines that a person remembers, and two pictures.

    Args:
        setting: Of the run.
        fitted: The network's posterior; it has been compared, and learns the new digits at the end.
        comparison: The table.
        found: What the detector makes of test inputs and others.
    """
    assert isinstance(fitted.predictor, NetworkPredictor) and found is not None
    la, x, y = fitted.predictor.la, *_whole(setting.data.test)
    setting.log("A curve with a gap.")
    curve_line, curve_panel = curve(setting.config.seed)
    lines = [curve_line, detection(found), calibration(comparison), cost(la, x, comparison)]
    setting.log("New digits.")
    lines.append(new_data(la, (x[::2], y[::2]), x[1::2], float(fitted.report["seconds"])))
    return Opening(lines, (curve_panel, found.panels()[0]))


def _whole(data: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*(data[i] for i in range(len(data))), strict=True)
    return torch.stack(inputs), torch.as_tensor(targets)


# --- 1. a curve with a gap --------------------------------------------------------------------------------------------


def curve(seed: int) -> tuple[str, Panel]:
    """Fit a regression whose data leave a gap, with prior precision and noise by the evidence."""
    generator = torch.Generator().manual_seed(seed)
    sides = torch.rand(80, 1, generator=generator)
    X = torch.where(torch.arange(80)[:, None] < 40, -4 + (4 + GAP[0]) * sides, GAP[1] + (4 - GAP[1]) * sides)
    y = torch.sin(1.5 * X) + 0.15 * torch.randn(80, 1, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 50), nn.SiLU(), nn.Linear(50, 50), nn.SiLU(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    for _ in range(1000):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), y).backward()
        optimizer.step()
    la: Any = Laplace(model, "regression", "all", "iterncgp")
    la.fit(DataLoader(TensorDataset(X, y), batch_size=80))
    hyperparameters = [torch.tensor([value], requires_grad=True) for value in (0.0, -1.0)]
    optimizer = torch.optim.Adam(hyperparameters, lr=0.1)
    for _ in range(120):
        optimizer.zero_grad()
        (-la.log_marginal_likelihood(*(value.exp() for value in hyperparameters))).backward()
        optimizer.step()
    grid = torch.linspace(-6.5, 6.5, 261)[:, None]
    mean, deviation = (part.detach().flatten() for part in la(grid))
    deviation, noise = deviation.sqrt(), la.sigma_noise.detach() ** 2
    at_data, in_gap = float(la(X)[1].sqrt().median()), float(deviation[(grid[:, 0] > -0.5) & (grid[:, 0] < 0.5)].mean())

    def draw(axes: Axes) -> None:
        for width, alpha in ((deviation, 0.35), ((deviation**2 + noise).sqrt(), 0.18)):
            axes.fill_between(grid[:, 0], mean - 2 * width, mean + 2 * width, color=BLUE, alpha=alpha, linewidth=0)
        axes.plot(grid, mean, color=BLUE, linewidth=1.4)
        axes.scatter(X, y, s=5, color="black", linewidths=0, zorder=3)
        axes.set(ylim=(-3.4, 3.4), xlim=(-6.5, 6.5))

    line = (
        f"A curve with a gap: the network alone is a line. Its posterior adds an uncertainty of ±{2 * at_data:.2f} at "
        f"the data and ±{2 * in_gap:.2f} in the gap between them (two standard deviations)."
    )
    sentence = "The network, and two standard deviations of its posterior without and with the noise of the data."
    return line, ("A curve with a gap", sentence, svg(draw))


# --- 2. turned digits and noise, and probabilities --------------------------------------------------------------------


def detection(found: Novelty) -> str:
    """Say how well unfamiliar inputs are told from test inputs, by the network's entropy and by the detector."""
    alone = found.ways[0]
    areas = ", ".join(
        f"{name} {alone.metrics(name).auroc:.2f} → {found.detector.metrics(name).auroc:.2f}" for name in found.others
    )
    raised = ", ".join(f"{100 * found.alarms(name):.0f} % of {name}" for name in found.others)
    return (
        f"Unfamiliar inputs: AUROC by the network's entropy → by la.detector, which needs no labels and no examples of "
        f"them: {areas}. Set to {100 * found.rate:.2g} % of false alarms, it raises an alarm at "
        f"{100 * found.alarms(TEST):.1f} % of the test digits, {raised}."
    )


def calibration(comparison: Comparison) -> str:
    """Say what became of the network's confidence, and whether temperature scaling does better."""
    alone, scaled, own = (comparison[name] for name in ("map", "temperature", "iterncgp"))
    assert scaled.difference is not None
    if scaled.difference.lower > 0:
        verdict = "worse, beyond chance"
    elif scaled.difference.upper < 0:
        verdict = "better, beyond chance"
    else:
        verdict = "the difference is within chance"
    return (
        f"Calibration: the NLL of the test digits is {alone.metrics.nll:.4f} by the network alone, "
        f"{own.metrics.nll:.4f} by the posterior and {scaled.metrics.nll:.4f} by temperature scaling ({verdict}); the "
        f"ECE {alone.metrics.ece:.3f}, {own.metrics.ece:.3f} and {scaled.metrics.ece:.3f}."
    )


# --- 3. cost ----------------------------------------------------------------------------------------------------------


def cost(la: Any, x: Tensor, comparison: Comparison) -> str:
    """Say what the fit and a prediction cost, beside other methods and the truth."""
    own = comparison["iterncgp"].fit_seconds
    others = [
        f"{result.label.partition(' (')[0]} {result.fit_seconds / own:.2g}"
        for result in comparison.results
        if result.name in ("kfac", "ella", "exact")
    ]
    beside = f" Fits that took other times, as multiples of its seconds: {', '.join(others)}." if others else ""
    ratio, price = comparison.exact_ratio, price_of(la, x)
    near = "" if ratio is None else f" The variance is {in_bounds(ratio)}, as a multiple of the exact one."
    return (
        f"Cost: the fit takes {la.report_.epochs:.1f} epochs, and a prediction {price.milliseconds:.2g} ms or "
        f"{price.passes:.0f} forward passes of this tiny network.{beside}{near}"
    )


# --- 4. new digits ----------------------------------------------------------------------------------------------------


def new_data(la: Any, new: tuple[Tensor, Tensor], x: Tensor, fit_seconds: float) -> str:
    """Condition on digits that the fit has not seen, without those it has."""
    before = la.latent(x)[1].diagonal(dim1=1, dim2=2).sum(1)
    started = time.perf_counter()
    la.update(DataLoader(TensorDataset(*new), batch_size=len(new[0])))
    spent = (time.perf_counter() - started) / fit_seconds
    ratio = la.latent(x)[1].diagonal(dim1=1, dim2=2).sum(1) / before
    falls = int((ratio < 1).sum())
    return (
        f"New data: la.update adds {len(new[0])} digits without the old ones, in {spent:.2g} times the seconds of the "
        f"fit; the variance falls at {falls} of {len(x)} other digits, by {100 * (1 - float(ratio.median())):.0f} % in "
        "the median."
    )

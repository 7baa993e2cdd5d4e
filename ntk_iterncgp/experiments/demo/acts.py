"""The acts of the demo: each gives a line to remember, the first two a figure as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from laplace import Laplace
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.experiments.evaluation.compare import Comparison
from ntk_iterncgp.experiments.evaluation.figures import svg
from ntk_iterncgp.experiments.evaluation.html import Opening
from ntk_iterncgp.experiments.evaluation.links import entropy
from ntk_iterncgp.experiments.evaluation.ood import ood_metrics
from ntk_iterncgp.experiments.runs.fit import Fitted
from ntk_iterncgp.experiments.runs.predictor import NetworkPredictor
from ntk_iterncgp.experiments.runs.prepare import Setting

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
RATE = 0.01  # of alarms among familiar inputs
GAP = (-0.9, 0.9)  # of the curve's inputs

Panel = tuple[str, str, str]  # title, one sentence, SVG


def opening(setting: Setting, fitted: Fitted, comparison: Comparison) -> Opening:
    """Five lines that a person remembers, and two pictures.

    Args:
        setting: Of the run.
        fitted: The network's posterior; it has been compared, and learns the new digits at the end.
        comparison: The table.
    """
    assert isinstance(fitted.predictor, NetworkPredictor)
    la, x, y = fitted.predictor.la, *_whole(setting.data.test)
    others = {name: _whole(data)[0] for name, data in setting.data.ood.items()}
    setting.log("A curve with a gap.")
    curve_line, curve_panel = curve(setting.config.seed)
    setting.log("Turned digits and noise.")
    detection_line, detection_panel = detection(la, x[::2], x[1::2], others)
    lines = [curve_line, detection_line, calibration(comparison), cost(la, x, comparison)]
    setting.log("New digits.")
    lines.append(new_data(la, (x[::2], y[::2]), x[1::2], float(fitted.report["seconds"])))
    return Opening(lines, (curve_panel, detection_panel))


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
        f"A curve: the network alone is a line. Its posterior is ±{2 * at_data:.2f} at the data and ±{2 * in_gap:.2f} "
        "in the gap between them."
    )
    sentence = "The network, and two standard deviations of its posterior without and with noise; a fit and no tuning."
    return line, ("A curve with a gap", sentence, svg(draw))


# --- 2. turned digits and noise, and probabilities --------------------------------------------------------------------


def detection(la: Any, familiar: Tensor, test: Tensor, others: dict[str, Tensor]) -> tuple[str, Panel]:
    """Tell unfamiliar inputs from test inputs, by the network's entropy and by a detector."""
    detector = la.detector(familiar)

    def doubt(x: Tensor) -> Tensor:
        with torch.no_grad():
            return entropy(la.model(x).double().softmax(1))

    before = {name: ood_metrics(doubt(test), doubt(x)).auroc for name, x in others.items()}
    scores = {name: detector.score(x) for name, x in {"test digits": test, **others}.items()}
    after = {name: ood_metrics(scores["test digits"], scores[name]).auroc for name in others}
    alarms = {name: float((detector.novelty.p_value(s) <= RATE).float().mean()) for name, s in scores.items()}

    def draw(axes: Axes) -> None:
        top = max(float(s.quantile(0.99)) for s in scores.values())
        for (name, values), colour in zip(scores.items(), (BLUE, ORANGE, GREEN, "0.5"), strict=False):
            axes.hist(
                values.clamp(max=top).tolist(),
                bins=30,
                range=(0, top),
                density=True,
                color=colour,
                alpha=0.5,
                label=name,
            )
        axes.set(xlabel="novelty", yticks=[])
        axes.legend()

    found = "; ".join(f"{name} {before[name]:.2f} → {after[name]:.2f}" for name in others)
    raised = ", ".join(f"{100 * alarms[name]:.0f} % of {name}" for name in others)
    line = (
        f"Detection without labels, AUROC by the network's entropy → by la.detector: {found}. Alarms at "
        f"{100 * RATE:.0f} %: {100 * alarms['test digits']:.1f} % of test digits, {raised}."
    )
    return line, (
        "Novelty",
        "The detector's score of test digits and of inputs the network was not made for.",
        svg(draw),
    )


def calibration(comparison: Comparison) -> str:
    """Say what became of the network's confidence."""
    alone, scaled, own = (comparison[name] for name in ("map", "temperature", "ours"))
    apart = scaled.difference is not None and not scaled.difference.lower <= 0 <= scaled.difference.upper
    return (
        f"Calibration: NLL {alone.metrics.nll:.4f} → {own.metrics.nll:.4f} (temperature scaling "
        f"{scaled.metrics.nll:.4f}{'' if apart else ': the same, within chance'}), ECE {alone.metrics.ece:.3f} → "
        f"{own.metrics.ece:.3f} ({scaled.metrics.ece:.3f})."
    )


# --- 3. cost ----------------------------------------------------------------------------------------------------------


def cost(la: Any, x: Tensor, comparison: Comparison) -> str:
    """Say what the fit and a prediction cost, beside other methods and the truth."""

    def forward() -> None:
        with torch.no_grad():
            la.model(x)

    passes = _fastest(lambda: la(x, link_approx="quadrature")) / _fastest(forward)
    own = comparison["ours"].fit_seconds
    others = [
        f"{result.label.partition(' (')[0]} {result.fit_seconds / own:.2g} ×"
        for result in comparison.results
        if result.name in ("kfac", "ella", "exact")
    ]
    beside = f"; its seconds beside it: {', '.join(others)}" if others else ""
    ratio = comparison.exact_ratio
    near = (
        "" if ratio is None else f" Variance {float(ratio.min()):.3f} to {float(ratio.max()):.3f} × exact, never below."
    )
    price = f"A prediction: {passes:.0f} forward passes of a network this small."
    return f"Cost: {la.report_.epochs:.1f} epochs for the fit{beside}. {price}{near}"


def _fastest(work: Callable[[], object], repeats: int = 3) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


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
        f"New data: {len(new[0])} more digits without the old ones, for {spent:.2g} × the time of the fit; the "
        f"variance fell at {falls} of {len(x)} inputs, by {100 * (1 - float(ratio.median())):.0f} % in the median."
    )

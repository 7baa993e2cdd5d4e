"""Figures of a fitted `NonConjugateGP` in one and two dimensions, ready to be printed.

    gp.plot_1d()              mean, 95 % bands of the function and of an observation, data
    gp.plot_2d()              the mean, rate or probability as filled contours with the data, or regions of classes

Matplotlib is imported when a figure is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods import Bernoulli, Binomial, Gaussian, NegativeBinomial, Ordinal, Poisson, Softmax
from ntk_iterncgp.likelihoods.quadrature import line_points, standard_normal_quantile
from ntk_iterncgp.posterior.predictive import expected_response

POINTS_1D, POINTS_2D = 400, 120  # along an axis
MARGIN = 0.08  # of the range of the data, on either side
LINE, DATA = "#1f4e79", "#222222"
CLASSES = ("#3b75af", "#e1812c", "#3a923a", "#c03d3e", "#9372b2", "#845b53", "#d684bd", "#7f7f7f", "#a9aa35", "#2eabb8")
MAX_COUNT = 3000  # up to which the probabilities of all counts are added up for a band
MAX_POINTS = 3000  # of the data, that can be distinguished


def plot_1d(
    gp: Any,
    ax: Any = None,
    *,
    x: Tensor | None = None,
    level: float = 0.95,
    data: bool = True,
    observation_band: bool = True,
    legend: bool = True,
    labels: tuple[str, str] = ("x", "y"),
) -> Any:
    """Plot mean, bands and data of a GP with one-dimensional inputs.

    Args:
        gp: a fitted NonConjugateGP of one output, or a classifier.
        ax: the axes of matplotlib to draw in; None: new ones.
        x: where to evaluate (b,) or (b, 1), rising; None: over the range of the data and a little beyond.
        level: the probability that each band holds.
        data: whether to show the data.
        observation_band: whether to show the band of an observation where there is one: for regression and counts.
        legend: whether to show a legend.
        labels: of the two axes.

    Returns:
        The axes.
    """
    ax = _axes(ax)
    inputs, targets = _data(gp, 1)
    if x is None:
        low, high = _range(inputs[:, 0])
        x = torch.linspace(low, high, POINTS_1D, dtype=torch.float64)
    at = torch.as_tensor(x).reshape(-1, 1).to(inputs)
    horizontal = at[:, 0].double().cpu().numpy()
    if isinstance(gp.likelihood, (Softmax, Ordinal)):
        _class_curves(gp, ax, at, horizontal)
    else:
        _curve_and_bands(gp, ax, at, level, observation_band)
    if data:
        _rug_or_points(gp, ax, inputs, targets)
    ax.set_xlim(horizontal[0], horizontal[-1])
    ax.set_xlabel(labels[0])
    is_class = isinstance(gp.likelihood, (Softmax, Ordinal, Bernoulli))
    ax.set_ylabel("probability" if is_class and labels[1] == "y" else labels[1])
    _finish(ax, legend)
    return ax


def plot_2d(
    gp: Any,
    ax: Any = None,
    *,
    what: str = "mean",
    limits: tuple[float, float, float, float] | None = None,
    num_points: int = POINTS_2D,
    data: bool = True,
    colorbar: bool = True,
    labels: tuple[str, str] = ("x₁", "x₂"),
) -> Any:
    """Plot a GP with two-dimensional inputs: filled contours, or regions of classes as sure as their colour is strong.

    Args:
        gp: a fitted NonConjugateGP of one output, or a classifier.
        ax: the axes of matplotlib to draw in; None: new ones.
        what: "mean": the mean, rate or probability, for several classes their regions. "std": the standard deviation of
            the latent function, of several the root of their mean variance.
        limits: x₁ from and to, x₂ from and to; None: the range of the data and a little beyond.
        num_points: along each axis.
        data: whether to show the data.
        colorbar: whether to show what the colours mean.
        labels: of the two axes.

    Returns:
        The axes.
    """
    if what not in ("mean", "std"):
        raise ValueError(f"`what` must be 'mean' or 'std'; got {what!r}. Try 'mean'.")
    ax = _axes(ax)
    inputs, targets = _data(gp, 2)
    x1, x2 = limits[:2] if limits else _range(inputs[:, 0]), limits[2:] if limits else _range(inputs[:, 1])
    first, second = (torch.linspace(*ends, num_points, dtype=torch.float64) for ends in (x1, x2))
    at = torch.cartesian_prod(first, second).to(inputs)
    is_classes = isinstance(gp.likelihood, (Softmax, Ordinal))

    def grid(values: Tensor) -> Any:
        return values.double().cpu().reshape(num_points, num_points).T.numpy()

    if what == "mean" and is_classes:
        filled = None
        _regions(gp, ax, at, first, second)
    else:
        if what == "std":
            values = gp.latent(at)[1].diagonal(dim1=1, dim2=2).mean(1).sqrt()
        else:
            values = gp.predict(at, link="quadrature")[:, 0]
        bounded = what == "mean" and isinstance(gp.likelihood, (Bernoulli, Binomial))
        levels: Any = torch.linspace(0, 1, 21).tolist() if bounded else 20
        filled = ax.contourf(first, second, grid(values), levels=levels, cmap="RdBu_r" if bounded else "viridis")
        if bounded:
            ax.contour(first, second, grid(values), levels=[0.5], colors="black", linewidths=1.0)
        if colorbar:
            name = "standard deviation" if what == "std" else _response_name(gp.likelihood)
            ax.figure.colorbar(filled, ax=ax, label=name)
    if data:
        colour_of = filled if what == "mean" else None
        _points_2d(gp.likelihood, ax, inputs, targets, colour_of)
    ax.set_xlim(*x1)
    ax.set_ylim(*x2)
    ax.set_xlabel(labels[0])
    ax.set_ylabel(labels[1])
    return ax


# --- parts -----------------------------------------------------------------------------------------------------------


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        message = "Plots need the package matplotlib, which is not installed: pip install matplotlib."
        raise ImportError(message) from error
    return plt.subplots(figsize=(5.6, 3.4), layout="constrained")[1]


def _data(gp: Any, dimension: int) -> tuple[Tensor, Tensor]:
    problem = gp.posterior_.state.problem
    inputs = problem.prior.inputs.to(problem.prior.data_dtype)
    if inputs.shape[1] != dimension:
        raise ValueError(
            f"`gp` must have inputs of {dimension} dimension(s) to be plotted so; got {inputs.shape[1]}. Try to plot "
            "predict() along the directions of interest."
        )
    return inputs, problem.targets


def _range(values: Tensor) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    margin = MARGIN * (high - low) or 1.0
    return low - margin, high + margin


def _response_name(likelihood: Any) -> str:
    if isinstance(likelihood, (Bernoulli, Binomial)):
        return "probability"
    return "rate" if isinstance(likelihood, (Poisson, NegativeBinomial)) else "function"


def _observation_band(likelihood: Any, mean: Tensor, variance: Tensor, level: float) -> tuple[Tensor, Tensor] | None:
    """The central interval of an observation: the Gaussian's in closed form, of counts from their probabilities."""
    if isinstance(likelihood, Gaussian):
        spread = standard_normal_quantile(level) * (variance + likelihood.variance).sqrt()[:, 0]
        return mean[:, 0] - spread, mean[:, 0] + spread
    if not isinstance(likelihood, (Poisson, NegativeBinomial)):
        return None
    one = type(likelihood)(**likelihood.settings() | {"exposure": 1.0})  # a new observation's exposure is one unit
    points, weights = line_points(mean[:, 0], variance[:, 0].sqrt())
    latent = mean + variance.sqrt() * points  # (b, q)
    largest = float(one.response(mean + 4 * variance.sqrt()).max())
    if not 4 * largest + 20 < MAX_COUNT:
        return None
    below = mean.new_zeros(len(mean))
    low, high = below.clone(), below.clone()
    for count in range(MAX_COUNT):
        counts = mean.new_full((latent.numel(),), count)
        p = one.log_prob(latent.reshape(-1, 1), counts).exp().reshape(latent.shape)
        below = below + (weights * p).sum(1)  # the probability of this count or fewer
        low += (below < (1 - level) / 2).double()
        high += (below < (1 + level) / 2).double()
        if bool((below >= (1 + level) / 2).all()):
            break
    return low, high


def _curve_and_bands(gp: Any, ax: Any, at: Tensor, level: float, observation_band: bool) -> None:
    """The mean of the response, and the central intervals of the function and of an observation."""
    horizontal = at[:, 0].double().cpu().numpy()
    mean, covariance = (moment.double().cpu() for moment in gp.latent(at))
    if mean.shape[1] > 1:
        raise ValueError(f"`gp` must have one output to be plotted; got {mean.shape[1]}. Try one GP for each output.")
    variance = covariance[:, 0]
    band = _observation_band(gp.likelihood, mean, variance, level) if observation_band else None
    percent = f"{100 * level:g} %"
    if band is not None:
        ax.fill_between(
            horizontal, *band, color=LINE, alpha=0.13, linewidth=0, label=f"{percent} of observations", zorder=1
        )
    spread = standard_normal_quantile(level) * variance.sqrt()
    low, high = (gp.likelihood.response(mean + sign * spread)[:, 0] for sign in (-1, 1))
    name = _response_name(gp.likelihood)
    label = f"{percent} of the {name}"
    ax.fill_between(horizontal, low, high, color=LINE, alpha=0.28, linewidth=0, label=label, zorder=2)
    centre = expected_response(gp.likelihood, mean, covariance, link="quadrature")[:, 0]
    ax.plot(horizontal, centre, color=LINE, linewidth=1.6, label=f"mean {name}", zorder=3)


def _class_curves(gp: Any, ax: Any, at: Tensor, horizontal: Any) -> None:
    p = gp.predict(at, link="quadrature").double().cpu()
    for c in range(p.shape[1]):
        ax.plot(horizontal, p[:, c], color=CLASSES[c % len(CLASSES)], linewidth=1.6, label=f"class {c}", zorder=3)
    ax.set_ylim(-0.08, 1.04)


def _rug_or_points(gp: Any, ax: Any, inputs: Tensor, targets: Tensor) -> None:
    shown = slice(None, None, -(-len(inputs) // MAX_POINTS))
    x, y = inputs[shown, 0].cpu().numpy(), _per_unit(gp.likelihood, targets)[shown].cpu()
    if isinstance(gp.likelihood, (Softmax, Ordinal)):
        colours = [CLASSES[int(c) % len(CLASSES)] for c in y]
        ax.scatter(x, torch.full_like(y, -0.04).numpy(), c=colours, marker="|", s=30, linewidths=0.8, zorder=4)
        return
    size = 18 if len(y) < 100 else 9 if len(y) < 500 else 4
    ax.scatter(x, y.numpy(), s=size, color=DATA, alpha=0.75, linewidths=0, label="data", zorder=4)


def _points_2d(likelihood: Any, ax: Any, inputs: Tensor, targets: Tensor, contours: Any) -> None:
    """The data in the colours of their classes, or of the contours of the mean where there are any."""
    shown = slice(None, None, -(-len(inputs) // MAX_POINTS))
    points, seen = inputs[shown].cpu(), targets[shown].cpu().reshape(-1)
    style: dict[str, Any] = {"color": DATA}
    if isinstance(likelihood, (Softmax, Ordinal)):
        style = {"c": [CLASSES[int(c) % len(CLASSES)] for c in seen]}
    elif contours is not None:
        style = {"c": _per_unit(likelihood, targets)[shown].cpu(), "cmap": contours.cmap, "norm": contours.norm}
    ax.scatter(*points.T.numpy(), s=16, edgecolors="white", linewidths=0.6, zorder=3, **style)


def _per_unit(likelihood: Any, targets: Tensor) -> Tensor:  # (N,)
    """Targets on the scale of predictions: counts by their exposure, successes by their trials."""
    y = targets.double().reshape(-1)
    if isinstance(likelihood, Binomial):
        return y / likelihood.trials.to(y)
    return y / likelihood.exposure.to(y) if isinstance(likelihood, (Poisson, NegativeBinomial)) else y


def _regions(gp: Any, ax: Any, at: Tensor, first: Tensor, second: Tensor) -> None:
    """Where each class is the likeliest, and how sure that is."""
    p, size = gp.predict(at, link="quadrature").double().cpu(), len(first)
    extent = (float(first[0]), float(first[-1]), float(second[0]), float(second[-1]))
    ax.imshow(_blended(p, size), origin="lower", extent=extent, aspect="auto", interpolation="bilinear")
    winner = p.argmax(1).reshape(size, size).T.numpy()
    for c in range(p.shape[1]):
        ax.contour(first, second, (winner == c).astype(float), levels=[0.5], colors="white", linewidths=1.0)


def _blended(probabilities: Tensor, num_points: int) -> Any:  # (rows, columns, 3)
    """The colours of the classes mixed by their probabilities: white where they are all the same."""
    from matplotlib.colors import to_rgb

    C = probabilities.shape[1]
    colours = torch.tensor([to_rgb(CLASSES[c % len(CLASSES)]) for c in range(C)], dtype=torch.float64)
    sure = ((probabilities.max(1).values - 1 / C) / (1 - 1 / C)).clamp(0, 1)[:, None]
    mixed = 1 - 0.75 * sure * (1 - colours[probabilities.argmax(1)])
    return mixed.reshape(num_points, num_points, 3).transpose(0, 1).numpy()


def _finish(ax: Any, legend: bool) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if legend:
        ax.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2, columnspacing=1.0)

"""The two figures of the README: confidence on two moons, and a curve with a gap.

.venv/bin/python docs/hero.py [FOLDER]
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers hessian_structure="iterncgp"

STYLE = {"fontsize": 9, "loc": "left"}


def trained(sizes: tuple[int, ...], X: Tensor, y: Tensor, steps: int, weight_decay: float = 1e-4) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.SiLU()]
    model = nn.Sequential(*layers[:-1])
    loss = nn.functional.mse_loss if y.is_floating_point() else nn.functional.cross_entropy
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=weight_decay)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()
    return model


def two_moons(path: Path) -> None:
    """The network alone, its last layer's posterior, and that of all weights; both precisions by the evidence."""
    inputs, labels = make_moons(400, noise=0.15, random_state=0)
    X, y = torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(labels)
    model, loader = trained((2, 32, 32, 2), X, y, 400), DataLoader(TensorDataset(X, y), batch_size=100)
    fine, coarse = torch.linspace(-9.5, 10.5, 900), torch.linspace(-9.5, 10.5, 120)
    grid = torch.cartesian_prod(coarse, coarse)
    with torch.no_grad():
        panels = [("network alone", fine, model(torch.cartesian_prod(fine, fine)).softmax(1))]
    for title, weights in (("last-layer Laplace", "last_layer"), ("IterNCGP, all weights", "all")):
        la: Any = Laplace(model, "classification", weights, "iterncgp")
        la.fit(loader)
        la.optimize_prior_precision(method="marglik", prior_structure="scalar")
        with torch.no_grad():
            parts = [la(part, link_approx="quadrature") for part in grid.split(3000)]
            panels.append((title, coarse, torch.cat(parts)))
        at_data = la(X, link_approx="quadrature").amax(1).median()
        print(f"{title}: precision {float(la.prior_precision):.3g}, median confidence at the data {float(at_data):.2f}")
    figure = Figure(figsize=(9, 3.1), dpi=300, layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for panel, (title, side, probabilities) in zip(axes, panels, strict=True):
        values = probabilities.max(1).values.reshape(len(side), -1).T
        print(f"{title}: confidence above 0.9 on {float((values > 0.9).float().mean()):.0%} of the area")
        shown = panel.imshow(
            values,
            extent=2 * (float(side[0]), float(side[-1])),
            origin="lower",
            cmap="cividis",
            vmin=0.5,
            vmax=1,
            interpolation="bicubic",
        )
        panel.contour(side, side, values, levels=[0.9], colors="white", linewidths=0.8)
        for label, colour in ((0, "#D55E00"), (1, "#56B4E9")):
            panel.scatter(*X[y == label].T, s=1.5, color=colour, linewidths=0)
        panel.set(xticks=[], yticks=[])
        panel.set_title(title, **STYLE)
    bar = figure.colorbar(shown, ax=axes, label="confidence", ticks=[0.5, 0.7, 0.9, 1])
    bar.ax.axhline(0.9, color="white", linewidth=0.8)
    figure.savefig(path)


def curve(path: Path) -> None:
    """A regression whose data have a gap; prior precision and noise by the evidence."""
    generator = torch.Generator().manual_seed(1)
    X = torch.cat([-4 + 3 * torch.rand(40, 1, generator=generator), 1 + 3 * torch.rand(40, 1, generator=generator)])
    y = torch.sin(1.5 * X) + 0.15 * torch.randn(80, 1, generator=generator)
    model = trained((1, 50, 50, 1), X, y, 1500, weight_decay=1e-3)
    la: Any = Laplace(model, "regression", "all", "iterncgp")
    la.fit(DataLoader(TensorDataset(X, y), batch_size=80))
    log_prior, log_sigma = torch.zeros(1, requires_grad=True), torch.full((1,), -1.0, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
        optimizer.step()
    print(f"curve: precision {la.prior_precision.item():.3g}, noise {la.sigma_noise.item():.3g}")
    grid = torch.linspace(-7, 7, 500)[:, None]
    mean, variance = (part.detach().flatten() for part in la(grid))
    total = (variance + float(la.sigma_noise) ** 2).sqrt()
    figure = Figure(figsize=(9, 2.7), dpi=300, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for panel, title in ((left, "network alone"), (right, "with its posterior: two standard deviations")):
        panel.plot(grid, mean, color="#0072B2", linewidth=1.5, zorder=3, label="network")
        panel.scatter(X, y, s=6, color="black", linewidths=0, zorder=4, label="data")
        panel.set(ylim=(-3.2, 3.2), xlim=(-7, 7), yticks=[-2, 0, 2])
        panel.set_title(title, **STYLE)
        panel.spines[["top", "right"]].set_visible(False)
    for spread, alpha, label in ((variance.sqrt(), 0.35, "of the curve"), (total, 0.18, "with the noise")):
        band = mean - 2 * spread, mean + 2 * spread
        right.fill_between(grid[:, 0], *band, color="#0072B2", alpha=alpha, linewidth=0, label=label)
    left.legend(fontsize=8, frameon=False, loc="upper left")
    bands = right.get_legend_handles_labels()
    right.legend(bands[0][2:], bands[1][2:], fontsize=8, frameon=False, loc="lower center")
    figure.savefig(path)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "figures"
    two_moons(folder / "two_moons.png")
    curve(folder / "curve.png")

"""The figure of the README: the same network's confidence, alone and with its posterior.

.venv/bin/python docs/two_moons.py [FILE]
"""

import sys
from pathlib import Path

import torch
from laplace import Laplace
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401 (registers hessian_structure="iterncgp")


def main(path: Path) -> None:
    torch.manual_seed(0)
    inputs, labels = make_moons(400, noise=0.2, random_state=0)
    X, y = torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(labels)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="iterncgp", num_actions=60)
    la.fit(DataLoader(TensorDataset(X, y), batch_size=100))

    side = torch.linspace(-4, 5, 90), torch.linspace(-4, 4.5, 85)
    grid = torch.cartesian_prod(*side)
    with torch.no_grad():
        alone = model(grid).softmax(1).max(1).values
    honest = la(grid, pred_type="glm", link_approx="probit").max(1).values
    figure = Figure(figsize=(7, 2.9), dpi=160, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for panel, confidence, title in zip(axes, (alone, honest), ("network alone", "with its posterior"), strict=True):
        values = confidence.detach().reshape(90, 85).T
        shown = panel.pcolormesh(*side, values, cmap="cividis", vmin=0.5, vmax=1, shading="auto", rasterized=True)
        for label, colour in ((0, "#D55E00"), (1, "#FFFFFF")):
            panel.scatter(*X[y == label].T, s=2, color=colour, linewidths=0)
        panel.set(xticks=[], yticks=[])
        panel.set_title(title, fontsize=10, loc="left")
    figure.colorbar(shown, ax=axes, label="confidence", ticks=[0.5, 0.75, 1])
    figure.savefig(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("two_moons.png"))

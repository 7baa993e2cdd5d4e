"""How much of what all data say do B actions say after one fit, and how much the best ones for the weights?

    ntk-iterncgp bench shares [--quick] [--json FILE]

Small networks on digits, whose exact posterior is known, at prior precision 1. The share is that of the contraction of
the variance at new inputs, summed over them, in percent, and a mean over seeds. Three kinds of actions:

groups  `policy="clusters"`, one fit
best    the B eigenvectors of JᵀWJ with the largest eigenvalues, the actions that contract the variance of the weights
        most: they need all of J, and nobody could afford them on a larger problem
floor   what groups must get
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from ntk_iterncgp.jacobian.autograd import Jacobian

NETWORKS: dict[str, tuple[tuple[int, ...], type[nn.Module]]] = {
    "tanh 64-32-10": ((64, 32, 10), nn.Tanh),
    "ReLU 64-16-10": ((64, 16, 10), nn.ReLU),
    "tanh 64-64-32-10": ((64, 64, 32, 10), nn.Tanh),
}
FLOOR = {20: 60.0, 50: 68.0, 100: 76.0, 500: 88.0}  # actions -> percent
TRAINING, NEW, EPOCHS = 800, 100, 15


def trained(sizes: Sequence[int], activation: type[nn.Module], seed: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network, its data, and new inputs."""
    images, labels = load_digits(return_X_y=True)
    X, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), activation())]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(EPOCHS):
        for rows in order[:TRAINING].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[rows]), y[rows]).backward()
            optimizer.step()
    train, new = order[:TRAINING], order[TRAINING : TRAINING + NEW]
    return model.eval(), X[train], y[train], X[new]


def shares(network: str, seed: int, actions: Sequence[int]) -> dict[str, list[float]]:
    """Of both kinds of actions, in percent, for each number of them."""
    model, X, y, new = trained(*NETWORKS[network], seed)
    jacobian, C = Jacobian(model), torch.eye(10)
    with torch.no_grad():
        J, J_new = (jacobian.vjp_each(x, C.expand(len(x), -1, -1)).double() for x in (X, new))
        p = model(X).double().softmax(1)
    root = p.sqrt()[..., None] * (J - (p[..., None] * J).sum(1, keepdim=True))  # W = CᵀC, C = √p(I − 1pᵀ)
    eigenvalues, vectors = torch.linalg.eigh(root.flatten(0, 1).T @ root.flatten(0, 1))
    along = (J_new.flatten(0, 1) @ vectors).square().sum(0)
    contraction = (along * eigenvalues / (1 + eigenvalues)).flip(0).cumsum(0)  # the largest eigenvalues first
    prior, whole = float(along.sum()), float(contraction[-1])
    found: dict[str, list[float]] = {"best": [100 * float(contraction[B - 1]) / whole for B in actions], "groups": []}
    loader = DataLoader(TensorDataset(X, y), 128)
    for B in actions:
        la = Laplace(model, "classification", "all", "iterncgp", policy="clusters", num_actions=B, prior_precision=1.0)
        la.fit(loader, progress_bar=False)
        left = float(la.predictive_moments(new)[1].double().diagonal(dim1=1, dim2=2).sum())
        found["groups"].append(100 * (prior - left) / whole)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench shares", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one network, one seed: does it run?")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    networks, seeds = (["ReLU 64-16-10"], 1) if options.quick else (list(NETWORKS), 5)
    actions, figures = list(FLOOR), {}
    print(f"{'actions':26}" + "".join(f"{B:>8}" for B in actions) + f"\n{'floor':26}", end="")
    print("".join(f"{least:>8.1f}" for least in FLOOR.values()))
    for network in networks:
        rows = [shares(network, seed, actions) for seed in range(seeds)]
        figures[network] = {kind: torch.tensor([row[kind] for row in rows]).mean(0).tolist() for kind in rows[0]}
        for kind, values in figures[network].items():
            print(f"{network:18}{kind:8}" + "".join(f"{value:>8.1f}" for value in values), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

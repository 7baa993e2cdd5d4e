"""Data come a few at a time: the posterior takes them in, keeps its size, and needs none of the old ones.

    .venv/bin/python examples/streaming.py

A network that is trained and stays as it is; 1600 points of two moons in sixteen parts. After each `update` the
variance is lower, and at the end it is compared with that of one fit to all points.
"""

import torch
from laplace import Laplace
from sklearn.datasets import make_moons
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401 (registers hessian_structure="iterncgp")


def trained_network(X: torch.Tensor, y: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-4)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    points, labels = make_moons(2000, noise=0.25, random_state=0)
    X, y = torch.as_tensor(points, dtype=torch.float32), torch.as_tensor(labels)
    model, new = trained_network(X[:400], y[:400]), X[1600:]

    def posterior(max_rank: int | None) -> Laplace:
        settings = {"num_actions": 30, "max_rank": max_rank}
        return Laplace(model, "classification", subset_of_weights="all", hessian_structure="iterncgp", **settings)

    def variance(la: Laplace) -> float:
        return float(la.predictive_moments(new)[1].diagonal(dim1=1, dim2=2).sum(1).mean())

    la = posterior(max_rank=30)
    print("data   actions   mean variance at new points")
    for x, t in zip(X[:1600].split(100), y[:1600].split(100), strict=True):
        la.update(DataLoader(TensorDataset(x, t), batch_size=50))
        if la.n_data in (100, 200, 400, 800, 1600):
            print(f"{la.n_data:4} {la.posterior.rank:9} {variance(la):12.4f}")

    whole = posterior(max_rank=None)
    whole.fit(DataLoader(TensorDataset(X[:1600], y[:1600]), batch_size=50))
    print(f"one fit {whole.posterior.rank:6} {variance(whole):12.4f}")


if __name__ == "__main__":
    main()

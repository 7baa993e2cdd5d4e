"""Which points should be labelled next? Those whose label the posterior is unsure about for lack of data.

    .venv/bin/python examples/active_learning.py

Two moons, eight labels to begin with. Each round the network is trained again, its posterior computed, and the
points with the largest mutual information (doubt that more data would remove) are labelled; at random for comparison.
"""

import torch
from laplace import Laplace
from sklearn.datasets import make_moons
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401 (registers hessian_structure="iterncgp")
from ntk_iterncgp.experiments.evaluation.links import mutual_information

ROUNDS, PER_ROUND, SEEDS = 4, 6, (0, 1)


def trained_network(X: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    return model.eval()


def doubt(model: nn.Module, X: Tensor, y: Tensor, pool: Tensor) -> Tensor:
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="iterncgp", num_actions=15)
    la.fit(DataLoader(TensorDataset(X, y), batch_size=50))
    mean, covariance = la.latent(pool)
    return mutual_information(mean.double(), covariance.double(), num_samples=128)


def accuracies(choose_by_doubt: bool, seed: int) -> list[float]:
    points, truth = make_moons(500, noise=0.15, random_state=1)
    X, y = torch.as_tensor(points, dtype=torch.float32), torch.as_tensor(truth)
    generator = torch.Generator().manual_seed(seed)
    labelled = torch.randperm(len(X), generator=generator)[:8]
    found = []
    for _ in range(ROUNDS):
        model = trained_network(X[labelled], y[labelled])
        with torch.no_grad():
            found.append(float((model(X).argmax(1) == y).float().mean()))
        score = doubt(model, X[labelled], y[labelled], X) if choose_by_doubt else torch.rand(500, generator=generator)
        score[labelled] = -1
        labelled = torch.cat([labelled, score.topk(PER_ROUND).indices])
    return found


def main() -> None:
    print("labels     " + "".join(f"{8 + PER_ROUND * i:>8}" for i in range(ROUNDS)))
    for name, by_doubt in (("by doubt", True), ("at random", False)):
        runs = torch.tensor([accuracies(by_doubt, seed) for seed in SEEDS])
        print(f"{name:11}" + "".join(f"{100 * a:7.1f}%" for a in runs.mean(0).tolist()))
    print("Accuracy on all points, averaged over two choices of the first eight.")


if __name__ == "__main__":
    main()

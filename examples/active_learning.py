"""Which data should be labelled next? Those that tell most, together, about what the network is unsure of.

    .venv/bin/python examples/active_learning.py

scikit-learn's digits (and MNIST under NTK_ITERNCGP_DATA, if set), twenty labels to begin with, ten more each round. Of
a batch each input is chosen given those before: the margin's variance under the posterior, conditioned on them.
"""

import os
import sys

import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401 (registers hessian_structure="iterncgp")

START, BATCH, CANDIDATES = 20, 10, 200


def trained_network(X: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(X.shape[1], 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    return model.eval()


def most_telling(model: nn.Module, X: Tensor, y: Tensor, pool: Tensor) -> Tensor:
    """The numbers of a batch of the pool: greedily the largest gain log(1 + w var) of a label, given those before."""
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="iterncgp", num_actions=50)
    la.fit(DataLoader(TensorDataset(X, y), batch_size=100))
    covariance = la.predictive_moments(pool, joint=True)[1]
    p = la(pool, link_approx="quasi").double()  # (b, C)
    (p1, p2), (first, second) = p.topk(2).values.T, p.topk(2).indices.T
    H = nn.functional.one_hot(first, 10).double() - nn.functional.one_hot(second, 10)  # the margin of each input
    K = torch.einsum("ic,icjd,jd->ij", H, covariance.double().reshape(len(p), 10, len(p), 10), H)
    weight = (p1 + p2 - (p1 - p2) ** 2) / 4  # how much a label says about the margin
    chosen: list[int] = []
    for _ in range(BATCH):
        gain = torch.log1p(weight * K.diagonal())
        gain[chosen] = -1
        i = int(gain.argmax())
        chosen.append(i)
        K = K - torch.outer(K[i], K[i]) / (K[i, i] + 1 / weight[i])
    return torch.tensor(chosen)


def accuracies(X: Tensor, y: Tensor, by_posterior: bool, seed: int, rounds: int) -> list[float]:
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    new, labelled, rest, found = order[:600], order[600 : 600 + START], order[600 + START :], []
    for _ in range(rounds):
        model = trained_network(X[labelled], y[labelled], seed)
        found.append(float((model(X[new]).argmax(1) == y[new]).float().mean()))
        rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(len(rest)))]
        some = X[rest[:CANDIDATES]]
        chosen = most_telling(model, X[labelled], y[labelled], some) if by_posterior else torch.arange(BATCH)
        labelled = torch.cat([labelled, rest[chosen]])
        rest = rest[~torch.isin(rest, labelled)]
    return found


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    sets = {"digits": (torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))}
    if "NTK_ITERNCGP_DATA" in os.environ:
        from torchvision.datasets import MNIST

        mnist = MNIST(os.environ["NTK_ITERNCGP_DATA"])
        sets["MNIST"] = mnist.data[:6000].flatten(1) / 255, mnist.targets[:6000]
    rounds, seeds = (2, 2) if "--toy" in sys.argv else (8, 5)
    for name, (X, y) in sets.items():
        print(f"{name + ', labels':16}" + "".join(f"{START + BATCH * i:>8}" for i in range(rounds)))
        runs = torch.tensor([[accuracies(X, y, best, s, rounds) for s in range(seeds)] for best in (True, False)])
        for way, found in zip(("by posterior", "at random", "difference"), [*runs, runs[0] - runs[1]], strict=True):
            print(f"{way:16}" + "".join(f"{100 * a:7.1f}%" for a in found.mean(0).tolist()))
        half = 100 * 1.96 * (runs[0] - runs[1]).std(0) / seeds**0.5
        print(f"{'95 % interval ±':16}" + "".join(f"{a:7.1f} " for a in half.tolist()))


if __name__ == "__main__":
    main()

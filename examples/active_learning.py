"""Which data should be labelled next? Those that tell most, together, about what the network is unsure of.

    .venv/bin/python examples/active_learning.py

scikit-learn's digits (and MNIST under NTK_ITERNCGP_DATA, if set), twenty labels to begin with, ten more each round. Of
a batch each is chosen given those before: a small margin, of whose variance they have explained little."""

import os
import sys

import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401 (registers hessian_structure="iterncgp")
from ntk_iterncgp.experiments.config import DataConfig
from ntk_iterncgp.experiments.datasets.known import known

START, BATCH, CANDIDATES = 20, 10, 200
WAYS = ("by posterior", "at random", "difference", "95 % interval ±")


def trained_network(X: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(X.shape[1], 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    for _ in range(150):
        model.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    return model.eval()


def most_telling(model: nn.Module, X: Tensor, y: Tensor, pool: Tensor) -> Tensor:
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=50, chunk_bytes=2**30)  # all rows at once
    la.fit(DataLoader(TensorDataset(X, y), batch_size=100))
    cov = la.latent(pool, joint=True)[1].double().reshape(len(pool), 10, len(pool), 10)
    (p1, p2), (first, second) = (part.T for part in la(pool, link_approx="quadrature").double().topk(2))
    H = nn.functional.one_hot(first, 10).double() - nn.functional.one_hot(second, 10)  # the margin of each input
    K = torch.einsum("ic,icjd,jd->ij", H, cov, H)
    noise, prior, chosen = 4 / (p1 + p2 - (p1 - p2) ** 2), K.diagonal().clone(), list[int]()
    for _ in range(BATCH):
        score = (1 - (p1 - p2)) * K.diagonal() / prior  # how close it is, and how much those before leave open
        chosen.append(i := int(score.index_fill(0, torch.tensor(chosen, dtype=torch.long), -1.0).argmax()))
        K = K - torch.outer(K[i], K[i]) / (K[i, i] + noise[i])
    return torch.tensor(chosen)


def accuracies(X: Tensor, y: Tensor, by_posterior: bool, seed: int, rounds: int) -> list[float]:
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    new, labelled, rest, found = *order.split([600, START, len(X) - 600 - START]), []
    for _ in range(rounds):
        model = trained_network(X[labelled], y[labelled], seed)
        found.append(float((model(X[new]).argmax(1) == y[new]).float().mean()))
        some, own = X[rest[:CANDIDATES]], (X[labelled], y[labelled])
        chosen = most_telling(model, *own, some) if by_posterior else torch.arange(BATCH)
        labelled = torch.cat([labelled, rest[chosen]])
        rest = rest[~torch.isin(rest, labelled)]
    return found


def main() -> None:
    rounds, seeds = (2, 2) if "--toy" in sys.argv else (8, 5)
    images, labels = load_digits(return_X_y=True)
    sets = {"digits": (torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))}
    if "NTK_ITERNCGP_DATA" in os.environ:
        sets["MNIST"] = (mnist := known("mnist", True, DataConfig()))[0][:6000].flatten(1), mnist[1][:6000]
    for name, (X, y) in sets.items():
        print(f"{name + ', labels':16}" + "".join(f"{START + BATCH * i:>8}" for i in range(rounds)))
        runs = torch.tensor([[accuracies(X, y, best, s, rounds) for s in range(seeds)] for best in (True, False)])
        better = runs[0] - runs[1]
        for way, found in zip(WAYS, [*runs.mean(1), better.mean(0), 1.96 * better.std(0) / seeds**0.5], strict=True):
            print(f"{way:16}" + "".join(f"{100 * a:7.1f}%" for a in found.tolist()))


if __name__ == "__main__":
    main()

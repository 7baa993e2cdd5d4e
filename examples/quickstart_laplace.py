"""A trained network, and how sure it should be: ten lines around laplace-torch's interface.

    .venv/bin/python examples/quickstart_laplace.py

Two moons, a small network that is sure everywhere, and the same network with its posterior: far from the data the
probabilities go back towards one half.
"""

import torch
from laplace import Laplace
from sklearn.datasets import make_moons
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401 (registers hessian_structure="iterncgp")


def trained_network(X: torch.Tensor, y: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    inputs, labels = make_moons(600, noise=0.2, random_state=0)
    X, y = torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(labels)
    model = trained_network(X[:400], y[:400])

    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="iterncgp", num_actions=40)
    la.fit(DataLoader(TensorDataset(X[:400], y[:400]), batch_size=100))
    print(la.report_)
    # la.optimize_prior_precision(method="gridsearch", val_loader=...) would choose the prior by held-out data

    print("\nmean confidence           network alone   with its posterior")
    for name, x in (("200 new points", X[400:]), ("(3, 3), without data", torch.tensor([[3.0, 3.0]]))):
        alone = model(x).softmax(1).max(1).values.mean()
        honest = la(x, pred_type="glm", link_approx="probit").max(1).values.mean()
        print(f"{name:24}  {100 * float(alone):10.1f} %   {100 * float(honest):14.1f} %")


if __name__ == "__main__":
    main()

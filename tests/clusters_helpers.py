"""What the tests of the one-epoch posterior share: small trained networks with their dense truth, and digits."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from tests import oracles
from tests.network_cases import dense_jacobian, outputs_of

PRIOR_PRECISION = 0.7


def in_groups(settings: dict[str, Any]) -> dict[str, Any]:
    """policy="clusters" by name, since "auto" is exact on problems as small as these; a refined mean has no groups."""
    return {"policy": "clusters"} if settings.get("mean", "network") == "network" else {}


@dataclass(frozen=True, eq=False)
class Net:
    """A network with data, and the exact posterior of its linearisation, in float64."""

    model: nn.Module  # float64
    likelihood: str
    x: Tensor
    y: Tensor
    sigma: float = 1.0

    def laplace(self, dtype: torch.dtype = torch.float64, subset: str = "all", **settings: Any) -> Any:
        settings = {**in_groups(settings), "prior_precision": PRIOR_PRECISION, **settings}
        if self.likelihood == "regression":
            settings["sigma_noise"] = self.sigma
        return Laplace(deepcopy(self.model).to(dtype), self.likelihood, subset, "iterncgp", **settings)

    def loader(self, dtype: torch.dtype = torch.float64, batch_size: int = 5, **settings: Any) -> DataLoader:
        return DataLoader(self.dataset(dtype), batch_size=batch_size, **settings)

    def dataset(self, dtype: torch.dtype = torch.float64) -> TensorDataset:
        y = self.y if self.likelihood == "classification" else self.y.to(dtype)
        return TensorDataset(self.x.to(dtype), y)

    def curvature(self) -> Tensor:  # (n, n)
        name = "softmax" if self.likelihood == "classification" else "gaussian"
        return oracles.curvature_matrix(name, outputs_of(self.model, self.x), noise=self.sigma**2)

    def weight_covariance(self, precision: float = PRIOR_PRECISION) -> Tensor:  # (P, P)
        J = dense_jacobian(self.model, self.x).flatten(0, 1)
        return oracles.weight_covariance(J, self.curvature(), precision)

    def exact(self, x: Tensor) -> Tensor:  # (b·C, b·C)
        """The joint covariance at new inputs."""
        J = dense_jacobian(self.model, x).flatten(0, 1)
        return J @ self.weight_covariance() @ J.T

    def information(self) -> float:
        """log|I + W^½ K W^½|."""
        J = dense_jacobian(self.model, self.x).flatten(0, 1)
        H = J.T @ self.curvature() @ J / PRIOR_PRECISION
        return float(torch.linalg.slogdet(torch.eye(len(H), dtype=H.dtype) + H)[1])

    def near_and_far(self) -> Tensor:
        """Training inputs, new ones, and some far away from all."""
        generator = torch.Generator().manual_seed(9)
        new = torch.randn(4, self.x.shape[1], generator=generator, dtype=torch.float64)
        return torch.cat([self.x[:2], new[:2], 20 * new[2:]])


def make_net(
    seed: int = 0,
    *,
    num_outputs: int = 3,
    num_data: int = 17,
    width: int = 4,
    likelihood: str = "classification",
    scale: float = 2.0,
) -> Net:
    """`scale` says how confident the network is."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, num_outputs)).double()
    for p in model.parameters():
        p.data = scale * 0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    x = torch.randn(num_data, 3, generator=generator, dtype=torch.float64)
    if likelihood == "classification":
        y = torch.randint(num_outputs, (num_data,), generator=generator)
    else:
        y = torch.randn(num_data, num_outputs, generator=generator, dtype=torch.float64)
    return Net(model, likelihood, x, y, sigma=0.6)


def joint_variance(la: Any, x: Tensor) -> Tensor:  # (b·C, b·C)
    """The joint covariance at new inputs, in float64."""
    dtype = next(la.model.parameters()).dtype
    return la.predictive_moments(x.to(dtype), joint=True)[1].double()


class Stream(IterableDataset):
    """The items of a dataset in order, and how many there are; no item by number."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[i] for i in range(len(self)))


# --- digits -------------------------------------------------------------------------------------------------------

TRAINING = 800


@dataclass(frozen=True, eq=False)
class Digits:
    """A small network trained on scikit-learn's digits, in float32, and its dense truth in float64 for precision 1."""

    model: nn.Module
    x: Tensor
    y: Tensor
    new_x: Tensor
    new_y: Tensor
    new_J: Tensor  # (b, C, P)
    weight_covariance: Tensor  # (P, P)
    curvature_trace: float  # tr(W K)

    def loader(self, batch_size: int = 128) -> DataLoader:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=batch_size)

    def laplace(self, **settings: Any) -> Any:
        return Laplace(self.model, "classification", "all", "iterncgp", **{**in_groups(settings), **settings})

    def fraction(self, la: Any) -> float:
        """Of the exact contraction of the variance at new inputs."""
        prior = float(self.new_J.square().sum())
        exact = float((self.new_J @ self.weight_covariance * self.new_J).sum())
        found = float(la.functional_variance(self.new_J.float()).diagonal(dim1=1, dim2=2).sum())
        return (prior - found) / (prior - exact)


@cache
def digits(seed: int, hidden: int = 16, activation: type[nn.Module] = nn.ReLU) -> Digits:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    train, new = order[:TRAINING], order[TRAINING : TRAINING + 100]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, hidden), activation(), nn.Linear(hidden, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(15):
        for rows in train.split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    double = deepcopy(model).double().requires_grad_(False)
    J, new_J = _mlp_jacobian(double, x[train].double()), _mlp_jacobian(double, x[new].double())
    p = double(x[train].double()).softmax(1)
    H = torch.zeros(J.shape[2], J.shape[2], dtype=torch.float64)
    for rows, probabilities in zip(J.split(100), p.split(100), strict=True):
        half = probabilities.sqrt()[..., None] * (rows - (probabilities[..., None] * rows).sum(1, keepdim=True))
        H += half.flatten(0, 1).T @ half.flatten(0, 1)
    covariance = torch.linalg.inv(torch.eye(len(H), dtype=torch.float64) + H)
    return Digits(model, x[train], y[train], x[new], y[new], new_J, covariance, float(H.trace()))


def _mlp_jacobian(model: nn.Module, x: Tensor) -> Tensor:  # (b, C, P)
    """Of one hidden layer with ReLU or tanh, by the chain rule."""
    first, activation, last = model
    features = activation(first(x))
    slope = 1 - features.square() if isinstance(activation, nn.Tanh) else (features > 0).double()
    C = len(last.weight)
    hidden = last.weight * slope[:, None]  # (b, C, H)
    eye = torch.eye(C, dtype=torch.float64).expand(len(x), C, C)
    last_weight = eye[..., None] * features[:, None, None]  # (b, C, C, H)
    return torch.cat([(hidden[..., None] * x[:, None, None]).flatten(2), hidden, last_weight.flatten(2), eye], 2)

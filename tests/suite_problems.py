"""Small networks with all that laplace-torch's own tests ask about written out: posterior, evidence, Jacobians."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from tests import oracles
from tests.network_cases import dense_jacobian

NUM_DATA, SIGMA, PRECISION = 18, 0.4, 1.3
# The default is exact on all of these; groups of data, as many as there are outputs, hold all actions too.
POLICIES: dict[str, dict[str, Any]] = {"auto": {}, "clusters": {"policy": "clusters", "num_actions": 3 * NUM_DATA}}
FLAVOURS = ("all", "last_layer")
LINKS = ("probit", "mc", "bridge", "bridge_norm", "quadrature")


@dataclass(frozen=True)
class Problem:
    """A small network, its data, and the posterior of some of its weights written out."""

    likelihood: str
    num_outputs: int

    @property
    def is_regression(self) -> bool:
        return self.likelihood == "regression"

    @property
    def noise(self) -> dict[str, float]:
        return {"sigma_noise": SIGMA} if self.is_regression else {}

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Sequential:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, self.num_outputs)).to(dtype)

    def data(
        self, seed: int = 0, num_data: int = NUM_DATA, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_data, 3, generator=generator, dtype=torch.float64)
        if self.is_regression:
            y = torch.randn(num_data, self.num_outputs, generator=generator, dtype=torch.float64).to(dtype)
        else:
            y = torch.randint(self.num_outputs, (num_data,), generator=generator)
        return x.to(dtype), y

    def loader(self, seed: int = 0, **settings: Any) -> DataLoader:
        return DataLoader(TensorDataset(*self.data(seed, **settings)), batch_size=7)

    def laplace(self, flavour: str, structure: str = "iterncgp", **settings: Any) -> Any:
        model = settings.pop("model", None) or self.model()
        settings = {"prior_precision": PRECISION, **self.noise, **settings}
        la = Laplace(model, self.likelihood, flavour, structure, **settings)
        la.fit(self.loader())
        return la

    def with_all_actions(self, flavour: str, policy: str, **settings: Any) -> Any:
        """Fitted with as many actions as the exact posterior has: in groups, `refine` adds the directions left."""
        la = self.laplace(flavour, **POLICIES[policy], **settings)
        while policy == "clusters" and la.report_.status != "exhausted":
            la.refine(self.loader(), epochs=2)
        return la

    @cache  # noqa: B019
    def jacobian(self, flavour: str, seed: int = 0) -> Tensor:  # (N, C, P)
        everything = dense_jacobian(self.model(), self.data(seed)[0])
        return everything if flavour == "all" else everything[..., 20:]  # 3·5 + 5 weights before the last layer

    def weights(self, flavour: str) -> Tensor:
        return parameters_to_vector(self.model().parameters()).detach()[0 if flavour == "all" else 20 :]

    def curvature(self, sigma: float = SIGMA) -> Tensor:
        name = "gaussian" if self.is_regression else "softmax"
        return oracles.curvature_matrix(name, self.model()(self.data()[0]).detach(), noise=sigma**2)

    def covariance(self, flavour: str, precision: Tensor | float = PRECISION) -> Tensor:  # (P, P)
        return oracles.weight_covariance(self.jacobian(flavour).flatten(0, 1), self.curvature(), precision)

    def evidence(self, flavour: str, precision: Tensor, prior_mean: float = 0.0, sigma: float = SIGMA) -> Tensor:
        J, theta, (x, y) = self.jacobian(flavour).flatten(0, 1), self.weights(flavour) - prior_mean, self.data()
        name = "gaussian" if self.is_regression else "softmax"
        fit = oracles.log_prob(name, self.model()(x).detach(), y, noise=sigma**2)
        determinant = oracles.log_determinant(self.curvature(sigma), J / precision @ J.T)
        return fit - 0.5 * (precision * theta.square()).sum() - 0.5 * determinant


REGRESSIONS = [Problem("regression", 1), Problem("regression", 3)]
CLASSIFICATION = Problem("classification", 3)
PROBLEMS = [*REGRESSIONS, Problem("classification", 2), CLASSIFICATION]
problems = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.likelihood}-{p.num_outputs}")
regressions = pytest.mark.parametrize("problem", REGRESSIONS, ids=lambda p: f"{p.num_outputs}-outputs")
flavours = pytest.mark.parametrize("flavour", FLAVOURS)
policies = pytest.mark.parametrize("policy", POLICIES)

# What no hyperparameter may be.
WRONG: dict[str, list[Any]] = {
    "prior_precision": [0.0, -1.0, math.nan, math.inf, "1.5", None, torch.ones(1, 1), torch.tensor([1.0, -1.0])],
    "prior_mean": [math.nan, math.inf, "72", None, torch.ones(1, 1)],
    "sigma_noise": [0.0, -1.0, math.nan, math.inf, "1.2", None, torch.ones(1, 1), torch.tensor([1.0, -1.0])],
    "temperature": [0.0, -1.0, math.nan, math.inf, "1.1", None, torch.ones(2)],
}


class NamedModel(nn.Module):
    """Takes a mapping."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.body = model

    def forward(self, batch: Any) -> Tensor:
        return self.body(batch["features"])

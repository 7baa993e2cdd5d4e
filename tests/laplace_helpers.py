"""What the tests of the laplace-torch flavours share: fitted posteriors, and the dense truth about them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ntk_iterncgp  # noqa: F401  registers the flavours
from tests import oracles
from tests.network_cases import BY_NAME, NetworkCase, dense_jacobian, outputs_of

MLP, ONE, SEVERAL = (BY_NAME[n] for n in ("mlp", "regression with one output", "regression with several outputs"))
ENOUGH = 200  # products: more than any of these problems can use
NUM_DATA, BATCH = 14, 7

problems = pytest.mark.parametrize("case", [MLP, ONE, SEVERAL], ids=["classification", "one output", "several outputs"])
subsets = pytest.mark.parametrize("subset", ["all", "last_layer"])
# That no such warning is given is for a test of its own to say.
quiet_scalars = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning")
policies = pytest.mark.parametrize("policy", ["curvature_residual", "random_subspace"])

# The last linear layers of the cases whose outputs are those of a last linear layer.
HEADS = {
    "mlp": "2",
    "cnn with BatchNorm and in-place ReLU": "5",
    "residual net": "head",
    "transformer encoder layer": "head",
    "LayerNorm and attention": "head",
    "frozen layer": "2",
    "tied embedding": "head",
    "layer applied twice": "4",
    "embedding": "head",
    "mapping": "head",
    "mapping and outputs with logits": "head",
    "unused parameters": "body.2",
    "regression with flat outputs": "body.2",
    "regression with one output": "2",
    "regression with several outputs": "2",
}


# The dense truth


@dataclass(frozen=True)
class Dense:
    """A linearised network written out: Jacobians at the training and at new inputs, outputs, targets, weights."""

    likelihood: str
    J: Tensor  # (n, P)
    f: Tensor  # (N, C)
    y: Tensor
    weights: Tensor  # (P,)
    new_J: Tensor  # (b, C, P)
    new_f: Tensor  # (b, C)

    def log_prob(self, f: Tensor, sigma: float) -> Tensor:
        return oracles.log_prob(self.likelihood, f, self.y, noise=sigma**2)

    def curvature(self, f: Tensor, sigma: float) -> Tensor:  # (n, n)
        return oracles.curvature_matrix(self.likelihood, f, noise=sigma**2)

    def covariance(
        self, precision: Tensor | float, sigma: float = 1.0, temperature: float = 1.0, f: Tensor | None = None
    ) -> Tensor:  # (P, P)
        """(Λ + JᵀWJ)⁻¹ with W at the network's outputs, or at other latent values."""
        W = self.curvature(self.f if f is None else f, sigma) / temperature
        return oracles.weight_covariance(self.J, W, precision)

    def at_new(self, weight_covariance: Tensor) -> Tensor:  # (b, C, C)
        return self.new_J @ weight_covariance @ self.new_J.mT

    def mode(
        self, precision: Tensor, prior_mean: Tensor, sigma: float = 1.0, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Newton's method in weight space, halved until it ascends: θ that maximises

        log p(y | f* + J(θ − θ*)) / T − ½ (θ − μ₀)ᵀΛ(θ − μ₀), and the latent values (N, C) there.
        """

        def latent(theta: Tensor) -> Tensor:
            return self.f + (self.J @ (theta - self.weights)).reshape(self.f.shape)

        def objective(theta: Tensor) -> Tensor:
            penalty = (precision * (theta - prior_mean).square()).sum() / 2
            return self.log_prob(latent(theta), sigma) / temperature - penalty

        theta = prior_mean.clone()
        for _ in range(100):
            f = latent(theta)
            score = oracles.score(self.likelihood, f, self.y, noise=sigma**2) / temperature
            gradient = self.J.T @ score - precision * (theta - prior_mean)
            step = self.covariance(precision, sigma, temperature, f) @ gradient
            while not objective(theta + step) >= objective(theta) - 1e-13 * objective(theta).abs():
                step = step / 2
            theta = theta + step
            if float(step.norm()) <= 1e-13 * float(theta.norm()):
                return theta, latent(theta)
        raise RuntimeError("The oracle did not converge.")


def written_out(case: NetworkCase, subset: str = "all", *, num_data: int = NUM_DATA, x: Any = None) -> Dense:
    model = case.model().eval()
    batches = list(case.loader(num_data=num_data, batch_size=BATCH))
    inputs = [batch if case.name.startswith("mapping") else batch[0] for batch in batches]
    y = torch.cat([b[case.dict_key_y] if case.name.startswith("mapping") else b[1] for b in batches])
    x = case.new_inputs() if x is None else x
    if subset == "all":
        jacobian, chosen = dense_jacobian, [p for p in model.parameters() if p.requires_grad]
    else:
        head = model.get_submodule(HEADS[case.name])
        jacobian, chosen = head_jacobian(head), list(head.parameters())
    return Dense(
        "softmax" if case.likelihood == "classification" else "gaussian",
        torch.cat([jacobian(model, batch) for batch in inputs]).flatten(0, 1),
        torch.cat([outputs_of(model, batch) for batch in inputs]),
        y,
        torch.cat([p.detach().flatten() for p in chosen]),
        jacobian(model, x),
        outputs_of(model, x),
    )


def head_jacobian(head: nn.Linear) -> Callable[[nn.Module, Any], Tensor]:
    """J = φᵀ ⊗ I, entry by entry, from the inputs of the last layer."""

    def jacobian(model: nn.Module, x: Any) -> Tensor:
        seen: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        with torch.no_grad():
            model(x)
        handle.remove()
        (phi,) = seen
        C, D = head.weight.shape
        weight = torch.zeros(len(phi), C, C, D, dtype=phi.dtype)
        for c in range(C):
            weight[:, c, c] = phi
        eye = torch.eye(C, dtype=phi.dtype).expand(len(phi), C, C)
        return torch.cat([weight.flatten(2)] + ([eye] if head.bias is not None else []), 2)

    return jacobian


def training(case: NetworkCase, dtype: torch.dtype = torch.float64) -> DataLoader:
    return case.loader(dtype, num_data=NUM_DATA, batch_size=BATCH)


def training_inputs(case: NetworkCase) -> Tensor:
    return torch.cat([batch[0] for batch in training(case)])


def fitted(
    case: NetworkCase,
    subset: str = "all",
    *,
    dtype: torch.dtype = torch.float64,
    loader: Any = None,
    model: nn.Module | None = None,
    **settings: Any,
) -> Any:
    la = unfitted(case, subset, dtype=dtype, model=model, **settings)
    la.fit(training(case, dtype) if loader is None else loader)
    return la


def unfitted(
    case: NetworkCase,
    subset: str = "all",
    *,
    dtype: torch.dtype = torch.float64,
    model: nn.Module | None = None,
    **settings: Any,
) -> Any:
    model = case.model(dtype) if model is None else model
    settings = {"policy": "curvature_residual", "num_actions": ENOUGH, **case.keys, **settings}
    return Laplace(model, case.likelihood, subset, "iterncgp", **settings)


def full_laplace(case: NetworkCase, subset: str = "all", **settings: Any) -> Any:
    """laplace-torch's own, with the exact Gauss–Newton matrix."""
    la = Laplace(case.model(), case.likelihood, subset, "full", **settings)
    la.fit(training(case))
    return la


def near_and_far(case: NetworkCase, dtype: torch.dtype = torch.float64) -> Tensor:
    """Two training inputs, two new ones, and two far away from all."""
    training, new = next(iter(case.loader(dtype)))[0], case.new_inputs(dtype)
    return torch.cat([training[:2], new[:2], 10 * new[2:4]])


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    """To a tolerance relative to the largest entry."""
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * scale)


def differ(one: Tensor, other: Tensor, by: float = 1e-3) -> bool:
    return float((one - other).abs().max()) > by * float(other.abs().max())


def not_below(actual: Tensor, exact: Tensor, tolerance: float = 1e-9) -> None:
    """actual − exact is positive semidefinite."""
    difference = (actual - exact).double()
    smallest = torch.linalg.eigvalsh((difference + difference.mT) / 2).min()
    assert float(smallest) >= -tolerance * float(exact.abs().max()), (
        f"below the exact variance by {-float(smallest):.2e}"
    )


def precisions(la: Any, structure: str) -> Tensor | float:
    generator = torch.Generator().manual_seed(6)
    size = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}[structure]
    return (0.3 + 3 * torch.rand(size, generator=generator)).double()


def validation(case: NetworkCase, num_data: int = 15) -> DataLoader:
    """Held-out data in batches of four."""
    return DataLoader(case.dataset(num_data, 5, torch.float64), batch_size=4)


GRID = {"log_prior_prec_min": -2, "log_prior_prec_max": 3, "grid_size": 6}

"""Float32 where data are nearly exhausted, so that actions are nearly dependent; and callers who ask for less."""

from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.laplace_torch.grid import pass_once
from ntk_iterncgp.linalg.factor import independent_columns
from ntk_iterncgp.posterior.tuning import ScalarPath
from tests import oracles
from tests.laplace_helpers import not_below
from tests.network_cases import dense_jacobian, outputs_of


def confident_net(seed: int, width: int, scale: float, num_data: int) -> tuple[nn.Module, DataLoader]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
    with torch.no_grad():
        model[2].weight *= scale
        model[2].bias *= scale
        x = torch.randn(num_data, 4)
        y = model(x).argmax(1)
    return model, DataLoader(TensorDataset(x, y), batch_size=16)


def written_out(model: nn.Module, loader: DataLoader, subset: str = "all") -> tuple[Any, Tensor]:
    """J as a function, and JᵀWJ, in float64; of the last layer, if asked, its columns alone."""
    exact = nn.Sequential(*[type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m for m in model])
    exact.load_state_dict(model.state_dict())
    exact = exact.double()
    start = 0 if subset == "all" else sum(p.numel() for p in model[0].parameters())
    x = loader.dataset.tensors[0].double()

    def rows(at: Tensor) -> Tensor:
        return dense_jacobian(exact, at.double())[..., start:]

    W = oracles.curvature_matrix("softmax", outputs_of(exact, x), noise=1.0)
    J = rows(x).flatten(0, 1)
    return rows, J.T @ W @ J


@pytest.mark.slow
@pytest.mark.parametrize(("subset", "width", "num_data"), [("all", 6, 40), ("last_layer", 8, 300)])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_more_actions_than_weights_are_not_below_the_exact_variance(
    subset: str, width: int, num_data: int, scale: float
) -> None:
    """Folding divides by R, of which the least eigenvalues are smaller than the rounding of A."""
    model, loader = confident_net(4, width, scale, num_data)
    rows, H = written_out(model, loader, subset)
    x = 2 * torch.randn(5, 4)
    J = rows(x)
    exact = J @ torch.linalg.inv(H + torch.eye(len(H), dtype=torch.float64)) @ J.mT
    truth = float(torch.linalg.slogdet(torch.eye(len(H), dtype=torch.float64) + H)[1])
    la = Laplace(model, "classification", subset, "iterncgp", num_actions=num_data // 5, policy="clusters")
    la.fit(loader)
    for _ in range(6):
        la.refine(loader, epochs=2)
        covariance = la.predictive_moments(x)[1].double()
        for found, expected in zip(covariance, exact, strict=True):
            not_below(found, expected, 1e-4)
        lower, upper = map(float, la.posterior.log_determinant_bounds(la.prior_precision, la._noise_scale))
        assert lower <= truth + 1e-4 and upper >= truth - 1e-4
    assert la._fit.state.clusters.rank > len(H) and bool((covariance <= 1.02 * exact.abs().max()).all())
    attributed = la.attribution(x).sum(1)
    prior = (J @ J.mT).diagonal(dim1=1, dim2=2).sum(1)
    error = attributed - (prior - covariance.diagonal(dim1=1, dim2=2).sum(1))
    assert float((error.abs() / prior).max()) < 2e-3


@pytest.mark.parametrize("seed", [2, 3, 6])
def test_refining_to_the_end_in_float32_raises_no_false_alarm_and_bounds_are_bounds(seed: int) -> None:
    model, loader = confident_net(seed, 40, 5.0, 100)
    _, H = written_out(model, loader)
    truth = float(torch.linalg.slogdet(torch.eye(len(H), dtype=torch.float64) + H)[1])
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=30)
    la.fit(loader)
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    validation = DataLoader(TensorDataset(x, y), batch_size=20)
    for _ in range(4):
        la.refine(loader, epochs=2)
        lower, upper = map(float, la.posterior.log_determinant_bounds(la.prior_precision, la._noise_scale))
        assert lower <= truth + 1e-4 and upper >= truth - 1e-4
        assert la.report_.information_captured <= lower / truth + 1e-6
        la.prior_precision = 1e-2
        path = ScalarPath(la.posterior, pass_once(la, validation, progress_bar=False), la._noise_scale)
        of_grid = path.moments(torch.tensor(1e-2, dtype=torch.float64))[0][1].diagonal(dim1=1, dim2=2)
        predicted = la.predictive_moments(x)[1].double().diagonal(dim1=1, dim2=2)
        assert float((of_grid / predicted - 1).abs().max()) < 0.02
        la.prior_precision = 1.0
    assert la.posterior.rank > 150


def test_of_many_nearly_dependent_columns_those_kept_are_definite() -> None:
    """No pivot is below 1e-6 there, and eigenvalues are nevertheless: they shrink with each further one."""
    generator = torch.Generator().manual_seed(0)
    for size in (40, 150, 300):
        for _ in range(10):
            lower = torch.randn(size, size, generator=generator, dtype=torch.float64).tril(-1)
            lower += 1.02e-3 * torch.eye(size, dtype=torch.float64)
            lower /= lower.norm(dim=1, keepdim=True)
            gram = lower @ lower.T
            kept = independent_columns(gram)
            assert len(kept) >= 10 and float(torch.linalg.eigvalsh(gram[kept][:, kept]).min()) > 5e-13


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_inside_autocast_all_is_as_outside(subset: str) -> None:
    model, loader = confident_net(0, 30, 1.0, 80)
    x = torch.randn(6, 4)
    fitted = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            la = Laplace(model, "classification", subset, "iterncgp", num_actions=60)
            la.fit(loader)
            la.refine(loader, epochs=2)
            rows = torch.ones(1, 3, la.n_params)
            samples = la.sample(2, generator=torch.Generator().manual_seed(0))
            fitted.append(
                [*la.predictive_moments(x), la.functional_variance(rows), la(x, link_approx="quadrature"), samples]
            )
    for outside, inside in zip(*fitted, strict=True):
        assert torch.equal(outside, inside)


def test_a_default_dtype_of_float64_beside_a_float32_model_changes_nothing() -> None:
    model, loader = confident_net(0, 6, 1.0, 40)
    x, variances = torch.randn(3, 4), []
    try:
        for default in (torch.float32, torch.float64):
            torch.set_default_dtype(default)
            la = Laplace(model, "classification", "all", "iterncgp", num_actions=8)
            la.fit(loader)
            variances.append(la.predictive_moments(x)[1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert variances[1].dtype == torch.float32
    torch.testing.assert_close(*variances)


def test_the_random_numbers_of_the_user_stay_as_they_are() -> None:
    model, loader = confident_net(0, 6, 1.0, 40)
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=8)
    before = torch.get_rng_state()
    la.estimate_cost(loader)
    la.fit(loader)
    assert torch.equal(torch.get_rng_state(), before)

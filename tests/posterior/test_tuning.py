"""Hyperparameters after the fit: from the small matrices what refits would give, and one pass over a validation set."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.jacobian.rows import DenseRows, Rows
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.posterior.predictive import expected_response
from ntk_iterncgp.posterior.tuning import ScalarPath, ValidationPart
from tests.clusters_helpers import Net, make_net
from tests.laplace_helpers import close

GRID = {"log_prior_prec_min": -2, "log_prior_prec_max": 2.5, "grid_size": 50, "n_samples": 64}


def net(likelihood: str = "classification") -> Net:
    """Trained a little, so that the validation loss has a minimum inside the grid."""
    case = make_net(11, num_data=40, likelihood=likelihood, num_outputs=3 if likelihood == "classification" else 2)
    with torch.no_grad():
        truth = case.x @ torch.tensor([[2.0, -1, 0], [0, 1, -2], [1, 1, 1]], dtype=torch.float64)
    y = truth.argmax(1) if likelihood == "classification" else truth[:, :2]
    optimizer = torch.optim.Adam(case.model.parameters(), 0.05)
    for _ in range(80):
        optimizer.zero_grad()
        outputs = case.model(case.x)
        if likelihood == "classification":
            loss = torch.nn.functional.cross_entropy(outputs, y)
        else:
            loss = (outputs - y).square().mean()
        loss.backward()
        optimizer.step()
    return Net(case.model, likelihood, case.x, y, case.sigma)


def held_out(case: Net) -> DataLoader:
    generator = torch.Generator().manual_seed(4)
    x = 1.5 * torch.randn(60, 3, generator=generator, dtype=torch.float64)
    truth = x @ torch.tensor([[2.0, -1, 0], [0, 1, -2], [1, 1, 1]], dtype=torch.float64)
    truth = truth + torch.randn(truth.shape, generator=generator, dtype=torch.float64)
    y = truth.argmax(1) if case.likelihood == "classification" else truth[:, :2]
    return DataLoader(TensorDataset(x, y), batch_size=20)


def fitted(case: Net, **settings: Any) -> Any:
    la = case.laplace(**{"num_actions": 10, **settings})
    la.fit(case.loader(batch_size=40))
    return la


def loss_of(la: Any, loader: DataLoader, *, num_points: int = 128, differentiable: bool = True) -> float:
    """The summed negative log-likelihood of predictions. Where a gradient is asked for, the link takes another root of
    the covariance, and with few points the loss is a little different."""
    total = 0.0
    for x, y in loader:
        mean, covariance = la.predictive_moments(x)
        if la.likelihood == "classification":
            covariance.requires_grad_(differentiable)
            settings: dict[str, Any] = {"link": "quadrature", "num_samples": num_points}
            p = expected_response(Softmax(3), mean, covariance, **settings)
            total -= float(p.detach().log().gather(1, y[:, None]).sum())
        else:
            variance = covariance.diagonal(dim1=1, dim2=2) + la.sigma_noise.square()
            total -= float(torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum())
    return total


class Counted:
    """A validation set that counts how often its batches are taken."""

    def __init__(self, loader: DataLoader) -> None:
        self.data, self.count = list(loader), 0

    def loader(self) -> DataLoader:
        counted = self

        class Batches(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return len(counted.data)

            def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
                counted.count += 1
                return counted.data[i]

        return DataLoader(Batches(), batch_size=None)


@pytest.mark.slow
@pytest.mark.parametrize(("likelihood", "cotangents"), [("classification", 1), ("regression", 2)])
def test_the_grid_picks_what_fifty_refits_would_pick_and_passes_the_validation_set_once(
    likelihood: str, cotangents: int
) -> None:
    case = net(likelihood)
    la, counted = fitted(case, cotangents=cotangents), Counted(held_out(case))
    la.optimize_prior_precision(method="gridsearch", val_loader=counted.loader(), link_approx="quadrature", **GRID)
    assert counted.count == len(counted.data)
    grid = torch.logspace(-2, 2.5, 50)
    losses = []
    for precision in grid:
        refit = fitted(case, cotangents=cotangents, prior_precision=float(precision))
        losses.append(loss_of(refit, held_out(case), num_points=64, differentiable=False))
    best = int(torch.tensor(losses).argmin())
    assert 0 < best < 49, "the minimum is expected inside the grid, or else this test shows little"
    assert float(la.prior_precision) == pytest.approx(float(grid[best]))


@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_moments_from_small_matrices_are_those_of_predictions(structure: str, dtype: torch.dtype) -> None:
    case = net()
    la = case.laplace(dtype, num_actions=10, cotangents=2, temperature=1.7)
    la.fit(case.loader(dtype))
    x, y = next(iter(held_out(case)))
    rows = next(iter(la._rows_at(x.to(dtype))))
    part = ValidationPart.of(rows, la.posterior, la.mean - la.prior_mean, y, layerwise=structure == "layerwise")
    for precision in ([0.05], [3.0], [40.0]) if structure == "scalar" else ([0.1, 1.0, 5.0, 30.0],):
        la.prior_precision = torch.tensor(precision, dtype=dtype)
        mean, covariance = la.predictive_moments(x.to(dtype))
        found = part.moments(la.posterior, la.prior_precision, la._noise_scale, refined=False)
        tolerance = 1e-9 if dtype == torch.float64 else 3e-4
        close(found[0], mean, tolerance)
        close(found[1], covariance, tolerance)
        if structure == "scalar":
            ((path_mean, path_covariance, _),) = ScalarPath(la.posterior, [part], la._noise_scale).moments(
                la.prior_precision.double()
            )
            close(path_mean, mean, tolerance)
            close(path_covariance, covariance, tolerance)


def test_rows_by_layer_add_up_and_both_ways_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(4, 2, 9, generator=generator, dtype=torch.float64)
    weights = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    rows, sizes = DenseRows(J[..., 0], J), (4, 2, 3)
    fast, plain = list(rows.by_layer(weights, sizes)), list(Rows.by_layer(rows, weights, sizes))
    for (cross, covariance), (plain_cross, plain_covariance) in zip(fast, plain, strict=True):
        close(cross, plain_cross, 1e-12)
        close(covariance, plain_covariance, 1e-12)
    close(sum(cross for cross, _ in fast), J @ weights, 1e-12)
    close(sum(covariance for _, covariance in fast), J @ J.mT, 1e-12)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_gradient_finds_what_a_fine_grid_finds(likelihood: str) -> None:
    case = net(likelihood)
    la, counted = fitted(case), Counted(held_out(case))
    before = loss_of(la, held_out(case))
    settings: dict[str, Any] = {"method": "validation", "prior_structure": "scalar", "init_prior_prec": 1.0, "lr": 0.2}
    la.optimize_prior_precision(val_loader=counted.loader(), **settings)
    assert counted.count == len(counted.data) and la.prior_precision.shape == (1,)
    found = float(la.prior_precision)
    assert loss_of(la, held_out(case)) < before
    grid = torch.logspace(-1, 2.5, 60)
    losses = []
    for precision in grid:
        la.prior_precision = float(precision)
        losses.append(loss_of(la, held_out(case)))
    best = float(grid[int(torch.tensor(losses).argmin())])
    la.prior_precision = found
    assert loss_of(la, held_out(case)) < min(losses) + 1e-3
    assert found == pytest.approx(best, rel=0.15)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_one_precision_per_layer_is_never_worse_than_the_scalar_it_starts_from(likelihood: str) -> None:
    case = net(likelihood)
    la, loader = fitted(case), held_out(case)
    la.optimize_prior_precision(method="validation", prior_structure="scalar", val_loader=loader, lr=0.2)
    scalar, start = loss_of(la, loader), float(la.prior_precision)
    la.optimize_prior_precision(
        method="validation", prior_structure="layerwise", val_loader=loader, init_prior_prec=start, n_steps=40
    )
    assert la.prior_precision.shape == (4,)
    assert loss_of(la, loader) <= scalar + 1e-9
    assert la.temperature == 1.0


def test_no_steps_keep_the_start() -> None:
    case = net()
    la = fitted(case)
    la.optimize_prior_precision(
        method="validation", val_loader=held_out(case), init_prior_prec=3.0, n_steps=0, prior_structure="scalar"
    )
    assert la.prior_precision.tolist() == pytest.approx([3.0])


def test_the_temperature_is_tuned_with_the_precision() -> None:
    case, loader = net(), held_out(net())
    losses = []
    for tune in (False, True):
        la = fitted(case, temperature=0.5)
        la.optimize_prior_precision(
            method="validation", prior_structure="scalar", val_loader=loader, tune_temperature=tune, lr=0.2
        )
        assert (la.temperature != 0.5) == tune
        losses.append(loss_of(la, loader))
    assert losses[1] < losses[0]
    la(case.x[:2])  # and predictions follow it
    refit = fitted(case, temperature=la.temperature, prior_precision=float(la.prior_precision))
    close(la.predictive_moments(case.x[:4])[1], refit.predictive_moments(case.x[:4])[1])


def test_tuning_says_what_it_needs() -> None:
    case = net("regression")
    la = fitted(case)
    with pytest.raises(ValueError, match="`val_loader` must hold data"):
        la.optimize_prior_precision(method="validation")
    with pytest.raises(ValueError, match="`tune_temperature` must be False for regression"):
        la.optimize_prior_precision(method="validation", val_loader=held_out(case), tune_temperature=True)
    with pytest.raises(ValueError, match=r"`prior_structure` must be 'scalar' or 'layerwise', .*; got 'diag'"):
        la.optimize_prior_precision(method="validation", val_loader=held_out(case), prior_structure="diag")


def test_the_evidence_of_clusters_is_a_lower_bound_and_is_maximised() -> None:
    case = net()
    few, all_of_it = fitted(case, num_actions=4), fitted(case, num_actions=40, cotangents=2)
    for precision in (0.1, 1.0, 10.0):
        bound = few.log_marginal_likelihood(torch.tensor([precision], dtype=torch.float64))
        exact = all_of_it.log_marginal_likelihood(torch.tensor([precision], dtype=torch.float64))
        assert float(bound) < float(exact)
    few.prior_precision = 1.0
    before = float(few.log_marginal_likelihood())
    few.optimize_prior_precision(method="marglik", prior_structure="layerwise")
    assert float(few.log_marginal_likelihood()) > before

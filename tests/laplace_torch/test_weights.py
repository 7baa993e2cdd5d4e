"""The posterior of the weights as laplace-torch's users ask for it: precision, density, and the network at draws."""

import warnings

import pytest
import torch
from laplace import Laplace, marglik_training
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.laplace_helpers import ENOUGH, MLP, ONE, SEVERAL, fitted, problems, subsets
from tests.network_cases import NetworkCase


@problems
@subsets
@pytest.mark.parametrize("num_actions", [4, ENOUGH])
def test_precision_and_density_are_those_of_the_covariance(case: NetworkCase, subset: str, num_actions: int) -> None:
    la = fitted(case, subset, num_actions=num_actions, prior_precision=2.0)
    P = la.n_params
    one = torch.eye(P, dtype=torch.float64)
    covariance = la.functional_variance(one[None])[0]  # rows that are the weights themselves
    precision = la.posterior_precision
    assert precision.shape == (P, P)
    torch.testing.assert_close(precision.to_dense() @ covariance, one, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(precision.diagonal(), precision.to_dense().diagonal())
    torch.testing.assert_close(precision @ one[0], precision.to_dense()[:, 0])
    mean, value = la._mean_weights(la._posterior_now()), la.sample(1)[0]
    normal = torch.distributions.MultivariateNormal(mean, covariance)
    torch.testing.assert_close(la.log_prob(value), normal.log_prob(value), rtol=1e-6, atol=1e-6)
    difference = normal.log_prob(value) - normal.log_prob(mean)
    torch.testing.assert_close(la.log_prob(value, normalized=False), difference, rtol=1e-6, atol=1e-6)


@subsets
@pytest.mark.parametrize("case", [MLP, ONE, SEVERAL], ids=str)
def test_the_network_at_drawn_weights_is_the_network_with_these_weights(case: NetworkCase, subset: str) -> None:
    la, x = fitted(case, subset, prior_precision=30.0), case.new_inputs()
    generator = torch.Generator().manual_seed(0)
    drawn = la.sample(3, generator=generator)
    found = la.functional_samples(x, "nn", 3, generator=torch.Generator().manual_seed(0))
    model = case.model().eval()
    weights = list((model[-1] if subset == "last_layer" and isinstance(model, nn.Sequential) else model).parameters())
    if sum(w.numel() for w in weights) != drawn.shape[1]:
        pytest.skip("the last layer is elsewhere")
    with torch.no_grad():
        for values, outputs in zip(drawn, found, strict=True):
            nn.utils.vector_to_parameters(values, weights)
            torch.testing.assert_close(outputs, model(x).reshape(outputs.shape))
    torch.manual_seed(0)
    whole = la(x, pred_type="nn", n_samples=200)
    if case.likelihood == "classification":
        torch.testing.assert_close(whole.sum(1), torch.ones(len(whole), dtype=whole.dtype))
    else:
        assert [part.shape for part in whole] == [found.shape[1:]] * 2 and (whole[1] > 0).all()


def test_one_precision_is_tuned_unless_asked_for_more() -> None:
    la = fitted(MLP)
    la.optimize_prior_precision(n_steps=2)
    assert len(la.prior_precision) == 1
    la.optimize_prior_precision(n_steps=2, prior_structure="layerwise")
    assert len(la.prior_precision) == 4


def test_the_evidence_trains_a_network_with_this_posterior() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 40)[:, None]
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(TensorDataset(x, torch.sin(2 * x)), 40)
    model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la, trained, evidences, _ = marglik_training(
            model, loader, "regression", "iterncgp", optimizer_kwargs={"lr": 1e-2}, n_epochs=30, marglik_frequency=15
        )
    assert isinstance(la, type(Laplace(trained, "regression", "all", "iterncgp")))
    assert evidences[-1] < evidences[0]  # negative ones

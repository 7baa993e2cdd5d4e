"""The exact posterior of a small network, against weight-space Laplace written out in float64."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp import Checkpoint
from ntk_iterncgp.fitting import cost as cost_module
from ntk_iterncgp.fitting import exact_network
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.likelihoods.base import ANY_VARIANCE
from ntk_iterncgp.posterior.weight_space import precision_of_weights
from tests import oracles
from tests.laplace_helpers import MLP, close, fitted, precisions, problems, subsets, training, unfitted, written_out

automatic = partial(fitted, policy="auto", num_actions=None)
SIGMA, TEMPERATURE = 0.4, 1.7


def wide(num_data: int, *, width: int = 3, outputs: int = 3) -> tuple[nn.Module, TensorDataset]:
    """A classifier, with more weights than rows of J or with fewer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    return model, TensorDataset(torch.randn(num_data, 2).double(), torch.arange(num_data) % outputs)


def of_data(model: nn.Module, data: TensorDataset, **settings):
    settings = {"policy": "auto", "num_actions": None, **settings}
    return fitted(MLP, model=model, loader=DataLoader(data, 8), **settings)


@problems
@subsets
@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
def test_mean_and_covariance_are_those_of_the_dense_posterior(case, subset, structure):
    la, truth = automatic(case, subset), written_out(case, subset)
    la.temperature = TEMPERATURE
    sigma = 1.0 if case.likelihood == "classification" else SIGMA
    la.sigma_noise, la.prior_precision = sigma, precisions(la, structure)
    mean, covariance = la.latent(case.new_inputs())
    precision = precision_of_weights(la.prior_precision, la._layer_sizes())
    close(mean, truth.new_f, 1e-8)
    close(covariance, truth.at_new(truth.covariance(precision, sigma, TEMPERATURE)), 1e-8)
    assert la.report_.status == "exact" and la.report_.information_captured > 1 - 1e-9
    assert "all of the information" in str(la.report_)


@problems
def test_evidence_and_its_gradient_are_those_of_the_dense_posterior(case):
    la, truth = automatic(case), written_out(case)
    leaf = torch.rand(la.n_layers, dtype=torch.float64) + 0.2
    found, expected = leaf.clone().requires_grad_(), leaf.clone().requires_grad_()
    sigma = 1.0 if case.likelihood == "classification" else SIGMA
    precision = torch.repeat_interleave(expected, torch.tensor(la._layer_sizes()))
    GGN = truth.J.T @ truth.curvature(truth.f, sigma) @ truth.J
    log_ratio = torch.logdet(torch.eye(len(GGN)).double() + GGN / precision)
    theta = (precision * truth.weights.square()).sum()
    oracle = truth.log_prob(truth.f, sigma) - 0.5 * (log_ratio + theta)
    noise = None if case.likelihood == "classification" else torch.tensor(sigma, dtype=torch.float64)
    evidence = la.log_marginal_likelihood(found, noise)
    close(evidence.detach(), oracle.detach(), 1e-8)
    close(*(torch.autograd.grad(value, at)[0] for value, at in ((evidence, found), (oracle, expected))), 1e-8)


@pytest.mark.parametrize("num_data", [6, 90], ids=["more weights than rows", "more rows than weights"])
def test_rank_is_the_smaller_of_weights_and_rows(num_data, monkeypatch):
    model, data = wide(num_data)
    la = of_data(model, data)
    assert la.posterior.rank == min(21, 2 * num_data) and la.report_.status == "exact"
    monkeypatch.setattr(exact_network, "FOLD_FACTOR", 100)  # one decomposition instead of several
    whole = of_data(model, data)
    close(la.latent(data.tensors[0])[1], whole.latent(data.tensors[0])[1], 1e-12)


def test_nothing_jumps_at_the_switch_to_groups_with_all_actions():
    model, data = wide(20)
    la = of_data(model, data)
    groups = of_data(model, data, policy="clusters", num_actions=40)
    assert groups.report_.status == "exhausted"
    for one, other in zip(la.latent(data.tensors[0]), groups.latent(data.tensors[0]), strict=True):
        close(other, one, 1e-6)
    close(groups.log_marginal_likelihood(), la.log_marginal_likelihood(), 1e-6)


def test_saturated_data_say_what_little_they_do():
    """Probabilities of e⁻⁶⁰: the factor has W to a relative accuracy, where π(1 − π) would be rounding."""
    model, data = wide(10)
    with torch.no_grad():
        model[2].weight.mul_(60)
    outputs = model(data.tensors[0]).detach()
    whitened = exact_network.whitening(Softmax(3).for_prior_variance(ANY_VARIANCE), outputs)
    expected = oracles.curvature_matrix("softmax", outputs)
    assert float(outputs.softmax(1).min()) < 1e-16
    torch.testing.assert_close(torch.block_diag(*(whitened @ whitened.mT)), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "budget",
    [{"num_actions": 20}, {"max_rank": 20}, {"max_epochs": 2.0}, {"cotangents": 1}],
    ids=lambda b: next(iter(b)),
)
def test_a_budget_below_the_exact_rank_is_kept(budget):
    model, data = wide(90)
    assert of_data(model, data, **budget).report_.status != "exact"
    assert of_data(model, data, policy="exact", num_actions=20).report_.status == "exact"
    assert of_data(model, data, num_actions=21).report_.status == "exact"


def test_what_takes_too_long_is_not_chosen(monkeypatch):
    monkeypatch.setattr(cost_module, "FREE_FLOPS", 0.0)
    monkeypatch.setattr(cost_module, "CALL_FLOPS", 0.0)
    model, data = wide(200, width=60)  # 303 weights, 400 rows
    assert of_data(model, data).report_.status != "exact"


def test_what_does_not_fit_is_refused_with_its_size(monkeypatch):
    model, data = wide(90)
    monkeypatch.setattr(cost_module, "MEMORY_FRACTION", 0.0)
    assert of_data(model, data).report_.status != "exact"
    monkeypatch.setattr(cost_module, "available_bytes", lambda device: 10_000)
    with pytest.raises(MemoryError, match=r"min\(21 weights, 180 rows\) = 21 actions"):
        of_data(model, data, policy="exact")


def test_float32_is_refused_where_exact_is_insisted_on():
    la = unfitted(MLP, dtype=torch.float32, policy="exact")
    la.dtype = torch.float32
    with pytest.raises(ValueError, match=r"`dtype` must be torch.float64 for policy='exact'"):
        la.fit(training(MLP, torch.float32))
    with pytest.raises(ValueError, match="policy='exact' must be combined with mean='network'"):
        automatic(MLP, policy="exact", mean="refined")


def test_update_and_merge_stay_exact():
    model, data = wide(30)
    x, y = data.tensors
    whole, la, other = (
        of_data(model, data),
        *(of_data(model, TensorDataset(x[part], y[part])) for part in (slice(0, 11), slice(20, 30))),
    )
    la.update(DataLoader(TensorDataset(x[11:20], y[11:20]), 9))
    la.merge(other)
    close(la.latent(x)[1], whole.latent(x)[1], 1e-10)
    close(la.log_marginal_likelihood(), whole.log_marginal_likelihood(), 1e-10)
    assert la.report_.status == "exact" and "all of the information" in str(la.report_)


def test_refine_leaves_an_exact_posterior_as_it_is():
    la = automatic(MLP)
    before = la.posterior
    la.refine(training(MLP), epochs=1)
    assert la.posterior is before


def test_estimate_cost_is_that_of_the_exact_posterior():
    la = automatic(MLP)
    cost = la.estimate_cost(training(MLP))
    assert cost.num_actions == la.posterior.rank and cost.epochs == la.report_.epochs
    assert cost.fit_seconds is not None and cost.predict_seconds is not None


def test_an_interrupted_sweep_is_resumed(tmp_path, monkeypatch):
    model, data = wide(40)
    expected, visited = of_data(model, data).posterior.images, []
    visit = exact_network.FactorRun._visited

    def broken(run, state, x, y):
        visited.append(len(x))
        if len(visited) == 4:
            raise RuntimeError("the power is gone")
        return visit(run, state, x, y)

    monkeypatch.setattr(exact_network.FactorRun, "_visited", broken)
    checkpoint = Checkpoint(tmp_path / "fit", every_seconds=0)
    la = unfitted(MLP, model=model, policy="auto", num_actions=None)
    with pytest.raises(RuntimeError, match="power"):
        la.fit(DataLoader(data, 8), checkpoint=checkpoint)
    la.fit(DataLoader(data, 8), checkpoint=checkpoint)
    assert len(visited) < 4 + 5  # of five batches one at least was saved
    close(la.posterior.images, expected, 1e-12)


def test_a_saved_posterior_predicts_the_same():
    la, again = automatic(MLP), unfitted(MLP)
    again.load_state_dict(la.state_dict())
    close(again.latent(MLP.new_inputs())[1], la.latent(MLP.new_inputs())[1], 1e-12)

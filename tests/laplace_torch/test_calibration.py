"""`la.calibrate`: temperature and precision together, never clearly worse than temperature scaling."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.laplace_torch.grid import pass_once
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.posterior.calibration import FAMILIES, NEGLIGIBLE, POINTS, Losses, _without_variance
from ntk_iterncgp.posterior.predictive import expected_response
from tests.clusters_helpers import Digits, digits, make_net


class Scaled(torch.nn.Module):
    """A network that is surer than it should be, or less sure."""

    def __init__(self, model: torch.nn.Module, factor: float) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.model(x)


@pytest.fixture(scope="module")
def net() -> Digits:
    return digits(0)


def fitted(net: Digits, factor: float) -> Any:
    la = Laplace(Scaled(net.model, factor), "classification", "all", "iterncgp", num_actions=40)
    la.fit(net.loader())
    return la


def halves(net: Digits) -> tuple[DataLoader, Tensor, Tensor]:
    """Inputs to tune on and others to test on."""
    tuning = DataLoader(TensorDataset(net.new_x[:60], net.new_y[:60]), batch_size=25)
    return tuning, net.new_x[60:], net.new_y[60:]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0], ids=["too cautious", "calibrated", "confident"])
def test_it_is_as_good_as_temperature_scaling_on_confident_and_on_cautious_networks(net: Digits, factor: float) -> None:
    la = fitted(net, factor)
    tuning, x, y = halves(net)
    found = la.calibrate(tuning)
    temperatures = torch.logspace(-1, 1, 161, dtype=torch.float64)
    f, f_new, targets = la.model(net.new_x[:60]).double(), la.model(x).double(), net.new_y[:60]
    losses = torch.stack([nll_loss((f / T).log_softmax(1), targets) for T in temperatures])
    floor = nll_loss((f_new / temperatures[int(losses.argmin())]).log_softmax(1), y, reduction="none")
    floor, ours = floor.detach(), nll_loss(la(x, link_approx="quadrature").detach().double().log(), y, reduction="none")
    noise = float((ours - floor).std()) / math.sqrt(len(y))
    assert float((ours - floor).mean()) < 0.005 + 2 * noise
    assert found.output_temperature == la.output_temperature and found.family in FAMILIES
    if factor == 0.25:
        assert found.output_temperature < 0.6, "a variance alone cannot make it surer"


def test_the_losses_are_those_of_the_link(net: Digits) -> None:
    la = fitted(net, 2.0)
    tuning, *_ = halves(net)
    parts = pass_once(la, tuning, False)
    losses = Losses(parts, la.posterior, la._noise_scale.detach())
    pairs = [(1.0, 3.0), (0.5, 3.0), (2.0, math.inf)]
    table = losses(pairs)
    for (T, precision), row in zip(pairs[:2], table, strict=False):
        la.prior_precision, la.output_temperature = precision, 1.0
        mean, covariance = (moment.double() for moment in la.predictive_moments(net.new_x[:60]))
        p = expected_response(Softmax(10), mean / T, covariance / T**2, link="quadrature", num_samples=POINTS)
        assert torch.allclose(row, -p.log().gather(1, net.new_y[:60, None])[:, 0].detach(), rtol=1e-3, atol=1e-4)
    plain = (la.model(net.new_x[:60]).double() / 2).log_softmax(1)
    assert torch.allclose(table[2], nll_loss(plain, net.new_y[:60], reduction="none"), atol=1e-5)


@pytest.mark.parametrize("ask", ["quadrature", "probit", "uncertainty", "joint", "samples"])
def test_the_output_temperature_divides_the_latent_values_wherever_they_are_used(ask: str) -> None:
    """It is the same as a network whose outputs are divided by it, at a prior that keeps its covariance in step."""
    case = make_net(3)
    la = case.laplace(num_actions=6)
    la.fit(case.loader())
    x = case.near_and_far()
    mean, covariance = la.predictive_moments(x)
    asked: dict[str, Callable[[], Tensor]] = {
        "quadrature": lambda: la(x, link_approx="quadrature"),
        "probit": lambda: la(x),
        "uncertainty": lambda: la.uncertainty(x).variance,
        "joint": lambda: la.predictive_moments(x, joint=True)[1],
        "samples": lambda: la.functional_samples(x, n_samples=10, generator=torch.Generator().manual_seed(0)),
    }
    before = asked[ask]()
    la.output_temperature = 2.0
    half_mean, quarter = la.predictive_moments(x)
    assert torch.allclose(half_mean, mean / 2) and torch.allclose(quarter, covariance / 4)
    after = asked[ask]()
    if ask in ("uncertainty", "joint"):
        assert torch.allclose(after, before / 4)
    elif ask == "samples":
        assert torch.allclose(after, before / 2)
    else:
        assert not torch.allclose(after, before) and torch.allclose(after.sum(1), torch.ones(len(x)).double())
    assert float(la.temperature) == 1.0


def test_it_is_saved_and_earlier_files_mean_one(net: Digits) -> None:
    la = fitted(net, 4.0)
    la.output_temperature = 1.7
    state, other = la.state_dict(), fitted(net, 4.0)
    other.load_state_dict(state)
    assert other.output_temperature == 1.7
    assert torch.equal(other(net.new_x, link_approx="quadrature"), la(net.new_x, link_approx="quadrature"))
    del state["output_temperature"]
    other.load_state_dict(state)
    assert other.output_temperature == 1.0
    with pytest.raises(ValueError, match="output_temperature of a saved posterior must be whole"):
        other.load_state_dict({**state, "output_temperature": -1.0})
    assert other.output_temperature == 1.0
    with pytest.raises(ValueError, match="`output_temperature` must be a positive number"):
        other.output_temperature = 0.0


def test_the_report_says_what_was_chosen_and_why(net: Digits) -> None:
    found = fitted(net, 0.25).calibrate(halves(net)[0])
    text = str(found)
    assert repr(found) == text
    assert text.startswith("Output temperature ") and "cross-fitted NLL of 60 inputs" in text
    assert all(name in text for name in FAMILIES) and text.count("(chosen)") == 1
    assert found.num_data == 60 and set(found.losses) == set(FAMILIES)


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_where_no_variance_is_wanted_the_most_is_left_that_changes_next_to_nothing(
    net: Digits, factor: float, temperature: float
) -> None:
    la = fitted(net, factor)
    losses = Losses(pass_once(la, halves(net)[0], False), la.posterior, la._noise_scale.detach())
    precision = _without_variance(losses, temperature)
    changes = losses([(temperature, p) for p in (precision, precision / 1.6)]) - losses([(temperature, math.inf)])
    less, more = changes.abs().mean(1).tolist()
    assert NEGLIGIBLE / 4 < less <= NEGLIGIBLE < more, (precision, less, more)
    la.prior_precision, la.output_temperature = precision, temperature
    assert float(la.uncertainty(net.new_x).epistemic.mean()) > NEGLIGIBLE / 10, "there is a posterior"


def test_training_data_are_seen_and_warned_about() -> None:
    case = make_net(3, num_data=100)
    loader = DataLoader(case.dataset(), batch_size=10)
    la = case.laplace(num_actions=6)
    la.fit(loader)
    with pytest.warns(UserWarning, match=r"`val_loader` must hold data that the network was not.*got the training"):
        la.calibrate(loader)
    copies = DataLoader(TensorDataset(case.x.clone(), case.y.clone()), batch_size=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.calibrate(copies)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_regression_has_no_output_temperature(subset: str) -> None:
    case = make_net(1, likelihood="regression")
    la = case.laplace(subset=subset, num_actions=6)
    la.output_temperature = 1.0
    with pytest.raises(ValueError, match=r"`output_temperature` must be 1 for regression, whose mean .* got 2"):
        la.output_temperature = 2
    la.fit(case.loader())
    mean = la(case.x)[0]
    with pytest.raises(ValueError, match="`output_temperature` must be 1 for regression"):
        la.output_temperature = torch.tensor(0.5)
    state, other = la.state_dict(), case.laplace(subset=subset, num_actions=6)
    with pytest.raises(ValueError, match="`output_temperature` must be 1 for regression"):
        other.load_state_dict({**state, "output_temperature": 2.0})
    assert not other._fitted and torch.equal(la(case.x)[0], mean)


def test_without_actions_or_with_two_classes_it_works_too() -> None:
    case = make_net(2, num_outputs=2, num_data=60)
    la = case.laplace(num_actions=6)
    la.fit(case.loader())
    found = la.calibrate(DataLoader(TensorDataset(case.x.clone(), case.y.clone()), batch_size=30))
    assert math.isfinite(found.losses["both"]) and found.output_temperature > 0


def test_wrong_arguments_are_named(net: Digits) -> None:
    la = fitted(net, 1.0)
    few = DataLoader(TensorDataset(net.new_x[:5], net.new_y[:5]))
    with pytest.raises(ValueError, match=r"`val_loader` must hold at least 20 data; got 5"):
        la.calibrate(few)
    regression = make_net(1, likelihood="regression")
    other = regression.laplace(num_actions=6)
    other.fit(regression.loader())
    with pytest.raises(ValueError, match="`likelihood` must be 'classification' for calibrate"):
        other.calibrate(regression.loader())
    with pytest.raises(TypeError, match=r"`val_loader` must be a DataLoader of inputs and labels.*got Tensor. Try"):
        la.calibrate(net.new_x)
    with pytest.raises(RuntimeError, match=r"calibrate must follow a fit; got none. Try fit\(train_loader\)"):
        net.laplace(num_actions=6).calibrate(few)
    refined = make_net(3).laplace(num_actions=6, mean="refined")
    refined.fit(make_net(3).loader())
    with pytest.raises(ValueError, match="`mean` must be 'network' for calibrate of a classifier"):
        refined.calibrate(few)

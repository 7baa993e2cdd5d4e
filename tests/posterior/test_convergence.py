"""How much twice the actions would bring: against fits with twice the actions, and at the ends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ntk_iterncgp.posterior.convergence import continued
from tests.clusters_helpers import Digits, digits, make_net
from tests.laplace_helpers import subsets

PRECISIONS = (0.01, 1.0, 100.0)


@pytest.fixture(scope="module")
def net() -> Digits:
    return digits(0)


@pytest.fixture(scope="module")
def fits(net: Digits) -> dict[int, Any]:
    found = {}
    for number in (20, 40, 80, 400, 800):
        found[number] = net.laplace(num_actions=number)
        found[number].fit(net.loader())
    return found


@pytest.mark.parametrize("number", [20, 40, 400])  # from 160 to 320 groups, 320 to 384, 400 to 800
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_fall_with_twice_the_actions_is_within_a_factor_of_two(
    net: Digits, fits: dict[int, Any], number: int, precision: float
) -> None:
    one, two = (fits[n].convergence(net.new_x, prior_precision=precision) for n in (number, 2 * number))
    assert one.prior_variance == pytest.approx(two.prior_variance, rel=1e-5)
    true = 1 - two.variance / one.variance
    assert 0.5 < one.fall / true < 2, (one.fall, true)
    assert one.prior_variance > one.variance > one.doubled_variance > 0


def test_of_the_same_groups_the_fall_is_known(net: Digits, fits: dict[int, Any]) -> None:
    la = net.laplace(num_actions=160)
    la.fit(net.loader())
    for precision in PRECISIONS:
        one, two = (each.convergence(net.new_x, prior_precision=precision) for each in (fits[80], la))
        assert one.doubled_variance == pytest.approx(two.variance, rel=1e-4)


def test_the_variance_is_that_of_predictions(net: Digits, fits: dict[int, Any]) -> None:
    for number in (40, 400):
        la = fits[number]
        found, (mean, covariance) = la.convergence(net.new_x), la.predictive_moments(net.new_x)
        h = torch.full_like(mean, -1 / 9).scatter(1, mean.argmax(1, keepdim=True), 1.0)[..., None]
        assert found.variance == pytest.approx(float((h.mT @ covariance @ h).mean()), rel=1e-4)
        assert found.num_actions == number and str(found).startswith(f"{number} actions leave ")


def test_regressions_with_several_outputs_are_estimated() -> None:
    case = make_net(1, likelihood="regression", num_data=300, width=12)
    one, two = (case.laplace(num_actions=number) for number in (18, 36))
    for la in (one, two):
        la.fit(case.loader())
    found, true = one.convergence(case.x[:20] + 0.3), two.convergence(case.x[:20] + 0.3)
    assert found.fall == pytest.approx(1 - true.variance / found.variance, rel=0.2)


@subsets
def test_nothing_is_to_come_where_all_directions_are_taken(subset: str) -> None:
    case = make_net(3)
    la = case.laplace(subset=subset, num_actions=200, policy="curvature_residual")
    la.fit(case.loader())
    found = la.convergence(case.near_and_far())
    assert found.fall == 0 and found.advice == "More actions would change little here."


def test_at_a_precision_where_the_data_have_no_say_the_advice_is_to_ask_elsewhere(
    net: Digits, fits: dict[int, Any]
) -> None:
    found = fits[40].convergence(net.new_x, prior_precision=1e8)
    assert found.variance > 0.99 * found.prior_variance and found.fall < 0.01
    assert "no say at this prior precision" in found.advice and "la.detector().prior_precision" in found.advice
    assert "prior precision" not in fits[40].convergence(net.new_x, prior_precision=0.01).advice


def _refined(la: Any, net: Digits) -> None:
    la.refine(net.loader(), epochs=1)


def _compressed(la: Any, net: Digits) -> None:
    la.compress(15)


def _loaded(la: Any, net: Digits) -> None:
    la.load_state_dict(la.state_dict())


@pytest.mark.parametrize("change", [_refined, _compressed, _loaded])
def test_no_estimate_is_given_where_there_is_no_ground_for_one(
    net: Digits, change: Callable[[Any, Digits], None]
) -> None:
    la = net.laplace(num_actions=20)
    la.fit(net.loader())
    change(la, net)
    found = la.convergence(net.new_x)
    assert found.fall is None and found.doubled_variance is None and found.prior_variance > found.variance > 0
    assert "cannot be estimated" in str(found) and repr(found) == str(found)


def test_nothing_is_advised_that_is_refused(net: Digits) -> None:
    la = net.laplace(num_actions=20, storage="bfloat16")
    la.fit(net.loader())
    with pytest.raises(RuntimeError, match="with `storage`"):
        la.refine(net.loader(), epochs=1)
    found = la.convergence(net.new_x)
    assert "with `storage`" in found.advice and "Fit with twice as many" in found.advice
    for advice in (la.report_.advice, found.advice):
        assert "refine(" not in advice and "or refine" not in advice


def test_no_estimate_is_given_where_twice_the_actions_would_look_at_more_data(net: Digits) -> None:
    la = net.laplace(num_actions=200)  # at 480 of 800 data, 400 actions at all
    la.fit(net.loader())
    assert la.convergence(net.new_x).fall is None


def test_a_series_is_continued_by_a_constant_part_of_each_doubling() -> None:
    assert continued([10, 20, 40], [1.0, 1.5, 1.75], 80) == pytest.approx(1.875)
    assert continued([10, 20, 40], [1.0, 1.5, 1.75], 160) == pytest.approx(1.9375)
    assert continued([10, 20, 40], [1.0, 1.5, 1.75], 40) == 1.75
    assert continued([10, 20, 40], [1.0, 1.1, 1.3], 80) == pytest.approx(1.5)  # not more than the last one
    assert continued([40], [1.75], 40) == 1.75


def test_a_precision_that_is_none_is_refused(net: Digits, fits: dict[int, Any]) -> None:
    with pytest.raises(ValueError, match="`prior_precision` must be a positive number"):
        fits[40].convergence(net.new_x, prior_precision=-1.0)

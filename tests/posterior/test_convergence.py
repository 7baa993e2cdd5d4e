"""How much twice the actions would bring: against fits with twice the actions, and at the ends."""

from typing import Any

import pytest
import torch

from ntk_iterncgp.posterior.convergence import fall_of_doubling
from tests.clusters_helpers import Digits, digits, make_net
from tests.laplace_helpers import subsets

PRECISIONS = (0.01, 0.1, 1.0, 10.0)


@pytest.fixture(scope="module")
def net() -> Digits:
    return digits(0)


@pytest.fixture(scope="module")
def fits(net: Digits) -> dict[int, Any]:
    found = {}
    for number in (40, 80, 160):
        found[number] = net.laplace(num_actions=number)
        found[number].fit(net.loader())
    return found


@pytest.mark.parametrize("number", [40, 80])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_fall_with_twice_the_actions_is_within_a_factor_of_two(
    net: Digits, fits: dict[int, Any], number: int, precision: float
) -> None:
    one, two = (fits[n].convergence(net.new_x, prior_precision=precision) for n in (number, 2 * number))
    assert one.prior_variance == pytest.approx(two.prior_variance, rel=1e-5)
    true = 1 - two.variance / one.variance
    assert 0.5 < one.fall / true < 2, (one.fall, true)
    assert one.prior_variance > one.half_variance > one.variance > one.doubled_variance > 0


def test_the_variance_is_that_of_predictions(net: Digits, fits: dict[int, Any]) -> None:
    la = fits[40]
    found, (mean, covariance) = la.convergence(net.new_x), la.predictive_moments(net.new_x)
    h = torch.full_like(mean, -1 / 9).scatter(1, mean.argmax(1, keepdim=True), 1.0)[..., None]
    assert found.variance == pytest.approx(float((h.mT @ covariance @ h).mean()), rel=1e-4)
    assert found.num_actions == 40 and str(found).startswith("40 actions leave ")


@subsets
def test_nothing_is_to_come_where_all_directions_are_taken(subset: str) -> None:
    case = make_net(3)
    la = case.laplace(subset=subset, num_actions=200, policy="curvature_residual")
    la.fit(case.loader())
    found = la.convergence(case.near_and_far())
    assert found.fall < 1e-6 and found.advice == "More actions would change little here."


def test_a_spectrum_that_is_a_power_law_is_continued_exactly() -> None:
    b = torch.arange(1, 101, dtype=torch.float64)
    gamma, parts = 1e4 * b**-1.5, 3 * b**-0.5
    expected = float((parts * gamma / (gamma + 0.7))[40:80].sum())
    assert fall_of_doubling(gamma[:40], parts[:40], 0.7, most=1000) == pytest.approx(expected, rel=1e-9)
    some = float((parts * gamma / (gamma + 0.7))[40:50].sum())
    assert fall_of_doubling(gamma[:40], parts[:40], 0.7, most=50) == pytest.approx(some, rel=1e-9)
    assert fall_of_doubling(gamma[:40], parts[:40], 0.7, most=40) == 0


def test_a_precision_that_is_none_is_refused(net: Digits, fits: dict[int, Any]) -> None:
    with pytest.raises(ValueError, match="`prior_precision` must be a positive number"):
        fits[40].convergence(net.new_x, prior_precision=-1.0)

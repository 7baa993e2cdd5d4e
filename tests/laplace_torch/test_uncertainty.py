"""From latent moments to what a user asks: an accurate link, scores with their parts, and which data they come from."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.likelihoods.quadrature import covariance_root
from ntk_iterncgp.posterior.predictive import (
    Uncertainty,
    classification_uncertainty,
    expected_response,
    regression_uncertainty,
)
from tests.clusters_helpers import Net, digits, joint_variance, make_net
from tests.laplace_helpers import close


def fitted(case: Net, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    la = case.laplace(dtype, **{"num_actions": 6, **settings})
    la.fit(case.loader(dtype))
    return la


# The link


@pytest.mark.slow
@pytest.mark.parametrize("precision", [30.0, 100.0])
def test_the_quasi_random_link_is_as_good_as_ten_thousand_samples_on_digits(precision: float) -> None:
    """Plain sampling is averaged over four seeds, of 10⁴ samples each, so that its noise does not decide."""
    net = digits(0)
    la = net.laplace(num_actions=50, prior_precision=precision)
    la.fit(net.loader())
    mean, covariance = (moment.double() for moment in la.predictive_moments(net.new_x))
    sampled = torch.zeros_like(mean)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        settings: dict[str, Any] = {"link": "mc", "num_samples": 10**4, "generator": generator}
        sampled += expected_response(Softmax(10), mean, covariance, **settings) / 4
    losses = {"mc": nll_loss(sampled.log(), net.new_y)}
    for link in ("quadrature", "probit"):
        losses[link] = nll_loss(la(net.new_x, link_approx=link).double().log(), net.new_y)
    assert abs(float(losses["quadrature"] - losses["mc"])) < 5e-4, losses
    assert abs(float(losses["probit"] - losses["mc"])) > 2e-3, "or else this case is too easy"


def test_the_link_is_deterministic_and_leaves_random_numbers_alone() -> None:
    case = make_net(3)
    la, x, state = fitted(case), case.near_and_far(), torch.get_rng_state()
    first, second = la(x, link_approx="quadrature"), la(x, pred_type="glm", link_approx="quadrature")
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)
    close(first.sum(1), torch.ones(len(x), dtype=torch.float64), 1e-12)
    close(la(x[2:3], link_approx="quadrature"), first[2:3], 1e-12)
    assert not torch.equal(la(x, link_approx="quadrature", n_samples=64), first)
    with pytest.raises(ValueError, match=r"`n_samples` must be .*; got 0"):
        la(x, link_approx="quadrature", n_samples=0)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_the_link_is_differentiable_in_the_inputs(subset: str, dtype: torch.dtype) -> None:
    """With one action the covariance of a last layer has equal eigenvalues, where eigenvectors have no derivative."""
    case = make_net(3)
    la = fitted(case, dtype, subset=subset, enable_backprop=True, num_actions=1)
    x = case.near_and_far().to(dtype)[:3].requires_grad_()
    loss = la(x, link_approx="quadrature")[:, 0].sum()
    (gradient,) = torch.autograd.grad(loss, x)
    with torch.no_grad():  # at the same points
        assert float(la(x, link_approx="quadrature")[:, 0].sum()) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert bool(torch.isfinite(gradient).all()) and float(gradient.abs().min()) > 0
    if dtype == torch.float64:
        step, direction = 1e-5, torch.ones_like(x)
        along = torch.stack(
            [
                la((x + s * direction).detach().requires_grad_(), link_approx="quadrature")[:, 0].sum()
                for s in (step, -step)
            ]
        )
        slope = float((along[0] - along[1]).detach() / (2 * step))
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-4)


def test_a_root_is_found_where_rounding_made_a_covariance_negative() -> None:
    negative = torch.diag(torch.tensor([1.0, -1e-3, 2.0])).expand(2, 3, 3).clone()
    negative[1, 1, 1] = 0.5
    root = covariance_root(negative.requires_grad_())
    assert bool(torch.isfinite(root).all())
    close(root[1] @ root[1].mT, negative[1].detach(), 2e-5)
    with pytest.raises(ArithmeticError, match="positive semidefinite up to rounding"):
        covariance_root(torch.full((2, 2), torch.nan, requires_grad=True))


def test_regression_has_no_link() -> None:
    case = make_net(3, likelihood="regression", num_outputs=2)
    la, x = fitted(case), case.near_and_far()
    for accurate, plain in zip(la(x, link_approx="quadrature"), la(x), strict=True):
        assert torch.equal(accurate, plain)


def test_many_inputs_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from ntk_iterncgp.posterior import predictive

    mean, covariance = moments(9)
    whole = expected_response(Softmax(4), mean, covariance, link="quadrature")
    score = classification_uncertainty(mean, covariance)
    monkeypatch.setattr(predictive, "POINT_ENTRIES", 512 * 4)
    close(expected_response(Softmax(4), mean, covariance, link="quadrature"), whole, 1e-12)
    close(classification_uncertainty(mean, covariance).entropy, score.entropy, 1e-12)


# Scores


def moments(number: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mean = 2 * torch.randn(number, 4, generator=generator, dtype=torch.float64)
    root = scale * torch.randn(number, 4, 4, generator=generator, dtype=torch.float64)
    return mean, root @ root.mT


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 10.0])
def test_the_parts_of_the_entropy_add_up_and_none_is_negative(scale: float) -> None:
    mean, covariance = moments(50, scale)
    found = classification_uncertainty(mean, covariance)
    close(found.epistemic + found.aleatoric, found.entropy, 1e-12)
    for values in (found.entropy, found.epistemic, found.aleatoric, found.variance, found.margin_variance):
        assert values is not None and values.shape == (50,) and float(values.min()) >= 0
    assert float(found.entropy.max()) <= math.log(4) + 1e-12
    p = expected_response(Softmax(4), mean, covariance, link="quadrature")
    close(found.entropy, -(p * p.log()).sum(1), 1e-10)
    if scale == 0.0:
        assert float(found.epistemic.max()) < 1e-12


def test_the_epistemic_part_is_the_mutual_information_between_label_and_latent_values() -> None:
    mean, covariance = moments(5)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(5, 40_000, 4, generator=generator, dtype=torch.float64)
    log_p = (mean[:, None] + noise @ torch.linalg.cholesky(covariance).mT).log_softmax(-1)
    conditional = -(log_p.exp() * log_p).sum(-1).mean(1)
    p = log_p.exp().mean(1)
    expected = -(p * p.log()).sum(1) - conditional
    torch.testing.assert_close(classification_uncertainty(mean, covariance).epistemic, expected, rtol=0, atol=1e-2)


def test_variances_are_those_of_the_latent_moments() -> None:
    mean, covariance = moments(20)
    found = classification_uncertainty(mean, covariance)
    close(found.variance, torch.einsum("bcc->b", covariance), 1e-12)
    for n in range(20):
        first, second = mean[n].argsort(descending=True)[:2]
        c = torch.zeros(4, dtype=torch.float64)
        c[first], c[second] = 1, -1
        assert found.margin_variance is not None
        assert float(found.margin_variance[n]) == pytest.approx(float(c @ covariance[n] @ c))


def test_regression_has_the_entropies_of_gaussians() -> None:
    _, covariance = moments(6)
    noise = torch.tensor(0.3, dtype=torch.float64)
    found = regression_uncertainty(covariance, noise)
    eye, zero = torch.eye(4, dtype=torch.float64), torch.zeros(6, 4, dtype=torch.float64)
    normal = torch.distributions.MultivariateNormal
    close(found.entropy, normal(zero, covariance + noise * eye).entropy(), 1e-12)
    close(found.aleatoric, normal(zero, (noise * eye).expand(6, 4, 4)).entropy(), 1e-12)
    close(found.epistemic + found.aleatoric, found.entropy, 1e-12)
    assert float(found.epistemic.min()) > 0 and found.margin_variance is None


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_one_call_scores_inputs_and_prints_a_table(likelihood: str, dtype: torch.dtype) -> None:
    case = make_net(3, likelihood=likelihood, num_outputs=2)
    la, x = fitted(case, dtype), case.near_and_far().to(dtype)
    found = la.uncertainty(x)
    assert isinstance(found, Uncertainty) and len(found) == len(x)
    covariance = la.predictive_moments(x)[1]
    close(found.variance, covariance.diagonal(dim1=1, dim2=2).sum(1).double(), 1e-5)
    close(found.epistemic + found.aleatoric, found.entropy, 1e-9)
    if likelihood == "regression":
        close(found.aleatoric, torch.full_like(found.aleatoric, math.log(2 * math.pi * math.e * case.sigma**2)), 1e-6)
    lines = str(found).splitlines()
    assert lines[0].split()[:5] == ["input", "entropy", "epistemic", "aleatoric", "variance"]
    assert ("margin_variance" in lines[0]) == (likelihood == "classification")
    assert len(lines) == 1 + len(x) and lines[3].split()[1] == f"{float(found.entropy[2]):.4g}"
    assert str(la.uncertainty(x.repeat(5, 1))).splitlines()[-1] == "… and 10 more"


def test_inputs_unlike_the_data_have_more_variance_on_digits() -> None:
    net = digits(0)
    la = net.laplace(num_actions=100)
    la.fit(net.loader())
    noise = torch.rand(100, 64, generator=torch.Generator().manual_seed(0))
    inside, outside = la.uncertainty(net.new_x), la.uncertainty(noise)
    for name, factor in {"variance": 1.5, "margin_variance": 1.5, "epistemic": 1.2, "entropy": 1.05}.items():
        assert float(getattr(outside, name).median()) > factor * float(getattr(inside, name).median()), name


# Attribution


@pytest.mark.parametrize("cotangents", [1, 2])
@pytest.mark.parametrize("refined", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_attribution_gives_out_what_the_data_took_from_the_variance(
    cotangents: int, refined: float, subset: str
) -> None:
    case = make_net(4)
    la, x = fitted(case, cotangents=cotangents, subset=subset), case.near_and_far()
    if refined:
        la.refine(case.loader(), epochs=refined)
    for precision in (0.7, 3.0):  # also at another prior than that of the fit
        la.prior_precision = precision
        shares = la.attribution(x)
        assert shares.shape == (len(x), len(case.x))
        prior = torch.cat([rows.covariance(1 / la.prior_precision_diag) for rows in la._rows_at(x)])
        expected = (prior - la.predictive_moments(x)[1]).diagonal(dim1=1, dim2=2).sum(1)
        close(shares.sum(1), expected.detach(), 1e-9)


def test_attribution_points_to_the_data_that_matter() -> None:
    """With an action for each datum, an input is explained most by itself among the undecided."""
    case = make_net(4, num_data=12, scale=0.5)
    la = fitted(case, num_actions=12, cotangents=2)
    shares = la.attribution(case.x)
    assert int((shares.argmax(1) == torch.arange(12)).sum()) >= 6
    assert float(shares.diagonal().mean()) > 2 * float(shares.mean())


def test_attribution_says_where_it_cannot_answer() -> None:
    case = make_net(4)
    x, sentence = case.near_and_far(), r"attribution must follow a fit with policy='clusters'"
    la = fitted(case)
    loaded = case.laplace(num_actions=6)
    loaded.load_state_dict(la.state_dict())
    compressed, by_products = fitted(case), fitted(case, policy="curvature_residual")
    compressed.compress(3)
    for other in (loaded, compressed, by_products, fitted(case, max_rank=3)):
        with pytest.raises(RuntimeError, match=sentence):
            other.attribution(x)
    with pytest.raises(ValueError, match="at least one input"):
        la.attribution(x[:0])
    with torch.no_grad():
        la.model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="weights it was fitted with"):
        la.attribution(x)
    assert joint_variance(compressed, x).shape == (18, 18)

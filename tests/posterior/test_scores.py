"""Scores of unfamiliar inputs, against their formulas written out, and their ranks."""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from ntk_iterncgp.posterior.detection import Novelty
from ntk_iterncgp.posterior.scores import SCORES, Latent, against_rest
from ntk_iterncgp.posterior.typicality import Typicality


def latent(num_inputs: int = 40, num_classes: int = 4, seed: int = 0) -> Latent:
    generator = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(num_inputs, num_classes, dtype=torch.float64, generator=generator)
    prior = 1 + torch.rand(num_inputs, dtype=torch.float64, generator=generator)
    ratio = torch.rand(num_inputs, dtype=torch.float64, generator=generator)
    layers = torch.rand(num_inputs, 3, dtype=torch.float64, generator=generator) * prior[:, None]
    return Latent(outputs, prior * ratio, prior, layers, prior * ratio**2)


def of_variances(variance: Tensor) -> Latent:
    """Nothing but variances."""
    return Latent(
        torch.zeros(len(variance), 2).double(), variance, torch.ones_like(variance), variance[:, None], variance
    )


def novelty_of(names: tuple[str, ...], num_inputs: int = 40, seed: int = 0) -> Novelty:
    return Novelty.of(names, latent(200, seed=99), latent(num_inputs, seed=seed), of_classes=True)


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(1)


def test_the_contrast_is_the_likeliest_class_against_the_mean_of_the_others() -> None:
    f = torch.tensor([[3.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    h = against_rest(f)[..., 0]
    assert torch.allclose(h, torch.tensor([[1.0, -1 / 3, -1 / 3, -1 / 3]], dtype=torch.float64))
    assert float(Latent(f, f[:, 0], f[:, 0], f, f[:, 0]).evidence) == pytest.approx(3.0)
    assert torch.equal(against_rest(f[:, :2])[..., 0], torch.tensor([[1.0, -1.0]], dtype=torch.float64))


def test_each_score_is_its_formula() -> None:
    given = latent()
    f, v = given.outputs, given.variance
    evidence = f.max(1).values - (f.sum(1) - f.max(1).values) / 3
    soft = f / (1 + math.pi * v / 8).sqrt()[:, None]
    expected = {
        "evidence": -evidence / v.sqrt(),
        "energy": -f.exp().sum(1).log(),
        "entropy": entropy(f.softmax(1)),
        "posterior_entropy": entropy(soft.softmax(1)),
        "posterior_energy": -(soft - soft.mean(1, keepdim=True)).exp().sum(1).log(),
        "ratio": v / given.prior_variance,
        "variance": v,
    }
    for name, value in expected.items():
        assert torch.allclose(SCORES[name](given), value, rtol=1e-10), name
    assert set(SCORES) == {*expected, "mutual_information"}


def test_the_mutual_information_agrees_with_sampling_and_vanishes_without_variance() -> None:
    given = latent(5)
    draws = torch.randn(10**6, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = torch.sigmoid(given.evidence + given.variance.sqrt() * draws)
    both = torch.stack([p, 1 - p])
    sampled = torch.special.entr(both.mean(1)).sum(0) - torch.special.entr(both).sum(0).mean(0)
    assert torch.allclose(SCORES["mutual_information"](given), sampled, atol=1e-3)
    none = replace(given, variance=torch.full_like(given.variance, 1e-12))
    assert float(SCORES["mutual_information"](none).abs().max()) < 1e-9


def test_scores_rise_where_the_posterior_knows_less() -> None:
    """At the same outputs, more variance is never more familiar."""
    less = latent()
    more = replace(less, variance=4 * less.variance)
    for name in ("evidence", "posterior_entropy", "posterior_energy", "ratio", "variance"):
        assert bool((SCORES[name](more) >= SCORES[name](less)).all()), name
        assert not torch.equal(SCORES[name](more), SCORES[name](less)), name


def test_entropies_keep_their_order_where_the_network_is_as_good_as_certain() -> None:
    f = torch.tensor([[300.0, 0.0], [200.0, 0.0], [100.0, 0.0], [50.0, 0.0]], dtype=torch.float64)
    scores = SCORES["entropy"](replace(latent(4), outputs=f))
    assert bool((scores.diff() > 0).all()), scores


@pytest.mark.parametrize("names", [("evidence",), ("typicality",), ("evidence", "energy", "typicality")])
def test_p_values_of_other_familiar_inputs_are_uniform(names: tuple[str, ...]) -> None:
    novelty = novelty_of(names, 4999, seed=1)
    p = novelty.p_value(novelty.score(latent(5000, seed=2))).sort().values
    grid = torch.arange(1, 5001, dtype=torch.float64) / 5000
    distance = float((p - grid).abs().max())
    assert distance < 1.63 * math.sqrt(2 / 5000), "two samples, at 1 %"
    assert abs(float((p <= 0.01).double().mean()) - 0.01) < 0.005


def test_a_rank_is_exactly_conformal() -> None:
    """Which of n + 1 inputs is the new one makes its ranks 1/(n + 1), …, 1, each once."""
    every = latent(20, seed=3)
    ranks = []
    for i in range(20):
        rest = torch.arange(20) != i
        others, one = (Latent(*(getattr(every, f.name)[chosen] for f in fields(Latent))) for chosen in (rest, ~rest))
        novelty = Novelty.of(("evidence", "energy", "typicality"), latent(200, seed=99), others, of_classes=True)
        ranks.append(float(novelty.p_value(novelty.score(one))))
    assert sorted(ranks) == pytest.approx([(k + 1) / 20 for k in range(20)])


def test_a_p_value_counts_the_familiar_inputs_that_score_as_high() -> None:
    ranked = of_variances(torch.tensor([1.0, 2, 3, 4]).double())
    novelty = Novelty.of(("variance",), of_variances(torch.rand(40).double()), ranked, of_classes=True)
    scores = torch.tensor([0.5, 2.5, 9.0], dtype=torch.float64)
    assert torch.allclose(novelty.p_value(scores), torch.tensor([5 / 5, 3 / 5, 1 / 5], dtype=torch.float64))


def test_equal_scores_share_their_ranks_at_random_and_reproducibly() -> None:
    same = of_variances(torch.ones(999, dtype=torch.float64))
    novelty = Novelty.of(("variance",), same, same, of_classes=True)
    p = novelty.p_value(torch.ones(2000, dtype=torch.float64))
    assert torch.equal(p, novelty.p_value(torch.ones(2000, dtype=torch.float64)))
    assert abs(float(p.mean()) - 0.5) < 0.03 and float(p.min()) > 0 and float(p.max()) <= 1
    assert abs(float((p <= 0.1).double().mean()) - 0.1) < 0.03


def test_a_variance_is_untypical_on_either_side() -> None:
    novelty = novelty_of(("typicality",))
    usual = latent(200, seed=99)
    for factor in (1e-4, 1e4):
        strange = replace(usual, layers=usual.layers * factor)
        assert float(novelty.score(strange).min()) > float(novelty.score(usual).quantile(0.9)), factor


def test_a_distance_from_what_is_typical_is_that_of_mahalanobis() -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.tensor([[1.0, 0.0], [0.8, 0.6]], dtype=torch.float64)
    features = torch.randn(20_000, 2, dtype=torch.float64, generator=generator) @ mixing.T
    classes = torch.arange(20_000) % 2
    features = features + 2.0 * classes[:, None]
    fitted = Typicality.of(features, classes, 3)  # the third class was never predicted
    away = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    expected = ((away @ torch.linalg.inv(mixing @ mixing.T)) * away).sum(1)
    for c in (0, 1):
        found = fitted(away + 2.0 * c, torch.full((2,), c))
        assert torch.allclose(found, expected, rtol=0.1, atol=0.1), (found, expected)
    assert float(fitted(features.mean(0, keepdim=True), torch.tensor([2]))) < 0.01


def test_a_fit_to_few_inputs_is_scaled_by_the_distance_of_others() -> None:
    """Its own inputs are nearer than new ones, so that every new one would be untypical."""
    features = torch.randn(1000, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    features = features * torch.linspace(0.1, 3, 50).double().square()  # so that little is shrunk
    features = features @ torch.linalg.qr(torch.randn(50, 50, generator=torch.Generator().manual_seed(1)).double()).Q
    classes = torch.arange(60) % 5
    fitted = Typicality.of(features[:60], classes, 5)
    own = float(fitted(features[:60], classes).median())
    others = float(Typicality.of_others(features[:60], classes, 5).median())
    truth = float(fitted(features[60:], torch.arange(940) % 5).median())
    assert own < 0.75 * truth and 0.8 < others / truth < 1.5, (own, others, truth)


def test_a_saved_novelty_comes_back_and_a_damaged_one_is_refused() -> None:
    novelty, device = novelty_of(("evidence", "typicality")), torch.device("cpu")
    saved = novelty.to_dict()
    again = Novelty.from_dict(saved, device)
    assert torch.equal(again.score(latent(seed=3)), novelty.score(latent(seed=3)))
    worse = [
        {**saved, "names": ["evidence", "no such score"]},
        {**saved, "names": []},
        {**saved, "location": saved["location"][:1]},
        {**saved, "scale": saved["scale"] * float("nan")},
        {**saved, "ranked": saved["ranked"].flip(0)},
        {**saved, "ranked": None},
        {},
    ]
    for damaged in worse:
        with pytest.raises(ValueError, match="must be known, sorted and finite"):
            Novelty.from_dict(damaged, device)
    features = saved["typicality"]
    for lost in ({**features, "scale": -features["scale"]}, {**features, "precision": features["means"]}, None):
        with pytest.raises(ValueError, match="must be finite and of one size"):
            Novelty.from_dict({**saved, "typicality": lost}, device)

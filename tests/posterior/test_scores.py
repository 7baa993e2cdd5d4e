"""Scores of unfamiliar inputs, against their formulas written out, and their ranks."""

import math

import pytest
import torch
from torch import Tensor

from ntk_iterncgp.posterior.detection import Novelty
from ntk_iterncgp.posterior.scores import SCORES, Latent, against_rest


def latent(num_inputs: int = 40, num_classes: int = 4, seed: int = 0) -> Latent:
    generator = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(num_inputs, num_classes, dtype=torch.float64, generator=generator)
    prior = 1 + torch.rand(num_inputs, dtype=torch.float64, generator=generator)
    ratio = torch.rand(num_inputs, dtype=torch.float64, generator=generator)
    return Latent(outputs, prior * ratio, prior)


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(1)


def test_the_contrast_is_the_likeliest_class_against_the_mean_of_the_others() -> None:
    f = torch.tensor([[3.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    h = against_rest(f)[..., 0]
    assert torch.allclose(h, torch.tensor([[1.0, -1 / 3, -1 / 3, -1 / 3]], dtype=torch.float64))
    assert float(Latent(f, f[:, 0], f[:, 0]).evidence) == pytest.approx(3.0)
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
    none = Latent(given.outputs, torch.full_like(given.variance, 1e-12), given.prior_variance)
    assert float(SCORES["mutual_information"](none).abs().max()) < 1e-9


def test_scores_rise_where_the_posterior_knows_less() -> None:
    """At the same outputs, more variance is never more familiar."""
    less = latent()
    more = Latent(less.outputs, 4 * less.variance, less.prior_variance)
    for name in ("evidence", "posterior_entropy", "posterior_energy", "ratio", "variance"):
        assert bool((SCORES[name](more) >= SCORES[name](less)).all()), name
        assert not torch.equal(SCORES[name](more), SCORES[name](less)), name


def test_entropies_keep_their_order_where_the_network_is_as_good_as_certain() -> None:
    f = torch.tensor([[300.0, 0.0], [200.0, 0.0], [100.0, 0.0], [50.0, 0.0]], dtype=torch.float64)
    scores = SCORES["entropy"](Latent(f, torch.ones(4).double(), torch.ones(4).double()))
    assert bool((scores.diff() > 0).all()), scores


@pytest.mark.parametrize("names", [("evidence",), ("evidence", "energy", "ratio")])
def test_p_values_of_other_familiar_inputs_are_uniform(names: tuple[str, ...]) -> None:
    novelty = Novelty.of(names, latent(4999, seed=1))
    p = novelty.p_value(novelty.score(latent(5000, seed=2))).sort().values
    grid = torch.arange(1, 5001, dtype=torch.float64) / 5000
    distance = float((p - grid).abs().max())
    assert distance < 1.63 * math.sqrt(2 / 5000), "two samples, at 1 %"
    assert abs(float((p <= 0.01).double().mean()) - 0.01) < 0.005


def test_a_p_value_counts_the_familiar_inputs_that_score_as_high() -> None:
    novelty = Novelty.of(
        ("variance",), Latent(torch.zeros(4, 2).double(), torch.tensor([1.0, 2, 3, 4]).double(), torch.ones(4).double())
    )
    scores = torch.tensor([0.5, 2.5, 9.0], dtype=torch.float64)
    assert torch.allclose(novelty.p_value(scores), torch.tensor([5 / 5, 3 / 5, 1 / 5], dtype=torch.float64))


def test_equal_scores_share_their_ranks_at_random_and_reproducibly() -> None:
    same = torch.ones(999, dtype=torch.float64)
    novelty = Novelty.of(("variance",), Latent(torch.zeros(999, 2).double(), same, same))
    p = novelty.p_value(torch.ones(2000, dtype=torch.float64))
    assert torch.equal(p, novelty.p_value(torch.ones(2000, dtype=torch.float64)))
    assert abs(float(p.mean()) - 0.5) < 0.03 and float(p.min()) > 0 and float(p.max()) <= 1
    assert abs(float((p <= 0.1).double().mean()) - 0.1) < 0.03


def test_a_saved_novelty_comes_back_and_a_damaged_one_is_refused() -> None:
    novelty, device = Novelty.of(("evidence", "ratio"), latent()), torch.device("cpu")
    saved = novelty.to_dict()
    again = Novelty.from_dict(saved, device)
    assert torch.equal(again.score(latent(seed=3)), novelty.score(latent(seed=3)))
    worse = [
        {**saved, "names": ["evidence", "no such score"]},
        {**saved, "names": []},
        {**saved, "references": saved["references"][:1]},
        {**saved, "references": saved["references"] * float("nan")},
        {**saved, "combined": saved["combined"].flip(0)},
        {**saved, "combined": None},
        {},
    ]
    for damaged in worse:
        with pytest.raises(ValueError, match="must be known, sorted and finite"):
            Novelty.from_dict(damaged, device)

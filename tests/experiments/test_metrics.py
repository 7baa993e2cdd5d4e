"""Metrics against values computed by hand, and what they make of probabilities that are not."""

import math

import pytest
import torch

from ntk_iterncgp.experiments.evaluation import classification_metrics, reliability_curve

PROBABILITIES = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.9, 0.05, 0.05]])
LABELS = torch.tensor([0, 1, 0, 0])


def test_adaptive_ece_equals_its_value_by_hand() -> None:
    """Confidences .51, .52 … .80, hence two in each of 15 bins; of each three bins both, none and one of two are right.

    Of bin k the confidences add up to 1 + (4k + 3)/100, so its gaps sum to 1 − (4k + 3)/100, 1 + (4k + 3)/100 and
    (4k + 3)/100, and those of all bins to 3.65 + 6.55 + 1.75.
    """
    confidence = 0.5 + torch.arange(1, 31, dtype=torch.float64) / 100
    labels = torch.tensor([1, 1, 0, 0, 1, 0]).repeat(5)  # class 1 is predicted
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    found = classification_metrics(confidence[order], labels[order])
    assert found.adaptive_ece == pytest.approx(11.95 / 30, abs=1e-12)
    assert found.ece != pytest.approx(11.95 / 30, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_metrics_equal_their_values_by_hand(dtype: torch.dtype) -> None:
    metrics = classification_metrics(PROBABILITIES.to(dtype), LABELS)
    brier = [0.09 + 0.04 + 0.01, 0.01 + 0.16 + 0.09, 0.5625 + 0.0625 + 0.25, 0.01 + 0.0025 + 0.0025]
    assert metrics.accuracy == 0.75
    assert metrics.nll == pytest.approx(-math.log(0.7 * 0.6 * 0.25 * 0.9) / 4, rel=1e-6)
    assert metrics.brier == pytest.approx(sum(brier) / 4, rel=1e-6)
    assert metrics.ece == pytest.approx((0.3 + 0.4 + 0.5 + 0.1) / 4, rel=1e-6)  # each confidence in a bin of its own


def test_calibration_error_averages_within_a_bin() -> None:
    probabilities = torch.tensor([[0.81, 0.19], [0.83, 0.17], [0.82, 0.18], [0.55, 0.45]])  # 0.8 to 0.8667 is one bin
    metrics = classification_metrics(probabilities, torch.tensor([0, 0, 1, 1]))
    assert metrics.ece == pytest.approx(0.75 * abs(0.82 - 2 / 3) + 0.25 * 0.55, rel=1e-5)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_probabilities_of_class_one_stand_for_both_classes(shape: tuple[int, ...]) -> None:
    of_one, labels = torch.tensor([0.9, 0.2, 0.6]), torch.tensor([1, 0, 0])
    both = torch.stack([1 - of_one, of_one], 1)
    assert classification_metrics(of_one.reshape(shape), labels) == classification_metrics(both, labels)
    assert classification_metrics(both, labels).accuracy == pytest.approx(2 / 3)


@pytest.mark.parametrize(("dtype", "nats"), [(torch.float32, 87.336), (torch.float64, 708.396)])
def test_a_label_of_probability_zero_costs_much_but_not_infinitely(dtype: torch.dtype, nats: float) -> None:
    probabilities = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=dtype)
    metrics = classification_metrics(probabilities, torch.tensor([0, 1]))
    assert metrics.nll == pytest.approx(nats / 2, abs=1e-2)
    assert metrics.ece == 0.5


def test_probabilities_above_one_by_rounding_are_not_taken_for_logits() -> None:
    rounded = torch.tensor([[1.0 + 1e-6, -1e-6], [0.8, 0.2]])
    metrics = classification_metrics(rounded, torch.tensor([0, 0]))
    assert metrics.ece == pytest.approx(0.1, abs=1e-5)


def test_the_reliability_curve_adds_up_to_the_calibration_error() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.softmax(2 * torch.randn(500, 4, generator=generator), 1)
    labels = torch.randint(0, 4, (500,), generator=generator)
    curve = reliability_curve(probabilities, labels)
    gap = (curve.count / curve.count.sum() * (curve.confidence - curve.accuracy).abs()).sum()
    assert int(curve.count.sum()) == 500
    assert float(gap) == pytest.approx(classification_metrics(probabilities, labels).ece, abs=1e-6)


@pytest.mark.parametrize(
    ("probabilities", "labels", "sentence"),
    [
        (torch.tensor([[2.0, -1.0]]), torch.tensor([0]), r"got others \(logits, or NaN\)\. Try softmax"),
        (torch.tensor([[0.5, 0.2]]), torch.tensor([0]), "add up to 1"),
        (torch.tensor([[math.nan, 0.2]]), torch.tensor([0]), "NaN"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([2]), "must be from 0 to 1; got 2 to 2"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1]), "1 whole numbers, one per row"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0.0]), "whole numbers"),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "b ≥ 1"),
    ],
)
def test_what_is_no_distribution_is_refused_in_a_sentence(
    probabilities: torch.Tensor, labels: torch.Tensor, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        classification_metrics(probabilities, labels)

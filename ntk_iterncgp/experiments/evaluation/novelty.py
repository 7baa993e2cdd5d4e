"""What the detector of a fit says of test inputs, which are familiar, and of the out-of-distribution sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ntk_iterncgp.experiments.evaluation.ood import ood_metrics
from ntk_iterncgp.laplace_torch.detector import Detector

RATES = (0.01, 0.05)  # of alarms: the first that the number of ranked inputs allows


def novelty(detector: Detector, test: Dataset[Any], others: Mapping[str, Dataset[Any]], batch: int) -> dict[str, Any]:
    """Tell the sets from the test inputs, and count alarms.

    Args:
        detector: Of the fit.
        test: Familiar inputs that it was not calibrated on.
        others: Out-of-distribution sets by name.
        batch: How many inputs at a time.

    Returns:
        The rate that was asked for, the fraction of alarms on test inputs, and for each set that and the areas.
    """

    def scores(data: Dataset[Any]) -> Tensor:
        return detector.score(DataLoader(data, batch)).cpu()

    least = 1 / (len(detector.novelty) + 1)
    rate = next((rate for rate in RATES if rate >= least), least)

    def alarms(values: Tensor) -> float:
        p = detector.novelty.p_value(values.to(detector.prior.noise_scale.device))
        return float((p <= rate).to(torch.float64).mean())

    familiar = scores(test)
    found: dict[str, Any] = {"rate": rate, "test_alarms": alarms(familiar), "num_ranked": len(detector.novelty)}
    found["sets"] = {}
    for name, data in others.items():
        values = scores(data)
        found["sets"][name] = {"alarms": alarms(values), **asdict(ood_metrics(familiar, values))}
    return found


def in_words(found: Mapping[str, Any]) -> str:
    """For the screen and the report."""
    each = [
        f"{name} from test inputs with AUROC {part['auroc']:.3f}, alarms at {100 * part['alarms']:.1f} %"
        for name, part in found["sets"].items()
    ]
    told = f" It tells {'; '.join(each)}." if each else ""
    return (
        f"The detector raises an alarm at {100 * found['test_alarms']:.1f} % of the test inputs, where "
        f"{100 * found['rate']:.1f} % are asked for.{told}"
    )

"""What the detector of a fit says of test inputs, which are familiar, and of the out-of-distribution sets.

Its scores are compared with two of the network alone, which need no posterior: entropy and energy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ntk_iterncgp.experiments.evaluation.figures import svg
from ntk_iterncgp.experiments.evaluation.ood import OODMetrics, ood_metrics, roc_curve
from ntk_iterncgp.experiments.evaluation.tables import Column, Table
from ntk_iterncgp.laplace_torch.detector import Detector, measured_at
from ntk_iterncgp.posterior.scores import Energy, Entropy, Latent

RATES = (0.01, 0.05)  # of alarms: the first above which some ranked inputs lie
ABOVE = 5  # of them: with one alone a rate of 1 % would be the luck of the largest score
TEST = "test"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
LABELS = {"entropy": "entropy of the network", "energy": "energy of the network", "detector": "la.detector"}


@dataclass(frozen=True, eq=False)
class Way:
    """One way to tell sets from test inputs: its scores of each set, higher for less familiar inputs."""

    name: str
    scores: dict[str, Tensor]  # set -> (b,)

    @property
    def label(self) -> str:
        return LABELS[self.name]

    def metrics(self, other: str) -> OODMetrics:
        """How well it tells the inputs of another set from test inputs."""
        return ood_metrics(self.scores[TEST], self.scores[other])


@dataclass(frozen=True, eq=False)
class Novelty:
    """Scores and p-values of the test inputs (`"test"`) and of the out-of-distribution sets by name."""

    ways: list[Way]  # the detector is the last one
    p_values: dict[str, Tensor]  # of the detector, set -> (b,)
    confidences: dict[str, Tensor]  # of the network alone, set -> (b,)
    rate: float  # of alarms
    num_ranked: int  # familiar inputs of the detector

    @classmethod
    def of(cls, detector: Detector, test: Dataset[Any], others: Mapping[str, Dataset[Any]], batch: int) -> Novelty:
        """Score all sets.

        Args:
            detector: Of the fit.
            test: Familiar inputs that it was not calibrated on.
            others: Out-of-distribution sets by name.
            batch: How many inputs at a time.
        """
        scored: tuple[Callable[[Latent], Tensor], ...] = (Entropy(), Energy(), detector.novelty.score)
        ways, p_values, confidences = [Way(name, {}) for name in LABELS], {}, {}
        for name, data in {TEST: test, **others}.items():
            parts = measured_at(detector.la, detector.prior, DataLoader(data, batch))
            latents = [part.latent(detector.prior) for part in parts]
            for way, score in zip(ways, scored, strict=True):
                way.scores[name] = torch.cat([score(latent) for latent in latents]).cpu()
            own = ways[-1].scores[name].to(detector.prior.noise_scale.device)
            p_values[name] = detector.novelty.p_value(own).cpu()
            confidences[name] = torch.cat([latent.outputs.softmax(1).amax(1) for latent in latents]).cpu()
        number = len(detector.novelty)
        rate = next((rate for rate in RATES if rate * number >= ABOVE), max(RATES[-1], 1 / (number + 1)))
        return cls(ways, p_values, confidences, rate, len(detector.novelty))

    @property
    def detector(self) -> Way:
        return self.ways[-1]

    @property
    def others(self) -> list[str]:
        """The out-of-distribution sets."""
        return [name for name in self.p_values if name != TEST]

    def alarms(self, name: str) -> float:
        """The fraction of a set at which the detector raises an alarm."""
        return float((self.p_values[name] <= self.rate).to(torch.float64).mean())

    def as_json(self) -> dict[str, Any]:
        """All numbers."""
        sets = {
            name: {"alarms": self.alarms(name), **asdict(self.detector.metrics(name))}
            | {way.name: asdict(way.metrics(name)) for way in self.ways[:-1]}
            for name in self.others
        }
        return {"rate": self.rate, "test_alarms": self.alarms(TEST), "num_ranked": self.num_ranked, "sets": sets}

    def in_words(self) -> str:
        """For the screen and the report."""
        each = [
            f"{name} from test inputs with AUROC {self.detector.metrics(name).auroc:.3f}, alarms at "
            f"{100 * self.alarms(name):.1f} %"
            for name in self.others
        ]
        told = f" It tells {'; '.join(each)}." if each else ""
        return (
            f"The detector raises an alarm at {100 * self.alarms(TEST):.1f} % of the test inputs, where "
            f"{100 * self.rate:.1f} % are asked for.{told}"
        )

    def table(self) -> Table:
        """How well each way tells each set from test inputs, and the alarms of the detector."""
        columns = [column for name in self.others for column in self._columns(name)]
        share = f"Alarms at {100 * self.rate:.3g} %: the fraction of"
        for name in (TEST, *self.others):
            kind = "test inputs" if name == TEST else name
            columns.append(
                Column(f"alarms, {kind}", self._alarm_cell(name), f"{share} {kind} with p ≤ {self.rate:.3g}.")
            )
        return Table(self.ways, columns, {})

    def _columns(self, name: str) -> list[Column]:
        return [
            Column(
                f"AUROC, {name}",
                lambda way: f"{way.metrics(name).auroc:.3f}",
                f"The chance that one of {name} scores higher than a test input; one half is guessing.",
                max,
            ),
            Column(
                f"FPR95, {name}",
                lambda way: f"{way.metrics(name).fpr95:.3f}",
                f"The fraction of {name} that passes where 95 % of the test inputs do; lower is better.",
                min,
            ),
        ]

    def _alarm_cell(self, name: str) -> Callable[[Way], str]:
        return lambda way: f"{100 * self.alarms(name):.1f} %" if way is self.detector else "–"

    def panels(self) -> list[tuple[str, str, str]]:
        """Title, one sentence, and SVG: scores, ROC and p-values."""
        found = [
            (
                "Scores of the detector",
                "Test inputs and the other sets; further right is less familiar.",
                self._histogram,
            )
        ]
        if self.others:
            sentence = "Solid: the detector, with the area under its curve. Dashed: the entropy of the network."
            found.append(("ROC of the detector", sentence, self._roc))
        sentence = "The fraction of inputs whose p-value is below each value; grey: as many as are asked for."
        found.append(("p-values", sentence, self._ranks))
        return [(title, sentence, svg(draw)) for title, sentence, draw in found]

    def _coloured(self) -> list[tuple[str, str, str]]:
        names = [TEST, *self.others]
        return [
            (name, "test inputs" if name == TEST else name, COLOURS[i % len(COLOURS)]) for i, name in enumerate(names)
        ]

    def _histogram(self, axes: Axes) -> None:
        scores = self.detector.scores
        low = min(float(s.quantile(0.005)) for s in scores.values())
        high = max(float(s.quantile(0.99)) for s in scores.values())
        for name, label, colour in self._coloured():
            values = scores[name].clamp(low, high).tolist()
            axes.hist(values, bins=40, range=(low, high), density=True, color=colour, alpha=0.5, label=label)
        axes.set(xlabel="score", ylabel="density")
        axes.legend()

    def _roc(self, axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, zorder=0)
        for name, label, colour in self._coloured()[1:]:
            for way, dashes in ((self.ways[0], "--"), (self.detector, "-")):
                x, y = roc_curve(way.scores[TEST], way.scores[name])
                text = f"{label}: {way.metrics(name).auroc:.3f}" if way is self.detector else None
                axes.plot(x, y, dashes, color=colour, linewidth=1.3, label=text)
        axes.set(xlabel="test inputs rejected", ylabel="others rejected", xlim=(0, 1), ylim=(0, 1.02))
        axes.legend(loc="lower right")

    def _ranks(self, axes: Axes) -> None:
        least = 1 / (self.num_ranked + 1)
        asked = torch.logspace(math.log10(least), 0, 100)
        axes.plot(asked, asked, color="0.6", linewidth=0.8, zorder=0)
        for name, label, colour in self._coloured():
            p = self.p_values[name].sort().values
            fraction = torch.arange(1, len(p) + 1) / len(p)
            axes.step([least, *p.tolist(), 1], [0, *fraction.tolist(), 1], where="post", color=colour, label=label)
        axes.set(xscale="log", xlabel="p-value", ylabel="fraction of inputs", xlim=(least, 1), ylim=(0, 1.02))
        axes.legend(loc="lower right")

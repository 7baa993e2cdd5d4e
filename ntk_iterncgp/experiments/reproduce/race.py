"""Methods against the clock: accuracy, NLL and ECE on training and test data while each of them works.

The clock stands still while predictions are scored. All methods are scored alike: by the probit approximation from the
mean and the marginal variances of the latent functions, as in the paper.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ntk_iterncgp.experiments.evaluation import classification_metrics
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.posterior.function_space import Posterior

Predict = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Means (b, C) and marginal variances (b, C) of the latent functions at x (b, d)."""

CHUNK_BYTES = 128 * 2**20


@dataclass(frozen=True, eq=False)
class Classes:
    """A classification problem; `seen` are the training data that are scored, a sample where there are many."""

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    num_classes: int
    num_seen: int

    @property
    def seen(self) -> tuple[Tensor, Tensor]:
        """The inputs and labels trained on so far."""
        return self.train_inputs[: self.num_seen], self.train_labels[: self.num_seen]


@dataclass(eq=False)
class Clock:
    """Seconds of a method's own work: started when made, stopped while a score is taken."""

    method: str
    group: str  # whose colour it has
    classes: Classes
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    resumed: float = field(default_factory=time.perf_counter)
    bar: Any = field(init=False, repr=False)  # a line on the screen, so that an hour is not spent in silence

    def __post_init__(self) -> None:
        self.bar = tqdm(desc=self.method, unit=" scores", leave=False, disable=None)

    def pause(self) -> float:
        """Count the time so far; returns the seconds so far."""
        self.seconds += time.perf_counter() - self.resumed
        self.resumed = time.perf_counter()
        return self.seconds

    def score(self, predict: Predict, **more: Any) -> None:
        """A row of scores at this moment."""
        self.pause()
        row: dict[str, Any] = {"method": self.method, "group": self.group, "seconds": self.seconds, **more}
        for name, (inputs, labels) in (
            ("test", (self.classes.test_inputs, self.classes.test_labels)),
            ("train", self.classes.seen),
        ):
            mean, variance = predict(inputs)
            probabilities = Softmax(self.classes.num_classes).expected_response(mean, variance)
            metrics = classification_metrics(probabilities, labels)
            row |= {f"{name}_{key}": getattr(metrics, key) for key in ("accuracy", "nll", "ece")}
        self.rows.append(row)
        self.bar.set_postfix_str(f"{self.seconds:.0f} s of its own, test NLL {row['test_nll']:.3f}", refresh=False)
        self.bar.update()
        self.resumed = time.perf_counter()

    def finish(self) -> Clock:
        """At the end of a method's work."""
        self.pause()
        self.bar.close()
        return self


def marginals(posterior: Posterior) -> Predict:
    """Means and variances in parts whose work fits in memory."""

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        size = max(1, CHUNK_BYTES // posterior.bytes_per_input(marginal=True))
        parts = [posterior.marginals(part) for part in x.split(size)]
        return torch.cat([mean for mean, _ in parts]), torch.cat([variance for _, variance in parts])

    return predict

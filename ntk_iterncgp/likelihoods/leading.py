"""The softmax likelihood of many classes, of which each datum keeps a few: nothing that grows as N·C is held.

Of each datum the log-probabilities of its likeliest classes and of its target are stored, and of all others together
as one more. For a direction u that is zero on the others, with πᵀu = 0,

    W u = π ∘ u,    uᵀW u′ = Σ_c π_c u_c u′_c,

which is zero on the others, too: products with W are exact, and so are the actions. The contrasts of a softmax
(`cotangent`) are of this kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods.base import ANY_VARIANCE, CurvatureAt
from ntk_iterncgp.likelihoods.softmax import Softmax

NUM_LEADING = 6  # classes of each datum: as many contrasts as a first pass takes, four, and the target
SKETCH = 128  # numbers by which vectors over the classes are compared


class LeadingSoftmax(Softmax):
    """Of `num_leading` classes of each datum, and all of its others as one class that no direction is along."""

    def __init__(self, num_leading: int) -> None:
        super().__init__(num_leading + 1)

    @property
    def curvature_rank(self) -> int:
        """The directions of each datum that there are, fewer than its W has."""
        return self.num_outputs - 2

    def cotangent(self, latent: Tensor, index: int) -> Tensor:
        return torch.nn.functional.pad(super().cotangent(latent[:, :-1], index), (0, 1))

    def direction(self, latent: Tensor, drawn: Tensor) -> Tensor:
        probabilities = latent[:, :-1].softmax(1)
        inside = drawn[:, :-1] - (probabilities * drawn[:, :-1]).sum(1, keepdim=True)
        return torch.nn.functional.pad(inside, (0, 1))


@dataclass(frozen=True, eq=False)
class Leading:
    """Which classes each datum keeps."""

    classes: Tensor  # (N, K)
    traces: Tensor  # tr(W_n), of all classes (N,)
    num_classes: int  # C

    def to_dict(self) -> dict[str, Tensor]:
        """All but the number of classes, which follows from the model."""
        return {"classes": self.classes, "traces": self.traces}

    @staticmethod
    def of_batch(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probabilities (b, K + 1), places of the targets among the classes (b,), the classes, and traces."""
        logs = outputs.double().log_softmax(1)
        classes = logs.topk(NUM_LEADING, 1).indices
        is_missing = (classes != targets[:, None]).all(1)
        classes[is_missing, -1] = targets[is_missing]
        kept, others = Leading._split(logs, classes)
        traces = Softmax(outputs.shape[1]).for_prior_variance(ANY_VARIANCE).curvature_traces(logs)
        return torch.cat([kept, others], 1), (classes == targets[:, None]).int().argmax(1), classes.int(), traces

    @staticmethod
    def _split(logs: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        return logs.gather(1, classes), logs.scatter(1, classes, -torch.inf).logsumexp(1, keepdim=True)

    def reduced(self, outputs: Tensor, rows: Tensor) -> Tensor:  # (r, C) -> (r, K + 1)
        """Log-probabilities of the classes that these data keep, and of all others together."""
        return torch.cat(self._split(outputs.log_softmax(1), self.classes[rows].long()), 1)

    def whole(self, block: Tensor, rows: Tensor) -> Tensor:  # (r, K + 1, q) -> (r, C, q)
        """What is zero on all other classes, for each class."""
        found: Tensor = block.new_zeros(len(block), self.num_classes, block.shape[2])
        places = self.classes[rows].long()[..., None].expand(-1, -1, block.shape[2])
        found.scatter_(1, places, block[:, :-1])
        return found

    def sketch(self, block: Tensor, rows: Tensor) -> Tensor:  # (r, K + 1) -> (r, SKETCH)
        """Projected at random, which keeps angles between vectors over the classes."""
        drawn = torch.randn(self.num_classes, SKETCH, generator=torch.Generator().manual_seed(0)) / SKETCH**0.5
        drawn, unit = drawn.to(block.device), torch.nn.functional.normalize(block[:, :-1], eps=1e-300).float()
        total: Tensor = drawn.new_zeros(len(block), SKETCH)
        for values, classes in zip(unit.T, self.classes[rows].long().T, strict=True):
            total += values[:, None] * drawn[classes]
        return total


@dataclass(frozen=True, eq=False)
class CurvatureOfMany(CurvatureAt):
    """W where outputs are computed when they are asked for, of few data at a time; `latent` are the traces alone."""

    outputs_at: Callable[[Tensor], Tensor]  # (r,) -> (r, C)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.latent), self.likelihood.num_outputs

    def at(self, data: slice | Tensor) -> Tensor:
        return self.outputs_at(torch.arange(len(self.latent))[data] if isinstance(data, slice) else data)

    def traces(self) -> Tensor:
        return self.latent

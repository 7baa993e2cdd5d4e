"""Subset of data: the exact Laplace approximation of a softmax GP on M training data, as a baseline.

Rasmussen & Williams, Algorithms 3.3 and 3.4: C + 1 Cholesky factors of size M in place of the paper's one of size C·M,
which makes this a stronger baseline than the paper's: the same mean for C²/3 times less work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ntk_iterncgp.experiments.reproduce.quadratic import quadratic_forms
from ntk_iterncgp.experiments.reproduce.race import Classes, Clock
from ntk_iterncgp.kernels import Kernel

MAX_NEWTON_STEPS = 20
CHUNK = 2000  # inputs predicted at once


@dataclass(frozen=True, eq=False)
class Laplace:
    """The posterior at Newton's point: E_c = (K + D_c⁻¹)⁻¹ for each class, and the factor of their sum."""

    kernel: Kernel
    inputs: Tensor  # (M, d)
    weights: Tensor  # a (M, C), with f = K a
    projections: list[Tensor]  # E_c (M, M); one and the same for classes that are alike
    sum_factor: Tensor  # L with LLᵀ = Σ_c E_c

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means (b, C) and marginal variances (b, C), Alg. 3.4: k(x, x) − kᵀA_c k."""
        means, variances = [], []
        for part in x.double().split(CHUNK):
            cross = self.kernel(self.inputs, part)  # (M, b)
            means.append(cross.T @ self.weights)
            single = cross.float()
            removed = {key: quadratic_forms(matrix, single).double() for key, matrix in self._downdates.items()}
            columns = torch.stack([removed[id(E)] for E in self.projections], 1)
            variances.append((self.kernel.diagonal(part)[:, None] - columns).clamp_min(0))
        return torch.cat(means), torch.cat(variances)

    @cached_property
    def _downdates(self) -> dict[int, Tensor]:
        """A_c = E_c − E_c(Σ E)⁻¹E_c by the identity of E_c.

        Made once, not solved with for every input. In single precision, which is enough for a score: no eigenvalue of
        A_c is above one.
        """
        found = {}
        for E in {id(E): E for E in self.projections}.values():
            half = torch.linalg.solve_triangular(self.sum_factor, E, upper=False)
            found[id(E)] = (E - half.T @ half).float()
        return found


def newton_steps(
    kernel: Kernel, inputs: Tensor, labels: Tensor, num_classes: int, tolerance: float
) -> Iterator[Laplace]:  # (M, d), (M,)
    """The posterior after each step of Alg. 3.3, in float64, until f changes by less than `tolerance`."""
    X, y = inputs.double(), one_hot(labels, num_classes).double()
    K, f = kernel(X, X), torch.zeros(len(X), num_classes, dtype=torch.float64, device=X.device)
    eye = torch.eye(len(X), dtype=torch.float64, device=X.device)
    for _ in range(MAX_NEWTON_STEPS):
        p = f.softmax(1)
        projections: list[Tensor] = []
        for c in range(num_classes):
            if c > 0 and torch.equal(p[:, c], p[:, c - 1]):  # all of them at f = 0
                projections.append(projections[-1])
                continue
            root = p[:, c].sqrt()
            factor = torch.linalg.cholesky(eye + root[:, None] * K * root)
            projections.append(root[:, None] * torch.cholesky_inverse(factor) * root)
        sum_factor = torch.linalg.cholesky(sum(projections[1:], projections[0]))
        b = p * f - p * (p * f).sum(1, keepdim=True) + y - p
        image = K @ b
        removed = torch.stack([E @ image[:, c] for c, E in enumerate(projections)], 1)
        shared = torch.cholesky_solve(removed.sum(1, keepdim=True), sum_factor)
        a = b - removed + torch.cat([E @ shared for E in projections], 1)
        new = K @ a
        change, f = (new - f).norm() / new.norm(), new
        yield Laplace(kernel, X, a, projections, sum_factor)
        if change <= tolerance:
            return


def race(classes: Classes, kernel: Kernel, size: int, tolerance: float, generator: torch.Generator) -> Clock:
    """A random subset, scored after each Newton step."""
    chosen = torch.randperm(len(classes.train_labels), generator=generator)[:size]
    clock = Clock(f"SoD {size}", "sod", classes)
    inputs, labels = classes.train_inputs[chosen], classes.train_labels[chosen]
    steps = newton_steps(kernel, inputs, labels, classes.num_classes, tolerance)
    for step, laplace in enumerate(steps, start=1):
        clock.score(laplace.predict, step=step)
    return clock.finish()

"""The paper's binary classification problems: a draw from a GP with an RBF kernel, and labels with that log-odds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_iterncgp.experiments.reproduce.beliefs import make_problem
from ntk_iterncgp.kernels import RBF
from ntk_iterncgp.likelihoods import Bernoulli
from ntk_iterncgp.solver import Problem

LOW, HIGH = (-3.0, -4.0), (5.0, 1.0)  # the first coordinate lies in [−3, 5], the second in [−4, 1]
MARGIN = 0.5  # of the maps, beyond the data


@dataclass(frozen=True, eq=False)
class BinaryData:
    """Inputs (N, d), labels 0 and 1, and as many unseen ones for testing; the latent function at both."""

    kernel: RBF
    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    latent: Tensor

    @property
    def problem(self) -> Problem:
        """The Bernoulli problem of the training data."""
        return make_problem(self.kernel, Bernoulli(), self.inputs, self.labels)


def draw(num_data: int, dimension: int, outputscale: float, seed: int, *, num_test: int = 500) -> BinaryData:
    """`num_data` inputs drawn uniformly, labels 1 with probability logistic(f)."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (torch.tensor(ends[:dimension], dtype=torch.float64) for ends in (LOW, HIGH))
    inputs = torch.rand(num_data + num_test, dimension, generator=generator, dtype=torch.float64)
    inputs = low + (high - low) * inputs
    kernel = RBF(lengthscale=1.0, outputscale=outputscale)
    values, vectors = torch.linalg.eigh(kernel(inputs, inputs))  # eigenvalues below rounding make Cholesky fail
    noise = torch.randn(len(inputs), generator=generator, dtype=torch.float64)
    latent = vectors @ (values.clamp_min(0).sqrt() * noise)
    labels = torch.bernoulli(latent.sigmoid(), generator=generator)
    return BinaryData(
        kernel, inputs[:num_data], labels[:num_data], inputs[num_data:], labels[num_data:], latent[:num_data]
    )


def plane(resolution: int) -> tuple[Tensor, tuple[float, float, float, float]]:  # (resolution², 2)
    """A grid over the input plane, and its extent as matplotlib's imshow takes it (origin below)."""
    extent = (LOW[0] - MARGIN, HIGH[0] + MARGIN, LOW[1] - MARGIN, HIGH[1] + MARGIN)
    x = torch.linspace(extent[0], extent[1], resolution, dtype=torch.float64)
    y = torch.linspace(extent[2], extent[3], resolution, dtype=torch.float64)
    second, first = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([first.flatten(), second.flatten()], 1), extent


def probit_nll(mean: Tensor, variance: Tensor, labels: Tensor) -> float:  # (b,), (b,), (b,)
    """−log p(y) by the probit approximation, as the paper scores classification."""
    probability = Bernoulli().expected_response(mean, variance)
    return float(torch.nn.functional.binary_cross_entropy(probability, labels))

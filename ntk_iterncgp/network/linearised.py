"""What a network fit is given and what it returns, whichever way the actions are chosen."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ntk_iterncgp import parallel
from ntk_iterncgp.data import FixedOrderData
from ntk_iterncgp.likelihoods import Gaussian, Likelihood, Softmax
from ntk_iterncgp.priors.jacobian import NetworkJacobian
from ntk_iterncgp.solver import NewtonOptions, Policy, Stopping
from ntk_iterncgp.solver.report import FitReport
from ntk_iterncgp.solver.stopping import Status
from ntk_iterncgp.weight_posterior import WeightPosterior, precision_of_weights

MEANS = ("network", "refined")
CLUSTERS = "clusters"
PRODUCT_EPOCHS = 5 / 3  # a product with the NTK: forward and backward, and a sweep of Jacobian-vector products


@dataclass(frozen=True)
class NetworkSettings:
    """How to fit; none of it changes what is being fitted."""

    mean: str
    policy: Policy | None  # None: clusters
    num_actions: int
    cotangents: int | None  # directions of each datum; None: one, or each output of a regression
    max_epochs: float | None
    stopping: Stopping
    options: NewtonOptions
    chunk_bytes: int
    seed: int

    @property
    def product_policy(self) -> Policy:
        assert self.policy is not None
        return self.policy


@dataclass(frozen=True, eq=False)
class LinearisedNetwork:
    """A network at its trained weights θ*, the data, and the prior N(μ₀, Λ⁻¹) of the weights.

    `noise_scale` is τ = σ²·T: it scales the noise of a Gaussian likelihood, and stands for temperature otherwise.
    """

    jacobian: NetworkJacobian
    data: FixedOrderData
    classification: bool
    prior_precision: Tensor  # (1,), (L,) or (P,)
    noise_scale: Tensor
    shift: Tensor  # θ* − μ₀ (P,)
    prior_mean: Tensor  # μ₀, (1,) or (P,)
    layer_sizes: tuple[int, ...]

    @property
    def weight_precision(self) -> Tensor:  # (P,)
        return precision_of_weights(self.prior_precision, self.layer_sizes)

    def first_look(self) -> FirstLook:
        x, _ = next(self.data.batches())
        with torch.no_grad():
            outputs = self.jacobian.forward(x)
        return FirstLook(outputs, self.data.num_items)

    def likelihood(self, outputs: Tensor, noise: float) -> Likelihood:
        """Of the right kind, after a look at the outputs."""
        if not bool(torch.isfinite(outputs).all()):
            bad = int((~torch.isfinite(outputs)).any(1).sum())
            raise ValueError(
                f"The model is expected to return finite outputs, but {bad} of {len(outputs)} training inputs gave "
                "NaN or infinity. Check its weights and the scale of its inputs."
            )
        return Softmax(outputs.shape[1]) if self.classification else Gaussian(noise, num_outputs=outputs.shape[1])


class FirstLook(NamedTuple):
    """By what data are known again: the outputs of their first batch (b, C), and how many there are, if known."""

    outputs: Tensor
    num_items: int | None

    def check_same(self, other: FirstLook) -> None:
        """Actions are sums over numbered data: other data, or another order, would make nonsense of them."""
        rows = min(len(self.outputs), len(other.outputs))
        same = torch.allclose(self.outputs[:rows], other.outputs[:rows], rtol=1e-3, atol=1e-4)
        if not same or (None not in (self.num_items, other.num_items) and self.num_items != other.num_items):
            raise ValueError(
                "refine expects the data of the fit in the same order, but this loader gives "
                f"{f'{other.num_items} instead of {self.num_items}' if same else 'other ones'}. Pass the loader of the "
                "fit; where it draws its data at random, fit again with shuffle=False."
            )


@dataclass(frozen=True, eq=False)
class NetworkFit:
    """What a fit gives: the posterior, the loss −log p(y | f) for unit noise without constants, and the report.

    `progress` is what `refine` goes on from.
    """

    posterior: WeightPosterior
    loss: float
    num_data: int
    num_outputs: int
    report: FitReport
    progress: Any
    first_look: FirstLook | None = None


@dataclass(frozen=True)
class Budget:
    """What may be spent, in epochs (a forward and a backward pass over the data) or in seconds; None is no limit."""

    epochs: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "seconds"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{name} expects a positive number, but got {value!r}.")
            if isinstance(value, int) and value >= 2**63:
                raise ValueError(f"{name} expects a positive number, a whole one below 2^63, but got a larger one.")

    def is_spent_in_epochs(self, epochs: float) -> bool:
        return self.epochs is not None and epochs >= self.epochs - 1e-9

    def is_spent(self, epochs: float, started: float) -> bool:
        """Several processes, whose clocks differ, are asked together and agree."""
        if self.is_spent_in_epochs(epochs):
            return True
        return self.seconds is not None and parallel.any_of(time.perf_counter() - started >= self.seconds)


def checked_targets(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    if len(targets) != len(outputs):
        raise ValueError(f"Expected one target for each of the {len(outputs)} training inputs, but got {len(targets)}.")
    if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
        raise ValueError("Expected finite targets, but they hold NaN or infinity. Remove those data.")
    return likelihood.check_targets(targets)


def advice_after(status: str) -> str:
    """What to do next."""
    if status == Status.EXHAUSTED:
        return "There is no new action beyond rounding. information_captured says how much of the data has been used."
    if status == Status.NEWTON_STEPS:
        return "The mean had not converged when the Newton steps ran out. Use more actions per step."
    return "refine(train_loader, epochs=…) contracts the variance further."

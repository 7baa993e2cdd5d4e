"""A linearised network: what its fit is given and what it returns, whichever way the actions are chosen.

auto         the exact posterior where it costs less than the budget, else clusters (the default)
exact        all whitened rows of J, factored: one sweep
clusters     all data in about one epoch, one action per group of data
other        the same solver as for any other prior: one action per product with the NTK, about 1.7 epochs each

mean="network"   The predictive mean is the network's own output. W is taken there, and there is one linear system.
mean="refined"   Newton's method, from the network's outputs to the mode of the linearised model under the given prior.
                 Actions are recycled from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

import torch
from torch import Tensor

from ntk_iterncgp.data.fixed_order import FirstBatch, FixedOrderData
from ntk_iterncgp.fitting.drive import Budget
from ntk_iterncgp.fitting.report import FitReport
from ntk_iterncgp.jacobian.rows import NetworkJacobian
from ntk_iterncgp.likelihoods.base import Likelihood
from ntk_iterncgp.posterior.weight_space import WeightPosterior, precision_of_weights
from ntk_iterncgp.runtime.validate import seed_number, whole_number
from ntk_iterncgp.solver.policies import Policy, resolve_policy
from ntk_iterncgp.solver.state import State
from ntk_iterncgp.solver.stopping import NewtonOptions, Status, Stopping

if TYPE_CHECKING:
    from ntk_iterncgp.fitting.cluster_run import ClusterState

MEANS = ("network", "refined")
CLUSTERS: Final = "clusters"
AUTO: Final = "auto"
EXACT: Final = "exact"
MODES = (AUTO, EXACT, CLUSTERS)
FOLD_FACTOR = 3  # rows are folded into a factor of JᵀWJ when they are so many times P: 2.7 n'P² flops
PRODUCT_EPOCHS = 5 / 3  # a product with the NTK: forward and backward, and a sweep of Jacobian-vector products


@dataclass(frozen=True)
class NetworkSettings:
    """How to fit; none of it changes what is being fitted."""

    mean: str
    policy: Policy | Literal["auto", "exact", "clusters"]
    in_groups: bool  # actions are groups of data, if they are not exact; else each is a product with the NTK
    num_actions: int
    cotangents: int | None  # directions of each datum; None: one, or each output of a regression
    max_epochs: float | None
    stopping: Stopping
    options: NewtonOptions
    chunk_bytes: int
    seed: int
    combines: bool = True  # more groups than actions into the best combinations; else each group is an action
    is_known: bool = False  # the model, whose derivatives an earlier fit has checked
    is_bounded: bool = False  # num_actions was asked for, and is not the default
    storage: torch.dtype | None = None  # of A once the fit is done; None: as derivatives

    @classmethod
    def checked(
        cls,
        *,
        mean: str,
        policy: str | Policy | None,
        num_actions: int | None,
        cotangents: int | None,
        max_epochs: float | None,
        actions_per_step: int,
        newton_tol: float,
        options: NewtonOptions,
        chunk_bytes: int,
        seed: int,
        storage: torch.dtype | str | None = None,
    ) -> NetworkSettings:
        """What the user asked for, with defaults filled in; or an error that names the setting."""
        if mean not in MEANS:
            raise ValueError(f"`mean` must be 'network' or 'refined'; got {mean!r}. Try mean='network'.")
        policy = AUTO if policy is None else policy
        if policy == AUTO and mean != "network":
            policy = "curvature_residual"
        if policy in (CLUSTERS, EXACT) and mean != "network":
            raise ValueError(
                f"policy={policy!r} must be combined with mean='network'; got mean={mean!r}. Its actions contract the "
                "variance and say little about the mean. Try policy='curvature_residual'."
            )
        if storage not in (None, torch.bfloat16, "bfloat16"):
            raise ValueError(f"`storage` must be None or 'bfloat16'; got {storage!r}. Try storage='bfloat16'.")
        max_epochs = Budget(epochs=max_epochs).epochs
        if max_epochs is not None and max_epochs <= 1 / 3:
            raise ValueError(
                f"`max_epochs` must be more than 1/3, the cost of the forward sweep over all data; got {max_epochs}. "
                "Try max_epochs=1."
            )
        in_groups, is_bounded = policy in MODES, num_actions is not None
        if num_actions is None:
            num_actions = 200 if in_groups else 50
        num_actions = max_products = whole_number("num_actions", num_actions, at_least=1)
        if max_epochs is not None:
            max_products = max(1, int(min(num_actions, (max_epochs - 1 / 3) / PRODUCT_EPOCHS)))
        actions_per_step = whole_number("actions_per_step", actions_per_step, at_least=1)
        return cls(
            mean=mean,
            policy=cast(Literal["auto"], policy) if in_groups else resolve_policy(policy, others=MODES),
            in_groups=in_groups,
            num_actions=num_actions,
            cotangents=None if cotangents is None else whole_number("cotangents", cotangents, at_least=1),
            max_epochs=max_epochs,
            stopping=Stopping(max_products, actions_per_step, newton_tol=newton_tol),
            options=options,
            chunk_bytes=whole_number("chunk_bytes", chunk_bytes, at_least=1),
            seed=seed_number(seed),
            is_bounded=is_bounded,
            storage=None if storage is None else torch.bfloat16,
        )

    @property
    def product_policy(self) -> Policy:
        """The policy of a fit by products."""
        assert not isinstance(self.policy, str)
        return self.policy


@dataclass(frozen=True, eq=False)
class LinearisedNetwork:
    """A network at its trained weights θ*, the data, and the prior N(μ₀, Λ⁻¹) of the weights.

    `noise_scale` is τ = σ²·T: it scales the noise of a Gaussian likelihood, and stands for temperature otherwise.
    """

    jacobian: NetworkJacobian
    data: FixedOrderData
    classification: bool
    likelihood: Likelihood  # with unit noise, in the geometric mean over outputs
    prior_precision: Tensor  # (1,), (L,) or (P,)
    noise_scale: Tensor
    shift: Tensor  # θ* − μ₀ (P,)
    prior_mean: Tensor  # μ₀, (1,) or (P,)
    layer_sizes: tuple[int, ...]
    first_batch: FirstBatch

    @property
    def weight_precision(self) -> Tensor:  # (P,)
        """The prior precision of each weight."""
        return precision_of_weights(self.prior_precision, self.layer_sizes)


@dataclass(frozen=True, eq=False)
class NetworkFit:
    """What a fit gives: the posterior, the loss −log p(y | f) for unit noise without constants, and the report.

    `state` is what `refine` resumes, with data that begin with `first_batch`; `data_seen` is their fingerprint.
    """

    posterior: WeightPosterior
    loss: float
    num_data: int
    num_outputs: int
    report: FitReport
    state: State | ClusterState | None  # None: exact, or A is stored in fewer digits
    first_batch: FirstBatch
    data_seen: Tensor  # (1,)


ADVICE = {
    Status.EXHAUSTED: "There is no new action beyond rounding. information_captured says how much of the data has been "
    "used.",
    Status.NEWTON_STEPS: "The mean had not converged when the Newton steps ran out. Use more actions per step.",
}
MORE = "refine(train_loader, epochs=…) contracts the variance further."  # the advice after any other status

"""Problems for the solver: four likelihoods, each with a kernel per output and with correlated outputs as in a network.

A case knows its dense covariance for the oracle, and makes the prior that the solver is given.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp import kernels, likelihoods
from ntk_iterncgp.linalg.columns import Buffer, Columns, DenseColumns, Images
from ntk_iterncgp.priors.base import AtInputs, Prior
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.runtime.parallel import Shard
from ntk_iterncgp.solver import NewtonOptions, Problem, State, Status, Stopping, initial_state, newton, resolve_policy
from tests import oracles

NOISE = 0.3
POLICIES = ("unit", "residual", "curvature_residual", "random_subspace")


@dataclass(frozen=True)
class Case:
    """N training and b new inputs with C outputs; `covariance` and `mean` cover all of them, training inputs first."""

    name: str  # of the likelihood, as the oracle calls it
    likelihood: likelihoods.Likelihood
    covariance: Tensor  # ((N + b) C, (N + b) C)
    mean: Tensor  # (N + b, C)
    targets: Tensor
    make_prior: Callable[[torch.dtype], Prior]
    new_inputs: Tensor  # what the prior takes as x

    @property
    def num_data(self) -> int:
        return len(self.targets)

    @property
    def num_rows(self) -> int:
        return self.num_data * self.mean.shape[1]

    @property
    def noise(self) -> float | None:
        return NOISE if self.name == "gaussian" else None

    @property
    def K(self) -> Tensor:
        return self.covariance[: self.num_rows, : self.num_rows]

    @property
    def Kx(self) -> Tensor:
        return self.covariance[self.num_rows :, : self.num_rows]

    @property
    def Kxx(self) -> Tensor:
        return self.covariance[self.num_rows :, self.num_rows :]

    @property
    def m(self) -> Tensor:
        return self.mean[: self.num_data].flatten()

    @property
    def mx(self) -> Tensor:
        return self.mean[self.num_data :].flatten()

    def problem(self, dtype: torch.dtype = torch.float64) -> Problem:
        return Problem(self.make_prior(dtype), self.likelihood, self.likelihood.check_targets(self.targets))

    def start(self, dtype: torch.dtype = torch.float64, *, capacity: int = 4, kronecker: bool = False) -> State:
        return initial_state(self.problem(dtype), seed=0, capacity=capacity, kronecker=kronecker)

    def exact(self) -> tuple[Tensor, Tensor]:
        """The Laplace posterior at the new inputs."""
        return oracles.posterior(self.name, self.K, self.Kx, self.Kxx, self.m, self.mx, self.targets, noise=self.noise)

    def exact_covariance_at(self, latent: Tensor) -> Tensor:
        """The exact covariance at the new inputs for the curvature at given latent values."""
        return oracles.posterior_at(self.name, latent, self.K, self.Kx, self.Kxx, noise=self.noise)


def make_case(
    name: str,
    prior: str,
    *,
    num_data: int = 14,
    num_new: int = 5,
    num_classes: int = 3,
    scale: float = 1.0,
    seed: int = 0,
) -> Case:
    """`prior`: "kernels" (one per output), "shared" (one for all outputs) or "network" (low rank, correlated)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    likelihood = {
        "gaussian": lambda: likelihoods.Gaussian(NOISE, num_outputs=2),
        "bernoulli": likelihoods.Bernoulli,
        "poisson": likelihoods.Poisson,
        "softmax": lambda: likelihoods.Softmax(num_classes),
    }[name]()
    C, points = likelihood.num_outputs, num_data + num_new
    if prior == "network":
        jacobian = normal(points * C, 2 * num_data) * scale**0.5
        covariance = jacobian @ jacobian.T / (2 * num_data)
        mean = 0.3 * normal(points, C)
        new_inputs = torch.arange(num_data, points)

        def make_prior(dtype: torch.dtype) -> Prior:
            return DensePrior(covariance.to(dtype), mean, num_data)
    else:
        X = normal(points, 2)
        families = [kernels.Matern32, kernels.RBF, kernels.Matern12, kernels.Matern52]
        one_each = [families[c % 4](0.5 + 0.4 * c, scale * (1 + 0.5 * c)) for c in range(C)]
        chosen = one_each if prior == "kernels" and C > 1 else one_each[:1]
        per_output = chosen if len(chosen) == C else chosen * C
        covariance = oracles.block_kernel([k(X, X) for k in per_output])
        mean = (0.3 * normal(C)).expand(points, C)
        new_inputs = X[num_data:]

        def make_prior(dtype: torch.dtype) -> Prior:
            return GramPrior(chosen, X[:num_data].to(dtype), mean[0])

    root = torch.linalg.cholesky(covariance + 1e-9 * torch.eye(points * C, dtype=torch.float64))
    latent = (mean + (root @ normal(points * C)).reshape(points, C))[:num_data]
    targets = _draw(name, latent, normal, generator)
    return Case(name, likelihood, covariance, mean, targets, make_prior, new_inputs)


def _draw(name: str, latent: Tensor, normal: Callable[..., Tensor], generator: torch.Generator) -> Tensor:
    if name == "gaussian":
        return latent + NOISE**0.5 * normal(*latent.shape)
    if name == "bernoulli":
        return torch.bernoulli(latent[:, 0].sigmoid(), generator=generator)
    if name == "poisson":
        return torch.poisson(latent[:, 0].exp(), generator=generator)
    return torch.multinomial(latent.softmax(1), 1, generator=generator)[:, 0]


def exhaust(run: Generator[State, None, tuple[State, Status]]) -> tuple[list[State], State, Status]:
    """All states of a run, its last one, and why it stopped."""
    states = []
    while True:
        try:
            states.append(next(run))
        except StopIteration as end:
            return states, *end.value


PRECISE: dict[str, Any] = dict(
    max_products=10_000, products_per_step=10_000, max_newton_steps=100, newton_tol=1e-13, residual_tol=1e-14
)


def solve(
    case: Case,
    policy: Any = "curvature_residual",
    *,
    dtype: torch.dtype = torch.float64,
    kronecker: bool = False,
    options: NewtonOptions | None = None,
    **stopping: Any,
) -> tuple[list[State], State, Status]:
    """Newton's method with settings that lead to the exact mode unless told otherwise."""
    run = newton(
        case.start(dtype, kronecker=kronecker),
        resolve_policy(policy),
        Stopping(**{**PRECISE, **stopping}),
        options or NewtonOptions(),
    )
    return exhaust(run)


class DensePrior(Prior):
    """The plain prior: a covariance matrix over a finite set of points, written out, that the others are tested by.

    `covariance` is (points·C, points·C), class index fastest; `mean` is (points, C). The first N points are the
    training inputs; any point is named by its index, so `x` is a tensor of indices. Outputs may be correlated in any
    way, as they are for a network.
    """

    def __init__(self, covariance: Tensor, mean: Tensor, num_data: int) -> None:
        super().__init__(Shard.even(num_data))
        self.num_data, self.num_outputs = num_data, mean.shape[1]
        self.dtype, self.device = covariance.dtype, covariance.device
        self._covariance, self._mean = covariance, mean.double()
        self._num_rows = num_data * self.num_outputs

    @property
    def mean(self) -> Tensor:
        return self._mean[: self.num_data]

    def image(self, actions: Columns) -> DenseColumns:
        assert isinstance(actions, DenseColumns)
        self.num_products += actions.size
        rows = self.shard.take(self._covariance[: self._num_rows, : self._num_rows])
        return DenseColumns.of(rows @ actions.whole().matrix, self.num_outputs, self.shard)

    def gram(self, left: Buffer, right: Buffer) -> Tensor:
        return left.actions.gram(self.lift(right.images))

    def lift(self, images: Images) -> DenseColumns:
        assert isinstance(images, DenseColumns)
        return images

    def at(self, x: Tensor, buffer: Buffer, *, joint: bool = False) -> AtInputs:
        assert isinstance(buffer.actions, DenseColumns)
        rows = self._rows_of(x)
        cross = self._covariance[rows, : self._num_rows] @ buffer.actions.whole().matrix
        covariance = self._covariance[rows][:, rows] if joint else self._blocks_of(x)
        cross = cross.double().unflatten(0, (len(x), self.num_outputs))
        return AtInputs(self._mean[x], cross, covariance.double())

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        data = self.shard.mine
        yield data, self._blocks_of(torch.arange(data.start, data.stop, device=self.device)).double()

    def product_error(self, gram: Tensor) -> float:
        return self._error

    @cached_property
    def _error(self) -> float:
        return torch.finfo(self.dtype).eps * float(torch.linalg.matrix_norm(self._covariance.double(), torch.inf))

    def pick(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield rows, rows

    def _blocks_of(self, x: Tensor) -> Tensor:  # (b, C, C)
        rows = self._rows_of(x).reshape(len(x), self.num_outputs)
        return self._covariance[rows[:, :, None], rows[:, None, :]]

    def _rows_of(self, x: Tensor) -> Tensor:
        return (x[:, None] * self.num_outputs + torch.arange(self.num_outputs, device=x.device)).flatten()

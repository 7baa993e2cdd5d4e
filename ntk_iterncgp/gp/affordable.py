"""Whether the exact posterior costs less than the budget of an iterative one: flops and bytes, counted.

Exact: K written out, and in each of some eight Newton steps (one for a Gaussian likelihood) a Cholesky factor for each
output, with softmax their inverses and one more factor. Iterative: `max_products` products with K, each of which
computes all entries of K again, and the algebra of B actions. What an entry of K costs is counted in flops of a
factorization: `ENTRY_FLOPS`, the ratio of two measured rates. It only has to be right to a factor of two or so, since
near the switch both cost about the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ntk_iterncgp.fitting.exact_run import USUAL_STEPS
from ntk_iterncgp.kernels import Kernel
from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.runtime.memory import available_bytes, mebibytes, require_memory
from ntk_iterncgp.solver.exact import is_solvable

ENTRY_FLOPS = 250.0  # an exponential and its memory traffic; 60 to 240 million of them in the time of 3e10 flops
COORDINATE_FLOPS = 10.0
MEMORY_FRACTION = 0.5  # of what is available, that exact fits take without being asked
SUBSETS = (1000, 500, 250, 100)  # data whose exact evidence gives a search its starting values
SEARCH_EVALUATIONS = 40  # of that evidence, in a usual search
SEARCH_FITS = 10  # iterative ones, the usual search by the bound with its climbs: a subset may cost as much
MAX_SEARCH_FLOPS = 1e13  # of a search by the exact evidence of all data, some minutes
CHEAP_FLOPS = 3e11  # a few seconds, that a subset may cost in any case
MODES = ("auto", "exact")  # of `policy`, besides the policies of the solver


@dataclass(frozen=True)
class Sizes:
    """What both ways to a posterior cost depends on."""

    num_data: int
    num_coordinates: int
    num_outputs: int
    num_kernels: int
    has_unseen: bool  # a direction of each datum that W does not see
    is_quadratic: bool
    max_products: int
    max_actions: int  # B, of those that the budget can fill

    @classmethod
    def of(
        cls, inputs: torch.Tensor, kernels: list[Kernel], likelihood: Likelihood, max_products: int, max_actions: int
    ) -> Sizes:
        """Of a fit to these inputs."""
        rank, outputs = likelihood.curvature_rank, likelihood.num_outputs
        return cls(
            num_data=inputs.shape[0],
            num_coordinates=inputs.shape[1],
            num_outputs=outputs,
            num_kernels=len(kernels),
            has_unseen=rank < outputs,
            is_quadratic=likelihood.is_quadratic,
            max_products=max_products,
            max_actions=max_actions,
        )

    @property
    def num_factors(self) -> int:
        """One for all outputs, where they have one kernel and the same noise."""
        return 1 if self.is_quadratic and self.num_kernels == 1 else self.num_outputs

    @property
    def matrix_flops(self) -> float:
        """To compute all entries of K once."""
        return self.num_kernels * self.num_data**2 * (ENTRY_FLOPS + COORDINATE_FLOPS * self.num_coordinates)

    @property
    def exact_flops(self) -> float:
        """Of the exact way."""
        each = self.num_factors * (1 / 3 + (2 / 3 if self.has_unseen else 0)) + (1 / 3 if self.has_unseen else 0)
        return self.matrix_flops + (1 if self.is_quadratic else USUAL_STEPS) * each * self.num_data**3

    @property
    def iterative_flops(self) -> float:
        """Of the whole budget."""
        columns = 2 * self.num_outputs * self.num_data**2 * self.max_products
        n, B = self.num_data * self.num_outputs, self.max_actions
        algebra = 2 * n * B**2 + (1 if self.is_quadratic else USUAL_STEPS) * B**3 / 3
        return self.max_products * self.matrix_flops + columns + algebra

    @property
    def exact_bytes(self) -> int:
        """At the peak: K, its factors, with softmax their sum, and what a step works with."""
        matrices = self.num_kernels + 2 * self.num_factors + (4 if self.has_unseen else 2)
        return 8 * matrices * self.num_data**2


def chooses_exact(mode: str, sizes: Sizes, likelihood: Likelihood, device: torch.device) -> bool:
    """Whether to compute the exact posterior.

    Args:
        mode: "auto", or "exact" to insist on it.
        sizes: of the problem.
        likelihood: of the problem.
        device: whose memory is asked for.

    Returns:
        Whether to; all processes agree.
    """
    possible, available = is_solvable(likelihood), available_bytes(device)
    if mode == "exact":
        if not possible:
            raise ValueError(
                f"`policy` must be an iterative one for {likelihood!r}, whose curvature is not diagonal; got 'exact'. "
                "Try policy='curvature_residual'."
            )
        advice = f"K has {sizes.num_data:,}² entries. Try policy='auto', which iterates where K does not fit."
        require_memory(sizes.exact_bytes, available, advice)
        return True
    is_cheaper = sizes.exact_flops <= sizes.iterative_flops
    fits = available is None or sizes.exact_bytes <= MEMORY_FRACTION * available
    return not parallel.any_of(not (possible and is_cheaper and fits))


def searches_exactly(sizes: Sizes) -> bool:
    """Whether dozens of exact fits are affordable, where one is."""
    return SEARCH_EVALUATIONS * sizes.exact_flops <= MAX_SEARCH_FLOPS


def subset_size(sizes: Sizes, likelihood: Likelihood, device: torch.device) -> int:
    """How many data a search by the bound takes its starting values from, by their exact evidence.

    Args:
        sizes: of the problem.
        likelihood: of the problem.
        device: whose memory is asked for.

    Returns:
        The largest of a few numbers with which the search costs no more than the one by the bound, all data where they
        are fewer; 0 where there is no exact evidence. All processes agree.
    """
    if not is_solvable(likelihood):
        return 0
    limit, available = max(CHEAP_FLOPS, SEARCH_FITS * sizes.iterative_flops), available_bytes(device)
    for number in SUBSETS:
        subset = replace(sizes, num_data=min(number, sizes.num_data))
        fits = available is None or subset.exact_bytes <= MEMORY_FRACTION * available
        if not parallel.any_of(not fits or SEARCH_EVALUATIONS * subset.exact_flops > limit):
            return subset.num_data
    return 0


def explained(sizes: Sizes) -> str:
    """For the report: why it is exact."""
    ratio = sizes.iterative_flops / sizes.exact_flops
    return (
        f"Cholesky factors ({mebibytes(sizes.exact_bytes)}, at most 1/{ratio:.0f} of the work of {sizes.max_products} "
        "products)"
        if ratio >= 2
        else f"Cholesky factors ({mebibytes(sizes.exact_bytes)})"
    )

"""Choosing a kernel's hyperparameters, and the noise: by the exact Laplace evidence, or by a lower bound.

Where the exact posterior is affordable its evidence and gradient are (`evidence.py`), and the search is one of some
dozens of evaluations (`search.py`). Elsewhere that search, of a subset of the data, gives the prior mean and starting
values. From there on a GP of all data is fitted, its bound is maximised over log θ with actions and sites held
(`elbo.py`), and the GP is fitted again there, until that would change nothing; for a Gaussian likelihood with all
actions taken one step is exact.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ntk_iterncgp.fitting.report import FitReport
from ntk_iterncgp.gp.affordable import searches_exactly, subset_size
from ntk_iterncgp.gp.elbo import climb
from ntk_iterncgp.gp.evidence import ExactEvidence
from ntk_iterncgp.gp.hyperparameters import MEAN, free_names, values_from_data, with_values
from ntk_iterncgp.gp.search import Evaluations, climb_evidence, shrink_while
from ntk_iterncgp.kernels import Kernel
from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.persistence.checkpoint import CheckpointSession, unusable
from ntk_iterncgp.posterior.function_space import FunctionPosterior
from ntk_iterncgp.priors.gram import working_dtype
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.runtime.validate import non_negative
from ntk_iterncgp.solver import Status
from ntk_iterncgp.solver.state import State

SHORTER = 0.3  # of the median distance
MAX_GAP = 1.0  # of the Laplace evidence above the ELBO, in nats
MIN_ELBO_GAIN = 1e-4  # as a fraction of the bound


class Fitted(Protocol):
    """A GP fitted at some hyperparameters. If it was interrupted, the bound holds for the work done."""

    @property
    def posterior_(self) -> FunctionPosterior:
        """The posterior of the fit."""

    @property
    def report_(self) -> FitReport:
        """How the fit ended."""


F = TypeVar("F", bound=Fitted)


@dataclass(frozen=True)
class OptimizationReport:
    """How the search went; `history` has one entry for each fit, or each evaluation of the exact evidence."""

    status: str  # "converged", "max_steps" or "interrupted"
    elbo: float  # of the fit that was found
    hyperparameters: dict[str, Any]
    num_products: int
    seconds: float
    history: list[dict[str, Any]]
    log_evidence: float | None = None  # what was maximised, where it is exact; else the ELBO was

    def __str__(self) -> str:
        advice = "" if self.status == "converged" else " Call optimize again to continue from here."
        number, key, name, what, found = len(self.history), "elbo", "ELBO", "fit", self.elbo
        if self.log_evidence is not None:
            key, name, what, found = "log_evidence", "log evidence", "evaluation", self.log_evidence
        products = f"{self.num_products} products, " if self.log_evidence is None else ""
        return (
            f"{self.status}: {name} {self.history[0][key]:.6g} -> {found:.6g} in {number} {what}{'s' * (number > 1)}, "
            f"{products}{self.seconds:.1f} s.{advice}"
        )


@dataclass(frozen=True)
class SearchOptions:
    """Settings of a search for hyperparameters."""

    max_steps: int
    tolerance: float = 0.02  # as a change of log θ
    fixed: Sequence[str] = ()
    restarts: int = 1
    progress_bar: bool = False

    def without(self, name: str) -> SearchOptions:
        """The same for a search that does not know this name."""
        if isinstance(self.fixed, str) or not isinstance(self.fixed, Iterable):
            return self  # for `free` to refuse
        return replace(self, fixed=[other for other in self.fixed if other != name])

    def free(self, values: Mapping[str, Tensor], kernels: Sequence[Kernel]) -> list[str]:
        """The names of those hyperparameters that may change."""
        if not set(values) - {MEAN}:
            raise ValueError(f"`kernel` must have hyperparameters to optimise; got {kernels[0]!r}, which shows none.")
        non_negative("tolerance", self.tolerance)
        return free_names(values, self.fixed)


def maximise_evidence(
    evidence: ExactEvidence, values: dict[str, Tensor], options: SearchOptions, session: CheckpointSession | None = None
) -> tuple[dict[str, Tensor], OptimizationReport]:
    """Climb the exact evidence from where the hyperparameters are, and from where the data say they may be.

    Args:
        evidence: of the data.
        values: where to start.
        options: of the search.
        session: where evaluations are saved, if anywhere.

    Returns:
        All hyperparameters at the largest evidence, and how the search went; its ELBO is not known yet (NaN).
    """
    started = time.perf_counter()
    free = options.free(values, evidence.kernels)
    spread = float(evidence.targets.double().std(correction=0)) if evidence.likelihood.is_quadratic else 1.0
    evaluations = Evaluations(evidence, values, free, session, mean_unit=spread or 1.0)
    elsewhere = values_from_data(values, free, evidence.inputs, evidence.targets, evidence.likelihood)
    starts = [evaluations.flat(start) for start in (values, elsewhere, _shorter(elsewhere, free))]
    climbing = climb_evidence(
        evaluations, starts, max_steps=options.max_steps, tolerance=options.tolerance, restarts=options.restarts
    )
    status, best = "max_steps", None
    try:
        visible = options.progress_bar and parallel.is_main()
        for progress in tqdm(climbing, desc="Hyperparameters", unit="step", disable=not visible):
            status = progress or status
        best = _where_the_bound_agrees(evaluations, options)
    except KeyboardInterrupt:
        if not evaluations.results or parallel.num_processes() > 1:
            raise
        status = Status.INTERRUPTED.value
    value, place = best or evaluations.best
    found = evaluations.named(place)
    history = [
        {"log_evidence": value} | {name: x.tolist() for name, x in evaluations.named(place).items()}
        for place, (value, _) in zip(evaluations.places, evaluations.results, strict=True)
    ]
    named = {name: x.tolist() for name, x in found.items()}
    seconds = time.perf_counter() - started
    return found, OptimizationReport(status, math.nan, named, 0, seconds, history, log_evidence=value)


def _where_the_bound_agrees(evaluations: Evaluations, options: SearchOptions) -> tuple[float, Tensor] | None:
    """The evidence, and the place, where Laplace's approximation holds; None where it does at the largest evidence.

    Where classes can be separated Laplace's evidence rises with the outputscale without end: a Gaussian at the mode is
    ever further from the posterior. The ELBO of that Gaussian knows, and falls. So where the two differ by more than
    `MAX_GAP` the outputscale is shrunk for as long as the ELBO rises.
    """
    names = [name for name in evaluations.names if name.endswith("outputscale")]
    if evaluations.evidence.likelihood.is_quadratic or not names:
        return None
    value, place = evaluations.best
    if value - evaluations.elbo(place) <= MAX_GAP:
        return None
    steps = shrink_while(evaluations, names, evaluations.elbo, max_steps=options.max_steps, tolerance=options.tolerance)
    place = max(steps, key=lambda step: step[1])[0]
    return evaluations.value_at(place), place


def _shorter(values: Mapping[str, Tensor], free: Sequence[str]) -> dict[str, Tensor]:
    """A third start: structure at a smaller scale, which a descent from long lengthscales misses."""
    return {
        name: value * SHORTER if name in free and name.endswith("lengthscale") else value
        for name, value in values.items()
    }


def maximise_elbo(
    fit: Callable[[list[Kernel], Likelihood], F],
    kernels: list[Kernel],
    likelihood: Likelihood,
    values: dict[str, Tensor],
    options: SearchOptions,
    session: CheckpointSession | None = None,
) -> tuple[F, OptimizationReport]:
    """Fit, climb, fit again, until no hyperparameter moves by more than `tolerance`, or until Ctrl-C.

    Args:
        fit: fits a GP with given kernels and likelihood.
        kernels: whose hyperparameters are searched for; one for all outputs, or one for each.
        likelihood: the noise of a Gaussian is a hyperparameter too.
        values: where to start.
        options: of the search.
        session: where each step is saved, if anywhere.

    Returns:
        The fit with the largest bound, and how the search went.
    """
    started = time.perf_counter()
    free = options.free(values, kernels)
    search = _ElboSearch(values, session)
    best: tuple[F, float] | None = None  # with its bound
    status, interrupted = (
        "max_steps" if options.max_steps else "converged",
        False,
    )  # without steps it ends where it began

    def evaluate() -> State:
        """Fit at the current values, and enter it in the history."""
        nonlocal best, interrupted
        fitted = fit(*with_values(kernels, likelihood, search.values))
        elbo = fitted.posterior_.elbo()
        state: State = fitted.posterior_.state
        search.enter(elbo, state.num_products)
        if best is None or elbo > best[1]:
            best = fitted, elbo
        interrupted = fitted.report_.status == Status.INTERRUPTED
        if interrupted:
            raise KeyboardInterrupt
        return state

    try:
        visible = options.progress_bar and parallel.is_main()
        for _ in tqdm(range(len(search.history), options.max_steps), desc="Hyperparameters", disable=not visible):
            state, before, status = evaluate(), search.values, "converged"
            if search.has_stalled():
                break
            found, spent = climb(state, kernels, before, free)
            search.num_products += spent
            if max(float((found[name] / before[name]).log().abs().max()) for name in free) <= options.tolerance:
                break  # another fit would be the same one
            search.move(found)
            status = "max_steps"
        else:
            evaluate()
    except KeyboardInterrupt:
        if best is None or (parallel.num_processes() > 1 and not interrupted):  # the others have not been interrupted
            raise
        status = Status.INTERRUPTED.value
    assert best is not None
    fitted, elbo = best
    if search.best_elbo > elbo:  # it was found before the process was stopped that began this search
        fitted = fit(*with_values(kernels, likelihood, search.best_values))
        elbo = fitted.posterior_.elbo()
    place = {name: x.tolist() for name, x in search.best_values.items()}
    seconds = time.perf_counter() - started
    return fitted, OptimizationReport(status, elbo, place, search.num_products, seconds, search.history)


class _ElboSearch:
    """Where a search by the bound stands: what a checkpoint of it holds."""

    def __init__(self, values: dict[str, Tensor], session: CheckpointSession | None) -> None:
        self.values, self.session = values, session
        self.history: list[dict[str, Any]] = []
        self.best_elbo, self.best_values, self.num_products = -math.inf, values, 0
        if session is None or session.saved is None:
            return
        try:
            saved = session.saved
            self.values = {name: saved["values"][name].to(value) for name, value in values.items()}
            self.best_values = {name: saved["best_values"][name].to(value) for name, value in values.items()}
            self.best_elbo, self.num_products = float(saved["best_elbo"]), int(saved["num_products"])
            self.history = list(saved["history"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise unusable("a search for hyperparameters", error) from error
        session.forget()

    def enter(self, elbo: float, num_products: int) -> None:
        """A fit at the current values."""
        self.num_products += num_products
        self.history.append({"elbo": elbo} | {name: x.tolist() for name, x in self.values.items()})
        if elbo > self.best_elbo:
            self.best_elbo, self.best_values = elbo, self.values

    def move(self, values: dict[str, Tensor]) -> None:
        """On to the next place."""
        self.values = values
        if self.session is not None:
            self.session.offer(self._content)

    def has_stalled(self) -> bool:
        """Whether the last step gained next to nothing: another one would cost a fit."""
        bounds = [line["elbo"] for line in self.history[-2:]]
        return len(bounds) == 2 and abs(bounds[1] - bounds[0]) < MIN_ELBO_GAIN * max(1.0, abs(bounds[1]))

    def _content(self) -> dict[str, Any]:
        return {
            "values": self.values,
            "best_values": self.best_values,
            "best_elbo": self.best_elbo,
            "num_products": self.num_products,
            "history": self.history,
        }


# --- what `NonConjugateGP.optimize` searches: of how many data, of which data, and with which fits --------------------

# `gp` is a NonConjugateGP, which comes after this file.


def num_searched(gp: Any, inputs: Tensor, *, is_exact: bool) -> int:
    """How many data a search begins with, or ends with where the fit is exact; 0 where none have an evidence."""
    sizes = gp._sizes(inputs)
    if is_exact and (gp.mode == "exact" or searches_exactly(sizes)):
        return len(inputs)
    return subset_size(sizes, gp.likelihood, inputs.device) or (len(inputs) if is_exact else 0)


def search_exactly(
    gp: Any,
    inputs: Tensor,
    targets: Tensor,
    values: dict[str, Tensor],
    options: SearchOptions,
    session: CheckpointSession | None,
    *,
    num_data: int,
) -> tuple[dict[str, Tensor], OptimizationReport]:
    """By the exact evidence, of all data or of `num_data` of them."""
    likelihood = gp.likelihood
    if num_data < len(inputs):
        some = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(gp.seed))[:num_data]
        some = some.to(inputs.device)
        inputs, targets, likelihood = inputs[some], targets[some], likelihood.given(targets).on(some)
    inputs = inputs.to(working_dtype(gp.kernels, inputs))
    evidence = ExactEvidence(inputs, targets, gp.kernels, likelihood, gp.mean, chunk_bytes=gp.chunk_bytes)
    return maximise_evidence(evidence, values, options, session)


def search_by_bound(
    gp: Any, X: Tensor, y: Tensor, values: dict[str, Tensor], options: SearchOptions, session: CheckpointSession | None
) -> tuple[Any, OptimizationReport]:
    """By the evidence lower bound of iterative fits."""
    mean, values = values.get(MEAN, gp.mean), {name: x for name, x in values.items() if name != MEAN}
    options = options.without(MEAN)

    def fit(kernels: list[Kernel], likelihood: Likelihood) -> Any:
        fitted = copy(gp)  # this one stays as it is until there is a result
        fitted.kernels, fitted.likelihood, fitted.mean = kernels, likelihood, mean
        left = gp.stopping.max_products - fitted.fit(X, y).report_.num_products
        if left > 0 and fitted.report_.status != Status.INTERRUPTED:
            fitted.refine(left)  # a loose bound prefers smooth kernels
        return fitted

    return maximise_elbo(fit, gp.kernels, gp.likelihood, values, options, session)

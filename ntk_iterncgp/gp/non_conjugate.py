"""`NonConjugateGP`: the front door for Gaussian processes with an explicit kernel.

    gp = NonConjugateGP(kernels.Matern32(lengthscale=0.05, outputscale=0.05), likelihoods.Softmax(10))
    gp.fit(X, y)
    probabilities = gp.predict(X_test)

Everything is checked here, before any work is done; the rooms behind it do not check again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ntk_iterncgp.fitting.drive import Run, Trajectory, drive
from ntk_iterncgp.fitting.exact_run import ExactRun, exact_checked, exact_report
from ntk_iterncgp.fitting.report import FitReport
from ntk_iterncgp.fitting.self_check import checked
from ntk_iterncgp.fitting.solver_run import SolverRun, Steps, solver_report
from ntk_iterncgp.gp.affordable import MODES, Sizes, chooses_exact, explained
from ntk_iterncgp.gp.checks import (
    check_memory,
    checked_device,
    checked_dtype,
    checked_inputs,
    checked_kernels,
    checked_likelihood,
    checked_mean,
    checked_targets,
    choose_kronecker,
    computing_dtype,
)
from ntk_iterncgp.gp.hyperparameters import MEAN, hyperparameters, mean_from_data, with_values
from ntk_iterncgp.gp.optimize import (
    OptimizationReport,
    SearchOptions,
    num_searched,
    search_by_bound,
    search_exactly,
)
from ntk_iterncgp.gp.report import IterativeReport
from ntk_iterncgp.gp.saving import search_session, session_of
from ntk_iterncgp.gp.state import Shareable
from ntk_iterncgp.kernels import METHODS, Kernel
from ntk_iterncgp.kernels.choice import checked_tolerance
from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.persistence.checkpoint import Checkpoint
from ntk_iterncgp.persistence.fingerprint import described
from ntk_iterncgp.posterior.exact import ExactPosterior
from ntk_iterncgp.posterior.function_space import Evidence, FunctionPosterior, Posterior
from ntk_iterncgp.posterior.predictive import check_interval, check_link, credible_interval, expected_response
from ntk_iterncgp.priors.gram import GramPrior, working_dtype
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.runtime.validate import non_negative, seed_number, whole_number
from ntk_iterncgp.solver import (
    NewtonOptions,
    Policy,
    Problem,
    State,
    Status,
    Stopping,
    initial_state,
    newton,
    refine,
    resolve_policy,
)
from ntk_iterncgp.solver.exact import ExactState, exact_state, written_out
from ntk_iterncgp.solver.extension import with_more_data

T = TypeVar("T")
MAX_STEPS = 50  # of a search for hyperparameters
MAX_CLIMBED_DATA = 5000  # beyond which a climb of the bound takes longer than all else together
MAX_KRONECKER_RANK = 3000  # beyond this the B×B algebra takes longer than it saves in products


class NonConjugateGP(Shareable):
    """A Gaussian process with a log-concave likelihood, by IterNCGP.

    Args:
        kernel: One kernel for all outputs, or a list with one for each.
        likelihood: One of `ntk_iterncgp.likelihoods` (Gaussian, FixedNoiseGaussian, Bernoulli, Softmax, Binomial,
            Poisson, NegativeBinomial, Ordinal), or your own.
        mean: The prior mean, a constant or one for each output. None: zero, until `optimize` learns it with the
            hyperparameters (by the exact evidence of all data or a subset, and not for several classes).
        policy: "auto": the exact posterior where it costs less than `max_products` products and fits in memory, else
            "curvature_residual". "exact" insists. "curvature_residual", "residual", "unit", "random_subspace", or a
            callable state -> (n, k), iterate. So does "auto" where `max_rank`, `actions` or `damped` are given.
        max_products: Products with the kernel matrix that `fit` may spend.
        max_newton_steps: Newton steps that `fit` may take.
        products_per_step: Products in one Newton step.
        max_rank: How many actions to retain (None: all, or 3000 if they are Kronecker).
        compression: How to choose them: "mean+trace", or "eigen": like the paper the top eigenvectors of M, but of
            actions of length one, and the mean moves into the retained span.
        newton_tol: Stop when the latent values change by less than this fraction.
        actions: "joint": each product gives one action. "kronecker": where all classes share one kernel, each product
            gives up to (C−1)², at the price of larger small matrices. "auto": Kronecker for up to eleven classes, a
            shared kernel and the policies "curvature_residual" and "random_subspace".
        damped: False for the paper's undamped Newton steps.
        product_method: How to multiply by the kernel matrix: "auto", "plain", "fused", "gemm", "sparse" or "keops".
        product_tolerance: What the sparse method may leave out, as a fraction of the kernel's largest value; 0:
            nothing.
        chunk_bytes: Memory for one block of the kernel matrix.
        seed: Of policies that draw random numbers.
        dtype: Of inputs and answers; None: that of the data. Small problems (up to about 10 000 data) are computed in
            float64.
        device: Where to compute; None: where the data are.
    """

    def __init__(
        self,
        kernel: Kernel | Sequence[Kernel],
        likelihood: Likelihood,
        *,
        mean: float | Sequence[float] | Tensor | None = None,
        policy: str | Policy = "auto",
        max_products: int = 100,
        max_newton_steps: int = 20,
        products_per_step: int = 5,
        max_rank: int | None = None,
        compression: str = "mean+trace",
        newton_tol: float = 1e-2,
        actions: str = "auto",
        damped: bool = True,
        product_method: str = "auto",
        product_tolerance: float | None = None,
        chunk_bytes: int = 64 * 2**20,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.likelihood = checked_likelihood(likelihood)
        self.kernels = checked_kernels(kernel, likelihood)
        self.mean = checked_mean(0.0 if mean is None else mean, likelihood)
        self.mean_is_given = mean is not None
        iterating = "curvature_residual" if isinstance(policy, str) and policy in MODES else policy
        self.policy = resolve_policy(iterating, others=MODES)
        asks_for_iteration = max_rank is not None or actions != "auto" or damped is not True
        self.mode = "iterative"
        if isinstance(policy, str) and policy in MODES and (policy == "exact" or not asks_for_iteration):
            self.mode = policy
        self.stopping = Stopping(
            max_products,
            products_per_step,
            max_newton_steps,
            newton_tol,
            residual_tol=min(1e-5, 1e-3 * non_negative("newton_tol", newton_tol)),
        )
        self.options = NewtonOptions(max_rank, compression, damped)
        self.kronecker = choose_kronecker(actions, iterating, likelihood, self.kernels, max_rank)
        if self.kronecker and max_rank is None:
            self.options = NewtonOptions(MAX_KRONECKER_RANK, compression, damped)
        if product_method not in METHODS:
            names = ", ".join(map(repr, METHODS))
            raise ValueError(f"`product_method` must be one of {names}; got {product_method!r}. Try 'auto'.")
        self.product_method = product_method
        self.product_tolerance = checked_tolerance(product_tolerance, "product_tolerance")
        self.chunk_bytes = whole_number("chunk_bytes", chunk_bytes, at_least=1)
        self.seed = seed_number(seed)
        self.dtype, self.device = checked_dtype(dtype), checked_device(device)
        self._posterior: FunctionPosterior | None = None
        self._report: FitReport | None = None
        self.optimization_: OptimizationReport | None = None  # how `optimize` went

    def __repr__(self) -> str:
        kernel = repr(self.kernels[0]) if len(self.kernels) == 1 else repr(self.kernels)
        fitted = f", fitted: {self._report}" if self._report else ", not fitted"
        return f"NonConjugateGP({kernel}, {self.likelihood!r}{fitted})"

    # --- fitting --------------------------------------------------------------------------------------------------

    @parallel.together()
    @torch.no_grad()
    def fit(
        self,
        X: Tensor,
        y: Tensor,
        *,
        progress_bar: bool = False,
        callback: Callable[[Any], object] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> NonConjugateGP:
        """Infer the posterior of the latent functions from data.

        Args:
            X: The inputs (N, d).
            y: The targets: labels or counts (N,), or values (N,) or (N, C).
            progress_bar: Whether to show one.
            callback: Called with each state of the solver.
            checkpoint: Where to save the work as it proceeds; the same call after a crash resumes from there.

        Returns:
            This GP.
        """
        inputs = self._checked_inputs(X, "X").detach().clone()  # what the caller does to X later changes nothing here
        targets = checked_targets(y, inputs, self.likelihood).clone()
        parallel.check_same([inputs, targets], "X and y are")
        state = self._start(inputs, targets)
        return self._drive(
            "fit",
            state,
            lambda state: newton(state, self.policy, self.stopping, self.options),
            self.stopping.max_products,
            progress_bar=progress_bar,
            callback=callback,
            checkpoint=checkpoint,
        )

    @parallel.together()
    def optimize(
        self,
        X: Tensor,
        y: Tensor,
        *,
        max_steps: int | None = None,
        tolerance: float = 0.02,
        restarts: int = 1,
        fixed: Sequence[str] = (),
        progress_bar: bool = False,
        checkpoint: Checkpoint | None = None,
    ) -> NonConjugateGP:
        """Choose lengthscales, outputscale and noise by the evidence, and fit there.

        Where some dozens of exact fits are affordable (up to a few thousand data; for policy="exact" always), their
        Laplace evidence is maximised: also over the prior mean, where none was given, and from starting values that the
        data suggest besides those of the kernel. Elsewhere the same is done with a subset of the data (up to 1000). An
        exact fit is then made there; for an iterative one the evidence lower bound of all data is maximised from there:
        each step spends `max_products` on a fit and then climbs. The bound is as tight as the fit: make sure that
        `information_captured` is high. A climb differentiates whole kernel matrices: beyond 5000 data, where that takes
        minutes, there is one only if `max_steps` is given.

        Afterwards `kernels`, `likelihood`, `mean` and `optimization_` hold the result; after Ctrl-C, the best so far.

        Args:
            X: The inputs (N, d).
            y: The targets, as in `fit`.
            max_steps: How many steps to take at most; None: 50, and none by the bound beyond 5000 data.
            tolerance: Stop when no hyperparameter moves by more than this fraction.
            restarts: How many more places to climb the exact evidence from, besides the best one.
            fixed: Names of hyperparameters to leave as they are.
            progress_bar: Whether to show one.
            checkpoint: Where to save the search as it proceeds; the same call after a crash resumes from there.

        Returns:
            This GP.
        """
        inputs = self._checked_inputs(X, "X").detach().clone()
        targets = checked_targets(y, inputs, self.likelihood).clone()
        options = SearchOptions(
            MAX_STEPS if max_steps is None else whole_number("max_steps", max_steps, at_least=1),
            tolerance,
            fixed,
            whole_number("restarts", restarts, at_least=0),
            progress_bar,
        )
        values = {n: x.detach().clone() for n, x in hyperparameters(self.kernels, self.likelihood).items()}
        is_exact = self._chooses_exact(inputs)
        has_full_rank = self.likelihood.curvature_rank == self.likelihood.num_outputs
        if not is_exact:
            options.without(MEAN).free(values, self.kernels)  # which the bound does not learn; refuses before any work
        if has_full_rank and not self.mean_is_given:
            values[MEAN] = mean_from_data(self.likelihood, targets).cpu()
        options.free(values, self.kernels)
        session = search_session(self, checkpoint, inputs, targets, options)
        num_data = num_searched(self, inputs, is_exact=is_exact)
        of_all, was_interrupted, seconds = is_exact and num_data == len(inputs), False, 0.0
        if num_data:
            own_session = session if of_all else None
            values, report = search_exactly(self, inputs, targets, values, options, own_session, num_data=num_data)
            was_interrupted, seconds = report.status == Status.INTERRUPTED, report.seconds
        if is_exact or was_interrupted:
            best = self._at(values).fit(X, y)
            report = replace(report, elbo=best.elbo())
            if not of_all:  # the evidence was that of a subset
                report = replace(report, log_evidence=None, history=[{"elbo": report.elbo} | report.hyperparameters])
        else:
            ends_here = max_steps is None and num_data and len(inputs) > MAX_CLIMBED_DATA
            climbs = replace(options, max_steps=0) if ends_here else options
            best, report = search_by_bound(self, X, y, values, climbs, session)
            report = replace(report, seconds=seconds + report.seconds)
        if session is not None:
            session.end(dict)
        self.kernels, self.likelihood, self.mean = best.kernels, best.likelihood, best.mean
        self.optimization_, self._posterior, self._report = report, best._posterior, best._report
        return self

    def _at(self, values: dict[str, Tensor]) -> NonConjugateGP:
        """A copy with other hyperparameters."""
        gp = copy(self)
        gp.kernels, gp.likelihood = with_values(self.kernels, self.likelihood, values)
        gp.mean = values.get(MEAN, self.mean)
        return gp

    @parallel.together()
    @torch.no_grad()
    def refine(
        self,
        max_products: int = 50,
        *,
        progress_bar: bool = False,
        callback: Callable[[Any], object] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> NonConjugateGP:
        """Spend more products from where the fit stopped: first on the mean, then on the variance.

        Args:
            max_products: How many products to spend.
            progress_bar: Whether to show one.
            callback: Called with each state of the solver.
            checkpoint: Where to save the work as it proceeds; the same call after a crash resumes from there.

        Returns:
            This GP.
        """
        state, report = self.posterior_.state, self.report_
        max_products = whole_number("max_products", max_products, at_least=1)
        stopping = replace(self.stopping, max_products=max_products)
        if isinstance(state, State):
            self._check_room(state, max_products)
        return self._drive(
            "refine",
            state,
            lambda state: refine(state, self.policy, stopping, self.options),
            max_products,
            progress_bar=progress_bar,
            callback=callback,
            checkpoint=checkpoint,
            report=report,
            identity={"max_products": max_products},
        )

    @parallel.together()
    @torch.no_grad()
    def update(
        self,
        X: Tensor,
        y: Tensor,
        *,
        max_products: int | None = None,
        progress_bar: bool = False,
        callback: Callable[[Any], object] | None = None,
        checkpoint: Checkpoint | None = None,
        **per_datum: Any,
    ) -> NonConjugateGP:
        """Condition on more data, from where the fit stopped.

        An iterative fit recycles its actions, S extended by zeros: products are spent on what is new. An exact one goes
        on from its mode. Newton's method then finds the mode of the posterior given all data.

        Args:
            X: The new inputs (N', d).
            y: The new targets, as in `fit`.
            max_products: How many products to spend besides the one that recycling takes; None: as many as `fit` may.
            progress_bar: Whether to show one.
            callback: Called with each state of the solver.
            checkpoint: Where to save the work as it proceeds; the same call after a crash resumes from there.
            per_datum: The `exposure`, `trials` or `noise` of the new data (N',), where the likelihood has one of each.

        Returns:
            This GP, whose likelihood is then that of all data.
        """
        before = self.posterior_.state
        inputs = self._checked_inputs(X, "X", new=True).detach().clone()
        more = self.likelihood.of_more(**per_datum)
        targets = checked_targets(y, inputs, more).clone()
        parallel.check_same([inputs, targets], "X and y are")
        limit = self.stopping.max_products if max_products is None else max_products
        stopping = replace(self.stopping, max_products=limit)
        if not len(inputs):
            return self
        likelihood = self.likelihood.joined(more, before.problem.prior.num_data, len(inputs))
        identity = {"max_products": stopping.max_products}
        self._drive(
            "update",
            self._with_more_data(before, inputs, targets, likelihood, stopping.max_products),
            lambda state: newton(state, self.policy, stopping, self.options),
            stopping.max_products,
            progress_bar=progress_bar,
            callback=callback,
            checkpoint=checkpoint,
            identity=identity if more is self.likelihood else identity | {"likelihood": described(likelihood)},
        )
        self.likelihood = likelihood
        return self

    # --- runs -----------------------------------------------------------------------------------------------------

    def _start(self, inputs: Tensor, targets: Tensor, likelihood: Likelihood | None = None) -> State | ExactState:
        """Where a fit begins, by another likelihood if there is one; refuses what does not fit in memory."""
        capacity, outputs = self._capacity(len(inputs)), 1 if self.kronecker else self.likelihood.num_outputs
        dtype = computing_dtype(self.kernels, inputs, capacity * outputs)
        is_exact = self._chooses_exact(inputs)
        prior = GramPrior(
            self.kernels,
            inputs.to(working_dtype(self.kernels, inputs) if is_exact else dtype),
            self.mean,
            chunk_bytes=self.chunk_bytes,
            method=self.product_method,
            tolerance=self.product_tolerance,
            data_dtype=inputs.dtype,
        )
        problem = Problem(prior, likelihood or self.likelihood, targets)
        if is_exact:
            return exact_state(problem, written_out(prior))
        check_memory(problem, capacity, self.options.max_rank, self.kronecker, self.chunk_bytes)
        return initial_state(problem, seed=self.seed, capacity=capacity, kronecker=self.kronecker)

    def _with_more_data(
        self,
        before: State | ExactState,
        inputs: Tensor,
        targets: Tensor,
        likelihood: Likelihood,
        max_products: int,
    ) -> State | ExactState:
        """Where an update begins: at the point of a fit, or anew where all data are too many for an exact one."""
        old = before.problem.prior
        assert isinstance(old, GramPrior)
        every = torch.cat([before.problem.targets, targets])
        if isinstance(before, ExactState):
            prior = old.extended(inputs)
            if not self._chooses_exact(prior.inputs):
                return self._start(prior.inputs.to(prior.data_dtype), every, likelihood)
            problem = Problem(prior, likelihood, every)
            weights = before.iterate.representer_weights
            padded = torch.nn.functional.pad(weights, (0, problem.num_rows - len(weights)))
            return exact_state(problem, written_out(prior), padded)
        problem = Problem(old.extended(inputs), likelihood, every)
        self._check_room(replace(before, problem=problem), max_products)
        return with_more_data(before, problem, capacity=self._capacity(len(every), max_products))

    def _drive(
        self,
        name: str,
        state: State | ExactState,
        steps: Callable[[State], Steps],
        max_products: int,
        *,
        progress_bar: bool,
        callback: Callable[[Any], object] | None,
        checkpoint: Checkpoint | None,
        report: FitReport | None = None,
        identity: dict[str, Any] | None = None,
    ) -> NonConjugateGP:
        """Continue from a state, and adopt the posterior where that ends; `report` is of the calls before."""
        session, digests = session_of(self, checkpoint, name, state, **(identity or {}))
        start: Any = state
        is_exact = isinstance(state, ExactState)
        run: Run[Any] = ExactRun(start, digests) if is_exact else SolverRun(steps, start, max_products, digests)
        trajectory = drive(
            run,
            start,
            history=report.history if report else (),
            seconds=report.seconds if report else 0.0,
            callback=callback,
            progress_bar=progress_bar,
            session=session,
        )
        return self._take(trajectory)

    def _take(self, trajectory: Trajectory[Any]) -> NonConjugateGP:
        """Adopt a posterior that has passed its self-check; on failure an earlier one stays in place."""
        state = trajectory.state
        if isinstance(state, ExactState):
            prior = state.problem.prior
            assert isinstance(prior, GramPrior)
            report = replace(exact_report(trajectory), products_by=explained(self._sizes(prior.inputs)))
            state = exact_checked(state, report.history, is_finished=trajectory.status is Status.EXACT)
            self._posterior, self._report = ExactPosterior(state), report
            return self
        prior = state.problem.prior
        report = replace(IterativeReport.of(solver_report(trajectory)), products_by=prior.how)
        ascends = self.options.damped and self.options.keeps_mean and not self.likelihood.is_quadratic
        state = checked(state, report.history, ascends=ascends)
        spent = prior.num_products  # mending costs products too
        self._posterior, self._report = Posterior(state), replace(report, num_products=spent)
        return self

    @property
    def posterior_(self) -> FunctionPosterior:
        """The posterior of the latent functions."""
        return _fitted(self._posterior)

    @property
    def report_(self) -> FitReport:
        """How the fit ended, with advice."""
        return _fitted(self._report)

    # --- predicting -----------------------------------------------------------------------------------------------

    def latent(self, x: Tensor, *, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Mean (b, C) and covariance (b, C, C) of the latent functions at x; if `joint`, (b·C, b·C)."""
        posterior, x = self.posterior_, self._checked_inputs(x, "x", new=True)
        if joint:
            mean, covariance = posterior.latent(x, joint=True)
        else:
            mean, covariance = map(torch.cat, zip(*(posterior.latent(part) for part in self._parts(x)), strict=True))
        return mean.to(x.dtype), covariance.to(x.dtype)

    def predict(self, x: Tensor, *, link: str = "probit", n_samples: int = 512) -> Tensor:
        """Predict E[y]: class probabilities (of class 1 for Bernoulli), rates for Poisson, means for Gaussian.

        Args:
            x: The inputs (b, d).
            link: "probit", "quadrature" or "mc".
            n_samples: Of "mc", and of "quadrature" for three classes or more; for fewer it is right to ten digits.

        Returns:
            The expected responses (b, C).
        """
        check_link(link)
        n_samples = whole_number("n_samples", n_samples, at_least=1)
        posterior, x = self.posterior_, self._checked_inputs(x, "x", new=True)
        if link == "probit":  # which needs no covariances between outputs
            marginals = (posterior.marginals(part) for part in self._parts(x, marginal=True))
            return torch.cat([self.likelihood.expected_response(*moments) for moments in marginals]).to(x.dtype)
        parts = [
            expected_response(
                self.likelihood, *posterior.latent(part), link=link, num_samples=n_samples, generator=self._generator(x)
            )
            for part in self._parts(x, extra=16 * n_samples * self.likelihood.num_outputs)
        ]
        return torch.cat(parts).to(x.dtype)

    def credible_interval(self, x: Tensor, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper ends (b, C) of the central interval of the rate, the probability or the noise-free value."""
        check_interval(self.likelihood, level)
        mean, covariance = self.latent(x)
        return credible_interval(self.likelihood, mean, covariance.diagonal(dim1=1, dim2=2), level=level)

    def sample(self, x: Tensor, n_samples: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Joint draws of the latent functions at x: (n_samples, b, C)."""
        n_samples = whole_number("n_samples", n_samples, at_least=1)
        posterior, x = self.posterior_, self._checked_inputs(x, "x", new=True)
        return posterior.sample(x, n_samples, generator).to(x.dtype)

    def log_evidence(self) -> Evidence:
        """Two-sided bounds on the Laplace log-evidence at the current point."""
        return self.posterior_.log_evidence()

    def elbo(self) -> float:
        """A lower bound on the true log-evidence."""
        return self.posterior_.elbo()

    # --- checks ---------------------------------------------------------------------------------------------------

    def _checked_inputs(self, X: Tensor, name: str, *, new: bool = False) -> Tensor:
        return checked_inputs(X, name, self.dtype, self.device, trained=self._trained_inputs if new else None)

    @property
    def _trained_inputs(self) -> Tensor:
        prior = self.posterior_.prior
        assert isinstance(prior, GramPrior)
        return prior.inputs[:0].to(prior.data_dtype)  # no rows: new inputs must match their columns, dtype and device

    # --- sizes ----------------------------------------------------------------------------------------------------

    def _chooses_exact(self, inputs: Tensor) -> bool:
        if self.mode == "iterative":
            return False
        return chooses_exact(self.mode, self._sizes(inputs), self.likelihood, inputs.device)

    def _sizes(self, inputs: Tensor) -> Sizes:
        columns = self._capacity(len(inputs)) * (self.likelihood.curvature_rank if self.kronecker else 1)
        actions = min(columns, self.options.max_rank or columns)
        return Sizes.of(inputs, self.kernels, self.likelihood, self.stopping.max_products, actions)

    def _check_room(self, state: State, max_products: int) -> None:
        """For more columns than there are: as they grow by half, into another place."""
        columns = state.buffer.actions.factor.size + self._capacity(state.problem.prior.num_data, max_products)
        check_memory(state.problem, int(2.5 * columns), self.options.max_rank, self.kronecker, self.chunk_bytes)

    def _capacity(self, num_data: int, max_products: int | None = None) -> int:
        """Room for the columns that the budget can fill, so that buffers are not copied as they grow."""
        max_products = self.stopping.max_products if max_products is None else max_products
        if self.kronecker:
            return min(num_data, max_products * self.likelihood.num_outputs)
        budget, max_rank = min(max_products, num_data * self.likelihood.curvature_rank), self.options.max_rank
        return budget if max_rank is None else min(budget, max_rank + self.stopping.products_per_step)

    def _generator(self, x: Tensor) -> torch.Generator:
        """The same draws for every part of the inputs, so that how they are divided does not matter."""
        return torch.Generator(device=x.device).manual_seed(self.seed)

    def _parts(self, x: Tensor, extra: int = 0, *, marginal: bool = False) -> Iterator[Tensor]:
        """x in parts whose work fits in `chunk_bytes`; one empty part for no inputs."""
        return iter(x.split(max(1, self.chunk_bytes // (self.posterior_.bytes_per_input(marginal=marginal) + extra))))


def _fitted(found: T | None) -> T:
    if found is None:
        raise RuntimeError("This NonConjugateGP must be fitted first; got one that has not been. Try fit(X, y).")
    return found

"""The first half of a flavour: settings, fitting, refining, and the posterior for the current hyperparameters."""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from inspect import signature
from typing import Any, ClassVar

import torch
from laplace.baselaplace import BaseFunctionalLaplace
from laplace.utils.enums import Likelihood
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ntk_iterncgp.data.fixed_order import FirstBatch, FixedOrderData, Inputs, slice_rows, to_device
from ntk_iterncgp.data.sharding import shard_of
from ntk_iterncgp.fitting.cluster_run import fit_by_clusters, refine_by_clusters
from ntk_iterncgp.fitting.cost import (
    Cost,
    check_memory,
    check_memory_to_refine,
    estimated_cost,
    reference_inputs,
    resolved,
    room_for_data,
)
from ntk_iterncgp.fitting.drive import Budget
from ntk_iterncgp.fitting.exact_network import fit_exactly
from ntk_iterncgp.fitting.network import EXACT, MORE, LinearisedNetwork, NetworkFit, NetworkSettings
from ntk_iterncgp.fitting.newton_fit import fit_by_products, refine_by_products
from ntk_iterncgp.fitting.report import FitReport
from ntk_iterncgp.fitting.timing import timed_cost
from ntk_iterncgp.jacobian.autograd import Logits, unwrapped
from ntk_iterncgp.jacobian.blocks import WeightColumns
from ntk_iterncgp.jacobian.rows import NetworkJacobian
from ntk_iterncgp.laplace_torch.hyperparameters import (
    check_hyperparameters,
    check_relative_noise,
    hyperparameters,
    noise_parts,
)
from ntk_iterncgp.laplace_torch.updating import (
    PartialFit,
    added,
    check_may_add,
    check_new_data,
    derivatives_as_before,
    is_crowded,
    other_fit,
    summed,
    update_settings,
    whole_of,
    without_interruption,
)
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.likelihoods.output_noise import OutputNoise
from ntk_iterncgp.likelihoods.tokens import TokenSoftmax
from ntk_iterncgp.persistence.checkpoint import Checkpoint, CheckpointSession, open_session
from ntk_iterncgp.persistence.fingerprint import described, digest, fingerprint, flatten, same_fingerprint
from ntk_iterncgp.posterior.contrasts import Reference
from ntk_iterncgp.posterior.weight_space import ConditionedPosterior, WeightPosterior
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.runtime.threads import evaluating, exclusively
from ntk_iterncgp.runtime.validate import whole_number
from ntk_iterncgp.solver.policies import Policy
from ntk_iterncgp.solver.stopping import NewtonOptions, Status

MORE_OF_STORED = "A fit with more num_actions contracts the variance further; with `storage` there is none to refine."


class FittedNetwork(BaseFunctionalLaplace):
    """The posterior of the linearised network given all training data. Abstract; the flavours are final.

    Beside laplace-torch's own arguments:

    mean              "network": the predictive mean is the network's output; "refined": the linearised model's mode
    policy            how actions are chosen: "auto" (the default), "exact", "clusters" (one epoch for all of them),
                      "curvature_residual" (what "auto" is for mean="refined"), "random_subspace", or a callable.
                      "exact" is the posterior with as many actions as there are weights, or as J has rows; "auto" is
                      "exact" where that costs less than "clusters" or next to nothing, and no other budget is given:
                      no num_actions or max_rank below that number, no max_epochs, no cotangents
    num_actions       how many: for "clusters" the best combinations of more groups of data than that (200), else
                      products with the NTK (50), each one sweep forward+backward and one of Jacobian-vector products
                      (policy="exact" has as many as it takes: there max_rank bounds their number)
    cotangents        directions for each datum, for "clusters": q of them take (1 + 2q)/3 epochs for q·num_actions.
                      None: one for classification, where the curvature is; for regression, whose outputs all say as
                      much, each output (up to 8 of them, in turn), for num_actions in all
    max_epochs        where to stop before all of them are done
    actions_per_step  of these, how many per Newton step (mean="refined")
    max_rank          how many actions to keep (None: all); compression says how they are chosen
    chunk_bytes       memory for the rows of the Jacobian, in predictions
    backend           of laplace-torch, for its `marglik_training`: ignored, since derivatives are taken by this library
    storage           "bfloat16" stores the images of the actions, P numbers for each, in half of the memory; what
                      that loses is in the variance. refine needs all digits. None: as derivatives
    dtype             of derivatives; None: float64 for networks of up to 16 384 weights if they regress or have at most
                      4096 data, else that of the model
    """

    _training_data: ClassVar[weakref.WeakKeyDictionary[Any, weakref.ref[Any]]] = weakref.WeakKeyDictionary()
    """The data set of the last fit of each object. Not its attribute, which could not be copied or sent elsewhere."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *,
        backend: object = None,
        mean: str = "network",
        policy: str | Policy | None = None,
        num_actions: int | None = None,
        cotangents: int | None = None,
        max_epochs: float | None = None,
        actions_per_step: int = 5,
        max_rank: int | None = None,
        compression: str = "mean+trace",
        newton_tol: float = 1e-2,
        chunk_bytes: int = 256 * 2**20,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        storage: torch.dtype | str | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(_unknown_argument(next(iter(unknown))))
        if likelihood not in (Likelihood.CLASSIFICATION, Likelihood.REGRESSION):
            raise ValueError(
                f"`likelihood` must be 'classification' or 'regression'; got {likelihood!r}. Try another "
                "hessian_structure for other likelihoods."
            )
        check_hyperparameters(
            prior_precision=prior_precision, prior_mean=prior_mean, sigma_noise=sigma_noise, temperature=temperature
        )
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"`dtype` must be None, torch.float32 or torch.float64; got {dtype!r}. Try dtype=None.")
        self.settings = NetworkSettings.checked(
            mean=mean,
            policy=policy,
            num_actions=num_actions,
            cotangents=cotangents,
            max_epochs=max_epochs,
            actions_per_step=actions_per_step,
            newton_tol=newton_tol,
            options=NewtonOptions(max_rank, compression),
            chunk_bytes=chunk_bytes,
            seed=seed,
            storage=storage,
        )
        self.dtype = dtype
        self._fitted, model = False, unwrapped(model)
        is_per_output = isinstance(sigma_noise, Tensor) and sigma_noise.numel() > 1
        _require_one_device(model)
        with exclusively(model):  # while another thread fits it, it holds other weights
            super().__init__(
                model,
                likelihood,
                sigma_noise=1.0 if is_per_output else sigma_noise,
                prior_precision=prior_precision,
                prior_mean=prior_mean,
                temperature=temperature,
                enable_backprop=enable_backprop,
                dict_key_x=dict_key_x,
                dict_key_y=dict_key_y,
            )
        if is_per_output:  # which laplace-torch refuses
            self.sigma_noise = sigma_noise
        self._parts: tuple[WeightPosterior, ...] = ()  # of disjoint data, which add up
        self._report: FitReport | None = None
        self._fit: NetworkFit | None = None  # what refine resumes
        self._shard: tuple[int, int] | None = None  # and of which part of the data
        self.data_seen = torch.zeros(0, dtype=torch.int64)  # fingerprints of the data sets in the posterior
        self.shards_seen = torch.zeros(0, 3, dtype=torch.int64)  # and which parts of what they are
        self._prior_of_fit: dict[str, Tensor]
        self._conditioned: tuple[tuple[Tensor, Tensor], ConditionedPosterior] | None = None

    _num_tokens = 1  # of a classifier of so many places of each input, as a tagger of tokens

    def _logits(self, targets: str | None = None) -> Logits | None:
        """How to read the outputs of a classifier, in training those without a target as such."""
        return Logits(targets) if self.likelihood == Likelihood.CLASSIFICATION else None

    # --- where J comes from ------------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self, loader: DataLoader[Any], *, is_known: bool) -> tuple[NetworkJacobian, FixedOrderData, FirstBatch]:
        """Return the Jacobian, the training data as it takes them, and the first batch of these.

        For a model that is known from an earlier fit, some data of it instead of the first batch.
        """

    @abstractmethod
    def _jacobian_at(self, x: Inputs) -> tuple[NetworkJacobian, Inputs]:
        """The Jacobian, and new inputs as it takes them."""

    @abstractmethod
    def _parameters(self) -> dict[str, Tensor]:
        """The weights that are uncertain, by name."""

    def _layer_sizes(self) -> tuple[int, ...]:
        """The numbers of weights of the parameter tensors."""
        return tuple(value.numel() for value in self.params)

    # --- fitting -----------------------------------------------------------------------------------------------------

    @parallel.together()
    def fit(
        self,
        train_loader: DataLoader[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        checkpoint: Checkpoint | None = None,
        shard: tuple[int, int] | None = None,
    ) -> None:
        """Infer the posterior from all data of the loader. On failure the model and an earlier fit are as before.

        Args:
            train_loader: A DataLoader, a list of batches, or an iterable with the same batches on every walk.
            override: False conditions an earlier fit on these data, too: `update`.
            progress_bar: Whether to show one.
            checkpoint: Where the work is saved as it goes; the same call after a crash resumes it.
            shard: (k, K) for the k-th of K parts of the data, every K-th datum. Fits of all parts, on machines that
                need not talk, make up the posterior of all data: `merge`.
        """
        part = train_loader if shard is None else shard_of(train_loader, shard)
        if not override:
            self._update(part, train_loader, shard, progress_bar=progress_bar, checkpoint=checkpoint)
            return
        _require_one_device(self.model)
        with exclusively(self.model), evaluating(self.model):
            network = self._network(part)
            settings, session = resolved(network, self.settings), None
            if checkpoint is not None:
                session = open_session(checkpoint, "fit", *identity(self, network, settings))
            found = self._stored(_fitted_to(network, settings, progress_bar=progress_bar, session=session))
            self._take(self._with_reference(found, network))
            self._shard, self.shards_seen = shard, whole_of(train_loader, shard)

    @parallel.together()
    def update(
        self, loader: DataLoader[Any], *, progress_bar: bool = False, checkpoint: Checkpoint | None = None
    ) -> None:
        """Condition on more data, without the old ones, at the cost of a fit to the new data alone.

        At fixed weights posteriors of disjoint data add up: with A = [A₁ A₂] and R = diag(R₁, R₂) the variance falls at
        every input, and is not below the exact one given all data. Without `max_rank` each update adds `num_actions`
        actions, up to as many as there are weights. With it the best combinations of the old and the new are kept: the
        trace of the weights' covariance, in units of the prior's, never rises (mean="network"), but the variance at an
        input may, where what was known about it made room. It stays above the exact one. Before any fit it is one. Data
        given twice count twice, with a warning.

        Args:
            loader: The new data, as for `fit`.
            progress_bar: Whether to show one.
            checkpoint: Where the work is saved as it goes.

        Raises:
            ValueError: for a refined mean of a classifier, which moves with all data.
            RuntimeError: where the model has changed since the fit.
            KeyboardInterrupt: after Ctrl-C. Whatever is raised, the earlier posterior stays.
        """
        self._update(loader, loader, None, progress_bar=progress_bar, checkpoint=checkpoint)

    def _update(
        self,
        loader: DataLoader[Any],
        whole: DataLoader[Any],
        shard: tuple[int, int] | None,
        *,
        progress_bar: bool,
        checkpoint: Checkpoint | None,
    ) -> None:
        """`loader` is this shard of the whole, or the whole."""
        _require_one_device(self.model)
        if self._fitted:
            check_may_add(self)
            self._refresh_posterior()
        with exclusively(self.model), evaluating(self.model):
            with derivatives_as_before(self):
                network = self._network(loader, is_known=self.has_fitted)
            settings, before = update_settings(self, network), self.n_data if self._fitted else 0
            settings, session = resolved(network, settings), None
            if checkpoint is not None:
                about = identity(self, network, settings, data_before=before)
                session = open_session(checkpoint, "update", *about)
            with without_interruption():
                found = self._stored(_fitted_to(network, settings, progress_bar=progress_bar, session=session))
            which, max_rank = whole_of(whole, shard), self.settings.options.max_rank
            check_new_data(self, found, which)
            if self._fitted:
                both = added(self, PartialFit.of_fit(found, which))
                self._adopt(summed(self, both, max_rank) if is_crowded(both, max_rank) else both)
            else:
                self._take(self._with_reference(found, network))
                self.shards_seen = which

    def merge(self, other: FittedNetwork | Mapping[str, Any], *, max_rank: int | None = None) -> None:
        """Add the posterior of another fit of this network, to other data.

        The hyperparameters stay those of this object. In any order the result is the same, and that of one fit with all
        of the actions; `max_rank` keeps the best combinations. On failure nothing has changed.

        Args:
            other: A fitted Laplace object, or its `state_dict()`.
            max_rank: How many actions to keep; None for that of the settings, if any.

        Raises:
            TypeError: where it is neither.
            ValueError: for another model, likelihood or prior mean, and for a fit to data that are in already.
        """
        self._check_fitted()
        if max_rank is not None:
            max_rank = whole_number("max_rank", max_rank, at_least=1)
        check_may_add(self)
        self._refresh_posterior()
        max_rank = self.settings.options.max_rank if max_rank is None else max_rank
        self._adopt(summed(self, added(self, other_fit(self, other)), max_rank))

    @property
    def has_fitted(self) -> bool:
        """Whether there was a fit in this process, which has checked the model."""
        return self._report is not None

    @property
    def posterior(self) -> WeightPosterior:
        """Given all data so far. What updates have added is summed when somebody asks."""
        if not self._parts:
            raise AttributeError("The posterior must follow a fit; got none. Try fit(train_loader).")
        if len(self._parts) > 1:
            self._adopt(summed(self, PartialFit.of(self), self.settings.options.max_rank))
        return self._parts[0]

    @posterior.setter
    def posterior(self, posterior: WeightPosterior) -> None:
        self._parts = (posterior,)

    def _adopt(self, found: PartialFit) -> None:
        """All has been computed before anything is changed."""
        self._parts, self.loss, self.n_data = found.parts, found.loss, found.num_data
        self.data_seen, self.shards_seen, self._report = found.data_seen, found.shards_seen, found.report
        self._fit, self._conditioned = None, None

    @parallel.together()
    def refine(
        self,
        train_loader: DataLoader[Any],
        *,
        epochs: float | None = None,
        seconds: float | None = None,
        progress_bar: bool = False,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Spend more on the same data, from where the fit stopped: the variance only falls.

        Three exceptions, all of which keep it above the exact one: a refined mean may still move, and the curvature of
        the likelihood with it; where an iterable dataset was interrupted, groups are first completed; and with
        `max_rank` the best combinations of all actions are retained, which may say less about some input than before.
        """
        self._check_fitted()
        if epochs is None and seconds is None:
            raise ValueError("refine must be given epochs or seconds; got neither. Try refine(train_loader, epochs=1).")
        if self._fit is not None and self._fit.report.status == Status.EXACT:
            return  # there is nothing left to spend on
        if self._fit is None or self._fit.state is None:
            raise RuntimeError(
                "refine must follow a fit in this process; got a loaded or merged posterior, or an updated one, or one "
                "with `storage`, which holds what predictions need, not the groups and actions to resume. Try "
                "fit(train_loader), or update(loader) with data that it has not seen."
            )
        self._refresh_posterior()
        budget = Budget(epochs, seconds)
        with exclusively(self.model), evaluating(self.model):
            part = train_loader if self._shard is None else shard_of(train_loader, self._shard)
            network, fitted = self._network(part), self._fit
            session = None
            if checkpoint is not None:
                about = identity(self, network, self.settings, fitted, budget)
                session = open_session(checkpoint, "refine", *about)
            fitted.first_batch.check_same(network.first_batch)
            network.data.keep_bytes = room_for_data(check_memory_to_refine(fitted, network, self.settings, budget))
            refine = refine_by_clusters if self.settings.in_groups else refine_by_products
            result = refine(fitted, network, self.settings, budget, progress_bar=progress_bar, session=session)
            self._take(self._with_reference(result, network))

    def estimate_cost(self, train_loader: DataLoader[Any]) -> Cost:
        """Seconds, epochs and memory of a fit and of predictions, from timing one batch; prints as a table."""
        with exclusively(self.model), evaluating(self.model):
            return timed_cost(self._network(train_loader), self.settings)

    def _network(self, loader: DataLoader[Any], *, is_known: bool = False) -> LinearisedNetwork:
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "A fit must run outside of torch.inference_mode(), where there are no derivatives; got a call inside. "
                "Try torch.no_grad()."
            )
        self._training_data.pop(self, None)
        with suppress(TypeError):  # a list has no weak references
            self._training_data[self] = weakref.ref(getattr(loader, "dataset", loader))
        parallel.check_same([*self.model.parameters(), *self.model.buffers()], "The model's weights and buffers are")
        jacobian, data, first_batch = self._open(loader, is_known=is_known)
        self._check_hyperparameters()
        now = hyperparameters(self)
        noise_scale = float(now["temperature"])
        if not (math.isfinite(noise_scale) and noise_scale > 0):
            raise ValueError(
                f"sigma_noise² · temperature must be a positive number in {self._dtype}; got {noise_scale}. Try "
                "targets of another scale, or float64."
            )
        C, T = first_batch.outputs.shape[1], jacobian.num_tokens
        is_classifier = self.likelihood == Likelihood.CLASSIFICATION
        return LinearisedNetwork(
            jacobian,
            data,
            is_classifier,
            (TokenSoftmax(C // T, T) if T > 1 else Softmax(C))
            if is_classifier
            else self._output_noise(C, now["relative_noise"]),
            prior_precision=self.prior_precision.detach(),
            noise_scale=now["temperature"].reshape(()),
            shift=flatten(self._parameters()) - self.prior_mean,
            prior_mean=self.prior_mean,
            layer_sizes=self._layer_sizes(),
            first_batch=first_batch,
        )

    def _stored(self, found: NetworkFit) -> NetworkFit:
        """With A as it is to be stored; what refine would resume is in full precision, and let go."""
        if self.settings.storage is None:
            return found
        report = found.report
        if MORE in report.advice:
            report = replace(report, advice=MORE_OF_STORED)
        return replace(found, posterior=found.posterior.stored_as(self.settings.storage), report=report, state=None)

    def _with_reference(self, found: NetworkFit, network: LinearisedNetwork) -> NetworkFit:
        """With the shape of the covariance of the outputs, from a few of the first inputs."""
        first, jacobian, posterior = network.first_batch, network.jacobian, found.posterior
        (num_rows, C), number = first.outputs.shape, reference_inputs(network)
        if number == 0:
            return found
        some = slice_rows(to_device(first.inputs, jacobian.device), slice(0, number), num_rows)
        with torch.no_grad():
            rows = jacobian.rows_in_parts(
                some, number, Reference.contrasts, Reference.num_rows(C), self.settings.chunk_bytes
            )
            gram, columns = posterior.unit_gram, WeightColumns(posterior.images, posterior.dtype)
            reference = Reference.of(rows, columns, gram + posterior.rounding(gram), posterior.noise_gram)
        return replace(found, posterior=replace(posterior, reference=reference).with_gram(gram))

    def _check_hyperparameters(self) -> None:
        """Again, since they may have been set."""
        check_hyperparameters(
            prior_precision=self.prior_precision,
            prior_mean=self.prior_mean,
            sigma_noise=self.sigma_noise,
            temperature=self.temperature,
        )

    def _take(self, result: NetworkFit) -> None:
        self._fit, self.posterior, self._report = result, result.posterior, result.report
        self.loss, self.n_data, self.n_outputs = result.loss, result.num_data, result.num_outputs
        self.mean, self._fingerprint = flatten(self._parameters()), fingerprint(self.model)
        self.data_seen = result.data_seen
        self._fitted, self._conditioned, self._prior_of_fit = True, None, hyperparameters(self)

    def compress(self, max_rank: int) -> None:
        """Keep the `max_rank` combinations of actions that matter most at this prior: less memory, more variance."""
        self._check_fitted()
        max_rank = whole_number("max_rank", max_rank, at_least=1)
        self.posterior = self.posterior.compress(max_rank, self.prior_precision, self._noise_scale)
        self._conditioned = None

    @property
    def report_(self) -> FitReport:
        """How the fit ended, with advice; the information captured is that at the current hyperparameters."""
        if self._report is None:
            raise RuntimeError("A report must follow a fit in this process; got none. Try fit(train_loader).")
        information = self.posterior.information_captured(self.prior_precision, self._noise_scale)
        return replace(self._report, information_captured=information, rank=self.posterior.rank)

    @property
    def sigma_noise(self) -> Tensor:
        """The standard deviation of a regression's noise: one for all outputs, or one for each (C,).

        After a fit all may be multiplied by one number; other ratios between outputs take another fit.
        """
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, sigma_noise: float | Tensor) -> None:
        given = torch.as_tensor(sigma_noise, device=self._device, dtype=self._dtype)
        self._sigma_noise = given if given.numel() > 1 else given.reshape(())

    def _output_noise(self, num_outputs: int, relative: Tensor) -> OutputNoise:
        """The noise of each output over their geometric mean."""
        if self.sigma_noise.numel() not in (1, num_outputs):
            raise ValueError(
                f"`sigma_noise` must be a positive number, or a tensor of one for each of the {num_outputs} outputs; "
                f"got a tensor of shape {tuple(self.sigma_noise.shape)}. Try sigma_noise=torch.ones({num_outputs})."
            )
        return OutputNoise(relative.expand(num_outputs))

    @property
    def _noise_scale(self) -> Tensor:
        """τ = σ²·T, with the geometric mean of the σ² of several outputs."""
        if self._fitted:
            check_relative_noise(self)
        temperature = self.temperature if isinstance(self.temperature, Tensor) else float(self.temperature)
        return noise_parts(self.sigma_noise)[0] * temperature

    def _refresh_posterior(self) -> None:
        """Called before every prediction: the model must still be that of the fit, frozen weights and buffers too."""
        with exclusively(self.model):
            current, now = flatten(self._parameters()), fingerprint(self.model)
        if not (torch.equal(current, self.mean) and same_fingerprint(now, self._fingerprint)):
            raise RuntimeError(
                "The model must have the weights it was fitted with; got weights that have changed since. Try "
                "fit(train_loader) again, or load the weights of the fit."
            )

    def _gradients(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.enable_backprop else torch.no_grad()

    def _posterior_now(self) -> ConditionedPosterior:
        """The posterior for the current prior precision, noise and temperature; cached until one of them changes."""
        cached, now = self._conditioned, (self.prior_precision.detach(), self._noise_scale.detach())
        if cached is None or not all(map(torch.equal, cached[0], now)):
            self._check_hyperparameters()
            conditioned = self.posterior.conditioned(*now)
            self._conditioned = cached = (now[0].clone(), now[1].clone()), conditioned
        return cached[1]


def _unknown_argument(name: str) -> str:
    """With the arguments whose names are close."""
    known = [n for n in signature(FittedNetwork.__init__).parameters if n not in ("self", "unknown")]
    close = list(dict.fromkeys([n for n in known if name in n] + get_close_matches(name, known, cutoff=0.5)))
    advice = " or ".join(map(repr, close)) if close else "help(type(la)), which lists them"
    return f"`hessian_structure='iterncgp'` must be given arguments that it has; got {name!r}. Try {advice}."


def _require_one_device(model: nn.Module) -> None:
    """The data go where the model is, so there must be one such place, with values in it."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    first: dict[torch.device, str] = {}
    for name, tensor in tensors:
        first.setdefault(tensor.device, name)
    if len(first) > 1 or any(device.type == "meta" for device in first):
        where = ", ".join(f"{name!r} on {device}" for device, name in first.items())
        raise ValueError(
            f"All parameters and buffers of the model must be on one device, with values; got {where}. Try "
            "model.to(device) for the whole model (from meta: load its weights first); the data follow it."
        )


def _fitted_to(
    network: LinearisedNetwork, settings: NetworkSettings, *, progress_bar: bool, session: CheckpointSession | None
) -> NetworkFit:
    """Infer the posterior, if it fits in memory; exactly, in groups of data, or by products with the NTK."""
    network.data.keep_bytes = room_for_data(check_memory(estimated_cost(network, settings)))
    fit = fit_exactly if settings.policy == EXACT else fit_by_clusters if settings.in_groups else fit_by_products
    return fit(network, settings, progress_bar=progress_bar, session=session)


def identity(
    la: FittedNetwork,
    network: LinearisedNetwork,
    spent: NetworkSettings,
    fitted: NetworkFit | None = None,
    budget: Budget | None = None,
    *,
    data_before: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fingerprint of a run: settings of a fit, or of a refine and where it begins; and the model."""
    own = {f.name: getattr(la.settings, f.name) for f in fields(la.settings)}
    if own["cotangents"] is None and network.classification:
        own["cotangents"] = 1  # which it means, and what earlier checkpoints say
    if la.settings.in_groups:
        own["policy"] = EXACT if spent.policy == EXACT else None  # as in earlier checkpoints
    del own["combines"], own["is_known"], own["in_groups"], own["is_bounded"]  # which follow from what is called
    del own["storage"]  # of what a run ends with
    stopping, options = asdict(own.pop("stopping")), asdict(own.pop("options"))
    settings = {
        "flavour": type(la).__name__,
        "likelihood": str(Likelihood(la.likelihood).value),
        **described(own | stopping | options),
        "prior_precision": described(network.prior_precision),
        "prior_mean": described(network.prior_mean),
        "noise_scale": float(network.noise_scale),
        "weights": sum(network.layer_sizes),
        "batch_size": network.data.batch_size,
        "batches": len(network.data),
        "dtype": str(network.jacobian.dtype),
        "device": network.jacobian.device.type,
    }
    if isinstance(network.likelihood, OutputNoise) and bool((network.likelihood.variances != 1).any()):
        settings["relative_noise"] = described(network.likelihood.variances)
    if fitted is not None and budget is not None:
        settings |= {"epochs": budget.epochs, "seconds": budget.seconds, "epochs_before": fitted.report.epochs}
        settings |= {"starts_from": described([fitted.posterior.noise_gram, fitted.posterior.images])}
    if data_before is not None:
        settings |= {"num_actions": spent.num_actions, "data_before": data_before}
    model = {name: digest(value) for name, value in (*la.model.named_parameters(), *la.model.named_buffers())}
    return settings, model

"""What the two flavours share: fitting, predictions, evidence and hyperparameters, all from a `WeightPosterior`.

laplace-torch's base class turns latent moments into probabilities and samples; this file supplies the moments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from laplace.baselaplace import BaseFunctionalLaplace
from laplace.utils.enums import Likelihood, PredType
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ntk_iterncgp.data import FixedOrderData, Inputs, evaluating
from ntk_iterncgp.laplace_addon.grid import GivenMoments, search_grid
from ntk_iterncgp.laplace_addon.saving import fingerprint, flatten, from_state_dict, same_fingerprint, to_state_dict
from ntk_iterncgp.network import MEANS, NetworkSettings, fit_network
from ntk_iterncgp.priors.jacobian import DenseRows, NetworkJacobian, Rows
from ntk_iterncgp.solver import NewtonOptions, Policy, Stopping, resolve_policy
from ntk_iterncgp.solver.report import FitReport
from ntk_iterncgp.solver.stopping import whole_number
from ntk_iterncgp.tuning import tune_by_evidence
from ntk_iterncgp.weight_posterior import ConditionedPosterior, WeightPosterior


class IterNCGPLaplace(BaseFunctionalLaplace):
    """The posterior of the linearised network given all training data. Abstract; the flavours are final.

    Beside laplace-torch's own arguments:

    mean              "network": the predictive mean is the network's output; "refined": the linearised model's mode
    policy            how actions are chosen: "curvature_residual", "random_subspace", or a callable
    num_actions       products with the NTK, each one sweep forward+backward and one of Jacobian-vector products
    actions_per_step  of these, how many per Newton step (mean="refined")
    max_rank          how many actions to keep (None: all); compression says how they are chosen
    chunk_bytes       memory for the rows of the Jacobian, in predictions
    """

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
        mean: str = "network",
        policy: str | Policy = "curvature_residual",
        num_actions: int = 50,
        actions_per_step: int = 5,
        max_rank: int | None = None,
        compression: str = "mean+trace",
        newton_tol: float = 1e-2,
        chunk_bytes: int = 256 * 2**20,
        seed: int = 0,
    ) -> None:
        if likelihood not in (Likelihood.CLASSIFICATION, Likelihood.REGRESSION):
            raise ValueError(
                "hessian_structure='iterncgp' expects the likelihood 'classification' or 'regression', but got "
                f"{likelihood!r}."
            )
        if mean not in MEANS:
            raise ValueError(f"mean expects 'network' or 'refined', but got {mean!r}.")
        self.settings = NetworkSettings(
            mean=mean,
            policy=resolve_policy(policy),
            stopping=Stopping(
                whole_number("num_actions", num_actions, at_least=1),
                whole_number("actions_per_step", actions_per_step, at_least=1),
                newton_tol=newton_tol,
            ),
            options=NewtonOptions(max_rank, compression),
            chunk_bytes=chunk_bytes,
            seed=seed,
        )
        self._fitted = False
        super().__init__(
            model,
            likelihood,
            sigma_noise=sigma_noise,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            temperature=temperature,
            enable_backprop=enable_backprop,
            dict_key_x=dict_key_x,
            dict_key_y=dict_key_y,
        )
        self.posterior: WeightPosterior
        self._report: FitReport | None = None
        self._conditioned: tuple[tuple[Tensor, Tensor], ConditionedPosterior] | None = None

    # --- where J comes from ------------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self, loader: DataLoader) -> tuple[NetworkJacobian, FixedOrderData]:
        """The Jacobian, and the training data as it takes them."""

    @abstractmethod
    def _rows_at(self, x: Inputs) -> Iterator[Rows]:
        """The network at new inputs, in parts that fit in `chunk_bytes`."""

    @abstractmethod
    def _layer_sizes(self) -> tuple[int, ...]:
        """The numbers of weights of the parameter tensors."""

    @abstractmethod
    def _parameters(self) -> dict[str, Tensor]:
        """The weights that are uncertain, by name."""

    # --- fitting -----------------------------------------------------------------------------------------------------

    def fit(self, train_loader: DataLoader, override: bool = True, progress_bar: bool = False) -> None:
        """Infer the posterior from all data of the loader. On failure the model and an earlier fit are as before."""
        if not override:
            raise ValueError("override=False is not offered: the posterior is that of one data set. Fit on all of it.")
        with evaluating(self.model):
            jacobian, data = self._open(train_loader)
            weights = flatten(self._parameters())
            result = fit_network(
                jacobian,
                data,
                self.likelihood == Likelihood.CLASSIFICATION,
                prior_precision=self.prior_precision_diag.detach(),
                noise_scale=float(self._noise_scale.detach()),
                shift=weights - self.prior_mean,
                prior_mean=self.prior_mean,
                layer_sizes=self._layer_sizes(),
                settings=self.settings,
                progress_bar=progress_bar,
            )
        self.posterior, self._report = result.posterior, result.report
        self.loss, self.n_data, self.n_outputs = result.loss, result.num_data, result.num_outputs
        self.mean, self._fingerprint = weights, fingerprint(self.model)
        self._fitted, self._conditioned = True, None

    def compress(self, max_rank: int) -> None:
        """Keep the `max_rank` combinations of actions that matter most at this prior: less memory, more variance."""
        self._check_fitted()
        max_rank = whole_number("max_rank", max_rank, at_least=1)
        self.posterior = self.posterior.compress(max_rank, self.prior_precision, self._noise_scale)
        self._conditioned = None

    @property
    def report_(self) -> FitReport:
        """How the fit ended, with advice."""
        if self._report is None:
            raise RuntimeError("This posterior has not been fitted in this session. Call fit(train_loader) first.")
        return self._report

    @property
    def _noise_scale(self) -> Tensor:
        """τ = σ²·T."""
        return 1 / self._H_factor

    def _refresh_posterior(self) -> None:
        """Called before every prediction: the model must still be that of the fit, frozen weights and buffers too."""
        current = flatten(self._parameters())
        if not (torch.equal(current, self.mean) and same_fingerprint(fingerprint(self.model), self._fingerprint)):
            raise RuntimeError(
                "The model is expected to have the weights it was fitted with, but they have changed since. Call "
                "fit(train_loader) again, or load the weights of the fit."
            )

    def _posterior_now(self) -> ConditionedPosterior:
        """The posterior for the current prior precision, noise and temperature; kept until one of them changes."""
        kept, now = self._conditioned, (self.prior_precision.detach(), self._noise_scale.detach())
        if kept is None or not all(map(torch.equal, kept[0], now)):
            conditioned = self.posterior.conditioned(*now)
            self._conditioned = kept = (now[0].clone(), now[1].clone()), conditioned
        return kept[1]

    # --- predictions -------------------------------------------------------------------------------------------------

    def __call__(self, x: Inputs, pred_type: PredType | str = PredType.GP, *args: Any, **kwargs: Any) -> Any:
        """As laplace-torch's function-space flavours; `pred_type="glm"` is another name for "gp"."""
        pred_type = PredType.GP if pred_type == PredType.GLM else pred_type
        return super().__call__(x, pred_type, *args, **kwargs)

    def _glm_predictive_distribution(self, x: Inputs, joint: bool = False) -> tuple[Tensor, Tensor]:
        if isinstance(x, GivenMoments):  # moments known already: laplace-torch's links are asked about them
            return x
        posterior = self._posterior_now()
        with evaluating(self.model), self._gradients():
            if joint:
                rows = self._all_rows_at(x)
                mean, covariance = self._mean_of(rows, posterior).flatten(), posterior.covariance(rows, joint=True)
            else:
                parts = [(self._mean_of(rows, posterior), posterior.covariance(rows)) for rows in self._rows_at(x)]
                mean, covariance = map(torch.cat, zip(*parts, strict=True))
        return mean.to(self._dtype), covariance.to(self._dtype)

    def _all_rows_at(self, x: Inputs) -> Rows:
        parts = list(self._rows_at(x))
        if len(parts) > 1:
            raise ValueError(
                f"A joint prediction is expected to fit in chunk_bytes at once, but it takes {len(parts)} parts of "
                f"{self.settings.chunk_bytes / 2**20:.0f} MiB. Raise chunk_bytes, or ask for fewer inputs."
            )
        return parts[0]

    def _mean_weights(self, posterior: ConditionedPosterior) -> Tensor:  # (P,)
        """μ: the weights themselves, or the mode of the linearised model."""
        if self.settings.mean == "network":
            return self.mean.double()
        start = self.posterior.anchor_share * (self.mean - self.prior_mean).double()
        return self.prior_mean.double() + start + posterior.mean_shift(self.prior_mean)

    def _mean_of(self, rows: Rows, posterior: ConditionedPosterior) -> Tensor:
        if self.settings.mean == "network":
            return rows.outputs.double()
        shift = self._mean_weights(posterior) - self.mean.double()  # μ − θ*
        return rows.outputs.double() + rows.times(shift[:, None])[..., 0]

    def _gradients(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.enable_backprop else torch.no_grad()

    def functional_variance(self, Js: Tensor, *, joint: bool = False) -> Tensor:  # (b, C, P) -> (b, C, C)
        """J Σ Jᵀ for given rows of the Jacobian."""
        self._check_fitted()
        self._check_jacobians(Js)
        return self._posterior_now().covariance(DenseRows(Js[..., 0], Js), joint=joint).to(Js.dtype)

    def functional_covariance(self, Js: Tensor) -> Tensor:  # (b, C, P) -> (b·C, b·C)
        """The joint covariance for given rows of the Jacobian."""
        return self.functional_variance(Js, joint=True)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:  # (n_samples, P)
        """Draws of the weights."""
        self._check_fitted()
        posterior = self._posterior_now()
        return (self._mean_weights(posterior) + posterior.sample(n_samples, generator)).to(self._dtype)

    # --- evidence and hyperparameters --------------------------------------------------------------------------------

    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Tensor:
        """A lower bound on the Laplace evidence, equal to it with enough actions; differentiable in both arguments."""
        self._check_fitted()
        if prior_precision is not None:
            self.prior_precision = prior_precision
        if sigma_noise is not None:
            if self.likelihood != Likelihood.REGRESSION:
                raise ValueError("sigma_noise is expected for regression only; classification has no noise to set.")
            self.sigma_noise = sigma_noise
        return self.log_likelihood - 0.5 * (self.log_det_ratio + self._misfit())

    def _misfit(self) -> Tensor:
        """What the evidence charges the mean: the prior's penalty of the weights; or, where the mean moves with the
        prior, bᵀ(K + W⁺)⁻¹b in the span of the actions."""
        if self.settings.mean == "network":
            return self.scatter
        right_hand_side = self.posterior.right_hand_side_for(self.prior_mean)[:, None]
        factor = self.posterior.factor(self.prior_precision, self._noise_scale)
        return factor.half_solve(right_hand_side).square().sum().to(self._dtype)

    @property
    def log_det_ratio(self) -> Tensor:
        """An upper bound on log|I + W^{½}KW^{½}|, so that the evidence is safe to maximise."""
        return self.posterior.log_determinant_bounds(self.prior_precision, self._noise_scale)[1].to(self._dtype)

    @property
    def scatter(self) -> Tensor:
        """The prior's penalty of the mean weights."""
        if self.settings.mean == "refined":
            delta = self._mean_weights(self._posterior_now()).to(self._dtype) - self.prior_mean
        else:
            delta = self.mean - self.prior_mean
        return (delta * self.prior_precision_diag) @ delta

    def optimize_prior_precision(
        self,
        pred_type: PredType | str = PredType.GLM,
        method: str = "marglik",
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: str = "layerwise",
        val_loader: DataLoader | None = None,
        loss: Any = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str = "probit",
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
    ) -> None:
        """Set the prior precision: by the evidence ("marglik"), or by the loss on a validation set ("gridsearch").

        Neither touches the training data; the grid passes the validation set once in all.
        """
        self._check_fitted()
        if method == "marglik":
            self.prior_precision = tune_by_evidence(
                lambda precision: self.log_marginal_likelihood(prior_precision=precision),
                len(self._layer_sizes()),
                self.mean,
                start=init_prior_prec,
                structure=prior_structure,
                num_steps=n_steps,
                learning_rate=lr,
                progress_bar=progress_bar,
            )
        elif method == "gridsearch":
            if val_loader is None:
                raise ValueError("method='gridsearch' expects a val_loader with held-out data, but got none.")
            grid = torch.logspace(log_prior_prec_min, log_prior_prec_max, grid_size, base=log_prior_prec_base)
            self.prior_precision = search_grid(
                self,
                val_loader,
                grid.to(self._device),
                loss=loss,
                link=link_approx,
                num_samples=n_samples,
                progress_bar=progress_bar,
            )
        else:
            raise ValueError(f"method expects 'marglik' or 'gridsearch', but got {method!r}.")
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")

    # --- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings: loads with `torch.load(..., weights_only=True)`."""
        self._check_fitted()
        return to_state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a saved posterior, after checking that it belongs to this model."""
        from_state_dict(self, state_dict)

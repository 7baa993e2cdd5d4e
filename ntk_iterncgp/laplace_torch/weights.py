"""The posterior of the weights themselves: draws, density, precision, and the network at drawn weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from laplace.utils.enums import Likelihood
from torch import Tensor

from ntk_iterncgp.data.fixed_order import Inputs
from ntk_iterncgp.posterior.weight_space import ConditionedPosterior, PosteriorPrecision
from ntk_iterncgp.runtime.threads import evaluating, exclusively
from ntk_iterncgp.runtime.validate import whole_number

if TYPE_CHECKING:
    from ntk_iterncgp.laplace_torch.fitting import FittedNetwork
else:
    FittedNetwork = object


class WeightDistribution(FittedNetwork):
    """N(μ, Σ_θ), for a fitted network. A mixin."""

    output_temperature: float

    @property
    def _num_classes(self) -> int:
        return self.n_outputs // self._num_tokens

    def _averaged(self, draws: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # (s, b, C)
        """Probabilities, or the mean and the variance of a regression."""
        if self.likelihood == Likelihood.CLASSIFICATION:
            return draws.mean(0)
        whole_number("n_samples", len(draws), at_least=2)  # one draw has no variance
        return draws.mean(0), draws.var(0)

    def _split_tokens(self, outputs: Tensor) -> Tensor:  # (…, T·C) -> (…, T, C)
        return outputs.unflatten(-1, (-1, self._num_classes)) if self._num_tokens > 1 else outputs

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:  # (n_samples, P)
        """Draws of the weights."""
        self._check_fitted()
        n_samples = whole_number("n_samples", n_samples, at_least=1)
        posterior = self._posterior_now()
        return (self._mean_weights(posterior) + posterior.sample(n_samples, generator)).to(self._dtype)

    def _mean_weights(self, posterior: ConditionedPosterior) -> Tensor:  # (P,)
        """μ: the weights themselves, or the mode of the linearised model."""
        if self.settings.mean == "network":
            return self.mean.double()
        start = self.posterior.anchor_share * (self.mean - self.prior_mean).double()
        return self.prior_mean.double() + start + posterior.mean_shift(self.prior_mean)

    @property
    def posterior_precision(self) -> PosteriorPrecision:
        """The precision of the weights as a linear operator: products, diagonal, log-determinant."""
        self._check_fitted()
        return self._posterior_now().precision()

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:  # (P,) -> ()
        """The log-density of the weights' posterior, or the part of it that depends on the weights."""
        precision, posterior = self.posterior_precision, self._posterior_now()
        if not isinstance(value, Tensor) or value.shape != self.mean.shape:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"`value` must be one tensor of all weights, of shape (P,) = ({len(self.mean)},); got {shown}. Try one "
                "of la.sample(), or torch.nn.utils.parameters_to_vector."
            )
        deviation = value.double() - self._mean_weights(posterior)
        constant = precision.logdet() - len(deviation) * math.log(2 * math.pi) if normalized else 0.0
        return (0.5 * (constant - deviation @ (precision @ deviation))).to(value.dtype)

    def _at_sampled_weights(self, x: Inputs, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """Outputs (n_samples, b, C) of the network itself."""
        changes = self.sample(n_samples, generator) - self.mean
        with exclusively(self.model), evaluating(self.model), self._gradients():
            jacobian, inputs = self._jacobian_at(x)
            draws = torch.stack([jacobian.forward_at(inputs, change) for change in changes])
        return draws.to(self._dtype) / self.output_temperature

"""The contract of a likelihood p(y | f), log-concave in f and independent over data.

Four questions, with W = −∇² log p(y | f), block diagonal with one C×C block per datum:

    log_prob   log p(y_n | f_n)                score      ∇ = ∇_f log p(y | f)
    curvature  W V                             noise      W⁺ V

and one more where W is singular: `project`, the projection onto the range of W. Every action the solver takes lies
there, so that a direction about which the data say nothing is never conditioned on.

W may depend on the targets, and a likelihood may have parameters of each datum, such as an exposure or a noise: those
named in `per_datum` have one entry for each datum of the fit. `given` binds a likelihood to the targets, `on` is the
same likelihood of some of the data, `of_more` and `joined` are that of more. At new inputs, whose exposure nobody
knows, a response is that of one unit of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods.quadrature import gaussian_points

CURVATURE_FLOOR = 1e-10
"""Probabilities and rates are held at or above this, in W and W⁺ alike, for a prior variance of at most one.

A saturated point (π ~ 1e-30) carries no information, but its noise 1/π would drown all other entries of the small
matrices in rounding. At the floor it still carries none that can be seen. What counts is W K, so the floor is lowered
in proportion to a larger prior variance (`for_prior_variance`).
"""

ANY_VARIANCE = 1e20
"""A prior variance that no prior exceeds: its floor is for those who never divide by a probability, or who scale their
actions by what they divide by, and who may be asked about any prior afterwards."""


EXPECTATION_POINTS = 256  # of a latent Gaussian with more than one contrast


class Likelihood(ABC):
    """An observation model. `latent` is (N, C), `block` is (N, C, k); any subset of the data may be passed."""

    num_outputs: int = 1
    is_quadratic: bool = False  # log p is quadratic in f: a single Newton step is exact
    has_exact_response: bool = False  # expected_response is a closed form, not an approximation
    has_monotone_response: bool = True  # each output's response rises with its latent value: quantiles pass through
    per_datum: tuple[str, ...] = ()  # attributes with one entry for each datum, or None, or a single number
    per_datum_arguments: tuple[str, ...] = ()  # what these are called where a likelihood is made
    curvature_floor: float = CURVATURE_FLOOR

    def given(self, targets: Tensor) -> Self:
        """Bind the likelihood to the targets of all data, on which W may depend.

        Args:
            targets: as `check_targets` returns them.

        Returns:
            This likelihood, or a copy with its parameters of each datum on the device of the targets.
        """
        held = self._held_per_datum()
        if not held:
            return self
        self.check_length(len(targets))
        bound = copy(self)
        for name, value in held.items():
            setattr(bound, name, value.to(targets.device))
        return bound

    def on(self, data: slice | Tensor) -> Self:
        """The same likelihood of some of the data: a slice, or their numbers."""
        held = self._held_per_datum()
        if not held:
            return self
        part = copy(self)
        for name, value in held.items():
            setattr(part, name, value[data])
        return part

    def of_more(self, **per_datum: Any) -> Self:
        """The likelihood of data that arrive later, with their own parameters.

        Args:
            per_datum: the parameters of each datum by the names of the arguments that make a likelihood, such as
                `exposure`; those that are one number for all data need not be given.

        Returns:
            A copy with these parameters.
        """
        if not per_datum:
            return self
        settings = self.settings()
        names = [name for name in settings if name in self.per_datum_arguments]
        unknown = [name for name in per_datum if name not in names]
        if unknown:
            raise TypeError(f"`{unknown[0]}` must be a parameter of each datum of {self!r}; it has {names or 'none'}.")
        return type(self)(**settings | per_datum)

    def joined(self, more: Self, num_data: int, num_more: int) -> Self:
        """The likelihood of all data: of `num_data` by this one, and of `num_more` behind them by another."""
        if more is self:
            return self
        every = copy(self)
        for name in self.per_datum:
            parts = [getattr(self, name), getattr(more, name)]
            if all(isinstance(part, Tensor) for part in parts):
                lengths = (num_data, num_more)
                setattr(every, name, torch.cat([p.cpu().expand(n) for p, n in zip(parts, lengths, strict=True)]))
        return every

    def check_length(self, num_data: int) -> None:
        """Raise ValueError unless parameters of each datum are as many as the data."""
        for name, value in self._held_per_datum().items():
            if len(value) != num_data:
                raise ValueError(
                    f"`{name}` of {self!r} must have one entry for each datum; got {len(value)} for {num_data} data. "
                    f"Try a likelihood with the {name} of all data of a fit; `update` takes that of its new data."
                )

    def settings(self) -> dict[str, Any]:
        """The arguments with which an equal likelihood can be made, as numbers, texts and tensors."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is made: it lacks `settings`.")

    def _held_per_datum(self) -> dict[str, Tensor]:
        values = ((name, getattr(self, name)) for name in self.per_datum)
        return {name: value for name, value in values if isinstance(value, Tensor) and value.ndim > 0}

    def for_prior_variance(self, variance: float) -> Self:
        """The same likelihood with its floor set for a prior of this variance."""
        adjusted = copy(self)
        adjusted.curvature_floor = CURVATURE_FLOOR / max(1.0, variance)
        return adjusted

    @abstractmethod
    def check_targets(self, targets: Tensor) -> Tensor:
        """The targets as they are used inside, or a ValueError that says what is wrong with them."""

    @abstractmethod
    def log_prob(self, latent: Tensor, targets: Tensor) -> Tensor:  # (N, C) -> (N,)
        """log p(y_n | f_n) for each datum."""

    def loss(self, latent: Tensor, targets: Tensor) -> float:
        """−log p(y | f) of all data; of a noise that is relative, for unit noise and without constants."""
        return -float(self.log_prob(latent, targets).sum())

    def keeps_leading(self, num_data: int) -> bool:
        """Whether of the outputs of so many data only the leading classes are stored, as in `leading.py`."""
        return False

    @abstractmethod
    def score(self, latent: Tensor, targets: Tensor) -> Tensor:  # (N, C) -> (N, C)
        """∇_f log p(y | f)."""

    @abstractmethod
    def curvature(self, latent: Tensor, block: Tensor) -> Tensor:  # (N, C), (N, C, k) -> (N, C, k)
        """W V."""

    @abstractmethod
    def noise(self, latent: Tensor, block: Tensor) -> Tensor:  # (N, C), (N, C, k) -> (N, C, k)
        """W⁺ V."""

    def noise_diagonal(self, latent: Tensor) -> Tensor | None:  # (N, C) -> (N, C)
        """A diagonal that acts within the range of W as W⁺ does, where there is one. Spares work; may stay None."""
        return None

    @abstractmethod
    def response(self, latent: Tensor) -> Tensor:  # (..., C) -> (..., C)
        """E[y | f]: what the latent values say about an observation."""

    @abstractmethod
    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:  # (b, C), (b, C) -> (b, C)
        """E[response(f)] for f ~ N(mean, diag variance): in closed form, or by the probit approximation."""

    def expected_log_prob(
        self, mean: Tensor, covariance: Tensor, targets: Tensor
    ) -> Tensor:  # (N, C), (N, C, C) -> (N,)
        """E[log p(y | f)] for f ~ N(mean, covariance), by fixed points unless there is a closed form."""
        root, points, weights = gaussian_points(mean, covariance, self.contrasts(mean.device), EXPECTATION_POINTS)
        total = mean.new_zeros(len(mean))
        for point, weight in zip(points.unbind(1), weights.unbind(1), strict=True):  # (b or 1, r), (b or 1,)
            total = total + weight * self.log_prob(mean + (root @ point[..., None])[..., 0], targets)
        return total

    def project(self, block: Tensor) -> Tensor:  # (N, C, k) -> (N, C, k)
        """The projection onto the range of W."""
        return block

    def project_in_noise(self, block: Tensor, noise: Tensor) -> Tensor:  # (N, C, k), (N, C) -> (N, C, k)
        """The projection onto the range of W that is orthogonal in the metric of the noise, given by its diagonal.

        What it adds to a block is as small as W allows. The same as `project` where W has full rank.
        """
        return self.project(block)

    def contrasts(self, device: torch.device) -> Tensor:  # (C, q)
        """An orthonormal basis of the range of each datum's W, in float64."""
        return torch.eye(self.num_outputs, dtype=torch.float64, device=device)

    def cotangent(self, latent: Tensor, index: int) -> Tensor:  # (N, C) -> (N, C)
        """The direction of each datum in the `index`-th pass over the data, index < curvature_rank.

        Together they span the range of W, uᵀWu' = 0 between any two; the first says the most.
        """
        unit = torch.zeros_like(latent)
        unit[:, index] = 1
        return unit

    def direction(self, latent: Tensor, drawn: Tensor) -> Tensor:  # (N, C), (N, C) -> (N, C)
        """Random numbers as directions in the range of W, beyond those of `cotangent`."""
        return self.project(drawn[..., None])[..., 0]

    @property
    def curvature_rank(self) -> int:
        """The rank of each datum's block of W."""
        return self.num_outputs

    def curvature_root(self, latent: Tensor, block: Tensor) -> Tensor:  # (N, C), (N, C, k) -> (N, C, k)
        """H V, for some H with H Hᵀ = W."""
        values, vectors = torch.linalg.eigh(self._blocks(latent))
        result: Tensor = vectors @ (values.clamp_min(0).sqrt()[..., None] * block)
        return result

    def curvature_traces(self, latent: Tensor) -> Tensor:  # (N, C) -> (N,)
        """tr(W_n) of each datum: how much it may say."""
        return self._blocks(latent).diagonal(dim1=1, dim2=2).sum(1)

    def _blocks(self, latent: Tensor) -> Tensor:  # (N, C, C)
        """W_n of each datum, written out: for likelihoods of few outputs."""
        eye = torch.eye(self.num_outputs, dtype=latent.dtype, device=latent.device)
        return self.curvature(latent, eye.expand(len(latent), -1, -1))


class OneLatent(Likelihood):
    """A likelihood of one latent function, so that W is one positive number for each datum."""

    @abstractmethod
    def weight(self, latent: Tensor) -> Tensor:  # (N, 1) -> (N, 1)
        """W_n, held at the floor."""

    def curvature(self, latent: Tensor, block: Tensor) -> Tensor:
        return self.weight(latent)[..., None] * block

    def noise(self, latent: Tensor, block: Tensor) -> Tensor:
        return self.noise_diagonal(latent)[..., None] * block

    def noise_diagonal(self, latent: Tensor) -> Tensor:
        return 1 / self.weight(latent)


@dataclass(frozen=True, eq=False)
class CurvatureAt:
    """W at some latent values, for a slice or numbers of the data: its product, that with a root, and traces."""

    likelihood: Likelihood
    latent: Tensor  # (N, C)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, C)."""
        return len(self.latent), self.latent.shape[1]

    def at(self, data: slice | Tensor) -> Tensor:  # (rows, C)
        """Some of the latent values."""
        return self.latent[data]

    def __call__(self, data: slice | Tensor, block: Tensor) -> Tensor:  # (rows, C, k)
        return self.likelihood.on(data).curvature(self.at(data), block)

    def root(self, data: slice | Tensor, block: Tensor) -> Tensor:  # (rows, C, k)
        """H V with H Hᵀ = W."""
        return self.likelihood.on(data).curvature_root(self.at(data), block)

    def traces(self) -> Tensor:  # (N,)
        """tr(W_n) of each datum."""
        return self.likelihood.curvature_traces(self.latent)


def one_dimensional(targets: Tensor, name: str, meaning: str) -> Tensor:
    """Targets with one number per datum, or a ValueError."""
    if targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if targets.ndim != 1:
        raise ValueError(
            f"`y` must have the shape (N,) for {name}, {meaning}; got {tuple(targets.shape)}. Try one number per datum."
        )
    return targets


def require(condition: Tensor, targets: Tensor, message: str) -> None:
    """Raise `message`, what must hold, with the first target that it does not hold for."""
    if not bool(condition.all()):
        first = int(torch.nonzero(~condition.reshape(-1))[0])
        raise ValueError(
            f"{message}; got y[{first}] = {targets.reshape(-1)[first].item()}. Try other targets or likelihood."
        )


def positive_per_datum(value: float | Sequence[float] | Tensor, name: str, advice: str) -> Tensor:
    """Check a parameter that is one positive number, or one for each datum.

    Args:
        value: the parameter.
        name: what to call it in an error message.
        advice: what to try instead, the end of that message.

    Returns:
        It as a float64 tensor of shape () or (N,).
    """
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(value).__name__
        raise TypeError(f"`{name}` must be a positive number, or one for each datum; got {got}. {advice}") from error
    if tensor.ndim > 1 or tensor.numel() == 0:
        raise ValueError(
            f"`{name}` must be one number, or one for each datum (N,); got the shape {tuple(tensor.shape)}. {advice}"
        )
    wrong = tensor.reshape(-1)[~(tensor.isfinite() & (tensor > 0)).reshape(-1)]
    if wrong.numel():
        raise ValueError(f"`{name}` must be positive and finite; got {wrong[0].item():g}. {advice}")
    return tensor


def described_per_datum(value: Tensor) -> str:
    """A parameter as one reads it: 3, or (200 values)."""
    return f"{value.item():g}" if value.ndim == 0 else f"({len(value)} values)"


def is_one(value: Tensor) -> bool:
    """Whether a parameter is the number 1 for all data."""
    return value.ndim == 0 and value.item() == 1


def column(value: Tensor, latent: Tensor) -> Tensor:  # () or (N,) -> (1, 1) or (N, 1)
    """A parameter of each datum beside its latent value, in the dtype and on the device of the latent values."""
    return value.to(latent).reshape(-1, 1)

"""From the latent Gaussian to predictions: E[response(f)], by one of three links, and credible intervals.

probit      closed form where there is one (Gaussian, Poisson), the probit approximation for classification. Cheap;
            for softmax it uses the diagonal of the C×C covariance alone
quadrature  fixed points, deterministic, with the whole covariance. One output or two classes: a rule for the line,
            right to ten digits however broad the posterior is; closed forms where there are any. More classes:
            quasi-random points; with ten classes 512 are as accurate as ten thousand plain samples, and for posteriors
            so broad that those scatter too, nearly so
mc          plain Monte Carlo with the whole covariance

and scores of the uncertainty of each input, from the same latent Gaussian (`Uncertainty`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods import Likelihood, Softmax
from ntk_iterncgp.likelihoods.quadrature import LINE_POINTS, contrast_root, gaussian_points, standard_normal_quantile
from ntk_iterncgp.posterior.contrasts import HEAD, MANY_CLASSES_POINTS, Shape, contrasts_needed, ranking
from ntk_iterncgp.runtime.validate import whole_number

LINKS = ("probit", "quadrature", "mc")
POINT_ENTRIES = 2**20  # latent values of points at once


def check_link(link: str) -> None:
    """Raise ValueError unless `link` is one of `LINKS`."""
    if link not in LINKS:
        raise ValueError(f"`link` must be one of {', '.join(map(repr, LINKS))}; got {link!r}. Try 'quadrature'.")


def expected_response(
    likelihood: Likelihood,
    mean: Tensor,  # (b, C)
    covariance: Tensor,  # (b, C, C), or (b, r, r)
    *,
    link: str = "probit",
    num_samples: int = 512,
    generator: torch.Generator | None = None,
) -> Tensor:  # (b, C)
    """Compute E[y] at each input: class probabilities, rates, or means.

    Args:
        likelihood: whose response is averaged.
        mean: the latent means.
        covariance: the latent covariances. Links that use all of them need those of the contrasts Hᵀf alone, and accept
            these in their place.
        link: one of `LINKS`.
        num_samples: the number of samples of "mc" and of points of "quadrature". With one output or two classes
            quadrature is on a line and always takes `LINE_POINTS` points.
        generator: of the samples.

    Returns:
        The expected responses, in the dtype of the mean.
    """
    check_link(link)
    num_samples = whole_number("num_samples", num_samples, at_least=1)
    if link == "probit" or (link == "quadrature" and likelihood.has_exact_response):
        return likelihood.expected_response(mean, covariance.diagonal(dim1=1, dim2=2))
    contrasts = likelihood.contrasts(mean.device)
    if link == "mc":
        shape = (num_samples, contrasts.shape[1])
        samples = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)

    def some(mean: Tensor, covariance: Tensor) -> Tensor:
        if link == "mc":
            return likelihood.response(mean[:, None] + samples @ contrast_root(mean, covariance, contrasts).mT).mean(1)
        root, points, weights = gaussian_points(mean, covariance, contrasts, num_samples)
        response = likelihood.response(mean[:, None] + points @ root.mT)  # (b, q, C)
        return (weights[..., None] * response).sum(1)

    return _in_chunks(some, mean, covariance, num_samples)


def _in_chunks(function: Callable[..., Tensor], mean: Tensor, covariance: Tensor, num_points: int) -> Tensor:
    """Apply a function to a few inputs at a time, so that all points of all inputs are never held at once."""
    size = 1 + POINT_ENTRIES // (max(num_points, LINE_POINTS) * mean.shape[1])
    parts = zip(mean.split(size), covariance.split(size), strict=True)
    return torch.cat([function(*part) for part in parts])


@dataclass(frozen=True, eq=False)
class KnownContrasts:
    """Inputs at which the same number of contrasts is known, or one is expected to be as at a typical input."""

    where: Tensor  # among all inputs (b,)
    outputs: Tensor  # of the network (b, C), by which classes are ranked
    covariance: Tensor  # V (b, k, k)

    def at(self, some: Tensor) -> KnownContrasts:  # (s,)
        """Some of the inputs."""
        return KnownContrasts(self.where[some], self.outputs[some], self.covariance[some])

    def more_needed(self, shape: Shape) -> Tensor:  # (b,)
        """How many contrasts "auto" takes, by probabilities from a fourth of the points of a prediction."""
        return contrasts_needed(self.probabilities(shape, default_points(self.outputs.shape[1]) // 4))

    def split(self, size: int) -> Iterator[KnownContrasts]:
        """At most so many inputs at a time."""
        pieces = zip(self.where.split(size), self.outputs.split(size), self.covariance.split(size), strict=True)
        return (KnownContrasts(*piece) for piece in pieces)

    def filled(self, shape: Shape) -> Tensor:  # (b, C, C)
        """Σ̂."""
        return shape.covariance(self.covariance, ranking(self.outputs))

    def variances(self, shape: Shape) -> Tensor:  # (b, C)
        """The diagonal of Σ̂."""
        return shape.variances(self.covariance, ranking(self.outputs))

    def by_probit(self, shape: Shape) -> Tensor:  # (b, C)
        """E softmax(f), by the probit approximation."""
        return Softmax(self.outputs.shape[1]).expected_response(self.outputs, self.variances(shape))

    def probabilities(self, shape: Shape, num_points: int) -> Tensor:  # (b, C)
        """E softmax(f), by quadrature."""
        order = ranking(self.outputs)
        if order.shape[1] <= HEAD + 1:  # as with all contrasts
            likelihood = Softmax(order.shape[1])
            return expected_response(
                likelihood, self.outputs, self.filled(shape), link="quadrature", num_samples=num_points
            )
        by_rank = torch.cat([f.softmax(2).mean(1) for f in self._by_rank(shape, order, num_points, torch.float32)])
        return by_rank.gather(1, order.argsort(1)).to(self.outputs)

    def scored(self, shape: Shape, num_points: int) -> tuple[Tensor, Uncertainty]:
        """E softmax(f) by quadrature, and scores from the same points."""
        order = ranking(self.outputs)
        if order.shape[1] <= HEAD + 1:
            return classification_scores(self.outputs, self.filled(shape), num_points)
        points = self._by_rank(shape, order, num_points, torch.float64)  # small entropies would be rounding
        found = [_entropies(f.log_softmax(2), f.new_full((1, f.shape[1]), 1 / f.shape[1])) for f in points]
        by_rank, total, aleatoric = (torch.cat(part).to(self.outputs) for part in zip(*found, strict=True))
        variance, margin = self.variances(shape).sum(1), self.covariance[:, 0, 0]
        return by_rank.gather(1, order.argsort(1)), Uncertainty.of(total, aleatoric, variance, margin)

    def _by_rank(
        self, shape: Shape, order: Tensor, num_points: int, dtype: torch.dtype
    ) -> Iterator[Tensor]:  # (b, q, C)
        """Values of the outputs by rank at equally likely points, some inputs at a time."""
        values = shape.latent(self.outputs.gather(1, order).to(dtype), self.covariance, num_points)
        size = 1 + POINT_ENTRIES // (num_points * order.shape[1])
        return (values(slice(start, start + size)) for start in range(0, len(order), size))


def default_points(num_outputs: int) -> int:
    """How many points of quadrature a softmax takes."""
    return 512 if num_outputs <= HEAD + 1 else MANY_CLASSES_POINTS


def in_order(parts: Sequence[KnownContrasts], results: Sequence[Tensor]) -> Tensor:
    """Results of parts as one tensor, in the order of the inputs."""
    return torch.cat(list(results))[torch.cat([part.where for part in parts]).argsort()]


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """How uncertain the prediction at each input is, in nats, and why: tensors of shape (b,).

    entropy = epistemic + aleatoric. The epistemic part (the mutual information between weights and label) is what more
    data would remove; the aleatoric part is noise in the labels themselves.
    """

    entropy: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    variance: Tensor  # the trace of the latent covariance
    margin_variance: Tensor | None  # of the difference between the two largest logits; None for regression

    @classmethod
    def of(cls, entropy: Tensor, aleatoric: Tensor, variance: Tensor, margin_variance: Tensor) -> Uncertainty:
        """Of a classifier; the epistemic part is what is left of the entropy."""
        return cls(entropy, (entropy - aleatoric).clamp_min(0), aleatoric, variance, margin_variance)

    @classmethod
    def joined(cls, parts: Sequence[Uncertainty], join: Callable[[list[Tensor]], Tensor]) -> Uncertainty:
        """Those of several parts as one."""
        each = ([getattr(part, f.name) for part in parts] for f in fields(cls))
        found: list[Any] = [None if values[0] is None else join(values) for values in each]
        return cls(*found)

    def __len__(self) -> int:
        return len(self.entropy)

    def __str__(self) -> str:
        columns = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) is not None]
        lines = ["input  " + "  ".join(f"{name:>15}" for name, _ in columns)]
        for n in range(min(len(self), 20)):
            lines.append(f"{n:>5}  " + "  ".join(f"{float(values[n]):>15.4g}" for _, values in columns))
        if len(self) > 20:
            lines.append(f"… and {len(self) - 20} more")
        return "\n".join(lines)

    __repr__ = __str__


def classification_uncertainty(mean: Tensor, covariance: Tensor, *, num_samples: int = 512) -> Uncertainty:
    """Compute scores from latent moments (b, C) and (b, C, C) of a softmax, by quadrature."""
    return classification_scores(mean, covariance, num_samples)[1]


def classification_scores(mean: Tensor, covariance: Tensor, num_samples: int) -> tuple[Tensor, Uncertainty]:
    """Probabilities (b, C) and scores from latent moments (b, C) and (b, C, C) of a softmax, by quadrature."""
    contrasts = Softmax(mean.shape[1]).contrasts(mean.device)

    def some(mean: Tensor, covariance: Tensor) -> Tensor:  # (b, C + 2)
        root, points, weights = gaussian_points(mean, covariance, contrasts, num_samples)
        p, total, aleatoric = _entropies(torch.log_softmax(mean[:, None] + points @ root.mT, -1), weights)
        return torch.cat([p, total[:, None], aleatoric[:, None]], 1)

    found = _in_chunks(some, mean, covariance, num_samples)
    variance, margin = covariance.diagonal(dim1=1, dim2=2).sum(1), margin_variance(mean, covariance)
    return found[:, :-2], Uncertainty.of(found[:, -2], found[:, -1], variance, margin)


def _entropies(log_p: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (b, q, C), (b or 1, q)
    """E p, its entropy, and the expected entropy, from probabilities at weighted points."""
    p = log_p.exp()
    aleatoric = (weights * -(p * log_p).sum(-1)).sum(1)
    expected = (weights[..., None] * p).sum(1)
    return expected, torch.special.entr(expected).sum(1), aleatoric


def margin_variance(mean: Tensor, covariance: Tensor) -> Tensor:  # (b, C), (b, C, C) -> (b,)
    """The variance of the difference between the two largest outputs."""
    top = mean.topk(2, 1).indices
    contrast = torch.zeros_like(mean).scatter_(1, top[:, :1], 1).scatter_(1, top[:, 1:], -1)
    return torch.einsum("bc,bcd,bd->b", contrast, covariance, contrast)


def regression_uncertainty(covariance: Tensor, noise_variance: Tensor) -> Uncertainty:  # (b, C, C), one number or (C,)
    """Compute scores from entropies of Gaussians: of an observation, and of its noise alone."""
    C = covariance.shape[1]
    eye = torch.eye(C, dtype=covariance.dtype, device=covariance.device)
    epistemic = 0.5 * torch.logdet(eye + covariance / noise_variance)
    aleatoric = 0.5 * (2 * math.pi * math.e * noise_variance).log().expand(C).sum().expand_as(epistemic)
    variance = covariance.diagonal(dim1=1, dim2=2).sum(1)
    return Uncertainty(epistemic + aleatoric, epistemic, aleatoric, variance, None)


def credible_interval(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, *, level: float = 0.95
) -> tuple[Tensor, Tensor]:  # (b, C), (b, C)
    """The central interval of response(f) that holds `level` of the probability.

    Quantiles pass through a monotone response.
    """
    check_interval(likelihood, level)
    spread = standard_normal_quantile(level) * variance.sqrt()
    return likelihood.response(mean - spread), likelihood.response(mean + spread)


def check_interval(likelihood: Likelihood, level: float) -> None:
    """Raise ValueError where a likelihood has no credible intervals, or `level` is not a probability."""
    if isinstance(likelihood, Softmax):
        raise ValueError(
            "`likelihood` must have outputs that depend on one latent function each for credible intervals; got "
            f"{likelihood!r}, whose probabilities depend on all. Try quantiles of the softmax of sample(x, n_samples)."
        )
    if not likelihood.has_monotone_response:
        raise ValueError(
            "`likelihood` must have a response that rises with the latent value for credible intervals; got "
            f"{likelihood!r}. Try quantiles of likelihood.response(sample(x, n_samples))."
        )
    if not 0 < level < 1:
        raise ValueError(f"`level` must be between 0 and 1; got {level}. Try 0.95.")

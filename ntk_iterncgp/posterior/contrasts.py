"""Predictions from a few contrasts of the outputs: what is known exactly, and the rest filled in by a shape.

Softmax probabilities depend on the C×C covariance Σ(x), which takes a backward pass for each output. Few classes have a
say at an input, so k contrasts are enough: of the likeliest class against the next k, each input its own. In the
coordinates u = (f₁ − f₂, …, f₁ − f_C, f₁), classes in the order of the network's outputs, the covariance V of the first
k is computed and has the guarantee. The others are an *estimate*, that of a Gaussian of covariance a S̄ given the first:

    Σ̂ = a S̄ + G (V − a S̄₁₁) Gᵀ,    G = S̄·₁ S̄₁₁⁻¹,    a = tr(S̄₁₁⁻¹V) / k

The shape S̄ is the mean of Σ/V₁₁ over some training inputs, whose labels are not asked for. By rank, a C×C matrix serves
all inputs, and is known from few: with twenty it is as good as with three hundred, and on a CIFAR ResNet-20 half as far
from the whole covariance as a matrix for each predicted class, in the order of the classes, from three hundred.

S̄ follows the hyperparameters. Of the training inputs D J JᵀDᵀ and D J A are stored for unit precision, a few hundred
kilobytes; a precision for each layer counts as the one that scales tr(AᵀΛ⁻¹A) as much.

Of many classes the first `HEAD` ranks are stored; those beyond are taken for exchangeable, as the last of these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.jacobian.blocks import WeightColumns
from ntk_iterncgp.jacobian.rows import Rows
from ntk_iterncgp.likelihoods.quadrature import covariance_root, normal_points
from ntk_iterncgp.linalg.factor import Factor

HEAD = 24  # contrasts of the likeliest class that the shape is learnt from
ALIKE = 8  # the last of these stand for all ranks beyond
REFERENCE_INPUTS, REFERENCE_FRACTION = 32, 0.03  # at most so many, and so much of the rows of all data
NEGLECTED, GROWTH = 0.002, 1.6  # probability that "auto" leaves to classes no contrast knows: of none, and of each more
MARGINS = 2.0  # posterior standard deviations in the median margin, beyond which "auto" does not soften
NUMBERS = (0, 1, 2, 3, 4, 6, 9)  # of contrasts that "auto" chooses from: few numbers make large batches
SPREAD = 3  # contrasts where the most of these are not enough
MANY_CLASSES_POINTS = 128  # of quadrature, beyond `HEAD` ranks
JITTER = 1e-9  # of a shape, relative to its largest entry


def reference_size(num_data: int, num_outputs: int, *, is_small: bool) -> int:
    """Count the inputs that a shape is learnt from: those of a few percent of a fit, or eight where rows cost little.

    None where two outputs are all, or where a fit has too few data to afford one.
    """
    affordable = int(REFERENCE_FRACTION * num_data / Reference.num_rows(num_outputs))
    least = REFERENCE_INPUTS // 4 if is_small else 0
    return 0 if num_outputs <= 2 else min(REFERENCE_INPUTS, max(least, affordable))


def softest_variance(margins: Tensor) -> float:
    """The variance of logits from which on more of it would ask for no more contrasts."""
    return float((margins.median() / MARGINS).square())


def ranking(outputs: Tensor) -> Tensor:  # (b, C)
    """The outputs of each input from the largest to the least."""
    return outputs.detach().argsort(dim=1, descending=True, stable=True)


def leading_contrasts(outputs: Tensor, number: int, *, with_level: bool = False) -> Tensor:  # (b, C) -> (b, C, k)
    """The likeliest class of each input against each of the next k; and, in one more column, that class alone."""
    order = ranking(outputs)[:, : number + 1, None]
    found = torch.zeros(len(outputs), number + with_level, outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
    found.scatter_(2, order[:, :1].expand(-1, number + with_level, 1), 1.0)
    found[:, :number].scatter_(2, order[:, 1:], -1.0)
    return found.mT


def contrasts_needed(probabilities: Tensor) -> Tensor:  # (b, C) -> (b,)
    """The least k of `NUMBERS` at each input that leaves at most `NEGLECTED` · `GROWTH`ᵏ to the classes beyond k + 1.

    The fewer classes are left, the less their variance matters. Where the most contrasts leave out more, the
    probability is spread over so many classes that none of them matters much, and `SPREAD` must do.

    Args:
        probabilities: as expected before any contrast is known, from the covariance of a typical input.
    """
    ranked = probabilities.detach().double().sort(1, descending=True).values
    beyond = ranked.flip(1).cumsum(1).flip(1)[:, 1:]  # by the classes of rank 2, 3, … and all that follow
    limits = NEGLECTED * GROWTH ** torch.arange(beyond.shape[1], dtype=torch.float64, device=beyond.device)
    numbers = torch.tensor([*NUMBERS, SPREAD], device=beyond.device)
    return numbers[torch.bucketize((beyond > limits).sum(1), numbers[:-1])].clamp_max(beyond.shape[1])


@dataclass(frozen=True, eq=False)
class Reference:
    """Covariances at M training inputs for unit prior precision, in the coordinates u of their first ranks."""

    prior: Tensor  # D J Jᵀ Dᵀ (M, h, h)
    cross: Tensor  # D J A (M, h, B)
    gram: Tensor  # AᵀA, with the noise of rounding (B, B)
    noise: Tensor  # R (B, B)
    margins: Tensor  # between the two largest outputs (M,)
    num_outputs: int  # C
    is_of_part: bool = False  # whether A are the actions of one of several posteriors that were merged

    @classmethod
    def of(cls, parts: Iterable[Rows], images: WeightColumns, gram: Tensor, noise: Tensor) -> Reference:
        """From the rows of `Reference.contrasts` at some inputs, and the posterior there."""
        found = []
        for rows in parts:
            unit = torch.ones(1, dtype=torch.float64, device=rows.outputs.device)
            cross, prior = rows.products(images, unit)
            top = rows.outputs.double().topk(2, 1).values
            found.append((prior, cross.to(images.dtype), top[:, 0] - top[:, 1]))
            num_outputs = rows.outputs.shape[1]
        prior, cross, margins = map(torch.cat, zip(*found, strict=True))
        return cls(prior, cross, gram, noise, margins, num_outputs)

    @staticmethod
    def num_rows(num_outputs: int) -> int:
        """h, the number of coordinates."""
        return min(num_outputs, HEAD + 1)

    @staticmethod
    def contrasts(outputs: Tensor) -> Tensor:  # (b, C) -> (b, C, h)
        """Those of the first ranks, and the largest output."""
        return leading_contrasts(outputs, Reference.num_rows(outputs.shape[1]) - 1, with_level=True)

    def combined(self, coefficients: Tensor) -> Reference:  # (B, R)
        """For combinations of the actions; what one of several posteriors had learnt stays as it was."""
        if self.is_of_part:
            return self
        cross = (self.cross.double() @ coefficients).to(self.cross.dtype)
        gram, noise = (coefficients.T @ matrix @ coefficients for matrix in (self.gram, self.noise))
        return replace(self, cross=cross, gram=gram, noise=noise)

    @property
    def softest(self) -> float:
        """The `softest_variance` at these inputs."""
        return softest_variance(self.margins)

    def to_dict(self) -> dict[str, Tensor | int]:
        """Plain tensors and numbers."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], device: torch.device) -> Reference:
        """Of which `to_dict` made `saved`, on a device."""
        moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in saved.items()}
        return cls(**moved)

    def shape(self, precision: Tensor, noise_scale: Tensor) -> Shape:
        """The mean of Σ/V₁₁ for a scalar precision δ and τ."""
        factor = Factor(self.gram / precision + noise_scale.double() * self.noise)
        half = factor.half_solve(self.cross.double().flatten(0, 1).T / precision).T.unflatten(0, self.cross.shape[:2])
        covariance = self.prior / precision - half @ half.mT  # (M, h, h)
        margin = covariance[:, 0, 0].clamp_min(1e-300)
        mean = (covariance / margin[:, None, None]).mean(0)
        return Shape(_all_ranks(mean, self.num_outputs), float(margin.mean()), self.softest)


def _all_ranks(head: Tensor, num_outputs: int) -> Tensor:  # (h, h) -> (C, C)
    """The shape of all ranks: those beyond the head have the mean covariances of its last, and with others."""
    m, C = len(head) - 1, num_outputs
    if m == C - 1:
        return head
    contrasts, level = head[:m, :m], head[:m, m]
    last = slice(m - ALIKE, m)
    block = contrasts[last, last]
    between = (block.sum() - block.trace()) / (ALIKE * (ALIKE - 1))
    full = head.new_zeros(C, C)
    full[:-1, :-1] = between
    full[:m, :m] = contrasts
    full[: m - ALIKE, m:-1] = contrasts[: m - ALIKE, last].mean(1, keepdim=True)
    full[m:-1, : m - ALIKE] = full[: m - ALIKE, m:-1].T
    full.diagonal()[m:-1] = block.diagonal().mean()
    full[:m, -1] = level
    full[m:-1, -1] = level[last].mean()
    full[-1, :-1] = full[:-1, -1]
    full[-1, -1] = head[m, m]
    return full


class Shape:
    """S̄ in the coordinates u, and what is filled in by it."""

    def __init__(self, matrix: Tensor, margin: float, softest: float = math.inf) -> None:
        self.matrix = matrix  # (C, C)
        self.margin = min(margin, softest)  # V₁₁ as expected, of which "auto" decides
        self.is_typical = margin <= softest  # else no input is left without a contrast
        self._given: dict[int, Given] = {}

    @classmethod
    def independent(cls, num_outputs: int, device: torch.device) -> Shape:
        """Of outputs that are independent and equally uncertain: where nothing was learnt."""
        eye = torch.eye(num_outputs, dtype=torch.float64, device=device)
        change = eye[:1] - eye.roll(-1, 0)  # u = (f₁ − f₂, …, f₁ − f_C, f₁)
        change[-1] = eye[0]
        return cls(change @ change.T / 2, 1.0)

    def given(self, number: int) -> Given:
        """The Gaussian of covariance S̄, given its first k coordinates; computed once."""
        if number not in self._given:
            k, C = number, len(self.matrix)
            eye = torch.eye(C, dtype=torch.float64, device=self.matrix.device)
            shape = self.matrix + JITTER * self.matrix.diagonal().max() * eye
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(shape[:k, :k]))
            gain = torch.cat([eye[:k, :k], shape[k:, :k] @ inverse])
            rest = shape - gain @ shape[:k]
            self._given[number] = Given(inverse, gain, 0.5 * (rest + rest.T))
        return self._given[number]

    def covariance(self, known: Tensor, order: Tensor) -> Tensor:  # (b, k, k), (b, C) -> (b, C, C)
        """Σ̂ of the outputs, in the order of the classes."""
        given, C = self.given(known.shape[1]), len(self.matrix)
        gain, rank = given.output_gain, order.argsort(1)
        by_rank = gain @ known @ gain.T + given.scale(known)[:, None, None] * given.output_rest
        by_rank = by_rank.gather(1, rank[:, :, None].expand(-1, -1, C))
        return by_rank.gather(2, rank[:, None].expand(-1, C, -1))

    def variances(self, known: Tensor, order: Tensor) -> Tensor:  # (b, k, k), (b, C) -> (b, C)
        """The diagonal of Σ̂, and no C×C matrix."""
        given = self.given(known.shape[1])
        by_rank = ((given.output_gain @ known) * given.output_gain).sum(2)
        by_rank = by_rank + given.scale(known)[:, None] * given.output_rest.diagonal()
        return by_rank.gather(1, order.argsort(1))

    def latent(
        self, mean: Tensor, known: Tensor, num_points: int
    ) -> Callable[[slice], Tensor]:  # (b, C), (b, k, k) -> (b, q, C)
        """Equally likely quasi-random values of the outputs by rank, given their means by rank; and no C×C matrix."""
        given, k, C = self.given(known.shape[1]), known.shape[1], mean.shape[1]
        points = normal_points(C - 1, num_points, mean.device)[0]  # (q, C−1)
        known_points = (points[:, :k].to(mean.dtype), given.gain[:-1].to(mean.dtype))
        rest = (points[:, k:] @ given.root.T).to(mean.dtype)  # (q, C−1)
        scale = given.scale(known).sqrt().to(mean.dtype)

        def values(part: slice) -> Tensor:
            root = known_points[1] @ covariance_root(known[part]).to(mean.dtype)  # (b, C−1, k)
            contrasts = known_points[0] @ root.mT + scale[part, None, None] * rest  # (b, q, C−1)
            top, others = mean[part, None, :1], mean[part, None, 1:]
            return torch.cat([top.expand(-1, len(points), -1), others - contrasts], 2)

        return values


@dataclass(frozen=True, eq=False)
class Given:
    """What a shape says about the coordinates u, given the first k."""

    inverse: Tensor  # S̄₁₁⁻¹ (k, k)
    gain: Tensor  # G (C, k)
    rest: Tensor  # S̄ − G S̄₁· (C, C): what they leave

    @cached_property
    def output_gain(self) -> Tensor:  # (C, k)
        """G for the outputs."""
        return _outputs_of(self.gain)

    @cached_property
    def output_rest(self) -> Tensor:  # (C, C)
        """What they leave of the outputs."""
        return _outputs_of(_outputs_of(self.rest).T)

    @cached_property
    def root(self) -> Tensor:  # (C−1, C−1−k)
        """A root of what they leave of the contrasts."""
        k = len(self.inverse)
        inner = covariance_root(self.rest[k:-1, k:-1])
        return torch.cat([inner.new_zeros(k, inner.shape[1]), inner])

    def scale(self, known: Tensor) -> Tensor:  # (b, k, k) -> (b,)
        """a = tr(S̄₁₁⁻¹V) / k."""
        return (self.inverse * known).sum((1, 2)).clamp_min(1e-300) / known.shape[1]


def _outputs_of(coordinates: Tensor) -> Tensor:  # (C, …)
    """The outputs f by rank, from u = (f₁ − f₂, …, f₁ − f_C, f₁)."""
    level = coordinates[-1:]
    return torch.cat([level, level - coordinates[:-1]])

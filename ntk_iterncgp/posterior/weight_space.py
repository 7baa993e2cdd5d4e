"""The posterior of a linearised network's weights, from A = JᵀS and small matrices: no training data, any prior.

    Σ_θ = Λ⁻¹ − Λ⁻¹A M⁻¹AᵀΛ⁻¹,    M = AᵀΛ⁻¹A + τ R,    R = SᵀW⁺S

A and R do not depend on the prior precision Λ, nor on the noise or temperature, which only scale R (τ = σ²·T). So all
hyperparameters may change after the fit and take effect at once: G(Λ) = AᵀΛ⁻¹A is a sum of one small matrix per
parameter tensor, over its precision.

Rounding. The computed Ã = A + E has ‖E_b‖ ≤ ε‖A_b‖ for each action b, and for any noise D > 0

    Ã(R + D)⁻¹Ãᵀ ≤ A R⁻¹Aᵀ + E D⁻¹Eᵀ,

so the noise D = ρ diag(G) with ρ = ε²/x keeps the information of rounding below x of the prior's: the variance stays
above the exact one divided by 1 + x, and it costs an action of signal-to-noise γ = G_bb/R_bb at most a fraction ργ,
whatever the others are. Combinations A c of actions have the errors E c, and so the noise cᵀDc, however small A c is.
The same number covers the rows J(x) of a prediction: ρ k(x, x) is added to the variance. M, G and the downdate are
computed in float64 from the very Ã that predictions use.

A stored in bfloat16 takes half of the memory. Its rounding E is measured, all of EᵀE, when A is stored, and D has
EᵀΛ⁻¹E/x more: then E D⁻¹Eᵀ ≤ xΛ whatever the errors are, also where those of different actions are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.jacobian.blocks import WeightColumns
from ntk_iterncgp.jacobian.rows import Rows
from ntk_iterncgp.linalg.factor import SLICE_ROWS, Factor, inner_products, rows_at_once
from ntk_iterncgp.posterior.contrasts import Reference, Shape
from ntk_iterncgp.runtime.threads import full_precision

EPS = torch.finfo(torch.float64).eps
DERIVATIVE_ROUNDINGS = 8  # ε of a derivative, in units of the rounding of one number
PRODUCT_ROUNDINGS = 8  # of a downdate whose products are taken in float32, as a fraction of k(x, x)
TOLERANCE = 1e-3  # x: by how much rounding may lower a variance
STRONG_SIGNAL = 1e4  # the signal-to-noise of an action from which on products with float32 rows are taken in float64


@dataclass(frozen=True, eq=False)
class WeightPosterior:
    """What remains of a fit: the actions' images A in weight space, and small matrices."""

    images: Tensor  # A (P, B)
    noise_gram: Tensor  # R (B, B), for τ = 1
    right_hand_side: Tensor  # M w (B,), which is Sᵀb at the mode: zero where the mean is the network itself
    anchor_share: float  # how much of θ* − μ₀ is left in the mean: zero once Newton has taken a full step
    prior_mean: Tensor  # μ₀ of the fit, (1,) or (P,)
    curvature_diagonal: Tensor  # the diagonal of the GGN JᵀWJ (P,), for τ = 1
    curvature_rank: int  # of W
    layer_sizes: tuple[int, ...]  # the number of weights in each parameter tensor
    trace_is_exact: bool  # whether `curvature_diagonal` is exact, and not an estimate
    num_actions: int | None = None  # of which it was made, where more than its rank were folded together
    rounding_gram: Tensor | None = None  # D/ρ for unit precision (B, B); None: the diagonal of AᵀA
    storage_gram: Tensor | None = None  # EᵀE (B, B) of what was lost when A was stored in fewer digits; None: nothing
    reference: Reference | None = None  # from which the shape of the covariance of many outputs follows

    @property
    def rank(self) -> int:
        """B, the number of actions."""
        return self.images.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of derivatives; that of products with A, which may be stored in half of it."""
        return torch.promote_types(self.images.dtype, torch.float32)

    def to_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers, all but the layer sizes, which follow from the model."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layer_sizes"}
        if self.reference is not None:
            found["reference"] = self.reference.to_dict()
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], layer_sizes: tuple[int, ...], device: torch.device) -> WeightPosterior:
        """The posterior of which `to_dict` made `saved`, on a device."""
        moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in saved.items()}
        if "reference" in moved:
            moved["reference"] = Reference.from_dict(moved["reference"], device)
        moved["images"] = moved["images"].T.contiguous().T  # action by action, as fits have it: products are faster
        return cls(**moved, layer_sizes=layer_sizes)

    # --- small matrices for a prior -------------------------------------------------------------------------------

    @cached_property
    def unit_gram(self) -> Tensor:  # (B, B)
        """AᵀA."""
        return inner_products(self.images, self.images)

    @cached_property
    def layer_grams(self) -> Tensor:  # (L, B, B)
        """A_lᵀA_l for each parameter tensor."""
        return torch.stack([inner_products(part, part) for part in self.images.split(self.layer_sizes)])

    def with_gram(self, unit_gram: Tensor) -> WeightPosterior:  # (B, B)
        """The same posterior, where AᵀA has been computed already."""
        known = replace(self)
        known.__dict__["unit_gram"] = unit_gram
        return known

    def gram(self, prior_precision: Tensor) -> Tensor:  # (1,), (L,) or (P,) -> (B, B)
        """AᵀΛ⁻¹A, differentiable in Λ."""
        precision = prior_precision.double()
        if len(precision) == 1:
            return self.unit_gram / precision
        if len(precision) == len(self.layer_sizes):
            return torch.einsum("l,lbc->bc", 1 / precision, self.layer_grams)
        parts = zip(self.images.split(SLICE_ROWS), precision.split(SLICE_ROWS), strict=True)
        return sum(
            (((part.double() / p[:, None]).T @ part.double()) for part, p in parts),
            start=torch.zeros_like(self.noise_gram),
        )

    def noise(self, gram: Tensor, noise_scale: Tensor) -> Tensor:  # AᵀΛ⁻¹A (B, B) -> (B, B)
        """τR + D: the noise of the data, and of rounding."""
        return noise_scale.double() * self.noise_gram + self.rounding(gram)

    def rounding(self, gram: Tensor) -> Tensor:  # AᵀΛ⁻¹A (B, B) -> (B, B)
        """D, the noise of rounding. Another prior stretches errors as it stretches the images."""
        stretch = gram.detach().trace() / self.unit_gram.trace().clamp_min(1e-300)
        noise = relative_rounding(self.dtype) * stretch * self.unit_rounding()
        if self.storage_gram is None:
            return noise
        each = gram.detach().diagonal() / self.unit_gram.diagonal().clamp_min(1e-300)
        return noise + each.max() / TOLERANCE * self.storage_gram  # of many digits lost: as the action stretched most

    def unit_rounding(self) -> Tensor:  # (B, B)
        """The squared errors of the images, over those of one number."""
        return self.unit_gram.diagonal().diag() if self.rounding_gram is None else self.rounding_gram

    def factor(self, prior_precision: Tensor, noise_scale: Tensor) -> Factor:
        """M = AᵀΛ⁻¹A + τR + D, factored."""
        gram = self.gram(prior_precision)
        return Factor(gram + self.noise(gram, noise_scale))

    def right_hand_side_for(self, prior_mean: Tensor) -> Tensor:  # (B,)
        """Sᵀb for another prior mean: b = f − m + W⁺∇ changes by J(μ₀ − μ₀′) at the same f."""
        change = (self.prior_mean - prior_mean).double().reshape(-1)
        if not bool(change.any()):
            return self.right_hand_side
        weights = change.expand(len(self.images))[:, None]
        return self.right_hand_side + inner_products(self.images, weights)[:, 0]

    def precision_of_weights(self, prior_precision: Tensor) -> Tensor:  # (P,)
        """One precision for each weight, in float64."""
        return precision_of_weights(prior_precision, self.layer_sizes)

    def shape(self, prior_precision: Tensor, noise_scale: Tensor) -> Shape | None:
        """The shape of the covariance of the outputs for these hyperparameters; None where nothing was learnt.

        A precision for each layer or weight counts as the one that scales tr(AᵀΛ⁻¹A) as much.
        """
        if self.reference is None:
            return None
        precision = prior_precision.detach().double()
        if len(precision) > 1:
            precision = self.unit_gram.trace() / self.gram(precision).trace().clamp_min(1e-300)
        return self.reference.shape(precision.reshape(()), noise_scale.detach())

    # --- predictions ----------------------------------------------------------------------------------------------

    def conditioned(self, prior_precision: Tensor, noise_scale: Tensor) -> ConditionedPosterior:
        """The posterior for one choice of hyperparameters, ready for predictions."""
        precision = prior_precision.detach()
        one = len(precision) == 1
        variance = 1 / (precision.double() if one else self.precision_of_weights(precision))
        gram = self.gram(precision)
        noise = self.noise(gram, noise_scale.detach())
        gains = gram.diagonal() / noise.diagonal()
        is_strong = bool((gains > STRONG_SIGNAL).any())
        shape = partial(self.shape, precision, noise_scale.detach())
        return ConditionedPosterior(self, variance, Factor(gram + noise), noise, shape, is_strong=is_strong)

    # --- evidence -------------------------------------------------------------------------------------------------

    def log_determinant_bounds(self, prior_precision: Tensor, noise_scale: Tensor) -> tuple[Tensor, Tensor]:
        """lo ≤ log|I + W^{½}KW^{½}| ≤ hi, differentiable in both arguments.

        lo = log|I + (R + D)⁻¹G|, with the noise D of rounding. What the actions leave is in the free directions of the
        data, and of as many weights: hi = log|I + R⁻¹G| + free · log(1 + missing / free).
        """
        precision = self.precision_of_weights(prior_precision)
        missing = (self.curvature_diagonal / precision).sum() / noise_scale
        lower = own = torch.zeros((), dtype=torch.float64, device=self.images.device)
        if self.rank:
            gram = self.gram(prior_precision)
            noise = self.noise(gram, noise_scale)
            lower, captured = _information(gram, noise)
            own = torch.maximum(lower, _information(gram, noise_scale.double() * self.noise_gram)[0])
            unsure = self.rank * EPS * (4 * self._noise_condition + 16 * float(captured.detach()))
            lower, own = (lower - unsure).clamp_min(0), own + unsure
            missing = (missing - captured).clamp_min(0)
        spanned = self.rank if self.num_actions is None else self.num_actions
        free = min(self.curvature_rank - spanned, len(self.images))
        return lower, own + free * torch.log1p(missing / free) if free > 0 else own

    @cached_property
    def _noise_condition(self) -> float:
        """The condition number of R, scaled to a unit diagonal: large where actions are nearly dependent."""
        sides = self.noise_gram.diagonal().rsqrt()
        values = torch.linalg.eigvalsh(self.noise_gram * sides[:, None] * sides)
        return float(values[-1] / values[0].clamp_min(EPS))

    def information_captured(self, prior_precision: Tensor, noise_scale: Tensor) -> float:
        """A lower bound on the fraction of the information in the data that the actions have used, lo / hi."""
        lower, upper = self.log_determinant_bounds(prior_precision.detach(), noise_scale.detach())
        return float(lower / upper) if float(upper) > 0 else 1.0

    # --- less memory ----------------------------------------------------------------------------------------------

    def leading(self, number: int) -> WeightPosterior:
        """The posterior of the first actions alone."""
        return replace(
            self,
            images=self.images[:, :number],
            noise_gram=self.noise_gram[:number, :number],
            right_hand_side=self.right_hand_side[:number],
            rounding_gram=None if self.rounding_gram is None else self.rounding_gram[:number, :number],
            storage_gram=None if self.storage_gram is None else self.storage_gram[:number, :number],
            num_actions=None,
            reference=self._reference_of(torch.eye(self.rank, number)),
        )

    def _reference_of(self, coefficients: Tensor) -> Reference | None:  # (B, R)
        return None if self.reference is None else self.reference.combined(coefficients.to(self.noise_gram))

    def combined(self, coefficients: Tensor) -> WeightPosterior:  # (B, R)
        """The posterior of combinations of the actions."""

        def both_sides(matrix: Tensor) -> Tensor:
            product = coefficients.T @ matrix @ coefficients
            return 0.5 * (product + product.T)

        parts = self.images.split(SLICE_ROWS)
        found = replace(
            self,
            images=torch.cat([(coefficients.T @ part.T.double()).to(self.dtype) for part in parts], 1).T,
            noise_gram=both_sides(self.noise_gram),
            right_hand_side=coefficients.T @ self.right_hand_side,
            rounding_gram=both_sides(self.unit_rounding()),
            storage_gram=None if self.storage_gram is None else both_sides(self.storage_gram),
            num_actions=None,
            reference=self._reference_of(coefficients),
        )
        return found.stored_as(self.images.dtype)

    def stored_as(self, dtype: torch.dtype) -> WeightPosterior:
        """The same with A stored in another dtype, and what that loses in the noise of rounding.

        What was lost before, ‖E₁c‖², and what is lost now add up to no more than twice their sum.
        """
        if self.images.dtype == dtype:
            return self
        images = torch.empty_like(self.images.T, dtype=dtype).T  # contiguous as A is
        lost = torch.zeros_like(self.noise_gram)
        step = rows_at_once(self.rank)
        for place, part in zip(images.split(step), self.images.split(step), strict=True):
            place.copy_(part)
            error = part.double() - place.double()
            lost += error.T @ error
        before = self.storage_gram
        return replace(self, images=images, storage_gram=lost if before is None else 2 * (before + lost))

    @torch.no_grad()
    def compress(self, max_rank: int, prior_precision: Tensor, noise_scale: Tensor) -> WeightPosterior:
        """Retain `max_rank` combinations that preserve the mean and contract the variance most, at a given prior."""
        if max_rank >= self.rank:
            return self
        root = self.factor(prior_precision, noise_scale).root()
        contraction = root.T @ self.gram(prior_precision) @ root
        mean = root.T @ self.right_hand_side[:, None]
        u = mean / mean.norm().clamp_min(1e-300)
        along = contraction @ u
        deflated = contraction - u @ along.T - along @ u.T + (u.T @ along) * (u @ u.T)  # beside u
        keep = max_rank - int(float(mean.norm()) > 0)
        top = torch.linalg.eigh(deflated).eigenvectors[:, self.rank - keep :]
        combined = top if keep == max_rank else torch.cat([u, top], 1)
        return self.combined(torch.linalg.qr(root @ combined).Q)


def relative_rounding(dtype: torch.dtype) -> float:
    """ρ = ε²/x for derivatives in this dtype, and the rounding of sums in float64."""
    error = DERIVATIVE_ROUNDINGS * torch.finfo(dtype).eps / 2
    return error**2 / TOLERANCE + 16 * EPS


def downdate_rounding(rows: torch.dtype, products: torch.dtype) -> float:
    """What rounding may remove from a variance, over k(x, x), for rows J(x) and products in these dtypes."""
    of_products = 0.0 if products == torch.float64 else PRODUCT_ROUNDINGS * torch.finfo(products).eps
    return relative_rounding(rows) + of_products


def _information(gram: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:  # (B, B), (B, B)
    """log|I + R⁻¹G| and tr(R⁻¹G), differentiable in both.

    Whitened first, so that little information is not a difference of large numbers.
    """
    factor = Factor(noise)
    whitened = factor.half_solve(factor.half_solve(gram).T)
    one = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    lower = torch.linalg.cholesky(one + 0.5 * (whitened + whitened.T))
    return 2 * lower.diagonal().log().sum(), whitened.trace()


def precision_of_weights(prior_precision: Tensor, layer_sizes: tuple[int, ...]) -> Tensor:  # (1,), (L,), (P,) -> (P,)
    """One precision for each weight, in float64."""
    precision = prior_precision.double()
    if len(precision) == len(layer_sizes) != 1:
        return torch.repeat_interleave(precision, torch.tensor(layer_sizes, device=precision.device))
    return precision.expand(sum(layer_sizes))


@dataclass(frozen=True, eq=False)
class PosteriorPrecision:
    """Σ_θ⁻¹ = Λ + A (τR + D)⁻¹ Aᵀ, which is never formed: products in float64, at the cost of two with A."""

    prior: Tensor  # the diagonal of Λ (P,)
    images: Tensor  # A (P, B)
    noise: Factor  # of τR + D
    log_ratio: Tensor  # log|Σ_θ⁻¹| − log|Λ|

    @property
    def shape(self) -> tuple[int, int]:
        """(P, P)."""
        return len(self.prior), len(self.prior)

    def __repr__(self) -> str:
        return f"PosteriorPrecision({len(self.prior)} weights, {self.images.shape[1]} actions)"

    def __matmul__(self, weights: Tensor) -> Tensor:  # (P,) or (P, k)
        columns = (weights if weights.ndim == 2 else weights[:, None]).double()
        dtype = torch.promote_types(self.images.dtype, torch.float32)  # A may be stored in half precision
        seen = (self.images.T.to(dtype) @ columns.to(dtype)).double()  # (B, k)
        of_data = (self.images.to(dtype) @ self.noise.solve(seen).to(dtype)).double()
        product = self.prior[:, None] * columns + of_data
        return product if weights.ndim == 2 else product[:, 0]

    def diagonal(self) -> Tensor:  # (P,)
        """Λ_ii and what the data add."""
        half = self.noise.half_solve(self.images.T.double())  # (B, P)
        return self.prior + half.square().sum(0)

    def logdet(self) -> Tensor:
        """The log-determinant."""
        return self.prior.log().sum() + self.log_ratio

    def to_dense(self) -> Tensor:  # (P, P)
        """Write it out, for few weights."""
        return self @ torch.eye(len(self.prior), dtype=torch.float64, device=self.prior.device)


class ConditionedPosterior:
    """N(μ, Σ_θ) for one prior precision and noise: what predictions and samples are made from.

    Products with rows J(x) are taken in the dtype of the images. Where an action `is_strong`, a variance that is nearly
    all removed would be lost in the rounding of what is removed: then they are taken in float64, and where derivatives
    are in float64 too, nothing is removed at all. With the orthogonal parts J̃ = z Qᵀ + J̃_⊥ of J̃ = JΛ^{-½} in and
    beside the span of Λ^{-½}A = QT the covariance is a sum, J̃_⊥J̃_⊥ᵀ + z (I + T R⁻¹Tᵀ)⁻¹zᵀ.
    """

    def __init__(
        self,
        posterior: WeightPosterior,
        variance: Tensor,
        factor: Factor,
        noise: Tensor,
        shape: Callable[[], Shape | None],
        *,
        is_strong: bool,
    ) -> None:
        self.posterior, self.variance, self.factor, self.noise = posterior, variance, factor, noise
        self._make_shape = shape
        dtype = torch.float64 if is_strong else posterior.dtype
        # Λ⁻¹A, of which there is no second copy: one precision for all weights scales what is made of A
        self.columns = WeightColumns(posterior.images, dtype, None if variance.numel() == 1 else variance)
        self.scale = variance if variance.numel() == 1 else torch.ones_like(variance[:1])
        self.rounding = downdate_rounding(posterior.dtype, dtype)
        self.is_sum = is_strong and posterior.images.dtype == torch.float64 and posterior.rank > 0

    @cached_property
    def shape(self) -> Shape | None:
        """The shape of the covariance of the outputs, for predictions from few contrasts."""
        return self._make_shape()

    def precision(self) -> PosteriorPrecision:
        """Σ_θ⁻¹ as a linear operator."""
        log_ratio = _information(self.posterior.gram(1 / self.variance), self.noise)[0]
        precision = 1 / self.variance.expand(len(self.posterior.images))
        return PosteriorPrecision(precision, self.posterior.images, Factor(self.noise), log_ratio)

    def mean_shift(self, prior_mean: Tensor) -> Tensor:  # (P,)
        """Λ⁻¹A M⁻¹Sᵀb: what the data add to the prior mean of the weights."""
        coefficients = self.factor.solve(self.posterior.right_hand_side_for(prior_mean)[:, None])
        return self._combine(coefficients)[:, 0]

    def _combine(self, coefficients: Tensor) -> Tensor:  # (B, k) -> (P, k)
        """Λ⁻¹A a, in float64 but for the products."""
        with full_precision(coefficients.device):
            columns, a = self.columns, coefficients.to(self.columns.dtype)
            return self.scale * torch.cat([(rows @ a).double() for _, rows in columns.slices()])

    def covariance(self, rows: Rows, *, joint: bool = False) -> Tensor:  # (b, C, C), or (b·C, b·C)
        """J(x) Σ_θ J(x)ᵀ, in float64, and ρ k(x, x) for rounding."""
        if self.is_sum:
            return self._sum(rows, joint)
        with full_precision(self.variance.device):
            cross, prior = rows.products(self.columns, self.variance, joint=joint)  # (b, C, B), as the result
        half = self.factor.half_solve(self.scale * cross.flatten(0, 1).T).T  # (b·C, B)
        if not joint:
            half = half.unflatten(0, cross.shape[:2])
        unsure = torch.diag_embed(self.rounding * prior.diagonal(dim1=-2, dim2=-1))
        return prior + unsure - half @ half.mT

    def _sum(self, rows: Rows, joint: bool) -> Tensor:
        Q, inside = self._span
        scaled = rows.written_out().double() * self.variance.sqrt()  # J̃ (b, C, P)
        scaled = scaled.flatten(0, 1) if joint else scaled
        z = scaled @ Q
        beside = scaled - z @ Q.mT
        half: Tensor = inside.half_solve(z.flatten(0, -2).T).T.unflatten(0, z.shape[:-1])
        return beside @ beside.mT + half @ half.mT

    @cached_property
    def _span(self) -> tuple[Tensor, Factor]:
        """Q (P, B), and I + T R⁻¹Tᵀ factored."""
        Q, T = torch.linalg.qr(self.variance.sqrt()[:, None] * self.posterior.images)
        whitened = Factor(self.noise).half_solve(T.T)  # (B, B)
        return Q, Factor(torch.eye(len(T), dtype=T.dtype, device=T.device) + whitened.T @ whitened)

    def contributions(self, rows: Rows, groups: Tensor, combinations: Tensor) -> Tensor:  # (P, g), (g, B) -> (b, g)
        """How much each group of data reduces the variance at each input, summed over outputs.

        With the cross-covariances z of the groups, and z Q of the actions, it is z_g (Q M⁻¹Qᵀz)_g.

        Args:
            rows: the rows of J at the inputs.
            groups: the images of the groups.
            combinations: Q, of the groups, that are the actions.
        """
        scale = self.variance.expand(len(groups))
        cross = rows.times(WeightColumns(groups, groups.dtype, scale))  # (b, C, g)
        solved = self.factor.solve((cross @ combinations).flatten(0, 1).T).T
        per_input: Tensor = (solved @ combinations.T).unflatten(0, cross.shape[:2])
        return (cross * per_input).sum(1)

    def sample(self, num_samples: int, generator: torch.Generator | None) -> Tensor:  # (num_samples, P)
        """Draw θ − μ: a draw ε from the prior, corrected by what the data say about it (Matheron's rule)."""
        images, device = self.posterior.images, self.variance.device
        shape = (len(images), num_samples)
        epsilon = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
        epsilon = epsilon * self.variance.sqrt().reshape(-1, 1)
        noise_root = torch.linalg.cholesky(self.noise)
        shape = (self.posterior.rank, num_samples)
        eta = noise_root @ torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
        observed = inner_products(images, epsilon) + eta
        return (epsilon - self._combine(self.factor.solve(observed))).T

"""What is to be inferred: a prior, a likelihood and targets, with the likelihood's questions asked in flat n-vectors.

Vectors over the data are float64 throughout: there are only a handful of them, and saturated points need the range.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ntk_iterncgp.likelihoods.base import ANY_VARIANCE, CurvatureAt, Likelihood
from ntk_iterncgp.linalg.columns import Columns, Weight
from ntk_iterncgp.priors.base import Prior


@dataclass(frozen=True, eq=False)
class Anchor:
    """A point from which Newton may start although no actions lead there: the trained network itself.

    In weight space it is δ = θ* − μ₀; here it is given by its latent values J δ and its prior penalty δᵀΛδ.
    """

    offset: Tensor  # (n,)
    penalty: float


@dataclass(frozen=True, eq=False)
class Problem:
    """f ~ GP(m, K), y ~ p(y | f).

    `whitened` is for a W that never changes, at a network's own outputs: actions are then orthonormal in the metric of
    their noise, SᵀW⁺S = I. However small a probability π is, its 1/π drowns nothing, so none is raised to a floor, and
    SᵀW⁺S is right for any prior.
    """

    prior: Prior
    likelihood: Likelihood
    targets: Tensor
    anchor: Anchor | None = None
    whitened: bool = False

    def __post_init__(self) -> None:
        variance = ANY_VARIANCE if self.whitened else self.prior.variance_scale()
        bound = self.likelihood.given(self.targets).for_prior_variance(variance)
        object.__setattr__(self, "likelihood", bound)

    @property
    def num_rows(self) -> int:
        """n = N·C."""
        return self.prior.num_data * self.prior.num_outputs

    @property
    def curvature_rank(self) -> int:
        """The rank of W: how many independent actions there are at most."""
        return self.prior.num_data * self.likelihood.curvature_rank

    def latent(self, offset: Tensor) -> Tensor:  # (n,) -> (N, C)
        """f = m + g."""
        return self.prior.mean + offset.reshape(-1, self.prior.num_outputs)

    def log_prob(self, latent: Tensor) -> float:
        """log p(y | f)."""
        return float(self.likelihood.log_prob(latent, self.targets).sum())

    def score(self, latent: Tensor) -> Tensor:  # (N, C) -> (n,)
        """∇ = ∂ log p(y | f) / ∂f."""
        return self.likelihood.score(latent, self.targets).flatten()

    def curvature(self, latent: Tensor, vector: Tensor) -> Tensor:  # (N, C), (n,) or (n, k)
        """W V."""
        return self.likelihood.curvature(latent, self._blocks(vector)).reshape(vector.shape)

    def noise(self, latent: Tensor, vector: Tensor) -> Tensor:  # (N, C), (n,) or (n, k)
        """W⁺V."""
        return self.likelihood.noise(latent, self._blocks(vector)).reshape(vector.shape)

    def project(self, vector: Tensor) -> Tensor:  # (n,) or (n, k)
        """Π V, with the projection onto the range of W."""
        return self.likelihood.project(self._blocks(vector)).reshape(vector.shape)

    def orthonormalise(self, block: Tensor, actions: Columns, noise: Tensor | None) -> Columns:  # (n, k), (N, C)
        """What a block adds to the actions: in the range of W, orthonormal, new.

        If the problem is whitened and the diagonal of W⁺ is given, orthonormal in its metric.
        """
        if not self.whitened or noise is None:
            return actions.orthonormalise(block, self.project)
        mine = noise[self.prior.shard.mine]

        def project(block: Tensor) -> Tensor:  # rows of this process
            return self.likelihood.project_in_noise(self._blocks(block), mine).reshape(block.shape)

        return actions.orthonormalise(block, project, mine.reshape(-1, 1))

    def noise_inner(self, latent: Tensor, diagonal: Tensor | None, left: Columns, right: Columns) -> Tensor:  # (B, B')
        """SᵀW⁺S', by the diagonal of W⁺ where the likelihood gives one."""
        if diagonal is not None:
            return left.diagonal_inner(diagonal, right)
        return left.weighted_inner(lambda data, block: self.likelihood.on(data).noise(latent[data], block), right)

    def curvature_inner(self, latent: Tensor, images: Columns) -> Tensor:  # (B, B)
        """TᵀWT."""
        return images.weighted_inner(self.curvature_product(latent), images)

    def curvature_trace(self, latent: Tensor) -> float:
        """tr(W K)."""
        return self.prior.curvature_trace(self.curvature_product(latent))

    def curvature_product(self, latent: Tensor) -> Weight:
        """The product with W, on some data."""
        return CurvatureAt(self.likelihood, latent)

    def _blocks(self, vector: Tensor) -> Tensor:  # (N, C, k)
        """Of all data, or of those of this process."""
        num_outputs, num_columns = self.prior.num_outputs, 1 if vector.ndim == 1 else vector.shape[1]
        return vector.reshape(len(vector) // num_outputs, num_outputs, num_columns)

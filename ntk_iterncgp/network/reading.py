"""The posterior of what has been swept so far, and the meter that says how much it knows."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch

from ntk_iterncgp.network.clusters import Clusters
from ntk_iterncgp.network.linearised import LinearisedNetwork
from ntk_iterncgp.network.progress import Progress
from ntk_iterncgp.solver.report import Record
from ntk_iterncgp.weight_posterior import WeightPosterior


class Meter:
    """Reads the information captured so far, and keeps the history."""

    def __init__(self, progress: Progress, network: LinearisedNetwork, started: float) -> None:
        self.progress, self.network, self.started = progress, network, started

    def read(self) -> str:
        progress, last = self.progress, self.progress.clusters.passes[-1]
        posterior = weight_posterior(progress, self.network)
        if last.num_kept is not None and not last.is_complete:  # not more than combinations of all will say
            posterior = posterior.leading(last.num_kept)
        try:
            information = posterior.information_captured(self.network.prior_precision, self.network.noise_scale)
        except (
            torch.linalg.LinAlgError,
            ArithmeticError,
        ):  # of images that are no numbers; the self-check mends or refuses them
            information = math.nan
        progress.history.append(
            Record(
                num_products=0,
                newton_step=0,
                rank=posterior.rank,
                objective=math.nan,
                relative_residual=math.nan,
                information_captured=information,
                seconds=progress.seconds + time.perf_counter() - self.started,
                epochs=progress.epochs,
            )
        )
        return f"information {'≥' if progress.trace_is_exact else '≈'} {100 * information:.1f} %"


def weight_posterior(progress: Progress, network: LinearisedNetwork) -> WeightPosterior:
    clusters = progress.clusters
    images, noise_gram = clusters.actions()
    posterior = WeightPosterior(
        images=images,
        noise_gram=noise_gram,
        right_hand_side=torch.zeros(len(noise_gram), dtype=torch.float64, device=images.device),
        anchor_share=0.0,
        prior_mean=network.prior_mean.detach().reshape(-1).clone(),
        curvature_diagonal=progress.curvature_diagonal,
        curvature_rank=clusters.max_rank,
        layer_sizes=network.layer_sizes,
        trace_is_exact=progress.trace_is_exact,
        rounding_gram=clusters.rounding_gram(),
    )
    if posterior.rank > len(images):
        return folded(posterior)
    if len(clusters.passes) == 1 and not clusters.passes[0].is_complete:
        return posterior  # most images may still be zero: not worth the products of all
    return posterior.knowing(clusters.image_gram())


def folded(posterior: WeightPosterior) -> WeightPosterior:
    """More actions than weights as just so many: for every prior the posterior knows A R⁻¹Aᵀ alone, a P×P matrix.

    With R = LLᵀ and the QR decomposition L⁻¹Aᵀ = QT it is TᵀT, which is that of the combinations L⁻ᵀQ of the actions.
    """
    lower = torch.linalg.cholesky(posterior.noise_gram)
    whitened = torch.linalg.solve_triangular(lower, posterior.images.T.double(), upper=False)  # (B, P)
    Q = torch.linalg.qr(whitened).Q
    combinations = torch.linalg.solve_triangular(lower.T, Q, upper=True)
    return replace(posterior.combined(combinations), num_actions=posterior.rank)


def unfolded(posterior: WeightPosterior, clusters: Clusters) -> WeightPosterior:
    """The same with the actions of which it was made."""
    images, noise_gram = clusters.actions()
    right_hand_side = noise_gram.new_zeros(len(noise_gram))
    return replace(
        posterior,
        images=images,
        noise_gram=noise_gram,
        right_hand_side=right_hand_side,
        rounding_gram=clusters.rounding_gram(),
        num_actions=None,
    )

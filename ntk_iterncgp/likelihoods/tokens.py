"""Classification at each of T places of a datum, as of the tokens of a text: T independent softmax likelihoods.

The outputs of a datum are those of its places, one after the other, with the class index fastest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.likelihoods.base import Likelihood, require
from ntk_iterncgp.likelihoods.softmax import Softmax

IGNORED = -100  # the label of a place that says nothing, as in `torch.nn.functional.cross_entropy`


class TokenSoftmax(Likelihood):
    """`num_classes` logits at each of `num_tokens` places. Targets (N, T), -100 where there is none.

    A place without a target must have constant logits that are sure of one class, so that it has no curvature.
    """

    has_monotone_response = False

    def __init__(self, num_classes: int, num_tokens: int) -> None:
        self.softmax, self.num_tokens = Softmax(num_classes), int(num_tokens)
        self.num_outputs = self.softmax.num_outputs * self.num_tokens

    def __repr__(self) -> str:
        return f"TokenSoftmax({self.softmax.num_outputs}, {self.num_tokens})"

    def settings(self) -> dict[str, Any]:
        return {"num_classes": self.softmax.num_outputs, "num_tokens": self.num_tokens}

    @property
    def curvature_rank(self) -> int:
        return self.num_tokens * self.softmax.curvature_rank

    def for_prior_variance(self, variance: float) -> TokenSoftmax:
        adjusted = super().for_prior_variance(variance)
        adjusted.softmax = self.softmax.for_prior_variance(variance)
        return adjusted

    def check_targets(self, targets: Tensor) -> Tensor:
        if targets.ndim != 2 or targets.shape[1] != self.num_tokens:
            raise ValueError(
                f"`y` must have the shape (N, {self.num_tokens}), one label for each place, {IGNORED} for none; got "
                f"{tuple(targets.shape)}. Try labels padded to the length of the inputs."
            )
        C = self.softmax.num_outputs
        message = f"`y` must be whole numbers from 0 to {C - 1}, or {IGNORED}, for {self!r}"
        inside = (targets >= 0) & (targets < C)
        require((targets == targets.long()) & (inside | (targets == IGNORED)), targets, message)
        return targets.long()

    def check_ignored(self, latent: Tensor, targets: Tensor) -> None:
        """Raise ValueError where a place without a target has logits that a weight may change."""
        ignored = self._each(latent)[targets.flatten() == IGNORED]
        if not bool((ignored == ignored[:1]).all()):
            raise ValueError(
                f"Labels of {IGNORED} must be an item of a batch that is a mapping, so that outputs there count for "
                "nothing; got batches (x, y). Try {'input': x, 'labels': y} and dict_key_x='input'."
            )

    def log_prob(self, latent: Tensor, targets: Tensor) -> Tensor:
        each = self.softmax.log_prob(self._each(latent), targets.flatten().clamp_min(0)).view_as(targets)
        total: Tensor = (each * (targets != IGNORED)).sum(1)
        return total

    def score(self, latent: Tensor, targets: Tensor) -> Tensor:
        each = self.softmax.score(self._each(latent), targets.flatten().clamp_min(0))
        counts = (targets != IGNORED).flatten()[:, None]
        return (each * counts).view_as(latent)

    def curvature(self, latent: Tensor, block: Tensor) -> Tensor:
        return self.softmax.curvature(self._each(latent), self._each(block)).view_as(block)

    def noise(self, latent: Tensor, block: Tensor) -> Tensor:
        return self.softmax.noise(self._each(latent), self._each(block)).view_as(block)

    def noise_diagonal(self, latent: Tensor) -> Tensor:
        return self.softmax.noise_diagonal(self._each(latent)).view_as(latent)

    def project(self, block: Tensor) -> Tensor:
        return self.softmax.project(self._each(block)).view_as(block)

    def project_in_noise(self, block: Tensor, noise: Tensor) -> Tensor:
        return self.softmax.project_in_noise(self._each(block), self._each(noise)).view_as(block)

    def contrasts(self, device: torch.device) -> Tensor:
        blocks: Tensor = torch.block_diag(*[self.softmax.contrasts(device)] * self.num_tokens)
        return blocks

    def cotangent(self, latent: Tensor, index: int) -> Tensor:
        """One contrast of the softmax at one place: the first at the most uncertain place, then at the next, …."""
        contrast, rank = divmod(index, self.num_tokens)
        each = latent.unflatten(1, (self.num_tokens, -1))  # (N, T, C)
        traces = self.softmax.curvature_traces(each.flatten(0, 1)).view(each.shape[:2])
        place = traces.argsort(dim=1, descending=True, stable=True)[:, rank]  # (N,)
        rows = torch.arange(len(latent), device=latent.device)
        chosen = torch.zeros_like(each)
        chosen[rows, place] = self.softmax.cotangent(each[rows, place], contrast)
        return chosen.flatten(1)

    def curvature_root(self, latent: Tensor, block: Tensor) -> Tensor:
        return self.softmax.curvature_root(self._each(latent), self._each(block)).view_as(block)

    def curvature_traces(self, latent: Tensor) -> Tensor:
        return self.softmax.curvature_traces(self._each(latent)).view(len(latent), -1).sum(1)

    def response(self, latent: Tensor) -> Tensor:
        return self.softmax.response(latent.unflatten(-1, (self.num_tokens, -1))).flatten(-2)

    def expected_response(self, mean: Tensor, variance: Tensor) -> Tensor:
        return self.softmax.expected_response(self._each(mean), self._each(variance)).view_as(mean)

    def _each(self, values: Tensor) -> Tensor:  # (N, T·C, …) -> (N·T, C, …)
        return values.reshape(-1, self.softmax.num_outputs, *values.shape[2:])

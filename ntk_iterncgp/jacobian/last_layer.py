"""The Jacobian of a linear last layer: f(x) = Φ(x) Wᵀ + c, so J(x) = φ(x)ᵀ ⊗ I_C, kept as features alone.

The weights are those of `nn.Linear`: W (C, D) flattened, then the bias (C,) if there is one. With the bias as one more
feature that is always 1, a weight vector is a matrix (C, D′); J V, JᵀV and J Λ⁻¹ Jᵀ are contractions over D′, and no
matrix of C·D columns per row, let alone (C·D)², is formed.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor, nn

from ntk_iterncgp.data.fixed_order import Inputs
from ntk_iterncgp.jacobian.blocks import WeightColumns
from ntk_iterncgp.jacobian.rows import Contrasts, NetworkJacobian, Rows, contrasts_at


class LastLayerJacobian(NetworkJacobian):
    """J of `layer`, where a batch of inputs is a batch of its features (b, D); in `dtype`, or in that of the layer."""

    def __init__(self, layer: nn.Linear, *, dtype: torch.dtype | None = None) -> None:
        self.layer, self.has_bias = layer, layer.bias is not None
        self.num_outputs, self.num_features = layer.weight.shape
        self.num_params = layer.weight.numel() + (self.num_outputs if self.has_bias else 0)
        self.dtype, self.device = dtype or layer.weight.dtype, layer.weight.device

    def forward(self, x: Inputs) -> Tensor:
        bias = self.layer.bias.detach().to(self.dtype) if self.has_bias else None
        return nn.functional.linear(x.to(self.dtype), self.layer.weight.detach().to(self.dtype), bias)

    def forward_at(self, x: Inputs, change: Tensor) -> Tensor:
        return self.forward(x) + self.jvp(x, change[:, None])[..., 0]

    def vjp(self, x: Inputs, cotangents: Tensor) -> Tensor:
        return self.flat(torch.einsum("bd,bck->cdk", self.extended(x), cotangents.to(self.dtype)))

    def vjp_each(self, x: Inputs, cotangents: Tensor) -> Tensor:
        each = torch.einsum("bd,bck->cdbk", self.extended(x), cotangents.to(self.dtype)).flatten(2)
        rows: Tensor = self.flat(each).T.unflatten(0, (len(x), cotangents.shape[2]))
        return rows

    def jvp(self, x: Inputs, tangents: Tensor) -> Tensor:
        return torch.einsum("bd,cdk->bck", self.extended(x), self.matrix(tangents.to(self.dtype)))

    def rows(self, x: Inputs, num_rows: int, contrasts: Contrasts | None = None) -> Rows:
        return LastLayerRows(self, x, contrasts)

    def prepare(self, x: Inputs, num_rows: int) -> None:
        pass  # memory is known without

    def bytes_per_row(self, num_outputs: int) -> int:
        return 8 * (2 * num_outputs**2 + 2 * self.num_features + 2 * num_outputs * self.num_outputs)

    def extended(self, features: Tensor) -> Tensor:  # (b, D) -> (b, D′)
        """Return the features, with a column of ones if the layer has a bias."""
        features = features.to(self.dtype)
        return torch.cat([features, torch.ones_like(features[:, :1])], 1) if self.has_bias else features

    def matrix(self, weights: Tensor) -> Tensor:  # (P, k) -> (C, D′, k)
        """Return flat weights as matrices of the layer, with the bias as their last column."""
        C, D = self.num_outputs, self.num_features
        matrix = weights[: C * D].unflatten(0, (C, D))
        return torch.cat([matrix, weights[C * D :, None]], 1) if self.has_bias else matrix

    def flat(self, matrix: Tensor) -> Tensor:  # (C, D′, k) -> (P, k)
        """Return matrices of the layer as flat weights: the inverse of `matrix`."""
        D = self.num_features
        flat = matrix[:, :D].flatten(0, 1)
        return torch.cat([flat, matrix[:, D]]) if self.has_bias else flat


class LastLayerRows(Rows):
    """J(x) = φ(x)ᵀ ⊗ I at b inputs, or φ(x)ᵀ ⊗ Hᵀ."""

    def __init__(self, jacobian: LastLayerJacobian, features: Tensor, contrasts: Contrasts | None) -> None:
        self.outputs = jacobian.forward(features)
        self._jacobian, self._features = jacobian, jacobian.extended(features)
        # H (C, r) or (b, C, r)
        self._contrasts = None if contrasts is None else contrasts_at(contrasts, self.outputs).double()

    def written_out(self) -> Tensor:
        contrasts = contrasts_at(self._contrasts, self.outputs).double().expand(len(self._features), -1, -1)
        each = torch.einsum("bd,bcr->cdbr", self._features.double(), contrasts).flatten(2)  # (C, D′, b·r)
        rows: Tensor = self._jacobian.flat(each).T.unflatten(0, (len(self._features), -1))
        return rows

    def in_dtype(self, dtype: torch.dtype) -> Rows:
        same = copy(self)
        same._features = self._features.to(dtype)
        return same

    def times(self, weights: Tensor | WeightColumns) -> Tensor:
        weights = WeightColumns.of(weights, self._features.dtype).whole()
        if self._contrasts is not None and self._contrasts.ndim == 3:
            return self._times_of_few(weights)
        matrix = self._jacobian.matrix(weights)
        product = torch.einsum("bd,cdk->bck", self._features, matrix).double()
        return product if self._contrasts is None else self._contrasts.mT @ product

    def _times_of_few(self, weights: Tensor) -> Tensor:  # (P, k) -> (b, r, k)
        """Of contrasts of a few classes each: a product with the weights of these alone, class by class."""
        assert self._contrasts is not None
        C, D = self._jacobian.num_outputs, self._jacobian.num_features
        matrix, bias = weights[: C * D].unflatten(0, (C, D)), weights[C * D :]  # (C, D, k), (C or 0, k)
        features = self._features[:, :D]
        b, _, r = self._contrasts.shape
        has_part = (self._contrasts != 0).any(2)  # (b, C)
        total = self._contrasts.new_zeros(b, r, weights.shape[1])
        for c in has_part.any(0).nonzero()[:, 0].tolist():  # over classes that any input asks for
            where = has_part[:, c].nonzero()[:, 0]
            product = (features[where] @ matrix[c]).double()  # (b_c, k)
            product = product + bias[c].double() if len(bias) else product
            total.index_add_(0, where, self._contrasts[where, c, :, None] * product[:, None])
        return total

    def covariance(self, variance: Tensor, *, joint: bool = False) -> Tensor:
        each = variance.double().expand(self._jacobian.num_params)
        features, per_class = self._features.double(), self._jacobian.matrix(each[:, None])[..., 0]
        if not joint:
            variances = features.square() @ per_class.T  # (b, C)
            if self._contrasts is not None:
                return self._contrasts.mT @ (variances[..., None] * self._contrasts)  # (b, r, r)
            return torch.diag_embed(variances)
        each = torch.einsum("bd,cd,ed->cbe", features, per_class, features)  # (C, b, b): the classes are independent
        contrasts = contrasts_at(self._contrasts, self.outputs).double().expand(len(features), -1, -1)  # (b, C, r)
        full = torch.einsum("bcr,cbe,ecs->bres", contrasts, each, contrasts)
        return full.flatten(2).flatten(0, 1)

    def curvature_diagonal(self, curvature: Callable[[Tensor], Tensor]) -> Tensor:
        b, C = self.outputs.shape
        eye = torch.eye(C, dtype=torch.float64, device=self.outputs.device).expand(b, C, C)
        weights = curvature(eye).diagonal(dim1=1, dim2=2)  # W_cc (b, C)
        return self._jacobian.flat((weights.T @ self._features.double().square())[..., None])[:, 0]

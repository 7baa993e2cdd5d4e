"""The Jacobian of a linear last layer: f(x) = Φ(x) Wᵀ + c, so J(x) = φ(x)ᵀ ⊗ I_C, kept as features alone.

The weights are those of `nn.Linear`: W (C, D) flattened, then the bias (C,) if there is one. With the bias as one more
feature that is always 1, a weight vector is a matrix (C, D′); J V, JᵀV and J Λ⁻¹ Jᵀ are contractions over D′, and no
matrix of C·D columns per row, let alone (C·D)², is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import cached_property

import torch
from torch import Tensor, nn

from ntk_iterncgp.data.fixed_order import Inputs
from ntk_iterncgp.jacobian.blocks import LayerColumns, WeightColumns
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

    def in_dtype(self, dtype: torch.dtype) -> LastLayerRows:
        same = copy(self)
        same._features = self._features.to(dtype)
        return same

    def times(self, weights: Tensor | WeightColumns) -> Tensor:
        columns = WeightColumns.of(weights, self._features.dtype)
        if self._contrasts is not None and self._contrasts.ndim == 3:
            parts = enumerate(columns.layers(self._sizes))
            return torch.stack([self._times_of(place, part) for place, part in parts]).sum(0)
        matrix = self._jacobian.matrix(columns.whole())
        product = torch.einsum("bd,cdk->bck", self._features, matrix).double()
        return product if self._contrasts is None else self._contrasts.mT @ product

    def by_layer(self, weights: Tensor | WeightColumns, sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        if self._contrasts is None or self._contrasts.ndim == 2 or list(sizes) != self._sizes:
            yield from super().by_layer(weights, sizes)
            return
        rows = self.in_dtype(weights.dtype)
        for place, part in enumerate(WeightColumns.of(weights, weights.dtype).layers(sizes)):
            squares = rows._of_layer(place).double().square().sum(1)  # (b,)
            yield rows._times_of(place, part), squares[:, None, None] * (self._contrasts.mT @ self._contrasts)

    @property
    def _sizes(self) -> list[int]:
        """Of the weight, and of the bias if there is one."""
        C, D = self._jacobian.num_outputs, self._jacobian.num_features
        return [C * D, C] if self._jacobian.has_bias else [C * D]

    def _of_layer(self, place: int) -> Tensor:  # (b, D) or (b, 1)
        """What the weight is multiplied by, or the bias."""
        D = self._jacobian.num_features
        return self._features[:, D:] if place else self._features[:, :D]

    @cached_property
    def _common(self) -> Tensor:  # (b, r)
        """The entry that most classes have in each contrast: zero for a few classes, −1/(C − 1) for one against all."""
        assert self._contrasts is not None
        return self._contrasts.median(1).values

    def _times_of(self, place: int, columns: LayerColumns) -> Tensor:  # (P_l, k) -> (b, r, k)
        """Σ_c H_c φᵀA_c, class by class where H_c is not what most classes have, and by the sum of all A_c for these.

        So contrasts of a few classes, or of one against the others, meet the weights of these few alone.
        """
        assert self._contrasts is not None
        features, (b, C, r) = self._of_layer(place), self._contrasts.shape
        D, total = features.shape[1], self._contrasts.new_zeros(b, r, columns.number)
        special = self._contrasts - self._common[:, None]
        has_part = (special != 0).any(2)  # (b, C)
        for c in has_part.any(0).nonzero()[:, 0].tolist():  # over classes that any input asks for
            where = has_part[:, c].nonzero()[:, 0]
            product = (features[where] @ columns.rows(slice(c * D, (c + 1) * D))).double()  # (b_c, k)
            total.index_add_(0, where, special[where, c, :, None] * product[:, None])
        if bool(self._common.any()):
            product = (features @ columns.summed(C)).double()  # (b, k)
            total += self._common[..., None] * product[:, None]
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

"""The two flavours, final and registered with laplace-torch by their keys: they differ in where J comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, final

import torch
from laplace.utils import FeatureExtractor
from laplace.utils.enums import Likelihood
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.data.fixed_order import FirstBatch, FixedOrderData, Inputs, Probe, slice_rows, to_device
from ntk_iterncgp.fitting.network import EXACT
from ntk_iterncgp.jacobian.autograd import Jacobian, arguments, as_outputs, derivative_dtype
from ntk_iterncgp.jacobian.last_layer import LastLayerJacobian
from ntk_iterncgp.jacobian.narrowing import Narrowing
from ntk_iterncgp.jacobian.rows import NetworkJacobian
from ntk_iterncgp.laplace_torch.base import IterNCGPLaplace
from ntk_iterncgp.laplace_torch.hyperparameters import CheckedHyperparameters
from ntk_iterncgp.runtime.threads import exclusively

FEW = 2**16  # weights of a last layer, up to which its products are taken in float64


@final
class IterNCGPAllLaplace(CheckedHyperparameters, IterNCGPLaplace):
    """All weights that require a gradient."""

    _key = ("all", "iterncgp")
    _jacobian: Jacobian | None = None

    def _open(self, loader: DataLoader[Any], *, is_known: bool) -> tuple[NetworkJacobian, FixedOrderData, FirstBatch]:
        data = FixedOrderData(loader, device=self._device, dict_key_x=self.dict_key_x, dict_key_y=self.dict_key_y)
        probe = Probe(self.model, data, is_known=is_known)
        jacobian, outputs = self._in_dtype(probe.inputs, data.num_items)
        first_batch = probe.check(jacobian.forward, outputs)
        self._num_tokens = jacobian.num_tokens
        self._jacobian = jacobian  # what a fit finds out about the model holds for predictions too
        return jacobian, data, first_batch

    def _in_dtype(self, x: Inputs, num_items: int | None) -> tuple[Jacobian, Tensor | None]:
        """Derivatives in the dtype asked for, or in the model's own where it does not work in that; and outputs at x.

        The outputs are None where the model was not asked for them.
        """
        jacobian = Jacobian(self.model, logits=self._logits(self.dict_key_y))
        is_regression = self.likelihood == Likelihood.REGRESSION
        own = derivative_dtype(jacobian.num_params, jacobian.dtype, num_items, is_regression=is_regression)
        dtype = self.dtype or (torch.float64 if self.settings.policy == EXACT else own)
        if dtype == jacobian.dtype:
            return jacobian, None
        other = Jacobian(self.model, dtype=dtype, logits=self._logits(self.dict_key_y))
        narrowing = Narrowing()
        try:
            with torch.no_grad(), narrowing:
                outputs = other.forward(x)
            if self.dtype is None and narrowing.is_seen:  # in float64 it would have the digits of float32
                return self._in_single_precision(jacobian)
            if outputs.dtype == dtype:
                other.vjp(slice_rows(x, slice(0, 1), len(outputs)), outputs[:1, :, None])
                return other, outputs
        except (
            RuntimeError,
            TypeError,
            NotImplementedError,
        ):  # it has a constant of its own dtype, or checkpoints gradients
            with torch.no_grad():
                jacobian.forward(x)  # whose error, if there is one, is about these inputs, and not the dtype
        if self.dtype is not None:
            raise ValueError(
                f"dtype={dtype} must be one that the model can compute in; got outputs of another dtype, or an error. "
                f"Try dtype=None, or let the model create its own tensors in the dtype of its inputs."
            )
        return jacobian, None

    def _in_single_precision(self, jacobian: Jacobian) -> tuple[Jacobian, None]:
        """Derivatives in float32; of a model in half precision too."""
        if jacobian.dtype == torch.float32:
            return jacobian, None
        return Jacobian(self.model, dtype=torch.float32, logits=self._logits(self.dict_key_y)), None

    def _jacobian_at(self, x: Inputs) -> tuple[NetworkJacobian, Inputs]:
        dtype = self.posterior.dtype
        if self._jacobian is None or self._jacobian.dtype != dtype or not self._jacobian.is_of(self.model):
            self._jacobian = Jacobian(
                self.model, dtype=dtype
            )  # cached: what it found out about the model cost two rows
        self._jacobian.logits = self._logits()  # new inputs may have another length, and no labels count
        return self._jacobian, to_device(x, self._device)

    def _parameters(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}


class CopyableFeatureExtractor(FeatureExtractor):
    """laplace-torch's, but for its hook.

    Its own is a closure, which a copy shares with the original: the features of the copy's inputs went to the
    original, and the copy predicted from features that it had been copied with. Nor can a closure be pickled.
    """

    def _get_hook(self, name: str) -> Callable[..., None]:
        return FeatureHook(self, name)


@dataclass(frozen=True, eq=False)
class FeatureHook:
    """Records the input of the last layer. Copied together with its extractor."""

    extractor: FeatureExtractor
    name: str

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> None:
        features = inputs[0]
        self.extractor._features[self.name] = features if self.extractor.enable_backprop else features.detach()


@final
class IterNCGPLastLayerLaplace(CheckedHyperparameters, IterNCGPLaplace):
    """The weights of a linear last layer; its features are computed once.

    The layer is found by a forward pass, as laplace-torch does, or named by `last_layer_name`. The model is copied,
    since finding features leaves hooks behind.
    """

    _key = ("last_layer", "iterncgp")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        *args: Any,
        last_layer_name: str | None = None,
        feature_reduction: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, likelihood, sigma_noise, 1.0, 0.0, *args, **kwargs)
        with exclusively(self.model):
            copied = deepcopy(self.model)
        for module in copied.modules():
            if isinstance(module, nn.Linear):  # the extractor takes what is given by position
                module.register_forward_pre_hook(_by_position, with_kwargs=True)
        copied.register_forward_pre_hook(_as_it_asks, with_kwargs=True)
        copied.register_forward_hook(_logits)
        self.extractor = CopyableFeatureExtractor(
            copied, last_layer_name, self.enable_backprop, feature_reduction=feature_reduction
        )
        self.model = self.extractor
        if last_layer_name is not None:
            self._take_last_layer()
        self.prior_precision, self.prior_mean = prior_precision, prior_mean

    def __setattr__(self, name: str, value: Any) -> None:
        """The size of a prior set before the last layer is known is checked when it is known."""
        extractor = self.__dict__.get("extractor")
        if extractor is not None and extractor.last_layer is None and name in ("prior_precision", "prior_mean"):
            self._check_hyperparameter(name, value)
            tensor = torch.as_tensor(value, dtype=self._dtype, device=self._device).reshape(-1)
            super().__setattr__(f"_{name}", tensor)  # where laplace-torch keeps it
        else:
            super().__setattr__(name, value)

    @property
    def _layer(self) -> nn.Linear:
        layer = self.extractor.last_layer
        assert isinstance(layer, nn.Linear)
        return layer

    def _take_last_layer(self) -> None:
        self.params = list(self._layer.parameters())
        self.n_params, self.n_layers = sum(p.numel() for p in self.params), len(self.params)
        self.prior_precision, self.prior_mean = self.prior_precision, self.prior_mean  # now their sizes too

    def _open(self, loader: DataLoader[Any], *, is_known: bool) -> tuple[NetworkJacobian, FixedOrderData, FirstBatch]:
        data = FixedOrderData(loader, device=self._device, dict_key_x=self.dict_key_x, dict_key_y=self.dict_key_y)
        if self.extractor.last_layer is None:
            with torch.no_grad():
                self.extractor.find_last_layer(next(data.batches())[0])
            self._take_last_layer()
        Probe(self.extractor, data, is_known=is_known).check(lambda x: self._as_outputs(self.extractor(x)))
        own = self._layer.weight.dtype
        jacobian = self._layer_jacobian(self.dtype or (torch.float64 if self.n_params <= FEW else own))

        def features_of(x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
            outputs, features = self._with_features(x)
            found = jacobian.forward(features).to(outputs)
            if len(found) != len(outputs) or not torch.allclose(found, outputs, rtol=1e-4, atol=1e-5, equal_nan=True):
                raise ValueError(
                    f"The model must end in its last linear layer, {self.extractor._last_layer_name!r}; got outputs "
                    "that are not those of that layer at one place for each datum. Try to return the layer's "
                    "outputs as they are, another layer (last_layer_name), or feature_reduction where it is applied "
                    "at many places."
                )
            return features, y

        with torch.no_grad():
            batches = list(data.each_batch(features_of))
        rows = len(batches[0][0])
        features, targets = map(torch.cat, zip(*batches, strict=True))
        if len(targets) != len(features):
            raise ValueError(
                f"There must be one target for each of the {len(features)} training inputs; got {len(targets)}. Try a "
                "loader whose batches are pairs (x, y)."
            )
        cached = DataLoader(TensorDataset(features, targets), rows)  # which can be visited group by group
        inputs = features[:rows]
        first_batch = FirstBatch(inputs, jacobian.forward(inputs), len(features))
        return jacobian, FixedOrderData(cached, device=self._device), first_batch

    def _with_features(self, x: Inputs) -> tuple[Tensor, Tensor]:  # (b, C), (b, D)
        raw, features = self.extractor.forward_with_features(x)
        outputs = as_outputs(raw)
        if features.ndim == 3 and len(features) == len(outputs):  # a head at each token, of which one is returned
            logits = nn.functional.linear(features, self._layer.weight, self._layer.bias)
            distance = (logits - outputs[:, None]).abs().amax(2)
            features = features[torch.arange(len(features), device=features.device), distance.argmin(1)]
        return self._as_outputs(raw), features.reshape(-1, self._layer.in_features)

    def _as_outputs(self, outputs: object) -> Tensor:  # (b, C)
        if getattr(getattr(outputs, "logits", outputs), "ndim", 0) == 3:
            raise ValueError(
                "The last layer must give one output vector for each input; got outputs at several places. Try "
                "subset_of_weights='all' with the other weights frozen (requires_grad_(False)), which is the same."
            )
        logits = self._logits()
        return as_outputs(outputs) if logits is None else logits.of(outputs, None)

    def _layer_jacobian(self, dtype: torch.dtype) -> NetworkJacobian:
        if self._layer.out_features == 1 and self.likelihood == Likelihood.CLASSIFICATION:
            return Jacobian(self._layer, dict(self._layer.named_parameters()), dtype=dtype, logits=self._logits())
        return LastLayerJacobian(self._layer, dtype=dtype)

    def _jacobian_at(self, x: Inputs) -> tuple[NetworkJacobian, Inputs]:
        jacobian = self._layer_jacobian(self.posterior.dtype)
        return jacobian, self._with_features(to_device(x, self._device))[1]

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self._layer.named_parameters()) if self.extractor.last_layer is not None else {}

    def state_dict(self) -> dict[str, Any]:
        """With the name of the last layer."""
        return {**super().state_dict(), "last_layer_name": self.extractor._last_layer_name}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a saved posterior; its last layer is looked up by name."""
        if self.extractor.last_layer is None and state_dict.get("last_layer_name") in dict(
            self.extractor.model.named_modules()
        ):
            self.extractor.set_last_layer(state_dict["last_layer_name"])
            self._take_last_layer()
        super().load_state_dict(state_dict)


def _as_it_asks(model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return arguments(model, given[0]) if len(given) == 1 and not named else None


def _logits(model: nn.Module, given: Any, outputs: Any) -> Any:
    return getattr(outputs, "logits", outputs)


def _by_position(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """What a model gives to a linear layer by keyword, as in self.head(input=x)."""
    if inputs or "input" not in named:
        return None
    return (named["input"],), {name: value for name, value in named.items() if name != "input"}

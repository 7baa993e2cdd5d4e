"""The Jacobian J of a network's outputs with respect to its weights, known by its products on one batch at a time.

    vjp   JᵀV   reverse mode: one forward pass, then one backward pass per column
    jvp   J V   forward mode: the columns share the primal pass
    rows  J     datum by datum, for predictions: by layers where these are plain (`layers.py`), else by `torch.func`

Two kinds share this contract (`NetworkJacobian`): that of any model, and that of a linear last layer on cached features
(`last_layer.py`), where J(x) = φ(x)ᵀ ⊗ I is never written out.

The weights are those named in `params`; frozen ones and buffers stay as they are in the model, and are not touched. The
parameters are handed to the model functionally, so its own `.grad` and `requires_grad` never change. Flat vectors of
weights are in the order of `params`. Derivatives may be taken in another dtype than the model's: then all weights,
buffers and inputs are handed to it in that dtype.

How a model is asked: a tensor goes in by position. A model that takes a mapping has one argument for it,
`forward(self, batch)`. Models of Hugging Face name theirs, `forward(self, input_ids, attention_mask, …)`: the items of
a mapping that have such a name are handed over by it, but for `labels`, with which a model would compute a loss of its
own; others, as a datum's number, are left out.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from textwrap import shorten
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.functional import pad

from ntk_iterncgp.data.fixed_order import Inputs, slice_rows
from ntk_iterncgp.jacobian.layers import LayerRows, aliases_of, layer_rows, layers_of, padding_rows
from ntk_iterncgp.jacobian.rows import SMALL_NETWORK, Contrasts, DenseRows, NetworkJacobian, Rows, contrasts_at
from ntk_iterncgp.likelihoods.tokens import IGNORED
from ntk_iterncgp.runtime.threads import FORWARD_MODE, exclusively, plain_attention

JVP_COLUMNS, JVP_BYTES = 8, 2 * 2**20
"""How many tangents share a primal pass: up to 8, while as many copies of a batch of inputs fit in 2 MiB. Beyond that
the activations of all tangents leave the cache, and sharing costs more than it saves: on a LeNet eight tangents at
once take 0.5 epochs each instead of 1.25, on a CIFAR ResNet-20 2.0 instead of 1.0."""


PROOF_ROWS = 2
"""At how many data rows by layers are compared with reverse mode: whether they are right is a matter of the model. That
weights are used again for some data only is a matter of the batch, and seen in each by `layer_rows`."""

Owners = Mapping[str, tuple[str, str]]  # of each parameter: its layer, and where it is in it

FEW_DATA = 2**12  # up to which derivatives of a small classifier are taken in float64

_warned: WeakSet[nn.Module] = WeakSet()  # which models are known not to be vectorised: once is enough


class Jacobian(NetworkJacobian):
    """J of `model` at its current weights, for the parameters in `params`; in `dtype`, or in that of the model.

    The outputs are as the model returns them; with `logits`, those of a classifier.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor] | None = None,
        *,
        dtype: torch.dtype | None = None,
        logits: Logits | None = None,
    ) -> None:
        self.model: nn.Module = model
        self.logits = logits
        chosen = params if params is not None else {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not chosen:
            raise ValueError(
                "`params` must have at least one parameter that requires a gradient; got none. Try "
                "parameter.requires_grad_(True) for those that are to be uncertain."
            )
        self._weights = {name: value.detach() for name, value in chosen.items()}  # as they are in the model
        first = next(iter(self._weights.values()))
        self.dtype, self.device = dtype or first.dtype, first.device
        self.params = {name: value.to(self.dtype) for name, value in self._weights.items()}
        self._constants = _in_dtype(model, self.dtype) if self.dtype != first.dtype else {}
        self._aliases = aliases_of(model, chosen)
        self._padding = padding_rows(model, chosen)
        self.sizes = [value.numel() for value in self.params.values()]
        self.num_params = sum(self.sizes)
        self._vmaps = True
        self._places = layers_of(model, self.params)
        self._numbers: tuple[int, int] | None = None  # of rows by layers at an input: for any, and for each of them
        self._shapes: list[torch.Size] | None = None  # of the inputs that were looked at

    # --- the function ---------------------------------------------------------------------------------------------

    def forward(self, x: Inputs, params: Mapping[str, Tensor] | None = None) -> Tensor:  # (b, C)
        """The model's outputs as (b, C); a regression model may return (b,)."""
        values = self.params if params is None else params
        named = {alias: values[name] for name, aliases in self._aliases.items() for alias in aliases}
        if self._constants:
            named, x = self._constants | named, _floats_to(x, self.dtype)
        with exclusively(self.model):
            positional, by_name = arguments(self.model, x)
            outputs = functional_call(self.model, named, positional, by_name, tie_weights=False)
            return as_outputs(outputs) if self.logits is None else self.logits.of(outputs, x)

    def forward_at(self, x: Inputs, change: Tensor) -> Tensor:  # (P,) -> (b, C)
        """Without one of an embedding's padding row, which is constant."""
        changes = self._unflatten(change.to(self.dtype))
        return self.forward(x, {name: value + changes[name] for name, value in self.params.items()})

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return 1 if self.logits is None else self.logits.num_tokens or 1

    # --- products on a batch --------------------------------------------------------------------------------------

    def vjp(self, x: Inputs, cotangents: Tensor) -> Tensor:  # (b, C, k) -> (P, k)
        """JᵀV summed over a batch."""
        leaves = self._leaves()
        with torch.enable_grad(), plain_attention():
            return self._gradients(self.forward(x, leaves), leaves, cotangents)

    def _gradients(
        self,
        outputs: Tensor,
        leaves: Mapping[str, Tensor],
        cotangents: Tensor,
        *,
        create_graph: bool = False,
        retain_graph: bool = False,
    ) -> Tensor:  # (…), (…, k) -> (P, k)
        """One backward pass per column, which every model has that can be trained."""
        columns = []
        for j in range(cotangents.shape[-1]):
            gradients = torch.autograd.grad(
                outputs,
                list(leaves.values()),
                cotangents[..., j].to(outputs.dtype),
                retain_graph=create_graph or retain_graph or j + 1 < cotangents.shape[-1],
                create_graph=create_graph,
                allow_unused=True,
            )
            columns.append(self._flatten(gradients))
        return torch.stack(columns).T if columns else cotangents.new_zeros(self.num_params, 0)

    def jvp(self, x: Inputs, tangents: Tensor) -> Tensor:  # (P, k) -> (b, C, k)
        """J V on a batch."""

        def push(tangent: Tensor) -> Tensor:
            pushed: Tensor = jvp(lambda p: self.forward(x, p), (self.params,), (self._unflatten(tangent),))[1]
            return pushed

        with torch.no_grad(), plain_attention(), exclusively(self.model), FORWARD_MODE:
            try:
                parts = []
                for block in tangents.split(_tangents_at_once(x), 1):
                    one = block.shape[1] == 1
                    parts.append(push(block[:, 0])[..., None] if one else vmap(push, in_dims=1, out_dims=2)(block))
            except (RuntimeError, NotImplementedError) as error:
                if "out of memory" in str(error):
                    raise
                return self._jvp_by_reverse_mode(x, tangents)
        return torch.cat(parts, 2)

    def _jvp_by_reverse_mode(self, x: Inputs, tangents: Tensor) -> Tensor:  # (P, k) -> (b, C, k)
        """For operations without a forward-mode derivative: Jᵀc is linear in c, and J v is the gradient of vᵀJᵀc."""
        leaves = self._leaves()
        with torch.enable_grad():
            outputs = self.forward(x, leaves)
            cotangent = torch.zeros_like(outputs, requires_grad=True)
            pulled = torch.autograd.grad(
                outputs, list(leaves.values()), cotangent, create_graph=True, allow_unused=True
            )
            flat = self._flatten(pulled)
            columns = [
                torch.autograd.grad(flat @ tangents[:, j], cotangent, retain_graph=True)[0]
                for j in range(tangents.shape[1])
            ]
        return torch.stack(columns, 2)

    def prepare(self, x: Inputs, num_rows: int) -> None:
        with exclusively(self.model):  # another thread may be about to use what is not proven yet
            self._prepare(x, num_rows)

    def _prepare(self, x: Inputs, num_rows: int) -> None:
        some = slice_rows(x, slice(0, PROOF_ROWS), num_rows)
        shapes = [value.shape[1:] for value in _tensors_of(some)]
        if self._places is None or shapes == self._shapes:
            return
        self._shapes = shapes
        turned = torch.arange(min(PROOF_ROWS, num_rows)).flip(0)  # a model may sort its batch, and some be in order
        leaves = self._leaves()
        with torch.enable_grad(), plain_attention():
            outputs = self.forward(some, leaves)  # once, for all backward passes of the proof

        def pull_back(cotangents: Tensor) -> Tensor:  # (b, C) -> (P,)
            return self._gradients(outputs, leaves, cotangents[..., None], retain_graph=True)[:, 0]

        with torch.no_grad():
            one = self._proven(some, self._places, outputs.shape, 1, pull_back)
            turned_round = slice_rows(some, turned, len(turned))
            two = self._proven(turned_round, self._places, outputs.shape, 2, lambda c: pull_back(c.flip(0)))
        if one is None or two is None:
            self._places = None
            return
        b, each = len(one.outputs), two.num_numbers - one.num_numbers
        self._numbers = -(-(one.num_numbers - each) // b), -(-each // b)

    def _proven(
        self, x: Inputs, places: Owners, shape: torch.Size, number: int, pull_back: Callable[[Tensor], Tensor]
    ) -> LayerRows | None:
        """Return rows by layers of random combinations of the outputs, if reverse mode agrees.

        For a thousand outputs it is as cheap as for one, and none of them can be wrong alone.
        """
        generator = torch.Generator().manual_seed(number)
        contrasts = torch.randn(shape[1], number, generator=generator, dtype=torch.float64)
        contrasts = contrasts.to(self.device, self.dtype)
        rows = self._rows_by_layers(x, shape[0], places, contrasts)
        return rows if rows is not None and rows.agrees_with(lambda c: pull_back(c @ contrasts.T)) else None

    def bytes_per_row(self, num_outputs: int) -> int:
        # Of J as a whole there are three copies: itself, what it is concatenated from, and J Λ^{-½}. By layers there is
        # less, as `prepare` finds; before it, what `layer_rows` may take at the most.
        by_layers = self._places is not None and not torch.is_grad_enabled()
        fixed, each = (self._numbers or (0, 2 * self.num_params)) if by_layers else (0, 3 * self.num_params)
        return (fixed + num_outputs * each) * self.dtype.itemsize

    def rows(self, x: Inputs, num_rows: int, contrasts: Contrasts | None = None) -> Rows:
        if not torch.is_grad_enabled():
            self.prepare(x, num_rows)
            places = self._places
            found = None if places is None else self._rows_by_layers(x, num_rows, places, contrasts)
            if found is not None:
                return found
            self._places = None  # nor for other data, so that their memory is counted as it will be

        with plain_attention():
            outputs = self.forward(x)
            return DenseRows(outputs, self._pulled_back(x, num_rows, contrasts_at(contrasts, outputs)))

    def _rows_by_layers(
        self, x: Inputs, num_rows: int, places: Owners, contrasts: Contrasts | None
    ) -> LayerRows | None:
        leaves = self._leaves()
        source = x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else None
        return layer_rows(
            self.model,
            lambda: self.forward(x if source is None else source.clone(), leaves),  # a model may overwrite it
            source,
            places,
            leaves,
            num_rows,
            contrasts,
        )

    def vjp_each(self, x: Inputs, cotangents: Tensor) -> Tensor:  # (b, C, k) -> (b, k, P)
        with torch.no_grad(), plain_attention():
            return self._pulled_back(x, len(cotangents), cotangents)

    def _pulled_back(self, x: Inputs, num_rows: int, cotangents: Tensor) -> Tensor:  # -> (b, k, P)
        """JᵀV of each datum, for its own cotangents (b, C, k) or for those of all, (C, k).

        All data together by `vmap`; one by one for a model that cannot be vectorised.
        """
        if self._vmaps:
            try:
                return self._together(x, num_rows, cotangents)
            except RuntimeError as error:
                if "out of memory" in str(error):
                    raise
                _tell_once(self.model, error)
                self._vmaps = False
        return self._one_by_one(x, num_rows, cotangents)

    def _together(self, x: Inputs, num_rows: int, cotangents: Tensor) -> Tensor:
        def whole(datum: Inputs) -> Inputs:
            return datum[None]

        if isinstance(x, Mapping):
            per_datum = {k: v for k, v in x.items() if isinstance(v, Tensor) and v.ndim and len(v) == num_rows}
            shared = {k: v for k, v in x.items() if k not in per_datum}
            kind: Callable[..., Inputs] = type(x)

            def whole(datum: Inputs) -> Inputs:
                return kind({**shared, **{k: v[None] for k, v in datum.items()}})

            x = per_datum

        def pull_back(datum: Inputs, columns: Tensor) -> Tensor:  # (C, k) -> (k, P)
            pull = vjp(lambda params: self.forward(whole(datum), params)[0], self.params)[1]
            pulled = vmap(pull, in_dims=1)(columns)[0]
            # by its size, since a parameter of no dimension has none to flatten
            parts = zip(self.params, self.sizes, strict=True)
            return torch.cat([pulled[name].reshape(columns.shape[1], size) for name, size in parts], 1)

        return vmap(pull_back, in_dims=(0, 0 if cotangents.ndim == 3 else None))(x, cotangents)

    def _one_by_one(self, x: Inputs, num_rows: int, cotangents: Tensor) -> Tensor:
        """Without `torch.func`, which some layers refuse even for a single datum, as an LSTM in float32 on a CPU."""
        in_inputs = torch.is_grad_enabled() and any(value.requires_grad for value in _tensors_of(x))
        parts = []
        for n in range(num_rows):
            leaves, columns = self._leaves(), cotangents[n] if cotangents.ndim == 3 else cotangents
            with torch.enable_grad():
                outputs = self.forward(slice_rows(x, slice(n, n + 1), num_rows), leaves)[0]
                if outputs.requires_grad:
                    parts.append(self._gradients(outputs, leaves, columns, create_graph=in_inputs).T)
                else:  # no weight has a say in this datum
                    parts.append(outputs.new_zeros(columns.shape[1], self.num_params))
        return torch.stack(parts)

    # --- flat weight vectors --------------------------------------------------------------------------------------

    def weights(self) -> Tensor:  # (P,)
        """The weights as a flat vector."""
        return torch.cat([value.flatten() for value in self.params.values()])

    def is_of(self, model: nn.Module) -> bool:
        """Whether these are all weights of `model` that require a gradient, in the memory where they are now."""
        current = {name: value for name, value in model.named_parameters() if value.requires_grad}
        return (
            self.model is model
            and list(current) == list(self._weights)
            and all(current[name].is_set_to(value) for name, value in self._weights.items())
        )

    def _leaves(self) -> dict[str, Tensor]:
        """The weights, as new tensors that require gradients."""
        return {name: value.detach().requires_grad_() for name, value in self.params.items()}

    def _unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """A tangent by parameter. Reverse mode holds an embedding's padding row for constant, so forward mode must."""
        pairs = zip(self.params.items(), vector.split(self.sizes), strict=True)
        tangents = {name: part.view_as(value) for (name, value), part in pairs}
        for name, row in self._padding.items():
            keep = torch.ones(len(tangents[name]), 1, dtype=self.dtype, device=self.device)
            keep[row] = 0
            tangents[name] = tangents[name] * keep
        return tangents

    def _flatten(self, gradients: tuple[Tensor | None, ...]) -> Tensor:  # (P,)
        pairs = zip(gradients, self.params.values(), strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def derivative_dtype(num_params: int, own: torch.dtype, num_data: int | None, *, is_regression: bool) -> torch.dtype:
    """Return float64 where it costs next to nothing: small networks that regress, or that see few data.

    With little noise, or a weak prior, a posterior variance is a small difference of large numbers. Never half
    precision.
    """
    own = torch.promote_types(own, torch.float32)
    is_small = num_params <= SMALL_NETWORK and (is_regression or (num_data is not None and num_data <= FEW_DATA))
    return torch.float64 if is_small and own == torch.float32 else own


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """All parameters and buffers of floating point, in another dtype, by their name in each module.

    A module used twice counts once: its parameters, exchanged twice, would stay in the model.
    """
    return {
        name: value.detach().to(dtype)
        for prefix, module in model.named_modules()
        for named in (module.named_parameters, module.named_buffers)
        for name, value in named(prefix, recurse=False, remove_duplicate=False)
        if value.is_floating_point()
    }


def _floats_to(x: Inputs, dtype: torch.dtype) -> Inputs:
    if isinstance(x, Mapping):
        kind: Callable[..., Inputs] = type(x)
        return kind({key: _floats_to(value, dtype) for key, value in x.items()})
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _tell_once(model: nn.Module, error: RuntimeError) -> None:
    if model not in _warned:
        _warned.add(model)
        warnings.warn(
            "This model cannot be vectorised over data (torch.func.vmap says: "
            f"{shorten(str(error).splitlines()[0], 160, placeholder=' …')}). Its rows are taken one by one, which is "
            "slower.",
            stacklevel=4,
        )


def _tensors_of(x: Inputs) -> list[Tensor]:
    return [value for value in (x.values() if isinstance(x, Mapping) else [x]) if isinstance(value, Tensor)]


def _tangents_at_once(x: Inputs) -> int:
    size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors_of(x))
    return max(1, min(JVP_COLUMNS, JVP_BYTES // max(1, size)))


# --- how a model is asked ---

TARGETS = "labels"


def arguments(model: nn.Module, x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments with which a model takes a batch."""
    if isinstance(x, Mapping):
        names = _names(model)
        named = {name: x[name] for name in names if name in x and name != TARGETS}
        if named and len(names) > 1:  # a single argument is for the mapping, whatever its name
            return (), named
    return (x,), {}


def _names(model: nn.Module) -> list[str]:
    """Of the arguments of `forward`; of a model that hands on whatever it gets, as PEFT's, those of the inner one."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    inner = getattr(model, "get_base_model", None)
    return _names(inner()) if not names and callable(inner) else names


def as_outputs(outputs: object, *, of_tokens: bool = False) -> Tensor:  # (b, C), or (b, T, C)
    """What a model returned as (b, C); Hugging Face models return an object with `logits`."""
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor) or outputs.ndim not in ((1, 2, 3) if of_tokens else (1, 2)):
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        shapes = "(b, C), (b,), or (b, T, C) for classes at T places," if of_tokens else "(b, C) or (b,),"
        raise ValueError(
            f"The model must return a tensor of shape {shapes} or an object with such `logits`; got {found}. "
            f"Try a module around it that returns {_advised(outputs, of_tokens)}."
        )
    return outputs[:, None] if outputs.ndim == 1 else outputs


def _advised(outputs: object, of_tokens: bool) -> str:
    """What a module around a model should return instead."""
    if isinstance(outputs, Mapping) and outputs:
        names = list(outputs)
        return f"outputs[{'out' if 'out' in names else names[0]!r}]".replace("'", '"') + f", of {names}"
    if isinstance(outputs, tuple) and len(outputs) == 2:
        return "the first one alone (of a mean and a log-variance the mean, with `sigma_noise` for the noise)"
    if isinstance(outputs, Tensor) and outputs.ndim == 4 and of_tokens:
        return "for (b, C, H, W) outputs.flatten(2).mT, with labels (b, H·W)"
    return "those outputs alone"


SURE = 60.0  # a logit beside which others are nothing


class Logits:
    """The outputs of a classifier as logits (b, C), or (b, T·C) where it has T places, as a tagger of tokens.

    A single logit f, of the second of two classes, becomes (0, f). Where the batch says that a place is to be ignored,
    which only training data do, it has constant logits that are sure: no weight has a say there.
    """

    def __init__(self, targets: str | None = None) -> None:
        self.targets = targets  # the item of a batch that says which places to ignore
        self.num_tokens: int | None = None

    def of(self, outputs: object, x: Inputs) -> Tensor:  # (b, T·C)
        """The logits of what a model returned for a batch."""
        logits = as_outputs(outputs, of_tokens=True)
        logits = pad(logits, (1, 0)) if logits.shape[-1] == 1 else logits
        num_tokens = logits.shape[1] if logits.ndim == 3 else 1
        if num_tokens != (self.num_tokens or num_tokens):
            raise ValueError(
                f"The outputs must be at as many places for all data; got {num_tokens} after {self.num_tokens}. Try to "
                "pad all inputs to one length (padding='max_length')."
            )
        self.num_tokens = num_tokens
        targets = x.get(self.targets) if isinstance(x, Mapping) else None
        if isinstance(targets, Tensor) and logits.ndim == 3 and targets.shape == logits.shape[:2]:
            sure = SURE * (torch.arange(logits.shape[2], device=logits.device) == 0).to(logits)
            logits = torch.where((targets == IGNORED)[..., None], sure, logits)
        return logits.flatten(1)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of `torch.compile` and of data parallelism, which has the same weights.

    Derivatives are taken of the module itself, and data are shared out by the library.
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
            warnings.warn(
                f"The posterior is that of the module inside {type(model).__name__}; several processes share the work "
                "under torchrun.",
                stacklevel=4,
            )
        if not isinstance(inner, nn.Module):
            break
        model = inner
    quantised = [name for name, part in model.named_modules() if "quantized" in type(part).__module__]
    if quantised:
        raise ValueError(
            f"`model` must have weights that can be differentiated; got quantised layers: {', '.join(quantised[:5])}. "
            "Try the model before quantisation."
        )
    return model

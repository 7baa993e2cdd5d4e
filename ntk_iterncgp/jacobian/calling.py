"""How a model is asked for its outputs: a tensor goes in by position, a mapping whole or by the names it holds.

A model that takes a mapping has one argument for it, `forward(self, batch)`. Models of Hugging Face name theirs,
`forward(self, input_ids, attention_mask, …)`: the items of a mapping that have such a name are handed over by it, but
for `labels`, with which a model would compute a loss of its own; others, as a datum's number, are left out.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ntk_iterncgp.data.fixed_order import Inputs

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


def as_outputs(outputs: object) -> Tensor:  # (b, C)
    """What a model returned as (b, C); Hugging Face models return an object with `logits`."""
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor) or outputs.ndim not in (1, 2):
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"The model must return a tensor of shape (b, C) or (b,), or an object with such `logits`; got {found}. "
            "Try a module around it that returns those outputs alone."
        )
    return outputs if outputs.ndim == 2 else outputs[:, None]


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

"""The laplace-torch flavour of a run: what the settings name is passed on, the rest is left to the flavour."""

from __future__ import annotations

import inspect
from typing import Any

from laplace import Laplace
from torch import nn

from ntk_iterncgp.experiments.config import RunConfig
from ntk_iterncgp.experiments.settings import ConfigError, SettingError, nearest
from ntk_iterncgp.laplace_torch import IterNCGPAllLaplace, IterNCGPLastLayerLaplace

FLAVOURS: dict[str, type] = {"all": IterNCGPAllLaplace, "last_layer": IterNCGPLastLayerLaplace}


def make_flavour(config: RunConfig, model: nn.Module) -> Any:
    """The flavour with what the settings name; the rest is left to its defaults."""
    try:
        return Laplace(
            model,
            config.data.task,
            subset_of_weights=config.fit.subset_of_weights,
            hessian_structure="iterncgp",
            prior_precision=config.fit.prior_precision,
            **_keywords(config),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The settings under fit: {error}") from error
    except KeyError as error:
        raise ConfigError(
            f"last_layer_name (fit.options) must be a layer of the network; got {error}. Try without it."
        ) from error


def check_keywords(config: RunConfig) -> None:
    """`fit.options` are names that the flavour knows; a kernel has none."""
    if config.kernel.name is not None:
        if config.fit.shard is not None:
            raise ConfigError("fit.shard must be for a network; got a kernel, whose posteriors do not add up.")
        return
    known = set(inspect.signature(FLAVOURS["all"]).parameters)
    known |= set(inspect.signature(FLAVOURS[config.fit.subset_of_weights]).parameters)
    known -= {"self", "model", "likelihood", "args", "kwargs"}
    for key in _keywords(config):
        if key not in known:
            near = nearest(key, known)
            advice = f"'{near}'" if near else f"one of {', '.join(sorted(known))}"
            raise SettingError("fit.options", "settings of the flavour", f"'{key}'", advice)


def _keywords(config: RunConfig) -> dict[str, Any]:
    named = {key: getattr(config.fit, key) for key in ("mean", "policy", "num_actions", "max_rank")}
    return {key: value for key, value in named.items() if value is not None} | config.fit.options

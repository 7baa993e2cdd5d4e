"""`ntk-iterncgp fit`: a posterior file from a network and its training data.

The file holds everything `predict` needs: the posterior, the network's weights and buffers, how inputs were scaled, and
the settings. The prior precision is the one with the least NLL on test inputs that are put aside for it.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from ntk_iterncgp import parallel
from ntk_iterncgp.config import ConfigError, RunConfig, as_plain
from ntk_iterncgp.evaluation.compare import precision_grid
from ntk_iterncgp.evaluation.crossfit import crossfit
from ntk_iterncgp.evaluation.families import Ours
from ntk_iterncgp.files import load_posterior, save_posterior, write_json
from ntk_iterncgp.laplace_addon.grid import pass_once
from ntk_iterncgp.runs.flavour import check_keywords, make_flavour
from ntk_iterncgp.runs.predict import restore
from ntk_iterncgp.runs.prepare import Setting, chosen_device, find_checkpoint, prepare, prepare_model

POSTERIOR = "posterior.safetensors"
NETWORK_ONLY = (
    "'fit' writes the posterior of a network. A Gaussian process with a kernel of its own needs its training data for "
    "every prediction: use 'evaluate', or NonConjugateGP from Python."
)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A posterior in memory, and how it came about."""

    la: Any
    model: nn.Module
    report: dict[str, Any]


def fit(config: RunConfig) -> Path:
    """The whole command; returns the posterior file. Processes that torchrun started fit together, and one writes."""
    if config.kernel.name is not None:
        raise ConfigError(NETWORK_ONLY)
    with parallel.joined(chosen_device(config.device).type), parallel.together():
        setting = prepare(config, "fit")
        check_keywords(config)
        fitted = fit_network(setting, prepare_model(setting))
        return _finish(setting, fitted) if parallel.is_main() else setting.folder / POSTERIOR


def _finish(setting: Setting, fitted: Fitted) -> Path:
    if setting.config.tuning.protocol != "none":
        _tune(setting, fitted.la)
    path = save(setting, fitted)
    setting.log(f"Posterior: {path} ({path.stat().st_size / 2**20:.1f} MiB), after {setting.log.seconds:.0f} s.")
    return path


def fit_network(setting: Setting, model: nn.Module) -> Fitted:
    """A posterior from all of the training data."""
    config, log = setting.config, setting.log
    loader = DataLoader(setting.data.train, config.data.batch_size)
    la = make_flavour(config, model)
    try:
        if hasattr(la, "estimate_cost"):
            log(str(la.estimate_cost(loader)))
        log(f"Fitting: {type(la).__name__} from {len(setting.data.train):,} data")  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*nterrupt")  # said by the exit code
            la.fit(loader, progress_bar=True)
            if config.fit.refine_epochs is not None and la.report_.status != "interrupted":
                if not hasattr(la, "refine"):
                    raise ConfigError("fit.refine_epochs expects a flavour that can be refined; leave it null.")
                la.refine(loader, epochs=config.fit.refine_epochs)
    except ConfigError:
        raise
    except ValueError as error:  # the flavour's own sentences, about data and models
        raise ConfigError(str(error)) from error
    if la.report_.status == "interrupted":
        raise KeyboardInterrupt
    log(str(la.report_))
    return Fitted(la, model, asdict(la.report_))


def _tune(setting: Setting, la: Any) -> None:
    """The precision with the least NLL, by the accurate link, on some of the test inputs."""
    config, size = setting.config, min(setting.config.tuning.validation_size, len(setting.data.test))  # type: ignore[arg-type]
    loader = DataLoader(Subset(setting.data.test, range(size)), config.data.batch_size)
    parts = pass_once(la, loader, True)
    grid, start = precision_grid(config), config.fit.prior_precision
    family = Ours(
        la.posterior,
        parts,
        la._noise_scale.detach(),
        refined=config.fit.mean == "refined",
        grid=grid,
        start=start,
        num_samples=config.evaluate.link_samples,
    )
    labels = torch.cat([part.targets for part in parts]).cpu()
    everything = torch.arange(size)
    tuned = crossfit(family, labels, [(everything, everything)], "accurate")
    la.prior_precision = tuned.values[0]
    setting.log(f"Prior precision: {tuned.values[0]:.3g}, by the NLL of {size:,} test inputs")


def save(setting: Setting, fitted: Fitted) -> Path:
    """The posterior file, and the same in small for people to read."""
    data, path = setting.data, setting.folder / POSTERIOR
    about = {
        "config": as_plain(setting.config),
        "scaling": {"mean": list(data.scaling.mean), "std": list(data.scaling.std)},
        "class_names": list(data.class_names),
        "input_shape": list(data.input_shape),
        "prior_precision": fitted.la.prior_precision.reshape(-1).tolist(),
        "num_data": len(data.train),  # type: ignore[arg-type]
        "report": fitted.report,
    }
    save_posterior(path, fitted.la.state_dict(), fitted.model.state_dict(), about)
    short = {key: value for key, value in fitted.report.items() if key != "history"}
    write_json(setting.folder / "posterior.json", {**about, "report": short})
    return path


def _is_newer(path: Path, config: RunConfig) -> bool:
    """Whether the posterior was written after the files it depends on; a model made by a function has none to ask."""
    if config.model.checkpoint is None and ":" in config.model.name:
        return False
    sources = [find_checkpoint(config)] if config.model.checkpoint is not None else []
    sources += [Path(config.data.train)] if config.data.train is not None else []
    return all(not source.exists() or source.stat().st_mtime < path.stat().st_mtime for source in sources)


def saved_fit(setting: Setting) -> Fitted | None:
    """The posterior of an earlier `fit` with the same settings in the same folder, if there is one."""
    path = setting.folder / POSTERIOR
    if not path.exists() or not _is_newer(path, setting.config):
        return None
    saved = load_posterior(path)[2]
    mine, theirs = as_plain(setting.config), saved.get("config", {})
    irrelevant = {"test_limit", "ood", "ood_limit", "batch_size", "download"}
    for section in ("data", "model", "fit", "seed"):
        one, other = (
            {k: v for k, v in s.items() if k not in irrelevant} if isinstance(s, dict) else s
            for s in (mine[section], theirs.get(section))
        )
        if one != other:
            return None
    restored = restore(path, setting.device)
    setting.log(f"Posterior of an earlier fit with these settings: {path}")
    return Fitted(restored.la, restored.model, saved["report"])

"""`ntk-iterncgp fit`: a posterior file from a network, or a kernel, and its training data.

The file holds everything `predict` needs: the posterior, the network's weights and buffers, how inputs were scaled, and
the settings. How the prior precision is chosen is in `tune.py`.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from ntk_iterncgp.data.sharding import shard_of
from ntk_iterncgp.experiments.config import RunConfig, as_plain, shard_numbers
from ntk_iterncgp.experiments.progress import duration, reporting
from ntk_iterncgp.experiments.runs.flavour import check_keywords, make_flavour
from ntk_iterncgp.experiments.runs.kernel import fit_gp
from ntk_iterncgp.experiments.runs.predict import restore
from ntk_iterncgp.experiments.runs.predictor import KernelPredictor, NetworkPredictor, Predictor
from ntk_iterncgp.experiments.runs.prepare import Setting, chosen_device, find_checkpoint, prepare, prepare_model
from ntk_iterncgp.experiments.runs.tune import tune
from ntk_iterncgp.experiments.settings import config_errors
from ntk_iterncgp.laplace_torch.detector import LEAST_INPUTS
from ntk_iterncgp.persistence.files import as_json, load_posterior, save_posterior
from ntk_iterncgp.runtime import parallel

POSTERIOR, RESULTS = "posterior.safetensors", "results.json"


@dataclass(frozen=True, eq=False)
class Fitted:
    """A posterior in memory, and how it came about; a kernel has no model."""

    predictor: Predictor
    model: nn.Module | None
    report: dict[str, Any]


def fit(config: RunConfig) -> Path:
    """The whole command; returns the posterior file. Processes that torchrun started fit together, and one writes."""
    check_keywords(config)
    with parallel.joined(chosen_device(config.device).type), parallel.together(), prepare(config, "fit") as setting:
        path = setting.folder / POSTERIOR
        with setting.saved_as_it_goes():
            fitted = fitted_to(setting)
            if not parallel.is_main():
                return path
            save(setting, fitted)
        size = path.stat().st_size / 2**20
        setting.log(f"Posterior: {path} ({size:.1f} MiB), after {setting.log.seconds:.0f} s.")
        return path


def fitted_to(setting: Setting) -> Fitted:
    """The posterior of the settings, its hyperparameters chosen."""
    if setting.config.kernel.name is not None:
        gp = fit_gp(setting)
        return Fitted(KernelPredictor.of(gp), None, _report(setting, gp))
    model = prepare_model(setting)
    la = fit_network(setting, model)
    report = _report(setting, la)
    if parallel.is_main():  # who writes the posterior
        tune(setting, la)
        _make_detector(setting, la)
    return Fitted(NetworkPredictor(la), model, report)


def _make_detector(setting: Setting, la: Any) -> None:
    """Of unfamiliar inputs, from the held-out ones, where there are enough of them to rank others among."""
    held_out = setting.data.held_out
    if held_out is not None and len(held_out) >= LEAST_INPUTS:  # type: ignore[arg-type]
        setting.log(str(la.detector(DataLoader(held_out, setting.config.data.batch_size))))


def _report(setting: Setting, fitted: Any) -> dict[str, Any]:
    return asdict(fitted.report_) | {"peak_bytes": setting.watch.peak_bytes.get("fit")}


def fit_network(setting: Setting, model: nn.Module) -> Any:
    """The flavour, fitted to all of the training data."""
    config, log = setting.config, setting.log
    loader = DataLoader(setting.data.train, config.data.batch_size)
    la = make_flavour(config, model)
    with config_errors(), warnings.catch_warnings():
        if config.fit.shard is not None:
            loader = shard_of(loader, shard_numbers(config.fit.shard))
        cost = la.estimate_cost(loader)
        log(str(cost))
        log(f"Fitting: {type(la).__name__} from {len(loader.dataset):,} data")  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message=".*nterrupt")  # said by the exit code
        is_known = cost.fit_seconds is not None and config.fit.refine_epochs is None
        what = f"Fitting (estimated: {duration(cost.fit_seconds)})" if is_known else "Fitting"
        with reporting(what, log), setting.watch("fit", memory=True):
            la.fit(loader, progress_bar=True, checkpoint=setting.checkpoint)
            if config.fit.refine_epochs is not None and la.report_.status != "interrupted":
                more = {"epochs": config.fit.refine_epochs, "checkpoint": setting.checkpoint}
                la.refine(loader, progress_bar=True, **more)
    if la.report_.status == "interrupted":
        raise KeyboardInterrupt
    log(str(la.report_))
    return la


def save(setting: Setting, fitted: Fitted) -> Path:
    """The posterior file, the same in small for people to read, and the settings.

    Where an evaluation lies there, its settings stay beside it until the next one is complete.
    """
    data, path = setting.data, setting.folder / POSTERIOR
    about = {
        "config": as_plain(setting.config),
        "scaling": {"mean": list(data.scaling.mean), "std": list(data.scaling.std)},
        "targets": None if data.target_scaling is None else [data.target_scaling.mean[0], data.target_scaling.std[0]],
        "class_names": list(data.class_names),
        "input_shape": list(data.input_shape),
        **_hyperparameters(fitted.predictor),
        "num_data": _num_data(setting, fitted),
        "report": fitted.report,
    }
    short = {key: value for key, value in fitted.report.items() if key != "history"}
    beside = {setting.folder / "posterior.json": as_json({**about, "report": short})}
    if setting.command == "fit" or not (setting.folder / RESULTS).exists():
        beside |= setting.resolved()
    weights = {} if fitted.model is None else fitted.model.state_dict()
    save_posterior(path, fitted.predictor.state(), weights, about, beside=beside)
    return path


def _num_data(setting: Setting, fitted: Fitted) -> int:
    if isinstance(fitted.predictor, NetworkPredictor):
        return int(fitted.predictor.la.n_data)
    return len(setting.data.train)  # type: ignore[arg-type]


def _hyperparameters(predictor: Predictor) -> dict[str, Any]:
    if isinstance(predictor, NetworkPredictor):
        precision = predictor.la.prior_precision.reshape(-1).tolist()
        temperature = float(predictor.la.output_temperature)
        return {
            "prior_precision": precision,
            "output_temperature": temperature,
            "noise_variance": predictor.noise_variance,
        }
    assert isinstance(predictor, KernelPredictor)
    return {"kernel": repr(predictor.prior.kernels[0]), "noise_variance": predictor.noise_variance}


def _is_newer(path: Path, config: RunConfig) -> bool:
    """Whether the posterior was written after the files it depends on; a model made by a function has none to ask."""
    if config.model.checkpoint is None and config.model.is_own:
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
    mine, theirs = as_plain(setting.config), dict(saved.get("config", {}))
    theirs["fit"] = {"shard": None, **theirs.get("fit", {})}  # which earlier versions did not know
    irrelevant = {"test_limit", "ood", "ood_limit", "batch_size", "download"}
    if setting.config.data.held_out_from == "test":
        irrelevant.remove("test_limit")
    for section in ("data", "model", "kernel", "fit", "seed"):
        one, other = (
            {k: v for k, v in s.items() if k not in irrelevant} if isinstance(s, dict) else s
            for s in (mine[section], theirs.get(section))
        )
        if one != other:
            return None
    restored = restore(path, setting.device, trusted_model=setting.config.model.name)
    setting.log(f"Posterior of an earlier fit with these settings: {path}")
    return Fitted(restored.predictor, restored.model, saved["report"])

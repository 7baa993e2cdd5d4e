"""`ntk-iterncgp evaluate`: how good are the probabilities, beside what else one could do?."""

from __future__ import annotations

import math
import resource
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ntk_iterncgp import kernels
from ntk_iterncgp.config import RunConfig, as_plain
from ntk_iterncgp.datasets import labels_of
from ntk_iterncgp.evaluation.compare import Comparison, Stopwatch, compare_families, compare_network
from ntk_iterncgp.evaluation.families import Family, Tabulated, Tempered
from ntk_iterncgp.evaluation.html import write_report
from ntk_iterncgp.evaluation.report import as_json, table, verdict
from ntk_iterncgp.files import write_json, write_text
from ntk_iterncgp.gp import NonConjugateGP
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.runs.fit import fit_network, save, saved_fit
from ntk_iterncgp.runs.flavour import check_keywords
from ntk_iterncgp.runs.prepare import Setting, num_weights, prepare, prepare_model

TEST_CHUNK = 500


def evaluate(config: RunConfig, *, command: str = "evaluate", title: str | None = None) -> Comparison:
    """The whole command: prints a table, writes `report.html`, `results.json` and `table.txt`."""
    setting = prepare(config, command)
    if config.kernel.name is None:
        check_keywords(config)
        comparison, report, about = _network(setting)
    else:
        comparison, report, about = _kernel(setting)
    log, folder = setting.log, setting.folder
    text = table(comparison)
    log(f"\n{table(comparison, short=True)}\n")
    for sentence in verdict(comparison):
        log(sentence)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    cost = {"seconds": log.seconds, "peak_memory_bytes": peak, "threads": torch.get_num_threads()}
    write_text(folder / "table.txt", text + "\n")
    write_json(
        folder / "results.json",
        {"config": as_plain(config), "about": about, "fit": report, **as_json(comparison), "cost": cost},
    )
    pictures = _pictures(setting, comparison)
    write_report(
        folder / "report.html",
        comparison,
        title=title or f"{config.data.name}, {config.model.name if config.kernel.name is None else config.kernel.name}",
        config=config,
        about=about,
        fit=report,
        cost=cost,
        pictures=pictures,
        class_names=setting.data.class_names,
    )
    log(f"\nReport:  {folder / 'report.html'}\nNumbers: {folder / 'results.json'}\nTook {log.seconds:.0f} s.")
    return comparison


def _network(setting: Setting) -> tuple[Comparison, dict[str, Any], dict[str, Any]]:
    earlier = saved_fit(setting)
    fitted = earlier or fit_network(setting, prepare_model(setting))
    if earlier is None:
        save(setting, fitted)
    about = {
        "weights": num_weights(fitted.model),
        "data": len(setting.data.train),  # type: ignore[arg-type]
        "rank": fitted.la.posterior.rank,
    }
    comparison = compare_network(fitted.la, fitted.model, setting.data, setting.config, setting.log)
    if earlier is None and setting.config.tuning.protocol != "none":  # so that `predict` is calibrated, too
        values = comparison["ours"].values
        fitted.la.prior_precision = math.exp(sum(map(math.log, values)) / len(values))
        save(setting, fitted)
    return comparison, fitted.report, about


def _kernel(setting: Setting) -> tuple[Comparison, dict[str, Any], dict[str, Any]]:
    """A Gaussian process with a kernel in the place of the network: its hyperparameters are those of the settings."""
    config, data, watch = setting.config, setting.data, Stopwatch()
    k, C = config.kernel, data.num_classes
    kernel = getattr(kernels, str(k.name))(lengthscale=k.lengthscale, outputscale=k.outputscale)
    gp = NonConjugateGP(
        kernel,
        Softmax(C),
        policy=k.policy,
        max_products=k.max_products,
        products_per_step=k.products_per_step,
        max_rank=k.max_rank,
        seed=config.seed,
    )
    X, y = _flat_inputs(data.train, setting), labels_of(data.train)
    setting.log(f"Fitting: {gp!r} to {len(X):,} data")
    with watch("fit ours"):
        gp.fit(X, y, progress_bar=True)
        if gp.report_.status == "interrupted":
            raise KeyboardInterrupt
        if k.refine_products:
            gp.refine(k.refine_products, progress_bar=True)
    setting.log(str(gp.report_))
    sets = {"test": data.test, **data.ood}
    with watch("see ours"):
        inputs = torch.cat([_flat_inputs(part, setting) for part in sets.values()])
        parts = [gp.latent(x) for x in inputs.split(TEST_CHUNK)]
    mean, covariance = (torch.cat(part) for part in zip(*parts, strict=True))
    one = torch.ones(1, dtype=torch.float64)
    samples = config.evaluate.link_samples
    families: dict[str, Family] = {
        "map": Tempered(mean, one),
        "temperature": Tempered(mean, torch.logspace(-1, 1, 161, dtype=torch.float64)),
        "ours": Tabulated(mean, covariance[None], one, 1.0, samples),
    }
    families = {name: family for name, family in families.items() if name in (*config.evaluate.baselines, "ours")}
    sizes = {name: len(part) for name, part in sets.items()}  # type: ignore[arg-type]
    comparison = compare_families(
        families, labels_of(data.test), sizes, config, setting.log, watch=watch, unavailable={}
    )
    return comparison, asdict(gp.report_), {"data": len(X), "rank": gp.report_.rank, "kernel": repr(kernel)}


def _flat_inputs(data: Dataset[Any], setting: Setting) -> Tensor:  # (N, d), in [0, 1]
    """Kernels measure distances between pixels as they are."""
    loader = DataLoader(data, setting.config.data.batch_size)
    return torch.cat([setting.data.scaling.undo(x).flatten(1) for x, _ in loader])


def _pictures(setting: Setting, comparison: Comparison) -> dict[int, Tensor]:
    """The most and the least certain test images, by their place among the scored inputs."""
    if len(setting.data.input_shape) != 3 or setting.data.input_shape[0] not in (1, 3):
        return {}
    confidence = comparison["ours"].probabilities.max(1).values
    order, count = confidence.argsort(descending=True, stable=True).tolist(), 6
    chosen = order[:count] + order[-count:] if len(order) >= 2 * count else order
    images = {}
    for place in chosen:
        x = setting.data.test[int(comparison.scored[place])][0][None]
        images[place] = setting.data.scaling.undo(x)[0].clamp(0, 1)
    return images

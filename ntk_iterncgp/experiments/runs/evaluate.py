"""`ntk-iterncgp evaluate`: how good are the predictions, beside what else one could do?

What is evaluated is what `fit` makes of the same settings. The hyperparameters of every method, also of IterNCGP, are
chosen once more by the protocol of the settings: all are on one footing, and none is scored on what it was tuned on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ntk_iterncgp.experiments.config import RunConfig, as_plain
from ntk_iterncgp.experiments.datasets import labels_of
from ntk_iterncgp.experiments.evaluation import figures, regression_report, report
from ntk_iterncgp.experiments.evaluation.compare import LABELS, Comparison, compare_families, compare_network
from ntk_iterncgp.experiments.evaluation.crossfit import folds_of
from ntk_iterncgp.experiments.evaluation.families import Family, Tabulated, Tempered
from ntk_iterncgp.experiments.evaluation.html import Opening, Page, as_html, cost_note, cost_table
from ntk_iterncgp.experiments.evaluation.novelty import in_words, novelty
from ntk_iterncgp.experiments.evaluation.pictures import cards
from ntk_iterncgp.experiments.evaluation.regression import RegressionComparison
from ntk_iterncgp.experiments.evaluation.stopwatch import Stopwatch
from ntk_iterncgp.experiments.runs.fit import RESULTS, Fitted, fitted_to, save, saved_fit
from ntk_iterncgp.experiments.runs.flavour import check_keywords
from ntk_iterncgp.experiments.runs.kernel import flat_inputs
from ntk_iterncgp.experiments.runs.predictor import KernelPredictor, NetworkPredictor
from ntk_iterncgp.experiments.runs.prepare import Setting, num_weights, prepare
from ntk_iterncgp.experiments.runs.targets import ONLY_NETWORKS, compare_targets, latent_at
from ntk_iterncgp.persistence.files import as_json, text_writer, write_together
from ntk_iterncgp.runtime.memory import highest_bytes

NUM_PICTURES = 6  # of the most certain test images, and of the least


Opener = Callable[[Setting, Fitted, Comparison], Opening]


def evaluate(
    config: RunConfig, *, command: str = "evaluate", title: str | None = None, opening: Opener | None = None
) -> Comparison | RegressionComparison:
    """The whole command: prints a table, writes `report.html`, `results.json` and `table.txt`.

    Args:
        config: The settings.
        command: What the log calls it.
        title: Of the report; None for data and model.
        opening: Makes what the report of a classifier begins with and the output ends with.

    Returns:
        All that the report shows.
    """
    check_keywords(config)
    with prepare(config, command) as setting:
        return _evaluate(setting, title, opening)


def _evaluate(setting: Setting, title: str | None, opening: Opener | None) -> Comparison | RegressionComparison:
    config = setting.config
    folds_of(config, len(labels_of(setting.data.test)))  # too few inputs to tune on are found before the fit
    fitted = saved_fit(setting)
    if fitted is None:
        with setting.saved_as_it_goes():
            fitted = fitted_to(setting)
            save(setting, fitted)
    about = _about(setting, fitted)
    of_user = config.data.train is not None and config.data.name in ("arrays", "image_folder")
    data_name = Path(str(config.data.train)).stem if of_user else config.data.name
    title = title or f"{data_name}, {config.kernel.name or config.model.name}"
    if setting.data.task == "regression":
        return _finish_targets(setting, fitted, about, title)
    return _finish_classes(setting, fitted, about, title, opening)


def _finish_classes(
    setting: Setting, fitted: Fitted, about: dict[str, Any], title: str, opening: Opener | None
) -> Comparison:
    comparison = _compare_classes(setting, fitted)
    table = report.results_table(comparison)
    pictures, detector, data = _pictures(setting, comparison), fitted.predictor.detector, setting.data
    found = None if detector is None else novelty(detector, data.test, data.ood, setting.config.data.batch_size)
    verdict = report.verdict(comparison.results) + _as_saved(fitted) + ([] if found is None else [in_words(found)])
    _finish(
        setting,
        fitted,
        about,
        Page(
            title=title,
            summary=report.summary(comparison, setting.config, about, fitted.report),
            verdict=verdict,
            results=table,
            others=report.others_table(comparison),
            panels=figures.panels(comparison, fitted.report),
            pictures=cards(comparison["ours"].probabilities, comparison.labels, pictures, setting.data.class_names),
            costs=cost_table(comparison.results),
            cost_note=cost_note(_cost(setting), comparison.rows_seconds),
            opening=None if opening is None else opening(setting, fitted, comparison),
        ),
        shown=report.on_screen(comparison),
        numbers={**report.as_json(comparison), "novelty": found},
    )
    return comparison


def _as_saved(fitted: Fitted) -> list[str]:
    """In what the saved fit of a classifier differs from its row in the table."""
    if not isinstance(fitted.predictor, NetworkPredictor):
        return []
    la = fitted.predictor.la
    return [
        "The row of IterNCGP has a prior precision alone, chosen as all are. The saved fit, which predict uses, "
        f"has an output temperature of {float(la.output_temperature):.3g} and a prior precision of "
        f"{float(la.prior_precision.mean()):.3g}; it is not in the table."
    ]


def _finish_targets(setting: Setting, fitted: Fitted, about: dict[str, Any], title: str) -> RegressionComparison:
    comparison = compare_targets(setting, fitted.predictor, fitted.model, _cost_of_fit(fitted))
    table = regression_report.results_table(comparison)
    _finish(
        setting,
        fitted,
        about,
        Page(
            title=title,
            summary=regression_report.summary(comparison, setting.config, about, fitted.report),
            verdict=report.verdict(comparison.results),
            results=table,
            others=None,
            panels=regression_report.panels(comparison, fitted.report),
            pictures=(),
            costs=cost_table(comparison.results),
            cost_note=cost_note(_cost(setting), 0.0),
        ),
        shown=table.text(),
        numbers=regression_report.as_json(comparison),
    )
    return comparison


def _finish(
    setting: Setting, fitted: Fitted, about: dict[str, Any], page: Page, *, shown: str, numbers: dict[str, Any]
) -> None:
    """The same end for all: the table on the screen, then the files."""
    log, folder, config = setting.log, setting.folder, setting.config
    log(f"\n{shown}\n")
    for sentence in page.verdict if page.opening is None else page.opening.lines:
        log(sentence)
    tables = [page.results.text(), *([page.others.text()] if page.others else [])]
    content = {"config": as_plain(config), "about": about, "fit": fitted.report, **numbers, "cost": _cost(setting)}
    texts = {"table.txt": "\n\n".join(tables) + "\n", RESULTS: as_json(content), "report.html": as_html(page, config)}
    files = {folder / name: text for name, text in texts.items()} | setting.resolved()
    write_together({path: text_writer(text) for path, text in files.items()})
    log(f"\nReport:  {folder / 'report.html'}\nNumbers: {folder / 'results.json'}\nTook {log.seconds:.0f} s.")


def _about(setting: Setting, fitted: Fitted) -> dict[str, Any]:
    about: dict[str, Any] = {"data": len(setting.data.train), "rank": fitted.report["rank"]}  # type: ignore[arg-type]
    if isinstance(fitted.predictor, KernelPredictor):
        return {**about, "kernel": repr(fitted.predictor.prior.kernels[0])}
    assert fitted.model is not None
    return {**about, "weights": num_weights(fitted.model)}


def _cost(setting: Setting) -> dict[str, Any]:
    seconds, threads = setting.log.seconds, torch.get_num_threads()
    return {"seconds": seconds, "peak_memory_bytes": highest_bytes(), "threads": threads}


def _compare_classes(setting: Setting, fitted: Fitted) -> Comparison:
    config, data, watch = setting.config, setting.data, _cost_of_fit(fitted)
    if isinstance(fitted.predictor, NetworkPredictor):
        assert fitted.model is not None
        return compare_network(fitted.predictor.la, fitted.model, data, config, setting.log, watch=watch)
    sets = {"test": data.test, **data.ood}
    with watch("see ours"):
        inputs = torch.cat([flat_inputs(part, data.scaling, data.input_shape) for part in sets.values()])
        parts = latent_at(fitted.predictor, inputs, setting.log)
    mean, covariance = (torch.cat(part) for part in zip(*parts, strict=True))
    one = torch.ones(1, dtype=torch.float64)
    families: dict[str, Family] = {
        "map": Tempered(mean, one),
        "temperature": Tempered(mean, torch.logspace(-1, 1, 161, dtype=torch.float64)),
        "ours": Tabulated(mean, covariance[None], one, 1.0, config.evaluate.link_samples),
    }
    asked = config.evaluate.baselines
    unavailable = {LABELS[name]: ONLY_NETWORKS for name in asked if name not in families}
    families = {name: family for name, family in families.items() if name in (*asked, "ours")}
    sizes = {name: len(part) for name, part in sets.items()}  # type: ignore[arg-type]
    labels = labels_of(data.test)
    names = LABELS | {"map": "the mean alone"}
    return compare_families(
        families, labels, sizes, config, setting.log, watch=watch, unavailable=unavailable, names=names
    )


def _cost_of_fit(fitted: Fitted) -> Stopwatch:
    """What the fit cost is in its report, also where it was another command's."""
    watch, peak = Stopwatch(), fitted.report.get("peak_bytes")
    watch.seconds["fit ours"] = float(fitted.report["seconds"])
    if peak is not None:
        watch.peak_bytes["fit ours"] = int(peak)
    return watch


def _pictures(setting: Setting, comparison: Comparison) -> dict[int, Tensor]:
    """The most and the least certain test images, by their place among the scored inputs."""
    if len(setting.data.input_shape) != 3 or setting.data.input_shape[0] not in (1, 3):
        return {}
    confidence = comparison["ours"].probabilities.max(1).values
    order, count = confidence.argsort(descending=True, stable=True).tolist(), NUM_PICTURES
    chosen = order[:count] + order[-count:] if len(order) >= 2 * count else order
    images = {}
    for place in chosen:
        x = setting.data.test[int(comparison.scored[place])][0][None]
        images[place] = setting.data.scaling.undo(x)[0].clamp(0, 1)
    return images

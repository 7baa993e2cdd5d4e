"""`ntk-iterncgp evaluate`: how good are the predictions, beside what else one could do?

What is evaluated is what `fit` makes of the same settings. The hyperparameters of every method, also of IterNCGP, are
chosen once more by the protocol of the settings: all are on one footing, and none is scored on what it was tuned on.
"""

from __future__ import annotations

import time
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
from ntk_iterncgp.experiments.evaluation.html import (
    DetectorSection,
    Opening,
    Page,
    Price,
    as_html,
    cost_note,
    cost_table,
)
from ntk_iterncgp.experiments.evaluation.novelty import TEST, Novelty
from ntk_iterncgp.experiments.evaluation.pictures import Card, cards, scored_card
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
MOST_TIMED, REPEATS = 100, 3  # test inputs whose prediction is timed, and how often


Opener = Callable[[Setting, Fitted, Comparison, Novelty | None], Opening]


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
    detector, data = fitted.predictor.detector, setting.data
    found = None if detector is None else Novelty.of(detector, data.test, data.ood, setting.config.data.batch_size)
    verdict = report.verdict(comparison.results) + _as_saved(fitted) + ([] if found is None else [found.in_words()])
    pictures, convergence, price = _pictures(setting, comparison), None, None
    if isinstance(fitted.predictor, NetworkPredictor):
        x = _first_inputs(setting)
        price, convergence = (
            price_of(fitted.predictor.la, x, setting.config.fit.contrasts),
            fitted.predictor.la.convergence(x),
        )
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
            panels=figures.panels(comparison, fitted.report, convergence),
            pictures=cards(comparison["iterncgp"].probabilities, comparison.labels, pictures, setting.data.class_names),
            costs=cost_table(comparison.results),
            cost_note=cost_note(_cost(setting), comparison.rows_seconds, fitted.report.get("epochs"), price),
            detector=None if found is None else _detector_section(setting, found),
            opening=None if opening is None else opening(setting, fitted, comparison, found),
        ),
        shown=report.on_screen(comparison),
        numbers={**report.as_json(comparison), "novelty": None if found is None else found.as_json()},
    )
    return comparison


def _as_saved(fitted: Fitted) -> list[str]:
    """In what the saved fit of a classifier differs from its row in the table."""
    if not isinstance(fitted.predictor, NetworkPredictor):
        return []
    la = fitted.predictor.la
    if la.settings.mean == "refined":
        return []
    return [
        f"The row '{LABELS['calibrated']}' has an output temperature and a prior precision, chosen together as by fit; "
        f"the row '{LABELS['iterncgp']}' a prior precision alone. The saved fit, which predict uses, has an output "
        f"temperature of {float(la.output_temperature):.3g} and a prior precision of "
        f"{float(la.prior_precision.mean()):.3g}."
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


def price_of(la: Any, x: Tensor, contrasts: int | str = "auto") -> Price:
    """Time a prediction of probabilities beside a forward pass of the network over the same inputs."""

    def fastest(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    def forward() -> None:
        with torch.no_grad():
            la.model(x)

    own = fastest(lambda: la(x, link_approx="quadrature", contrasts=contrasts))
    return Price(1000 * own / len(x), own / fastest(forward), len(x))


def _first_inputs(setting: Setting) -> Tensor:
    test, device = setting.data.test, setting.device
    return torch.stack([test[i][0] for i in range(min(MOST_TIMED, len(test)))]).to(device)  # type: ignore[arg-type]


def _cost(setting: Setting) -> dict[str, Any]:
    seconds, threads = setting.log.seconds, torch.get_num_threads()
    return {"seconds": seconds, "peak_memory_bytes": highest_bytes(), "threads": threads}


def _compare_classes(setting: Setting, fitted: Fitted) -> Comparison:
    config, data, watch = setting.config, setting.data, _cost_of_fit(fitted)
    if isinstance(fitted.predictor, NetworkPredictor):
        assert fitted.model is not None
        return compare_network(fitted.predictor.la, fitted.model, data, config, setting.log, watch=watch)
    sets = {"test": data.test, **data.ood}
    with watch("see iterncgp"):
        inputs = torch.cat([flat_inputs(part, data.scaling, data.input_shape) for part in sets.values()])
        parts = latent_at(fitted.predictor, inputs, setting.log)
    mean, covariance = (torch.cat(part) for part in zip(*parts, strict=True))
    one = torch.ones(1, dtype=torch.float64)
    families: dict[str, Family] = {
        "map": Tempered(mean, one),
        "temperature": Tempered(mean, torch.logspace(-1, 1, 161, dtype=torch.float64)),
        "iterncgp": Tabulated(mean, covariance[None], one, 1.0, config.evaluate.link_samples),
    }
    asked = config.evaluate.baselines
    unavailable = {LABELS[name]: ONLY_NETWORKS for name in asked if name not in families}
    families = {name: family for name, family in families.items() if name in (*asked, "iterncgp")}
    sizes = {name: len(part) for name, part in sets.items()}  # type: ignore[arg-type]
    labels = labels_of(data.test)
    names = LABELS | {"map": "the mean alone"}
    return compare_families(
        families, labels, sizes, config, setting.log, watch=watch, unavailable=unavailable, names=names
    )


def _cost_of_fit(fitted: Fitted) -> Stopwatch:
    """What the fit cost is in its report, also where it was another command's."""
    watch, peak = Stopwatch(), fitted.report.get("peak_bytes")
    watch.seconds["fit iterncgp"] = float(fitted.report["seconds"])
    if peak is not None:
        watch.peak_bytes["fit iterncgp"] = int(peak)
    return watch


def _detector_section(setting: Setting, found: Novelty) -> DetectorSection:
    """With the test images that are least familiar to the detector, and the other images that pass most easily."""
    data, pictures = setting.data, []
    if _shows_images(setting):
        order = {name: p.argsort(stable=True).tolist() for name, p in found.p_values.items()}
        labels = labels_of(data.test)
        least = [
            _scored(setting, found, TEST, place, str(data.class_names[int(labels[place])]))
            for place in order[TEST][:NUM_PICTURES]
        ]
        passing = [
            _scored(setting, found, name, place, name)
            for name in found.others
            for place in order[name][: -1 - NUM_PICTURES // len(found.others) : -1]
        ]
        pictures = [("Test images that are least familiar", least), ("Other images that pass most easily", passing)]
    return DetectorSection(found.in_words(), found.table(), found.panels(), pictures)


def _scored(setting: Setting, found: Novelty, name: str, place: int, title: str) -> Card:
    data = setting.data.test if name == TEST else setting.data.ood[name]
    image = setting.data.scaling.undo(data[place][0][None])[0].clamp(0, 1)
    return scored_card(image, title, float(found.confidences[name][place]), float(found.p_values[name][place]))


def _shows_images(setting: Setting) -> bool:
    shape = setting.data.input_shape
    return len(shape) == 3 and shape[0] in (1, 3)


def _pictures(setting: Setting, comparison: Comparison) -> dict[int, Tensor]:
    """The most and the least certain test images, by their place among the scored inputs."""
    if not _shows_images(setting):
        return {}
    confidence = comparison["iterncgp"].probabilities.max(1).values
    order, count = confidence.argsort(descending=True, stable=True).tolist(), NUM_PICTURES
    chosen = order[:count] + order[-count:] if len(order) >= 2 * count else order
    images = {}
    for place in chosen:
        x = setting.data.test[int(comparison.scored[place])][0][None]
        images[place] = setting.data.scaling.undo(x)[0].clamp(0, 1)
    return images

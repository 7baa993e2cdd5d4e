"""The prior precision that `fit` leaves behind: the grid follows the optimum, and few data are not asked."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from ntk_iterncgp.experiments import cli
from ntk_iterncgp.experiments.config import as_yaml, flat, from_settings, load
from ntk_iterncgp.experiments.evaluation.compare import precision_grid
from ntk_iterncgp.experiments.runs.tune import LIMITS, TOLERANCE, Search, tune
from ntk_iterncgp.experiments.settings import ConfigError

PLAIN = load(None)


def log_precision(search: Search, i: int) -> float:
    return float(search.precisions[i].log10())


def test_the_grid_of_the_settings_is_continued_in_its_own_steps_up_to_the_limits() -> None:
    for settings in ([], ["tuning.steps_per_decade=3", "tuning.precision_min=0.02", "tuning.precision_max=7e4"]):
        config = load(None, settings)
        search, tuning = Search.of(config), config.tuning
        inner = search.precisions[[search.first, search.last]].tolist()
        assert inner == pytest.approx([tuning.precision_min, tuning.precision_max])
        ratios = search.precisions[1:] / search.precisions[:-1]
        torch.testing.assert_close(ratios, ratios[0].expand_as(ratios))
        step = float(ratios[0])
        assert LIMITS[0] / step < float(search.precisions[0]) <= LIMITS[0] * 1.001
        assert LIMITS[1] * 0.999 <= float(search.precisions[-1]) < LIMITS[1] * step
    narrow = load(None, ["tuning.precision_min=1", "tuning.precision_max=1.01"])
    assert precision_grid(narrow).tolist() == pytest.approx([1, 1.01])
    assert Search.of(load(None, ["tuning.precision_min=1", "tuning.precision_max=1.3"])).last > 0
    wide = Search.of(load(None, ["tuning.precision_max=1e14"]))
    assert wide.last == len(wide.precisions) - 1


@pytest.mark.parametrize("optimum", [-8.0, -5.5, -3.0, -1.25, 0.0, 4.0, 6.0, 6.25, 9.5, 11.0])
@pytest.mark.parametrize("num_noises", [1, 9])
def test_the_optimum_is_found_inside_the_grid_and_outside_of_it(optimum: float, num_noises: int) -> None:
    search = Search.of(PLAIN)
    found = search.best(num_noises, lambda i, j: (log_precision(search, i) - optimum) ** 2 + (j - num_noises // 2) ** 2)
    assert log_precision(search, found.precision) == pytest.approx(optimum) and found.noise == num_noises // 2
    assert found.limit is None and found.is_widened == (not -3 <= optimum <= 6)


def test_no_optimum_is_reported_and_the_precision_is_the_furthest_inside_that_costs_little() -> None:
    search, asked = Search.of(PLAIN), []

    def decaying(i: int, j: int) -> float:  # the NLL of a network that is too cautious already: 100/δ more than it
        asked.append((i, j))
        return 0.5 + 100 / float(search.precisions[i])

    found = search.best(1, decaying)
    assert (found.limit, found.is_widened) == ("larger", False)
    assert float(search.precisions[found.precision]) == pytest.approx(100 / TOLERANCE)  # and not 1e12
    assert len(asked) == len(set(asked)), "no loss is computed twice"
    found = search.best(1, lambda i, j: 0.5 + 1e-4 * float(search.precisions[i]))
    assert found.limit == "smaller"
    assert float(search.precisions[found.precision]) <= 100 < 2 * float(search.precisions[found.precision])
    flat = search.best(1, lambda i, j: 0.5)  # nothing is known: then as the settings say
    assert search.first <= flat.precision <= search.last


def table(folder: Path, number: int, *, noise: float = 1.0) -> None:
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, number)
    x = 2 * np.eye(4)[y] + noise * generator.normal(size=(number, 4))
    np.savetxt(folder / "classes.csv", np.column_stack([x, y]), delimiter=",")
    np.savetxt(folder / "targets.csv", np.column_stack([x, x @ [1, 2, -1, 0.5]]), delimiter=",")
    (folder / "run.yaml").write_text(
        "data: {name: arrays, train: classes.csv}\nmodel: {name: mlp, arguments: {width: 8, depth: 1}}\n"
        "fit: {num_actions: 30}\nevaluate: {link_samples: 64}\n"
    )


def fit(*settings: str) -> tuple[int, str, float]:
    """Exit code, log and prior precision."""
    changes = [text for setting in settings for text in ("--set", setting)]
    Path("out", "run.log").unlink(missing_ok=True)  # of an earlier one
    code = cli.main(["fit", "run.yaml", *changes, "--output-dir", "out"])
    if code:
        return code, "", 0.0
    about = json.loads(Path("out", "posterior.json").read_text(encoding="utf-8"))
    return code, Path("out", "run.log").read_text(encoding="utf-8"), about["prior_precision"][0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.cli
@pytest.mark.parametrize(
    ("number", "held_out"), [(60, 0), (123, 0), (125, 20), (180, 28), (400, 50), (1000, 80)], ids=str
)
def test_a_tenth_is_held_out_but_more_where_that_is_few_and_none_where_too_few(
    folder: Path, number: int, held_out: int
) -> None:
    table(folder, number)  # of which a fifth is for the test
    code, log, _ = fit("model.train_epochs=2")
    assert code == 0
    if held_out:
        assert f", {held_out} held out, 3 classes" in log and f"by the cross-fitted NLL of {held_out} inputs." in log
    else:
        assert "held out, 3 classes" not in log
        assert "by the evidence, since 20 inputs to choose on would be more than a fifth of the training data" in log


@pytest.mark.cli
def test_too_few_inputs_that_are_named_to_choose_on_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(folder, 180)
    assert fit("data.held_out=14")[0] == 2
    assert "data.held_out must be 0 or at least 20; got 14, too few to choose a prior precision on. Try 0 for" in (
        capsys.readouterr().err
    )
    code, log, precision = fit("data.held_out=14", "tuning=none", "model.train_epochs=2", "fit.prior_precision=3")
    assert code == 0 and precision == 3 and ", 14 held out" in log and "Prior precision" not in log
    code, log, _ = fit("tuning=none", "model.train_epochs=2")
    assert code == 0 and "held out" not in log, "where nothing is chosen all data are learnt from"


@pytest.mark.cli
def test_a_network_that_is_too_cautious_gets_a_temperature_below_one(folder: Path) -> None:
    """Hardly trained, it is less sure than it should be: a variance alone cannot mend that."""
    table(folder, 400, noise=0.3)
    code, log, _ = fit("model.train_epochs=25", "data.held_out=100")
    found = re.search(r"Output temperature (\S+) and prior precision", log)
    assert code == 0 and found is not None and float(found[1]) < 0.9


@pytest.mark.cli
def test_a_refined_mean_of_a_classifier_keeps_the_precision_of_its_fit(folder: Path) -> None:
    table(folder, 180)
    settings = ("fit.mean=refined", "fit.prior_precision=2.7", "model.train_epochs=40", "fit.num_actions=15")
    code, log, precision = fit(*settings)
    assert code == 0 and precision == pytest.approx(2.7) and "held out" not in log
    assert "Prior precision 2.7, as set (fit.prior_precision): a refined mean of a classifier is the mode under" in log
    changes = [text for setting in (*settings, "evaluate.baselines=[map, prior, exact]") for text in ("--set", setting)]
    assert cli.main(["evaluate", "run.yaml", *changes, "--output-dir", "out"]) == 0
    results = json.loads(Path("out", "results.json").read_text(encoding="utf-8"))
    methods = {method["name"]: method for method in results["methods"]}
    assert methods["iterncgp"]["hyperparameters"] == pytest.approx([2.7, 2.7]) and results["evidence_precision"] is None
    assert len(set(methods["prior"]["hyperparameters"])) >= 1 and methods["prior"]["hyperparameters"] != [2.7, 2.7]
    code, log, precision = fit("data.task=regression", "data.train=targets.csv", *settings)
    assert code == 0 and precision != pytest.approx(2.7) and "by the NLL of 28 inputs held out" in log


@pytest.mark.cli
@pytest.mark.parametrize(
    ("task", "data"),
    [("regression", "data.held_out=100"), ("regression", "data.held_out=0"), ("classification", "data.held_out=0")],
)
def test_a_grid_that_lacks_the_optimum_is_widened_to_it(folder: Path, task: str, data: str) -> None:
    table(folder, 400)
    settings = [data, "model.train_epochs=150", "model.learning_rate=0.03", f"data.task={task}"]
    settings += ["data.train=targets.csv"] if task == "regression" else []
    code, log, precision = fit(*settings)
    assert code == 0 and "Warning: the" not in log
    outside = ["tuning.precision_min=1e-7", "tuning.precision_max=1e-5"]
    code, log, again = fit(*settings, *outside)
    assert code == 0 and again == pytest.approx(precision, rel=1e-6)
    what = "NLL" if "100" in data else "evidence"
    assert f"outside of tuning.precision_min and precision_max, 1e-07 and 1e-05, between which the {what} has no" in log


@pytest.mark.parametrize(("text", "expected"), [("3", 3), ("all", "all"), ("auto", "auto")])
def test_contrasts_are_a_number_or_a_word_and_reach_the_calibration(text: str, expected: int | str) -> None:
    config = load(None, [f"fit.contrasts={text}"])
    assert from_settings(dict(flat(yaml.safe_load(as_yaml(config))))).fit.contrasts == expected
    asked = []

    class Flavour:
        def calibrate(self, loader: Any, *, contrasts: int | str) -> str:
            asked.append(contrasts)
            return "as told"

    data = SimpleNamespace(held_out=[1, 2], task="classification")
    tune(SimpleNamespace(config=config, data=data, log=lambda line: None), Flavour())  # type: ignore[arg-type]
    assert asked == [expected]


@pytest.mark.parametrize("wrong", ["most", "0", "1.5", "null", "[1]"])
def test_contrasts_that_make_no_sense_are_refused_by_name(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"fit.contrasts must be a whole number.* or all or auto; got"):
        load(None, [f"fit.contrasts={wrong}"])

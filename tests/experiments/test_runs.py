"""A run from beginning to end at toy size: fit, predict, evaluate; the files it leaves, and what they hold."""

import base64
import csv
import importlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.experiments import cli, datasets, demo, models
from ntk_iterncgp.experiments.config import DataConfig, ModelConfig, load
from ntk_iterncgp.experiments.evaluation.figures import in_bounds
from ntk_iterncgp.experiments.evaluation.links import class_probabilities
from ntk_iterncgp.experiments.evaluation.stopwatch import reset_peak
from ntk_iterncgp.experiments.runs.predict import restore
from ntk_iterncgp.experiments.runs.predictor import KernelPredictor
from ntk_iterncgp.experiments.settings import ConfigError
from ntk_iterncgp.persistence import files

SMALL = [
    "data.train_limit=300",
    "data.test_limit=120",
    "data.ood=[rotated, noise]",  # two kinds, as in the demo: the widest table
    "data.ood_limit=40",
    "model.train_epochs=6",
    "model.learning_rate=0.02",
    "model.train_batch_size=20",
    "model.arguments={width: 4}",
    "fit.num_actions=6",
    "evaluate.link_samples=64",
    "evaluate.bootstrap=200",
]


def sets(settings: list[str]) -> list[str]:
    return [text for setting in settings for text in ("--set", setting)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fit and an evaluation, through the command line."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "small.yaml").write_text("# all by --set\n")
    baselines = ["evaluate.baselines=[map, temperature, prior, last_layer, kfac, sod, ella, exact]"]
    assert cli.main(["fit", str(folder / "small.yaml"), *sets(SMALL), "--output-dir", str(folder / "out")]) == 0
    arguments = [str(folder / "small.yaml"), *sets(SMALL + baselines), "--output-dir", str(folder / "out")]
    assert cli.main(["evaluate", *arguments]) == 0
    return folder / "out"


@pytest.mark.cli
def test_a_run_leaves_its_results_and_nothing_half_done(run: Path) -> None:
    assert sorted(path.name for path in run.iterdir()) == [
        "config.yaml",
        "model.safetensors",
        "posterior.json",
        "posterior.safetensors",
        "report.html",
        "results.json",
        "run.log",
        "table.txt",
    ]
    log = (run / "run.log").read_text(encoding="utf-8")
    assert "No checkpoint was given (model.checkpoint), so it is trained here for 6 epochs." in log
    assert "Posterior of an earlier fit with these settings" in log  # evaluate does not fit again
    assert re.search(r"Output temperature \S+ and prior precision \S+: .* by the cross-fitted NLL of 50 inputs", log)
    temperature = json.loads((run / "posterior.json").read_text())["output_temperature"]
    assert temperature > 0
    assert f"The saved fit, which predict uses, has an output temperature of {temperature:.3g} and" in log


@pytest.mark.cli
def test_the_detector_is_scored_beside_the_methods(run: Path) -> None:
    found = json.loads((run / "results.json").read_text())["novelty"]
    assert found["rate"] == pytest.approx(1 / (found["num_ranked"] + 1)) or found["rate"] in (0.01, 0.05)
    assert 0 <= found["test_alarms"] < 0.5 and found["sets"].keys() == {"rotated", "noise"}
    assert found["sets"]["noise"]["auroc"] > 0.7
    sentence = f"with AUROC {found['sets']['noise']['auroc']:.3f}, alarms at"
    assert all(sentence in (run / name).read_text(encoding="utf-8") for name in ("run.log", "report.html"))


@pytest.mark.cli
def test_the_report_has_a_section_about_the_detector_and_says_what_a_prediction_costs(run: Path) -> None:
    page = (run / "report.html").read_text(encoding="utf-8")
    section = page.partition("<h2>Detector of unfamiliar inputs")[2].partition("<h2>Cost")[0]
    areas = json.loads((run / "results.json").read_text(encoding="utf-8"))["novelty"]["sets"]["noise"]
    for area in (areas["auroc"], areas["entropy"]["auroc"], areas["energy"]["auroc"]):
        assert f">{area:.3f}</td>" in section
    assert all(f"<b>{title}</b>" in section for title in ("Scores of the detector", "ROC of the detector", "p-values"))
    assert section.count(">p-value<") == 12  # six test images, three of each other set
    assert re.search(r"A prediction by IterNCGP takes \S+ ms for each of 100 inputs, \S+ forward passes", page)


def test_a_ratio_to_the_exact_variance_is_called_below_one_where_it_is() -> None:
    assert in_bounds(torch.tensor([1.002, 1.0])) == "1.000 to 1.002, never below one"
    assert in_bounds(torch.tensor([1.5, 0.9])) == "0.900 to 1.500, below one at 1 of 2 inputs"


@pytest.mark.cli
def test_the_resolved_settings_repeat_the_run(run: Path) -> None:
    config = load(run / "config.yaml")
    assert config.data.train_limit == 300 and config.data.ood == ("rotated", "noise")
    assert config.output_dir == str(run)


@pytest.mark.cli
def test_a_run_that_fails_leaves_the_settings_of_the_results_that_lie_there(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **settings: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "out"
    shutil.copytree(run, folder)
    (tmp_path / "small.yaml").touch()
    other = [str(tmp_path / "small.yaml"), *sets([*SMALL, "fit.num_actions=3"]), "--output-dir", str(folder)]

    def replaced() -> list[str]:
        return [
            p.name for p in sorted(folder.iterdir()) if p.is_file() and p.read_bytes() != (run / p.name).read_bytes()
        ]

    evaluation = importlib.import_module("ntk_iterncgp.experiments.runs.evaluate")
    with monkeypatch.context() as patch:
        patch.setattr(models, "train", interrupt)
        assert cli.main(["fit", *other]) == 130 and replaced() == ["run.log"]
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "compare_network", interrupt)
        assert cli.main(["evaluate", *other]) == 130
    assert replaced() == ["posterior.json", "posterior.safetensors", "run.log"]  # which say what they were fitted with
    assert cli.main(["fit", *other]) == 0
    assert load(folder / "config.yaml").fit.num_actions == 3


@pytest.mark.cli
def test_the_posterior_file_predicts_as_the_posterior_does(run: Path, tmp_path: Path) -> None:
    config = load(run / "config.yaml")
    data = datasets.load(config.data, seed=0)
    x = data.test[:20][0]
    raw = data.scaling.undo(x)
    np.savez(tmp_path / "new.npz", x=raw.numpy())
    arguments = [str(run / "posterior.safetensors"), "--input", str(tmp_path / "new.npz")]
    assert cli.main(["predict", *arguments, "--output", str(tmp_path / "new.csv")]) == 0
    assert cli.main(["predict", *arguments, "--output", str(tmp_path / "out.npz")]) == 0
    restored = restore(run / "posterior.safetensors", torch.device("cpu"))
    mean, covariance = restored.predictor.latent(x)
    expected = class_probabilities(mean.double(), covariance.double(), link="quadrature", num_samples=64)
    content = np.load(tmp_path / "out.npz", allow_pickle=False)
    np.testing.assert_allclose(content["probabilities"], expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(content["epistemic"] + content["aleatoric"], content["entropy"], atol=1e-9)
    assert cli.main(["predict", *arguments, "--contrasts", "2", "--output", str(tmp_path / "few.npz")]) == 0
    variance = restored.predictor.latent(x, 2)[1].diagonal(dim1=1, dim2=2).sum(1)
    few = np.load(tmp_path / "few.npz", allow_pickle=False)["variance"]
    np.testing.assert_allclose(few, variance.numpy(), rtol=1e-5)
    assert not np.allclose(few, content["variance"])
    with pytest.raises(SystemExit):
        cli.main(["predict", *arguments, "--contrasts", "most"])
    rows = list(csv.reader((tmp_path / "new.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0][:7] == ["input", "class", "confidence", "entropy", "epistemic", "aleatoric", "variance"]
    assert len(rows) == 21 and rows[1][1] == str(int(expected[0].argmax()))
    first = rows[0].index("p(0)" if "p(0)" in rows[0] else rows[0][-expected.shape[1]])  # after a detector's columns
    assert [float(value) for value in rows[3][first:]] == pytest.approx(expected[2].tolist(), abs=1e-5)


@pytest.mark.cli
def test_the_posterior_file_holds_tensors_and_text_alone(run: Path) -> None:
    with safe_open(run / "posterior.safetensors", framework="pt") as file:
        assert {name.partition(".")[0] for name in file.keys()} == {"model", "posterior", "sha256"}  # noqa: SIM118
        header = json.loads(file.metadata()[files.HEADER])
    assert header["format"] == f"{files.POSTERIOR} {files.POSTERIOR_VERSION}"
    assert header["about"]["class_names"] == [str(c) for c in range(10)]
    short = json.loads((run / "posterior.json").read_text(encoding="utf-8"))
    assert short["num_data"] == 250 and "history" not in short["report"]


@pytest.mark.cli
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"x": np.zeros((3, 5, 5))}, "must hold inputs of shape (1, 8, 8), as in the fit; got (1, 5, 5)"),
        ({"z": np.zeros(3)}, "must hold the arrays x; got z"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_a_sentence(
    run: Path, tmp_path: Path, content: dict[str, np.ndarray], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "new.npz", **content)
    arguments = [str(run / "posterior.safetensors"), "--input", str(tmp_path / "new.npz")]
    assert cli.main(["predict", *arguments, "--output", str(tmp_path / "new.csv")]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "new.csv").exists()


@pytest.mark.cli
def test_a_damaged_posterior_is_refused_in_a_sentence(run: Path, tmp_path: Path) -> None:
    content = (run / "posterior.safetensors").read_bytes()
    for name, damaged in (("short", content[: len(content) // 2]), ("long", content + b"x"), ("none", b"")):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(files.FileError, match="is not a posterior file, or is damaged"):
            files.load_posterior(tmp_path / name)


@pytest.mark.cli
def test_ours_is_close_to_the_truth_and_never_below_it(run: Path) -> None:
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    methods = {method["name"]: method for method in results["methods"]}
    baselines = ["map", "temperature", "prior", "last_layer", "kfac", "sod", "ella", "exact"]
    assert list(methods) == [*baselines, "iterncgp", "calibrated"]
    assert results["unavailable"] == {} and results["num_scored"] == 120
    assert results["variance_over_exact"]["least"] >= 1 - 1e-4
    assert methods["iterncgp"]["accuracy"] > 0.7
    for name, method in methods.items():
        assert method["nll"] > 0 and 0 <= method["ece"] <= 1 and 0 <= method["ood"]["rotated"]["entropy"]["auroc"] <= 1
        assert len(method["hyperparameters"]) == 2
        assert (method["difference_to_iterncgp"] is None) == (name == "iterncgp")
        assert (method["probit"] is None) == (name in ("map", "temperature", "calibrated"))
    assert len(methods["calibrated"]["output_temperatures"]) == 2 and "output_temperatures" not in methods["iterncgp"]
    assert 1 <= len(results["verdict"]) <= 4 and "IterNCGP, calibrated" in " ".join(results["verdict"])
    peaks = {name: method["fit_peak_bytes"] for name, method in methods.items()}
    assert peaks["map"] is None and all(methods[name]["fit_seconds"] > 0 for name in ("iterncgp", "kfac", "exact"))
    if reset_peak() is not None:  # where the system can tell
        assert all(0 <= peaks[name] <= results["cost"]["peak_memory_bytes"] for name in ("iterncgp", "kfac", "exact"))
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "fit (MiB)" in text


class Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.cli
def test_the_report_is_one_file_with_every_part(run: Path) -> None:
    text, outline = (run / "report.html").read_text(encoding="utf-8"), Outline()
    outline.feed(text)
    assert outline.open == []
    images = [attributes for tag, attributes in outline.tags if tag == "img"]
    assert all(str(image["src"]).startswith("data:image/") and image["alt"] for image in images)
    assert not re.search(r'(?:src|href)="(?!data:)', text) and "<script" not in text and "@import" not in text
    titles = [image["alt"] for image in images if image.get("class") == "panel"]
    assert titles == [
        "Reliability",
        "Confidence",
        "Selective risk",
        "Entropy: test and rotated",
        "ROC: rotated",
        "Entropy: test and noise",
        "ROC: noise",
        "Information captured",
        "Variance contraction",
        "Against the truth",
        "Scores of the detector",
        "ROC of the detector",
        "p-values",
    ]
    for image in images:
        kind, _, data = str(image["src"]).partition(";base64,")
        content = base64.b64decode(data)
        assert content[:4] == (b"<svg" if kind.endswith("svg+xml") else b"\x89PNG")
    assert text.count('class="card"') == 24 and "Most certain" in text and "Least certain" in text
    for heading in ("<h2>Results</h2>", "<h2>Figures</h2>", "<h2>Cost</h2>", "All settings of this run"):
        assert heading in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.cli
def test_the_report_marks_the_best_of_each_column_and_no_line(run: Path) -> None:
    text = (run / "report.html").read_text(encoding="utf-8")
    methods = json.loads((run / "results.json").read_text(encoding="utf-8"))["methods"]
    best = {
        "accuracy": f"{100 * max(method['accuracy'] for method in methods):.2f} %",
        "NLL": f"{min(method['nll'] for method in methods):.4f}",
        "NLL probit": f"{min(method['probit']['nll'] for method in methods if method['probit']):.4f}",
        "noise: FPR95": f"{min(method['ood']['noise']['entropy']['fpr95'] for method in methods):.3f}",
    }
    for heading, expected in best.items():
        assert set(re.findall(rf'data-label="{heading}" class="best[^"]*">([^<]*)<', text)) == {expected}
    assert "<tr>" in text and "<tr class" not in text


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<script>addEventListener('load', () => { const wide = document.documentElement.scrollWidth;
const broken = [...document.images].filter(i => !i.complete || i.naturalWidth === 0).length;
const cut = [...document.querySelectorAll('.frame, td')].filter(e => e.scrollWidth > e.clientWidth + 1).length;
parent.postMessage(`probe ${wide} ${innerWidth} ${broken} ${document.images.length} ${cut}`, '*'); });</script>"""
FRAME = """<script>addEventListener('message', event => { document.title = event.data; });</script>
<iframe src="probe.html" style="width:{width}px;height:3000px;border:0"></iframe>"""


@pytest.mark.cli
@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, and none is installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_every_figure_loads_and_nothing_overflows_in_a_browser(run: Path, tmp_path: Path, width: int) -> None:
    report = (run / "report.html").read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>")
    (tmp_path / "probe.html").write_text(report, encoding="utf-8")
    # Headless windows have a least width, so the page is looked at through a frame of the width that is wanted.
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("{width}", str(width)), encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    command = [str(CHROMIUM), *flags, "--window-size=1400,3200", "--dump-dom", frame.as_uri()]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<title>probe (\d+) (\d+) (\d+) (\d+) (\d+)</title>", output)
    assert found, output[:500]
    scroll_width, inner_width, broken, images, cut = map(int, found.groups())
    assert (inner_width, broken, cut) == (width, 0, 0) and images >= 8  # no table scrolls in its frame, either
    assert scroll_width <= width


@pytest.mark.cli
def test_a_kernel_takes_the_place_of_the_network(tmp_path: Path) -> None:
    (tmp_path / "gp.yaml").write_text("kernel:\n  name: Matern52\n  max_products: 4\n")
    small = [s for s in SMALL if not s.startswith(("model", "fit"))]
    arguments = [str(tmp_path / "gp.yaml"), *sets(small), "--output-dir", str(tmp_path / "out")]
    assert cli.main(["evaluate", *arguments]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    labels = {"map": "the mean alone", "temperature": "temperature scaling", "iterncgp": "IterNCGP"}
    assert {method["name"]: method["label"] for method in results["methods"]} == labels
    reason = "It is about the weights of a network, and this run has a kernel in its place."
    assert results["unavailable"] == {"prior only": reason, "last layer (laplace-torch)": reason}
    assert "prior only: not available here." in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert results["methods"][2]["accuracy"] > 0.5 and results["about"]["kernel"].startswith("Matern52")
    assert (tmp_path / "out" / "report.html").exists()
    config = load(tmp_path / "out" / "config.yaml")
    data, posterior = datasets.load(config.data, seed=0), tmp_path / "out" / "posterior.safetensors"
    np.savez(tmp_path / "new.npz", x=data.scaling.undo(data.test[:][0]).numpy())  # as a user has them: pixels
    new = tmp_path / "new.csv"
    assert cli.main(["predict", str(posterior), "--input", str(tmp_path / "new.npz"), "--output", str(new)]) == 0
    rows = list(csv.DictReader(new.read_text(encoding="utf-8").splitlines()))
    right = [int(row["class"]) == label for row, label in zip(rows, data.test[:][1].tolist(), strict=True)]
    assert np.mean(right) == pytest.approx(results["methods"][2]["accuracy"])


@pytest.mark.cli
def test_hyperparameters_may_be_chosen_on_half_of_the_test_set(tmp_path: Path) -> None:
    (tmp_path / "gp.yaml").write_text("kernel: {name: Matern52, max_products: 4}\ntuning: validation\n")
    small = [*(s for s in SMALL if s.startswith("data.")), "evaluate.link_samples=64"]
    assert cli.main(["evaluate", str(tmp_path / "gp.yaml"), *sets(small), "--output-dir", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert results["num_scored"] == 60 and results["config"]["tuning"]["protocol"] == "validation"
    assert all(len(method["hyperparameters"]) == 1 for method in results["methods"])


@pytest.mark.cli
def test_a_checkpoint_that_is_newer_than_the_posterior_is_fitted_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    checkpoint, config = tmp_path / "net.safetensors", tmp_path / "own.yaml"
    config.write_text("evaluate:\n  baselines: [map]\n")
    small = [*SMALL, f"model.checkpoint={checkpoint}"]
    arguments = ["evaluate", str(config), *sets(small), "--output-dir", str(tmp_path / "out")]
    save_file(models.cnn(10, (1, 8, 8), 4).state_dict(), checkpoint)
    assert cli.main(arguments) == 0
    first = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["methods"][0]["nll"]
    log = (tmp_path / "out" / "run.log").read_text(encoding="utf-8")
    assert (
        "by the evidence, since no data are held out: predictions may be far too cautious." in log
    )  # the checkpoint may have seen all training data
    save_file(models.cnn(10, (1, 8, 8), 4).state_dict(), checkpoint)  # other weights
    os.utime(checkpoint, (2**32, 2**32))
    assert cli.main(arguments) == 0
    second = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["methods"][0]["nll"]
    assert first != second


def test_the_file_of_a_kernel_answers_as_the_gaussian_process_does() -> None:
    torch.manual_seed(0)
    X, x = torch.randn(40, 3), torch.randn(7, 3)
    classes = (torch.arange(40) % 3, likelihoods.Softmax(3))
    targets = (X[:, 0].sin(), likelihoods.Gaussian(0.1))
    for y, likelihood in (classes, targets):
        gp = NonConjugateGP(kernels.Matern32(1.5, 2.0), likelihood, max_products=6, policy="curvature_residual").fit(
            X, y
        )
        saved = KernelPredictor.of(gp)
        restored = KernelPredictor.from_state(saved.state(), torch.device("cpu"))
        mean, covariance = gp.posterior_.latent(x)
        torch.testing.assert_close(restored.latent(x), (mean, covariance), rtol=1e-6, atol=1e-9)
        assert restored.noise_variance == (1.0 if likelihood is classes[1] else 0.1)
    broken = {**saved.state(), "coefficients": torch.zeros(2)}
    with pytest.raises(ValueError, match="of different sizes"):
        KernelPredictor.from_state(broken, torch.device("cpu"))


class Unread(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> None:
        raise AssertionError("a test input was read")


@pytest.mark.cli
def test_fit_never_reads_a_test_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = datasets.load
    monkeypatch.setattr(datasets, "load", lambda *a, **k: replace(loaded(*a, **k), test=Unread(), ood={}))
    (tmp_path / "small.yaml").touch()
    assert cli.main(["fit", str(tmp_path / "small.yaml"), *sets(SMALL), "--output-dir", str(tmp_path / "out")]) == 0


def test_what_is_held_out_is_in_no_other_part() -> None:
    data = datasets.load(DataConfig(train_limit=100, test_limit=50), seed=0)
    for source, sizes in (("train", (90, 50)), ("test", (100, 40))):
        parts = data.put_aside(10, source, 0)
        assert (len(parts.train), len(parts.test), len(parts.held_out)) == (*sizes, 10)
        together = torch.cat([getattr(parts, source)[:][0], parts.held_out[:][0]])
        whole = getattr(data, source)[:][0]
        assert sorted(map(tuple, together.flatten(1).tolist())) == sorted(map(tuple, whole.flatten(1).tolist()))
    with pytest.raises(ConfigError, match="at least two inputs fewer than the 50 of the test set; got 49"):
        data.put_aside(49, "test", 0)


@pytest.mark.cli
def test_the_last_layer_flavour_runs_with_its_own_rows(tmp_path: Path) -> None:
    (tmp_path / "last.yaml").write_text("fit:\n  subset_of_weights: last_layer\n")
    arguments = [str(tmp_path / "last.yaml"), *sets(SMALL), "--output-dir", str(tmp_path / "out")]
    assert cli.main(["evaluate", *arguments]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert [method["name"] for method in results["methods"]] == ["map", "temperature", "iterncgp", "calibrated"]
    assert len(results["unavailable"]) == 2  # prior only and last layer, which are about all weights


@pytest.mark.cli
def test_the_demo_ends_with_five_lines_with_which_the_report_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [*SMALL, "data.test_limit=80", "data.held_out=60", "evaluate.baselines=[map, temperature, exact]"]
    assert cli.main(["demo", *sets(small), "--output-dir", str(tmp_path)]) == 0
    shown, page = capsys.readouterr().out, (tmp_path / "report.html").read_text(encoding="utf-8")
    lines = shown.partition("\nA curve with a gap: ")[2].splitlines()[:5]
    assert [line.split(":")[0] for line in lines[1:]] == ["Unfamiliar inputs", "Calibration", "Cost", "New data"]
    inside, gap = map(float, re.findall(r"±(\d+\.\d+)", lines[0]))
    assert gap > 3 * inside
    assert float(re.findall(r"variance is (\d\.\d+) to \d+\.\d+, never below one", lines[3])[0]) >= 1
    assert "falls at 40 of 40 other digits" in lines[4]
    assert page.index("Calibration: the NLL") < page.index("<b>A curve with a gap") < page.index("<h2>Results")
    assert demo.settings().output_dir == "runs/demo"


def test_arrays_and_tables_are_data_too(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 3, generator=generator), torch.arange(50) % 3
    np.savez(tmp_path / "a.npz", x=x.numpy(), y=y.numpy())
    table = torch.cat([x, y[:, None]], 1)
    np.savetxt(tmp_path / "a.csv", table.numpy(), delimiter=",", header="a,b,c,label", comments="")
    for name in ("a.npz", "a.csv"):
        data = datasets.load(DataConfig(name="arrays", train=str(tmp_path / name)), seed=0)
        assert (len(data.train), len(data.test), data.input_shape, data.num_outputs) == (40, 10, (3,), 3)
        torch.testing.assert_close(data.train.tensors[0].mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    restored = datasets.inputs_for(tmp_path / "a.csv", datasets.Scaling((0.0,) * 3, (1.0,) * 3), (3,))
    torch.testing.assert_close(restored, x, atol=1e-5, rtol=0)


def test_binary_cifar_and_packed_mnist_are_read_where_they_lie(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rows = generator.integers(0, 10, (6, 3073), dtype=np.uint8)
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        rows.tofile(folder / name)
    data = datasets.load(DataConfig(name="cifar10", root=str(tmp_path)), seed=0)
    assert (len(data.train), len(data.test)) == (12, 6)  # the batches that are there
    image = data.scaling.undo(data.test[2][0][None])[0]
    torch.testing.assert_close(image, torch.from_numpy(rows[2, 1:].reshape(3, 32, 32)) / 255, atol=1e-6, rtol=0)
    assert int(data.test[2][1]) == rows[2, 0]
    (folder / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(ConfigError, match="must be a multiple of 3073 bytes; got 3"):
        datasets.load(DataConfig(name="cifar10", root=str(tmp_path)), seed=0)


def test_folders_of_images_are_data_and_single_images_are_inputs(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                pixels = generator.integers(0, 255, (20, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{i}.png")
    config = DataConfig(name="image_folder", train=str(tmp_path / "train"), test=str(tmp_path / "test"), image_size=12)
    data = datasets.load(config, seed=0)
    assert (data.class_names, data.input_shape, len(data.train)) == (("cat", "dog"), (3, 12, 12), 6)
    assert data.train[0][0].shape == (3, 12, 12) and datasets.labels_of(data.train).tolist() == [0, 0, 0, 1, 1, 1]
    inputs = datasets.inputs_for(tmp_path / "test" / "cat", data.scaling, data.input_shape)
    assert inputs.shape == (3, 3, 12, 12)
    grey = datasets.inputs_for(tmp_path / "test" / "cat" / "0.png", datasets.Scaling((0.5,), (0.5,)), (1, 12, 12))
    assert grey.shape == (1, 1, 12, 12) and float(grey.abs().max()) <= 1
    with pytest.raises(ConfigError, match="must hold images; got none"):
        datasets.inputs_for(tmp_path / "test", data.scaling, data.input_shape)


def test_a_test_folder_has_the_labels_of_the_training_folder(tmp_path: Path) -> None:
    for folder in ("train/cat", "train/dog", "test/dog", "other/dog", "other/eel"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "0.png")
    config = DataConfig(name="image_folder", train=str(tmp_path / "train"), test=str(tmp_path / "test"), image_size=8)
    data = datasets.load(config, seed=0)
    assert data.class_names == ("cat", "dog") and datasets.labels_of(data.test).tolist() == [1]
    assert data.test[0][1] == 1
    with pytest.raises(ConfigError, match=r"called like those in data\.train; got eel besides, in .*other"):
        datasets.load(replace(config, test=str(tmp_path / "other")), seed=0)


REAL = os.environ.get("NTK_ITERNCGP_DATA")


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="needs real data, and NTK_ITERNCGP_DATA does not say where they are")
def test_the_official_files_and_the_public_network_are_read_as_they_are() -> None:
    mnist = datasets.load(DataConfig(name="mnist", ood=("fashion_mnist",), ood_limit=10, download=False), seed=0)
    assert (len(mnist.train), len(mnist.test), len(mnist.ood["fashion_mnist"])) == (60_000, 10_000, 10)
    assert datasets.labels_of(mnist.test)[:5].tolist() == [7, 2, 1, 0, 4]
    cifar = datasets.load(DataConfig(name="cifar10", test_limit=400, download=False), seed=0)
    model = models.build("cifar_resnet20", 10, cifar.input_shape)
    models.load_checkpoint(model, Path(str(REAL), "pretrained", "cifar10_resnet20.safetensors"), "cifar_resnet20")
    with torch.no_grad():
        right = model(cifar.test.tensors[0]).argmax(1) == cifar.test.tensors[1]
    assert float(right.double().mean()) > 0.9


def test_the_built_in_networks_have_the_sizes_they_say() -> None:
    sizes = {"cifar_resnet20": 272_474, "cifar_resnet32": 466_906, "cifar_resnet44": 661_338, "cifar_resnet56": 855_770}
    for name, size in sizes.items():
        model = models.build(name, 10, (3, 32, 32))
        assert sum(p.numel() for p in model.parameters()) == size
    assert sum(p.numel() for p in models.build("cnn", 10, (1, 8, 8)).parameters()) == 1446
    assert models.build("lenet", 10, (1, 28, 28))(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert models.build("mlp", 3, (7,), {"width": 5})(torch.zeros(2, 7)).shape == (2, 3)
    assert models.build("resnet18", 4, (3, 64, 64))(torch.zeros(1, 3, 64, 64)).shape == (1, 4)


def test_a_network_with_auxiliary_outputs_is_trained_by_its_own() -> None:
    torch.manual_seed(0)
    model = models.build("googlenet", 2, (3, 32, 32), {"init_weights": False})
    data = torch.utils.data.TensorDataset(torch.randn(4, 3, 32, 32), torch.arange(4) % 2)
    settings = ModelConfig(train_epochs=1, train_batch_size=4)
    share = models.train(model, data, settings, task="classification", seed=0, device=torch.device("cpu"))
    assert 0 <= share <= 1 and model(data.tensors[0]).shape == (4, 2)


def test_one_number_that_was_expanded_is_saved_like_any_other(tmp_path: Path) -> None:
    state = {"one": torch.tensor(2.5, dtype=torch.float64).expand(1), "many": torch.arange(3.0).expand(2, 3)}
    files.save_posterior(tmp_path / "p.safetensors", state, {}, {})
    saved = files.load_posterior(tmp_path / "p.safetensors")[0]
    assert saved["one"].tolist() == [2.5] and saved["many"].tolist() == [[0, 1, 2]] * 2


def test_a_file_that_could_not_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    target.write_text("old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(target, fail)
    with pytest.raises(OSError, match="disk full"):  # nor is one of several replaced
        files.write_together({target: files.text_writer("new"), tmp_path / "report.html": fail})
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]

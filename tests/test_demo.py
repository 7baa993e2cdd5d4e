"""The demo on a few digits: the table, the figure and the results file, and nothing half done."""

import json
import struct
from pathlib import Path

import pytest
import torch

from ntk_iterncgp import cli, demo
from ntk_iterncgp.config import RunConfig
from ntk_iterncgp.evaluation.report import Row, write_atomically

SMALL = {"num_train": 300, "num_test": 80, "max_products": 10, "refine_products": 3}
LABELS = ["subset of data", "paper's listing", "ours, joint", "ours", "ours, refined"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row], str]:
    """Output folder, rows and what was printed, of one small run through the command line."""
    folder = tmp_path_factory.mktemp("demo") / "runs" / "small"
    rows: list[Row] = []
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as printing:
        original, printed = demo.run, []
        patch.setattr(demo, "run", lambda config: rows.extend(original(config)))
        printing.setattr("builtins.print", lambda *parts, **_: printed.append(" ".join(map(str, parts))))
        settings = [text for key, value in SMALL.items() for text in ("--set", f"{key}={value}")]
        assert cli.main(["demo", *settings, "--output-dir", str(folder)]) == 0
    return folder, rows, "\n".join(printed)


def test_the_plan_comes_first_and_says_what_it_will_cost(run: tuple[Path, list[Row], str]) -> None:
    first, second, third = run[2].splitlines()[:3]
    assert first == "300 digits to learn from, 80 to classify, Matern52(lengthscale=8, outputscale=32)."
    assert "at most 10 products each" in second and "3 more for ours" in second and "minute" in third


def test_the_table_has_a_line_per_method_and_a_sentence_per_column(run: tuple[Path, list[Row], str]) -> None:
    _, rows, printed = run
    lines = printed.splitlines()
    top = next(i for i, line in enumerate(lines) if "accuracy" in line)
    headings = lines[top].split()
    assert headings == ["accuracy", "NLL", "ECE", "products", "seconds", "information"]
    assert {len(line) for line in lines[top : top + 7]} == {len(lines[top])}  # aligned
    for row, line in zip(rows, lines[top + 2 : top + 7], strict=True):
        assert line.startswith(row.label)
        assert f"{row.metrics.nll:.3f}" in line and f" {row.num_products} " in line
    for heading, line in zip(headings, lines[top + 8 : top + 14], strict=True):
        assert line.startswith(f"{heading} ") and line.endswith(".")


def test_the_results_file_holds_the_table_and_the_settings(run: tuple[Path, list[Row], str]) -> None:
    folder, rows, printed = run
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["config"] | SMALL == results["config"]
    assert (results["num_train"], results["num_test"]) == (300, 80)
    assert [line["label"] for line in results["rows"]] == LABELS == [row.label for row in rows]
    for row, line in zip(rows, results["rows"], strict=True):
        assert (line["nll"], line["num_products"]) == (row.metrics.nll, row.num_products)
        assert line["curve"][-1] == [row.num_products, row.metrics.nll]
        assert 0 < line["information_captured"] <= 1
    assert f"has NLL {results['mean_alone']['nll']:.3f}" in printed
    assert str(folder / "results.json") in printed and str(folder / "digits.png") in printed


def test_the_figure_is_a_png_of_column_width_and_nothing_else_is_left(run: tuple[Path, list[Row], str]) -> None:
    data = (run[0] / "digits.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1400, 1000)  # 7 by 5 inches at 200 dots per inch
    assert sorted(path.name for path in run[0].iterdir()) == ["digits.png", "results.json"]


def test_ours_learns_more_per_product_than_a_subset_and_refining_adds_to_it(run: tuple[Path, list[Row], str]) -> None:
    rows = {row.label: row for row in run[1]}
    assert rows["subset of data"].num_products <= rows["ours"].num_products
    assert rows["ours"].metrics.nll < rows["subset of data"].metrics.nll
    assert rows["ours, refined"].num_products == rows["ours"].num_products + SMALL["refine_products"]
    assert rows["ours, refined"].information_captured > rows["ours"].information_captured
    assert rows["ours, joint"].num_products <= SMALL["max_products"]


def test_the_split_is_fixed_stratified_and_scaled() -> None:
    config = RunConfig()
    digits, again = demo.load_data(config), demo.load_data(config)
    assert (len(digits.train_labels), len(digits.test_labels)) == (1347, 450)
    assert torch.equal(digits.train_inputs, again.train_inputs)
    assert digits.train_inputs.dtype == torch.float32
    assert (float(digits.train_inputs.min()), float(digits.train_inputs.max())) == (0.0, 1.0)
    assert int(digits.test_labels.bincount().min()) >= 43


def test_the_subset_policy_takes_ten_digits_for_one_product() -> None:
    digits = demo.load_data(RunConfig(num_train=60, num_test=20))
    gp = demo.NonConjugateGP(
        demo.kernels.RBF(4.0), demo.LIKELIHOOD, policy=demo.ten_at_a_time, actions="kronecker", max_products=3
    )
    gp.fit(digits.train_inputs, digits.train_labels)
    factor = gp.posterior_.state.buffer.actions.factor.matrix  # (N, r)
    assert gp.report_.num_products == 3
    assert torch.equal(factor, torch.eye(60, 30))


def test_interrupting_a_fit_ends_the_demo_with_130_and_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.Method, "_predict", interrupt)  # in the middle of a fit
    assert cli.main(["demo", "--set", "num_train=60", "--output-dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err.endswith("ntk-iterncgp: interrupted.\n")
    assert not list(tmp_path.iterdir())


def test_a_file_that_could_not_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    target.write_text("old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, fail)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]

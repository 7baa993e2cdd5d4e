"""Each benchmark runs in its quick version and writes what it promises; the timings are for the benchmark to judge."""

import json
import mmap
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    compatibility,
    gp_peers,
    hyperparameters,
    kernels,
    kill_and_resume,
    many_classes,
    ntk,
    one_epoch,
    peers,
    prediction,
    scaling,
    shares,
    soak,
    solver,
    tables,
    updates,
    when_it_helps,
)
from ntk_iterncgp.kernels import fused
from ntk_iterncgp.persistence.files import load_posterior
from ntk_iterncgp.runtime import memory
from tests.parallel_work import in_processes


@pytest.mark.cli
def test_the_solver_benchmark_prints_a_table_and_writes_its_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "solver.json"
    solver.main(["--quick", "--json", str(file)])
    written = json.loads(file.read_text())
    assert written["settings"].keys() == {
        "num_data",
        "num_classes",
        "num_actions",
        "num_newton_steps",
        "num_repeats",
        "chunk_bytes",
        "threads",
    }
    rows = {(row["name"], row["actions"]): row for row in written["results"]}
    assert rows.keys() == {
        ("overhead", "joint"),
        ("held", "joint"),
        ("resident", "joint"),
        ("overhead", "kronecker"),
    }
    for row in rows.values():
        assert row.keys() == {
            "name",
            "actions",
            "rank",
            "num_products",
            "measured",
            "target",
            "is_full_size",
            "verdict",
        }
    targets = {name: row["target"] for name, row in rows.items()}
    assert list(targets.values()) == [0.15, 1.3, 1.3, None]
    for actions in ("joint", "kronecker"):
        assert 0 < rows["overhead", actions]["measured"] < 1
    for name in ("overhead", "held", "resident"):  # the budget is spent, or the ratio would be that of another problem
        assert rows[name, "joint"]["rank"] == rows[name, "joint"]["num_products"] == solver.QUICK.num_actions
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 5 and "target" in table[0] and "measured" in table[0]


def test_a_missed_target_is_called_missed_and_one_without_target_is_not_judged() -> None:
    def verdict(measured: float | None, target: float | None, is_full_size: bool = True) -> str:
        return solver.Row("overhead", "joint", 1, 1, measured, target, is_full_size).verdict

    assert (verdict(0.1, 0.15), verdict(0.2, 0.15), verdict(0.2, None)) == ("ok", "MISSED", "")
    assert verdict(None, 1.3) == "not measured"
    assert verdict(0.2, 0.15, is_full_size=False) == "too small to judge"


def test_timing_the_products_leaves_the_prior_as_it_was() -> None:
    original = solver.GramPrior.image
    with pytest.raises(ZeroDivisionError), solver.timed_images() as seconds:
        assert solver.GramPrior.image is not original
        solver.make_gp(solver.QUICK, "joint").fit(*solver.problem(solver.QUICK))
        assert len(seconds) == solver.QUICK.num_actions and min(seconds) > 0
        raise ZeroDivisionError
    assert solver.GramPrior.image is original


def test_the_peak_of_memory_sees_a_large_block_come_and_go() -> None:
    if not memory.restart_peak():
        pytest.skip("the peak of resident memory can be reset on Linux only")
    start, size = memory.resident_bytes(), 50 * 2**20
    with mmap.mmap(-1, size) as block:  # straight from the system: an allocator might have it in store
        block.write(b"1" * size)
    assert 0.9 * size < memory.peak_resident_bytes() - start < 2.2 * size  # with the string that is written
    assert memory.resident_bytes() - start < 0.9 * size


@pytest.mark.cli
def test_the_columns_of_the_ntk_are_measured_in_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ntk.json"
    ntk.main(["--quick", "--json", str(file)])
    figures, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert "epochs per column" in shown and "peak memory of fit" in shown
    assert all(figures["LeNet"][f"k={k}"] > 0 for k in (1, 8, 32))
    assert figures["memory"]["predict"] > 0


@pytest.mark.cli
@pytest.mark.skipif(fused.missing_compiler() is not None, reason="needs a C++ compiler")
def test_the_kernel_benchmark_prints_a_table_and_writes_its_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernels.json"
    kernels.main(["--quick", "--json", str(file)])
    rows = {row["name"]: row for row in json.loads(file.read_text())["results"]}
    targets = {name: row["target"] for name, row in rows.items() if row["target"] is not None}
    assert targets == {
        "fused / KeOps": 2.0,
        "fused / eager": 5.0,
        "sparse / fused": 3.0,
        "error of sparse": 1e-5,
        "gemm / bare": 1.5,
        "memory": 4.0,
    }
    assert all(row["verdict"] in ("", "too small to judge") for row in rows.values())
    assert rows["error of sparse"]["measured"] < 1e-5 and rows["fused / eager"]["measured"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    missed, kept = (kernels.Row("x", 1.0, target).verdict for target in (2.0, 0.5))
    assert (missed, kept, kernels.Row("x", 1.0, 0.5, at_least=False).verdict) == ("MISSED", "ok", "MISSED")


@pytest.mark.cli
def test_the_benchmark_of_hyperparameters_shows_found_over_true(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hyperparameters.json"
    hyperparameters.main(["--quick", "--json", str(file)])
    rows = json.loads(file.read_text())["results"]
    assert [row["likelihood"] for row in rows] == ["bernoulli", "poisson"]
    assert all(row["lengthscale"] > 0 and row["verdict"] == "too small to judge" for row in rows)
    assert "found / true" in capsys.readouterr().out
    assert hyperparameters.Row("poisson", 0, 1.0, 1.2, 0.85, 4, True).verdict == "ok"
    assert hyperparameters.Row("poisson", 0, 1.0, 1.2, 0.75, 4, True).verdict == "MISSED"


@pytest.mark.cli
def test_the_one_epoch_benchmark_counts_a_fit_in_epochs_and_a_prediction_in_forward_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NTK_ITERNCGP_DATA", raising=False)
    file = tmp_path / "one_epoch.json"
    one_epoch.main(["--quick", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["fit MNIST, LeNet"] > 1 and figures["predict"] > 10  # a backward pass for each of ten outputs
    assert 0 < figures["predict at peak"] < figures["predict"]  # nothing is faster than its arithmetic
    assert "forward passes" in capsys.readouterr().out


@pytest.mark.cli
def test_the_benchmark_of_when_it_helps_compares_the_data_with_the_prior_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "when.json"
    when_it_helps.main(["--quick", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["small data (150 digits)"].keys() == set(when_it_helps.METHODS)
    assert figures["diabetes, NLL"]["all data"] < figures["diabetes, NLL"]["noise alone"]
    assert "the data beat the prior alone" in capsys.readouterr().out


@pytest.mark.cli
def test_the_benchmark_of_peers_has_iterncgp_at_three_budgets_and_never_below_the_exact_variance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "peers.json"
    peers.main(["--quick", "--json", str(file)])
    rows = {row["method"]: row for row in json.loads(file.read_text())["digits"]}
    ours = [row for name, row in rows.items() if name.startswith("IterNCGP") and name.endswith("epochs")]
    assert "IterNCGP, calibrated" in rows
    assert [row["method"] for row in ours] == ["IterNCGP, 1.3 epochs", "IterNCGP, 5.0 epochs", "IterNCGP, 20.0 epochs"]
    for kind in ("test", "rotated", "noise"):
        ratios = [row["variance"][kind] for row in ours]
        assert min(ratios) >= 1 - 1e-4 and ratios[0] >= ratios[1] - 1e-6 and ratios[1] >= ratios[2] - 1e-6
    assert rows["VaLLA"]["epochs"] > 0 and rows["prior only"]["variance"]["noise"] >= ours[0]["variance"]["noise"]
    assert all(0 <= row["ood by entropy"]["noise"] <= 1 for row in rows.values())
    if memory.restart_peak():
        assert ours[2]["peak bytes"] > 0 and rows["exact linearised Laplace"]["peak bytes"] > 8 * 1446**2
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows) and len({len(line) for line in lines}) == 1


@pytest.mark.cli
@pytest.mark.process
def test_the_benchmark_of_scaling_counts_the_bytes_that_it_expects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(num_processes: int, size: scaling.Size) -> dict[str, dict[str, float]]:
        found, _ = in_processes(num_processes, scaling.measure, size)
        return found[0]

    monkeypatch.setattr(scaling.rows, "__defaults__", (launch,))  # without the seconds that torchrun takes to start
    file = tmp_path / "scaling.json"
    scaling.main(["--quick", "--json", str(file)])
    rows = {(row["name"], row["num_processes"]): row for row in json.loads(file.read_text())["results"]}
    assert rows.keys() == {(name, K) for name in ("clusters", "product", "kernel") for K in (1, 2)}
    for (name, K), row in rows.items():
        assert row["work"] > 0 and row["even_share"] == 1 / K
        assert row["bytes_sent"] == pytest.approx(row["expected_bytes"], rel=0.02 if name == "clusters" else 1e-9)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


@pytest.mark.cli
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_the_soak_reads_memory_after_each_round_and_judges_its_slope(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "soak.json"
    soak.main(["--quick", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["rounds"] >= 1 and figures["files"] == 5 * figures["rounds"] and figures["last_mib"] > 50
    assert "MiB/min" in capsys.readouterr().out
    rising = [(0.1 * i, 500 + 0.1 * i + 0.02 * (-1) ** i) for i in range(40)]  # 1 MiB per minute, with noise
    slope, error = soak.slope_of(rising)
    assert slope == pytest.approx(1.0, abs=0.05) and 0 < error < 0.05
    outcome = dict(rounds=40, minutes=4, first_mib=1, last_mib=2, error=error, files=120, kills="")
    assert soak.Outcome(**outcome, slope=slope).verdict == "MISSED"
    assert soak.Outcome(**outcome, slope=0.1).verdict == "ok"
    assert soak.Outcome(**{**outcome, "rounds": 3}, slope=9.0).verdict == "too short to judge"


@pytest.mark.parametrize("name", ["actions", "coefficients", "action_gram"])
def test_a_soak_fails_where_the_file_of_a_kernel_comes_back_as_another(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(path: Path) -> Any:
        state, *others = load_posterior(path)
        return {**state, name: 1.01 * state[name]}, *others

    monkeypatch.setattr(soak, "load_posterior", wrong)
    with pytest.raises(AssertionError, match=r"expected to be the saved one, but '.*kernel_curvature_residual"):
        next(soak.one_round(tmp_path))


@pytest.mark.parametrize("code", [0, 1])
def test_a_soak_fails_where_a_killed_run_ends_with_other_bits(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_and_resume, "main", lambda arguments: code)
    if code == 0:
        assert soak.kill_and_resume(3) == "3 of each program"
        return
    with pytest.raises(AssertionError, match="but it did not"):
        soak.kill_and_resume(3)


@pytest.mark.cli
def test_shares_are_set_beside_the_best_that_so_many_actions_could_get(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "TRAINING", 200)
    file = tmp_path / "shares.json"
    shares.main(["--quick", "--json", str(file)])
    (figures,) = json.loads(file.read_text()).values()
    assert figures["best"] == sorted(figures["best"]) and figures["groups"] == sorted(figures["groups"])
    for groups, best in zip(figures["groups"], figures["best"], strict=True):
        assert 0.8 * best < groups < 100.01 and best < 100.01
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.slow
@pytest.mark.cli
def test_the_benchmark_of_gps_prints_two_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gp_peers.json"
    gp_peers.main(["--quick", "--limit", "40", "--only", "iterncgp", "sklearn", "--json", str(file)])
    written = json.loads(file.read_text())
    assert {row["method"] for row in written["peers"]} == {"iterncgp", "sklearn"}
    assert {row["problem"] for row in written["counts"]} == set(gp_peers.DESIGNS)
    assert {row["method"] for row in written["counts"]} == {"iterncgp", "GLM", "mean count"}
    assert all(row["nll"] == row["nll"] and not row["note"] for table in written.values() for row in table)
    assert capsys.readouterr().out.count("| data | N | method | NLL |") == 2


@pytest.mark.cli
def test_many_classes_take_less_memory_than_a_vector_of_all_outputs(tmp_path: Path) -> None:
    file = tmp_path / "many_classes.json"
    many_classes.main(["--quick", "--num-data", "20000", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["data"] == 20_000 and 0 < figures["information"] < 1
    assert figures["estimated GB"] < 2 * figures["one float64 vector, GB"]


@pytest.mark.cli
def test_the_benchmark_of_updates_counts_what_went_through_the_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NTK_ITERNCGP_DATA", raising=False)
    file = tmp_path / "updates.json"
    updates.main(["--quick", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["updates rank"] == figures["one fit rank"] == figures["rank"] == 8
    for name in ("one fit", "updates"):
        assert 0.3 < figures[f"{name} backward"] < 2 and figures[f"{name} forward"] > 1
        assert 0 < figures[f"{name} contraction"] < 1
    assert figures["quality"] > 0.5
    told = capsys.readouterr().out
    assert "time of the updates, over one fit" in told and "4 shards" in told
    assert figures["4 shards 8 contraction"] > 0.5 * figures["one fit 8 contraction"] > 0
    assert 0 <= figures["4 shards 8 AUROC"] <= 1


@pytest.mark.cli
@pytest.mark.slow
def test_the_table_of_architectures_is_written_and_all_that_work_are_exact(tmp_path: Path) -> None:
    page, file = tmp_path / "compatibility.md", tmp_path / "compatibility.json"
    assert compatibility.main(["--quick", "--table", str(page), "--json", str(file)]) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["results"]}
    assert rows["Bert"]["rows"] == "by layers" and not rows["Bert"]["message"]
    assert "Try the model before quantisation" in rows["quantised"]["message"]
    written = (Path(compatibility.__file__).parents[1] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert all(f"\n| {case.name} |" in written for case in compatibility.CASES)  # whoever adds one prints it again
    heading = page.read_text(encoding="utf-8").split("|---")[0]
    assert written.startswith(heading)


@pytest.mark.cli
def test_the_benchmark_of_predictions_compares_few_contrasts_with_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prediction.json"
    prediction.main(["--quick", "--json", str(file)])
    shown = capsys.readouterr().out
    results = json.loads(file.read_text())
    for found in results:
        assert found["setting"] in shown and found["fit bytes"] > 0 and found["predict bytes"] > 0
        assert list(found["rows"]) == ["1", "3", "auto", "all", "auto, probit"]
        for row in found["rows"].values():
            assert row["forwards"] > 1 and row["milliseconds"] > 0 and row["NLL"] > 0 and 0 <= row["ECE"] <= 1
    assert len({str(setting) for setting in prediction.settings()}) == len(prediction.settings())
    assert any(s.subset == "last_layer" and s.num_classes == 1000 for s in prediction.settings())
    lines = prediction.table(results, "abc1234").splitlines()
    assert "`abc1234`" in lines[0] and "batches of 64" in lines[0]
    assert len(lines) == 4 + len(results) and len({line.count("|") for line in lines[2:]}) == 1
    page = prediction.PAGE.read_text(encoding="utf-8")
    assert "new" in tables.written(page, prediction.MARK, "new")
    with pytest.raises(SystemExit):
        prediction.main(["--quick", "--docs"])  # a toy run is not a result
    assert prediction.PAGE.read_text(encoding="utf-8") == page


@pytest.mark.cli
def test_the_tables_of_the_results_are_made_with_the_commit_and_the_best_in_bold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tables.PAGE.read_bytes()
    tables.main(["--quick", "--output-dir", str(tmp_path), "--json", str(tmp_path / "numbers.json")])
    text = capsys.readouterr().out
    assert re.search(r"`ntk-iterncgp evaluate configs/digits.yaml` at commit `[0-9a-f]{7}\+?`: 1,446 weights", text)
    best = min(method["nll"] for method in json.loads((tmp_path / "numbers.json").read_text())["digits"]["methods"])
    assert f"| **{best:.4f}** |" in text and "raises them at" in text
    assert tables.PAGE.read_bytes() == before  # a toy run is not a result
    marks = "a <!-- digits -->\nold\n<!-- end of digits --> b"
    assert tables.written(marks, "digits", "new") == marks.replace("old", "new")
    with pytest.raises(SystemExit, match="must hold the marks"):
        tables.written("", "digits", "new")

"""The paper's small experiments at their smallest: the files are there, the paper's claims come out, ours too."""

import contextlib
import csv
import io
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ntk_iterncgp.experiments import cli
from ntk_iterncgp.experiments.reproduce import EXPERIMENTS, main
from ntk_iterncgp.experiments.reproduce.beliefs import in_between, moments, start, without_recycling
from ntk_iterncgp.experiments.reproduce.binary import draw
from ntk_iterncgp.experiments.reproduce.outcome import Claim, Outcome
from ntk_iterncgp.experiments.reproduce.papers import papers_newton
from ntk_iterncgp.experiments.reproduce.runner import experiment
from ntk_iterncgp.experiments.reproduce.settings import load
from ntk_iterncgp.experiments.settings import ConfigError
from ntk_iterncgp.solver import NewtonOptions, Stopping, newton, resolve_policy

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["visual-abstract", "pseudo-targets", "policies", "compression"]
FILES = {
    "visual-abstract": ["visual_abstract"],
    "pseudo-targets": ["pseudo_targets"],
    "policies": ["policies_mean", "policies_variance", "policies_curves"],
    "compression": ["compression"],
}


@dataclass(frozen=True)
class Ran:
    """A quick run through the command: where it wrote, what it printed, its claims and its numbers as read back."""

    folder: Path
    printed: str

    def rows(self, stem: str) -> list[dict[str, str]]:
        with (self.folder / f"{stem}.csv").open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def claim(self, pattern: str) -> dict[str, str]:
        found = [row for row in self.rows("claims") if re.search(pattern, row["claim"])]
        assert len(found) == 1, (pattern, found)
        return found[0]

    def holds(self, pattern: str) -> bool:
        return self.claim(pattern)["holds"] == "True"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """Runs each experiment once."""

    @cache
    def run(name: str) -> Ran:
        folder, printed = tmp_path_factory.mktemp(name) / "out", io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main([name, "--quick", "--output-dir", str(folder)]) == 0
        return Ran(folder, printed.getvalue())

    return run


def outcome_of(name: str, **changes: Any) -> Outcome:
    """Without figures on the disk."""
    module = experiment(name)
    return module.run(load(module.SETTINGS, quick=True, changes=changes))


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.cli
@pytest.mark.parametrize("name", SMALL)
def test_a_quick_run_writes_figures_numbers_and_claims(name: str, ran: Callable[[str], Ran]) -> None:
    assert_written(ran(name), FILES[name])


def assert_written(run: Ran, figures: list[str]) -> None:
    """The files of a run are there, whole, and named on the terminal."""
    written = {path.name for path in run.folder.iterdir()}
    assert written >= {f"{stem}.{kind}" for stem in figures for kind in ("png", "pdf")} | {"claims.csv", "config.yaml"}
    assert not any(file.startswith(".") for file in written)  # nothing half written is left
    for stem in figures:
        assert (run.folder / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert (run.folder / f"{stem}.pdf").read_bytes().startswith(b"%PDF")
    claims = run.rows("claims")
    assert claims and all(claim["claim"] in run.printed and claim["numbers"] in run.printed for claim in claims)
    assert all(f"wrote {run.folder / file}" in run.printed for file in written)


@pytest.mark.cli
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["poisson", "--set", "num_redraw=3"],
            "A setting must be one that there is; got 'num_redraw'. Try 'num_redraws'.",
        ),
        (["policies", "--set", "zzz=3"], "got 'zzz'. Try one of seed, num_data"),
        (["policies", "--set", "iterations=3"], "iterations must be a list; got 3."),
        (["policies", "--set", "num_data=many"], "num_data must be a whole number; got 'many'"),
        (["policies", "--set", "num_data=0"], "num_data must be a whole number of at least 1; got 0"),
        (["policies", "--set", "outputscale=-1"], "outputscale must be a finite number above 0; got -1.0"),
        (["poisson", "--set", "lengthscale=0"], "lengthscale must be a finite number above 0; got 0.0"),
        (["poisson", "--set", "outputscale=1e30"], "All rates must be below e^30; got e^"),
        (["compression", "--set", "residual_tol=1"], "residual_tol must be a fraction from 0 to below 1; got 1.0"),
        (["policies", "--set", "resolution=1"], "resolution must be a whole number of at least 2; got 1"),
        (["policies", "--set", "num_data=5"], "iterations must be at most the number of data, 5; got 19"),
        (["policies", "--set", "iterations=[1, 101]"], "the number of data, 100; got 101"),
        (["visual-abstract", "--set", "num_data=5"], "iterations_per_step must be at most the number of data, 5; got"),
        (["pseudo-targets", "--set", "num_newton_steps=1"], "num_newton_steps must be a whole number of at least 2"),
        (["policies", "--set", "seed"], "--set must be given as key=value"),
        (["policies", "--n", "10"], "--n must be left out for 'policies', whose size is fixed; got 10."),
        (["policies", "--config", "nowhere.yaml"], "'nowhere.yaml' must be a file that can be read"),
    ],
)
def test_what_cannot_be_right_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output-dir", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert sentence in message and message.count("\n") == 1


@pytest.mark.cli
def test_an_unknown_experiment_and_a_folder_that_is_a_file_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["poison"])
    assert end.value.code == 2 and "invalid choice: 'poison'" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["policies", "--output-dir", str(tmp_path / "file")]) == 2
    assert "--output-dir" in capsys.readouterr().err


@pytest.mark.cli
def test_the_settings_of_a_run_lie_beside_its_results_and_make_the_same_run(ran: Callable[[str], Ran]) -> None:
    kind, path = experiment("compression").SETTINGS, ran("compression").folder / "config.yaml"
    assert load(kind, quick=False, path=path, changes={}) == load(kind, quick=True, changes={})
    assert path.read_text(encoding="utf-8").startswith("# ntk-iterncgp reproduce compression: all settings of this run")


def test_maps_may_be_asked_for_beyond_the_curves_and_newton_may_end_early() -> None:
    changes = {"iterations": [1, 9], "num_data": 12, "max_iterations": 3, "resolution": 4}
    rows = outcome_of("policies", **changes).tables["policies"]
    assert max(row["j"] for row in rows) == 9
    steps = outcome_of("pseudo-targets", outputscale=1e-30, num_data=5).tables["pseudo_targets"]
    assert [row["i"] for row in steps] == [0, 1]  # nothing moves, and a third step is not taken


@pytest.mark.cli
def test_of_several_processes_none_reproduces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["reproduce", "policies", "--quick"]) == 2
    assert "must 'fit'; got 'reproduce'. Try it in one process" in capsys.readouterr().err


@pytest.mark.cli
def test_an_interrupted_experiment_writes_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment("policies"), "run", interrupted)
    assert main(["policies", "--quick", "--output-dir", str(tmp_path)]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_configuration_of_an_experiment_lists_the_papers_settings_in_full(name: str) -> None:
    path = ROOT / "configs" / "paper" / f"{name}.yaml"
    kind = experiment(name).SETTINGS
    assert load(kind, quick=False, path=path, changes={}) == kind()
    assert set(yaml.safe_load(path.read_text(encoding="utf-8"))) == set(asdict(kind()))


def test_the_command_line_has_the_last_word_and_quick_the_first(tmp_path: Path) -> None:
    kind = experiment("policies").SETTINGS
    file = tmp_path / "mine.yaml"
    file.write_text("resolution: 11\nnum_data: 60\n", encoding="utf-8")
    settings = load(kind, quick=True, path=file, changes={"num_data": 70, "iterations": [2, 3]})
    assert (settings.resolution, settings.num_data, settings.iterations) == (11, 70, (2, 3))
    with pytest.raises(ConfigError, match="Try 'resolution'"):
        load(kind, quick=False, changes={"resolutions": 3})


# --- what the paper claims --------------------------------------------------------------------------------------------


@pytest.mark.cli
def test_recycling_propagates_the_belief_between_newton_steps(ran: Callable[[str], Ran]) -> None:
    run = ran("visual-abstract")
    assert run.holds("drops: CG, R = ∞")
    assert run.holds("drops: our default, R = 10")
    assert run.holds("without recycling performance drops")
    assert run.holds("ends below unit vectors")
    # At R = 10 the paper's criterion does lose some: a few per cent, where starting from scratch loses 14.
    assert float(run.claim("drops: CG, R = 10")["numbers"].split()[-1]) < 1.05


@pytest.mark.cli
def test_newton_steps_are_similar_regressions_and_ours_ends_where_they_do(ran: Callable[[str], Ran]) -> None:
    assert ran("pseudo-targets").holds("similar between Newton steps")
    assert ran("pseudo-targets").holds("ends at the same posterior")


@pytest.mark.cli
def test_cg_looks_at_the_data_globally_and_the_curvature_residual_where_it_matters(ran: Callable[[str], Ran]) -> None:
    run = ran("policies")
    assert run.holds("its mean is closer") and run.holds("so is its variance") and run.holds("at the mode")
    rows = {(row["system"], row["policy"], row["j"]): float(row["variance_excess"]) for row in run.rows("policies")}
    assert rows["first", "residual", "10"] == rows["first", "curvature_residual", "10"]  # W = ¼ everywhere
    assert rows["mode", "curvature_residual", "10"] < rows["mode", "residual", "10"]


@pytest.mark.cli
def test_a_larger_rank_makes_a_more_expressive_belief(ran: Callable[[str], Ran]) -> None:
    run = ran("compression")
    assert run.holds(": eigen") and run.holds(": mean\\+trace") and run.holds("leaves no more variance")
    # What docs/reproduction.md reports against us: at R = 10 the paper's criterion has the better mean.
    error = {(row["criterion"], row["rank"]): float(row["mean_error"]) for row in run.rows("compression")}
    assert error["eigen", "10"] < error["mean+trace", "10"] < 0.2
    assert error["mean+trace", "1"] < error["eigen", "1"]


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_without_compression_the_papers_newton_is_the_librarys_undamped_one() -> None:
    data, stopping = draw(30, 2, 10.0, seed=1), Stopping(12, 4, 3, newton_tol=0.0, residual_tol=0.0)
    ours = newton(start(data.problem, stopping), resolve_policy("residual"), stopping, NewtonOptions(damped=False))
    papers = papers_newton(start(data.problem, stopping), stopping, None)
    for state, other in zip(list(ours), list(papers), strict=True):
        assert (state.newton_step, state.num_products) == (other.newton_step, other.num_products)
        torch.testing.assert_close(other.solution.offset, state.solution.offset, rtol=1e-8, atol=1e-10)


def test_the_papers_compression_keeps_the_top_eigenvectors_of_its_own_m_and_leaves_newtons_point() -> None:
    data, stopping, rank = draw(30, 2, 10.0, seed=1), Stopping(9, 9, 1, newton_tol=0.0, residual_tol=0.0), 4
    K = data.kernel(data.inputs, data.inputs)
    before, *_ = (s for s in papers_newton(start(data.problem, stopping), stopping, None) if s.buffer.size == 9)
    *_, after = papers_newton(start(data.problem, stopping), stopping, rank)
    # The same by the paper's words: raw residuals as actions, M = Sᵀ(K + W⁻¹)S at the new point, its top eigenvectors.
    S, v = torch.zeros(30, 0, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
    b = 4 * (data.labels - 0.5)  # ŷ − m at f = 0, where W⁻¹ = 4
    system = K + 4 * torch.eye(30, dtype=torch.float64)
    for _ in range(9):
        S = torch.cat([S, (b - system @ v)[:, None]], 1)
        v = S @ torch.linalg.solve(S.T @ system @ S, S.T @ b)
    f = K @ v
    torch.testing.assert_close(after.latent[:, 0], f, rtol=1e-6, atol=1e-8)  # not moved by compression
    noise = (1 / (f.sigmoid() * (-f).sigmoid())).diag()
    kept = S @ torch.linalg.eigh(S.T @ (K + noise) @ S).eigenvectors[:, -rank:]
    Q, actions = torch.linalg.qr(kept).Q, after.buffer.actions.combine(torch.eye(rank, dtype=torch.float64))
    torch.testing.assert_close(actions @ actions.T, Q @ Q.T, rtol=1e-5, atol=1e-6)
    assert before.buffer.size == 9 and after.buffer.size == rank


def test_without_recycling_every_newton_step_starts_from_the_prior() -> None:
    data, stopping = draw(30, 2, 10.0, seed=1), Stopping(12, 4, 3, newton_tol=0.0)
    problem = data.problem
    seen = list(moments(without_recycling(problem, "unit", stopping), start(problem, stopping)))
    assert [(m.newton_step, m.iteration) for m in seen[:7]] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]
    variance = in_between(seen[5].state).latent(data.test_inputs)[1]
    torch.testing.assert_close(variance, torch.full_like(variance, 10.0))
    assert all(b.seconds >= a.seconds for a, b in pairwise(seen))


def test_a_claim_that_fails_says_so() -> None:
    assert str(Claim("the earth is flat", False, "radius 6371 km")).startswith("DOES NOT HOLD: the earth is flat")

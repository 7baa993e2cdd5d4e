"""`ntk-iterncgp fit --shard` and `merge`: files of parts of the data become that of all, or stay as they are."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ntk_iterncgp.experiments import cli
from ntk_iterncgp.experiments.runs import merge as command
from ntk_iterncgp.experiments.runs.predict import restore
from ntk_iterncgp.persistence import files
from ntk_iterncgp.persistence.files import load_posterior, save_posterior
from ntk_iterncgp.persistence.locks import FolderLock
from tests.processes import lock_held_elsewhere, started_command

CPU = torch.device("cpu")
SMALL = ["data.train_limit=200", "data.test_limit=40", "model.train_epochs=2", "model.learning_rate=0.02"]
SMALL += [
    "model.train_batch_size=20",
    "model.arguments={width: 2}",
    "fit.num_actions=4",
    "checkpoint.every_seconds=null",
]
SHARDS = 3


def run(arguments: list[str], settings: list[str]) -> int:
    return cli.main([*arguments, *[text for setting in settings for text in ("--set", setting)]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fits of all data, of three shards, and of other things, in a folder each."""
    root = tmp_path_factory.mktemp("merge")
    (root / "small.yaml").touch()
    for k in range(1, SHARDS + 1):
        arguments = ["fit", str(root / "small.yaml"), "--shard", f"{k}/{SHARDS}", "--output-dir", str(root / f"{k}")]
        assert run(arguments, SMALL) == 0
    others = {"other": ["seed=1"], "layer": ["fit.subset_of_weights=last_layer", "fit.shard=2/3"]}
    kernel = ["kernel.name=RBF", "kernel.max_products=2"]
    for name, settings in {**others, "kernel": kernel}.items():
        assert run(["fit", str(root / "small.yaml"), "--output-dir", str(root / name)], SMALL + settings) == 0
    return root


def parts(folder: Path) -> list[str]:
    return [str(folder / f"{k}" / "posterior.safetensors") for k in range(1, SHARDS + 1)]


def covariance(path: Path) -> Any:
    restored = restore(path, CPU)
    x = torch.randn(5, *restored.input_shape, generator=torch.Generator().manual_seed(0))
    return restored.predictor.latent(x)[1]


@pytest.mark.cli
def test_the_shards_are_different_data_of_one_network(folder: Path) -> None:
    found = [load_posterior(Path(path)) for path in parts(folder)]
    assert sorted(about["num_data"] for _, _, about in found) == [53, 53, 54]  # 40 are held out for tuning
    assert len({int(state["data_seen"]) for state, _, _ in found}) == SHARDS
    for name, value in found[0][1].items():
        assert all(torch.equal(value, weights[name]) for _, weights, _ in found[1:])


@pytest.mark.cli
def test_merged_files_predict_and_are_the_same_in_any_order(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = parts(folder)
    outputs = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    assert cli.main(["merge", *files, "--output", str(outputs[0])]) == 0
    assert "Posterior of 160 data" in capsys.readouterr().out
    assert cli.main(["merge", *reversed(files), "--output", str(outputs[1])]) == 0
    one, other = map(covariance, outputs)
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * float(one.abs().max()))
    la = restore(outputs[0], CPU).predictor.la  # type: ignore[attr-defined]
    assert la.posterior.rank == 12 and la.n_data == 160 and len(la.data_seen) == SHARDS
    about = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert about["num_data"] == 160 and about["config"]["fit"]["shard"] is None and len(about["merged"]) == SHARDS
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "a.json", "b.safetensors", "b.json"}


@pytest.mark.cli
def test_merging_again_gives_what_merging_at_once_does(folder: Path, tmp_path: Path) -> None:
    first, second, third = parts(folder)
    total = tmp_path / "total.safetensors"
    assert cli.main(["merge", first, second, "--output", str(total)]) == 0
    assert json.loads((tmp_path / "total.json").read_text())["config"]["fit"]["shard"] == "1/3"
    assert cli.main(["merge", str(total), third, "--output", str(total)]) == 0  # onto itself
    assert json.loads((tmp_path / "total.json").read_text())["config"]["fit"]["shard"] is None, "all are there"
    assert cli.main(["merge", first, second, third, "--output", str(tmp_path / "all.safetensors")]) == 0
    la, whole = (restore(path, CPU).predictor.la for path in (total, tmp_path / "all.safetensors"))  # type: ignore[attr-defined]
    assert la.n_data == whole.n_data == 160 and set(la.data_seen.tolist()) == set(whole.data_seen.tolist())


@pytest.mark.cli
def test_overlapping_shards_are_refused_and_disjoint_ones_are_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(shard: str) -> str:
        path = tmp_path / shard.replace("/", "of")
        arguments = ["fit", str(folder / "small.yaml"), "--output-dir", str(path)]
        assert run([*arguments, *(["--shard", shard] if shard != "1/1" else [])], SMALL) == 0
        return str(path / "posterior.safetensors")

    half, quarter, other, whole = map(fit, ("1/2", "1/4", "2/4", "1/1"))
    out = tmp_path / "out.safetensors"
    for given, message in (([half, quarter], "of shard 1/4 and '.*' of shard 1/2"), ([quarter, whole], "shard 1/1")):
        assert cli.main(["merge", *given, "--output", str(out)]) == 2
        assert re.search(message, capsys.readouterr().err) and not out.exists()
    assert cli.main(["merge", half, other, "--output", str(out)]) == 0  # rows 1, 3, 5, … and 2, 6, 10, …
    assert json.loads((tmp_path / "out.json").read_text())["shards"] == ["1/2", "2/4"]
    assert cli.main(["merge", str(out), quarter, "--output", str(tmp_path / "more.safetensors")]) == 2
    everything = tmp_path / "everything.safetensors"
    assert cli.main(["merge", *parts(folder), "--output", str(everything)]) == 0
    assert json.loads((tmp_path / "everything.json").read_text())["shards"] == ["1/1"]
    assert cli.main(["merge", str(everything), whole, "--output", str(out)]) == 2
    assert "would count twice" in capsys.readouterr().err


@pytest.mark.cli
def test_evaluate_takes_a_complete_merge_for_the_fit_of_all_data(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["merge", *parts(folder), "--output", str(out / "posterior.safetensors"), "--max-rank", "5"]) == 0
    settings = [*SMALL, "evaluate.baselines=[map]", "evaluate.bootstrap=10", "evaluate.link_samples=16"]
    assert run(["evaluate", str(folder / "small.yaml"), "--output-dir", str(out)], settings) == 0
    assert "Posterior of an earlier fit with these settings" in capsys.readouterr().out
    assert cli.main(["merge", *parts(folder)[:2], "--output", str(tmp_path / "some" / "posterior.safetensors")]) == 0
    assert run(["evaluate", str(folder / "small.yaml"), "--output-dir", str(tmp_path / "some")], settings) == 0
    assert "earlier fit" not in capsys.readouterr().out.rpartition("merge")[2]


@pytest.mark.cli
@pytest.mark.parametrize("max_rank", [None, 4])
def test_no_more_than_a_few_posteriors_are_in_memory(
    max_rank: int | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sixteen: sums of 8, 4, 2 and 1, and the one that is read."""
    alive, most = 0, 0

    class Part:
        def __init__(self, number: int) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            self.number = number

        def merge(self, other: "Part", max_rank: int | None) -> None:
            self.number += other.number

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    from ntk_iterncgp.experiments.runs.merge import _added

    assert _added([Path(str(i)) for i in range(16)], lambda path: Part(int(path.name)), max_rank).number == 120
    assert most <= 5


@pytest.mark.cli
@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["1", "1"], "'.*1/posterior.safetensors' and '.*1/posterior.safetensors', which have seen the same"),
        (["1"], "two posterior files or more; got one"),
        (
            ["1", "other"],
            "other/posterior.safetensors' cannot be merged.*this model; got one of other weights",
        ),
        (["1", "layer"], "layer/posterior.safetensors' cannot be merged"),
        (["1", "kernel"], "kernel/posterior.safetensors' must hold the posterior of a network; got that of a kernel"),
        (["1", "nowhere"], "There is no posterior at '.*nowhere/posterior.safetensors'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_belong_together_is_refused_in_one_message(
    files: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(folder / name / "posterior.safetensors") for name in files]
    output = tmp_path / "out.safetensors"
    output.write_text("as it was")
    assert cli.main(["merge", *paths, "--output", str(output)]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert re.search(message, told), told
    assert output.read_text() == "as it was" and [p.name for p in tmp_path.iterdir()] == ["out.safetensors"]


@pytest.mark.cli
@pytest.mark.parametrize("where", ["header", "middle", "end", "text"])
def test_a_damaged_file_is_refused_by_its_name(
    where: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = parts(folder)
    content = bytearray(Path(third).read_bytes())
    place = {"header": 40, "middle": len(content) // 2, "end": len(content) - 1}.get(where, 0)
    content[place] ^= 64
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"no tensors at all" if where == "text" else bytes(content))
    assert cli.main(["merge", first, second, str(damaged), "--output", str(tmp_path / "out.safetensors")]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1 and "damaged.safetensors" in told
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.safetensors"]


@pytest.mark.cli
def test_other_inputs_and_wrong_numbers_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, weights, about = load_posterior(Path(parts(folder)[1]))
    scaled = tmp_path / "scaled.safetensors"
    save_posterior(scaled, state, weights, {**about, "scaling": {"mean": [0.0], "std": [1.0]}})
    out = ["--output", str(tmp_path / "out.safetensors")]
    for arguments, message in (
        ([parts(folder)[0], str(scaled), *out], "must have the same scaling; got others in"),
        ([*parts(folder), "--output", str(tmp_path / "out.pt")], "--output must end in .safetensors"),
        ([*parts(folder), *out, "--max-rank", "0"], "--max-rank must be a whole number of at least 1; got 0"),
    ):
        assert cli.main(["merge", *arguments]) == 2
        assert message in capsys.readouterr().err
    for shard in ("4/3", "0/3", "third", "1/3/3", "1/-3"):
        assert run(["fit", str(folder / "small.yaml"), "--shard", shard], SMALL) == 2
        assert "fit.shard must be k/K with 1 ≤ k ≤ K; got" in capsys.readouterr().err
    assert run(["fit", str(folder / "small.yaml"), "--shard", "1/2"], [*SMALL, "kernel.name=RBF"]) == 2
    assert "fit.shard must be for a network" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.cli
def test_a_folder_that_another_run_writes_into_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock_held_elsewhere(tmp_path):
        assert cli.main(["merge", *parts(folder), "--output", str(tmp_path / "out.safetensors")]) == 2
        assert "must not be in use by another run" in capsys.readouterr().err


@pytest.mark.cli
def test_fits_that_chose_different_hyperparameters_get_their_geometric_mean(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, path, precision in zip("ab", parts(folder), (1.0, 100.0), strict=False):
        state, weights, about = load_posterior(Path(path))
        files.append(str(tmp_path / f"{name}.safetensors"))
        save_posterior(Path(files[-1]), state, weights, {**about, "prior_precision": [precision], "num_data": 10})
    for order in (files, files[::-1]):
        assert cli.main(["merge", *order, "--output", str(tmp_path / "out.safetensors")]) == 0
        assert "prior precision 10, their geometric mean" in capsys.readouterr().out
        la = restore(tmp_path / "out.safetensors", CPU).predictor.la  # type: ignore[attr-defined]
        assert float(la.prior_precision) == pytest.approx(10)


def killed_while_writing() -> None:
    """The content is written, the file is not renamed."""
    files._flush = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
@pytest.mark.cli
@pytest.mark.parametrize("before", [None, "an earlier merge"])
def test_killed_in_the_middle_of_writing_no_file_is_half_written_and_nothing_lost(
    before: str | None, folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    output = tmp_path / "out.safetensors"
    if before is not None:
        assert cli.main(["merge", *parts(folder)[:2], "--output", str(output)]) == 0
    earlier = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    inputs = [Path(path).read_bytes() for path in parts(folder)]
    arguments = ["merge", *parts(folder), "--output", str(output)]
    beside = tmp_path_factory.mktemp("beside")
    killed = started_command(arguments, beside, killed_while_writing)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL, (beside / "stderr").read_text()
    visible = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert visible == earlier and [Path(path).read_bytes() for path in parts(folder)] == inputs
    assert any(path.name.startswith(".out.") for path in tmp_path.iterdir())
    assert cli.main(arguments) == 0  # the lock of the dead holds nobody up, and what it left behind goes
    assert {path.name for path in tmp_path.iterdir()} == {"out.safetensors", "out.json"}
    FolderLock(tmp_path, "a test").release()


@pytest.mark.cli
def test_the_command_is_a_function_too(folder: Path, tmp_path: Path) -> None:
    output = command([Path(path) for path in parts(folder)], tmp_path / "new" / "out.safetensors", max_rank=3)
    assert restore(output, CPU).predictor.la.posterior.rank == 3  # type: ignore[attr-defined]

"""Checkpoints: a run that was killed goes on from its last save and ends with the same bits, or says why it cannot."""

import errno
import signal
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp import Checkpoint, kernels, likelihoods
from ntk_iterncgp.experiments import cli
from ntk_iterncgp.fitting import cost
from ntk_iterncgp.persistence import checkpoint as module
from ntk_iterncgp.persistence import files
from ntk_iterncgp.persistence.checkpoint import CheckpointMismatch, CheckpointSession
from ntk_iterncgp.persistence.files import FileError, load_posterior
from tests.checkpoint_helpers import (
    RUNS,
    Killed,
    Run,
    assert_same,
    checkpoint_in,
    die_at_save,
    gp_run,
    net_run,
    small_net,
    three,
)
from tests.clusters_helpers import Stream

# Going on


@pytest.fixture(autouse=True)
def saves_may_take_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every state is saved, however long that takes."""
    monkeypatch.setattr(module, "SAVING_SHARE", float("inf"))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_every_save_ends_as_if_it_had_not_been(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after its first save, the next one after the second, and so on."""
    run, folder, kills = RUNS[name], tmp_path / "checkpoint", 0
    expected = run()
    while True:
        said: list[str] = []
        with monkeypatch.context() as patch:
            die_at_save(1, patch)
            try:
                with checkpoint_in(folder, said) as checkpoint:
                    resumed = run(checkpoint)
            except Killed:
                kills += 1
                assert kills < 100
                continue
        assert said, "nothing was said"
        break
    assert kills >= 2
    assert_same(resumed, expected)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["softmax, joint", "clusters"])
def test_a_call_that_has_ended_starts_anew_and_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    folder, said = tmp_path / "checkpoint", []
    for _ in range(2):
        RUNS[name](checkpoint_in(folder, said))
        assert not folder.exists() and not said


@pytest.mark.parametrize("name", ["refine", "clusters, refined", "products, refined"])
def test_calls_in_one_block_are_not_repeated_when_the_last_is_killed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit of the second program comes from its file: not one product, nor a sweep, is spent on it again."""
    run, folder, said = RUNS[name], tmp_path / "checkpoint", []
    expected = run()
    with pytest.raises(Killed), checkpoint_in(folder) as checkpoint:
        made = run.make()
        run.calls[0](made, checkpoint)
        die_at_save(1, monkeypatch)
        run.calls[1](made, checkpoint)
    monkeypatch.undo()
    assert len(list(folder.glob("0-fit.*"))) >= 1 and len(list(folder.glob("1-refine.*"))) == 1
    monkeypatch.setattr("ntk_iterncgp.gp.non_conjugate.newton", not_again)
    monkeypatch.setattr("ntk_iterncgp.fitting.cluster_run.ClusterRun._forward", not_again)
    monkeypatch.setattr("ntk_iterncgp.fitting.newton_fit.newton", not_again)
    with checkpoint_in(folder, said) as checkpoint:
        made = run.make()
        for call in run.calls:
            call(made, checkpoint)
    assert "The result of 'fit'" in said[0] and "Going on with 'refine'" in said[1]
    assert_same(made, expected)
    assert not folder.exists()


def not_again(*arguments: object, **settings: object) -> None:
    raise AssertionError("this was done before")


def test_an_error_in_the_block_keeps_what_was_saved(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    with pytest.raises(ZeroDivisionError), checkpoint_in(folder) as checkpoint:
        RUNS["clusters"](checkpoint)
        1 / 0  # noqa: B018
    said: list[str] = []
    with checkpoint_in(folder, said) as checkpoint:
        assert_same(RUNS["clusters"](checkpoint), RUNS["clusters"]())
    assert len(said) == 1 and "was saved already" in said[0]


@pytest.mark.filterwarnings("ignore:The run was interrupted")
@pytest.mark.parametrize("streamed", [False, True])
def test_a_fit_stopped_by_ctrl_c_goes_on_when_it_is_called_again(
    streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "KEEP_BYTES", 0)  # so that the sweep reads again, and can be stopped by what is read
    net, reads = small_net(), [0]

    class Watched(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            reads[0] += 1
            if reads[0] == 64:  # in the second sweep
                signal.raise_signal(signal.SIGINT)
            return super().__getitem__(index)

    data = Watched(*net.dataset().tensors)
    run = net_run(net, streamed=streamed, num_actions=5)
    stopped = run.make()
    stopped.fit(DataLoader(Stream(data) if streamed else data, batch_size=4), checkpoint=checkpoint_in(tmp_path / "c"))
    assert stopped.report_.status == "interrupted" and 0 < stopped._fit.state.clusters.passes[0].swept.sum() < 21
    said: list[str] = []
    assert_same(run(checkpoint_in(tmp_path / "c", said)), run())
    assert "Going on with 'fit'" in said[0]


@pytest.mark.parametrize("policy", ["clusters", "curvature_residual"])
def test_seconds_that_were_spent_before_a_crash_count(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that ticks whenever a datum is read, a run in two parts stops where a run in one does."""
    clock, net = [0.0], small_net()
    monkeypatch.setattr(cost, "KEEP_BYTES", 0)  # every sweep reads
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Ticking(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            clock[0] += 1
            return super().__getitem__(index)

    loader = DataLoader(Ticking(*net.dataset().tensors), batch_size=4)

    def run(checkpoint: Checkpoint | None = None) -> Any:
        made = net.laplace(policy=policy, num_actions=5)
        made.fit(loader)
        made.refine(loader, seconds=14 if policy == "clusters" else 100, checkpoint=checkpoint)
        return made

    expected = run()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at_save(1, patch)
        run(checkpoint_in(tmp_path / "c"))
    resumed = run(checkpoint_in(tmp_path / "c"))
    assert resumed.report_.status == "budget" and resumed.report_.epochs == expected.report_.epochs
    assert_same(resumed, expected)


# Whose it is


def refusal(run: Run, folder: Path) -> str:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointMismatch) as error:
        run(checkpoint_in(folder))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before, "what was saved is as it was"
    return str(error.value)


def killed(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, *, saves: int = 1) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at_save(saves, patch)
        run(checkpoint_in(folder))


def test_other_settings_of_a_network_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, folder = small_net(), tmp_path / "c"
    killed(net_run(net, num_actions=5), folder, monkeypatch)
    said = refusal(net_run(net, num_actions=6, prior_precision=2.0), folder)
    assert "its num_actions is 5 and here it is 6" in said
    assert "its prior_precision is [0.7] and here it is [2.0]" in said or "prior_precision" in said
    assert "Try the run as it was, another folder, or remove this one" in said
    assert "its policy is None and here it is 'ntk_iterncgp.solver.policies.curvature_residual'" in refusal(
        net_run(net, num_actions=5, policy="curvature_residual"), folder
    )
    assert "its flavour is 'IterNCGPAllLaplace'" in refusal(net_run(net, subset="last_layer", num_actions=5), folder)


def test_other_settings_of_a_kernel_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "c"
    killed(gp_run(three), folder, monkeypatch)
    assert "its seed is 3 and here it is 4" in refusal(gp_run(three, seed=4), folder)
    said = refusal(gp_run(three, kernel=kernels.Matern32(0.8, 2.0 + 1e-12)), folder)
    assert "its kernels[0].outputscale is 2.0 and here it is 2.000000000001;" in said and "lengthscale" not in said
    said = refusal(gp_run(three, likelihood=likelihoods.Softmax(4)), folder)
    assert "its likelihood.num_outputs is 3 and here it is 4" in said


def differences(saved: Any, now: Any) -> list[str]:
    return module._differences({"settings": {"data": saved}, "model": {}}, {"settings": {"data": now}, "model": {}})


def test_of_nested_settings_those_that_differ_are_named_and_no_others() -> None:
    saved = {"name": "digits", "root": "r" * 80, "split": [0.5, {"seed": 1, "kind": "random"}], "limit": 100}
    now = {"name": "digits", "root": "r" * 80, "split": [0.5, {"seed": 2, "kind": "random"}], "limit": 200, "new": None}
    assert differences(saved, now) == [
        "its data.limit is 100 and here it is 200",
        "its data.split[1].seed is 1 and here it is 2",
    ]
    assert differences(saved, saved) == []
    assert differences([1, 2], [1, 2, 3]) == ["its data is [1, 2] and here it is [1, 2, 3]"]


@pytest.mark.parametrize("place", [0, 150, 299])
def test_of_long_texts_the_place_is_shown_where_they_differ(place: int) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(300))
    (said,) = differences({"root": text}, {"root": text[:place] + "#" + text[place + 1 :]})
    one, other = said.removeprefix("its data.root is ").split(" and here it is ")
    assert "#" not in one and other.replace("#", text[place]) == one and len(one) <= 62
    assert one.startswith("…") == (place > 0) and one.endswith("…") == (place < 299)


def test_of_many_entries_that_differ_a_few_are_named() -> None:
    assert differences([0] * 20, [1] * 20)[4:] == ["its data[4] is 0 and here it is 1", "15 more"]


def test_another_model_is_refused_by_the_names_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, folder = small_net(), tmp_path / "c"
    killed(net_run(net, num_actions=5), folder, monkeypatch)
    other = deepcopy(net.model)
    other[2].bias.data[1] += 1e-12
    assert "its model has other values in 2.bias." in refusal(net_run(replace(net, model=other), num_actions=5), folder)


@pytest.mark.parametrize("saves", [2, 9], ids=["forward sweep", "backward sweep"])
@pytest.mark.parametrize("policy", ["clusters", "curvature_residual"])
def test_other_data_are_refused_by_their_numbers(
    policy: str, saves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, folder = small_net(), tmp_path / "c"
    killed(net_run(net, policy=policy, num_actions=9), folder, monkeypatch, saves=saves)
    x, y = net.x.clone(), net.y.clone()
    x[3, 1] += 1e-12
    y[6] = (y[6] + 1) % 3
    said = refusal(net_run(replace(net, x=x, y=y), policy=policy, num_actions=9), folder)
    assert "2 of its" in said and "data differ from those here (numbers 3, 6)" in said
    few = replace(net, x=net.x[:5], y=net.y[:5])
    assert "its batches is 6 and here it is 2" in refusal(net_run(few, policy=policy, num_actions=9), folder)


def test_other_data_of_a_kernel_are_refused_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "c"
    killed(gp_run(three), folder, monkeypatch)
    other = three.clone()
    other[[4, 5]] = other[[5, 4]]
    assert "2 of its 14 data differ from those here (numbers 4, 5)" in refusal(gp_run(other), folder)
    assert "its data are 14 and here they are 12" in refusal(gp_run(three[:12]), folder)


def test_a_refine_that_starts_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, net = tmp_path / "c", small_net()
    loader, made = net.loader(), net.laplace(num_actions=5, max_epochs=0.9)
    made.fit(loader)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at_save(1, patch)
        made.refine(loader, epochs=1, checkpoint=checkpoint_in(folder))
    with pytest.raises(CheckpointMismatch, match="its epochs is 1 and here it is 2"):
        made.refine(loader, epochs=2, checkpoint=checkpoint_in(folder))
    made.refine(loader, epochs=0.3)
    with pytest.raises(CheckpointMismatch, match=r"its starts_from\[1\] is '\[31, 3\]"):
        made.refine(loader, epochs=1, checkpoint=checkpoint_in(folder))


# Bad days


@pytest.mark.parametrize("damage", ["empty", "half", "bit", "long"])
@pytest.mark.parametrize("name", ["softmax, joint", "clusters"])
def test_a_damaged_file_is_passed_over_for_the_one_before(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder, said = RUNS[name], tmp_path / "c", []
    killed(run, folder, monkeypatch, saves=6)
    newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    whole = newest.read_bytes()
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    damaged = {"half": whole[: len(whole) // 2], "bit": bytes(flipped), "long": whole + b"x", "empty": b""}
    newest.write_bytes(damaged[damage])
    resumed = run(checkpoint_in(folder, said))
    assert "A checkpoint is passed over" in said[0] and newest.name in said[0] and "Going on with 'fit'" in said[1]
    assert_same(resumed, run())


def test_with_both_files_damaged_a_run_starts_anew_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder, said = RUNS["clusters"], tmp_path / "c", []
    killed(run, folder, monkeypatch, saves=3)
    for path in folder.iterdir():
        path.write_bytes(b"\0" * 1000)
    assert_same(run(checkpoint_in(folder, said)), run())
    assert len(said) == 2 and all("is passed over" in sentence for sentence in said)


@pytest.mark.parametrize("name", ["softmax, joint", "clusters"])
def test_a_full_disk_is_told_once_and_the_last_good_file_is_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder, said = RUNS[name], tmp_path / "c", []
    written, write = [0], files._bytes_of

    def fills_up(tensor: Tensor) -> Iterator[memoryview]:
        written[0] += 1
        if written[0] > 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(tensor)

    expected = run()
    with monkeypatch.context() as patch:
        patch.setattr(files, "_bytes_of", fills_up)
        patch.setattr(CheckpointSession, "end", lambda call, content: None)  # as if killed just before
        assert_same(run(checkpoint_in(folder, said)), expected)
    assert len(said) == 1 and "No space left on device" in said[0] and "what was saved before is intact" in said[0]
    assert {path.suffix for path in folder.iterdir()} == {".safetensors"}
    assert_same(run(checkpoint_in(folder, said)), expected)
    assert len(said) == 2 and "Going on" in said[1]


def test_a_folder_that_cannot_be_written_to_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for door in ("softmax, joint", "clusters"):
        with pytest.raises(FileError, match=r"must be writable; got .* \(Not a directory\)\. Try another folder\."):
            RUNS[door](checkpoint_in(tmp_path / "file" / "c"))


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = RUNS["clusters"], tmp_path / "c"
    killed(run, folder, monkeypatch)
    (folder / ".0-fit.b.999.safetensors").write_bytes(b"half")
    run(checkpoint_in(folder))
    assert not folder.exists()


def test_others_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "2026-weights.safetensors").write_text("mine")
    with checkpoint_in(tmp_path) as checkpoint:
        RUNS["clusters"](checkpoint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2026-weights.safetensors", "notes.txt"]


# The command line


def command(folder: Path, *settings: str) -> list[str]:
    small = ("data.train_limit=60", "data.test_limit=20", "model.train_epochs=2", "fit.num_actions=3", *settings)
    (folder / "empty.yaml").touch()
    sets = [text for setting in ("checkpoint.every_seconds=0", *small) for text in ("--set", setting)]
    return ["fit", str(folder / "empty.yaml"), "--output-dir", str(folder / "out"), *sets]


@pytest.mark.cli
@pytest.mark.parametrize(
    "settings",
    [
        ("data.batch_size=10", "fit.refine_epochs=1"),
        ("kernel.name=Matern32", "kernel.max_products=6", "kernel.refine_products=3"),
    ],
    ids=["network", "kernel"],
)
def test_the_same_command_goes_on_and_writes_the_same_posterior(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed after each save, from the training of the network to the end of refine."""
    posteriors, kills = [], 0
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        argv = command(tmp_path / name, *settings)
        while True:
            with monkeypatch.context() as patch:
                if name == "killed":
                    die_at_save(2, patch)
                try:
                    assert cli.main(argv) == 0
                except Killed:
                    kills += 1
                    continue
            break
        posteriors.append(load_posterior(tmp_path / name / "out" / "posterior.safetensors"))
        assert not (tmp_path / name / "out" / "checkpoint").exists()
    assert kills >= 3 and "Going on with 'fit'" in capsys.readouterr().out
    (state, weights, about), (other_state, other_weights, other_about) = posteriors
    assert_equal_trees(state, other_state)
    assert_equal_trees(weights, other_weights)
    for report in (about["report"], other_about["report"]):
        report["peak_bytes"] = 0  # like seconds, measured
        for record in (report, *report["history"]):
            record["seconds"] = 0
    assert about["report"] == other_about["report"]


def assert_equal_trees(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_trees(one[key], other[key])
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.cli
def test_a_command_that_differs_from_what_was_saved_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at_save(3, patch)
        cli.main(command(tmp_path))
    capsys.readouterr()
    assert cli.main([*command(tmp_path), "--set", "fit.num_actions=4"]) == 2
    error = capsys.readouterr().err
    assert "its num_actions is 3 and here it is 4" in error and error.strip().count("\n") == 0
    assert cli.main([*command(tmp_path), "--set", "data.train_limit=50"]) == 2
    assert "its data.train_limit is 60 and here it is 50. Try" in capsys.readouterr().err  # while it is trained
    assert cli.main([*command(tmp_path), "--set", "fit.num_actions=4", "--set", "checkpoint.every_seconds=null"]) == 0


@pytest.mark.cli
def test_a_command_with_another_kernel_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = command(tmp_path, "kernel.name=Matern32", "kernel.max_products=6")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at_save(2, patch)
        cli.main(kernel)
    capsys.readouterr()
    assert cli.main([*kernel, "--set", "kernel.lengthscale=7"]) == 2
    error = capsys.readouterr().err
    assert "its kernels[0].lengthscale is 8.0 and here it is 7.0" in error and error.strip().count("\n") == 0


# Settings


@pytest.mark.parametrize("value", [-1, float("nan"), "30", True, None])
def test_an_interval_that_is_no_time_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`every_seconds` must be a number of at least 0; got"):
        Checkpoint(tmp_path, every_seconds=value)  # type: ignore[arg-type]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for door in ("softmax, joint", "clusters"):
        with pytest.raises(TypeError, match=r"`checkpoint` must be a Checkpoint; got .* Try Checkpoint\('folder'\)"):
            RUNS[door](str(tmp_path))  # type: ignore[arg-type]


def test_saves_are_as_far_apart_as_asked_or_take_a_tenth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVING_SHARE", 0.1)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    session = Checkpoint(tmp_path, every_seconds=30, say=print).session("fit", {})
    assert not session.is_due()
    now[0] += 30
    assert session.is_due()

    def slowly(*arguments: object) -> None:
        now[0] += 5

    monkeypatch.setattr(module, "write_tensors", slowly)
    session.save({})
    now[0] += 49
    assert not session.is_due()
    now[0] += 1
    assert session.is_due()

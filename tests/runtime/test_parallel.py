"""Several processes give what one gives, to 1e-10 in float64; and when one of them fails, none waits for it.

Long after the mean has converged the actions themselves may differ; predictions and evidence do not.

Processes are real, under gloo; `parallel_work.py` has what they do. One process is this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ntk_iterncgp.experiments import cli
from ntk_iterncgp.fitting import cost
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.runtime.parallel import Shard
from tests import parallel_work as work
from tests import torchrun_work
from tests.parallel_work import Failed, in_processes, plain

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
PROMPT = 5.0  # seconds within which all processes have ended after one of them failed


@pytest.fixture(scope="module")
def alone() -> Any:
    return plain(work.all_results())


@pytest.fixture(scope="module", params=[2, 3])
def together(request: pytest.FixtureRequest) -> Any:
    found, _ = in_processes(request.param, work.all_results)
    for one in found:
        assert not isinstance(one, Failed), one
    return found


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    """Everything in two trees of arrays agrees to 1e-10, relative to the largest number of each array."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key], f"{where}{key}: ")
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, where)
    else:
        size = max(1.0, float(np.abs(np.nan_to_num(expected)).max(initial=0.0)))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * size, err_msg=where)


# --- the same numbers ---------------------------------------------------------------------------------------------


def test_a_network_is_fitted_alike_by_one_two_and_three_processes(alone: Any, together: Any) -> None:
    for one in together:
        assert_close(one[0], alone[0])


def test_a_kernel_is_fitted_alike_by_one_two_and_three_processes(alone: Any, together: Any) -> None:
    for one in together:
        assert_close(one[1], alone[1])


def test_the_small_matrices_are_the_same_bits_in_all_processes(together: Any) -> None:
    """All processes take the same decisions only if they see the same numbers."""
    first = together[0]
    for other in together[1:]:
        for fits in (0, 1):
            for name, found in first[fits].items():
                for key in found:
                    np.testing.assert_array_equal(found[key], other[fits][name][key], err_msg=f"{name}: {key}")


def test_one_process_sends_nothing(alone: Any) -> None:
    assert alone[2] == 0


def test_hyperparameters_are_chosen_alike() -> None:
    found, _ = in_processes(2, work.optimised)
    expected = work.optimised()
    for one in found:
        np.testing.assert_allclose(one, expected, rtol=1e-6)


def test_a_fit_by_clusters_sends_the_images_once() -> None:
    """One all-reduce per sweep: of what grows with the number of groups, twice (K − 1)/K the images, and for each group
    no more than a checksum and a flag for its round of batches."""
    (few, many), _ = zip(*(in_processes(2, work.traffic_of_a_fit, number) for number in (2, 4)), strict=True)
    for one, other in zip(few, many, strict=True):
        sent, images, groups = (b - a for a, b in zip(one, other, strict=True))
        assert groups > 10 and images <= sent <= images + 2 * 8 * groups


def test_blocks_of_several_widths_are_gathered_without_their_columns() -> None:
    found, _ = in_processes(3, work.ragged_batches)
    for one in found:
        assert one == [[[rows, 0], [rows], [rows, 1]] for rows in (3, 3, 3, 1)]


# --- failure handling -----------------------------------------------------------------------------------------------

CLUSTERS, PRODUCTS = {"num_actions": 7}, {"policy": "random_subspace", "num_actions": 8}


@pytest.mark.parametrize("settings", [CLUSTERS, PRODUCTS])
def test_an_error_in_one_process_ends_the_others_with_it(settings: dict[str, Any]) -> None:
    (first, failed, third), seconds = in_processes(3, work.fit_with_trouble, 60, work.raise_disk_error, settings)
    assert failed == "OSError: [Errno 5] the disk is gone"
    for other in (first, third):
        assert "This process stops, since process 1 failed with OSError: [Errno 5] the disk is gone" in other
    assert seconds < PROMPT


def test_a_process_that_is_killed_ends_the_others() -> None:
    (first, killed, third), seconds = in_processes(3, work.fit_with_trouble, 60, work.die, CLUSTERS)
    assert killed is None
    for other in (first, third):
        assert isinstance(other, Failed)
        assert "This process stops, since another one ended without an error message" in other
    assert seconds < PROMPT


def test_ctrl_c_in_one_process_stops_all_at_the_same_place_and_refine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _ = in_processes(2, work.interrupt_and_go_on, 65, CLUSTERS)
    monkeypatch.setattr(cost, "KEEP_BYTES", 0)  # one process reads again, too
    with pytest.warns(UserWarning, match="The run was interrupted"):
        *_, expected = plain(work.interrupt_and_go_on(110, CLUSTERS, rank=0))
    for status, stopped, ended in found:
        assert status == "interrupted"
        assert_close(stopped, found[0][1])
        assert 0 < len(stopped["noise_gram"]) < len(ended["noise_gram"]) == 39  # each group by itself, once cut short
        for key in ("images", "noise_gram", "covariance"):
            assert_close(ended[key], expected[key])


def test_ctrl_c_in_one_process_stops_all_products() -> None:
    found, _ = in_processes(2, work.interrupt_and_go_on, 100, PRODUCTS | {"num_actions": 24})
    for status, stopped, _ in found:
        assert status == "interrupted"
        assert_close(stopped, found[0][1])
        assert len(stopped["noise_gram"]) == 8  # of the 12 that the budget would have brought


def test_the_clock_of_one_process_is_the_clock_of_all() -> None:
    found, _ = in_processes(2, work.refine_by_the_clock)
    assert found[0] == found[1] > 7


def test_processes_that_fail_alike_can_go_on() -> None:
    found, _ = in_processes(2, work.fail_alike_then_fit)
    assert found[0] == found[1] == pytest.approx(work.fail_alike_then_fit())


@pytest.mark.parametrize(
    ("fit", "what"),
    [
        (work.fit_different_models, "The model's weights and buffers are"),
        (work.fit_different_data, "The training data (all of them, without a DistributedSampler) are"),
        (work.fit_different_inputs, "X and y are"),
    ],
)
def test_what_differs_between_processes_is_refused_in_all_of_them(fit: Any, what: str) -> None:
    found, _ = in_processes(2, fit)
    for one in found:
        assert isinstance(one, Failed) and f"{what} must be the same in all 2 processes" in one


@pytest.mark.parametrize("corrupt", [work.break_image, work.break_small_matrix, work.break_kernel_image])
def test_what_is_broken_in_one_process_is_mended_by_all(corrupt: Any) -> None:
    ((told, *first), (_, *second)), _ = in_processes(2, work.refine_broken, corrupt)
    assert len(told) == 1 and "The self-check expected" in told[0] and told[0].endswith("again.")
    assert first[0] == second[0] == [], "nothing is wrong any more"
    for one, other in zip(first[1], second[1], strict=True):
        np.testing.assert_array_equal(one, other)
    if corrupt is not work.break_kernel_image:  # whose further actions were chosen before it was mended
        assert_close(first[1], plain(work.refine_broken(None))[2])


@pytest.mark.parametrize("corrupt", [work.break_directions, work.put_nan_in_point])
def test_what_cannot_be_mended_in_one_process_is_refused_by_all(corrupt: Any) -> None:
    found, _ = in_processes(2, work.refine_broken, corrupt)
    for one in found:
        assert isinstance(one, Failed) and "SelfCheckError" in one and "is not to be trusted, and was not kept" in one
    assert "another one has found something wrong" in found[0] and "another one" not in found[1]


# --- killed and resumed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "fit", "die_at", "settings"),
    [
        (2, 3, work.fit_network_saving, 8, CLUSTERS),
        (2, 3, work.fit_network_saving, 50, CLUSTERS),
        (3, 1, work.fit_network_saving, 15, PRODUCTS | {"num_actions": 24}),
        (1, 2, work.fit_kernel_saving, 4, {"max_products": 6, "actions": "kronecker"}),
    ],
    ids=["clusters, looking", "clusters, sweeping", "products", "kernel"],
)
def test_a_killed_run_goes_on_with_another_number_of_processes(
    before: int, after: int, fit: Any, die_at: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    killed, _ = in_processes(before, fit, folder, die_at, settings)
    assert killed[-1] is None and all(isinstance(one, Failed) for one in killed[:-1])
    assert list((tmp_path / "saved").glob("*.safetensors"))
    found, _ = in_processes(after, fit, folder, None, settings)
    _, expected = plain(fit(str(tmp_path / "other"), None, settings))
    for place, (said, result) in enumerate(found):
        assert said == ([f"Going on with 'fit' in '{folder}' from where it was saved."] if place == 0 else [])
        assert_close(result, expected)
    assert not (tmp_path / "saved").exists()


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cli
def test_three_processes_of_torchrun_fit_networks_and_kernels_as_one_does_and_one_writes(tmp_path: Path) -> None:
    """By commands, and in float64 both front doors to 1e-10. One start for all, which takes the longest."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", "-m"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*command, "tests.torchrun_work", str(tmp_path)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Posterior: ") == ended.stdout.count("Data: ") == len(torchrun_work.COMMANDS)
    for name, arguments in torchrun_work.COMMANDS.items():
        assert cli.main([*arguments, "--output-dir", str(tmp_path / "one" / name)]) == 0
        folders = [tmp_path / number / name for number in ("one", "several")]
        one, several = (load_file(folder / "posterior.safetensors") for folder in folders)
        assert one.keys() == several.keys()
        for key in one.keys() - {"sha256"}:  # in float32, as commands compute
            scale = np.abs(one[key]).max(initial=0)
            np.testing.assert_allclose(several[key], one[key], rtol=1e-4, atol=1e-4 * scale, err_msg=key)
        assert len({frozenset(path.name for path in folder.iterdir()) for folder in folders}) == 1
    expected = torchrun_work.results()
    for rank in range(3):
        with np.load(tmp_path / f"{rank}.npz") as found:
            assert_close(dict(found), expected)


@pytest.mark.cli
@pytest.mark.parametrize(("rank", "waits"), [(0, []), (1, [cli.GRACE_SECONDS])])
def test_only_the_first_process_says_at_once_what_is_wrong(
    rank: int, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends the others as soon as the first has ended."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    assert cli.main(["fit", "no such file.yaml"]) == cli.USER_ERROR
    assert "no such file.yaml" in capsys.readouterr().err
    assert slept == waits


@pytest.mark.cli
@pytest.mark.parametrize("command", [["evaluate", "configs/digits.yaml"], ["demo"]])
def test_only_fit_is_for_several_processes(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert cli.main(command) == cli.USER_ERROR
    assert f"must 'fit'; got '{command[0]}'" in capsys.readouterr().err


@pytest.mark.cli
def test_a_process_that_does_not_find_the_others_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cli.main([*torchrun_work.FIT, "--output-dir", str(tmp_path)]) == cli.FAILURE
    assert "must be one of 2 (WORLD_SIZE); got no connection to the others" in capsys.readouterr().err


# --- shards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
@pytest.mark.parametrize("num_rows", [1, 2, 6, 41])
def test_blocks_are_nearly_of_the_same_size_and_the_first_is_never_empty(
    num_processes: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "num_processes", lambda: num_processes)
    starts = Shard.even(num_rows).starts
    sizes = np.diff(starts)
    assert starts[0] == 0 and starts[-1] == num_rows and len(sizes) == num_processes
    assert sizes.max() - sizes.min() <= 1 <= sizes[0]


def test_shards_of_batches_begin_where_batches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "num_processes", lambda: 3)
    assert Shard.of_batches([10, 10, 10, 10, 3]).starts == (0, 20, 40, 43)
    assert Shard.of_batches([10, 4]).starts == (0, 10, 14, 14)

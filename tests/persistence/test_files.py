"""Files from anywhere: what is damaged or hostile is refused in a sentence of ours, and what is kept loads for good.

Of the kept files `posterior-1` and `-2` were written by `ntk-iterncgp fit` on sixty points in three classes with `mlp`
of width 4 and depth 1, the others by `kept_runs.py`.
"""

import copy
import gc
import json
import os
import random
import resource
import shutil
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ntk_iterncgp import Checkpoint
from ntk_iterncgp.experiments.runs.predict import columns_of, restore
from ntk_iterncgp.experiments.settings import ConfigError
from ntk_iterncgp.persistence import checkpoint, files
from ntk_iterncgp.persistence.files import FileError, load_posterior, write_tensors
from tests import kept_runs
from tests.checkpoint_helpers import Killed, Run, checkpoint_in, die_at_save, net_run, small_net

KEPT = Path(__file__).resolve().parents[1] / "kept"
NEWEST = KEPT / f"posterior-{files.POSTERIOR_VERSION}.safetensors"
OURS = (FileError, ConfigError)
CPU = torch.device("cpu")

# What is written is read


def test_every_type_of_number_comes_back_with_its_bits(tmp_path: Path) -> None:
    written = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in files.DTYPES}
    written |= {"none": torch.zeros(0, 3), "one": torch.tensor(0.1)}
    write_tensors(tmp_path / "all", written, {"format": "numbers 1"})
    _, found = files.read_tensors(tmp_path / "all", "numbers", 1)
    assert set(found) == set(written)
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in written.items())


def test_reading_files_for_days_takes_no_memory(tmp_path: Path) -> None:
    write_tensors(tmp_path / "many", {f"{i}": torch.zeros(2, 3) for i in range(50)}, {"format": "numbers 1"})

    def blocks_after(reads: int) -> int:
        for _ in range(reads):
            files.read_tensors(tmp_path / "many", "numbers", 1)
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(20)  # the interpreter's own caches fill
    assert blocks_after(40) - before < 1000  # one for each tensor read would be 2000


# Versions


@pytest.mark.parametrize("version", range(1, files.POSTERIOR_VERSION + 1))
def test_posteriors_of_every_version_so_far_predict_as_they_did(version: int) -> None:
    restored = restore(KEPT / f"posterior-{version}.safetensors", CPU)
    x = torch.tensor([[0.0, 0.0], [2.0, 0.5], [-30.0, 4.0]])
    found = columns_of(restored, restored.scaling.apply(x), "quadrature")
    # By 2^19 points; the link's own are fewer.
    expected = [[0.309492, 0.31448, 0.376027], [0.35547, 0.328417, 0.316113], [0.159889, 0.295321, 0.544791]]
    assert torch.allclose(found["probabilities"], torch.tensor(expected, dtype=torch.float64), atol=5e-4)
    assert torch.allclose(found["variance"], torch.tensor([4.06329, 3.71245, 13.6082], dtype=torch.float64), rtol=1e-4)


def test_posteriors_of_kernels_predict_as_they_did() -> None:
    def found(task: str) -> dict[str, Tensor]:
        restored = restore(KEPT / f"posterior-kernel-{task}-2.safetensors", CPU)
        return columns_of(restored, restored.scaling.apply(kept_runs.NEW.float()), "quadrature")

    classes, targets = found("classification"), found("regression")
    expected = [[0.345838, 0.361627, 0.292535], [0.370643, 0.360416, 0.26894], [0.335126, 0.333045, 0.33183]]
    assert torch.allclose(classes["probabilities"].double(), torch.tensor(expected).double(), atol=3e-3)
    for column, numbers in (
        (classes["variance"], [86.443589, 57.169371, 95.995398]),
        (targets["mean"], [-0.066098, 0.296017, -0.099445]),
        (targets["std"], [7.005071, 5.38063, 7.073242]),
    ):
        assert torch.allclose(column.double(), torch.tensor(numbers).double(), rtol=1e-3)


MEANS = {
    "network": [
        [0.0561607, 0.1585835, -1.1729978],
        [-0.0417014, -0.1253313, -0.6901358],
        [-1.1181554, 1.5875405, -1.4074544],
    ],
    "kernel": [[0.1206851, 0.1343812, -0.2550663], [0.3836171, 0.0308962, -0.4145133], [0.003787, -7.5e-05, -0.003712]],
}
VARIANCES = {
    ("network", 1): [4.4900889, 5.4083194, 9.8888499],  # each datum in one group
    ("network", 2): [4.2900019, 4.5376635, 10.527315],
    ("kernel", 1): [5.679181, 3.671004, 5.9999484],
    ("kernel", 2): [5.679181, 3.671004, 5.9999484],
}


@pytest.mark.parametrize("version", range(1, checkpoint.VERSION + 1))
@pytest.mark.parametrize("name", kept_runs.CHECKPOINTS)
def test_checkpoints_of_every_version_so_far_are_gone_on_with(name: str, version: int, tmp_path: Path) -> None:
    said: list[str] = []
    shutil.copy(KEPT / f"checkpoint-{name}-{version}.safetensors", tmp_path / "0-fit.a.safetensors")
    found = kept_runs.CHECKPOINTS[name](checkpoint_in(tmp_path, said))
    assert said == [f"Going on with 'fit' in '{tmp_path}' from where it was saved."]
    for numbers, expected in zip(found, (MEANS[name], VARIANCES[name, version]), strict=True):
        assert torch.allclose(numbers, torch.tensor(expected, dtype=torch.float64), atol=1e-6)


def test_a_file_of_a_newer_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        FileError, match=r"'ntk-iterncgp posterior 3', which is newer than .* that wrote it, or a later"
    ):
        load_posterior(rewritten(tmp_path, lambda content, tensors: content.update(format="ntk-iterncgp posterior 3")))


def test_what_we_write_is_read_by_anyone_who_reads_safetensors() -> None:
    with safe_open(NEWEST, framework="pt") as file:
        assert {"sha256", "posterior.posterior.images", "model.1.weight"} <= set(file.keys())


# Damage


def damaged(content: bytes, rng: random.Random) -> bytes:
    """One of the things that happen to files: bits, bytes, blocks, lengths."""
    changed, size = bytearray(content), len(content)
    place, kind = rng.randrange(size), rng.randrange(8)
    if kind == 0:
        changed[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        changed[place] = rng.randrange(256)
    elif kind == 2:  # the header, where a change means most
        changed[rng.randrange(min(size, 3000))] = rng.choice(b'{}[]",:0123456789eE-.\\ \x00\xff')
    elif kind == 3:
        changed[place : place + rng.randrange(1, 200)] = b""
    elif kind == 4:
        changed[place:place] = rng.randbytes(rng.randrange(1, 200))
    elif kind == 5:
        del changed[place:]
    elif kind == 6:
        block = rng.randrange(1, 64)
        changed[place : place + block] = rng.randbytes(len(changed[place : place + block]))
    else:
        changed[:8] = struct.pack("<Q", rng.choice([0, 1, rng.randrange(2 * size), 2**31, 2**62, 2**64 - 1]))
    return bytes(changed)


def small_checkpoint(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr("ntk_iterncgp.persistence.checkpoint.SAVING_SHARE", float("inf"))
        die_at_save(7, patch)
        net_run(small_net(num_data=9), num_actions=3)(checkpoint_in(folder))
    return max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.slow
def test_of_5000_mutations_of_a_posterior_and_a_checkpoint_each_is_refused_or_loads_as_it_was(tmp_path: Path) -> None:
    readers: list[tuple[Path, Callable[[Path], Any]]] = [
        (NEWEST, load_posterior),
        (
            small_checkpoint(tmp_path / "c"),
            lambda path: files.read_tensors(path, "ntk-iterncgp checkpoint", checkpoint.VERSION),
        ),
    ]
    rng, refused, target = random.Random(8), 0, tmp_path / "mutated"
    for path, read in readers:
        content = path.read_bytes()
        read(path)
        for _ in range(2500):
            mutated = damaged(content, rng)
            target.write_bytes(mutated)
            try:
                read(target)
            except FileError as error:
                assert len(str(error)) < 500 and str(error).endswith(".")
                refused += 1
            else:
                assert mutated == content, "what loads is what was saved"
    assert refused > 4900, "a few mutations change nothing"


def test_mutations_of_a_file_without_digest_never_end_in_anything_but_a_sentence(tmp_path: Path) -> None:
    """Version 1 had none, so numbers may change unseen; but nothing else may happen, up to a network in memory."""
    content, rng, target = (KEPT / "posterior-1.safetensors").read_bytes(), random.Random(9), tmp_path / "mutated"
    refused = 0
    for _ in range(600):
        target.write_bytes(damaged(content, rng))
        try:
            restore(target, CPU)
        except OURS:
            refused += 1
    assert refused > 200


# Ill will: files whose digest is right


def rewritten(folder: Path, change: Callable[[Any, dict[str, Tensor]], Any]) -> Path:
    """The newest kept file with another content, and a digest that says so."""
    content, tensors = files.read_tensors(NEWEST, files.POSTERIOR, files.POSTERIOR_VERSION)
    content = copy.deepcopy(content)
    change(content, tensors)
    path = folder / "hostile.safetensors"
    write_tensors(path, tensors, content)
    return path


def in_state(name: str, value: Any) -> Callable[[Any, dict[str, Tensor]], Any]:
    return lambda content, tensors: content["state"]["items"].update({name: value})


def in_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any, dict[str, Tensor]], Any]:
    return lambda content, tensors: tensors.update({name: change(tensors[name])})


def in_config(section: str, **values: Any) -> Callable[[Any, dict[str, Tensor]], Any]:
    return lambda content, tensors: content["about"]["config"][section].update(values)


IMAGES, R = "posterior.posterior.images", "posterior.posterior.noise_gram"
HOSTILE: dict[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "NaN in the images": in_tensor(IMAGES, lambda t: t.index_fill(0, torch.tensor([1]), torch.nan)),
    "infinity in the model": in_tensor("model.1.weight", lambda t: t / 0),
    "images of another shape": in_tensor(IMAGES, lambda t: t.T.contiguous()),
    "images of whole numbers": in_tensor(IMAGES, lambda t: t.long()),
    "no images": in_tensor(IMAGES, lambda t: t[0, 0]),
    "a small matrix that is too large": in_tensor(R, lambda t: torch.eye(200, dtype=torch.float64)),
    "a small matrix in float32": in_tensor(R, lambda t: t.float()),
    "negative noise": in_tensor(R, lambda t: -t),
    "a weight too many": in_tensor("model.1.weight", lambda t: torch.cat([t, t])),
    "other weights": in_tensor("posterior.weights", lambda t: t + 1),
    "weights of another shape": in_tensor("posterior.weights", lambda t: t[:2]),
    "negative precision": in_tensor("posterior.prior_precision", lambda t: -t),
    "a tensor that is not there": in_state("weights", {"tensor": "nowhere"}),
    "a tensor by a list": in_state("weights", {"tensor": [1, 2]}),
    "a path for a name": in_state("weights", {"tensor": "../../etc/passwd"}),
    "a number for a tensor": in_state("weights", 3),
    "a text for a number": in_state("temperature", "warm"),
    "a negative temperature": in_state("temperature", -1.0),
    "a huge number": in_state("n_data", 10**400),
    "no posterior": in_state("posterior", None),
    "a posterior with more in it": lambda c, t: c["state"]["items"]["posterior"]["items"].update(extra=1),
    "no state": lambda c, t: c.pop("state"),
    "state as a list": lambda c, t: c.update(state=[1, 2]),
    "items as a number": lambda c, t: c.update(state={"items": 3}),
    "no about": lambda c, t: c.pop("about"),
    "about as text": lambda c, t: c.update(about="x"),
    "no config": lambda c, t: c["about"].pop("config"),
    "config as a list": lambda c, t: c["about"].update(config=[]),
    "an unknown setting": in_config("fit", nonsense=1),
    "a huge width": in_config("model", arguments={"width": 10**9, "depth": 1}),
    "a huge depth": in_config("model", arguments={"width": 4, "depth": 10**9}),
    "a width beyond numbers": in_config("model", arguments={"width": 10**30, "depth": 1}),
    "a width in words": in_config("model", arguments={"width": "wide", "depth": 1}),
    "an unknown model": in_config("model", name="../../model"),
    "a large model of torchvision": in_config("model", name="vit_h_14", arguments={}),
    "a program": in_config("model", name="os:system", arguments={"command": "touch /tmp/never"}),
    "another program": in_config("model", name="subprocess:run", arguments={"args": ["touch", "never"]}),
    "millions of samples": in_config("evaluate", link_samples=10**12),
    "a million classes": lambda c, t: c["about"].update(class_names=["x"] * 10**6),
    "classes that are no texts": lambda c, t: c["about"].update(class_names=[{}, 1]),
    "an input larger than memory": lambda c, t: c["about"].update(input_shape=[2**30, 2**30]),
    "a negative input": lambda c, t: c["about"].update(input_shape=[-2]),
    "a scaling in words": lambda c, t: c["about"].update(scaling={"mean": "ab", "std": "cd"}),
    "a scaling of nothing": lambda c, t: c["about"].update(scaling=None),
    "another flavour": in_state("flavour", "Anything"),
    "another option": in_config("fit", options={"nonsense": 1}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gives_a_sentence_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = rewritten(tmp_path, HOSTILE[name])
    started = time.process_time()
    with pytest.raises(OURS) as refusal:
        restore(path, CPU)
    assert time.process_time() - started < 5
    assert len(str(refusal.value)) < 700 and "\n" not in str(refusal.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hostile.safetensors"]


@pytest.mark.parametrize("depth", [400, 100_000])
def test_a_tree_that_is_too_deep_gives_a_sentence(depth: int, tmp_path: Path) -> None:
    tree = '{"items": {"a": ' * depth + "1" + "}}" * depth
    text = f'{{"format": "ntk-iterncgp posterior 1", "about": {{}}, "state": {tree}}}'
    save_file({"a": torch.zeros(1)}, tmp_path / "deep.safetensors", metadata={files.HEADER: text})
    with pytest.raises(OURS, match="damaged"):
        restore(tmp_path / "deep.safetensors", CPU)


def test_the_file_that_the_hostile_ones_are_made_of_is_a_good_one(tmp_path: Path) -> None:
    assert restore(rewritten(tmp_path, lambda content, tensors: None), CPU).predictor.la.posterior.rank == 3


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="how much memory a process has is not known here")
def test_hostile_files_take_no_memory(tmp_path: Path) -> None:
    """In a process that may have only so much of it."""
    names = ["a huge width", "a million classes", "an input larger than memory", "a large model of torchvision"]
    paths = []
    for name in names:
        paths.append(tmp_path / f"{len(paths)}.safetensors")
        rewritten(tmp_path, HOSTILE[name]).rename(paths[-1])
    size = NEWEST.stat().st_size
    huge = struct.pack("<Q", 2**40) + NEWEST.read_bytes()[8:]
    declared = {"a": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]}}
    text = json.dumps(declared).encode()
    for content in (huge, struct.pack("<Q", len(text)) + text, b"\x90" + b"\0" * size):
        paths.append(tmp_path / f"{len(paths)}.safetensors")
        paths[-1].write_bytes(content)
    child = os.fork()  # so that the limit is its own
    if child == 0:
        status = Path("/proc/self/status").read_text()
        used = 1024 * int(next(line for line in status.splitlines() if line.startswith("VmSize")).split()[1])
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        os._exit(0 if all(map(is_refused, paths)) else 1)
    assert os.waitpid(child, 0)[1] == 0


def is_refused(path: Path) -> bool:
    try:
        restore(path, CPU)
    except OURS:
        return True
    except BaseException as error:
        print(path.name, type(error), error, file=sys.stderr)
    return False


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(FileError, match="is not a posterior file: there is no such file"):
            load_posterior(path)
    with pytest.raises(FileError, match="There is no posterior at"):
        load_posterior(tmp_path / "nothing")


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "opened",))

    torch.save({"state": Evil()}, tmp_path / "evil.safetensors")
    assert zipfile.is_zipfile(tmp_path / "evil.safetensors")
    with pytest.raises(FileError, match="is not a posterior file, or is damaged"):
        load_posterior(tmp_path / "evil.safetensors")
    assert not (tmp_path / "opened").exists()


def test_tensors_of_someone_else_are_no_posterior(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(FileError, match="holds tensors, but no posterior"):
        load_posterior(tmp_path / "weights.safetensors")


# Checkpoints that mean ill


def only_save(run: Run, folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a run leaves that is killed after so many saves, without the save before."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at_save(number, patch)
        run(checkpoint_in(folder))
    *earlier, newest = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in earlier:
        path.unlink()
    return newest


@pytest.mark.parametrize("door", ["clusters", "curvature_residual"])
def test_a_checkpoint_with_a_right_digest_and_wrong_content_gives_a_sentence(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its tensors in another shape, with infinities, and in another dtype."""
    monkeypatch.setattr("ntk_iterncgp.persistence.checkpoint.SAVING_SHARE", float("inf"))
    run, folder = net_run(small_net(num_data=9), policy=door, num_actions=4), tmp_path / "c"
    newest = only_save(run, folder, 9 if door == "clusters" else 2, monkeypatch)
    about, tensors = files.read_tensors(newest, "ntk-iterncgp checkpoint", checkpoint.VERSION)
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.flatten()[:-1],
        lambda t: t / 0,
        lambda t: t.to(torch.int16),
    ]
    count = 0
    for name in tensors:
        for change in changes:
            wrong = change(tensors[name])
            if name.endswith("targets") and wrong.dtype == torch.int16:
                continue  # labels are labels
            write_tensors(newest, tensors | {name: wrong}, about)
            with pytest.raises(ValueError, match="must") as refusal:
                run(Checkpoint(folder, say=lambda text: None))
            assert "\n" not in str(refusal.value), name
            count += 1
    assert count > 20


def test_a_counter_in_a_checkpoint_that_does_not_count_gives_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntk_iterncgp.persistence.checkpoint.SAVING_SHARE", float("inf"))
    run, folder = net_run(small_net(num_data=9), num_actions=4), tmp_path / "c"
    newest = only_save(run, folder, 9, monkeypatch)
    about, tensors = files.read_tensors(newest, "ntk-iterncgp checkpoint", checkpoint.VERSION)
    content = about["content"]["items"]
    for place, names in (
        (content["passes"][0]["items"], ["num_kept", "by_group"]),
        (content["turn"]["items"], ["done", "missing", "readings", "passes", "rank"]),
    ):
        for name in names:
            right = place[name]
            for wrong in ("many", -3, [1], 10.5, {"items": {"a": 1}}):
                place[name] = wrong
                write_tensors(newest, tensors, about)
                with pytest.raises(FileError, match=r"must hold a state of this run; got something else"):
                    run(Checkpoint(folder, say=lambda text: None))
            place[name] = right

"""The user's own tables and arrays: what people really have is read, and the rest is refused in one sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ntk_iterncgp.experiments import cli, datasets
from ntk_iterncgp.experiments.config import DataConfig
from ntk_iterncgp.experiments.settings import ConfigError

X, Y = np.random.default_rng(0).normal(size=(50, 3)), np.arange(50) % 3


def loaded(path: Path, **settings: Any) -> datasets.Data:
    return datasets.load(DataConfig(name="arrays", train=str(path), **settings), seed=0)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x": X, "y": np.eye(3)[Y]}, r"must hold one label or target for each x; got the shape \(50, 3\)"),
        ({"x": X, "y": np.array(["a", "b", "c"])[Y]}, "The array y in .* must hold real numbers, .* got the kind <U1"),
        ({"x": X + 1j, "y": Y}, "The array x in .* must hold real numbers, .* got the kind complex128"),
        ({"x": 1.0, "y": 1.0}, "The array x in .* got a single number"),
        (
            {"x": X, "y": 10**6 * Y},
            "must be the numbers of the classes, from 0 to 99999; got 2000000. Try numbers from 0",
        ),
    ],
)
def test_arrays_that_are_no_data_are_refused_in_a_sentence(
    tmp_path: Path, arrays: dict[str, Any], sentence: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ConfigError, match=sentence):
        loaded(tmp_path / "a.npz")


def test_one_number_for_each_datum_is_one_column(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X[:, 0], y=X[:, 1:2])
    data = loaded(tmp_path / "a.npz", task="regression")
    assert data.input_shape == (1,) and len(data.train) == 40


def test_a_file_of_another_kind_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\t2\t0\n" * 5)
    with pytest.raises(ConfigError, match=r"a\.tsv' must be an \.npz with x and y, or a \.csv"):
        loaded(tmp_path / "a.tsv")
    with pytest.raises(ConfigError, match=r"a\.tsv' must be an \.npz with x, an \.npy, a \.csv or an image"):
        datasets.inputs_for(tmp_path / "a.tsv", datasets.Scaling((0.0,) * 3, (1.0,) * 3), (3,))


def test_tables_as_spreadsheets_write_them_are_read(tmp_path: Path) -> None:
    rows = np.column_stack([X, Y]).tolist()
    plain = "\n".join(",".join(map(str, row)) for row in rows)
    quoted = "\n".join(",".join(f'"{value}"' for value in row) for row in rows)
    (tmp_path / "plain.csv").write_text(plain)
    expected = loaded(tmp_path / "plain.csv").train.tensors
    for name, content in {
        "marked.csv": "\ufeff" + plain,  # as UTF-8, which Excel does
        "quoted.csv": '"a","b","c","label"\n' + quoted,
        "UPPER.CSV": plain,
    }.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        found = loaded(tmp_path / name).train.tensors
        assert all(map(torch.equal, found, expected)), name


def test_labels_of_new_inputs_need_not_make_sense(tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=X, y=np.array(["?"] * 50))
    assert datasets.inputs_for(tmp_path / "new.npz", datasets.Scaling((0.0,) * 3, (1.0,) * 3), (3,)).shape == (50, 3)


@pytest.mark.cli
def test_labels_that_count_from_one_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "a.npz", x=X, y=Y + 1)
    (tmp_path / "run.yaml").write_text(
        "data: {name: arrays, train: a.npz}\nmodel: {name: mlp, train_epochs: 1}\nfit: {num_actions: 3}\n"
    )
    assert cli.main(["fit", "run.yaml", "--output-dir", "out"]) == 0
    log = (tmp_path / "out" / "run.log").read_text(encoding="utf-8")
    assert "Warning: 1 of 4 classes has no training data (0). Labels count from 0." in log

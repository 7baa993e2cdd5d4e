"""How far it is from `Laplace(...).fit` to the sweep and back: figures that cannot rise unseen."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import walk
from ntk_iterncgp.laplace_torch import fitting

# As found; the targets are in the table of `ntk-iterncgp bench walk`.
LARGEST = {
    "files of a fit": 26,
    "functions of a fit": 323,
    "files of a prediction": 15,
    "longest chain of imports": 15,
    "files of kernels/ that laplace_torch imports": 0,
    "lines without experiments": 25_100,
}


@pytest.mark.cli
def test_the_walk_from_fit_to_the_sweep_gets_no_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "walk.json"
    assert walk.main(["--json", str(file)]) == 0
    found = {row["what"]: row["found"] for row in json.loads(file.read_text())}
    assert {what: found[what] for what, largest in LARGEST.items() if found[what] > largest} == {}
    assert "at most" in capsys.readouterr().out


class Begun(Exception):
    """The first sweep is about to begin."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("policy", ["clusters", "curvature_residual"])
def test_the_first_batch_passes_the_model_at_most_three_times_before_the_sweep(
    policy: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return super().forward(x)

    def begin(*arguments: Any, **settings: Any) -> None:
        raise Begun

    for name in ("fit_by_clusters", "fit_by_products"):
        monkeypatch.setattr(fitting, name, begin)
    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la = Laplace(Counted(3, 3), "classification", "all", "iterncgp", policy=policy, dtype=dtype)
        with pytest.raises(Begun):
            la.fit(DataLoader(TensorDataset(x, y), batch_size=10))
    assert 1 <= sizes.count(10) <= 3

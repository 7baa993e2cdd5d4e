"""Many classes, of which each datum keeps a few: exact products, the guarantee, and nothing that grows as N·C."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from ntk_iterncgp.fitting.cluster_run import ClusterState
from ntk_iterncgp.likelihoods import Softmax, leading, softmax
from ntk_iterncgp.likelihoods.base import ANY_VARIANCE
from ntk_iterncgp.likelihoods.leading import Leading, LeadingSoftmax
from tests.checkpoint_helpers import Killed, checkpoint_in, die_at_save
from tests.clusters_helpers import joint_variance, make_net
from tests.laplace_helpers import close, not_below

NET = make_net(3, num_data=60, num_outputs=12)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve classes count as many."""
    monkeypatch.setattr(softmax, "MANY_CLASSES", 12)
    monkeypatch.setattr(softmax, "MANY_NUMBERS", 1)


def fitted(dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    la = NET.laplace(dtype, **{"num_actions": 12, **settings})
    la.dtype = dtype
    la.fit(DataLoader(NET.dataset(dtype), 7))
    return la


def test_products_with_directions_among_the_leading_classes_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = 4 * torch.randn(9, 20, generator=generator, dtype=torch.float64)
    targets = torch.randint(20, (9,), generator=generator)
    logs, places, classes, traces = Leading.of_batch(outputs, targets)
    held, rows = Leading(classes, traces, 20), torch.arange(9)
    whole, few = (each.for_prior_variance(ANY_VARIANCE) for each in (Softmax(20), LeadingSoftmax(logs.shape[1] - 1)))
    assert torch.equal(classes.gather(1, places[:, None])[:, 0].long(), targets)
    close(few.log_prob(logs, places), whole.log_prob(outputs, targets), 1e-12)
    close(traces, whole.curvature_traces(outputs), 1e-12)
    close(held.reduced(outputs, rows), logs, 1e-12)
    directions = [few.cotangent(logs, j) for j in range(4)]
    directions.append(few.direction(logs, torch.randn(logs.shape, generator=generator, dtype=torch.float64)))
    for j, u in enumerate(directions):
        wide = held.whole(u[..., None], rows)[..., 0]
        curved = held.whole(few.curvature(logs, u[..., None]), rows)[..., 0]
        close(curved, whole.curvature(outputs, wide[..., None])[..., 0], 1e-12)
        if j < 4:
            close(wide, whole.cotangent(outputs, j), 1e-12)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_variance_never_falls_below_the_exact_one(dtype: torch.dtype) -> None:
    la, x = fitted(dtype), NET.near_and_far()
    before, exact = joint_variance(la, x), NET.exact(x)
    state = la._fit.state
    assert isinstance(state, ClusterState) and state.clusters.outputs.shape == (60, leading.NUM_LEADING + 1)
    rounding = 1e-9 if dtype == torch.float64 else 1e-5
    not_below(before, exact, rounding)
    la.refine(DataLoader(NET.dataset(dtype), 7), epochs=8)  # beyond the directions of the leading classes
    after = joint_variance(la, x)
    not_below(after, exact, rounding)
    assert float(after.trace()) < float(before.trace())
    lower, upper = la.posterior.log_determinant_bounds(la.prior_precision, la._noise_scale)
    assert float(lower) <= NET.information() <= float(upper)


@pytest.mark.usefixtures("many")
def test_a_datum_an_action_contracts_as_much_as_with_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    la, x = fitted(num_actions=1000), NET.near_and_far()
    monkeypatch.setattr(softmax, "MANY_NUMBERS", 10**9)
    whole = fitted(num_actions=1000)
    assert float(la.loss) == pytest.approx(float(whole.loss)) and la.n_outputs == whole.n_outputs == 12
    close(la.posterior.curvature_diagonal, whole.posterior.curvature_diagonal, 1e-9)
    close(joint_variance(la, x), joint_variance(whole, x), 1e-7)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("saves", [1, 2])
def test_a_killed_fit_resumes_to_the_same_bits(tmp_path: Path, saves: int) -> None:
    loader, x = DataLoader(Subset(NET.dataset(torch.float64), range(40)), 7), NET.near_and_far()
    whole, la = NET.laplace(num_actions=12), NET.laplace(num_actions=12)
    whole.fit(loader)
    checkpoint = checkpoint_in(tmp_path / "saved")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr("ntk_iterncgp.persistence.checkpoint.SAVING_SHARE", float("inf"))  # saves may take any time
        die_at_save(saves, patch)
        la.fit(loader, checkpoint=checkpoint)
    la.fit(loader, checkpoint=checkpoint)
    assert torch.equal(joint_variance(la, x), joint_variance(whole, x))

"""`la.detector`: one fit, two precisions; ranks, alarms, saving, and what it refuses."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from statistics import mean
from typing import Any

import pytest
import torch
from laplace import Laplace
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from ntk_iterncgp.laplace_torch.detector import measured_at
from ntk_iterncgp.posterior.detection import Measured, split
from ntk_iterncgp.posterior.scores import against_rest
from tests import oracles
from tests.clusters_helpers import TRAINING, Digits, Net, digits, make_net
from tests.laplace_helpers import subsets
from tests.network_cases import dense_jacobian

NAMES = ("evidence", "energy", "typicality")


@pytest.fixture(scope="module")
def net() -> Digits:
    return digits(0)


@pytest.fixture(scope="module")
def la(net: Digits) -> Any:
    la = net.laplace(num_actions=40)
    la.fit(net.loader())
    return la


@cache
def held_out() -> Tensor:  # (997, 64)
    """What `digits(0)` was not trained on."""
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[TRAINING:]]


def familiar() -> Tensor:
    return held_out()[:500]


def others() -> Tensor:
    return held_out()[500:]


def of(case: Net, dtype: torch.dtype = torch.float64) -> Tensor:  # (140, 3)
    """Enough inputs to make a detector of."""
    return case.near_and_far().repeat(20, 1).to(dtype)


def auroc(low: Tensor, high: Tensor) -> float:
    return float((high[:, None] > low).double().mean() + 0.5 * (high[:, None] == low).double().mean())


def test_it_tells_noise_and_rotated_digits_from_digits_better_than_the_network(net: Digits, la: Any) -> None:
    det = la.detector(familiar())
    assert det.novelty.names == NAMES
    rotated = torch.rot90(others().unflatten(1, (8, 8)), 1, (1, 2)).reshape(-1, 64)
    noise = torch.rand(200, 64, generator=torch.Generator().manual_seed(0))
    for unfamiliar in (rotated, noise):
        ours = auroc(det.score(others()), det.score(unfamiliar))
        entropy = [torch.special.entr(la.model(x).softmax(1)).sum(1).detach() for x in (others(), unfamiliar)]
        assert ours > max(0.8, auroc(*entropy)), (ours, auroc(*entropy))


@subsets
def test_its_variance_is_the_dense_one_at_its_own_precision(subset: str) -> None:
    case = make_net(3)
    la = case.laplace(subset=subset, num_actions=6, prior_precision=2.0)
    la.fit(case.loader())
    x = case.near_and_far()
    det = la.detector(of(case), score="variance", z=1.5)
    assert torch.equal(la.prior_precision, torch.full_like(la.prior_precision, 2.0)), "that of predictions stays"
    sizes = la.posterior.layer_sizes
    assert det.prior_precision.shape == (len(sizes),)
    squares = torch.stack([part.square().sum() for part in la.posterior.images.split(sizes)])
    assert torch.allclose(squares / det.prior_precision, (squares / det.prior_precision)[:1]), "it balances the layers"
    conditioned = la.posterior.conditioned(det.prior_precision, la._noise_scale.detach())
    with torch.no_grad():
        rows = la._all_rows_at(x)
    h = against_rest(rows.outputs.double())
    expected = (h.mT @ conditioned.covariance(rows) @ h)[:, 0, 0]
    assert torch.allclose(det.score(x), expected, rtol=1e-6)
    fitting = of(case)[split(len(of(case)), torch.device("cpu"))[0]]
    evidence = (against_rest(la.model(fitting))[..., 0] * la.model(fitting)).sum(1) / det.score(fitting).sqrt()
    assert float(evidence.detach().median()) == pytest.approx(1.5, rel=2e-3)


def test_the_variance_never_falls_below_the_exact_one() -> None:
    case = make_net(3)
    for dtype in (torch.float32, torch.float64):
        la = case.laplace(dtype, num_actions=4)
        la.fit(case.loader(dtype))
        det, x = la.detector(of(case, dtype), score="variance"), case.near_and_far()
        with torch.no_grad():
            h = against_rest(case.model(x))
        each = la.posterior.precision_of_weights(det.prior_precision).rsqrt()  # a unit prior for scaled rows
        J_train = dense_jacobian(case.model, case.x).flatten(0, 1) * each
        J = dense_jacobian(case.model, x) * each
        exact = J @ oracles.weight_covariance(J_train, case.curvature(), 1.0) @ J.mT
        ratio = det.score(x.to(dtype)) / (h.mT @ exact @ h)[:, 0, 0]
        assert float(ratio.min()) > 0.999 and float(ratio.max()) > 1.01, ratio


def test_inputs_may_come_as_a_tensor_a_loader_of_pairs_or_of_inputs_alone(net: Digits, la: Any) -> None:
    x = familiar()
    det = la.detector(x)
    for loader in (
        DataLoader(TensorDataset(x, torch.zeros(len(x)).long()), batch_size=33),
        DataLoader(TensorDataset(x), batch_size=50),
        [x[:70], x[70:]],
    ):
        again = la.detector(loader)
        assert torch.allclose(again.novelty.ranked, det.novelty.ranked, rtol=1e-4, atol=1e-3)
        assert len(det.score(loader)) == len(x)


def test_p_values_and_alarms_of_5000_other_familiar_inputs_are_uniform() -> None:
    """Against the distribution itself, with what the draw of the 4500 that are ranked allows, at 1 %."""
    case = make_net(3)
    la = case.laplace(num_actions=6)
    la.fit(case.loader())
    x = torch.randn(10_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    det = la.detector(x[:5000])
    p = det.p_value(x[5000:]).sort().values
    n = len(det.novelty)
    assert n == 4500 and det.novelty.names == NAMES
    places = torch.arange(5001, dtype=torch.float64) / 5000
    distance = max(float((places[1:] - p).max()), float((p - places[:-1]).max()))
    assert distance < 1.63 * (1 / n + 1 / 5000) ** 0.5, distance
    assert float((p <= 0.01).double().mean()) == pytest.approx(0.01, abs=0.005)


def test_far_from_all_data_it_raises_an_alarm_however_much_evidence_the_network_has() -> None:
    torch.manual_seed(0)
    y, angle = torch.arange(900) % 2, torch.pi * torch.rand(900)
    x = torch.stack([angle.cos() + y, angle.sin() * (1 - 2 * y) + y / 2], 1) + 0.15 * torch.randn(900, 2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.SiLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[:400]), y[:400]).backward()
        optimizer.step()
    la: Any = Laplace(model, "classification", "all", "iterncgp", num_actions=60)
    la.fit(DataLoader(TensorDataset(x[:400], y[:400]), batch_size=100))
    far = 20 * torch.randn(300, 2)
    detector = la.detector(x[400:700])
    assert float(model(far).detach().softmax(1).amax(1).mean()) > 0.99
    assert float(detector.alarm(far).double().mean()) > 0.9 and float(detector.alarm(x[700:]).double().mean()) < 0.04


UNFAMILIAR: dict[str, Callable[[Tensor], Tensor]] = {  # of images (b, 8, 8)
    "turned": lambda x: torch.rot90(x, 1, (1, 2)),
    "mirrored": lambda x: x.flip(2),
    "noisy": lambda x: (x + 0.4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))).clamp(0, 1),
    "faint": lambda x: 0.25 * x + 0.75 * x.mean((1, 2), keepdim=True),
    "negative": lambda x: 1 - x,
}


def mean_auroc(det: Any, measured: dict[str, Measured]) -> float:
    """Over the sets, beside familiar inputs."""
    scores = {name: det.novelty.score(part.latent(det.prior)) for name, part in measured.items()}
    own = scores.pop("own")
    return mean(auroc(own, other) for other in scores.values())


@pytest.mark.parametrize("number", [100, 200])
def test_other_inputs_of_a_hundred_or_two_make_as_good_a_detector(net: Digits, la: Any, number: int) -> None:
    """Of turned, mirrored, noisy, faint and negative digits: the mean, between two draws that share no input."""
    x = others()
    sets = {"own": x} | {name: make(x.unflatten(1, (8, 8))).flatten(1) for name, make in UNFAMILIAR.items()}
    prior = la.detector(familiar()).prior  # at unit scale all precisions are the same
    measured = {name: Measured.cat(list(measured_at(la, prior, inputs))) for name, inputs in sets.items()}
    differences, areas = [], []
    for seed in range(4):
        order = torch.randperm(500, generator=torch.Generator().manual_seed(seed))
        pair = [mean_auroc(la.detector(familiar()[some]), measured) for some in order[: 2 * number].split(number)]
        differences.append(abs(pair[0] - pair[1]))
        areas += pair
    assert mean(differences) < 0.005, differences
    assert mean(areas) > mean_auroc(la.detector(familiar()), measured) - 0.01, areas


def test_fewer_than_two_thousand_inputs_all_fix_the_score_and_are_ranked(net: Digits, la: Any) -> None:
    det = la.detector(familiar(), score="typicality")
    assert len(det.novelty) == 500 and "calibrated on 500 inputs" in str(det)
    own = det.score(familiar()).sort().values
    assert bool(det.novelty.ranked.mean() > own.mean()), "what is fitted to an input is nearer to it"
    p = torch.cat([det.p_value(others()), la.detector(others(), score="typicality").p_value(familiar())])
    assert float((p <= 0.1).double().mean()) == pytest.approx(0.1, abs=0.03)


def test_alarms_come_at_the_rate_that_was_asked_for(net: Digits, la: Any) -> None:
    det = la.detector(familiar(), score="evidence")
    assert float(det.alarm(familiar(), rate=0.1).double().mean()) == pytest.approx(0.1, abs=0.02)
    assert 0.02 < float(det.alarm(others(), rate=0.1).double().mean()) < 0.25
    with pytest.raises(ValueError, match=r"`rate` must be between 0 and 1; got 1\.5"):
        det.alarm(others(), rate=1.5)
    with pytest.raises(ValueError, match=r"`rate` must be at least 1/\(n \+ 1\)"):
        det.alarm(others(), rate=1e-5)


def test_it_is_saved_with_the_posterior_and_stale_after_another_fit(net: Digits, la: Any) -> None:
    det, x = la.detector(familiar()), others()[:10]
    other = net.laplace(num_actions=40)
    other.load_state_dict(la.state_dict())
    assert torch.equal(other.detector().score(x), det.score(x)) and str(other.detector()) == str(det)
    assert repr(det) == str(det)
    assert str(det).startswith("Detector by evidence + energy + typicality, calibrated on ")
    other.compress(20)
    assert "detector" not in other.state_dict()
    with pytest.raises(RuntimeError, match=r"must follow la.detector\(inputs\) for this posterior"):
        other.detector()
    assert torch.equal(det.score(x), la.detector().score(x)), "frozen"


def test_it_stays_the_same_when_hyperparameters_of_predictions_change(net: Digits, la: Any) -> None:
    changed = deepcopy(la)
    det, x = changed.detector(familiar()), others()[:10]
    before = det.score(x)
    changed.prior_precision, changed.temperature, changed.output_temperature = 1e4, 3.0, 2.0
    assert torch.equal(det.score(x), before)


def test_after_more_data_it_scores_as_before_and_tells_once_that_it_does_not_know_them() -> None:
    case = make_net(3, num_data=24)
    loaders = [DataLoader(Subset(case.dataset(), rows), 4) for rows in (range(16), range(16, 24))]
    la: Any = case.laplace(num_actions=6)
    la.fit(loaders[0])
    det = la.detector(of(case))
    before = det.score(case.x)
    la.update(loaders[1])
    with pytest.warns(
        UserWarning, match=r"made before update or merge added data, .* Try la\.detector\(inputs\) again"
    ):
        assert torch.equal(det.score(case.x), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(det.score(case.x), before)
        la.detector(of(case)).score(case.x)
        la.compress(4)
        la.detector(of(case)).p_value(case.x)


def test_a_damaged_detector_is_refused_and_leaves_the_posterior_as_it_was(net: Digits, la: Any) -> None:
    la.detector(familiar())
    state = la.state_dict()
    assert state["detector"]["z"] == 1.75
    for name, value in (
        ("scales", torch.tensor([-1.0, 1.0], dtype=torch.float64)),
        ("variances", torch.ones(2, 1, dtype=torch.float64)),
        ("noise_scale", torch.tensor([float("nan")])),
        ("z", "many"),
        ("names", ["no such score"]),
    ):
        with pytest.raises(ValueError, match="saved detector must be"):
            net.laplace(num_actions=40).load_state_dict({**state, "detector": {**state["detector"], name: value}})


def test_training_data_are_seen_and_warned_about() -> None:
    case = make_net(3, num_data=100)
    data, la = case.dataset(), case.laplace(num_actions=6)
    half = Subset(data, range(50))
    la.fit(DataLoader(half, batch_size=10))
    for known in (Subset(data, range(40, 90)), half, data):
        with pytest.warns(UserWarning, match="`x` must be inputs that the network was not trained on"):
            la.detector(DataLoader(known, batch_size=50))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.detector(DataLoader(Subset(data, range(50, 100)), batch_size=50))
    la.fit(DataLoader(data, batch_size=10))
    with pytest.warns(UserWarning, match="got the training data"):
        la.detector(data.tensors[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.detector(data.tensors[0].clone())


def test_regression_is_scored_by_its_variance() -> None:
    case = make_net(1, likelihood="regression")
    la = case.laplace(num_actions=20)
    la.fit(case.loader())
    x = of(case)
    det, total = la.detector(x, score="variance"), la.predictive_moments(x)[1].diagonal(dim1=1, dim2=2).sum(1)
    assert det.z is None and torch.allclose(det.prior_precision, la.prior_precision.double())
    assert torch.allclose(det.score(x), total, rtol=1e-4)
    assert la.detector(x).novelty.names == ("variance", "typicality")
    with pytest.raises(ValueError, match="`score` must be 'auto' or one or several of 'ratio', 'variance'"):
        la.detector(x, score="entropy")


def test_wrong_arguments_are_named(net: Digits, la: Any) -> None:
    x = familiar()
    for arguments, message in (
        ({"score": "typo"}, r"`score` must be 'auto' or one or several of 'evidence'.*got 'typo'"),
        ({"score": ()}, "`score` must be 'auto'"),
        ({"z": 0}, "`z` must be a positive number of standard deviations; got 0"),
        ({"z": float("nan")}, "`z` must be a positive number"),
    ):
        with pytest.raises(ValueError, match=message):
            la.detector(x, **arguments)
    with pytest.raises(ValueError, match=r"`x` must hold at least 20 inputs .* got 3"):
        la.detector(x[:3])
    with pytest.raises(ValueError, match="`x` must be a tensor, a mapping or a loader; got int"):
        la.detector(3)
    with pytest.raises(ValueError, match=r"got ndarray. Try torch.as_tensor\(x\)"):
        la.detector(x.numpy())
    with pytest.raises(ValueError, match="`x` must be a loader of batches of tensors or mappings; got ndarray"):
        la.detector([x.numpy()])
    with pytest.raises(
        ValueError, match=r"`x` must hold inputs as those of the fit, of shape \(N, 64\); got \(30, 65\)"
    ):
        la.detector(torch.rand(30, 65))
    for method in ("detector", "convergence"):
        with pytest.raises(RuntimeError, match=f"{method} must follow a fit; got none. Try fit"):
            getattr(net.laplace(num_actions=6), method)(x)
    assert float(la.prior_precision) == 1

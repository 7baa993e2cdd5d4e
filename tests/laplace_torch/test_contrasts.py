"""Predictions from a few contrasts: what is known is exact, what is filled in is an estimate, and "all" is as ever."""

import copy
import io
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from ntk_iterncgp.experiments.runs.predictor import NetworkPredictor
from ntk_iterncgp.jacobian import rows as rows_room
from ntk_iterncgp.jacobian.rows import Rows
from ntk_iterncgp.laplace_torch import base
from ntk_iterncgp.posterior.contrasts import (
    HEAD,
    Reference,
    Shape,
    contrasts_needed,
    leading_contrasts,
    ranking,
    reference_size,
)
from ntk_iterncgp.posterior.predictive import classification_uncertainty
from ntk_iterncgp.posterior.tuning import ValidationPart
from tests import oracles
from tests.network_cases import dense_jacobian

CLASSES, NUM_DATA = 6, 48
NEW = torch.randn(7, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def network(num_classes: int = CLASSES, width: int = 9, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, num_classes)).to(dtype)
    with torch.no_grad():
        model[2].weight.mul_(4)
    return model.eval()


def loader_for(model: nn.Module, dtype: torch.dtype = torch.float64, num_data: int = NUM_DATA) -> DataLoader:
    x = torch.randn(num_data, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return DataLoader(TensorDataset(x, model(x).argmax(1)), 16)


@cache
def fitted(
    subset: str = "all", num_classes: int = CLASSES, width: int = 9, dtype: torch.dtype = torch.float64, **settings: Any
) -> Any:
    model = network(num_classes, width, dtype)
    la = Laplace(model, "classification", subset, "iterncgp", prior_precision=0.5, num_actions=12, **settings)
    la.fit(loader_for(model, dtype))
    return la


def exact_covariance(la: Any, x: Tensor) -> Tensor:  # (b, C, C)
    """(Λ + JᵀWJ)⁻¹ at new inputs, from dense Jacobians in float64."""
    model = copy.deepcopy(la.model).double()
    inputs = loader_for(model).dataset.tensors[0]  # type: ignore[attr-defined]
    J, outputs = dense_jacobian(model, inputs).flatten(0, 1), model(inputs).detach()
    W = oracles.curvature_matrix("softmax", outputs)
    Sigma = oracles.weight_covariance(J, W, float(la.prior_precision))
    new = dense_jacobian(model, x.double())
    return new @ Sigma @ new.mT


def known_of(la: Any, covariance: Tensor, x: Tensor, k: int) -> Tensor:  # (b, k, k)
    D = leading_contrasts(la.model(x).detach(), k).double()
    return D.mT @ covariance.double() @ D


subsets = pytest.mark.parametrize("subset", ["all", "last_layer"])


# The contrasts themselves


def test_contrasts_are_of_the_likeliest_class_against_the_next_ones() -> None:
    outputs = torch.tensor([[0.0, 3.0, 2.0, -1.0], [5.0, 1.0, 2.0, 4.0]])
    expected = torch.tensor([[[0, 1, -1, 0], [-1, 1, 0, 0]], [[1, 0, 0, -1], [1, 0, -1, 0]]]).float()
    assert torch.equal(leading_contrasts(outputs, 2), expected.mT)
    assert torch.equal(leading_contrasts(outputs, 2, with_level=True)[..., 2], torch.eye(4)[[1, 0]])


def test_as_many_contrasts_are_needed_as_classes_have_a_say() -> None:
    outputs = torch.full((4, 8), -30.0)
    outputs[0, 3], outputs[1, :2], outputs[2, :5] = 0.0, 0.0, 0.0
    outputs[3, 0], outputs[3, 5] = 5.0, -1.0  # .0025 to the second class
    assert contrasts_needed(outputs.softmax(1)).tolist() == [0, 1, 4, 1]
    assert contrasts_needed(torch.full((1, 8), 1 / 8)).tolist() == [7]
    assert contrasts_needed(torch.full((1, 500), 1 / 500)).tolist() == [3]  # so many that none of them matters


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "most", None])
def test_a_setting_that_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="`contrasts` must be a positive whole number, 'all' or 'auto'"):
        fitted()(NEW, contrasts=wrong)


# What is known


@subsets
@pytest.mark.parametrize("k", [1, 2, 3])
def test_known_contrasts_have_the_covariance_of_all_contrasts(subset: str, k: int) -> None:
    la = fitted(subset)
    whole, few = la._moments(NEW, "all"), la._moments(NEW, k)
    torch.testing.assert_close(few[0], whole[0])
    torch.testing.assert_close(known_of(la, few[1], NEW, k), known_of(la, whole[1], NEW, k), rtol=1e-9, atol=1e-9)
    assert float((few[1] - whole[1]).abs().max()) > 1e-3  # and the others are filled in


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, CLASSES - 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    exponent=st.floats(-3, 3),
)
def test_variances_of_known_contrasts_never_fall_below_the_exact_ones(
    seed: int, k: int, dtype: torch.dtype, exponent: float
) -> None:
    la = copy.copy(fitted(dtype=dtype))
    la.prior_precision = 10.0**exponent
    x = 2 * torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    exact = known_of(la, exact_covariance(la, x), x.to(dtype), k)
    found = known_of(la, la._moments(x.to(dtype), k)[1], x.to(dtype), k)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}[dtype]
    lowest = torch.linalg.eigvalsh(found - exact)[:, 0]
    assert (lowest >= -tolerance * exact.diagonal(dim1=1, dim2=2).amax(1)).all()


@subsets
def test_all_contrasts_are_what_they_were(subset: str) -> None:
    la = fitted(subset)
    with torch.no_grad():
        rows = torch.cat([rows.written_out() for rows in la._rows_at(NEW)])
    torch.testing.assert_close(la._moments(NEW, "all")[1], la.functional_variance(rows), rtol=1e-8, atol=1e-10)
    for k in (CLASSES - 1, 50, "auto"):  # all of these are all: the network is small
        assert torch.equal(
            la(NEW, link_approx="quadrature", contrasts=k), la(NEW, link_approx="quasi", contrasts="all")
        )


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_contrasts_change_nothing_where_there_is_only_one(likelihood: str) -> None:
    model = network(2)
    x = loader_for(model).dataset.tensors[0]  # type: ignore[attr-defined]
    y = model(x).detach() if likelihood == "regression" else model(x).argmax(1)
    la = Laplace(model, likelihood, "all", "iterncgp", num_actions=5)
    la.fit(DataLoader(TensorDataset(x, y), 16))
    assert la.posterior.reference is None
    found, expected = la(NEW, contrasts=1), la(NEW, contrasts="all")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# What is filled in


@pytest.mark.parametrize("num_classes", [3, CLASSES, HEAD + 1, HEAD + 9])
@pytest.mark.parametrize("k", [1, 2])
def test_a_shape_that_is_right_gives_the_whole_covariance(num_classes: int, k: int) -> None:
    outputs = torch.randn(4, num_classes, dtype=torch.float64)
    shape = Shape.independent(num_classes, torch.device("cpu"))
    truth = torch.eye(num_classes, dtype=torch.float64) * torch.tensor([0.3, 1.0, 2.0, 5.0]).double()[:, None, None]
    D = leading_contrasts(outputs, k)
    found = shape.covariance(D.mT @ truth @ D, ranking(outputs))
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-6)


def test_filled_covariances_agree_with_the_formula() -> None:
    torch.manual_seed(0)
    k, C = 2, 5
    root = torch.randn(C, C, dtype=torch.float64)
    outputs, S0 = torch.randn(3, C, dtype=torch.float64), root @ root.T
    order = ranking(outputs)
    to_rank = torch.eye(C, dtype=torch.float64)[order]  # (b, C, C): outputs by rank
    change = torch.cat([leading_contrasts(torch.arange(C, 0, -1)[None].double(), C - 1, with_level=True)[0].T])
    shape = Shape(change @ S0 @ change.T, 1.0)
    V = torch.diag_embed(torch.rand(3, k).double() + 0.5)
    D = leading_contrasts(outputs, k).mT  # (b, k, C)
    S = to_rank.mT @ S0 @ to_rank  # in the order of the classes
    inner = torch.linalg.inv(D @ S @ D.mT)
    S = S * ((inner * V).sum((1, 2)) / k)[:, None, None]
    inner = torch.linalg.inv(D @ S @ D.mT)
    G = S @ D.mT @ inner
    expected = S + G @ (V - D @ S @ D.mT) @ G.mT
    torch.testing.assert_close(shape.covariance(V, order), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("num_classes", [CLASSES, HEAD + 9])
def test_the_shape_is_the_mean_covariance_of_the_first_ranks(num_classes: int) -> None:
    la = fitted(num_classes=num_classes)
    count = min(reference_size(NUM_DATA, num_classes, is_small=True), 16)
    x = loader_for(la.model).dataset.tensors[0][:count]  # type: ignore[attr-defined]
    H = Reference.contrasts(la.model(x).detach())
    for precision in (0.5, 30.0):
        la.prior_precision = precision
        covariance = H.mT @ la._moments(x, "all")[1] @ H
        expected = (covariance / covariance[:, :1, :1]).mean(0)
        found = la._posterior_now().shape.matrix
        m = H.shape[2] - 1
        torch.testing.assert_close(found[:m, :m], expected[:m, :m], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found[-1, :m], expected[-1, :m], rtol=1e-5, atol=1e-7)
    la.prior_precision = 0.5


def test_many_classes_are_averaged_as_with_their_whole_covariance() -> None:
    la = fitted(num_classes=HEAD + 9)
    mean, covariance = la._moments(NEW, 2)
    draws = torch.distributions.MultivariateNormal(
        mean[0] - mean[0, :1], covariance[0] + 1e-9 * torch.eye(HEAD + 9, dtype=torch.float64)
    ).sample((200_000,))
    found = la(NEW[:1], link_approx="quadrature", contrasts=2, n_samples=4096)
    torch.testing.assert_close(found[0], draws.softmax(1).mean(0), rtol=0.05, atol=2e-3)


def test_the_prediction_with_more_contrasts_comes_nearer_to_that_with_all() -> None:
    la = fitted(width=40)
    expected = la(NEW, link_approx="quadrature", contrasts="all")
    errors = [float((la(NEW, link_approx="quadrature", contrasts=k) - expected).abs().sum(1).mean()) for k in (1, 2, 4)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[0] < 0.2


# Ways of asking


@cache
def large() -> Any:
    """So large that "auto" takes few contrasts, with as many data as afford a shape of ten inputs."""
    model = network(width=1500, dtype=torch.float32)
    la = Laplace(model, "classification", "all", "iterncgp", prior_precision=0.5, num_actions=12)
    la.fit(loader_for(model, torch.float32, num_data=2400))
    return la


@pytest.mark.parametrize(("contrasts", "precision"), [("auto", 0.5), ("auto", 300.0), (1, 0.5), (3, 0.5), ("all", 0.5)])
def test_predictions_do_not_depend_on_the_batch(contrasts: Any, precision: float) -> None:
    la, x, arguments = copy.copy(large()), NEW.float(), {"link_approx": "quadrature", "contrasts": contrasts}
    la.prior_precision = precision
    whole = la(x, **arguments)
    alone = torch.cat([la(part, **arguments) for part in x.split(2)])
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.flip(0), la(x.flip(0), **arguments), rtol=1e-4, atol=1e-5)


def taken(la: Any, x: Tensor, link: str | None) -> list[int]:
    """How many contrasts "auto" takes, from least to most: none where nothing has more than its expected variance."""
    parts, shape = la._known(x, "auto", link=link)
    expected = shape.margin / la.output_temperature**2
    found = [0 if bool((part.covariance == expected).all()) else part.covariance.shape[1] for part in parts]
    return sorted(found)


def test_auto_takes_no_contrast_where_the_classes_are_certain_and_says_so_in_probabilities_alone() -> None:
    la = copy.copy(large())
    assert max(taken(la, NEW.float(), "quadrature")) == CLASSES - 1  # nothing is certain
    la.prior_precision, la.output_temperature = 1e6, 0.1  # next to no variance
    assert taken(la, NEW.float(), "quadrature")[0] == 0
    assert taken(la, NEW.float(), None)[0] == 1
    found, expected = (la(NEW.float(), link_approx="quadrature", contrasts=k) for k in ("auto", "all"))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
    exact = la.uncertainty(NEW.float(), contrasts="all").margin_variance
    torch.testing.assert_close(la.uncertainty(NEW.float()).margin_variance, exact, rtol=1e-3, atol=0)


def test_probit_goes_without_contrasts_only_where_its_own_variance_changes_nothing() -> None:
    la = copy.copy(large())
    la.prior_precision, la.output_temperature = 1e6, 0.1
    assert taken(la, NEW.float(), "probit")[0] == 0
    found, expected = (la(NEW.float(), contrasts=k) for k in ("auto", "all"))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
    la.prior_precision = 300.0
    by_link = {link: sum(k == 0 for k in taken(la, NEW.float(), link)) for link in ("quadrature", "probit")}
    assert by_link["probit"] <= by_link["quadrature"]


@subsets
@pytest.mark.parametrize("contrasts", [1, 3, "all"])
def test_probit_takes_the_variances_of_the_latent_covariance(subset: str, contrasts: Any) -> None:
    la = fitted(subset)
    mean, covariance = la.latent(NEW, contrasts=contrasts)
    variance = covariance.diagonal(dim1=1, dim2=2)
    expected = (mean / (1 + torch.pi / 8 * variance).sqrt()).softmax(1)
    torch.testing.assert_close(la(NEW, contrasts=contrasts), expected, rtol=1e-7, atol=1e-9)


# Many classes


MANY = 600


@cache
def many() -> Any:
    return fitted("last_layer", num_classes=MANY)


def most_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the covariances that are filled in."""
    sizes: list[int] = []
    covariance = Shape.covariance

    def watched(shape: Shape, known: Tensor, order: Tensor) -> Tensor:
        found = covariance(shape, known, order)
        sizes.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(Shape, "covariance", watched)
    return sizes


def test_probabilities_and_scores_of_many_classes_form_no_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    la, sizes = many(), most_bytes(monkeypatch)
    x = NEW.repeat(20, 1)
    la(x, contrasts=2)
    la(x, link_approx="quadrature", contrasts=2)
    la.uncertainty(x, contrasts=2)
    p, scores = NetworkPredictor(la).scored(x, "probit", 64, 2)  # what the command predict asks for
    torch.testing.assert_close(p, la(x, contrasts=2), rtol=1e-6, atol=1e-12)
    assert len(scores) == len(x)
    assert not sizes


def test_scores_of_many_classes_are_those_of_their_covariance() -> None:
    la = many()
    mean, covariance = la.latent(NEW[:2], contrasts=2)
    found, points = la.uncertainty(NEW[:2], contrasts=2), 4096
    expected = classification_uncertainty(mean, covariance, num_samples=points)
    torch.testing.assert_close(found.variance, expected.variance, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.margin_variance, expected.margin_variance, rtol=1e-6, atol=0)
    _, _, many_points = la._scored(NEW[:2], 2, points)
    for name in ("entropy", "epistemic", "aleatoric"):
        torch.testing.assert_close(getattr(many_points, name), getattr(expected, name), rtol=0.03, atol=2e-3)
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0.1, atol=2e-2)


def test_samples_of_many_classes_are_drawn_for_as_many_inputs_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    la, sizes = copy.copy(many()), most_bytes(monkeypatch)
    la.settings = replace(la.settings, chunk_bytes=2 * 4 * 8 * MANY**2)
    samples = la.predictive_samples(NEW, n_samples=2, contrasts=2)
    assert samples.shape == (2, len(NEW), MANY)
    assert max(sizes) <= 2 * 8 * MANY**2
    assert la(NEW, link_approx="mc", n_samples=2, contrasts=2).shape == (len(NEW), MANY)


def test_covariances_that_do_not_fit_are_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    la = many()
    monkeypatch.setattr(base, "UNASKED_BYTES", 0)
    monkeypatch.setattr(base, "available_bytes", lambda device: 20 * 2**20)
    with pytest.raises(
        MemoryError, match=r"at most 3 inputs, whose covariances of 600 outputs .* 20 MiB; got 7 inputs"
    ):
        la.latent(NEW, contrasts=1)
    assert la.latent(NEW[:3], contrasts=1)[1].shape == (3, MANY, MANY)


@pytest.mark.parametrize("contrasts", [1, 3, "all", "auto"])
def test_gradients_come_to_the_inputs(contrasts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_room, "SMALL_NETWORK", 0)  # so that "auto" is not all
    la = copy.copy(fitted(enable_backprop=True))
    la.prior_precision = 30.0
    x = NEW[:2].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(la(x, link_approx="quadrature", contrasts=contrasts)[:, 0].sum(), x)
    step, values = 1e-5 * torch.ones_like(x), []
    for moved in (x + step, x - step):  # at points made as where a gradient is asked for
        values.append(la(moved.detach().requires_grad_(), link_approx="quadrature", contrasts=contrasts)[:, 0].sum())
    torch.testing.assert_close((gradient * step).sum(), (values[0] - values[1]).detach() / 2, rtol=1e-3, atol=1e-10)


@subsets
def test_scores_and_samples_take_contrasts_too(subset: str) -> None:
    la = fitted(subset)
    few, whole = la.uncertainty(NEW, contrasts=2), la.uncertainty(NEW, contrasts="all")
    torch.testing.assert_close(few.margin_variance, whole.margin_variance, rtol=1e-8, atol=1e-10)
    assert not torch.equal(few.variance, whole.variance)
    samples = la.predictive_samples(NEW, n_samples=20_000, contrasts=2)
    expected = la(NEW, link_approx="quadrature", contrasts=2)
    torch.testing.assert_close(samples.mean(0), expected, rtol=0, atol=0.02)
    for link in ("probit", "mc", "bridge"):
        assert not torch.equal(la(NEW, link_approx=link, contrasts=1), la(NEW, link_approx=link, contrasts="all"))


@pytest.mark.parametrize("name", ["quasi", "accurate"])
def test_the_accurate_link_has_one_name_and_two_old_ones(name: str) -> None:
    la = fitted()
    assert torch.equal(la(NEW, link_approx=name), la(NEW, link_approx="quadrature"))


@pytest.mark.parametrize("method", ["gridsearch", "validation"])
def test_tuning_with_few_contrasts_finds_nearly_the_precision_of_all(method: str) -> None:
    found = []
    for contrasts in ("all", 3):
        la = copy.copy(fitted())
        arguments = {"prior_structure": "scalar", "n_steps": 30, "grid_size": 9, "link_approx": "quadrature"}
        la.optimize_prior_precision(method=method, val_loader=loader_for(la.model), contrasts=contrasts, **arguments)
        found.append(float(la.prior_precision))
    assert found[1] == pytest.approx(found[0], rel=0.7)


def test_calibration_takes_as_many_contrasts_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    la, seen = copy.copy(large()), []
    of = ValidationPart.of

    def watched(rows: Rows, *args: Any, **kwargs: Any) -> ValidationPart:
        found = of(rows, *args, **kwargs)
        seen.append(found.covariance.shape[-1])
        return found

    monkeypatch.setattr(ValidationPart, "of", watched)
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(4))
    loader = DataLoader(TensorDataset(x, torch.arange(60) % CLASSES), 20)
    found = {}
    for contrasts in ("all", 3, "auto"):
        seen.clear()
        found[contrasts] = la.calibrate(loader, contrasts=contrasts)
        assert set(seen) == {"all": {CLASSES}, 3: {3}}.get(contrasts, set(seen))
    for contrasts in (3, "auto"):
        assert found[contrasts].losses["both"] == pytest.approx(found["all"].losses["both"], abs=0.02)
    with pytest.raises(ValueError, match="`contrasts` must be a positive whole number, 'all' or 'auto'"):
        la.calibrate(loader, contrasts="most")


def test_the_grid_scores_what_a_prediction_with_as_many_contrasts_gives() -> None:
    la, seen = copy.copy(fitted()), []

    def loss(p: Tensor, y: Tensor) -> float:
        seen.append(p)
        return float(len(seen))

    data = DataLoader(TensorDataset(NEW, torch.arange(len(NEW)) % CLASSES), 4)
    la.optimize_prior_precision(
        method="gridsearch",
        val_loader=data,
        loss=loss,
        grid_size=2,
        log_prior_prec_min=0,
        log_prior_prec_max=1,
        link_approx="quadrature",
        n_samples=128,
        contrasts=2,
    )
    for precision, found in zip((1.0, 10.0), seen, strict=True):
        la.prior_precision = precision
        torch.testing.assert_close(
            found, la(NEW, link_approx="quadrature", n_samples=128, contrasts=2), rtol=1e-6, atol=1e-8
        )


# What stays with the posterior


def test_the_shape_is_saved_and_follows_compression_and_refinement() -> None:
    la = fitted()
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    loaded = Laplace(network(), "classification", "all", "iterncgp", prior_precision=3.0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    arguments: dict[str, Any] = {"link_approx": "quadrature", "contrasts": 2}
    assert torch.equal(loaded(NEW, **arguments), la(NEW, **arguments))
    before = loaded(NEW, **arguments)
    loaded.compress(9)
    assert loaded._posterior_now().shape is not None
    torch.testing.assert_close(loaded(NEW, **arguments), before, rtol=0, atol=0.05)
    other = fitted(seed=1)
    other.refine(loader_for(other.model), epochs=1)
    assert other.posterior.reference.cross.shape[2] == other.posterior.rank


def test_a_merged_posterior_takes_the_shape_of_its_larger_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_room, "SMALL_NETWORK", 0)  # so that "auto" is not all
    one, two = copy.copy(fitted()), Laplace(network(), "classification", "all", "iterncgp", prior_precision=0.5)
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    two.fit(DataLoader(TensorDataset(x, two.model(x).argmax(1)), 10))
    shape = one._posterior_now().shape.matrix
    for first, second in ((one, two), (two, one)):
        merged = copy.copy(first)
        merged.merge(second)
        assert merged.posterior.rank > fitted().posterior.rank
        torch.testing.assert_close(merged._posterior_now().shape.matrix, shape)
        few, whole = (merged(NEW, link_approx="quadrature", contrasts=k) for k in ("auto", "all"))
        assert 0 < float((few - whole).abs().sum(1).mean()) < 0.1
        merged.compress(10)
        torch.testing.assert_close(merged._posterior_now().shape.matrix, shape)
        loaded = Laplace(network(), "classification", "all", "iterncgp")
        loaded.load_state_dict(merged.state_dict())
        assert loaded.posterior.reference.is_of_part


@pytest.mark.parametrize("part", ["prior", "cross", "gram", "noise", "margins", "num_outputs"])
def test_a_damaged_shape_is_refused(part: str) -> None:
    state = fitted().state_dict()
    reference = dict(state["posterior"]["reference"])
    reference[part] = torch.full_like(reference[part], torch.nan) if part != "num_outputs" else "six"
    state["posterior"] = {**state["posterior"], "reference": reference}
    loaded = Laplace(network(), "classification", "all", "iterncgp")
    with pytest.raises(ValueError, match=f"The {part} of a saved posterior must be whole"):
        loaded.load_state_dict(state)


def test_a_precision_for_each_layer_counts_as_one_that_scales_as_much() -> None:
    la = copy.copy(fitted())
    la.prior_precision = torch.full((4,), 7.0, dtype=torch.float64)
    several = la._posterior_now().shape.matrix
    la.prior_precision = 7.0
    torch.testing.assert_close(la._posterior_now().shape.matrix, several)


def test_contrasts_of_each_input_are_cut_with_the_batch() -> None:
    la, H = copy.copy(fitted()), torch.randn(len(NEW), CLASSES, 2, dtype=torch.float64)
    with torch.no_grad():
        whole = torch.cat([rows.written_out() for rows in la._rows_at(NEW)])
        la.settings = replace(la.settings, chunk_bytes=3 * la._jacobian_at(NEW)[0].bytes_per_row(2))
        parts = list(la._rows_at(NEW, H))
    assert len(parts) == 3  # two rows count for each input, not one for each output
    torch.testing.assert_close(torch.cat([rows.written_out() for rows in parts]), H.mT @ whole)

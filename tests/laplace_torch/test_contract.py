"""What a user of the laplace-torch flavours relies on: the model left alone, sentences, memory, registration."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laplace import Laplace
from laplace.baselaplace import BaseLaplace, DiagLaplace, FullLaplace, FunctionalLaplace, KronLaplace
from laplace.laplace import _all_subclasses
from laplace.lllaplace import DiagLLLaplace, FullLLLaplace, FunctionalLLLaplace, KronLLLaplace
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from ntk_iterncgp import FitReport, IterNCGPAllLaplace, IterNCGPLastLayerLaplace
from tests import oracles
from tests.laplace_helpers import (
    ENOUGH,
    GRID,
    HEADS,
    MLP,
    NUM_DATA,
    ONE,
    SEVERAL,
    close,
    fitted,
    head_jacobian,
    near_and_far,
    not_below,
    problems,
    quiet_scalars,
    subsets,
    training,
    training_inputs,
    unfitted,
    validation,
    written_out,
)
from tests.network_cases import BY_NAME, CASES, NetworkCase, dense_jacobian, outputs_of, untouched

# The user's model and data


@quiet_scalars
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fitting_and_predicting_leave_the_model_of_the_user_untouched(case: NetworkCase) -> None:
    for subset in ("all", "last_layer") if case.name in HEADS else ("all",):
        model, x = case.model(), case.new_inputs()
        next(model.children()).train(False)
        with untouched(model):
            la = fitted(case, subset, model=model, num_actions=3)
            la(x)
            la.predictive_moments(x, joint=True)
            la.sample(2)
            la.functional_samples(x, n_samples=2)
            la.optimize_prior_precision(method="marglik", n_steps=2)
            la.state_dict()


@pytest.mark.parametrize("mean_mode", ["network", "refined"])
@pytest.mark.parametrize("sweep", range(1, 9))
def test_a_fit_that_breaks_off_leaves_the_model_of_the_user_untouched(sweep: int, mean_mode: str) -> None:
    """In whichever pass the model fails."""

    class Fails(nn.Sequential):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            Fails.passes += 1
            if Fails.passes > 4 * sweep:
                raise ArithmeticError("broken off")
            return super().forward(x)

    model = Fails(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double().train()
    model[1].eval()
    with untouched(model):
        la = unfitted(MLP, model=model, mean=mean_mode)
        with pytest.raises(ArithmeticError, match="broken off"):
            la.fit(MLP.loader(num_data=9))
    with pytest.raises(RuntimeError, match="Call fit before"):
        la(MLP.new_inputs())


@subsets
def test_samplers_are_respected_and_drop_last_is_overruled(subset: str) -> None:
    whole = MLP.dataset(NUM_DATA, 1, torch.float64)
    x, chosen = MLP.new_inputs(), [1, 2, 4, 8, 9]
    part = DataLoader(torch.utils.data.Subset(whole, chosen), batch_size=2)
    sampled = DataLoader(whole, batch_size=2, sampler=SubsetRandomSampler(chosen))
    close(
        fitted(MLP, subset, loader=sampled).predictive_moments(x)[1],
        fitted(MLP, subset, loader=part).predictive_moments(x)[1],
        1e-9,
    )
    with pytest.warns(UserWarning, match=f"`drop_last=True` would leave 2 of {NUM_DATA} data out"):
        dropping = fitted(MLP, subset, loader=DataLoader(whole, batch_size=6, drop_last=True))
    all_data = fitted(MLP, subset, loader=DataLoader(whole, batch_size=6))
    close(dropping.predictive_moments(x)[1], all_data.predictive_moments(x)[1], 1e-12)
    assert dropping.n_data == NUM_DATA


@subsets
def test_a_shuffling_loader_gives_the_same_posterior(subset: str) -> None:
    shuffling = DataLoader(MLP.dataset(NUM_DATA, 1, torch.float64), batch_size=3, shuffle=True)
    x = MLP.new_inputs()
    close(
        fitted(MLP, subset, loader=shuffling).predictive_moments(x)[1],
        fitted(MLP, subset).predictive_moments(x)[1],
        1e-9,
    )


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_flat_targets_and_columns_of_targets_are_the_same(subset: str) -> None:
    x, y = next(iter(ONE.loader(num_data=NUM_DATA, batch_size=NUM_DATA)))
    flat = fitted(ONE, subset, loader=DataLoader(TensorDataset(x, y[:, 0]), batch_size=4), mean="refined")
    column = fitted(ONE, subset, mean="refined", loader=DataLoader(TensorDataset(x, y), batch_size=4))
    for ours, theirs in zip(flat(x), column(x), strict=True):
        close(ours, theirs, 1e-12)
    close(flat.log_marginal_likelihood(), column.log_marginal_likelihood(), 1e-12)


@subsets
def test_a_fit_where_there_are_no_derivatives_says_so(subset: str) -> None:
    case = BY_NAME["mlp"]
    model = case.model()
    sentence = r"outside of torch\.inference_mode\(\)"
    with untouched(model), pytest.raises(RuntimeError, match=sentence), torch.inference_mode():
        fitted(case, subset, model=model)
    with torch.no_grad():  # which is no obstacle
        assert fitted(case, subset, model=model).report_.rank > 0


@subsets
def test_a_mapping_without_targets_can_be_predicted(subset: str) -> None:
    case = BY_NAME["mapping"]
    la, x = fitted(case, subset), case.new_inputs()
    unlabelled = type(x)({key: value for key, value in x.items() if key != "labels"})
    assert torch.equal(la(unlabelled), la(x))


class FirstToken(nn.Module):
    """The last layer is applied to every token, and the first one taken afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))[:, 0]


def test_features_of_a_sequence_can_be_reduced_also_in_a_batch_of_one() -> None:
    torch.manual_seed(0)
    model = FirstToken().double()
    x, y = torch.randn(7, 3, 4, dtype=torch.float64), torch.arange(7) % 2
    la = Laplace(model, "classification", "last_layer", "iterncgp", num_actions=ENOUGH, feature_reduction="pick_first")
    la.fit(DataLoader(TensorDataset(x, y), batch_size=3))  # the last batch has one datum
    phi = torch.tanh(model.body(x))[:, 0].detach()
    J = head_jacobian(model.head)(nn.Sequential(model.head), phi)
    f = model.head(phi).detach()
    exact = J @ oracles.weight_covariance(J.flatten(0, 1), oracles.curvature_matrix("softmax", f), 1.0) @ J.mT
    close(la.predictive_moments(x)[1], exact)
    close(la.predictive_moments(x[:1])[1], exact[:1])


class EndsInSomethingElse(nn.Module):
    """The outputs are not those of the last linear layer."""

    def __init__(self, ending: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.ending = nn.Linear(3, 4), nn.Linear(4, 3), ending

    def forward(self, x: Tensor) -> Tensor:
        return self.ending(self.head(torch.tanh(self.body(x))))


@pytest.mark.parametrize("ending", [lambda f: 2 * f, lambda f: torch.log_softmax(f, 1)], ids=["scaled", "log-softmax"])
def test_a_model_that_does_not_end_in_its_last_linear_layer_is_refused(ending: Callable[[Tensor], Tensor]) -> None:
    """Else the mean would not be the network's output."""
    la = Laplace(EndsInSomethingElse(ending).double(), "classification", "last_layer", "iterncgp", num_actions=5)
    with pytest.raises(ValueError, match="last"):
        la.fit(MLP.loader())


def test_a_model_without_a_linear_last_layer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Softplus()).double()
    la = Laplace(model, "classification", "last_layer", "iterncgp")
    with pytest.raises(ValueError, match="linear last layer"):
        la.fit(MLP.loader())


def test_a_frozen_model_is_refused() -> None:
    la = Laplace(MLP.model().requires_grad_(False), "classification", "all", "iterncgp")
    with pytest.raises(ValueError, match="at least one parameter that requires a gradient; got none"):
        la.fit(MLP.loader())


# Bad input


@subsets
def test_a_loader_with_no_data_is_refused(subset: str) -> None:
    for empty in ([], DataLoader(MLP.dataset(0, 1, torch.float64), batch_size=8)):
        with pytest.raises(ValueError, match="an empty loader"):
            unfitted(MLP, subset).fit(empty)


@pytest.mark.parametrize(("offset", "found"), [(1, "= 3"), (-1, "= -1")])
@subsets
def test_labels_outside_the_classes_are_refused(offset: int, found: str, subset: str) -> None:
    x, _ = next(iter(MLP.loader(num_data=6, batch_size=6)))
    loader = DataLoader(TensorDataset(x, torch.tensor([0, 1, 2, 0, 1, 2]) + offset), batch_size=3)
    with pytest.raises(ValueError, match=rf"must be whole numbers from 0 to 2.*{found}"):
        unfitted(MLP, subset).fit(loader)


@subsets
def test_targets_of_another_shape_are_refused(subset: str) -> None:
    x, _ = next(iter(SEVERAL.loader(num_data=6, batch_size=6)))
    loader = DataLoader(TensorDataset(x, torch.zeros(6, 3)), batch_size=3)
    with pytest.raises(ValueError, match=r"shape \(N, 2\) for Gaussian with 2 output\(s\); got \(6, 3\)"):
        unfitted(SEVERAL, subset).fit(loader)
    with pytest.raises(ValueError, match="one target for each of the 6 training inputs; got 12"):
        unfitted(MLP, subset).fit([(x, torch.zeros(12, dtype=torch.long))])


@subsets
def test_targets_that_are_not_finite_are_refused(subset: str) -> None:
    x, y = next(iter(ONE.loader(num_data=6, batch_size=6)))
    y[4] = float("nan")
    with pytest.raises(ValueError, match="Targets must be finite"):
        unfitted(ONE, subset).fit([(x, y)])


@subsets
@pytest.mark.parametrize("row", [0, 5], ids=["first batch", "last batch"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_model_that_returns_nan_is_refused(subset: str, row: int, value: float) -> None:
    x, y = next(iter(MLP.loader(num_data=6, batch_size=6)))
    x[row] = value
    la = unfitted(MLP, subset)
    with pytest.raises(ValueError, match="must return finite outputs"):
        la.fit(DataLoader(TensorDataset(x, y), batch_size=2))
    with pytest.raises(RuntimeError, match="Call fit before"):
        la(MLP.new_inputs())


@subsets
def test_noise_in_the_model_is_found_at_the_door(subset: str) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(nn.functional.dropout(self.body(x), 0.5, training=True))

    with pytest.raises(ValueError, match="without dropout"):
        Laplace(Noisy().double(), "classification", subset, "iterncgp").fit(MLP.loader())


@problems
@subsets
def test_an_empty_batch_is_refused(case: NetworkCase, subset: str) -> None:
    la, x = fitted(case, subset, num_actions=3), case.new_inputs()[:0]
    for question in (la, la.predictive_moments, la.functional_samples, la.predictive_samples):
        with pytest.raises(ValueError, match="at least one input"):
            question(x)


def saturated(scale: float) -> nn.Module:
    model = MLP.model()
    with torch.no_grad():
        model[2].weight *= scale
        model[2].bias *= scale
    return model


@pytest.mark.parametrize("scale", [1e2, 1e4])
@pytest.mark.parametrize("mean_mode", ["network", "refined"])
@subsets
def test_saturated_logits_give_finite_answers(subset: str, mean_mode: str, scale: float) -> None:
    la, x = fitted(MLP, subset, model=saturated(scale), mean=mean_mode, num_actions=10), near_and_far(MLP)
    mean, variance = la.predictive_moments(x)
    assert bool(mean.isfinite().all()) and bool(variance.isfinite().all())
    assert bool((variance.diagonal(dim1=1, dim2=2) > 0).all())
    probabilities = la(x)
    assert bool(probabilities.isfinite().all())
    close(probabilities.sum(1), torch.ones(len(x)), 1e-12)
    assert math.isfinite(float(la.log_marginal_likelihood()))


@pytest.mark.parametrize("scale", [1e2, 1e3, 1e4])
@subsets
def test_saturated_logits_are_not_below_the_exact_variance(subset: str, scale: float) -> None:
    """Decided points say nothing, however large the prior variance is."""
    model, x, seen = saturated(scale), near_and_far(MLP), training_inputs(MLP)
    jacobian = dense_jacobian if subset == "all" else head_jacobian(model[2])
    J, new = jacobian(model, seen).flatten(0, 1), jacobian(model, x).flatten(0, 1)
    exact = oracles.posterior_at("softmax", outputs_of(model, seen), J @ J.T, new @ J.T, new @ new.T)
    la = fitted(MLP, subset, model=model, num_actions=10)
    not_below(la.predictive_moments(x, joint=True)[1], exact, 1e-5)


@subsets
def test_reward_modeling_is_refused(subset: str) -> None:
    with pytest.raises(ValueError, match="`likelihood` must be 'classification' or 'regression'; got 'reward_mod"):
        Laplace(MLP.model(), "reward_modeling", subset, "iterncgp")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean": "mode"}, "`mean` must be 'network' or 'refined'; got 'mode'"),
        ({"policy": "magic"}, "`policy` must be one of 'unit'.* 'clusters', .*got 'magic'"),
        ({"compression": "zip"}, r"`compression` must be 'mean\+trace' or 'eigen'; got 'zip'"),
        ({"max_rank": 0}, "`max_rank` must be None or a whole number"),
        ({"num_actions": 0}, "must be a whole number of at least 1; got 0"),
        ({"newton_tol": -1.0}, "`newton_tol` must be"),
        ({"sigma_noise": 0.5}, "only available for regression"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@subsets
def test_settings_that_cannot_be_are_refused(subset: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Laplace(MLP.model(), "classification", subset, "iterncgp", **settings)


def test_a_budget_of_actions_is_refused_by_the_name_it_has_here() -> None:
    with pytest.raises(ValueError, match="`num_actions` must be a whole number"):
        Laplace(MLP.model(), "classification", "all", "iterncgp", num_actions=0)


# Memory


@pytest.mark.parametrize("question", ["fit", "predict"])
def test_a_budget_too_small_for_one_row_is_refused_by_the_sizes(question: str) -> None:
    la = fitted(MLP, num_actions=2)
    if question == "fit":
        la = unfitted(MLP, chunk_bytes=100)
    else:
        la.settings = type(la.settings)(**{**vars(la.settings), "chunk_bytes": 100})
    message = r"`chunk_bytes` must hold.*3 outputs × 31 weights, 480 bytes; got 100\. Try chunk_bytes=480"
    with pytest.raises(ValueError, match=message):
        if question == "fit":
            la.fit(MLP.loader())
        else:
            la(MLP.new_inputs())


@pytest.mark.parametrize(("subset", "row"), [("all", 3 * 8 * (7 + 7 + 2 * 12)), ("last_layer", 8 * (2 * 9 + 2 * 4))])
@pytest.mark.parametrize("mean_mode", ["network", "refined"])
def test_predictions_do_not_depend_on_the_memory_they_are_given(subset: str, row: int, mean_mode: str) -> None:
    x = torch.cat([near_and_far(MLP), MLP.new_inputs()])
    large = fitted(MLP, subset, mean=mean_mode, num_actions=8)
    small = fitted(MLP, subset, mean=mean_mode, num_actions=8, chunk_bytes=4 * row)  # ten inputs in three parts
    for ours, theirs in zip(small.predictive_moments(x), large.predictive_moments(x), strict=True):
        close(ours, theirs, 1e-10)
    close(small(x), large(x), 1e-10)
    close(small.log_marginal_likelihood(), large.log_marginal_likelihood(), 1e-10)
    if mean_mode == "refined":  # which has one precision, that of the fit
        return
    for la in (small, large):
        la.optimize_prior_precision(method="gridsearch", val_loader=validation(MLP), **GRID)
    assert torch.equal(small.prior_precision, large.prior_precision)


def test_a_joint_prediction_that_does_not_fit_is_refused() -> None:
    la = fitted(MLP, num_actions=4, chunk_bytes=3 * 480)
    with pytest.raises(ValueError, match=r"A joint prediction must fit in chunk_bytes at once; got 2 parts"):
        la.predictive_moments(MLP.new_inputs(), joint=True)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("mean_mode", ["network", "refined"])
def test_a_last_layer_of_a_thousand_classes_stays_small(mean_mode: str) -> None:
    """513 000 weights: their covariance would take two terabytes, one dense row of J for 1000 classes two gigabytes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1000))
    x, y = torch.randn(6, 8), torch.randint(1000, (6,))
    la = Laplace(model, "classification", "last_layer", "iterncgp", num_actions=6, mean=mean_mode)
    with LargestTensor() as largest:
        la.fit(DataLoader(TensorDataset(x, y), batch_size=4))
        probabilities = la(x[:2])
        la.log_marginal_likelihood()
        la.sample(2)
    assert probabilities.shape == (2, 1000) and bool(probabilities.isfinite().all())
    assert la.n_params == 513_000 and la.report_.rank == 6
    assert largest.num_bytes >= 6 * 4 * 513_000  # A itself: the meter works
    assert largest.num_bytes <= 80 * 2**20


def test_the_rows_of_all_weights_stay_within_the_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 10))  # 2470 weights
    x, y = torch.randn(64, 30), torch.randint(10, (64,))
    budget = 2 * 2**20
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=4, chunk_bytes=budget)
    with LargestTensor() as largest:
        la.fit(DataLoader(TensorDataset(x, y), batch_size=32))
        la(x)
    whole = 64 * 10 * 2470 * 4
    assert whole > 3 * budget
    assert largest.num_bytes <= budget


# As a flavour of laplace-torch


def test_both_flavours_are_registered_and_the_others_keep_their_own_classes() -> None:
    model = MLP.model()
    expected: dict[tuple[str, str], tuple[type, dict[str, Any]]] = {
        ("all", "iterncgp"): (IterNCGPAllLaplace, {}),
        ("last_layer", "iterncgp"): (IterNCGPLastLayerLaplace, {}),
        ("all", "full"): (FullLaplace, {}),
        ("all", "kron"): (KronLaplace, {}),
        ("all", "diag"): (DiagLaplace, {}),
        ("all", "gp"): (FunctionalLaplace, {"n_subset": 4}),
        ("last_layer", "full"): (FullLLLaplace, {}),
        ("last_layer", "kron"): (KronLLLaplace, {}),
        ("last_layer", "diag"): (DiagLLLaplace, {}),
        ("last_layer", "gp"): (FunctionalLLLaplace, {"n_subset": 4}),
    }
    for (subset, structure), (flavour, settings) in expected.items():
        assert type(Laplace(model, "classification", subset, structure, **settings)) is flavour
    assert type(Laplace(model, "classification", hessian_structure="iterncgp")) is IterNCGPLastLayerLaplace


def test_no_class_of_the_package_shares_a_key() -> None:
    """laplace-torch keeps one class per key, whichever comes last: an inherited key would hijack its owner's."""
    keyed = [flavour for flavour in _all_subclasses(BaseLaplace) if hasattr(flavour, "_key")]
    ours = [flavour for flavour in keyed if flavour.__module__.startswith("ntk_iterncgp")]
    assert {flavour._key for flavour in ours} == {("all", "iterncgp"), ("last_layer", "iterncgp")} and len(ours) == 2
    assert not {flavour._key for flavour in keyed if flavour not in ours} & {flavour._key for flavour in ours}


def test_the_quick_start_of_laplace_torch_runs_with_one_word_changed() -> None:
    digits = load_digits()
    inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
    targets = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[:400]), targets[:400]).backward()
        optimizer.step()
    train_loader = DataLoader(TensorDataset(inputs[:400], targets[:400]), batch_size=100, shuffle=True)
    val_loader = DataLoader(TensorDataset(inputs[400:600], targets[400:600]), batch_size=100)
    x, y = inputs[600:], targets[600:]

    # User-specified LA flavor
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="iterncgp")
    la.fit(train_loader)
    la.optimize_prior_precision(method="gridsearch", pred_type="glm", link_approx="probit", val_loader=val_loader)

    # User-specified predictive approx.
    pred = la(x, pred_type="glm", link_approx="probit")

    assert pred.shape == (len(x), 10) and pred.dtype == torch.float32
    torch.testing.assert_close(pred.sum(1), torch.ones(len(x)))
    assert float((pred.argmax(1) == y).float().mean()) > 0.85
    assert 1e-4 < float(la.prior_precision) < 1e4
    with torch.no_grad():
        network = torch.softmax(model(inputs[400:600]), 1)
    losses = [float(nn.functional.nll_loss(p.log(), targets[400:600])) for p in (la(inputs[400:600]), network)]
    assert losses[0] < losses[1], "where the prior was tuned, uncertainty is expected to help"


# Reports


@pytest.mark.parametrize("mean_mode", ["network", "refined"])
@subsets
def test_the_report_says_what_was_done(subset: str, mean_mode: str) -> None:
    la = fitted(MLP, subset, num_actions=7, mean=mean_mode)
    report = la.report_
    assert isinstance(report, FitReport)
    assert report.num_products == 7 and report.rank == la.posterior.rank == 7
    assert report.status == "budget" and report.advice
    assert 0 < report.information_captured < 1 and report.seconds > 0
    assert (report.num_newton_steps == 0) == (mean_mode == "network")
    assert "7 products" in str(report) and "rank 7" in str(report)
    captured = [record.information_captured for record in report.history]
    assert report.history[-1].num_products == 7
    if mean_mode == "network":
        assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(captured))
        lower, upper = la.posterior.log_determinant_bounds(la.prior_precision, torch.tensor(1.0).double())
        assert report.information_captured == pytest.approx(float(lower / upper), rel=1e-6)


def test_the_advice_of_a_report_names_only_what_exists() -> None:
    report = fitted(MLP, num_actions=3).report_
    assert "refine(" not in report.advice or hasattr(fitted(MLP, num_actions=3), "refine")


def test_information_captured_is_a_lower_bound_on_the_exact_share() -> None:
    dense = written_out(MLP)
    exact = oracles.log_determinant(dense.curvature(dense.f, 1.0), dense.J @ dense.J.T)
    for num_actions in (1, 4, 12):
        la = fitted(MLP, num_actions=num_actions)
        lower, _ = la.posterior.log_determinant_bounds(la.prior_precision, torch.tensor(1.0).double())
        assert la.report_.information_captured <= float(lower / exact) + 1e-9 <= 1 + 2e-9


def test_a_fit_is_the_same_every_time_and_follows_its_seed() -> None:
    x = MLP.new_inputs()
    first, again, other = (
        fitted(MLP, policy="random_subspace", num_actions=8, seed=seed).predictive_moments(x)[1] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_fit_leaves_the_random_numbers_of_the_caller_alone() -> None:
    la = unfitted(MLP, policy="random_subspace", num_actions=8)
    loader = MLP.loader()
    before = torch.get_rng_state()
    la.fit(loader)
    la(MLP.new_inputs())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_policy_may_be_any_callable() -> None:
    seen = []

    def first_rows(state: Any) -> Tensor:
        seen.append(state.problem.num_rows)
        block = torch.zeros(state.problem.num_rows, 2, dtype=torch.float64)
        block[3 * len(seen), 0] = block[3 * len(seen) + 1, 1] = 1.0
        return block

    la = fitted(MLP, policy=first_rows, num_actions=6)
    assert la.report_.rank == 6 and seen == [3 * NUM_DATA] * 3
    dense = written_out(MLP)
    not_below(la.predictive_moments(MLP.new_inputs())[1], dense.at_new(dense.covariance(1.0)))


def test_an_interrupted_fit_is_valid_for_the_work_done() -> None:
    def interrupt(state: Any) -> Tensor:
        if state.buffer.size >= 3:
            raise KeyboardInterrupt
        return state.curvature_residual[:, None]

    la, x = unfitted(MLP, policy=interrupt), MLP.new_inputs()
    with pytest.warns(UserWarning, match="interrupted"):
        la.fit(training(MLP))
    assert la.report_.status == "interrupted" and la.report_.rank == 3
    close(la.predictive_moments(x)[1], fitted(MLP, num_actions=3).predictive_moments(x)[1], 1e-9)


def test_progress_bars_are_shown_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    la = fitted(MLP, num_actions=3)
    la.optimize_prior_precision(method="gridsearch", val_loader=validation(MLP), grid_size=3)
    assert capsys.readouterr() == ("", "")
    la.fit(MLP.loader(), progress_bar=True)
    assert "information" in capsys.readouterr().err


@pytest.mark.cuda
@subsets
def test_a_model_on_another_device_than_the_data_draws_the_data_to_it(subset: str) -> None:
    la = fitted(MLP, subset, model=MLP.model().cuda(), num_actions=5)
    mean, variance = la.predictive_moments(MLP.new_inputs().cuda())
    expected = fitted(MLP, subset, num_actions=5).predictive_moments(MLP.new_inputs())
    close(mean.cpu(), expected[0])
    close(variance.cpu(), expected[1])


@subsets
def test_a_model_without_values_or_on_two_devices_gets_a_sentence(subset: str) -> None:
    with pytest.raises(ValueError, match=r"on one device, with values; got '.*' on meta\. Try model\.to\(device\)"):
        unfitted(MLP, subset, model=MLP.model().to("meta"))
    split = MLP.model()
    list(split.children())[-1].to("meta")
    with pytest.raises(ValueError, match=r"on one device.* on cpu, '.*' on meta\. Try model\.to"):
        unfitted(MLP, subset, model=split)
    la = unfitted(MLP, subset)
    list(la.model.modules())[-1].to("meta")  # after it was wrapped
    with pytest.raises(ValueError, match=r"on one device.* on cpu, '.*' on meta\. Try model\.to"):
        la.fit(MLP.loader())


@subsets
def test_data_without_values_get_a_sentence_in_fit_and_in_predictions(subset: str) -> None:
    x, y = MLP.new_inputs().to("meta"), torch.zeros(len(MLP.new_inputs()), dtype=torch.long)
    with pytest.raises(ValueError, match=r"The data must have values.*got a tensor on the meta device"):
        unfitted(MLP, subset).fit(DataLoader(TensorDataset(x, y)))
    with pytest.raises(ValueError, match=r"The data must have values.*got a tensor on the meta device"):
        fitted(MLP, subset, num_actions=3)(x)

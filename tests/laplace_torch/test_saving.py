"""Saving the laplace-torch flavours, and that no posterior is ever stale."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.laplace_helpers import (
    MLP,
    NUM_DATA,
    SEVERAL,
    close,
    differ,
    fitted,
    near_and_far,
    precisions,
    problems,
    subsets,
    training,
    unfitted,
    validation,
)
from tests.network_cases import BY_NAME, NetworkCase, outputs_of

# Saving


def save_and_load(la: Any, folder: Path) -> Any:
    torch.save(la.state_dict(), folder / "posterior.pt")
    return torch.load(folder / "posterior.pt", weights_only=True)


@problems
@subsets
@pytest.mark.parametrize("mean_mode", ["network", "refined"])
def test_a_saved_posterior_predicts_as_before_without_the_training_data(
    case: NetworkCase, subset: str, mean_mode: str, tmp_path: Path
) -> None:
    la, x = fitted(case, subset, mean=mean_mode, num_actions=7, prior_mean=0.1), near_and_far(case)
    follows = mean_mode == "network" or case.likelihood == "regression"
    if follows:
        la.prior_precision = precisions(la, "layerwise")
        la.temperature = 0.5
    if case.likelihood == "regression":
        la.sigma_noise = 0.2
    other = unfitted(case, subset, mean=mean_mode)
    other.load_state_dict(save_and_load(la, tmp_path))
    for ours, theirs in zip(other.predictive_moments(x, joint=True), la.predictive_moments(x, joint=True), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(other.log_marginal_likelihood(), la.log_marginal_likelihood())
    seeds = (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3))
    assert torch.equal(other.sample(3, generator=seeds[0]), la.sample(3, generator=seeds[1]))
    other.prior_precision = la.prior_precision = 0.3  # and goes on following its hyperparameters, or refusing to
    if follows:
        assert torch.equal(other.predictive_moments(x)[1], la.predictive_moments(x)[1])
    else:
        with pytest.raises(ValueError, match=r"`prior_precision` must be that of the fit, 1, .* got 0\.3"):
            other.predictive_moments(x)
    with pytest.raises(RuntimeError, match="A report must follow a fit in this process"):
        other.report_  # noqa: B018


@subsets
def test_a_loaded_posterior_says_why_it_cannot_be_refined(subset: str, tmp_path: Path) -> None:
    other = unfitted(MLP, subset)
    other.load_state_dict(save_and_load(fitted(MLP, subset, num_actions=4), tmp_path))
    with pytest.raises(RuntimeError, match=r"holds what predictions need, not the groups .* Try fit\(train_loader\)"):
        other.refine(training(MLP), epochs=1)


@subsets
def test_a_mapping_model_is_saved_and_loaded(subset: str, tmp_path: Path) -> None:
    case = BY_NAME["mapping"]
    la, x = fitted(case, subset), case.new_inputs()
    other = unfitted(case, subset)
    other.load_state_dict(save_and_load(la, tmp_path))
    assert torch.equal(other(x), la(x))


def changed(model: nn.Module, name: str) -> nn.Module:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] += 1e-3
    return model


@problems
@subsets
def test_a_posterior_of_other_weights_is_refused(case: NetworkCase, subset: str, tmp_path: Path) -> None:
    saved = save_and_load(fitted(case, subset, num_actions=4), tmp_path)
    other = unfitted(case, subset, model=changed(case.model(), "2.weight"))
    with pytest.raises(ValueError, match="belong to this model; got one of other weights"):
        other.load_state_dict(saved)


def test_a_posterior_of_a_last_layer_is_refused_on_other_features(tmp_path: Path) -> None:
    """The last layer is the same, the layers before it are not: J is another one."""
    saved = save_and_load(fitted(MLP, "last_layer", num_actions=4), tmp_path)
    other = unfitted(MLP, "last_layer", model=changed(MLP.model(), "0.weight"))
    with pytest.raises(ValueError, match="must belong to this model"):
        other.load_state_dict(saved)


def test_a_posterior_is_refused_where_frozen_weights_differ(tmp_path: Path) -> None:
    case = BY_NAME["frozen layer"]
    saved = save_and_load(fitted(case, num_actions=4), tmp_path)
    with pytest.raises(ValueError, match="must belong to this model"):
        unfitted(case, model=changed(case.model(), "0.weight")).load_state_dict(saved)


@pytest.mark.parametrize(
    ("case", "subset", "settings", "named"),
    [
        (MLP, "all", {"mean": "refined"}, "mean_mode 'refined'; got 'network'"),
        (BY_NAME["frozen layer"], "all", {}, "parameters "),
        (BY_NAME["frozen bias"], "all", {}, "parameters "),
        (MLP, "last_layer", {"last_layer_name": "2"}, "flavour 'IterNCGPLastLayerLaplace'; got 'IterNCGPAllLaplace'"),
    ],
    ids=["mean", "frozen layer", "frozen bias", "flavour"],
)
def test_a_posterior_of_another_kind_is_refused_by_what_differs(
    case: NetworkCase, subset: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    saved = save_and_load(fitted(MLP, num_actions=4), tmp_path)
    other = unfitted(case, subset, **settings)
    with pytest.raises(ValueError, match=f"The saved posterior must have the {named}"):
        other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="Call fit before"):  # nothing was taken over
        other(case.new_inputs())


def test_a_posterior_of_another_likelihood_is_refused(tmp_path: Path) -> None:
    saved = save_and_load(fitted(SEVERAL, num_actions=4), tmp_path)
    other = Laplace(SEVERAL.model(), "classification", "all", "iterncgp")
    with pytest.raises(ValueError, match="likelihood 'classification'; got 'regression'"):
        other.load_state_dict(saved)


def test_a_posterior_of_all_weights_is_refused_by_a_last_layer_that_is_yet_to_be_found(tmp_path: Path) -> None:
    saved = save_and_load(fitted(MLP, num_actions=4), tmp_path)
    with pytest.raises(ValueError, match="flavour 'IterNCGPLastLayerLaplace'; got 'IterNCGPAllLaplace'"):
        unfitted(MLP, "last_layer").load_state_dict(saved)


def test_what_is_no_saved_posterior_is_refused() -> None:
    for subset in ("all", "last_layer"):
        with pytest.raises(ValueError, match="must have the format 1; got None"):
            unfitted(MLP, subset).load_state_dict(MLP.model().state_dict())


def test_a_posterior_is_loaded_in_another_precision_and_predicts_the_same(tmp_path: Path) -> None:
    saved = save_and_load(fitted(MLP, num_actions=4), tmp_path)
    other = unfitted(MLP, dtype=torch.float32)
    other.load_state_dict(saved)
    close(other(MLP.new_inputs(torch.float32)), fitted(MLP, num_actions=4)(MLP.new_inputs()), 1e-6)


def test_nothing_can_be_saved_before_a_fit() -> None:
    for subset in ("all", "last_layer"):
        with pytest.raises(RuntimeError, match="Call fit before"):
            unfitted(MLP, subset).state_dict()


# No stale posterior


QUESTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "call": lambda la, x: la(x),
    "moments": lambda la, x: la.predictive_moments(x),
    "functional samples": lambda la, x: la.functional_samples(x, n_samples=2),
    "weight samples": lambda la, x: la.sample(2),
    "evidence": lambda la, x: la.log_marginal_likelihood(),
    "evidence tuning": lambda la, x: la.optimize_prior_precision(method="marglik", n_steps=1),
    "grid": lambda la, x: la.optimize_prior_precision(method="gridsearch", val_loader=validation(MLP), grid_size=2),
    "state": lambda la, x: la.state_dict(),
    "compression": lambda la, x: la.compress(2),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_before_the_fit_is_refused(question: str) -> None:
    for subset in ("all", "last_layer"):
        with pytest.raises(RuntimeError, match="Call fit before"):
            QUESTIONS[question](unfitted(MLP, subset), MLP.new_inputs())


@pytest.mark.parametrize("question", QUESTIONS)
@subsets
def test_a_question_after_the_weights_have_changed_is_refused(question: str, subset: str) -> None:
    la = fitted(MLP, subset, num_actions=4)
    model = la.model if subset == "all" else la.model.model
    changed(model, "2.bias")
    with pytest.raises(
        RuntimeError, match=r"the weights it was fitted with; got weights that have changed since\. Try fit"
    ):
        QUESTIONS[question](la, MLP.new_inputs())


def test_a_refit_after_the_weights_have_changed_is_that_of_the_new_weights() -> None:
    la, x = fitted(MLP), MLP.new_inputs()
    changed(la.model, "2.bias")
    la.fit(training(MLP))
    close(la.predictive_moments(x)[0], outputs_of(la.model, x), 1e-14)
    assert la(x).shape == (len(x), 3)


def test_frozen_weights_that_have_changed_are_noticed() -> None:
    case = BY_NAME["frozen layer"]
    la = fitted(case, num_actions=4)
    changed(la.model, "0.weight")
    with pytest.raises(RuntimeError, match="weights that have changed since"):
        la(case.new_inputs())


def test_running_statistics_that_have_changed_are_noticed() -> None:
    case = BY_NAME["cnn with BatchNorm and in-place ReLU"]
    la = fitted(case, num_actions=4)
    la.model[1].running_mean += 0.1
    with pytest.raises(RuntimeError, match="changed since"):
        la(case.new_inputs())


def test_features_of_a_last_layer_that_have_changed_are_noticed() -> None:
    la = fitted(MLP, "last_layer", num_actions=4)
    changed(la.model.model, "0.weight")
    with pytest.raises(RuntimeError, match="weights that have changed since"):
        la(MLP.new_inputs())


@subsets
def test_predictions_follow_a_prior_that_is_changed_in_place(subset: str) -> None:
    la, x = fitted(MLP, subset, prior_precision=1.0), MLP.new_inputs()
    before = la.predictive_moments(x)[1]
    la.prior_precision.mul_(3.0)
    after = la.predictive_moments(x)[1]
    assert differ(before, after)
    close(after, fitted(MLP, subset, prior_precision=3.0).predictive_moments(x)[1])


@subsets
def test_a_prior_set_between_construction_and_fit_counts(subset: str) -> None:
    la, x = unfitted(MLP, subset, prior_precision=1.0, num_actions=4), MLP.new_inputs()
    la.prior_precision = 50.0
    la.fit(training(MLP))
    assert float(la.prior_precision) == 50.0
    expected = fitted(MLP, subset, prior_precision=50.0, num_actions=4)
    close(la.predictive_moments(x)[1], expected.predictive_moments(x)[1], 1e-12)


@subsets
def test_a_second_fit_replaces_the_first(subset: str) -> None:
    la, x = fitted(MLP, subset, loader=MLP.loader(num_data=6)), MLP.new_inputs()
    small = la.predictive_moments(x)[1]
    la.fit(training(MLP))
    close(la.predictive_moments(x)[1], fitted(MLP, subset).predictive_moments(x)[1], 1e-12)
    assert differ(small, la.predictive_moments(x)[1]) and la.n_data == NUM_DATA


@pytest.mark.parametrize("mean_mode", ["network", "refined"])
@subsets
def test_a_second_fit_that_fails_leaves_the_first_usable(subset: str, mean_mode: str) -> None:
    la, x = fitted(MLP, subset, mean=mean_mode, num_actions=6), MLP.new_inputs()
    before, evidence, report = la.predictive_moments(x), la.log_marginal_likelihood(), la.report_
    inputs, labels = next(iter(MLP.loader(num_data=6, batch_size=6)))
    for bad in (DataLoader(TensorDataset(inputs, labels + 5), 3), DataLoader(TensorDataset(inputs / 0, labels), 3), []):
        with pytest.raises(ValueError, match=r"expected|expects|must"):
            la.fit(bad)
        after = la.predictive_moments(x)
        assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
        assert torch.equal(la.log_marginal_likelihood(), evidence) and la.report_ == report


def test_a_posterior_of_other_layers_with_the_same_weights_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    other = nn.Sequential(model[0], nn.Tanh(), model[2])
    x = torch.randn(8, 3)
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=4)
    la.fit(DataLoader(TensorDataset(x, torch.randint(2, (8,))), batch_size=4))
    with pytest.raises(ValueError, match="modules"):
        Laplace(other, "classification", "all", "iterncgp", num_actions=4).load_state_dict(la.state_dict())


def test_before_a_fit_the_evidence_and_its_parts_ask_for_one() -> None:
    la = Laplace(nn.Linear(3, 2), "classification", "all", "iterncgp")
    for name in ("log_likelihood", "scatter", "log_det_ratio"):
        with pytest.raises((RuntimeError, AttributeError), match="fit"):
            getattr(la, name)


def test_laplace_torch_refuses_a_posterior_of_iterncgp_by_its_class() -> None:
    """By the entry that its own posteriors have, not by a KeyError."""
    la = fitted(MLP)
    other = Laplace(MLP.model(), "classification", "all", "diag")
    with pytest.raises(ValueError, match="wrong Laplace type"):
        other.load_state_dict(la.state_dict())

"""What laplace-torch asks of its function-space flavours, asked of ours, against dense oracles and its `FullLaplace`.

Its own tests also reach into a Gaussian process on a subset of the data (K_MM, Sigma_inv, n_subset); ours has none of
these. Its evidence of a functional regression is no reference: it adds log p(y | f) to a Gaussian process evidence that
holds the residuals already. The reference here is the Laplace evidence,

    log p(y | f) − ½ (θ − μ₀)ᵀΛ(θ − μ₀) − ½ log |I + W^½ K W^½|,    K = J Λ⁻¹ Jᵀ.
"""

import math
from collections import UserDict
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests import oracles
from tests.laplace_helpers import close
from tests.suite_problems import (
    CLASSIFICATION,
    FLAVOURS,
    LINKS,
    NUM_DATA,
    POLICIES,
    PRECISION,
    PROBLEMS,
    REGRESSIONS,
    WRONG,
    NamedModel,
    Problem,
    flavours,
    policies,
    problems,
    regressions,
)

# Moments, evidence, samples


@problems
@flavours
@policies
def test_moments_are_those_of_the_dense_posterior_and_of_the_full_laplace(
    problem: Problem, flavour: str, policy: str
) -> None:
    la, full = problem.with_all_actions(flavour, policy), problem.laplace(flavour, "full")
    x, J, covariance = problem.data(1)[0], problem.jacobian(flavour, 1), problem.covariance(flavour)
    mean, variance = la.predictive_moments(x)
    joint_mean, joint = la.predictive_moments(x, joint=True)
    close(mean, problem.model()(x).detach(), 1e-12)
    close(joint_mean, mean.flatten(), 1e-12)
    close(variance, J @ covariance @ J.mT)
    close(joint, J.flatten(0, 1) @ covariance @ J.flatten(0, 1).T)
    close(la.functional_variance(J), full.functional_variance(J))
    close(la.functional_covariance(J), full.functional_covariance(J))


@problems
@flavours
@policies
@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
def test_evidence_is_that_of_the_oracle_for_any_prior_and_noise(
    problem: Problem, flavour: str, policy: str, structure: str
) -> None:
    la, full = (
        problem.with_all_actions(flavour, policy, prior_mean=0.2),
        problem.laplace(flavour, "full", prior_mean=0.2),
    )
    size = {"scalar": 1, "layerwise": la.n_layers, "diag": la.n_params}[structure]
    precision = torch.linspace(0.5, 2.0, size).double()
    sigma = {"sigma_noise": torch.tensor(0.9).double()} if problem.is_regression else {}
    found = la.log_marginal_likelihood(precision, **sigma)
    spread = la.prior_precision_diag  # for a last layer, laplace-torch takes no precision per parameter tensor
    close(found, full.log_marginal_likelihood(spread, **sigma))
    close(found, problem.evidence(flavour, spread, 0.2, float(la.sigma_noise) if problem.is_regression else 1.0))
    close(la.scatter, (spread * (problem.weights(flavour) - 0.2).square()).sum(), 1e-12)


@problems
@flavours
@policies
def test_samples_follow_their_generator_and_not_the_likelihood(problem: Problem, flavour: str, policy: str) -> None:
    la, x = problem.with_all_actions(flavour, policy), problem.data(1)[0]
    for joint, kind in product([False, True], ["gp", "glm"]):
        latent, outputs = (
            draw(x, pred_type=kind, n_samples=9, joint=joint, generator=torch.Generator().manual_seed(5))
            for draw in (la.functional_samples, la.predictive_samples)
        )
        assert latent.shape == outputs.shape == (9, NUM_DATA, problem.num_outputs)
        assert torch.equal(outputs, latent if problem.is_regression else latent.softmax(-1))
    draws = la.sample(30_000, generator=torch.Generator().manual_seed(6))
    error = (draws.T.cov() - problem.covariance(flavour)).abs().max() / problem.covariance(flavour).abs().max()
    assert draws.shape == (30_000, la.n_params) and float(error) < 0.06
    with pytest.raises(ValueError, match="n_samples must be positive"):
        la.functional_samples(x, n_samples=0)


# The forms of a prediction


@regressions
@flavours
@pytest.mark.parametrize("kind", ["gp", "glm"])
def test_forms_of_a_regression_prediction(problem: Problem, flavour: str, kind: str) -> None:
    la, x, C = problem.laplace(flavour), problem.data(1)[0], problem.num_outputs
    for joint, diagonal in product([False, True], repeat=2):
        mean, variance = la(x, pred_type=kind, joint=joint, diagonal_output=diagonal)
        rows = (NUM_DATA * C,) if joint else (NUM_DATA, C)
        assert mean.shape == rows
        assert variance.shape == ((*rows, *rows) if joint else rows if diagonal else (*rows, C))
    close(la(x, diagonal_output=True)[1], la(x)[1].diagonal(dim1=1, dim2=2), 1e-12)


@pytest.mark.parametrize("problem", PROBLEMS[2:], ids=lambda p: f"{p.num_outputs}-classes")
@flavours
@pytest.mark.parametrize("link", LINKS)
def test_forms_of_a_classification_prediction(problem: Problem, flavour: str, link: str) -> None:
    la, full, x = problem.laplace(flavour), problem.laplace(flavour, "full"), problem.data(1)[0]
    settings: dict[str, Any] = {"link_approx": link, "n_samples": 4000 if link == "mc" else 512}
    found = la(x, **settings, generator=torch.Generator().manual_seed(0))
    assert found.shape == (NUM_DATA, problem.num_outputs) and bool((found > 0).all())
    close(found.sum(1), torch.ones(NUM_DATA))
    for kind, joint, diagonal in product(["gp", "glm"], [False, True], [False, True]):
        again = la(x, kind, joint, **settings, diagonal_output=diagonal, generator=torch.Generator().manual_seed(0))
        assert again.shape == found.shape
    if link in ("probit", "bridge", "bridge_norm"):
        close(found, full(x, pred_type="glm", link_approx=link))
    else:
        draws = la.predictive_samples(x, n_samples=40_000, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(found, draws.mean(0), rtol=0, atol=0.03 if link == "mc" else 0.01)


@problems
@flavours
def test_what_is_no_prediction_is_refused(problem: Problem, flavour: str) -> None:
    la, x = problem.laplace(flavour), problem.data(1)[0]
    with pytest.raises(ValueError, match="`pred_type` must be one of"):
        la(x, pred_type="linear")
    with pytest.raises(ValueError, match="`link_approx` must be one of"):
        la(x, link_approx="logistic")
    with pytest.raises(ValueError, match="at least one input"):
        la(x[:0])
    with pytest.raises(ValueError, match="Invalid Jacobians shape"):
        la.functional_variance(torch.zeros(2, problem.num_outputs, la.n_params + 1).double())


@problems
@flavours
@policies
@pytest.mark.parametrize("joint", [False, True])
def test_gradients_reach_the_inputs(problem: Problem, flavour: str, policy: str, joint: bool) -> None:
    la = problem.laplace(flavour, enable_backprop=True, **POLICIES[policy])
    x = problem.data(1)[0][:2].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: la.predictive_moments(x, joint=joint), (x,), rtol=1e-5, atol=1e-7)


# Inputs, outputs and types


@problems
@flavours
def test_mappings_are_fitted_and_predicted_as_tensors_are(problem: Problem, flavour: str) -> None:
    (x, y), (new, _) = problem.data(), problem.data(1)
    rows = [{"features": a, "target": b, "source": "notes"} for a, b in zip(x, y, strict=True)]
    keys = {"dict_key_x": "features", "dict_key_y": "target"}
    settings = {"prior_precision": PRECISION, **problem.noise}
    la = Laplace(NamedModel(problem.model()), problem.likelihood, flavour, "iterncgp", **keys, **settings)
    la.fit(DataLoader(rows, batch_size=7))
    for mapping in ({"features": new}, UserDict(features=new)):
        close(la.predictive_moments(mapping)[1], problem.laplace(flavour).predictive_moments(new)[1])
    wrong = Laplace(NamedModel(problem.model()), problem.likelihood, flavour, "iterncgp", **settings)
    with pytest.raises((KeyError, ValueError), match="target"):
        wrong.fit(DataLoader(rows, batch_size=7))


@problems
@flavours
@policies
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_answers_have_the_type_of_the_model(problem: Problem, flavour: str, policy: str, dtype: torch.dtype) -> None:
    settings = {**problem.noise, **POLICIES[policy]}
    la = Laplace(problem.model(dtype), problem.likelihood, flavour, "iterncgp", **settings)
    la.fit(problem.loader(dtype=dtype))
    x = problem.data(1, dtype=dtype)[0]
    answers = [*la.predictive_moments(x), *la.predictive_moments(x, joint=True), la.sample(2), la.functional_samples(x)]
    answers += [la.log_marginal_likelihood(), la.log_likelihood, la.scatter, la.prior_precision, la.sigma_noise]
    answers += [] if problem.is_regression else [la(x, link_approx=link) for link in LINKS]
    assert {answer.dtype for answer in answers} == {dtype}


@flavours
def test_only_the_weights_that_are_trained_are_uncertain(flavour: str) -> None:
    model = CLASSIFICATION.model()
    model[0].bias.requires_grad_(False)
    la, x = CLASSIFICATION.laplace(flavour, model=model), CLASSIFICATION.data(1)[0]
    trained = torch.cat([torch.arange(15), torch.arange(20, 38)]) if flavour == "all" else torch.arange(18)
    J, new_J = (CLASSIFICATION.jacobian(flavour, seed)[..., trained] for seed in (0, 1))
    covariance = oracles.weight_covariance(J.flatten(0, 1), CLASSIFICATION.curvature(), PRECISION)
    assert la.mean.shape == (len(trained),)
    close(la.predictive_moments(x)[1], new_J @ covariance @ new_J.mT)


@flavours
def test_what_is_not_offered_is_refused(flavour: str) -> None:
    model, (x, y) = CLASSIFICATION.model(), CLASSIFICATION.data()
    with pytest.raises(ValueError, match="'classification' or 'regression'; got 'reward_modeling'"):
        Laplace(model, "reward_modeling", flavour, "iterncgp")
    sequences = x.reshape(6, 3, 3)  # outputs (6, 3, C)
    with pytest.raises(ValueError):
        targets = torch.randn(6, 3, 3).double()
        Laplace(model, "regression", flavour, "iterncgp").fit(DataLoader(TensorDataset(sequences, targets), 3))
    if flavour == "last_layer":  # with all weights it is a classifier of each place
        with pytest.raises(ValueError, match="subset_of_weights='all'"):
            Laplace(model, "classification", flavour, "iterncgp").fit(
                DataLoader(TensorDataset(sequences, y.reshape(6, 3)), 3)
            )
    one_output = Problem("regression", 1).model()
    with pytest.raises(ValueError, match="from 0 to 1"):  # a single logit is that of the second of two classes
        Laplace(one_output, "classification", flavour, "iterncgp").fit(CLASSIFICATION.loader())


# Hyperparameters


@flavours
@pytest.mark.parametrize("name", WRONG)
def test_wrong_hyperparameters_are_refused_where_they_are_given_or_set(flavour: str, name: str) -> None:
    problem = REGRESSIONS[0]
    la, unfitted = problem.laplace(flavour), Laplace(problem.model(), "regression", flavour, "iterncgp")
    before = la.log_marginal_likelihood()
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            Laplace(problem.model(), "regression", flavour, "iterncgp", **{name: value})
        for each in (la, unfitted):
            with pytest.raises(ValueError, match=f"`{name}` must be"):
                setattr(each, name, value)
    assert torch.equal(la.log_marginal_likelihood(), before)
    if name != "temperature":  # which is kept in double precision
        with pytest.raises(ValueError, match=rf"`{name}` must be .*, finite in torch\.float32; got 1e\+50"):
            Laplace(problem.model(torch.float32), "regression", flavour, "iterncgp", **{name: 1e50})


@flavours
def test_classification_keeps_a_noise_of_one(flavour: str) -> None:
    la, x = CLASSIFICATION.laplace(flavour), CLASSIFICATION.data(1)[0]
    before = la.predictive_moments(x)[1]
    with pytest.raises(ValueError, match=r"`sigma_noise` must be 1 for classification, .*; got 2\.0\. Try temperature"):
        la.sigma_noise = 2.0
    la.sigma_noise = 1.0
    assert torch.equal(la.predictive_moments(x)[1], before)


@pytest.mark.parametrize("size", [1, 2, 18])
def test_a_last_layer_yet_to_be_found_shows_the_prior_that_it_was_given(size: int) -> None:
    precision = torch.linspace(0.5, 2.0, size).double()
    la = Laplace(CLASSIFICATION.model(), "classification", "last_layer", "iterncgp", prior_precision=precision)
    assert torch.equal(la.prior_precision, precision)
    la.prior_mean = 0.3
    assert float(la.prior_mean) == 0.3
    la.fit(CLASSIFICATION.loader())
    close(la.log_marginal_likelihood(), CLASSIFICATION.evidence("last_layer", la.prior_precision_diag, 0.3))
    la = Laplace(CLASSIFICATION.model(), "classification", "last_layer", "iterncgp", prior_precision=torch.ones(7))
    with pytest.raises(ValueError, match="Length of prior precision does not align"):
        la.fit(CLASSIFICATION.loader())


@pytest.mark.parametrize("problem", [REGRESSIONS[1], CLASSIFICATION], ids=["regression", "classification"])
@flavours
@policies
def test_the_evidence_is_maximised_as_the_oracle_is(problem: Problem, flavour: str, policy: str) -> None:
    la = problem.with_all_actions(flavour, policy)
    la.optimize_prior_precision(pred_type="gp", method="marglik", prior_structure="scalar", n_steps=150)
    values = torch.logspace(-2, 3, 51, dtype=torch.float64)
    best = max(float(problem.evidence(flavour, value.expand(la.n_params))) for value in values)
    assert float(problem.evidence(flavour, la.prior_precision.expand(la.n_params))) >= best - 1e-3


@problems
@flavours
def test_the_grid_has_the_base_that_was_asked_for(problem: Problem, flavour: str) -> None:
    la, x, seen = problem.laplace(flavour), problem.data(2)[0], []
    grid: dict[str, Any] = {"log_prior_prec_min": -1, "log_prior_prec_max": 2, "grid_size": 4}

    def loss(*moments: Tensor) -> float:
        seen.append(moments[problem.is_regression])
        return float(len(seen) != 3)  # the third is the best

    la.optimize_prior_precision(
        method="gridsearch", val_loader=problem.loader(2), loss=loss, log_prior_prec_base=math.e, **grid
    )
    assert float(la.prior_precision) == pytest.approx(math.e) and len(seen) == 4
    close(seen[2], la(x)[1] if problem.is_regression else la(x))
    with pytest.raises(ValueError, match="`val_loader` must hold data"):
        la.optimize_prior_precision(method="gridsearch")


@flavours
def test_a_loss_that_is_the_same_for_all_precisions_changes_none(flavour: str) -> None:
    problem = REGRESSIONS[0]
    la, metric = problem.laplace(flavour), torchmetrics.MeanSquaredError()
    with pytest.warns(UserWarning, match="must depend on the prior precision; got the same value"):
        la.optimize_prior_precision(method="gridsearch", val_loader=problem.loader(2), loss=metric, grid_size=3)
    assert la.prior_precision.tolist() == [PRECISION]


@flavours
@pytest.mark.parametrize("method", ["gridsearch", "validation"])
def test_validation_targets_are_read_as_a_fit_reads_them(flavour: str, method: str) -> None:
    def tuned(problem: Problem, targets: Tensor) -> Tensor:
        la, held_out = problem.laplace(flavour), DataLoader(TensorDataset(problem.data(2)[0], targets), batch_size=7)
        la.optimize_prior_precision(method=method, val_loader=held_out, grid_size=9, n_steps=3)
        return la.prior_precision

    labels, values = CLASSIFICATION.data(2)[1], REGRESSIONS[0].data(2)[1]
    expected = tuned(CLASSIFICATION, labels)
    for same in (labels[:, None], labels.double(), labels.to(torch.int32)):
        assert torch.equal(tuned(CLASSIFICATION, same), expected)
    assert torch.equal(tuned(REGRESSIONS[0], values[:, 0]), tuned(REGRESSIONS[0], values))
    for wrong in (labels + 1, torch.full_like(labels, -100), labels + 0.5, nn.functional.one_hot(labels)):
        with pytest.raises(ValueError, match="Softmax"):
            tuned(CLASSIFICATION, wrong)
    for wrong, match in ((values.expand(-1, 3), "as many outputs"), (values * math.nan, "must be finite; got NaN")):
        with pytest.raises(ValueError, match=match):
            tuned(REGRESSIONS[0], wrong)


# Copies and files


@problems
@flavours
@policies
def test_a_saved_posterior_is_plain_and_predicts_the_same(
    problem: Problem, flavour: str, policy: str, tmp_path: Path
) -> None:
    la, x = problem.laplace(flavour, **POLICIES[policy]), problem.data(1)[0]
    la.optimize_prior_precision(n_steps=3)
    torch.save(la.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again = Laplace(problem.model(), problem.likelihood, flavour, "iterncgp")
    again.load_state_dict(state)
    for found, expected in zip(again.predictive_moments(x), la.predictive_moments(x), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    other = Problem("classification" if problem.is_regression else "regression", problem.num_outputs + 2)
    elsewhere = FLAVOURS[1 - FLAVOURS.index(flavour)]
    for stranger in (
        Laplace(problem.model(), other.likelihood, flavour, "iterncgp"),
        Laplace(other.model(), problem.likelihood, flavour, "iterncgp"),
        Laplace(problem.model(), problem.likelihood, elsewhere, "iterncgp"),
    ):
        with pytest.raises(ValueError, match=r"The saved posterior must have the (likelihood|parameters|flavour)"):
            stranger.load_state_dict(state)


@problems
@flavours
@policies
def test_a_copy_predicts_from_its_own_inputs(problem: Problem, flavour: str, policy: str) -> None:
    la, x, others = problem.laplace(flavour, **POLICIES[policy]), problem.data(1)[0], problem.data(2)[0]
    copied, expected = deepcopy(la), la.predictive_moments(x)
    la(others)  # what the original sees last is nothing to the copy
    for found, moments in zip(copied.predictive_moments(x), expected, strict=True):
        assert torch.equal(found, moments)

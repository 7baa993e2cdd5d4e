"""The estimators: scikit-learn's own checks, and what its users do with them."""

import time
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_moons
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process import kernels as peers
from sklearn.metrics import mean_poisson_deviance
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from benchmarks.gp_peers import compare_counts
from ntk_iterncgp import NonConjugateGP, kernels
from ntk_iterncgp.sklearn import GPClassifier, GPPoissonRegressor, GPRegressor, default_kernel


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [GPClassifier(optimize=False), GPRegressor(optimize=False), GPPoissonRegressor(optimize=False)]
)
def test_the_estimators_pass_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([GPClassifier(), GPRegressor(), GPPoissonRegressor()])
def test_the_estimators_pass_the_checks_of_scikit_learn_also_when_they_optimise(estimator: Any, check: Any) -> None:
    check(estimator)


rng = np.random.default_rng(0)
INPUTS = rng.uniform(-2, 2, (60, 2))
WAVE = 100 + 20 * np.sin(2 * INPUTS[:, 0]) + rng.normal(size=60)


def test_labels_are_texts_and_inputs_are_tables() -> None:
    X, y = make_moons(80, noise=0.15, random_state=0)
    table, names = pd.DataFrame(X, columns=["east", "north"]), np.array(["no", "yes"])[y]
    model = GPClassifier(optimize=False).fit(table, names)
    assert list(model.classes_) == ["no", "yes"] and list(model.feature_names_in_) == ["east", "north"]
    assert set(model.predict(table)) == {"no", "yes"} and model.score(table, names) > 0.9
    p = model.predict_proba(table)
    assert p.shape == (80, 2) and np.allclose(p.sum(1), 1) and isinstance(model.gp_, NonConjugateGP)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(table[["north", "east"]])


def test_more_than_two_classes_in_a_pipeline_and_a_grid() -> None:
    X, y = load_iris(return_X_y=True)
    some = slice(None, None, 3)
    pipeline = make_pipeline(StandardScaler(), GPClassifier(optimize=False))
    grid = {"gpclassifier__kernel": [kernels.RBF(0.1), 4.0 * kernels.Matern52(1.5)]}
    search = GridSearchCV(pipeline, grid, scoring="neg_log_loss", cv=3).fit(X[some], y[some])
    assert search.best_params_["gpclassifier__kernel"] is not None
    assert "Matern52" in repr(search.best_estimator_[-1].kernel_)
    assert search.best_estimator_.score(X, y) > 0.93


def test_clones_are_equal_and_unfitted_and_settings_are_kept() -> None:
    model = GPRegressor(kernels.RBF(0.5), noise=0.2, max_products=7, random_state=3)
    copy = clone(model)
    assert copy.get_params()["noise"] == 0.2 and not hasattr(copy, "gp_")
    assert repr(copy.kernel) == repr(model.kernel) and copy.set_params(noise=0.3).noise == 0.3
    copy.fit(INPUTS, WAVE)
    assert copy.noise == 0.3 and not hasattr(model, "gp_")  # what is optimised is in kernel_ and gp_


def test_regression_is_that_of_scikit_learn_at_the_same_hyperparameters() -> None:
    peer = GaussianProcessRegressor(2.0 * peers.RBF(0.8), alpha=0.1, optimizer=None).fit(INPUTS, WAVE)
    ours = GPRegressor(2.0 * kernels.RBF(0.8), noise=0.1, normalize_y=False, optimize=False, max_products=200)
    ours.fit(INPUTS, WAVE).gp_.refine(100)
    new = rng.uniform(-2, 2, (9, 2))
    mean, covariance = peer.predict(new, return_cov=True)
    found, spread = ours.predict(new, return_cov=True)
    assert np.allclose(found, mean, rtol=1e-4)
    assert np.allclose(spread, covariance + 0.1 * np.eye(9), atol=1e-5)  # ours is of observations
    assert np.allclose(ours.predict(new, return_std=True)[1] ** 2, np.diag(spread), atol=1e-9)
    assert ours.predict(new).shape == (9,)


def test_the_scale_of_the_targets_does_not_matter() -> None:
    one, other = (GPRegressor(optimize=False).fit(INPUTS, scale * WAVE) for scale in (1.0, 1e5))
    for found, expected in zip(
        other.predict(INPUTS, return_std=True), one.predict(INPUTS, return_std=True), strict=True
    ):
        assert np.allclose(found, 1e5 * expected, rtol=1e-6)


def test_several_outputs_have_the_shapes_of_scikit_learn() -> None:
    Y = np.stack([WAVE, -0.01 * WAVE, INPUTS[:, 1]], 1)
    model = GPRegressor(optimize=False).fit(INPUTS, Y)
    mean, std = model.predict(INPUTS[:5], return_std=True)
    covariance = model.predict(INPUTS[:5], return_cov=True)[1]
    assert mean.shape == std.shape == (5, 3) and covariance.shape == (5, 5, 3)
    assert np.allclose(np.sqrt(np.diagonal(covariance).T), std) and model.score(INPUTS, Y) > 0.9
    with pytest.raises(ValueError, match="must not both be True"):
        model.predict(INPUTS, return_std=True, return_cov=True)


def test_rates_are_found_whatever_the_exposure() -> None:
    exposure = rng.uniform(0.5, 40, 60)
    rate = np.exp(1 + np.sin(2 * INPUTS[:, 0]))
    counts = rng.poisson(rate * exposure)
    model = GPPoissonRegressor(optimize=False).fit(INPUTS, counts, exposure=exposure)
    found, std = model.predict(INPUTS, return_std=True)
    assert np.abs(found / rate - 1).mean() < 0.15 and (std >= np.sqrt(found)).all()
    assert 0 < GPPoissonRegressor(optimize=False).fit(INPUTS, rng.poisson(rate)).score(INPUTS, rng.poisson(rate)) < 1
    with pytest.raises(ValueError, match="`y` must hold counts of at least 0"):
        GPPoissonRegressor().fit(INPUTS, counts - 1000)
    with pytest.raises(ValueError, match="`exposure` must hold one number for each of the 60 data"):
        GPPoissonRegressor().fit(INPUTS, counts, exposure=[1.0])


@pytest.mark.parametrize("wrong", [-1.0, 0.0, np.nan])
def test_an_exposure_that_is_not_positive_is_refused(wrong: float) -> None:
    counts, exposure = rng.poisson(3.0, 60), np.ones(60)
    model = GPPoissonRegressor(optimize=False).fit(INPUTS, counts)
    exposure[7] = wrong
    for call in (GPPoissonRegressor().fit, model.score, model.partial_fit):
        with pytest.raises(ValueError, match=r"`exposure` must be positive and finite; got (-1|0|nan)\. Try"):
            call(INPUTS, counts, exposure=exposure)


def test_the_score_of_counts_knows_their_exposure() -> None:
    exposure = rng.uniform(0.5, 40, 60)
    rate = np.exp(1 + np.sin(2 * INPUTS[:, 0]))
    counts = rng.poisson(rate * exposure)
    model = GPPoissonRegressor(optimize=False).fit(INPUTS, counts, exposure=exposure)

    def deviance(mean: np.ndarray) -> float:
        return mean_poisson_deviance(counts, mean)

    null = deviance(exposure * counts.sum() / exposure.sum())
    expected = 1 - deviance(exposure * model.predict(INPUTS)) / null
    assert model.score(INPUTS, counts, exposure=exposure) == pytest.approx(expected, abs=1e-12)
    assert expected > 0.8 > model.score(INPUTS, counts)  # raw counts are no rates
    weights = rng.uniform(size=60)
    weighted = model.score(INPUTS, counts, sample_weight=weights, exposure=np.ones(60))
    assert weighted == pytest.approx(model.score(INPUTS, counts, sample_weight=weights))


def test_more_counts_have_their_own_exposure() -> None:
    exposure = rng.uniform(0.5, 40, 60)
    counts = rng.poisson(np.exp(1 + np.sin(2 * INPUTS[:, 0])) * exposure)
    kernel = kernels.RBF(1.0)
    whole = GPPoissonRegressor(kernel, optimize=False).fit(INPUTS, counts, exposure=exposure)
    model = GPPoissonRegressor(kernel, optimize=False).partial_fit(INPUTS[:40], counts[:40], exposure=exposure[:40])
    model.partial_fit(INPUTS[40:], counts[40:], exposure=exposure[40:])
    assert np.allclose(model.predict(INPUTS), whole.predict(INPUTS), rtol=0.02)  # but for the prior mean, of the first
    model.partial_fit(INPUTS[:5], counts[:5])  # of one unit
    assert model.gp_.likelihood.exposure.tolist()[-5:] == [1.0] * 5


def test_settings_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`kernel` must be a kernel such as .*; got 'rbf'"):
        GPClassifier(kernel="rbf").fit(INPUTS, WAVE > 100)
    for wrong in ("yes", 1, None):
        with pytest.raises(TypeError, match=f"`optimize` must be True or False; got {wrong!r}"):
            GPRegressor(optimize=wrong).fit(INPUTS, WAVE)
    GPRegressor(optimize=np.False_).fit(INPUTS, WAVE)


def test_a_grid_search_goes_over_the_settings_of_a_kernel() -> None:
    y = WAVE > 100
    kernel = kernels.RBF(1.0)
    search = GridSearchCV(GPClassifier(kernel=kernel, optimize=False), {"kernel__lengthscale": [1e-3, 0.8, 1e3]}, cv=3)
    search.fit(INPUTS, y)
    assert search.best_params_ == {"kernel__lengthscale": 0.8}
    assert float(search.best_estimator_.kernel_.lengthscale) == 0.8 and float(kernel.lengthscale) == 1.0
    scores = search.cv_results_["mean_test_score"]
    assert scores[1] > max(scores[0], scores[2])
    compound = GPClassifier(2.0 * kernels.RBF(1.0) + kernels.Linear(), optimize=False)
    search = GridSearchCV(compound, {"kernel__0__kernel__lengthscale": [0.5, 5.0], "kernel__1__variance": [0.1]}, cv=3)
    assert repr(search.fit(INPUTS, y).best_estimator_.kernel_).endswith("Linear(variance=0.1)")


def test_a_fit_keeps_its_kernel_when_the_settings_change() -> None:
    model = GPRegressor(kernels.RBF(0.8), optimize=False).fit(INPUTS, WAVE)
    before = model.predict(INPUTS)
    model.set_params(kernel__lengthscale=5.0)
    assert np.array_equal(model.predict(INPUTS), before) and float(model.kernel_.lengthscale) == 0.8
    assert model.get_params()["kernel__lengthscale"] == 5.0
    copied = clone(model)
    copied.set_params(kernel__lengthscale=3.0, kernel__active_dims=[0])
    assert float(model.kernel.lengthscale) == 5.0 and copied.kernel.active_dims == (0,)


def test_draws_have_the_moments_of_the_prediction_and_the_shapes_of_scikit_learn() -> None:
    model = GPRegressor(optimize=False).fit(INPUTS, WAVE)
    mean, covariance = model.predict(INPUTS[:4], return_cov=True)
    draws = model.sample_y(INPUTS[:4], 20_000)
    assert draws.shape == (4, 20_000)
    scale = np.sqrt(np.diagonal(covariance))
    assert (np.abs(draws.mean(1) - mean) < 0.05 * scale).all()
    assert (np.abs(np.cov(draws) - covariance) < 0.06 * np.outer(scale, scale)).all()
    assert np.array_equal(model.sample_y(INPUTS[:4], 3, random_state=1), model.sample_y(INPUTS[:4], 3, random_state=1))
    several = GPRegressor(optimize=False).fit(INPUTS, np.stack([WAVE, -WAVE], 1))
    peer = GaussianProcessRegressor(alpha=0.1, optimizer=None).fit(INPUTS, np.stack([WAVE, -WAVE], 1))
    assert several.sample_y(INPUTS[:4], 3).shape == peer.sample_y(INPUTS[:4], 3).shape == (4, 2, 3)
    assert model.sample_y(INPUTS[:4]).shape == (4, 1)


@pytest.mark.slow
def test_a_search_takes_about_as_long_as_that_of_scikit_learn() -> None:
    """benchmarks/gp_peers.py measures it; this would notice another order of magnitude, also on a busy machine."""
    X = np.random.default_rng(1).uniform(-2, 2, (225, 2))
    y = np.sin(2 * X[:, 0]) + 0.3 * np.random.default_rng(2).normal(size=225)
    kernel = peers.ConstantKernel(1.0) * peers.Matern([1.0, 1.0], nu=2.5) + peers.WhiteKernel(0.1)

    def seconds(fit: Any) -> float:
        started = time.perf_counter()
        fit(X, y)
        return time.perf_counter() - started

    GPRegressor().fit(X, y)  # whose first call imports and compiles
    ratios = [seconds(GPRegressor().fit) / seconds(GaussianProcessRegressor(kernel).fit) for _ in range(4)]
    assert min(ratios) < 10


def test_counts_that_are_all_zero_have_a_small_rate() -> None:
    model = GPPoissonRegressor(optimize=False).fit(INPUTS, np.zeros(60))
    assert (model.predict(INPUTS) < 0.1).all()


def test_hyperparameters_are_chosen_by_default_and_help() -> None:
    chosen, started = (GPRegressor(optimize=optimize).fit(INPUTS, WAVE) for optimize in (True, False))
    assert chosen.log_marginal_likelihood() > started.log_marginal_likelihood()
    assert chosen.gp_.likelihood.variance < 0.05  # of 20² / 2
    lengthscales = chosen.kernel_.hyperparameters()["lengthscale"]
    assert lengthscales[1] > 3 * lengthscales[0]  # the second feature means nothing


def test_the_default_kernel_knows_the_scale_of_each_feature() -> None:
    X = torch.tensor(rng.normal(size=(100, 2)) * [1.0, 1000.0])
    first, second = default_kernel(X, 1.0).lengthscale.tolist()
    assert second == pytest.approx(1000 * first, rel=0.2)
    assert default_kernel(X[:10], 1.0).lengthscale.ndim == 0
    assert default_kernel(torch.ones(50, 2), 1.0).lengthscale.tolist() == [pytest.approx(2**0.5)] * 2


def test_float32_stays_float32_inside_and_seeds_decide() -> None:
    model = GPRegressor(optimize=False, random_state=np.random.RandomState(3)).fit(INPUTS.astype(np.float32), WAVE)
    assert model.gp_.latent(torch.tensor(INPUTS, dtype=torch.float32))[0].dtype == torch.float32
    assert model.predict(INPUTS).dtype == np.float64
    assert cross_val_score(GPRegressor(optimize=False), INPUTS, WAVE, cv=3).mean() > 0.5


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="needs labels of at least two classes; got one class, 'a'"):
        GPClassifier().fit(INPUTS, ["a"] * 60)


def test_partial_fit_is_a_fit_to_all_data_at_the_hyperparameters_of_the_first() -> None:
    first, rest = slice(0, 40), slice(40, 60)
    counts = rng.poisson(np.exp(INPUTS[:, 0] / 2))
    for model, y in (
        (GPRegressor(normalize_y=False), WAVE - 100),
        (GPClassifier(), np.where(WAVE > 100, "up", "down")),
        (GPPoissonRegressor(), counts),
    ):
        model.partial_fit(INPUTS[first], y[first]).partial_fit(INPUTS[rest], y[rest])
        gp = NonConjugateGP(model.kernel_, model.gp_.likelihood, mean=model.gp_.mean)
        targets = y == "up" if y.dtype.kind == "U" else y
        gp.fit(torch.tensor(INPUTS), torch.tensor(targets).double())
        for found, expected in zip(
            model.gp_.latent(torch.tensor(INPUTS)), gp.latent(torch.tensor(INPUTS)), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_partial_fit_of_a_classifier_asks_for_labels_that_may_come() -> None:
    model = GPClassifier(optimize=False).partial_fit(INPUTS, WAVE > 100, classes=[False, True])
    with pytest.raises(ValueError, match="Try all `classes` in the first call"):
        model.partial_fit(INPUTS, np.full(60, 2))
    model = GPClassifier(optimize=False).partial_fit(INPUTS, np.zeros(60), classes=[0, 1, 2])
    assert model.partial_fit(INPUTS, np.full(60, 2)).predict_proba(INPUTS).shape == (60, 3)


def test_counts_are_predicted_no_worse_than_by_a_log_linear_model_and_better_where_it_is_wrong() -> None:
    rows = {name: compare_counts(name, 150, 0) for name in ("log-linear", "interaction", "saturation", "ring", "waves")}
    gains = {name: glm.nll - ours.nll for name, (ours, glm, _) in rows.items()}
    assert gains.pop("log-linear") >= -0.01
    assert min(gains.values()) >= 0.1, gains

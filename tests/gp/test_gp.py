"""The front door: what it refuses, with which sentence and before any work; and what it promises once fitted."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ntk_iterncgp import FitReport, NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.kernels import RBF, Matern32, Matern52
from ntk_iterncgp.likelihoods import Bernoulli, Gaussian, Poisson, Softmax
from ntk_iterncgp.posterior.function_space import Posterior
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver import State
from tests import oracles

KERNEL = Matern32(lengthscale=0.5)
N, C, b = 60, 3, 7
POLICIES = ["curvature_residual", "residual", "unit", "random_subspace"]
QUESTIONS: dict[str, Callable[[NonConjugateGP, Any], Any]] = {
    "latent": lambda gp, x: gp.latent(x),
    "latent jointly": lambda gp, x: gp.latent(x, joint=True),
    "predict": lambda gp, x: gp.predict(x),
    "sample": lambda gp, x: gp.sample(x, 2),
    "credible_interval": lambda gp, x: gp.credible_interval(x),
}


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, x = uniform(N, 2), uniform(b, 2, seed=1)
y = torch.randint(C, (N,), generator=torch.Generator().manual_seed(2))
counts = torch.poisson((2 * X[:, 0]).exp(), generator=torch.Generator().manual_seed(3))
wave = torch.sin(6 * X[:, 0]) + 0.1 * uniform(N, seed=4)


def classifier(**settings: Any) -> NonConjugateGP:
    return NonConjugateGP(KERNEL, Softmax(C), **{"policy": "curvature_residual"} | settings)


def counter(**settings: Any) -> NonConjugateGP:
    return NonConjugateGP(KERNEL, Poisson(), **{"policy": "curvature_residual"} | settings)


def with_entry(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone().double()
    changed.view(-1)[5] = value
    return changed


def close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Problems this small take longest to divide, and the order of sums must be the same each time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with the name of every question that costs something, as it is asked of a kernel prior."""
    asked: list[str] = []
    for name in ("image", "at"):
        original = getattr(GramPrior, name)

        def counted(self: GramPrior, *args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            asked.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(GramPrior, name, counted)
    return asked


# What it refuses when it is made


BAD_SETTINGS: dict[str, tuple[Callable[[], object], Any, str]] = {
    "two kernels of three": (
        lambda: NonConjugateGP([KERNEL] * 2, Softmax(3)),
        ValueError,
        r"must be one kernel, or a list of 3 for the output\(s\) of Softmax\(3\); got a list of 2\. Try a single",
    ),
    "no kernels": (
        lambda: NonConjugateGP([], Softmax(3)),
        ValueError,
        r"`kernel` must be one kernel, or a list of 3 .*; got a list of 0\. Try",
    ),
    "kernels for one output": (
        lambda: NonConjugateGP([KERNEL] * 2, Poisson()),
        ValueError,
        r"a list of 1 for the output\(s\) of Poisson\(.*\); got a list of 2\.",
    ),
    "name of a kernel": (
        lambda: NonConjugateGP("RBF", Softmax(3)),
        TypeError,
        r"must be a kernel such as Matern32\(",
    ),
    "class of a kernel": (
        lambda: NonConjugateGP(RBF, Softmax(3)),
        TypeError,
        r"`kernel` must be a kernel such as .* got <class",
    ),
    "number for a kernel": (
        lambda: NonConjugateGP([KERNEL, 1.0, KERNEL], Softmax(3)),
        TypeError,
        r"`kernel` must be a kernel such as .*, or a list of them; got 1\.0",
    ),
    "class of a likelihood": (
        lambda: NonConjugateGP(KERNEL, Softmax),
        TypeError,
        r"must be an instance such as Softmax\(10\)",
    ),
    "name of a likelihood": (lambda: NonConjugateGP(KERNEL, "softmax"), TypeError, r"an instance .* got 'softmax'"),
    "lengthscale 0": (lambda: Matern32(lengthscale=0.0), ValueError, r"lengthscale must be positive .*; got 0\.0"),
    "lengthscale -2": (lambda: RBF(lengthscale=[0.5, -2.0]), ValueError, r"lengthscale must be .*; got -2\.0"),
    "outputscale -1": (lambda: RBF(0.5, outputscale=-1.0), ValueError, r"outputscale must be positive .*; got -1\.0"),
    "one class": (lambda: Softmax(1), ValueError, r"at least two; got 1\. Try Bernoulli"),
    "noise 0": (lambda: Gaussian(0.0), ValueError, r"positive, finite variance; got 0\.0"),
    "noise -0.1": (lambda: Gaussian(-0.1), ValueError, r"positive, finite variance; got -0\.1"),
    "two means of three": (
        lambda: classifier(mean=[0.0, 1.0]),
        ValueError,
        r"each of the 3 output\(s\); got the shape \(2,\)",
    ),
    "mean NaN": (lambda: classifier(mean=math.nan), ValueError, r"`mean` must be finite; got NaN"),
    "policy": (
        lambda: classifier(policy="cg"),
        ValueError,
        r"`policy` must be one of 'unit', .* a callable .*; got 'cg'",
    ),
    "policy None": (
        lambda: classifier(policy=None),
        ValueError,
        r"`policy` must be one of .* or a callable .*; got None",
    ),
    "compression": (lambda: classifier(compression="svd"), ValueError, r"must be 'mean\+trace' or 'eigen'; got 'svd'"),
    "actions": (
        lambda: classifier(actions="split"),
        ValueError,
        r"`actions` must be one of 'auto', 'joint', 'kronecker'; got 'split'",
    ),
    "max_products 0": (
        lambda: classifier(max_products=0),
        ValueError,
        r"`max_products` must be .* at least 1; got 0",
    ),
    "max_products 2.5": (
        lambda: classifier(max_products=2.5),
        ValueError,
        r"max_products` must be a whole number .*; got 2\.5",
    ),
    "products_per_step": (lambda: classifier(products_per_step=0), ValueError, r"`products_per_step` .* 1; got 0"),
    "max_newton_steps": (
        lambda: classifier(max_newton_steps=-1),
        ValueError,
        r"`max_newton_steps` must be .*; got -1",
    ),
    "newton_tol -0.1": (lambda: classifier(newton_tol=-0.1), ValueError, r"`newton_tol` .* at least 0; got -0\.1"),
    "newton_tol NaN": (lambda: classifier(newton_tol=math.nan), ValueError, r"`newton_tol` must be .*; got nan"),
    "max_rank": (lambda: classifier(max_rank=0), ValueError, r"`max_rank` must be None or a whole number .*; got 0"),
    "chunk_bytes 0": (lambda: classifier(chunk_bytes=0), ValueError, r"`chunk_bytes`.*; got 0"),
    "chunk_bytes 1e6": (lambda: classifier(chunk_bytes=1e6), (TypeError, ValueError), r"chunk_bytes.* got 1000000"),
    "seed": (lambda: classifier(seed=0.5), (TypeError, ValueError), r"`seed`.*; got 0\.5"),
    "Kronecker with several kernels": (
        lambda: NonConjugateGP([KERNEL] * 3, Softmax(3), actions="kronecker"),
        ValueError,
        r"`kernel` must be one for all outputs where actions='kronecker'; got 3\. Try actions='joint'",
    ),
    "Kronecker with unit vectors": (
        lambda: classifier(actions="kronecker", policy="unit"),
        ValueError,
        r"`policy` must spread over the data where actions='kronecker'; got 'unit'",
    ),
    "Kronecker with a small rank": (
        lambda: classifier(actions="kronecker", max_rank=3),
        ValueError,
        r"`max_rank` must be at least 4 for Kronecker actions of Softmax\(3\), .*; got 3\. Try a larger",
    ),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_unfit_settings_get_a_sentence_when_they_are_given(case: str) -> None:
    make, error, sentence = BAD_SETTINGS[case]
    with pytest.raises(error, match=sentence):
        make()


# What it refuses to be fitted to

BAD_DATA: dict[str, tuple[Callable[..., NonConjugateGP], Any, Any, type[Exception], str]] = {
    "fewer targets": (classifier, X, y[:-1], ValueError, r"one target for each of the 60 rows of X; got 59"),
    "more targets": (classifier, X[:50], y, ValueError, r"one target for each of the 50 rows of X; got 60"),
    "one target": (classifier, X, torch.tensor(1), ValueError, r"each of the 60 rows of X; got a single number"),
    "NaN in X": (
        classifier,
        with_entry(X, math.nan),
        y,
        ValueError,
        r"`X` must be finite; got NaN or infinity in 1 of",
    ),
    "infinity in X": (
        classifier,
        with_entry(X, math.inf),
        y,
        ValueError,
        r"got NaN or infinity in 1 of its rows\. Try to remove",
    ),
    "NaN in y": (counter, X, with_entry(counts, math.nan), ValueError, r"`y` must be finite; got NaN"),
    "NaN in labels": (classifier, X, with_entry(y, math.nan), ValueError, r"`y` must be finite; got NaN"),
    "infinity in y": (counter, X, with_entry(counts, math.inf), ValueError, r"`y` must be finite; .* Try to remove"),
    "complex y": (counter, X, counts + 0j, ValueError, r"`y` must hold real numbers; got torch\.complex128"),
    "label too large": (classifier, X, with_entry(y, 3), ValueError, r"from 0 to 2 .*; got y\[5\] = 3"),
    "label negative": (classifier, X, with_entry(y, -1), ValueError, r"from 0 to 2 .*; got y\[5\] = -1"),
    "label fractional": (classifier, X, with_entry(y, 0.5), ValueError, r"whole numbers .*; got y\[5\] = 0\.5"),
    "count negative": (counter, X, with_entry(counts, -2), ValueError, r"must be counts .*; got y\[5\] = -2"),
    "count fractional": (counter, X, with_entry(counts, 1.5), ValueError, r"no fractional numbers; got y\[5\] = 1\.5"),
    "labels as vectors": (classifier, X, torch.zeros(N, 3), ValueError, "`y` must hold probabilities that sum to one"),
    "no data": (classifier, X[:0], y[:0], ValueError, r"`X` must hold at least one input .*; got \(0, 2\)"),
    "no coordinates": (classifier, X[:, :0], y, ValueError, r"at least one dimension; got \(60, 0\)"),
    "X a vector": (
        classifier,
        X[:, 0],
        y,
        ValueError,
        r"`X` must have the shape \(N, d\), .* got \(60,\)\. .* X\[:, None\]",
    ),
    "X images": (classifier, X[:, None], y, ValueError, r"`X` must have the shape \(N, d\), .*; got \(60, 1, 2\)"),
    "X whole numbers": (classifier, X.long(), y, TypeError, r"`X` must be float32 or float64; got torch\.int64"),
    "X half precision": (classifier, X.half(), y, TypeError, r"`X` must be float32 or float64; got torch\.float16"),
    "other lengthscales": (
        lambda: NonConjugateGP(RBF(lengthscale=[0.5, 0.5, 0.5]), Softmax(3), policy="curvature_residual"),
        X,
        y,
        ValueError,
        r"`X` must have 3 coordinates, one for each lengthscale; got 2\. Try one lengthscale per coordinate",
    ),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_unfit_data_get_a_sentence_before_any_work(case: str, work: list[str]) -> None:
    make, inputs, targets, error, sentence = BAD_DATA[case]
    gp = make()
    with pytest.raises(error, match=sentence):
        gp.fit(inputs, targets)
    assert work == []
    with pytest.raises(RuntimeError, match="must be fitted first"):
        gp.predict(x)


@pytest.mark.parametrize("case", [case for case in BAD_DATA if case != "other lengthscales"])
def test_a_fitted_gp_that_is_given_unfit_data_predicts_as_before(case: str, work: list[str]) -> None:
    make, inputs, targets, error, _ = BAD_DATA[case]
    gp = make(max_products=4).fit(X, y)
    report, prediction = gp.report_, gp.predict(x)
    work.clear()
    with pytest.raises(error):
        gp.fit(inputs, targets)
    assert work == []
    assert gp.report_ is report
    assert torch.equal(gp.predict(x), prediction)


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (
            lambda state: torch.ones(5, 1, dtype=torch.float64),
            r"`policy` must return .* of shape \(180, k\), .*; got shape \(5, 1\)",
        ),
        (
            lambda state: torch.ones(N * C, dtype=torch.float64),
            r"`policy` must return .* of shape \(180, k\), .*; got shape \(180,\)",
        ),
        (
            lambda state: torch.full((N * C, 1), math.nan, dtype=torch.float64),
            r"`policy` must return finite actions; got NaN",
        ),
    ],
    ids=["wrong rows", "no columns", "NaN"],
)
def test_a_policy_that_returns_no_actions_gets_a_sentence(policy: Callable[[State], Tensor], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        classifier(policy=policy, actions="joint").fit(X, y)


# What it refuses to answer


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_before_fitting_get_a_sentence(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"must be fitted first; got one that has not been\. Try fit\(X, y\)"):
        QUESTIONS[name](counter(), x)


@pytest.mark.parametrize(
    "ask",
    [
        lambda gp: gp.refine(5),
        lambda gp: gp.report_,
        lambda gp: gp.posterior_,
        lambda gp: gp.log_evidence(),
        lambda gp: gp.elbo(),
    ],
    ids=["refine", "report_", "posterior_", "log_evidence", "elbo"],
)
def test_what_comes_after_fitting_gets_a_sentence_before_it(ask: Callable[[NonConjugateGP], object]) -> None:
    with pytest.raises(RuntimeError, match=r"must be fitted first; got one that has not been\. Try fit\(X, y\)"):
        ask(classifier())


@pytest.mark.parametrize(
    ("inputs", "error", "sentence"),
    [
        (uniform(b, 3), ValueError, r"`x` must have 2 columns, as the training inputs; got 3"),
        (uniform(0, 3), ValueError, r"`x` must have 2 columns, as the training inputs; got 3"),
        (x[0], ValueError, r"`x` must have the shape \(N, d\), one row for each input; got \(2,\)"),
        (x.float(), TypeError, r"`x` must be torch\.float64 on cpu, .*; got torch\.float32 on cpu\. Try to convert"),
        (x.long(), TypeError, r"`x` must be float32 or float64; got torch\.int64"),
        (with_entry(x, math.nan), ValueError, r"`x` must be finite; got NaN or infinity in 1 of its rows"),
    ],
    ids=["more dimensions", "more dimensions, no inputs", "one input", "float32", "whole numbers", "NaN"],
)
@pytest.mark.parametrize("name", QUESTIONS)
def test_unfit_new_inputs_get_a_sentence_before_any_work(
    name: str, inputs: Tensor, error: type[Exception], sentence: str, work: list[str]
) -> None:
    gp = counter(max_products=2).fit(X, counts)
    work.clear()
    with pytest.raises(error, match=sentence):
        QUESTIONS[name](gp, inputs)
    assert work == []


@pytest.mark.parametrize(
    ("make", "ask", "sentence"),
    [
        (counter, lambda gp: gp.predict(x, link="logit"), r"`link` must be one of 'probit', .*; got 'logit'"),
        (counter, lambda gp: gp.predict(x, link="mc", n_samples=0), r"samples` must be .*; got 0"),
        (counter, lambda gp: gp.sample(x, -1), r"samples` must be .*; got -1"),
        (counter, lambda gp: gp.credible_interval(x, level=1.0), r"`level` must be between 0 and 1; got 1\.0"),
        (counter, lambda gp: gp.credible_interval(x, level=0.0), r"`level` must be between 0 and 1; got 0\.0"),
        (
            counter,
            lambda gp: gp.credible_interval(x, level=95),
            r"`level` must be .*; got 95\. Try 0\.95",
        ),
        (classifier, lambda gp: gp.credible_interval(x), r"Softmax\(3\), whose probabilities .* Try .* sample\("),
        (counter, lambda gp: gp.refine(0), r"`max_products` must be a whole number of at least 1; got 0"),
        (counter, lambda gp: gp.refine(max_products=-5), r"`max_products` must be .*; got -5"),
    ],
    ids=["link", "no samples", "draws", "level 1", "level 0", "level 95", "softmax interval", "refine 0", "refine -5"],
)
def test_unfit_questions_get_a_sentence_before_any_work(
    make: Callable[..., NonConjugateGP], ask: Callable[[NonConjugateGP], object], sentence: str, work: list[str]
) -> None:
    gp = make(max_products=2).fit(X, y)
    report = gp.report_
    work.clear()
    with pytest.raises(ValueError, match=sentence):
        ask(gp)
    assert work == []
    assert gp.report_ is report


# Fitting


def test_fit_and_refine_return_the_gp_itself() -> None:
    gp = classifier(max_products=3)
    assert gp.fit(X, y) is gp
    assert gp.refine(2) is gp


@pytest.mark.parametrize("name", oracles.LIKELIHOODS)
def test_a_generous_fit_with_a_kernel_per_output_equals_the_dense_posterior(name: str) -> None:
    likelihood = {"gaussian": Gaussian(0.3, 2), "bernoulli": Bernoulli(), "poisson": Poisson(), "softmax": Softmax(3)}[
        name
    ]
    outputs, num_data = likelihood.num_outputs, 12
    parts = [Matern52(0.3 + 0.2 * c, 1.0 + c) for c in range(outputs)]
    constants = [0.2 * (c + 1) for c in range(outputs)]
    inputs = X[:num_data]
    targets = {"gaussian": wave.reshape(-1, 2)[:num_data], "poisson": counts, "softmax": y, "bernoulli": y % 2}[name]
    targets = targets[:num_data]
    gp = NonConjugateGP(
        parts,
        likelihood,
        mean=constants,
        max_products=1000,
        newton_tol=1e-9,
        max_newton_steps=100,
        policy="curvature_residual",
    )
    mean, covariance = gp.fit(inputs, targets).refine(1000).latent(x, joint=True)

    K, Kx, Kxx = (
        oracles.block_kernel([k(left, right) for k in parts]) for left, right in [(inputs, inputs), (x, inputs), (x, x)]
    )
    constant = torch.tensor(constants, dtype=torch.float64)
    expected_mean, expected_covariance = oracles.posterior(
        name, K, Kx, Kxx, constant.repeat(num_data), constant.repeat(b), targets, 0.3
    )
    close(mean.flatten(), expected_mean, atol=1e-7)
    close(covariance, expected_covariance, atol=1e-7)


def test_a_list_of_equal_kernels_is_one_kernel_for_all() -> None:
    settings = {"actions": "joint", "max_products": 6}
    shared = NonConjugateGP(KERNEL, Softmax(3), **{"policy": "curvature_residual"} | settings).fit(X, y)
    apart = NonConjugateGP(
        [KERNEL, Matern32(0.5), KERNEL], Softmax(3), **{"policy": "curvature_residual"} | settings
    ).fit(X, y)
    close(apart.predict(x), shared.predict(x), atol=1e-8)


def test_numpy_arrays_and_lists_are_data_too() -> None:
    expected = classifier().fit(X, y).predict(x)
    from_numpy = classifier().fit(X.numpy(), y.numpy()).predict(x.numpy())
    assert isinstance(from_numpy, Tensor) and torch.equal(from_numpy, expected)
    assert torch.equal(classifier().fit(X, y.tolist()).predict(x), expected)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    gp = classifier(max_products=np.int64(3), products_per_step=np.int32(2), max_rank=np.int64(50)).fit(X, y)
    assert gp.refine(np.int64(2)).report_.num_products == 5


@pytest.mark.parametrize(
    ("likelihood", "targets", "shape"),
    [
        (Gaussian(0.1), wave, (b, 1)),
        (Gaussian(0.1, 2), torch.stack([wave, -wave], 1), (b, 2)),
        (Bernoulli(), y % 2, (b, 1)),
        (Poisson(), counts, (b, 1)),
        (Softmax(3), y, (b, 3)),
    ],
    ids=repr,
)
def test_answers_have_one_row_per_input_and_one_column_per_output(
    likelihood: likelihoods.Likelihood, targets: Tensor, shape: tuple[int, int]
) -> None:
    gp = NonConjugateGP(KERNEL, likelihood, max_products=5, policy="curvature_residual").fit(X, targets)
    mean, covariance = gp.latent(x)
    assert mean.shape == shape and covariance.shape == (*shape, shape[1])
    assert gp.sample(x, 4).shape == (4, *shape)
    for link in ("probit", "quadrature", "mc"):
        assert gp.predict(x, link=link).shape == shape
    if shape[1] == 1:
        lower, upper = gp.credible_interval(x, level=0.9)
        assert lower.shape == upper.shape == shape and (lower < upper).all()


def test_the_prior_mean_is_what_is_predicted_far_from_the_data() -> None:
    gp = NonConjugateGP(KERNEL, Softmax(3), mean=[1.0, -2.0, 0.5], policy="curvature_residual").fit(X, y)
    mean, covariance = gp.latent(torch.full((1, 2), 1e3, dtype=torch.float64))
    close(mean, torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64))
    close(covariance[0], torch.eye(3, dtype=torch.float64))
    assert float(counter(mean=3.0).fit(X, counts).latent(torch.full((1, 2), 1e3).double())[0]) == pytest.approx(3.0)


def test_a_prior_mean_in_regression_is_a_shift_of_the_targets() -> None:
    shifted = NonConjugateGP(KERNEL, Gaussian(0.1), mean=5.0, policy="curvature_residual").fit(X, wave + 5.0)
    plain = NonConjugateGP(KERNEL, Gaussian(0.1), policy="curvature_residual").fit(X, wave)
    close(shifted.predict(x), plain.predict(x) + 5.0, atol=1e-10)


def test_a_given_dtype_is_the_dtype_of_everything() -> None:
    gp = classifier(dtype=torch.float32).fit(X, y)
    for inputs in (x, x.float()):
        mean, covariance = gp.latent(inputs)
        for answer in (mean, covariance, gp.predict(inputs), gp.predict(inputs, link="mc"), gp.sample(inputs, 2)):
            assert answer.dtype == torch.float32
    whole = torch.randint(5, (N, 2), generator=torch.Generator().manual_seed(1))
    assert classifier(dtype=torch.float64).fit(whole, y).predict(whole).dtype == torch.float64


@pytest.mark.parametrize("actions", ["joint", "kronecker"])
def test_float32_predicts_what_float64_does(actions: str) -> None:
    single = classifier(actions=actions).fit(X.float(), y)
    double = classifier(actions=actions).fit(X, y)
    assert single.predict(x.float()).dtype == torch.float32
    close(single.predict(x.float()).double(), double.predict(x), atol=1e-4)
    close(single.latent(x.float())[1].double(), double.latent(x)[1], atol=1e-3)


def test_kronecker_actions_get_more_from_a_product_and_are_the_default_for_a_shared_kernel() -> None:
    joint, auto = (classifier(actions=actions, max_products=4).fit(X, y) for actions in ("joint", "auto"))
    assert joint.report_.rank <= joint.report_.num_products
    assert auto.report_.rank > 2 * auto.report_.num_products
    assert auto.report_.information_captured > joint.report_.information_captured
    for plain in (
        NonConjugateGP([KERNEL] * 3, Softmax(3), max_products=4, policy="curvature_residual"),
        classifier(policy="unit", max_products=4),
        classifier(max_rank=5, max_products=4),
        NonConjugateGP(KERNEL, Softmax(12), max_products=4, policy="curvature_residual"),
    ):
        report = plain.fit(X, y).report_
        assert report.rank <= report.num_products


def test_changing_the_data_in_place_after_fitting_changes_no_answer() -> None:
    inputs, targets = X.clone(), counts.clone()
    gp = counter(max_products=5).fit(inputs, targets)
    undisturbed = counter(max_products=5).fit(X, counts)
    inputs.zero_()
    targets.zero_()
    assert torch.equal(gp.predict(x), undisturbed.predict(x))
    assert torch.equal(gp.refine(5).predict(x), undisturbed.refine(5).predict(x))


def test_kernels_that_require_gradients_are_fitted_without_a_graph() -> None:
    lengthscale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    gp = NonConjugateGP(Matern32(lengthscale), Softmax(3), max_products=4, policy="curvature_residual").fit(X, y)
    assert not gp.posterior_.state.buffer.images.factor.storage.requires_grad
    close(gp.predict(x).detach(), classifier(max_products=4).fit(X, y).predict(x))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_bits(policy: str) -> None:
    first = classifier(policy=policy, max_products=12).fit(X, y).refine(4)
    torch.manual_seed(12345)
    expected = torch.rand(1)
    torch.manual_seed(12345)
    second = classifier(policy=policy, max_products=12).fit(X, y).fit(X, y).refine(4)  # the first fit leaves no trace
    assert torch.equal(torch.rand(1), expected)  # and the global generator is left alone
    for mine, other in zip(first.latent(x), second.latent(x), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(first.predict(x, link="mc"), second.predict(x, link="mc"))


def test_another_seed_gives_other_random_probes() -> None:
    one, other = (classifier(policy="random_subspace", seed=seed, max_products=4).fit(X, y) for seed in (0, 1))
    assert not torch.equal(one.latent(x)[1], other.latent(x)[1])


# The report


@pytest.mark.parametrize("policy", POLICIES)
def test_the_report_says_what_was_done_and_the_history_how(policy: str) -> None:
    gp = classifier(policy=policy, max_products=20).fit(X, y)
    report = gp.report_
    assert isinstance(report, FitReport)
    assert report.status in ("converged", "budget", "newton_steps", "exhausted")
    assert report.num_products == gp.posterior_.prior.num_products <= 20
    assert report.rank == gp.posterior_.state.buffer.size
    assert 0 < report.information_captured <= 1
    for name in ("num_products", "newton_step", "seconds"):
        values = [getattr(record, name) for record in report.history]
        assert values == sorted(values)
    objectives = [record.objective for record in report.history]
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(objectives))
    last = report.history[-1]
    assert (last.newton_step, last.rank) == (report.num_newton_steps, report.rank)
    assert last.num_products == report.num_products
    assert 0 < last.seconds <= report.seconds
    assert last.information_captured <= report.information_captured  # read once more, and closer, at the end


def test_the_report_reads_as_a_sentence_with_advice() -> None:
    report = classifier(max_products=3, newton_tol=0.0, max_newton_steps=2).fit(X, y).report_
    assert report.status == "budget"
    assert "refine(max_products=…) continues from here" in report.advice
    assert str(report).startswith("budget: 3 products, 2 Newton steps, rank ")
    assert str(report).endswith(report.advice)
    assert "% of the information captured" in str(report)


def test_the_report_says_how_products_were_computed_and_why() -> None:
    gp = classifier(max_products=2, newton_tol=0.0).fit(X, y)
    chosen = "plain (3,600 pairs are too few to be worth compiling)"
    assert gp.report_.products_by == chosen and f", products by {chosen}. " in str(gp.report_)
    assert gp.refine(2).report_.products_by == chosen
    forced = NonConjugateGP(
        [KERNEL, RBF(0.3), KERNEL], Softmax(C), max_products=2, product_method="gemm", policy="curvature_residual"
    )
    assert forced.fit(X, y).report_.products_by == "gemm (as asked)"  # once for all kernels


@pytest.mark.parametrize(
    ("settings", "status", "advice"),
    [
        ({}, "converged", "contracts the variance further"),
        ({"max_products": 2, "newton_tol": 0.0}, "budget", "continues from here"),
        ({"max_newton_steps": 1, "newton_tol": 0.0}, "newton_steps", "max_newton_steps was reached"),
    ],
)
def test_each_way_to_end_has_its_own_advice(settings: dict[str, Any], status: str, advice: str) -> None:
    report = classifier(**settings).fit(X, y).report_
    assert report.status == status and advice in report.advice


def test_a_policy_that_repeats_itself_is_exhausted_and_its_repetition_costs_nothing() -> None:
    ones = torch.ones(N, 1, dtype=torch.float64)
    report = NonConjugateGP(KERNEL, Gaussian(0.1), policy=lambda state: ones).fit(X, wave).report_
    assert (report.status, report.num_products, report.rank) == ("exhausted", 1, 1)
    assert "no new action to offer" in report.advice


def test_the_gp_shows_what_it_is_and_how_its_fit_ended() -> None:
    gp = classifier(max_products=2)
    assert repr(gp) == "NonConjugateGP(Matern32(lengthscale=0.5, outputscale=1), Softmax(3), not fitted)"
    assert str(gp.fit(X, y).report_) in repr(gp)


@pytest.mark.parametrize("actions", ["joint", "kronecker"])
@pytest.mark.parametrize("max_products", [1, 3, 7])
def test_the_budget_is_never_exceeded(max_products: int, actions: str) -> None:
    gp = classifier(max_products=max_products, newton_tol=0.0, actions=actions).fit(X, y)
    assert gp.report_.num_products == gp.posterior_.prior.num_products == max_products


def test_the_progress_bar_shows_products_information_and_residual(capsys: pytest.CaptureFixture[str]) -> None:
    report = classifier(max_products=8, newton_tol=0.0).fit(X, y, progress_bar=True).report_
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.strip().splitlines()[-1].split("\r")[-1]
    assert "8/8" in last and "product" in last
    record = report.history[-1]
    assert f"information ≥ {100 * record.information_captured:.1f} %" in last
    assert f"residual {record.relative_residual:.1e}" in last


def test_without_a_progress_bar_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    classifier(max_products=3).fit(X, y)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_the_callback_sees_every_state_of_the_history() -> None:
    seen: list[State] = []
    gp = classifier(max_products=8).fit(X, y, callback=seen.append)
    assert all(isinstance(state, State) for state in seen)
    history = gp.report_.history
    assert [s.num_products for s in seen] == [record.num_products for record in history]
    assert [s.buffer.size for s in seen] == [record.rank for record in history]
    assert [s.objective for s in seen] == [record.objective for record in history]
    gp.refine(3, callback=seen.append)
    assert len(seen) == len(gp.report_.history)


# Going on


@pytest.mark.parametrize("budget", [1, 4, 5])
@pytest.mark.parametrize("actions", ["joint", "kronecker"])
@pytest.mark.parametrize("policy", ["curvature_residual", "residual", "random_subspace"])
def test_refining_spends_exactly_its_budget_and_says_so(policy: str, actions: str, budget: int) -> None:
    gp = classifier(policy=policy, actions=actions, max_products=6).fit(X, y)
    before = gp.posterior_.prior.num_products
    assert gp.report_.num_products == before
    gp.refine(budget)
    assert gp.report_.num_products == gp.posterior_.prior.num_products == before + budget


@pytest.mark.parametrize("actions", ["joint", "kronecker"])
def test_refining_a_converged_fit_never_raises_the_variance(actions: str) -> None:
    gp = classifier(actions=actions, newton_tol=1e-7, max_newton_steps=50).fit(X, y)
    before = gp.latent(x)[1].diagonal(dim1=1, dim2=2)
    after = gp.refine(6).latent(x)[1].diagonal(dim1=1, dim2=2)
    assert (after <= before + 1e-6).all()
    assert after.sum() < before.sum() - (1e-3 if actions == "joint" else 0.0)


def test_refining_a_regression_never_raises_the_variance() -> None:
    gp = NonConjugateGP(KERNEL, Gaussian(0.1), max_products=5, policy="curvature_residual").fit(X, wave)
    for _ in range(4):
        before = gp.latent(x)[1]
        after = gp.refine(5).latent(x)[1]
        assert (after <= before + 1e-12).all() and after.sum() < before.sum()


def test_refining_goes_on_with_the_history_and_the_clock() -> None:
    gp = classifier(max_products=6).fit(X, y)
    fitted = gp.report_
    kept = list(fitted.history)
    gp.refine(4)
    history = gp.report_.history
    assert history[: len(kept)] == kept and len(history) > len(kept)
    assert fitted.history == kept  # the earlier report stays as it was
    assert gp.report_.seconds > fitted.seconds
    assert history[len(kept)].seconds >= kept[-1].seconds
    products = [record.num_products for record in history]
    assert products == sorted(products)


def test_refining_leads_to_the_same_posterior_as_a_larger_budget() -> None:
    regression = {"policy": "curvature_residual", "max_products": 4}
    in_parts = (
        NonConjugateGP(KERNEL, Gaussian(0.1), **{"policy": "curvature_residual"} | regression).fit(X, wave).refine(4)
    )
    at_once = NonConjugateGP(KERNEL, Gaussian(0.1), policy="curvature_residual", max_products=8).fit(X, wave)
    for mine, other in zip(in_parts.latent(x), at_once.latent(x), strict=True):
        close(mine, other, atol=1e-10)


def test_refining_past_the_last_action_is_exhausted_and_counts_what_it_spent() -> None:
    gp = classifier(actions="joint").fit(X[:5], y[:5]).refine(200)
    assert gp.report_.status == "exhausted"
    assert gp.report_.rank == 5 * (C - 1)
    assert gp.report_.information_captured == pytest.approx(1.0)
    assert gp.report_.num_products == gp.posterior_.prior.num_products


def interrupt_after(num_states: int) -> tuple[Callable[[State], None], list[State]]:
    seen: list[State] = []

    def callback(state: State) -> None:
        seen.append(state)
        if len(seen) == num_states:
            raise KeyboardInterrupt

    return callback, seen


@pytest.mark.parametrize("num_states", [1, 4, 6])
def test_an_interrupted_fit_is_valid_for_the_work_done_and_goes_on(num_states: int) -> None:
    callback, seen = interrupt_after(num_states)
    gp = classifier(actions="joint", max_products=20)
    with pytest.warns(UserWarning, match="interrupted; the posterior is valid for the work done"):
        assert gp.fit(X, y, callback=callback) is gp
    assert gp.report_.status == "interrupted" and "refine" in gp.report_.advice
    assert len(seen) == len(gp.report_.history) == num_states
    assert gp.report_.num_products == seen[-1].num_products < 20
    for mine, expected in zip(gp.latent(x), Posterior(seen[-1]).latent(x), strict=True):
        assert torch.equal(mine, expected)
    assert (gp.latent(x)[1].diagonal(dim1=1, dim2=2) <= 1 + 1e-12).all()
    before = gp.report_.num_products
    assert gp.refine(4).report_.num_products == before + 4


@pytest.mark.parametrize("actions", ["joint", "kronecker"])
def test_interrupted_before_the_first_action_the_posterior_is_the_prior(actions: str) -> None:
    def policy(state: State) -> Tensor:
        raise KeyboardInterrupt

    gp = classifier(policy=policy, actions=actions, mean=0.7)
    with pytest.warns(UserWarning, match="interrupted"):
        gp.fit(X, y)
    mean, covariance = gp.latent(x)
    close(mean, torch.full((b, C), 0.7, dtype=torch.float64))
    close(covariance, torch.eye(C, dtype=torch.float64).expand(b, -1, -1))
    assert (gp.report_.num_products, gp.report_.rank, gp.report_.information_captured) == (0, 0, 0.0)
    assert gp.log_evidence().lower < gp.log_evidence().upper
    assert math.isfinite(gp.elbo())


def test_an_interrupted_refinement_keeps_what_it_has() -> None:
    gp = classifier(max_products=6).fit(X, y)
    products, states = gp.report_.num_products, len(gp.report_.history)
    callback, seen = interrupt_after(2)
    with pytest.warns(UserWarning, match="interrupted"):
        gp.refine(10, callback=callback)
    assert products < gp.report_.num_products == seen[-1].num_products < products + 10
    assert len(gp.report_.history) == states + 2


def test_an_error_in_the_callback_reaches_the_caller_and_changes_nothing() -> None:
    gp = classifier(max_products=6).fit(X, y)
    report, latent = gp.report_, gp.latent(x)

    def fail(state: State) -> None:
        raise ZeroDivisionError("mine")

    for run in (lambda: gp.refine(5, callback=fail), lambda: gp.fit(X, y, callback=fail)):
        with pytest.raises(ZeroDivisionError, match="mine"):
            run()
        assert gp.report_ is report
        assert all(torch.equal(now, before) for now, before in zip(gp.latent(x), latent, strict=True))


# Asking


@pytest.mark.parametrize("actions", ["joint", "kronecker"])
def test_no_inputs_give_empty_answers(actions: str) -> None:
    gp, none = classifier(actions=actions, max_products=4).fit(X, y), x[:0]
    mean, covariance = gp.latent(none)
    assert mean.shape == (0, C) and covariance.shape == (0, C, C)
    assert gp.latent(none, joint=True)[1].shape == (0, 0)
    assert gp.sample(none, 5).shape == (5, 0, C)
    for link in ("probit", "quadrature", "mc"):
        assert gp.predict(none, link=link).shape == (0, C)
    lower, upper = counter(max_products=4).fit(X, counts).credible_interval(none)
    assert lower.shape == upper.shape == (0, 1)


@pytest.mark.parametrize("actions", ["joint", "kronecker"])
def test_the_blocks_of_the_joint_covariance_are_the_marginal_ones(actions: str) -> None:
    gp = classifier(actions=actions).fit(X, y)
    (mean, covariance), (joint_mean, joint) = gp.latent(x), gp.latent(x, joint=True)
    close(joint_mean, mean)
    assert joint.shape == (b * C, b * C)
    close(joint, joint.T)
    assert torch.linalg.eigvalsh(joint).min() > -1e-10
    blocks = joint.reshape(b, C, b, C)
    close(torch.stack([blocks[i, :, i] for i in range(b)]), covariance)
    assert (blocks[0, :, 1].abs() > 1e-3).any()  # inputs are correlated


@pytest.mark.parametrize("actions", ["joint", "kronecker"])
def test_the_probit_link_is_that_of_the_latent_moments(actions: str) -> None:
    gp = classifier(actions=actions, max_products=4).fit(X, y)
    mean, covariance = gp.latent(x)
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert float((variance.amax(1) / variance.amin(1)).max()) > 1.01  # or exchanged classes would not be seen
    close(gp.predict(x), gp.likelihood.expected_response(mean, variance))


def test_samples_have_the_posterior_mean_and_covariance() -> None:
    gp = classifier().fit(X, y)
    mean, covariance = gp.latent(x[:3], joint=True)
    draws = gp.sample(x[:3], 40_000, generator=torch.Generator().manual_seed(1)).reshape(-1, 3 * C)
    scale = float(covariance.diag().max())
    close(draws.mean(0), mean.flatten(), atol=5 * math.sqrt(scale / 40_000))
    close(draws.T.cov(), covariance, atol=5 * scale * math.sqrt(2 / 40_000))


def test_samples_are_reproduced_by_a_generator() -> None:
    gp = classifier(max_products=5).fit(X, y)
    first, second, third = (gp.sample(x, 3, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize("actions", ["joint", "kronecker"])
@pytest.mark.parametrize("link", ["probit", "quadrature", "mc"])
def test_memory_given_for_chunks_changes_no_prediction(link: str, actions: str) -> None:
    roomy = classifier(chunk_bytes=2**26, actions=actions, max_products=4).fit(X, y)
    tight = classifier(chunk_bytes=2000, actions=actions, max_products=4).fit(X, y)
    for marginal in (False, True):  # otherwise this test says nothing
        assert len(list(tight._parts(x, marginal=marginal))) > 1 and len(list(roomy._parts(x, marginal=marginal))) == 1
    close(tight.predict(x, link=link), roomy.predict(x, link=link), atol=1e-6)  # fitted apart, equal to convergence
    for mine, other in zip(tight.latent(x), roomy.latent(x), strict=True):
        close(mine, other, atol=1e-6)


@pytest.mark.parametrize("link", ["probit", "quadrature", "mc"])
def test_a_prediction_does_not_depend_on_the_other_inputs(link: str) -> None:
    gp = classifier(max_products=5).fit(X, y)
    together = gp.predict(x, link=link)
    close(torch.cat([gp.predict(x[i : i + 1], link=link) for i in range(b)]), together)


def test_the_rate_of_a_poisson_is_the_mean_of_its_log_normal_and_lies_in_its_interval() -> None:
    gp = counter().fit(X, counts)
    mean, covariance = gp.latent(x)
    close(gp.predict(x), (mean + covariance[:, 0] / 2).exp())
    lower, upper = gp.credible_interval(x, level=0.95)
    spread = 1.959963984540054 * covariance[:, 0].sqrt()
    close(lower, (mean - spread).exp())
    close(upper, (mean + spread).exp())


def test_class_probabilities_sum_to_one_and_lean_towards_the_labels_nearby() -> None:
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.arange(3).repeat(10)
    near = corners[labels] + 0.1 * uniform(30, 2)
    gp = classifier().fit(near, labels)
    for link in ("probit", "quadrature", "mc"):
        probabilities = gp.predict(corners, link=link)
        close(probabilities.sum(1), torch.ones(3, dtype=torch.float64))
        assert (probabilities.diag() > 0.5).all()


def test_one_datum_is_enough() -> None:
    gp = classifier().fit(X[:1], y[:1])
    assert int(gp.predict(X[:1]).argmax()) == int(y[0])


def test_fitting_and_asking_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gp = NonConjugateGP(
            2.0 * kernels.Matern12(0.5) + RBF([0.3, 0.4]) * Matern52(0.7),
            Bernoulli(),
            max_products=5,
            policy="curvature_residual",
        )
        gp.fit(X.float(), y % 2).refine(3)
        gp.predict(x.float(), link="mc")
        gp.log_evidence()
        gp.elbo()


def test_a_report_says_that_the_mean_alone_has_converged_where_the_variance_has_not() -> None:
    X = torch.rand(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gp = NonConjugateGP(RBF(0.15), Gaussian(0.01), policy="curvature_residual", max_products=200)
    gp.fit(X, torch.sin(4 * X[:, 0]))
    assert gp.report_.status == "converged" and gp.report_.variance_ratio > 1.1
    assert str(gp.report_).startswith("mean converged: ") and "fitted: mean converged" in repr(gp)
    close = replace(gp.report_, variance_ratio=1.05)
    assert str(close).startswith("converged: ")
    assert str(replace(gp.report_, status="budget")).startswith("budget: ")

"""Figures: what is drawn is what the GP predicts."""

import sys
from collections.abc import Iterator

import matplotlib
import numpy as np
import pytest
import torch
from scipy import stats

from ntk_iterncgp import NonConjugateGP
from ntk_iterncgp.gp.plots import _observation_band
from ntk_iterncgp.kernels import Matern52
from ntk_iterncgp.likelihoods import (
    Bernoulli,
    Binomial,
    Gaussian,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Softmax,
)

matplotlib.use("Agg")
from matplotlib import pyplot as plt

generator = torch.Generator().manual_seed(0)
X = torch.rand(50, 1, generator=generator, dtype=torch.float64)
wave = torch.sin(9 * X[:, 0])
counts = torch.poisson((1 + wave).exp(), generator=generator)
levels = torch.bucketize(wave, torch.tensor([-0.5, 0.5], dtype=torch.float64))
CASES: dict[str, tuple[Likelihood, torch.Tensor]] = {
    "gaussian": (Gaussian(0.05), wave),
    "poisson": (Poisson(torch.full((50,), 2.0)), counts),
    "negative binomial": (NegativeBinomial(0.3), counts),
    "bernoulli": (Bernoulli(), (wave > 0).long()),
    "binomial": (Binomial(20), counts.clamp_max(20)),
    "ordinal": (Ordinal(3), levels),
    "softmax": (Softmax(3), levels),
}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def fitted(name: str, inputs: torch.Tensor = X) -> NonConjugateGP:
    likelihood, y = CASES[name]
    return NonConjugateGP(Matern52(0.3, 2.0), likelihood, max_products=30).fit(inputs, y)


@pytest.mark.parametrize("name", CASES)
def test_one_dimension_is_drawn_with_its_mean_and_its_data(name: str) -> None:
    gp = fitted(name)
    at = torch.linspace(0, 1, 30, dtype=torch.float64)
    ax = gp.plot_1d(x=at)
    p = gp.predict(at[:, None], link="quadrature")
    for line, expected in zip(ax.get_lines(), p.T, strict=True):
        assert np.allclose(line.get_ydata(), expected.numpy(), atol=1e-10)
    assert ax.get_legend() is not None and len(ax.collections) >= 1
    plain = gp.plot_1d(plt.figure().add_subplot(), data=False, observation_band=False, legend=False)
    assert plain.get_legend() is None and len(plain.collections) <= 1
    ax.figure.canvas.draw()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("what", ["mean", "std"])
def test_two_dimensions_are_drawn(name: str, what: str) -> None:
    gp = fitted(name, torch.cat([X, X.flip(0)], 1))
    ax = gp.plot_2d(what=what, num_points=15)
    assert ax.get_xlim()[0] < 0.1 and len(ax.collections) + len(ax.images) >= 2
    ax.figure.canvas.draw()


def test_the_band_of_counts_holds_what_it_says() -> None:
    mean, variance = torch.full((3, 1), 1.5).double(), torch.full((3, 1), 1e-12).double()
    low, high = _observation_band(Poisson(), mean, variance, 0.9) or ()
    expected = stats.poisson.interval(0.9, np.exp(1.5))
    assert low.tolist() == [expected[0]] * 3 and high.tolist() == [expected[1]] * 3
    wide = _observation_band(NegativeBinomial(0.8), mean, variance, 0.9) or ()
    size = 1 / 0.8
    expected = stats.nbinom.interval(0.9, size, size / (size + np.exp(1.5)))
    assert wide[0].tolist() == [expected[0]] * 3 and wide[1].tolist() == [expected[1]] * 3
    broad = _observation_band(Poisson(), mean, torch.full((3, 1), 1.0).double(), 0.9) or ()
    draws = np.random.default_rng(0).poisson(np.exp(1.5 + np.random.default_rng(1).normal(size=400_000)))
    assert broad[0][0] == np.quantile(draws, 0.05) and abs(float(broad[1][0]) - np.quantile(draws, 0.95)) <= 1
    assert _observation_band(Poisson(), mean + 20, variance, 0.9) is None  # too many to add up


def test_the_band_of_the_function_is_the_credible_interval_and_that_of_observations_is_wider() -> None:
    gp, at = fitted("gaussian"), torch.linspace(0, 1, 20, dtype=torch.float64)
    observed, function, _ = gp.plot_1d(x=at, level=0.8).collections
    low, high = gp.credible_interval(at[:, None], level=0.8)
    inner, outer = (band.get_paths()[0].vertices[:, 1] for band in (function, observed))
    assert inner.min() == pytest.approx(float(low.min())) and inner.max() == pytest.approx(float(high.max()))
    assert outer.min() < inner.min() and outer.max() > inner.max()


def test_misuse_gets_a_message_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    gp = fitted("gaussian")
    with pytest.raises(ValueError, match=r"must have inputs of 2 dimension\(s\) to be plotted so; got 1"):
        gp.plot_2d()
    with pytest.raises(ValueError, match="`what` must be 'mean' or 'std'; got 'var'"):
        gp.plot_2d(what="var")
    with pytest.raises(RuntimeError, match="must be fitted first; got one that has not been"):
        NonConjugateGP(Matern52(), Gaussian(0.1)).plot_1d()
    two = NonConjugateGP(Matern52(), Gaussian(0.1, 2)).fit(X, torch.stack([wave, wave], 1))
    with pytest.raises(ValueError, match="must have one output to be plotted; got 2"):
        two.plot_1d()
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        gp.plot_1d()

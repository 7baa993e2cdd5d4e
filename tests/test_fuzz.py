"""Whatever is asked of both front doors, within reason and without: numbers that hold, or a sentence.

Nothing that makes sense may fail, warn, give a NaN, or be more certain than the dense truth; what makes no sense may
fail, but only with an error of this package: of a documented type, raised by a `raise` of its own, that says what must
hold and what came. What may be accepted is listed, so that nonsense that passes in silence fails too. `make test` tries
200 cases, the same ones every time; `make fuzz` as many new ones as FUZZ_CASES says (2000).
"""

import math
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp
from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.fitting.report import SelfCheckError
from tests import oracles
from tests.clusters_helpers import Stream
from tests.network_cases import dense_jacobian, outputs_of

PACKAGE = str(Path(ntk_iterncgp.__file__).parent)
CASES = os.environ.get("FUZZ_CASES")
DOCUMENTED = (ValueError, TypeError, RuntimeError, MemoryError)  # SelfCheckError is one; but it admits a defect
HOUSE_FORM = re.compile(r"\bmust\b.+\bgot\b.+\.$", re.DOTALL)  # what must hold; got what came. Often: Try what to do.


def share_of_cases(share: float) -> Callable[[Any], Any]:
    """So much of 200 cases, always the same; or of FUZZ_CASES new ones."""
    return settings(
        max_examples=max(1, round(share * int(CASES or 200))),
        derandomize=CASES is None,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


@contextmanager
def only_our_errors() -> Iterator[None]:
    """What is raised inside must be raised by this package, and say what must hold and what came.

    An operation of torch's that fails leaves a frame of the package too, but not one that is at a `raise`.
    """
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        is_ours = frame.filename.startswith(PACKAGE) and (frame.line or "").startswith("raise")
        is_documented = isinstance(error, DOCUMENTED) and not isinstance(error, SelfCheckError)
        has_form = HOUSE_FORM.search(str(error).rstrip()) or isinstance(error, MemoryError)  # which ends in a table
        if not (is_ours and is_documented and has_form):
            place = f"{frame.filename}:{frame.lineno} ({frame.line})"
            raise AssertionError(f"{type(error).__name__} at {place}: {error}") from error


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


# --- explicit kernels ---------------------------------------------------------------------------------------------

FAMILIES = [kernels.RBF, kernels.Matern12, kernels.Matern32, kernels.Matern52]


@dataclass
class GPCase:
    X: Tensor
    y: Tensor
    new: Tensor
    kernel: Any
    name: str
    likelihood: likelihoods.Likelihood
    noise: float
    settings: dict[str, Any]
    refine: int

    @property
    def per_output(self) -> list[kernels.Kernel]:
        return self.kernel if isinstance(self.kernel, list) else [self.kernel] * self.likelihood.num_outputs

    def covariance(self, one: Tensor, other: Tensor) -> Tensor:
        return oracles.block_kernel([k(one.double(), other.double()) for k in self.per_output])


@st.composite
def gp_cases(draw: Any) -> GPCase:
    N, d = draw(st.integers(1, 14)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    scale = draw(powers(-3, 3))
    X = scale * torch.randn(N, d, generator=generator, dtype=torch.float64)
    shape = draw(st.sampled_from(["plain", "plain", "duplicates", "one point", "far apart", "tiny distances"]))
    if shape == "duplicates":
        X = X[torch.randint(max(1, N // 2), (N,), generator=generator)]
    elif shape == "one point":
        X = X[:1].expand(N, d).clone()
    elif shape == "far apart":
        X[::2] *= 1e4
    elif shape == "tiny distances":
        X = X[:1] + 1e-7 * (X - X[:1])
    name = draw(st.sampled_from(oracles.LIKELIHOODS))
    noise, C = draw(powers(-6, 2)), 1
    likelihood: likelihoods.Likelihood
    if name == "softmax":
        C = draw(st.integers(2, 4))
        likelihood = likelihoods.Softmax(C)
        used = draw(st.integers(1, C))  # some classes may be missing, or all labels the same
        y = torch.randint(used, (N,), generator=generator)
    elif name == "bernoulli":
        likelihood = likelihoods.Bernoulli()
        y = torch.randint(draw(st.integers(1, 2)), (N,), generator=generator)
    elif name == "poisson":
        likelihood = likelihoods.Poisson()
        y = torch.randint(draw(st.sampled_from([1, 3, 50, 5000])), (N,), generator=generator)
    else:
        C = draw(st.integers(1, 2))
        likelihood = likelihoods.Gaussian(noise, num_outputs=C)
        y = draw(powers(-3, 3)) * torch.randn(N, C, generator=generator, dtype=torch.float64)

    def one_kernel() -> kernels.Kernel:
        lengthscale = scale * draw(powers(-2, 2))
        made = draw(st.sampled_from(FAMILIES))(lengthscale, draw(powers(-4, 4 if name != "poisson" else 1)))
        kind = draw(st.sampled_from(["one", "one", "sum", "product"]))
        other = draw(st.sampled_from(FAMILIES))(scale, 1.0)
        return made + other if kind == "sum" else made * other if kind == "product" else made

    kernel = [one_kernel() for _ in range(C)] if draw(st.booleans()) else one_kernel()
    chosen = dict(
        mean=draw(st.sampled_from([0.0, 1.0, -3.0])),
        policy=draw(st.sampled_from(["unit", "residual", "curvature_residual", "random_subspace"])),
        max_products=draw(st.integers(1, 12)),
        products_per_step=draw(st.integers(1, 6)),
        max_newton_steps=draw(st.integers(1, 6)),
        max_rank=draw(st.sampled_from([None, None, 1, 4, 9])),
        compression=draw(st.sampled_from(["mean+trace", "eigen"])),
        damped=draw(st.sampled_from([True, True, True, False])),
        actions=draw(st.sampled_from(["auto", "joint", "kronecker"])),
        product_method=draw(st.sampled_from(["auto", "plain", "gemm", "sparse"])),
        product_tolerance=draw(st.sampled_from([None, 0.0, 1e-9])),
        chunk_bytes=draw(st.sampled_from([1, 1000, 2**26])),
        seed=draw(st.integers(0, 3)),
    )
    new = torch.cat([X[:2], X[:2] + 0.3 * scale, X[:1] + 1e3 * scale])
    X, new = X.to(dtype), new.to(dtype)
    return GPCase(X, y, new, kernel, name, likelihood, noise, chosen, draw(st.integers(0, 4)))


def exact_variances(root: Tensor, K: Tensor, Kx: Tensor, prior: Tensor) -> Tensor:
    """The dense truth for W = root rootᵀ. Where W K is beyond float64 it cannot be had; but it is not negative."""
    if float(root.abs().max()) ** 2 * float(K.abs().max()) > 1e12:
        return torch.zeros_like(prior)
    return oracles.posterior_from_root(root, K, Kx, prior)


@pytest.mark.slow
@share_of_cases(0.5)
@given(gp_cases())
def test_a_gp_gives_numbers_that_hold(case: GPCase) -> None:
    with only_our_errors():
        gp = NonConjugateGP(case.kernel, case.likelihood, **{"policy": "curvature_residual", **(case.settings)})
        gp.fit(case.X, case.y)
        if case.refine:
            gp.refine(case.refine)
        mean, covariance = gp.latent(case.new)
        expected, evidence, elbo = gp.predict(case.new), gp.log_evidence(), gp.elbo()
        draws = gp.sample(case.new[:2], 3)
        state = gp.posterior_.state
    if "state" not in locals():  # refused with a sentence
        return
    assert torch.isfinite(mean).all() and torch.isfinite(covariance).all() and torch.isfinite(draws).all()
    assert not expected.isnan().any() and (case.name == "poisson" or torch.isfinite(expected).all())
    assert not math.isnan(elbo) and evidence.lower <= evidence.value <= evidence.upper
    assert 0 <= gp.report_.information_captured <= 1
    K, Kx = case.covariance(case.X, case.X), case.covariance(case.new, case.X)
    Kxx = case.covariance(case.new, case.new)
    found, prior = covariance.double().diagonal(dim1=1, dim2=2).flatten(), Kxx.diagonal()
    exact = exact_variances(oracles.curvature_root(case.name, state.latent, case.noise), K, Kx, prior)
    tolerance = 1e-6 if case.X.dtype == torch.float64 else 5e-3
    tolerance += gp.posterior_.prior.product_tolerance
    if gp.posterior_.prior.product_tolerance > 1e-10:
        tolerance += 1e-3
    assert (found >= exact - tolerance * prior).all(), (
        f"below the truth by {float(((exact - found) / prior).max()):.1e}"
    )
    assert (found <= (1 + tolerance) * prior).all()


# --- networks -----------------------------------------------------------------------------------------------------


@dataclass
class NetCase:
    model: nn.Module  # float64
    x: Tensor
    y: Tensor
    likelihood: str
    subset: str
    dtype: torch.dtype
    batch_size: int
    in_order: bool
    settings: dict[str, Any]
    epochs: float

    def loader(self) -> DataLoader:
        y = self.y if self.likelihood == "classification" else self.y.to(self.dtype)
        data = TensorDataset(self.x.to(self.dtype), y)
        return DataLoader(Stream(data) if self.in_order else data, batch_size=self.batch_size)


@st.composite
def net_cases(draw: Any) -> NetCase:
    N, d, width = draw(st.integers(1, 14)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    likelihood = draw(st.sampled_from(["classification", "classification", "regression"]))
    C = draw(st.integers(2, 4)) if likelihood == "classification" else draw(st.integers(1, 2))
    model = nn.Sequential(nn.Linear(d, width), draw(st.sampled_from([nn.Tanh(), nn.ReLU()])), nn.Linear(width, C))
    scale = draw(powers(-2, 2))
    for p in model.parameters():
        p.data = scale * torch.randn(p.shape, generator=generator)
    x = draw(powers(-2, 1)) * torch.randn(N, d, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        x = x[torch.randint(max(1, N // 2), (N,), generator=generator)]
    if likelihood == "classification":
        y = torch.randint(draw(st.integers(1, C)), (N,), generator=generator)
    else:
        y = draw(powers(-2, 2)) * torch.randn(N, C, generator=generator, dtype=torch.float64)
    mean = draw(st.sampled_from(["network", "network", "refined"]))
    policies = ["curvature_residual", "random_subspace", "residual", "unit"]
    policy = draw(st.sampled_from([*policies, "clusters", "clusters", "clusters"] if mean == "network" else policies))
    chosen = dict(
        mean=mean,
        policy=policy,
        num_actions=draw(st.integers(1, 8)),
        cotangents=draw(st.integers(1, 3)),
        actions_per_step=draw(st.integers(1, 4)),
        max_rank=draw(st.sampled_from([None, None, 1, 4])),
        compression=draw(st.sampled_from(["mean+trace", "eigen"])),
        max_epochs=draw(st.sampled_from([None, None, 0.6, 5.0])),
        prior_precision=draw(powers(-4, 4)),
        temperature=draw(st.sampled_from([1.0, 1.0, 0.1])),
        seed=draw(st.integers(0, 3)),
    )
    if likelihood == "regression":
        chosen["sigma_noise"] = draw(powers(-3, 1))
    return NetCase(
        model.double(),
        x,
        y,
        likelihood,
        draw(st.sampled_from(["all", "all", "last_layer"])),
        draw(st.sampled_from([torch.float64, torch.float32])),
        draw(st.integers(1, 8)),
        draw(st.booleans()),
        chosen,
        draw(st.sampled_from([0.0, 0.5, 2.0])),
    )


@pytest.mark.slow
@share_of_cases(0.25)
@given(net_cases())
def test_a_network_gives_numbers_that_hold(case: NetCase) -> None:
    model = case.model.to(case.dtype)
    new = torch.cat([case.x[:2], case.x[:1] + 1.0, 10 * case.x[:1]]).to(case.dtype)
    with only_our_errors():
        la = Laplace(model, case.likelihood, case.subset, "iterncgp", **case.settings)
        la.fit(case.loader())
        if case.epochs:
            la.refine(case.loader(), epochs=case.epochs)
        mean, covariance = la.predictive_moments(new)
        evidence, probabilities = la.log_marginal_likelihood(), la(new, link_approx="quadrature")
    if "probabilities" not in locals():
        return
    shown = probabilities[0] if isinstance(probabilities, tuple) else probabilities
    assert all(bool(torch.isfinite(value).all()) for value in (mean, covariance, evidence, shown))
    found = covariance.double().diagonal(dim1=1, dim2=2)
    assert 0 <= la.report_.information_captured <= 1
    J = dense_jacobian(model.double(), new.double())
    if case.subset == "last_layer":
        J = J[..., -sum(p.numel() for p in model[2].parameters()) :]
    precision = case.settings["prior_precision"]
    prior = J.square().sum(2) / precision
    tolerance = 1e-6 if case.dtype == torch.float64 else 5e-3
    assert (found >= -tolerance * prior).all() and (found <= (1 + tolerance) * prior + 1e-30).all()
    if case.settings["mean"] == "refined":  # its curvature is taken where the mode is
        return
    x = case.x.to(case.dtype).double()  # what the network has seen
    training = dense_jacobian(model, x)
    if case.subset == "last_layer":
        training = training[..., -J.shape[2] :]
    name = "softmax" if case.likelihood == "classification" else "gaussian"
    noise = case.settings.get("sigma_noise", 1.0) ** 2 * case.settings["temperature"]
    R = oracles.curvature_root(name, outputs_of(model, x), noise=noise)
    if name == "softmax":
        R = R / case.settings["temperature"] ** 0.5
    JJ = training.flatten(0, 1)
    exact = exact_variances(R, JJ @ JJ.T / precision, J.flatten(0, 1) @ JJ.T / precision, prior.flatten())
    assert (found.flatten() >= exact - tolerance * prior.flatten()).all(), (
        f"below the truth by {float(((exact - found.flatten()) / prior.flatten()).max()):.1e}"
    )


# --- nonsense -----------------------------------------------------------------------------------------------------

NONSENSE = [
    None,
    -1,
    0,
    1.5,
    math.nan,
    math.inf,
    "nonsense",
    True,
    [],
    (1, 2),
    10**30,
    10**400,
    torch.ones(2, 2),
    b"x",
    object(),
]
GP_SETTINGS = [
    "mean", "policy", "max_products", "max_newton_steps", "products_per_step", "max_rank", "compression", "newton_tol",
    "actions", "damped", "product_method", "product_tolerance", "chunk_bytes", "seed", "dtype", "device",
]  # fmt: skip
NET_SETTINGS = [
    "mean", "policy", "num_actions", "cotangents", "max_epochs", "actions_per_step", "max_rank", "compression",
    "newton_tol", "chunk_bytes", "seed", "prior_precision", "sigma_noise", "temperature", "prior_mean",
]  # fmt: skip
INPUTS, LABELS = torch.linspace(0, 1, 10).reshape(5, 2), torch.tensor([0, 1, 2, 1, 0])
# What of NONSENSE makes sense after all, by setting; all else must be refused. Whole numbers are real ones, too.
NUMBERS: list[Any] = [-1, 0, 1.5, 10**30]
SENSIBLE: dict[str, list[Any]] = {
    "mean": [*NUMBERS, None],  # of a GP; that of a network is a name
    "policy": [None],
    "max_rank": [None],
    "newton_tol": [0, 1.5, 10**30, math.inf],
    "damped": [True],
    "product_tolerance": [None, 0],
    "seed": [0],
    "dtype": [None],
    "device": [None],
    "num_actions": [None],
    "cotangents": [None],
    "max_epochs": [None, 1.5, 10**30, math.inf],
    "prior_precision": [1.5, 10**30],
    "sigma_noise": [1.5, 10**30],
    "temperature": [1.5, 10**30],
    "prior_mean": NUMBERS,
    "X": [INPUTS, torch.full((5, 2), 1e38), torch.ones(5, 2)],
    "y": [LABELS, [0, 1, 2, 1, 0]],
    "latent(x)": [torch.ones(2, 2)],
    "predict(n_samples)": [3],
    "sample(n_samples)": [3],
    "refine(max_products)": [3, 10**30, 10**400],
    "credible_interval(level)": [],
    "refine(epochs)": [3, 1.5, 10**30, math.inf],  # until there is no new action
    "refine(seconds)": [3, 1.5, 10**30, math.inf],
    "compress(rank)": [3, 10**30, 10**400],
    "link(n_samples)": [3, None],
    "contrasts": [3, 10**30, 10**400],  # as many as there are
}


def is_sensible(name: str, value: Any) -> bool:
    return any(
        type(value) is type(good) and bool(torch.all(torch.as_tensor(value == good))) for good in SENSIBLE.get(name, [])
    )


# What is asked after a fit, by name, with a value of which SENSIBLE says whether it makes sense.
NEW_X = torch.linspace(0, 1, 4).reshape(2, 2)
GP_CALLS: dict[str, Callable[[NonConjugateGP, Any], object]] = {
    "latent(x)": lambda gp, value: gp.latent(value),
    "predict(n_samples)": lambda gp, value: gp.predict(NEW_X, link="mc", n_samples=value),
    "sample(n_samples)": lambda gp, value: gp.sample(NEW_X, value),
    "refine(max_products)": lambda gp, value: gp.refine(value),
    "credible_interval(level)": lambda gp, value: gp.credible_interval(NEW_X, level=value),
}
NET_CALLS: dict[str, Callable[[Any, DataLoader, Any], object]] = {
    "refine(epochs)": lambda la, loader, value: la.refine(loader, epochs=value),
    "refine(seconds)": lambda la, loader, value: la.refine(loader, seconds=value),
    "compress(rank)": lambda la, loader, value: la.compress(value),
    "link(n_samples)": lambda la, loader, value: la(NEW_X, link_approx="quadrature", n_samples=value),
    "contrasts": lambda la, loader, value: la.latent(NEW_X, contrasts=value),
}


TENSORS = [
    torch.zeros(0, 2), torch.zeros(5), torch.zeros(5, 0), torch.zeros(5, 2, 2), torch.full((5, 2), torch.nan),
    torch.ones(5, 2, dtype=torch.int64), torch.ones(5, 2, dtype=torch.complex64), torch.ones(5, 2, dtype=torch.bool),
    torch.ones(5, 2, dtype=torch.float16), torch.full((5, 2), 1e38), torch.ones(5, 2), "nonsense", None, 3.0, [[1.0]],
]  # fmt: skip

TARGETS = [
    torch.full((5,), torch.nan), torch.arange(4), torch.arange(5), torch.ones(5, 3), torch.full((5,), 0.5), "nonsense",
    None, 5, torch.zeros(0), -torch.ones(5), torch.zeros(5, dtype=torch.complex64), [0, 1, 2, 1, 0],
]  # fmt: skip


def small_gp(settings: dict[str, Any]) -> NonConjugateGP:
    return NonConjugateGP(kernels.RBF(1.0), likelihoods.Softmax(3), **{"max_products": 3, **settings})


def small_network(settings: dict[str, Any]) -> tuple[Any, DataLoader]:
    """A flavour and its training data."""
    likelihood = "regression" if "sigma_noise" in settings else "classification"
    y = torch.arange(6) % 3 if likelihood == "classification" else torch.zeros(6, 3)
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 12).reshape(6, 2), y), batch_size=4)
    return Laplace(nn.Linear(2, 3), likelihood, "all", "iterncgp", **{"num_actions": 2, **settings}), loader


def accepted_of(name: str, values: list[Any], ask: Callable[[Any], object]) -> list[Any]:
    """What makes no sense and was accepted; what was refused was refused by the package."""
    accepted = []
    for value in values:
        with only_our_errors():
            ask(value)
            accepted.append(value)
    return [value for value in accepted if not is_sensible(name, value)]


@pytest.mark.parametrize("name", GP_SETTINGS)
def test_a_gp_refuses_every_value_that_makes_no_sense(name: str) -> None:
    assert accepted_of(name, NONSENSE, lambda value: small_gp({name: value}).fit(INPUTS, LABELS)) == []


@pytest.mark.parametrize("name", NET_SETTINGS)
def test_a_network_refuses_every_value_that_makes_no_sense(name: str) -> None:
    def fit(value: Any) -> None:
        la, loader = small_network({name: value})
        la.fit(loader)

    assert accepted_of(name, NONSENSE, fit) == []


@pytest.mark.parametrize("name", GP_CALLS)
def test_a_fitted_gp_refuses_every_value_that_makes_no_sense(name: str) -> None:
    gp = small_gp({"policy": "curvature_residual"}).fit(INPUTS, LABELS)
    assert accepted_of(name, NONSENSE, lambda value: GP_CALLS[name](copy(gp), value)) == []


@pytest.mark.parametrize("name", NET_CALLS)
def test_a_fitted_network_refuses_every_value_that_makes_no_sense(name: str) -> None:
    la, loader = small_network({})
    la.fit(loader)
    assert accepted_of(name, NONSENSE, lambda value: NET_CALLS[name](copy(la), loader, value)) == []


def test_a_gp_refuses_all_data_that_make_no_sense() -> None:
    assert accepted_of("X", TENSORS, lambda value: small_gp({}).fit(value, LABELS)) == []
    assert accepted_of("y", TARGETS, lambda value: small_gp({}).fit(INPUTS, value)) == []


@share_of_cases(0.15)
@given(
    st.dictionaries(st.sampled_from(GP_SETTINGS), st.sampled_from(NONSENSE), min_size=0, max_size=2),
    st.sampled_from(TENSORS) | st.just(INPUTS),
    st.sampled_from(TARGETS) | st.just(LABELS),
    st.sampled_from(list(GP_CALLS)),
    st.sampled_from([*NONSENSE, 3]),
)
def test_nonsense_asked_of_a_gp_is_refused_with_what_must_hold(
    settings: dict[str, Any], X: Any, y: Any, then: str, argument: Any
) -> None:
    with only_our_errors():
        gp = small_gp(settings).fit(X, y)
        GP_CALLS[then](gp, argument)
        asked = [*settings.items(), ("X", X), ("y", y), (then, argument)]
        unjustly = [(name, value) for name, value in asked if not is_sensible(name, value)]
        assert not unjustly, f"accepted: {unjustly}"


@share_of_cases(0.1)
@given(
    st.dictionaries(st.sampled_from(NET_SETTINGS), st.sampled_from(NONSENSE), min_size=1, max_size=2),
    st.sampled_from(list(NET_CALLS)),
    st.sampled_from([*NONSENSE, 3]),
)
def test_nonsense_asked_of_a_network_is_refused_with_what_must_hold(
    settings: dict[str, Any], then: str, argument: Any
) -> None:
    with only_our_errors():
        la, loader = small_network(settings)
        la.fit(loader)
        NET_CALLS[then](la, loader, argument)
        unjustly = [
            (name, value) for name, value in [*settings.items(), (then, argument)] if not is_sensible(name, value)
        ]
        assert not unjustly, f"accepted: {unjustly}"

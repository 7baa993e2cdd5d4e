"""Rational quadratic, periodic, linear and constant kernels, and kernels of some coordinates: against their formula in
dense float64, against scikit-learn, by every method of multiplication, and with the gradients that `optimize` needs."""

import copy
from collections.abc import Callable

import pytest
import torch
from sklearn.gaussian_process import kernels as peers
from torch import Tensor

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.kernels import (
    RBF,
    Constant,
    Deep,
    Kernel,
    KernelMatrix,
    Linear,
    Matern12,
    Matern32,
    Periodic,
    RationalQuadratic,
    kernel_from_dict,
    kernel_to_dict,
)
from ntk_iterncgp.kernels.choice import choose
from tests.kernels.test_kernels import close, draw
from tests.kernels.test_products import TOLERANCE, needs_compiler, points

PI = torch.pi
L, P = torch.tensor([0.7, 1.3, 0.9]).double(), torch.tensor([1.1, 2.0, 3.1]).double()


def rational_quadratic(X: Tensor, Z: Tensor, scale: Tensor, alpha: float) -> Tensor:
    squared = ((X[:, None] - Z) / scale).square().sum(2)
    return (1 + squared / (2 * alpha)) ** -alpha


def periodic(X: Tensor, Z: Tensor, scale: Tensor, period: Tensor) -> Tensor:
    return torch.exp(-2 * ((PI * (X[:, None] - Z) / period).sin() / scale).square().sum(2))


CASES: dict[str, tuple[Kernel, Callable[[Tensor, Tensor], Tensor]]] = {  # and its formula, in three coordinates
    "rational quadratic": (
        RationalQuadratic(0.8, 1.7, alpha=0.4),
        lambda X, Z: 1.7 * rational_quadratic(X, Z, L * 0 + 0.8, 0.4),
    ),
    "rational quadratic per dimension": (
        RationalQuadratic(L, 1.7, alpha=3.0),
        lambda X, Z: 1.7 * rational_quadratic(X, Z, L, 3.0),
    ),
    "periodic": (Periodic(0.8, 1.7, period=1.3), lambda X, Z: 1.7 * periodic(X, Z, L * 0 + 0.8, L * 0 + 1.3)),
    "periodic per dimension": (Periodic(L, 1.7, period=P), lambda X, Z: 1.7 * periodic(X, Z, L, P)),
    "constant": (Constant(1.7), lambda X, Z: torch.full((len(X), len(Z)), 1.7, dtype=torch.float64)),
    "linear": (Linear(1.7), lambda X, Z: 1.7 * torch.einsum("ad,bd->ab", X, Z)),
    "linear per dimension": (Linear(L), lambda X, Z: torch.einsum("ad,d,bd->ab", X, L, Z)),
    "linear in some": (
        Linear([0.5, 2.0], active_dims=[2, 0]),
        lambda X, Z: X[:, [2, 0]] * L.new_tensor([0.5, 2]) @ Z[:, [2, 0]].T,
    ),
    "some coordinates": (
        RBF([0.5, 2.0], 1.7, active_dims=[2, 0]),
        lambda X, Z: (
            1.7 * torch.exp(-0.5 * ((X[:, None, [2, 0]] - Z[:, [2, 0]]) / L.new_tensor([0.5, 2.0])).square().sum(2))
        ),
    ),
    "sum and product": (
        Constant(0.5) + RBF(0.7, active_dims=[1]) * Periodic(0.8, 1.7, [1.3, 0.9], active_dims=[0, 2]),
        lambda X, Z: (
            0.5
            + torch.exp(-0.5 * ((X[:, None, 1] - Z[:, 1]) / 0.7).square())
            * 1.7
            * periodic(X[:, [0, 2]], Z[:, [0, 2]], L[:2] * 0 + 0.8, L.new_tensor([1.3, 0.9]))
        ),
    ),
    "sum with linear": (
        2.0 * (Linear() + Matern12(0.9)) * Constant(0.5),
        lambda X, Z: X @ Z.T + torch.exp(-(X[:, None] - Z).norm(dim=2) / 0.9),
    ),
}
OF_DISTANCE = [name for name, (kernel, _) in CASES.items() if kernel.is_of_distance and name != "constant"]
DECREASING = [name for name in OF_DISTANCE if CASES[name][0].is_decreasing]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_agrees_with_its_formula_also_at_near_and_coincident_points(name: str, dtype: torch.dtype) -> None:
    kernel, formula = CASES[name]
    X, Z = points(30, 3, dtype=dtype), points(20, 3, seed=1, dtype=dtype)
    Z = torch.cat([Z, X[:10]])
    expected = formula(X.double(), Z.double())
    found = kernel(X, Z)
    assert found.dtype == dtype
    close(found.double() / expected.abs().max(), expected / expected.abs().max(), atol=TOLERANCE[dtype])
    close(kernel.diagonal(X).double(), kernel(X, X).diagonal().double(), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_matrix_is_positive_semidefinite(name: str) -> None:
    X = draw(40, 3)
    K = CASES[name][0](X, X)
    assert torch.linalg.eigvalsh((K + K.T) / 2).min() > -1e-12 * K.diagonal().max()


@pytest.mark.parametrize(
    ("ours", "theirs", "d"),
    [
        (RationalQuadratic(0.8, 1.0, alpha=0.4), peers.RationalQuadratic(length_scale=0.8, alpha=0.4), 3),
        (Periodic(0.8, 1.0, period=1.3), peers.ExpSineSquared(length_scale=0.8, periodicity=1.3), 1),
        (Linear() + Constant(0.25), peers.DotProduct(sigma_0=0.5), 3),
        (2.0 * RBF([0.5, 1.0, 2.0]), peers.ConstantKernel(2.0) * peers.RBF([0.5, 1.0, 2.0]), 3),
    ],
)
def test_a_kernel_agrees_with_scikit_learn(ours: Kernel, theirs: peers.Kernel, d: int) -> None:
    X, Z = draw(12, d), draw(9, d, seed=1)
    close(ours(X, Z), torch.from_numpy(theirs(X.numpy(), Z.numpy())))


def test_a_periodic_kernel_repeats_far_from_the_origin() -> None:
    kernel, X = Periodic(0.7, period=0.25), draw(20, 1)
    close(kernel(X, X + 0.25 * 4000), kernel(X, X), atol=1e-9)


# Every method


def agree(name: str, method: str, dtype: torch.dtype = torch.float64) -> None:
    kernel, formula = CASES[name]
    X = points(90, 3, dtype=dtype)
    for Z in (X, points(50, 3, seed=3, dtype=dtype)):
        V = draw(len(Z), 10, seed=5).to(dtype)
        expected = formula(X.double(), Z.double()) @ V.double()
        found = KernelMatrix(kernel, X, Z, method=method, tolerance=0.0 if method == "sparse" else None) @ V
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[dtype], f"{method} errs by {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_the_plain_method_agrees_with_the_dense_product(name: str, dtype: torch.dtype) -> None:
    agree(name, "plain", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OF_DISTANCE)
def test_matrix_products_agree_with_the_dense_product(name: str, dtype: torch.dtype) -> None:
    agree(name, "gemm", dtype)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", OF_DISTANCE)
def test_compiled_tiles_agree_with_the_dense_product(name: str) -> None:
    agree(name, "fused")


@needs_compiler
@pytest.mark.parametrize("name", ["sum and product"])
def test_compiled_tiles_agree_where_distances_have_different_coordinates(name: str) -> None:
    agree(name, "fused")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", DECREASING)
def test_sparse_products_agree_with_the_dense_product(name: str) -> None:
    agree(name, "sparse")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rational quadratic", "periodic", "sum and product"])
def test_keops_agrees_with_the_dense_product(name: str) -> None:
    agree(name, "keops")


def test_skipped_tiles_of_a_kernel_of_some_coordinates_are_far_in_those(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes that are far apart in the coordinate that is not looked at must not be skipped."""
    X = 100 * torch.rand(500, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kernel, V = Matern32(2.0, active_dims=[1]), draw(500, 3)
    matrix = KernelMatrix(kernel, X, method="sparse", tolerance=1e-9)
    assert matrix.choice.pattern is not None and matrix.choice.pattern.fraction < 1
    close(matrix @ V, kernel(X, X) @ V, atol=1e-5)


def test_what_is_no_formula_of_distances_takes_the_plain_path_and_says_why() -> None:
    X, y = draw(30, 2), draw(30, 1)[:, 0]
    reason = "plain (Linear is not a formula of distances)"
    assert str(choose(2.0 * (RBF() + Linear()), X, X)) == reason
    assert str(choose(Constant(2.0) + Constant(), X, X)) == "plain (Constant(2) + Constant(1) depends on no distance)"
    gp = NonConjugateGP(RBF() + Linear(), likelihoods.Gaussian(0.1), policy="curvature_residual").fit(X, y)
    assert gp.report_.products_by == reason
    with pytest.raises(ValueError, match=r"`kernel` must have a distance in it"):
        KernelMatrix(Constant(), X, method="gemm")
    with pytest.raises(ValueError, match="`kernel` must be a formula of distances"):
        KernelMatrix(Linear(), X, method="gemm")
    with pytest.raises(ValueError, match="`kernel` must fall with distance"):
        KernelMatrix(Periodic(), X, method="sparse")


def test_few_active_coordinates_of_many_are_few() -> None:
    X = torch.zeros(20_000, 40)
    assert choose(RBF(active_dims=[3, 5]), X, X).method in ("fused", "sparse")
    assert choose(RBF(), X, X).method == "gemm"


# Gradients


@pytest.mark.parametrize("method", ["plain", "gemm"])
@pytest.mark.parametrize("name", OF_DISTANCE)
def test_hyperparameters_get_the_gradient_of_the_formula(name: str, method: str) -> None:
    X, V = draw(12, 3), draw(12, 2, seed=1)
    values = {n: v.detach().clone() for n, v in CASES[name][0].hyperparameters().items()}

    def product(*logs: Tensor) -> Tensor:
        kernel = CASES[name][0].with_hyperparameters({n: x.exp() for n, x in zip(values, logs, strict=True)})
        return KernelMatrix(kernel, X, method=method) @ V

    logs = [value.log().requires_grad_() for value in values.values()]
    assert torch.autograd.gradcheck(product, logs, atol=1e-6)


@pytest.mark.parametrize("name", ["linear per dimension", "constant", "sum with linear"])
def test_hyperparameters_of_kernels_of_no_distance_get_gradients(name: str) -> None:
    X, V = draw(12, 3), draw(12, 2, seed=1)
    values = CASES[name][0].hyperparameters()

    def product(*given: Tensor) -> Tensor:
        return KernelMatrix(CASES[name][0].with_hyperparameters(dict(zip(values, given, strict=True))), X) @ V

    assert torch.autograd.gradcheck(product, [v.clone().requires_grad_() for v in values.values()])


def test_optimize_finds_the_period_of_data_and_which_coordinate_matters() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * PI * X[:, 0] / 0.4) + 0.05 * torch.randn(60, generator=generator, dtype=torch.float64)
    gp = NonConjugateGP(Periodic(1.0, 1.0, 0.42, active_dims=[0]), likelihoods.Gaussian(0.1))
    gp.optimize(X, y)
    assert float(gp.kernels[0].hyperparameters()["period"]) == pytest.approx(0.4, abs=0.01)
    gp = NonConjugateGP(RBF([0.5, 0.5]), likelihoods.Gaussian(0.1), max_products=60).optimize(X, y)
    relevant, irrelevant = gp.kernels[0].hyperparameters()["lengthscale"].tolist()
    assert irrelevant > 5 * relevant


# A kernel as data


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_the_same_after_being_described(name: str) -> None:
    kernel, X = CASES[name][0], draw(9, 3)
    again = kernel_from_dict(kernel_to_dict(kernel))
    assert repr(again) == repr(kernel) and torch.equal(again(X, X), kernel(X, X))


@pytest.mark.parametrize("name", CASES)
def test_settings_are_shown_and_changed_by_name(name: str) -> None:
    kernel, X = copy.deepcopy(CASES[name][0]), draw(5, 3)
    names = list(kernel.hyperparameters())
    shown = kernel.get_params()
    assert [n.replace(".", "__") for n in names] == [n for n in shown if n != "active_dims"]
    doubled = {n: 2 * value for n, value in shown.items() if n != "active_dims"}
    assert kernel.set_params(**doubled) is kernel
    before = CASES[name][0]
    expected = before.with_hyperparameters({n: 2 * x for n, x in before.hyperparameters().items()})
    assert torch.equal(kernel(X, X), expected(X, X))
    assert kernel.set_params() is kernel and torch.equal(kernel(X, X), expected(X, X))


def test_settings_are_checked_when_they_are_changed() -> None:
    kernel = RBF(1.0) + 2.0 * Matern32(3.0)
    with pytest.raises(
        ValueError, match=r"`noise` must be a setting of RBF.*it has \['0__lengthscale', '0__outputscale'"
    ):
        kernel.set_params(noise=1.0)
    with pytest.raises(ValueError, match="must be positive and finite; got -1"):
        kernel.set_params(**{"1__scale": -1.0})
    with pytest.raises(ValueError, match="lengthscale must be positive and finite; got 0"):
        RBF().set_params(lengthscale=0.0)
    assert float(kernel.set_params(**{"1__kernel__lengthscale": 4.0}).get_params()["1__kernel__lengthscale"]) == 4.0


def test_what_cannot_be_described_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"got Deep\(.*Try to keep it beside the file"):
        kernel_to_dict(RBF() + Deep(torch.nn.Identity(), RBF()))
    with pytest.raises(ValueError, match=r"no kernel of this package: 'os\.system'"):
        kernel_from_dict({"kernel": "os.system"})


# Messages


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: RBF(active_dims=2), TypeError, r"must be a list of coordinates.*got 2\. Try"),
        (lambda: RBF(active_dims=[0.5]), TypeError, r"must be a list of coordinates.*got \[0\.5\]"),
        (lambda: RBF(active_dims=[-1]), TypeError, r"counted from 0; got \[-1\]"),
        (lambda: RBF(active_dims=[]), ValueError, r"one or more different coordinates; got \[\]"),
        (lambda: Linear(active_dims=[1, 1]), ValueError, r"different coordinates; got \[1, 1\]"),
        (lambda: RBF([1.0, 2.0], active_dims=[1]), ValueError, r"as its per-dimension hyperparameters, 2; got 1"),
        (
            lambda: Periodic([1.0, 2.0], period=[1.0, 2.0, 3.0]),
            ValueError,
            r"must be single numbers or equally many; got 2 and 3",
        ),
        (lambda: Periodic(period=0.0), ValueError, "period must be positive and finite; got 0"),
        (lambda: RationalQuadratic(alpha=-1.0), ValueError, "alpha must be positive and finite; got -1"),
        (lambda: Linear(0.0), ValueError, "variance must be positive and finite; got 0"),
        (lambda: RBF(active_dims=[3])(draw(4, 3), draw(4, 3)), ValueError, r"up to coordinate 3.*X1 has 3 coordinates"),
        (lambda: (RBF() + Linear(active_dims=[5])).diagonal(draw(4, 3)), ValueError, r"active_dims up to coordinate 5"),
        (lambda: RBF() + 1.0, TypeError, r"Try Constant\(c\) for a constant c"),
        (lambda: kernels.White, AttributeError, r"There is no kernel `White`.*FixedNoiseGaussian"),
        (lambda: kernels.Cosine, AttributeError, "has no attribute 'Cosine'"),
    ],
)
def test_misuse_gets_a_message_that_helps(make: Callable[[], object], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()

"""Kernels from elsewhere: gpytorch's own answers are the truth for its kernels, composition is for deep ones."""

import subprocess
import sys
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels as theirs
from torch import Tensor, nn

from ntk_iterncgp import NonConjugateGP, likelihoods
from ntk_iterncgp.kernels import RBF, Deep, FromGPyTorch, KernelMatrix, Matern32, kernel_matmul
from tests.kernels.test_kernels import close, draw


def matern(nu: float, lengthscale: float, **settings: Any) -> theirs.MaternKernel:
    kernel = theirs.MaternKernel(nu=nu, **settings)
    kernel.lengthscale = lengthscale
    return kernel


def with_one_per_dimension() -> theirs.Kernel:
    kernel = theirs.ScaleKernel(theirs.RBFKernel(ard_num_dims=3))
    kernel.base_kernel.lengthscale = torch.tensor([0.5, 1.0, 2.0])
    kernel.outputscale = 2.5
    return kernel


def periodic(**settings: Any) -> theirs.PeriodicKernel:
    kernel = theirs.PeriodicKernel(**settings)
    kernel.lengthscale, kernel.period_length = torch.tensor(0.6), torch.tensor(1.7)
    return kernel


THEIRS: dict[str, tuple[Any, bool]] = {  # and whether it has a formula here
    "RBF": (theirs.RBFKernel(), True),
    "Matern-1/2": (matern(0.5, 0.7), True),
    "Matern-3/2, scaled": (theirs.ScaleKernel(matern(1.5, 0.7)), True),
    "per dimension": (with_one_per_dimension(), True),
    "sum and product": (theirs.ScaleKernel(matern(2.5, 0.7) + theirs.RBFKernel()) * matern(0.5, 3.0), True),
    "rational quadratic": (theirs.ScaleKernel(theirs.RQKernel(ard_num_dims=3)), True),
    "periodic": (periodic(), True),
    "periodic of some": (theirs.ScaleKernel(periodic(ard_num_dims=2, active_dims=[2, 0])), True),
    "linear": (theirs.ScaleKernel(theirs.LinearKernel()), False),
    "linear per dimension and constant": (theirs.LinearKernel(ard_num_dims=3) + theirs.ConstantKernel(), False),
    "cosine": (theirs.CosineKernel(), False),
    "cosine plus": (theirs.CosineKernel() + theirs.RBFKernel(), False),
    "scale of some coordinates": (theirs.ScaleKernel(theirs.RBFKernel(), active_dims=[1]), False),
    "KeOps Matern, scaled": (theirs.ScaleKernel(theirs.keops.MaternKernel(nu=1.5)), True),
    "KeOps RBF": (theirs.keops.RBFKernel(ard_num_dims=3), True),
    "KeOps periodic": (theirs.keops.PeriodicKernel(), True),
    "some coordinates": (theirs.RBFKernel(active_dims=[0, 2]), True),
    "some coordinates, scaled": (theirs.ScaleKernel(matern(2.5, 0.7, active_dims=[1])), True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", THEIRS)
def test_a_gpytorch_kernel_means_here_what_it_means_there(name: str, dtype: torch.dtype) -> None:
    peer, has_formula = THEIRS[name]
    ours = FromGPyTorch(peer)
    X, Z, V = (draw(*shape, seed=i).to(dtype) for i, shape in enumerate([(9, 3), (7, 3), (7, 2)]))
    with torch.no_grad():
        expected = peer.double()(X.double(), Z.double()).to_dense()
        variances = peer(X.double(), diag=True)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    close(ours(X, Z).double(), expected, atol=tolerance)
    close(ours.diagonal(X).double(), variances, atol=tolerance)
    close(kernel_matmul(ours, X, Z, V).double(), expected @ V.double(), atol=10 * tolerance)
    assert ours.is_of_distance == has_formula
    assert ours.is_decreasing == (has_formula and "eriodic" not in name)
    assert ours(X, Z).dtype == dtype


def test_a_translated_kernel_keeps_its_values_when_the_original_is_trained_on() -> None:
    peer = theirs.ScaleKernel(theirs.RBFKernel())
    ours = FromGPyTorch(peer)
    X = draw(5, 2)
    before = ours(X, X)
    peer.base_kernel.lengthscale = 17.0
    close(ours(X, X), before)
    assert repr(ours) == "FromGPyTorch(0.693147 * RBF(lengthscale=0.693147, outputscale=1))"
    assert list(ours.hyperparameters()) == ["scale", "kernel.lengthscale", "kernel.outputscale"]
    longer = ours.with_hyperparameters({"kernel.lengthscale": torch.tensor(2.0, dtype=torch.float64)})
    assert "lengthscale=2" in repr(longer) and "lengthscale=0.69" in repr(ours)


def test_kernels_that_gpytorch_does_not_call_stationary_are_refused() -> None:
    with pytest.raises(ValueError, match="`kernel` must be stationary; got PolynomialKernel"):
        FromGPyTorch(theirs.PolynomialKernel(power=2))
    with pytest.raises(ValueError, match=r"must be a single kernel; got a batch of shape \(2,\)"):
        FromGPyTorch(theirs.RBFKernel(batch_shape=torch.Size([2])))
    with pytest.raises(TypeError, match=r"must be a kernel of gpytorch's; got RBF\("):
        FromGPyTorch(RBF())


def test_kernels_with_several_values_for_a_pair_of_inputs_are_refused() -> None:
    kernel, X, Z = FromGPyTorch(theirs.RBFKernelGrad()), draw(4, 2), draw(3, 2)
    with pytest.raises(ValueError, match=r"one value for each pair .* \(4, 3\) here; got \(12, 9\) from RBFKernelGrad"):
        kernel(X, Z)
    with pytest.raises(ValueError, match=r"of shape \(4,\) here; got \(12,\) from RBFKernelGrad"):
        kernel.diagonal(X)
    with pytest.raises(ValueError, match="one value for each pair"):
        kernel_matmul(kernel, X, Z, draw(3, 1))


@pytest.mark.parametrize("name", ["KeOps Matern, scaled", "KeOps periodic", "some coordinates, scaled"])
def test_the_inputs_get_a_gradient_through_a_gpytorch_kernel(name: str) -> None:
    peer, _ = THEIRS[name]
    X, V = draw(9, 3).requires_grad_(), draw(9, 2, seed=1)
    (expected,) = torch.autograd.grad((peer.double()(X).to_dense() @ V).square().sum(), X)
    (found,) = torch.autograd.grad(kernel_matmul(FromGPyTorch(peer), X, X, V).square().sum(), X)
    close(found, expected, atol=1e-8)


@pytest.mark.process
def test_the_package_works_without_gpytorch() -> None:
    code = (
        "import sys; sys.modules['gpytorch'] = None\n"
        "from ntk_iterncgp.kernels import FromGPyTorch\n"
        "try: FromGPyTorch(None)\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert (
        run.stdout == "The package gpytorch must be installed for FromGPyTorch; got none. Try pip install gpytorch.\n"
    )
    assert gpytorch.__version__


# A network's features


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def test_a_deep_kernel_is_the_kernel_of_the_features() -> None:
    features, top = network(), Matern32([0.5, 1.0, 2.0], 1.7)
    kernel = Deep(features, top)
    X, Z, V = draw(9, 5), draw(7, 5, seed=1), draw(7, 2, seed=2)
    with torch.no_grad():
        expected = top(features(X), features(Z))
        close(kernel(X, Z), expected)
        close(kernel.diagonal(X), top.diagonal(X[:, :3]))
        close(kernel_matmul(kernel, X, Z, V), expected @ V)
        close(kernel_matmul(kernel, X, X, V.repeat(2, 1)[:9]), kernel(X, X) @ V.repeat(2, 1)[:9])


@pytest.mark.parametrize("method", ["plain", "gemm"])
def test_the_weights_get_the_gradient_of_the_dense_product(method: str) -> None:
    features, top = network(), RBF(0.8)
    X, V = draw(9, 5), draw(9, 2, seed=1)
    weights = list(features.parameters())
    expected = torch.autograd.grad((top(features(X), features(X)) @ V).square().sum(), weights)
    product = KernelMatrix(Deep(features, top), X, method=method) @ V
    for found, wanted in zip(torch.autograd.grad(product.square().sum(), weights), expected, strict=True):
        close(found, wanted, atol=1e-10)


def test_the_weights_get_a_gradient_also_where_the_deep_kernel_is_part_of_a_sum() -> None:
    features, X, V = network(), draw(9, 5), draw(9, 2, seed=1)
    kernel = 0.5 * (Deep(features, RBF(0.8)) + Matern32(2.0))
    weights = list(features.parameters())
    expected = torch.autograd.grad((0.5 * RBF(0.8)(features(X), features(X)) @ V).sum(), weights)
    found = torch.autograd.grad(kernel_matmul(kernel, X, X, V).sum(), weights)
    for actual, wanted in zip(found, expected, strict=True):
        close(actual, wanted, atol=1e-10)


def test_features_are_computed_once_for_a_product_of_many_tiles() -> None:
    calls: list[int] = []
    features = network()
    features.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    X, V = draw(200, 5), draw(200, 2, seed=1)
    with torch.no_grad():
        kernel_matmul(Deep(features, RBF()), X, X, V, chunk_bytes=10_000)
    assert calls == [200]


def test_a_gp_with_a_deep_kernel_is_a_gp_on_the_features() -> None:
    X, features, top = draw(60, 5), network().requires_grad_(False), RBF(0.5, 4.0)
    labels = (X[:, 0] > 0).long()
    deep = NonConjugateGP(
        Deep(features, top), likelihoods.Bernoulli(), max_products=30, policy="curvature_residual"
    ).fit(X, labels)
    plain = NonConjugateGP(top, likelihoods.Bernoulli(), max_products=30, policy="curvature_residual").fit(
        features(X), labels
    )
    close(deep.predict(X), plain.predict(features(X)), atol=1e-9)


def test_features_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`features` must be a torch\.nn\.Module; got function"):
        Deep(lambda x: x, RBF())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a Kernel, on top of the features; got .* Try RBF\(\)"):
        Deep(nn.Identity(), None)  # type: ignore[arg-type]
    flat: Tensor = draw(4, 6)
    with pytest.raises(ValueError, match=r"must give one row for each of the 4 inputs; got \(4, 2, 3\)"):
        Deep(nn.Unflatten(1, (2, 3)), RBF())(flat, flat)

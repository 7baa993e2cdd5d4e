"""A fitted GP in a file: the same predictions, the same refinement, and nothing that is not checked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ntk_iterncgp import NonConjugateGP
from ntk_iterncgp.kernels import RBF, Constant, Deep, Linear, Matern32, Periodic, Stationary
from ntk_iterncgp.likelihoods import (
    Bernoulli,
    Binomial,
    FixedNoiseGaussian,
    Gaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Softmax,
)
from ntk_iterncgp.persistence.files import FileError
from ntk_iterncgp.solver import State

N = 40
generator = torch.Generator().manual_seed(0)
X = torch.rand(N, 2, generator=generator, dtype=torch.float64)
x = torch.rand(7, 2, generator=generator, dtype=torch.float64)
wave = torch.sin(6 * X[:, 0])
counts = torch.poisson((1 + wave).exp(), generator=generator)
exposure = torch.rand(N, generator=generator, dtype=torch.float64) + 0.5
levels = torch.bucketize(wave, torch.tensor([-0.5, 0.5], dtype=torch.float64))
KERNEL = Matern32([0.5, 2.0], 1.5)

CASES: dict[str, tuple[Callable[[], NonConjugateGP], Tensor]] = {
    "gaussian": (lambda: NonConjugateGP(KERNEL, Gaussian(0.1)), wave),
    "two outputs": (lambda: NonConjugateGP([KERNEL, RBF()], Gaussian(0.1, 2)), torch.stack([wave, X[:, 1]], 1)),
    "fixed noise": (lambda: NonConjugateGP(KERNEL + Linear(), FixedNoiseGaussian(0.1 * exposure)), wave),
    "poisson": (lambda: NonConjugateGP(KERNEL, Poisson(exposure), mean=1.0, max_products=9), counts),
    "negative binomial": (lambda: NonConjugateGP(2.0 * KERNEL * RBF(), NegativeBinomial(0.5), seed=3), counts),
    "bernoulli": (
        lambda: NonConjugateGP(Constant() + Periodic(active_dims=[0]), Bernoulli(), policy="random_subspace", seed=5),
        wave > 0,
    ),
    "binomial": (lambda: NonConjugateGP(KERNEL, Binomial(30), max_rank=12), counts.clamp_max(30)),
    "ordinal": (lambda: NonConjugateGP(KERNEL, Ordinal(3, link="probit"), policy="unit", max_products=8), levels),
    "softmax": (lambda: NonConjugateGP(KERNEL, Softmax(3), max_products=6), levels),
    "softmax, joint": (lambda: NonConjugateGP([KERNEL, RBF(), RBF(0.3)], Softmax(3), max_products=30), levels),
}


def same(one: NonConjugateGP, other: NonConjugateGP, at: Tensor) -> None:
    for found, expected in zip(other.latent(at), one.latent(at), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(other.predict(at, link="quadrature"), one.predict(at, link="quadrature"))
    assert other.elbo() == one.elbo() and other.log_evidence() == one.log_evidence()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_a_gp_predicts_the_same_bits_after_it_was_saved_and_refines_the_same(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    make, y = CASES[name]
    gp = make().fit(X.to(dtype), y)
    gp.save(str(tmp_path / "gp.safetensors"))
    again = NonConjugateGP.load(tmp_path / "gp.safetensors")
    same(gp, again, x.to(dtype))
    assert repr(again.kernels) == repr(gp.kernels) and repr(again.likelihood) == repr(gp.likelihood)
    assert again.report_.status == gp.report_.status and again.report_.history == gp.report_.history
    assert again.report_.num_products == gp.report_.num_products
    same(gp.refine(3), again.refine(3), x.to(dtype))
    same(gp, NonConjugateGP.from_state_dict(gp.state_dict()), x.to(dtype))


def test_a_loaded_gp_can_be_fitted_and_optimised_anew() -> None:
    gp = NonConjugateGP.from_state_dict(
        NonConjugateGP(KERNEL, Gaussian(0.1), max_products=20).fit(X, wave).state_dict()
    )
    assert gp.stopping.max_products == 20
    assert torch.equal(
        gp.fit(X, wave).predict(x), NonConjugateGP(KERNEL, Gaussian(0.1), max_products=20).fit(X, wave).predict(x)
    )


class Own(Stationary):
    """A kernel that the package does not know."""

    @staticmethod
    def profile(squared: Tensor) -> Tensor:
        return 1 / (1 + squared)


def own_policy(state: State) -> Tensor:
    return state.residual[:, None]


def test_what_is_not_of_the_package_is_given_when_loading(tmp_path: Path) -> None:
    path = tmp_path / "gp.safetensors"
    gp = NonConjugateGP(Own(0.7, 1.3), Gaussian(0.1), policy=own_policy, max_products=5).fit(X, wave)
    gp.save(path)
    with pytest.raises(FileError, match=r"cannot be loaded: `kernel` must be given, .*; got None\. Try .*kernel="):
        NonConjugateGP.load(path)
    again = NonConjugateGP.load(path, kernel=Own())  # its hyperparameters are in the file
    same(gp, again, x)
    with pytest.raises(RuntimeError, match=r"`policy` must be given .*; got None\. Try load"):
        again.refine(2)
    same(gp.refine(2), NonConjugateGP.load(path, kernel=Own(), policy=own_policy).refine(2), x)
    with pytest.raises(FileError, match=r"does not agree with its kernel and its data.*another kernel"):
        NonConjugateGP.load(path, kernel=RBF())


def test_a_network_inside_is_given_when_loading(tmp_path: Path) -> None:
    torch.manual_seed(0)
    deep = Deep(torch.nn.Linear(2, 2).double().requires_grad_(False), RBF(0.8))
    gp = NonConjugateGP(deep, Bernoulli()).fit(X, wave > 0)
    gp.save(tmp_path / "gp.safetensors")
    same(gp, NonConjugateGP.load(tmp_path / "gp.safetensors", kernel=deep), x)


def test_damaged_and_foreign_files_get_one_clear_message(tmp_path: Path) -> None:
    path = tmp_path / "gp.safetensors"
    gp = NonConjugateGP(KERNEL, Gaussian(0.1)).fit(X, wave)
    gp.save(path)
    whole = path.read_bytes()
    for content in (whole[:-10], whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:], b"", b"PK\x03\x04 not ours"):
        path.write_bytes(content)
        with pytest.raises(FileError, match="is not a Gaussian process file, or is damaged"):
            NonConjugateGP.load(path)
    with pytest.raises(FileError, match="there is no such file"):
        NonConjugateGP.load(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s.pop("inputs"), "does not describe a fitted GP"),
        (lambda s: s["kernels"][0].update(kernel="eval"), "no kernel of this package: 'eval'"),
        (lambda s: s["likelihood"].update(likelihood="__class__"), "likelihood must be one of this package; got"),
        (
            lambda s: s.update(targets=s["targets"][:5]),
            "does not describe a fitted GP|must be a float64 tensor of shape",
        ),
        (lambda s: s["run"]["state"]["gram"].mul_(1.5), "does not agree with its kernel and its data"),
        (lambda s: s["kernels"][0].update(lengthscale=torch.tensor(3.0).double()), "does not agree with its kernel"),
    ],
)
def test_a_description_that_was_tampered_with_is_refused(change: Callable[[Any], object], sentence: str) -> None:
    saved = NonConjugateGP(KERNEL, Gaussian(0.1), policy="curvature_residual").fit(X, wave).state_dict()
    change(saved)
    with pytest.raises(ValueError, match=sentence):
        NonConjugateGP.from_state_dict(saved)


def test_there_is_nothing_to_save_before_a_fit(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="must be fitted first; got one that has not been"):
        NonConjugateGP(KERNEL, Gaussian(0.1)).save(tmp_path / "gp.safetensors")
    assert list(tmp_path.iterdir()) == []

"""Misuse of a network's posterior: each message says what must hold, what came, and what to do."""

import warnings
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from ntk_iterncgp.jacobian.autograd import _tell_once, as_outputs

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def fitted(num_outputs: int = 1, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, num_outputs))
    la = Laplace(model, "regression", "all", "iterncgp", **settings)
    la.fit(DataLoader(TensorDataset(X, X[:, :num_outputs]), batch_size=6))
    return la


def test_a_precision_prints_as_its_sizes() -> None:
    la = fitted()
    assert repr(la.posterior_precision) == f"PosteriorPrecision(21 weights, {la.posterior.rank} actions)"


def test_what_predictions_refuse() -> None:
    la = fitted()
    with pytest.raises(
        ValueError, match=r"`value` must be .* shape \(P,\) = \(21,\); got \(3,\)\. Try one of la\.sample"
    ):
        la.log_prob(torch.zeros(3))
    with pytest.raises(ValueError, match=r"`pred_type` must be one of 'glm', 'nn', 'gp'; got 'foo'"):
        la(X, pred_type="foo")
    with pytest.raises(ValueError, match=r"`link_approx` must be one of 'mc', 'probit', .*'quadrature'.*; got 'foo'"):
        la(X, link_approx="foo")
    with warnings.catch_warnings(), pytest.raises(ValueError, match="`n_samples` must be a whole number of at least 2"):
        warnings.simplefilter("error")
        la(X, pred_type="nn", n_samples=1)


@pytest.mark.parametrize(
    ("name", "advice"), [("rank", "'max_rank'"), ("number_actions", "'num_actions'"), ("zz", "help")]
)
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_an_unknown_argument_names_the_close_ones(name: str, advice: str, subset: str) -> None:
    with pytest.raises(TypeError, match=rf"'iterncgp'` must be given .*; got '{name}'\. Try {advice}"):
        Laplace(nn.Linear(3, 1), "regression", subset, "iterncgp", **{name: 3})


def test_what_the_noise_must_be() -> None:
    with pytest.raises(ValueError, match=r"`sigma_noise` .* Try sigma_noise=torch\.tensor\(\[0\.1, 0\.2\]\)"):
        fitted(2, sigma_noise=[0.1, 0.2])
    with pytest.raises(ValueError, match=r"`sigma_noise` must be a positive .* finite; got -1 among them"):
        fitted(2, sigma_noise=torch.tensor([0.1, -1.0]))
    la = fitted(2, sigma_noise=torch.tensor([0.1, 0.2]))
    la.sigma_noise = torch.tensor([0.3, 0.2])
    with pytest.raises(ValueError, match=r"which was given \[0\.1, 0\.2\]; got \[0\.3, 0\.2\]"):
        la(X)


OUTPUTS: list[tuple[Any, str]] = [
    (torch.zeros(2, 3, 4, 4), r"outputs\.flatten\(2\)\.mT, with labels \(b, H·W\)"),
    ({"out": torch.zeros(2, 3), "aux": torch.zeros(2, 3)}, r'returns outputs\["out"\]'),
    ((torch.zeros(2, 1), torch.zeros(2, 1)), "of a mean and a log-variance the mean, with `sigma_noise`"),
    ([], "those outputs alone"),
]


@pytest.mark.parametrize(("outputs", "advice"), OUTPUTS)
def test_other_outputs_are_refused_with_what_to_return_instead(outputs: Any, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        as_outputs(outputs, of_tokens=True)


def test_a_warning_is_cut_between_words() -> None:
    said = RuntimeError("vmap: " + 20 * "attempting " + "\nmore")
    with pytest.warns(UserWarning, match=r"says: vmap: (attempting )+…\)\. Its rows"):
        _tell_once(nn.Linear(1, 1), said)

"""Evidence and hyperparameters of the laplace-torch flavours: without a pass over the training data."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests import oracles
from tests.laplace_helpers import (
    ENOUGH,
    GRID,
    MLP,
    ONE,
    SEVERAL,
    close,
    fitted,
    near_and_far,
    policies,
    precisions,
    problems,
    quiet_scalars,
    subsets,
    training,
    validation,
    written_out,
)
from tests.network_cases import BY_NAME, NetworkCase


@pytest.fixture
def every_warning() -> Iterator[None]:
    """torch gives some warnings once in a session; here each time, whichever test comes first."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


# Evidence and hyperparameters


@problems
@subsets
@pytest.mark.parametrize("num_actions", [4, ENOUGH])
@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
def test_the_gradient_of_the_evidence_is_right(
    case: NetworkCase, subset: str, num_actions: int, structure: str
) -> None:
    la = fitted(case, subset, num_actions=num_actions)
    precision = precisions(la, structure).requires_grad_()
    arguments: tuple[Tensor, ...] = (precision,)
    if case.likelihood == "regression":
        arguments = (precision, torch.tensor(0.7, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(lambda *given: la.log_marginal_likelihood(*given), arguments, rtol=1e-5, atol=1e-7)


def test_the_gradient_of_the_refined_evidence_of_a_regression_is_right() -> None:
    la = fitted(ONE, mean="refined", newton_tol=1e-12)
    precision = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: la.log_marginal_likelihood(given), (precision,), rtol=1e-4, atol=1e-6)


@problems
@subsets
@policies
@pytest.mark.parametrize("num_actions", [1, 5, 15])
def test_the_evidence_of_few_actions_is_a_lower_bound(
    case: NetworkCase, subset: str, policy: str, num_actions: int
) -> None:
    la, dense = fitted(case, subset, policy=policy, num_actions=num_actions), written_out(case, subset)
    W, fit = dense.curvature(dense.f, 1.0), dense.log_prob(dense.f, 1.0)
    for precision in (0.05, 1.0, 20.0):
        bound = float(la.log_marginal_likelihood(prior_precision=torch.tensor(precision, dtype=torch.float64)))
        penalty = precision * dense.weights @ dense.weights
        exact = float(fit - (penalty + oracles.log_determinant(W, dense.J @ dense.J.T / precision)) / 2)
        assert bound <= exact + 1e-11 * abs(exact)


@subsets
def test_sigma_noise_is_refused_for_classification(subset: str) -> None:
    la = fitted(MLP, subset)
    with pytest.raises(ValueError, match="`sigma_noise` must be 1 for classification"):
        la.log_marginal_likelihood(sigma_noise=torch.tensor(0.5))


@pytest.mark.parametrize("case", [MLP, ONE], ids=["classification", "regression"])
def test_predictions_go_on_after_the_evidence_has_been_differentiated(case: NetworkCase, every_warning: None) -> None:
    la, x = fitted(case), case.new_inputs()
    precision = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor(0.5, dtype=torch.float64, requires_grad=True) if case is ONE else None
    la.log_marginal_likelihood(precision, sigma).backward()
    mean, variance = la.predictive_moments(x)
    assert not mean.requires_grad and not variance.requires_grad
    expected = fitted(case, prior_precision=2.0, **({"sigma_noise": 0.5} if case is ONE else {}))
    close(variance, expected.predictive_moments(x)[1])
    la.compress(6)
    assert not la.predictive_moments(x)[1].requires_grad
    saved = la.state_dict()
    assert not any(value.requires_grad for value in saved.values() if isinstance(value, Tensor))
    assert not any(value.requires_grad for value in saved["posterior"].values() if isinstance(value, Tensor))
    la.fit(training(case))
    close(la.predictive_moments(x)[1], variance)


@quiet_scalars
@problems
@subsets
@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
def test_tuning_by_the_evidence_raises_it(case: NetworkCase, subset: str, structure: str) -> None:
    la = fitted(case, subset, num_actions=5)
    before = float(la.log_marginal_likelihood())
    la.optimize_prior_precision(method="marglik", prior_structure=structure, n_steps=40)
    assert la.prior_precision.shape == (1 if structure == "scalar" else la.n_layers,)
    assert not la.prior_precision.requires_grad
    assert float(la.log_marginal_likelihood()) > before


def test_tuning_by_the_evidence_is_silent(every_warning: None) -> None:
    la = fitted(MLP, num_actions=5)
    la.optimize_prior_precision(method="marglik", n_steps=2)
    assert not la.prior_precision.requires_grad


def test_tuning_by_the_evidence_follows_a_loop_of_ones_own_that_has_learnt_the_noise() -> None:
    la = fitted(ONE, num_actions=5)
    log_noise = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (-la.log_marginal_likelihood(sigma_noise=log_noise.exp())).backward()
    learnt = log_noise.grad.clone()
    la.optimize_prior_precision(method="marglik", n_steps=3)
    assert not la.prior_precision.requires_grad and torch.equal(log_noise.grad, learnt)


@quiet_scalars
def test_tuning_one_precision_by_the_evidence_finds_the_best_of_a_fine_grid() -> None:
    la = fitted(ONE)
    la.optimize_prior_precision(method="marglik", prior_structure="scalar", n_steps=200)
    found = float(la.prior_precision)
    grid = torch.logspace(-3, 3, 400, dtype=torch.float64)
    values = torch.tensor([float(la.log_marginal_likelihood(prior_precision=p)) for p in grid])
    best = float(grid[values.argmax()])
    assert 2e-3 < best < 500
    assert found == pytest.approx(best, rel=0.1)


def test_one_precision_per_weight_by_the_evidence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`prior_structure` must be 'scalar' or 'layerwise', .*; got 'diag'"):
        fitted(MLP).optimize_prior_precision(method="marglik", prior_structure="diag")


def test_an_unknown_way_of_tuning_is_refused() -> None:
    la = fitted(MLP)
    with pytest.raises(ValueError, match="`method` must be 'marglik', 'gridsearch' or 'validation'; got 'magic'"):
        la.optimize_prior_precision(method="magic")
    with pytest.raises(ValueError, match="`val_loader` must hold data"):
        la.optimize_prior_precision(method="gridsearch")


CANDIDATES = torch.logspace(-2, 3, 6)


@functools.cache
def refits(name: str, subset: str) -> list[Any]:
    """A fit for each candidate."""
    case = BY_NAME[name]
    settings = {"sigma_noise": 0.4} if case.likelihood == "regression" else {}
    return [fitted(case, subset, prior_precision=float(candidate), **settings) for candidate in CANDIDATES]


def score_by_hand(case: NetworkCase, la: Any, link: str = "probit") -> float:
    """The negative log-likelihood of the validation set."""
    total = 0.0
    for x, y in validation(case):
        if case.likelihood == "classification":
            total -= float(la(x, pred_type="glm", link_approx=link).gather(1, y[:, None]).log().sum())
        else:
            mean, variance = la(x, diagonal_output=True)
            normal = torch.distributions.Normal(mean, (variance + la.sigma_noise**2).sqrt())
            total -= float(normal.log_prob(y.reshape(mean.shape)).sum())
    return total


def best(scores: list[float]) -> float:
    assert max(scores) - min(scores) > 1e-2, "the score is expected to depend on the prior"
    return pytest.approx(float(CANDIDATES[torch.tensor(scores).argmin()]), rel=1e-5)


@pytest.mark.parametrize(
    ("case", "link"),
    [(MLP, "probit"), (MLP, "bridge"), (MLP, "bridge_norm"), (ONE, "probit"), (SEVERAL, "probit")],
    ids=["probit", "bridge", "bridge_norm", "one output", "several outputs"],
)
@subsets
def test_the_grid_picks_what_refitting_and_scoring_by_hand_picks(case: NetworkCase, link: str, subset: str) -> None:
    la = fitted(case, subset, **({"sigma_noise": 0.4} if case.likelihood == "regression" else {}))
    la.optimize_prior_precision(method="gridsearch", val_loader=validation(case), link_approx=link, **GRID)
    assert float(la.prior_precision) == best([score_by_hand(case, refit, link) for refit in refits(case.name, subset)])


def test_the_grid_follows_the_refined_mean_of_a_regression() -> None:
    """It picks what the same posterior scores best at, when set to each precision."""
    la, scores = fitted(ONE, mean="refined", sigma_noise=0.4), []
    for candidate in CANDIDATES:
        la.prior_precision = float(candidate)
        scores.append(score_by_hand(ONE, la))
    la.optimize_prior_precision(method="gridsearch", val_loader=validation(ONE), **GRID)
    assert float(la.prior_precision) == best(scores)


class SummedLoss(torchmetrics.Metric):
    """Adds up what it is given, and remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.asked: list[float] = []

    def update(self, probabilities: Tensor, targets: Tensor) -> None:
        self.total = self.total - probabilities.gather(1, targets[:, None]).log().sum()

    def compute(self) -> Tensor:
        self.asked.append(float(self.total))
        return self.total


def test_a_metric_is_reset_between_candidates() -> None:
    la, metric = fitted(MLP), SummedLoss()
    metric.update(torch.full((3, 3), 1e-30, dtype=torch.float64), torch.zeros(3, dtype=torch.long))  # left from before
    la.optimize_prior_precision(method="gridsearch", val_loader=validation(MLP), loss=metric, **GRID)
    scores = [score_by_hand(MLP, refit) for refit in refits("mlp", "all")]
    close(torch.tensor(metric.asked), torch.tensor(scores), 1e-6)
    assert float(la.prior_precision) == best(scores)


@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
@subsets
def test_a_loss_sees_for_each_candidate_what_refitting_predicts(subset: str, link: str) -> None:
    la, seen = fitted(MLP, subset), []

    def loss(probabilities: Tensor, targets: Tensor) -> Tensor:
        assert len(targets) == 15
        seen.append(-float(probabilities.gather(1, targets[:, None]).log().sum()))
        return torch.tensor(seen[-1])

    la.optimize_prior_precision(method="gridsearch", val_loader=validation(MLP), loss=loss, link_approx=link, **GRID)
    scores = [score_by_hand(MLP, refit, link) for refit in refits("mlp", subset)]
    close(torch.tensor(seen), torch.tensor(scores), 1e-6)
    assert float(la.prior_precision) == best(scores)


@pytest.mark.parametrize("case", [ONE, SEVERAL], ids=["one output", "several outputs"])
def test_a_metric_of_the_mean_alone_serves_for_regression(case: NetworkCase) -> None:
    """With a refined mean even the squared error depends on the prior; several outputs add up, as in laplace-torch."""
    la = fitted(case, mean="refined")
    metric = torchmetrics.MeanSquaredError(num_outputs=case.num_outputs)
    la.optimize_prior_precision(method="gridsearch", val_loader=validation(case), loss=metric, **GRID)
    chosen, errors = float(la.prior_precision), []
    x, y = next(iter(DataLoader(case.dataset(15, 5, torch.float64), batch_size=15)))
    for candidate in CANDIDATES:
        la.prior_precision = float(candidate)
        errors.append(float((la(x)[0] - y).square().mean(0).sum()))
    assert chosen == best(errors)


def test_the_grid_passes_the_validation_set_once() -> None:
    class Counting(TensorDataset):
        asked = 0

        def __getitem__(self, index: int) -> Any:
            Counting.asked += 1
            return super().__getitem__(index)

    x, y = next(iter(DataLoader(MLP.dataset(15, 5, torch.float64), batch_size=15)))
    fitted(MLP).optimize_prior_precision(
        method="gridsearch", val_loader=DataLoader(Counting(x, y), batch_size=4), grid_size=20
    )
    assert Counting.asked == 15


def test_a_failed_choice_leaves_the_precision_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted(MLP, prior_precision=3.0)
    with pytest.raises(ValueError, match="`init_prior_prec` must be a positive number"):
        la.optimize_prior_precision(method="marglik", init_prior_prec=-1.0)
    calls = iter(range(4))

    def interrupted(*args: Any, **settings: Any) -> Tensor:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return evidence(*args, **settings)

    evidence = la.log_marginal_likelihood
    monkeypatch.setattr(la, "log_marginal_likelihood", interrupted)
    with pytest.raises(KeyboardInterrupt):
        la.optimize_prior_precision(method="marglik")
    assert la.prior_precision.tolist() == [3.0] and not la.prior_precision.requires_grad


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused_where_it_is_set(temperature: float) -> None:
    la = fitted(MLP)
    with pytest.raises(ValueError, match="`temperature` must be a positive number"):
        la.temperature = temperature
    assert la.temperature == 1.0 and bool(torch.isfinite(la.predictive_moments(near_and_far(MLP))[1]).all())

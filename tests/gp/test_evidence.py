"""The exact evidence as a function of the hyperparameters: its gradient, and the search that climbs it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ntk_iterncgp import NonConjugateGP
from ntk_iterncgp.gp.evidence import ExactEvidence
from ntk_iterncgp.gp.hyperparameters import (
    MEAN,
    hyperparameters,
    kernels_with,
    mean_from_data,
    values_from_data,
    with_values,
)
from ntk_iterncgp.kernels import RBF, Kernel, Matern32, Matern52
from ntk_iterncgp.likelihoods import Bernoulli, Binomial, Gaussian, Likelihood, NegativeBinomial, Ordinal, Poisson
from tests import oracles
from tests.checkpoint_helpers import Killed, checkpoint_in, die_at_save
from tests.gp.test_exact import LIKELIHOODS, NOISE, N, X, x

PARTS: list[Kernel] = [Matern52(0.3, 5.0), 0.7 * RBF([0.5, 0.9]) + Matern32(2.0), Matern32(0.8, 1.0)]


@pytest.mark.parametrize("shared", [0, 1, None], ids=["one kernel", "a sum", "a kernel each"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_value_and_gradient_are_those_of_the_dense_evidence(name: str, shared: int | None) -> None:
    likelihood, y = LIKELIHOODS[name]
    C = likelihood.num_outputs
    kernels = PARTS[:C] if shared is None else [PARTS[shared]]
    mean = 0.2 * torch.arange(1, C + 1, dtype=torch.float64)
    values = hyperparameters(kernels, likelihood) | {MEAN: mean}
    evidence = ExactEvidence(X, likelihood.check_targets(y), kernels, likelihood, mean, chunk_bytes=2**26)
    found, gradient = evidence(values, list(values))

    def dense(at: dict[str, Tensor]) -> float:
        parts, changed = with_values(kernels, likelihood, at)
        parts = parts if len(parts) == C else parts * C
        K = oracles.block_kernel([k(X, X) for k in parts])
        noise = changed.variance if isinstance(changed, Gaussian) else NOISE
        return float(oracles.log_evidence(name, K, at[MEAN].repeat(N), y, noise))

    assert found == pytest.approx(dense(values), abs=1e-8)
    differences = []
    for key, value in values.items():
        for place in range(value.numel()):
            ends = []
            for step in (-2e-3, -1e-3, 1e-3, 2e-3):
                moved = value.clone().reshape(-1)
                moved[place] = moved[place] + step if key == MEAN else moved[place] * torch.tensor(step).double().exp()
                ends.append(dense(values | {key: moved.reshape(value.shape)}))
            differences.append((ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / 12e-3)
    torch.testing.assert_close(gradient, torch.tensor(differences).double(), rtol=1e-5, atol=3e-6)


MORE: dict[str, tuple[Likelihood, Tensor]] = LIKELIHOODS | {
    "negative binomial": (NegativeBinomial(0.7, exposure=0.5 + X[:, 1]), LIKELIHOODS["poisson"][1]),
    "binomial": (Binomial(200), LIKELIHOODS["poisson"][1]),
    "ordinal": (Ordinal(3, thresholds=[-0.5, 0.7]), LIKELIHOODS["softmax"][1]),
}


@pytest.mark.parametrize("shared", [0, 1, None], ids=["one kernel", "a sum", "a kernel each"])
@pytest.mark.parametrize("name", MORE)
def test_the_gradient_is_that_of_autograd_through_the_dense_formula(name: str, shared: int | None) -> None:
    """A Newton step from the mode, differentiated, has the derivatives of the mode: its error is quadratic."""
    likelihood, given = MORE[name]
    C, y = likelihood.num_outputs, likelihood.check_targets(given)
    kernels = PARTS[:C] if shared is None else [PARTS[shared]]
    values = hyperparameters(kernels, likelihood) | {MEAN: 0.2 * torch.arange(1, C + 1, dtype=torch.float64)}
    evidence = ExactEvidence(X, y, kernels, likelihood, values[MEAN], chunk_bytes=2**26)
    found, gradient = evidence(values, list(values))
    mode = evidence.mode(values).latent.detach().flatten()
    bound, eye = likelihood.given(y), torch.eye(N * C, dtype=torch.float64)
    leaves = {key: value.detach().clone().requires_grad_() for key, value in values.items()}

    def log_p(f: Tensor) -> Tensor:
        if isinstance(likelihood, Gaussian):
            return torch.distributions.Normal(f.reshape(N, C), leaves["noise"].sqrt()).log_prob(y).sum()
        return bound.log_prob(f.reshape(N, C), y).sum()

    parts = kernels_with(kernels, leaves)
    K = oracles.block_kernel([kernel(X, X) for kernel in (parts if len(parts) == C else parts * C)])
    m = leaves[MEAN].repeat(N)
    for _ in range(3):  # the last of which is differentiated from where the first two have ended
        f = mode.detach().requires_grad_()
        score = torch.func.grad(log_p)(f)
        W = -torch.func.hessian(log_p)(f)
        v = torch.linalg.solve(eye + W @ K, W @ (f - m) + score)
        mode = m + K @ v
    W = -torch.func.hessian(log_p)(mode)
    value = log_p(mode) - 0.5 * v @ K @ v - 0.5 * torch.logdet(eye + W @ K)
    slopes = torch.autograd.grad(value, list(leaves.values()))
    scaled = [x if key == MEAN else x * values[key] for key, x in zip(leaves, slopes, strict=True)]
    assert found == pytest.approx(value.item(), abs=1e-8)
    torch.testing.assert_close(gradient, torch.cat([x.reshape(-1) for x in scaled]).detach(), rtol=1e-8, atol=1e-8)


def test_rows_of_a_kernel_at_a_time_give_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood, y = LIKELIHOODS["softmax"]
    evidence = ExactEvidence(X, y, PARTS, likelihood, torch.zeros(3).double(), chunk_bytes=2000)
    values = hyperparameters(PARTS, likelihood)
    whole = evidence(values, list(values))[1]
    monkeypatch.setattr("ntk_iterncgp.gp.evidence.GRAPH_BYTES", 8 * 16 * N * 5)
    torch.testing.assert_close(evidence(values, list(values))[1], whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_search_ends_where_the_gradient_is_next_to_nothing(name: str) -> None:
    likelihood, y = LIKELIHOODS[name]
    gp = NonConjugateGP(Matern52(1.5, 0.3), likelihood, mean=0.0).optimize(X, y)
    report = gp.optimization_
    assert report is not None and report.status == "converged" and report.log_evidence is not None
    assert report.log_evidence == pytest.approx(gp.log_evidence().value, abs=1e-6)
    assert report.log_evidence == max(line["log_evidence"] for line in report.history)
    assert report.elbo == pytest.approx(gp.elbo()) and "log evidence" in str(report)
    values = hyperparameters(gp.kernels, gp.likelihood)
    for key, value in values.items():
        for factor in (0.8, 1.25):
            kernels, changed = with_values(gp.kernels, gp.likelihood, values | {key: factor * value})
            other = NonConjugateGP(kernels[0], changed, mean=0.0).fit(X, y)
            assert other.log_evidence().value <= report.log_evidence + 0.05


def test_a_mean_that_was_not_given_is_learnt_and_one_that_was_stays() -> None:
    counts = torch.poisson((4 + torch.sin(6 * X[:, 0])).exp().repeat(1), generator=torch.Generator().manual_seed(0))
    learnt = NonConjugateGP(RBF(0.5), Poisson()).optimize(X, counts)
    given = NonConjugateGP(RBF(0.5), Poisson(), mean=0.0).optimize(X, counts)
    assert 2 < float(learnt.mean) < 6 and float(given.mean) == 0.0
    assert learnt.log_evidence().value > given.log_evidence().value
    far = x + 100.0  # where nothing was counted the rate is the average one, not one
    assert float(learnt.predict(far).mean()) > 10


def test_starting_values_follow_the_data() -> None:
    inputs, likelihood = X * torch.tensor([1.0, 100.0]).double(), Gaussian(1.0)
    y = likelihood.check_targets(50 * X[:, 0])
    kernels: list[Kernel] = [RBF([1.0, 1.0])]
    values = hyperparameters(kernels, likelihood)
    found = values_from_data(values, list(values), inputs, y, likelihood)
    assert 50 < float(found["lengthscale"][1] / found["lengthscale"][0]) < 200
    assert float(found["outputscale"]) == pytest.approx(float(y.var(correction=0)))
    held = values_from_data(values, ["noise"], inputs, y, likelihood)
    assert torch.equal(held["lengthscale"], values["lengthscale"])
    assert float(mean_from_data(likelihood, y)) == pytest.approx(float(y.mean()))
    assert float(mean_from_data(Poisson(), torch.tensor([0.0, 1e6]).double())) == pytest.approx(13.1224, abs=1e-3)
    assert float(mean_from_data(Bernoulli(), torch.tensor([1.0, 1.0, 0.0]).double())) == pytest.approx(0.6931, abs=1e-3)
    assert bool(torch.isfinite(mean_from_data(Poisson(), torch.zeros(3).double())).all())


@pytest.mark.parametrize("policy", ["auto", "curvature_residual"])
def test_a_search_that_was_killed_goes_on(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    y, said = LIKELIHOODS["poisson"][1], list[str]()

    def searched(**settings: Any) -> NonConjugateGP:
        gp = NonConjugateGP(Matern52(1.5, 0.3), Poisson(), policy=policy, max_products=15)
        return gp.optimize(X, y, max_steps=4, **settings)

    whole = searched()
    with monkeypatch.context() as patch:
        die_at_save(1, patch)
        with pytest.raises(Killed):
            searched(checkpoint=checkpoint_in(tmp_path))
    calls: list[int] = []
    evaluate = ExactEvidence.__call__
    monkeypatch.setattr(
        ExactEvidence, "__call__", lambda self, *arguments: calls.append(1) or evaluate(self, *arguments)
    )
    resumed = searched(checkpoint=checkpoint_in(tmp_path, said))
    assert any("Going on with 'optimize'" in sentence for sentence in said)
    assert whole.optimization_ is not None and resumed.optimization_ is not None
    assert resumed.optimization_.hyperparameters == whole.optimization_.hyperparameters
    assert resumed.optimization_.history == whole.optimization_.history
    if policy == "auto":
        assert 0 < len(calls) <= len(whole.optimization_.history) - 1
    assert not tmp_path.exists() or not any(tmp_path.iterdir())


def test_what_is_fixed_stays_where_it_is() -> None:
    y = LIKELIHOODS["bernoulli"][1]
    gp = NonConjugateGP(Matern52(0.5, 2.0), Bernoulli()).optimize(X, y, fixed=["lengthscale", "mean"])
    values = gp.kernels[0].hyperparameters()
    assert float(values["lengthscale"]) == 0.5 and float(values["outputscale"]) != 2.0
    assert float(gp.mean) == pytest.approx(float(mean_from_data(Bernoulli(), y)))


@pytest.mark.filterwarnings("ignore:The run was interrupted")
def test_an_interrupt_ends_the_search_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    y, calls = LIKELIHOODS["bernoulli"][1], [0]
    evaluate = ExactEvidence.__call__

    def interrupted(self: ExactEvidence, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return evaluate(self, *arguments)

    monkeypatch.setattr(ExactEvidence, "__call__", interrupted)
    gp = NonConjugateGP(Matern52(0.5, 2.0), Bernoulli()).optimize(X, y)
    assert gp.optimization_ is not None and gp.optimization_.status == "interrupted"
    assert len(gp.optimization_.history) == 5 and gp.report_.status == "exact"

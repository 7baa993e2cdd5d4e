"""Posteriors as BoTorch models: moments, batches, gradients, acquisition, more observations."""

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("botorch", reason="needs botorch (extra `botorch`)")

from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient, qLogExpectedImprovement
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.botorch import GPModel, LaplaceModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning"),
]
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(12, 2, generator=GENERATOR, dtype=torch.float64)
y = torch.sin(5 * X[:, 0]) + X[:, 1]
NEW = torch.rand(3, 2, 2, generator=GENERATOR, dtype=torch.float64)  # three batches of two points


def regression(num_outputs: int = 1) -> NonConjugateGP:
    kernel = kernels.Matern52(lengthscale=0.5, outputscale=1.0)
    targets = y if num_outputs == 1 else torch.stack([y, -2 * y], 1)
    return NonConjugateGP(kernel, likelihoods.Gaussian(0.01, num_outputs)).fit(X, targets)


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_each_batch_has_the_joint_moments_of_its_points(num_outputs: int) -> None:
    gp = regression(num_outputs)
    posterior = GPModel(gp).posterior(NEW)
    assert posterior.mean.shape == (3, 2, num_outputs)
    for batch, points in enumerate(NEW):
        mean, joint = gp.latent(points, joint=True)
        torch.testing.assert_close(posterior.mean[batch], mean)
        torch.testing.assert_close(posterior.distribution.covariance_matrix[batch], joint, rtol=1e-9, atol=1e-12)


def test_one_point_a_batch_is_the_same_as_in_company() -> None:
    model = GPModel(regression(2))
    alone, together = model.posterior(NEW.reshape(6, 1, 2)), model.posterior(NEW.reshape(6, 2))
    torch.testing.assert_close(alone.variance[:, 0], together.variance)
    assert model.posterior(NEW.reshape(3, 1, 2, 2)).mean.shape == (3, 1, 2, 2)


def test_outputs_can_be_chosen_and_noise_added() -> None:
    model = GPModel(regression(2))
    whole, second = model.posterior(NEW), model.posterior(NEW, output_indices=[1])
    torch.testing.assert_close(second.variance[..., 0], whole.variance[..., 1])
    noisy = model.posterior(NEW, observation_noise=True)
    torch.testing.assert_close(noisy.variance, whole.variance + 0.01)
    given = model.posterior(NEW, observation_noise=torch.tensor([[0.1, 0.2]], dtype=torch.float64))
    torch.testing.assert_close(given.variance - whole.variance, torch.tensor([0.1, 0.2]).double().expand(3, 2, 2))


def test_moments_can_be_differentiated_in_the_points() -> None:
    model = GPModel(regression())

    def moments(points: Tensor) -> tuple[Tensor, Tensor]:
        posterior = model.posterior(points)
        return posterior.mean, posterior.distribution.covariance_matrix

    assert torch.autograd.gradcheck(moments, NEW.clone().requires_grad_())


def test_acquisition_functions_find_a_better_point() -> None:
    model, bounds = GPModel(regression()), torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    for acquisition in (LogExpectedImprovement, qLogExpectedImprovement):
        candidate, value = optimize_acqf(
            acquisition(model, best_f=y.max()), bounds, q=1, num_restarts=2, raw_samples=16, options={"maxiter": 20}
        )
        assert candidate.shape == (1, 2) and bool(value.isfinite())
        assert float(torch.sin(5 * candidate[0, 0]) + candidate[0, 1]) > float(y.max())


def test_more_observations_are_an_update_and_leave_the_model_as_it_is() -> None:
    model = GPModel(regression())
    before = model.posterior(NEW).variance
    more = model.condition_on_observations(NEW[0], torch.ones(2, 1, dtype=torch.float64))
    assert bool((more.posterior(NEW).variance <= before + 1e-9).all())
    assert float(more.posterior(NEW[0]).variance.max()) < float(before[0].max())
    torch.testing.assert_close(model.posterior(NEW).variance, before)
    refit = NonConjugateGP(model.gp.kernels, model.gp.likelihood).fit(
        torch.cat([X, NEW[0]]), torch.cat([y, torch.ones(2, dtype=torch.float64)])
    )
    torch.testing.assert_close(more.posterior(NEW).mean, GPModel(refit).posterior(NEW).mean, rtol=1e-7, atol=1e-7)


def test_noise_of_counts_is_refused() -> None:
    counts = NonConjugateGP(kernels.RBF(0.5), likelihoods.Poisson()).fit(X, torch.ones(12))
    with pytest.raises(ValueError, match="`observation_noise` must be False"):
        GPModel(counts).posterior(NEW, observation_noise=True)


def test_a_gp_must_be_fitted_and_points_have_a_dimension() -> None:
    with pytest.raises(RuntimeError):
        GPModel(NonConjugateGP(kernels.RBF(0.5), likelihoods.Gaussian(0.1)))
    with pytest.raises(ValueError, match=r"`X` must have the shape \(…, q, d\)"):
        GPModel(regression()).posterior(X[0])


def network(num_outputs: int = 1, subset: str = "all", **settings: object) -> Laplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, num_outputs)).double()
    targets = torch.stack([y, -2 * y], 1)[:, :num_outputs]
    la = Laplace(model, "regression", subset, "iterncgp", sigma_noise=0.1, **{"enable_backprop": True, **settings})
    la.fit(DataLoader(TensorDataset(X, targets), batch_size=4))
    return la


@pytest.mark.parametrize("num_outputs", [1, 2])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_network_has_the_joint_moments_of_each_batch(num_outputs: int, subset: str) -> None:
    la = network(num_outputs, subset)
    posterior = LaplaceModel(la).posterior(NEW)
    for batch, points in enumerate(NEW):
        mean, joint = la.latent(points, joint=True)
        torch.testing.assert_close(posterior.mean[batch], mean)
        torch.testing.assert_close(posterior.distribution.covariance_matrix[batch], joint)
    noisy = LaplaceModel(la).posterior(NEW, observation_noise=True)
    torch.testing.assert_close(noisy.variance, posterior.variance + 0.01)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_moments_of_a_network_can_be_differentiated_in_the_points(subset: str) -> None:
    model = LaplaceModel(network(2, subset))

    def moments(points: Tensor) -> tuple[Tensor, Tensor]:
        posterior = model.posterior(points)
        return posterior.mean, posterior.distribution.covariance_matrix

    assert torch.autograd.gradcheck(moments, NEW[:1].clone().requires_grad_())


def test_an_acquisition_function_on_a_network() -> None:
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    acquisition = qLogExpectedImprovement(LaplaceModel(network()), best_f=y.max())
    candidates, value = optimize_acqf(
        acquisition, bounds, q=2, num_restarts=2, raw_samples=8, options={"maxiter": 5}, sequential=False
    )
    assert candidates.shape == (2, 2) and bool(value.isfinite())


def test_a_network_must_be_differentiable_in_its_inputs() -> None:
    with pytest.raises(ValueError, match=r"`la` must be differentiable .* enable_backprop=True"):
        LaplaceModel(network(enable_backprop=False))


ONE = NEW[:, :1]  # three batches of one point


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_each_fantasy_is_the_posterior_given_it(num_outputs: int) -> None:
    model = GPModel(regression(num_outputs))
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    fantasies = model.fantasize(NEW, sampler)
    assert fantasies.batch_shape == (4, 3) and fantasies.num_outputs == num_outputs
    observed = sampler(model.posterior(NEW, observation_noise=True))  # (4, 3, 2, C)
    found = fantasies.posterior(ONE)
    assert found.mean.shape == (4, 3, 1, num_outputs)
    for s, b in ((0, 0), (3, 2)):
        given = model.condition_on_observations(NEW[b], observed[s, b])  # a fit of all data
        expected = given.posterior(ONE[b])
        torch.testing.assert_close(found.mean[s, b], expected.mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.variance[s, b], expected.variance, rtol=1e-4, atol=1e-7)
    again = fantasies.fantasize(ONE, SobolQMCNormalSampler(torch.Size([2]), seed=1))  # of a fantasy
    assert again.posterior(ONE).mean.shape == (2, 4, 3, 1, num_outputs)


def test_batches_of_observations_are_a_model_each() -> None:
    model, values = GPModel(regression()), torch.ones(3, 2, 1, dtype=torch.float64)
    found = model.condition_on_observations(NEW, values).posterior(ONE)
    for b in range(3):
        expected = model.condition_on_observations(NEW[b], values[b]).posterior(ONE[b])
        torch.testing.assert_close(found.mean[b], expected.mean, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"`X` and `Y` must have the shapes \(…, n, d\) and \(…, n, 1\)"):
        model.condition_on_observations(NEW, values[..., 0])


@pytest.mark.parametrize("kind", ["gp", "network"])
def test_knowledge_gradient_can_be_climbed(kind: str) -> None:
    model = GPModel(regression()) if kind == "gp" else LaplaceModel(network())
    acquisition = qKnowledgeGradient(model, num_fantasies=3)
    points = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.autograd.gradcheck(acquisition, points.requires_grad_())
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    candidate, value = optimize_acqf(acquisition, bounds, q=1, num_restarts=2, raw_samples=4, options={"maxiter": 3})
    assert candidate.shape == (1, 2) and bool(value.isfinite())


def test_a_network_given_fantasies_is_less_uncertain_there_and_its_mean_moves() -> None:
    model = LaplaceModel(network())
    fantasies = model.fantasize(NEW, SobolQMCNormalSampler(torch.Size([4]), seed=0))
    before, after = model.posterior(NEW), fantasies.posterior(NEW)
    assert bool((after.variance < before.variance).all())
    assert float((after.mean - before.mean).abs().min()) > 0
    mean = LaplaceModel(network(mean="refined")).posterior(NEW).mean
    assert mean.shape == before.mean.shape


def test_some_outputs_are_a_model() -> None:
    model = GPModel(regression(2))
    second = model.subset_output([1])
    assert second.num_outputs == 1
    torch.testing.assert_close(second.posterior(NEW).mean, model.posterior(NEW).mean[..., 1:])
    expected = model.posterior(NEW, output_indices=[1], observation_noise=True).variance
    torch.testing.assert_close(second.posterior(NEW, observation_noise=True).variance, expected)
    assert second.fantasize(ONE, SobolQMCNormalSampler(torch.Size([2]), seed=0)).batch_shape == (2, 3)


def test_fantasies_of_counts_are_refused() -> None:
    counts = NonConjugateGP(kernels.RBF(0.5), likelihoods.Poisson()).fit(X, torch.ones(12))
    with pytest.raises(ValueError, match="fantasies need Gaussian observations"):
        GPModel(counts).fantasize(NEW, SobolQMCNormalSampler(torch.Size([2]), seed=0))

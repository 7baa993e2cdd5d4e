"""Whatever is broken on purpose in what a run leaves behind is mended with a warning or refused, never handed out."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.clusters.clusters import Pass
from ntk_iterncgp.fitting import cost, self_check
from ntk_iterncgp.fitting.report import Record, SelfCheckError
from ntk_iterncgp.fitting.self_check import checked, problems
from ntk_iterncgp.gp import checks as gp_checks
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.posterior.function_space import Posterior
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.priors.ntk import NTKPrior
from ntk_iterncgp.solver import State
from tests.clusters_helpers import Net, Stream, joint_variance, make_net
from tests.laplace_helpers import close, not_below

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
ACTIONS = pytest.mark.parametrize("actions", ["joint", "kronecker"])
NUM_DATA = 150  # more than the rows that are looked at


def make_gp(actions: str = "joint", likelihood: likelihoods.Likelihood | None = None, **settings: Any) -> Any:
    likelihood = likelihoods.Softmax(3) if likelihood is None else likelihood
    return NonConjugateGP(
        kernels.Matern32(0.7, 2.0),
        likelihood,
        actions=actions,
        **{"policy": "curvature_residual", **({"max_products": 15, **settings})},
    )


def data(dtype: torch.dtype = torch.float64, num_classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(NUM_DATA, 2, generator=generator, dtype=torch.float64)
    return X.to(dtype), ((X[:, 0] > 0).long() + (X[:, 1] > 0.3).long()).clamp_max(num_classes - 1)


def fitted_state(actions: str = "joint", dtype: torch.dtype = torch.float64) -> State:
    return make_gp(actions).fit(*data(dtype)).posterior_.state


def moments(state: State) -> tuple[Tensor, Tensor]:
    x = data(state.problem.prior.dtype)[0][:7] + 0.1
    mean, covariance = Posterior(state).latent(x)
    return mean, covariance


def accepted(state: State, history: list[Record] | None = None) -> State:
    """The state, which must pass without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return checked(state, history or [], ascends=True)


# What is right passes


@DTYPES
@ACTIONS
@pytest.mark.parametrize("max_rank", [None, 12])
def test_a_healthy_fit_passes_untouched(actions: str, dtype: torch.dtype, max_rank: int | None) -> None:
    gp = make_gp(actions, max_rank=max_rank).fit(*data(dtype))
    gp.refine(5)
    state = gp.posterior_.state
    products = state.problem.prior.num_products
    assert accepted(state, gp.report_.history) is state
    assert state.problem.prior.num_products == products == gp.report_.num_products  # it costs no product


@DTYPES
@ACTIONS
def test_tolerances_are_far_from_what_rounding_does(
    actions: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fitted_state(actions, dtype)
    for name in ("MARGIN", "FLOOR"):
        monkeypatch.setattr(self_check, name, getattr(self_check, name) / 30)
    assert problems(state) == {}


def test_the_check_draws_no_random_numbers_of_others() -> None:
    state = fitted_state()
    own, everybodys = state.generator.get_state(), torch.get_rng_state()
    accepted(state)
    assert torch.equal(state.generator.get_state(), own) and torch.equal(torch.get_rng_state(), everybodys)


# Explicit kernels: what can be computed again is


def factor_of(columns: Any) -> Tensor:  # (columns, rows)
    return columns.factor.storage


def break_one_image(state: State) -> State:
    factor_of(state.buffer.images)[3] *= 1.01
    return state


def break_one_number_of_the_images(state: State) -> State:
    factor_of(state.buffer.images)[2, 17] += 0.5
    return state


def break_images_and_what_follows(state: State) -> State:
    """As if the products had been wrong all along."""
    factor_of(state.buffer.images)[:5] *= 1.03
    gram = state.problem.prior.gram(state.buffer, state.buffer)
    offset = state.buffer.images.combine(state.iterate.coefficients[:, None])[:, 0]
    broken = replace(state, gram=0.5 * (gram + gram.T), iterate=replace(state.iterate, offset=offset))
    return broken.linearise(broken.iterate)


def break_the_gram(state: State) -> State:
    gram = state.gram.clone()
    gram[1, 2] = gram[2, 1] = gram[2, 1] + 0.1 * float(gram.diagonal().max())
    return replace(state, gram=gram)


def break_the_symmetry_of_the_gram(state: State) -> State:
    gram = state.gram.clone()
    gram[0, 5] += 1e-3 * float(gram.diagonal().max())
    return replace(state, gram=gram)


def make_m_indefinite(state: State) -> State:
    return replace(state, gram=state.gram - 10 * float(state.noise_gram.diagonal().max()) * torch.eye(len(state.gram)))


def put_nan_in_the_gram(state: State) -> State:
    gram = state.gram.clone()
    gram[0, 0] = torch.nan
    return replace(state, gram=gram)


def break_the_noise(state: State) -> State:
    return replace(state, noise_gram=0.99 * state.noise_gram)


def break_the_latent_values(state: State) -> State:
    broken = replace(state)
    broken.__dict__["latent"] = state.latent + 0.01
    return broken


def break_the_factor(state: State) -> State:
    broken = replace(state)
    broken.factor.lower.mul_(1.1)
    return broken


MENDED = [
    break_one_image,
    break_one_number_of_the_images,
    break_the_gram,
    break_the_symmetry_of_the_gram,
    make_m_indefinite,
    put_nan_in_the_gram,
    break_the_noise,
    break_the_latent_values,
    break_the_factor,
]


@pytest.mark.parametrize("corrupt", MENDED, ids=lambda f: f.__name__)
@ACTIONS
@DTYPES
def test_what_follows_from_the_actions_is_computed_again(
    corrupt: Callable[[State], State], actions: str, dtype: torch.dtype
) -> None:
    state = fitted_state(actions, dtype)
    right = moments(state)
    with pytest.warns(UserWarning, match=r"The self-check expected .*\. It is computed again\."):
        mended = checked(corrupt(state), [], ascends=True)
    for found, expected in zip(moments(mended), right, strict=True):
        close(found, expected, 1e-6 if dtype == torch.float64 else 1e-3)
    accepted(mended)


@ACTIONS
def test_a_mean_of_wrong_images_is_found_again(actions: str) -> None:
    state = fitted_state(actions)
    right, objective = moments(state), state.objective
    with pytest.warns(UserWarning, match="images equal to K S at random data"):
        mended = checked(break_images_and_what_follows(state), [], ascends=True)
    assert mended.objective >= objective - 0.05 * abs(objective)
    close(moments(mended)[0], right[0], 0.1)
    accepted(mended)


# What cannot be known again is refused


def break_the_coefficients(state: State) -> State:
    w = state.iterate.coefficients.clone()
    w[0] += 0.1 * float(w.abs().max())
    return replace(state, iterate=replace(state.iterate, coefficients=w))


def break_the_representer_weights(state: State) -> State:
    v = state.iterate.representer_weights.clone()
    v[40] += 0.1 * float(v.abs().max())
    return replace(state, iterate=replace(state.iterate, representer_weights=v))


def break_the_offset(state: State) -> State:
    return replace(state, iterate=replace(state.iterate, offset=1.05 * state.iterate.offset))


def put_nan_in_the_coefficients(state: State) -> State:
    w = state.iterate.coefficients * torch.nan
    return replace(state, iterate=replace(state.iterate, coefficients=w))


@pytest.mark.filterwarnings("ignore:The self-check expected")
@pytest.mark.parametrize(
    "corrupt",
    [break_the_coefficients, break_the_representer_weights, break_the_offset, put_nan_in_the_coefficients],
    ids=lambda f: f.__name__,
)
@ACTIONS
@DTYPES
def test_a_broken_point_is_refused(corrupt: Callable[[State], State], actions: str, dtype: torch.dtype) -> None:
    with pytest.raises(SelfCheckError, match=r"is not to be trusted, and was not kept\. See that data, kernel"):
        checked(corrupt(fitted_state(actions, dtype)), [], ascends=True)


@pytest.mark.filterwarnings("ignore:The self-check expected")
def test_an_action_that_conditions_on_what_the_data_do_not_say_is_refused() -> None:
    state = fitted_state()
    factor_of(state.buffer.actions)[0] += 0.01  # no longer zero-sum over the classes
    with pytest.raises(SelfCheckError, match="actions in the range of the curvature"):
        checked(state, [], ascends=True)


def test_an_objective_that_fell_is_refused_where_steps_were_damped() -> None:
    gp = make_gp().fit(*data())
    state, history = gp.posterior_.state, list(gp.report_.history)
    history[3] = replace(history[3], objective=history[3].objective + 1.0)
    with pytest.raises(SelfCheckError, match="an objective that never falls, but it went from"):
        checked(state, history, ascends=True)
    assert checked(state, history, ascends=False) is state


# Through the front door


@pytest.mark.filterwarnings("ignore:The self-check expected")
@pytest.mark.parametrize("how", ["one percent off", "half precision", "one class off"])
def test_products_that_are_wrong_raise_and_leave_the_earlier_fit(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gp, (X, y) = make_gp(), data()
    gp.fit(X, y)
    before, report = gp.latent(X[:5]), gp.report_
    original = GramPrior.image

    def wrong(prior: GramPrior, actions: Any) -> Any:
        images = original(prior, actions)
        storage = images.factor.storage
        if how == "one percent off":
            storage *= 1.01
        elif how == "half precision":
            storage.copy_(storage.bfloat16())
        else:
            storage[:, 1::3] += 0.01 * storage[:, ::3]
        return images

    with monkeypatch.context() as patch:
        patch.setattr(GramPrior, "image", wrong)
        for again in (lambda: gp.fit(X, y), lambda: gp.refine(5)):
            with pytest.raises(SelfCheckError):
                again()
            assert gp.report_ is report
            assert all(map(torch.equal, gp.latent(X[:5]), before))
    gp.refine(5)
    assert gp.report_.num_products > report.num_products


def test_one_bad_product_is_mended_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    (X, y), calls, original = data(), [], GramPrior.image

    def wrong_once(prior: GramPrior, actions: Any) -> Any:
        images = original(prior, actions)
        calls.append(actions.size)
        if len(calls) == 4:
            images.storage[0, 20:] += 0.2
        return images

    monkeypatch.setattr(GramPrior, "image", wrong_once)
    gp = make_gp()
    with pytest.warns(UserWarning, match="images equal to K S"):
        gp.fit(X, y)
    rank = gp.report_.rank
    assert calls[-1] == rank and gp.report_.num_products == sum(calls)
    assert problems(gp.posterior_.state) == {}


@pytest.mark.filterwarnings("ignore:The self-check expected")
@pytest.mark.parametrize("likelihood", [likelihoods.Softmax(3), likelihoods.Gaussian(0.1)], ids=["softmax", "gaussian"])
def test_a_kernel_changed_underfoot_is_noticed(likelihood: likelihoods.Likelihood) -> None:
    (X, y), gp = data(), make_gp(likelihood=likelihood)
    gp.fit(X, y.double() if likelihood.is_quadratic else y)
    gp.kernels[0].lengthscale.mul_(1.5)
    with pytest.warns(UserWarning, match="images equal to K S"):
        gp.refine(2)
    assert problems(gp.posterior_.state) == {}  # a posterior of the kernel as it is now


# Networks, by products


def network_state(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[Any, State]:
    net = make_net(3, num_data=50)
    la = net.laplace(dtype, policy="curvature_residual", num_actions=8, **settings)
    la.fit(net.loader(dtype, batch_size=16))
    return la, la._fit.state


@pytest.mark.parametrize(("mean", "dtype"), [("network", torch.float64), ("refined", torch.float32)], ids=str)
@pytest.mark.parametrize("which", ["weights", "outputs", "both"])
def test_images_of_a_network_are_computed_again(which: str, dtype: torch.dtype, mean: str) -> None:
    _, state = network_state(dtype, mean=mean)
    images, right = state.buffer.images, state.buffer.images.outputs.matrix.clone()
    if which in ("weights", "both"):
        images.weights.storage[2] *= 1.05
    if which in ("outputs", "both"):
        images.outputs.storage[2] *= 1.05
    if which == "both":  # rows agree, and only the adjoint identity tells
        state = replace(state, gram=state.problem.prior.gram(state.buffer, state.buffer))
    with pytest.warns(UserWarning, match="The self-check expected"):
        mended = checked(state, [], ascends=False)
    close(mended.buffer.images.outputs.matrix, right, 1e-10 if dtype == torch.float64 else 1e-4)
    accepted(mended)


@pytest.mark.filterwarnings("ignore:The self-check expected")
@pytest.mark.parametrize("place", ["jacobian.vjp", "prior variance", "weights of the model"])
def test_a_network_that_contradicts_itself_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    la, state = network_state()
    prior = state.problem.prior
    assert isinstance(prior, NTKPrior)
    if place == "jacobian.vjp":
        original = Jacobian.vjp
        monkeypatch.setattr(Jacobian, "vjp", lambda self, *args: 1.01 * original(self, *args))
        net = make_net(3, num_data=90)
        with pytest.raises(SelfCheckError):
            net.laplace(policy="curvature_residual", num_actions=8).fit(net.loader())
        return
    if place == "prior variance":
        prior.prior_variance[0] *= 3
    else:
        with torch.no_grad():
            next(la.model.parameters()).mul_(1.1)
    assert "images" in problems(state)


# Networks, by clusters


def cluster_net() -> Net:
    return make_net(4, num_data=80)


def cluster_loader(net: Net, in_order: bool = False, dtype: torch.dtype = torch.float64) -> DataLoader:
    return DataLoader(Stream(net.dataset(dtype)) if in_order else net.dataset(dtype), batch_size=16)


@DTYPES
@pytest.mark.parametrize("in_order", [False, True], ids=["visited", "in order"])
@pytest.mark.parametrize("cotangents", [1, 2])
def test_a_healthy_pass_is_accepted(in_order: bool, cotangents: int, dtype: torch.dtype) -> None:
    net = cluster_net()
    la = net.laplace(dtype, num_actions=6, cotangents=cotangents)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.fit(cluster_loader(net, in_order, dtype))
        la.refine(cluster_loader(net, in_order, dtype), epochs=1)


@DTYPES
@pytest.mark.parametrize("in_order", [False, True], ids=["visited", "in order"])
@pytest.mark.parametrize("what", ["one image", "one number", "nan", "a checksum"])
def test_a_group_whose_image_is_broken_is_swept_again(what: str, in_order: bool, dtype: torch.dtype) -> None:
    net, x = cluster_net(), cluster_net().near_and_far()
    la, clean = (net.laplace(dtype, num_actions=6) for _ in range(2))
    for fitted in (la, clean):
        fitted.fit(cluster_loader(net, in_order, dtype))
    done = la._fit.state.clusters.passes[0]
    if what == "one image":
        done.images[2] *= 1.1
    elif what == "one number":
        done.images[1, 7] += 0.5
    elif what == "nan":
        done.images[3, 0] = torch.nan
    else:
        done.checksums[0] += 1.0
    with pytest.warns(UserWarning, match=r"what was summed on the way, but 1 are not\. These groups are swept again"):
        la.refine(cluster_loader(net, in_order, dtype), epochs=1)
    clean.refine(cluster_loader(net, in_order, dtype), epochs=1)
    close(joint_variance(la, x), joint_variance(clean, x), 1e-9 if dtype == torch.float64 else 1e-3)


def break_gradients(change: Callable[[Tensor], Tensor], calls: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these batches, as they are summed."""
    count, original = [0], Pass.add

    def add(self: Any, rows: Tensor, gradients: Tensor, h: Tensor) -> None:
        count[0] += 1
        original(self, rows, change(gradients) if count[0] in calls else gradients, h)

    monkeypatch.setattr(Pass, "add", add)


@pytest.mark.parametrize(
    ("change", "calls", "sentence"),
    [
        (lambda g: 1.2 * g, range(1, 25), r"images that are sums of gradients, but of \d computed again one differs"),
        (lambda g: g * torch.nan, range(2, 3), "what was summed on the way, but 1 are not"),
        (lambda g: g / 0, range(20, 21), "what was summed on the way, but 1 are not"),
    ],
    ids=["too large", "nan", "infinite"],
)
def test_sums_that_went_wrong_on_the_way_are_swept_again(
    change: Callable[[Tensor], Tensor], calls: range, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = cluster_net(), cluster_net().near_and_far()
    la, clean = (net.laplace(num_actions=6) for _ in range(2))
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=sentence):
        break_gradients(change, calls, patch)
        la.fit(cluster_loader(net))
    clean.fit(cluster_loader(net))
    close(joint_variance(la, x), joint_variance(clean, x), 1e-9)
    assert la.report_.information_captured == pytest.approx(clean.report_.information_captured, rel=1e-9)


@pytest.mark.filterwarnings("ignore:The self-check")
def test_gradients_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    break_gradients(lambda g: g * torch.nan, range(1, 10**6), monkeypatch)
    la = cluster_net().laplace(num_actions=6)
    with pytest.raises(SelfCheckError, match="is not to be trusted"):
        la.fit(cluster_loader(cluster_net()))
    assert not la._fitted


@DTYPES
@pytest.mark.parametrize("name", ["gram_blocks", "noise_blocks"])
@pytest.mark.parametrize("change", [0.5, 1.1, torch.nan], ids=str)
def test_a_small_matrix_that_was_broken_is_computed_again(change: float, name: str, dtype: torch.dtype) -> None:
    net, x = cluster_net(), cluster_net().near_and_far()
    la, clean = (net.laplace(dtype, num_actions=6, cotangents=2) for _ in range(2))
    for fitted in (la, clean):
        fitted.fit(cluster_loader(net, dtype=dtype))
        fitted.refine(cluster_loader(net, dtype=dtype), epochs=2)
    blocks = getattr(la._fit.state.clusters, name)
    blocks[max(i for i, _ in blocks), 0][2] *= change  # between the last pass and the first
    with pytest.warns(UserWarning, match=r"small matrices to be those of the actions, .*\. They are computed again"):
        la.refine(cluster_loader(net, dtype=dtype), epochs=2)
    clean.refine(cluster_loader(net, dtype=dtype), epochs=2)
    close(joint_variance(la, x), joint_variance(clean, x), 1e-9 if dtype == torch.float64 else 1e-3)


@pytest.mark.filterwarnings("ignore:The self-check")
@pytest.mark.parametrize("what", ["directions", "labels", "outputs"])
def test_a_pass_that_cannot_be_mended_is_refused_and_the_earlier_posterior_stays(what: str) -> None:
    net, x = cluster_net(), cluster_net().near_and_far()
    la = net.laplace(num_actions=6)
    la.fit(cluster_loader(net))
    before, clusters = joint_variance(la, x), la._fit.state.clusters
    if what == "directions":
        clusters.passes[0].directions[0, :10] *= 1.5
    elif what == "labels":
        clusters.passes[0].labels[:10] = 0
    else:
        clusters.outputs += 0.01
    with pytest.raises(SelfCheckError, match="is not to be trusted"):
        la.refine(cluster_loader(net), epochs=1)
    assert torch.equal(joint_variance(la, x), before)


class Drifting(Dataset):
    """Calls `drift` once, when so many items have been read."""

    def __init__(self, net: Net, after: int, drift: Callable[[], object]) -> None:
        self.data, self.left, self.drift = net.dataset(), after, drift

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        self.left -= 1
        if self.left == 0:
            self.drift()
        return self.data[i]


@pytest.mark.parametrize("policy", ["clusters", "curvature_residual"])
@pytest.mark.parametrize("what", ["weights", "data"])
@pytest.mark.filterwarnings("ignore:The self-check")
def test_weights_or_data_that_change_while_a_fit_runs_are_noticed(
    what: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "KEEP_BYTES", 0)  # what is kept in memory is not read again
    net = deepcopy(cluster_net())
    la = net.laplace(num_actions=6, policy=policy)

    def drift() -> None:
        with torch.no_grad():
            (next(la.model.parameters()) if what == "weights" else net.x).mul_(1.2)

    with pytest.raises(SelfCheckError):
        la.fit(DataLoader(Drifting(net, 80 + 5 * 16, drift), batch_size=16))
    assert not la._fitted


def test_a_derivative_that_differs_between_sweeps_and_predictions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net, original = cluster_net(), Jacobian.vjp
    monkeypatch.setattr(Jacobian, "vjp", lambda self, *args: 1.01 * original(self, *args))
    with pytest.raises(SelfCheckError, match=r"`model` must have derivatives that agree .* got a rel.*Try it"):
        net.laplace(num_actions=6).fit(cluster_loader(net))


# Loaded posteriors


def break_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    def apply(saved: dict[str, Any]) -> None:
        saved["posterior"][name] = change(saved["posterior"][name].clone())

    return apply


def with_nan(value: Tensor) -> Tensor:
    value[0, 0] = torch.nan
    return value


LOADED = {
    "nan in the images": (break_tensor("images", with_nan), "finite numbers in images"),
    "images too large": (break_tensor("images", lambda t: 5 * t), "say no more than all data do"),
    "too few images": (break_tensor("images", lambda t: t[:, 1:]), "noise_gram of shape"),
    "too few weights": (break_tensor("images", lambda t: t[1:]), "images of shape"),
    "noise too small": (break_tensor("noise_gram", lambda t: 0.01 * t), "say no more than all data do"),
    "noise not symmetric": (break_tensor("noise_gram", lambda t: t + torch.ones_like(t).triu(1)), "a symmetric noise"),
    "noise negative": (break_tensor("noise_gram", lambda t: -t), "positive definite"),
    "noise infinite": (break_tensor("noise_gram", lambda t: t / 0), "finite numbers in noise_gram"),
    "curvature negative": (break_tensor("curvature_diagonal", lambda t: -t), "nowhere negative"),
    "mean": (break_tensor("right_hand_side", lambda t: t[:-1]), "right_hand_side of shape"),
    "prior": (lambda saved: saved.update(prior_precision=-saved["prior_precision"]), "prior_precision to be positive"),
    "sigma": (lambda saved: saved.update(sigma_noise=saved["sigma_noise"] * torch.nan), "noise scale to be positive"),
}


@pytest.mark.parametrize("name", LOADED)
@DTYPES
def test_a_file_whose_numbers_contradict_each_other_is_not_loaded(name: str, dtype: torch.dtype) -> None:
    net, x = cluster_net(), cluster_net().near_and_far()
    la, other = (net.laplace(dtype, num_actions=6) for _ in range(2))
    la.fit(cluster_loader(net, dtype=dtype))
    saved = deepcopy(la.state_dict())
    corrupt, sentence = LOADED[name]
    corrupt(saved)
    whole = r"The \w+ of a saved posterior must be whole; got"  # said at the door, where files are read
    with pytest.raises((SelfCheckError, ValueError), match=rf"{sentence}|{whole}"):
        other.load_state_dict(saved)
    assert not other._fitted
    other.load_state_dict(la.state_dict())
    not_below(joint_variance(other, x), net.exact(x), 1e-9 if dtype == torch.float64 else 1e-3)


def test_float32_data_spread_over_many_lengthscales_are_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gp_checks, "SMALL_BYTES", 0)  # as for many data
    X = torch.tensor([[1.5e6], [-29.3], [-2.2e6], [56.8], [-1.1e6], [-139.9], [4.0e5]])
    gp = NonConjugateGP(kernels.RBF(100.0), likelihoods.Bernoulli(), policy="unit", max_products=1, chunk_bytes=1000)
    gp.fit(X, torch.zeros(7))
    gp.refine(1)  # a warning would be an error here
    assert gp.posterior_.prior.product_tolerance > 1e-4

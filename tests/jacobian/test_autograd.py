"""Products with the Jacobian of a network against dense Jacobians, over all the kinds of model in `network_cases`."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp import likelihoods
from ntk_iterncgp.data.fixed_order import FixedOrderData
from ntk_iterncgp.jacobian import rows as rows_of_prior
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.jacobian.blocks import LayerColumns, WeightColumns
from ntk_iterncgp.jacobian.last_layer import LastLayerJacobian
from ntk_iterncgp.jacobian.rows import NetworkJacobian
from ntk_iterncgp.likelihoods.base import CurvatureAt
from ntk_iterncgp.linalg.columns import Buffer, DenseColumns
from ntk_iterncgp.posterior.contrasts import leading_contrasts
from ntk_iterncgp.posterior.scores import against_rest
from ntk_iterncgp.priors.ntk import NTKPrior, sweep_outputs
from ntk_iterncgp.runtime.threads import evaluating
from tests import oracles
from tests.network_cases import BY_NAME, CASES, NetworkCase, dense_jacobian, mlp, outputs_of, untouched

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Relative to the largest entry: products are sums, whose entries may cancel."""
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=0, atol=tolerance * max(1.0, _largest(expected))
    )


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch_of(case: NetworkCase, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any, Tensor]:
    """The model in eval mode, inputs, and the dense Jacobian there in float64."""
    x = case.new_inputs(dtype)
    return case.model(dtype).eval(), x, dense_jacobian(case.model(), case.new_inputs())


def prior_of(
    case: NetworkCase, dtype: torch.dtype = torch.float64, **settings: Any
) -> tuple[NTKPrior, Tensor, Tensor, Tensor]:
    """The prior over the training data with one precision per weight; its dense J (n, P), precision and outputs."""
    model = case.model(dtype).eval()
    jacobian = Jacobian(model)
    data = FixedOrderData(case.loader(dtype), device=CPU, **case.keys)
    outputs, _ = sweep_outputs(jacobian, data)
    precision = 0.5 + 2 * torch.rand(jacobian.num_params, generator=torch.Generator().manual_seed(4)).double()
    dense = torch.cat([dense_jacobian(case.model(), x) for x, _ in case.batches()]).flatten(0, 1)
    return NTKPrior(jacobian, data, outputs, precision, **settings), dense, precision, outputs


# Products on a batch


@every_case
def test_forward_is_the_model_itself_with_outputs_as_columns(case: NetworkCase) -> None:
    model, x, _ = batch_of(case)
    close(Jacobian(model).forward(x), outputs_of(model, x), 1e-14)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_rows_are_the_dense_jacobian(case: NetworkCase, dtype: torch.dtype) -> None:
    model, x, dense = batch_of(case, dtype)
    rows = Jacobian(model).rows(x, len(dense))
    assert rows.jacobian.dtype == dtype
    close(rows.jacobian, dense, TOLERANCE[dtype])
    close(rows.outputs, outputs_of(model, x), TOLERANCE[dtype])


@every_case
@pytest.mark.parametrize("num_columns", [1, 3, 10])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_vjp_is_the_transposed_jacobian_times_cotangents(
    case: NetworkCase, num_columns: int, dtype: torch.dtype
) -> None:
    model, x, dense = batch_of(case, dtype)
    cotangents = normal(*dense.shape[:2], num_columns)
    product = Jacobian(model).vjp(x, cotangents.to(dtype))
    assert product.dtype == dtype and not product.requires_grad
    close(product, torch.einsum("bcp,bck->pk", dense, cotangents), TOLERANCE[dtype])


@every_case
@pytest.mark.parametrize("num_columns", [1, 3, 10])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_jvp_is_the_jacobian_times_tangents(case: NetworkCase, num_columns: int, dtype: torch.dtype) -> None:
    model, x, dense = batch_of(case, dtype)
    tangents = normal(dense.shape[2], num_columns)
    product = Jacobian(model).jvp(x, tangents.to(dtype))
    assert product.dtype == dtype and not product.requires_grad
    close(product, dense @ tangents, TOLERANCE[dtype])


@every_case
def test_jvp_and_vjp_are_adjoint(case: NetworkCase) -> None:
    """⟨J V, S⟩ = ⟨V, JᵀS⟩, whatever J is: no dense Jacobian takes part."""
    model, x = case.model().eval(), case.new_inputs()
    jacobian = Jacobian(model)
    V, S = normal(jacobian.num_params, 3), normal(len(jacobian.forward(x)), case.num_outputs, 3, seed=5)
    left = torch.einsum("bck,bck->k", jacobian.jvp(x, V), S)
    right = (V * jacobian.vjp(x, S)).sum(0)
    close(left, right, 1e-12)


def test_jvp_and_vjp_are_adjoint_where_an_embedding_has_a_padding_token() -> None:
    """Whose row has no gradient, by definition of `padding_idx`."""
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 2)).double()
    x = torch.tensor([[0, 1], [2, 0], [3, 4]])
    jacobian = Jacobian(model)
    V, S = normal(jacobian.num_params, 2), normal(3, 2, 2, seed=5)
    close((jacobian.jvp(x, V) * S).sum(), (V * jacobian.vjp(x, S)).sum(), 1e-12)


@every_case
def test_rows_answer_products_covariances_and_curvature_diagonals(case: NetworkCase) -> None:
    model, x, dense = batch_of(case)
    b, C, P = dense.shape
    rows, variance, V = Jacobian(model).rows(x, b), 0.1 + torch.rand(P, dtype=torch.float64), normal(P, 3)
    flat = dense.flatten(0, 1)
    close(rows.times(V), dense @ V)
    close(rows.covariance(variance), dense * variance @ dense.mT)
    close(rows.covariance(variance, joint=True), flat * variance @ flat.T)
    root = normal(b, C, C)
    W = root @ root.mT
    close(rows.curvature_diagonal(lambda block: W @ block), torch.einsum("bcp,bcd,bdp->p", dense, W, dense))


def test_products_with_no_columns_have_no_columns() -> None:
    model, x, dense = batch_of(BY_NAME["mlp"])
    assert Jacobian(model).vjp(x, dense.new_zeros(*dense.shape[:2], 0)).shape == (dense.shape[2], 0)


def test_chosen_parameters_are_in_the_given_order() -> None:
    model, x, dense = batch_of(BY_NAME["mlp"])
    names = dict(model.named_parameters())
    jacobian = Jacobian(model, {"2.bias": names["2.bias"], "0.bias": names["0.bias"]})
    expected = torch.cat([dense[..., -3:], dense[..., 12:16]], 2)
    assert jacobian.num_params == 7
    close(jacobian.rows(x, len(dense)).jacobian, expected)
    close(jacobian.jvp(x, torch.eye(7, dtype=torch.float64)), expected)
    close(jacobian.vjp(x, normal(4, 3, 1)), torch.einsum("bcp,bck->pk", expected, normal(4, 3, 1)))
    close(jacobian.weights(), torch.cat([names["2.bias"], names["0.bias"]]).detach(), 0.0)


def test_tied_weights_count_once() -> None:
    model = BY_NAME["tied embedding"].model()
    assert Jacobian(model).num_params == 5 * 3 + 3 * 3 + 3


def test_a_model_with_all_parameters_frozen_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one parameter that requires a gradient; got none"):
        Jacobian(mlp().requires_grad_(False))


class _Returns(nn.Module):
    def __init__(self, returned: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.returned = nn.Linear(3, 2), returned

    def forward(self, x: Tensor) -> Any:
        return self.returned(self.linear(x))


@pytest.mark.parametrize(
    ("returned", "found"),
    [(lambda f: (f, f), "tuple"), (lambda f: f[:, None], r"\(4, 1, 2\)"), (lambda f: f.sum(), r"\(\)")],
    ids=["tuple", "three dimensions", "scalar"],
)
def test_outputs_that_are_no_matrix_are_refused_by_their_shape(returned: Callable[[Tensor], Any], found: str) -> None:
    with pytest.raises(ValueError, match=rf"return a tensor of shape \(b, C\) or \(b,\), .*; got {found}"):
        Jacobian(_Returns(returned)).forward(torch.randn(4, 3))


def test_a_jacobian_knows_whether_it_is_still_that_of_a_model() -> None:
    model = BY_NAME["mlp"].model()
    jacobian = Jacobian(model)
    with torch.no_grad():
        model[2].bias[1] += 1  # seen: it is the same memory
    assert jacobian.is_of(model)
    assert not jacobian.is_of(BY_NAME["mlp"].model())
    model[2].bias.requires_grad_(False)
    assert not jacobian.is_of(model)
    model[2].bias = torch.nn.Parameter(model[2].bias.clone())
    assert not jacobian.is_of(model)


def test_rows_are_differentiable_in_the_inputs() -> None:
    model = BY_NAME["mlp"].model().eval()
    jacobian = Jacobian(model)
    x, weights = normal(2, 3).requires_grad_(), normal(jacobian.num_params, 2)

    def scalar(x: Tensor) -> Tensor:
        rows = jacobian.rows(x, len(x))
        return (rows.times(weights) ** 2).sum() + (rows.outputs**3).sum()

    (gradient,) = torch.autograd.grad(scalar(x), x)
    step, expected = 1e-6, torch.zeros_like(gradient)
    for i in range(x.numel()):
        e = torch.zeros_like(x).flatten().index_fill(0, torch.tensor(i), step).reshape(x.shape)
        expected.view(-1)[i] = (scalar(x + e) - scalar(x - e)) / (2 * step)
    close(gradient, expected.detach(), 1e-7)


# The prior over a data set


@every_case
@pytest.mark.parametrize("num_columns", [1, 3, 10])
def test_image_is_the_dense_kernel_times_actions(case: NetworkCase, num_columns: int) -> None:
    prior, J, precision, _ = prior_of(case)
    S = normal(len(J), num_columns)
    images = prior.image(DenseColumns.of(S, case.num_outputs))
    close(images.weights.matrix, J.T @ S)
    close(prior.lift(images).matrix, J / precision @ J.T @ S)
    assert prior.num_products == num_columns


@every_case
def test_image_in_float32_is_within_its_rounding(case: NetworkCase) -> None:
    prior, J, precision, _ = prior_of(case, torch.float32)
    S = normal(len(J), 3)
    images = prior.image(DenseColumns.of(S.float(), case.num_outputs))
    assert images.weights.dtype == images.outputs.dtype == torch.float32
    close(images.weights.matrix, J.T @ S, TOLERANCE[torch.float32])
    close(prior.lift(images).matrix, J / precision @ J.T @ S, TOLERANCE[torch.float32])


@every_case
def test_the_other_questions_to_the_prior_have_the_dense_answers(case: NetworkCase) -> None:
    prior, J, precision, outputs = prior_of(case)
    S = normal(len(J), 3)
    actions = DenseColumns.of(S, case.num_outputs)
    buffer = Buffer(actions, prior.image(actions))
    model, x, new = batch_of(case)
    C = new.shape[1]
    close(prior.gram(buffer, buffer), S.T @ J / precision @ J.T @ S)
    close(prior.mean, outputs, 1e-14)
    mean, cross, covariance = prior.at(x, buffer)
    close(mean, outputs_of(model, x), 1e-13)
    close(cross, new / precision @ (J.T @ S))
    close(covariance, new / precision @ new.mT)
    flat = new.flatten(0, 1)
    close(prior.at(x, buffer, joint=True).covariance, flat / precision @ flat.T)
    blocks = torch.cat([block for _, block in prior.blocks()])
    dense = J.unflatten(0, (-1, C))
    close(blocks, dense / precision @ dense.mT)


@every_case
def test_a_prior_mean_of_the_weights_shifts_the_prior_mean_of_the_outputs(case: NetworkCase) -> None:
    shift = normal(Jacobian(case.model()).num_params, seed=7)
    prior, J, _, outputs = prior_of(case, shift=shift)
    close(prior.mean.flatten(), outputs.flatten() - J @ shift)
    model, x, new = batch_of(case)
    empty = DenseColumns.of(torch.zeros(len(J), 0, dtype=torch.float64), case.num_outputs)
    buffer = Buffer(empty, prior.empty_images(empty))
    close(prior.at(x, buffer).mean, outputs_of(model, x) - new @ shift)


def _curvature(case: NetworkCase, outputs: Tensor) -> tuple[CurvatureAt, Tensor]:
    """W at the outputs, and W itself (n, n) from the oracle."""
    if case.likelihood == "classification":
        likelihood, W = likelihoods.Softmax(case.num_outputs), oracles.curvature_matrix("softmax", outputs)
    else:
        likelihood = likelihoods.Gaussian(0.5, num_outputs=case.num_outputs)
        W = oracles.curvature_matrix("gaussian", outputs, noise=0.5)
    return CurvatureAt(likelihood, outputs), W


@every_case
def test_curvature_diagonal_is_exact_where_rows_are_few(case: NetworkCase) -> None:
    prior, J, precision, outputs = prior_of(case)
    curvature, W = _curvature(case, outputs)
    expected = (J.T @ W @ J).diagonal()
    assert prior.trace_is_exact
    close(prior.curvature_diagonal(curvature), expected)
    assert prior.curvature_trace(curvature) == pytest.approx(float((expected / precision).sum()), rel=1e-10)


@pytest.mark.parametrize("chunk_rows", [1, 2, 100])
def test_curvature_diagonal_does_not_depend_on_the_memory_it_is_given(chunk_rows: int) -> None:
    case = BY_NAME["mlp"]
    per_row = Jacobian(case.model()).bytes_per_row(3)
    prior, J, _, outputs = prior_of(case, chunk_bytes=chunk_rows * per_row)
    curvature, W = _curvature(case, outputs)
    close(prior.curvature_diagonal(curvature), (J.T @ W @ J).diagonal())


@pytest.mark.parametrize("name", ["mlp", "regression with several outputs"])
def test_curvature_diagonal_is_estimated_without_bias_where_rows_are_many(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over many samples of the data is within five standard errors of the truth, weight by weight."""
    monkeypatch.setattr(rows_of_prior, "EXACT_TRACE_ROWS", 0)
    case, repeats = BY_NAME[name], 400
    prior, J, _, outputs = prior_of(case)
    curvature, W = _curvature(case, outputs)
    assert not prior.trace_is_exact
    expected, draws = (J.T @ W @ J).diagonal(), []
    once = prior.curvature_diagonal(curvature)
    torch.testing.assert_close(prior.curvature_diagonal(curvature), once, rtol=0, atol=0)  # the same every time
    made = torch.Generator
    for seed in range(repeats):
        with monkeypatch.context() as patched:
            patched.setattr(torch, "Generator", lambda seed=seed, **kw: _Seeded(made(**kw), seed))
            draws.append(prior.curvature_diagonal(curvature))
    stacked = torch.stack(draws)
    error = stacked.std(0) / repeats**0.5
    assert bool((error > 0).any()), "an estimate that never varies is no estimate"
    assert bool(((stacked.mean(0) - expected).abs() <= 5 * error + 1e-12 * expected.max()).all())


class _Seeded:
    """Hands out a generator with a seed of the test's choice."""

    def __init__(self, generator: torch.Generator, seed: int) -> None:
        self.generator, self.seed = generator, seed

    def manual_seed(self, _: int) -> torch.Generator:
        return self.generator.manual_seed(self.seed)


# The last layer


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_last_layer_products_are_those_of_the_model_restricted_to_it(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=bias)).to(dtype)
    x = normal(5, 3).to(dtype)
    chosen = {name: value for name, value in model.named_parameters() if name.startswith("2.")}
    plain, features = Jacobian(model, chosen), model[:2](x).detach()
    fast, tolerance = LastLayerJacobian(model[2]), TOLERANCE[dtype]
    P = plain.num_params
    assert fast.num_params == P
    S, V, variance = normal(5, 3, 4).to(dtype), normal(P, 4).to(dtype), 0.1 + normal(P).abs()
    close(fast.forward(features), plain.forward(x), tolerance)
    close(fast.vjp(features, S), plain.vjp(x, S), tolerance)
    close(fast.jvp(features, V), plain.jvp(x, V), tolerance)
    expected, rows = plain.rows(x, 5), fast.rows(features, 5)
    close(rows.outputs, expected.outputs, tolerance)
    close(rows.times(V), expected.times(V), tolerance)
    close(rows.covariance(variance), expected.covariance(variance), tolerance)
    close(rows.covariance(variance, joint=True), expected.covariance(variance, joint=True), tolerance)
    W = normal(5, 3, 3) @ normal(5, 3, 3).mT
    close(rows.curvature_diagonal(lambda v: W @ v), expected.curvature_diagonal(lambda v: W @ v), tolerance)


def test_last_layer_products_are_adjoint() -> None:
    jacobian, features = LastLayerJacobian(nn.Linear(4, 3).double()), normal(5, 4)
    V, S = normal(15, 2), normal(5, 3, 2, seed=6)
    close((jacobian.jvp(features, V) * S).sum(), (V * jacobian.vjp(features, S)).sum(), 1e-13)


def leading(outputs: Tensor) -> Tensor:
    return leading_contrasts(outputs, 2)


def leading_and_against_rest(outputs: Tensor) -> Tensor:
    return torch.cat([against_rest(outputs), leading(outputs)], 2)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("contrasts", [leading, against_rest, leading_and_against_rest])
def test_last_layer_contrasts_are_multiplied_layer_by_layer(
    bias: bool, dtype: torch.dtype, contrasts: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 9, bias=bias).to(dtype)
    jacobian, features = LastLayerJacobian(layer), normal(5, 4).to(dtype)
    sizes = tuple(p.numel() for p in layer.parameters())
    rows, A = jacobian.rows(features, 5, contrasts), normal(sum(sizes), 6).to(dtype).T.contiguous().T
    J, tolerance = rows.written_out().double(), TOLERANCE[dtype]
    scale = 0.1 + normal(len(A)).abs()
    close(rows.times(WeightColumns(A, dtype, scale)), J @ (scale[:, None] * A.double()), tolerance)
    found = list(rows.by_layer(WeightColumns(A, dtype), sizes))
    for (cross, own), part, V in zip(found, J.split(sizes, 2), A.double().split(sizes), strict=True):
        close(cross, part @ V, tolerance)
        close(own, part @ part.mT, tolerance)


@pytest.mark.parametrize("contrasts", [leading, against_rest])
def test_last_layer_contrasts_meet_the_weights_of_a_few_classes(
    contrasts: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(4, 500)
    rows = LastLayerJacobian(layer).rows(normal(5, 4).float(), 5, contrasts)
    columns, sizes = WeightColumns(torch.randn(2500, 6).T.contiguous().T, torch.float32), (2000, 500)
    met = []
    whole = LayerColumns.rows

    def watched(self: LayerColumns, part: slice) -> Tensor:
        found = whole(self, part)
        met.append(len(found))
        return found

    monkeypatch.setattr(LayerColumns, "rows", watched)
    list(rows.by_layer(columns, sizes))
    rows.times(columns)
    assert sum(met) <= 2 * 5 * 3 * (4 + 1)  # twice, of three classes for each input, a row of weights and a bias


# The user's model


def _all_products(jacobian: NetworkJacobian, x: Any, b: int, C: int) -> None:
    jacobian.forward(x)
    jacobian.vjp(x, torch.ones(b, C, 2, dtype=torch.float64))
    jacobian.jvp(x, torch.ones(jacobian.num_params, 2, dtype=torch.float64))
    jacobian.rows(x, b)


@every_case
def test_products_leave_the_model_untouched(case: NetworkCase) -> None:
    model, x = case.model(), case.new_inputs()
    first = next(model.children())
    first.train(False)  # flags that differ from module to module
    with untouched(model), evaluating(model):
        _all_products(Jacobian(model), x, 4, case.num_outputs)


class _Fails(nn.Module):
    """A model whose forward or backward pass breaks off when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.broken = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        if self.broken == "forward":
            raise ArithmeticError("broken off")
        return self.last(_BrokenBackward.apply(hidden) if self.broken == "backward" else hidden)


class _BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("broken off")


@pytest.mark.parametrize(
    "product",
    [
        lambda j, x: j.vjp(x, torch.ones(4, 2, 2, dtype=torch.float64)),
        lambda j, x: j.jvp(x, torch.ones(j.num_params, 2, dtype=torch.float64)),
        lambda j, x: j.rows(x, 4),
    ],
    ids=["vjp", "jvp", "rows"],
)
def test_a_forward_pass_that_breaks_off_leaves_the_model_untouched(product: Callable[[Jacobian, Tensor], Any]) -> None:
    model, x = _Fails().double(), normal(4, 3)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with untouched(model):
        model.broken = "forward"
        with pytest.raises(ArithmeticError, match="broken off"), evaluating(model):
            product(Jacobian(model), x)
    model.broken = ""
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    close(Jacobian(model.eval()).rows(x, 4).jacobian, dense_jacobian(model, x))


def test_a_backward_pass_that_breaks_off_leaves_the_model_untouched() -> None:
    model, x = _Fails().double(), normal(4, 3)
    with untouched(model):
        model.broken = "backward"
        with pytest.raises(ArithmeticError, match="broken off"), evaluating(model):
            Jacobian(model).vjp(x, torch.ones(4, 2, 2, dtype=torch.float64))


# Models that cannot be vectorised


class _LooksAtValues(nn.Module):
    """Python code that asks a tensor for its value, which vmap cannot answer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = [row * (2.0 if row[0].item() > 0 else 1.0) for row in x]
        return self.last(torch.tanh(self.first(torch.stack(rows))))


def test_a_model_that_vmap_cannot_take_gives_the_same_rows_after_one_warning() -> None:
    torch.manual_seed(0)
    model, x = _LooksAtValues().double(), normal(4, 3)
    expected = dense_jacobian(model, x)
    jacobian = Jacobian(model)
    with pytest.warns(UserWarning, match="cannot be vectorised over data"):
        close(jacobian.rows(x, 4).jacobian, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(jacobian.rows(x, 4).jacobian, expected)
    close(jacobian.vjp(x, normal(4, 2, 3)), torch.einsum("bcp,bck->pk", expected, normal(4, 2, 3)))
    for k in (1, 3):
        close(jacobian.jvp(x, normal(expected.shape[2], k)), expected @ normal(expected.shape[2], k))


def test_what_cannot_be_vectorised_is_told_once_for_each_model() -> None:
    x = normal(4, 3)
    for _ in range(2):
        model = _LooksAtValues().double()
        with pytest.warns(UserWarning, match="cannot be vectorised over data") as told:
            for _ in range(3):
                Jacobian(model).rows(x, 4)
        assert len(told) == 1


def test_rows_taken_one_by_one_are_differentiable_in_the_inputs() -> None:
    torch.manual_seed(0)
    model, x = _LooksAtValues().double(), normal(3, 3)
    jacobian = Jacobian(model)
    jacobian._vmaps = False
    assert not jacobian.rows(x, 3).jacobian.requires_grad
    (found,) = torch.autograd.grad((jacobian.rows(x.requires_grad_(), 3).jacobian ** 2).sum(), x)
    step = 1e-6 * normal(3, 3, seed=9)
    above, below = (dense_jacobian(model, x.detach() + s).square().sum() for s in (step, -step))
    close((found * step).sum() / step.norm(), (above - below) / (2 * step.norm()), 1e-7)


def test_a_datum_without_a_say_of_the_weights_has_rows_of_zeros() -> None:
    class Decided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([row[:2] if row[0].item() > 0 else self.linear(row) for row in x])

    model, x = Decided().double(), torch.cat([normal(3, 3), torch.ones(1, 3, dtype=torch.float64)])
    with pytest.warns(UserWarning, match="cannot be vectorised over data"):
        rows = Jacobian(model).rows(x, 4).jacobian
    close(rows, dense_jacobian(model, x))
    assert not rows[3].any()


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.body, self.head = kind(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


def _weight_normed() -> nn.Module:
    """Has no forward-mode derivative in torch."""
    return nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.GELU(), nn.Linear(4, 2)
    )


def _normed_by_groups() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.GroupNorm(2, 4), nn.GELU(), nn.Linear(4, 2))


not_vectorised = pytest.mark.filterwarnings(
    "ignore:This model cannot be vectorised:UserWarning",
    "ignore:There is a performance drop because we have not yet implemented:UserWarning",
)


@not_vectorised
@pytest.mark.parametrize(
    "build",
    [
        lambda: _Recurrent(nn.RNN),
        lambda: _Recurrent(nn.GRU),
        lambda: _Recurrent(nn.LSTM),
        _weight_normed,
        _normed_by_groups,
    ],
    ids=["RNN", "GRU", "LSTM", "weight norm", "GroupNorm"],
)
@pytest.mark.parametrize("product", ["rows", "vjp", "jvp"])
def test_layers_that_torch_cannot_vectorise_or_push_forward_have_all_products(
    build: Callable[[], nn.Module], product: str
) -> None:
    torch.manual_seed(0)
    model, x = build().double(), normal(4, 3, 2)
    expected = dense_jacobian(model, x)
    jacobian, P = Jacobian(model), expected.shape[2]
    with untouched(model):
        if product == "rows":
            close(jacobian.rows(x, 4).jacobian, expected)
        elif product == "vjp":
            close(jacobian.vjp(x, normal(4, 2, 3)), torch.einsum("bcp,bck->pk", expected, normal(4, 2, 3)))
        else:
            for k in (1, 3):
                close(jacobian.jvp(x, normal(P, k)), expected @ normal(P, k))


@not_vectorised
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_in_float32_have_the_products_of_float64(kind: type[nn.Module]) -> None:
    """An LSTM in float32 has kernels of its own on a CPU, which `torch.func` refuses even for a single datum."""
    torch.manual_seed(0)
    model, x = _Recurrent(kind), normal(4, 3, 2)
    dense = dense_jacobian(deepcopy(model).double(), x)
    jacobian, V, S = Jacobian(model), normal(dense.shape[2], 3), normal(4, 2, 3)
    tolerance = TOLERANCE[torch.float32]
    with untouched(model):
        close(jacobian.rows(x.float(), 4).jacobian, dense, tolerance)
        close(jacobian.vjp_each(x.float(), S.float()), torch.einsum("bcp,bck->bkp", dense, S), tolerance)
        close(jacobian.vjp(x.float(), S.float()), torch.einsum("bcp,bck->pk", dense, S), tolerance)
        close(jacobian.jvp(x.float(), V.float()), dense @ V, tolerance)


@not_vectorised
def test_an_lstm_in_float32_has_the_posterior_of_float64() -> None:
    torch.manual_seed(0)
    model, x, y, new = _Recurrent(nn.LSTM), normal(12, 3, 2), torch.arange(12) % 2, normal(3, 3, 2, seed=8)
    covariances = []
    for dtype in (torch.float32, torch.float64):
        la = Laplace(deepcopy(model).to(dtype), "classification", "all", "iterncgp", num_actions=12)
        loader = DataLoader(TensorDataset(x.to(dtype), y), batch_size=5)
        la.estimate_cost(loader)
        la.fit(loader)
        covariances.append(la._glm_predictive_distribution(new.to(dtype))[1])
    close(*covariances, 1e-4)


def test_an_error_of_the_model_is_not_taken_for_a_failure_to_vectorise() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x[..., :2])

    with pytest.raises(RuntimeError, match=r"cannot be multiplied|must match|size mismatch|shapes"):
        Jacobian(Wrong().double()).rows(normal(4, 3), 4)

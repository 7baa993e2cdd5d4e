"""Rows of the Jacobian by layers: the same numbers as by `torch.func`, and only where they can be had this way."""

from collections.abc import Callable

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ntk_iterncgp.jacobian import blocks
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.jacobian.blocks import WeightColumns
from ntk_iterncgp.jacobian.last_layer import LastLayerJacobian
from ntk_iterncgp.jacobian.layers import LayerRows
from ntk_iterncgp.jacobian.rows import DenseRows, NetworkJacobian

NUM_INPUTS = 3
SHUT = 0.0  # the first input up to which some models below do not use their weights again


class Tokens(nn.Module):
    """A linear layer applied at each place of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(torch.tanh(self.inner(x))).mean(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(3)
        self.second, self.head = nn.Conv2d(3, 3, 3, padding=2, dilation=2), nn.Linear(27, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.norm(self.first(x)))
        h = h + self.second(h)
        return self.head(torch.relu_(h).flatten(1))


class Normed(nn.Module):
    """Batch norms behind a convolution with a bias, behind one whose output is also used otherwise, behind no layer,
    without weights, and in one dimension; rectangular kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first, self.norm = nn.BatchNorm2d(2), nn.Conv2d(2, 3, (3, 2), bias=True), nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 4, (1, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2))
        self.also, self.plain = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)
        self.mix, self.last, self.head = nn.Conv2d(4, 4, 1), nn.BatchNorm1d(4), nn.Linear(4, 3)
        nn.init.zeros_(self.norm.weight[:1])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(self.before(x))))
        z = self.second(h)
        h = torch.relu_(self.also(z)) + torch.sin(z) + self.plain(self.mix(z))
        return self.head(torch.relu_(self.last(h.flatten(2))).mean(2))


class Overwritten(Tokens):
    """What comes out of layers is overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu_(self.norm(torch.relu_(self.inner(x)))).mean(1))


class Unused(nn.Module):
    """A layer that is called, and whose output is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.auxiliary = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        self.auxiliary(h)
        return self.outer(h)


class ByKeyword(Residual):
    """Layers that are called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.last_norm = nn.LayerNorm(27)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.norm(input=self.first(input=x)))
        return self.head(input=self.last_norm(input=self.second(input=h).flatten(1)))


class Embedded(nn.Module):
    """Words, of which some come twice and one is padding, and positions, which are looked up once for all data."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(5, 4, padding_idx=0), nn.Embedding(6, 4)
        self.kind, self.head = nn.Embedding(5, 4), Tokens()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x) * self.kind(x[:, 0])[:, None] + self.places(torch.arange(6)[None]))


PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3, bias=False)), (4,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "tokens": (Tokens, (6, 4)),
    "embeddings": (Embedded, (6,)),
    "residual": (Residual, (2, 6, 6)),
    "normed": (Normed, (2, 7, 5)),
    "overwritten": (Overwritten, (6, 4)),
    "unused": (Unused, (4,)),
    "by keyword": (ByKeyword, (2, 6, 6)),
    "one output": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), (4,)),
}


class TwoCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class BehindTheBack(TwoCalls):
    """One call that the layer knows about, one that it does not."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)) + x @ self.inner.weight.T)


class Shut(TwoCalls):
    """Behind the layer's back for some data only, while the sum for the first ones is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)) + torch.relu(x[:, :1] - SHUT) * (x @ self.inner.weight.T))


class ShutAndTied(TwoCalls):
    """The same, with weights that another layer has too."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.where(x[:, :1] > SHUT, self.again(x), torch.tanh(self.inner(x))))


class SometimesTwice(TwoCalls):
    """Python code that uses a weight again for some batches."""

    def forward(self, x: Tensor) -> Tensor:
        h, is_open = torch.tanh(self.inner(x)), x[:, :1] > SHUT
        if bool(is_open.any()):
            h = torch.where(is_open, x @ self.inner.weight.T, h)
        return self.outer(h)


class DroppedSometimes(TwoCalls):
    """The layer is called, but its weight is used otherwise for some batches."""

    def forward(self, x: Tensor) -> Tensor:
        h, is_open = torch.tanh(self.inner(x)), x[:, :1] > SHUT
        again = x @ self.inner.weight.T
        return self.outer(again if bool(is_open.all()) else torch.where(is_open, again, h) if is_open.any() else h)


class Skipped(TwoCalls):
    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)


class Constant(TwoCalls):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.inner(x)
        return self.outer(torch.tanh(h))


class Wide(nn.Module):
    """Activations that are many times the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3))


OTHER: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "called twice": (TwoCalls, (4,)),
    "behind the back": (BehindTheBack, (4,)),
    "skipped": (Skipped, (4,)),
    "constant": (Constant, (4,)),
    "wide": (Wide, (1, 20, 20)),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 2)), (2, 6, 6)),
    "another kind": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)), (2, 6)),
}


def prepared(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = make().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    if isinstance(model, Embedded):
        return model.eval(), torch.randint(5, (NUM_INPUTS, *shape))
    return model.eval(), torch.randn(NUM_INPUTS, *shape, dtype=torch.float64)


def by_func(model: nn.Module, x: Tensor) -> DenseRows:
    jacobian = Jacobian(model)
    jacobian._places = None
    with torch.no_grad():
        rows = jacobian.rows(x, len(x))
    assert isinstance(rows, DenseRows)
    return rows


def check_rows(model: nn.Module, x: Tensor, kind: type) -> None:
    expected = by_func(model, x)
    with torch.no_grad():
        rows = Jacobian(model).rows(x, len(x))
    assert isinstance(rows, kind)
    torch.testing.assert_close(rows.jacobian, expected.jacobian)


@pytest.mark.parametrize("case", PLAIN)
def test_plain_layers_give_the_rows_that_torch_func_gives(case: str) -> None:
    model, x = prepared(*PLAIN[case])
    jacobian, expected = Jacobian(model), by_func(model, x)
    with torch.no_grad():
        rows = jacobian.rows(x, len(x))
    assert isinstance(rows, LayerRows)
    P, C = jacobian.num_params, rows.outputs.shape[1]
    torch.testing.assert_close(rows.outputs, expected.outputs)
    torch.testing.assert_close(rows.jacobian, expected.jacobian)
    weights, variance = torch.randn(P, 4, dtype=torch.float64), torch.rand(P, dtype=torch.float64) + 0.1
    layerwise = torch.repeat_interleave(torch.rand(len(jacobian.sizes)).double(), torch.tensor(jacobian.sizes))
    for some in (weights[:, :1], weights, weights.repeat(1, 20)):  # few columns go through a layer, many meet its rows
        torch.testing.assert_close(rows.times(some), expected.times(some))
    for each in (variance, layerwise, torch.ones(P, dtype=torch.float64)):
        torch.testing.assert_close(rows.covariance(each), expected.covariance(each))
        for joint in (False, True):
            both = expected.times(weights), expected.covariance(each, joint=joint)
            torch.testing.assert_close(rows.products(weights, each, joint=joint), both)
    sizes = tuple(jacobian.sizes)
    for found, truth in zip(rows.by_layer(weights, sizes), expected.by_layer(weights, sizes), strict=True):
        torch.testing.assert_close(found, truth)
    root = torch.randn(NUM_INPUTS, C, C, dtype=torch.float64)
    curvature = root @ root.mT
    torch.testing.assert_close(
        rows.curvature_diagonal(lambda block: curvature @ block),
        expected.curvature_diagonal(lambda block: curvature @ block),
    )


def pixels() -> nn.Module:
    """Convolutions that see a few pixels, and padding."""
    body = [nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 3, padding=1, bias=False), nn.Tanh()]
    return nn.Sequential(*body, nn.Conv2d(5, 5, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(5, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("k", [0, 3, 40])
@pytest.mark.parametrize("size", [1, 2])
def test_weights_that_see_nothing_but_padding_are_left_out_of_products(
    size: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SLICE_NUMBERS", 64)  # many slices
    torch.manual_seed(0)
    model, x = pixels().to(dtype), torch.randn(40, 2, size, size, dtype=dtype)
    jacobian, J = Jacobian(model), by_func(model, x).jacobian.double()
    with torch.no_grad():
        rows = jacobian.rows(x, len(x))
    assert isinstance(rows, LayerRows)
    A = torch.einsum("bcp,bck->pk", J, torch.randn(40, 3, k).double())
    assert k == 0 or float((A == 0).all(1).double().mean()) > 0.3
    variance = torch.rand(len(A), dtype=torch.float64) + 0.1
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    for scale in (None, variance):
        # as posteriors store it, actions by weights; and the same A again, where it is known what is zero
        columns = WeightColumns(A.to(dtype).T.contiguous().T, dtype, scale)
        V = A if scale is None else scale[:, None] * A
        for _ in range(2):
            torch.testing.assert_close(rows.times(columns), J @ V, **tolerance)
            for each in (variance, torch.full((1,), 0.3, dtype=torch.float64)):
                cross, covariance = rows.products(columns, each)
                torch.testing.assert_close(cross, J @ V, **tolerance)
                torch.testing.assert_close(covariance, J * each @ J.mT, **tolerance)
    assert k == 0 or any(compact is not None for compact in columns._compact.values())


def test_a_in_half_precision_is_multiplied_as_it_is_stored() -> None:
    model, x = prepared(*PLAIN["residual"])
    with torch.no_grad():
        rows = Jacobian(model).rows(x, len(x))
    A = torch.randn(rows.jacobian.shape[2], 5).bfloat16()
    expected = rows.jacobian @ A.double()
    for some in (rows, by_func(model, x)):
        torch.testing.assert_close(some.times(WeightColumns(A, torch.float64)), expected)


def same_for_all(outputs: Tensor) -> Tensor:  # (C, 2)
    return torch.arange(2 * outputs.shape[1], dtype=outputs.dtype).reshape(-1, 2).sin()


def own_for_each(outputs: Tensor) -> Tensor:  # (b, C, 2), of the outputs themselves
    return torch.stack([outputs.sin(), outputs.square()], 2)


@pytest.mark.parametrize("contrasts_of", [same_for_all, own_for_each])
@pytest.mark.parametrize("as_function", [False, True], ids=["tensor", "function"])
@pytest.mark.parametrize("case", [*PLAIN, *OTHER, "last layer"])
def test_rows_of_contrasts_are_contrasts_of_rows(
    case: str, as_function: bool, contrasts_of: Callable[[Tensor], Tensor]
) -> None:
    jacobian: NetworkJacobian
    if case == "last layer":
        layer, x = nn.Linear(4, 3).double(), torch.randn(NUM_INPUTS, 4, dtype=torch.float64)
        jacobian, expected = LastLayerJacobian(layer), by_func(layer, x)
    else:
        model, x = prepared(*{**PLAIN, **OTHER}[case])
        jacobian, expected = Jacobian(model), by_func(model, x)
    H = contrasts_of(expected.outputs.detach())
    weights, variance = torch.randn(jacobian.num_params, 40).double(), torch.rand(jacobian.num_params).double() + 0.1
    with torch.no_grad():
        rows = jacobian.rows(x, len(x), contrasts_of if as_function else H)
    each = H.expand(len(x), -1, -1).mT @ expected.jacobian  # (b, 2, P)
    whole, flat = expected.outputs, each.flatten(0, 1)
    torch.testing.assert_close(rows.outputs, whole)
    torch.testing.assert_close(rows.written_out(), each)
    for found in (rows.times(weights), rows.products(weights, variance)[0]):
        torch.testing.assert_close(found, each @ weights)
    for found in (rows.covariance(variance), rows.products(weights, variance)[1]):
        torch.testing.assert_close(found, each * variance @ each.mT)
    torch.testing.assert_close(rows.covariance(variance, joint=True), flat * variance @ flat.T)


def test_contrasts_are_differentiable_in_the_inputs() -> None:
    model, x = prepared(*PLAIN["residual"])
    x = x.requires_grad_()
    H = own_for_each(model(x).detach())
    rows = Jacobian(model).rows(x, len(x), own_for_each)
    (found,) = torch.autograd.grad(rows.written_out().square().sum(), x)
    (expected,) = torch.autograd.grad((H.mT @ Jacobian(model).rows(x, len(x)).written_out()).square().sum(), x)
    assert float(found.norm()) > 0
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (NUM_INPUTS + 1, 3, 2), (1, NUM_INPUTS, 3, 2)])
def test_contrasts_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    model, x = prepared(*PLAIN["mlp"])
    with pytest.raises(ValueError, match=r"`contrasts` must have shape \(3, k\), or \(3, 3, k\) for each input"):
        Jacobian(model).rows(x, len(x), torch.zeros(shape))


def test_inputs_without_a_derivative_have_rows_by_layers_too() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 4), Tokens()
            self.table.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x))

    torch.manual_seed(0)
    model, x = Looked().double().eval(), torch.randint(5, (NUM_INPUTS, 6))
    check_rows(model, x, LayerRows)


def test_the_memory_of_rows_is_counted_when_inputs_of_a_shape_are_first_seen() -> None:
    pooled = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    model, x = prepared(lambda: pooled, (1, 5, 5))
    jacobian = Jacobian(model)
    with torch.no_grad():
        jacobian.prepare(x, len(x))
        small = jacobian.bytes_per_row(3)
        # for all outputs 25 + 18 and 8 + 3 into and out of the layers, and patches 9·9; for each derivatives of 2·3·3
        # numbers of the convolution and 3 of the head, and of 2 biases and 3
        assert small == 8 * (25 + 18 + 8 + 3 + 81 + 3 * (18 + 3 + 2 + 3))
        jacobian.prepare(torch.randn(3, 1, 7, 7, dtype=torch.float64), 3)
        assert jacobian.bytes_per_row(3) == 8 * (49 + 50 + 8 + 3 + 225 + 3 * (50 + 3 + 2 + 3))


@pytest.mark.parametrize("case", OTHER)
def test_other_models_are_left_to_torch_func(case: str) -> None:
    model, x = prepared(*OTHER[case])
    check_rows(model, x, DenseRows)


in_python = pytest.mark.filterwarnings("ignore:This model cannot be vectorised:UserWarning")


@in_python
@pytest.mark.parametrize("make", [Shut, ShutAndTied, SometimesTwice, DroppedSometimes])
@pytest.mark.parametrize("at_once", [True, False], ids=["in one batch", "in a later batch"])
def test_weights_used_again_for_some_data_only_are_left_to_torch_func(make: type[nn.Module], at_once: bool) -> None:
    """Although rows by layers are right at the first data, which they are compared at."""
    model, x = prepared(make, (4,))
    x = torch.cat([x, x])
    x[:, 0] = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0])
    jacobian, expected = Jacobian(model), by_func(model, x)
    with torch.no_grad():
        parts = [jacobian.rows(part, len(part)) for part in ([x] if at_once else x.split(2))]
    assert isinstance(parts[-1], DenseRows)
    torch.testing.assert_close(torch.cat([part.jacobian for part in parts]), expected.jacobian)


@in_python
def test_what_a_batch_has_shown_holds_for_those_after_it() -> None:
    model, x = prepared(SometimesTwice, (4,))
    x[:, 0] = -1
    jacobian = Jacobian(model)
    with torch.no_grad():
        assert isinstance(jacobian.rows(x, len(x)), LayerRows)
        for some in (-x, x):
            assert isinstance(jacobian.rows(some, len(some)), DenseRows)


@in_python
def test_what_a_fit_has_found_out_about_the_model_holds_for_predictions() -> None:
    model, x = prepared(SometimesTwice, (4,))
    x[:, 0] = torch.tensor([-1.0, -1.0, 1.0])
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=2)
    la.fit(DataLoader(TensorDataset(x, torch.arange(NUM_INPUTS) % 2), batch_size=NUM_INPUTS))
    assert all(isinstance(rows, DenseRows) for rows in la._rows_at(x[:2]))


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_model_that_calls_its_layers_by_keyword_is_fitted_without_a_warning(subset: str) -> None:
    class AsUsual(ByKeyword):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu_(self.norm(self.first(x)))
            return self.head(self.last_norm(self.second(h).flatten(1)))

    covariances = []
    for make in (ByKeyword, AsUsual):
        model, x = prepared(make, (2, 6, 6))
        la = Laplace(model, "classification", subset, "iterncgp", num_actions=2)
        la.fit(DataLoader(TensorDataset(x, torch.arange(NUM_INPUTS)), batch_size=2))
        covariances.append(la._glm_predictive_distribution(x)[1])
    torch.testing.assert_close(*covariances)


@pytest.mark.parametrize("frozen", ["first.weight", "first", "norm", "norm.weight", "norm.bias", "before", "head"])
def test_a_subset_of_the_weights_has_the_rows_of_that_subset(frozen: str) -> None:
    model, x = prepared(*PLAIN["normed"])
    for name, value in model.named_parameters():
        value.requires_grad_(not name.startswith(frozen))
    check_rows(model, x, LayerRows)


def test_what_a_hook_makes_of_a_batch_norm_is_kept() -> None:
    model, x = prepared(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (4,))
    model[1].register_forward_hook(lambda layer, inputs, output: output + 1)
    expected = by_func(model, x)
    with torch.no_grad():
        rows = Jacobian(model).rows(x, len(x))
    assert isinstance(rows, LayerRows)
    torch.testing.assert_close(rows.outputs, expected.outputs)
    torch.testing.assert_close(rows.jacobian, expected.jacobian)


def test_what_a_hook_makes_of_an_output_is_not_taken_for_the_layer() -> None:
    model, x = prepared(*PLAIN["mlp"])
    model[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    check_rows(model, x, LayerRows)


def test_the_model_keeps_no_hook_also_after_an_exception() -> None:
    model, x = prepared(*PLAIN["residual"])
    with torch.no_grad():
        Jacobian(model).rows(x, len(x))
        with pytest.raises(RuntimeError):
            Jacobian(model).rows(x[:, :1], len(x))
    assert not any(module._forward_hooks for module in model.modules())


def test_gradients_through_the_inputs_take_the_way_that_has_them() -> None:
    model, x = prepared(*PLAIN["mlp"])
    rows = Jacobian(model).rows(x.requires_grad_(), len(x))
    assert isinstance(rows, DenseRows)
    assert torch.autograd.grad(rows.covariance(torch.ones(40, dtype=torch.float64)).sum(), x)[0].abs().sum() > 0


def test_a_model_that_sorts_its_batch_is_left_to_torch_func() -> None:
    """The data at which rows are proven may be in order as they come."""

    class Sorting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            return self.head(torch.tanh(self.first(x[order]))[order.argsort()])

    model, x = prepared(Sorting, (4,))
    x[:, 0] = torch.tensor([1.0, 2.0, 0.0])
    check_rows(model, x, DenseRows)

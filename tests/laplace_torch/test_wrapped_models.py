"""Models inside of wrappers, in half precision, or with layers that cannot be differentiated."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ntk_iterncgp  # noqa: F401  registers the flavours

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
y = torch.arange(40) % 3


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def covariance(model: nn.Module, x: Tensor = X, **settings: Any) -> Tensor:
    la = Laplace(model, "classification", settings.pop("subset", "all"), "iterncgp", num_actions=30, **settings)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=20))
    return la._glm_predictive_distribution(x[:5])[1]


@pytest.mark.slow
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_compiled_model_is_that_inside(subset: str) -> None:
    plain = covariance(network(), subset=subset)
    torch.testing.assert_close(covariance(torch.compile(network()), subset=subset), plain)  # type: ignore[arg-type]


def test_a_data_parallel_model_is_that_inside_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="inside DataParallel"):
        found = covariance(nn.DataParallel(network()))
    torch.testing.assert_close(found, covariance(network()))


@pytest.mark.slow
def test_a_distributed_data_parallel_model_is_that_inside_with_a_warning(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.warns(UserWarning, match="inside DistributedDataParallel"):
            found = covariance(nn.parallel.DistributedDataParallel(network()))
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(found, covariance(network()))


class Stream:
    """As a loader of WebDataset's, which need not know its length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(X.split(20), y.split(20), strict=True)


def test_a_stream_of_batches_gives_the_posterior_of_a_loader() -> None:
    la = Laplace(network(), "classification", "all", "iterncgp", policy="clusters", num_actions=30)
    la.fit(Stream())
    la.refine(Stream(), epochs=1)
    whole = Laplace(network(), "classification", "all", "iterncgp", policy="clusters", num_actions=30)
    whole.fit(list(Stream()))
    whole.refine(list(Stream()), epochs=1)
    torch.testing.assert_close(la.latent(X[:5])[1], whole.latent(X[:5])[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    rounded = network().to(dtype)
    exact = covariance(rounded.float(), X.to(dtype).float())
    found = covariance(network().to(dtype), X.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), exact, rtol=1e-2, atol=1e-2)


def test_channels_last_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    images = torch.randn(40, 1, 6, 6)
    plain = covariance(model, images)
    model, images = (each.to(memory_format=torch.channels_last) for each in (model, images))
    torch.testing.assert_close(covariance(model, images), plain)


def test_gradient_checkpointing_works() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.testing.assert_close(covariance(Checkpointed()), covariance(network()), rtol=1e-4, atol=1e-4)


def test_quantised_layers_are_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(network(), {nn.Linear})
    with pytest.raises(ValueError, match="got quantised layers: 0"):
        covariance(quantised)

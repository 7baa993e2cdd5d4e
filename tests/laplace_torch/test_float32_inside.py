"""Models that compute in float32 inside, whatever their dtype: Llama and its relatives."""

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader

import ntk_iterncgp  # noqa: F401  registers the flavours
from tests import oracles
from tests.laplace_torch.test_huggingface import (
    LENGTH,
    NUM_CLASSES,
    NUM_DATA,
    SMALL,
    VOCABULARY,
    Sentences,
    bert,
    rows,
    with_adapters,
)

transformers = pytest.importorskip("transformers", reason="needs transformers (extra `dev`)")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This model cannot be vectorised:UserWarning"),  # their masks ask for values
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]


def llama_like(kind: str) -> nn.Module:
    """Their RMSNorm casts to float32, whatever the dtype of the model."""
    sizes = SMALL | dict(num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, pad_token_id=0)
    extra = {"Gemma": {"head_dim": 4}, "Qwen2": {}}.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(**sizes | extra)
    return getattr(transformers, f"{kind}ForSequenceClassification")(config)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Gemma"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_model_that_computes_in_float32_inside_is_fitted_in_float32(kind: str, lora: bool) -> None:
    torch.manual_seed(0)
    model = llama_like(kind).eval()
    model = with_adapters(model, "q_proj", "v_proj") if lora else model
    loader = DataLoader(Sentences(), batch_size=4)
    la = Laplace(model, "classification", "all", "iterncgp", policy="clusters", num_actions=NUM_DATA * NUM_CLASSES)
    la.fit(loader)
    la.refine(loader, epochs=4)
    assert la.posterior.dtype == torch.float32
    batch = next(iter(DataLoader(loader.dataset, batch_size=NUM_DATA)))
    outputs, jacobian = rows(model, batch)
    flat = jacobian.double().flatten(0, 1)
    K = flat @ flat.T
    exact = oracles.posterior_at("softmax", outputs.double(), K, K, K).diagonal().reshape(outputs.shape)
    covariance = la.latent({k: v for k, v in batch.items() if k != "labels"})[1]
    ratio = covariance.double().diagonal(dim1=1, dim2=2) / exact
    assert ratio.min() >= 1 - 1e-3 and ratio.max() <= 1 + 1e-2


def test_float64_asked_for_of_a_model_that_computes_in_float32_names_the_way_out() -> None:
    torch.manual_seed(0)
    la = Laplace(
        llama_like("Llama").eval(), "classification", "all", "iterncgp", policy="clusters", dtype=torch.float64
    )
    with pytest.raises(RuntimeError, match=r"`model` must have .* inside\. Try dtype=torch\.float32\.$"):
        la.fit(DataLoader(Sentences(), batch_size=4))


def test_a_model_that_computes_in_its_own_dtype_is_fitted_in_float64() -> None:
    torch.manual_seed(0)
    la = Laplace(bert().eval(), "classification", "all", "iterncgp", policy="clusters", num_actions=4)
    la.fit(DataLoader(Sentences(), batch_size=4))
    assert la.posterior.dtype == torch.float64


def test_more_data_for_a_model_that_computes_in_float32_inside() -> None:
    torch.manual_seed(0)
    la, loader = Laplace(llama_like("Llama").eval(), "classification", "all", "iterncgp"), DataLoader(Sentences(), 4)
    la.fit(loader)
    x = {k: v for k, v in next(iter(loader)).items() if k != "labels"}
    before = la.latent(x)[1].diagonal(dim1=1, dim2=2)
    with pytest.warns(UserWarning):
        la.update(loader)
    assert bool((la.latent(x)[1].diagonal(dim1=1, dim2=2) < before).all())

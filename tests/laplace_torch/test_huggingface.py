"""Models and batches of Hugging Face, as they are: no wrapper, no download, the exact variance."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ntk_iterncgp  # noqa: F401  registers the flavours
from tests import oracles

transformers = pytest.importorskip("transformers", reason="needs transformers (extra `dev`)")
peft = pytest.importorskip("peft", reason="needs peft (extra `dev`)")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("error:This model cannot be vectorised:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning"),
]

NUM_DATA, LENGTH, VOCABULARY, NUM_CLASSES = 8, 5, 20, 3
SMALL: dict[str, Any] = dict(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=NUM_CLASSES
)


class Sentences(Dataset):
    """Padded token sequences of random lengths, with labels, as a tokenizer gives them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, LENGTH + 1, (NUM_DATA, 1), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.ids = torch.randint(1, VOCABULARY, (NUM_DATA, LENGTH), generator=generator) * self.mask
        self.labels = torch.randint(NUM_CLASSES, (NUM_DATA,), generator=generator)

    def __len__(self) -> int:
        return NUM_DATA

    def __getitem__(self, n: int) -> dict[str, Tensor | int]:
        return {"input_ids": self.ids[n], "attention_mask": self.mask[n], "labels": self.labels[n], "number": n}


class Images(Dataset):
    def __init__(self) -> None:
        self.pixels = torch.randn(NUM_DATA, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_DATA

    def __getitem__(self, n: int) -> dict[str, Tensor | int]:
        return {"pixel_values": self.pixels[n], "labels": n % NUM_CLASSES}


def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **SMALL)
    return transformers.BertForSequenceClassification(config)


def distilbert() -> nn.Module:
    sizes = dict(dim=8, n_layers=1, n_heads=2, hidden_dim=8, num_labels=NUM_CLASSES)
    config = transformers.DistilBertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)
    return transformers.DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    sizes = dict(n_embd=8, n_layer=1, n_head=2, n_positions=LENGTH, num_labels=NUM_CLASSES, pad_token_id=0)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1, **sizes)
    return transformers.GPT2ForSequenceClassification(config)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **SMALL))


def with_adapters(model: nn.Module, *targets: str) -> nn.Module:
    """The model with LoRA adapters that are not zero, as after some training."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(targets), task_type="SEQ_CLS"))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    return adapted


MODELS: dict[str, tuple[Callable[[], nn.Module], type[Dataset]]] = {
    "bert": (bert, Sentences),
    "distilbert": (distilbert, Sentences),
    "gpt2": (gpt2, Sentences),
    "vit": (vit, Images),
    "bert, LoRA": (lambda: with_adapters(bert(), "query", "value"), Sentences),
    "distilbert, LoRA": (lambda: with_adapters(distilbert(), "q_lin", "v_lin"), Sentences),
    "gpt2, LoRA": (lambda: with_adapters(gpt2(), "c_attn"), Sentences),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, DataLoader, dict[str, str]]]:
    make, kind = MODELS[request.param]
    torch.manual_seed(0)
    keys = {"dict_key_x": "pixel_values"} if kind is Images else {}
    yield make().eval(), DataLoader(kind(), batch_size=4), keys


def rows(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:  # (b, C), (b, C, P)
    """Outputs and Jacobian by plain autograd, the model called as Hugging Face documents it."""
    weights = [p for p in model.parameters() if p.requires_grad]
    named = {k: v for k, v in batch.items() if k not in ("labels", "number")}
    outputs = model(**named).logits
    jacobian = [
        torch.cat(
            [
                torch.zeros(w.numel()) if g is None else g.flatten()
                for g, w in zip(torch.autograd.grad(f, weights, retain_graph=True, allow_unused=True), weights)  # noqa: B905
            ]
        )
        for f in outputs.flatten()
    ]
    return outputs.detach(), torch.stack(jacobian).unflatten(0, outputs.shape)


def test_a_batch_is_handed_over_by_name_and_the_variance_is_exact(
    case: tuple[nn.Module, DataLoader, dict[str, str]],
) -> None:
    model, loader, keys = case
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=NUM_DATA * (NUM_CLASSES - 1), **keys)
    la.fit(loader)
    batch = next(iter(DataLoader(loader.dataset, batch_size=NUM_DATA)))
    outputs, jacobian = rows(model, batch)
    flat = jacobian.double().flatten(0, 1)
    K = flat @ flat.T
    exact = oracles.posterior_at("softmax", outputs.double(), K, K, K).diagonal().reshape(outputs.shape)
    mean, covariance = la._glm_predictive_distribution({k: v for k, v in batch.items() if k != "labels"})
    torch.testing.assert_close(mean, outputs)
    ratio = covariance.double().diagonal(dim1=1, dim2=2) / exact
    assert ratio.min() >= 1 - 1e-3 and ratio.max() <= 1 + 1e-2
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("name", ["bert", "distilbert, LoRA", "vit", "gpt2"])  # the last with the head at each token
def test_the_last_layer_of_a_model_that_takes_names(name: str) -> None:
    make, kind = MODELS[name]
    torch.manual_seed(0)
    model, loader = make().eval(), DataLoader(kind(), batch_size=4)
    la = Laplace(
        model, "classification", "last_layer", "iterncgp", dict_key_x="pixel_values" if kind is Images else "input_ids"
    )
    la.fit(loader)
    batch = next(iter(loader))
    assert la(batch).shape == (4, NUM_CLASSES)
    with torch.no_grad():
        named = {k: v for k, v in batch.items() if k not in ("labels", "number")}
        torch.testing.assert_close(la._glm_predictive_distribution(batch)[0], model(**named).logits)


def test_a_last_layer_whose_places_are_mixed_is_refused_with_advice() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, NUM_CLASSES)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.head(self.embed(input_ids)).mean(1)

    la = Laplace(Mean(), "classification", "last_layer", "iterncgp")
    with pytest.raises(ValueError, match="feature_reduction"):
        la.fit(DataLoader(Sentences(), batch_size=4))


def test_a_model_for_token_classification_is_fitted_as_it_is() -> None:
    class Tags(Sentences):
        def __getitem__(self, n: int) -> dict[str, Tensor | int]:
            return {**super().__getitem__(n), "labels": torch.where(self.mask[n] == 1, self.ids[n] % NUM_CLASSES, -100)}

    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **SMALL)
    model = transformers.BertForTokenClassification(config).eval()
    la = Laplace(model, "classification", "all", "iterncgp", num_actions=20)
    la.fit(DataLoader(Tags(), batch_size=4))
    batch = next(iter(DataLoader(Tags(), batch_size=4)))
    named = {k: batch[k] for k in ("input_ids", "attention_mask")}
    with torch.no_grad():
        torch.testing.assert_close(la.latent(named)[0], model(**named).logits)
    assert la(named).shape == (4, LENGTH, NUM_CLASSES)


def test_a_mapping_that_a_model_takes_whole_stays_whole() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, NUM_CLASSES)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            assert isinstance(batch, dict) and "attention_mask" in batch
            return self.head(self.embed(batch["input_ids"]).mean(1))

    la = Laplace(Whole(), "classification", "all", "iterncgp", num_actions=4)
    la.fit(DataLoader(Sentences(), batch_size=4))
    assert la.n_data == NUM_DATA

"""The callback of Hugging Face's Trainer: a posterior when training ends."""

from pathlib import Path

import pytest
import torch
from laplace import Laplace
from torch.utils.data import DataLoader

from tests.laplace_torch.test_huggingface import NUM_DATA, Sentences, bert, with_adapters

pytest.importorskip("transformers", reason="needs transformers (extra `dev`)")
pytest.importorskip("accelerate", reason="needs accelerate, as the Trainer does")

import transformers

from ntk_iterncgp.huggingface import LaplaceCallback

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:transformers")]


@pytest.mark.parametrize(("subset", "lora"), [("all", False), ("all", True), ("last_layer", False)])
def test_the_posterior_at_the_end_of_training_is_that_of_the_trained_model(
    subset: str, lora: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = with_adapters(bert(), "query", "value") if lora else bert()
    before = [weight.detach().clone() for weight in model.parameters()]
    callback = LaplaceCallback(subset_of_weights=subset, policy="clusters", num_actions=6)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no"
    )
    transformers.Trainer(model, arguments, train_dataset=Sentences(), callbacks=[callback]).train()
    assert any(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert callback.la.n_data == NUM_DATA

    fitted = Laplace(model, "classification", subset, "iterncgp", policy="clusters", num_actions=6)
    fitted.fit(DataLoader(Sentences(), batch_size=4))
    batch = next(iter(DataLoader(Sentences(), batch_size=NUM_DATA)))
    x = {name: value for name, value in batch.items() if name not in ("labels", "number")}
    for found, expected in zip(callback.la.latent(x), fitted.latent(x), strict=True):
        torch.testing.assert_close(found, expected)

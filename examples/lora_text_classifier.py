"""A transformer tuned by LoRA on few texts: the posterior of its adapters in one epoch, beside KFAC and a temperature.

    .venv/bin/python examples/lora_text_classifier.py [--toy]

The texts are generated: each topic prefers some words. A Bert learns to tell eight topics, then adapters of rank 4
learn three new ones from few labelled texts, a fifth of them mislabelled. KFAC is laplace-torch's, as in Laplace-LoRA.
"""

import sys
import warnings

import peft
import torch
import transformers
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ntk_iterncgp  # noqa: F401 (registers hessian_structure="iterncgp")

TOY = "--toy" in sys.argv
WORDS, LENGTH, MISLABELLED = 120, 12, 0.2
Batch = dict[str, Tensor]


def texts(topics: range, number: int, seed: int, mislabelled: float = 0.0) -> list[Batch]:
    """Texts of some topics: a third of their words are among the ten that the topic prefers."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(number):
        label = int(torch.randint(len(topics), (), generator=generator))
        preferred = torch.randperm(WORDS - 1, generator=torch.Generator().manual_seed(topics[label]))[:10] + 1
        typical = preferred[torch.randint(10, (LENGTH,), generator=generator)]
        anything = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, (), generator=generator)).long()
        ids = torch.where(torch.rand(LENGTH, generator=generator) < 1 / 3, typical, anything) * mask
        if torch.rand((), generator=generator) < mislabelled:
            label = int(torch.randint(len(topics), (), generator=generator))
        found.append({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(label)})
    return found


def bert(num_labels: int) -> nn.Module:
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config = transformers.BertConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=num_labels, attn_implementation="eager", **sizes
    )
    return transformers.BertForSequenceClassification(config)


def trained(model: nn.Module, data: list[Batch], epochs: int, learning_rate: float) -> nn.Module:
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, learning_rate)
    model.train()
    for _ in range(1 if TOY else epochs):
        for batch in DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return model.eval()


class TakesBatches(nn.Module):
    """The model as laplace-torch's own flavours call it: with the whole batch, for its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def scores(p: Tensor, y: Tensor, far: Tensor) -> str:
    """NLL, expected calibration error, and the area under the curve by which the entropy finds other topics."""
    confidence, predicted = p.max(1)
    bins = (confidence * 10).long().clamp_max(9)
    gaps = [((predicted == y).double() - confidence)[bins == b].sum().abs() for b in bins.unique()]
    entropy, far_entropy = (torch.special.entr(q).sum(1) for q in (p, far))
    area = (far_entropy[:, None] > entropy).double().mean()
    nll = -p.gather(1, y[:, None]).log().mean()
    return f"{float(nll):.4f}  {float(sum(gaps)) / len(y):.4f}  {float(area):.4f}"


def main() -> None:
    torch.manual_seed(0)
    size = 40 if TOY else 200
    model = trained(bert(8), texts(range(8), 10 * size, 1), 6, 2e-3)
    model.classifier, model.num_labels, model.config.num_labels = nn.Linear(32, 3), 3, 3
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = peft.get_peft_model(model, settings)
    topics = range(20, 23)
    data, tuning, test = (texts(topics, size, seed, MISLABELLED) for seed in (2, 3, 4))
    far = texts(range(30, 38), size, 5)
    model = trained(model, data, 40, 2e-3)
    val_loader = DataLoader(tuning, batch_size=100)
    tuned, new, other = (next(iter(DataLoader(part, batch_size=size))) for part in (tuning, test, far))

    def logits(batch: Batch) -> Tensor:
        with torch.no_grad():
            return TakesBatches(model)(batch).double()

    print("                       NLL     ECE     OOD")
    print(f"the model as it is     {scores(logits(new).softmax(1), new['labels'], logits(other).softmax(1))}")
    grid = torch.logspace(-1, 1, 101)
    losses = [nn.functional.cross_entropy(logits(tuned) / t, tuned["labels"]) for t in grid]
    T = grid[torch.stack(losses).argmin()]
    p, q = ((logits(batch) / T).softmax(1) for batch in (new, other))
    print(f"temperature {T:4.2f}       {scores(p, new['labels'], q)}")
    for structure, uncertain in (("kron", TakesBatches(model)), ("iterncgp", model)):
        la = Laplace(uncertain, "classification", subset_of_weights="all", hessian_structure=structure)
        la.fit(DataLoader(data, batch_size=50))
        la.optimize_prior_precision(method="gridsearch", val_loader=val_loader, grid_size=9)
        p, q = (la(batch, link_approx="mc", n_samples=500).double() for batch in (new, other))
        name = f"{structure}, precision {float(la.prior_precision):.0f}"
        print(f"{name:<23}{scores(p, new['labels'], q)}")
    print(f"{la.n_params} of {sum(p.numel() for p in model.parameters())} weights are uncertain. {la.report_}")


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of laplace-torch's backends
        main()

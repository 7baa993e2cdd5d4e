"""Batches that are mappings, a model that returns an object with `logits`, most weights frozen: as in Hugging Face.

    .venv/bin/python examples/huggingface_style_dict_batches.py

A toy text classifier; only its adapter and head require a gradient, so only they are uncertain (as with LoRA).
"""

from types import SimpleNamespace

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ntk_iterncgp  # noqa: F401 (registers hessian_structure="iterncgp")

VOCABULARY, LENGTH, CLASSES = 50, 12, 3


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16, padding_idx=0)
        self.adapter, self.head = nn.Linear(16, 8), nn.Linear(8, CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> SimpleNamespace:
        mask = batch["attention_mask"][..., None].float()
        pooled = (self.embedding(batch["input_ids"]) * mask).sum(1) / mask.sum(1)
        return SimpleNamespace(logits=self.head(torch.tanh(self.adapter(pooled))))


def token_batches(count: int) -> list[dict[str, Tensor]]:
    """Words 1 to 48; the class is the third of the vocabulary that most of them come from."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(count):
        label = int(torch.randint(CLASSES, (), generator=generator))
        typical = 1 + 16 * label + torch.randint(16, (LENGTH,), generator=generator)
        anything = torch.randint(1, 49, (LENGTH,), generator=generator)
        words = torch.where(torch.rand(LENGTH, generator=generator) < 0.4, typical, anything)
        mask = torch.arange(LENGTH) < int(torch.randint(6, LENGTH + 1, (), generator=generator))
        found.append({"input_ids": words * mask, "attention_mask": mask, "labels": torch.tensor(label)})
    return found


def main() -> None:
    torch.manual_seed(0)
    loader, model = DataLoader(token_batches(600), batch_size=50), Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(15):
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch).logits, batch["labels"]).backward()
            optimizer.step()
    model.embedding.requires_grad_(False)

    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="iterncgp", num_actions=20)
    la.fit(loader)
    print(f"{la.n_params} of {sum(p.numel() for p in model.parameters())} weights are uncertain. {la.report_}")
    batch = next(iter(loader))
    probabilities = la(batch, pred_type="glm", link_approx="probit")
    right = (probabilities.argmax(1) == batch["labels"]).float().mean()
    confidence = probabilities.max(1).values.mean()
    print(f"{100 * right:.0f} % of the first batch right, mean confidence {100 * confidence:.0f} %")


if __name__ == "__main__":
    main()

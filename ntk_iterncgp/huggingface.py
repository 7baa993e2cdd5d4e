"""The posterior of a model that Hugging Face's Trainer has trained, fitted when training ends.

callback = LaplaceCallback(num_actions=200)
Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
callback.la.latent(batch)                      # or callback.la(batch), callback.la.calibrate(loader)
"""

from __future__ import annotations

from typing import Any

from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ntk_iterncgp.laplace_torch import IterNCGPAllLaplace, IterNCGPLastLayerLaplace

__all__ = ["LaplaceCallback"]


class LaplaceCallback(TrainerCallback):
    """Fits the posterior of the trainer's model on its training data, all of them in order, at the end of training.

    Args:
        likelihood: "classification" or "regression".
        subset_of_weights: "all", those that require a gradient (of LoRA the adapters), or "last_layer".
        **settings: Those of `Laplace(model, …, "iterncgp")`, such as `num_actions`; `dict_key_x="pixel_values"` for
            images.
    """

    la: IterNCGPAllLaplace | IterNCGPLastLayerLaplace
    """The posterior, once training has ended."""

    def __init__(self, likelihood: str = "classification", subset_of_weights: str = "all", **settings: Any) -> None:
        self.likelihood, self.subset_of_weights, self.settings = likelihood, subset_of_weights, settings

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Fit; called by the trainer, after it has loaded its best model where it was asked to."""
        model: nn.Module = kwargs["model"]
        trained = kwargs["train_dataloader"]  # which draws another order on every sweep
        loader = DataLoader(trained.dataset, batch_size=args.train_batch_size, collate_fn=trained.collate_fn)
        la: Any = Laplace(model, self.likelihood, self.subset_of_weights, "iterncgp", **self.settings)
        la.fit(loader)
        self.la = la

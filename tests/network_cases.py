"""Small networks of the kinds that people have, each with data: what every product with the Jacobian is tried on.

A case makes its model in any dtype, always with the same weights, and its training data in batches of three.
`dense_jacobian` is the plain truth: one backward pass per output, through the model itself.
"""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

N, BATCH, NEW = 8, 3, 4


@dataclass(frozen=True)
class NetworkCase:
    """`inputs` makes a tensor or a mapping for a number of data; a mapping gets the targets too, as `dict_key_y`."""

    name: str
    likelihood: str
    num_outputs: int
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Any]
    target_shape: tuple[int, ...] = ()  # of one datum
    dict_key_x: str = "input_ids"
    dict_key_y: str = "labels"
    shared: Mapping[str, Any] | None = None  # items of a mapping that are not one per datum

    def __str__(self) -> str:
        return self.name

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """In train mode, as a user may leave it: dropout and BatchNorm wait to be put in eval mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build()
            for buffer in model.buffers():  # running statistics as after training
                if buffer.is_floating_point():
                    buffer.add_(0.5 * torch.rand_like(buffer))
        return model.to(dtype).train()

    def loader(self, dtype: torch.dtype = torch.float64, *, batch_size: int = BATCH, num_data: int = N) -> DataLoader:
        return DataLoader(self.dataset(num_data, 1, dtype), batch_size=batch_size, collate_fn=self.collate)

    def batches(self, dtype: torch.dtype = torch.float64) -> list[tuple[Any, Tensor]]:
        """(x, y); a mapping is its own x."""
        batches = list(self.loader(dtype))
        return [(b, b[self.dict_key_y]) if isinstance(b, Mapping) else (b[0], b[1]) for b in batches]

    def new_inputs(self, dtype: torch.dtype = torch.float64, *, num_data: int = NEW) -> Any:
        batch = self.collate(list(self.dataset(num_data, 2, dtype)))
        return batch if isinstance(batch, Mapping) else batch[0]

    @property
    def keys(self) -> dict[str, str]:
        return {"dict_key_x": self.dict_key_x, "dict_key_y": self.dict_key_y}

    def dataset(self, num_data: int, seed: int, dtype: torch.dtype) -> Dataset:
        generator = torch.Generator().manual_seed(seed)
        x, shape = self.inputs(num_data, generator), (num_data, *self.target_shape)
        if self.likelihood == "classification":
            y = torch.randint(self.num_outputs, shape, generator=generator)
        else:
            y = torch.randn(shape, generator=generator, dtype=torch.float64)
        return Rows(x, y, self.dict_key_y, dtype)

    def collate(self, items: list[Any]) -> Any:
        batch = default_collate(items)
        if self.shared is not None:
            batch.update(self.shared)
        return batch


class Rows(Dataset):
    """Data in memory, as pairs or as mappings."""

    def __init__(self, x: Any, y: Tensor, key_y: str, dtype: torch.dtype) -> None:
        self.x, self.y, self.key_y, self.dtype = x, y, key_y, dtype

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        if isinstance(self.x, Mapping):
            return type(self.x)({**{k: self._cast(v[i]) for k, v in self.x.items()}, self.key_y: self._cast(self.y[i])})
        return self._cast(self.x[i]), self._cast(self.y[i])

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value


def dense_jacobian(model: nn.Module, x: Any) -> Tensor:  # (b, C, P)
    """One backward pass per output of the model in eval mode, for the parameters that require a gradient."""
    model = deepcopy(model).eval()
    parameters = [p for p in model.parameters() if p.requires_grad]
    outputs = _as_matrix(model(x))
    rows = []
    for output in outputs.flatten():
        gradients = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(gradients, parameters, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    return torch.stack(rows).unflatten(0, outputs.shape)


def outputs_of(model: nn.Module, x: Any) -> Tensor:  # (b, C)
    """The plain forward pass, in eval mode."""
    with torch.no_grad():
        return _as_matrix(deepcopy(model).eval()(x))


def _as_matrix(outputs: Any) -> Tensor:
    outputs = getattr(outputs, "logits", outputs)
    return outputs[:, None] if outputs.ndim == 1 else outputs


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Weights, buffers, gradients, requires_grad and train flags are afterwards what they were before."""
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, float(i)) if p.requires_grad else None
    before = _snapshot(model)
    try:
        yield
    finally:
        after = _snapshot(model)
        assert after.keys() == before.keys()
        for key, value in before.items():
            both = isinstance(value, Tensor) and isinstance(after[key], Tensor)
            same = torch.equal(value, after[key]) if both else value is after[key] or value == after[key]
            assert same, f"{key} has changed"


def _snapshot(model: nn.Module) -> dict[str, Any]:
    parts: dict[str, Any] = {f"module {name}": module.training for name, module in model.named_modules()}
    for name, p in model.named_parameters():
        parts[f"weight {name}"] = p.detach().clone()
        parts[f"gradient {name}"] = None if p.grad is None else p.grad.clone()
        parts[f"requires_grad {name}"] = p.requires_grad
        parts[f"identity {name}"] = id(p)
    parts |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return parts


# Inputs


def vectors(num_data: int, generator: torch.Generator) -> Tensor:
    return torch.randn(num_data, 3, generator=generator, dtype=torch.float64)


def images(num_data: int, generator: torch.Generator) -> Tensor:
    return torch.randn(num_data, 1, 5, 5, generator=generator, dtype=torch.float64)


def sequences(num_data: int, generator: torch.Generator) -> Tensor:
    return torch.randn(num_data, 3, 4, generator=generator, dtype=torch.float64)


def tokens(num_data: int, generator: torch.Generator) -> Tensor:
    return torch.randint(5, (num_data, 4), generator=generator)


def token_batch(num_data: int, generator: torch.Generator) -> UserDict:
    """As a tokenizer of Hugging Face gives it: not a dict, but a mapping."""
    lengths = torch.randint(1, 5, (num_data, 1), generator=generator)
    return UserDict(input_ids=tokens(num_data, generator), attention_mask=(torch.arange(4) < lengths).long())


def named_vectors(num_data: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"image": vectors(num_data, generator), "weight": torch.rand(num_data, 1, generator=generator)}


# Models


def mlp(num_outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, num_outputs))


def frozen_mlp() -> nn.Sequential:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def frozen_bias() -> nn.Sequential:
    """A frozen parameter between two that are not."""
    model = mlp()
    model[0].bias.requires_grad_(False)
    return model


def convolutional() -> nn.Sequential:
    """BatchNorm, in-place ReLU and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(18, 3),
    )


class Residual(nn.Module):
    """Two blocks as in a ResNet, with the addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)]) for _ in range(2)
        )
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for convolution, norm in self.blocks:
            out = norm(convolution(x))
            out += x
            x = self.relu(out)
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Encoder(nn.Module):
    """LayerNorm, attention and dropout in torch's own layer, which has a fast path of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, nhead=2, dim_feedforward=5, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0])[:, 0])


class LowRankAdapter(nn.Module):
    """A frozen linear layer with a trainable correction of rank one."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(0.5 * torch.randn(1, layer.in_features))
        self.up = nn.Parameter(0.5 * torch.randn(layer.out_features, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def adapted_mlp() -> nn.Sequential:
    return nn.Sequential(LowRankAdapter(nn.Linear(3, 4)), nn.Tanh(), LowRankAdapter(nn.Linear(4, 3)))


class TiedLanguageModel(nn.Module):
    """The embedding is also the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(x).mean(1))))


def tied_mlp() -> nn.Sequential:
    """One layer applied twice."""
    shared = nn.Linear(3, 3)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(3, 2))


class EmbeddingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x).sum(1)))


class TextClassifier(nn.Module):
    """Takes a mapping, and averages over the tokens that the mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 3)

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        embedded = self.embedding(batch["input_ids"])
        mask = batch["attention_mask"][..., None].to(embedded.dtype)
        return self.head(torch.tanh((mask * embedded).sum(1) / mask.sum(1)))


class TextClassifierWithOutput(TextClassifier):
    """Returns an object with `logits`, as Hugging Face models do."""

    def forward(self, batch: Mapping[str, Tensor]) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(batch), loss=None)


class NamedInputs(nn.Module):
    """Takes a mapping with keys of its own, one of whose items is shared by all data and one no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(2)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        assert batch["mode"] == "plain"
        return batch["scale"] * self.body(batch["image"]) * (1 + batch["weight"])


class FlatRegressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, 0]


class UnusedHead(nn.Module):
    """Some of its parameters play no part in the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.auxiliary = mlp(2), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Scalars(nn.Module):
    """Parameters of no dimension: the gate of a residual branch (ReZero) and the scale of the logits (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.gate, self.logit_scale = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        hidden = hidden + self.gate * torch.tanh(self.branch(hidden))
        return self.head(hidden) * self.logit_scale.exp()


def scalar_bias() -> nn.Sequential:
    """One number as the bias of all outputs of a layer."""
    model = mlp()
    model[0].bias = nn.Parameter(torch.tensor(0.4))
    return model


SHARED = {"scale": torch.tensor(1.5), "mode": "plain"}
KEYS: dict[str, Any] = {"dict_key_x": "image", "dict_key_y": "target"}
CASES = [
    NetworkCase("mlp", "classification", 3, mlp, vectors),
    NetworkCase("cnn with BatchNorm and in-place ReLU", "classification", 3, convolutional, images),
    NetworkCase("residual net", "classification", 3, Residual, images),
    NetworkCase("transformer encoder layer", "classification", 3, Encoder, sequences),
    NetworkCase("LayerNorm and attention", "classification", 2, Attention, sequences),
    NetworkCase("frozen layer", "classification", 3, frozen_mlp, vectors),
    NetworkCase("frozen bias", "classification", 3, frozen_bias, vectors),
    NetworkCase("low-rank adapters", "classification", 3, adapted_mlp, vectors),
    NetworkCase("tied embedding", "classification", 5, TiedLanguageModel, tokens),
    NetworkCase("layer applied twice", "classification", 2, tied_mlp, vectors),
    NetworkCase("embedding", "classification", 2, EmbeddingModel, tokens),
    NetworkCase("mapping", "classification", 3, TextClassifier, token_batch),
    NetworkCase("mapping and outputs with logits", "classification", 3, TextClassifierWithOutput, token_batch),
    NetworkCase("mapping with keys of its own", "classification", 2, NamedInputs, named_vectors, **KEYS, shared=SHARED),
    NetworkCase("unused parameters", "classification", 2, UnusedHead, vectors),
    NetworkCase("scalar parameters", "classification", 3, Scalars, vectors),
    NetworkCase("scalar bias", "classification", 3, scalar_bias, vectors),
    NetworkCase("regression with flat outputs", "regression", 1, FlatRegressor, vectors),
    NetworkCase("regression with one output", "regression", 1, lambda: mlp(1), vectors, (1,)),
    NetworkCase("regression with several outputs", "regression", 2, lambda: mlp(2), vectors, (2,)),
]
BY_NAME = {case.name: case for case in CASES}

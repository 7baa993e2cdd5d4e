"""Which architectures work as they are? Each is fitted at toy size, asked, and compared with the exact posterior.

    ntk-iterncgp bench compatibility [--quick] [--json FILE] [--table FILE]

rows        how derivatives of single inputs are computed: by layers, by `torch.func`, or one input at a time
fit         time of a fit with four actions, in forward passes over its twelve data
predict     time of a prediction at four inputs, in forward passes over these
variance    the posterior variance over the exact one of the linearised network, the smallest and the largest at four
            inputs, with as many actions as there are: both should be 1, and below 1 is an error

What is refused is shown with its message. docs/compatibility.md is what `--table` writes.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision.models as vision
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

import ntk_iterncgp  # noqa: F401  registers the flavours
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.jacobian.layers import LayerRows

NUM_DATA, NUM_NEW, CLASSES, WORDS, LENGTH = 12, 4, 3, 20, 5
IGNORED = -100
TOLERANCE = 1e-3  # below the exact variance, in float32
BROAD = 1.05  # above it, where all actions were taken


@dataclass(frozen=True)
class Case:
    """An architecture, and which inputs it takes."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    labels: str = "one"  # for each input; or "tokens", for each token; or "binary"
    is_quick: bool = False


@dataclass(frozen=True)
class Row:
    """What came out; a message where it is refused."""

    name: str
    weights: int
    rows: str = ""
    fit: float | None = None
    predict: float | None = None
    smallest: float | None = None
    largest: float | None = None
    message: str = ""
    tolerance: float = TOLERANCE  # more for a variance that is returned in half precision

    @property
    def is_right(self) -> bool:
        return self.smallest is not None and self.smallest >= 1 - self.tolerance and self.largest <= BROAD  # type: ignore[operator]


# --- inputs -----------------------------------------------------------------------------------------------------------


def vectors(n: int) -> Tensor:
    return torch.randn(n, 6)


def images(size: int, n: int) -> Tensor:
    return torch.randn(n, 3, size, size)


def series(n: int) -> Tensor:
    return torch.randn(n, 7, 4)


def channels_first(n: int) -> Tensor:
    return torch.randn(n, 4, 16)


def words(n: int) -> Tensor:
    return torch.randint(1, WORDS, (n, LENGTH))


def texts(n: int) -> dict[str, Tensor]:
    """Padded, as a tokenizer gives them."""
    mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (n, 1))).long()
    return {"input_ids": words(n) * mask, "attention_mask": mask}


def pixels(n: int) -> dict[str, Tensor]:
    return {"pixel_values": images(8, n)}


# --- architectures ----------------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """Modules, and what is done with them."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module, **parameters: Tensor) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)
        self.extra = nn.ParameterDict({name: nn.Parameter(value) for name, value in parameters.items()})

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts, **self.extra)


def mlp(num_outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, num_outputs))


def convolutions(*layers: nn.Module, channels: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def normalised(norm: nn.Module) -> nn.Sequential:
    return convolutions(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), channels=4)


def vgg() -> nn.Sequential:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, CLASSES))


def recurrent(kind: type[nn.Module], **settings: Any) -> nn.Module:
    inner: Any = kind(4, 4, batch_first=True, **settings)
    width = 8 if settings.get("bidirectional") else 4
    return Apply(lambda x, cell, head: head(cell(x)[0][:, -1]), inner, nn.Linear(width, CLASSES))


def unet() -> nn.Module:
    def pass_through(x: Tensor, first: Any, down: Any, up: Any, last: Any, head: Any) -> Tensor:
        h = torch.relu(first(x))
        deep = torch.relu(up(torch.relu(down(h))))
        return head(torch.relu(last(torch.cat([h, deep], 1))).mean((2, 3)))

    down, up = nn.Conv2d(4, 6, 2, stride=2), nn.ConvTranspose2d(6, 4, 2, stride=2)
    return Apply(pass_through, nn.Conv2d(3, 4, 3, padding=1), down, up, nn.Conv2d(8, 4, 1), nn.Linear(4, CLASSES))


def mixer() -> nn.Module:
    def mix(x: Tensor, patch: Any, norm: Any, tokens: Any, channels: Any, head: Any) -> Tensor:
        h = patch(x).flatten(2).mT  # (b, 4, 6)
        h = h + tokens(norm(h).mT).mT
        return head((h + channels(norm(h))).mean(1))

    tokens = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
    channels = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6))
    return Apply(mix, nn.Conv2d(3, 6, 4, stride=4), nn.LayerNorm(6), tokens, channels, nn.Linear(6, CLASSES))


def shared() -> nn.Sequential:
    inner = nn.Linear(6, 6)
    return nn.Sequential(inner, nn.Tanh(), inner, nn.Tanh(), nn.Linear(6, CLASSES))


def tied() -> nn.Module:
    table, body, head = nn.Embedding(WORDS, 4), nn.Linear(4, 4), nn.Linear(4, WORDS, bias=False)
    head.weight = table.weight
    return Apply(lambda x, a, b, c: c(torch.tanh(b(a(x).mean(1))))[:, :CLASSES], table, body, head)


def gated() -> nn.Module:
    return Apply(
        lambda x, a, b, c, gate, scale: scale.exp() * c(a(x) + gate * torch.tanh(b(a(x)))),
        nn.Linear(6, 5),
        nn.Linear(5, 5),
        nn.Linear(5, CLASSES),
        gate=torch.tensor(0.3),
        scale=torch.tensor(0.2),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return Apply(lambda x, inner, head: head(inner(x).mean(1)), layer, nn.Linear(4, CLASSES))


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear})


class Noisy(nn.Dropout):
    """Dropout that ignores eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.p, training=True)


class TwoHeads(nn.Module):
    """A regression with a noise of its own at each input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.log_variance = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.mean(h), self.log_variance(h)


def hugging_face(kind: str, task: str = "SequenceClassification", **settings: Any) -> nn.Module:
    import transformers

    small: dict[str, Any] = dict(num_labels=CLASSES)
    if kind == "DistilBert":
        small |= dict(dim=8, n_layers=1, n_heads=2, hidden_dim=8, vocab_size=WORDS, max_position_embeddings=LENGTH)
    elif kind == "GPT2":
        small |= dict(n_embd=8, n_layer=1, n_head=2, n_positions=LENGTH, vocab_size=WORDS)
        small |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=1)
    else:
        small |= dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        is_vision = kind == "ViT"
        small |= dict(image_size=8, patch_size=4) if is_vision else dict(vocab_size=WORDS, pad_token_id=0)
        small |= {} if is_vision else dict(max_position_embeddings=LENGTH + 2)
    config = getattr(transformers, f"{kind}Config")(**small | settings)
    return getattr(transformers, f"{kind}For{task}")(config)


def adapted(kind: str, task: str = "SequenceClassification", *, targets: list[str]) -> nn.Module:
    import peft

    keeps = {"ImageClassification": None, "SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS"}
    settings = peft.LoraConfig(r=2, target_modules=targets, task_type=keeps[task])
    model = peft.get_peft_model(hugging_face(kind, task), settings)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero before training
            nn.init.normal_(weight, std=0.1)
    return model


def torchvision_net(build: Callable[..., nn.Module], **settings: Any) -> nn.Module:
    """The stock architecture, of which the last module's weights alone are uncertain: its exact posterior is known.

    All others are frozen but for the first layer's, so that derivatives go through the whole of it.
    """
    model = build(weights=None, num_classes=CLASSES, **settings)
    named = list(model.named_parameters())
    for _, weight in named[1:-2]:
        weight.requires_grad_(False)
    return model


NETS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "ResNet-18": (vision.resnet18, 32),
    "MobileNet V3": (vision.mobilenet_v3_small, 32),
    "EfficientNet-B0": (vision.efficientnet_b0, 32),
    "ConvNeXt": (vision.convnext_tiny, 32),
    "Swin": (vision.swin_t, 32),
    "DenseNet-121": (vision.densenet121, 32),
    "RegNet": (vision.regnet_y_400mf, 32),
    "ShuffleNet V2": (vision.shufflenet_v2_x0_5, 32),
    "SqueezeNet": (vision.squeezenet1_1, 32),
}
CASES = [
    Case("MLP", mlp, vectors, is_quick=True),
    Case("MLP with a single logit", partial(mlp, 1), vectors, "binary", is_quick=True),
    Case("VGG-like", vgg, partial(images, 8), is_quick=True),
    *(
        Case(f"torchvision {name}", partial(torchvision_net, build), partial(images, size))
        for name, (build, size) in NETS.items()
    ),
    Case(
        "grouped convolutions",
        lambda: convolutions(nn.Conv2d(3, 6, 3, groups=3), nn.Tanh(), channels=6),
        partial(images, 6),
    ),
    Case(
        "dilated convolutions",
        lambda: convolutions(nn.Conv2d(3, 4, 3, dilation=2), nn.Tanh(), channels=4),
        partial(images, 8),
    ),
    Case(
        "transposed convolutions",
        lambda: convolutions(nn.ConvTranspose2d(3, 4, 3), nn.Tanh(), channels=4),
        partial(images, 5),
    ),
    Case(
        "circular padding",
        lambda: convolutions(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Tanh(), channels=4),
        partial(images, 5),
    ),
    Case(
        "1-d CNN",
        lambda: nn.Sequential(
            nn.Conv1d(4, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(5, CLASSES)
        ),
        channels_first,
    ),
    Case("U-Net-like", unet, partial(images, 8)),
    Case("MLP-Mixer-like", mixer, partial(images, 8)),
    Case("GroupNorm", lambda: normalised(nn.GroupNorm(2, 4)), partial(images, 8)),
    Case("InstanceNorm", lambda: normalised(nn.InstanceNorm2d(4, affine=True)), partial(images, 8)),
    Case(
        "LayerNorm", lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, CLASSES)), vectors
    ),
    Case(
        "weight norm",
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, CLASSES)),
        vectors,
    ),
    Case("one layer twice", shared, vectors),
    Case("tied embedding", tied, words),
    Case("0-dim gates", gated, vectors, is_quick=True),
    Case(
        "Embedding",
        lambda: Apply(lambda x, a, b: b(torch.tanh(a(x)).mean(1)), nn.Embedding(WORDS, 4), nn.Linear(4, CLASSES)),
        words,
    ),
    Case("EmbeddingBag", lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 4), nn.Tanh(), nn.Linear(4, CLASSES)), words),
    Case("RNN", partial(recurrent, nn.RNN), series),
    Case("LSTM", partial(recurrent, nn.LSTM), series, is_quick=True),
    Case("LSTM in both directions", partial(recurrent, nn.LSTM, bidirectional=True), series),
    Case("GRU", partial(recurrent, nn.GRU), series),
    Case("TransformerEncoderLayer", encoder, series),
    Case("Bert", partial(hugging_face, "Bert"), texts, is_quick=True),
    Case("Bert, LoRA", partial(adapted, "Bert", targets=["query", "value"]), texts),
    Case("Bert, token classification", partial(hugging_face, "Bert", "TokenClassification"), texts, "tokens"),
    Case(
        "Bert, token classification, LoRA",
        partial(adapted, "Bert", "TokenClassification", targets=["query", "value"]),
        texts,
        "tokens",
    ),
    Case("RoBERTa", partial(hugging_face, "Roberta"), texts),
    Case("Electra", partial(hugging_face, "Electra", embedding_size=8), texts),
    Case("DistilBert", partial(hugging_face, "DistilBert"), texts),
    Case("DistilBert, LoRA", partial(adapted, "DistilBert", targets=["q_lin", "v_lin"]), texts),
    Case("GPT-2", partial(hugging_face, "GPT2"), texts),
    Case("GPT-2, LoRA", partial(adapted, "GPT2", targets=["c_attn"]), texts),
    *(Case(kind, partial(hugging_face, kind, num_key_value_heads=2), texts) for kind in ("Llama", "Mistral", "Qwen2")),
    Case("Llama, LoRA", partial(adapted, "Llama", targets=["q_proj", "v_proj"]), texts),
    Case("ViT", partial(hugging_face, "ViT", "ImageClassification"), pixels),
    Case("ViT, LoRA", partial(adapted, "ViT", "ImageClassification", targets=["q_proj", "v_proj"]), pixels),
    Case("torch.compile", lambda: torch.compile(mlp()), vectors),  # type: ignore[arg-type, return-value]
    Case("bfloat16", lambda: mlp().bfloat16(), lambda n: vectors(n).bfloat16()),
    Case("quantised", quantised, vectors, is_quick=True),
    Case("dropout in eval mode", lambda: nn.Sequential(nn.Linear(6, 8), Noisy(), nn.Linear(8, CLASSES)), vectors),
    Case(
        "BatchNorm without running statistics",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, CLASSES)),
        vectors,
    ),
    Case("two heads, a mean and a log-variance", TwoHeads, vectors),
    Case("segmentation, outputs (b, C, H, W)", lambda: nn.Conv2d(3, CLASSES, 3), partial(images, 5)),
]


# --- measuring --------------------------------------------------------------------------------------------------------


class Items(Dataset[Any]):
    """Inputs with labels, as pairs or as mappings."""

    def __init__(self, x: Any, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, n: int) -> Any:
        if isinstance(self.x, Mapping):
            return {**{name: value[n] for name, value in self.x.items()}, "labels": self.y[n]}
        return self.x[n], self.y[n]


def labels_of(kind: str, x: Any) -> Tensor:
    if kind == "tokens":
        return torch.where(x["attention_mask"] == 1, x["input_ids"] % CLASSES, IGNORED)
    return torch.arange(NUM_DATA) % (2 if kind == "binary" else CLASSES)


def exact_variance(jacobian: Jacobian, data: Items, outputs: Tensor, new: Any) -> Tensor:  # (b, C)
    """By single backward passes and a dense inverse, in float64, at prior precision 1."""
    curvature = torch.softmax(outputs.double(), -1).reshape(NUM_DATA, -1, outputs.shape[-1])  # (N, T, C)
    used = (data.y != IGNORED).reshape(NUM_DATA, -1)
    J = rows_at(jacobian, default_collate([data[n] for n in range(NUM_DATA)]), NUM_DATA)
    K, blocks = J @ J.T, [torch.diag(p) - p.outer(p) for p in curvature[used]]
    W = torch.zeros(len(J), len(J), dtype=torch.float64)
    C = curvature.shape[2]
    for place, block in zip(used.flatten().nonzero()[:, 0].tolist(), blocks, strict=True):
        W[place * C : (place + 1) * C, place * C : (place + 1) * C] = block
    at_new = rows_at(jacobian, new, NUM_NEW)
    removed = (at_new @ J.T) @ torch.linalg.solve(torch.eye(len(J)) + W @ K, W) @ (J @ at_new.T)
    return (at_new.square().sum(1) - removed.diagonal()).reshape(NUM_NEW, -1)


def rows_at(jacobian: Jacobian, batch: Any, number: int) -> Tensor:  # (number·C, P)
    x = batch[0] if isinstance(batch, (list, tuple)) else batch
    with torch.no_grad():
        C = jacobian.forward(x).shape[1]
        return jacobian._one_by_one(x, number, torch.eye(C, dtype=jacobian.dtype)).flatten(0, 1).double()


def seconds(function: Callable[[], object], repeats: int) -> float:
    """The least of some times."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def forward_seconds(la: Any, dtype: torch.dtype, x: Any) -> float:
    jacobian = Jacobian(la.model, dtype=dtype, logits=la._logits())
    with torch.no_grad():
        return seconds(lambda: jacobian.forward(x), 3)


def fitted(model: nn.Module, data: Items, num_actions: int) -> Any:
    keys = {"dict_key_x": next(iter(data.x))} if isinstance(data.x, Mapping) else {}
    la = Laplace(model, "classification", "all", "iterncgp", policy="clusters", num_actions=num_actions, **keys)
    la.fit(DataLoader(data, batch_size=6))
    return la


def measured(case: Case, repeats: int) -> Row:
    torch.manual_seed(0)
    model = case.build().eval()
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    x, new = case.inputs(NUM_DATA), case.inputs(NUM_NEW)
    data = Items(x, labels_of(case.labels, x))
    try:
        la = fitted(model, data, 4)
    except (ValueError, RuntimeError) as error:
        return Row(case.name, weights, message=" ".join(str(error).split()))
    dtype = la._jacobian_at(new)[0].dtype
    forward = forward_seconds(la, dtype, x), forward_seconds(la, dtype, new)
    fit, predict = seconds(lambda: fitted(model, data, 4), repeats), seconds(lambda: la(new), repeats)
    jacobian, kind = Jacobian(la.model, dtype=dtype, logits=la._logits("labels")), "one by one"
    with torch.no_grad():
        batch = default_collate([data[n] for n in range(NUM_DATA)])
        batch = batch if isinstance(batch, Mapping) else batch[0]
        outputs, rows = jacobian.forward(batch), jacobian.rows(batch, NUM_DATA)
        if jacobian._vmaps:
            kind = "by layers" if isinstance(rows, LayerRows) else "torch.func"
    C = 2 if case.labels == "binary" else CLASSES
    whole = fitted(model, data, outputs.shape[1] * NUM_DATA)
    whole.refine(DataLoader(data, batch_size=6), epochs=3 * outputs.shape[1])
    covariance = whole.latent(new)[1]
    variance = covariance.diagonal(dim1=-2, dim2=-1).double().reshape(NUM_NEW, -1)
    exact = exact_variance(jacobian, data, outputs.unflatten(1, (-1, C)), new)
    ratio = (variance / exact)[exact > 1e-12 * exact.max()]
    times, extremes = (fit / forward[0], predict / forward[1]), (float(ratio.min()), float(ratio.max()))
    tolerance = max(TOLERANCE, torch.finfo(covariance.dtype).eps)
    return Row(case.name, weights, kind, *times, *extremes, tolerance=tolerance)


def reported(case: Case, repeats: int) -> Row:
    """Measure a case and print its line."""
    row = measured(case, repeats)
    print(line(row) if not row.message else f"| {row.name} | {row.message} |", flush=True)
    return row


# --- showing ----------------------------------------------------------------------------------------------------------

HEADING = """# What works as it is

Written by `ntk-iterncgp bench compatibility --table docs/compatibility.md`. Each architecture is built at toy size with
random weights and fitted to twelve inputs, with no wrapper of ours. The time of a fit with four actions is in forward
passes over its data, that of a prediction with its full covariance at four inputs in forward passes over these: at this
size both are mostly overhead. The variance is compared with the exact one of the linearised network (dense, float64).
Of torchvision's networks the first and the last layer's weights are uncertain, so that the exact posterior is known.

| architecture | weights | rows | fit | predict | variance / exact |
|---|---:|---|---:|---:|---|
"""
REFUSED = """
## What is refused

| architecture | message |
|---|---|
"""


NOT_THERE = """
A network with a second head for its noise is not supported: `sigma_noise` is one number, or one for each output. Return
the mean alone, and add the noise of the second head to the variance of the predictions.

## laplace-torch's own tests

Run by hand, with these flavours in the place of its functional ones, from its repository: 93 of 102 pass
(`test_functional_laplace.py`, `test_functional_laplace_unit.py`, the functional tests of `test_serialization.py`). 72
of the 93 are `test_dtype`, which ignores that `L` and `Sigma_inv` are missing; without that excuse its answers have the
type of the model too. Six fail for internals of a subset of the data that are not here (`_get_SoD_data_loader`,
`_init_K_MM`, `_kernel_batch`, `_kernel_star`, `_kernel_batch_star`), one because targets (b,) of a single output are
taken as (b, 1), two because a saved state holds mappings of plain values, which `torch.load` reads with its defaults.
The files may be older than 0.3. `tests/laplace_torch/test_upstream.py` asks what they ask, in our words.
"""


def line(r: Row) -> str:
    return (
        f"| {r.name} | {r.weights:,} | {r.rows} | {r.fit:.0f} | {r.predict:.0f} | {r.smallest:.4f} to {r.largest:.4f} |"
    )


def table(rows: list[Row]) -> str:
    lines = [line(r) for r in rows if not r.message]
    refused = [f"| {r.name} | {r.message} |" for r in rows if r.message]
    return HEADING + "\n".join(lines) + "\n" + REFUSED + "\n".join(refused) + "\n" + NOT_THERE


def main(flags: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few architectures, once")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--table", type=Path, help="write them as a page")
    arguments = parser.parse_args(flags)
    cases = [case for case in CASES if case.is_quick or not arguments.quick]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [reported(case, 1 if arguments.quick else 2) for case in cases]
    if arguments.json:
        arguments.json.write_text(json.dumps({"results": [asdict(row) for row in rows]}, indent=1))
    if arguments.table:
        arguments.table.write_text(table(rows), encoding="utf-8")
    wrong = [row.name for row in rows if not (row.is_right or row.message)]
    print(f"Not exact: {', '.join(wrong) or 'none'}.")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())

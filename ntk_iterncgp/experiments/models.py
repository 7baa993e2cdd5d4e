"""The networks of a run: built in, torchvision's, or anyone's by import path; their checkpoints; quick training.

build("lenet", num_classes=10, input_shape=(1, 28, 28))
build("cifar_resnet20", 10, (3, 32, 32))        state dict keys as in the public CIFAR-10 weights
build("resnet18", 10, (3, 224, 224))            any classifier of torchvision
build("my_package.my_module:make_model", 10, (1, 28, 28), {"width": 64})
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchvision.models
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ntk_iterncgp.experiments.config import ModelConfig
from ntk_iterncgp.experiments.progress import Say, reporting, silent
from ntk_iterncgp.experiments.settings import ConfigError, nearest
from ntk_iterncgp.jacobian.autograd import as_outputs

RESNETS = {f"cifar_resnet{depth}": (depth - 2) // 6 for depth in (20, 32, 44, 56)}
MAX_DEPTH = 1000
BUILT_IN = ("mlp", "cnn", "lenet", *RESNETS)


def mlp(num_classes: int, input_shape: tuple[int, ...], width: int = 100, depth: int = 2) -> nn.Module:
    """Tanh layers of one width."""
    _check_size("width", width, at_least=1)
    if _check_size("depth", depth, at_least=0) > MAX_DEPTH:
        raise TypeError(f"depth must be a whole number from 0 to {MAX_DEPTH}; got {depth!r}")
    sizes = [math.prod(input_shape), *[width] * depth]
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], num_classes))


def cnn(num_classes: int, input_shape: tuple[int, ...], width: int = 8) -> nn.Module:
    """Two small convolutions: 1446 weights on digits of 8×8, so that the exact posterior can be computed beside it."""
    channels, side, _ = _image_shape("cnn", input_shape, smallest=4)
    _check_size("width", width, at_least=1)
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 3 * width // 2, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3 * width // 2 * (side // 4) ** 2, num_classes),
    )


def lenet(num_classes: int = 10, input_shape: tuple[int, ...] = (1, 28, 28)) -> nn.Module:
    """LeNet-5 with ReLU and max pooling."""
    channels, side, _ = _image_shape("lenet", input_shape, smallest=12)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * ((side // 2 - 4) // 2) ** 2, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu(hidden + (x if self.downsample is None else self.downsample(x)))
        return result


class CifarResNet(nn.Module):
    """ResNet-(6n + 2) with widths 16, 32, 64; state dict keys as in the public CIFAR-10 weights."""

    def __init__(self, blocks: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(inner, outer, stride), *(Block(outer, outer, 1) for _ in range(blocks - 1)))
            for inner, outer, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        )
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        outputs: Tensor = self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))
        return outputs


def build(
    name: str, num_classes: int, input_shape: tuple[int, ...], arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """A network by name, in eval mode."""
    given = dict(arguments or {})
    if ":" in name:
        return _imported(name, given).eval()
    with foreign(f"model.arguments must suit '{name}'", "others"):
        if name in RESNETS:
            _image_shape(name, input_shape, smallest=8, channels=3)
            return CifarResNet(RESNETS[name], **({"num_classes": num_classes} | given)).eval()
        if name in BUILT_IN:
            makers: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn, "lenet": lenet}
            return makers[name](num_classes, input_shape, **given).eval()
        if name in torchvision.models.list_models(torchvision.models):
            model: nn.Module = torchvision.models.get_model(name, **({"num_classes": num_classes} | given))
            return model.eval()
    near = nearest(name, (*BUILT_IN, *torchvision.models.list_models(torchvision.models)))
    advice = f"'{near}', " if near else ""
    raise ConfigError(
        f"model.name must be a model; got '{name}'. Try {advice}one of {', '.join(BUILT_IN)}, a classifier of "
        "torchvision's, or your own as 'package.module:function'."
    )


def rebuild(
    config: ModelConfig,
    num_classes: int,
    input_shape: tuple[int, ...],
    weights: Mapping[str, Tensor],
    *,
    trusted: str | None = None,
) -> nn.Module:
    """The network that a posterior file describes, with the weights it holds.

    A file may come from anyone. It shall not choose which code runs, so an import path is called only if the caller has
    named the same one; and a network is first built without memory, to see that it is as large as its weights.
    """
    if ":" in config.name and config.name != trusted:
        raise ConfigError(
            f"The code that makes the network, '{config.name}', must be named by you, not by the file alone; got none. "
            f"If you trust it, try --model {config.name}."
        )
    arguments = {k: v for k, v in config.arguments.items() if k != "weights"}  # they come from the file
    if ":" not in config.name:
        with torch.device("meta"):
            described = build(config.name, num_classes, input_shape, arguments).state_dict()
        _check_shapes(described, weights)
    model = build(config.name, num_classes, input_shape, arguments)
    _check_shapes(model.state_dict(), weights)
    model.load_state_dict(weights)
    return model


def _check_shapes(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name in sorted({*expected, *found}):
        one, other = (tuple(s[name].shape) if name in s else None for s in (expected, found))
        if one != other:
            raise ValueError(f"{name} must have the shape {one}; got {other}")


def load_checkpoint(model: nn.Module, path: Path, name: str) -> None:
    """Weights from a file that cannot run code, or a sentence about why they do not fit."""
    try:
        state: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except FileNotFoundError as error:
        raise ConfigError(f"model.checkpoint must be a file that exists; got '{path}'. Try another path.") from error
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise ConfigError(
            f"'{path}' must be a checkpoint in safetensors; got: {_line(error).rstrip('.')}. Try to save it again."
        ) from error
    except Exception as error:  # what torch raises for a file that would run code
        raise ConfigError(
            f"'{path}' must hold weights only; got other objects. Try torch.save(model.state_dict(), path)."
        ) from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    own = model.state_dict()
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(
            f"'{path}' must hold a state dict, tensors by name; got another object. Try model.state_dict()."
        )
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]
    wrong = [key for key in own if key in state and own[key].shape != state[key].shape]
    if missing or extra or wrong:
        what = [f"lacks {_some(missing)}"] * bool(missing) + [f"has {_some(extra)} besides"] * bool(extra)
        what += [f"has {key} as {tuple(state[key].shape)}, not {tuple(own[key].shape)}" for key in wrong[:2]]
        raise ConfigError(
            f"'{path}' must be a checkpoint of '{name}'; got another architecture: it {'; it '.join(what)}. Try the "
            "model it was saved from (model.name, model.arguments)."
        )
    model.load_state_dict(state, strict=False)


def train(
    model: nn.Module,
    data: Dataset[Any],
    config: ModelConfig,
    *,
    task: str,
    seed: int,
    device: torch.device,
    say: Say = silent,
) -> float:
    """Adam with a cosine schedule; returns the accuracy of the last epoch, or the root mean squared error.

    The loss is cross-entropy for "classification", squared error for "regression". `say` gets reports of progress.
    """
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(data, config.train_batch_size, shuffle=True, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    num_batches = config.epochs_here * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, num_batches))
    is_regression = task == "regression"
    score = total = 0.0
    model.train()
    with reporting("Training", say, total=num_batches, unit="batches") as progress:
        for _ in range(config.epochs_here):
            score = total = 0.0
            for x, y in loader:
                x, y = x.to(device), y.to(device)
                optimizer.zero_grad()
                outputs = as_outputs(model(x))  # GoogLeNet and Inception have others beside their logits as they learn
                loss = nn.functional.mse_loss(outputs, y) if is_regression else nn.functional.cross_entropy(outputs, y)
                loss.backward()
                optimizer.step()
                schedule.step()
                score += len(y) * float(loss.detach()) if is_regression else float((outputs.argmax(1) == y).sum())
                total += len(y)
                progress.advance()
    model.eval()
    mean_score = score / max(1.0, total)
    return math.sqrt(mean_score) if is_regression else mean_score


def _imported(path: str, arguments: Mapping[str, Any]) -> nn.Module:
    module_name, _, function = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules beside the run, as `python -m` finds them
    with foreign(f"The module of '{path}' must be importable", "to install it, or to run where it lies"):
        module = importlib.import_module(module_name)
    maker = getattr(module, function, None)
    if maker is None:
        raise ConfigError(
            f"'{path}' must be a function of its module; got no '{function}' in '{module_name}'. Try another name."
        )
    with foreign(f"'{path}' must make a model of model.arguments {arguments}", "others"):
        model = maker(**arguments)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"'{path}' must return a torch.nn.Module; got {type(model).__name__}. Try another function.")
    return model


@contextmanager
def foreign(requirement: str, advice: str) -> Iterator[None]:
    """While open, code runs that is not ours, a network's: what it raises becomes a `ConfigError`."""
    try:
        yield
    except (ConfigError, OSError, MemoryError):  # which have sentences of their own
        raise
    except Exception as error:
        raise ConfigError(
            f"{requirement}; got {type(error).__name__}: {_line(error).rstrip('.')}. Try {advice}."
        ) from error


def _check_size(name: str, value: Any, *, at_least: int) -> int:
    if type(value) is not int or value < at_least:
        raise TypeError(f"{name} must be a whole number of at least {at_least}; got {value!r}")
    return value


def _image_shape(
    name: str, shape: tuple[int, ...], *, smallest: int, channels: int | None = None
) -> tuple[int, int, int]:
    wrong = len(shape) != 3 or shape[1] != shape[2] or shape[1] < smallest or channels not in (None, shape[0])
    if wrong:
        kind = f"{channels} channels and " if channels else ""
        raise ConfigError(
            f"Inputs of '{name}' must be square images with {kind}sides of at least {smallest}; got the shape {shape}. "
            "Try another model, for instance 'mlp'."
        )
    return shape[0], shape[1], shape[2]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:120]

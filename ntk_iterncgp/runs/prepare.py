"""The beginning of every run: folder, log, data, network. All that can be wrong is found here, before the long part."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ntk_iterncgp import datasets, models, parallel
from ntk_iterncgp.config import ConfigError, RunConfig, as_yaml, prepare_output_dir
from ntk_iterncgp.files import write_atomically, write_text


class Log:
    """Says a line on the screen, and keeps it with the time in `run.log`. Of several processes one speaks."""

    def __init__(self, folder: Path) -> None:
        self.path, self.started = folder / "run.log", time.perf_counter()

    def __call__(self, message: str) -> None:
        if not parallel.is_main():
            return
        print(message, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            for line in message.splitlines():
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


@dataclass(frozen=True, eq=False)
class Setting:
    """Where a run stands once everything it needs has been found."""

    config: RunConfig
    folder: Path
    log: Log
    data: datasets.Data
    device: torch.device


def prepare(config: RunConfig, command: str) -> Setting:
    """Output folder with the resolved settings, and the data."""
    device = chosen_device(config.device)
    with parallel.main_first():
        data = datasets.load(config.data, seed=config.seed)
    folder = Path(config.output_dir)
    if parallel.is_main():
        folder = prepare_output_dir(config)
        write_text(folder / "config.yaml", f"# ntk-iterncgp {command}: all settings of this run\n{as_yaml(config)}")
    log = Log(folder)
    sizes = f"{len(data.train):,} to learn from, {len(data.test):,} to be tested on"  # type: ignore[arg-type]
    others = "".join(f", {len(other):,} of {name}" for name, other in data.ood.items())  # type: ignore[arg-type]
    log(f"Data: {config.data.name}, {sizes}{others}, {data.num_classes} classes, inputs {data.input_shape}")
    return Setting(config, folder, log, data, device)


def prepare_model(setting: Setting) -> nn.Module:
    """The network with its weights: from the checkpoint, or trained here."""
    config, data, log = setting.config, setting.data, setting.log
    torch.manual_seed(config.seed)
    model = models.build(config.model.name, data.num_classes, data.input_shape, config.model.arguments)
    model = model.to(setting.device)
    if config.model.checkpoint is not None:
        path = find_checkpoint(config)
        models.load_checkpoint(model, path, config.model.name)
        log(f"Model: {config.model.name}, {num_weights(model):,} weights from {path.name}")
        check_outputs(model, setting)
        return model
    check_outputs(model, setting)
    if ":" in config.model.name or config.model.arguments.get("weights") is not None:
        log(f"Model: {config.model.name}, {num_weights(model):,} weights as they come")
        return model
    log(
        f"Model: {config.model.name}, {num_weights(model):,} weights. No checkpoint was given (model.checkpoint), so "
        f"it is trained here for {config.model.train_epochs} epochs."
    )
    if not parallel.is_main():
        return parallel.same_model(model.eval())
    started = time.perf_counter()
    accuracy = models.train(model, data.train, config.model, seed=config.seed, device=setting.device)
    target = setting.folder / "model.safetensors"
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    write_atomically(target, lambda path: save_file(weights, path))
    log(f"Trained in {time.perf_counter() - started:.0f} s: {100 * accuracy:.1f} % on the training data; {target}")
    return parallel.same_model(model)


def find_checkpoint(config: RunConfig) -> Path:
    """As it is named, or under the data root."""
    path = Path(str(config.model.checkpoint))
    under_root = datasets.data_root(config.data) / path
    return under_root if not path.exists() and under_root.exists() else path


def check_outputs(model: nn.Module, setting: Setting) -> None:
    """One output for each class."""
    x = setting.data.test[0][0][None].to(setting.device)
    try:
        with torch.no_grad():
            outputs = model(x)
    except RuntimeError as error:
        raise ConfigError(
            f"'{setting.config.model.name}' does not take inputs of shape {setting.data.input_shape} "
            f"({str(error).partition(chr(10))[0][:120]}). Choose another model or other data."
        ) from error
    found, classes = outputs.shape[-1], setting.data.num_classes
    fewer_are_possible = setting.config.data.name == "arrays"  # the highest classes may be missing from a sample
    if found < classes or (found > classes and not fewer_are_possible):
        raise ConfigError(
            f"The model is expected to have {classes} outputs, one for each class of the data, but has {found}. Check "
            "data.name, model.checkpoint and model.arguments."
        )


def chosen_device(name: str) -> torch.device:
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise ConfigError(f"device expects auto, cpu or cuda, but got '{name}'.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' expects a GPU, but torch finds none. Use auto or cpu.")
    return device


def num_weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

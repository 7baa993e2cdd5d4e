"""The beginning of every run: folder, log, data, network. All that can be wrong is found here, before the long part."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from ntk_iterncgp.data.fixed_order import FixedOrderData
from ntk_iterncgp.experiments import datasets, models
from ntk_iterncgp.experiments.config import RunConfig, as_plain, as_yaml, flat, prepare_output_dir
from ntk_iterncgp.experiments.datasets import labels_of
from ntk_iterncgp.experiments.evaluation.stopwatch import Stopwatch
from ntk_iterncgp.experiments.runs.flavour import make_flavour
from ntk_iterncgp.experiments.settings import ConfigError
from ntk_iterncgp.jacobian.autograd import as_outputs
from ntk_iterncgp.persistence.checkpoint import Checkpoint, open_session
from ntk_iterncgp.persistence.files import write_atomically
from ntk_iterncgp.persistence.fingerprint import data_digests
from ntk_iterncgp.persistence.locks import FolderLock
from ntk_iterncgp.runtime import parallel
from ntk_iterncgp.runtime.threads import evaluating

LEAST_HELD_OUT, ENOUGH_HELD_OUT, MOST_HELD_OUT = 20, 50, 1000
"""How many inputs choose a prior precision. Over eight networks on 100 to 1000 data, a choice on 14 inputs costs up to
.07 nats of test NLL on average and .2 in one of ten draws; on 20 up to .05, on 50 up to .023, on 100 up to .012. The
evidence costs .01 to .1, and where a network fits all of its training data 1.0 to 1.2."""

CHECKED_DATA = 500  # how many training data show whether given weights fit them


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
        """Since the command began."""
        return time.perf_counter() - self.started


@dataclass(frozen=True, eq=False)
class Setting:
    """Where a run stands once everything it needs has been found."""

    config: RunConfig
    command: str
    folder: Path
    log: Log
    data: datasets.Data
    device: torch.device
    checkpoint: Checkpoint | None
    lock: FolderLock | None  # the main process's
    watch: Stopwatch = field(default_factory=Stopwatch)

    def __enter__(self) -> Setting:
        return self

    def __exit__(self, *_: object) -> None:
        """The run has ended, one way or another: others may write into its folder."""
        if self.lock is not None:
            self.lock.release()

    def resolved(self) -> dict[Path, str]:
        """The file of all settings, to be written together with what came out."""
        heading = f"# ntk-iterncgp {self.command}: all settings of this run"
        return {self.folder / "config.yaml": f"{heading}\n{as_yaml(self.config)}"}

    def saved_as_it_goes(self) -> AbstractContextManager[object]:
        """While open, what a run has done is kept for the same command after a crash; at its end, no longer."""
        return nullcontext() if self.checkpoint is None else self.checkpoint


def prepare(config: RunConfig, command: str) -> Setting:
    """Output folder, log and data. An earlier run's files stay as they are until there is a result to replace them.

    The folder is locked until the setting, a context manager, is left: a second run in it is refused.
    """
    device = chosen_device(config.device)
    with parallel.main_first():
        data = datasets.load(config.data, seed=config.seed)
    data = data.put_aside(num_held_out(config, data), config.data.held_out_from, config.seed)
    folder, lock = Path(config.output_dir), None
    if parallel.is_main():
        folder = prepare_output_dir(config)
        lock = FolderLock(folder, f"ntk-iterncgp {command}")
    log = Log(folder)
    sizes = f"{len(data.train):,} to learn from, {len(data.test):,} to be tested on"  # type: ignore[arg-type]
    others = "" if data.held_out is None else f", {len(data.held_out):,} held out"  # type: ignore[arg-type]
    others += "".join(f", {len(other):,} of {name}" for name, other in data.ood.items())  # type: ignore[arg-type]
    kind = "real targets" if data.task == "regression" else f"{data.num_outputs} classes"
    log(f"Data: {config.data.name}, {sizes}{others}, {kind}, inputs {data.input_shape}")
    if config.data.name == "arrays" and data.task == "classification":
        _warn_of_empty_classes(data, log)
    return Setting(config, command, folder, log, data, device, _checkpoint(config, folder, log), lock)


def _warn_of_empty_classes(data: datasets.Data, log: Log) -> None:
    """A class without training data is most often a label that was counted from 1."""
    counts = labels_of(data.train).bincount(minlength=data.num_outputs)
    empty = [data.class_names[c] for c in (counts == 0).nonzero()[:, 0].tolist()]
    if empty:
        some = ", ".join(empty[:5]) + (" …" if len(empty) > 5 else "")
        number = f"{len(empty)} of {data.num_outputs} classes {'has' if len(empty) == 1 else 'have'}"
        log(f"Warning: {number} no training data ({some}). Labels count from 0.")


def _checkpoint(config: RunConfig, folder: Path, log: Log) -> Checkpoint | None:
    seconds = config.checkpoint.every_seconds
    return None if seconds is None else Checkpoint(folder / "checkpoint", every_seconds=seconds, say=log)


def num_held_out(config: RunConfig, data: datasets.Data) -> int:
    """As set; else a tenth where the network is trained here, or up to a fifth where a tenth are few.

    None where a fifth are too few to choose on, or nothing is to be chosen: a kernel has no prior precision.
    """
    is_fixed = config.fit.mean == "refined" and data.task == "classification"  # by its own prior: see `tune.py`
    given, is_tuned = config.data.held_out, config.tuning.protocol != "none" and not is_fixed
    if config.kernel.name is not None:
        return 0
    if given is not None:
        if is_tuned and 0 < given < LEAST_HELD_OUT:
            raise ConfigError(
                f"data.held_out must be 0 or at least {LEAST_HELD_OUT}; got {given}, too few to choose a prior "
                "precision on. Try 0 for the evidence, or tuning=none with fit.prior_precision."
            )
        return given
    size = len(data.train)  # type: ignore[arg-type]
    count = min(MOST_HELD_OUT, max(size // 10, min(ENOUGH_HELD_OUT, size // 5)))
    return count if is_tuned and config.model.epochs_here > 0 and count >= LEAST_HELD_OUT else 0


def prepare_model(setting: Setting) -> nn.Module:
    """The network with its weights: from the checkpoint, trained here, or as the model comes with them."""
    config, data, log = setting.config, setting.data, setting.log
    torch.manual_seed(config.seed)
    model = models.build(config.model.name, data.num_outputs, data.input_shape, config.model.arguments)
    model = model.to(setting.device)
    if config.model.checkpoint is not None:
        path = find_checkpoint(config)
        models.load_checkpoint(model, path, config.model.name)
    check_model(model, setting)
    name = f"Model: {config.model.name}, {num_weights(model):,} weights"
    if config.model.epochs_here > 0:
        log(
            f"{name}. No checkpoint was given (model.checkpoint), so it is trained here for "
            f"{config.model.epochs_here} epochs."
        )
        _train_and_save(model, setting)
        return model
    if config.model.checkpoint is not None:
        log(f"{name} from {path.name}")
        if config.model.train_epochs:
            log("  model.train_epochs is not used: it is for networks without a checkpoint")
    else:
        log(f"{name} used unchanged, not trained here")
    fit, checked = _fit_to_some(model, setting)
    log(f"  {_described(setting, fit)} on {checked:,} of the training data")
    _warn_if_useless(setting, fit)
    return model


def _train_and_save(model: nn.Module, setting: Setting) -> None:
    started, target = time.perf_counter(), setting.folder / "model.safetensors"
    fit = _trained(model, setting)
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    if parallel.is_main():
        write_atomically(target, lambda path: save_file(weights, path))
    seconds, how = time.perf_counter() - started, _described(setting, fit)
    setting.log(f"Trained in {seconds:.0f} s: {how} on the training data; {target}")
    _warn_if_useless(setting, fit)


def _fit_to_some(model: nn.Module, setting: Setting) -> tuple[float, int]:
    """Accuracy, or root mean squared error, on some training data drawn at random; and on how many."""
    data, size = setting.data, len(setting.data.train)  # type: ignore[arg-type]
    drawn = torch.randperm(size, generator=torch.Generator().manual_seed(setting.config.seed))[:CHECKED_DATA]
    loader = DataLoader(datasets.chosen_of(data.train, drawn), min(len(drawn), setting.config.data.batch_size))
    score = 0.0
    with evaluating(model), torch.no_grad():
        for x, y in loader:
            outputs, y = as_outputs(model(x.to(setting.device))), y.to(setting.device)
            is_regression = data.task == "regression"
            score += float((outputs - y).square().sum() if is_regression else (outputs.argmax(1) == y).sum())
    mean_score = score / len(drawn)
    return (math.sqrt(mean_score) if data.task == "regression" else mean_score), len(drawn)


def _described(setting: Setting, fit: float) -> str:
    is_regression = setting.data.task == "regression"
    return f"error {fit:.3g} standard deviations" if is_regression else f"{100 * fit:.1f} % right"


def _warn_if_useless(setting: Setting, fit: float) -> None:
    """Warn where the network is no better than a constant: whatever its posterior says, it is about nothing."""
    data = setting.data
    if data.task == "regression":
        is_useless, constant = fit > 0.99, "the mean of the targets"
    else:
        commonest = float(labels_of(data.train).bincount().max()) / len(data.train)  # type: ignore[arg-type]
        is_useless, constant = fit <= commonest, f"always the commonest class ({100 * commonest:.1f} %)"
    if is_useless:
        setting.log(
            f"Warning: the network fits its training data no better than {constant}. Train it longer "
            "(model.train_epochs), or check its weights (model.checkpoint) and the scale of its inputs."
        )


def _trained(model: nn.Module, setting: Setting) -> float:
    """Train, or take the weights that this run had trained when it was killed; and the random numbers after it.

    Of several processes one trains, and the others get its weights.
    """
    config, data = setting.config, setting.data
    plain = as_plain(config)
    settings = dict(flat({"data": plain["data"], "model": plain["model"]}))  # one by one: what differs is named
    settings |= {"seed": config.seed, "device": setting.device.type}
    session, digests = None, None
    if setting.checkpoint is not None:
        session = open_session(setting.checkpoint, "train", settings, {})
        digests = data_digests(FixedOrderData(DataLoader(data.train, 1000), device=torch.device("cpu")))
        session.check_data(digests)
    if session is not None and session.saved is not None:
        model.load_state_dict(session.saved["weights"])
        torch.set_rng_state(session.saved["random"])
        session.end(dict)
        return float(session.saved["fit"])
    fit = 0.0
    if parallel.is_main():
        with models.foreign(f"'{config.model.name}' must be trainable on these data", "another model"):
            fit = models.train(
                model,
                data.train,
                config.model,
                task=data.task,
                seed=config.seed,
                device=setting.device,
                say=setting.log,
            )
    parallel.same_model(model.eval())
    found = {"weights": model.state_dict(), "random": torch.get_rng_state(), "fit": fit, "data": digests}
    if session is not None:
        session.end(lambda: found)
    return fit


def find_checkpoint(config: RunConfig) -> Path:
    """As it is named, or under the data root."""
    path = Path(str(config.model.checkpoint))
    under_root = datasets.data_root(config.data) / path
    return under_root if not path.exists() and under_root.exists() else path


def check_model(model: nn.Module, setting: Setting) -> None:
    """One output for each class, or one for the target; and a flavour can be made of it, before it is trained."""
    x, name = torch.stack([setting.data.train[i][0] for i in range(2)]).to(setting.device), setting.config.model.name
    with models.foreign(f"'{name}' must take inputs of shape {setting.data.input_shape}", "another model"):
        outputs = as_outputs(model(x))
        if len(outputs) != len(x):
            raise ValueError(f"two inputs must have two rows of outputs; got {len(outputs)}")
        weights = [p for p in model.parameters() if p.requires_grad]
        if weights:  # what a fit will ask for
            torch.autograd.grad(outputs.sum(), weights, allow_unused=True)
    empty = [name for name, value in model.named_parameters() if value.numel() == 0]
    if empty:
        raise ConfigError(
            f"'{name}' must have weights in every layer; got none in {', '.join(empty[:3])}. Try other sizes."
        )
    found, wanted = outputs.shape[1], setting.data.num_outputs
    of_arrays = setting.config.data.name == "arrays" and setting.data.task == "classification"
    if found < wanted or (found > wanted and not of_arrays):  # the highest classes may be missing from a sample
        each = "one for each class of the data" if setting.data.task == "classification" else "for the target"
        raise ConfigError(
            f"The model must have {wanted} outputs, {each}; got {found}. Try another data.name, data.task, "
            "model.checkpoint or model.arguments."
        )
    make_flavour(setting.config, model)


def chosen_device(name: str) -> torch.device:
    """Return the device of this name; "auto" is a GPU where there is one."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu or cuda; got '{name}'. Try auto.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device must be cpu where torch finds no GPU; got 'cuda'. Try auto or cpu.")
    return device


def num_weights(model: nn.Module) -> int:
    """Count the weights that require a gradient."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

"""The settings of a run: defaults in code, differences in a YAML file, last words on the command line.

    config = load("configs/mnist_lenet.yaml", ["data.train_limit=10000"])

A file lists only what differs from the defaults, section by section. Whatever cannot be right is a `ConfigError` with
one sentence, before any work is done. The resolved settings are written beside the results, so that a run can be
repeated from its folder alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from ntk_iterncgp.experiments.settings import (
    ConfigError,
    parsed,
    read_settings,
    require_choice,
    shown,
    suggestion,
    typed_value,
)

# Light imports only: wrong settings are reported before PyTorch, which takes seconds, is imported. So the names of the
# solver's policies and of the kernels are repeated here; a test holds them against the originals.
POLICIES = ("unit", "residual", "curvature_residual", "random_subspace")
KERNELS = ("RBF", "Matern12", "Matern32", "Matern52")
TASKS = ("classification", "regression")
PROTOCOLS = ("crossfit", "validation", "none")
DEFAULT_EPOCHS = 50
MOST_STEPS, PRECISIONS = 100, (1e-20, 1e20)  # of the grid of prior precisions
BASELINES = ("map", "temperature", "prior", "last_layer", "kfac", "sod", "ella", "valla", "exact")


@dataclass(frozen=True)
class DataConfig:
    """Which data, and how much of them."""

    name: str = "digits"  # digits, mnist, fashion_mnist, kmnist, cifar10, cifar100, svhn, image_folder, arrays
    task: str = "classification"  # or "regression": arrays whose y are real numbers
    root: str | None = None  # where data sets lie; null: $NTK_ITERNCGP_DATA, or else data/
    train: str | None = None  # image_folder: a folder; arrays: an .npz with x and y, or a .csv whose last column is y
    test: str | None = None  # the same; null: a fifth of the training data is held out
    train_limit: int | None = None  # null: all
    test_limit: int | None = None
    held_out: int | None = None  # to choose the prior precision on; null: a tenth (few data: a fifth) if trained here
    held_out_from: str = "train"  # or "test", for a checkpoint that has seen all training data
    ood: tuple[str, ...] = ()  # other data sets, "rotated", "noise": what a classifier should not be sure about
    ood_limit: int | None = 2000
    batch_size: int = 250
    image_size: int = 224  # image_folder: images are scaled and cropped to this side
    download: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A built-in network, one of torchvision's, or an import path `package.module:function`; trained if need be."""

    name: str = "cnn"
    checkpoint: str | None = None  # .safetensors, or .pt with weights only; also looked for under data.root
    arguments: dict[str, Any] = field(default_factory=dict)
    train_epochs: int | None = None  # 0: the weights as they come; null: 50 without a checkpoint; yours must say which
    train_batch_size: int = 50
    learning_rate: float = 3e-3
    weight_decay: float = 1e-5

    @property
    def is_own(self) -> bool:
        """Made by a function of the user's."""
        return ":" in self.name

    @property
    def epochs_here(self) -> int:
        """For how many epochs it is trained by this run; 0 where its weights are taken as they come."""
        if self.checkpoint is not None:
            return 0
        default = 0 if self.arguments.get("weights") is not None else DEFAULT_EPOCHS
        return default if self.train_epochs is None else self.train_epochs


@dataclass(frozen=True)
class KernelConfig:
    """A Gaussian process in the place of the network, where `name` is given."""

    name: str | None = None
    lengthscale: float = 8.0
    outputscale: float = 32.0
    noise: float = 0.1  # regression: the variance of the noise, targets being scaled to unit variance
    optimize_steps: int = 0  # fits spent on finding better ones than these three, by the evidence lower bound
    policy: str = "curvature_residual"
    max_products: int = 100
    products_per_step: int = 3  # each brings up to 81 actions, so few of them make a Newton step worth taking
    refine_products: int = 0  # spent on the variance once the mean has converged
    max_rank: int | None = None


@dataclass(frozen=True)
class FitConfig:
    """How the posterior is computed; null leaves a setting to the flavour."""

    subset_of_weights: str = "all"
    mean: str = "network"
    policy: str | None = None
    num_actions: int | None = None
    max_rank: int | None = None
    prior_precision: float = 1.0
    refine_epochs: float | None = None  # after the fit, so many epochs more
    shard: str | None = None  # 3/16: the third of 16 parts of the training data, to be merged with those of the others
    options: dict[str, Any] = field(default_factory=dict)  # further keywords of the flavour, as they are


@dataclass(frozen=True)
class TuningConfig:
    """How every method's one hyperparameter is chosen: never on what it is scored on."""

    protocol: str = "crossfit"  # two folds of the test set; "validation": a part of it put aside; "none"
    validation_size: int | None = None  # for "validation"; null: half of the test set, at most 1000
    precision_min: float = 1e-3  # `fit` looks further where the best one is at an end
    precision_max: float = 1e6
    steps_per_decade: int = 4


@dataclass(frozen=True)
class EvaluateConfig:
    """What is compared."""

    baselines: tuple[str, ...] = ("map", "temperature", "prior", "last_layer")
    link_samples: int = 512  # fixed points of the accurate link
    bootstrap: int = 2000  # resamples for the intervals of differences
    sod_size: int = 100  # data in the subset
    ella_size: int = 500
    ella_rank: int = 20
    valla_size: int = 100  # inducing points
    valla_steps: int = 500  # minibatches
    exact_limit: int = 4000  # the exact posterior is computed for at most so many weights


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run that is killed can go on from, under output_dir/checkpoint."""

    every_seconds: float | None = 30.0  # how much work may be lost; null: nothing is saved


@dataclass(frozen=True)
class RunConfig:
    """One run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output_dir: str = ""  # empty: runs/ and the name of the configuration
    seed: int = 0
    device: str = "auto"  # auto: a GPU where there is one

    def __post_init__(self) -> None:
        for name, choices in (
            ("data.task", TASKS),
            ("data.held_out_from", ("train", "test")),
            ("fit.subset_of_weights", ("all", "last_layer")),
            ("fit.mean", ("network", "refined")),
            ("tuning.protocol", PROTOCOLS),
            ("kernel.policy", POLICIES),
        ):
            require_choice(name, self[name], choices)
        if self.kernel.name is not None:
            require_choice("kernel.name", self.kernel.name, KERNELS)
        for baseline in self.evaluate.baselines:
            require_choice("evaluate.baselines", baseline, BASELINES)
        for name in POSITIVE:
            if self[name] is not None and not 0 < self[name] < float("inf"):
                raise ConfigError(f"{name} expects a positive, finite number, but got {shown(self[name])}.")
        for name in NOT_NEGATIVE:
            if self[name] is not None and not 0 <= self[name] < float("inf"):
                raise ConfigError(f"{name} expects a finite number of at least 0, but got {shown(self[name])}.")
        for name, least in LEAST.items():
            value = self[name]
            if value is not None and value < least:
                raise ConfigError(f"{name} expects a whole number of at least {least}, but got {shown(value)}.")
            if value is not None and value > MOST:
                raise ConfigError(f"{name} expects a whole number of at most {MOST}, but got {shown(value)}.")
        if self.data.task == "regression" and (self.data.name != "arrays" or self.data.ood):
            raise ConfigError("data.task 'regression' expects data.name 'arrays', and no data.ood.")
        if self.fit.shard is not None:
            shard_numbers(self.fit.shard)
        model = self.model
        if self.kernel.name is None and model.is_own and model.checkpoint is None and model.train_epochs is None:
            raise ConfigError(
                f"model.train_epochs must be set for '{model.name}' without a checkpoint; got null. Try "
                f"{DEFAULT_EPOCHS} to train the network here, 0 to take its weights as the function returns them, or "
                "set model.checkpoint."
            )
        tuning = self.tuning
        if tuning.steps_per_decade > MOST_STEPS:
            raise ConfigError(
                f"tuning.steps_per_decade must be at most {MOST_STEPS}; got {shown(tuning.steps_per_decade)}. Try 4."
            )
        if tuning.precision_min < PRECISIONS[0] or tuning.precision_max > PRECISIONS[1]:
            raise ConfigError(
                f"tuning.precision_min and precision_max must lie from {PRECISIONS[0]:g} to {PRECISIONS[1]:g}; got "
                f"{tuning.precision_min:g} and {tuning.precision_max:g}. Try the defaults: `fit` widens the grid."
            )
        if self.tuning.precision_min >= self.tuning.precision_max:
            raise ConfigError(
                "tuning.precision_min expects a number below tuning.precision_max, but got "
                f"{self.tuning.precision_min:g} and {self.tuning.precision_max:g}."
            )

    def __getitem__(self, name: str) -> Any:
        """A setting by its dotted name."""
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        return value


def shard_numbers(text: str) -> tuple[int, int]:
    """The 3 and the 16 of 3/16."""
    number, slash, total = text.partition("/")
    digits = slash and all(part.isascii() and part.isdigit() and len(part) < 10 for part in (number, total))
    if not digits or not 1 <= int(number) <= int(total):
        raise ConfigError(f"fit.shard must be k/K with 1 ≤ k ≤ K; got {shown(text)}. Try 1/4, 2/4, … on 4 machines.")
    return int(number), int(total)


POSITIVE = (
    "model.learning_rate",
    "kernel.lengthscale",
    "kernel.outputscale",
    "kernel.noise",
    "fit.prior_precision",
    "fit.refine_epochs",
    "tuning.precision_min",
    "tuning.precision_max",
)
NOT_NEGATIVE = ("model.weight_decay", "checkpoint.every_seconds")
MOST = 2**32 - 1  # what scikit-learn takes as a seed; nothing that is counted comes near
LEAST = {
    "data.train_limit": 2,
    "data.test_limit": 2,
    "data.ood_limit": 2,
    "data.held_out": 0,
    "data.batch_size": 1,
    "data.image_size": 1,
    "model.train_epochs": 0,
    "model.train_batch_size": 1,
    "kernel.max_products": 1,
    "kernel.products_per_step": 1,
    "kernel.refine_products": 0,
    "kernel.optimize_steps": 0,
    "kernel.max_rank": 1,
    "fit.num_actions": 1,
    "fit.max_rank": 1,
    "tuning.validation_size": 1,
    "tuning.steps_per_decade": 1,
    "seed": 0,
}
LEAST |= {f"evaluate.{f.name}": 1 for f in fields(EvaluateConfig) if f.name != "baselines"}
SHORT = {"tuning": "protocol"}  # a section that may be written as one of its settings: `tuning: crossfit`


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """The defaults, changed by a YAML file and then by `section.key=value` texts."""
    settings = {} if path is None else dict(flat(read_settings(Path(path))))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set expects key=value, for instance data.train_limit=5000, but got {override!r}.")
        settings |= flat({key.strip(): parsed(text, f"the value of {key.strip()}")})
    return from_settings(settings, default_output_dir=f"runs/{Path(path).stem if path is not None else 'run'}")


def from_settings(settings: Mapping[str, Any], *, default_output_dir: str = "runs/run") -> RunConfig:
    """Checked settings, by dotted name."""
    names = dict(setting_names())
    for key in settings:
        if key not in names:
            raise ConfigError(f"There is no setting '{key}'; {suggestion(str(key), names)}")
    typed = {key: typed_value(key, value, names[key]) for key, value in settings.items()}
    config = RunConfig()
    sections: dict[str, dict[str, Any]] = {}
    for key, value in typed.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    changes = sections.pop("", {})
    changes |= {section: replace(getattr(config, section), **values) for section, values in sections.items()}
    return replace(config, **({"output_dir": default_output_dir} | {k: v for k, v in changes.items() if v != ""}))


def setting_names() -> Iterator[tuple[str, Any]]:
    """Dotted names and types of all settings."""
    hints = get_type_hints(RunConfig)
    for f in fields(RunConfig):
        if is_dataclass(hints[f.name]):
            inner = get_type_hints(hints[f.name])
            yield from ((f"{f.name}.{g.name}", inner[g.name]) for g in fields(hints[f.name]))
        else:
            yield f.name, hints[f.name]


def flat(settings: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Sections as dotted names."""
    sections = {f.name for f in fields(RunConfig) if is_dataclass(get_type_hints(RunConfig)[f.name])}
    for key, value in settings.items():
        if key in SHORT and isinstance(value, str):
            yield f"{key}.{SHORT[key]}", value
        elif key in sections:
            if not isinstance(value, Mapping):
                raise ConfigError(f"'{key}' expects a section of settings, but got {shown(value)}.")
            yield from ((f"{key}.{name}", item) for name, item in value.items())
        else:
            yield str(key), value


def as_yaml(config: RunConfig) -> str:
    """All settings; loading the text gives the same run."""
    return str(yaml.safe_dump(as_plain(config), sort_keys=False, allow_unicode=True))


def as_plain(config: RunConfig) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return {key: plain(value) for key, value in asdict(config).items()}


def prepare_output_dir(config: RunConfig) -> Path:
    """The output folder, made and seen to be writable."""
    folder = Path(config.output_dir)
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"Cannot write to the folder '{folder}' ({reason.lower()}); name another one with --output-dir."
        ) from error
    return folder

"""The settings of a run: defaults in code, differences in a YAML file, last words on the command line.

    config = load("configs/mnist_lenet.yaml", ["data.train_limit=10000"])

A file lists only what differs from the defaults, section by section. What a setting may be is its annotation here;
whatever cannot be right is a `ConfigError` that names the setting and the line of the file, before any work is done.
The resolved settings are written beside the results, so that a run can be repeated from its folder alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml

from ntk_iterncgp.experiments.settings import (
    ConfigError,
    Range,
    SettingError,
    line_of,
    parsed,
    read_settings,
    shown,
    typed_value,
    unknown_setting,
)

# Light imports only: wrong settings are reported before PyTorch, which takes seconds, is imported. So the names of the
# solver's policies and of the kernels are repeated here; a test holds them against the originals.
Policy = Literal["unit", "residual", "curvature_residual", "random_subspace"]
Kernel = Literal["RBF", "Matern12", "Matern32", "Matern52"]
Baseline = Literal["map", "temperature", "prior", "last_layer", "kfac", "sod", "ella", "valla", "exact"]
POLICIES, KERNELS = get_args(Policy), get_args(Kernel)

MOST = 2**32 - 1  # what scikit-learn takes as a seed; nothing that is counted comes near
Count = Annotated[int, Range(1, MOST)]
CountFromZero = Annotated[int, Range(0, MOST)]
CountFromTwo = Annotated[int, Range(2, MOST)]
Positive = Annotated[float, Range(0, is_open=True)]
NotNegative = Annotated[float, Range(0)]
Precision = Annotated[float, Range(1e-20, 1e20)]
DEFAULT_EPOCHS = 50


@dataclass(frozen=True)
class DataConfig:
    """Which data, and how much of them."""

    name: str = "digits"  # digits, mnist, fashion_mnist, kmnist, cifar10, cifar100, svhn, image_folder, arrays
    task: Literal["classification", "regression"] = "classification"  # or "regression": arrays whose y are real numbers
    root: str | None = None  # where data sets lie; null: $NTK_ITERNCGP_DATA, or else data/
    train: str | None = None  # image_folder: a folder; arrays: an .npz with x and y, or a .csv whose last column is y
    test: str | None = None  # the same; null: a fifth of the training data is held out
    train_limit: CountFromTwo | None = None  # null: all
    test_limit: CountFromTwo | None = None
    held_out: CountFromZero | None = (
        None  # to choose the precision on; null: a tenth (few data: a fifth) if trained here
    )
    held_out_from: Literal["train", "test"] = "train"  # or "test", for a checkpoint that has seen all training data
    ood: tuple[str, ...] = ()  # other data sets, "rotated", "noise": what a classifier should not be sure about
    ood_limit: CountFromTwo | None = 2000
    batch_size: Count = 250
    image_size: Count = 224  # image_folder: images are scaled and cropped to this side
    download: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A built-in network, one of torchvision's, or an import path `package.module:function`; trained if need be."""

    name: str = "cnn"
    checkpoint: str | None = None  # .safetensors, or .pt with weights only; also looked for under data.root
    arguments: dict[str, Any] = field(default_factory=dict)
    train_epochs: CountFromZero | None = None  # 0: weights unchanged; null: 50 without a checkpoint; yours must say
    train_batch_size: Count = 50
    learning_rate: Positive = 3e-3
    weight_decay: NotNegative = 1e-5

    @property
    def is_own(self) -> bool:
        """Made by a function of the user's."""
        return ":" in self.name

    @property
    def epochs_here(self) -> int:
        """For how many epochs it is trained by this run; 0 where its weights are used unchanged."""
        if self.checkpoint is not None:
            return 0
        default = 0 if self.arguments.get("weights") is not None else DEFAULT_EPOCHS
        return default if self.train_epochs is None else self.train_epochs


@dataclass(frozen=True)
class KernelConfig:
    """A Gaussian process in the place of the network, where `name` is given."""

    name: Kernel | None = None
    lengthscale: Positive = 8.0
    outputscale: Positive = 32.0
    noise: Positive = 0.1  # regression: the variance of the noise, targets being scaled to unit variance
    optimize_steps: CountFromZero = 0  # fits spent on finding better ones than these three, by the evidence lower bound
    policy: Policy = "curvature_residual"
    max_products: Count = 100
    products_per_step: Count = 3  # each brings up to 81 actions, so few of them make a Newton step worth taking
    refine_products: CountFromZero = 0  # spent on the variance once the mean has converged
    max_rank: Count | None = None


@dataclass(frozen=True)
class FitConfig:
    """How the posterior is computed; null leaves a setting to the flavour."""

    subset_of_weights: Literal["all", "last_layer"] = "all"
    mean: Literal["network", "refined"] = "network"
    policy: str | None = None
    num_actions: Count | None = None
    max_rank: Count | None = None
    prior_precision: Positive = 1.0
    contrasts: Count | Literal["all", "auto"] = "auto"  # of a classifier's outputs: to calibrate, and to predict
    refine_epochs: Positive | None = None  # after the fit, so many epochs more
    shard: str | None = None  # 3/16: the third of 16 parts of the training data, to be merged with those of the others
    options: dict[str, Any] = field(default_factory=dict)  # further keywords of the flavour, as they are


@dataclass(frozen=True)
class TuningConfig:
    """How every method's one hyperparameter is chosen: never on what it is scored on."""

    protocol: Literal["crossfit", "validation", "none"] = (
        "crossfit"  # two folds of the test set; "validation": a part of it put aside; "none"
    )
    validation_size: Count | None = None  # for "validation"; null: half of the test set, at most 1000
    precision_min: Precision = 1e-3  # `fit` looks further where the best one is at an end
    precision_max: Precision = 1e6
    steps_per_decade: Annotated[int, Range(1, 100)] = 4


@dataclass(frozen=True)
class EvaluateConfig:
    """What is compared."""

    baselines: tuple[Baseline, ...] = ("map", "temperature", "prior", "last_layer")
    link_samples: Count = 512  # points of the quadrature
    bootstrap: Count = 2000  # resamples for the intervals of differences
    sod_size: Count = 100  # data in the subset
    ella_size: Count = 500
    ella_rank: Count = 20
    valla_size: Count = 100  # inducing points
    valla_steps: Count = 500  # minibatches
    exact_limit: Count = 4000  # the exact posterior is computed for at most so many weights


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run that is killed can go on from, under output_dir/checkpoint."""

    every_seconds: NotNegative | None = 30.0  # how much work may be lost; null: nothing is saved


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
    seed: CountFromZero = 0
    device: str = "auto"  # auto: a GPU where there is one

    def __post_init__(self) -> None:
        self._check_task()
        self._check_model()
        self._check_precisions()

    def _check_task(self) -> None:
        if self.fit.shard is not None:
            shard_numbers(self.fit.shard)
        if self.data.task == "regression" and (self.data.name != "arrays" or self.data.ood):
            got = f"{self.data.name} and {shown(list(self.data.ood))}"
            expected = "'classification' unless data.name is 'arrays' and data.ood empty"
            raise SettingError("data.task", expected, f"'regression' with {got}", "data.name=arrays")

    def _check_model(self) -> None:
        model = self.model
        if self.kernel.name is None and model.is_own and model.checkpoint is None and model.train_epochs is None:
            raise SettingError(
                "model.train_epochs",
                f"set for '{model.name}' without a checkpoint",
                "null",
                f"{DEFAULT_EPOCHS} to train the network here, 0 to take its weights as the function returns them, or "
                "a model.checkpoint",
            )

    def _check_precisions(self) -> None:
        least, most = self.tuning.precision_min, self.tuning.precision_max
        if least >= most:
            raise SettingError(
                "tuning.precision_min", "below tuning.precision_max", f"{least:g} and {most:g}", "the defaults"
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


SHORT = {"tuning": "protocol"}  # a section that may be written as one of its settings: `tuning: crossfit`


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Read the settings of a run.

    Args:
        path: A YAML file with what differs from the defaults.
        overrides: Texts `section.key=value` that come after it.

    Returns:
        All settings, checked.
    """
    settings: dict[str, Any] = {}
    try:
        if path is not None:
            settings = dict(flat(read_settings(Path(path))))
        changes = dict(_override(text) for text in overrides)
        folder = f"runs/{Path(path).stem if path is not None else 'run'}"
        return from_settings(settings | dict(flat(changes)), default_output_dir=folder)
    except SettingError as error:
        if path is None or any(error.name.startswith(text.partition("=")[0].strip()) for text in overrides):
            raise
        line = line_of(Path(path), error.name)
        raise ConfigError(f"{path}, line {line}: {error}" if line else str(error)) from error


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set must be given as key=value; got {text!r}. Try data.train_limit=5000.")
    return key.strip(), parsed(value, f"the value of {key.strip()}")


def from_settings(settings: Mapping[str, Any], *, default_output_dir: str = "runs/run") -> RunConfig:
    """Make a run of settings by their dotted names."""
    config, names = RunConfig(), dict(setting_names())
    for key in settings:
        if key not in names:
            raise unknown_setting(str(key), names)
    typed = {key: typed_value(key, value, names[key], config[key]) for key, value in settings.items()}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in typed.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    changes = sections.pop("", {})
    changes |= {section: replace(getattr(config, section), **values) for section, values in sections.items()}
    return replace(config, **({"output_dir": default_output_dir} | {k: v for k, v in changes.items() if v != ""}))


def setting_names() -> Iterator[tuple[str, Any]]:
    """Dotted names and types of all settings."""
    hints = get_type_hints(RunConfig, include_extras=True)
    for f in fields(RunConfig):
        if is_dataclass(hints[f.name]):
            inner = get_type_hints(hints[f.name], include_extras=True)
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
                raise SettingError(key, "a section of settings", shown(value), f"one of its settings, {key}.NAME")
            yield from ((f"{key}.{name}", item) for name, item in value.items())
        else:
            yield str(key), value


def as_yaml(config: RunConfig) -> str:
    """All settings; loading the text gives the same run."""
    return str(yaml.safe_dump(as_plain(config), sort_keys=False, allow_unicode=True))


def as_plain(config: RunConfig) -> dict[str, Any]:
    """All settings as numbers, texts, lists and dictionaries."""

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
            f"The folder '{folder}' must be writable; got: {reason.lower()}. Try another one with --output-dir."
        ) from error
    return folder

"""`ntk-iterncgp merge`: one posterior file from those of the same network and different data.

    ntk-iterncgp fit CONFIG --shard 1/4 --output-dir runs/1      on four machines that never talk
    ntk-iterncgp merge runs/*/posterior.safetensors --output runs/all/posterior.safetensors --max-rank 200

Headers are compared first, so that what does not belong together is refused before the long part. Then the files are
read one at a time, and added up as a tree: of K posteriors at most log₂K + 2 are in memory at once.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ntk_iterncgp.experiments.config import RunConfig, shard_numbers
from ntk_iterncgp.experiments.runs.flavour import make_flavour
from ntk_iterncgp.experiments.runs.predict import restore
from ntk_iterncgp.experiments.runs.predictor import NetworkPredictor
from ntk_iterncgp.experiments.runs.prepare import chosen_device
from ntk_iterncgp.experiments.settings import ConfigError, config_errors
from ntk_iterncgp.persistence.files import as_json, load_posterior, peek_posterior, save_posterior, temporary_prefix
from ntk_iterncgp.persistence.locks import FolderLock

ALIKE = ("scaling", "targets", "class_names", "input_shape")
"""What files must agree in beside the network, which is compared number by number."""


ELSEWHERE = ("root", "batch_size", "download", "test_limit", "ood", "ood_limit")
"""Settings of data in which machines may differ that share them out."""


@dataclass(frozen=True, eq=False)
class Header:
    """What a file says about itself before its posterior is read."""

    path: Path
    about: dict[str, Any]
    data_seen: list[int]

    @classmethod
    def of(cls, path: Path) -> Header:
        """Read that."""
        about, seen = peek_posterior(path, "data_seen")
        if "prior_precision" not in about:
            raise ConfigError(f"'{path}' must hold the posterior of a network; got that of a kernel.")
        return cls(path, about, [] if seen is None else seen.tolist())

    @property
    def num_data(self) -> int:
        """How many data it has seen."""
        return int(self.about["num_data"])

    @property
    def shards(self) -> list[str]:
        """Which parts of its training data it has seen, as k/K; 1/1 for all. Of a merge of an earlier version, one."""
        found = self.about.get("shards")
        return list(found) if found else [self.about["config"]["fit"].get("shard") or "1/1"]

    @property
    def whole(self) -> str:
        """What these are parts of."""
        config = self.about["config"]
        data = {name: value for name, value in config["data"].items() if name not in ELSEWHERE}
        return json.dumps([data, config.get("seed")], sort_keys=True)


def merge(
    files: Sequence[Path],
    output: Path,
    *,
    max_rank: int | None = None,
    device: str = "auto",
    trusted_model: str | None = None,
) -> Path:
    """The whole command. Whatever goes wrong, no file is changed but `output`, and that whole or not at all.

    Args:
        files: Posterior files, two or more.
        output: The file to write; it may be one of them.
        max_rank: How many actions to keep, after each addition; None for all.
        device: auto, cpu or cuda.
        trusted_model: An import path that may be called, for a network of one's own.

    Returns:
        The output file.
    """
    started = time.perf_counter()
    if output.suffix != ".safetensors":
        raise ConfigError(
            f"--output must end in .safetensors; got '{output}'. Try '{output.with_suffix('')}.safetensors'."
        )
    headers = [Header.of(path) for path in files]
    _check_together(headers)
    output.parent.mkdir(parents=True, exist_ok=True)
    with FolderLock(output.parent, "ntk-iterncgp merge"), config_errors():
        for leftover in output.parent.glob(f"{temporary_prefix(output)}*"):
            leftover.unlink(missing_ok=True)  # of one that was killed
        first = restore(files[0], chosen_device(device), trusted_model=trusted_model)
        assert isinstance(first.predictor, NetworkPredictor) and first.model is not None
        choose, own, model = _hyperparameters(headers), first.predictor.la, first.model

        def read(path: Path) -> Any:
            la = own if path == files[0] else _restored(path, first.config, model)
            choose(la)
            print(f"{path}: {la.n_data:,} data, rank {la.posterior.rank}", flush=True)
            return la

        la = _added(files, read, max_rank)
        if max_rank is not None:
            la.compress(max_rank)
        about = _about(headers, la, time.perf_counter() - started)
        short = {**about, "report": {key: value for key, value in about["report"].items() if key != "history"}}
        beside = {output.with_suffix(".json"): as_json(short)}
        save_posterior(output, la.state_dict(), model.state_dict(), about, beside=beside)
    captured = 100 * about["report"]["information_captured"]
    print(f"Posterior of {la.n_data:,} data: {output}, rank {la.posterior.rank}, {captured:.1f} % of the information.")
    return output


def _added(files: Sequence[Path], read: Callable[[Path], Any], max_rank: int | None) -> Any:
    """The sum of all, as a tree: what is in memory is one sum for each level."""
    if len(files) == 1:
        return read(files[0])
    half = (len(files) + 1) // 2
    left, right = _added(files[:half], read, max_rank), _added(files[half:], read, max_rank)
    try:
        left.merge(right, max_rank=max_rank)
    except ValueError as error:
        raise ConfigError(f"'{files[half]}' cannot be merged with '{files[0]}': {error}") from error
    return left


def _restored(path: Path, config: RunConfig, model: nn.Module) -> Any:
    state, _, _ = load_posterior(path)
    la = make_flavour(config, model)
    try:
        la.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError, ArithmeticError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise ConfigError(f"'{path}' cannot be merged: {reason}") from error
    return la


# --- what belongs together ----------------------------------------------------------------------------------------


def _check_together(headers: Sequence[Header]) -> None:
    """Raise where that cannot be, as far as headers tell."""
    if len(headers) < 2:
        raise ConfigError("merge must be given two posterior files or more; got one.")
    first, seen = headers[0], dict[int, Path]()
    for header in headers:
        for fingerprint in header.data_seen:
            if fingerprint in seen:
                raise ConfigError(
                    f"Each file must be of other data; got '{header.path}' and '{seen[fingerprint]}', which have seen "
                    "the same, and it would count twice. Try each of them once."
                )
        for other in headers[: headers.index(header)]:
            _check_disjoint(header, other)
        seen |= dict.fromkeys(header.data_seen, header.path)
        for name in ALIKE:
            if header.about.get(name) != first.about.get(name):
                raise ConfigError(
                    f"All files must have the same {name}; got others in '{header.path}' than in '{first.path}'. Try "
                    "fits that share a network, for instance by fit --shard."
                )


def _check_disjoint(one: Header, other: Header) -> None:
    """Raise where two files have seen overlapping shards of the same data, as 1/2 and 1/4 are.

    Files without a shard are compared by their data alone: those of the same name may be others by now.
    """
    if one.whole != other.whole or one.shards == other.shards == ["1/1"]:
        return
    for a, b in product(one.shards, other.shards):
        (k, total), (j, others) = shard_numbers(a), shard_numbers(b)
        if (k - j) % math.gcd(total, others) == 0:
            raise ConfigError(
                f"Each file must be of other data; got '{one.path}' of shard {a} and '{other.path}' of shard {b}, "
                "which overlap, and data would count twice. Try shards k/K with one K."
            )


def _hyperparameters(headers: Sequence[Header]) -> Callable[[Any], None]:
    """Sets the same for all: geometric means, weighted by data, of those that each fit has chosen for itself."""
    weights = torch.tensor([header.num_data for header in headers], dtype=torch.float64)
    values = [
        torch.tensor(
            [
                *h.about["prior_precision"],
                float(h.about["noise_variance"]),
                float(h.about.get("output_temperature", 1.0)),
            ],
            dtype=torch.float64,
        )
        for h in headers
    ]
    if len({len(value) for value in values}) > 1:
        raise ConfigError("All files must have a prior precision of one kind; got one for all weights, and several.")
    *precision, variance, temperature = _mean(torch.stack(values), weights).tolist()
    differ = any(not torch.equal(value, values[0]) for value in values)
    if differ:
        shown = f"{precision[0]:.3g}" if len(precision) == 1 else f"{len(precision)} numbers"
        print(f"The fits chose different hyperparameters: prior precision {shown}, their geometric mean.", flush=True)

    def choose(la: Any) -> None:
        if differ:
            la.prior_precision, la.output_temperature = torch.tensor(precision).to(la.prior_precision), temperature
            if la.likelihood == "regression":
                la.sigma_noise = math.sqrt(variance)

    return choose


def _mean(values: Tensor, weights: Tensor) -> Tensor:  # (K, h), (K,) -> (h,)
    """Geometric."""
    return (weights @ values.log() / weights.sum()).exp()


def _about(headers: Sequence[Header], la: Any, seconds: float) -> dict[str, Any]:
    """As of a fit of all data, if the shards are all there."""
    first = headers[0].about
    report = dict(first["report"])
    epochs = [(header.about["report"].get("epochs"), header.num_data) for header in headers]
    report |= {
        "rank": la.posterior.rank,
        "information_captured": la.posterior.information_captured(la.prior_precision, la._noise_scale),
        "seconds": seconds + sum(header.about["report"]["seconds"] for header in headers),
        "epochs": sum((value or 0.0) * number for value, number in epochs) / la.n_data,
        "history": [],
    }
    settings = {**first["config"], "fit": {**first["config"]["fit"]}}
    shards = [shard for header in headers for shard in header.shards]
    if _are_complete(shards) and len({header.whole for header in headers}) == 1:
        settings["fit"]["shard"], shards = None, ["1/1"]
    return {
        **first,
        "config": settings,
        "prior_precision": la.prior_precision.reshape(-1).tolist(),
        "output_temperature": float(la.output_temperature),
        "noise_variance": float(la.sigma_noise) ** 2,
        "num_data": la.n_data,
        "report": report,
        "shards": shards,
        "merged": [str(header.path) for header in headers],
    }


def _are_complete(shards: Sequence[str]) -> bool:
    """Whether these are 1/K, 2/K, …, K/K."""
    numbers = sorted(shard_numbers(shard) for shard in shards)
    return numbers == [(k, len(shards)) for k in range(1, len(shards) + 1)]

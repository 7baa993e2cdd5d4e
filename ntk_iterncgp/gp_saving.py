"""What is saved of a `NonConjugateGP` while it works, and by what it is known again: its settings and its data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from ntk_iterncgp.checkpoint import Call, Checkpoint, open_call
from ntk_iterncgp.digests import described, digest_rows
from ntk_iterncgp.priors import GramPrior
from ntk_iterncgp.solver import State


def call_of(  # `gp` is a NonConjugateGP, which comes after this file
    gp: Any, checkpoint: Checkpoint | None, name: str, state: State, **more: Any
) -> tuple[Call, Tensor | None]:
    """A fit or refine that starts from this state, as it was saved or from its beginning; and digests of its data."""
    if more and checkpoint is not None:  # a refine, which begins where another run ended
        more |= {"starts_from": described([state.gram, state.noise_gram, state.iterate.offset])}
    call = open_call(checkpoint, name, lambda: (_settings(gp, state) | more, {}))
    if not call.is_kept:
        return call, None
    prior = state.problem.prior
    assert isinstance(prior, GramPrior)
    data = digest_rows(prior.inputs, state.problem.targets)
    call.check_data(data)
    return call, data


def _settings(gp: Any, state: State) -> dict[str, Any]:
    prior = state.problem.prior
    kernels = [described(kernel) | {"values": described(kernel.trainable())} for kernel in gp.kernels]
    return {
        "kernels": kernels,
        "likelihood": described(gp.likelihood),
        "mean": gp.mean.tolist(),
        "policy": described(gp.policy),
        **asdict(gp.stopping),
        **asdict(gp.options),
        "kronecker": gp.kronecker,
        "product_method": gp.product_method,
        "product_tolerance": gp.product_tolerance,
        "chunk_bytes": gp.chunk_bytes,
        "seed": gp.seed,
        "dtype": str(prior.dtype),
        "device": prior.device.type,
    }

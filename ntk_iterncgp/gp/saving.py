"""The fingerprint of a `NonConjugateGP`, by which a checkpoint is matched to it: its settings and its data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from ntk_iterncgp.persistence.checkpoint import Checkpoint, CheckpointSession, open_session
from ntk_iterncgp.persistence.fingerprint import described, digest_rows
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver import State
from ntk_iterncgp.solver.exact import ExactState


def session_of(  # `gp` is a NonConjugateGP, which comes after this file
    gp: Any, checkpoint: Checkpoint | None, name: str, state: State | ExactState, **more: Any
) -> tuple[CheckpointSession | None, Tensor | None]:
    """Open the checkpoint of a fit or refine that starts from this state.

    Args:
        gp: the GP that is fitted.
        checkpoint: where to save, if anywhere.
        name: "fit", "refine" or "update".
        state: where the run starts.
        more: further settings that must match.

    Returns:
        The session, resumed from what was saved or at its beginning, and a digest of each datum; None without a
        checkpoint.
    """
    if checkpoint is None:
        return None, None
    if more:  # a refine or update, which starts where another run ended
        matrices = [] if isinstance(state, ExactState) else [state.gram, state.noise_gram]
        more |= {"starts_from": described([*matrices, state.iterate.offset])}
    session = open_session(checkpoint, name, _settings(gp, state) | more, {})
    prior = state.problem.prior
    assert isinstance(prior, GramPrior)
    data = digest_rows(prior.inputs, state.problem.targets)
    session.check_data(data)
    return session, data


def search_session(
    gp: Any, checkpoint: Checkpoint | None, inputs: Tensor, targets: Tensor, options: Any
) -> CheckpointSession | None:
    """Open the checkpoint of a search for hyperparameters, if there is one."""
    if checkpoint is None:
        return None
    data = {"data": described(digest_rows(inputs, targets)), "fixed": list(options.fixed)}
    search = {"max_steps": options.max_steps, "tolerance": options.tolerance, "restarts": options.restarts}
    settings = _settings_of_gp(gp) | data | search | {"device": inputs.device.type}
    return open_session(checkpoint, "optimize", settings, {})


def _settings(gp: Any, state: State | ExactState) -> dict[str, Any]:
    prior = state.problem.prior
    exact = {"exact": True} if isinstance(state, ExactState) else {}  # or else as before there was a choice
    return exact | _settings_of_gp(gp) | {"dtype": str(prior.dtype), "device": prior.device.type}


def _settings_of_gp(gp: Any) -> dict[str, Any]:
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
    }

"""A fitted `NonConjugateGP` as tensors, numbers and texts, and back: what `save` and `load` put in a file.

    {"kernels": …, "likelihood": …, "mean": …, "settings": …, "inputs": X, "targets": y, "run": …}

`run` is what a checkpoint holds of the run at its end, so that a GP predicts the same bits after it was loaded, and its
`refine` resumes with them. A file is one `.safetensors` with the rest as JSON in its header: nothing in it is called.
What was loaded is compared with its kernel and its data before anybody may use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor

import ntk_iterncgp.likelihoods as likelihoods
from ntk_iterncgp.fitting.drive import Run, Trajectory
from ntk_iterncgp.fitting.exact_run import ExactRun
from ntk_iterncgp.fitting.report import SelfCheckError
from ntk_iterncgp.fitting.self_check import problems
from ntk_iterncgp.fitting.solver_run import SolverRun
from ntk_iterncgp.gp.plots import plot_1d, plot_2d
from ntk_iterncgp.kernels import Kernel, kernel_from_dict, kernel_to_dict
from ntk_iterncgp.likelihoods import Likelihood
from ntk_iterncgp.persistence.files import FileError, read_tensors, with_tensors, without_tensors, write_tensors
from ntk_iterncgp.priors.gram import GramPrior
from ntk_iterncgp.solver import NewtonOptions, Policy, State, Status, Stopping, newton
from ntk_iterncgp.solver.exact import ExactState
from ntk_iterncgp.solver.policies import POLICIES, resolve_policy

KIND, VERSION = "ntk-iterncgp Gaussian process", 1
PLAIN = (
    "mode",
    "kronecker",
    "product_method",
    "product_tolerance",
    "chunk_bytes",
    "seed",
)  # settings that are themselves


class Shareable:
    """Saving, loading and plotting of a `NonConjugateGP`, which inherits from it."""

    def state_dict(self) -> dict[str, Any]:
        """This fitted GP as tensors, numbers and texts, of which `from_state_dict` makes an equal one."""
        gp: Any = self
        state, report = gp.posterior_.state, gp.report_
        prior = state.problem.prior
        assert isinstance(prior, GramPrior)
        ended = Trajectory(state, report.history, report.seconds, 0.0, Status(report.status))
        return {
            "kernels": _described_kernels(gp.kernels),
            "hyperparameters": [_detached(kernel.hyperparameters()) for kernel in gp.kernels],
            "likelihood": _described_likelihood(gp.likelihood),
            "mean": gp.mean,
            "policy": next((n for n, make in POLICIES.items() if _same_policy(make(), gp.policy)), None),
            "settings": {name: getattr(gp, name) for name in PLAIN},
            "stopping": asdict(gp.stopping),
            "options": asdict(gp.options),
            "dtype": None if gp.dtype is None else str(gp.dtype).removeprefix("torch."),
            "is_exact": isinstance(state, ExactState),
            "inputs": prior.inputs.to(prior.data_dtype),
            "targets": state.problem.targets,
            "run": _run(gp, state).to_dict(ended),
        }

    @classmethod
    @torch.no_grad()
    def from_state_dict(
        cls,
        saved: Mapping[str, Any],
        *,
        kernel: Kernel | Sequence[Kernel] | None = None,
        likelihood: Likelihood | None = None,
        policy: str | Policy | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Make the GP that `state_dict` described, checked against its kernel and its data.

        Args:
            saved: as `state_dict` returned it.
            kernel: the kernel (or one for each output), where it was not one of this package.
            likelihood: the same for the likelihood.
            policy: the same for the policy, which `refine` needs.
            device: where to put it; None: the CPU.

        Returns:
            The fitted GP, which predicts the same bits.

        Raises:
            ValueError: if the description is incomplete, or does not agree with its kernel and its data.
        """
        try:
            gp: Any = _unfitted(cls, saved, kernel, likelihood, policy, device)
            device = gp.device or torch.device("cpu")
            inputs, targets = saved["inputs"].to(device), saved["targets"].to(device)
            start = _start(gp, inputs, targets, is_exact=saved["is_exact"])
            trajectory = _run(gp, start).from_dict(saved["run"], Trajectory(start, [], 0.0))
        except (KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
            raise ValueError(f"it does not describe a fitted GP ({type(error).__name__}: {error})") from error
        trajectory.before, trajectory.seconds = trajectory.seconds, 0.0
        found = {} if saved["is_exact"] else problems(trajectory.state)  # those of an exact one cannot be mended
        if found:
            raise ValueError(
                f"it does not agree with its kernel and its data: expected {'; and '.join(found.values())}. Was it "
                "saved with another kernel or likelihood than the one given?"
            )
        try:
            gp._take(trajectory)
        except SelfCheckError as error:
            raise ValueError(f"it does not agree with its kernel and its data: {error}") from error
        fitted: Self = gp
        return fitted

    def save(self, path: str | Path) -> None:
        """Write this fitted GP, with its data, to one `.safetensors` file; whole or not at all."""
        path, tensors = Path(path), dict[str, Tensor]()
        plain = without_tensors(self.state_dict(), "gp", tensors)
        write_tensors(path, tensors, {"format": f"{KIND} {VERSION}", "state": plain})

    @classmethod
    def load(cls, path: str | Path, **given: Any) -> Self:
        """Read a fitted GP from a file that `save` wrote; nothing in it is run.

        Args:
            path: The file.
            given: As in `from_state_dict`.

        Returns:
            The fitted GP, which predicts the same bits.
        """
        path = Path(path)
        content, tensors = read_tensors(path, KIND, VERSION)
        try:
            saved = with_tensors(content["state"], tensors)
            return cls.from_state_dict(saved, **given)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise FileError(f"'{path}' cannot be loaded: {error}") from error

    def plot_1d(self, ax: Any = None, **settings: Any) -> Any:
        """Plot a GP of one-dimensional inputs: mean, bands, data. See `gp.plots.plot_1d` for the settings."""
        return plot_1d(self, ax, **settings)

    def plot_2d(self, ax: Any = None, **settings: Any) -> Any:
        """Plot a GP of two-dimensional inputs: mean, rate or classes, and data. See `gp.plots.plot_2d`."""
        return plot_2d(self, ax, **settings)


# --- parts -----------------------------------------------------------------------------------------------------------


def _described_kernels(kernels: Sequence[Kernel]) -> list[dict[str, Any]] | None:
    """None where they are not of this package: then they are given when loading."""
    try:
        return [kernel_to_dict(kernel) for kernel in kernels]
    except ValueError:
        return None


def _described_likelihood(likelihood: Likelihood) -> dict[str, Any] | None:
    name = type(likelihood).__name__
    if name not in likelihoods.__all__ or getattr(likelihoods, name) is not type(likelihood):
        return None
    return {"likelihood": name, **_detached(likelihood.settings())}


def _detached(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}


def _same_policy(one: Policy, other: Policy) -> bool:
    """One function, or two objects of one class with equal settings."""
    return one is other or (type(one) is type(other) and not isinstance(one, FunctionType) and vars(one) == vars(other))


def _unfitted(
    kind: type,
    saved: Mapping[str, Any],
    kernel: Kernel | Sequence[Kernel] | None,
    likelihood: Likelihood | None,
    policy: str | Policy | None,
    device: torch.device | str | None,
) -> Any:
    """A GP with the settings of the one that was saved."""
    if kernel is None:
        if saved["kernels"] is None:
            raise ValueError(
                "`kernel` must be given, as that of the saved GP is not of this package; got None. Try "
                "load(path, kernel=…)."
            )
        found = [kernel_from_dict(described) for described in saved["kernels"]]
        kernel = found[0] if len(found) == 1 else found
    else:
        kernel = _with_hyperparameters(kernel, saved["hyperparameters"])
    if likelihood is None:
        if saved["likelihood"] is None:
            raise ValueError(
                "`likelihood` must be given, as that of the saved GP is not of this package; got None. Try "
                "load(path, likelihood=…)."
            )
        settings = dict(saved["likelihood"])
        name = settings.pop("likelihood")
        if name not in likelihoods.__all__ or name == "Likelihood":
            raise ValueError(f"the saved likelihood must be one of this package; got {name!r:.60}.")
        likelihood = getattr(likelihoods, name)(**settings)
    policy = saved["policy"] if policy is None else policy
    dtype = None if saved["dtype"] is None else {"float32": torch.float32, "float64": torch.float64}[saved["dtype"]]
    gp = kind(kernel, likelihood, mean=saved["mean"], dtype=dtype, device=device)
    gp.policy = _unknown_policy if policy is None else resolve_policy(policy)
    gp.stopping, gp.options = Stopping(**saved["stopping"]), NewtonOptions(**saved["options"])
    for name in PLAIN:
        setattr(gp, name, saved["settings"][name])
    return gp


def _with_hyperparameters(
    kernel: Kernel | Sequence[Kernel], saved: Sequence[Mapping[str, Tensor]]
) -> Kernel | list[Kernel]:
    kernels = [kernel] if isinstance(kernel, Kernel) else list(kernel)
    if len(kernels) != len(saved):
        raise ValueError(f"it was fitted with {len(saved)} kernel(s), and kernel= gives {len(kernels)}")
    found = [one.with_hyperparameters(values) for one, values in zip(kernels, saved, strict=True)]
    return found[0] if isinstance(kernel, Kernel) else found


def _unknown_policy(state: State) -> Tensor:
    raise RuntimeError(
        "`policy` must be given to refine this GP, as its own is not of this package and was not saved; got None. Try "
        "load(path, policy=…)."
    )


def _start(gp: Any, inputs: Tensor, targets: Tensor, *, is_exact: bool) -> State | ExactState:
    """Where such a fit begins: the formats of its state."""
    mode, gp.mode = gp.mode, "exact" if is_exact else "iterative"
    try:
        found: State | ExactState = gp._start(inputs, targets)
    finally:
        gp.mode = mode
    return found


def _run(gp: Any, state: State | ExactState) -> Run[Any]:
    """The run of which a state is the last one."""
    if isinstance(state, ExactState):
        return ExactRun(state)
    return SolverRun(lambda state: newton(state, gp.policy, gp.stopping, gp.options), state, gp.stopping.max_products)

"""The other methods, each fitted to the training data and then shown the rows of J at every test input.

    prior        no data at all: the variance of the prior
    last_layer   laplace-torch, full Hessian of the last linear layer
    kfac         laplace-torch, Kronecker-factored Hessian of all layers
    sod          laplace-torch's function-space flavour: a subset of the data, with its diagonal of W
    ella         laplace-torch's ELLA: rank-K Nyström features
    valla        VaLLA: inducing points, trained by gradients (`valla.py`)
    exact        the linearised Laplace posterior itself, dense: the truth for networks of a few thousand weights

What laplace-torch fits is fitted by laplace-torch; only the algebra of predictions is here, so that all methods see the
same rows and the prior precision can be scanned. Tests compare each with laplace-torch's own `functional_variance`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any, ClassVar, final

import torch
from laplace import ELLA, Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from ntk_iterncgp.data.fixed_order import FixedOrderData
from ntk_iterncgp.experiments.config import EvaluateConfig
from ntk_iterncgp.experiments.evaluation.families import Downdated, Family, Spectral, Tabulated
from ntk_iterncgp.experiments.evaluation.valla import fit_valla
from ntk_iterncgp.experiments.progress import Progress
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.jacobian.rows import DenseRows
from ntk_iterncgp.runtime.threads import evaluating

CHUNK_BYTES = 256 * 2**20
VALLA_BATCH = 16


class Unavailable(RuntimeError):
    """A baseline that this network or these data do not admit, in one sentence."""


class Baseline(ABC):
    """Fitted on construction; `see` is called with every part of the inputs, in order, and then `family` once."""

    label: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        settings: EvaluateConfig,
        seed: int,
        grid: Tensor,
        progress: Progress | None = None,
    ) -> None:
        self.settings, self.grid, self.seed, self.progress = settings, grid, seed, progress or Progress()
        self.seen: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.prior: list[Tensor] = []  # J Jᵀ at the inputs, where a method starts from it
        with evaluating(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of laplace-torch and its backends
            self._fit(model, loader)

    def see(self, rows: DenseRows) -> None:
        """Take in the rows of J at some of the inputs."""
        self.outputs.append(rows.outputs.detach())
        self.seen.append(self._keep(rows))

    @abstractmethod
    def _fit(self, model: nn.Module, loader: DataLoader[Any]) -> None: ...

    @abstractmethod
    def _keep(self, rows: DenseRows) -> Tensor:
        """What predictions need of these inputs."""

    @abstractmethod
    def family(self, start: float, num_samples: int) -> Family:
        """Return the predictions at all inputs seen, as a function of the prior precision."""


class _InEigenbasis(Baseline):
    """Curvature of some columns of J, eigendecomposed. Abstract."""

    columns: slice | Tensor = slice(None)
    basis: Tensor
    eigenvalues: Tensor

    def _keep(self, rows: DenseRows) -> Tensor:
        return rows.jacobian[..., self.columns].to(self.basis.dtype) @ self.basis

    def family(self, start: float, num_samples: int) -> Family:
        outputs, Z = torch.cat(self.outputs), torch.cat(self.seen)
        return Spectral(outputs, Z, self.eigenvalues.double(), self.grid, start, num_samples)


@final
class LastLayer(_InEigenbasis):
    """The full Laplace posterior of the last layer, by laplace-torch."""

    label = "last layer (laplace-torch)"

    def _fit(self, model: nn.Module, loader: DataLoader[Any]) -> None:
        la = _fitted("last_layer", "full", model, self.progress.counted(loader))
        values, vectors = torch.linalg.eigh(la.H.double())
        self.basis, self.eigenvalues = vectors.to(la.H.dtype), values
        prefix, start, found = f"{la.model._last_layer_name}.", 0, []
        for name, value in model.named_parameters():
            if not value.requires_grad:
                continue
            if name.startswith(prefix):
                found.append(torch.arange(start, start + value.numel(), device=value.device))
            start += value.numel()
        self.columns = torch.cat(found) if found else torch.arange(0)
        if len(self.columns) != len(values):
            raise Unavailable("Its last layer is not among the weights that require a gradient.")


@final
class Exact(_InEigenbasis):
    """The linearised Laplace posterior of all weights, from the whole P×P GGN."""

    label = "exact linearised Laplace"

    def _fit(self, model: nn.Module, loader: DataLoader[Any]) -> None:
        jacobian = Jacobian(model)
        if jacobian.num_params > self.settings.exact_limit:
            raise Unavailable(f"{jacobian.num_params:,} weights are more than evaluate.exact_limit.")
        total = torch.zeros(jacobian.num_params, jacobian.num_params, dtype=torch.float64, device=jacobian.device)
        for rows in rows_of(jacobian, loader, self.progress):
            J = rows.jacobian.double()
            p = rows.outputs.double().softmax(1)
            root = p.sqrt()[..., None] * (J - (p[..., None] * J).sum(1, keepdim=True))  # W = CᵀC, C = √p(I − 1pᵀ)
            total += root.flatten(0, 1).T @ root.flatten(0, 1)
        self.eigenvalues, self.basis = torch.linalg.eigh(total)


@final
class Ella(_InEigenbasis):
    """ELLA: eigenfunctions of the NTK from a random subset, by laplace-torch."""

    label = "ELLA (laplace-torch)"

    def _fit(self, model: nn.Module, loader: DataLoader[Any]) -> None:
        size = min(self.settings.ella_size, len(loader.dataset))  # type: ignore[arg-type]
        la = ELLA(deepcopy(model), "classification", size, min(self.settings.ella_rank, size), seed=self.seed)
        try:
            la.fit(self.progress.counted(loader))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise Unavailable(_line(error)) from error
        assert la.feature_gram is not None and la.dual_directions is not None
        self.eigenvalues, vectors = torch.linalg.eigh(la.feature_gram.double())
        self.basis = la.dual_directions @ vectors.to(la.dual_directions.dtype)


@final
class Kfac(Baseline):
    """The Kronecker-factored GGN, by laplace-torch."""

    label = "KFAC (laplace-torch)"

    def _fit(self, model: nn.Module, loader: DataLoader[Any]) -> None:
        self.kron = _fitted("all", "kron", model, self.progress.counted(loader)).H

    def _keep(self, rows: DenseRows) -> Tensor:  # (g, b, C, C)
        """Rotated into the eigenbasis of each factor once; then every precision is a weighting of columns."""
        b, C, _ = rows.jacobian.shape
        covariances = torch.zeros(len(self.grid), b, C, C, dtype=torch.float64, device=rows.outputs.device)
        start = 0
        for values, vectors in zip(self.kron.eigenvalues, self.kron.eigenvectors, strict=True):
            size = int(torch.tensor([len(value) for value in values]).prod())
            part = rows.jacobian[..., start : start + size].to(vectors[0].dtype)  # ours may be in float64
            if len(values) == 2:
                part = part.reshape(b * C, len(values[0]), len(values[1]))
                rotated = (vectors[0].T @ part @ vectors[1]).reshape(b, C, size)
                spectrum = torch.outer(*values).flatten()
            else:
                rotated, spectrum = part @ vectors[0], values[0]
            for i, precision in enumerate(self.grid.to(spectrum)):
                weighted = rotated / (spectrum + precision)
                covariances[i] += (weighted @ rotated.mT).double()
            start += size
        return covariances.float()

    def family(self, start: float, num_samples: int) -> Family:
        return Tabulated(torch.cat(self.outputs), torch.cat(self.seen, 1), self.grid, start, num_samples)


class _Downdating(Baseline):
    """The prior less what some actions say. Abstract."""

    directions: Tensor  # images of the actions (P, B), combined so that they have unit noise, and γ is diagonal
    gamma: Tensor  # their Gram matrix (B,)

    def _keep(self, rows: DenseRows) -> Tensor:
        self.prior.append(rows.covariance(torch.ones((), device=rows.outputs.device)))
        return rows.times(self.directions).to(self.directions.dtype)

    def family(self, start: float, num_samples: int) -> Family:
        Z, prior = torch.cat(self.seen), torch.cat(self.prior)
        return Downdated(torch.cat(self.outputs), prior, Z, self.gamma, self.grid, start, num_samples)


@final
class PriorOnly(_Downdating):
    """Variance k(x, x), without any data."""

    label = "prior only"

    def _fit(self, model: nn.Module, loader: DataLoader[Any]) -> None:
        weights = Jacobian(model).weights()
        self.directions, self.gamma = weights.new_zeros(len(weights), 0), weights.new_zeros(0)


@final
class SubsetOfData(_Downdating):
    """The posterior of a random subset of the data with diagonal curvature, by laplace-torch."""

    label = "subset of data (laplace-torch)"

    def _fit(self, model: nn.Module, loader: DataLoader[Any]) -> None:
        size = min(self.settings.sod_size, len(loader.dataset))  # type: ignore[arg-type]
        chosen = torch.randperm(len(loader.dataset), generator=torch.Generator().manual_seed(self.seed))[:size]  # type: ignore[arg-type]
        subset = DataLoader(Subset(loader.dataset, chosen.tolist()), loader.batch_size, collate_fn=loader.collate_fn)
        parts = list(rows_of(Jacobian(model), subset, self.progress))
        J = torch.cat([part.jacobian for part in parts]).flatten(0, 1)  # (M·C, P)
        p = torch.cat([part.outputs for part in parts]).double().softmax(1)
        # laplace-torch keeps the diagonal of W alone; where it underflows to zero, its noise is set to ten.
        noise = torch.nan_to_num(1 / (p * (1 - p)).flatten(), posinf=10.0)
        whitened = (J @ J.T).double() / noise.sqrt() / noise.sqrt()[:, None]
        gamma, vectors = torch.linalg.eigh(whitened)
        self.directions = J.T @ (vectors / noise.sqrt()[:, None]).to(J.dtype)  # (P, M·C)
        self.gamma = gamma.clamp_min(0)


@final
class Valla(_Downdating):
    """VaLLA: inducing inputs trained by the variational objective."""

    label = "VaLLA"

    def _fit(self, model: nn.Module, loader: DataLoader[Any]) -> None:
        settings, size = self.settings, min(self.settings.valla_size, len(loader.dataset))  # type: ignore[arg-type]
        found = fit_valla(
            Jacobian(model),
            loader,
            num_inducing=size,
            num_steps=settings.valla_steps,
            batch_size=VALLA_BATCH,
            seed=self.seed,
            progress=self.progress,
        )
        images = found.images().detach()  # with unit noise
        gamma, vectors = torch.linalg.eigh(images.double().T @ images.double())
        self.directions, self.gamma = images @ vectors.to(images.dtype), gamma.clamp_min(0)


BASELINES: dict[str, type[Baseline]] = {
    "prior": PriorOnly,
    "last_layer": LastLayer,
    "kfac": Kfac,
    "sod": SubsetOfData,
    "ella": Ella,
    "valla": Valla,
    "exact": Exact,
}


def rows_of(jacobian: Jacobian, loader: DataLoader[Any], progress: Progress | None = None) -> Any:
    """Rows of J for each part of a loader's data."""
    data, progress = FixedOrderData(loader, device=jacobian.device), progress or Progress()
    progress.start(data.num_items, "data")
    with torch.no_grad():
        for x, _ in data.batches():
            num_outputs = jacobian.forward(x[:1]).shape[1]
            for rows in jacobian.rows_in_parts(x, data.num_rows(x), None, num_outputs, CHUNK_BYTES):
                yield rows
                progress.advance(len(rows.outputs))


def _fitted(subset: str, structure: str, model: nn.Module, loader: DataLoader[Any]) -> Any:
    try:
        # A copy: finding the last layer, and backends, leave hooks behind.
        la = Laplace(deepcopy(model), "classification", subset_of_weights=subset, hessian_structure=structure)
        la.fit(loader)
    except (RuntimeError, ValueError, NotImplementedError, KeyError, AttributeError, TypeError) as error:
        raise Unavailable(_line(error)) from error
    return la


def _line(error: BaseException) -> str:
    text = str(error).partition("\n")[0][:160] or type(error).__name__
    return text if text.endswith(".") else f"{text}."

"""VaLLA: a sparse variational approximation of the linearised Laplace posterior that keeps the network as its mean.

L. A. Ortega, S. Rodríguez-Santana and D. Hernández-Lobato, "Variational linearized Laplace approximation for Bayesian
deep learning", ICML 2024. M inducing inputs z_m, each with one output c_m, have features φ_m = ∇_θ f_{c_m}(z_m), the
columns of Φ; with a free triangular factor L

    Ψ = Φ L,   cov(x) = J Jᵀ/δ − (J Ψ/δ)(I + ΨᵀΨ/δ)⁻¹(J Ψ/δ)ᵀ

which is what M actions with images Ψ (P, M) and unit noise would leave. Inducing inputs, L and δ minimise

    −Σ_n log p(y_n | x_n) + ½ [log|I + ΨᵀΨ/δ| − tr(ΨᵀΨ/δ (I + ΨᵀΨ/δ)⁻¹)]

by Adam on minibatches, p being the predictive probability by the probit link: the α-divergence with α = 1, as in the
paper. Posterior and objective are those of laplace-torch's `VaLLA` (the tests compare both). Only the algebra differs,
M×M matrices in the place of a QR decomposition of P rows: a step costs a fraction, so that a budget buys more of them.
"""

from __future__ import annotations

import itertools
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils.data import DataLoader

from ntk_iterncgp.experiments.progress import Progress
from ntk_iterncgp.jacobian.autograd import Jacobian
from ntk_iterncgp.jacobian.rows import Rows

LEARNING_RATE = 0.01


@final
class VariationalPosterior:
    """The variational parameters: inducing inputs, packed L, and log δ."""

    def __init__(self, jacobian: Jacobian, inputs: Tensor, outputs: Tensor) -> None:  # (M, …), (M,)
        self.jacobian = jacobian
        self.inputs = inputs.detach().clone().requires_grad_()
        num_outputs = jacobian.forward(inputs[:1]).shape[1]
        self.one_hot = nn.functional.one_hot(outputs, num_outputs).to(jacobian.dtype)
        self.lower = torch.eye(len(inputs), dtype=torch.float64, device=jacobian.device, requires_grad=True)
        self.log_precision = torch.zeros((), dtype=torch.float64, device=jacobian.device, requires_grad=True)

    def images(self) -> Tensor:  # Ψ (P, M)
        """Differentiable in the inducing inputs and in L."""

        def feature(z: Tensor, output: Tensor) -> Tensor:  # (P,)
            gradient = grad(lambda params: self.jacobian.forward(z[None], params)[0] @ output)(self.jacobian.params)
            return torch.cat([gradient[name].flatten() for name in self.jacobian.params])

        features = vmap(feature)(self.inputs, self.one_hot)  # (M, P)
        return features.T @ self.lower.tril().to(features.dtype)

    def objective(self, rows: Rows, labels: Tensor, num_data: int) -> Tensor:
        """The function to minimise, estimated from some of the data."""
        images, precision = self.images(), self.log_precision.exp()
        gram = images.double().T @ images.double() / precision
        factor = torch.linalg.cholesky(torch.eye(len(gram), dtype=gram.dtype, device=gram.device) + gram)
        cross = rows.times(images) / precision  # (b, C, M)
        half = torch.linalg.solve_triangular(factor, cross.flatten(0, 1).T, upper=False)
        unit = rows.covariance(torch.ones((), device=images.device))
        prior = unit.diagonal(dim1=1, dim2=2).double() / precision
        variance = (prior - half.square().sum(0).reshape(prior.shape)).clamp_min(0)
        scaled = rows.outputs.double() / (1 + torch.pi / 8 * variance).sqrt()
        loss = nn.functional.cross_entropy(scaled, labels)
        divergence = factor.diagonal().log().sum() - 0.5 * torch.cholesky_solve(gram, factor).trace()
        objective: Tensor = num_data * loss + divergence
        return objective


def fit_valla(
    jacobian: Jacobian,
    loader: DataLoader[Any],
    *,
    num_inducing: int,
    num_steps: int,
    batch_size: int,
    seed: int,
    progress: Progress | None = None,
) -> VariationalPosterior:
    """Inducing inputs start as random training data, each with its own class."""
    generator, data = torch.Generator().manual_seed(seed), loader.dataset
    num_data = len(data)  # type: ignore[arg-type]
    chosen = torch.randperm(num_data, generator=generator)[:num_inducing].tolist()
    collate = loader.collate_fn
    inputs, outputs = (part.to(jacobian.device) for part in collate([data[i] for i in chosen]))
    posterior = VariationalPosterior(jacobian, inputs, outputs)
    optimizer = torch.optim.Adam([posterior.lower, posterior.log_precision, posterior.inputs], lr=LEARNING_RATE)
    batches = DataLoader(data, min(batch_size, num_data), shuffle=True, generator=generator, collate_fn=collate)
    endless = itertools.chain.from_iterable(itertools.repeat(batches))
    progress = progress or Progress()
    progress.start(num_steps, "minibatches")
    for x, y in itertools.islice(endless, num_steps):
        with torch.no_grad():
            rows = jacobian.rows(x.to(jacobian.device), len(x))
        optimizer.zero_grad()
        with torch.enable_grad():
            posterior.objective(rows, y.to(jacobian.device), num_data).backward()
        optimizer.step()
        progress.advance()
    return posterior

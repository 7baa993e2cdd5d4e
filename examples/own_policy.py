"""A policy of one's own: where should the next products go?

    .venv/bin/python examples/own_policy.py

A policy is any callable from the state of the solver to a block of columns (n, k), n = N·C, class index fastest. It
need not orthogonalise, normalise or remember: the solver does, and drops what is not new. Whatever a policy proposes,
the variance stays at or above that of the exact posterior; a good policy gets close to it with few products.
"""

import torch
from sklearn.datasets import make_moons
from torch import Tensor

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.solver import State


def worst_explained(state: State) -> Tensor:  # (n, 1)
    """The datum whose residual is largest: a subset of the data, chosen greedily."""
    chosen = state.curvature_residual.abs().argmax()
    action = torch.zeros(state.problem.num_rows, 1, dtype=torch.float64)
    action[chosen] = 1.0
    return action


def split_residual(state: State) -> Tensor:  # (n, 3)
    """The residual, split by how saturated the points are: three actions with a third of the data each."""
    uncertain = state.problem.curvature(state.latent, torch.ones(state.problem.num_rows, dtype=torch.float64))
    action = torch.zeros(state.problem.num_rows, 3, dtype=torch.float64)
    for column, rows in enumerate(uncertain.argsort().tensor_split(3)):
        action[rows, column] = state.curvature_residual[rows]
    return action


def main() -> None:
    inputs, labels = make_moons(600, noise=0.25, random_state=0)
    X, y = torch.as_tensor(inputs), torch.as_tensor(labels)
    policies = {"unit": "unit", "worst_explained": worst_explained, "split_residual": split_residual}
    policies["curvature_residual"] = "curvature_residual"
    print("policy               products   information   mean variance")
    for name, policy in policies.items():
        kernel = kernels.Matern52(lengthscale=0.7, outputscale=9.0)
        settings = {"max_products": 30, "products_per_step": 6, "newton_tol": 1e-4}
        gp = NonConjugateGP(kernel, likelihoods.Bernoulli(), policy=policy, **settings).fit(X, y)
        report, variance = gp.report_, gp.latent(X)[1].mean()
        captured = f"≥ {100 * report.information_captured:.1f} %"
        print(f"{name:20} {report.num_products:8}   {captured:>11}   {float(variance):13.3f}")


if __name__ == "__main__":
    main()

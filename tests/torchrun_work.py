"""What torchrun starts for test_parallel.py: a command with a kernel, then both front doors in float64, for which
there is no command. Each process writes what it got."""

import sys
from pathlib import Path

import numpy as np

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.experiments import cli
from ntk_iterncgp.runtime import parallel
from tests.parallel_work import CLASSES, DataLoader, TensorDataset, inputs_and_labels, laplace, of_network, plain


def results() -> dict[str, np.ndarray]:
    """A network by clusters, refined, and by products; a kernel with both kinds of actions."""
    X, y = inputs_and_labels()
    loader, found = DataLoader(TensorDataset(X, y), 4), {}
    for policy, settings in (("clusters", {"num_actions": 7}), ("random_subspace", {"num_actions": 4})):
        la = laplace(policy=policy, **settings)
        la.fit(loader)
        la.refine(loader, epochs=1)
        found |= {f"{policy} {name}": value for name, value in of_network(la).items()}
    for actions in ("joint", "kronecker"):
        kernel = kernels.Matern32(lengthscale=0.4, outputscale=4.0)
        gp = NonConjugateGP(
            kernel, likelihoods.Softmax(CLASSES), max_products=4, actions=actions, policy="curvature_residual"
        ).fit(X, y)
        mean, covariance = gp.latent(X[:5] + 0.01)
        of_gp = {"mean": mean, "covariance": covariance, "gram": gp.posterior_.state.gram}
        found |= {f"{actions} {name}": value for name, value in of_gp.items()}
    return dict(plain(found))


if __name__ == "__main__":
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    with parallel.joined("cpu"):
        code = cli.main(command)
        np.savez(folder / f"{parallel.rank()}.npz", **results())
    sys.exit(code)

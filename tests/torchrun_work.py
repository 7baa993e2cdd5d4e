"""What torchrun starts for test_parallel.py: the commands, then both front doors in float64, for which there is none.

Each process writes what it got.
"""

import sys
from pathlib import Path

import numpy as np

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.experiments import cli
from ntk_iterncgp.runtime import parallel
from tests.parallel_work import CLASSES, DataLoader, TensorDataset, inputs_and_labels, laplace, of_network, plain

ROOT = Path(__file__).resolve().parents[1]
FIT = ("fit", str(ROOT / "configs" / "digits.yaml"), "--set", "model.train_epochs=3", "--set", "fit.num_actions=20")
FIT += ("--set", "tuning.protocol=none")
KERNEL = ("kernel.name=Matern32", "kernel.max_products=4", "data.train_limit=100", "data.test_limit=20")
COMMANDS = {"network": FIT, "kernel": (*FIT[:2], *(text for setting in KERNEL for text in ("--set", setting)))}


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
    folder = Path(sys.argv[1])
    with parallel.joined("cpu"):
        codes = [cli.main([*c, "--output-dir", str(folder / "several" / name)]) for name, c in COMMANDS.items()]
        np.savez(folder / f"{parallel.rank()}.npz", **results())
    sys.exit(max(codes))

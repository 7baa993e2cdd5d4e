"""Where should a costly function be evaluated next? At the pair of points that promises most, by the joint posterior.

    .venv/bin/python examples/bayesian_optimisation.py

Branin's function on the unit square, five values to begin with, two more in each of twenty rounds: BoTorch's
qLogExpectedImprovement on a Gaussian process that is updated with the new values, not fitted again, and for comparison
points at random. The least value that there is is 0.398. Needs BoTorch, the extra `botorch`."""

import sys
import warnings

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from torch import Tensor

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.botorch import GPModel

START, PAIR = 5, 2
UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
function = Branin(dtype=torch.float64)


def value(X: Tensor) -> Tensor:  # (n, 2) in the unit square -> (n,), in units in which it varies by about one
    low, high = function.bounds
    return -torch.log(function(low + (high - low) * X))


def least_so_far(y: Tensor, rounds: int) -> list[float]:
    return [float(torch.exp(-y[: START + PAIR * i].max())) for i in range(rounds + 1)]


def by_posterior(X: Tensor, rounds: int) -> list[float]:
    y = value(X)
    mean, kernel = float(y.mean()), kernels.Matern52(lengthscale=0.3, outputscale=4.0)
    gp = NonConjugateGP(kernel, likelihoods.Gaussian(1e-4)).fit(X, y - mean)
    for _ in range(rounds):
        acquisition = qLogExpectedImprovement(GPModel(gp), best_f=y.max() - mean)
        pair, _ = optimize_acqf(acquisition, UNIT, q=PAIR, num_restarts=4, raw_samples=64)
        gp.update(pair, value(pair) - mean)
        y = torch.cat([y, value(pair)])
    return least_so_far(y, rounds)


def main() -> None:
    rounds, seeds = (2, 1) if "--toy" in sys.argv else (20, 5)
    warnings.filterwarnings("ignore", category=Warning, module="botorch|linear_operator|ntk_iterncgp")
    found: dict[str, list[list[float]]] = {"by posterior": [], "at random": []}
    for seed in range(seeds):
        torch.manual_seed(seed)
        X = torch.rand(START + PAIR * rounds, 2, dtype=torch.float64)
        found["by posterior"].append(by_posterior(X[:START], rounds))
        found["at random"].append(least_so_far(value(X), rounds))
    shown = [i for i in (0, 1, 2, 5, 10, 20) if i <= rounds]
    print(f"{'rounds':16}" + "".join(f"{i:>9}" for i in shown))
    for way, runs in found.items():
        print(f"{way:16}" + "".join(f"{float(torch.tensor(runs)[:, i].mean()):9.3f}" for i in shown))


if __name__ == "__main__":
    main()

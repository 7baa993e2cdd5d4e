"""Counts along a line: rates with credible intervals, compared with the truth they were drawn from.

    .venv/bin/python examples/poisson_counts.py

The latent function is the logarithm of the rate, so intervals are never negative. Where there are no data they open up.
"""

import torch

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods


def true_rate(x: torch.Tensor) -> torch.Tensor:
    return 10 * torch.exp(torch.sin(2 * x) + 0.3 * x)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    X = 6 * torch.rand(500, 1, generator=generator, dtype=torch.float64)
    X = X[(X[:, 0] < 3.0) | (X[:, 0] > 4.0)]  # nothing was counted between 3 and 4
    counts = torch.poisson(true_rate(X[:, 0]), generator=generator)

    kernel = kernels.Matern52(lengthscale=1.0)
    gp = NonConjugateGP(kernel, likelihoods.Poisson()).optimize(X, counts)  # its prior mean of the log-rate, too
    print(f"{gp.optimization_}\n{gp.kernels[0]}, mean {float(gp.mean):.2f}\n{gp.report_}\n")

    x = torch.linspace(0, 6, 13, dtype=torch.float64)[:, None]
    rate = gp.predict(x)[:, 0]
    lower, upper = (end[:, 0] for end in gp.credible_interval(x, level=0.95))
    print("     x    truth     rate   95 % interval")
    for row in zip(x[:, 0], true_rate(x[:, 0]), rate, lower, upper, strict=True):
        print("{:6.1f} {:8.1f} {:8.1f}   {:5.1f} … {:5.1f}".format(*map(float, row)))

    grid = torch.linspace(0, 6, 601, dtype=torch.float64)[:, None]
    lower, upper = gp.credible_interval(grid, level=0.95)
    truth = true_rate(grid)
    inside = ((lower <= truth) & (truth <= upper)).double().mean()
    print(f"\nThe true rate is inside its 95 % interval at {100 * inside:.0f} % of 601 places.")


if __name__ == "__main__":
    main()

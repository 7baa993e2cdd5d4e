"""Three kinds of wine, thirteen measurements: a Gaussian process with one Matérn kernel for all classes.

    .venv/bin/python examples/standalone_matern.py

Shows a fit (so few data are computed exactly), what the report says, choosing a lengthscale by the evidence, the same
posterior when some data come later, and what happens far from the data: the probabilities go back to one third each.
"""

import torch
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from ntk_iterncgp import NonConjugateGP, kernels, likelihoods
from ntk_iterncgp.experiments.evaluation import classification_metrics


def fit(lengthscale: float, X: torch.Tensor, y: torch.Tensor) -> NonConjugateGP:
    kernel = kernels.Matern32(lengthscale=lengthscale, outputscale=16.0)
    return NonConjugateGP(kernel, likelihoods.Softmax(3)).fit(X, y)


def main() -> None:
    inputs, labels = load_wine(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(inputs, labels, random_state=0, stratify=labels)
    scaler = StandardScaler().fit(train)
    X, X_test = torch.as_tensor(scaler.transform(train)), torch.as_tensor(scaler.transform(test))
    y, y_test = torch.as_tensor(train_labels), torch.as_tensor(test_labels)

    candidates = {lengthscale: fit(lengthscale, X, y) for lengthscale in (2.0, 4.0, 8.0, 16.0)}
    for lengthscale, candidate in candidates.items():
        print(f"lengthscale {lengthscale:>4}: log evidence ≥ {candidate.elbo():.1f}")
    best = max(candidates, key=lambda lengthscale: candidates[lengthscale].elbo())  # training data alone
    gp = candidates[best]

    print(f"\nlengthscale {best}: {gp.report_}\n")
    scores = classification_metrics(gp.predict(X_test, link="quadrature"), y_test)
    print(f"{len(y_test)} test wines: accuracy {scores.accuracy:.3f}, NLL {scores.nll:.3f}, ECE {scores.ece:.3f}")

    later = fit(best, X[:100], y[:100]).update(X[100:], y[100:])
    difference = float((later.predict(X) - gp.predict(X)).abs().max())
    print(f"with {len(y) - 100} of the data later: the same to {difference:.0e}")

    far_away = X_test[:1] + 100.0
    print("far from the data:", [f"{p:.2f}" for p in gp.predict(far_away, link="quadrature")[0].tolist()])


if __name__ == "__main__":
    main()

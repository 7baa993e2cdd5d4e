"""Gaussian processes side by side, each with its own way of choosing hyperparameters; and counts beside a Poisson GLM.

    ntk-iterncgp bench gp_peers [--quick] [--json FILE] [--docs docs/gp-peers.md]
    python -m benchmarks.gp_peers --sizes 1000 10000 100000 --only iterncgp svgp

The whole takes less than 20 minutes on two quiet cores (OMP_NUM_THREADS=2), and stops starting anything after
`--minutes`: then lines are missing, and the page says which.

Regression and classification: IterNCGP (Matérn-5/2, hyperparameters by the evidence) beside scikit-learn's GPR and GPC,
gpytorch's exact GP and its variational GP with inducing points (SVGP), all with the same family of kernel and the same
standardised inputs. scikit-learn's bundled sets (of the digits some), and synthetic sets of the sizes asked for. Exact
methods are left out where N is above their limit. SVGP has a fixed time, from 20 to 150 seconds; the NLL is that at its
end, and its seconds are those until the NLL first was that of IterNCGP, if ever. Computing the test NLL is not part of
its time.

Counts: designs on which a log-linear GLM is wrong (waves, an interaction, a threshold, saturation, a ring), and one
on which it is right. `NonConjugateGP` after `optimize` beside scikit-learn's PoissonRegressor, its penalty chosen by
the same data.

NLL       mean negative log predictive density of test targets, in nats
score     accuracy, or RMSE in units of the standard deviation of the test targets
seconds   of fit and choice of hyperparameters, in the same process
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process import kernels as their_kernels
from sklearn.linear_model import PoissonRegressor
from sklearn.model_selection import GridSearchCV, train_test_split
from torch import Tensor

from ntk_iterncgp.likelihoods import Poisson
from ntk_iterncgp.likelihoods.quadrature import line_points
from ntk_iterncgp.sklearn import GPClassifier, GPPoissonRegressor, GPRegressor

METHODS = ("iterncgp", "sklearn", "exact", "svgp")
LIMITS = {"sklearn": 2000, "exact": 3000}  # data, beyond which O(N³) takes minutes
MAX_DIGITS = 500  # for ten classes O(N³) takes minutes earlier
MAX_TEST = 5000
MANY_DATA, FEW_PRODUCTS = 50_000, 25  # from which on a product takes seconds, and a fit makes so few
SAME_NLL = 0.005
SVGP_SECONDS = {0: 20.0, 5000: 60.0, MANY_DATA: 150.0}  # from so many data on


@dataclass(frozen=True)
class Problem:
    """Standardised inputs, and targets: class numbers, or standardised values."""

    name: str
    kind: str  # "classes" or "values"
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def num_classes(self) -> int:
        return int(torch.cat([self.train[1], self.test[1]]).max()) + 1


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    problem: str
    num_data: int
    method: str
    nll: float
    score: float
    seconds: float
    note: str = ""
    kind: str = ""


# --- data ------------------------------------------------------------------------------------------------------------


def made(
    name: str, kind: str, X: np.ndarray, y: np.ndarray, *, limit: int | None = None, num_test: int | None = None
) -> Problem:
    """Three quarters to fit to and a quarter to test on, or so many."""
    stratify = y if kind == "classes" else None
    parts = train_test_split(X, y, test_size=num_test or 0.25, random_state=0, stratify=stratify)
    x, x_test, y, y_test = (part if limit is None else part[:limit] for part in parts)
    centre, scale = x.mean(0), np.where(x.std(0) > 0, x.std(0), 1.0)
    inputs = [torch.tensor((part - centre) / scale) for part in (x, x_test)]
    if kind == "classes":
        targets = [torch.tensor(part).long() for part in (y, y_test)]
    else:
        targets = [torch.tensor((part - y.mean()) / y.std()) for part in (y, y_test)]
    return Problem(name, kind, (inputs[0], targets[0]), (inputs[1], targets[1]))


def bundled(limit: int | None) -> list[Problem]:
    """scikit-learn's sets."""
    classes = {"iris": datasets.load_iris, "wine": datasets.load_wine, "breast cancer": datasets.load_breast_cancer}
    found = [made(name, "classes", *load(return_X_y=True), limit=limit) for name, load in classes.items()]
    digits = datasets.load_digits(return_X_y=True)
    found.append(made("digits", "classes", *digits, limit=MAX_DIGITS if limit is None else min(limit, MAX_DIGITS)))
    found.append(made("diabetes", "values", *datasets.load_diabetes(return_X_y=True), limit=limit))
    return found


def synthetic(size: int) -> list[Problem]:
    """Moons with noise, and a function of five inputs of which three matter."""
    test = min(size // 3, MAX_TEST)
    rng, total = np.random.default_rng(0), size + test
    X, y = datasets.make_moons(total, noise=0.3, random_state=0)
    Z = rng.uniform(-1, 1, (total, 5))
    f = np.sin(4 * Z[:, 0]) * np.cos(3 * Z[:, 1]) + Z[:, 2] ** 2 + 0.1 * rng.normal(size=total)
    return [made("moons", "classes", X, y, num_test=test), made("waves", "values", Z, f, num_test=test)]


# --- methods ---------------------------------------------------------------------------------------------------------


def of_probabilities(p: np.ndarray, y: Tensor) -> tuple[float, float]:
    """NLL and accuracy."""
    p = np.clip(p, 1e-12, 1)
    return float(-np.log(p[np.arange(len(p)), y]).mean()), float((p.argmax(1) == y.numpy()).mean())


def of_values(mean: np.ndarray, std: np.ndarray, y: Tensor) -> tuple[float, float]:
    """NLL and RMSE."""
    z = (y.numpy() - mean) / std
    nll = float((0.5 * z**2 + np.log(std) + 0.5 * math.log(2 * math.pi)).mean())
    return nll, float(np.sqrt(((y.numpy() - mean) ** 2).mean()) / y.numpy().std())


Fit = Callable[[Problem], Callable[[], tuple[float, float]]]  # fits; what it returns predicts and scores


def iterncgp(problem: Problem) -> Callable[[], tuple[float, float]]:
    X, y = (part.numpy() for part in problem.train)
    x, target = problem.test
    max_products = FEW_PRODUCTS if len(X) >= MANY_DATA else 100
    if problem.kind == "classes":
        classifier = GPClassifier(max_products=max_products).fit(X, y)
        return lambda: of_probabilities(classifier.predict_proba(x.numpy()), target)
    regressor = GPRegressor(max_products=max_products).fit(X, y)
    return lambda: of_values(*regressor.predict(x.numpy(), return_std=True), target)


def sklearns(problem: Problem) -> Callable[[], tuple[float, float]]:
    X, y = (part.numpy() for part in problem.train)
    x, target = problem.test
    kernel = their_kernels.ConstantKernel(1.0) * their_kernels.Matern(math.sqrt(X.shape[1]), nu=2.5)
    if problem.kind == "classes":
        classifier = GaussianProcessClassifier(kernel).fit(X, y)
        return lambda: of_probabilities(classifier.predict_proba(x.numpy()), target)
    regressor = GaussianProcessRegressor(kernel + their_kernels.WhiteKernel(0.1)).fit(X, y)
    return lambda: of_values(*regressor.predict(x.numpy(), return_std=True), target)


def exact_gpytorch(problem: Problem) -> Callable[[], tuple[float, float]]:
    """gpytorch's exact GP: 100 steps of Adam on the marginal likelihood. Regression alone."""
    import gpytorch

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, X: Tensor, y: Tensor, likelihood: Any) -> None:
            super().__init__(X, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            kernel = gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=X.shape[1])
            self.covar_module = gpytorch.kernels.ScaleKernel(kernel)
            self.covar_module.base_kernel.lengthscale = math.sqrt(X.shape[1])

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    X, y = problem.train
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Exact(X, y, likelihood).double()
    bound = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    for _ in range(100):
        optimizer.zero_grad()
        loss = -bound(model(X), y)
        loss.backward()
        optimizer.step()
    model.eval()
    likelihood.eval()

    def score() -> tuple[float, float]:
        with torch.no_grad():
            found = likelihood(model(problem.test[0]))
        return of_values(found.mean.numpy(), found.variance.sqrt().numpy(), problem.test[1])

    return score


def variational_gp(problem: Problem, C: int, inducing: int) -> tuple[Any, Any]:
    """gpytorch's model and likelihood, for C outputs."""
    import gpytorch
    from gpytorch import variational

    X = problem.train[0]
    shape = torch.Size([C]) if C > 1 else torch.Size([])
    points = X[torch.randperm(len(X))[:inducing]]

    class Variational(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            q = variational.CholeskyVariationalDistribution(len(points), batch_shape=shape)
            strategy: Any = variational.VariationalStrategy(self, points.expand(*shape, -1, -1), q)
            if C > 1:
                strategy = variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=C)
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=shape)
            kernel = gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=X.shape[1])
            self.covar_module = gpytorch.kernels.ScaleKernel(kernel)
            self.covar_module.base_kernel.lengthscale = math.sqrt(X.shape[1])

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Variational().double()
    likelihood: Any = gpytorch.likelihoods.GaussianLikelihood()
    if problem.kind == "classes":
        several = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=C, mixing_weights=False)
        likelihood = several if C > 1 else gpytorch.likelihoods.BernoulliLikelihood()
    return model, likelihood.double()


def svgp(
    problem: Problem, target_nll: float, max_seconds: float, *, inducing: int = 500, batch: int = 1024, every: int = 50
) -> tuple[float, float, float, str]:
    """gpytorch's variational GP by Adam on minibatches, for so many seconds.

    Returns:
        NLL and score at the end, the seconds until its NLL was that of IterNCGP or all of them, and a note.
    """
    import gpytorch

    torch.manual_seed(0)
    X, y = problem.train
    C = problem.num_classes if problem.kind == "classes" and problem.num_classes > 2 else 1
    model, likelihood = variational_gp(problem, C, inducing)
    targets = y if C > 1 else y.double()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(X))
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)

    def score() -> tuple[float, float]:
        x, target = problem.test
        model.eval()
        likelihood.eval()
        with torch.no_grad(), gpytorch.settings.num_likelihood_samples(256):
            found = likelihood(model(x))
        model.train()
        likelihood.train()
        if problem.kind == "values":
            return of_values(found.mean.numpy(), found.variance.sqrt().numpy(), target)
        if C > 1:
            return of_probabilities(found.probs.mean(0).numpy(), target)
        p = found.probs.numpy()
        return of_probabilities(np.stack([1 - p, p], 1), target)

    spent, reached = 0.0, math.nan
    while spent < max_seconds:
        started = time.perf_counter()
        for _ in range(every):
            index = torch.randint(len(X), (min(batch, len(X)),))
            optimizer.zero_grad()
            loss = -bound(model(X[index]), targets[index])
            loss.backward()
            optimizer.step()
        spent += time.perf_counter() - started
        found = score()
        if math.isnan(reached) and found[0] <= target_nll + SAME_NLL:
            reached = spent
    return (*found, spent, "not reached") if math.isnan(reached) else (*found, reached, "to that of IterNCGP")


FITS: dict[str, Fit] = {"iterncgp": iterncgp, "sklearn": sklearns, "exact": exact_gpytorch}


def compare(problem: Problem, methods: list[str], until: float = math.inf, *, quick: bool = False) -> list[Row]:
    """All methods on one problem; a method that fails, or that is too late, is a line that says so."""
    rows: list[Row] = []
    num_data = len(problem.train[1])
    svgp_seconds = 2.0 if quick else max(x for n, x in SVGP_SECONDS.items() if n <= num_data)
    for method in methods:
        too_large = num_data > LIMITS.get(method, num_data)
        if too_large or (method == "exact" and problem.kind == "classes"):
            continue
        started = time.perf_counter()
        if started > until:
            rows.append(Row(problem.name, num_data, method, math.nan, math.nan, math.nan, "left out", problem.kind))
            continue
        try:
            if method == "svgp":
                goal = next((row.nll for row in rows if row.method == "iterncgp"), -math.inf)
                end = svgp(problem, goal, min(svgp_seconds, until - started))
                rows.append(Row(problem.name, num_data, method, *end, problem.kind))
            else:
                score = FITS[method](problem)
                seconds = time.perf_counter() - started
                rows.append(Row(problem.name, num_data, method, *score(), seconds, kind=problem.kind))
        except (RuntimeError, ValueError, ArithmeticError) as error:
            note = f"{type(error).__name__}: {error!s:.60}"
            seconds = time.perf_counter() - started
            rows.append(Row(problem.name, num_data, method, math.nan, math.nan, seconds, note, problem.kind))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


# --- counts ----------------------------------------------------------------------------------------------------------

DESIGNS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], bool]] = {  # the log-rate, and whether a GLM is right
    "log-linear": (lambda X: 0.8 + 0.6 * X[:, 0] - 0.4 * X[:, 1], True),
    "waves": (lambda X: 1 + np.sin(3 * X[:, 0]), False),
    "interaction": (lambda X: 0.8 + 1.2 * X[:, 0] * X[:, 1], False),
    "threshold": (lambda X: np.where(X[:, 0] + X[:, 1] > 0, 2.0, 0.0), False),
    "saturation": (lambda X: 2 * np.tanh(3 * np.abs(X[:, 0])) - 0.5, False),
    "ring": (lambda X: 2 - 4 * (np.hypot(X[:, 0], X[:, 1]) - 0.8) ** 2, False),
}


def count_nll(mean: Tensor, variance: Tensor, counts: Tensor) -> float:
    """−log E[p(y | f)] of a Poisson with a Gaussian log-rate (b,), by quadrature on the line."""
    points, weights = line_points(mean, variance.sqrt())
    latent = mean[:, None] + variance.sqrt()[:, None] * points
    repeated = counts[:, None].expand_as(latent)
    log_p = Poisson().log_prob(latent.reshape(-1, 1), repeated.reshape(-1)).reshape(latent.shape)
    return float(-torch.logsumexp(log_p + weights.log(), 1).mean())


def compare_counts(name: str, size: int, seed: int) -> list[Row]:
    """`NonConjugateGP` and a Poisson GLM on one design."""
    rng = np.random.default_rng(seed)
    X, x = rng.uniform(-1, 1, (size, 2)), rng.uniform(-1, 1, (4000, 2))
    log_rate = DESIGNS[name][0]
    y, target = rng.poisson(np.exp(log_rate(X))), torch.tensor(rng.poisson(np.exp(log_rate(x)))).double()

    def row(method: str, mean: Tensor, variance: Tensor, seconds: float) -> Row:
        off = (mean + variance / 2).exp().numpy() / np.exp(log_rate(x)) - 1
        return Row(name, size, method, count_nll(mean, variance, target), float(np.sqrt((off**2).mean())), seconds)

    started = time.perf_counter()
    gp = GPPoissonRegressor().fit(X, y).gp_
    seconds = time.perf_counter() - started
    mean, covariance = gp.latent(torch.tensor(x))
    rows = [row("iterncgp", mean[:, 0], covariance[:, 0, 0], seconds)]
    started = time.perf_counter()
    glm = GridSearchCV(PoissonRegressor(max_iter=500), {"alpha": [0.0, 1e-3, 1e-2, 0.1]}).fit(X, y)
    seconds = time.perf_counter() - started
    found = torch.tensor(np.log(glm.predict(x)))
    rows.append(row("GLM", found, torch.full_like(found, 1e-12), seconds))
    constant = torch.full_like(found, math.log(max(y.mean(), 1e-6)))
    return [*rows, row("mean count", constant, torch.full_like(found, 1e-12), 0.0)]


# --- tables ----------------------------------------------------------------------------------------------------------


def printed(title: str, rows: list[Row], score: str) -> None:
    """A table of Markdown."""
    print(f"\n{title}\n\n| data | N | method | NLL | {score} | seconds |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.problem} | {row.num_data} | {row.method} | {row.nll:.4f} | {row.score:.4f} | {row.seconds:.2f} "
            f"{row.note}|",
            flush=True,
        )


PAGE = """# Gaussian processes beside other libraries

One run of `python -m benchmarks.gp_peers{arguments}`, which writes this page. All have Matérn-5/2 kernels on the same
standardised inputs, and choose their hyperparameters in their own way: `iterncgp` by the exact Laplace evidence of all
data where that is affordable, else of 1000 of them, and from there by a lower bound up to 5000 data; `sklearn` by its
GPC and GPR (up to {sklearn} data); `exact` is gpytorch's exact GP by 100 steps of Adam (up to {exact} data); `svgp` is
gpytorch's variational GP with 500 inducing points: its NLL and score are those after a fixed time (20 to 150 seconds,
by size), its seconds those until its NLL first was within 0.005 of that of IterNCGP, or all of them ("not reached"). A
quarter of the data, up to 5000, is for testing. `seconds` are those of the fit and of the choice of hyperparameters,
`time` is their ratio to IterNCGP's; {threads} thread(s), and times scatter by some tens of per cent. From 50,000 data
on IterNCGP makes 25 products.

{peers}
## Counts

Test NLL of `GPPoissonRegressor()` beside scikit-learn's PoissonRegressor, its penalty by cross-validation, on {counts}
counts with two inputs; averages over {seeds} draws. The first design is log-linear: there the GLM is right.

{table}"""


def page(rows: list[Row], counts: list[Row], settings: argparse.Namespace, arguments: str) -> str:
    """The document."""
    blocks = []
    for kind, score in (("classes", "accuracy"), ("values", "RMSE")):
        some = [row for row in rows if row.kind == kind]
        own = {(row.problem, row.num_data): row for row in some if row.method == "iterncgp"}
        lines = [f"| data | N | method | NLL | {score} | seconds | time |", "|---|---:|---|---:|---:|---:|---:|"]
        for row in some:
            base = own.get((row.problem, row.num_data))
            ratio = "" if base is None else f"{row.seconds / base.seconds:.2g} ×"
            failed = math.isnan(row.nll)
            numbers = (
                f"{row.note} | | | |" if failed else f"{row.nll:.4f} | {row.score:.4f} | {row.seconds:.3g} | {ratio}"
            )
            end = f"{numbers} ({row.note}) |" if row.note and not failed else numbers if failed else f"{numbers} |"
            lines.append(f"| {row.problem} | {row.num_data:,} | {row.method} | {end}")
        blocks.append("\n".join(lines) + "\n")
    lines = ["| design | IterNCGP | GLM | mean count |", "|---|---:|---:|---:|"]
    for name in DESIGNS:
        means = {row.method: [r.nll for r in counts if (r.problem, r.method) == (name, row.method)] for row in counts}
        lines.append("| " + " | ".join([name, *(f"{np.mean(nll):.4f}" for nll in means.values())]) + " |")
    numbers = {"counts": settings.counts, "seeds": settings.seeds, "threads": torch.get_num_threads()} | LIMITS
    return PAGE.format(arguments=arguments, peers="\n".join(blocks), table="\n".join(lines) + "\n", **numbers)


def main(argv: list[str] | None = None) -> None:
    """Run the comparison and print its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small problems: does it run?")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 10_000, 100_000], help="of synthetic sets")
    parser.add_argument("--counts", type=int, default=500, help="data of each design with counts")
    parser.add_argument("--seeds", type=int, default=3, help="draws of each design with counts")
    parser.add_argument("--minutes", type=float, default=20.0, help="nothing is started later, but counts")
    parser.add_argument("--limit", type=int, default=None, help="data of a bundled set at most")
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--json", metavar="FILE", help="write the results here, too")
    parser.add_argument("--docs", metavar="FILE", help="write a page of Markdown")
    settings = parser.parse_args(argv)
    if settings.quick:
        settings.sizes, settings.counts, settings.seeds, settings.limit = [60], 60, 1, 60
    until = time.perf_counter() + 60 * settings.minutes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        counts = [
            row for name in DESIGNS for s in range(settings.seeds) for row in compare_counts(name, settings.counts, s)
        ]
        printed("Counts", counts, "error of the rate")
        problems = itertools.chain(bundled(settings.limit), *(synthetic(size) for size in sorted(settings.sizes)))
        arguments = "".join(f" {word}" for word in (sys.argv[1:] if argv is None else argv))
        rows: list[Row] = []
        for problem in problems:
            rows += compare(problem, settings.only, until, quick=settings.quick)
            if settings.docs:  # each time, so that what was measured is not lost
                Path(settings.docs).write_text(page(rows, counts, settings, arguments), encoding="utf-8")
        printed("Gaussian processes side by side", rows, "accuracy or RMSE")
    if settings.json:
        written = {"peers": [asdict(row) for row in rows], "counts": [asdict(row) for row in counts]}
        Path(settings.json).write_text(json.dumps(written, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()

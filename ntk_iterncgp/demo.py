"""`ntk-iterncgp demo`: GP classification of scikit-learn's digits with a Matérn kernel, on all of the training data.

Five ways of spending products with the kernel matrix on one problem, each with the Newton steps that suit it:

    subset of data    ten digits per product (ten columns of k(X, X) cost what K costs on one n-vector), for as many
                      products as ours took
    paper's listing   conjugate gradients, undamped; 50 products per step, since with 20 it does worse and with fewer
                      it diverges
    ours, joint       one action per product, 20 products per step
    ours              the default: Kronecker actions, up to 81 per product
    ours, refined     the same, after `refine`
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from tqdm.auto import tqdm

from ntk_iterncgp import kernels
from ntk_iterncgp.config import ConfigError, RunConfig, prepare_output_dir
from ntk_iterncgp.evaluation.figures import demo_figure
from ntk_iterncgp.evaluation.metrics import ClassificationMetrics, classification_metrics
from ntk_iterncgp.evaluation.report import Row, table, write_atomically, write_json
from ntk_iterncgp.gp import NonConjugateGP
from ntk_iterncgp.likelihoods import Softmax
from ntk_iterncgp.posterior import Posterior
from ntk_iterncgp.predictive import expected_response
from ntk_iterncgp.solver import State, Status

LIKELIHOOD = Softmax(10)
TEST_CHUNK = 128  # test digits predicted at once


def run(config: RunConfig) -> list[Row]:
    """The whole demo: prints a table, writes `digits.png` and `results.json` into the output folder."""
    folder = prepare_output_dir(config)
    digits, started = load_data(config), time.perf_counter()
    kernel = getattr(kernels, config.kernel)(lengthscale=config.lengthscale, outputscale=config.outputscale)
    more = f", then {config.refine_products} more for ours" if config.refine_products else ""
    print(
        f"{len(digits.train_labels)} digits to learn from, {len(digits.test_labels)} to classify, {kernel}.\n"
        f"Four methods with at most {config.max_products} products each{more}; with the default settings this takes\n"
        "under a minute on two cores.",
        flush=True,
    )
    with tqdm(unit="product", leave=False, disable=None, total=3 * config.max_products) as bar:
        rows, mean_alone = compare(config, digits, kernel, bar)
    figure, results = folder / "digits.png", folder / "results.json"
    images = digits.test_inputs.unflatten(1, (8, 8))
    write_atomically(figure, lambda path: demo_figure(rows, digits.test_labels, images, path))
    sizes = {"num_train": len(digits.train_labels), "num_test": len(digits.test_labels)}
    lines = [row.as_json() for row in rows]
    write_json(results, {"config": asdict(config), **sizes, "rows": lines, "mean_alone": asdict(mean_alone)})
    print(f"\n{table(rows)}\n")
    for row in rows:
        if row.status == Status.DIVERGED:
            print(f"{row.label} diverged: {Status.DIVERGED.advice}\n")
    print(
        f"The mean alone, as if it were certain, has NLL {mean_alone.nll:.3f} and ECE {mean_alone.ece:.3f}.\n"
        "On digits as clean as these the exact Laplace posterior is cautious; what was not computed makes it more so.\n"
    )
    print(f"Figure:  {figure}\nResults: {results}\nTook {time.perf_counter() - started:.0f} s.")
    return rows


def compare(
    config: RunConfig, digits: Digits, kernel: kernels.Kernel, bar: tqdm[Any]
) -> tuple[list[Row], ClassificationMetrics]:
    """A row for each method, and what the mean of ours scores on its own."""

    def method(**settings: Any) -> Method:
        settings = {"max_products": config.max_products, "seed": config.seed} | settings
        return Method(NonConjugateGP(kernel, LIKELIHOOD, **settings), digits, config.link, bar)

    ours = method(policy=config.policy, products_per_step=config.products_per_step, max_rank=config.max_rank)
    default = ours.fit("ours")
    mean_alone = classification_metrics(LIKELIHOOD.response(ours.mean), digits.test_labels)
    refined = [ours.refine("ours, refined", config.refine_products)] if config.refine_products else []
    joint = method(policy=config.policy, actions="joint", products_per_step=20)
    paper = method(policy="residual", actions="joint", compression="eigen", damped=False, products_per_step=50)
    # Ten more digits change the mean by little, but not because it has converged: hence the small tolerance.
    subset = method(
        policy=ten_at_a_time,
        actions="kronecker",
        products_per_step=4,
        max_products=default.num_products,
        newton_tol=1e-4,
    )
    rows = [subset.fit("subset of data"), paper.fit("paper's listing"), joint.fit("ours, joint"), default, *refined]
    return rows, mean_alone


def ten_at_a_time(state: State) -> Tensor:  # (n, 1)
    """Unit vectors for the next ten data: class c of the n-vector names the datum of the c-th Kronecker column."""
    outputs, first = state.problem.prior.num_outputs, state.buffer.actions.factor.size
    last = min(first + outputs, state.problem.prior.num_data)
    block = torch.zeros(state.problem.prior.num_data, outputs, dtype=torch.float64)
    block[range(first, last), range(last - first)] = 1.0
    return block.reshape(-1, 1)


class Method:
    """A GP being fitted, and what is seen of it on the test digits after each Newton step."""

    def __init__(self, gp: NonConjugateGP, digits: Digits, link: str, bar: tqdm[Any]) -> None:
        self.gp, self.digits, self.link, self.bar = gp, digits, link, bar
        self.mean = self.probabilities = torch.empty(0)  # (b, C), after the last Newton step
        self.curve: list[tuple[int, float]] = []
        self.newton_step, self.num_products = 0, 0

    def fit(self, label: str) -> Row:
        return self._row(label, lambda: self.gp.fit(self.digits.train_inputs, self.digits.train_labels, callback=self))

    def refine(self, label: str, max_products: int) -> Row:
        """Goes on from where `fit` stopped; the costs are those of both."""
        self.curve = self.curve[-1:]
        return self._row(label, lambda: self.gp.refine(max_products, callback=self))

    def __call__(self, state: State) -> None:
        self.bar.update(state.num_products - self.num_products)
        self.num_products = state.num_products
        if state.newton_step > self.newton_step:
            self.newton_step = state.newton_step
            if self.curve and self.curve[-1][0] == state.num_products:  # a Newton step that cost no product
                self.curve.pop()
            self._predict(Posterior(state))
            nll = classification_metrics(self.probabilities, self.digits.test_labels).nll
            self.curve.append((state.num_products, nll))

    def _predict(self, posterior: Posterior) -> None:
        latent = [posterior.latent(inputs) for inputs in self.digits.test_inputs.split(TEST_CHUNK)]
        parts = [expected_response(LIKELIHOOD, mean, covariance, link=self.link) for mean, covariance in latent]
        self.mean, self.probabilities = torch.cat([mean for mean, _ in latent]), torch.cat(parts)

    def _row(self, label: str, work: Callable[[], object]) -> Row:
        self.bar.set_description(label)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=Status.INTERRUPTED.advice[:20])  # said by the exit code
            work()
        report = self.gp.report_
        if report.status == Status.INTERRUPTED:
            raise KeyboardInterrupt
        return Row(
            label=label,
            metrics=classification_metrics(self.probabilities, self.digits.test_labels),
            num_products=report.num_products,
            rank=report.rank,
            num_newton_steps=report.num_newton_steps,
            seconds=report.seconds,
            information_captured=report.information_captured,
            status=report.status,
            curve=self.curve,
            probabilities=self.probabilities,
        )


@dataclass(frozen=True, eq=False)
class Digits:
    """8×8 images as rows of numbers in [0, 1], float32."""

    train_inputs: Tensor
    test_inputs: Tensor
    train_labels: Tensor
    test_labels: Tensor


def load_data(config: RunConfig) -> Digits:
    """A stratified split of the 1797 digits that scikit-learn brings along."""
    images, labels = load_digits(return_X_y=True)
    num_train = len(labels) - config.num_test if config.num_train is None else config.num_train
    num_classes = LIKELIHOOD.num_outputs
    if min(num_train, config.num_test) < num_classes or num_train + config.num_test > len(labels):
        raise ConfigError(
            f"num_train and num_test expect at least {num_classes} each and at most {len(labels)} together, "
            f"but got {num_train} and {config.num_test}."
        )
    train_images, test_images, train_labels, test_labels = train_test_split(
        images / images.max(),
        labels,
        train_size=num_train,
        test_size=config.num_test,
        random_state=config.seed,
        stratify=labels,
    )
    return Digits(
        torch.as_tensor(train_images, dtype=torch.float32),
        torch.as_tensor(test_images, dtype=torch.float32),
        torch.as_tensor(train_labels),
        torch.as_tensor(test_labels),
    )

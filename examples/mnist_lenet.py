"""LeNet on MNIST from Python: train, fit the posterior, compare with temperature scaling and the prior alone.

    .venv/bin/python examples/mnist_lenet.py                        some thousand digits
    .venv/bin/python examples/mnist_lenet.py data.train_limit=null data.test_limit=null      all of them

The same run from the command line is `ntk-iterncgp evaluate configs/mnist_lenet.yaml`. Where MNIST is neither under
NTK_ITERNCGP_DATA nor to be had from the network, scikit-learn's digits stand in for it.
"""

import sys

from ntk_iterncgp.experiments.config import ConfigError, load
from ntk_iterncgp.experiments.runs import evaluate

LENET = ["data.name=mnist", "model.name=lenet", "data.ood=[fashion_mnist]"]
STAND_IN = ["data.name=digits", "model.name=cnn", "data.ood=[rotated]"]
SMALL = [
    "data.train_limit=2000",
    "data.test_limit=400",
    "data.ood_limit=200",
    "model.train_epochs=8",
    "fit.num_actions=10",
    "evaluate.baselines=[map, temperature, prior]",
    "output_dir=runs/example_mnist",
]


def main(overrides: list[str]) -> None:
    try:
        comparison = evaluate(load(None, [*LENET, *SMALL, *overrides]))
    except ConfigError as error:
        if "be downloadable" not in str(error):
            raise
        print(f"{error}\nGoing on with scikit-learn's digits.\n")
        comparison = evaluate(load(None, [*STAND_IN, *SMALL, *overrides]))
    iterncgp, scaled = comparison["iterncgp"], comparison["temperature"]
    print(f"\nNLL: IterNCGP {iterncgp.metrics.nll:.4f}, temperature scaling {scaled.metrics.nll:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])

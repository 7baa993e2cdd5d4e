"""`ntk-iterncgp demo`: a small network on scikit-learn's digits, beside the exact posterior it approximates.

The network has 1446 weights, few enough that the exact linearised Laplace posterior can be computed as the truth. It is
trained until it is surer than it should be. Then the posterior of all its weights is computed from all of the training
data, and compared with the truth, with temperature scaling, with the prior alone and with laplace-torch's flavours: on
test digits, on digits turned by a right angle, and on noise. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ntk_iterncgp.experiments.config import RunConfig, load

if TYPE_CHECKING:
    from ntk_iterncgp.experiments.evaluation.compare import Comparison

SETTINGS = (
    "model.train_epochs=80",
    "model.learning_rate=0.01",
    "model.weight_decay=0",
    "data.ood=[rotated, noise]",
    "data.held_out=0",  # all 1347: the folds of the test set are enough to choose on
    "evaluate.baselines=[map, temperature, prior, last_layer, kfac, sod, ella, exact]",
    "evaluate.ella_size=200",  # laplace-torch takes all their rows at once: 500 took 6 GB and a third of the time
    "output_dir=runs/demo",
)


def settings(overrides: Sequence[str] = ()) -> RunConfig:
    """Return the settings of the demo, changed by `section.key=value` texts."""
    return load(None, [*SETTINGS, *overrides])


def run(config: RunConfig) -> Comparison:
    """Prints the table and says how close ours is to the truth; writes `report.html`."""
    heading = "A small network on 8×8 digits, its posterior, and the truth beside it: under three minutes on two cores."
    print(f"{heading}\n", flush=True)  # before imports that take seconds
    from ntk_iterncgp.experiments.evaluation.compare import Comparison
    from ntk_iterncgp.experiments.runs import evaluate

    comparison = evaluate(config, command="demo", title="Digits: a small network and the exact posterior")
    assert isinstance(comparison, Comparison)
    ratio = comparison.exact_ratio
    if ratio is not None:
        print(
            f"\nAt the same prior, our variance is between {float(ratio.min()):.3f} and {float(ratio.max()):.3f} times "
            f"the exact one (median {float(ratio.median()):.3f}): what was not computed is left as variance."
        )
    return comparison

"""`ntk-iterncgp demo`: what a posterior over a network's weights is good for, in under three minutes.

    1. a curve with a gap         where a network has no data it should not be sure
    2. digits, turned and noisy   a network that is too sure of itself: calibration, and detection without labels
    3. cost                       epochs of the fit, forward passes of a prediction, beside laplace-torch's flavours
    4. new digits                 conditioned on without the old ones

The network has 1446 weights, few enough that the exact linearised Laplace posterior can be computed as the truth.
Nothing is downloaded. Five lines are what to remember; `report.html` opens with them.
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
    "data.held_out=250",  # without labels for the detector: 150 of them are ranked, enough for alarms at 1 %
    "fit.policy=clusters",  # as for a large network, to see how near it comes to the truth
    "evaluate.baselines=[map, temperature, prior, last_layer, kfac, sod, ella, exact]",
    "evaluate.ella_size=200",  # laplace-torch takes all their rows at once: 500 took 6 GB and a third of the time
    "output_dir=runs/demo",
)


def settings(overrides: Sequence[str] = ()) -> RunConfig:
    """Return the settings of the demo, changed by `section.key=value` texts."""
    return load(None, [*SETTINGS, *overrides])


def run(config: RunConfig) -> Comparison:
    """Print the table and five lines to remember, and write `report.html`, which opens with these."""
    heading = "A curve, and a small network on 8×8 digits with the truth beside it: under three minutes on two cores."
    print(f"{heading}\n", flush=True)  # before imports that take seconds
    from ntk_iterncgp.experiments.demo.acts import opening
    from ntk_iterncgp.experiments.evaluation.compare import Comparison
    from ntk_iterncgp.experiments.runs import evaluate

    title = "What a posterior is good for: a curve, and a small network on digits"
    comparison = evaluate(config, command="demo", title=title, opening=opening)
    assert isinstance(comparison, Comparison)
    return comparison

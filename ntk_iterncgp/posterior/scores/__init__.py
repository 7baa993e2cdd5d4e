"""Scores of how unfamiliar an input is, from one contrast of its outputs: a file for each.

All of them look at the likeliest class against the mean of the others, h = e_c − (1 − e_c)/(C − 1): one row hᵀJ(x) for
each input, whatever the number of classes (`base.py`). Higher scores mean less familiar.
"""

from ntk_iterncgp.posterior.scores.base import Latent, Score, against_rest, latent_of
from ntk_iterncgp.posterior.scores.energy import Energy, PosteriorEnergy
from ntk_iterncgp.posterior.scores.entropy import Entropy, PosteriorEntropy
from ntk_iterncgp.posterior.scores.evidence import Evidence
from ntk_iterncgp.posterior.scores.information import MutualInformation
from ntk_iterncgp.posterior.scores.ratio import VarianceRatio
from ntk_iterncgp.posterior.scores.variance import Variance

SCORES: dict[str, Score] = {
    score.name: score
    for score in (
        Evidence(),
        Energy(),
        VarianceRatio(),
        Entropy(),
        PosteriorEntropy(),
        PosteriorEnergy(),
        MutualInformation(),
        Variance(),
    )
}
"""All scores by name."""

AUTO = {
    "classification": ("evidence", "energy", "entropy", "ratio"),
    "regression": ("variance", "ratio"),
}
"""What "auto" combines: the posterior's doubt, two views of the network's own, and what the data left open."""

__all__ = [
    "AUTO",
    "SCORES",
    "Energy",
    "Entropy",
    "Evidence",
    "Latent",
    "MutualInformation",
    "PosteriorEnergy",
    "PosteriorEntropy",
    "Score",
    "Variance",
    "VarianceRatio",
    "against_rest",
    "latent_of",
]

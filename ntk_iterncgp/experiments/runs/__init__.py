"""What the command line does, as functions: from settings to files in the output folder."""

from ntk_iterncgp.experiments.runs.evaluate import evaluate
from ntk_iterncgp.experiments.runs.fit import fit
from ntk_iterncgp.experiments.runs.merge import merge
from ntk_iterncgp.experiments.runs.predict import predict

__all__ = ["evaluate", "fit", "merge", "predict"]

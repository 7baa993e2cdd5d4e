"""What the command line does, as functions: from settings to files in the output folder."""

from ntk_iterncgp.runs.evaluate import evaluate
from ntk_iterncgp.runs.fit import fit
from ntk_iterncgp.runs.predict import predict

__all__ = ["evaluate", "fit", "predict"]

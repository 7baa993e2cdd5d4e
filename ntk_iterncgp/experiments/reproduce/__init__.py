"""`ntk-iterncgp reproduce NAME`: every experiment of the paper, with its settings, in its algorithm and in ours.

    ntk-iterncgp reproduce poisson
    ntk-iterncgp reproduce gmm --n 10000 --output-dir runs/gmm

Each experiment is one file with `SETTINGS` (its dataclass) and `run(settings) -> Outcome`. docs/reproduction.md sets
what came out beside what the paper says.
"""

from __future__ import annotations

from ntk_iterncgp.experiments.reproduce.runner import EXPERIMENTS, main

__all__ = ["EXPERIMENTS", "main"]

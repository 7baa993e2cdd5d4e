"""The report of an iterative Gaussian process as one reads it: what has converged may be the mean alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import final

from ntk_iterncgp.fitting.report import FitReport
from ntk_iterncgp.solver.stopping import Status

CLOSE_VARIANCE = 1.1  # times the exact one, up to which nobody need be told that the mean alone has converged


@final
@dataclass(frozen=True)
class IterativeReport(FitReport):
    """How an iterative fit ended; in print "mean converged" where the variance may be far from the exact one."""

    @classmethod
    def of(cls, report: FitReport) -> IterativeReport:
        """The same report."""
        return cls(**{field.name: getattr(report, field.name) for field in fields(report)})

    def __str__(self) -> str:
        is_close = self.variance_ratio is None or self.variance_ratio <= CLOSE_VARIANCE
        return super().__str__() if self.status != Status.CONVERGED or is_close else f"mean {super().__str__()}"

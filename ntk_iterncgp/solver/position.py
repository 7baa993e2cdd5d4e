"""Where a run stands within its loops, so that it can be taken up again from a state alone.

A run is a generator, and what its loops count would be lost with it. So they count here, and each state that is yielded
carries the count with it: given such a state, a run goes on as if it had never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

from ntk_iterncgp.solver.stopping import Status


@dataclass(frozen=True)
class Position:
    """In numbers of products with the prior, counted from the first."""

    limit: int  # the budget of the run is spent when so many have been taken
    steps_left: int = 0  # Newton steps, the current one included
    step_start: int | None = None  # how many had been taken when the current Newton step began; None: between two
    stage: int = 0  # a run may have several, with other policies
    status: Status | None = None  # how the stage has ended, where it has

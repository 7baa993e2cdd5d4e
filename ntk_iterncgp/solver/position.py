"""Where a run stands within its loops, so that it can be resumed from a state alone.

A run is a generator, and its loop counters would be lost with it. So they are stored here, and each state that is
yielded carries them: resumed from such a state, a run continues as if it had never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

from ntk_iterncgp.solver.stopping import Status


@dataclass(frozen=True)
class Position:
    """Counters of a run. Products with the prior are counted from the first one ever."""

    limit: int  # the number of products at which the budget of the run is spent
    steps_left: int = 0  # Newton steps, the current one included
    step_start: int | None = None  # the number of products when the current Newton step began; None: between two
    stage: int = 0  # a run may have several, with different policies
    status: Status | None = None  # how the stage ended; None: it has not

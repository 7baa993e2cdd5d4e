"""IterNCGP: Newton's method (Alg. 1) over GP regression problems solved by few actions (Alg. 2), recycled (Alg. 3)."""

from ntk_iterncgp.solver.newton import initial_state, newton, refine
from ntk_iterncgp.solver.policies import POLICIES, Policy, RandomSubspace, Unit, resolve_policy
from ntk_iterncgp.solver.problem import Anchor, Problem
from ntk_iterncgp.solver.recycling import compress, virtual_solver_run
from ntk_iterncgp.solver.state import Iterate, State
from ntk_iterncgp.solver.stopping import COMPRESSIONS, NewtonOptions, Position, Status, Stopping

__all__ = [
    "COMPRESSIONS",
    "POLICIES",
    "Anchor",
    "Iterate",
    "NewtonOptions",
    "Policy",
    "Position",
    "Problem",
    "RandomSubspace",
    "State",
    "Status",
    "Stopping",
    "Unit",
    "compress",
    "initial_state",
    "newton",
    "refine",
    "resolve_policy",
    "virtual_solver_run",
]

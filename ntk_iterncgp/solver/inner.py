"""Algorithm 2, the inner loop: GP regression by a probabilistic linear solver that stops early.

Each action s adds one equation sᵀ(K + W⁺)v = sᵀb. Stopping early leaves variance that the missing actions would have
removed: the posterior covariance is exactly that of the exact one plus what was not computed, never less.

Where this departs from the paper's listing, and why:

1.  Actions are projected onto the range of W (zero sum over the classes): W⁺ puts no noise where the data say nothing.
2.  Actions are orthonormalised *before* they are multiplied, and dependent ones dropped. The paper's search directions
    Q and their images are recursions; carried across Newton steps they lose all accuracy, and a variance can then fall
    below the exact one. Here every image is a direct product.
3.  One product per action. v, K v and the residual are combinations of S and its images; the paper's listing spends
    three products (line 5, line 9 and Alg. 1, line 9).
4.  The loop stops on ‖W r‖, not ‖r‖: pseudo-targets of saturated points are as large as 1/π and would hide the others;
    and on √(rᵀW r), in posterior standard deviations: with informative data a small fraction of ‖W b‖ is many of them.
"""

from __future__ import annotations

import math
from collections.abc import Generator

from ntk_iterncgp.linalg.columns import Buffer
from ntk_iterncgp.solver.policies import Policy, check_actions
from ntk_iterncgp.solver.state import State
from ntk_iterncgp.solver.stopping import Status


def inner_loop(
    state: State, policy: Policy, *, max_products: int, residual_tol: float, max_error: float = math.inf
) -> Generator[State, None, tuple[State, Status]]:
    """Solve the linear system of a state by actions until it converges or the budget is spent (Alg. 2).

    Args:
        state: where to start; the actions that it holds are used.
        policy: proposes the actions.
        max_products: how many products with the prior may be spent.
        residual_tol: stop below this relative residual ‖W r‖ / ‖W b‖,
        max_error: and this error of the mean, in posterior standard deviations.

    Yields:
        The state after each block of actions.

    Returns:
        The last state, and why the loop stopped.
    """
    prior = state.problem.prior
    limit = prior.num_products + max_products
    while True:  # Alg. 2, line 4
        if prior.num_products >= limit:
            return state, Status.BUDGET
        # line 5: the residual costs no product (departure 3)
        if state.relative_residual < residual_tol and state.solution_error <= max_error:
            return state, Status.CONVERGED
        state = state.with_counters(products_left=limit - prior.num_products)
        block = check_actions(policy(state), state.problem.num_rows)  # line 6
        if prior.num_products >= limit:  # the policy itself may spend products
            return state, Status.BUDGET
        block = block[:, : limit - prior.num_products]
        state = state.with_counters(num_proposals=state.num_proposals + block.shape[1])
        actions = state.propose(block)  # departures 1 and 2
        if actions.size == 0:
            return state, Status.EXHAUSTED
        images = prior.image(actions)  # line 9: the only expensive line
        state = state.extend(Buffer(actions, images))  # lines 7 to 15, as small matrices
        yield state

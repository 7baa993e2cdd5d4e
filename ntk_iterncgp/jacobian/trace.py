"""What tr(W K) of a network may cost: the diagonal of JᵀWJ from all rows of J, from those of some data, or from probes.

One row of J for each output of each datum is as much work as C epochs. So all of them are computed where they are few
numbers; where they are not, those of a sample of data, if these are few. Else single directions of single data are
probed: with W_n = Σ_c h_c h_cᵀ, a pair (n, c) drawn with probability |h_c|² / tr W, and h its direction of unit length,

    E[(J_nᵀh)²] tr W = diag(JᵀWJ),    weight by weight.

That is a backward pass at one datum. As many are made as a twentieth of those of the fit, and at least one. They differ
little in length from one pair to the next: on networks trained on digits the error of the trace is 20 % of one probe,
and 6 % of ten.
"""

from __future__ import annotations

from typing import NamedTuple

from ntk_iterncgp.jacobian.base import NetworkJacobian

EXACT_TRACE_ROWS = 4096
"""Up to this many rows of J, if they are few numbers, tr(W K) is computed from all of them."""

FEW_NUMBERS = 2**24  # of J: what a small network's rows take, some tenths of a second

SAMPLED_SHARE, MIN_SAMPLED, MAX_SAMPLED = 0.02, 32, 64
"""A sample of data of which all rows are few: as many as cost 2 % of an epoch, within limits."""

FIT_SHARE = 0.05  # of the backward passes of a fit: what probes, and rows for its check, may take
MAX_PROBES = 64


class TracePlan(NamedTuple):
    """Data of which all rows are computed; or backward passes at single data."""

    num_rows: int
    num_probes: int
    is_exact: bool


def plan_trace(jacobian: NetworkJacobian, num_data: int, num_outputs: int, num_calls: int) -> TracePlan:
    """How the trace is had, in a fit that makes `num_calls` backward passes."""
    per_datum = num_outputs * jacobian.num_params
    if num_data * num_outputs <= EXACT_TRACE_ROWS and num_data * per_datum <= FEW_NUMBERS:
        return TracePlan(num_data, 0, is_exact=True)
    if MAX_SAMPLED * per_datum <= FEW_NUMBERS:
        size = int(SAMPLED_SHARE * num_data / row_epochs(num_outputs))
        return TracePlan(min(max(size, MIN_SAMPLED), MAX_SAMPLED), 0, is_exact=False)
    return TracePlan(0, max(1, min(MAX_PROBES, int(FIT_SHARE * num_calls))), is_exact=False)


def affordable_data(jacobian: NetworkJacobian, num_data: int, num_outputs: int, wanted: int) -> int:
    """At how many data all rows may be computed beside a fit: as many as wanted where they are few numbers, else what
    costs a twentieth of an epoch, and at least one."""
    if wanted * num_outputs * jacobian.num_params <= FEW_NUMBERS:
        return wanted
    return max(1, min(wanted, int(FIT_SHARE * num_data / row_epochs(num_outputs))))


def row_epochs(num_outputs: int) -> float:
    """All rows of J, in epochs: a forward pass and a backward pass for each output, which is twice as much."""
    return (1 + 2 * num_outputs) / 3

"""What a fit is going to do, as far as sizes and the first batch tell: from this its cost is counted and timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ntk_iterncgp.data import Inputs
from ntk_iterncgp.likelihoods.base import ANY_VARIANCE
from ntk_iterncgp.network.directions import cotangents_each, has_choice, worth_looking
from ntk_iterncgp.network.grouping import groups_for
from ntk_iterncgp.network.linearised import PRODUCT_EPOCHS, LinearisedNetwork, NetworkSettings
from ntk_iterncgp.network.passes import epochs_of
from ntk_iterncgp.network.self_check import MAX_CHECKED_OUTPUTS
from ntk_iterncgp.priors.jacobian import NetworkJacobian
from ntk_iterncgp.priors.trace import TracePlan, affordable_data, plan_trace
from ntk_iterncgp.self_check import MIN_DATA, ROWS


@dataclass(frozen=True, eq=False)
class Plan:
    """Numbers of data, actions, groups, and what is looked at."""

    x: Inputs  # of the first batch
    rows: int  # in it
    num_outputs: int
    num_data: int
    in_groups: bool
    cotangents: int
    actions: int
    groups: int  # as many as actions, or more of which combinations are kept
    items: int  # data and directions that the pass in groups goes through
    at_once: int  # inputs whose rows of J are held together
    trace: TracePlan  # for the meter
    checked_data: int  # at which the result is checked
    checked_outputs: int  # of them, or combinations of these
    chunk_bytes: int

    @classmethod
    def of(cls, network: LinearisedNetwork, settings: NetworkSettings, *, prepared: bool) -> Plan:
        jacobian, data = network.jacobian, network.data
        x, _ = next(data.batches())
        with torch.no_grad():
            outputs = jacobian.forward(x)
        rows, num_outputs = outputs.shape
        num_data, in_groups = data.num_data(rows), settings.policy is None
        actions = groups = settings.num_actions
        items, cotangents = num_data, 1
        if in_groups:
            cotangents = cotangents_each(network.likelihood(outputs, 1.0), settings.cotangents)
            actions *= settings.cotangents or 1
            items = _looks(network, settings, outputs, num_data, cotangents) * num_data // rows
            groups = groups_for(actions, items, image_bytes(jacobian, 1), cotangents) * cotangents
            actions = min(actions, items * cotangents)
        if prepared:
            jacobian.prepare(x, rows)
        at_once = max(1, min(rows, settings.chunk_bytes // jacobian.bytes_per_row(num_outputs)))
        num_calls = max(len(data), min(settings.num_actions, num_data)) if in_groups else 2 * actions * len(data)
        checked_outputs = min(num_outputs, MAX_CHECKED_OUTPUTS) if in_groups else num_outputs
        checked_data = affordable_data(jacobian, num_data, checked_outputs, max(MIN_DATA, -(-ROWS // num_outputs)))
        return cls(
            x=x,
            rows=rows,
            num_outputs=num_outputs,
            num_data=num_data,
            in_groups=in_groups,
            cotangents=cotangents,
            actions=actions,
            groups=groups,
            items=items,
            at_once=at_once,
            trace=plan_trace(jacobian, num_data, num_outputs, num_calls),
            checked_data=min(num_data, checked_data),
            checked_outputs=checked_outputs,
            chunk_bytes=settings.chunk_bytes,
        )

    @property
    def epochs(self) -> float:
        """A forward pass, and then one pass in groups, or products."""
        if self.in_groups:
            return 1 / 3 + epochs_of(self.items, self.cotangents, self.num_data)
        return 1 / 3 + PRODUCT_EPOCHS * self.actions


def _looks(
    network: LinearisedNetwork, settings: NetworkSettings, outputs: Tensor, num_data: int, cotangents: int
) -> int:
    """How often data of the first batch are looked at, if it is a sample of all."""
    likelihood = network.likelihood(outputs, 1.0).for_prior_variance(ANY_VARIANCE)
    has_a_choice = has_choice(likelihood, cotangents, settings.num_actions, num_data)
    if not has_a_choice or not bool(torch.isfinite(outputs).all()):
        return len(outputs)
    share = settings.num_actions * len(outputs) // num_data
    return len(worth_looking(likelihood, outputs.double(), cotangents, share, torch.Generator())[0])


def image_bytes(jacobian: NetworkJacobian, actions: int) -> int:
    return actions * jacobian.num_params * number_bytes(jacobian)


def number_bytes(jacobian: NetworkJacobian) -> int:
    return torch.empty(0, dtype=jacobian.dtype).element_size()

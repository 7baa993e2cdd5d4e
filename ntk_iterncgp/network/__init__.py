"""Fitting a linearised network: from a Jacobian and data to a `WeightPosterior`.

clusters     all data in about one epoch, one action per group of data (the default)
other        the same solver as for any other prior: one action per product with the NTK, about 1.7 epochs each

mean="network"   The predictive mean is the network's own output. W is taken there, and there is one linear system.
mean="refined"   Newton's method, from the network's outputs to the mode of the linearised model under the given prior.
                 Actions are recycled from step to step.
"""

from dataclasses import replace

from ntk_iterncgp.checkpoint import UNSAVED, Call
from ntk_iterncgp.network.cost import Cost, check_memory, check_memory_to_refine, estimate_cost, room_for_data
from ntk_iterncgp.network.linearised import (
    CLUSTERS,
    MEANS,
    PRODUCT_EPOCHS,
    Budget,
    LinearisedNetwork,
    NetworkFit,
    NetworkSettings,
)
from ntk_iterncgp.network.newton_fit import fit_by_products, refine_by_products
from ntk_iterncgp.network.one_epoch import fit_by_clusters, refine_clusters
from ntk_iterncgp.network.progress import Progress

__all__ = [
    "CLUSTERS",
    "MEANS",
    "PRODUCT_EPOCHS",
    "Budget",
    "Cost",
    "LinearisedNetwork",
    "NetworkFit",
    "NetworkSettings",
    "Progress",
    "estimate_cost",
    "fit_network",
    "refine_network",
]


def fit_network(
    network: LinearisedNetwork, settings: NetworkSettings, *, progress_bar: bool = False, call: Call = UNSAVED
) -> NetworkFit:
    network.data.keep_bytes = room_for_data(check_memory(estimate_cost(network, settings, timed=False)))
    fit = fit_by_clusters if settings.policy is None else fit_by_products
    return replace(fit(network, settings, progress_bar=progress_bar, call=call), first_look=network.first_look())


def refine_network(
    fitted: NetworkFit,
    network: LinearisedNetwork,
    settings: NetworkSettings,
    budget: Budget,
    *,
    progress_bar: bool = False,
    call: Call = UNSAVED,
) -> NetworkFit:
    """Spend more on a fit, from where it stopped: the variance only falls."""
    assert fitted.first_look is not None
    fitted.first_look.check_same(network.first_look())
    network.data.keep_bytes = room_for_data(check_memory_to_refine(fitted, network, settings, budget))
    refine = refine_clusters if settings.policy is None else refine_by_products
    result = refine(fitted, network, settings, budget, progress_bar=progress_bar, call=call)
    return replace(result, first_look=fitted.first_look)

"""Fitting a linearised network: from a Jacobian and data to a `WeightPosterior`.

clusters     all data in about one epoch, one action per group of data (the default)
other        the same solver as for any other prior: one action per product with the NTK, about 1.7 epochs each

mean="network"   The predictive mean is the network's own output. W is taken there, and there is one linear system.
mean="refined"   Newton's method, from the network's outputs to the mode of the linearised model under the given prior.
                 Actions are recycled from step to step.
"""

from ntk_iterncgp.fitting.cluster_run import fit_by_clusters, refine_by_clusters
from ntk_iterncgp.fitting.cluster_state import ClusterState
from ntk_iterncgp.fitting.cost import Cost, check_memory, check_memory_to_refine, estimate_cost, room_for_data
from ntk_iterncgp.fitting.drive import Budget
from ntk_iterncgp.fitting.linearised import (
    CLUSTERS,
    MEANS,
    PRODUCT_EPOCHS,
    LinearisedNetwork,
    NetworkFit,
    NetworkSettings,
)
from ntk_iterncgp.fitting.newton_fit import fit_by_products, refine_by_products
from ntk_iterncgp.persistence.checkpoint import UNSAVED, CheckpointSession

__all__ = [
    "CLUSTERS",
    "MEANS",
    "PRODUCT_EPOCHS",
    "Budget",
    "ClusterState",
    "Cost",
    "LinearisedNetwork",
    "NetworkFit",
    "NetworkSettings",
    "estimate_cost",
    "fit_network",
    "refine_network",
]


def fit_network(
    network: LinearisedNetwork,
    settings: NetworkSettings,
    *,
    progress_bar: bool = False,
    session: CheckpointSession = UNSAVED,
) -> NetworkFit:
    """Infer the posterior, if it fits in memory; in groups of data, or by products with the NTK."""
    network.data.keep_bytes = room_for_data(check_memory(estimate_cost(network, settings, timed=False)))
    fit = fit_by_clusters if settings.in_groups else fit_by_products
    return fit(network, settings, progress_bar=progress_bar, session=session)


def refine_network(
    fitted: NetworkFit,
    network: LinearisedNetwork,
    settings: NetworkSettings,
    budget: Budget,
    *,
    progress_bar: bool = False,
    session: CheckpointSession = UNSAVED,
) -> NetworkFit:
    """Spend more on a fit, from where it stopped: the variance only falls."""
    fitted.first_batch.check_same(network.first_batch)
    network.data.keep_bytes = room_for_data(check_memory_to_refine(fitted, network, settings, budget))
    refine = refine_by_clusters if settings.in_groups else refine_by_products
    return refine(fitted, network, settings, budget, progress_bar=progress_bar, session=session)

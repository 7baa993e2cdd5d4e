"""From a prior or a network and data to a posterior: the driver, its report, the cost and the self-check."""

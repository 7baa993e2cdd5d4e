"""Gaussian priors over the latent values, known by their products.

base    the contract
gram    a kernel                ntk     a linearised network

Import from these modules: a network needs no kernels, and a kernel no network.
"""

"""Posteriors in function space and in weight space, and predictions from them."""

"""Blocks of columns, orthonormalisation and Cholesky factors with rounding: below priors and solver."""

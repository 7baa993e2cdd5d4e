"""The training data: the same rows in the same order on every sweep."""

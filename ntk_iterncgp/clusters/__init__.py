"""The one-epoch policy: directions, groups of data, and one pass over them."""

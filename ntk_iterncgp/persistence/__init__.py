"""Files, checkpoints, fingerprints and locks."""

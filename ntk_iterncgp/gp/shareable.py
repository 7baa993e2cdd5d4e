"""What a fitted GP offers besides inference: files of it, and figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ntk_iterncgp.gp.plots import plot_1d, plot_2d
from ntk_iterncgp.gp.state import from_state_dict, load, save, state_dict


class Shareable:
    """Saving, loading and plotting of a `NonConjugateGP`, which inherits from it."""

    def state_dict(self) -> dict[str, Any]:
        """This fitted GP as tensors, numbers and texts, for `from_state_dict`."""
        return state_dict(self)

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any], **given: Any) -> Self:
        """Make the GP that `state_dict` described, checked against its kernel and its data.

        Args:
            saved: As `state_dict` returned it.
            given: `kernel`, `likelihood` or `policy`, where they are your own and were not saved; `device`.

        Returns:
            The fitted GP, which predicts the same bits.
        """
        return from_state_dict(cls, saved, **given)

    def save(self, path: str | Path) -> None:
        """Write this fitted GP, with its data, to one `.safetensors` file; whole or not at all."""
        save(self, path)

    @classmethod
    def load(cls, path: str | Path, **given: Any) -> Self:
        """Read a fitted GP from a file that `save` wrote; nothing in it is run.

        Args:
            path: The file.
            given: As in `from_state_dict`.

        Returns:
            The fitted GP, which predicts the same bits.
        """
        return load(cls, path, **given)

    def plot_1d(self, ax: Any = None, **settings: Any) -> Any:
        """Plot a GP of one-dimensional inputs: mean, bands, data. See `gp.plots.plot_1d` for the settings."""
        return plot_1d(self, ax, **settings)

    def plot_2d(self, ax: Any = None, **settings: Any) -> Any:
        """Plot a GP of two-dimensional inputs: mean, rate or classes, and data. See `gp.plots.plot_2d`."""
        return plot_2d(self, ax, **settings)

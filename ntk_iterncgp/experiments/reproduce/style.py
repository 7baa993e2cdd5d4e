"""One look for all figures: sizes of a printed page, colours that every kind of colour vision tells apart.

The two classes are blue and vermilion everywhere, variance is the sequential map, means the diverging one whose ends
are the colours of the classes. Methods keep their colour from figure to figure. Colours are Okabe and Ito's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

PAGE = 6.75  # inches: the width of a page's text, which two columns share
BLUE, VERMILION, GREEN, SKY, ORANGE, PURPLE = "#0072B2", "#D55E00", "#009E73", "#56B4E9", "#E69F00", "#CC79A7"
BLACK, GREY = "#222222", "#8C8C8C"
CLASSES = (BLUE, VERMILION)  # labels 0 and 1
# Paul Tol's "muted" scheme, for ten classes at once.
TEN_CLASSES = (
    "#CC6677",
    "#332288",
    "#DDCC77",
    "#117733",
    "#88CCEE",
    "#882255",
    "#44AA99",
    "#999933",
    "#AA4499",
    "#AAAAAA",
)

METHODS = {  # colour and dashes
    "ours": (BLUE, "-"),
    "ours, compressed": (SKY, "--"),
    "paper": (VERMILION, "-"),
    "paper, compressed": (ORANGE, "--"),
    "unit": (BLACK, "-"),
    "svgp": (GREEN, "-"),
}

MEAN = LinearSegmentedColormap.from_list("mean", [BLUE, "#7FB8D8", "#F7F7F7", "#EAAE80", VERMILION])
VARIANCE = mpl.colormaps["cividis"]


@contextmanager
def style() -> Iterator[None]:
    """The settings of matplotlib for what is drawn inside."""
    settings = mpl.rc_context(
        {
            "font.size": 8,
            "axes.titlesize": 8,
            "axes.labelsize": 8,
            "xtick.labelsize": 7,
            "ytick.labelsize": 7,
            "legend.fontsize": 7,
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.6,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "xtick.major.size": 2.5,
            "ytick.major.size": 2.5,
            "lines.linewidth": 1.2,
            "savefig.dpi": 150,
            "pdf.fonttype": 42,  # text stays text
        }
    )
    with settings:
        yield


def new_figure(height: float, width: float = PAGE) -> Figure:
    """An empty figure that arranges itself."""
    return Figure(figsize=(width, height), layout="constrained")


def show_map(
    axes: Axes,
    values: Tensor,  # (resolution²,)
    extent: tuple[float, float, float, float],
    colours: Colormap,
    limits: tuple[float, float],
) -> AxesImage:
    """A function over the input plane: no ticks, a thin frame."""
    side = math.isqrt(len(values))
    image = axes.imshow(
        values.reshape(side, side).numpy(),
        origin="lower",
        extent=extent,
        cmap=colours,
        vmin=limits[0],
        vmax=limits[1],
        interpolation="bilinear",
    )
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.6, color=GREY)
    return image


def scatter_classes(
    axes: Axes, inputs: Tensor, labels: Tensor, *, size: float | np.ndarray = 9.0, filled: bool = True
) -> None:  # (N, 2), (N,)
    """Data in the colours of their classes, with a white rim to stand out from any map."""
    sizes = np.broadcast_to(np.asarray(size, dtype=float), (len(labels),))
    for label, colour in enumerate(CLASSES):
        chosen = (labels == label).numpy()
        face = colour if filled else "none"
        edge = "white" if filled else BLACK
        axes.scatter(
            inputs[chosen, 0].numpy(),
            inputs[chosen, 1].numpy(),
            s=sizes[chosen],
            c=face,
            edgecolors=edge,
            linewidths=0.4,
            zorder=3,
        )

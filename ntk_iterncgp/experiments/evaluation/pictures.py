"""Test images with their probabilities, the most and the least certain ones, as cards of the report.

Images are PNG of a few pixels, scaled up by the browser without smoothing.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from PIL import Image
from torch import Tensor


def cards(
    probabilities: Tensor, labels: Tensor, pictures: Mapping[int, Tensor], class_names: Sequence[str]
) -> str:  # (b, C), (b,)
    """`pictures` are images (channels, side, side) in [0, 1], by their place among the scored inputs."""
    if not pictures:
        return ""
    places = sorted(pictures, key=lambda place: -float(probabilities[place].max()))
    half, room = (len(places) + 1) // 2, min(9, max(len(str(name)) for name in class_names))
    parts = []
    for heading, chosen in (("Most certain test images", places[:half]), ("Least certain test images", places[half:])):
        shown = "".join(
            _card(probabilities[place], int(labels[place]), pictures[place], class_names) for place in chosen
        )
        parts.append(f'<h2>{heading}</h2><div class="cards" style="--name:{0.3 + 0.52 * room:.1f}em">{shown}</div>')
    return "".join([*parts, '<p class="soft">Probabilities of IterNCGP; the true class in blue.</p>'])


def _card(p: Tensor, truth: int, image: Tensor, class_names: Sequence[str]) -> str:
    top = p.argsort(descending=True)[:3].tolist()
    shown = top if truth in top else [*top[:2], truth]
    bars = "".join(
        f'<div class="bar{" truth" if c == truth else ""}"><span>{escape(str(class_names[c]))}</span>'
        f'<i style="width:{max(1.0, 100 * float(p[c])):.1f}%"></i><span>{100 * float(p[c]):.0f}&nbsp;%</span></div>'
        for c in shown
    )
    wrong = "" if top[0] == truth else ' <span class="wrong">wrong</span>'
    name = escape(str(class_names[truth]))
    return f'<div class="card"><img alt="{name}" src="{_png(image)}"><b>{name}</b>{wrong}{bars}</div>'


def _png(image: Tensor) -> str:  # (channels, side, side), in [0, 1]
    pixels = (255 * image).round().byte().permute(1, 2, 0).numpy()
    if pixels.shape[2] == 1:
        pixels = 255 - pixels[..., 0]  # ink on paper
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"

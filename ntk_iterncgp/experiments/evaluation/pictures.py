"""Test images with their probabilities, the most and the least certain ones, as cards of the report.

Images are PNG of a few pixels, scaled up by the browser without smoothing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class Card:
    """A test image, its class, and the probabilities of three classes, the true one among them."""

    png: bytes
    truth: str
    wrong: bool  # another class is more probable
    bars: Sequence[tuple[str, float]]


def cards(
    probabilities: Tensor, labels: Tensor, pictures: Mapping[int, Tensor], class_names: Sequence[str]
) -> list[tuple[str, list[Card]]]:  # (b, C), (b,)
    """`pictures` are images (channels, side, side) in [0, 1], by their place among the scored inputs."""
    places = sorted(pictures, key=lambda place: -float(probabilities[place].max()))
    shown = [_card(probabilities[place], int(labels[place]), pictures[place], class_names) for place in places]
    half = (len(shown) + 1) // 2
    return [("Most certain test images", shown[:half]), ("Least certain test images", shown[half:])]


def scored_card(image: Tensor, title: str, confidence: float, p_value: float) -> Card:
    """An image with the confidence of the network alone and the p-value of the detector."""
    return Card(_png(image), title, False, [("confidence", confidence), ("p-value", p_value)])


def _card(p: Tensor, truth: int, image: Tensor, class_names: Sequence[str]) -> Card:
    top = p.argsort(descending=True)[:3].tolist()
    shown = top if truth in top else [*top[:2], truth]
    bars = [(str(class_names[c]), float(p[c])) for c in shown]
    return Card(_png(image), str(class_names[truth]), top[0] != truth, bars)


def _png(image: Tensor) -> bytes:  # (channels, side, side), in [0, 1]
    pixels = (255 * image).round().byte().permute(1, 2, 0).numpy()
    if pixels.shape[2] == 1:
        pixels = 255 - pixels[..., 0]  # ink on paper
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, format="PNG")
    return stream.getvalue()

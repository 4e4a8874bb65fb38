"""Test examples for which the predictions of the ensemble and of the selected network differ most."""

from __future__ import annotations

import base64
import io

from torch import Tensor

from enfold.errors import MissingExtra
from enfold.report.blocks import Bar, Block, Card, Gallery
from enfold.report.content import Content, Example, Examples

CLASSES = 3  # shown per model


def example_blocks(content: Content) -> list[Block]:
    """Return the gallery of examples, if there is one."""
    found = content.examples
    if found is None or not found.examples:
        return []
    caption = (
        f"The {len(found.examples)} of {found.total:,} test examples with the largest total variation distance between "
        f"the predictions of the ensemble and {found.label} (seed {found.seed}): half the sum of absolute differences "
        "of probabilities, from 0 to 1. Bars: the most probable classes of each model; the true class is green."
    )
    if found.notice:
        caption += f" ({found.notice[0].upper()}{found.notice[1:]}.)"
    return [Gallery(caption, tuple(_card(each, found) for each in found.examples))]


def _card(example: Example, found: Examples) -> Card:
    truth = _name(found, example.truth)
    return Card(
        title=f"test example {example.index}, distance {example.distance:.2f}",
        truth=truth,
        alt=f"test example {example.index}, of class {truth}",
        picture="" if example.image is None else encode_png(example.image),
        predictions=(
            ("ensemble", _bars(example.first, example, found)),
            (found.label, _bars(example.second, example, found)),
        ),
    )


def _bars(probabilities: Tensor, example: Example, found: Examples) -> tuple[Bar, ...]:
    likeliest = probabilities.topk(min(CLASSES, len(probabilities))).indices.tolist()
    return tuple(
        Bar(_name(found, index), 100 * float(probabilities[index]), index == example.truth) for index in likeliest
    )


def _name(found: Examples, index: int) -> str:
    return found.names[index] if index < len(found.names) else f"class {index}"


def encode_png(image: Tensor) -> str:
    """Return an image (C, H, W) of bytes as a data URL."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", "report", "a report with images") from error
    pixels = image[0].numpy() if image.shape[0] == 1 else image.permute(1, 2, 0).contiguous().numpy()
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()

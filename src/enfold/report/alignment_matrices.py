"""Figures of soft permutations: each complete matrix, and its hardest and softest rows."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt

from enfold.report.alignment_groups import describe_omitted, kinds_of, select_kinds

Array = npt.NDArray[np.float64]

MOST = 5  # layers of one figure
MAX_BLOCKS = 64  # blocks along one side of a complete matrix: single entries of 512 x 512 would not be visible
ZOOM = 24  # units of a matrix shown one by one
TICKS = ("0", "0.01", "0.05", "0.1", "0.25", "0.5", "0.75", "1")


def draw_matrices(matrices: Mapping[str, Array]) -> Any:
    """Draw complete matrices of the second member, and their hardest and softest rows with their own columns."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = kinds_of({name: len(matrix) for name, matrix in matrices.items()})
    shown = select_kinds(kinds, MOST)
    columns = 3 if any(kind.units > ZOOM for kind in shown) else 2
    figure = Figure(figsize=(2.8 * columns, 1.5 + 2.9 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(shown), columns, squeeze=False)
    for line, kind in zip(panels, shown, strict=True):
        first = f"first of {len(kind.groups)} × " if len(kind.groups) > 1 else ""
        drawn = _draw_line(line, matrices[kind.groups[0]], f"{fill(kind.name, 30)}\n{first}{kind.units} units")
    bar = figure.colorbar(drawn, ax=panels, location="top", shrink=0.7, aspect=40, pad=0.01)
    bar.set_ticks([float(tick) for tick in TICKS], labels=TICKS)
    less = fill(describe_omitted(kinds, shown, "matrices.safetensors"), 90)
    bar.set_label("entry of the soft permutation of member 2" + (f"\n{less}" if less else ""))
    return figure


def _draw_line(line: Any, matrix: Array, title: str) -> Any:
    from matplotlib.colors import PowerNorm

    images = {title: _blocks(matrix), **_ends(matrix)}
    for axes in line[len(images) :]:
        axes.set_visible(False)
    for axes, (words, image) in zip(line, images.items(), strict=False):
        drawn = axes.imshow(image, cmap="magma_r", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
        axes.set_title(words, loc="left", size=10)
        axes.set_xlabel("their columns, in the same order", size=9)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.grid(visible=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(True)
    block = _block(len(matrix))
    line[0].set_xlabel("units of member 2" + (f"\nlargest of {block} × {block} each" if block > 1 else ""), size=9)
    line[0].set_ylabel("units of member 1", size=9)
    return drawn


def _block(units: int) -> int:
    """Return the number of entries along a side that are shown as one."""
    return -(-units // MAX_BLOCKS)


def _blocks(matrix: Array) -> Array:
    """Return the largest entry of each block, so that single large entries remain visible."""
    side = _block(len(matrix))
    count = -(-len(matrix) // side)
    padded = np.zeros((count * side, count * side))
    padded[: len(matrix), : len(matrix)] = matrix
    return np.asarray(padded.reshape(count, side, count, side).max(axis=(1, 3)))


def _ends(matrix: Array) -> dict[str, Array]:
    """Return the rows with the largest and the smallest maxima; columns are those of the maxima, in order."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(matrix, maximize=True)
    order = np.argsort(-matrix[rows, columns], kind="stable")
    ends = {f"{ZOOM} hardest rows": order[:ZOOM], f"{ZOOM} softest rows": order[-ZOOM:]}
    chosen = ends if len(order) > ZOOM else {"all rows, the hardest first": order}
    return {words: matrix[np.ix_(rows[each], columns[each])] for words, each in chosen.items()}

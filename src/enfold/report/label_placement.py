"""Placement of labels: each takes the cheapest free place near its point, repeatedly, until none moves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]  # boxes are rows (left, bottom, right, top); points are rows (x, y); unit: points

GAP = 3.0  # between a marker and a label beside it
MARGIN = 1.0  # around a label, since renderers measure text differently
SWEEPS = 8
OPTIONS = 100  # candidates of a label for which crossings are computed
STEPS = 12  # points along a leader at which crossings are checked
# Costs: overlap; a leader that crosses something; a line behind; closer to another marker; left of the marker.
BLOCKED, CROSSED, STRUCK, MISTAKEN, LEFT = 1e4, 60.0, 25.0, 25.0, 1.0
ASKEW = 0.2  # per point above or below the middle


def place_labels(markers: Array, sizes: Array, frame: Array, lines: Array) -> Array:
    """Return one box per marker, inside the frame, without overlap with markers and other boxes.

    Args:
        markers: Boxes of the markers, (N, 4).
        sizes: Width and height of each label, (N, 2).
        frame: The box that contains all labels, (4,).
        lines: Thin boxes, such as error bars, that labels avoid if possible, (L, 4).

    Returns:
        Boxes (N, 4), deterministic.
    """
    boxes = np.full((len(markers), 4), np.nan)
    crowd = np.exp(-_distances(markers) / 30).sum(axis=1)
    order = [int(index) for index in np.argsort(-crowd, kind="stable")]
    options = [_options(markers[index], sizes[index], frame) for index in range(len(markers))]
    fixed = [_fixed_costs(options[index], index, markers, lines) for index in range(len(markers))]
    for _ in range(SWEEPS):
        before = boxes.copy()
        for index in order:
            others = [other for other in order if other != index and not np.isnan(boxes[other, 0])]
            boxes[index] = _cheapest(options[index], fixed[index], markers[index], boxes[others], markers[others])
        if np.array_equal(before, boxes):
            break
    return boxes


def leader(marker: Array, box: Array) -> Array:
    """Return the two ends (x, y) of the line from the middle of a marker to its label."""
    middle = (marker[:2] + marker[2:]) / 2
    return np.stack([middle, _ends(middle, box[None])[0]])


def distance(marker: Array, box: Array) -> float:
    """Return the distance from the middle of a marker to the nearest point of its label."""
    return float(_away((marker[:2] + marker[2:]) / 2, box[None])[0])


def _ends(middle: Array, boxes: Array) -> Array:
    nearest = np.clip(middle, boxes[:, :2], boxes[:, 2:])
    beside = nearest[:, 0] != middle[0]
    nearest[beside, 1] = (boxes[beside, 1] + boxes[beside, 3]) / 2
    return nearest


def overlaps(boxes: Array, others: Array) -> npt.NDArray[np.bool_]:
    """Return which boxes (B, 4) overlap which others (O, 4), as (B, O)."""
    left, bottom, right, top = boxes.T[..., None]
    found = (left < others[:, 2]) & (others[:, 0] < right)
    return np.asarray(found & (bottom < others[:, 3]) & (others[:, 1] < top))


def _distances(markers: Array) -> Array:
    middles = (markers[:, :2] + markers[:, 2:]) / 2
    return np.asarray(np.linalg.norm(middles[:, None] - middles[None], axis=-1))


def _options(marker: Array, size: Array, frame: Array) -> Array:
    """Return candidates for one label: around its marker at increasing distances, then on a grid over the frame."""
    width, height = size
    away = np.array([0.0, 8.0, 18.0, 32.0, 50.0, 75.0])
    middle = (marker[0] + marker[2] - width) / 2
    across = np.concatenate([marker[2] + GAP + away, marker[0] - GAP - away - width, [middle]])
    touching = height / 2 + 2 * MARGIN  # just above or below a line through the marker
    rows = (marker[1] + marker[3] - height) / 2 + np.append(np.arange(-16, 17) * height / 2, [-touching, touching])
    everywhere = np.arange(frame[0] + MARGIN, frame[2] - width, max(width / 3, 24.0))
    levels = np.arange(frame[1] + MARGIN, frame[3] - height, height)
    corners = np.concatenate([_grid(across, rows), _grid(everywhere, levels)])
    options = np.concatenate([corners, corners + size], axis=1)
    within = (options[:, :2] >= frame[:2]).all(axis=1) & (options[:, 2:] <= frame[2:]).all(axis=1)
    return options[within] if within.any() else options  # a name that is too long for the frame extends beyond it


def _grid(across: Array, up: Array) -> Array:
    return np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)


def _fixed_costs(options: Array, index: int, markers: Array, lines: Array) -> Array:
    """Return the cost of each candidate of label `index` that does not depend on other labels."""
    middle, others = (markers[index, :2] + markers[index, 2:]) / 2, np.delete(markers, index, axis=0)
    length, grown = _away(middle, options), _grown(options)
    cost = BLOCKED * overlaps(grown, markers).sum(axis=1) + STRUCK * overlaps(grown, lines).sum(axis=1)
    cost += CROSSED * _runs_through(_segments(middle, options), others).sum(axis=1)
    for other in (others[:, :2] + others[:, 2:]) / 2:
        cost += MISTAKEN * (_away(other, options) < length + GAP)
    askew = np.abs((options[:, 1] + options[:, 3]) / 2 - middle[1])
    return np.asarray(cost + length + ASKEW * askew + LEFT * (options[:, 0] < middle[0]))


def _cheapest(options: Array, fixed: Array, marker: Array, boxes: Array, of_boxes: Array) -> Array:
    """Return the cheapest candidate given the labels `boxes` of the markers `of_boxes`."""
    cost = fixed + BLOCKED * overlaps(_grown(options), boxes).sum(axis=1)
    best = np.argsort(cost, kind="stable")[:OPTIONS]
    options, cost = options[best], cost[best]
    own = _segments((marker[:2] + marker[2:]) / 2, options)
    theirs = np.array([leader(*pair) for pair in zip(of_boxes, boxes, strict=True)]).reshape(-1, 2, 2)
    cost += CROSSED * (_runs_through(own, boxes).sum(axis=1) + _cross(own, theirs).sum(axis=1))
    cost += STRUCK * _runs_through(theirs, _grown(options)).sum(axis=0)
    return np.asarray(options[int(np.argmin(cost))])


def _grown(boxes: Array) -> Array:
    return np.asarray(boxes + np.array([-MARGIN, -MARGIN, MARGIN, MARGIN]))


def _segments(middle: Array, boxes: Array) -> Array:
    """Return the leaders (B, 2, 2) from the middle of one marker to each box."""
    ends = _ends(middle, boxes)
    return np.stack([np.broadcast_to(middle, ends.shape), ends], axis=1)


def _away(middle: Array, boxes: Array) -> Array:
    return np.asarray(np.linalg.norm(np.clip(middle, boxes[:, :2], boxes[:, 2:]) - middle, axis=1))


def _runs_through(segments: Array, boxes: Array) -> npt.NDArray[np.bool_]:
    """Return which segments (S, 2, 2) cross which boxes (B, 4), checked at steps along them."""
    steps = np.linspace(0, 1, STEPS)[None, :, None]
    path = (segments[:, :1] + steps * (segments[:, 1:] - segments[:, :1])).reshape(-1, 2)
    within = overlaps(np.concatenate([path, path], axis=1), boxes)
    return np.asarray(within.reshape(len(segments), STEPS, len(boxes)).any(axis=1))


def _cross(segments: Array, others: Array) -> npt.NDArray[np.bool_]:
    """Return which segments (S, 2, 2) cross which others (O, 2, 2)."""
    a, b = segments[:, None, 0], segments[:, None, 1]
    c, d = others[None, :, 0], others[None, :, 1]
    return (_turn(a, b, c) * _turn(a, b, d) < 0) & (_turn(c, d, a) * _turn(c, d, b) < 0)


def _turn(a: Array, b: Array, c: Array) -> Array:
    along, aside = b - a, c - a
    return np.asarray(along[..., 0] * aside[..., 1] - along[..., 1] * aside[..., 0])

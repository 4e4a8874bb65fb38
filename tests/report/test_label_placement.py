import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enfold.report.label_placement import GAP, distance, leader, overlaps, place_labels

FRAME = np.array([0.0, 0.0, 430.0, 250.0])
NO_LINES = np.zeros((0, 4))


def _markers(points: list[tuple[float, float]]) -> np.ndarray:
    middles = np.array(points, dtype=float).reshape(-1, 2)
    return np.concatenate([middles - 4, middles + 4], axis=1)


def _sizes(widths: list[float]) -> np.ndarray:
    return np.array([(width, 11.0) for width in widths]).reshape(-1, 2)


points = st.lists(st.tuples(st.floats(5, 425), st.floats(5, 245), st.floats(10, 100)), min_size=1, max_size=14)


@pytest.mark.slow
@given(points)
@settings(max_examples=20)
def test_labels_are_inside_the_frame_and_do_not_overlap(drawn: list[tuple[float, float, float]]) -> None:
    markers, sizes = _markers([(x, y) for x, y, _ in drawn]), _sizes([width for *_, width in drawn])
    boxes = place_labels(markers, sizes, FRAME, NO_LINES)
    assert not np.triu(overlaps(boxes, boxes), 1).any()
    assert not overlaps(boxes, markers).any()
    assert (boxes[:, :2] >= FRAME[:2]).all()
    assert (boxes[:, 2:] <= FRAME[2:]).all()
    np.testing.assert_allclose(boxes[:, 2:] - boxes[:, :2], sizes)
    np.testing.assert_array_equal(boxes, place_labels(markers, sizes, FRAME, NO_LINES))


def test_coinciding_points_have_separate_labels() -> None:
    boxes = place_labels(_markers([(200, 100)] * 20), _sizes([90.0] * 20), FRAME, NO_LINES)
    assert not np.triu(overlaps(boxes, boxes), 1).any()


def test_a_single_label_is_right_of_its_marker() -> None:
    boxes = place_labels(_markers([(100, 50)]), _sizes([40]), FRAME, NO_LINES)
    np.testing.assert_allclose(boxes, [[104 + GAP, 44.5, 144 + GAP, 55.5]])


def test_at_the_right_edge_the_label_is_left() -> None:
    boxes = place_labels(_markers([(415, 50)]), _sizes([40]), FRAME, NO_LINES)
    np.testing.assert_allclose(boxes, [[411 - GAP - 40, 44.5, 411 - GAP, 55.5]])


def test_a_line_behind_is_avoided() -> None:
    line = np.array([[0.0, 49.5, 430.0, 50.5]])
    box = place_labels(_markers([(100, 50)]), _sizes([40]), FRAME, line)
    assert not overlaps(box, line).any()
    assert distance(_markers([(100, 50)])[0], box[0]) < 10


def test_a_label_longer_than_the_frame_is_placed() -> None:
    boxes = place_labels(_markers([(100, 50)]), _sizes([600]), FRAME, NO_LINES)
    assert np.isfinite(boxes).all()


def test_no_labels() -> None:
    assert place_labels(_markers([]), _sizes([]), FRAME, NO_LINES).shape == (0, 4)


def test_a_leader_goes_to_the_end_of_a_word_or_to_its_edge() -> None:
    marker = _markers([(10, 10)])[0]
    np.testing.assert_allclose(leader(marker, np.array([30.0, 20, 50, 30])), [[10, 10], [30, 25]])
    np.testing.assert_allclose(leader(marker, np.array([0.0, 20, 50, 30])), [[10, 10], [10, 20]])
    assert distance(marker, np.array([13.0, 14, 50, 30])) == 5


def test_boxes_that_touch_do_not_overlap() -> None:
    box = np.array([[0.0, 0, 2, 2]])
    others = np.array([[2.0, 0, 4, 2], [1, 1, 3, 3], [0.5, 0.5, 1, 1], [0, 3, 2, 4]])
    assert overlaps(box, others).tolist() == [[False, True, True, False]]

"""Kinds of groups: one per layer, with a readable name, and the selection of some of many."""

from __future__ import annotations

import pytest

from enfold.report.alignment_groups import (
    LONGEST,
    describe_omitted,
    kinds_of,
    layer_name,
    select_evenly,
    select_kinds,
    short,
)
from symmetry.known_networks import KNOWN, symmetry_of

HEADS = {
    "embed": 8,
    "a in blocks of 4": 2,
    "a": 4,
    "a from 4": 4,
    "v from 16": 4,
    "v from 20": 4,
    "linear": 16,
    "1": 5,
}


def test_units_inside_the_heads_of_a_layer_form_one_kind() -> None:
    told = ["embed (8)", "a, blocks of 4 (2)", "a (2 × 4)", "v (2 × 4)", "linear (16)", "layer 1 (5)"]
    kinds = kinds_of(HEADS)
    assert [str(kind) for kind in kinds] == told
    assert [kind.layer for kind in kinds if kind.is_complete] == ["embed", "linear", "1"]
    assert kinds[2].mean({"a": 0.25, "a from 4": 0.75}) == 0.5


@pytest.mark.slow
def test_groups_with_similar_names_are_all_retained() -> None:
    for name in KNOWN:
        groups = {group.name: group.size for group in symmetry_of(name)}
        kinds = kinds_of(groups)
        assert sorted(each for kind in kinds for each in kind.groups) == sorted(groups), name
        assert all(groups[each] == kind.units for kind in kinds for each in kind.groups), name


def test_complete_layers_are_shown_first_and_the_others_listed() -> None:
    kinds = kinds_of(HEADS)
    assert select_kinds(kinds, 6) == kinds
    assert describe_omitted(kinds, kinds, "x.json") == ""
    shown = select_kinds(kinds, 2)
    assert [kind.layer for kind in shown] == ["embed", "1"]
    assert describe_omitted(kinds, shown, "x.json") == (
        "omitted: 1 layer between these and 3 kinds of blocks and of units inside them, all in x.json"
    )
    blocks = kinds[1:4]
    assert select_kinds(blocks, 2) == [blocks[0], blocks[2]], "where there are no whole layers"


@pytest.mark.parametrize(("count", "most", "kept"), [(3, 5, [0, 1, 2]), (9, 3, [0, 4, 8]), (7, 1, [0]), (2, 0, [])])
def test_selection_is_even_from_first_to_last(count, most, kept) -> None:
    assert select_evenly(range(count), most) == kept


def test_layer_names() -> None:
    assert layer_name("3") == "layer 3"
    assert layer_name("hidden.0") == "hidden.0"
    assert short("hidden.0") == "hidden.0"
    assert short("transformer.encoder.layers.11.self_attention.in_proj_weight") == (
        "…layers.11.self_attention.in_proj_weight"
    )
    assert len(short("x" * 90)) == LONGEST + 1

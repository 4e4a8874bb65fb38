"""Budgets: never exceeded, every template used, and the published counts without allocating a network."""

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enfold.ensembles.common.template_budget import Group, Layout, Mix, Terms, make_layout, round_robin
from enfold.errors import EnfoldError


def group(layers: int, size: int, name: str = "g") -> Group:
    return Group(tuple(f"{name}{size}.{layer}" for layer in range(layers)), size)


@st.composite
def problems(draw, **settings):
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(2, 40)), min_size=1, max_size=4))
    groups = [group(layers, size, f"g{place}") for place, (layers, size) in enumerate(shapes)]
    total = sum(each.total for each in groups)
    fixed = draw(st.integers(0, 50))
    terms = {
        "budget": draw(st.integers(1, 6 * (total + fixed))),
        "fixed": fixed,
        "network": total + fixed,
        "num_members": draw(st.integers(1, 5)),
        "max_templates": draw(st.integers(1, 6)),
        "disjoint": draw(st.booleans()),
        "count_coefficients": draw(st.booleans()),
        "thin": draw(st.booleans()),
        "single_blob": draw(st.sampled_from([None, True, False])),
        "upsample": draw(st.booleans()),
    }
    return groups, Terms(**{**terms, **settings})


def stored(groups: list[Group], terms: Terms, layout: Layout) -> int:
    """Counted independently: templates, ordinary layers, fixed parameters, and coefficients if they count."""
    mixed = {mix.group for mix in layout.mixes}
    templates = layout.blob or sum(mix.templates * mix.group.size for mix in layout.mixes)
    ordinary = sum(each.total for each in groups if each not in mixed)
    coefficients = sum(terms.num_members * len(mix.group.names) * mix.per_layer for mix in layout.mixes)
    assert coefficients == layout.coefficients
    return terms.fixed + templates + ordinary + (coefficients if terms.count_coefficients else 0)


@settings(max_examples=25)
@given(problems())
def test_a_budget_is_never_exceeded_and_the_count_is_exact(problem):
    groups, terms = problem
    try:
        layout = make_layout(groups, terms)
    except EnfoldError:
        return
    assert layout.counted == stored(groups, terms, layout) <= terms.budget
    assert all(1 <= mix.per_layer <= terms.max_templates for mix in layout.mixes)
    if terms.single_blob is not None:
        assert bool(layout.blob) == terms.single_blob


@settings(max_examples=25)
@given(problems())
def test_every_template_is_used_and_as_often_as_the_others(problem):
    groups, terms = problem
    try:
        layout = make_layout(groups, terms)
    except EnfoldError:
        return
    for mix in layout.mixes:
        if layout.blob:
            break
        index = round_robin(mix, terms.num_members, terms.disjoint)
        used = Counter(template for rows in index for row in rows for template in row)
        assert set(used) == set(range(mix.templates))
        assert all(len(set(row)) == mix.per_layer for rows in index for row in rows)
        per_member = 1 if terms.disjoint else terms.num_members
        assert max(used.values()) - min(used.values()) <= per_member
    takers = terms.num_members if terms.disjoint else 1
    if layout.blob:
        pieces = sum(len(mix.group.names) * mix.per_layer * layout.piece(mix) for mix in layout.mixes)
        assert layout.blob <= pieces * takers


@settings(max_examples=25)
@given(problems(budget=0))
def test_the_error_names_the_smallest_possible_budget(problem):
    groups, terms = problem
    with pytest.raises(EnfoldError) as caught:
        make_layout(groups, terms)
    named = re.search(r"is (\d+) parameters, got 0", str(caught.value))
    if named is None:
        assert "set thin=True or single_blob=True" in str(caught.value)
        assert terms.single_blob is False
        return
    smallest = int(named[1])
    lowest = Terms(**{**vars(terms), "budget": smallest})
    assert make_layout(groups, lowest).counted <= smallest
    with pytest.raises(EnfoldError, match=f"is {smallest} parameters, got {smallest - 1}"):
        make_layout(groups, Terms(**{**vars(terms), "budget": smallest - 1}))


def test_banks_grow_in_proportion_to_their_layers():
    groups = [group(2, 100), group(6, 10)]
    terms = Terms(budget=260, fixed=0, network=260, count_coefficients=False, single_blob=False)
    assert [mix.templates for mix in make_layout(groups, terms).mixes] == [2, 6]
    assert [mix.per_layer for mix in make_layout(groups, terms).mixes] == [2, 5]
    half = Terms(budget=130, fixed=0, network=260, count_coefficients=False, single_blob=False)
    assert [mix.templates for mix in make_layout(groups, half).mixes] == [1, 3]
    one_more = Terms(budget=259, fixed=0, network=260, count_coefficients=False, single_blob=False)
    assert [mix.templates for mix in make_layout(groups, one_more).mixes] == [2, 5]  # the larger first


def test_unused_templates_are_not_stored():
    groups, ample = [group(3, 10)], {"budget": 10**6, "fixed": 0, "network": 30, "max_templates": 2}
    assert make_layout(groups, Terms(**ample)).mixes[0].templates == 3 * 2
    assert make_layout(groups, Terms(**ample, disjoint=True, num_members=5)).mixes[0].templates == 5 * 3 * 2
    assert make_layout(groups, Terms(**ample, single_blob=True)).blob == 3 * 2 * 10


def test_the_blob_is_used_where_banks_would_have_one_template():
    groups = [group(4, 100), group(1, 50)]
    settings = {"fixed": 0, "network": 450, "count_coefficients": False}
    assert make_layout(groups, Terms(budget=249, **settings)).blob == 249
    assert make_layout(groups, Terms(budget=250, **settings)).blob == 0  # 50 for the ordinary layer and two templates
    once = make_layout([group(1, 100), group(1, 50)], Terms(budget=150, **settings))
    assert once.blob == 150
    assert [mix.per_layer for mix in once.mixes] == [1, 3]


def test_round_robin_by_hand():
    mix = Mix(group(3, 1), per_layer=2, templates=5)
    assert round_robin(mix, 2, disjoint=False) == [[[0, 1], [2, 3], [4, 0]]] * 2
    assert round_robin(mix, 2, disjoint=True) == [[[0, 1], [2, 3], [4, 0]], [[1, 2], [3, 4], [0, 1]]]


@settings(max_examples=25)
@given(problems(disjoint=True, single_blob=False, thin=True))
def test_members_per_template_are_the_members_that_use_it(problem):
    groups, terms = problem
    try:
        layout = make_layout(groups, terms)
    except EnfoldError:
        return
    for mix in layout.mixes:
        index = round_robin(mix, terms.num_members, disjoint=True)
        users = {(member, template) for member, rows in enumerate(index) for row in rows for template in row}
        assert layout.members_per_template(mix, terms.num_members, disjoint=True) == pytest.approx(
            len(users) / mix.templates
        )
        assert layout.members_per_template(mix, terms.num_members, disjoint=False) == terms.num_members

"""A budget of parameters, split into banks of templates or one blob; numbers only, so that it costs nothing to ask.

A group is the L layers of one type and shape. Its bank holds n templates of which each layer mixes k = min(n, the cap).
Banks grow in proportion to their layers, n_g / L_g alike in all groups, until the next template does not fit.

The blob is one vector that every layer sees as templates of its own size: layers take consecutive pieces of it, from
the start again when its end is reached.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from enfold.errors import EnfoldError


@dataclass(frozen=True)
class Group:
    """Layers of one type and shape, by the names of their weights."""

    names: tuple[str, ...]
    size: int  # of one layer's weight

    @property
    def total(self) -> int:
        """Of all layers."""
        return self.size * len(self.names)


@dataclass(frozen=True)
class Terms:
    """How much may be stored, for whom, and in which form."""

    budget: int
    fixed: int  # what is stored in any case and counts
    network: int  # parameters of one network, for error messages
    num_members: int = 4
    max_templates: int = 5  # that a layer mixes
    disjoint: bool = False  # members take other templates as long as there are some
    count_coefficients: bool = True
    thin: bool = False  # a shape that occurs once has a bank too, instead of one layer for all members
    single_blob: bool | None = None
    upsample: bool = True  # a layer larger than the blob is interpolated


@dataclass(frozen=True)
class Mix:
    """What the layers of one group are made of."""

    group: Group
    per_layer: int  # k, the templates that a layer mixes
    templates: int = 0  # n, in the group's own bank; 0: pieces of the blob


@dataclass(frozen=True)
class Layout:
    """What is stored: a bank for each mix, or one blob for all."""

    mixes: tuple[Mix, ...]
    blob: int  # 0: banks
    counted: int  # parameters that count against the budget
    coefficients: int  # of all members

    def piece(self, mix: Mix) -> int:
        """Of a blob: the size of one template, which is interpolated where the layer is larger."""
        return min(mix.group.size, self.blob)

    def sharers(self, mix: Mix, num_members: int, disjoint: bool) -> float:
        """How many members use one template of a mix, on average over its templates."""
        if not disjoint:
            return num_members
        if self.blob:
            return num_members * min(1.0, sum(_pieces(each, self.blob) for each in self.mixes) / self.blob)
        return num_members * min(1.0, len(mix.group.names) * mix.per_layer / mix.templates)


def round_robin(mix: Mix, num_members: int, disjoint: bool) -> list[list[list[int]]]:
    """The templates of a bank that each layer of each member mixes, (M, L, k): one counter runs through the bank.

    Every template is used before any is used again. It starts anew for each member, so that all mix the same ones,
    or runs on (disjoint).
    """
    counter, found = 0, []
    for _ in range(num_members):
        counter = counter if disjoint else 0
        rows = []
        for _ in mix.group.names:
            rows.append([(counter + step) % mix.templates for step in range(mix.per_layer)])
            counter += mix.per_layer
        found.append(rows)
    return found


def lay_out(groups: Sequence[Group], terms: Terms) -> Layout:
    """Banks or a blob, within the budget; the reason in a sentence where that is impossible.

    Left open, banks are taken if at least half of the weights are mixed from banks of two templates or more: with one,
    members would differ by factors alone.
    """
    banks = None if terms.single_blob else _banks(groups, terms)
    blob = None if terms.single_blob is False else _blob(groups, terms)
    rich = sum(mix.group.total for mix in banks.mixes if mix.templates > 1) if banks else 0
    chosen = banks if blob is None or 2 * rich >= sum(group.total for group in groups) else blob
    if chosen is None:
        raise _too_small(groups, terms)
    return chosen


def _banks(groups: Sequence[Group], terms: Terms) -> Layout | None:
    """Start with one template a bank, then raise the lowest n / L; in the last round, what still fits."""
    banked = _banked(groups, terms)
    left = terms.budget - _least_banks(groups, terms)
    if left < 0 or not banked:
        return None
    sizes = [1] * len(banked)
    growing, level = set(range(len(banked))), math.inf
    while growing:
        # Ties: the largest layers first, as the rest may still fit where they do not.
        place = min(growing, key=lambda at: ((sizes[at] + 1) / len(banked[at].names), -banked[at].size, at))
        group, reached = banked[place], (sizes[place] + 1) / len(banked[place].names)
        price = _price(group, sizes[place] + 1, terms) - _price(group, sizes[place], terms)
        if reached > level:
            break
        if sizes[place] == _slots(group, terms) or price > left:
            level = reached if price > left else level
            growing.remove(place)
            continue
        sizes[place] += 1
        left -= price
    mixes = [Mix(group, min(n, terms.max_templates), n) for group, n in zip(banked, sizes, strict=True)]
    return Layout(tuple(mixes), 0, terms.budget - left, _coefficients(mixes, terms))


def _banked(groups: Sequence[Group], terms: Terms) -> list[Group]:
    return [group for group in groups if terms.thin or len(group.names) > 1]


def _slots(group: Group, terms: Terms) -> int:
    """As many templates can be used."""
    return len(group.names) * terms.max_templates * (terms.num_members if terms.disjoint else 1)


def _price(group: Group, templates: int, terms: Terms) -> int:
    per_layer = min(templates, terms.max_templates)
    coefficients = terms.num_members * len(group.names) * per_layer
    return templates * group.size + (coefficients if terms.count_coefficients else 0)


def _least_banks(groups: Sequence[Group], terms: Terms) -> int:
    banked = _banked(groups, terms)
    ordinary = sum(group.total for group in groups if group not in banked)
    return terms.fixed + ordinary + sum(_price(group, 1, terms) for group in banked)


def _coefficients(mixes: Sequence[Mix], terms: Terms) -> int:
    return terms.num_members * sum(len(mix.group.names) * mix.per_layer for mix in mixes)


def _blob(groups: Sequence[Group], terms: Terms) -> Layout | None:
    """The largest blob that fits with its coefficients, and of which every number is used."""
    room = terms.budget - terms.fixed
    size = bisect_right(range(room + 1), room, key=lambda blob: _blob_price(groups, blob, terms)) - 1
    if size < _least_blob(groups, terms):
        return None
    used = sum(_pieces(mix, size) for mix in _views(groups, size, terms))
    size = min(size, used * (terms.num_members if terms.disjoint else 1))
    mixes = _views(groups, size, terms)
    return Layout(tuple(mixes), size, terms.fixed + _blob_price(groups, size, terms), _coefficients(mixes, terms))


def _views(groups: Sequence[Group], blob: int, terms: Terms) -> list[Mix]:
    return [Mix(group, max(1, min(blob // group.size, terms.max_templates))) for group in groups]


def _pieces(mix: Mix, blob: int) -> int:
    return len(mix.group.names) * mix.per_layer * min(mix.group.size, blob)


def _blob_price(groups: Sequence[Group], blob: int, terms: Terms) -> int:
    return blob + (_coefficients(_views(groups, blob, terms), terms) if terms.count_coefficients else 0)


def _least_blob(groups: Sequence[Group], terms: Terms) -> int:
    return 1 if terms.upsample else max(group.size for group in groups)


def _too_small(groups: Sequence[Group], terms: Terms) -> EnfoldError:
    least = []
    if not terms.single_blob and _banked(groups, terms):
        least.append(_least_banks(groups, terms))
    if terms.single_blob is not False:
        least.append(terms.fixed + _blob_price(groups, _least_blob(groups, terms), terms))
    if not least:
        return EnfoldError(
            "banks of templates need layers of the same type and shape, but each of the "
            f"{len(groups)} shapes occurs once: set thin=True or single_blob=True"
        )
    part = math.ceil(1000 * min(least) / terms.network) / 1000
    return EnfoldError(
        f"the smallest possible budget for {terms.num_members} members of this network with these settings is "
        f"{min(least)} parameters, got {terms.budget}: pass at least that many, or {part} (with a decimal point, "
        "networks are counted)"
    )

"""Template budget: a budget of parameters, divided into banks of templates or used for one blob.

A group is the L layers of one type and shape. Its bank has n templates, of which each layer mixes
k = min(n, max_templates). Banks grow in proportion to their layers, with equal n_g / L_g in all groups, until the next
template does not fit.

The blob is one vector whose consecutive pieces, cyclically, are the templates of the layers.
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
    size: int  # parameters of one weight

    @property
    def total(self) -> int:
        """The number of parameters of all layers."""
        return self.size * len(self.names)


@dataclass(frozen=True)
class Terms:
    """The budget and the options that determine a layout; see `MixtureEnsemble`."""

    budget: int
    fixed: int  # parameters that are not mixed, but count
    network: int  # parameters of one network, for error messages
    num_members: int = 4
    max_templates: int = 5  # per layer
    disjoint: bool = False  # members use different templates where possible
    count_coefficients: bool = True
    thin: bool = False  # whether a shape that occurs once has a bank, instead of one layer for all members
    single_blob: bool | None = None
    upsample: bool = True  # whether the blob is interpolated for larger layers


@dataclass(frozen=True)
class Mix:
    """The templates of one group of layers."""

    group: Group
    per_layer: int  # k: templates that a layer mixes
    templates: int = 0  # n: templates in the bank of the group; 0: pieces of the blob


@dataclass(frozen=True)
class Layout:
    """The stored parameters: a bank for each mix, or one blob for all."""

    mixes: tuple[Mix, ...]
    blob: int  # 0: banks
    counted: int  # parameters that count against the budget
    coefficients: int  # number of coefficients of all members

    def piece(self, mix: Mix) -> int:
        """Return the size of one template of a blob, which is interpolated for larger layers."""
        return min(mix.group.size, self.blob)

    def members_per_template(self, mix: Mix, num_members: int, disjoint: bool) -> float:
        """Return the mean number of members that use a template of this mix.

        Args:
            mix: The templates of one group of layers.
            num_members: The number of members.
            disjoint: Whether members use different templates.
        """
        if not disjoint:
            return num_members
        if self.blob:
            return num_members * min(1.0, sum(_pieces(each, self.blob) for each in self.mixes) / self.blob)
        return num_members * min(1.0, len(mix.group.names) * mix.per_layer / mix.templates)


def round_robin(mix: Mix, num_members: int, disjoint: bool) -> list[list[list[int]]]:
    """Return the indices of the templates that each layer of each member mixes, (M, L, k).

    Templates are assigned in turn, so that each is used before any is used again. Assignment starts again for each
    member, so that all mix the same templates, or continues with `disjoint`.
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


def make_layout(groups: Sequence[Group], terms: Terms) -> Layout:
    """Return banks or a blob within the budget.

    With `single_blob=None`, banks are used if at least half of the weights are mixed from two or more templates: with
    one template, members would only differ by a factor.

    Raises:
        EnfoldError: If the budget is too small.
    """
    banks = None if terms.single_blob else _banks(groups, terms)
    blob = None if terms.single_blob is False else _blob(groups, terms)
    rich = sum(mix.group.total for mix in banks.mixes if mix.templates > 1) if banks else 0
    chosen = banks if blob is None or 2 * rich >= sum(group.total for group in groups) else blob
    if chosen is None:
        raise _too_small(groups, terms)
    return chosen


def _banks(groups: Sequence[Group], terms: Terms) -> Layout | None:
    """Return banks: one template each, then repeatedly one more for the lowest n / L, while the budget allows it."""
    repeated = _repeated_groups(groups, terms)
    left = terms.budget - _least_banks(groups, terms)
    if left < 0 or not repeated:
        return None
    sizes = [1] * len(repeated)
    growing, level = set(range(len(repeated))), math.inf
    while growing:
        # Ties: the largest layers first, as smaller ones may still fit when these do not.
        place = min(growing, key=lambda at: ((sizes[at] + 1) / len(repeated[at].names), -repeated[at].size, at))
        group, reached = repeated[place], (sizes[place] + 1) / len(repeated[place].names)
        price = _price(group, sizes[place] + 1, terms) - _price(group, sizes[place], terms)
        if reached > level:
            break
        if sizes[place] == _slots(group, terms) or price > left:
            level = reached if price > left else level
            growing.remove(place)
            continue
        sizes[place] += 1
        left -= price
    mixes = [Mix(group, min(n, terms.max_templates), n) for group, n in zip(repeated, sizes, strict=True)]
    return Layout(tuple(mixes), 0, terms.budget - left, _coefficients(mixes, terms))


def _repeated_groups(groups: Sequence[Group], terms: Terms) -> list[Group]:
    return [group for group in groups if terms.thin or len(group.names) > 1]


def _slots(group: Group, terms: Terms) -> int:
    """Return the largest number of templates that can be used."""
    return len(group.names) * terms.max_templates * (terms.num_members if terms.disjoint else 1)


def _price(group: Group, templates: int, terms: Terms) -> int:
    per_layer = min(templates, terms.max_templates)
    coefficients = terms.num_members * len(group.names) * per_layer
    return templates * group.size + (coefficients if terms.count_coefficients else 0)


def _least_banks(groups: Sequence[Group], terms: Terms) -> int:
    repeated = _repeated_groups(groups, terms)
    ordinary = sum(group.total for group in groups if group not in repeated)
    return terms.fixed + ordinary + sum(_price(group, 1, terms) for group in repeated)


def _coefficients(mixes: Sequence[Mix], terms: Terms) -> int:
    return terms.num_members * sum(len(mix.group.names) * mix.per_layer for mix in mixes)


def _blob(groups: Sequence[Group], terms: Terms) -> Layout | None:
    """Return the largest blob that fits with its coefficients and is used completely."""
    available = terms.budget - terms.fixed
    size = bisect_right(range(available + 1), available, key=lambda blob: _blob_price(groups, blob, terms)) - 1
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
    if not terms.single_blob and _repeated_groups(groups, terms):
        least.append(_least_banks(groups, terms))
    if terms.single_blob is not False:
        least.append(terms.fixed + _blob_price(groups, _least_blob(groups, terms), terms))
    if not least:
        return EnfoldError(
            "network must have layers of the same type and shape for banks of templates, but each of the "
            f"{len(groups)} shapes occurs once: set thin=True or single_blob=True"
        )
    multiple = math.ceil(1000 * min(least) / terms.network) / 1000
    return EnfoldError(
        f"budget is too small: the smallest possible budget for {terms.num_members} members of this network with these "
        f"options is {min(least)} parameters, got {terms.budget}: pass at least that many as an int, or "
        f"budget={multiple} networks"
    )

"""Labels of axes: which axes are permuted together, and how reshapes and slices divide them.

A label represents indices that are permuted together wherever it appears. An axis is a *term*: a concatenation of
products of labels. A channel axis is one label; channels flattened with H x W positions are a product of three; a
concatenation is a sequence. Labels are unified as operations require, divided by reshapes and cut by slices; axes
without a rule are fixed, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

Product = tuple[int, ...]  # labels, the outermost first; () is a single place
Term = tuple[Product, ...]  # products, one behind the other

ONE: Term = ((),)


class AxisLabels:
    """Labels with their sizes and the relations between them."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._sizes: list[int] = []
        self._reasons: dict[int, str] = {}
        self._meaning: dict[int, Term] = {}  # the labels that a label was divided or cut into
        self._inside: dict[int, int] = {}  # the label next to the left when a label was divided
        self._members: dict[
            int, tuple[int, list[int]]
        ] = {}  # of a label with different values at each index of another
        self._repeats: list[tuple[Product, Term]] = []  # sequences, and the products along which they are repeated
        self._opened: set[int] = set()  # labels whose indices have labels of their own

    # Labels

    def free(self, size: int) -> Term:
        """Return an axis without known constraints."""
        return (self._new(size, None if size else "it has no places"),)

    def fixed_axis(self, size: int, reason: str) -> Term:
        """Return an axis that cannot be permuted."""
        return (self._new(size, reason),)

    def _new(self, size: int, reason: str | None = None) -> Product:
        if size == 1:
            return ()
        self._parent.append(len(self._parent))
        self._sizes.append(size)
        if reason is not None:
            self._reasons[self._parent[-1]] = reason
        return (self._parent[-1],)

    def root(self, label: int) -> int:
        """Return the representative of all labels unified with this one."""
        while self._parent[label] != label:
            self._parent[label] = self._parent[self._parent[label]]
            label = self._parent[label]
        return label

    def reason(self, label: int) -> str | None:
        """Return why a label is fixed; None if it is not."""
        return self._reasons.get(self.root(label))

    def size(self, term: Term) -> int:
        """Return the length of an axis."""
        return sum(self.places(product) for product in term)

    def places(self, product: Iterable[int]) -> int:
        """Return the number of indices of one product."""
        return prod(self._sizes[label] for label in product)

    # Expansion into undivided labels

    def expand(self, term: Term) -> Term:
        """Return the term in labels that are neither divided nor cut."""
        return tuple(found for product in term for found in self._expand(product))

    def _expand(self, product: Product, *, open_: bool = True) -> list[Product]:
        found: list[Product] = [()]
        for index, label in enumerate(product):
            root = self.root(label)
            if open_ and root in self._opened:
                rest = product[index + 1 :]
                parts = [
                    part for place in range(self._sizes[root]) for part in self._expand(self._at(rest, root, place))
                ]
                return self._multiply(found, parts)
            meaning = self._meaning.get(root)
            inner: list[Product] = (
                [(root,)] if meaning is None else [p for m in meaning for p in self._expand(m, open_=open_)]
            )
            found = self._multiply(found, inner)
        return found

    def _multiply(self, left: list[Product], right: list[Product]) -> list[Product]:
        if len(right) == 1:
            return [product + right[0] for product in left]
        if any(left) and all(self.reason(label) is not None for product in right for label in product):
            whole = self._new(self.size(tuple(right)), "it is a sequence of fixed parts")
            return [product + whole for product in left]
        found: list[Product] = []
        for product in left:  # each index contains the complete sequence
            if product:
                self._repeats.append((product, tuple(right)))
            found += right * self.places(product)
        return found

    def fix_repeats(self) -> None:
        """Fix the labels along which sequences with free parts are repeated; call it after tracing."""
        for product, sequence in list(self._repeats):
            if any(self.reason(label) is None for part in self.expand(sequence) for label in part):
                self._fix_labels(product, "a sequence is repeated along it")

    def merge(self, terms: Sequence[Term]) -> Term:
        """Return axes merged into one, the first outermost."""
        found: list[Product] = [()]
        if all(len(term) == 1 for term in terms):
            return (tuple(label for term in terms for label in term[0]),)
        for term in terms:
            found = self._multiply(found, list(self.expand(term)))
        return tuple(found)

    # Constraints

    def fix(self, term: Term, reason: str) -> None:
        """Fix the order along an axis."""
        for product in self.expand(term):
            self._fix_labels(product, reason)

    def _fix_labels(self, product: Product, reason: str) -> None:
        for label in product:
            root = self.root(label)
            if root in self._meaning:
                self.fix(((root,),), reason)
            elif root not in self._reasons:
                self._reasons[root] = reason
                for member in self._members.pop(root, (0, []))[1]:
                    self._fix_labels((member,), reason)

    def unify(self, one: Term, other: Term, reason: str) -> None:
        """Tie two axes of the same size, so that they are permuted together.

        Args:
            one: The first axis.
            other: The second axis.
            reason: Why the axes are treated so, for messages.
        """
        left, right = list(self.expand(one)), list(self.expand(other))
        place = 0
        while place < min(len(left), len(right)):
            sizes = self.places(left[place]), self.places(right[place])
            if sizes[0] != sizes[1]:
                longer = left if sizes[0] > sizes[1] else right
                longer[place : place + 1] = self._cut(longer[place], min(sizes), reason)
                left, right = list(self.expand(tuple(left))), list(self.expand(tuple(right)))
                place = 0  # a label that was cut may occur in earlier products, too
            else:
                place += 1
        for first, second in zip(left, right, strict=True):
            self._pair(first, second, reason)

    def _pair(self, left: Product, right: Product, reason: str) -> None:
        """Unify two products of the same size."""
        while True:
            expanded = self._expand(left), self._expand(right)
            if max(len(found) for found in expanded) > 1:
                self.unify(tuple(expanded[0]), tuple(expanded[1]), reason)
                return
            left, right = expanded[0][0], expanded[1][0]
            at = next((k for k, (a, b) in enumerate(zip(left, right, strict=False)) if self._differ(a, b)), None)
            if at is None:
                break
            small = min(self._sizes[left[at]], self._sizes[right[at]])
            swapped = self._sizes[left[at]] < self._sizes[right[at]]
            large, other = (right, left) if swapped else (left, right)
            if self._sizes[large[at]] % small:
                self._fix_labels(left + right, reason)
                return
            large = large[:at] + self._divide(large[at], small) + large[at + 1 :]
            left, right = (other, large) if swapped else (large, other)
        for first, second in zip(left, right, strict=True):
            self._union(first, second)

    def _differ(self, one: int, other: int) -> bool:
        return self._sizes[one] != self._sizes[other]

    def _union(self, one: int, other: int) -> None:
        one, other = self.root(one), self.root(other)
        if one == other:
            return
        why = self._reasons.get(one) or self._reasons.get(other)
        if why is not None:
            self._fix_labels((one, other), why)
        ours, theirs = self._members.pop(one, None), self._members.pop(other, None)
        inside = [self.root(self._inside[label]) if label in self._inside else None for label in (one, other)]
        opened = bool({one, other} & self._opened)
        self._opened -= {one, other}
        self._parent[other] = one
        if opened:
            self._opened.add(one)
        if inside[0] != inside[1] or inside[0] is None:
            self._inside.pop(one, None)
        self._join_members(one, ours, theirs)

    def _join_members(
        self, root: int, ours: tuple[int, list[int]] | None, theirs: tuple[int, list[int]] | None
    ) -> None:
        if ours and theirs and self.root(ours[0]) == self.root(theirs[0]):
            self._members[root] = ours
            for first, second in zip(ours[1], theirs[1], strict=True):
                self._union(first, second)
            return
        for member in [*(ours or (0, []))[1], *(theirs or (0, []))[1]]:
            self._union(root, member)

    # Division and selection

    def _divide(self, label: int, outer: int) -> Product:
        """Split a label into outer x inner."""
        root = self.root(label)
        inner = self._sizes[root] // outer
        why = self._reasons.get(root)
        parts = self._new(outer, why) + self._new(inner, why)
        if why is None:
            self._bind(root, (parts,))
        return parts

    def _bind(self, root: int, meaning: Term) -> None:
        self._meaning[root] = meaning
        labels = [label for product in meaning for label in product]
        around = self._inside.get(root)
        for index, label in enumerate(labels):
            if len(meaning) == 1 and index:
                self._inside[label] = labels[index - 1]
            elif around is not None:
                self._inside[label] = around
        of, members = self._members.pop(root, (0, []))
        copies: list[list[int]] = []
        for member in members:
            copy = tuple(tuple(n for label in product for n in self._new(self._sizes[label])) for product in meaning)
            self._bind(self.root(member), copy)
            copies.append([label for product in copy for label in product])
        for index, label in enumerate(labels):
            if copies:
                self._members[label] = (of, [copy[index] for copy in copies])

    def _cut(self, product: Product, at: int, reason: str) -> tuple[Product, Product]:
        """Cut a product into two consecutive parts."""
        inner = self.places(product[1:])
        if at % inner:
            self._fix_labels(product, reason)
            return self._new(at, reason), self._new(self.places(product) - at, reason)
        root = self.root(product[0])
        why = self._reasons.get(root)
        first, second = self._new(at // inner, why), self._new(self._sizes[root] - at // inner, why)
        if why is None:
            self._bind(root, (first, second))
        return first + product[1:], second + product[1:]

    def cut(self, term: Term, sizes: Sequence[int], reason: str) -> list[Term]:
        """Cut an axis into consecutive parts of these sizes.

        Args:
            term: The axis.
            sizes: The sizes of the parts.
            reason: Why the axes are treated so, for messages.
        """
        queue, found = list(self.expand(term)), []
        for size in sizes:
            piece: list[Product] = []
            missing = size
            while missing:
                parts = self._expand(queue.pop(0))
                if len(parts) > 1:
                    queue[:0] = parts
                    continue
                if self.places(parts[0]) > missing:
                    head, tail = self._cut(parts[0], missing, reason)
                    parts, queue[:0] = [head], [tail]
                piece.append(parts[0])
                missing -= self.places(parts[0])
            found.append(tuple(piece) if piece else self.fixed_axis(0, reason))
        return found

    def split(self, term: Term, sizes: Sequence[int], reason: str) -> list[Term]:
        """Reshape an axis into axes of these sizes.

        Args:
            term: The axis.
            sizes: The sizes of the parts.
            reason: Why the axes are treated so, for messages.
        """
        if len(sizes) == 1:
            return [term]
        whole = [found for product in term for found in self._expand(product, open_=False)]
        if len(whole) == 1:
            return self._split_product(whole[0], sizes, reason)
        inner = prod(sizes[1:])
        if any(self.places(product) % inner for product in whole):  # each piece holds several products
            parts = self.cut(term, [inner] * sizes[0], reason)
            heads = self.fixed_axis(sizes[0], "it numbers the parts of a sequence")
        else:
            both = [
                self._split_product(product, [self.places(product) // inner, inner], reason)
                if self.places(product) > inner
                else [ONE, (product,)]
                for product in whole
            ]
            parts, heads = [pair[1] for pair in both], tuple(found for pair in both for found in pair[0])
        for part in parts[1:]:
            self.unify(parts[0], part, reason)
        return [heads, *self.split(parts[0], sizes[1:], reason)]

    def _split_product(self, product: Product, sizes: Sequence[int], reason: str) -> list[Term]:
        queue = list(product)
        found: list[Term] = []
        for size in sizes:
            taken: Product = ()
            while self.places(taken) < size:
                label = self.root(queue.pop(0))
                need = size // self.places(taken)
                if label in self._meaning:
                    queue[:0] = self._expand((label,), open_=False)[0]
                elif need % self._sizes[label] == 0:
                    taken += (label,)
                elif self._sizes[label] % need == 0:
                    queue[:0] = self._divide(label, need)
                else:
                    self._fix_labels(product, reason)
                    return [self.fixed_axis(one, reason) for one in sizes]
            found.append((taken,))
        return found

    def at(self, terms: Sequence[Term], axis: int, place: int, reason: str) -> list[Term]:
        """Return the remaining axes when one index of an axis is selected.

        Where the other axes were divided from the same label, each index gets labels of its own: queries, keys and
        values of a packed projection are permuted independently.

        Args:
            terms: The axes.
            axis: The index of the axis.
            place: The selected index.
            reason: Why the axes are treated so, for messages.
        """
        others = [term for index, term in enumerate(terms) if index != axis]
        own = self._expand(terms[axis][0], open_=False) if len(terms[axis]) == 1 else []
        if len(own) != 1 or len(own[0]) != 1 or self.reason(own[0][0]) is not None:
            size = self.size(terms[axis])
            if any(self.reason(label) is None for product in self.expand(terms[axis]) for label in product):
                self.cut(terms[axis], [place, 1, size - place - 1], reason)
            return others
        chosen = own[0][0]
        for term in others:
            for label in {label for product in self.expand(term) for label in product}:
                if label not in self._members and self._within(label, chosen) and label not in self._reasons:
                    copies = [self._new(self._sizes[label])[0] for _ in range(self._sizes[chosen])]
                    self._members[label] = (chosen, copies)
                    self._opened.add(chosen)
        if self.root(chosen) not in self._opened:
            self.cut(terms[axis], [place, 1, self._sizes[chosen] - place - 1], reason)
            return others
        return [tuple(self._at(p, chosen, place) for product in term for p in self._expand(product)) for term in others]

    def _within(self, label: int, chosen: int) -> bool:
        seen: set[int] = set()
        while label in self._inside and label not in seen:
            seen.add(label)
            label = self.root(self._inside[label])
            if label == self.root(chosen):
                return True
        return False

    def _at(self, product: Product, chosen: int, place: int) -> Product:
        """Return the product with the labels that it has at one index of another label."""
        parts = self._expand(product)
        if len(parts) > 1:
            return product
        found: list[int] = []
        for label in parts[0]:
            of, members = self._members.get(label, (None, []))
            found.append(members[place] if of is not None and self.root(of) == self.root(chosen) else label)
        return tuple(found)

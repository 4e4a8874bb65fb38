"""Every setting of every method says what it means, in its method's own file or in one place for all."""

from dataclasses import dataclass

import pytest

from enfold.registry import ROOMS, methods
from enfold.settings import COMMON, has_own_number, meanings


@dataclass(frozen=True)
class Plain:
    first: int = 1  # what comes first
    second: tuple[str, ...] = (
        "a",
        "b",
    )  # of two lines: more
    seed: int = 0
    silent: int = 3


@dataclass(frozen=True)
class Derived(Plain):
    first: int = 2
    silent: int = 4  # now it speaks


def test_the_comment_behind_a_field_is_its_meaning():
    assert meanings(Plain) == {
        "first": "what comes first",
        "second": "of two lines: more",
        "seed": COMMON["seed"],
        "silent": "",
    }
    assert meanings(Derived) == {**meanings(Plain), "silent": "now it speaks"}


@pytest.mark.parametrize(("room", "name"), [(room, name) for room in ROOMS for name in methods(room)])
def test_every_setting_of_a_method_has_a_meaning(room, name):
    kind = methods(room)[name].kind
    for setting, meaning in meanings(kind).items():
        assert len(meaning) > 3, f"add a comment behind {kind.__name__}.{setting}"
        assert "|" not in meaning, "it stands in a table"


def test_methods_with_a_number_of_members_of_their_own():
    own = {name for name, method in methods("share").items() if has_own_number(method.kind)}
    assert own == {"mimo", "snapshot_ensembles", "subspace", "swa", "swag"}

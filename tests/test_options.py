"""Every setting of every method says what it means, in its method's own file or in one place for all."""

from dataclasses import dataclass

import numpy as np
import pytest
from enfold.merge.common.folding import Composable

import enfold as library
from enfold.options import COMMON, has_own_number, meanings
from enfold.registry import ROOMS, methods


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
    assert own == {"mimo", "snapshot_ensemble", "subspace_sampling", "swa", "swag"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: library.ZipIt(discount="a"), "the discount must be a number, got 'a': 0.3 is usual"),
        (lambda: library.WeightMatching(rounds="3"), "the rounds must be a whole number, got '3': 100 is usual"),
        (lambda: library.WeightMatching(rounds=2.5), "the rounds must be a whole number, got 2.5"),
        (lambda: library.ActivationMatching(examples=10.5), "the examples must be a whole number, got 10.5"),
        (lambda: library.C2M3(iterations=2.5), "the iterations must be a whole number, got 2.5"),
        (lambda: library.StraightThrough(epochs=1.5), "the epochs must be a whole number, got 1.5"),
        (lambda: library.PermAVG(temperature="1"), "the temperature must be a number, got '1': 1.0 is usual"),
        (lambda: library.PermAVG(plan=5), "the plan must be a TrainConfig, got 5: choose one"),
        (lambda: library.PermAVG(universe=1), "the universe must be true or false, got 1"),
        (lambda: library.Repair(weights=0.5), "the weights must be a tuple, each value of it a number, got 0.5"),
        (lambda: library.Repair(weights=("a", "b")), "each value of it a number, got .'a', 'b'.: None is usual"),
        (lambda: library.KD(alpha="a"), "the alpha must be a number, got 'a': 1.0 is usual"),
        (lambda: library.KD(alpha=True), "the alpha must be a number, got True"),
    ],
)
def test_settings_of_another_type_are_refused_at_once(make, says):
    with pytest.raises(library.EnfoldError, match=says):
        make()


def test_settings_of_the_right_types_are_taken():
    """Whole numbers are numbers too, also those of numpy."""
    assert library.PermAVG(temperature=2, matched=np.float32(12)).matched == 12
    assert library.WeightMatching(rounds=np.int64(3)).rounds == 3
    assert library.Repair(weights=[1, 0.5]).weights == [1, 0.5]


@dataclass(frozen=True)
class Pair(Composable):
    needed: int
    ends: tuple[int, str] = (0, "a")
    free: object = None


def test_types_of_all_kinds():
    assert Pair(1, (2, "b"), free=Pair).ends == (2, "b")
    with pytest.raises(library.EnfoldError, match="the needed must be a whole number, got 'x': choose one"):
        Pair("x")
    for ends in ((1, 2), (1,), "ab"):
        with pytest.raises(library.EnfoldError, match="the ends must be a tuple"):
            Pair(1, ends)


def test_values_to_choose_from_are_told():
    assert meanings(library.BatchEnsemble)["bias_start"].endswith("(one of network, zeros)")
    assert "(one of" not in meanings(library.WeightMatching)["repair"], "they are told already"

"""Arguments of methods: read from signature and docstring, and checked when a method is called."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import nn

import enfold
from enfold.arguments import (
    REQUIRED,
    arguments_of,
    check_arguments,
    check_value,
    checked,
    describe_arguments,
    describe_rule,
    describe_type,
)
from enfold.errors import EnfoldError
from enfold.registry import PACKAGES, methods
from enfold.run.step_methods import has_own_number

EVERY = [pytest.param(method, id=f"{kind}-{name}") for kind in PACKAGES for name, method in methods(kind).items()]
Fraction = Annotated[float, Field(ge=0, lt=1)]


@checked
@dataclass(frozen=True)
class Options:
    """Options of all types.

    More about them.

    Args:
        count: How many there are,
            in two lines.
        pair: Two values (of
            two types).
        rate: A rate: more than 0.
        mode: One of two.
        undescribed_type: Anything.
    """

    count: Annotated[int, Field(ge=1)]
    pair: tuple[int, str] = (0, "a")
    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    mode: Literal["sum", "mean"] = "sum"
    undescribed_type: object = None
    silent: bool = False


@checked
def mix(models: Any, train: Any = None, *, weights: tuple[Fraction, ...] = (), **settings: Any) -> Any:
    """Return the weights.

    Args:
        models: The models.
        train: The data.
        weights: The weights (each of a model).
        **settings: More settings.

    Returns:
        The weights.
    """
    return weights


def test_arguments_are_read_from_signature_and_docstring():
    found = arguments_of(Options)
    assert list(found) == ["count", "pair", "rate", "mode", "undescribed_type", "silent"]
    assert found["count"].help == "How many there are, in two lines."
    assert found["pair"].help == "Two values (of two types)."
    assert found["rate"].help == "A rate: more than 0."
    assert found["silent"].help == ""
    assert (found["count"].default, found["count"].default_text) == (REQUIRED, "required")
    assert (found["mode"].default_text, found["mode"].choices) == ("'sum'", ("sum", "mean"))
    assert found["count"].choices == ()
    assert [found[name].type_name for name in ("count", "rate")] == ["int >= 1", "float > 0 | None"]


def test_networks_and_data_are_not_options():
    assert list(arguments_of(mix)) == ["weights"]
    assert describe_arguments(mix.__doc__ and "Return.\n\nArgs:\n    a: b\n    **c: d\n\nReturns:\n    e: f") == {
        "a": "b",
        "c": "d",
    }
    assert describe_arguments("No section.") == {}


@pytest.mark.parametrize("method", EVERY)
def test_every_option_of_a_method_is_documented(method):
    for argument in method.arguments.values():
        assert len(argument.help) > 3, f"document {argument.name} in the Args section of {method.target.__name__}"
        assert "|" not in argument.help, "it is a cell of a table"
        assert argument.hint is not Any, f"declare a type for {argument.name} of {method.target.__name__}"


@pytest.mark.parametrize("method", EVERY)
def test_the_choices_of_an_option_are_documented(method):
    for argument in method.arguments.values():
        shown = f"{argument.help} {argument.type_name}"
        assert all(str(choice) in shown for choice in argument.choices)


@pytest.mark.parametrize("method", EVERY)
def test_defaults_are_accepted(method):
    defaults = {name: each.default for name, each in method.arguments.items() if each.default is not REQUIRED}
    assert method.check(defaults) == defaults


def test_methods_with_a_published_number_of_members():
    own = {name for name, method in methods("ensemble").items() if has_own_number(method)}
    assert own >= {"mimo", "snapshot_ensemble", "subspace_sampling", "swa", "swag"}
    assert not own & {"batch_ensemble", "bagging", "film_ensemble"}


NETWORKS = [nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2)]
DATA = (torch.zeros(6, 4), torch.arange(6) % 3)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: enfold.merge.zipit(NETWORKS, DATA, discount="a"), "discount"),
        (lambda: enfold.merge.weight_matching(NETWORKS, rounds="3"), "rounds"),
        (lambda: enfold.merge.weight_matching(NETWORKS, rounds=2.5), "rounds"),
        (lambda: enfold.merge.activation_matching(NETWORKS, DATA, examples=10.5), "examples"),
        (lambda: enfold.merge.c2m3(NETWORKS, DATA, iterations=2.5), "iterations"),
        (lambda: enfold.merge.straight_through(NETWORKS, DATA, epochs=1.5), "epochs"),
        (lambda: enfold.merge.perm_avg(NETWORKS, DATA, temperature="1"), "temperature"),
        (lambda: enfold.merge.perm_avg(NETWORKS, DATA, universe=1), "universe"),
        (lambda: enfold.merge.repair(NETWORKS[0], NETWORKS, DATA, weights=0.5), "weights"),
        (lambda: enfold.merge.repair(NETWORKS[0], NETWORKS, DATA, weights=("a", "b")), "weights"),
        (lambda: enfold.KD(alpha="a"), "alpha"),
        (lambda: enfold.KD(alpha=True), "alpha"),
        (lambda: enfold.BatchEnsemble(NETWORKS[0], 2, rank=0), "rank"),
        (lambda: enfold.BatchEnsemble(NETWORKS[0], 2.0), "num_members"),
        (lambda: enfold.TrainConfig(betas=(0.9,)), "betas"),
    ],
)
def test_values_of_another_type_are_refused_before_anything_is_computed(call, name):
    with pytest.raises(EnfoldError, match=rf"^{name} must be .*, got .*: change {name}$"):
        call()


def test_values_of_the_right_types_are_converted_to_plain_ones():
    """Integers are numbers too, also those of numpy; lists become tuples."""
    assert enfold.TrainConfig(lr=np.float32(2), epochs=np.int64(3)) == enfold.TrainConfig(lr=2.0, epochs=3)
    assert enfold.KD(alpha=1).alpha == 1
    assert mix(None, weights=[0, 0.5]) == (0, 0.5)
    assert mix(None, None, weights=(np.float64(0.5),), anything=1) == (0.5,)
    options = Options(1, [2, "b"], 3, "mean", undescribed_type=Options)
    assert (options.pair, options.rate, options.undescribed_type) == ((2, "b"), 3, Options)


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (int, 2.5, "x must be an integer, got 2.5: change x"),
        (int, True, "x must be an integer, got True: change x"),
        (Annotated[int, Field(ge=1)], 0, "x must be an integer >= 1, got 0: change x"),
        (
            Annotated[int, Field(ge=2, multiple_of=2)],
            3,
            "x must be an integer >= 2 and a multiple of 2, got 3: change x",
        ),
        (bool, 1, "x must be True or False, got 1: change x"),
        (str, 1, "x must be a string, got 1: change x"),
        (Fraction, 1.0, "x must be a number >= 0 and < 1, got 1.0: change x"),
        (
            Annotated[float, Field(gt=0, allow_inf_nan=False)],
            float("inf"),
            "x must be a finite number > 0, got inf: change x",
        ),
        (float | None, "a", "x must be a number or None, got 'a': change x"),
        (Literal["sum", "mean"], "total", 'x must be one of "sum", "mean", got \'total\': change x'),
        (tuple[float, float], (0.9,), "x must be a tuple of 2 numbers, got (0.9,): change x"),
        (tuple[Fraction, Fraction], (0.9, 2), "x must be a tuple of 2 numbers >= 0 and < 1, got (0.9, 2): change x"),
        (tuple[str, ...], "abc", "x must be a tuple of strings, got 'abc': change x"),
        (tuple[int, str], (1, 2), "x must be a tuple of 2 values: an integer, a string, got (1, 2): change x"),
        (
            float | tuple[float, ...],
            ("a",),
            "x must be a number or a tuple of numbers, got ('a',): change x",
        ),
        (dict[str, float], {"a": "b"}, "x must be a dict of strings to numbers, got {'a': 'b'}: change x"),
        (
            tuple[Literal["late", "early"], ...],
            ("never",),
            'x must be a tuple of values out of "late", "early", got (\'never\',): change x',
        ),
    ],
)
def test_messages_name_the_argument_the_rule_and_the_value(hint, value, message):
    with pytest.raises(EnfoldError) as refused:
        check_value("x", value, hint)
    assert str(refused.value) == message


def test_other_types_are_validated_by_the_method():
    for hint in (object, np.ndarray, Any, list[int]):
        assert check_value("x", NETWORKS, hint) is NETWORKS


def test_types_in_tables():
    hints = {
        "int": int,
        "any": Any,
        "tuple": tuple[int, int],
        "tuple of int": tuple[int, ...],
        '"a" | 1': Literal["a", 1],
    }
    assert {text: describe_type(hint) for text, hint in hints.items()} == {text: text for text in hints}
    assert describe_rule(np.ndarray) == "ndarray"


def test_unknown_names_are_refused_with_the_closest():
    assert check_arguments(Options, {"count": 2, "pair": [1, "b"]}) == {"count": 2, "pair": (1, "b")}
    with pytest.raises(EnfoldError, match="'Options' has no option 'cuont', did you mean 'count'"):
        check_arguments(Options, {"cuont": 1})
    with pytest.raises(EnfoldError, match="count must be an integer"):
        check_arguments(Options, {"count": "1"})


def test_missing_and_unknown_arguments_are_refused_as_python_does():
    with pytest.raises(TypeError, match=r"mix\(\) missing 1 required positional argument: 'models'"):
        mix()
    with pytest.raises(TypeError, match=r"Options.*unexpected keyword argument 'cuont'"):
        Options(cuont=1)

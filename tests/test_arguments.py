"""Arguments of methods: documentation and types are read from docstring and signature, and applied when called."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

from enfold.arguments import REQUIRED, arguments_of, check_arguments, checked, describe_type
from enfold.errors import EnfoldError


@checked
def method(
    models: Any,
    train: Any = None,
    *,
    needed: int,
    rank: Annotated[int, Field(ge=1)] = 1,
    kind: Literal["sum", "mean"] = "mean",
    names: tuple[str, ...] = (),
    scale: float | None = None,
    free: object = None,
    **settings: Any,
) -> dict[str, Any]:
    """Do something.

    Args:
        models: An ensemble.
        needed: Without a default.
        rank: The rank,
            on two lines.
        kind (str): How to reduce.
        names: Some names.
        **settings: More.
    """
    return {"rank": rank, "kind": kind, "names": names, "scale": scale}


@checked
@dataclass(frozen=True)
class Loss:
    """A loss.

    Args:
        alpha: The weight.
    """

    alpha: Annotated[float, Field(ge=0, le=1)] = 1.0


def test_options_have_type_default_and_help() -> None:
    found = arguments_of(method)
    assert list(found) == ["needed", "rank", "kind", "names", "scale", "free"]
    assert (found["rank"].help, found["rank"].type_name, found["rank"].default_text) == (
        "The rank, on two lines.",
        "int >= 1",
        "1",
    )
    assert (found["kind"].choices, found["kind"].type_name) == (("sum", "mean"), '"sum" | "mean"')
    assert (found["needed"].default is REQUIRED, found["needed"].default_text) == (True, "required")
    assert [found[name].type_name for name in ("names", "scale")] == ["tuple of str", "float | None"]
    assert found["kind"].help == "How to reduce."
    assert describe_type(Any) == "any"
    assert arguments_of(Loss)["alpha"].type_name == "float >= 0 and <= 1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0}, {"rank": 1.5}, {"rank": "1"}, {"rank": True}, {"kind": "max"}, {"names": "a"}, {"names": (1,)},
        {"scale": "x"}, {"needed": None},
    ],
)  # fmt: skip
def test_wrong_values_are_refused_with_the_argument(wrong: dict[str, Any]) -> None:
    with pytest.raises(EnfoldError, match=next(iter(wrong))):
        method(None, **{"needed": 1, **wrong})
    with pytest.raises(EnfoldError, match=next(iter(wrong))):
        check_arguments(method, wrong)


def test_values_of_the_right_types_are_accepted() -> None:
    assert method(None, needed=np.int64(1), rank=np.int64(3), scale=2)["rank"] == 3
    assert method(None, needed=1, names=["a", "b"])["names"] == ("a", "b")
    assert check_arguments(method, {"free": object, "scale": np.float32(0.5)})["scale"] == 0.5
    assert Loss(alpha=1).alpha == 1


def test_unknown_options_and_classes() -> None:
    with pytest.raises(EnfoldError, match="did you mean 'rank'"):
        check_arguments(method, {"rnak": 1})
    with pytest.raises(EnfoldError, match="alpha"):
        Loss(alpha=2)

"""Methods as a recipe writes them: plain values become shares, networks, perturbations and plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from torch import nn

from enfold.arguments import check_arguments
from enfold.errors import EnfoldError
from enfold.merge.repair import Repair
from enfold.options import has_own_number
from enfold.registry import method, methods, nearest
from enfold.train import TrainConfig

Factory = Callable[[Any], Callable[[], nn.Module]]  # a network's spec to what makes the network


def made_share(name: str, settings: Mapping[str, Any], *, members: int | None = None, seed: int | None = None) -> Any:
    """The share with its settings, read as the types they are declared with.

    The run's number of members and seed hold where nothing else is given, unless the method has a number of its own.
    """
    chosen = method("share", name)
    for key in settings:
        if key not in chosen.fields:
            raise EnfoldError(f"'{chosen.name}' has no setting '{key}'{nearest(key, chosen.fields)}")
    defaults: dict[str, Any] = {}
    if members is not None and not has_own_number(chosen.kind):
        defaults["num_members"] = members
    if seed is not None and "seed" in chosen.fields:
        defaults["seed"] = seed
    given = {key: as_tuples(value) for key, value in settings.items()}
    return partial(chosen.kind, **check_arguments(chosen.kind, {**defaults, **given}))


def made_fold(
    name: str,
    settings: Mapping[str, Any],
    *,
    network: Factory | None = None,
    plan: TrainConfig | None = None,
    members: int | None = None,
    seed: int | None = None,
) -> Any:
    """The fold with its settings: `student` is a network's spec, `share` a share's name or its settings with `method`.

    Without `network` the settings are only checked, and no network is made.
    """
    chosen = method("fold", name)
    hints = get_type_hints(chosen.kind)
    made: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "student" and value is not None:
            if network is not None:
                made[key] = network(value)
        elif key == "share" and value is not None:
            made[key] = _student_share(value, members, seed)
        elif key == "perturb" or key not in hints:
            made[key] = value  # the method itself knows what is wrong with it
        else:
            made[key] = _typed(key, hints[key], value)
    if plan is not None and "plan" in chosen.fields:
        made["plan"] = plan
    return chosen.make(**made)


STEPS: dict[str, type[Any]] = {"repair": Repair}  # what can only follow a fold


def step_kind(name: str) -> type[Any]:
    """The class of what follows a fold in a route."""
    folds = methods("fold")
    able = {**STEPS, **{each: fold.kind for each, fold in folds.items() if hasattr(fold.kind, "after")}}
    key = name.replace("-", "_")
    if key not in able:
        meant = "" if key in folds else nearest(key, able)
        raise EnfoldError(
            f"what follows a fold starts from its network, got '{name}'{meant}: choose one of {', '.join(able)}"
        )
    return able[key]


def made_step(name: str, settings: Mapping[str, Any], **given: Any) -> Any:
    """What follows a fold, with its settings."""
    kind = step_kind(name)
    return TypeAdapter(kind).validate_python(dict(settings)) if name in STEPS else made_fold(name, settings, **given)


def has_plan(name: str) -> bool:
    """Whether a fold, or what follows one, trains."""
    return name not in STEPS and "plan" in method("fold", name).fields


def trainings(name: str, settings: Mapping[str, Any], members: int) -> int:
    """How often a fold of so many members trains by its plan."""
    counted = getattr(method("fold", name).kind, "trainings", None)
    return 1 if counted is None else int(counted(members, **settings))


def own_plan(name: str) -> dict[str, Any] | None:
    """The plan of a method that is not trained as networks are; None where the members' plan is taken."""
    chosen = {**methods("share"), **methods("fold")}.get(name.replace("-", "_"))
    made = chosen.fields["plan"].default_factory if chosen and "plan" in chosen.fields else TrainConfig
    if made is TrainConfig or made is dataclasses.MISSING:
        return None
    return {key: value for key, value in dataclasses.asdict(made()).items() if key not in ("seed", "device")}


def _student_share(value: Any, members: int | None, seed: int | None) -> Any:
    settings = {"method": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
    name = settings.pop("method", None)
    if not isinstance(name, str):
        raise EnfoldError(
            f"the student's share is a name, or a mapping with method, got {value!r}: write share: batch_ensemble"
        )
    return made_share(name, settings, members=members, seed=seed)


def _typed(key: str, hint: Any, value: Any) -> Any:
    """The value as the type its field is declared with; an error names the field."""
    adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, hint])  # a mapping: the error then says which key
    return adapter.validate_python({key: as_tuples(value)})[key]


def as_tuples(value: Any) -> Any:
    """Lists, which is what a file holds, as what settings are."""
    return tuple(value) if isinstance(value, list) else value

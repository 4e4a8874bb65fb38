"""Methods as the steps of a recipe name them: their family, options, training settings and student."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from enfold.arguments import REQUIRED, arguments_of, check_value
from enfold.errors import EnfoldError
from enfold.io.usercode import is_reference
from enfold.registry import Method, find_any, find_method, make_method, methods
from enfold.run.specs import StepSpec
from enfold.train import TrainConfig

COMPRESS = "compress"
"""The step that searches for the network to ship; it is not in a package of methods, because it tries all kinds."""

FAMILIES = ("ensemble", "distill", "merge")
"""Kinds of methods that are steps of a recipe; perturbations are part of a distillation."""

USUAL_MEMBERS = 4
"""Default number of members of methods without a published number of their own; in a run it is the run's number."""

CONSTRUCTION = frozenset(["student", "init", "loss", "perturb", "models", "settings"])
"""Parameters of `distill` that a step gives with keys of its own."""


def family_of(name: str) -> str:
    """Return the family of a method by its name.

    Raises:
        EnfoldError: If there is no such method, or two kinds have one of that name.
    """
    if name == COMPRESS:
        return "merge"
    if not is_reference(name) and name.replace("-", "_") in methods("perturb"):
        raise EnfoldError(f"'{name}' is a perturbation, not a step: write it in a distillation step as perturb: {name}")
    found = find_any(name, FAMILIES)
    if len(found) > 1:
        kinds = " or ".join(f"family: {each.kind}" for each in found)
        raise EnfoldError(f"there are {len(found)} methods '{name}': add {kinds} to the step")
    return found[0].kind


def method_of(step: StepSpec) -> Method:
    """Return the method of a step; code of the user must be trusted."""
    if step.method == COMPRESS:
        return _compress_method()
    return find_method(step.family or family_of(step.method), step.method)


@cache
def _compress_method() -> Method:
    from enfold.compress.step import compress_members

    return make_method(COMPRESS, "merge", compress_members)


def is_user_code(step: StepSpec) -> bool:
    """Return whether the method of a step is code of the user."""
    return is_reference(step.method)


def is_trained(step: StepSpec) -> bool:
    """Return whether a step trains a network; of a user's merge function, whether it has `train:` settings.

    No code of the user is imported to answer this, so that a report needs no trust.
    """
    if step.family != "merge":
        return True
    return bool(step.train) if is_user_code(step) else "config" in method_of(step).inputs


def default_settings(step: StepSpec) -> dict[str, Any] | None:
    """Return the training settings of a method whose file defines `PUBLISHED`; None if it uses those of the run."""
    config = None if is_user_code(step) else getattr(_module_of(step), "PUBLISHED", None)
    if not isinstance(config, TrainConfig):
        return None
    return {name: value for name, value in vars(config).items() if name not in ("seed", "device", "task")}


def count_trainings(step: StepSpec, num_members: int) -> int:
    """Return how many trainings of the configured length a step has: `count_trainings` of the method's file, or 1."""
    count = None if is_user_code(step) else getattr(_module_of(step), "count_trainings", None)
    return 1 if count is None else int(count(num_members, **step.options))


def _module_of(step: StepSpec) -> Any:
    return inspect.getmodule(inspect.unwrap(method_of(step).target))


def distill_arguments() -> dict[str, Any]:
    """Return the options of `distill` itself, which every distillation step has beside those of its loss."""
    from enfold.distill import distill

    return {name: each for name, each in arguments_of(distill).items() if name not in CONSTRUCTION}


def split_options(method: Method, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a method, and for a distillation those of `distill` itself, after checking all of them."""
    common = distill_arguments() if method.kind == "distill" else {}
    own = {name: value for name, value in options.items() if name in method.arguments or name not in common}
    rest = {name: value for name, value in options.items() if name not in own}
    return method.check(own), {name: check_value(name, value, common[name].hint) for name, value in rest.items()}


def has_own_number(method: Method) -> bool:
    """Return whether a method keeps its published number of members in a run."""
    argument = method.arguments.get("num_members")
    return argument is not None and argument.default not in (USUAL_MEMBERS, None, inspect.Parameter.empty)


def fill_options(
    method: Method, options: Mapping[str, Any], num_members: int | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Return the options, with the run's number of members and seed where the step gives none.

    Args:
        method: The method.
        options: The options of the step.
        num_members: The number of members of the run.
        seed: The seed of the run.
    """
    filled = dict(options)
    if num_members is not None and "num_members" in method.arguments and not has_own_number(method):
        filled.setdefault("num_members", num_members)
    if seed is not None and "seed" in method.arguments:
        filled.setdefault("seed", seed)
    return filled


def require_options(method: Method, options: Mapping[str, Any]) -> None:
    """Refuse options without one that the method has no default for; the run gives the number of members and the seed.

    Raises:
        EnfoldError: With the option that is missing.
    """
    given = options if method.kind in ("distill", "perturb") else fill_options(method, options, USUAL_MEMBERS, 0)
    for name, argument in method.arguments.items():
        if argument.default is REQUIRED and name not in given:
            raise EnfoldError(
                f"'{method.name}' needs a value for '{name}' ({argument.type_name}), got none: add {name}: VALUE to "
                f"the step, or --set {name}=VALUE"
            )


def make_perturbation(spec: str | Mapping[str, Any] | None) -> Any:
    """Return the perturbation of a step: a name, or a mapping with `method` and its options."""
    if spec is None:
        return None
    name, options = split_spec(spec, "perturb", "perturb: tdiv_sdiv")
    method = find_method("perturb", name)
    require_options(method, options)
    return method.target(**method.check(options))


def is_ensemble_student(spec: Any) -> bool:
    """Return whether a student is an efficient ensemble, written as a mapping with `method`."""
    return isinstance(spec, Mapping) and "method" in spec


def student_method(spec: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """Return the method and options of a student that is an efficient ensemble."""
    name, options = split_spec(spec, "student", "student: {method: batch_ensemble}")
    method = find_method("ensemble", name)
    require_options(method, options)
    return method, method.check(options)


def split_spec(spec: Any, key: str, example: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of what is given as a name or as a mapping with `method`.

    Raises:
        EnfoldError: If it is neither.
    """
    content = {"method": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    name = content.pop("method", None)
    if not isinstance(name, str):
        raise EnfoldError(f"{key} must be a name or a mapping with method, got {spec!r}: write for example {example}")
    return name, content


def check_keys(step: StepSpec) -> None:
    """Refuse keys of a step that its family does not have.

    Raises:
        EnfoldError: With the family that has the key.
    """
    allowed = {
        "network": ("ensemble",),
        "teacher": ("distill",),
        "student": ("distill",),
        "perturb": ("distill",),
        "first": ("distill", "merge"),
    }
    for key, kinds in allowed.items():
        if getattr(step, key) is not None and step.family not in kinds:
            owner = " or ".join(kinds)
            raise EnfoldError(
                f"'{key}' is a key of {owner} steps, but '{step.method}' is a {step.family} step: remove it"
            )

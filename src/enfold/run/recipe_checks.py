"""Checks of a recipe beyond the types of its fields: settings, steps, their order and their references to code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from enfold.errors import EnfoldError, UserCodeError
from enfold.io.usercode import is_reference, is_trusted, reporting
from enfold.registry import Method, suggest
from enfold.run.recipe_errors import SETTINGS, Place, RecipeError, describe_error
from enfold.run.specs import STARTS, StepSpec
from enfold.run.step_methods import (
    check_keys,
    default_settings,
    distill_arguments,
    family_of,
    is_ensemble_student,
    is_trained,
    make_perturbation,
    method_of,
    require_options,
    split_options,
    student_method,
)
from enfold.train import TrainConfig

if TYPE_CHECKING:
    from enfold.run.recipe import Recipe


def code_in(tree: Any) -> list[str]:
    """Return every reference to code in a part of a recipe; all texts but labels are searched."""
    return list(dict.fromkeys(filter(is_reference, _texts(tree))))


def _texts(tree: Any) -> Iterator[str]:
    """Yield all texts of a tree except labels."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(value) if key != "label" else ()
    elif isinstance(tree, Sequence):
        for value in tree:
            yield from _texts(value)


@cache
def train_config_adapter() -> TypeAdapter[TrainConfig]:
    """Return the validator of training settings, which is built once: that takes longer than to read a recipe."""
    return TypeAdapter(TrainConfig)


@dataclasses.dataclass(frozen=True)
class RecipeChecks:
    """Checks of a recipe beyond its types; errors have the line."""

    place: Place

    def train(self, settings: Mapping[str, Any], path: tuple[Any, ...], num_members: int | None) -> None:
        """Check training settings.

        Args:
            settings: The settings.
            path: Their place in the recipe.
            num_members: The number of members that settings may list values for; None if they may not.
        """
        reserved = {"seed": "seeds", "device": "--device", "task": "task"}
        known = [field.name for field in dataclasses.fields(TrainConfig) if field.name not in reserved]
        for key in settings:
            at = self.place.at((*path, key))
            if key in reserved:
                raise RecipeError(f"{at}: set {reserved[key]} of the run instead of train.{key}")
            if key not in known:
                raise RecipeError(f"{at}: there is no training setting '{key}'{suggest(key, known)}")
        try:
            config = train_config_adapter().validate_python({key: as_tuple(value) for key, value in settings.items()})
            for key, value in settings.items():
                if isinstance(value, str) and not isinstance(getattr(config, key), str):
                    raise EnfoldError(f"'{key}' of train must be a number, got the text {value!r}: remove the quotes")
            config = TrainConfig(**{key: as_tuple(value) for key, value in settings.items()})  # yes is no number
            for field in ("lr", "weight_decay", "label_smoothing") if num_members else ():
                config.per_member(field, num_members or 1)
        except ValidationError as error:
            raise describe_error(error, self.place, TrainConfig, path) from error
        except (EnfoldError, TypeError) as error:
            raise RecipeError(f"{self.place.of_message(path, str(error))}: {error}") from error

    def family(self, step: StepSpec, path: tuple[Any, ...]) -> StepSpec:
        """Return the step with its family."""
        try:
            return step if step.family else step.model_copy(update={"family": family_of(step.method)})
        except EnfoldError as error:
            raise RecipeError(f"{self.place.at((*path, 'method'))}: {error}") from error

    def step(self, recipe: Recipe, step: StepSpec, path: tuple[Any, ...]) -> None:
        """Check the keys, options and settings of a step.

        Args:
            recipe: The recipe.
            step: The step.
            path: Its place in the recipe.
        """
        try:
            check_keys(step)
            self._links(recipe, step, path)
            self._subset(recipe, step)
            self._options(step, path)
        except (RecipeError, UserCodeError):
            raise
        except EnfoldError as error:
            raise RecipeError(f"{self.place.at(path)}: {error}") from error
        if step.train and not is_trained(step):
            raise RecipeError(f"{self.place.at((*path, 'train'))}: '{step.method}' does not train: remove train")
        if is_trained(step):
            settings = {**(default_settings(step) or recipe.train), **step.train}
            self.train(settings, (*path, "train"), 1 if step.family != "ensemble" else None)

    def _options(self, step: StepSpec, path: tuple[Any, ...]) -> None:
        """Check the options of a step, its perturbation and its student; code of the user only where it may run."""
        if _may_import(step.method):
            with self._add_location((*path, "method")):
                method = method_of(step)
            self._own_options(method, step, path)
        if _may_import(step.perturb):
            with self._add_location((*path, "perturb")):
                make_perturbation(step.perturb)
        if is_ensemble_student(step.student) and _may_import(step.student):
            with self._add_location((*path, "student")):
                student_method(step.student)  # type: ignore[arg-type]

    def _own_options(self, method: Method, step: StepSpec, path: tuple[Any, ...]) -> None:
        known = [*method.arguments, *(distill_arguments() if step.family == "distill" else ()), *StepSpec.model_fields]
        for key, value in step.options.items():
            if key not in known:
                choose = f"choose from {', '.join(method.arguments)}" if method.arguments else "it has none"
                setting = f", but train.{key} is a training setting" if key in SETTINGS else suggest(key, known)
                raise RecipeError(
                    f"{self.place.at((*path, key))}: '{step.method}' has no option '{key}'{setting}: {choose}"
                )
            with self._add_location((*path, key)):
                split_options(method, {key: value})
        with self._add_location(path):
            require_options(method, step.options)
            if step.family == "distill":  # a loss also checks its options together
                with reporting(f"'{step.method}'"):
                    method.target(**split_options(method, step.options)[0])

    @contextmanager
    def _add_location(self, path: tuple[Any, ...]) -> Iterator[None]:
        """Add the place to errors inside the block."""
        try:
            yield
        except (RecipeError, UserCodeError):
            raise
        except (EnfoldError, TypeError) as error:
            owner = f" ({self.place.owner(path)})" if self.place.owner(path) else ""
            raise RecipeError(f"{self.place.at(path)}: {error}{owner}") from error

    def _links(self, recipe: Recipe, step: StepSpec, path: tuple[Any, ...]) -> None:
        """Check that `init`, `teacher` and `network` name earlier steps, which exist for the seeds of this one."""
        index = recipe.steps.index(step)
        earlier = {each.label: each for each in recipe.steps[:index]}
        networks = [label for label, each in earlier.items() if each.family != "ensemble"]
        if step.family != "ensemble" and step.init is not None and step.init not in (*STARTS, *networks):
            near = suggest(step.init, [*STARTS, *networks])
            raise RecipeError(
                f"{self.place.at((*path, 'init'))}: init must be the label of an earlier step that gives one network, "
                f"or one of {', '.join(STARTS)}, got '{step.init}'{near}"
            )
        if step.teacher is not None and step.teacher not in earlier:
            raise RecipeError(
                f"{self.place.at((*path, 'teacher'))}: teacher must be the label of an earlier step, got "
                f"'{step.teacher}'{suggest(step.teacher, earlier) or f': choose from {list(earlier)}'}"
            )
        for label in recipe.dependencies(step):
            missing = (
                set(step.seeds or recipe.seeds) - set(earlier[label].seeds or recipe.seeds) if label in earlier else ()
            )
            if missing:
                raise RecipeError(
                    f"{self.place.at(path)}: '{step.label}' uses '{label}', which seed {min(missing)} does not have: "
                    "give both the same seeds"
                )

    def _subset(self, recipe: Recipe, step: StepSpec) -> None:
        if step.first is not None and step.first > recipe.members:
            raise EnfoldError(
                f"'{step.label}' uses the first {step.first} members, but there are {recipe.members}: lower first"
            )
        if step.seeds is not None and not set(step.seeds) & set(recipe.seeds):
            raise EnfoldError(
                f"'{step.label}' has seeds {list(step.seeds)}, none of which the run has: choose from "
                f"{list(recipe.seeds)}"
            )


def _may_import(spec: Any) -> bool:
    """Return whether a part of a recipe names no code, or code that may run."""
    return is_trusted() or not code_in(spec)


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple and other values unchanged."""
    return tuple(value) if isinstance(value, list) else value

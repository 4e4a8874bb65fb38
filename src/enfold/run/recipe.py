"""Recipe: the complete description of a run in one YAML file.

An error names the file, the line and the key, and suggests the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from enfold.errors import EnfoldError, UserCodeError
from enfold.io.checkpoints import matching_files, require_local
from enfold.io.usercode import is_reference, is_refused, is_trusted, looking_in, reporting, trust_error
from enfold.registry import Method, suggest
from enfold.run.ood import OodSpec, check_sets
from enfold.run.outputs import make_task
from enfold.run.override import apply_override
from enfold.run.recipe_errors import SETTINGS, Place, RecipeError, describe_error, line_numbers
from enfold.run.specs import STARTS, CorruptionSpec, DataSpec, StepSpec, TrajectorySpec, Whole, add_labels
from enfold.run.step_methods import (
    check_keys,
    count_trainings,
    default_settings,
    distill_arguments,
    family_of,
    is_ensemble_student,
    is_trained,
    is_user_code,
    make_perturbation,
    method_of,
    require_options,
    split_options,
    student_method,
)
from enfold.run.yaml_text import Loader, read_text, read_yaml, write_yaml
from enfold.tasks import Task
from enfold.train import TrainConfig

MAX_LABEL = 100  # characters, so that file names with a suffix have at most 255 bytes
LABEL = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_LABEL - 1}}}")
MAX_MEMBERS = 10_000
RESERVED = ("mean", "member", "members", "ensemble", "control", "best_member", "random")
REMOVED = {"plan": "train", "shares": "steps", "folds": "steps", "then": "steps"}
"""Keys of recipes of the first edition, and the keys that replace them."""


class Recipe(BaseModel):
    """Everything that determines a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(default="run", description="Name of the run.")
    data: DataSpec = Field(default=DataSpec(), description="The data: a name, a path, module:function, or a mapping.")
    task: str | dict[str, Any] | None = Field(
        default=None, description="What outputs mean: a name, or {name: regression, head: gaussian}; else inferred."
    )
    network: str | dict[str, Any] = Field(
        default="mlp", description="The members' network: a name, or nets.py:function."
    )
    members: int = Field(default=4, strict=True, description="Number of members; of checkpoints all by default.")
    checkpoints: str | None = Field(
        default=None, description="Pattern of files with trained members; none are trained then."
    )
    seeds: tuple[Whole, ...] = Field(
        default=(0,), min_length=1, description="Seeds; several give a standard deviation."
    )
    sizes: tuple[Whole, ...] = Field(default=(), description="Also evaluate ensembles of the first k members.")
    train: dict[str, Any] = Field(default_factory=dict, description="Training settings, the fields of TrainConfig.")
    steps: tuple[StepSpec, ...] = Field(default=(), description="Methods; each gives a row of the results.")
    control: bool = Field(default=True, description="Train a control for each total training length of the steps.")
    control_names: dict[str, str] = Field(default_factory=dict, description="Names of controls by step; numbered.")
    cost: bool = Field(default=True, description="Measure parameters, memory and latency.")
    corruptions: CorruptionSpec | None = Field(default=None, description="Evaluate on corrupted test images.")
    ood: tuple[OodSpec, ...] = Field(default=(), description="Out-of-distribution sets.")
    trajectory: TrajectorySpec | None = Field(
        default=None, description="Store networks along the training; true: each epoch."
    )

    @field_validator("trajectory", mode="before")
    @classmethod
    def _expand_trajectory(cls, value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    @field_validator("trajectory")
    @classmethod
    def _check_trajectory(cls, value: TrajectorySpec | None, info: ValidationInfo) -> TrajectorySpec | None:
        if value is not None and info.data.get("checkpoints") is not None:
            raise ValueError("a trajectory is stored while members are trained, but these come from checkpoints")
        return value

    @field_validator("data", mode="before")
    @classmethod
    def _expand_data(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @field_validator("ood", mode="before")
    @classmethod
    def _expand_ood(cls, value: Any) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return value
        return [{"source": each} if isinstance(each, str) else each for each in value]

    @field_validator("ood")
    @classmethod
    def _check_ood(cls, value: tuple[OodSpec, ...], info: ValidationInfo) -> tuple[OodSpec, ...]:
        data = info.data.get("data", DataSpec())
        check_sets(value, data.source, data.exclude_classes)
        return value

    @field_validator("task")
    @classmethod
    def _check_task(cls, value: Any) -> Any:
        make_task(value)
        return value

    @field_validator("steps", mode="before")
    @classmethod
    def _expand_steps(cls, value: Any) -> Any:
        return add_labels(value)

    @field_validator("members")
    @classmethod
    def _check_members(cls, value: int) -> int:
        if not 1 <= value <= MAX_MEMBERS:
            raise ValueError(f"an ensemble must have 1 to {MAX_MEMBERS:,} members")
        return value

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("every seed must be given once")
        return value

    @field_validator("steps")
    @classmethod
    def _check_labels(cls, value: tuple[StepSpec, ...]) -> tuple[StepSpec, ...]:
        for each in value:
            taken = each.label.split("-")[0] in RESERVED or ".checkpoint" in each.label
            if not LABEL.fullmatch(each.label) or taken:
                raise ValueError(
                    f"a label must be at most {MAX_LABEL} letters, digits, '-', '_' or '.', and not one of "
                    f"{', '.join(RESERVED)} or a checkpoint: change '{each.label[:MAX_LABEL]}'"
                )
        labels = [each.label for each in value]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"every step must have its own label, got '{twice[0]}' twice: add label: ...")
        return value

    @field_validator("control_names")
    @classmethod
    def _check_control_names(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        steps = [step.label for step in info.data.get("steps", ())]
        for step, name in value.items():
            if step not in steps or not LABEL.fullmatch(name) or name.split("-")[0] != "control":
                raise ValueError(
                    f"they are 'control' or begin with 'control-', each for the label of a step, got {step}: {name}"
                )
        return value

    def members_config(self, seed: int, device: str = "cpu") -> TrainConfig:
        """Return the training settings of the members for one seed."""
        return TrainConfig(**{**self._task_setting(), **self.train, "seed": seed, "device": device})

    def _task_setting(self) -> dict[str, Task]:
        task = make_task(self.task)
        return {} if task is None else {"task": task}

    def step_config(self, step: StepSpec, seed: int, device: str = "cpu") -> TrainConfig:
        """Return the training settings of a step: the run's, or the published ones of its method, with its changes.

        Args:
            step: The step.
            seed: The seed.
            device: The device of training.
        """
        published = default_settings(step)
        base = self.train if published is None else published
        return TrainConfig(**{**base, **self._task_setting(), **step.train, "seed": seed, "device": device})

    def step(self, label: str) -> StepSpec:
        """Return the step of a label."""
        return next(step for step in self.steps if step.label == label)

    def chain(self, step: StepSpec) -> list[StepSpec]:
        """Return the steps that a step's network went through by `init`, the step itself last."""
        before = [each for each in self.steps if each.label == step.init] if step.family != "ensemble" else []
        return [*self.chain(before[0]), step] if before else [step]

    def dependencies(self, step: StepSpec) -> list[str]:
        """Return the labels of the steps whose models a step uses."""
        labels = {each.label for each in self.steps}
        named = [step.network if step.family == "ensemble" else step.init, step.teacher]
        return list(dict.fromkeys(each for each in named if isinstance(each, str) and each in labels))

    def closure(self, labels: Sequence[str]) -> set[str]:
        """Return these labels with all steps that they depend on."""
        found: set[str] = set()
        for label in labels:
            found |= {label, *self.closure(self.dependencies(self.step(label)))}
        return found

    def control_config(self, step: StepSpec, seed: int, device: str = "cpu") -> TrainConfig | None:
        """Return the settings with which a control trains as long as a step and the steps before it.

        Ensembles are trained instead of the members and have no control.

        Args:
            step: The step.
            seed: The seed.
            device: The device of training.

        Returns:
            The settings; None for ensembles and for steps that do not train.
        """
        training = [each for each in self.chain(step) if is_trained(each)]
        if step.family == "ensemble" or not training:
            return None
        num_members = step.first or self.members
        epochs = [self.step_config(each, seed, device).epochs * count_trainings(each, num_members) for each in training]
        usual = [each for each in training if default_settings(each) is None]
        config = self.step_config(usual[-1], seed, device) if usual else self.members_config(seed, device)
        return config.replace(epochs=sum(epochs))

    def controls(self, seed: int, device: str = "cpu") -> dict[str, TrainConfig]:
        """Return one control for each distinct training of the steps, by name."""
        found: dict[str, TrainConfig] = {}
        names = (f"control-{number}" if number > 1 else "control" for number in count(1))
        free = (name for name in names if name not in self.control_names.values())
        for step in self.steps if self.control else ():
            config = self.control_config(step, seed, device)
            if config is None or config in found.values():
                continue
            name = self.control_names.get(step.label) or next(free)
            if name in found:
                raise EnfoldError(
                    f"a control is trained as long as its steps, but '{step.label}' trains differently from the other "
                    f"steps of '{name}': change its name in control_names, or remove it there"
                )
            found[name] = config
        return found

    def controlled(self) -> dict[str, str]:
        """Return the name of the control of each step that has one."""
        configs = self.controls(seed := self.seeds[0])
        own = {step.label: self.control_config(step, seed) for step in self.steps}
        return {label: name for label, config in own.items() for name, each in configs.items() if each == config}

    def code_references(self) -> list[str]:
        """Return every reference to code in the recipe; all texts but names and labels are searched."""
        return code_in(self.model_dump(mode="json", exclude={"name"}))

    def command(self, *words: object) -> str:
        """Return a command line of enfold for a run of this recipe."""
        trust = ["--trust-code"] if self.code_references() else []
        return shlex.join(["enfold", *map(str, words), *trust])

    def extends(self, other: Recipe) -> bool:
        """Return whether this is the other recipe, whatever its name, or that with more steps and evaluations."""
        names: dict[str, Any] = {"name": "", "control_names": {}}
        none = {**names, "steps": (), "corruptions": None, "ood": ()}
        same = self.model_copy(update=none) == other.model_copy(update=none)
        return same and all(step in self.steps for step in other.steps)

    def steps_of(self, seed: int) -> tuple[StepSpec, ...]:
        """Return the steps that a seed has."""
        return tuple(step for step in self.steps if step.seeds is None or seed in step.seeds)

    def as_yaml(self) -> str:
        """Return the resolved recipe as YAML."""
        content = self.model_dump(mode="json", exclude={"steps"})
        steps = [step.model_dump(mode="json", exclude_defaults=True) for step in self.steps]
        return write_yaml({**content, "steps": steps})


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


def read_recipe(path: Path, overrides: Sequence[str] = (), *, trust_code: bool = False) -> Recipe:
    """Return the recipe in a YAML file.

    Args:
        path: The file.
        overrides: Changes as `a.b=value`.
        trust_code: Import methods of the user's own that the recipe names.

    Raises:
        EnfoldError: If the file cannot be read or the recipe is not valid.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise EnfoldError(f"a recipe must be a readable YAML file, got '{path}' ({error}): check the path") from error
    with looking_in([Path(), path.parent], trusted=trust_code):
        return parse_recipe(text, str(path), overrides)


def parse_recipe(text: str, where: str = "the recipe", overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe in YAML text.

    Raises:
        EnfoldError: If the text is not YAML or the recipe is not valid.
    """
    try:
        content = read_yaml(text)
        lines = line_numbers(yaml.compose(text, Loader=Loader))
    except yaml.YAMLError as error:
        raise EnfoldError(f"'{where}' must be YAML, but it cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise EnfoldError(f"'{where}' must be a mapping of keys to values, got {type(content).__name__}: see recipes/")
    given = {apply_override(content, override): f"--set {override}" for override in overrides}
    return make_recipe(content, where, lines, given)


def make_recipe(
    content: Mapping[str, Any],
    where: str,
    lines: Mapping[tuple[Any, ...], int] | None = None,
    overrides: Mapping[tuple[Any, ...], str] | None = None,
) -> Recipe:
    """Return a validated recipe; the training settings and options of all steps are checked too.

    Methods of the user's own are checked where code is trusted.

    Args:
        content: The keys and values.
        where: The name of its file, for errors.
        lines: The line of every key in the file.
        overrides: What was given on the command line, by the path of its key.

    Raises:
        EnfoldError: If something in the recipe is not valid; the message names the place.
    """
    place = Place(where, lines or {}, content, overrides or {})
    for key in content:
        if key in REMOVED:
            raise RecipeError(f"{place.at((key,))}: there is no key '{key}', use '{REMOVED[key]}'")
    if isinstance(content.get("checkpoints"), str):
        require_local(content["checkpoints"])
        if "members" not in content:
            content = {**content, "members": len(matching_files(content["checkpoints"]))}
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise describe_error(error, place, Recipe) from error
    if is_refused() and any(step.family is None and is_user_code(step) for step in recipe.steps):
        raise trust_error(recipe.code_references())  # all of them, before the first is imported
    checks = _Checks(place)
    checks.train(recipe.train, ("train",), recipe.members)
    steps = tuple(checks.family(step, ("steps", index)) for index, step in enumerate(recipe.steps))
    recipe = recipe.model_copy(update={"steps": steps})
    for index, step in enumerate(steps):
        checks.step(recipe, step, ("steps", index))
    recipe.controls(recipe.seeds[0])
    too_large = [size for size in recipe.sizes if not 1 <= size <= recipe.members]
    if too_large:
        raise EnfoldError(f"{where}: sizes must be from 1 to the {recipe.members} members, got {too_large[0]}")
    return recipe


@cache
def train_config_adapter() -> TypeAdapter[TrainConfig]:
    """Return the validator of training settings, which is built once: that takes longer than to read a recipe."""
    return TypeAdapter(TrainConfig)


@dataclasses.dataclass(frozen=True)
class _Checks:
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
            with self._located((*path, "method")):
                method = method_of(step)
            self._own_options(method, step, path)
        if _may_import(step.perturb):
            with self._located((*path, "perturb")):
                make_perturbation(step.perturb)
        if is_ensemble_student(step.student) and _may_import(step.student):
            with self._located((*path, "student")):
                student_method(step.student)  # type: ignore[arg-type]

    def _own_options(self, method: Method, step: StepSpec, path: tuple[Any, ...]) -> None:
        known = [*method.arguments, *(distill_arguments() if step.family == "distill" else ()), *StepSpec.model_fields]
        for key, value in step.options.items():
            if key not in known:
                choose = ", ".join(method.arguments) or "it has none"
                setting = f", but train.{key} is a training setting" if key in SETTINGS else suggest(key, known)
                raise RecipeError(
                    f"{self.place.at((*path, key))}: '{step.method}' has no option '{key}'{setting}: {choose}"
                )
            with self._located((*path, key)):
                split_options(method, {key: value})
        with self._located(path):
            require_options(method, step.options)
            if step.family == "distill":  # a loss also checks its options together
                with reporting(f"'{step.method}'"):
                    method.target(**split_options(method, step.options)[0])

    @contextmanager
    def _located(self, path: tuple[Any, ...]) -> Iterator[None]:
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

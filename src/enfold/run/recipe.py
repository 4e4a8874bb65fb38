"""Recipe: the complete description of a run in one YAML file.

An error names the file, the line and the key, and suggests the nearest valid key.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from enfold.errors import EnfoldError
from enfold.io.checkpoints import matching_files, require_local
from enfold.io.usercode import is_refused, looking_in, trust_error
from enfold.run.ood import OodSpec, check_sets
from enfold.run.outputs import make_task
from enfold.run.override import apply_override
from enfold.run.recipe_checks import RecipeChecks, code_in
from enfold.run.recipe_errors import Place, RecipeError, describe_error, line_numbers
from enfold.run.specs import CorruptionSpec, DataSpec, StepSpec, TrajectorySpec, Whole, add_labels
from enfold.run.step_methods import (
    count_trainings,
    default_settings,
    is_trained,
    is_user_code,
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

    def find_controls(self) -> dict[str, str]:
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
    checks = RecipeChecks(place)
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

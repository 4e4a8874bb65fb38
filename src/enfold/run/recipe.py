"""Recipe: a whole run as a file. A wrong key names the key, its line and the nearest right one."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from enfold.errors import EnfoldError
from enfold.io.checkpoints import matching_files, require_local
from enfold.io.usercode import is_reference, looking_in
from enfold.registry import method, nearest
from enfold.run.methods import (
    STEPS,
    as_tuples,
    has_plan,
    made_fold,
    made_share,
    made_step,
    own_plan,
    step_kind,
    trainings,
)
from enfold.run.ood import OodSpec, check_sets
from enfold.run.override import apply_override
from enfold.run.specs import CorruptionSpec, DataSpec, FoldSpec, MethodSpec, ShareSpec, TrajectorySpec, labelled
from enfold.run.wrong import Place, explained, lines_of
from enfold.run.yaml_text import Loader, read_text, read_yaml, write_yaml
from enfold.train import TrainConfig

LONGEST = 100  # of a label: the names of files, with what is added to it, have at most 255 bytes
LABEL = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{LONGEST - 1}}}")  # a file's name and a row's
MOST_MEMBERS = 10_000
RESERVED = ("mean", "member", "members", "ensemble", "control")


class Recipe(BaseModel):
    """Everything that determines a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "run"
    data: DataSpec = DataSpec()
    network: str | dict[str, Any] = "mlp"
    members: int = Field(default=4, strict=True)  # of checkpoints: the first so many, all if left out
    checkpoints: str | None = None  # of members that were trained elsewhere, as a pattern: none are trained then
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    sizes: tuple[int, ...] = ()  # also evaluate the first so many members as an ensemble
    plan: dict[str, Any] = Field(default_factory=dict)
    shares: tuple[ShareSpec, ...] = ()
    folds: tuple[FoldSpec, ...] = ()
    control: bool = True  # a control for every plan that a fold trains by
    control_names: dict[str, str] = Field(default_factory=dict)  # of folds by label; numbered where left out
    cost: bool = True
    corruptions: CorruptionSpec | None = None
    ood: tuple[OodSpec, ...] = ()  # sets from outside
    trajectory: TrajectorySpec | None = None  # true: after every epoch

    @field_validator("trajectory", mode="before")
    @classmethod
    def _trajectory_by_word(cls, value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    @field_validator("trajectory")
    @classmethod
    def _trajectory_of_a_training(cls, value: TrajectorySpec | None, info: ValidationInfo) -> TrajectorySpec | None:
        if value is not None and info.data.get("checkpoints") is not None:
            raise ValueError("a trajectory is kept while members are trained, and these come from checkpoints")
        return value

    @field_validator("data", mode="before")
    @classmethod
    def _data_by_name(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @field_validator("ood", mode="before")
    @classmethod
    def _sets_by_name(cls, value: Any) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return value
        return [{"source": each} if isinstance(each, str) else each for each in value]

    @field_validator("ood")
    @classmethod
    def _sets_are_outside(cls, value: tuple[OodSpec, ...], info: ValidationInfo) -> tuple[OodSpec, ...]:
        data = info.data.get("data", DataSpec())
        check_sets(value, data.source, data.exclude_classes)
        return value

    @field_validator("shares", "folds", mode="before")
    @classmethod
    def _methods_by_name(cls, value: Any) -> Any:
        return labelled(value)

    @field_validator("members")
    @classmethod
    def _members_exist(cls, value: int) -> int:
        if not 1 <= value <= MOST_MEMBERS:
            raise ValueError(f"an ensemble must have 1 to {MOST_MEMBERS:,} members")
        return value

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("every seed must be given once")
        return value

    @field_validator("shares", "folds")
    @classmethod
    def _labels_are_names(cls, value: tuple[MethodSpec, ...]) -> tuple[MethodSpec, ...]:
        for each in value:
            taken = each.label.split("-")[0] in RESERVED or ".checkpoint" in each.label
            if not LABEL.fullmatch(each.label) or taken:
                raise ValueError(
                    f"a label must be at most {LONGEST} letters, digits, '-', '_' or '.', and not one of "
                    f"{', '.join(RESERVED)} or a checkpoint: change '{each.label[:LONGEST]}'"
                )
        return value

    @field_validator("shares", "folds")
    @classmethod
    def _labels_differ(cls, value: tuple[MethodSpec, ...], info: ValidationInfo) -> tuple[MethodSpec, ...]:
        before = info.data.get("shares", ()) if info.field_name == "folds" else ()
        labels = [each.label for each in (*before, *value)]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"every share and fold must have its own label, got '{twice[0]}' twice: add label: ...")
        return value

    @field_validator("control_names")
    @classmethod
    def _controls_are_named_so(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        folds = [fold.label for fold in info.data.get("folds", ())]
        for fold, name in value.items():
            if fold not in folds or not LABEL.fullmatch(name) or name.split("-")[0] != "control":
                raise ValueError(
                    f"they are 'control' or begin with 'control-', each of a fold by its label, got {fold}: {name}"
                )
        return value

    def members_plan(self, seed: int, device: str = "cpu") -> TrainConfig:
        """The members' plan for one seed."""
        return TrainConfig(**{**self.plan, "seed": seed, "device": device})

    def method_plan(self, fold: MethodSpec, seed: int, device: str = "cpu") -> TrainConfig:
        """The members' plan, or the method's where it has one of its own, with what a share or fold changes."""
        own = own_plan(fold.method)
        return TrainConfig(**{**(self.plan if own is None else own), **fold.plan, "seed": seed, "device": device})

    def as_long(self, fold: FoldSpec, seed: int, device: str = "cpu") -> TrainConfig | None:
        """The plan by which a network is trained on the labels as long as this fold trains; None where it does not."""
        training = [step for step in fold.steps if has_plan(step.method)]
        if not training:
            return None
        count = fold.first or self.members
        epochs = [
            self.method_plan(step, seed, device).epochs * trainings(step.method, step.settings, count)
            for step in training
        ]
        kept = [step for step in training if own_plan(step.method) is None]
        plan = self.method_plan(kept[-1], seed, device) if kept else self.members_plan(seed, device)
        return plan.replace(epochs=sum(epochs))

    def controls(self, seed: int, device: str = "cpu") -> dict[str, TrainConfig]:
        """One control for each plan that a fold trains by, under the name that is given for it or the next free."""
        found: dict[str, TrainConfig] = {}
        names = (f"control-{number}" if number > 1 else "control" for number in count(1))
        free = (name for name in names if name not in self.control_names.values())
        for fold in self.folds if self.control else ():
            plan = self.as_long(fold, seed, device)
            if plan is None or plan in found.values():
                continue
            name = self.control_names.get(fold.label) or next(free)
            if name in found:
                raise EnfoldError(
                    f"a control is trained as long as its folds, but '{fold.label}' is trained otherwise than others "
                    f"of '{name}': give it another of the control_names, or none"
                )
            found[name] = plan
        return found

    def controlled(self) -> dict[str, str]:
        """Which control is trained as long as which fold."""
        plans = self.controls(seed := self.seeds[0])
        asked = {fold.label: self.as_long(fold, seed) for fold in self.folds}
        return {fold: label for fold, plan in asked.items() for label, own in plans.items() if own == plan}

    def code_references(self) -> list[str]:
        """Every reference to code, wherever it stands: all texts but names and labels are looked at."""
        return list(dict.fromkeys(filter(is_reference, _texts(self.model_dump(mode="json", exclude={"name"})))))

    def command(self, *words: object) -> str:
        """What to type to go on with a run of this recipe, as it must be typed."""
        trust = ["--trust-code"] if self.code_references() else []
        return shlex.join(["enfold", *map(str, words), *trust])

    def extends(self, other: Recipe) -> bool:
        """Whether this is the other recipe, whatever its name, or that with more shares and folds."""
        names: dict[str, Any] = {"name": "", "control_names": {}}
        none = {**names, "shares": (), "folds": (), "corruptions": None, "ood": ()}
        same = self.model_copy(update=none) == other.model_copy(update=none)
        known = all(share in self.shares for share in other.shares)
        return same and known and all(fold in self.folds for fold in other.folds)

    def folds_of(self, seed: int) -> tuple[FoldSpec, ...]:
        """The folds that this seed has."""
        return tuple(fold for fold in self.folds if fold.seeds is None or seed in fold.seeds)

    def as_yaml(self) -> str:
        """The resolved recipe as a file."""
        return write_yaml(self.model_dump(mode="json"))


def _texts(tree: Any) -> Iterator[str]:
    """All texts of a tree but labels."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(value) if key != "label" else ()
    elif isinstance(tree, Sequence):
        for value in tree:
            yield from _texts(value)


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, with `a.b=c` overrides applied."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise EnfoldError(f"a recipe must be a readable YAML file, got '{path}' ({error}): check the path") from error
    with looking_in([Path(), path.parent]):
        return parse_recipe(text, str(path), overrides)


def parse_recipe(text: str, where: str = "the recipe", overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from YAML text."""
    try:
        content = read_yaml(text)
        lines = lines_of(yaml.compose(text, Loader=Loader))
    except yaml.YAMLError as error:
        raise EnfoldError(f"'{where}' must be YAML, but it cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise EnfoldError(f"'{where}' must be a mapping of keys to values, got {type(content).__name__}: see recipes/")
    for override in overrides:
        apply_override(content, override)
    return make_recipe(content, where, lines)


def make_recipe(content: Mapping[str, Any], where: str, lines: Mapping[tuple[Any, ...], int] | None = None) -> Recipe:
    """Validate a recipe's content; all its plans and folds are checked too."""
    if isinstance(content.get("checkpoints"), str):
        require_local(content["checkpoints"])
        if "members" not in content:
            content = {**content, "members": len(matching_files(content["checkpoints"]))}
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise explained(error, Place(where, lines or {}, content), Recipe) from error
    located = _Located(Place(where, lines or {}, content))
    located.plan(recipe.plan, ("plan",), recipe.members)
    for index, share in enumerate(recipe.shares):
        if share.from_member and share.network is not None:
            raise EnfoldError(
                f"{where}: '{share.label}' goes on from a member, whose network it has, got network too: leave one out"
            )
        located.method("share", share, ("shares", index))
        located.plan({**recipe.plan, **share.plan}, ("shares", index, "plan"), None)
    for index, fold in enumerate(recipe.folds):
        located.fold(recipe, fold, ("folds", index))
    recipe.controls(recipe.seeds[0])
    too_many = [size for size in recipe.sizes if not 1 <= size <= recipe.members]
    if too_many:
        raise EnfoldError(f"{where}: sizes must lie between 1 and the {recipe.members} members, got {too_many[0]}")
    return recipe


@dataclasses.dataclass(frozen=True)
class _Located:
    """Checks with the line of what is wrong."""

    place: Place

    def plan(self, settings: Mapping[str, Any], path: tuple[Any, ...], num_members: int | None) -> None:
        reserved = {"seed": "seeds", "device": "--device"}
        known = [field.name for field in dataclasses.fields(TrainConfig) if field.name not in reserved]
        for key in settings:
            at = self.place.at((*path, key))
            if key in reserved:
                raise EnfoldError(f"{at}: set {reserved[key]} of the run instead of plan.{key}")
            if key not in known:
                raise EnfoldError(f"{at}: a plan has no key '{key}'{nearest(key, known)}")
        try:
            plan = TypeAdapter(TrainConfig).validate_python({key: as_tuples(value) for key, value in settings.items()})
            for key, value in settings.items():
                if isinstance(value, str) and not isinstance(getattr(plan, key), str):
                    raise EnfoldError(f"'{key}' of the plan must not be text, got {value!r}: leave out the quotes")
            for field in ("lr", "weight_decay", "label_smoothing") if num_members else ():
                plan.per_member(field, num_members or 1)
        except ValidationError as error:
            raise explained(error, self.place, TrainConfig, path) from error
        except (EnfoldError, TypeError) as error:
            raise EnfoldError(f"{self.place.at(path)}: {error}") from error

    def method(self, room: str, spec: MethodSpec, path: tuple[Any, ...]) -> None:
        try:
            step = "then" in path
            if spec.method in STEPS and not step:
                raise EnfoldError(
                    f"there is no {room} '{spec.method}', which is a step: let it follow a fold, as then: [repair]"
                )
            kind = step_kind(spec.method) if step else method(room, spec.method).kind
            known = [field.name for field in dataclasses.fields(kind) if field.name != "plan"]
            for key in spec.settings:
                if key not in known:
                    close = nearest(key, [*known, *type(spec).model_fields])
                    raise EnfoldError(f"'{spec.method}' has no setting '{key}'{close}")
            (made_share if isinstance(spec, ShareSpec) else made_step if step else made_fold)(
                spec.method, spec.settings
            )
        except ValidationError as error:
            raise explained(error, self.place, kind, path) from error
        except (EnfoldError, TypeError) as error:
            raise EnfoldError(f"{self.place.at(path)}: {error}") from error

    def fold(self, recipe: Recipe, fold: FoldSpec, path: tuple[Any, ...]) -> None:
        if fold.first is not None and fold.first > recipe.members:
            raise EnfoldError(
                f"{self.place.at((*path, 'first'))}: '{fold.label}' is of the first {fold.first} members, but there "
                f"are {recipe.members}: lower it"
            )
        if fold.seeds is not None and not set(fold.seeds) & set(recipe.seeds):
            raise EnfoldError(
                f"{self.place.at((*path, 'seeds'))}: '{fold.label}' is of seeds {list(fold.seeds)}, none of which the "
                f"run has: choose among {list(recipe.seeds)}"
            )
        for number, step in enumerate(fold.steps):
            own = path if not number else (*path, "then", number - 1)
            self.method("fold", step, own)
            if step.plan and not has_plan(step.method):
                raise EnfoldError(
                    f"{self.place.at((*own, 'plan'))}: '{step.method}' is not trained by a plan: leave it out"
                )
            if has_plan(step.method):
                self.plan({**(own_plan(step.method) or recipe.plan), **step.plan}, (*own, "plan"), 1)

"""The stages of one seed of a run: members, steps and controls. Each is made once and stored."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enfold.analysis.corruptions import load_official, require_images
from enfold.data import Data, Split, corrupt
from enfold.data import load as load_data
from enfold.data.content import content
from enfold.data.corruptions import cifar_c_kinds
from enfold.data.ood import Outside
from enfold.data.tree import describe
from enfold.distill.control import train_control
from enfold.ensembles.common.search import FewerCandidatesWarning
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError, EnvironmentWarning, UnchangedWarning
from enfold.evaluate import member_logits
from enfold.executors import Parallel
from enfold.io.checkpoints import matching_files
from enfold.io.files import sha256
from enfold.io.identity import differences
from enfold.io.usercode import code_digest, describe_error, reporting
from enfold.merge.soup import SingleModelWarning
from enfold.networks import factory
from enfold.progress import progress
from enfold.run.directory import RunDirectory
from enfold.run.ood import make_set
from enfold.run.outputs import check_outputs, count_outputs, example_of, has_classes, make_task
from enfold.run.recipe import Recipe
from enfold.run.recipe_checks import code_in
from enfold.run.specs import CorruptionSpec, StepSpec
from enfold.run.steps import check_step, load_step, make_step
from enfold.saving import load, save
from enfold.tasks import Task
from enfold.train import TrainConfig, Trajectory, fit
from enfold.train.checkpoint import stored_history
from enfold.train.diversity import LowDiversityWarning

STORED_WARNINGS = (LowDiversityWarning, SingleModelWarning, FewerCandidatesWarning, UnchangedWarning)
"""Warnings that are shown with the results, from what is stored, and not while a stage runs."""


@dataclass(frozen=True)
class SeedRun:
    """One seed of a recipe, in its directory."""

    run: RunDirectory
    recipe: Recipe
    seed: int
    device: str = "cpu"

    @cached_property
    def data(self) -> Data:
        """The data of the recipe; the split is the same for every seed."""
        with self.run.context():
            return self.recipe.data.load()

    @cached_property
    def ood_sets(self) -> tuple[Outside, ...]:
        """The out-of-distribution sets of the recipe, in the form that the network takes."""
        spec = self.recipe.data
        with self.run.context():
            test = load_data(spec.source, size=spec.size).test if spec.exclude_classes else self.data.test
            return tuple(make_set(each, self.data, test) for each in self.recipe.ood)

    @cached_property
    def make_network(self) -> Callable[[], nn.Module]:
        """A factory of the recipe's network."""
        return self.network_factory(self.recipe.network)

    def network_factory(self, spec: str | Mapping[str, Any]) -> Callable[[], nn.Module]:
        """Return a factory of the network of a spec for the recipe's data."""
        with self.run.context():
            return factory(spec, self.data.shape, self.num_outputs)

    @property
    def task(self) -> Task | None:
        """The task of the recipe; None to infer it."""
        return make_task(self.recipe.task)

    @cached_property
    def num_outputs(self) -> int | None:
        """The number of outputs of a network for each example or position; None if it is unknown."""
        return count_outputs(self.data, self.task)

    @property
    def has_classes(self) -> bool:
        """Return whether there is one class per example, of a known number of classes."""
        return has_classes(self.data, self.task)

    def check(self) -> None:
        """Check that data, networks and steps fit each other, before anything is written.

        Raises:
            EnfoldError: If something does not fit.
        """
        self.require_same_code()
        self.check_network("the network", self.make_network)
        if not self.is_done("members", "members"):
            self._load_checkpoints()
        for key in ("corruptions", "ood"):
            if getattr(self.recipe, key) and not self.has_classes:
                raise EnfoldError(
                    f"{key} needs data with one class per example, got '{self.data.source}' without: remove {key}"
                )
        if self.recipe.corruptions is not None:
            self._check_corruptions(self.recipe.corruptions)
        _check_splits(self.data)
        _ = self.ood_sets  # raises an error for sets that cannot be converted
        with progress("checking steps", len(self.recipe.steps), quiet=len(self.recipe.steps) < 3) as bar:
            for step in self.recipe.steps:
                self.check_step(step)
                bar.advance(1)

    def check_step(self, step: StepSpec) -> None:
        """Check one step, without training."""
        with self.run.context():
            check_step(self, step)

    def _check_corruptions(self, spec: CorruptionSpec) -> None:
        """Raise an error for inputs other than images, and for missing official files or files of other data."""
        if spec.folder is None:
            corrupt(require_images(self.data)[:1].inputs, spec.names[0], 1)
            return
        there = cifar_c_kinds(spec.folder)
        for kind in (spec.names[0], *[kind for kind in spec.names if kind not in there][:1]):
            load_official(self.data, spec.folder, kind, 1)

    def check_network(self, what: str, make: Callable[[], nn.Module]) -> None:
        """Run two inputs through a network and check the shape of its outputs."""
        if not self.has_classes:
            with reporting(what):
                check_outputs(what, make, self.data, self.task)
            return
        inputs = example_input(self.data).expand(2, *self.data.shape)
        rule = f"take inputs of shape {self.data.shape} and return {self.data.num_classes} logits each"
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                shape = tuple(member_logits(make().eval(), inputs).shape[1:])
        except EnfoldError:
            raise
        except Exception as error:  # user code may raise any exception
            raise EnfoldError(
                f"{what} must {rule}, but it fails with {describe_error(error)}: fix the network"
            ) from error
        if shape != (2, self.data.num_classes):
            raise EnfoldError(f"{what} must {rule}, got {shape[1:]}: change its last layer")

    @property
    def about(self) -> dict[str, Any]:
        """Information that is stored with every model."""
        return {
            "network": self.recipe.network,
            "shape": list(self.data.shape),
            "num_classes": self.num_outputs,
            "data": self.data.source,
            "seed": self.seed,
        }

    def settings(self, kind: str, label: str) -> dict[str, Any]:
        """Return the settings of the recipe that a model depends on."""
        recipe = self.recipe
        common: dict[str, Any] = {"seed": self.seed, "network": recipe.network, "train": recipe.train}
        common |= {} if recipe.task is None else {"task": recipe.task}
        if kind == "members":
            return {**common, "members": recipe.members, "checkpoints": recipe.checkpoints}
        spec = self.list_models()[kind, label]
        if isinstance(spec, TrainConfig):
            return {**common, "control": _changes(spec)}
        return {**common, "step": spec.model_dump(mode="json", exclude={"label", "seeds"})}

    @cached_property
    def content(self) -> dict[str, Any]:
        """The identity of the data, of all three splits."""
        return content(self.data)

    def code(self, kind: str, label: str) -> dict[str, str]:
        """Return the checksum of each user file that a model is made with; what these files import is not included."""
        spec = self.list_models()[kind, label] if kind == "steps" else None
        named = [self.recipe.network, None if spec is None else spec.model_dump(mode="json")]
        with self.run.context():
            found = {reference: code_digest(reference) for reference in code_in(named)}
        return {f"code of '{reference}'": digest for reference, digest in found.items() if digest is not None}

    def require_same_code(self) -> None:
        """Refuse changed user files that stored models, or interrupted trainings, were made with.

        Raises:
            EnfoldError: With the model and the reference.
        """
        for kind, label in [("members", "members"), *self.list_models()]:
            done = self.run.is_done(kind, label)
            known = self.run.made_from(kind, label) if done else self.run.started_with(kind, label)
            now = self.code(kind, label) if known else {}
            changed = [name for name, digest in now.items() if known.get(name, digest) != digest]
            if changed:
                again = f"remove the step with  enfold drop {self.run.home} {label}  and make it again"
                raise EnfoldError(
                    f"a model is only used with the code that it was made with, but the {changed[0]} has changed since "
                    f"'{label}' was made: restore the file, or "
                    + (again if kind == "steps" else "choose another folder for a new run")
                )

    def made_from(self, kind: str, label: str) -> dict[str, Any]:
        """Return the identity of a model: its settings, the data, and the weights of the models that it uses."""
        identity = {**self.settings(kind, label), **self.content}
        if kind == "members":
            return identity
        identity["members' weights"] = self.members_digest
        for used in self.recipe.dependencies(self.recipe.step(label)) if kind == "steps" else ():
            identity[f"weights of '{used}'"] = sha256(self.run.model_file("steps", used))
        return identity

    @cached_property
    def members_digest(self) -> str:
        """The checksum of the members' weights."""
        return sha256(self.run.model_file("members", "members"))

    def is_done(self, kind: str, label: str) -> bool:
        """Return whether the model is stored and was made with the settings of the recipe."""
        return self.run.is_done(kind, label) and not self._list_changes(kind, label, self.settings(kind, label))

    def require_same(self, kind: str, label: str) -> None:
        """Raise an error for a stored model with other settings, data or members."""
        changed = self._list_changes(kind, label, self.made_from(kind, label))
        if changed:
            raise EnfoldError(
                f"a stored model is only used with what it was made from, but '{self.run.model_file(kind, label)}' "
                f"was made with other {', '.join(changed)}: restore them, or choose another folder or label"
            )

    def _list_changes(self, kind: str, label: str, now: Mapping[str, Any]) -> list[str]:
        known = self.run.made_from(kind, label)
        return differences({key: known[key] for key in now if key in known}, now) if known else []

    def _stage(
        self,
        kind: str,
        label: str,
        make: Callable[[Path], nn.Module],
        read: Callable[[Path], nn.Module] | None = None,
        details: dict[str, Any] | None = None,
    ) -> nn.Module:
        """Return the stored model, or make and store it; its training checkpoint is removed last.

        Args:
            kind: The folder of the model.
            label: Its name.
            make: Makes the model; called with the file of the training checkpoint.
            read: Loads the stored model.
            details: Stored with the model; `make` may add to it.
        """
        file, checkpoint = self.run.model_file(kind, label), self.run.checkpoint_file(kind, label)
        if self.run.is_done(kind, label):
            self.require_same(kind, label)
            self.run.remove_checkpoints(kind, label)
            return read(file) if read else load(file, self.make_network)
        started, code = time.perf_counter(), self.code(kind, label)
        self.run.write_started(kind, label, code)
        self.run.log("started", stage=f"{kind}/{label}", seed=self.seed)
        with warnings.catch_warnings(), reporting(f"'{label}'"):
            for category in (*STORED_WARNINGS, EnvironmentWarning):  # of the environment the command line says it
                warnings.simplefilter("ignore", category)
            model = make(checkpoint)
        self.run.require_folder()
        details = dict(details or {})
        history = stored_history(checkpoint)
        if history is not None and kind != "members":  # the history of the members is written by their stage
            self.run.write_json(f"histories/{kind}/{label}.json", history.as_dict())
            details["unchanged"] = bool(history.unchanged)
        about = {**self.about, **details, "made_from": {**self.made_from(kind, label), **code}}
        save(model, file, about=about)  # last, because it marks the stage as done
        self.run.remove_checkpoints(kind, label)
        self.run.log("finished", stage=f"{kind}/{label}", seed=self.seed, seconds=time.perf_counter() - started)
        return model.eval()

    def _load_checkpoints(self) -> tuple[DeepEnsemble, dict[str, list[str]]] | None:
        """Return members from the files that the recipe names, in order of name, and the names of the files."""
        if self.recipe.checkpoints is None:
            return None
        with self.run.context():
            files, count = matching_files(self.recipe.checkpoints), self.recipe.members
        if len(files) < count:
            raise EnfoldError(
                f"there must be a checkpoint for each of the {count} members, got {len(files)} files of "
                f"'{self.recipe.checkpoints}': remove members from the recipe, or set it to {len(files)}"
            )
        names = {"files": [str(file) for file in files[:count]], "left_out": [str(file) for file in files[count:]]}
        members = DeepEnsemble.from_checkpoints(files[:count], self.make_network)
        members.task = self.task
        return members, names

    def members(self, executor: Parallel | None = None) -> DeepEnsemble:
        """Return the trained members.

        Args:
            executor: Where blocks of them are trained if they are not stored; None to train all in this process.
        """
        details: dict[str, Any] = {}

        def make(checkpoint: Path) -> nn.Module:
            loaded = self._load_checkpoints()
            if loaded is not None:
                details.update(loaded[1])
                return loaded[0]
            members = DeepEnsemble(self.make_network, self.recipe.members, seed=self.seed)
            title = f"seed {self.seed}: {self.recipe.members} members"
            config = self.recipe.members_config(self.seed, self.device)
            keep = self.trajectory() if self.recipe.trajectory else None
            where: dict[str, Any] = {"checkpoint": checkpoint}
            if executor is not None:
                where, details["block_size"] = {"executor": executor}, executor.block_size
            history = fit(members, self.data, config=config, title=title, trajectory=keep, **where)
            self.run.write_json("members/history.json", history.as_dict())
            return members

        members = self._stage("members", "members", make, details=details)
        if not isinstance(members, DeepEnsemble):
            raise TypeError("members are stored as DeepEnsemble")
        return members.to(self.device)

    def trajectory(self) -> Trajectory:
        """Return the networks along the members' training; it is empty unless the recipe stores them."""
        spec = self.recipe.trajectory
        return Trajectory(self.run.path / "trajectory", 1 if spec is None else spec.every)

    def step(self, step: StepSpec, members: DeepEnsemble) -> nn.Module:
        """Return the model of a step, made if it is not stored."""
        details: dict[str, Any] = {}
        with self.run.context():
            model = self._stage(
                "steps",
                step.label,
                lambda checkpoint: make_step(self, step, members, checkpoint, details),
                lambda file: load_step(self, step, file),
                details,
            )
        return model.to(self.device)

    def predictor(self, step: StepSpec, model: nn.Module) -> nn.Module:
        """Return the model whose outputs are logits of class probabilities."""
        from enfold.run.steps import as_predictor

        with self.run.context():
            return as_predictor(step, model)

    @cached_property
    def controls(self) -> dict[str, TrainConfig]:
        """The training settings of the controls by name."""
        return self.recipe.controls(self.seed, self.device)

    def control(self, label: str, config: TrainConfig, members: DeepEnsemble) -> nn.Module:
        """Return a member that is trained as long as the steps with this control.

        Args:
            label: The name of the control.
            config: The training settings.
            members: The trained members.
        """

        def make(checkpoint: Path) -> nn.Module:
            title = f"seed {self.seed}: {label}"
            return train_control(members, self.data, config=config, checkpoint=checkpoint, title=title)

        return self._stage("controls", label, make, details={"start": "the best member"})

    def unchanged_start(self, label: str) -> str | None:
        """Return what a control or step started from if its training returned that unchanged."""
        kind = next((kind for kind, name in self.list_models() if name == label), None)
        about = self.run.read_json(f"{kind}/{label}.json").get("about", {}) if kind else {}
        return str(about.get("start", "its start")) if about.get("unchanged") else None

    def list_models(self) -> dict[tuple[str, str], Any]:
        """Return the models that are made from the members or beside them, by folder and label."""
        return {
            **{("controls", label): config for label, config in self.controls.items()},
            **{("steps", step.label): step for step in self.recipe.steps_of(self.seed)},
        }

    def models(self, without: Collection[str] = ()) -> dict[str, nn.Module]:
        """Return the members, controls and steps of the recipe; missing ones are made.

        Args:
            without: Labels to omit.
        """
        self.require_same_code()
        members = self.members()
        found: dict[str, nn.Module] = {"ensemble": members}
        for (kind, label), spec in self.list_models().items():
            if label in without:
                continue
            if kind == "controls":
                found[label] = self.control(label, spec, members)
            else:
                found[label] = self.predictor(spec, self.step(spec, members))
        return found


def _changes(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that differ from the defaults, except the device."""
    usual = dataclasses.asdict(TrainConfig())
    found = {**dataclasses.asdict(config), "task": None if config.task is None else repr(config.task)}
    return {key: value for key, value in found.items() if value != usual[key] and key != "device"}


def _check_splits(data: Data) -> None:
    """Raise an error if the validation split is the test split: models are selected and calibrated on it."""
    validation, test = data.val, data.test
    same = validation is test
    if isinstance(validation, Split) and isinstance(test, Split) and len(validation) == len(test):
        same = torch.equal(validation.targets, test.targets) and torch.equal(validation.inputs, test.inputs)
    if same:
        raise EnfoldError(
            "models are selected on the validation split and evaluated on the test split, got the same examples in "
            "both: use another validation split"
        )


def example_input(data: Data) -> torch.Tensor:
    """Return one prepared input of the test split, without the batch axis."""
    found = example_of(data)
    if not isinstance(found, torch.Tensor):
        raise EnfoldError(f"inputs must be one tensor here, got {describe(found)}: use data whose inputs are a tensor")
    return found

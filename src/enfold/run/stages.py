"""The stages of a run: train members, fold them, train controls, evaluate everything. Each is done once and kept."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enfold.analysis.shift import images_of, official
from enfold.data import Data, Split, corrupt
from enfold.data import load as load_data
from enfold.data.content import content
from enfold.data.corruptions import cifar_c_kinds
from enfold.data.ood import Outside
from enfold.distill.base import Distillation
from enfold.distill.control import Control
from enfold.engines.initialization import initialised
from enfold.ensembles.common.search import FewerCandidatesWarning
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError, UnchangedWarning
from enfold.evaluate import best_member, member_logits
from enfold.io.checkpoints import matching_files
from enfold.io.files import sha256
from enfold.io.identity import differences
from enfold.io.usercode import told
from enfold.merge.common.inputs import require_reference
from enfold.merge.soup import SingleModelWarning
from enfold.networks import factory
from enfold.progress import progress, titled
from enfold.run.directory import RunDirectory
from enfold.run.methods import made_fold, made_share
from enfold.run.ood import made_set
from enfold.run.recipe import Recipe
from enfold.run.specs import CorruptionSpec, FoldSpec, MethodSpec, ShareSpec
from enfold.saving import load, save
from enfold.train import TrainConfig, Trajectory, fit
from enfold.train.checkpoint import stored_history
from enfold.train.diversity import LowDiversityWarning
from enfold.train.loop import Fit


@dataclass(frozen=True)
class Cell:
    """One seed of a recipe, in its directory."""

    run: RunDirectory
    recipe: Recipe
    seed: int
    device: str = "cpu"

    @cached_property
    def data(self) -> Data:
        """The recipe's data; the same split for every seed."""
        with self.run.context():
            return self.recipe.data.load()

    @cached_property
    def outside(self) -> tuple[Outside, ...]:
        """The recipe's sets from outside, as its network is shown them."""
        spec = self.recipe.data
        with self.run.context():
            everything = load_data(spec.source, size=spec.size).test if spec.exclude_classes else self.data.test
            return tuple(made_set(each, self.data, everything) for each in self.recipe.ood)

    @cached_property
    def make_network(self) -> Callable[[], nn.Module]:
        """The recipe's network, made anew at each call."""
        return self.maker(self.recipe.network)

    def maker(self, spec: str | Mapping[str, Any]) -> Callable[[], nn.Module]:
        """What makes the network of a spec for the recipe's data."""
        with self.run.context():
            return factory(spec, self.data.shape, self.data.known_classes())

    def check(self) -> None:
        """Data and network must fit before anything is written: two inputs are run through the network."""
        inputs = example_input(self.data).expand(2, *self.data.shape)
        self._check_one("the network", self.make_network, inputs)
        if not self.is_done("members", "members"):
            self._brought()
        if self.recipe.corruptions is not None:
            self._check_corruptions(self.recipe.corruptions)
        _require_apart(self.data)
        _ = self.outside  # refuses what cannot be adapted
        for spec in self.recipe.shares:
            self.check_share(spec)
        with progress("checking folds", len(self.recipe.folds), quiet=len(self.recipe.folds) < 3) as bar:
            for fold in self.recipe.folds:
                self.check_fold(fold)
                bar.advance(1)

    def _check_corruptions(self, spec: CorruptionSpec) -> None:
        """Refuse what is no image, and official files that are not there or are of other data."""
        if spec.folder is None:
            corrupt(images_of(self.data)[:1].inputs, spec.names[0], 1)
            return
        there = cifar_c_kinds(spec.folder)
        for kind in (spec.names[0], *[kind for kind in spec.names if kind not in there][:1]):
            official(self.data, spec.folder, kind, 1)

    def check_fold(self, spec: FoldSpec) -> None:
        """A reference must be there, and a student fit its network and its teachers.

        All but the student's training is tried, with untrained networks.
        """
        fold = self.chosen_fold(spec)
        reference = getattr(fold, "reference", None)
        if reference is not None:
            with _cannot_be(spec):
                require_reference(reference, spec.first or self.recipe.members)
        if not isinstance(fold, Distillation) or not isinstance(self.data.train, Split):
            return
        few = self.data.replace(train=self.data.train[:8])
        plan = fold.plan.replace(epochs=0, warmup_epochs=0)
        changes: dict[str, Any] = {"first_epochs": 0} if hasattr(fold, "first_epochs") else {}
        fold = dataclasses.replace(fold, plan=plan, start="fresh" if fold.begins == "member" else fold.start, **changes)
        make = self.make_network if fold.student is None else fold.student
        inputs = example_input(self.data).expand(2, *self.data.shape)
        self._check_one(f"the student of '{spec.label}'", make, inputs)
        with _cannot_be(spec), torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            members = DeepEnsemble.make(self.make_network, self.recipe.members, seed=self.seed).eval()
            fold.agreed(fold.begin(members, few, None, None), members, few)

    def check_share(self, spec: ShareSpec) -> None:
        """A share must fit its network and the plan."""
        inputs = example_input(self.data).expand(2, *self.data.shape)
        make_network = self.network_of(spec)
        if spec.network is not None:
            self._check_one(f"the network of '{spec.label}'", make_network, inputs)
        share = self.chosen_share(spec)
        plan = share.adapted(self.recipe.method_plan(spec, self.seed, self.device))
        self._check_one(f"the share '{spec.label}'", lambda: share(make_network()), inputs)
        planned = Fit(share(make_network()), self.data, plan, share.objective(plan), None)
        if isinstance(self.data.train, Split):
            next(planned.order.batches(self.data, 0))

    def _check_one(self, what: str, make: Callable[[], nn.Module], inputs: torch.Tensor) -> None:
        wanted = f"take inputs of shape {self.data.shape} and return {self.data.num_classes} logits each"
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                shape = tuple(member_logits(make().eval(), inputs).shape[1:])
        except EnfoldError:
            raise
        except Exception as error:  # the user's own code: anything may be raised
            raise EnfoldError(f"{what} must {wanted}, but it fails with {told(error)}: mend the network") from error
        if shape != (2, self.data.num_classes):
            raise EnfoldError(f"{what} must {wanted}, got {shape[1:]}: change its last layer")

    @property
    def about(self) -> dict[str, Any]:
        """What is recorded with every model."""
        return {
            "network": self.recipe.network,
            "shape": list(self.data.shape),
            "num_classes": self.data.num_classes,
            "data": self.data.source,
            "seed": self.seed,
        }

    def settings(self, kind: str, label: str) -> dict[str, Any]:
        """What a model is made by, as the recipe has it."""
        recipe = self.recipe
        found: dict[str, Any] = {"seed": self.seed, "network": recipe.network, "plan": recipe.plan}
        if kind == "members":
            return {**found, "members": recipe.members, "checkpoints": recipe.checkpoints}
        spec = self.wanted()[kind, label]
        if isinstance(spec, TrainConfig):
            return {**found, "control": _changes(spec)}
        own = spec.model_dump(mode="json", exclude={"label", "seeds"})
        return {**found, "method": {**own, "then": [_told(step) for step in getattr(spec, "then", ())]}}

    @cached_property
    def content(self) -> dict[str, Any]:
        """What tells the data, of all three parts, from others."""
        return content(self.data)

    def made_from(self, kind: str, label: str) -> dict[str, Any]:
        """What tells a model from one that is made by other settings, from other data or other members."""
        members = {} if kind == "members" else {"members' weights": self.members_digest}
        return {**self.settings(kind, label), **self.content, **members}

    @cached_property
    def members_digest(self) -> str:
        """What tells the members' weights from others."""
        return sha256(self.run.model_file("members", "members"))

    def is_done(self, kind: str, label: str) -> bool:
        """Whether the model is there and was made by the settings that the recipe has now."""
        return self.run.is_done(kind, label) and not self._changed(kind, label, self.settings(kind, label))

    def require_same(self, kind: str, label: str) -> None:
        """Refuse a model that was made by other settings, from other data or other members."""
        changed = self._changed(kind, label, self.made_from(kind, label))
        if changed:
            raise EnfoldError(
                f"a model is used again only with what it was made from, but '{self.run.model_file(kind, label)}' was "
                f"made with other {', '.join(changed)}: restore what it was, or choose another folder or label"
            )

    def _changed(self, kind: str, label: str, now: Mapping[str, Any]) -> list[str]:
        known = self.run.made_from(kind, label)
        return differences({key: known[key] for key in now if key in known}, now) if known else []

    def _stage(
        self,
        kind: str,
        label: str,
        make: Callable[[Path], nn.Module],
        network: Callable[[], nn.Module] | None = None,
        told: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """The stored model, or the one that `make` gives, which is stored; its training checkpoint goes last."""
        file, checkpoint = self.run.model_file(kind, label), self.run.checkpoint_file(kind, label)
        if self.run.is_done(kind, label):
            self.require_same(kind, label)
            self.run.remove_checkpoints(kind, label)
            return load(file, network or self.make_network)
        started = time.perf_counter()
        self.run.log("started", stage=f"{kind}/{label}", seed=self.seed)
        with warnings.catch_warnings():
            for notice in (
                LowDiversityWarning,
                SingleModelWarning,
                FewerCandidatesWarning,
                UnchangedWarning,
            ):  # with the results, from what is stored
                warnings.simplefilter("ignore", notice)
            model = make(checkpoint)
        self.run.require_folder()
        history = stored_history(checkpoint)
        if history is not None and kind != "members":  # the members' is kept by their own stage
            self.run.write_json(f"histories/{kind}/{label}.json", history.as_dict())
        made_from = self.made_from(kind, label)
        save(model, file, about={**self.about, **(told or {}), "made_from": made_from})  # last: the stage is done then
        self.run.remove_checkpoints(kind, label)
        self.run.log("finished", stage=f"{kind}/{label}", seed=self.seed, seconds=time.perf_counter() - started)
        return model.eval()

    def _brought(self) -> tuple[DeepEnsemble, dict[str, list[str]]] | None:
        """Members that were trained elsewhere, if the recipe names their files, and which file is which.

        They are the first so many in order of name.
        """
        if self.recipe.checkpoints is None:
            return None
        with self.run.context():
            files, wanted = matching_files(self.recipe.checkpoints), self.recipe.members
        if len(files) < wanted:
            raise EnfoldError(
                f"there must be a checkpoint for each of the {wanted} members, got {len(files)} files of "
                f"'{self.recipe.checkpoints}': leave members out, or set it to {len(files)}"
            )
        told = {"files": [str(file) for file in files[:wanted]], "left_out": [str(file) for file in files[wanted:]]}
        return DeepEnsemble.load(files[:wanted], self.make_network), told

    def members(self) -> DeepEnsemble:
        """The trained members."""
        told: dict[str, Any] = {}

        def make(checkpoint: Path) -> nn.Module:
            brought = self._brought()
            if brought is not None:
                told.update(brought[1])
                return brought[0]
            members = DeepEnsemble.make(self.make_network, self.recipe.members, seed=self.seed)
            title = f"seed {self.seed}: {self.recipe.members} members"
            plan = self.recipe.members_plan(self.seed, self.device)
            keep = self.trajectory() if self.recipe.trajectory else None
            history = fit(members, self.data, config=plan, checkpoint=checkpoint, title=title, keep=keep)
            self.run.write_json("members/history.json", history.as_dict())
            return members

        members = self._stage("members", "members", make, told=told)
        if not isinstance(members, DeepEnsemble):
            raise TypeError("members are stored as DeepEnsemble")
        return members.to(self.device)

    def trajectory(self) -> Trajectory:
        """What the members' training passed through; it has no epochs unless the recipe asks for it."""
        spec = self.recipe.trajectory
        return Trajectory(self.run.path / "trajectory", 1 if spec is None else spec.every)

    def share(self, spec: ShareSpec, members: DeepEnsemble | None) -> nn.Module:
        """One share, trained from a fresh network or on from the best member."""
        make_network = self.network_of(spec)

        def make(checkpoint: Path) -> nn.Module:
            if spec.from_member and members is not None:
                network = members.member(best_member(members, self.data))
            else:
                network, _ = initialised(make_network, self.seed, 0)
            plan = self.recipe.method_plan(spec, self.seed, self.device)
            title = f"seed {self.seed}: {spec.label}"
            trained: nn.Module = self.chosen_share(spec).train(
                network, self.data, plan, checkpoint=checkpoint, title=title
            )
            return trained

        return self._stage("shares", spec.label, make, make_network).to(self.device)

    def network_of(self, spec: ShareSpec) -> Callable[[], nn.Module]:
        """What makes the share's network: the recipe's, or its own."""
        if spec.network is None:
            return self.make_network
        return self.maker(spec.network)

    def chosen_share(self, spec: ShareSpec) -> Any:
        """The method with its settings; the recipe's number of members and the cell's seed where it has none given."""
        return made_share(spec.method, spec.settings, members=self.recipe.members, seed=self.seed)

    def notice(self, spec: ShareSpec) -> str | None:
        """What to know of a share that is started otherwise than it is meant to be."""
        if spec.from_member or not self.chosen_share(spec).wants_trained:
            return None
        return f"{spec.method} adapts a trained network, but this one was drawn anew: use from_member: true"

    def fold(self, spec: FoldSpec, members: DeepEnsemble) -> nn.Module:
        """One fold of the members."""
        fold, members = self.chosen_fold(spec), members[: spec.first]

        told: dict[str, Any] = {"fold": _told(spec)}

        def make(checkpoint: Path) -> nn.Module:
            with titled(f"seed {self.seed}: {spec.label}"):
                folded: nn.Module = fold(members, self.data, checkpoint=checkpoint, answers=self.run.path / "answers")
            return folded

        if spec.then:
            told["then"] = [_told(step) for step in spec.then]
        if isinstance(getattr(fold, "offset", None), float):
            told["dirichlet_offset"] = fold.offset  # by which Dirichlet(network, offset) reads it
        network = self._stage("folds", spec.label, make, getattr(fold, "student", None), told)
        answering: nn.Module = fold.answering(network) if hasattr(fold, "answering") else network
        return answering.to(self.device)

    def chosen_fold(self, spec: FoldSpec) -> Any:
        """The method with its settings and its plan, as a route with what follows it.

        A student that is a share has as many members as are folded.
        """

        def given(step: MethodSpec) -> dict[str, Any]:
            return {
                "network": self.maker,
                "plan": self.recipe.method_plan(step, self.seed, self.device),
                "members": spec.first or self.recipe.members,
                "seed": self.seed,
            }

        return made_fold(spec.method, spec.settings, **given(spec))

    def controls(self) -> dict[str, TrainConfig]:
        """One control for each plan that a fold trains by."""
        return self.recipe.controls(self.seed, self.device)

    def control(self, label: str, plan: TrainConfig, members: DeepEnsemble) -> nn.Module:
        """A member trained as long as the folds with that plan."""
        told: dict[str, Any] = {}

        def make(checkpoint: Path) -> nn.Module:
            with titled(f"seed {self.seed}: {label}"):
                return Control(plan)(members, self.data, checkpoint=checkpoint)

        return self._stage("controls", label, make, told=told)

    def start_kept(self, label: str) -> str | None:
        """What a control or fold started from, if its training returned that unchanged."""
        kind = next((kind for kind, name in self.wanted() if name == label), None)
        about = self.run.read_json(f"{kind}/{label}.json").get("about", {}) if kind else {}
        return about.get("unchanged")

    def wanted(self) -> dict[tuple[str, str], Any]:
        """What is made beside the members and from them, by kind and label."""
        return {
            **{("shares", spec.label): spec for spec in self.recipe.shares},
            **{("controls", label): plan for label, plan in self.controls().items()},
            **{("folds", spec.label): spec for spec in self.recipe.folds_of(self.seed)},
        }

    def models(self, without: Collection[str] = ()) -> dict[str, nn.Module]:
        """Everything the recipe asks for, made where it is missing: the members, each share, control and fold.

        Those of the labels in `without` are left out.
        """
        members = self.members()
        make: dict[str, Callable[[Any, DeepEnsemble], nn.Module]] = {"shares": self.share, "folds": self.fold}
        found: dict[str, nn.Module] = {"ensemble": members}
        for (kind, label), spec in self.wanted().items():
            if label not in without:
                found[label] = make[kind](spec, members) if kind in make else self.control(label, spec, members)
        return found


@contextmanager
def _cannot_be(spec: FoldSpec) -> Iterator[None]:
    """What is wrong with a fold names it."""
    try:
        yield
    except EnfoldError as error:
        raise EnfoldError(f"the fold '{spec.label}' cannot be: {error}") from error


def _changes(plan: TrainConfig) -> dict[str, Any]:
    """What a plan has other than usual; where it runs is no part of it."""
    usual = dataclasses.asdict(TrainConfig())
    return {key: value for key, value in dataclasses.asdict(plan).items() if value != usual[key] and key != "device"}


def _told(spec: MethodSpec) -> dict[str, Any]:
    """A method as a recipe has it."""
    return {"method": spec.method, **spec.settings, **({"plan": spec.plan} if spec.plan else {})}


def _require_apart(data: Data) -> None:
    """What models are calibrated by must not be what they are judged by."""
    validation, test = data.val, data.test
    same = validation is test
    if isinstance(validation, Split) and isinstance(test, Split) and len(validation) == len(test):
        same = torch.equal(validation.labels, test.labels) and torch.equal(validation.inputs, test.inputs)
    if same:
        raise EnfoldError(
            "models are calibrated on the validation part and judged by the test part, got the same examples in both: "
            "give the data a validation part of its own"
        )


def example_input(data: Data) -> torch.Tensor:
    """One prepared input of the test part, without the batch axis."""
    part = data.test
    inputs = part.inputs[:1] if hasattr(part, "inputs") else next(iter(part))[0][:1]
    return data.prepare(inputs)[0]

"""The alignment of a run's members: each section is stored when it is finished and not computed again."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from enfold.analysis.alignment import (
    TEMPERATURES,
    Aligned,
    Scores,
    check_soft,
    compute_matrix_statistics,
    compute_row_statistics,
    restore_alignment,
    score_average,
    score_mean_member,
    score_naive_averages,
    score_temperature,
    to_json,
    train_alignment,
    train_at_temperature,
)
from enfold.analysis.interpolation import compute_barriers, interpolate
from enfold.analysis.planted_permutations import NOISES, align_different_pair, recover_planted, train_different_pair
from enfold.data import Data, Split
from enfold.engines.skeleton import State
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.io.files import atomic_path, write_json
from enfold.merge import align
from enfold.merge.common.permutation_learning import PUBLISHED, PermutationOptions
from enfold.merge.common.states import states_of
from enfold.metrics import accuracy, nll
from enfold.progress import progress, replace_titles
from enfold.registry import find_method, suggest
from enfold.run.override import apply_override
from enfold.run.recipe_checks import as_tuple, train_config_adapter
from enfold.run.recipe_errors import Place, describe_error
from enfold.run.seed_run import SeedRun
from enfold.seeds import generator
from enfold.train import TrainConfig

PARTS = ("rows", "line", "matrices", "averages", "sweep", "planted", "different")
MATRICES = "matrices.safetensors"
# Increased when the content of a section changes.
MEANINGS = {"rows": 2, "averages": 2, "planted": 2, "different": 2}


@dataclass(frozen=True)
class AlignmentOptions:
    """The members, data and values of an analysis of alignment."""

    members: int = 2  # number of members to align, the first of the run
    examples: int | None = None  # number of training examples; None: all
    points: int = 21  # on each line
    temperatures: tuple[float, ...] = TEMPERATURES
    noises: tuple[float, ...] = NOISES
    only: tuple[str, ...] = PARTS

    def check(self, run: SeedRun) -> None:
        """Raise an error for options that cannot be computed, before anything is written."""
        for name in self.only:
            if name not in PARTS:
                raise EnfoldError(
                    f"an analysis has no section '{name}'{suggest(name, PARTS)}: it has {', '.join(PARTS)}"
                )
        if not 2 <= self.members <= run.recipe.members:
            raise EnfoldError(
                f"--members must be from 2 to {run.recipe.members} for this run, got {self.members}: change it"
            )
        if self.examples is not None and self.examples < 2:
            raise EnfoldError(f"--examples must be at least 2, got {self.examples}: raise it")
        if self.points < 2:
            raise EnfoldError(f"--points must be at least 2, got {self.points}: 21 are usual")
        if not all(0 < each < math.inf for each in self.temperatures):
            raise EnfoldError(f"temperatures must be above 0, got {min(self.temperatures)}: 1 is the published value")
        if not all(0 <= each < math.inf for each in self.noises):
            raise EnfoldError(
                f"noise must be 0 or more, got {min(self.noises)}: 1 is the standard deviation of the weights"
            )


def permutation_options(
    run: SeedRun, temperature: float, epochs: int | None, changes: Sequence[str]
) -> PermutationOptions:
    """Return the options of permAVG as published, with changes.

    Args:
        run: The seed that is analysed.
        temperature: The temperature of the soft permutations.
        epochs: The number of epochs; 20 as published if None.
        changes: Options of `enfold.merge.perm_avg` as `key=value`, and training settings as `train.key=value`.

    Raises:
        EnfoldError: If an option does not exist, does not fit, or the analysis does not support it.
    """
    settings: dict[str, Any] = {"temperature": temperature, "train": {}}
    for change in changes:
        apply_override(settings, change)
    place = Place("the command line", {}, settings)
    config = _train_config(settings.pop("train"), epochs, place).replace(seed=run.seed, device=run.device)
    options = find_method("merge", "perm_avg").check(settings)
    unsupported = [name for name in ("project", "repair") if options.pop(name, None)]
    if unsupported:
        raise EnfoldError(
            f"the analysis supports soft permutations to the first member only, got permAVG with {unsupported[0]}: "
            "omit it"
        )
    permutations = PermutationOptions(**options, config=config)
    check_soft(permutations)
    return permutations


def _train_config(changes: Any, epochs: int | None, place: Place) -> TrainConfig:
    try:
        given = TypeAdapter(dict[str, dict[str, Any]]).validate_python({"train": changes})["train"]
    except ValidationError as error:
        raise describe_error(error, place, TrainConfig) from error
    own = given if epochs is None else {**given, "epochs": epochs}
    unknown = next((key for key in own if key not in TrainConfig.__dataclass_fields__), None)
    if unknown is not None:
        near = suggest(unknown, TrainConfig.__dataclass_fields__)
        raise EnfoldError(f"there is no training setting '{unknown}'{near}: see TrainConfig")
    values = {key: as_tuple(value) for key, value in own.items()}
    try:
        return train_config_adapter().validate_python({**vars(PUBLISHED), **values})
    except ValidationError as error:
        raise describe_error(error, place, TrainConfig, ("train",)) from error


def study(run: SeedRun, folder: Path, options: AlignmentOptions, permutation: PermutationOptions) -> dict[str, Any]:
    """Return the requested sections by name, in the form of JSON; stored ones are read.

    Args:
        run: The seed to analyse.
        folder: The folder of the results.
        options: The members, data and sections.
        permutation: The options of permAVG.
    """
    options.check(run)
    own = _Study(run, folder, options, permutation)
    found: dict[str, Any] = {}
    with progress("alignment", len(options.only)) as bar:
        for name in (name for name in PARTS if name in options.only):
            found[name] = getattr(own, name)()
            bar.advance(1)
            bar.say(name)
    return found


def stored_matrices(folder: Path) -> dict[str, Tensor]:
    """Return the stored soft permutations by group, (members - 1, d, d); empty if none are stored."""
    return _read_matrices(folder / MATRICES)[1]


class _Study:
    """The members of one seed and the results about their alignment."""

    def __init__(self, run: SeedRun, folder: Path, options: AlignmentOptions, permutation: PermutationOptions) -> None:
        self.run, self.folder, self.options, self.permutation = run, folder, options, permutation
        settings = {
            "seed": run.seed,
            "members": options.members,
            "examples": options.examples,
            "fold": asdict(permutation),
        }
        self.settings: dict[str, Any] = json.loads(json.dumps({**settings, "weights": run.members_digest}))

    @cached_property
    def data(self) -> Data:
        """The run's data, with the requested number of training examples."""
        data, count = self.run.data, self.options.examples
        if count is None:
            return data
        if not isinstance(data.train, Split):
            raise EnfoldError("--examples selects from a training split in memory, got a loader: omit --examples")
        order = torch.randperm(len(data.train), generator=generator(self.run.seed, "alignment"))
        return data.replace(train=data.train[order[:count]])

    @cached_property
    def all_members(self) -> DeepEnsemble:
        """All members of the run."""
        return self.run.members().cpu()

    @cached_property
    def members(self) -> DeepEnsemble:
        """The members that are aligned."""
        chosen: DeepEnsemble = self.all_members[: self.options.members]
        return chosen

    @cached_property
    def aligned(self) -> Aligned:
        """The learned soft permutations, read or learned."""
        file = self.folder / MATRICES
        settings, matrices = _read_matrices(file)
        if matrices and settings == self.settings:
            return restore_alignment(self.members, self.data, self.permutation, list(matrices.values()))
        digest = hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:12]
        checkpoint = self.folder / f"learned-{digest}.checkpoint.safetensors"  # only valid for these settings
        with replace_titles(f"permAVG at temperature {self.permutation.temperature:g}"):
            found = train_alignment(self.members, self.data, self.permutation, checkpoint=checkpoint)
        values = {
            f"{k:03d} {g.name}": m.contiguous()
            for k, (g, m) in enumerate(zip(found.groups, found.matrices, strict=True))
        }
        with atomic_path(file) as temporary:
            save_file(values, temporary, {"settings": json.dumps(self.settings)})
        for left in self.folder.glob("learned-*.checkpoint*.safetensors"):
            left.unlink()
        return found

    def rows(self) -> Any:
        """Compare the rows of each layer before and after alignment."""

        def make() -> Any:
            states = states_of(self.members)
            return compute_row_statistics(states, self.aligned.states(), self.aligned.groups)

        return self._part("rows", {}, make)

    def matrices(self) -> Any:
        """Compute statistics of the soft permutations."""
        return self._part("matrices", {}, lambda: compute_matrix_statistics(self.aligned.groups, self.aligned.matrices))

    def line(self) -> Any:
        """Evaluate lines between members 1 and 2, unaligned, matched and aligned by permAVG, by batch-norm mode."""

        def make() -> Any:
            network = self.members.member(0)
            first, *_ = states_of(self.members)
            modes = ("stored", "train", "reset") if _has_batch_norm(network) else ("stored", "repair")
            return {
                mode: {name: self._line(network, first, end, mode) for name, end in self._ends().items()}
                for mode in modes
            }

        return self._part("line", {"points": self.options.points}, make)

    def _ends(self) -> dict[str, State]:
        matched = states_of(align(self.members[:2], self.data))[1]
        return {"naive": states_of(self.members)[1], "weight matching": matched, "permAVG": self.aligned.states()[1]}

    def _line(self, network: nn.Module, first: State, second: State, mode: Any) -> dict[str, Any]:
        how = {"repair": True} if mode == "repair" else {"batch_norm": mode}
        found = interpolate(network, first, second, self.data, points=self.options.points, **how)
        return {**found.as_dict(), "barrier": to_json(compute_barriers(found))}

    def averages(self) -> Any:
        """Evaluate averages of weights, the mean member and the ensemble of the aligned members."""

        def make() -> Any:
            matched = states_of(align(self.all_members, self.data))
            counts = range(2, self.all_members.num_members + 1)
            predictions = predict(self.members, self.data.test).mean()
            return {
                "naive": score_naive_averages(self.all_members, self.data),
                "weight matching": {k: score_average(self.all_members, matched[:k], self.data) for k in counts},
                "permAVG": {self.options.members: score_average(self.members, self.aligned.states(), self.data)},
                "ensemble": {self.options.members: Scores(accuracy(predictions), nll(predictions))},
                "mean member": {self.options.members: score_mean_member(self.members, self.data)},
            }

        return self._part("averages", {"all": self.run.recipe.members}, make)

    def sweep(self) -> Any:
        """Train and evaluate permAVG at several temperatures."""

        def one(temperature: float) -> Any:
            if temperature == self.permutation.temperature:
                return score_temperature(self.aligned, self.data, temperature)
            return train_at_temperature(self.members, self.data, self.permutation, temperature)

        return self._points("sweep", "temperature", self.options.temperatures, one)

    def planted(self) -> Any:
        """Recover planted permutations at increasing noise."""

        def one(noise: float) -> Any:
            return recover_planted(self.members, self.data, self.permutation, noise, seed=self.run.seed)

        return self._points("planted", "noise", self.options.noises, one)

    def different(self) -> Any:
        """Align and average members that were trained on different tasks."""
        plan = self.run.recipe.members_config(self.run.seed, self.run.device)

        def make(difference: Any) -> Any:
            pair = train_different_pair(self.run.make_network, self.data, plan, difference)
            return align_different_pair(pair, self.data, self.permutation, difference)

        return self._points(
            "different", "difference", ("classes", "labels"), make, {"plan": json.loads(json.dumps(asdict(plan)))}
        )

    def _part(self, name: str, more: dict[str, Any], make: Callable[[], Any]) -> Any:
        settings = self._settings(name, more)
        stored = self._read_stored(name, settings)
        if stored is None:
            stored = to_json(make())
            self._write(name, settings, stored)
        return stored

    def _points(
        self, name: str, key: str, values: Sequence[Any], make: Callable[[Any], Any], more: dict[str, Any] | None = None
    ) -> list[Any]:
        """Return the points of a section; each is stored when it is finished, beside points of other values."""
        settings = self._settings(name, more or {})
        stored: list[Any] = self._read_stored(name, settings) or []
        for value in values:
            if all(each[key] != value for each in stored):
                stored.append(to_json(make(value)))
                self._write(name, settings, stored)
        return [each for value in values for each in stored if each[key] == value]

    def _settings(self, name: str, more: dict[str, Any]) -> dict[str, Any]:
        """Return all settings that a section depends on, including the version of its content."""
        meaning = {"meaning": MEANINGS[name]} if name in MEANINGS else {}
        return {**self.settings, **more, **meaning}

    def _read_stored(self, name: str, settings: dict[str, Any]) -> Any:
        """Return the stored results with the same settings; None if there are none."""
        file = self.folder / f"{name}.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        same = isinstance(content, dict) and content.get("settings") == settings
        return content.get("found") if same else None

    def _write(self, name: str, settings: dict[str, Any], found: Any) -> None:
        write_json(self.folder / f"{name}.json", {"part": name, "settings": settings, "found": found})


def _has_batch_norm(network: nn.Module) -> bool:
    return any(isinstance(layer, _BatchNorm) for layer in network.modules())


def _read_matrices(file: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return the settings and the matrices by group, in the order of the groups."""
    if not file.is_file():
        return None, {}
    try:
        with safe_open(file, "pt") as stored:
            settings = json.loads((stored.metadata() or {}).get("settings", "null"))
            names = sorted(stored.keys())
            return settings, {name.split(" ", 1)[1]: stored.get_tensor(name) for name in names}
    except (SafetensorError, ValueError):  # damaged: they are learned again
        return None, {}

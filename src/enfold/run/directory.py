"""Run directories: every file is complete or absent, and a stage is done when its manifest exists."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from enfold.errors import EnfoldError
from enfold.io.files import append_line, atomic_path, remove_stale_parts, write_json, write_text
from enfold.io.identity import Identity
from enfold.io.usercode import looking_in, trust_error
from enfold.metrics.predictions import Predictions
from enfold.run.lock import FILE as LOCK
from enfold.run.lock import writing
from enfold.run.recipe import Recipe, parse_recipe
from enfold.run.yaml_text import read_text
from enfold.saving import versions

FORMAT = 2
"""Version of the layout of a run directory; the first edition of enfold wrote 1."""


class RunDirectory:
    """The folder of one run: its recipe, weights, predictions, metrics and log."""

    def __init__(
        self, path: Path, beside: Path | None = None, home: Path | None = None, *, trust_code: bool = False
    ) -> None:
        self.path, self.home = path, home or path
        self.beside = beside  # the folder of the recipe's file
        self.trust_code = trust_code  # whether code that its recipe names may run

    @classmethod
    def create(
        cls,
        path: Path,
        recipe: Recipe,
        *,
        resume: bool = False,
        beside: Path | None = None,
        trust_code: bool = False,
    ) -> RunDirectory:
        """A new run, or with `resume` the same one again; another run's directory is refused."""
        run = cls(path, beside, trust_code=trust_code)
        with run.writing():
            run.prepare()
            run._begin(recipe, resume)
        return run

    def _begin(self, recipe: Recipe, resume: bool) -> None:
        if not self.manifest_file.exists():
            if any(not _is_leftover(file) for file in self.path.iterdir()):
                raise EnfoldError(f"a run needs an empty or new folder, got '{self.path}': choose another")
            made_in = [relative(place, self.path) for place in self.places[:-1]]
            manifest = {"format": FORMAT, "name": recipe.name, "versions": versions(), "made_in": made_in}
            write_json(self.manifest_file, manifest)
        elif not resume:
            raise EnfoldError(
                f"'{self.path}' already holds a run: add --resume to go on with it, or choose another folder"
            )
        else:
            self.require_format()
        if not self.recipe_file.exists():  # a run is one from its manifest on, wherever it was stopped
            self.write_recipe(recipe)
        elif not self.recipe().extends(recipe):
            raise EnfoldError(
                f"a run can only be resumed with its own recipe, but '{self.path}' has another: choose another folder"
            )

    @classmethod
    def open(cls, path: Path, *, trust_code: bool = False) -> RunDirectory:
        """An existing run."""
        run = cls(path, trust_code=trust_code)
        if not run.manifest_file.is_file() or not run.recipe_file.is_file():
            raise EnfoldError(f"a run directory holds run.json and recipe.yaml, but '{path}' does not: check the path")
        run.require_format()
        return run

    def require_format(self) -> None:
        """Refuse a run that another version of enfold wrote in another layout.

        Raises:
            EnfoldError: With the version that wrote the run.
        """
        manifest = self.read_json("run.json")
        written = manifest.get("format") if isinstance(manifest, dict) else None
        if written != FORMAT:
            version = (
                (manifest.get("versions") or {}).get("enfold", "unknown") if isinstance(manifest, dict) else "unknown"
            )
            raise EnfoldError(
                f"this enfold reads run directories of format {FORMAT}, but '{self.path}' was written by enfold "
                f"{version} in format {written}: read it with that version, or run its recipe again in another folder"
            )

    def prepare(self) -> None:
        """Make a run ready to be written: remove what killed processes left, refuse folders that lead out of it."""
        remove_stale_parts(self.path)
        for file in sorted(self.path.rglob("*")):
            if file.is_symlink() and file.is_dir():
                raise EnfoldError(
                    f"a run's folders must lie in it, but '{file}' is a symbolic link: put the folder in its place"
                )

    def require_folder(self) -> None:
        """Refuse to go on with a run whose folder was removed."""
        if not (self.home / "run.json").is_file():
            raise EnfoldError(f"a run's folder must stay while it is written, but '{self.home}' is gone: start again")

    def writing(self) -> AbstractContextManager[None]:
        """Inside the block no other process writes to the run; where one does already, this one is refused."""
        return writing(self.home)

    @property
    def places(self) -> list[Path]:
        """Where files that the recipe names are looked for: where the run was made, the current folder, and the run's.

        Of a recipe's file, its own folder counts as where it was made. Kept relative to the run, as both may be moved.
        """
        made_in = [Path(os.path.normpath(self.home / each)) for each in self._manifest().get("made_in", ())]
        return [*made_in, Path(), *([self.beside] if self.beside else []), self.home]

    def context(self) -> AbstractContextManager[None]:
        """Where data and code that the recipe names are looked for; code is imported only if the run is trusted."""
        return looking_in(self.places, trusted=self.trust_code)

    def code(self, recipe: Recipe) -> list[str]:
        """The references to code in this recipe and in the run's own, which is the one that a resumed run follows."""
        recipes = [recipe, *([self.recipe()] if self.recipe_file.is_file() else [])]
        return list(dict.fromkeys(reference for each in recipes for reference in each.code_references()))

    def require_trust(self, recipe: Recipe) -> None:
        """Refuse a recipe that names code, here or in the run's own, unless the run is trusted."""
        references = self.code(recipe)
        if references and not self.trust_code:
            with self.context():
                raise trust_error(references)

    def _manifest(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.home / "run.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):  # not made yet, or of no use here
            return {}

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def manifest_file(self) -> Path:
        """What wrote the run."""
        return self.path / "run.json"

    def recipe(self) -> Recipe:
        """The run's recipe."""
        with self.context():
            return parse_recipe(read_text(self.recipe_file), str(self.recipe_file))

    def write_recipe(self, recipe: Recipe) -> None:
        """Replace the recipe, as when a fold is added."""
        write_text(self.recipe_file, recipe.as_yaml())

    def of_seed(self, seed: int) -> RunDirectory:
        """Return the folder of one seed."""
        return RunDirectory(self.path / f"seed-{seed}", self.beside, self.home, trust_code=self.trust_code)

    def model_file(self, kind: str, label: str) -> Path:
        """Where a model's weights are."""
        return self.path / kind / f"{label}.safetensors"

    def checkpoint_file(self, kind: str, label: str) -> Path:
        """Where a training that is under way keeps its state."""
        return self.path / kind / f"{label}.checkpoint.safetensors"

    def remove_checkpoints(self, kind: str, label: str) -> None:
        """Remove that, and those of trainings that go before it; in a run that is read-only they stay."""
        last = self.checkpoint_file(kind, label)
        for file in (*last.parent.glob(f"{last.stem}*{last.suffix}"), self._started_file(kind, label)):
            with suppress(OSError):
                file.unlink()

    def write_started(self, kind: str, label: str, code: Mapping[str, str]) -> None:
        """Store the checksums of the user's code that a training begins with, if it has any."""
        if code:
            write_json(self._started_file(kind, label), dict(code))

    def started_with(self, kind: str, label: str) -> Identity:
        """Return what `write_started` stored for an interrupted training; nothing if no epoch of it is stored."""
        if not self.checkpoint_file(kind, label).is_file():
            return {}
        try:
            return dict(json.loads(self._started_file(kind, label).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    def _started_file(self, kind: str, label: str) -> Path:
        return self.checkpoint_file(kind, label).with_suffix(".json")

    def is_done(self, kind: str, label: str) -> bool:
        """Whether a model is finished: its manifest is written last; `SeedRun.is_done` also compares its settings."""
        file = self.model_file(kind, label)
        return file.is_file() and file.with_suffix(".json").is_file()

    def made_from(self, kind: str, label: str) -> Identity:
        """What a finished model was made from, as its manifest has it; nothing where that cannot be read."""
        try:
            manifest = json.loads(self.model_file(kind, label).with_suffix(".json").read_text(encoding="utf-8"))
            return dict(manifest["about"]["made_from"])
        except (OSError, ValueError, KeyError, TypeError):  # reported when the model is loaded
            return {}

    def discard(self, kind: str, label: str) -> None:
        """Remove a model, and before it all that is made from it."""
        model = self.model_file(kind, label)
        derived = [self.path / folder / f"{label}.safetensors" for folder in ("predictions", "ood")]
        history = self.path / "histories" / kind / f"{label}.json"
        self.remove_checkpoints(kind, label)
        for file in (*derived, history, model.with_suffix(".json"), model):
            file.unlink(missing_ok=True)

    def write_json(self, name: str, content: Any) -> None:
        """Write a result."""
        self.require_folder()
        write_json(self.path / name, content)

    def read_json(self, name: str) -> Any:
        """Read a result."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise EnfoldError(
                f"'{self.path / name}' must be JSON written by enfold, but it cannot be read: rerun its stage"
            ) from error

    def write_predictions(self, label: str, parts: Mapping[str, Predictions]) -> None:
        """Store the predictions of a model, so that any metric can be computed later without running it."""
        self.require_folder()
        tensors = {}
        for part, predictions in parts.items():
            tensors[f"{part}/log_probs"] = predictions.log_probs.float().contiguous()
            tensors[f"{part}/labels"] = predictions.labels.contiguous()
        with atomic_path(self.path / "predictions" / f"{label}.safetensors") as temporary:
            save_file(tensors, temporary)

    def read_predictions(self, label: str) -> dict[str, Predictions] | None:
        """Return the stored predictions of a model by split; None if there are none."""
        path = self.path / "predictions" / f"{label}.safetensors"
        if not path.is_file():
            return None
        try:
            tensors: dict[str, torch.Tensor] = load_file(path)
        except SafetensorError:  # damaged: they are computed again
            return None
        parts = {key.split("/")[0] for key in tensors}
        return {part: Predictions(tensors[f"{part}/log_probs"], tensors[f"{part}/labels"]) for part in parts}

    def log(self, event: str, **details: Any) -> None:
        """One more line in the run's log."""
        record = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, **details}
        self.require_folder()
        append_line(self.path / "log.jsonl", json.dumps(record, ensure_ascii=False))


def relative(place: Path, start: Path) -> str:
    """Return the relative path from one folder to another; the absolute path if there is none, as between drives."""
    try:
        return Path(os.path.relpath(place, start)).as_posix()
    except ValueError:
        return place.resolve().as_posix()


def _is_leftover(file: Path) -> bool:
    """Of a run that was killed while its manifest was being written, or its lock."""
    return file.name == LOCK or (file.name.startswith(".run.json.") and file.name.endswith(".part"))

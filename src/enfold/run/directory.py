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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from enfold.errors import EnfoldError
from enfold.io.environment import changed_environment, environment
from enfold.io.files import append_line, atomic_path, remove_stale_parts, write_json, write_text
from enfold.io.identity import Identity
from enfold.io.usercode import looking_in, trust_error
from enfold.metrics.predictions import RowPredictions
from enfold.run.lock import FILE as LOCK
from enfold.run.lock import FolderInUse, writing
from enfold.run.recipe import Recipe, parse_recipe
from enfold.run.stored_predictions import from_tensors, to_tensors
from enfold.run.yaml_text import read_text
from enfold.saving import versions

JOIN = 30.0  # seconds to wait for another process that creates the run
FORMAT = 2
"""Version of the layout of a run directory; the first edition of enfold wrote 1."""


class RunDirectory:
    """The folder of one run: its recipe, weights, predictions, metrics and log."""

    def __init__(
        self, path: Path, beside: Path | None = None, home: Path | None = None, *, trust_code: bool = False
    ) -> None:
        self.path, self.home = path, home or path
        self.beside = beside  # folder of the recipe's file
        self.trust_code = trust_code  # whether code named by its recipe may run

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
        """Return a new run, or with `resume` the existing one.

        Args:
            path: The directory.
            recipe: The recipe of the run.
            resume: Continue the run in the directory; its recipe must be the same.
            beside: The folder of the recipe's file.
            trust_code: Run code that the recipe names.

        Raises:
            EnfoldError: If the directory contains another run, or other files.
        """
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
            about = {"versions": versions(), "environment": environment(), "made_in": made_in}
            manifest = {"format": FORMAT, "name": recipe.name, **about}
            write_json(self.manifest_file, manifest)
        elif not resume:
            raise EnfoldError(
                f"'{self.path}' already contains a run: add --resume to continue it, or choose another folder"
            )
        else:
            self.require_format()
        if not self.recipe_file.exists():  # the folder is a run as soon as its manifest exists
            self.write_recipe(recipe)
        else:
            self._require_same_recipe(recipe)

    def _require_same_recipe(self, recipe: Recipe) -> None:
        if not self.recipe().extends(recipe):
            raise EnfoldError(
                f"a run can only be resumed with its own recipe, but '{self.path}' has another: choose another folder"
            )

    @classmethod
    def join(cls, path: Path, recipe: Recipe, *, beside: Path | None = None, trust_code: bool = False) -> RunDirectory:
        """Return a run that several processes make together; the first of them creates it, and none keeps its lock.

        Args:
            path: The directory.
            recipe: The recipe of the run.
            beside: The folder of the recipe's file.
            trust_code: Run code that the recipe names.

        Raises:
            EnfoldError: If the directory contains another run, or other files, or a process has its lock.
        """
        run, until = cls(path, beside, trust_code=trust_code), time.monotonic() + JOIN
        while True:
            try:
                with run.writing():
                    if not (run.manifest_file.is_file() and run.recipe_file.is_file()):
                        run._begin(recipe, resume=True)
                break
            except FolderInUse:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        run.require_format()
        run._require_same_recipe(recipe)
        return run

    @classmethod
    def open(cls, path: Path, *, trust_code: bool = False) -> RunDirectory:
        """Return an existing run."""
        run = cls(path, trust_code=trust_code)
        if not run.manifest_file.is_file() or not run.recipe_file.is_file():
            raise EnfoldError(
                f"a run directory must contain run.json and recipe.yaml, but '{path}' does not: check the path"
            )
        run.require_format()
        return run

    def require_format(self) -> None:
        """Raise an error for a run with another format of the run directory.

        Raises:
            EnfoldError: With the version that wrote the run.
        """
        manifest = self.read_json("run.json")
        written = manifest.get("format") if isinstance(manifest, dict) else None
        if written != FORMAT:
            known = manifest.get("versions") if isinstance(manifest, dict) else None
            version = str(known.get("enfold"))[:40] if isinstance(known, dict) else "unknown"
            raise EnfoldError(
                f"this enfold reads run directories of format {FORMAT}, but '{self.path}' was written by enfold "
                f"{version} in format {str(written)[:40]}: read it with that version, or run its recipe again in "
                "another folder"
            )

    def changed_environment(self) -> str:
        """Return what the bits of the run depend on and differs from when it was created; empty if nothing does."""
        return changed_environment(self._manifest().get("environment"), environment())

    def prepare(self) -> None:
        """Prepare a run for writing: remove files of killed processes, refuse symbolic links to folders."""
        remove_stale_parts(self.path)
        for file in sorted(self.path.rglob("*")):
            if file.is_symlink() and file.is_dir():
                raise EnfoldError(
                    f"a run must not contain symbolic links to folders, but '{file}' is one: replace it by a folder"
                )

    def require_folder(self) -> None:
        """Raise an error if the folder of the run was removed."""
        if not (self.home / "run.json").is_file():
            raise EnfoldError(
                f"a run's folder must exist while it is written, but '{self.home}' was removed: start again"
            )

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which no other process writes to the run; raise an error if one does already."""
        return writing(self.home)

    @property
    def places(self) -> list[Path]:
        """Return the folders in which files named by the recipe are searched: original, current and run folder.

        The original folder of a recipe's file is its own. Paths are stored relative to the run, as both may be moved.
        """
        stored = self._manifest().get("made_in")
        named = [each for each in stored if isinstance(each, str)] if isinstance(stored, list) else []
        made_in = [Path(os.path.normpath(self.home / each)) for each in named]
        return [*made_in, Path(), *([self.beside] if self.beside else []), self.home]

    def context(self) -> AbstractContextManager[None]:
        """Return a context that finds the recipe's data and code; code is imported only if the run is trusted."""
        return looking_in(self.places, trusted=self.trust_code)

    def code(self, recipe: Recipe) -> list[str]:
        """Return the references to code in this recipe and in the stored one, which a resumed run follows."""
        recipes = [recipe, *([self.recipe()] if self.recipe_file.is_file() else [])]
        return list(dict.fromkeys(reference for each in recipes for reference in each.code_references()))

    def require_trust(self, recipe: Recipe) -> None:
        """Raise an error if this recipe or the stored one names code and the run is not trusted."""
        references = self.code(recipe)
        if references and not self.trust_code:
            with self.context():
                raise trust_error(references)

    def _manifest(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.home / "run.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):  # missing or damaged
            return {}

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def manifest_file(self) -> Path:
        """The versions that wrote the run."""
        return self.path / "run.json"

    def recipe(self) -> Recipe:
        """Return the run's recipe."""
        with self.context():
            return parse_recipe(read_text(self.recipe_file), str(self.recipe_file))

    def write_recipe(self, recipe: Recipe) -> None:
        """Replace the recipe, for example when a step is added."""
        write_text(self.recipe_file, recipe.as_yaml())

    def of_seed(self, seed: int) -> RunDirectory:
        """Return the folder of one seed."""
        return RunDirectory(self.path / f"seed-{seed}", self.beside, self.home, trust_code=self.trust_code)

    def model_file(self, kind: str, label: str) -> Path:
        """Return the file of a model's weights."""
        return self.path / kind / f"{label}.safetensors"

    def checkpoint_file(self, kind: str, label: str) -> Path:
        """Return the file of the state of a training in progress."""
        return self.path / kind / f"{label}.checkpoint.safetensors"

    def remove_checkpoints(self, kind: str, label: str) -> None:
        """Remove the training checkpoints of a model and its stages; those of a read-only run remain."""
        last = self.checkpoint_file(kind, label)
        for file in (*last.parent.glob(f"{last.stem}*{last.suffix}"), self._started_file(kind, label)):
            with suppress(OSError):
                file.unlink()

    def write_started(self, kind: str, label: str, code: Mapping[str, str]) -> None:
        """Store the checksums of the user's code that a training begins with, if it has any.

        Args:
            kind: The kind of the model.
            label: Its label.
            code: Checksums by file.
        """
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
        """Return whether a model has a manifest (written last); `SeedRun.is_done` also compares its settings."""
        file = self.model_file(kind, label)
        return file.is_file() and file.with_suffix(".json").is_file()

    def made_from(self, kind: str, label: str) -> Identity:
        """Return the identity of a finished model from its manifest; empty if the manifest cannot be read."""
        try:
            manifest = json.loads(self.model_file(kind, label).with_suffix(".json").read_text(encoding="utf-8"))
            return dict(manifest["about"]["made_from"])
        except (OSError, ValueError, KeyError, TypeError):  # reported when the model is loaded
            return {}

    def discard(self, kind: str, label: str) -> None:
        """Remove a model, after all files derived from it."""
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

    def write_predictions(self, label: str, parts: Mapping[str, RowPredictions]) -> None:
        """Store the predictions of a model, so that any metric can be computed later without running it."""
        self.require_folder()
        tensors: dict[str, torch.Tensor] = {}
        about: dict[str, Any] = {}
        for part, predictions in parts.items():
            values, what = to_tensors(predictions)
            tensors |= {f"{part}/{name}": value for name, value in values.items()}
            about |= {} if what == {"kind": "Predictions"} else {part: what}
        with atomic_path(self.path / "predictions" / f"{label}.safetensors") as temporary:
            # One entry, as the order of several would differ from file to file.
            save_file(tensors, temporary, {"about": json.dumps(about)} if about else None)

    def read_predictions(self, label: str) -> dict[str, Any] | None:
        """Return the stored predictions of a model by split; None if there are none."""
        path = self.path / "predictions" / f"{label}.safetensors"
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get("about", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        except (OSError, SafetensorError, ValueError):  # damaged or removed meanwhile: computed again
            return None
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            part, _, key = name.partition("/")
            parts.setdefault(part, {})[key] = value
        return {part: from_tensors(values, about.get(part, {})) for part, values in parts.items()}

    def log(self, event: str, **details: Any) -> None:
        """Add a line to the run's log."""
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
    """Return whether a file is the lock or was left by a run that was killed while it wrote its manifest."""
    return file.name == LOCK or (file.name.startswith(".run.json.") and file.name.endswith(".part"))

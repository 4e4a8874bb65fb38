"""The landscape of a run: parts are computed one after the other within a time, each kept as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from enfold.analysis.states import AT_ONCE, predict_in_batches
from enfold.errors import EnfoldError, closest
from enfold.io.files import atomic_path, write_json
from enfold.progress import progress
from enfold.run.directory import RunDirectory
from enfold.run.seed_run import SeedRun
from enfold.run.views import VIEWS, Arrays, Scene

FORMAT = 2


@dataclass(frozen=True)
class Asked:
    """Which parts, in how many minutes, and how closely."""

    only: tuple[str, ...] = ()  # all if empty
    minutes: float = 10.0
    examples: int = 500
    size: int = 41

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in VIEWS:
                meant = closest(name, VIEWS)
                hint = f", did you mean '{meant}'" if meant else ""
                raise EnfoldError(
                    f"a landscape has the parts {', '.join(VIEWS)}, got '{name}'{hint}: choose among them"
                )
        for name, least in {"minutes": 0.0, "examples": 10, "size": 2}.items():
            if getattr(self, name) < least:
                raise EnfoldError(f"{name} must be at least {least:g}, got {getattr(self, name)}: raise it")

    @property
    def parts(self) -> list[str]:
        """In the order in which they are computed, the quick ones first."""
        return [name for name in VIEWS if not self.only or name in self.only]


def study(run: SeedRun, folder: Path, asked: Asked | None = None) -> dict[str, Any]:
    """Compute what is asked and not there yet, and say of each part what became of it.

    A part is begun only if it can be expected to end in time, by the network's pace on this machine.
    """
    asked = asked or Asked()
    scene = Scene(run, asked.examples, asked.size)
    chosen = {"format": FORMAT, "seed": run.seed, "examples": asked.examples, "size": asked.size}
    settings = {**chosen, "weights": run.members_digest}
    return _compute(scene, asked.parts, folder, settings, time.monotonic() + 60 * asked.minutes)


def stored_parts(folder: Path) -> dict[str, tuple[dict[str, Any], Arrays]]:
    """What is there, in the order of the parts: facts and arrays."""
    return {name: kept for name in VIEWS if (kept := _stored(folder, name)) is not None}


def _compute(
    scene: Scene, chosen: Sequence[str], folder: Path, settings: Mapping[str, Any], until: float
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    pace: float | None = None
    with progress("landscape", len(chosen)) as bar:
        for name in chosen:
            own = _own_settings(scene, name, settings)
            kept = _stored(folder, name)
            reason = _lacks(scene, name)
            if kept is not None and kept[0]["settings"] == own:
                rows[name] = {"state": "there", **_told(kept[0])}
            elif reason is not None:
                rows[name] = {"state": "left out", "reason": reason}
            else:
                pace = _pace(scene) if pace is None else pace
                rows[name] = _in_time(scene, name, folder, own, pace * VIEWS[name].work(scene), until)
            bar.advance(1)
            bar.say(f"{name}: {rows[name]['state']}")
    return rows


def _own_settings(scene: Scene, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """With what else the part is made from: where that is more than before, it is made anew."""
    view = VIEWS[name]
    models = {"models": scene.models} if view.of_models else {}
    return {**settings, **models, **({"kinds": list(scene.kinds)} if view.of_samples else {})}


def _lacks(scene: Scene, name: str) -> str | None:
    """Why a part cannot be made of this run."""
    view = VIEWS[name]
    if len(scene.states) < view.members:
        return f"it needs {view.members} members, and there is {len(scene.states)}"
    if view.needs_trajectory and len(scene.trajectory.epochs) < 3:
        return "it needs what training passed through: run a recipe with  trajectory: true"
    return None


def _in_time(
    scene: Scene, name: str, folder: Path, settings: Mapping[str, Any], expected: float, until: float
) -> dict[str, Any]:
    left = until - time.monotonic()
    if expected > left:
        return {
            "state": "left out",
            "reason": f"it takes about {_minutes(expected)}, and {_minutes(max(left, 0.0))} were left: raise --minutes",
        }
    started = time.monotonic()
    try:
        found = VIEWS[name].make(scene)
    except EnfoldError as error:  # as of a base network that never errs: the other parts can do without
        return {"state": "left out", "reason": str(error)}
    content = {"settings": dict(settings), "seconds": time.monotonic() - started, "facts": found.facts}
    _store(folder, name, found.arrays, content)
    return {"state": "computed", **_told(content)}


def _told(content: Mapping[str, Any]) -> dict[str, Any]:
    return {"seconds": content["seconds"], "facts": content["facts"]}


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} s"


def _pace(scene: Scene) -> float:
    """Seconds in which one network is asked about one example, measured once the engine for them is chosen."""
    asked = predict_in_batches(scene.network, [scene.states[0]] * (3 * AT_ONCE), scene.data, examples=scene.examples)
    said = next(asked)
    started = time.monotonic()
    networks = sum(each.num_members for each in asked)
    return (time.monotonic() - started) / (networks * len(said))


def _store(folder: Path, name: str, arrays: Arrays, content: Mapping[str, Any]) -> None:
    """Arrays, then facts: where the facts are, the part is whole."""
    (folder / f"{name}.json").unlink(missing_ok=True)  # of other arrays
    with atomic_path(folder / f"{name}.safetensors") as temporary:
        save_file({key: _plain(tensor) for key, tensor in arrays.items()}, temporary)
    write_json(folder / f"{name}.json", content)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _stored(folder: Path, name: str) -> tuple[dict[str, Any], Arrays] | None:
    facts, arrays = folder / f"{name}.json", folder / f"{name}.safetensors"
    if not facts.is_file() or not arrays.is_file():
        return None
    content: dict[str, Any] = RunDirectory(folder).read_json(facts.name)
    try:
        if not {"settings", "seconds", "facts"} <= content.keys():
            raise ValueError("settings, seconds or facts are missing")
        return (content, load_file(arrays)) if content["settings"]["format"] == FORMAT else None
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise EnfoldError(
            f"'{folder}' must hold parts of a landscape as enfold writes them, but '{name}' cannot be read ({error}): "
            f"delete {facts.name} there, and draw it again"
        ) from error

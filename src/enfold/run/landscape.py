"""The landscape of a run: parts are computed within a time limit, and each is stored when it is finished."""

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
from enfold.run.landscape_parts import LANDSCAPE_PARTS, Arrays, LandscapeContext
from enfold.run.seed_run import SeedRun

FORMAT = 2


@dataclass(frozen=True)
class LandscapeOptions:
    """The parts to compute, the time limit in minutes, and the resolution."""

    only: tuple[str, ...] = ()  # all if empty
    minutes: float = 10.0
    examples: int = 500
    size: int = 41

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in LANDSCAPE_PARTS:
                meant = closest(name, LANDSCAPE_PARTS)
                hint = f", did you mean '{meant}'" if meant else ""
                raise EnfoldError(
                    f"a landscape has the parts {', '.join(LANDSCAPE_PARTS)}, got '{name}'{hint}: choose among them"
                )
        for name, least in {"minutes": 0.0, "examples": 10, "size": 2}.items():
            if getattr(self, name) < least:
                raise EnfoldError(f"{name} must be at least {least:g}, got {getattr(self, name)}: raise it")

    @property
    def parts(self) -> list[str]:
        """The parts in the order in which they are computed, from the fastest."""
        return [name for name in LANDSCAPE_PARTS if not self.only or name in self.only]


def study(run: SeedRun, folder: Path, options: LandscapeOptions | None = None) -> dict[str, Any]:
    """Compute and store the parts that are not stored yet, and return the state of each part.

    A part is started only if its estimated time does not exceed the remaining time.

    Args:
        run: The seed to analyse.
        folder: The folder of the results.
        options: The parts, the time limit and the resolution.
    """
    options = options or LandscapeOptions()
    context = LandscapeContext(run, options.examples, options.size)
    chosen = {"format": FORMAT, "seed": run.seed, "examples": options.examples, "size": options.size}
    settings = {**chosen, "weights": run.members_digest}
    return _compute(context, options.parts, folder, settings, time.monotonic() + 60 * options.minutes)


def stored_parts(folder: Path) -> dict[str, tuple[dict[str, Any], Arrays]]:
    """Return the settings, facts and arrays of every stored part, in the order of the parts."""
    return {name: stored for name in LANDSCAPE_PARTS if (stored := _read_stored(folder, name)) is not None}


def _compute(
    context: LandscapeContext, chosen: Sequence[str], folder: Path, settings: Mapping[str, Any], until: float
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    seconds: float | None = None
    with progress("landscape", len(chosen)) as bar:
        for name in chosen:
            own = _part_settings(context, name, settings)
            stored = _read_stored(folder, name)
            reason = _reason_to_skip(context, name)
            if stored is not None and stored[0]["settings"] == own:
                rows[name] = {"state": "stored", **_summarise(stored[0])}
            elif reason is not None:
                rows[name] = {"state": "skipped", "reason": reason}
            else:
                seconds = _measure_seconds(context) if seconds is None else seconds
                rows[name] = _compute_in_time(
                    context, name, folder, own, seconds * LANDSCAPE_PARTS[name].work(context), until
                )
            bar.advance(1)
            bar.say(f"{name}: {rows[name]['state']}")
    return rows


def _part_settings(context: LandscapeContext, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a part with the models and samples it shows; it is computed again when these change."""
    part = LANDSCAPE_PARTS[name]
    models = {"models": context.models} if part.of_models else {}
    return {**settings, **models, **({"kinds": list(context.kinds)} if part.of_samples else {})}


def _reason_to_skip(context: LandscapeContext, name: str) -> str | None:
    """Return why a part cannot be computed for this run; None if it can."""
    part = LANDSCAPE_PARTS[name]
    if len(context.states) < part.members:
        return f"it needs {part.members} members, and the run has {len(context.states)}"
    if part.needs_trajectory and len(context.trajectory.epochs) < 3:
        return "it needs networks along the training: run a recipe with  trajectory: true"
    return None


def _compute_in_time(
    context: LandscapeContext, name: str, folder: Path, settings: Mapping[str, Any], expected: float, until: float
) -> dict[str, Any]:
    left = until - time.monotonic()
    if expected > left:
        return {
            "state": "skipped",
            "reason": f"it takes about {_minutes(expected)}, and {_minutes(max(left, 0.0))} were left: raise --minutes",
        }
    started = time.monotonic()
    try:
        found = LANDSCAPE_PARTS[name].make(context)
    except EnfoldError as error:  # such as a base network without errors: the other parts do not depend on it
        return {"state": "skipped", "reason": str(error)}
    content = {"settings": dict(settings), "seconds": time.monotonic() - started, "facts": found.facts}
    _store(folder, name, found.arrays, content)
    return {"state": "computed", **_summarise(content)}


def _summarise(content: Mapping[str, Any]) -> dict[str, Any]:
    return {"seconds": content["seconds"], "facts": content["facts"]}


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} s"


def _measure_seconds(context: LandscapeContext) -> float:
    """Return the seconds of one forward pass of one example, measured after the engine is chosen."""
    batches = predict_in_batches(
        context.network, [context.states[0]] * (3 * AT_ONCE), context.data, examples=context.examples
    )
    predictions = next(batches)
    started = time.monotonic()
    networks = sum(each.num_members for each in batches)
    return (time.monotonic() - started) / (networks * len(predictions))


def _store(folder: Path, name: str, arrays: Arrays, content: Mapping[str, Any]) -> None:
    """Store the arrays, then the facts: a part is complete if its facts exist."""
    (folder / f"{name}.json").unlink(missing_ok=True)  # they describe other arrays
    with atomic_path(folder / f"{name}.safetensors") as temporary:
        save_file({key: _plain(tensor) for key, tensor in arrays.items()}, temporary)
    write_json(folder / f"{name}.json", content)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _read_stored(folder: Path, name: str) -> tuple[dict[str, Any], Arrays] | None:
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
            f"'{folder}' must contain parts of a landscape written by enfold, but '{name}' cannot be read ({error}): "
            f"delete {facts.name} there, and draw it again"
        ) from error

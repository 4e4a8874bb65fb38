"""The trainings of a run, read from its log and checkpoints: finished, in progress, and their histories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enfold.report.content import History, Training
from enfold.run.seed_run import SeedRun
from enfold.run.step_methods import count_trainings, is_trained
from enfold.train.checkpoint import stored_history


def read_trainings(runs: Sequence[SeedRun]) -> tuple[Training, ...]:
    """Return all stages that were started, seed by seed, in order."""
    found = []
    for run in runs:
        finished: dict[str, float | None] = {}
        for event in _log(run.run.path / "log.jsonl"):
            stage = event.get("stage")
            if not isinstance(stage, str) or event.get("seed") != run.seed:
                continue
            if event.get("event") == "removed":
                finished.pop(stage, None)
            else:
                seconds = event.get("seconds") if event.get("event") == "finished" else None
                finished[stage] = seconds if seconds is not None else finished.get(stage)
        for stage, seconds in finished.items():
            done = run.run.is_done(*stage.split("/", 1))
            found.append(
                Training(stage, run.seed, seconds if done else None, _epochs(run, stage), _history(run, stage))
            )
    return tuple(found)


def _log(file: Path) -> list[Mapping[str, Any]]:
    """Return the lines of a log; an incomplete line is skipped."""
    events: list[Mapping[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def _history(run: SeedRun, stage: str) -> History | None:
    kind, label = stage.split("/", 1)
    stored = "members/history.json" if kind == "members" else f"histories/{kind}/{label}.json"
    if (run.run.path / stored).is_file():
        history: History = run.run.read_json(stored)
        return history
    found = stored_history(run.run.checkpoint_file(kind, label))
    return found.as_dict() if found is not None else None


def _epochs(run: SeedRun, stage: str) -> int | None:
    """Return the number of epochs of a stage; None for ensembles, which may configure their own."""
    kind, label = stage.split("/", 1)
    if kind == "members":
        return run.recipe.members_config(run.seed).epochs
    if kind == "controls":
        config = run.controls.get(label)
        return config.epochs if config is not None else None
    step = next((step for step in run.recipe.steps if kind == "steps" and step.label == label), None)
    if step is None or step.family == "ensemble" or not is_trained(step):
        return None
    epochs = run.recipe.step_config(step, run.seed).epochs
    return epochs * count_trainings(step, step.first or run.recipe.members)

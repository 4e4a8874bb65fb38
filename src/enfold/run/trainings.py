"""The trainings of a run as its log and its checkpoints tell them: what is done, what is under way, how it went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enfold.report.content import History, Training
from enfold.run.stages import Cell
from enfold.train.checkpoint import stored_history


def trainings(parts: Sequence[Cell]) -> tuple[Training, ...]:
    """All stages that were started, seed by seed, in their order."""
    found = []
    for cell in parts:
        finished: dict[str, float | None] = {}
        for event in _log(cell.run.path / "log.jsonl"):
            stage = event.get("stage")
            if not isinstance(stage, str) or event.get("seed") != cell.seed:
                continue
            if event.get("event") == "forgotten":
                finished.pop(stage, None)
            else:
                seconds = event.get("seconds") if event.get("event") == "finished" else None
                finished[stage] = seconds if seconds is not None else finished.get(stage)
        for stage, seconds in finished.items():
            done = cell.run.is_done(*stage.split("/", 1))
            found.append(
                Training(stage, cell.seed, seconds if done else None, _epochs(cell, stage), _history(cell, stage))
            )
    return tuple(found)


def _log(file: Path) -> list[Mapping[str, Any]]:
    """The lines of a log; one that is being written is left for the next look."""
    events: list[Mapping[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def _history(cell: Cell, stage: str) -> History | None:
    kind, label = stage.split("/", 1)
    kept = "members/history.json" if kind == "members" else f"histories/{kind}/{label}.json"
    if (cell.run.path / kept).is_file():
        history: History = cell.run.read_json(kept)
        return history
    found = stored_history(cell.run.checkpoint_file(kind, label))
    return found.as_dict() if found is not None else None


def _epochs(cell: Cell, stage: str) -> int | None:
    """How many epochs the plan of a stage has; None where its method plans for itself."""
    kind, label = stage.split("/", 1)
    if kind == "members":
        return cell.recipe.members_plan(cell.seed).epochs
    if kind == "controls":
        plan = cell.controls().get(label)
        return plan.epochs if plan is not None else None
    for fold in cell.recipe.folds:
        if kind == "folds" and fold.label == label:
            plan = cell.recipe.as_long(fold, cell.seed)
            return plan.epochs if plan is not None else None
    return None

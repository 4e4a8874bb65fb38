"""The quality and the speed of written files: metrics on examples, and the time of a call."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enfold.calibrate import SMALLEST, Calibrated
from enfold.cost import time_rounds
from enfold.data import Split
from enfold.data.convert import as_split
from enfold.data.dataset import evaluation_batches
from enfold.data.tree import tensors
from enfold.ensemble import called_network
from enfold.errors import EnfoldError
from enfold.evaluate import score
from enfold.export.result import Artefact
from enfold.export.runtime import Run
from enfold.export.signature import Signature, spec
from enfold.tasks import Binary, Classification, Multilabel, Regression, Rows, Task, as_task

TIMED = (1, 128)  # examples
BATCH = 256


def batches(
    examples: Any, name: str, model: nn.Module, signature: Signature, *, raw: bool
) -> Iterator[tuple[list[Tensor], Any]]:
    """Yield the inputs of a graph with their targets.

    Args:
        examples: Examples as for `enfold.evaluate`; or inputs alone, whose targets are None.
        name: The split of a data set that is used.
        model: The model.
        signature: The inputs of the graph.
        raw: Whether the graph normalizes its inputs, so that they are not prepared before.
    """
    if isinstance(examples, Tensor | Mapping):
        yield _fit(examples, signature), None
        return
    part = as_split(examples, name, BATCH, network=called_network(model))
    if raw and isinstance(part, Split):
        for start in range(0, len(part), BATCH):
            chunk = part[start : start + BATCH]
            yield _fit(chunk.inputs, signature), chunk.targets
        return
    for inputs, targets, _ in evaluation_batches(part, BATCH):
        yield _fit(inputs, signature), targets


def _fit(inputs: Any, signature: Signature) -> list[Tensor]:
    """Return the tensors of a batch in the types of the graph."""
    found, wanted = tensors(inputs), tensors(signature.example)
    if len(found) != len(wanted) or not all(
        spec(a, axes) == spec(b.to(a.dtype), axes)
        for a, b, axes in zip(found, wanted, map(signature.axes.get, signature.names), strict=True)
    ):
        shapes = [tuple(each.shape[1:]) for each in found]
        raise EnfoldError(
            f"examples must have the inputs of example=, {[tuple(each.shape[1:]) for each in wanted]}, got {shapes}: "
            "pass examples of the same form"
        )
    return [a.detach().cpu().to(b.dtype).contiguous() for a, b in zip(found, wanted, strict=True)]


def measure_scores(
    run: Run, model: nn.Module, task: Task | None, examples: Iterator[tuple[list[Tensor], Any]]
) -> dict[str, float]:
    """Return the headline metrics of a file on examples, in their order.

    Args:
        run: The function that runs the file.
        model: The network or ensemble it was written from.
        task: The task; None if it is inferred.
        examples: Batches of inputs and targets.
    """
    known = as_task(model.model_task if isinstance(model, Calibrated) else task)
    values: list[Tensor] = []
    targets: list[Tensor] = []
    own: Task | None = None
    for inputs, target in examples:
        found, form = _as_network(run(inputs), known)
        own = (own or form).resolve(found[None], target)
        if own.is_ignored(found[None], target):
            continue
        rows = own.flatten(found[None], target)
        values.append(rows.values)
        targets.append(rows.targets)
    if own is None or not values:
        raise EnfoldError("test must have examples with targets, got none: pass a loader or (inputs, targets)")
    predictions = own.predictions(Rows(torch.cat(values, 1), torch.cat(targets)))
    scores = score(predictions)
    return {name: scores[name] for name in predictions.headline}


def _as_network(found: dict[str, Tensor], task: Task) -> tuple[Tensor, Task]:
    """Return the outputs of a file as those of a single network, and their task."""
    if "mean" in found:
        mean, aleatoric = found["mean"], found.get("aleatoric")
        if aleatoric is None or not bool((aleatoric > 0).any()):
            return mean, Regression()
        parts = [mean, aleatoric, found.get("epistemic", torch.zeros_like(mean))]
        joined = torch.stack(parts, 1) if mean.ndim == 1 else torch.cat(parts, 1)
        return joined, Regression(head="uncertainty", axis=1, min_variance=SMALLEST)
    if "probabilities" not in found:
        return next(iter(found.values())), task
    probabilities = found["probabilities"]
    if isinstance(task, Multilabel):
        return torch.logit(probabilities), task
    if isinstance(task, Binary):
        axis = -1 if task.class_axis is None else task.class_axis
        return torch.logit(probabilities.select(axis, 1)), task
    return probabilities.log(), task if isinstance(task, Classification) else Classification()


def measure_files(
    files: Mapping[str, tuple[Path, Run, float, float | None]],
    signature: Signature,
    scores: Mapping[str, dict[str, float]],
) -> tuple[Artefact, ...]:
    """Return size, time and quality of several files; they are timed in turns.

    Args:
        files: By name the path, the function that runs it, and difference and agreement with the source.
        signature: The inputs.
        scores: Metrics by name.
    """
    times = {name: dict.fromkeys(TIMED, 0.0) for name in files}
    for size in TIMED:
        values = signature.batch(size)
        found = time_rounds({name: _call(run, values) for name, (_, run, _, _) in files.items()}, rounds=15, warmup=2)
        for name, samples in found.items():
            times[name][size] = 1e3 * statistics.median(samples)
    return tuple(
        Artefact(name, path.stat().st_size, times[name], difference, agreement, scores.get(name, {}))
        for name, (path, _, difference, agreement) in files.items()
    )


def _call(run: Run, values: Sequence[Tensor]) -> Any:
    return lambda: run(values)

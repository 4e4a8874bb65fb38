"""Training checkpoints: weights, selected weights, optimizer state and history in one safetensors file.

Every random draw is derived from the seed and the epoch, so no generator state is needed to resume to the same bits
after an epoch. A training that is stopped within one stores its place, with the state of the generator that a loader of
the user may draw from.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from enfold.errors import EnfoldError, EnvironmentWarning, level_outside
from enfold.io.environment import changed_environment, environment
from enfold.io.files import atomic_path, parsing
from enfold.io.identity import Identity, differences
from enfold.train.data_parallel import complete, shard_as
from enfold.train.history import History
from enfold.train.optimize import Optimizer
from enfold.train.selection import Selection
from enfold.train.weight_average import WeightAverage

REMEDY = "delete it"


@dataclass
class Place:
    """How far an epoch is.

    Args:
        losses: The losses of its batches so far, (M,) each.
        sizes: Their numbers of examples.
        seconds: How long they took.
        generator: The state of PyTorch's generator after them; None at the start.
    """

    losses: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    generator: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint stores."""
        if self.generator is None:
            return {}
        return {
            "losses": torch.stack(self.losses).cpu(),
            "sizes": torch.tensor(self.sizes),
            "seconds": torch.tensor(self.seconds, dtype=torch.float64),
            "generator": self.generator,
        }

    @classmethod
    def from_tensors(cls, stored: dict[str, Tensor]) -> Place:
        """Invert `tensors`."""
        if not stored:
            return cls()
        losses, sizes = list(stored["losses"]), [int(size) for size in stored["sizes"]]
        return cls(losses, sizes, float(stored["seconds"]), stored["generator"])


def save_checkpoint(
    path: Path | None,
    model: nn.Module,
    optimizer: Optimizer,
    selection: Selection,
    scaler: torch.amp.GradScaler,
    history: History,
    identity: Identity,
    average: WeightAverage | None = None,
    place: Place | None = None,
) -> None:
    """Write the state after the last epoch in `history`, or at a place in the next, atomically.

    Args:
        path: The file; None in a process that only contributes its shards.
        model: The model.
        optimizer: The optimizer.
        selection: The best parameters so far.
        scaler: The gradient scaler.
        history: The epochs so far.
        identity: What a training must agree in to continue from the file.
        average: The average of the weights; None for none.
        place: The place in the next epoch; None for its start.
    """
    tensors: dict[str, Tensor] = {}
    for prefix, state in (
        ("model", model.state_dict()),
        ("chosen", selection.state),
        ("optimizer", optimizer.state()),
        ("average", {} if average is None else average.state),
        ("place", {} if place is None else place.tensors()),
    ):
        for name, tensor in state.items():  # cloned, because safetensors refuses tied tensors
            tensors[f"{prefix}/{name}"] = complete(tensor).clone(memory_format=torch.contiguous_format)
    if path is None:
        return
    progress = {
        "identity": dict(identity),
        "environment": training_environment(model),
        "history": history.as_dict(),
        "selection": selection.record(),
        "scaler": scaler.state_dict(),
        "averaged steps": 0 if average is None else average.steps,
    }
    first = len(history.epochs) < 2  # a folder that is missing later was removed on purpose
    with atomic_path(path, parents=first) as temporary:
        save_file(tensors, temporary, {"progress": json.dumps(progress)})


def training_environment(model: nn.Module) -> dict[str, str]:
    """Return what the bits of a training depend on, with the engine of an ensemble."""
    engine = getattr(model, "engine", None)
    return {**environment(), **({"engine": engine} if isinstance(engine, str) else {})}


@dataclass(frozen=True)
class Checkpoint:
    """The stored state of a training.

    Args:
        path: Its file.
        progress: History, selection and scaler.
        tensors: Parameters, selected parameters and the state of the optimizer.
    """

    path: Path
    progress: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def place(self) -> Place:
        """The position in the epoch after the last complete one."""
        found = {key.partition("/")[2]: each for key, each in self.tensors.items() if key.startswith("place/")}
        with parsing(self.path, "the checkpoint of this training", REMEDY):
            return Place.from_tensors(found)

    def warn_of_environment(self, model: nn.Module) -> None:
        """Warn if the training continues with other threads, another processor, PyTorch or engine."""
        changed = changed_environment(self.progress.get("environment"), training_environment(model))
        if changed:
            warnings.warn(
                f"'{self.path}' was written with other {changed}", EnvironmentWarning, stacklevel=level_outside()
            )

    def restore(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        selection: Selection,
        scaler: torch.amp.GradScaler,
        average: WeightAverage | None = None,
    ) -> History:
        """Put the state into model, optimizer, selection, scaler and average, and return the history.

        Args:
            model: The model.
            optimizer: The optimizer.
            selection: The best parameters so far.
            scaler: The gradient scaler.
            average: The average of the weights; None for none.

        Raises:
            EnfoldError: If the state does not fit.
        """
        with parsing(self.path, "the checkpoint of this training", REMEDY):
            return self._restore(model, optimizer, selection, scaler, average)

    def _restore(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        selection: Selection,
        scaler: torch.amp.GradScaler,
        average: WeightAverage | None,
    ) -> History:
        groups: dict[str, dict[str, Tensor]] = {
            name: {} for name in ("model", "chosen", "optimizer", "average", "place")
        }
        for key, tensor in self.tensors.items():
            prefix, name = key.split("/", 1)
            groups[prefix][name] = tensor
        own = model.state_dict()
        for prefix in ("model", "chosen", "average"):
            groups[prefix] = {name: shard_as(own.get(name), tensor) for name, tensor in groups[prefix].items()}
        model.load_state_dict(groups["model"])
        if self.progress["scaler"]:
            scaler.load_state_dict(self.progress["scaler"])
        optimizer.load(groups["optimizer"])
        device = next(model.parameters()).device
        chosen = {name: tensor.to(device) for name, tensor in groups["chosen"].items()}
        selection.restore(self.progress["selection"], chosen)
        if average is not None:
            average.restore(groups["average"], int(self.progress.get("averaged steps", 0)))
        return History.from_dict(self.progress["history"])


def read_checkpoint(path: Path, identity: Identity) -> Checkpoint:
    """Return the state in a checkpoint file.

    Raises:
        EnfoldError: If the file cannot be read, or belongs to a training with another identity.
    """
    with parsing(path, "a training checkpoint", REMEDY), safe_open(path, "pt") as file:
        progress: dict[str, Any] = dict(json.loads((file.metadata() or {}).get("progress", "{}")))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        changed = differences(dict(progress.get("identity", {})), identity)
    if changed:
        raise EnfoldError(
            f"checkpoint must belong to the same training, but '{path}' was written with different "
            f"{', '.join(changed)}: restore these, delete the file, or choose another"
        )
    return Checkpoint(path, progress, tensors)


def stored_history(path: Path) -> History | None:
    """Return the history in a checkpoint; None if there is no readable checkpoint yet."""
    try:
        with safe_open(path, "pt") as file:
            progress: dict[str, Any] = json.loads((file.metadata() or {}).get("progress", "{}"))
        history, selection = History.from_dict(progress["history"]), progress.get("selection", {"best": [None]})
        if None not in selection["best"]:  # an epoch is selected
            history.chosen = list(selection["epoch"])
        return history
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):  # removed, or not a checkpoint
        return None

"""Trajectories: the networks during training, one safetensors file per stored epoch.

Files are written once and atomically, so that an interrupted training resumes with its trajectory, and one epoch can be
read without the others. Epochs are counted as completed epochs: 0 is the start.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from enfold.engines.skeleton import State, read_state
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.io.files import atomic_path
from enfold.io.identity import Identity, differences

FILE = re.compile(r"epoch-(\d+)\.safetensors")


@dataclass(frozen=True)
class Trajectory:
    """A folder for ``fit(..., trajectory=Trajectory(folder))`` with the start, every n-th epoch and the last one.

    >>> Trajectory("somewhere", every=2).includes(3, epochs=3)
    True

    Args:
        folder: The folder.
        every: Distance between stored epochs.
    """

    folder: str | Path
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise EnfoldError(f"every must be at least 1, got {self.every}: raise every")

    def file(self, epoch: int) -> Path:
        """Return the file of the networks after this many epochs."""
        return Path(self.folder) / f"epoch-{epoch:04d}.safetensors"

    @property
    def epochs(self) -> list[int]:
        """The stored epochs, in order."""
        found = (FILE.fullmatch(path.name) for path in Path(self.folder).glob("epoch-*.safetensors"))
        return sorted(int(match.group(1)) for match in found if match)

    def includes(self, epoch: int, epochs: int) -> bool:
        """Return whether the networks after this epoch are stored."""
        return epoch % self.every == 0 or epoch == epochs

    def require(self, model: nn.Module, identity: Identity) -> None:
        """Refuse a model without separate networks, and a folder with the trajectory of another training."""
        if isinstance(model, Ensemble) and not model.is_expandable:
            raise EnfoldError(
                f"trajectory needs a model with separate networks, got a {type(model).__name__}: leave trajectory out"
            )
        for epoch in self.epochs[:1]:
            with _open(self.file(epoch)) as file:
                changed = differences(json.loads((file.metadata() or {}).get("identity", "{}")), identity)
            if changed:
                raise EnfoldError(
                    f"trajectory must be a folder of the same training, but '{self.folder}' was written with different "
                    f"{', '.join(changed)}: restore these, delete the folder, or choose another"
                )

    @torch.no_grad()
    def store(self, model: nn.Module, epoch: int, identity: Identity) -> None:
        """Write the networks after this many epochs, each tensor stacked as (M, *shape).

        Args:
            model: The network or ensemble.
            epoch: Number of completed epochs.
            identity: What a training must agree in to continue the folder.
        """
        if isinstance(model, Ensemble):
            state = {name: tensor[: model.trained_members] for name, tensor in model.expand().items()}
        else:
            state = {name: tensor[None] for name, tensor in read_state(model).items()}
        tensors = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in state.items()}
        with atomic_path(self.file(epoch), parents=not epoch) as temporary:
            save_file(tensors, temporary, {"identity": json.dumps(identity)})

    def state(self, epoch: int) -> State:
        """Return all members after this many epochs, stacked.

        Raises:
            EnfoldError: If the epoch was not stored.
        """
        if not self.file(epoch).is_file():
            raise EnfoldError(f"epoch must be one of the stored epochs {self.epochs}, got {epoch}: choose another")
        with _open(self.file(epoch)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary

    def of_member(self, index: int, last: int = 0) -> list[State]:
        """Return one member epoch by epoch; only the `last` epochs if given."""
        found = []
        for epoch in self.epochs[-last:]:
            with _open(self.file(epoch)) as file:
                found.append({name: file.get_slice(name)[index : index + 1][0] for name in file.keys()})  # noqa: SIM118
        return found


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise EnfoldError(
            f"'{path}' must be a file of a trajectory, but it cannot be read ({error}): delete it and train again"
        ) from error

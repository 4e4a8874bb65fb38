"""A trajectory: the networks that training passes through, one safetensors file a kept epoch.

Files are written once and whole, so that a training that was killed goes on with its trajectory, and one epoch can be
read without the others. Epochs are counted as trained so far: 0 is the start.
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
    """A folder with what `fit(..., keep=Trajectory(folder))` keeps: the start, every so many epochs, and the last.

    >>> Trajectory("somewhere", every=2).is_kept(3, epochs=3)
    True
    """

    folder: str | Path
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise EnfoldError(f"a trajectory keeps every 1 or more epochs, got every={self.every}: raise every")

    def file(self, epoch: int) -> Path:
        """Where the networks after so many epochs are."""
        return Path(self.folder) / f"epoch-{epoch:04d}.safetensors"

    @property
    def epochs(self) -> list[int]:
        """What is there, in order."""
        found = (FILE.fullmatch(path.name) for path in Path(self.folder).glob("epoch-*.safetensors"))
        return sorted(int(match.group(1)) for match in found if match)

    def is_kept(self, epoch: int, epochs: int) -> bool:
        """Whether the networks after this epoch of so many are kept."""
        return epoch % self.every == 0 or epoch == epochs

    def require(self, model: nn.Module, identity: Identity) -> None:
        """Refuse a model without separate networks, and a folder that holds another training's trajectory."""
        if isinstance(model, Ensemble) and not model.is_expandable:
            raise EnfoldError(
                f"a trajectory is of separate networks, which a {type(model).__name__} has not: leave keep out"
            )
        for epoch in self.epochs[:1]:
            with _opened(self.file(epoch)) as file:
                changed = differences(json.loads((file.metadata() or {}).get("identity", "{}")), identity)
            if changed:
                raise EnfoldError(
                    f"a folder holds one training's trajectory, but '{self.folder}' has that of one with other "
                    f"{', '.join(changed)}: restore what it was, delete the folder, or choose another"
                )

    @torch.no_grad()
    def keep(self, model: nn.Module, epoch: int, identity: Identity) -> None:
        """Write the networks as they are after so many epochs, each (M, *its shape in the network)."""
        if isinstance(model, Ensemble):
            state = {name: tensor[: model.trained_members] for name, tensor in model.expand().items()}
        else:
            state = {name: tensor[None] for name, tensor in read_state(model).items()}
        tensors = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in state.items()}
        with atomic_path(self.file(epoch), parents=not epoch) as temporary:
            save_file(tensors, temporary, {"identity": json.dumps(identity)})

    def state(self, epoch: int) -> State:
        """All members after so many epochs, stacked."""
        if not self.file(epoch).is_file():
            raise EnfoldError(f"an epoch must have been kept to be read, got {epoch} of {self.epochs}: choose another")
        with _opened(self.file(epoch)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary

    def of_member(self, index: int, last: int = 0) -> list[State]:
        """One member, epoch by epoch; the last so many if given."""
        found = []
        for epoch in self.epochs[-last:]:
            with _opened(self.file(epoch)) as file:
                found.append({name: file.get_slice(name)[index : index + 1][0] for name in file.keys()})  # noqa: SIM118
        return found


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise EnfoldError(
            f"'{path}' must be a part of a trajectory, but it cannot be read ({error}): delete it, and train anew"
        ) from error

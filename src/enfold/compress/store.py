"""Storage of finished trials, from which an interrupted search continues."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from enfold.io.files import atomic_path, digest


@dataclass
class Store:
    """Models and plans in a folder, by the identity of what they were made from; nothing is stored without a folder.

    Args:
        folder: The folder; it is made.
        identity: Digest of members, data and everything else that all trials depend on.
    """

    folder: Path | None
    identity: str = ""

    def path(self, name: str, detail: str) -> Path | None:
        """Return the file of a trial; None without a folder.

        Args:
            name: Its name.
            detail: What else identifies it, such as its settings.
        """
        if self.folder is None:
            return None
        key = digest([], f"{self.identity}{name}{detail}")[:16]
        return self.folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{key}.safetensors"

    def save(self, network: nn.Module, path: Path | None) -> None:
        """Write a model, and remove the checkpoint of its training."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            name: tensor.detach().clone().contiguous()
            for name, tensor in network.state_dict().items()
            if isinstance(tensor, Tensor)
        }
        with atomic_path(path) as temporary:
            save_file(state, temporary)
        path.with_suffix(".checkpoint").unlink(missing_ok=True)

    def load(self, path: Path, blank: nn.Module) -> nn.Module:
        """Return a stored model.

        Args:
            path: Its file.
            blank: An untrained model of its structure, which is filled.
        """
        state: dict[str, Any] = dict(blank.state_dict())
        blank.load_state_dict(state | load_file(path))
        return blank.eval()

    def read_plan(self, detail: str) -> dict[str, Any] | None:
        """Return a stored plan; None if there is none."""
        path = self._plan(detail)
        if path is None or not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def write_plan(self, detail: str, plan: dict[str, Any]) -> None:
        """Store a plan, so that a search with a time limit continues with the same trainings."""
        path = self._plan(detail)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(plan) + "\n", encoding="utf-8")

    def _plan(self, detail: str) -> Path | None:
        path = self.path("plan", detail)
        return None if path is None else path.with_suffix(".json")


def checkpoint_of(path: Path | None) -> Path | None:
    """Return the file of the training checkpoint of a trial, in a folder that exists; None without a folder."""
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_suffix(".checkpoint")

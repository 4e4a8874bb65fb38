"""Members from checkpoints: complete networks, or adapters of one base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from enfold.engines.copying import copy_network
from enfold.engines.initialization import call_factory, make_blank
from enfold.errors import EnfoldError
from enfold.io.adapters import add_adapter, require_one_base
from enfold.io.checkpoints import load_into
from enfold.io.layouts import is_adapter
from enfold.io.patterns import matching_files

Factory = Callable[[], nn.Module]


def load_members(
    files: str | Path | Sequence[str | Path], network: nn.Module | Factory, key: str | None
) -> list[nn.Module]:
    """Return one network for each checkpoint, in eval mode.

    Args:
        files: A file, a folder, a pattern or a list of them.
        network: A network of the architecture, or a function that makes one; with the weights of the base if a
            checkpoint is an adapter.
        key: The key or the prefix of names to read, if a checkpoint has several networks.

    Raises:
        EnfoldError: If a checkpoint does not fit the network, or adapters have no common base.
    """
    paths = matching_files(files)
    adapters = [path for path in paths if path.is_dir() and is_adapter(path)]
    if not adapters:
        return [load_into(make_blank(network), path, key) for path in paths]
    require_one_base(adapters)
    base = _make_base(network, adapters[0])
    return [
        add_adapter(copy_network(base), path) if path in adapters else load_into(copy_network(base), path, key)
        for path in paths
    ]


def _make_base(network: nn.Module | Factory, adapter: Path) -> nn.Module:
    """Return the base of adapters; a function that makes other weights in each call has no base."""
    if isinstance(network, nn.Module):
        return copy_network(network)
    made = []
    for seed in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # a function that draws weights makes others the second time
            made.append(call_factory(network))
    base, states = made[0], [network.state_dict() for network in made]
    names = [name for name, tensor in states[0].items() if isinstance(tensor, Tensor)]
    name = next((name for name in names if not torch.equal(states[0][name], states[1][name])), None)
    if name is not None:
        raise EnfoldError(
            f"network must make the base of the adapter '{adapter}' with its weights, but '{name}' differs in each "
            "call: pass the base itself, or a function that loads its weights"
        )
    return base

"""LoRA adapters in folders of peft, added to the weights of the network that they were trained for.

    ΔW = s B A,   s = α / r,   or α / √r with rank stabilization                                                   (1)
    W' = W + ΔW,   or m (W + ΔW) / ‖W + ΔW‖ with the norm of each output, DoRA                                     (2)

E. J. Hu et al., arXiv:2106.09685; D. Kalajdzievski, arXiv:2312.03732 (rank stabilization); S.-Y. Liu et al.,
arXiv:2402.09353 (DoRA). Only tensors and numbers are read from a folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError, closest
from enfold.io.layouts import ADAPTER_CONFIG, find_adapter
from enfold.io.manifest import read_json
from enfold.io.tensors import read_tensors

LARGEST = 4 << 20  # bytes of adapter_config.json
PART = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?")
PREFIX = "base_model.model."
ORDINARY = (True, False, None, "gaussian", "eva", "orthogonal")  # initializations that leave the base unchanged
SUPPORTED = ("use_rslora", "use_dora")
UNSUPPORTED = (  # options with which the change of a weight is not (1) and (2)
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "megatron_config",
    "lora_bias",
)
PATTERN = re.compile(r"[\w.^$\\*+-]{1,200}")  # regular expressions of a folder that are fast to match
REPEATS = 3
REMEDY = "merge it with peft's merge_and_unload, and pass the state dict of the result"


@dataclass(frozen=True)
class Adapter:
    """The content of a folder."""

    folder: Path
    config: Mapping[str, Any]
    layers: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # A, B and m by layer
    complete: dict[str, Tensor] = field(default_factory=dict)  # other tensors, such as a head

    def scale(self, layer: str, rank: int) -> float:
        """Return s of equation (1)."""
        alpha = self._option("lora_alpha", "alpha_pattern", layer)
        if self._option("r", "rank_pattern", layer) != rank:
            raise self.error(f"the rank of '{layer}' is {rank}, and {ADAPTER_CONFIG} has another", "save it again")
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _option(self, name: str, pattern: str, layer: str) -> float:
        for key, value in (self.config.get(pattern) or {}).items():
            if re.match(rf"(.*\.)?({key})$", layer):  # as in peft; keys were checked
                return float(value)
        return float(self.config[name])

    def error(self, what: str, remedy: str = REMEDY) -> EnfoldError:
        """Return an error about this folder."""
        return EnfoldError(f"an adapter must be a LoRA of layers of the network, but '{self.folder}': {what}; {remedy}")


def read_adapter(folder: Path) -> Adapter:
    """Return the content of a folder that peft wrote.

    Raises:
        EnfoldError: If a file is missing or damaged, or the adapter is of another kind than LoRA and DoRA.
    """
    adapter = Adapter(folder, read_json(folder / ADAPTER_CONFIG, LARGEST))
    _require_lora(adapter)
    for name, tensor in read_tensors(find_adapter(folder)).items():
        if not name.startswith(PREFIX):
            raise adapter.error(f"'{name}' does not begin with '{PREFIX}'")
        bare = name.removeprefix(PREFIX)
        match = PART.fullmatch(bare)
        if match:
            kind = match[2].removeprefix("lora_").removeprefix("embedding_")
            adapter.layers.setdefault(match[1], {})[kind] = tensor
        elif ".original_module." not in bare:  # what modules_to_save replace
            adapter.complete[re.sub(r"\.(modules_to_save|base_layer)\b", "", bare)] = tensor
    if not adapter.layers:
        raise adapter.error("it has no lora_A and lora_B", "save it again")
    return adapter


def _require_lora(adapter: Adapter) -> None:
    config = adapter.config
    if config.get("peft_type") != "LORA":
        raise adapter.error(f"its peft_type is {config.get('peft_type')!r}")
    used = [name for name in config if name.startswith("use_") and name not in SUPPORTED]
    for name in (*used, *UNSUPPORTED):
        if config.get(name):
            raise adapter.error(f"it uses {name}")
    initialization = config.get("init_lora_weights")
    if initialization not in ORDINARY:
        raise adapter.error(f"its initialization {initialization!r} changed the weights of the base")
    for name, value in _numbers(adapter).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise adapter.error(f"{name} is {value!r}", "save it again")


def _numbers(adapter: Adapter) -> dict[str, Any]:
    """Return ranks and alphas; keys of patterns are checked, as they are regular expressions of somebody else."""
    numbers = {"r": adapter.config.get("r"), "lora_alpha": adapter.config.get("lora_alpha")}
    for name in ("rank_pattern", "alpha_pattern"):
        values = adapter.config.get(name) or {}
        if not isinstance(values, dict):
            raise adapter.error(f"{name} is not a dictionary", "save it again")
        for key, value in values.items():
            if not PATTERN.fullmatch(key) or sum(key.count(each) for each in "*+") > REPEATS:
                raise adapter.error(f"the key '{key[:60]}' of {name} is not a simple pattern")
            numbers[f"{name}['{key}']"] = value
    return numbers


def require_one_base(folders: Sequence[Path]) -> None:
    """Refuse adapters of different networks.

    Raises:
        EnfoldError: With the names of two bases, from the configurations.
    """
    bases = [read_json(folder / ADAPTER_CONFIG, LARGEST).get("base_model_name_or_path") for folder in folders]
    for folder, base in zip(folders, bases, strict=True):
        if base != bases[0]:
            raise EnfoldError(
                f"adapters must have one base, but that of '{folders[0]}' is {bases[0]!r} and that of '{folder}' "
                f"{base!r}: pass adapters of one base; if it is the same, change base_model_name_or_path in "
                f"{ADAPTER_CONFIG}"
            )


@torch.no_grad()
def add_adapter(network: nn.Module, folder: Path) -> nn.Module:
    """Add an adapter to the weights of a network, in place, and switch the network to eval mode.

    Args:
        network: The base, with its weights.
        folder: The folder of the adapter.

    Returns:
        The network.

    Raises:
        EnfoldError: If the adapter does not fit the network.
    """
    adapter = read_adapter(folder)
    state = {name: tensor for name, tensor in network.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    new = {}
    for name, tensor in adapter.complete.items():
        new[name] = _fitting(adapter, state, name, tensor)
    modules = dict(network.named_modules())
    for layer, parts in adapter.layers.items():
        name = f"{layer}.weight"
        if name not in state:
            near = closest(layer, [other.removesuffix(".weight") for other in state if other.endswith(".weight")])
            raise adapter.error(
                f"the network {type(network).__name__} has no '{name}'"
                + (f" (nearest: '{near}.weight')" if near else ""),
                "pass the network that it was trained for",
            )
        _require_untied(adapter, state, name)
        new[name] = _adapt(adapter, layer, modules[layer], new.get(name, state[name]), parts)
    for name, tensor in new.items():
        state[name].copy_(tensor)
    return network.eval()


def _fitting(adapter: Adapter, state: Mapping[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    """Return a tensor that replaces one of the network."""
    if name not in state or state[name].shape != tensor.shape:
        near = closest(name, state)
        what = f"of shape {tuple(state[name].shape)}" if name in state else f"(nearest: '{near}')" if near else ""
        raise adapter.error(
            f"its '{name}' of shape {tuple(tensor.shape)} is not in the network {what}".rstrip(),
            "pass the network that it was trained for",
        )
    return tensor


def _require_untied(adapter: Adapter, state: Mapping[str, Tensor], name: str) -> None:
    other = next((each for each, tensor in state.items() if tensor is state[name] and each != name), None)
    if other is not None:
        raise adapter.error(f"'{name}' is one tensor with '{other}', and only one of them would change")


def _adapt(adapter: Adapter, layer: str, module: nn.Module, weight: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of equation (2)."""
    if not {"A", "B"} <= parts.keys() or bool(adapter.config.get("use_dora")) != ("magnitude_vector" in parts):
        raise adapter.error(f"'{layer}' has {', '.join(sorted(parts))} only", "save it again")
    is_flipped = type(module).__name__ == "Conv1D" or isinstance(module, nn.Embedding)  # the weight is in x out
    is_plain = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and getattr(module, "groups", 1) == 1
    if not (is_flipped or is_plain) or not weight.is_floating_point():
        raise adapter.error(f"'{layer}' is a {type(module).__name__} of {weight.dtype}")
    wide = torch.promote_types(weight.dtype, torch.float32)
    rows = (weight.T if is_flipped else weight.flatten(1)).to(wide)  # out x in
    down, up = parts["A"], parts["B"]
    fits = down.ndim == up.ndim == (weight.ndim if is_plain else 2) and up.shape[1:2] == down.shape[:1]
    if not fits or (up.shape[0], down[0].numel()) != rows.shape or up.numel() != up.shape[0] * up.shape[1]:
        raise adapter.error(
            f"A and B of '{layer}' have shapes {tuple(down.shape)} and {tuple(up.shape)} for a weight of shape "
            f"{tuple(weight.shape)}",
            "pass the network that it was trained for",
        )
    rows = rows + adapter.scale(layer, len(down)) * (up.flatten(1).to(wide) @ down.flatten(1).to(wide))  # (1)
    if "magnitude_vector" in parts:
        magnitude = parts["magnitude_vector"].to(wide).flatten()
        if len(magnitude) != len(rows):
            raise adapter.error(f"the magnitude of '{layer}' has {len(magnitude)} values for {len(rows)} outputs")
        rows = (magnitude / torch.linalg.norm(rows, dim=1))[:, None] * rows  # (2)
    return (rows.T if is_flipped else rows).reshape(weight.shape)

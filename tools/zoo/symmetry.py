"""Find and verify the symmetries of third-party networks: results/third-party-networks.json.

make zoo sets up the packages; then  .venv-zoo/bin/python -m tools.zoo.symmetry

All groups are permuted at random together in float64, and outputs are compared with those of the original. Weights
and statistics are perturbed first, so that initial zeros hide no difference. A network whose package is missing is
omitted, with a line that names the package.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.io.files import write_json
from enfold.saving import versions
from enfold.symmetry import Symmetry, permute, symmetries
from enfold.symmetry.execution import float64_mode, float_outputs
from tools.zoo.catalogue import NETWORKS
from tools.zoo.entry import Entry, declare_operators, seeded

RESULT = Path(__file__).parents[2] / "results" / "third-party-networks.json"
EVERYWHERE = (  # reasons that occur in every network
    "they are the network's inputs",
    "they are the network's outputs",
    "they are the places of a kernel",
    "the network's inputs number them",
)


def drawn(network: nn.Module) -> nn.Module:
    """Return the network in float64 with perturbed weights and statistics."""
    network = network.double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in network.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(0.1 * torch.rand_like(buffer))
    return network


def outputs_of(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return all outputs in one row, with the same random numbers in each call."""
    torch.manual_seed(1)
    with torch.no_grad(), float64_mode():
        return torch.cat([output.flatten() for output in float_outputs(network(inputs))])


def difference(network: nn.Module, inputs: Tensor, symmetry: Symmetry) -> float:
    """Return the largest difference of outputs after a random order of every group, relative to the largest output."""
    network = drawn(network)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    before = outputs_of(network, inputs)
    tensors = {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }
    orders = {group.name: torch.randperm(group.size) for group in symmetry.groups}
    changed = permute({name: tensor.detach().clone() for name, tensor in tensors.items()}, symmetry, orders)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(changed[name])
    return float((outputs_of(network, inputs) - before).abs().max() / before.abs().max())


def share_of(network: nn.Module, symmetry: Symmetry) -> float:
    """Return the fraction of all parameters that some group permutes."""
    moved = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in network.named_parameters()}
    for axis in (axis for group in symmetry.groups for axis in group.axes if axis.name in moved):
        axis.units_first(moved[axis.name]).fill_(True)
    return sum(int(mask.sum()) for mask in moved.values()) / sum(mask.numel() for mask in moved.values())


def tried(one: Entry) -> dict[str, Any]:
    """Return the groups of one network, or why it was refused."""
    seeded(0)
    network, inputs = one.make(0).eval(), one.inputs(2)
    learned = dict(network.named_parameters())
    parameters = sum(tensor.numel() for tensor in learned.values())
    row: dict[str, Any] = {"package": one.package, "version": version(one.package), "parameters": parameters}
    start = time.perf_counter()
    try:
        symmetry = symmetries(network, inputs)
    except EnfoldError as error:
        return {**row, "refused": str(error)}
    seconds = round(time.perf_counter() - start, 2)
    reasons = Counter(fixed.reason for fixed in symmetry.fixed if fixed.name in learned)
    found = {"groups": len(symmetry), "share": share_of(network, symmetry), "seconds": seconds, "note": symmetry.note}
    if symmetry.groups:
        found["difference"] = difference(network, inputs, symmetry)
    return {**row, **found, "fixed": dict(reasons.most_common())}


def line(name: str, row: dict[str, Any]) -> str:
    """Return the line of one network in the table."""
    if "refused" in row:
        return f"{name:38} {row['package']:28} refused: {row['refused']}"
    why = [f"{count} {reason}" for reason, count in row["fixed"].items() if reason not in EVERYWHERE]
    figures = f"{row['parameters']:>9,} {row['groups']:>4} {row['share']:>7.1%} {row.get('difference', 0):.0e}"
    return f"{name:38} {row['package']:28} {figures} {row['seconds']:>5.1f} s  {'; '.join(why)}"


def main() -> None:
    """Analyse all networks whose packages are installed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    declare_operators()
    rows: dict[str, Any] = {}
    missing: dict[str, str] = {}
    print("network, package, parameters, groups, share permuted, largest difference, seconds, what else is fixed")
    for one in (one for one in NETWORKS if one.package != "by hand"):
        try:
            rows[one.name] = tried(one)
        except ModuleNotFoundError as error:
            missing[one.name] = f"pip install {one.package} ({error})"
            print(f"{one.name:38} omitted: {missing[one.name]}", flush=True)
        except Exception as error:  # continue with the other networks
            missing[one.name] = f"{type(error).__name__}: {error}"
            print(f"{one.name:38} fails: {missing[one.name]}", flush=True)
        else:
            print(line(one.name, rows[one.name]), flush=True)
    command = "python -m tools.zoo.symmetry"
    about = {"command": command, "date": time.strftime("%Y-%m-%d"), "versions": versions()}
    write_json(RESULT, {**about, "left_out": missing, "networks": rows})


if __name__ == "__main__":
    main()

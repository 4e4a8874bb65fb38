"""Time to match the units of two networks by weights, beside the rebasin package where it is installed.

Writes results/bench-matching.json. Two unrelated MLPs 784-512-256-128-10, and two ResNet-20. Both sides find out
what may be permuted, which enfold also proves, then match; or they match alone. The distance afterwards says how well.
To have the comparison: pip install --no-deps rebasin torchview graphviz tqdm

With `--large`: seconds of merging two ResNet-50 and two or three MobileNetV2 on 64 images of 64x64, and how many
forwards `symmetries` takes without and with layers that are not called; writes results/bench-matching-large.json.
"""

from __future__ import annotations

import copy
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from architectures import MobileNetV2, ResNet50
from enfold.cost import time_rounds
from enfold.data import Data, Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.io.files import write_json
from enfold.merge import weight_matching, zipit
from enfold.networks import MLP, ResNet20
from enfold.saving import versions
from enfold.symmetry import Symmetry, symmetries
from enfold.symmetry.matching import match_state

RESULT = Path(__file__).parent.parent / "results" / "bench-matching.json"
LARGE = RESULT.with_stem("bench-matching-large")
WIDTHS = (512, 256, 128)
ROUNDS = 7
ALONE = ", matching alone"  # the symmetry is given
Way = Callable[[nn.Module, nn.Module, Tensor], nn.Module]


def ours(one: nn.Module, other: nn.Module, example: Tensor, symmetry: Symmetry | None = None) -> nn.Module:
    """Return the second network in the order of the first, by enfold."""
    symmetry = symmetry or symmetries(one, example)
    learned = {name for name, _ in one.named_parameters()}
    matched = copy.deepcopy(other)
    matched.load_state_dict(match_state(one.state_dict(), other.state_dict(), symmetry, learned=learned))
    return matched


def theirs(one: nn.Module, other: nn.Module, example: Tensor) -> nn.Module:
    """Return the second network in the order of the first, by the package."""
    return _ready(one, other, example)()


def _ready(one: nn.Module, other: nn.Module, example: Tensor) -> Callable[[], nn.Module]:
    """Return the matching of the package, with the permutable axes already found."""
    from rebasin import PermutationCoordinateDescent  # type: ignore[import-not-found]

    matched = copy.deepcopy(other)
    descent = PermutationCoordinateDescent(one, matched, example)

    def match() -> nn.Module:
        descent.rebasin()
        return matched

    return match


@torch.no_grad()
def distance(one: nn.Module, other: nn.Module) -> float:
    """Return the Euclidean distance of all weights."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return float(torch.stack([(a - b).square().sum() for a, b in pairs]).sum().sqrt())


def measured(make: Callable[[], nn.Module], example: Tensor) -> dict[str, dict[str, float]]:
    """Measure seconds, the ratio of the package to enfold, and the remaining distance."""
    one, other = make().eval(), make().eval()
    known = symmetries(one, example)
    ways: dict[str, Way] = {"enfold": ours, f"enfold{ALONE}": partial(ours, symmetry=known)}
    if importlib.util.find_spec("rebasin"):
        ready = [_ready(one, other, example) for _ in range(ROUNDS + 3)]  # each works once
        ways |= {"rebasin": theirs, f"rebasin{ALONE}": lambda *_: ready.pop()()}
    cases = {name: partial(way, one, other, example) for name, way in ways.items()}
    times = time_rounds(cases, ROUNDS, warmup=1, clock=time.process_time, shortest=0.0)
    found = {name: {"seconds": statistics.median(times[name])} for name in ways}
    for name, way in ways.items():
        found[name]["distance"] = distance(one, way(one, other, example))
        if "rebasin" in times:
            same = times[f"rebasin{ALONE}" if name.endswith(ALONE) else "rebasin"]
            within = [their / own for own, their in zip(times[name], same, strict=True)]
            lower, middle, upper = statistics.quantiles(within, n=4)
            found[name] |= {"rebasin takes times": middle, "lower": lower, "upper": upper}
    return {"before": {"distance": distance(one, other)}, **found}


def large() -> None:
    """Merge large networks and write their record."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(64, 3, 64, 64), torch.arange(64) % 10
    data = Data(Split(inputs, labels), Split(inputs, labels), Split(inputs, labels), num_classes=10, shape=(3, 64, 64))
    cases: dict[str, tuple[Callable[..., nn.Module], type[nn.Module], int]] = {
        "weight_matching, 2 ResNet-50": (weight_matching, ResNet50, 2),
        "zipit, 2 MobileNetV2": (zipit, MobileNetV2, 2),
        "zipit, 3 MobileNetV2": (zipit, MobileNetV2, 3),
    }
    table = {}
    for name, (merge, make, count) in cases.items():
        members = DeepEnsemble([make() for _ in range(count)])
        times = time_rounds({name: partial(merge, members, data)}, 3, warmup=1, shortest=0.0)
        table[name] = {"seconds": statistics.median(times[name])}
    for name, count in (("without", 0), ("with 20", 20)):
        table[f"symmetries of ResNet-50 {name} unused layers"] = {"forwards": forwards(count)}
    for name, row in table.items():
        print(name, {key: round(value, 2) for key, value in row.items()})
    about = {"command": "python bench/matching.py --large", "date": time.strftime("%Y-%m-%d"), "clock": "wall time"}
    threads = torch.get_num_threads()
    write_json(LARGE, {**about, "threads": threads, "images": [64, 3, 64, 64], "versions": versions(), "table": table})


def forwards(unused: int) -> int:
    """Return how often `symmetries` runs a ResNet-50 with a number of unused layers."""
    calls = []

    class Counted(ResNet50):
        def forward(self, inputs: Tensor) -> Tensor:
            calls.append(len(inputs))
            return super().forward(inputs)

    network = Counted()
    network.unused = nn.ModuleList(nn.Conv2d(64, 64, 3) for _ in range(unused))
    symmetries(network.eval(), torch.randn(2, 3, 64, 64))
    return len(calls)


def main() -> None:
    """Measure both pairs and write the record."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tables = {
        "784-512-256-128-10": measured(lambda: MLP(784, WIDTHS, 10), torch.randn(2, 784)),
        "ResNet-20": measured(ResNet20, torch.randn(2, 3, 32, 32)),
    }
    for name, table in tables.items():
        print(name, {row: {key: round(value, 3) for key, value in cells.items()} for row, cells in table.items()})
    about = {"command": "python bench/matching.py", "date": time.strftime("%Y-%m-%d"), "clock": "CPU time, one thread"}
    write_json(RESULT, {**about, "versions": versions(), "tables": tables})


if __name__ == "__main__":
    large() if "--large" in sys.argv else main()

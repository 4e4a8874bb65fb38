"""Time, size and quality of networks, their ONNX files and int8 files; writes results/bench-export.json.

Processor seconds of one thread, which other work on the machine hardly changes, in rounds of rotated order, for 1 and
128 images of 1 x 28 x 28. Networks are trained for a few epochs on fashion-mini; quality is that on its test split. The
second table compares members that run one after the other in the graph with stacked parameters.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import enfold
from enfold.cost import summarise, time_rounds
from enfold.engines.skeleton import read_state
from enfold.export.runtime import Run, open_onnx
from enfold.export.trace import to_onnx
from enfold.io.files import write_json
from enfold.networks import MLP, ResNet, ViT
from enfold.saving import versions
from timing import cnn

RESULTS = Path(__file__).parent.parent / "results"
SIZES, ROUNDS = (1, 128), 11


def gray(network: nn.Module) -> nn.Module:
    """Return a network for one channel in place of three."""
    first = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    first.weight = nn.Parameter(first.weight[:, :1].detach().clone())
    first.in_channels = 1
    return network


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "MLP 784-256-256-10": (lambda: MLP(784, [256, 256], 10), 4),
    "CNN 32-64-128": (lambda: gray(cnn()), 1),
    "ResNet-14": (lambda: ResNet(1, 10, 14), 1),
    "ViT, 4 layers": (lambda: ViT((1, 28, 28), 10, patch=7, width=64, depth=4, heads=4), 2),
    "DeepEnsemble of 4 MLPs": (lambda: enfold.DeepEnsemble(lambda: MLP(784, [256, 256], 10), 4), 4),
}


class Stacked(nn.Module):
    """Members as one batched product per layer, traced through torch.vmap."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.base = [networks[0]]
        self.names = list(read_state(networks[0]))
        states = [read_state(network) for network in networks]
        self.values = nn.ParameterList(
            nn.Parameter(torch.stack([s[n].detach() for s in states]), requires_grad=False) for n in self.names
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the mean probabilities."""

        def one(state: dict[str, Tensor]) -> Any:
            return torch.func.functional_call(self.base[0], state, (inputs,))

        outputs: Tensor = torch.vmap(one)(dict(zip(self.names, self.values, strict=True)))
        return torch.softmax(outputs, -1).mean(0)


class Unrolled(nn.Module):
    """Members one after the other."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the mean probabilities."""
        return torch.softmax(torch.stack([network(inputs) for network in self.networks]), -1).mean(0)


def times(calls: dict[str, Callable[[Tensor], object]], inputs: Tensor) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of each call by the number of examples: median, first and third quartile."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
    for size in SIZES:
        rows = inputs[:size].contiguous()
        samples = time_rounds(
            {name: partial(call, rows) for name, call in calls.items()},
            rounds=ROUNDS,
            clock=time.process_time,
            shortest=0.05,
        )
        for name, each in samples.items():
            spread = summarise(each)
            found[name][str(size)] = [round(1e3 * s, 5) for s in (spread.median, spread.lower, spread.upper)]
    return found


def of_source(model: nn.Module) -> Callable[[Tensor], object]:
    """Return the prediction of a model in torch."""

    def call(rows: Tensor) -> object:
        with torch.inference_mode():
            return model.predict(rows) if isinstance(model, enfold.Ensemble) else model(rows)

    return call


def of_file(run: Run) -> Callable[[Tensor], object]:
    """Return the call of a file."""
    return lambda rows: run([rows])


def measure(name: str, data: enfold.Data, inputs: Tensor, folder: Path) -> dict[str, Any]:
    """Train a network and return the rows of its table."""
    make, epochs = CASES[name]
    model = make()
    enfold.fit(model, data, epochs=epochs, lr=3e-3, quiet=True, select="last")
    model.eval()
    options: dict[str, Any] = {} if isinstance(model, enfold.Ensemble) else {"task": "classification"}
    kinds: dict[str, dict[str, Any]] = {
        "int8 static": {"calibrate_on": data},
        "int8 dynamic": {},
        "fp16": {},
        "bf16": {},
    }
    files, rows = {}, {}
    for kind, more in kinds.items():
        path = folder / f"{kind}.onnx"
        quantize: Any = kind.split()[-1]
        result = enfold.export(model, path, inputs[:32], quantize=quantize, test=data, **options, **more)
        files[kind], rows[kind] = path, result.table[1]
        rows.setdefault("ONNX", result.table[0])
    whole = folder / "whole.onnx"
    enfold.export(model, whole, inputs[:32], **options)
    calls = {"torch": of_source(model), "ONNX": of_file(open_onnx(whole, 1))}
    calls |= {kind: of_file(open_onnx(path, 1)) for kind, path in files.items()}
    found = times(calls, inputs)
    sizes = {"torch": sum(t.nbytes for t in model.state_dict().values())}
    sizes |= {kind: row.size for kind, row in rows.items()}
    table = {}
    for kind in calls:
        scores = enfold.evaluate(model, data).scores if kind == "torch" else rows[kind].scores
        quality = {key: scores[key] for key in ("accuracy", "nll")}
        table[kind] = {"bytes": sizes[kind], "milliseconds": found[kind], **quality}
        cells = "  ".join(f"{value[0]:8.3f}" for value in found[kind].values())
        print(f"{name:24s} {kind:13s} {sizes[kind] / 1e6:6.2f} MB {cells} ms  {quality}", flush=True)
    return table


def compare_forms(inputs: Tensor, folder: Path) -> dict[str, Any]:
    """Return the times of members one after the other and of stacked parameters."""
    networks = [MLP(784, [256, 256], 10).eval() for _ in range(4)]
    calls = {}
    for form in (Unrolled, Stacked):
        graph = form(networks).eval()
        shapes = ({0: torch.export.Dim("batch")},)
        with torch.no_grad():
            program = torch.export.export(graph, (inputs[:2],), dynamic_shapes=shapes, strict=False)
        path = folder / f"{form.__name__}.onnx"
        path.write_bytes(to_onnx(program, ["input"], ["probabilities"], 20).SerializeToString())
        calls[form.__name__.lower()] = of_file(open_onnx(path, 1))
    found = times(calls, inputs)
    print(found, flush=True)
    return found


def main() -> None:
    """Measure all cases."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = enfold.data.load("fashion-mini")
    assert isinstance(data.test, enfold.Split)
    inputs = data.prepare(data.test.inputs[: max(SIZES)])
    with tempfile.TemporaryDirectory() as folder:
        tables = {name: measure(name, data, inputs, Path(folder)) for name in CASES}
        forms = compare_forms(inputs, Path(folder))
    if "--quick" not in sys.argv:
        about = {
            "command": "python bench/export.py",
            "date": time.strftime("%Y-%m-%d"),
            "threads": 1,
            "clock": "processor time",
        }
        write_json(
            RESULTS / "bench-export.json",
            {
                **about,
                "rounds": ROUNDS,
                "milliseconds": "median, quartiles",
                "load average": os.getloadavg()[0],
                "versions": versions(),
                "tables": tables,
                "forms of 4 MLPs": forms,
            },
        )


if __name__ == "__main__":
    main()

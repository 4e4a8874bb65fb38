"""How results are written and compared: a few numbers for each tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
ENTRIES = 8
MOMENTS = ("mean", "std", "norm")
FLOOR = 1e-3  # the smallest scale that a tolerance is relative to: below it, a tensor is taken for rounding noise


def summarize(value: Any) -> Any:
    """Return a JSON value: tensors as shape, type, mean, deviation, norm and some entries; floats with 9 digits."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().flatten()
        numbers = flat.double()
        places = torch.linspace(0, max(len(flat) - 1, 0), min(ENTRIES, len(flat)), dtype=torch.float64).long()
        moments = [0.0] * 3 if not len(flat) else [numbers.mean(), numbers.std(correction=0), numbers.norm()]
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "moments": [rounded(float(each)) for each in moments],
            "entries": [rounded(each) for each in numbers[places].tolist()],
        }
    if isinstance(value, Mapping):
        return {str(name): summarize(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [summarize(each) for each in value]
    return rounded(value) if isinstance(value, float) else value


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with paths as names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping)
        found |= flattened(value, f"{prefix}{name}/") if nested else {f"{prefix}{name}": value}
    return found


def rounded(value: float) -> float | str:
    """Nine significant digits; values that are not finite are text in JSON."""
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)


@dataclass(frozen=True)
class Deviation:
    """One number, or one fact, compared."""

    where: str
    expected: Any
    found: Any
    relative: float  # to the scale of the tensor; infinite where shapes, types, names or integers differ

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found} (relative deviation {self.relative:.1e})"


def compare(expected: Any, found: Any, where: str = "") -> Iterator[Deviation]:
    """Yield all deviations between two summaries."""
    if isinstance(expected, dict) and isinstance(found, dict):
        yield _equal(f"{where} names", sorted(expected), sorted(found))
        if "entries" in expected and "entries" in found:
            yield from _compare_tensors(expected, found, where)
        else:
            for name in expected.keys() & found.keys():
                yield from compare(expected[name], found[name], f"{where}/{name}".lstrip("/"))
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from compare(one, other, f"{where}[{index}]")
    elif isinstance(expected, float) and isinstance(found, float):
        yield Deviation(where, expected, found, abs(expected - found) / max(abs(expected), FLOOR))
    else:
        yield _equal(where, expected, found)


def _equal(where: str, expected: Any, found: Any) -> Deviation:
    return Deviation(where, expected, found, 0.0 if expected == found else math.inf)


def _compare_tensors(expected: Any, found: Any, where: str) -> Iterator[Deviation]:
    for name in ("shape", "dtype"):
        yield _equal(f"{where} {name}", expected[name], found[name])
    if expected["shape"] != found["shape"]:
        return
    pairs = [(f"{where} {name}", expected["moments"][k], found["moments"][k]) for k, name in enumerate(MOMENTS)]
    pairs += [
        (f"{where} entry {k}", *both) for k, both in enumerate(zip(expected["entries"], found["entries"], strict=True))
    ]
    norm = _size(expected["moments"][2])
    root = math.sqrt(max(math.prod(expected["shape"]), 1))
    scale = max(FLOOR, norm / root, *(_size(each) for each in expected["entries"]))
    for label, one, other in pairs:
        if isinstance(one, str) or isinstance(other, str):
            yield _equal(label, one, other)
        else:
            unit = max(norm, FLOOR) if label.endswith(" norm") else scale
            yield Deviation(label, one, other, abs(one - other) / unit)


def _size(value: float | str) -> float:
    return 0.0 if isinstance(value, str) else abs(value)


def write(found: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Write each area's file, one line for each tensor so that changes can be read; return the sizes in bytes."""
    areas: dict[str, dict[str, Any]] = {}
    for name, values in sorted(found.items()):
        area, _, rest = name.partition("/")
        areas.setdefault(area, {})[rest] = values
    sizes = {}
    for area, cases in areas.items():
        text = "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(values)}" for name, values in cases.items()) + "\n}\n"
        sizes[area] = (FOLDER / f"{area}.json").write_text(text, encoding="utf-8")
    return sizes


def _lines(values: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(each)}" for name, each in values.items()) + "\n}"


@cache
def read(area: str) -> dict[str, Any]:
    """Return the recorded values of one area by case."""
    found: dict[str, Any] = json.loads((FOLDER / f"{area}.json").read_text(encoding="utf-8"))
    return found

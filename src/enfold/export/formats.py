"""Formats: a traced model is written, loaded again and compared; also in reduced precision."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from enfold.export.check import Comparison, Reference, compare, first_difference
from enfold.export.graph import Graph
from enfold.export.preprocess import Preprocess
from enfold.export.quality import batches, measure_files, measure_scores
from enfold.export.quantize import HALF, Quantize, reduce_onnx
from enfold.export.result import Artefact
from enfold.export.runtime import Run, open_onnx, open_pt2
from enfold.export.signature import Signature
from enfold.export.trace import TRACED, to_onnx, trace
from enfold.tasks import Task

ANY = sys.float_info.max  # difference: that of reduced precision is measured and not limited


@dataclass(frozen=True)
class Job:
    """The model to export, and the examples to compare it with.

    Args:
        model: The network or ensemble.
        task: What its outputs mean.
        raw: Whether the outputs of a single network are returned unchanged.
        normal: The normalization of inputs.
        signature: The inputs.
        reference: Batches and the outputs of the source.
        about: What is stored in the file about the model.
        opset: The version of the ONNX operators; None for torch.export.
        tolerance: The largest accepted difference.
    """

    model: nn.Module
    task: Task | None
    raw: bool
    normal: Preprocess | None
    signature: Signature
    reference: Reference
    about: dict[str, Any]
    opset: int | None
    tolerance: float

    @property
    def axes(self) -> list[Mapping[int, str]]:
        """Of each input, the axes that vary beside the first."""
        return [self.signature.axes.get(name, {}) for name in self.signature.names]

    def trace(self, dtype: torch.dtype | None = None) -> torch.export.ExportedProgram:
        """Return the graph of the model; with a dtype, of a copy in half precision."""
        graph = Graph(self.model, self.signature, self.task, self.raw, self.normal)
        if dtype is not None:
            graph.members.to(dtype)
        return trace(graph, self.signature.batch(TRACED), self.axes)

    def write(self, path: Path) -> Comparison:
        """Write the file, and compare it."""
        return self.write_traced(self.trace(), path, self.tolerance)

    def write_traced(self, program: torch.export.ExportedProgram, path: Path, tolerance: float) -> Comparison:
        """Write a traced graph, and compare the file.

        Args:
            program: The traced graph.
            path: The file.
            tolerance: The largest accepted difference from the model.
        """
        if self.opset is None:
            with path.open("wb") as file:
                torch.export.save(program, file, extra_files={"enfold.json": json.dumps(self.about)})
            return compare(open_pt2(path), self.reference, tolerance, None)
        model = to_onnx(program, list(self.about["inputs"]), list(self.about["outputs"]), self.opset, self.axes)
        entry = model.metadata_props.add()
        entry.key, entry.value = "enfold", json.dumps(self.about)
        path.write_bytes(model.SerializeToString())

        def explain(index: int) -> str:
            return first_difference(program, model, self.reference.batches[index], tolerance)

        return compare(open_onnx(path), self.reference, tolerance, explain)

    def write_reduced(
        self, path: Path, kind: Quantize, calibrate_on: Any, test: Any
    ) -> tuple[Comparison, tuple[Artefact, ...]]:
        """Write the file in reduced precision, and measure it beside the float file.

        Args:
            path: The file.
            kind: The precision.
            calibrate_on: Examples for the ranges of "static".
            test: Examples for the metrics; None for none.
        """
        examples = self._examples(test, "test")
        with TemporaryDirectory() as folder:
            whole = Path(folder) / ("float.pt2" if self.opset is None else "float.onnx")
            exact = self.write(whole)
            if self.opset is None:
                found = self.write_traced(self.trace(HALF[kind]), path, ANY)
            else:
                calibration = self._examples(calibrate_on, "val")
                reduce_onnx(whole, path, kind, [values for values, _ in calibration()])
                found = compare(open_onnx(path), self.reference, ANY, None)
            open_file = open_pt2 if self.opset is None else open_onnx
            files = {
                "float32": (whole, open_file(whole), exact.difference, exact.agreement),
                kind if kind in HALF else f"int8 {kind}": (path, open_file(path), found.difference, found.agreement),
            }
            scores = {name: self._scores(run, test, examples) for name, (_, run, _, _) in files.items()}
            return found, measure_files(files, self.signature, scores)

    def _examples(self, given: Any, name: str) -> Callable[[], Iterator[tuple[list[Tensor], Any]]]:
        if given is None:
            return lambda: iter(())
        return lambda: batches(given, name, self.model, self.signature, raw=self.normal is not None)

    def _scores(
        self, run: Run, test: Any, examples: Callable[[], Iterator[tuple[list[Tensor], Any]]]
    ) -> dict[str, float]:
        return {} if test is None else measure_scores(run, self.model, self.task, examples())

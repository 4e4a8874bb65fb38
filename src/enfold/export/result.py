"""The result of an export: what was written, and how it was compared with its source."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from enfold.display import format_bytes, html_table, text_table


@dataclass(frozen=True)
class Artefact:
    """One form of an exported model: its size, its speed and its quality.

    Args:
        name: The form, such as "float32" or "int8 dynamic".
        size: Bytes of the file.
        milliseconds: Median time of a call by the number of examples.
        difference: The largest difference of an output from the source.
        agreement: The fraction of predictions with the class of the source; None without classes.
        scores: Metrics on test examples; empty without test examples.
    """

    name: str
    size: int
    milliseconds: dict[int, float]
    difference: float
    agreement: float | None
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Args:
        path: The file.
        format: "onnx", "pt2" or "safetensors".
        opset: The version of the ONNX operators; None for other formats.
        quantize: The reduced precision; None for that of the model.
        inputs: Type and shape of each input, with "batch" for the axis of the examples.
        outputs: Type and shape of each output.
        batch_sizes: The numbers of examples for which the file was compared with the model; none of them was traced.
        difference: The largest difference of an output, relative to its largest value if that is above 1.
        agreement: The fraction of predictions with the same class; None without classes.
        size: Bytes of the file.
        table: The file beside that without reduced precision, with `quantize`.
    """

    path: Path
    format: str
    opset: int | None
    quantize: str | None
    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]
    batch_sizes: tuple[int, ...]
    difference: float
    agreement: float | None
    size: int
    table: tuple[Artefact, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the result as values for JSON."""
        return {**asdict(self), "path": str(self.path), "batch_sizes": list(self.batch_sizes)}

    def __str__(self) -> str:
        kind = self.format if self.opset is None else f"{self.format}, opset {self.opset}"
        kind = kind if self.quantize is None else f"{kind}, {self.quantize}"
        lines = [f"{self.path} ({kind}, {format_bytes(self.size)})"]
        lines += [f"  input   {name}: {_describe(each)}" for name, each in self.inputs.items()]
        lines += [f"  output  {name}: {_describe(each)}" for name, each in self.outputs.items()]
        if self.batch_sizes:
            sizes = ", ".join(map(str, self.batch_sizes))
            same = "" if self.agreement is None else f", same class in {100 * self.agreement:.1f} %"
            lines.append(f"  compared with batches of {sizes}: largest difference {self.difference:.1e}{same}")
        return "\n".join([*lines, *self._table()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        whole = str(self).splitlines()
        above = "".join(f"{html.escape(line)}\n" for line in whole[: len(whole) - len(self._table())])
        return f"<pre>{above}</pre>" + (html_table(*self._rows()) if self.table else "")

    def _table(self) -> list[str]:
        return [f"  {line}" for line in text_table(*self._rows()).splitlines()] if self.table else []

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        sizes, names = list(self.table[0].milliseconds), list(self.table[0].scores)
        head = ["", "size", *(f"ms, batch {size}" for size in sizes), "same class", *names]
        rows = []
        for each in self.table:
            same = "" if each.agreement is None else f"{100 * each.agreement:.1f} %"
            times = [f"{each.milliseconds[size]:.3f}" for size in sizes]
            rows.append(
                [each.name, format_bytes(each.size), *times, same, *(f"{each.scores[name]:.4f}" for name in names)]
            )
        return head, rows


def _describe(each: dict[str, Any]) -> str:
    return f"{each['dtype']} ({', '.join(map(str, each['shape']))})"

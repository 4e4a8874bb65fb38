"""The records of `enfold.measure`: costs of models, printable as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from enfold.display import format_bytes, format_count, html_table, text_table


@dataclass(frozen=True)
class Latency:
    """Seconds per call over the rounds; the value of a round is the mean of as many calls as take 2 ms."""

    median: float
    lower: float  # first quartile
    upper: float  # third quartile
    p95: float


@dataclass(frozen=True)
class Ratios:
    """Each cost divided by that of the reference; None if the reference's is 0 or unknown."""

    parameters: float | None
    bytes: float | None
    flops: float | None
    passes: float | None
    peak_memory: float | None
    latency: dict[int, float]  # by batch size: the median over rounds of the ratio within the round


@dataclass(frozen=True)
class Cost:
    """The cost of one model; `dataclasses.asdict` converts it to JSON types.

    Args:
        parameters: Number of parameters.
        trainable: Number of parameters that are trained.
        bytes: Bytes of parameters and persistent buffers.
        flops: Floating-point operations for one example.
        passes: Forward passes of the network for one prediction: one per member.
        peak_memory: Peak memory in bytes at the largest batch size; None if it was not measured.
        latency: Latency by batch size.
        ratios: Ratios to the reference model.
    """

    parameters: int
    trainable: int
    bytes: int
    flops: int
    passes: int
    peak_memory: int | None
    latency: dict[int, Latency]
    ratios: Ratios

    def cells(self, reference: Cost | None = None) -> list[str]:
        """Return the cells of a row of the table, each with its ratio to the reference.

        Args:
            reference: The cost of the reference; latencies whose quartiles overlap with its own are "equal".
        """
        counted = {
            "parameters": format_count(self.parameters),
            "bytes": format_bytes(self.bytes),
            "flops": format_count(self.flops),
            "peak_memory": "-" if self.peak_memory is None else format_bytes(self.peak_memory),
        }
        found = [_with_ratio(text, getattr(self.ratios, name)) for name, text in counted.items()]
        for size, latency in self.latency.items():
            spread = f"{1e3 * latency.median:.3g} [{1e3 * latency.lower:.3g}, {1e3 * latency.upper:.3g}]"
            other = None if reference is None or reference is self else reference.latency.get(size)
            if other is not None and latency.lower <= other.upper and other.lower <= latency.upper:
                found.append(f"{spread} (equal)")
            else:
                found.append(_with_ratio(spread, self.ratios.latency.get(size)))
        return found

    def _repr_html_(self) -> str:
        return Costs({"": self})._repr_html_()


class Costs(dict[str, Cost]):
    """The cost of each model by its name, printable as a table.

    Args:
        costs: The costs.
        reference: Name of the model that ratios refer to.
    """

    def __init__(self, costs: Mapping[str, Cost], reference: str = "") -> None:
        super().__init__(costs)
        self.reference = reference

    def header(self) -> list[str]:
        """Return the names of the columns."""
        sizes = dict.fromkeys(size for cost in self.values() for size in cost.latency)
        return ["", "parameters", "stored", "FLOPs", "peak memory", *(f"ms, batch {size}" for size in sizes)]

    def rows(self) -> list[list[str]]:
        """Return one row of text for each model."""
        return [[name, *cost.cells(self.get(self.reference))] for name, cost in self.items()]

    def __str__(self) -> str:
        return text_table(self.header(), self.rows())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(
            self.header(), self.rows(), "Medians with quartiles; in parentheses the ratio to the reference"
        )


def _with_ratio(text: str, ratio: float | None) -> str:
    return text if ratio is None else f"{text} ({ratio:.2f}x)"

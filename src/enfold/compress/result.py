"""The result of a compression: the recommended network, everything that was tried, and why."""

from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from enfold.compress.diagnosis import Diagnosis
from enfold.compress.explain import explain, shown_gain
from enfold.display import CONTROL, EFFICIENT, ENSEMBLE, NETWORK, axes_or_new, html_table
from enfold.ensemble import Ensemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError
from enfold.io.files import atomic_path
from enfold.merge.basin_check import BasinReport
from enfold.saving import save


@dataclass(frozen=True)
class Trial:
    """One network that was tried.

    Args:
        name: Name of the route.
        idea: What it does.
        scores: Scores on validation examples; empty if it failed.
        gain: Fraction of the ensemble's gain in the criterion that it recovers; NaN if there is no gain.
        cost: Operations of a prediction relative to one member.
        epochs: Epochs of training.
        seconds: Duration.
        note: Why it was stopped or failed; empty otherwise.
        kind: "reference" for members and ensemble, "control", "merge", "distillation" or "ensemble".
        size: Bytes to store it relative to one member.
        network: The network or ensemble; None for what cannot be shipped.
        calibrated_gain: Fraction of the ensemble's gain in the NLL at a fitted temperature or scale; NaN if it is not
            defined.
    """

    name: str
    idea: str
    scores: dict[str, float]
    gain: float
    cost: float
    epochs: int
    seconds: float
    note: str = ""
    kind: str = "distillation"
    size: float = 1.0
    network: nn.Module | None = field(default=None, repr=False, compare=False)
    calibrated_gain: float = math.nan

    @property
    def is_candidate(self) -> bool:
        """Return whether this network or ensemble can be shipped."""
        return self.network is not None and bool(self.scores)


@dataclass(frozen=True)
class Compression:
    """The network to ship in place of an ensemble, and the evidence for it.

    Args:
        chosen: The recommended trial.
        trials: Everything that was tried, references first.
        diagnosis: What was measured before.
        columns: The metrics of the table.
        percent: The metrics that are fractions.
        budget: The largest cost relative to one member.
        memory: The largest size relative to one member.
        members: The ensemble that was compressed, after further training if there was any.
        trained_longer: Epochs by which the members were trained longer first.
        left_out: Routes that were not tried for lack of time.
        resumed: Number of trainings that were taken from an earlier search.
    """

    chosen: Trial
    trials: list[Trial]
    diagnosis: Diagnosis
    columns: tuple[str, ...]
    percent: frozenset[str]
    budget: float
    memory: float = float("inf")
    members: Ensemble | None = field(default=None, repr=False)
    trained_longer: int = 0
    left_out: tuple[str, ...] = ()
    resumed: int = 0

    @property
    def network(self) -> nn.Module:
        """The network to ship, or the ensemble if the budget allows one, in eval mode."""
        network = self.chosen.network
        if network is None:
            raise EnfoldError("no network was found: see the table of what was tried")
        return network

    @property
    def control(self) -> Trial | None:
        """The best network that was trained without the ensemble; None if there is none."""
        found = [trial for trial in self.trials if trial.kind == "control" and trial.scores]
        return min(found, key=lambda trial: trial.scores[self.diagnosis.criterion], default=None)

    @property
    def is_mixed(self) -> bool:
        """Return whether members have different architectures."""
        return isinstance(self.members, MixedEnsemble)

    @property
    def needs_training(self) -> bool:
        """Return whether more training on the labels improves a member by more than the ensemble improves on it."""
        diagnosis, control = self.diagnosis, self.control
        if control is None:
            return diagnosis.needs_training
        improved = diagnosis.best_member_loss - control.scores[diagnosis.criterion]
        return diagnosis.needs_training or improved > max(diagnosis.mean_member - diagnosis.ensemble, 0.0)

    @property
    def recommendation(self) -> str:
        """The network to ship and the reasons, in a few sentences."""
        return explain(self)

    def rows(self) -> list[list[str]]:
        """Return the table of what was tried as text, one list per row."""
        found = []
        for trial in self.trials:
            scores = [_shown(trial.scores.get(name), name in self.percent) for name in self.columns]
            gain = shown_gain(trial.gain) if trial.scores else "-"
            mark = "* " if trial is self.chosen else "  "
            cost = [f"{trial.cost:.2f}x", *([f"{trial.size:.2f}x"] if self.shows_size else [])]
            epochs = str(trial.epochs) if trial.epochs else "-"
            found.append([mark + trial.name, *scores, gain, *cost, epochs, f"{trial.seconds:.0f}", trial.note])
        return found

    @property
    def shows_size(self) -> bool:
        """Return whether the table has a column of sizes, which are then not all equal to costs."""
        sized = [trial for trial in self.trials if trial.scores and trial.kind != "reference"]
        return self.memory < float("inf") or any(abs(trial.size - trial.cost) > 0.02 for trial in sized)

    @property
    def header(self) -> list[str]:
        """The names of the columns of `rows`."""
        names = [f"{name} (%)" if name in self.percent else name for name in self.columns]
        return ["  tried", *names, "gain", "cost", *(["size"] if self.shows_size else []), "epochs", "seconds", ""]

    def __str__(self) -> str:
        table = [self.header, *self.rows()]
        widths = [max(len(row[column]) for row in table) for column in range(len(self.header))]
        lines = [
            "  ".join(
                cell.ljust(width) if number in (0, len(row) - 1) else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        return "\n".join([self.recommendation, "", *lines, "", str(self.diagnosis)])

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        basin = self.diagnosis.basin
        trials = [
            {name: _finite(value) for name, value in vars(trial).items() if name != "network"}
            | {"chosen": trial is self.chosen}
            for trial in self.trials
        ]
        return {
            "recommendation": self.recommendation,
            "budget": self.budget,
            "memory": self.memory if math.isfinite(self.memory) else None,
            "trained_longer": self.trained_longer,
            "left_out": list(self.left_out),
            "diagnosis": {**vars(self.diagnosis), "basin": None if basin is None else _plain(basin)},
            "trials": trials,
        }

    def save(self, folder: str | Path) -> Path:
        """Write the network, the table as JSON and a page to a folder.

        Args:
            folder: The folder; it is made.

        Returns:
            The path of the network, `network.safetensors`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = save(self.network, folder / "network.safetensors", about={"recommendation": self.recommendation})
        with atomic_path(folder / "compress.json") as temporary:
            temporary.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        self.report(folder / "report.html")
        return path

    def report(self, path: str | Path) -> Path:
        """Write the recommendation, the table and the diagnosis as one HTML page."""
        path = Path(path)
        with atomic_path(path) as temporary:
            temporary.write_text(self._page(), encoding="utf-8")
        return path

    def plot(self, metric: str | None = None, axes: Any = None) -> Any:
        """Draw a metric of everything that was tried against the cost of a prediction; the chosen network is marked.

        Args:
            metric: A metric of the table; None for the criterion.
            axes: Axes of matplotlib to draw on; None for a new figure.

        Returns:
            The axes; `axes.figure.savefig(file)` stores the figure.

        Raises:
            EnfoldError: If the table does not have the metric.
            MissingExtra: If matplotlib is missing.
        """
        metric = metric or self.diagnosis.criterion
        if metric not in self.columns:
            raise EnfoldError(f"metric must be one of {', '.join(self.columns)}, got {metric!r}: change metric")
        axes = axes_or_new(axes)
        for trial in (each for each in self.trials if metric in each.scores):
            colour, marker = LOOKS.get(trial.kind, (NETWORK, "D"))
            value = trial.scores[metric] * (100 if metric in self.percent else 1)
            if trial is self.chosen:
                axes.plot(trial.cost, value, "o", ms=15, mfc="none", mec="black", mew=1.5)
            axes.plot(trial.cost, value, marker, color=colour, ms=7)
            axes.annotate(trial.name, (trial.cost, value), (7, 0), textcoords="offset points", fontsize=8, va="center")
        axes.set_xlabel("operations of a prediction, relative to one member")
        axes.set_ylabel(f"{metric} (%)" if metric in self.percent else metric)
        axes.margins(x=0.25)
        return axes

    def _repr_html_(self) -> str:
        return self._body()

    def _page(self) -> str:
        return f"<!doctype html><html lang='en'><meta charset='utf-8'>{STYLE}<body>{self._body()}</body></html>\n"

    def _body(self) -> str:
        header, *rows = [[cell.strip("* ") for cell in cells] for cells in (self.header, *self.rows())]
        chosen = [index for index, each in enumerate(self.trials) if each is self.chosen]
        table = html_table(header, rows, chosen=chosen)
        findings = "".join(f"<li>{html.escape(each)}</li>" for each in self.diagnosis.sentences())
        return (
            f"<h1>Network to ship</h1><p class='advice'>{html.escape(self.recommendation)}</p>"
            f"<div class='wide'>{table}</div>"
            f"<p>Scores on validation examples. Gain: fraction of the ensemble's gain in "
            f"{html.escape(self.diagnosis.criterion.upper())} over the mean member. Cost: operations of a prediction "
            f"relative to one member.</p><h2>Diagnosis</h2><ul>{findings}</ul>"
        )


LOOKS = {"reference": (ENSEMBLE, "s"), "control": (CONTROL, "X"), "ensemble": (EFFICIENT, "^")}  # colour and marker

STYLE = """<meta name='viewport' content='width=device-width'><title>Compression</title><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b}
.advice{font-size:1.15rem;background:#eef5ee;border-left:4px solid #2a7f3f;padding:.7rem 1rem}
.wide{overflow-x:auto}table{border-collapse:collapse;white-space:nowrap}th,td{padding:.35rem .8rem;text-align:right}
th:first-child,td:first-child,td:last-child{text-align:left}tr{border-bottom:1px solid #ddd}
.chosen{font-weight:600;background:#eef5ee}</style>"""


def _plain(basin: BasinReport) -> dict[str, Any]:
    barriers = {f"{one}, {other}": value for (one, other), value in basin.barriers.items()}
    return {**vars(basin), "barriers": barriers, "losses": list(basin.losses)}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: float | None, percent: bool) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{100 * value:.2f}" if percent else f"{value:.4f}"

"""What `enfold data` and `enfold doctor` show."""

from __future__ import annotations

import dataclasses
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from enfold.data import catalogue, check
from enfold.errors import EnfoldError

if TYPE_CHECKING:
    from rich.table import Table

PACKAGES = (  # package, extra, what it gives
    ("torch", "", "networks and training"),
    ("numpy", "", "arrays"),
    ("scipy", "", "temperature fitting, matching"),
    ("safetensors", "", "weights that cannot run code"),
    ("rich", "", "tables and progress bars"),
    ("typer", "", "this command line"),
    ("pydantic", "", "recipes"),
    ("PyYAML", "", "recipes"),
    ("matplotlib", "report", "figures"),
    ("scikit-learn", "data", "the digits data set"),
    ("pillow", "data", "folders of images"),
)


def data_rows(name: str | None = None) -> list[dict[str, Any]]:
    """The catalogue as plain values, all of it or one row."""
    rows = [dataclasses.asdict(row) for row in catalogue()]
    chosen = [row for row in rows if name is None or row["name"] == name]
    if not chosen:
        raise EnfoldError(f"there is no data set '{name}': choose one of {', '.join(row['name'] for row in rows)}")
    return [{key: str(value) if key == "path" else value for key, value in row.items()} for row in chosen]


def data_table(rows: list[dict[str, Any]]) -> Table:
    """For a terminal."""
    from rich.table import Table

    table = Table("name", "here", "classes", "shape", "train / validation / test", "description", "licence")
    for row in rows:
        sizes = " / ".join(f"{size:,}" for size in row["sizes"])
        shape = "x".join(map(str, row["shape"]))
        table.add_row(
            row["name"],
            "yes" if row["present"] else "no",
            str(row["classes"]),
            shape,
            sizes,
            row["description"],
            row["licence"],
        )
    return table


def check_data(name: str) -> None:
    """Raise with the first problem of a data set's files."""
    problems = check(name)
    if problems:
        raise EnfoldError(f"the files of '{name}' must be whole: {problems[0]}")


def doctor_rows() -> list[dict[str, Any]]:
    """Each package: its version or None, its extra, what it gives."""
    rows: list[dict[str, Any]] = []
    for package, extra, purpose in PACKAGES:
        try:
            found: str | None = version(package)
        except PackageNotFoundError:
            found = None
        rows.append({"package": package, "version": found, "extra": extra, "gives": purpose})
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    threads = f"{torch.get_num_threads()} threads"
    rows.append({"package": "device", "version": str(device or "cpu"), "extra": "", "gives": threads})
    return rows


def doctor_table(rows: list[dict[str, Any]]) -> Table:
    """For a terminal."""
    from rich.table import Table

    table = Table("package", "version", "gives", "if missing")
    for row in rows:
        remedy = f"pip install 'enfold[{row['extra']}]'" if row["extra"] else "pip install enfold"
        table.add_row(row["package"], row["version"] or "missing", row["gives"], "" if row["version"] else remedy)
    return table

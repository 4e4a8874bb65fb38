"""What `enfold methods`, `enfold data` and `enfold doctor` show."""

from __future__ import annotations

import dataclasses
import inspect
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enfold.data import catalogue, check
from enfold.errors import EnfoldError
from enfold.io.usercode import looking_in
from enfold.options import default_of, meanings
from enfold.registry import ROOMS, Method, methods, nearest
from enfold.run.methods import STEPS

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
    ("jinja2", "report", "the HTML report"),
    ("markupsafe", "report", "the HTML report"),
    ("scikit-learn", "data", "the digits data set"),
    ("pillow", "data", "folders of images"),
)


def method_rows() -> list[dict[str, Any]]:
    """Every method, and every step that only follows a fold, with its idea and the names of its settings."""
    return [
        {"name": each.name, "room": each.room, "idea": each.idea, "settings": list(each.fields)} for each in _methods()
    ]


def methods_table(rows: list[dict[str, Any]]) -> Table:
    """For a terminal."""
    from rich.table import Table

    table = Table("method", "kind", "idea", "settings")
    for row in rows:
        table.add_row(row["name"], row["room"], row["idea"], ", ".join(row["settings"]))
    return table


def method_row(chosen: Method) -> dict[str, Any]:
    """One method with what each of its settings means."""
    said = meanings(chosen.kind)
    settings = [
        {"name": key, "default": default_of(field), "meaning": said[key]} for key, field in chosen.fields.items()
    ]
    return {"name": chosen.name, "room": chosen.room, "idea": chosen.idea, "settings": settings}


def method_table(row: dict[str, Any]) -> Table:
    """The settings, for a terminal."""
    from rich.table import Table

    table = Table("setting", "default", "meaning")
    for setting in row["settings"]:
        table.add_row(setting["name"], setting["default"], setting["meaning"])
    return table


def paper_of(chosen: Method) -> str:
    """What opens the method's file after its idea: equations, paper, and what differs from it."""
    document = inspect.getdoc(inspect.getmodule(chosen.kind)) or ""
    return document.partition("\n")[2].strip("\n")


def named(name: str) -> list[Method]:
    """The method of that name, or a share and a fold that are both called so."""
    key = name.replace("-", "_")
    found = [each for each in _methods() if each.name == key]
    if not found:
        known = list(dict.fromkeys(each.name for each in _methods()))
        raise EnfoldError(f"there is no method '{name}'{nearest(key, known)}: choose one of {', '.join(known)}")
    return found


def _methods() -> list[Method]:
    steps = [Method(name, "step", kind) for name, kind in STEPS.items()]
    return [each for room in ROOMS for each in methods(room).values()] + steps


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


def check_data(name: str, trust_code: bool = False) -> None:
    """Raise with the first problem of a data set's files."""
    with looking_in([Path()], trusted=trust_code):
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

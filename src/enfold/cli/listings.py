"""Tables of `enfold methods`, `enfold data` and `enfold doctor`."""

from __future__ import annotations

import dataclasses
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enfold.arguments import arguments_of
from enfold.data import catalogue, check
from enfold.errors import EnfoldError
from enfold.io.usercode import looking_in
from enfold.registry import PACKAGES as KINDS
from enfold.registry import Method, find_any, methods, use_of
from enfold.run.step_methods import has_own_number
from enfold.train import TrainConfig

if TYPE_CHECKING:
    from rich.table import Table

SETTINGS = "train"
"""The name under which `enfold methods` shows the settings of training."""

NOT_SET = ("device", "seed")  # fields of TrainConfig that are options of a run: --device, seeds

PACKAGES = (  # package, extra, purpose
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
    ("pyarrow", "data", "streams of parquet files"),
    ("tensorboard", "tensorboard", "logger: tensorboard"),
    ("wandb", "wandb", "logger: wandb"),
    ("mlflow", "mlflow", "logger: mlflow"),
    ("onnx", "onnx", "ONNX files"),
    ("onnxscript", "onnx", "ONNX files"),
    ("onnxruntime", "onnx", "comparison and quantization of ONNX files"),
    ("transformers", "hf", "the Trainer of Hugging Face"),
    ("accelerate", "hf", "the Trainer of Hugging Face"),
    ("datasets", "hf", "data sets of Hugging Face"),
    ("lightning", "lightning", "modules for the Trainer of Lightning"),
    ("torchmetrics", "torchmetrics", "metrics in collections of torchmetrics"),
    ("timm", "timm", "factories of networks of timm"),
    ("torchvision", "torchvision", "factories of networks of torchvision"),
    ("huggingface_hub", "hub", "models on the Hugging Face Hub"),
    ("ray", "ray", "tasks on a cluster"),
    ("fsspec", "ray", "stores at addresses such as s3://"),
)


def method_rows() -> list[dict[str, Any]]:
    """Return every method with its kind, idea and the names of its options."""
    found = [method for kind in KINDS for method in methods(kind).values()]
    return [{"name": m.name, "kind": m.kind, "idea": m.idea, "options": list(m.arguments)} for m in found]


def methods_table(rows: list[dict[str, Any]]) -> Table:
    """Return the methods as a table for a terminal."""
    from rich.table import Table

    table = Table("method", "kind", "idea", "options")
    for row in rows:
        table.add_row(row["name"], row["kind"], row["idea"], ", ".join(row["options"]))
    return table


def method_row(method: Method) -> dict[str, Any]:
    """Return one method with type, default and help of each option."""
    options = [
        {"name": name, "type": argument.type_name, "default": argument.default_text, "help": argument.help}
        for name, argument in method.arguments.items()
    ]
    own = next((each for each in options if each["name"] == "num_members"), None)
    if own is not None:
        note = "in a run it stays this number" if has_own_number(method) else "in a run, the run's number of members"
        own["help"] = f"{own['help']} ({note})".strip()
    return {"name": method.name, "kind": method.kind, "idea": method.idea, "use": use_of(method), "options": options}


def method_table(row: dict[str, Any]) -> Table:
    """Return the options of a method as a table for a terminal."""
    from rich.table import Table

    table = Table("option", "type", "default", "help")
    for option in row["options"]:
        table.add_row(option["name"], option["type"], option["default"], option["help"])
    return table


def settings_row() -> dict[str, Any]:
    """Return the settings of training in the form of a method."""
    options = [
        {"name": name, "type": argument.type_name, "default": argument.default_text, "help": argument.help}
        for name, argument in arguments_of(TrainConfig).items()
        if name not in NOT_SET
    ]
    idea = "The settings of training: `train:` of a recipe or step, --set train.NAME=VALUE, fit(..., NAME=VALUE)."
    return {"name": SETTINGS, "kind": "settings", "idea": idea, "use": "--set train.epochs=5", "options": options}


def option_lines(row: dict[str, Any]) -> list[str]:
    """Return the options of a method as a Markdown list, for help texts."""
    return [f"- `{each['name']}` ({each['type']}; {each['default']}): {each['help']}" for each in row["options"]]


def find_methods(name: str, trust_code: bool = False) -> list[Method]:
    """Return the methods of a name; two kinds may have one of the same name."""
    with looking_in([Path()], trusted=trust_code):
        return find_any(name)


def data_rows(name: str | None = None) -> list[dict[str, Any]]:
    """Return the catalogue of data sets as plain values, or one row of it."""
    rows = [dataclasses.asdict(row) for row in catalogue()]
    chosen = [row for row in rows if name is None or row["name"] == name]
    if not chosen:
        raise EnfoldError(f"there is no data set '{name}': choose one of {', '.join(row['name'] for row in rows)}")
    return [{key: str(value) if key == "path" else value for key, value in row.items()} for row in chosen]


def data_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table for a terminal."""
    from rich.table import Table

    table = Table("name", "here", "classes", "shape", "train / validation / test", "description", "licence")
    for row in rows:
        sizes = " / ".join(f"{size:,}" for size in row["sizes"])
        shape = "x".join(map(str, row["shape"]))
        table.add_row(
            row["name"],
            "yes" if row["present"] else "no",
            str(row["classes"] or "-"),
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
        raise EnfoldError(f"the files of '{name}' must be complete: {problems[0]}")


def doctor_rows() -> list[dict[str, Any]]:
    """Return the version, extra and purpose of each package; version None if it is missing."""
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
    """Return a table for a terminal."""
    from rich.table import Table

    table = Table("package", "version", "gives", "if missing")
    for row in rows:
        remedy = f"pip install 'enfold[{row['extra']}]'" if row["extra"] else "pip install enfold"
        table.add_row(row["package"], row["version"] or "missing", row["gives"], "" if row["version"] else remedy)
    return table

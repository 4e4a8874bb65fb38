"""Reference of the public names: a page for each module, with an entry for each name, from its docstring."""

from __future__ import annotations

import ast
import importlib
import inspect
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import enfold
from website.methods import pages_by_target

MODULES = {
    "enfold": "Everything that `import enfold` offers.",
    "enfold.data": "Data sets, splits, augmentation and corruptions.",
    "enfold.tasks": "What outputs mean: losses, predictions and metrics of each task.",
    "enfold.train": "Training: settings, history, objectives.",
    "enfold.ensemble": "The base class of all ensembles, and their predictions.",
    "enfold.distill": "Distillation: the call, teachers, losses, perturbations.",
    "enfold.merge": "Merges: one function for each method.",
    "enfold.symmetry": "Permutable axes of a network: found, verified, matched.",
    "enfold.metrics": "Metrics: pure functions of predictions.",
    "enfold.analysis": "Loss landscape, diversity and alignment: arrays in, arrays out.",
    "enfold.networks": "The catalogue of networks.",
    "enfold.cost": "Parameters, operations, memory and latency.",
    "enfold.export": "One file for deployment: ONNX, torch.export or safetensors.",
    "enfold.loggers": "Trackers of metrics.",
    "enfold.errors": "Errors and warnings.",
    "enfold.arguments": "Typed, checked arguments of methods.",
    "enfold.seeds": "Seeds and random generators.",
    "enfold.integrations.huggingface": "Trainers of transformers.",
    "enfold.integrations.hub": "Folders and repositories of the Hugging Face Hub.",
    "enfold.integrations.lightning": "Modules for the Trainer of Lightning.",
    "enfold.integrations.sklearn": "Estimators of scikit-learn.",
    "enfold.integrations.torchmetrics": "Metrics for collections of torchmetrics.",
}
"""The public modules; their public names are in `__all__`, or all names without an underscore that they define."""


def public_names(module: str) -> list[str]:
    """Return the public names of a module."""
    found = importlib.import_module(module)
    if hasattr(found, "__all__"):
        return list(dict.fromkeys(found.__all__))
    return [
        name
        for name, value in vars(found).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module
    ]


def path_of(module: str, name: str) -> str:
    """Return the place where a public name is defined."""
    value = getattr(importlib.import_module(module), name)
    if inspect.ismodule(value):
        return value.__name__
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{module}.{name}"


def page_name(module: str) -> str:
    """Return the path of the page of a module."""
    return f"docs/api/{module}.md"


def navigation() -> list[Any]:
    """Return the pages in order."""
    modules = ["docs/api/index.md", *({module: page_name(module)} for module in MODULES)]
    return [{"Recipes": "docs/recipes.md"}, {"Command line": "docs/command-line.md"}, {"API": modules}]


def pages() -> dict[str, str]:
    """Return the pages of all public modules, and their list."""
    described: dict[str, str] = {}  # each object has its entry on one page
    found = {}
    for module in sorted(MODULES, key=lambda each: (each == "enfold", list(MODULES).index(each))):
        found[page_name(module)] = _page(module, described)
    rows = [f"| [`{module}`]({module}.md) | {text} |" for module, text in MODULES.items()]
    lines = ["# API reference", "", "Every public name, from its docstring.", ""]
    return {**found, "docs/api/index.md": "\n".join([*lines, "| module | contents |", "| --- | --- |", *rows, ""])}


def _page(module: str, described: dict[str, str]) -> str:
    table, entries = [], []
    for name in public_names(module):
        path = path_of(module, name)
        if path in pages_by_target():
            where = f"../methods/{pages_by_target()[path]}.md"
        elif path in MODULES:
            where = f"{path}.md"
        elif path in described:
            where = f"{described[path]}.md#{path}"
        else:
            described[path] = module
            where = f"#{path}"
            entries += ["", f"::: {path}"]
        table.append(f"| [`{name}`]({where}) | {summary(module, name)} |")
    head = [f"# `{module}`", "", MODULES[module], "", "| name | description |", "| --- | --- |", *table]
    return "\n".join([*head, *entries, ""])


def summary(module: str, name: str) -> str:
    """Return the first sentence of the docstring of a public name, as one line of a table."""
    value = getattr(importlib.import_module(module), name)
    is_object = inspect.ismodule(value) or inspect.isclass(value) or inspect.isfunction(value)
    text = ((inspect.getdoc(value) or "") if is_object else constants().get(name, "")).split("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


@cache
def constants() -> dict[str, str]:
    """Return the docstrings below the assignments of the public constants and types, by name."""
    found = {}
    for file in Path(enfold.__path__[0]).rglob("*.py"):
        for node, after in pairwise(ast.parse(file.read_text(encoding="utf-8")).body):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            if (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                found |= {each.id: after.value.value for each in targets if isinstance(each, ast.Name)}
    return found

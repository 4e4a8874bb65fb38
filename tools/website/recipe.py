"""Reference of recipes: all keys, with type, default and description, from the schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from enfold.arguments import Argument, arguments_of, describe_type
from enfold.registry import make_method
from enfold.run.ood import OodSpec
from enfold.run.recipe import Recipe
from enfold.run.specs import CorruptionSpec, DataSpec, StepSpec, TrajectorySpec
from enfold.train import TrainConfig

PAGE = "docs/recipes.md"
ELSEWHERE = {"seed": "`seeds`", "device": "`--device`", "task": "`task`"}
"""Training settings that a recipe sets elsewhere."""
SECTIONS: dict[str, tuple[str, type[BaseModel]]] = {
    "data": ("A text is its `source`.", DataSpec),
    "steps": (
        "A list; a text is a step with the defaults of this method. Keys that are not listed are options of the "
        "[method](methods.md).",
        StepSpec,
    ),
    "corruptions": ("", CorruptionSpec),
    "ood": ("A list; a text is its `source`.", OodSpec),
    "trajectory": ("`true` stores every epoch.", TrajectorySpec),
}
"""Keys of a recipe that have keys of their own, and their schemas."""
TEXT = """# Recipes

A recipe is the complete description of a run in one YAML file. It is checked before anything is computed, and an error
names the file, the line and the key. `enfold run RECIPE OUT` carries it out, `--set a.b=value` changes a key, and
`--dry-run` estimates time and memory. [Runs, recipes and clusters](guides/runs.md) explains how they are used; this
page lists every key.

"""


def pages() -> dict[str, str]:
    """Return the page of the keys of recipes."""
    parts = [TEXT, "## Keys of a recipe\n\n", _fields(Recipe, link=True)]
    for key, (text, schema) in SECTIONS.items():
        parts.append(f"\n## {key} {{: #{key} }}\n\n{text}\n\n{_fields(schema)}")
    settings = {name: each for name, each in arguments_of(TrainConfig).items() if name not in ELSEWHERE}
    others = ", ".join(f"`{name}` is set by {other}" for name, other in ELSEWHERE.items())
    parts.append(
        "\n## train {: #train }\n\nThe training settings, the fields of "
        "[`TrainConfig`](api/enfold.train.md#enfold.train.config.TrainConfig). A list in place of a number gives every "
        f"member its own value. {others[:1].upper()}{others[1:]}.\n\n{_arguments(settings)}"
    )
    parts.append(f"\n## A step that distils {{: #distill }}\n\n{_distill()}")
    parts.append(f"\n## A step that compresses {{: #compress }}\n\n{_compress()}")
    return {PAGE: "".join(parts)}


def _fields(schema: type[BaseModel], *, link: bool = False) -> str:
    lines = ["| key | type | default | description |", "| --- | --- | --- | --- |"]
    for name, field in schema.model_fields.items():
        known = link and (name in SECTIONS or name == "train")
        key = f"[`{name}`](#{name})" if known else f"`{name}`"
        default = "" if field.default is PydanticUndefined else _default(field.default)
        if field.default_factory is not None:
            default = "`{}`"
        hint = _type(field.annotation)
        lines.append(_row(key, hint, default or "required", field.description or ""))
    return "\n".join(lines) + "\n"


def _type(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "mapping"
    text = describe_type(hint)
    for _, schema in SECTIONS.values():
        text = text.replace(f"tuple of {schema.__name__}", "list").replace(schema.__name__, "mapping")
    return f"`{text.replace('tuple of', 'list of').replace('dict', 'mapping')}`"


def _default(value: Any) -> str:
    """Return a default as it is written in YAML."""
    if isinstance(value, BaseModel):
        return f"`{next(iter(value.model_dump().values()))}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    words = {None: "null", True: "true", False: "false"}
    return f"`{words[value] if value is None or isinstance(value, bool) else value}`"


def _row(*cells: str) -> str:
    """Return a row of a table; a cell in backquotes is code, in which Markdown would end the cell at a line."""
    return f"| {' | '.join(_code(cell) if cell.startswith('`') else cell.replace('|', '&#124;') for cell in cells)} |"


def _code(text: str) -> str:
    return f"<code>{text.strip('`').replace('<', '&lt;').replace('|', '&#124;')}</code>"


def _arguments(found: dict[str, Argument]) -> str:
    lines = ["| key | type | default | description |", "| --- | --- | --- | --- |"]
    for each in found.values():
        lines.append(_row(f"`{each.name}`", f"`{each.type_name}`", f"`{each.default_text}`", each.help))
    return "\n".join(lines) + "\n"


def _distill() -> str:
    from enfold.distill import distill
    from enfold.run.step_methods import distill_arguments

    known = {name: each for name, each in arguments_of(distill).items() if name in distill_arguments()}
    return f"Besides the options of its [loss](methods.md#distillation-losses):\n\n{_arguments(known)}"


def _compress() -> str:
    from enfold.compress.step import compress_members

    method = make_method("compress", "merge", compress_members)
    return f"`method: compress` has these options ([documentation](compress.md)):\n\n{_arguments(method.arguments)}"

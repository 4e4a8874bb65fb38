"""Reference of the command line: all commands and options, from their help."""

from __future__ import annotations

import re
from typing import Any

import typer

from enfold.cli.app import app

PAGE = "docs/command-line.md"
TEXT = """# Command line

`enfold COMMAND --help` shows the same in a terminal, `enfold COMMAND METHOD --help` also the options of a method.
A command ends with the exit code 0, with 2 if its input is refused, with 1 if something failed, and with 128 plus the
number of the signal that stopped it.

"""


def pages() -> dict[str, str]:
    """Return the page of the commands."""
    group: Any = typer.main.get_command(app)
    parts = [TEXT]
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            parts.append(f"## enfold {name}\n\n{_markdown(command.help)}\n")
            parts += [_command(f"{name} {inner}", each, 3) for inner, each in command.commands.items()]
        else:
            parts.append(_command(name, command, 2))
    return {PAGE: "\n".join(parts)}


def _command(name: str, command: Any, level: int) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    words = " ".join(_metavar(each) for each in arguments)
    lines = [f"{'#' * level} enfold {name}", "", f"`enfold {name} {words}{' [OPTIONS]' if options else ''}`", ""]
    lines += [_markdown(command.help), ""]
    rows = [(f"`{_metavar(each)}`", each) for each in arguments]
    rows += [(", ".join(f"`{opt}`" for opt in [*each.opts, *each.secondary_opts]), each) for each in options]
    if rows:
        lines += ["| argument or option | default | description |", "| --- | --- | --- |"]
        lines += [f"| {words} | {_default(each)} | {_cell(each.help or '')} |" for words, each in rows]
    return "\n".join([*lines, ""])


def _metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return f"{name}{'...' if argument.nargs == -1 else ''}" if argument.required else f"[{name}]"


def _default(option: Any) -> str:
    value = option.default
    if value in (None, "", (), []) or callable(value):
        return "required" if option.required else ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "&#124;").replace("<", "&lt;")


def _markdown(text: str | None) -> str:
    """Return help, which is Markdown; form feeds and line marks of the terminal are removed."""
    return re.sub(r"[\f\b]", "", text or "").strip()

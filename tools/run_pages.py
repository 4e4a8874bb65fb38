"""Run the code of Markdown pages, or check it: ``python tools/run_pages.py [PAGES]``, all pages by default.

- Python blocks of a page run in order, in one namespace, in an empty folder. What stands for the reader's own data and
  networks is in `<!-- setup ... -->` comments, which run where they are.
- Commands of enfold and of the studies in `sh` blocks are parsed: the command and its options exist.
- `yaml` blocks are validated as recipes; methods of `mine.py` are those of the Python blocks above.
- A block below `<!-- not run: REASON -->` is left out; the site shows the reason.
- Other blocks are `text` or `toml`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/guides/*.md", "studies/**/*.md")
LANGUAGES = ("python", "sh", "yaml")
SHOWN = ("text", "toml")
FENCE = re.compile(r"^ *```(\w+)", re.MULTILINE)
BLOCK = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|(?:^<!-- not run: (?P<reason>.*?) -->\n+)?^(?P<indent> *)```(?P<language>python|sh|yaml)\b[^\n]*\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str
    code: str
    line: int
    reason: str = ""


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page; a setup is Python."""
    for found in BLOCK.finditer(text):
        name = "setup" if found["setup"] is not None else "code"
        line = text[: found.start(name)].count("\n")
        indent = found["indent"] or ""
        code = "".join(each.removeprefix(indent) for each in found[name].splitlines(keepends=True))
        yield Block(found["language"] or "setup", code, line, found["reason"] or "")


def run(page: Path) -> str:
    """Run and check the blocks of a page in this process, and return how many there were."""
    module = sys.modules["page"] = ModuleType("page")  # dataclasses look for the module of a class
    counts = dict.fromkeys([*LANGUAGES, "not run"], 0)
    text = page.read_text(encoding="utf-8")
    if others := set(FENCE.findall(text)) - {*LANGUAGES, *SHOWN}:
        raise SystemExit(f"{page}: blocks must be {', '.join([*LANGUAGES, *SHOWN])}, got {', '.join(others)}")
    os.chdir(tempfile.mkdtemp())
    for block in blocks(text):
        if block.reason:
            counts["not run"] += 1
        elif block.language in ("setup", "python"):
            code = compile("\n" * block.line + block.code, str(page), "exec")
            exec(code, vars(module))  # noqa: S102 - that is what this file is for
            with Path("mine.py").open("a", encoding="utf-8") as own:
                own.write(block.code)
        else:
            try:
                (check_commands if block.language == "sh" else check_recipe)(block.code)
            except Exception as error:
                raise SystemExit(f"{page}, line {block.line + 1}: {error}") from error
        if block.language in counts and not block.reason:
            counts[block.language] += 1
    return ", ".join(f"{number} {name}" for name, number in counts.items() if number) or "no code"


def check_commands(text: str) -> None:
    """Raise an exception if a command of enfold, or an option of one, does not exist."""
    import typer

    from enfold.cli.app import app

    group = typer.main.get_command(app)
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] == ["python", "-m"] and words[2].split(".")[0] == "studies":
            check_study(words[2], words[3:])
        if words[:1] != ["enfold"] or len(words) < 2 or words[1].startswith("-"):
            continue
        command, rest = group, words[1:]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        with command.context_class(command, info_name=words[1]) as context:
            command.make_parser(context).parse_args(args=rest)


def check_study(module: str, words: list[str]) -> None:
    """Raise an exception if there is no such module of the studies, or no study of that name."""
    sys.path.insert(0, str(ROOT))
    import_module(f"{module}.__main__" if find_spec(module).submodule_search_locations else module)
    if module == "studies":
        from studies.__main__ import make_parser
        from studies.definition import resolve_names

        given = make_parser().parse_args(words)
        _ = resolve_names(given.name) if given.name else []


def check_recipe(text: str) -> None:
    """Raise an exception if a recipe is not valid."""
    from enfold.io.usercode import looking_in
    from enfold.run.recipe import parse_recipe

    with looking_in([Path()], trusted=True):
        parse_recipe(text)


def main(names: list[str]) -> int:
    """Run each page in a process of its own."""
    pages = [Path(name).resolve() for name in names] or sorted(page for each in PAGES for page in ROOT.glob(each))
    if os.environ.get("ENFOLD_PAGE"):
        print(run(pages[0]))
        return 0
    failed = 0
    for page in pages:
        started = time.monotonic()
        environment = os.environ | {"ENFOLD_PAGE": "1"}
        done = subprocess.run(  # noqa: S603
            [sys.executable, __file__, str(page)], env=environment, capture_output=True, text=True
        )
        failed += done.returncode != 0
        result = done.stdout.splitlines()[-1] if not done.returncode else f"FAILED\n{done.stdout}{done.stderr}"
        print(f"{page.relative_to(ROOT)}: {result} ({time.monotonic() - started:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

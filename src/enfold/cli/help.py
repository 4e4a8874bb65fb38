"""Help of commands that take a method: the names of all methods, or the options of the one that is named."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


def command_with_methods(kind: str) -> type[TyperCommand]:
    """Return a class of commands whose help ends with the methods of a kind, which are found when it is shown."""

    class Command(TyperCommand):
        words: tuple[str, ...] = ()

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            self.words = tuple(args)  # --help is handled before the other words are read
            parsed: list[str] = super().parse_args(ctx, args)
            return parsed

        def format_help(self, ctx: Any, formatter: Any) -> None:
            self.epilog = describe_methods(kind, self.words)
            super().format_help(ctx, formatter)

    return Command


def describe_methods(kind: str, words: tuple[str, ...] = ()) -> str:
    """Return the options of the first method among the words as Markdown; without one, the names of all methods."""
    from enfold.cli.listings import method_row, option_lines
    from enfold.registry import find_method, method_names

    names = method_names(kind)
    named = next((word for word in words if word.replace("-", "_") in names), None)
    if named is not None:
        row = method_row(find_method(kind, named))
        return "\n\n".join([f"**{row['name']}**: {row['idea']}", *option_lines(row)])
    own = next((word for word in words if ".py:" in word), None)
    more = (
        f"enfold methods {own} --trust-code"
        if own
        else f"enfold {kind if kind != 'ensemble' else 'train'} RUN METHOD --help"
    )
    return f"**Methods**: {', '.join(names)}; and those of installed packages.\n\n`{more}` shows options of one."

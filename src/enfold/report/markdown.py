"""Text from anybody inside of Markdown."""

from __future__ import annotations

import re


def escape(text: str) -> str:
    """Return text with Markdown and HTML escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|&])", r"\\\1", " ".join(text.split()))


def inline_code(value: object) -> str:
    """Return a value as inline code."""
    text = " ".join(str(value).split())
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"

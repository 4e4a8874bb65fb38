"""The report page: one self-contained HTML file that loads nothing and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from enfold.errors import EnfoldError, MissingExtra
from enfold.report.blocks import Figure, Section
from enfold.report.content import Content
from enfold.report.headline import summarize_run
from enfold.report.sections import sections
from enfold.report.svg import inline_svg

PARTS = ("page.html", "blocks.html", "error.html")


def render_page(contents: Sequence[Content], *, live: str | None = None) -> str:
    """Return the HTML page of one run, or of several runs side by side.

    Args:
        contents: The results of each run.
        live: The stamp of a page that is served while its run is in progress; the page reloads when it changes.

    Returns:
        The HTML text.

    Raises:
        EnfoldError: If a run is given twice.
    """
    contents = distinguish_names(contents)
    found = sections(contents)
    figures = _inline_figures(found)
    return _render(
        "page.html",
        live=live,
        title=" · ".join(content.name for content in contents),
        runs=[(content, summarize_run(content)) for content in contents],
        sections=found,
        figure=lambda block: figures[id(block)],
        results=to_json({content.name: content.summary for content in contents}),
        versions=contents[0].versions,
    )


def distinguish_names(contents: Sequence[Content]) -> list[Content]:
    """Return the runs with their folders added to names that occur more than once."""
    runs = [(content.name, content.folder.resolve()) for content in contents]
    for run in runs:
        if runs.count(run) > 1:
            raise EnfoldError(f"a page shows each run once, got '{run[1]}' {runs.count(run)} times: pass it once")
    names = [content.name for content in contents]
    return [
        replace(content, name=f"{content.name} ({content.folder})") if names.count(content.name) > 1 else content
        for content in contents
    ]


def render_error_page(message: str, live: str) -> str:
    """Return the page that is served while the run cannot be read."""
    return _render("error.html", live=live, message=message, title="enfold")


def to_json(content: Any) -> Any:
    """Return the content with None in place of NaN and infinity, which JSON cannot represent."""
    if isinstance(content, dict):
        return {str(key): to_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [to_json(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _inline_figures(found: Sequence[Section]) -> dict[int, str]:
    """Return the SVG of each figure with unique ids."""
    blocks = [block for section in found for _, part in section.runs for block in part if isinstance(block, Figure)]
    return {
        id(block): inline_svg(block.svg, block.alt, f"f{number}-", block.title)
        for number, block in enumerate(blocks)
        if block.svg
    }


def _render(name: str, *, live: str | None, **values: Any) -> str:
    try:
        from jinja2 import DictLoader, Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise MissingExtra("jinja2", "report", "the report page") from error

    folder = files("enfold.report").joinpath("page")
    read = {part: folder.joinpath(part).read_text(encoding="utf-8") for part in (*PARTS, "page.css", "page.js")}
    environment = Environment(
        loader=DictLoader(read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = read["page.js"]
    if "figure" in values:
        inlined = values["figure"]
        values["figure"] = lambda block: Markup(inlined(block))  # noqa: S704 - sanitized by `inline_svg`
    return environment.get_template(name).render(
        style=Markup(read["page.css"]),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        policy=_policy(script, live is not None),
        live=live,
        **values,
    )


def _policy(script: str, live: bool) -> str:
    """Return a content security policy that loads nothing and runs only the script of this package."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"base-uri 'none'; form-action 'none'{connect}"
    )

"""SVG figures in a page: drawn in one style, sanitized, in the colours of the page's theme."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

from enfold.errors import EnfoldError, MissingExtra
from enfold.report.figure import STYLE

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# The elements that figures need; all others, scripts and styles among them, are removed.
ELEMENTS = (
    *("svg", "g", "defs", "use", "path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "text", "tspan"),
    *("image", "clipPath", "linearGradient", "radialGradient", "stop", "marker", "pattern", "title", "desc", "mask"),
)
LINK = re.compile(r"#|data:image/(png|jpeg);base64,")
REFERENCE = re.compile(r"url\(\s*['\"]?#([^()'\"]+)['\"]?\s*\)")
# Values that could load something, hide an escape or leave the figure; functions of colour and position are allowed.
UNSAFE = re.compile(
    r"\\|/\*|@import|\bposition\s*:|"
    r"\b(?!(?:rgba?|hsla?|var|matrix|translate|scale|rotate|skew[xy])\s*\()[a-z-]+\s*\(",
    re.IGNORECASE,
)
# Text and background follow the theme; other colours stay, except a blue that is too dark for the dark theme.
THEME = {
    "#000000": "var(--ink)",
    "#333333": "var(--ink)",
    "#777777": "var(--faint)",
    "#b0b0b0": "var(--grid)",
    "#e6e6e6": "var(--grid)",
    "#f4f4f4": "var(--strip)",
    "#ffffff": "var(--paper)",
    "#0072b2": "var(--blue)",
}
COLOUR = re.compile("|".join(THEME), re.IGNORECASE)

DEEPEST = 100  # nested elements; figures have about ten

ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", XLINK)


def draw_svg(make: Callable[[], Any], purpose: str) -> str:
    """Return the figure that `make` draws as SVG with selectable text; `purpose` appears in errors."""
    try:
        from matplotlib import style
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", purpose) from error
    written = io.StringIO()
    with style.context(["default", STYLE, {"svg.fonttype": "none"}]):
        make().savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def inline_svg(text: str, alt: str, prefix: str, where: str = "a figure") -> str:
    """Return SVG for a page: unique ids, no scripts, no external links, with alt text.

    Args:
        text: The SVG.
        alt: The alternative text.
        prefix: The prefix of ids, which makes them unique on the page.
        where: The name of the source, for messages.
    """
    try:
        root = ElementTree.fromstring(text)  # noqa: S314 - expat refuses what would expand without bound
    except ElementTree.ParseError as error:
        raise EnfoldError(f"'{where}' must be an SVG figure, but it cannot be read ({error}): draw it again") from error
    if root.tag != f"{{{SVG}}}svg":
        raise EnfoldError(f"'{where}' must be an SVG figure, got <{root.tag}>: draw it again")
    if _depth(root) > DEEPEST:
        raise EnfoldError(f"'{where}' must have at most {DEEPEST} nested elements, got more: draw it again")
    _sanitize(root)
    _make_ids_unique(root, prefix)
    wide = _points(root.attrib.pop("width", ""))
    root.attrib.pop("height", None)
    root.attrib |= {"role": "img", "aria-label": alt}
    if wide:
        root.set("style", f"--width: {wide:g}pt; width: {wide:g}pt")  # small screens scale it down less
    return ElementTree.tostring(root, encoding="unicode")


def _points(width: str) -> float | None:
    found = re.fullmatch(r"([\d.]+)(pt|px)?", width)
    return float(found[1]) * (0.75 if found[2] == "px" else 1.0) if found else None


def _depth(root: ElementTree.Element) -> int:
    """Return how deep elements are nested; at most one more than is allowed."""
    level, depth = [root], 0
    while level and depth <= DEEPEST:
        level, depth = [child for element in level for child in element], depth + 1
    return depth


def _sanitize(element: ElementTree.Element) -> None:
    for child in list(element):
        name = child.tag.removeprefix(f"{{{SVG}}}") if isinstance(child.tag, str) else ""
        if name not in ELEMENTS:
            element.remove(child)
        else:
            _sanitize(child)
    for name, value in list(element.attrib.items()):
        plain = name.rpartition("}")[2].lower()
        linked = plain == "href" and not LINK.match(value)
        if plain.startswith("on") or plain == "base" or linked or UNSAFE.search(REFERENCE.sub("", value)):
            del element.attrib[name]
        elif plain in ("style", "fill", "stroke"):
            element.set(name, COLOUR.sub(lambda found: THEME[found[0].lower()], value))


def _make_ids_unique(root: ElementTree.Element, prefix: str) -> None:
    """Add a prefix to ids that are referred to and remove the others, which are equal in all figures."""
    used = set()
    for element in root.iter():
        for name, value in element.attrib.items():
            used |= {found[1] for found in REFERENCE.finditer(value)}
            if name.endswith("href") and value.startswith("#"):
                used.add(value[1:])
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id":
                if value in used:
                    element.set("id", prefix + value)
                else:
                    del element.attrib["id"]
            elif name.endswith("href") and value.startswith("#"):
                element.set(name, f"#{prefix}{value[1:]}")
            elif "url(" in value:
                element.set(name, REFERENCE.sub(lambda found: f"url(#{prefix}{found[1]})", value))

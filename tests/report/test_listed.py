"""Figures listed by a run: from the first seed that has them, inside the run only, sanitised."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from enfold.errors import EnfoldError
from enfold.report.blocks import Block, Figure, Notes
from enfold.report.content import Content
from enfold.report.page import render_page
from enfold.report.sections import alignment_blocks, listed_blocks
from enfold.report.svg import inline_svg
from enfold.run.collect import collect

pytestmark = pytest.mark.usefixtures("drawn_once")

EVIL = "<script>alert('1')</script>\"><img src=x onerror=alert(2)>&amp;"


@pytest.fixture(scope="module")
def content(stored_run: Path) -> Content:
    return collect(stored_run)


@pytest.mark.parametrize(("name", "blocks"), [("landscape", listed_blocks), ("alignment", alignment_blocks)])
def test_of_several_seeds_the_first_that_has_figures_is_shown_and_the_others_are_named(
    tmp_path: Path, stored_run: Path, name: str, blocks: Callable[[Content], list[Block]]
) -> None:
    run = Path(shutil.copytree(stored_run, tmp_path / "run"))
    content = collect(run)
    for home, shown, told in (
        ("seed-1", "seed-1", [("seed 1", "figures of one seed of 2; not available for other seeds")]),
        ("seed-0", "seed-0", [("seed 0", f"figures of one seed of 2; other seeds: seed-1/{name}")]),
        (".", "seed-0", [("seed 0", f"figures of one seed of 2; other seeds: seed-1/{name}, {name}")]),
    ):
        folder = run / home / name
        folder.mkdir()
        (folder / "plane.svg").write_text("<svg></svg>")
        entry = {"file": "plane.svg", "title": home, "caption": "Low is dark.", "alt": "A plane"}
        (folder / "figures.json").write_text(json.dumps({"figures": [entry]}))
        notes, figure = blocks(content)
        assert isinstance(notes, Notes)
        assert list(notes.notes) == told
        assert isinstance(figure, Figure)
        assert figure.title == shown
    shutil.rmtree(run / "seed-0" / name), shutil.rmtree(run / "seed-1" / name)
    (figure,) = blocks(content)
    assert figure.title == ".", "what lies in the run itself needs no remark"


@pytest.mark.parametrize("file", ["../../secret.svg", "absent.svg", "/etc/hostname"])
def test_a_listed_figure_must_be_inside_its_run(own_run: Path, file: str) -> None:
    (own_run.parent / "secret.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (own_run / "landscape").mkdir()
    entry = {"file": file, "title": "", "caption": "", "alt": ""}
    (own_run / "landscape/figures.json").write_text(json.dumps([entry]))
    with pytest.raises(EnfoldError, match="files of its run"):
        render_page([collect(own_run)])


def test_svg_is_sanitised() -> None:
    evil = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"
      onload="a()" width="72pt">
      <script>a()</script><style>@import url(//x)</style><foreignObject><b xmlns="http://www.w3.org/1999/xhtml"/></foreignObject>
      <a href="javascript:a()"><path d="M0 0"/></a><animate attributeName="href" to="javascript:a()"/>
      <image xlink:href="https://example.org/x.png"/><use xlink:href="#m"/><path id="m" style="fill: url(https://example.org)"/>
      <rect id="unused" style="fill: #ffffff; clip-path: url(#m)" onclick="a()"/></svg>"""
    found = inline_svg(evil, 'a "figure"', "f7-")
    for word in (
        "script",
        "@import",
        "foreignObject",
        "javascript",
        "example.org",
        "onload",
        "onclick",
        "unused",
        "animate",
    ):
        assert word not in found
    assert 'xlink:href="#f7-m"' in found
    assert 'id="f7-m"' in found
    assert "clip-path: url(#f7-m)" in found
    assert "fill: var(--paper)" in found
    assert 'aria-label="a &quot;figure&quot;"' in found
    assert 'width: 72pt"' in found


@pytest.mark.parametrize("text", ["<svg", "<html/>", ""])
def test_invalid_svg_is_refused(text: str) -> None:
    with pytest.raises(EnfoldError, match="must be an SVG figure"):
        inline_svg(text, "alt", "f-", "plane.svg")


UNSAFE = [
    'style="fill:u\\72l(http://e)"',
    'fill="u/**/rl(http://e)"',
    'fill="url/**/(http://e)"',
    'fill="url(#a url(http://e)"',
    'fill="url(#a) url(http://e)"',
    'style="fill:url&#9;(http://e)"',
    'style="background:image-set(&quot;http://e&quot; 1x)"',
    'style="@import &quot;http://e&quot;"',
    'xml:base="http://e/"',
    'href=" javascript:e"',
    'href="data:image/svg+xml;base64,e"',
]


@pytest.mark.parametrize("attribute", UNSAFE)
def test_attributes_that_could_load_something_are_removed(attribute: str) -> None:
    text = f'<svg xmlns="http://www.w3.org/2000/svg"><g id="a"/><rect {attribute} x="1"/></svg>'
    found = inline_svg(text, "alt", "f-")
    assert '<rect x="1" />' in found


def test_deeply_nested_svg_is_refused() -> None:
    text = f'<svg xmlns="http://www.w3.org/2000/svg">{"<g>" * 5000}{"</g>" * 5000}</svg>'
    with pytest.raises(EnfoldError, match="nested elements"):
        inline_svg(text, "alt", "f-", "plane.svg")

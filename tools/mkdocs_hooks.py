"""Hooks of MkDocs: the pages are files of the repository with the same paths, and pages generated from the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))  # the code beside these pages, not another installed one

from website import contents, equations, fences, fonts, gallery, methods  # noqa: E402


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace "GENERATED name" in the navigation by the pages of that name."""
    config.nav = _filled(config.nav)
    return config


def _filled(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_filled(each) for each in nav]
    if isinstance(nav, dict):
        return {title: _filled(each) for title, each in nav.items()}
    return contents.navigation(nav.removeprefix("GENERATED ")) if str(nav).startswith("GENERATED ") else nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the theme, of the repository, and the generated ones."""
    docs = Path(config.docs_dir)
    theme = [each for each in files if each.src_dir is None or Path(each.src_dir) != docs]
    place: Any = (str(ROOT), config.site_dir, config.use_directory_urls)
    own = [File(name, *place, inclusion=InclusionLevel.INCLUDED) for name in contents.repository_files()]
    made = [File.generated(config, name, content=text) for name, text in contents.generated_pages().items()]
    made.append(File.generated(config, fonts.FILE, content=fonts.math_font()))
    return Files([*theme, *own, *made])


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Show the reason of code that is not run, and hide what only the tests need."""
    if page.file.src_uri == "README.md":
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri == "docs/methods.md":
        markdown = methods.overview(markdown)
    if page.file.src_uri == "examples/README.md":
        markdown = gallery.overview(markdown)
    markdown = contents.without_links_to_code(methods.link_pages(markdown), page.file.src_uri)
    return fences.for_readers(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Render the formulas."""
    return equations.render_formulas(html)

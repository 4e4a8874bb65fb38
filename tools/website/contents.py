"""Contents of the site: which files of the repository it has, which pages are generated, and their order."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from website import api, commands, gallery, methods, recipe

ROOT = Path(__file__).parents[2]
PATTERNS = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "docs", "recipes", "results"),
    *("examples", "studies/**/*.md", "studies/**/*.png", "studies/**/*.json", "studies/**/*.yaml"),
)
"""Files of the repository that are pages, or that pages link to or show."""
LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")


def repository_files() -> list[str]:
    """Return the paths of the files of the repository that the site has; ignored files are left out."""
    found = subprocess.run(  # noqa: S603
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *(f":(glob){p}" for p in _globs())],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in sorted(set(found.stdout.splitlines())) if (ROOT / name).is_file()]


def _globs() -> list[str]:
    return [each if "*" in each or (ROOT / each).is_file() else f"{each}/**" for each in PATTERNS]


def without_links_to_code(markdown: str, page: str) -> str:
    """Return a page in which links to files of the repository that the site does not have are only their text.

    Args:
        markdown: The page.
        page: Its path.
    """
    folder, known = Path(page).parent, site_files()

    def text(link: re.Match[str]) -> str:
        target = os.path.normpath(folder / link[2])
        return link[1] if (ROOT / target).exists() and target not in known else link[0]

    return LINK.sub(text, markdown)


@cache
def site_files() -> frozenset[str]:
    """Return the paths of all files of the repository that the site has."""
    return frozenset(repository_files())


@cache
def generated_pages() -> dict[str, str]:
    """Return the Markdown of the generated pages by path."""
    return {**methods.pages(), **api.pages(), **recipe.pages(), **commands.pages(), **gallery.pages()}


def navigation(name: str) -> list[Any]:
    """Return the navigation of a generated part."""
    if name == "design":
        return sorted(each for each in repository_files() if each.startswith("docs/design/"))
    if name == "studies":
        found = [each for each in repository_files() if each.startswith("studies/") and each.endswith("README.md")]
        return sorted(found, key=lambda each: (each.count("/"), each))
    parts = {"methods": methods, "reference": api, "gallery": gallery}
    return parts[name].navigation()

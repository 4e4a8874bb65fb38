"""Check a built site: every link leads to a page and an anchor, and no page loads anything from another host.

python tools/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
STYLE_URL = re.compile(r"url\(\s*['\"]?(https?:)?//|@import\s+['\"]?(https?:)?//")


class Links(HTMLParser):
    """The anchors of a page, what it links to and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note ids, links and what is loaded."""
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        source = found.get(LOADED.get(tag, ""))
        if source and not (tag == "link" and found.get("rel") == "canonical"):
            self.loaded.append(source)
            self.links.append(source)


def read(folder: Path) -> dict[Path, Links]:
    """Return the links of every page."""
    pages = {}
    for file in sorted(folder.rglob("*.html")):
        pages[file.resolve()] = links = Links()
        links.feed(file.read_text(encoding="utf-8"))
    return pages


def problems(folder: Path) -> list[str]:
    """Return what is wrong, in one line each."""
    pages = read(folder)
    found = []
    for page, links in pages.items():
        name = page.relative_to(folder.resolve())
        found += [f"{name} loads {each}" for each in links.loaded if urlsplit(each).netloc]
        found += [f"{name} links to {each}" for each in dict.fromkeys(links.links) if not _exists(each, page, pages)]
    for style in folder.rglob("*.css"):
        if STYLE_URL.search(style.read_text(encoding="utf-8")):
            found.append(f"{style.relative_to(folder)} loads something from another host")
    return found


def _exists(link: str, page: Path, pages: dict[Path, Links]) -> bool:
    """Return whether a link leads somewhere; those to other hosts are not followed."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or link in ("", "#", "."):
        return True
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return page.name == "404.html"  # its links are absolute
    return not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors


def main(folder: Path) -> int:
    """Print all problems."""
    found = problems(folder)
    for each in found:
        print(each, file=sys.stderr)
    print(f"{len(read(folder))} pages, {len(found)} problems", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))

"""The page in a real browser: it asks for nothing, complains of nothing, sorts, changes its theme, fits a phone."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser
from enfold.report.page import render_page
from enfold.run.collect import collect
from enfold.run.watch import server

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: apt-get install chromium"),
    pytest.mark.usefixtures("drawn_once"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


@pytest.fixture
def opened(browser: Browser, stored_run: Path, tmp_path: Path) -> Browser:
    file = tmp_path / "report.html"
    file.write_text(render_page([collect(stored_run)]), encoding="utf-8")
    browser.size(1400, 900)
    browser.theme("light")
    browser.open(file.as_uri())
    return browser


COLUMN = "[...document.querySelectorAll('table.sortable tbody tr')].map(row => row.cells[%d].textContent.trim())"
HEADS = "[...document.querySelectorAll('table.sortable thead th')].map(head => head.textContent.trim())"


@pytest.mark.slow
def test_the_page_in_a_browser(opened: Browser) -> None:
    """One load for all that changes nothing: browsers start slowly."""
    asked = [address for address in opened.requests if not address.startswith("data:")]
    assert len(asked) == 1, asked
    assert asked[0].startswith("file://")
    assert opened.complaints == []
    figures = opened.ask(
        "[...document.querySelectorAll('figure')].map(f => [f.querySelector('figcaption').textContent.length, "
        "(f.querySelector('svg[role=img]')?.getAttribute('aria-label') ?? f.querySelector('img').alt).length, "
        "f.querySelector('svg, img').getBoundingClientRect().height])"
    )
    assert len(figures) == 7
    assert all(caption > 40 and alt > 20 and height > 100 for caption, alt, height in figures)
    assert opened.ask("JSON.parse(document.getElementById('results').textContent).small.seeds.length") == 2
    _sorts(opened)
    _changes_theme(opened)
    _fits(opened)


def _sorts(opened: Browser) -> None:
    column = opened.ask(HEADS).index("NLL (nats)")
    click = f"document.querySelectorAll('table.sortable thead button')[{column}].click()"
    before = opened.ask(COLUMN % column)
    values = []
    for direction in ("ascending", "descending"):
        opened.ask(click)
        values.append([float(text.split()[0]) for text in opened.ask(COLUMN % column)])
        sorts = opened.ask("[...document.querySelectorAll('table.sortable thead th')].map(h => h.ariaSort)")
        assert sorts[column] == direction
        assert sorts.count("none") == len(sorts) - 1
    assert values[0] == sorted(values[0])
    assert values[1] == sorted(values[0], reverse=True)
    assert len(before) == len(values[0])
    shift = opened.ask(HEADS).index("Δ NLL (nats)")
    opened.ask(f"document.querySelectorAll('table.sortable thead button')[{shift}].click()")
    assert opened.ask(COLUMN % shift)[-1] == "–", "what has no value stays last"
    opened.ask("document.querySelectorAll('table.sortable thead button')[0].click()")
    assert opened.ask(COLUMN % 0) == sorted(opened.ask(COLUMN % 0))


def _changes_theme(opened: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('figure svg text')).fill"
    light = opened.ask(ground), opened.ask(ink)
    opened.theme("dark")
    dark = opened.ask(ground), opened.ask(ink)
    assert light[0] != dark[0], "the system's wish is followed"
    assert light[1] != dark[1], "words in figures are the theme's"
    seen = []
    for _ in range(3):
        opened.ask("document.getElementById('theme').click()")
        seen.append((opened.ask("document.documentElement.dataset.theme"), opened.ask(ground)))
    assert seen == [("light", light[0]), ("dark", dark[0]), ("auto", dark[0])]
    opened.theme("light")


def _fits(opened: Browser) -> None:
    assert opened.ask("document.querySelector('meta[name=viewport]').content").startswith("width=device-width")
    for width in (400, 1400):
        opened.size(width, 900)
        assert opened.ask("document.documentElement.scrollWidth") <= width, "the page itself never scrolls sideways"
        wide = opened.ask(
            "Math.max(...[...document.querySelectorAll('figure .scroll')].map(s => s.getBoundingClientRect().right))"
        )
        assert wide <= width


@pytest.mark.slow
def test_a_live_page_reloads_once_per_change(browser: Browser, own_run: Path) -> None:
    with server(own_run) as own:
        thread = threading.Thread(target=own.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{own.server_port}/"
        browser.open(address)
        first = browser.ask("document.body.dataset.live")
        (own_run / "log.jsonl").write_text("")
        browser.page.wait_for_selector(f"body:not([data-live='{first}'])", timeout=60_000)
        seen = browser.ask("document.body.dataset.live")
        own.shutdown()
        thread.join()
    assert seen not in (first, None)
    assert browser.requests.count(address) == 2
    assert browser.complaints == []


def test_injected_code_does_not_run(browser: Browser, stored_run: Path, tmp_path: Path) -> None:
    """Should escaping ever fail, the page's policy lets no script run but its own."""
    shown = render_page([collect(stored_run)])
    evil = "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'>"
    file = tmp_path / "evil.html"
    file.write_text(shown.replace("<main>", f"<main>{evil}"), encoding="utf-8")
    browser.open(file.as_uri())
    assert browser.ask("window.hit === undefined")
    assert browser.ask("document.documentElement.dataset.theme") == "auto", "its own does"
    assert browser.complaints, "and the browser says so"

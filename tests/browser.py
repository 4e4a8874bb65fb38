"""A real browser for tests: Debian's chromium without a window, driven by Playwright."""

import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import ConsoleMessage, Error, Request, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


class Browser:
    """One page in one browser; its requests and messages are recorded."""

    def __init__(self) -> None:
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        self.page = self._browser.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", self._asked)
        self.page.on("console", self._said)
        self.page.on("pageerror", self._failed)

    def _asked(self, request: Request) -> None:
        self.requests.append(request.url)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(message.text)

    def _failed(self, error: Error) -> None:
        self.complaints.append(error.message)

    def open(self, address: str) -> None:
        """Load a page completely, and clear the recorded requests and messages."""
        self.requests.clear()
        self.complaints.clear()
        self.page.goto(address, wait_until="load")

    def size(self, width: int, height: int) -> None:
        """The window's size in pixels."""
        self.page.set_viewport_size({"width": width, "height": height})

    def theme(self, name: Any) -> None:
        """What the system prefers: light or dark."""
        self.page.emulate_media(color_scheme=name)

    def ask(self, code: str) -> Any:
        """The value of an expression; a promise is waited for."""
        return self.page.evaluate(code)

    def screenshot(self, path: Path) -> None:
        """What the window looks like."""
        self.page.screenshot(path=path)

    def close(self) -> None:
        """End it."""
        self._browser.close()
        self._playwright.stop()

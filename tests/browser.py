"""A real browser for tests: Debian's chromium without a window, spoken to over two pipes in its DevTools protocol."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and writes answers to 4; those of this process are numbered otherwise.
EXEC = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """One page in one browser; what it asks of a network and what it complains of are kept."""

    def __init__(self, folder: Path, patience: float = 60.0) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
        os.close(theirs_in), os.close(theirs_out)
        words = [sys.executable, "-c", EXEC, *map(str, high), CHROMIUM, *FLAGS, f"--user-data-dir={folder}"]
        self._log = (folder.parent / f"{folder.name}.log").open("wb")
        self._process = subprocess.Popen([*words, "about:blank"], pass_fds=high, stdout=self._log, stderr=self._log)
        for end in high:
            os.close(end)
        self._patience, self._number, self._read = patience, 0, b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        found = self.send("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in found if each["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + self._patience
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("the browser does not answer")
            self._read += chunk
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, address: str) -> None:
        """Load a page to its end."""
        seen = len(self.events)
        self.send("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events[seen:]):
            self.events.append(self._next())

    def size(self, width: int, height: int, phone: bool = False) -> None:
        """The window's size in pixels."""
        scale = 2 if phone else 1
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    def theme(self, name: str) -> None:
        """What the system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def ask(self, code: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """What the window, or the whole page, looks like."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    @property
    def requests(self) -> list[str]:
        """Every address that was asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    @property
    def complaints(self) -> list[Any]:
        """Errors and warnings of the console, and exceptions that nobody caught."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            wrong = method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")
            logged = method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning")
            if wrong or logged or method == "Runtime.exceptionThrown":
                found.append(params)
        return found

    def close(self) -> None:
        """Ask it to end, and see to it."""
        self._session = None
        try:
            self.send("Browser.close")
            self._process.wait(10)
        except (TimeoutError, subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait()
        os.close(self._in), os.close(self._out)
        self._log.close()

"""Watch: the report of a run in progress, served on the loopback address and updated when the run changes."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from enfold.errors import EnfoldError
from enfold.report.page import render_error_page, render_page
from enfold.run.collect import collect
from enfold.run.directory import RunDirectory

HOST = "127.0.0.1"
MOST = 64  # connections at a time
PATIENCE = 10.0  # seconds for a complete request
FILES = ("*.json", "*.jsonl", "*.yaml", "*.safetensors", "*.svg")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def stamp(path: Path) -> str:
    """Return a digest that changes when any file of the run does; files may appear and disappear meanwhile."""
    seen = hashlib.sha256()
    for pattern in FILES:
        for file in sorted(path.rglob(pattern)):
            try:
                found = file.stat()
            except OSError:
                continue
            seen.update(f"{file.relative_to(path)} {found.st_mtime_ns} {found.st_size}\n".encode())
    return seen.hexdigest()[:16]


class Live:
    """The page of a run, rendered on request if the run has changed."""

    def __init__(self, path: Path) -> None:
        RunDirectory.open(path)
        self._path, self._lock = path, threading.Lock()
        self._made: tuple[str, str] = ("", "")

    def stamp(self) -> str:
        """Return the digest of the run as it is now."""
        return stamp(self._path)

    def page(self) -> str:
        """Return the report, or why it is not available: a run in progress may be read between two writes."""
        with self._lock:
            now = self.stamp()
            if self._made[0] != now:
                try:
                    made = render_page([collect(self._path)], live=now)
                except EnfoldError as error:
                    made = render_error_page(str(error), now)
                self._made = now, made
            return self._made[1]


def server(path: Path, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the run's page on the loopback address; port 0 takes a free one."""
    live = Live(path)
    try:
        return _Server((HOST, port), _handler(live))
    except (OSError, OverflowError) as error:
        raise EnfoldError(f"a port must be free and from 0 to 65535, got {port} ({error}): omit --port") from error


class _Server(ThreadingHTTPServer):
    """A server that waits for its computations when it is closed, but not for open connections."""

    daemon_threads = False  # torch must not compute in a thread when Python exits

    def __init__(self, *given: Any) -> None:
        self.asking: dict[socket.socket, float] = {}  # connections, and when they were opened
        super().__init__(*given)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Accept a limited number of connections at a time."""
        return len(self.asking) < MOST

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread."""
        self.asking[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self.asking.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Stop reading from clients that take too long to send a request, such as one byte at a time."""
        self._stop_reading(before=time.monotonic() - PATIENCE)

    def _stop_reading(self, before: float) -> None:
        for connection, since in list(self.asking.items()):
            if since <= before:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)

    def server_close(self) -> None:
        """End all connections, then wait for their threads."""
        self._stop_reading(before=time.monotonic())
        super().server_close()


def serve(path: Path, port: int = 0, started: Callable[[str], None] = print) -> None:
    """Serve until Ctrl-C; `started` is called with the address."""
    with server(path, port) as own:
        started(f"http://{HOST}:{own.server_port}/")
        try:
            own.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return


def _handler(live: Live) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 2.0  # of connections that a browser opens and does not use

        def do_GET(self) -> None:
            pages: dict[str, tuple[str, Callable[[], str]]] = {
                "/": ("text/html", live.page),
                "/stamp": ("text/plain", live.stamp),
            }
            asked_by_name = self.headers.get("Host", "").split(":")[0] in (HOST, "localhost")
            if not asked_by_name:  # DNS rebinding: a foreign name that resolves to this address
                self._answer(403, "text/plain", "this server answers to 127.0.0.1 and localhost only\n")
            elif self.path in pages:
                kind, make = pages[self.path]
                self._answer(200, kind, make())
            else:
                self._answer(404, "text/plain", "there is one page here: /\n")

        def _answer(self, code: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            for name, value in HEADERS.items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # the client closed the connection
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Do nothing: the terminal is for the user's output."""

    return Handler

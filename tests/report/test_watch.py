"""A run in progress, served to this machine only."""

import contextlib
import http.client
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from enfold.errors import EnfoldError
from enfold.run.watch import Live, server, stamp

pytestmark = pytest.mark.usefixtures("drawn_once")


@pytest.fixture
def address(own_run: Path) -> Iterator[tuple[str, int]]:
    with server(own_run) as own:
        thread = threading.Thread(target=own.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield own.server_address
        own.shutdown()
        thread.join()


def _get(address: tuple[str, int], path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_page_grows_with_its_run(address: tuple[str, int], own_run: Path) -> None:
    assert address[0] == "127.0.0.1"
    code, before = _get(address, "/")
    first = _get(address, "/stamp")[1]
    assert code == 200
    assert f'data-live="{first}"' in before
    assert "connect-src" in before
    assert _get(address, "/stamp")[1] == first, "a look changes nothing"
    (own_run / "summary.json").write_text("{")
    second = _get(address, "/stamp")[1]
    assert second != first
    code, broken = _get(address, "/")
    assert code == 200, "a run may be read between two writes: the page stays alive"
    assert "summary.json" in broken
    assert f'data-live="{second}"' in broken


def test_closing_a_server_does_not_wait_for_open_requests(own_run: Path) -> None:
    own = server(own_run)
    thread = threading.Thread(target=own.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    clients = [socket.create_connection(own.server_address) for _ in range(3)]
    closed = threading.Event()

    def drip() -> None:
        while not closed.wait(0.05):
            for client in clients:
                with contextlib.suppress(OSError):
                    client.sendall(b"a")

    dripping = threading.Thread(target=drip)
    dripping.start()
    time.sleep(0.2)
    started = time.monotonic()
    own.shutdown()
    own.server_close()
    closed.set()
    dripping.join()
    thread.join()
    for client in clients:
        client.close()
    assert time.monotonic() - started < 10, "each byte would put off the end by two seconds"


def test_a_dripping_client_is_cut_off(address, monkeypatch) -> None:
    monkeypatch.setattr("enfold.run.watch.PATIENCE", 0.3)
    with socket.create_connection(address) as client:
        client.sendall(b"GET /stamp HTTP/1.1\r\nX: ")
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while not _is_closed(client) and time.monotonic() - started < 20:
                client.sendall(b"a")  # each byte would give it two more seconds
        assert time.monotonic() - started < 10
    assert _get(address, "/stamp")[0] == 200


def _is_closed(client: socket.socket) -> bool:
    client.settimeout(0.05)
    try:
        return not client.recv(1 << 16)
    except TimeoutError:
        return False


def test_connections_are_limited(address, monkeypatch) -> None:
    monkeypatch.setattr("enfold.run.watch.MOST", 3)
    clients = [socket.create_connection(address) for _ in range(3)]
    time.sleep(0.3)
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        _get(address, "/stamp")
    for client in clients:
        client.close()
    time.sleep(0.3)
    assert _get(address, "/stamp")[0] == 200


def test_only_localhost_is_served(address: tuple[str, int]) -> None:
    assert _get(address, "/stamp", "evil.example:80")[0] == 403
    for own in (f"localhost:{address[1]}", "localhost", "127.0.0.1"):  # without a port: it is 80
        assert _get(address, "/stamp", own)[0] == 200
    for path in ("/recipe.yaml", "/../run.json", "/predictions/kd.safetensors"):
        assert _get(address, path)[0] == 404


def test_a_disconnecting_client_prints_nothing(address: tuple[str, int], capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with socket.create_connection(address) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed at once, unread
            client.sendall(b"GET / HTTP/1.0\r\nHost: 127.0.0.1:1\r\n\r\n")
    assert _get(address, "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_page_is_made_once_for_each_change(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("enfold.run.watch.collect", lambda path: made.append(path) or path)
    monkeypatch.setattr("enfold.run.watch.render_page", lambda contents, live: f"page {live}")
    live = Live(own_run)
    assert live.page() == live.page() == f"page {stamp(own_run)}"
    assert len(made) == 1
    (own_run / "log.jsonl").write_text("")
    live.page()
    assert len(made) == 2


def test_invalid_runs_and_used_ports_are_refused(tmp_path: Path, own_run: Path) -> None:
    with pytest.raises(EnfoldError, match="a run directory must contain"):
        server(tmp_path / "nothing")
    with server(own_run) as own, pytest.raises(EnfoldError, match="must be free"):
        server(own_run, own.server_port)
    with pytest.raises(EnfoldError, match="from 0 to 65535"):
        server(own_run, 70000)


@pytest.mark.slow
def test_ctrl_c_ends_the_server_silently(own_run: Path) -> None:
    words = [sys.executable, "-c", "from enfold.cli import main; main()", "watch", str(own_run)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 0
    assert complaint == ""

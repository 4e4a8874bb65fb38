"""Load test of examples/serving/app.py on the loopback address; writes results/bench-serving.json.

Four clients send requests of one example each, for a fixed number of requests. It needs fastapi and uvicorn.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import enfold
from enfold.io.files import write_json
from enfold.networks import MLP
from enfold.saving import versions

ROOT = Path(__file__).parent.parent
CLIENTS, REQUESTS, SECONDS = 4, 500, 60  # requests of each client, and the time limit of all


def free_port() -> int:
    """Return a port that no other program uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(connection: HTTPConnection, body: bytes) -> tuple[float, Any]:
    """Return the seconds and the answer of one request."""
    start = time.perf_counter()
    connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    assert answer.status == 200, content
    return time.perf_counter() - start, content


def client(port: int, body: bytes, until: float) -> list[float]:
    """Send requests one after the other."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    found = []
    for _ in range(REQUESTS):
        found.append(ask(connection, body)[0])
        if time.perf_counter() > until:
            break
    connection.close()
    return found


def wait(port: int) -> None:
    """Wait until the server answers."""
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server does not answer")


def main() -> None:
    """Export an ensemble, serve it, and measure."""
    data = enfold.data.load("fashion-mini")
    assert isinstance(data.test, enfold.Split)
    ensemble = enfold.DeepEnsemble(lambda: MLP(784, [256, 256], 10), 4)
    enfold.fit(ensemble, data, epochs=2, quiet=True)
    images = data.test.inputs[:32]
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        enfold.export(ensemble, path, images, preprocess=data)
        command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(port), "--log-level", "warning"]
        environment = os.environ | {"MODEL": str(path)}
        server = subprocess.Popen(command, cwd=ROOT / "examples" / "serving", env=environment)  # noqa: S603
        try:
            wait(port)
            body = json.dumps({"inputs": images[:1].tolist()}).encode()
            expected = ensemble.predict(data.prepare(images[:1]))
            _, content = ask(HTTPConnection("127.0.0.1", port), body)
            assert abs(content[0]["entropy"] - float(expected.entropy[0])) < 1e-4
            start = time.perf_counter()
            with ThreadPoolExecutor(CLIENTS) as pool:
                each = list(pool.map(lambda _: client(port, body, start + SECONDS), range(CLIENTS)))
            elapsed = time.perf_counter() - start
        finally:
            server.terminate()
            server.wait(10)
    samples = sorted(second for one in each for second in one)
    record = {
        "requests": len(samples),
        "clients": CLIENTS,
        "requests per second": len(samples) / elapsed,
        "median ms": 1e3 * statistics.median(samples),
        "95 % ms": 1e3 * samples[int(0.95 * len(samples))],
        "load average": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    print(record)
    if "--quick" not in sys.argv:
        about = {"command": "python bench/serving.py", "date": time.strftime("%Y-%m-%d"), "versions": versions()}
        write_json(ROOT / "results" / "bench-serving.json", about | record)


if __name__ == "__main__":
    main()

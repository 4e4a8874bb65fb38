"""Fresh Python processes for tests of imports and programs: forks of one process that has imported torch only.

Importing torch takes longer than most of these tests. The process ends with the tests.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SERVER = """
import json, os, runpy, sys, traceback
import torch

def run(request):
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = ["", *filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = request["argv"]
    code = 0
    try:
        if request["code"] is None:
            runpy.run_module(request["argv"][0], run_name="__main__", alter_sys=True)
        else:
            exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = 0 if end.code is None else end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if not child:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # which closes the pipe and waits for the end
    return server


def run_python(
    code: str | None,
    *argv: object,
    cwd: Path | None = None,
    env: Mapping[str, str] = os.environ,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, as `subprocess.run` does, and return its exit code and what it printed.

    Args:
        code: The code; None to run the module `argv[0]`.
        *argv: The arguments: `sys.argv[1:]` for code, otherwise the module and its arguments.
        cwd: The folder to run in.
        env: The environment.
        check: Whether another exit code than 0 raises an error.
    """
    words = [*([] if code is None else ["-c"]), *map(str, argv)]
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("out", "err")}
        for file in files.values():
            file.touch()
        request = {"code": code, "argv": words, "cwd": str(cwd or Path.cwd()), "env": dict(env)}
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({**request, **{name: str(file) for name, file in files.items()}}) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        out, err = (file.read_text(encoding="utf-8", errors="replace") for file in files.values())
    assert not check or status == 0, err
    return subprocess.CompletedProcess(words, status, out, err)


def loaded_by(code: str) -> set[str]:
    """Return the names of all modules after running code in a fresh process."""
    return set(run_python(f"{code}\nimport sys\nprint(*sys.modules, sep='\\n')", check=True).stdout.split())

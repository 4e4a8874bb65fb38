"""Install enfold into an empty environment and start every command there: ``make install-check``.

Three times: with the required dependencies, with all extras, and with the lowest versions that pyproject.toml allows.
The source distribution is built from the checkout and the wheel from the source distribution. The build of torch is
always that of constraints.txt.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 1800  # seconds for one command, also on a busy machine
FIXED = "torch"

START = """
import importlib, pkgutil, sys
import enfold, enfold.cli.app as cli
for module in pkgutil.walk_packages(enfold.__path__, "enfold."):
    try:
        importlib.import_module(module.name)
    except enfold.errors.MissingExtra:
        assert module.name.startswith("enfold.integrations.")
for verb in cli.VERBS:
    sys.argv = ["enfold", verb.__name__, "--help"]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, f"enfold {verb.__name__} --help ends with {end.code}"
print("started", len(cli.VERBS), "verbs", file=sys.stderr)
"""

RECIPE = """
data: {source: fashion-mini, train_size: 200, val_size: 100}
network: {name: mlp, widths: [8]}
members: 2
train: {epochs: 1}
steps: [average]
cost: false
"""


def call(*command: str | Path, code: int = 0) -> str:
    """Run a command and return its output; stop if its exit code is not `code`."""
    done = subprocess.run(  # noqa: S603
        [str(word) for word in command], capture_output=True, text=True, timeout=TIMEOUT, cwd=tempfile.gettempdir()
    )
    printed = done.stdout + done.stderr
    if done.returncode != code:
        raise SystemExit(f"{' '.join(map(str, command))} ends with {done.returncode} instead of {code}:\n{printed}")
    return printed


def lowest(requirements: list[str]) -> list[str]:
    """Return each requirement at its lower bound."""
    return [text.replace(">=", "==") for text in requirements if not text.startswith((FIXED, "enfold["))]


def build(folder: Path, version: str) -> Path:
    """Build the source distribution, and the wheel from it; return the wheel."""
    call(sys.executable, "-m", "venv", folder / "tools")
    call(folder / "tools" / "bin" / "pip", "install", "--disable-pip-version-check", "build")
    call(folder / "tools" / "bin" / "python", "-m", "build", "--outdir", folder, ROOT)
    (folder / f"enfold-{version}.tar.gz").stat()
    return next(folder.glob(f"enfold-{version}-*.whl"))


def check(binaries: Path, folder: Path) -> None:
    """Start every verb, and run a small recipe."""
    call(binaries / "enfold", "--version")
    call(binaries / "python", "-c", START)
    (folder / "recipe.yaml").write_text(RECIPE)
    out = Path(tempfile.mkdtemp(dir=folder))
    call(binaries / "enfold", "run", folder / "recipe.yaml", out)
    call(binaries / "enfold", "evaluate", out, "--figures")


def main() -> None:
    """Build, install, start."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), time.monotonic()

        def report(what: str) -> None:
            print(f"{time.monotonic() - started:5.0f} s  {what}", flush=True)

        wheel = build(folder, project["version"])
        report(f"built {wheel.name}")
        call(sys.executable, "-m", "venv", folder / "venv")
        binaries = folder / "venv" / "bin"
        pip = (binaries / "pip", "install", "--disable-pip-version-check")
        call(*pip, "--constraint", ROOT / "constraints.txt", wheel)
        report("core installed")
        check(binaries, folder)
        output = call(binaries / "enfold", "train", folder / "none", "--data", "digits", code=2)
        if "pip install 'enfold[data]'" not in output:
            raise SystemExit(f"a missing extra must be named with its install line, got: {output}")
        report("core: every verb starts, a recipe runs, a missing extra is named")
        call(*pip, "--constraint", ROOT / "constraints.txt", f"{wheel}[all]")
        check(binaries, folder)
        report("[all]: every verb starts, a recipe runs")
        bounds = lowest([*project["dependencies"], *extras["report"], *extras["data"]])
        pinned = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith(f"{FIXED}=="))
        call(*pip, *dict.fromkeys(bounds), pinned, wheel)
        check(binaries, folder)
        report(f"lowest versions ({', '.join(dict.fromkeys(bounds))}): every verb starts, a recipe runs")


if __name__ == "__main__":
    main()

"""Run examples and notebooks, and store what they print and draw in examples/output, for their pages of the site.

python tools/record_examples.py [NAMES]    all by default; each runs with one thread in an empty folder

A script prints its results and may write figures to runs/*.png. Beside them, the scores of its models that it evaluates
are drawn in one figure.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from base64 import b64decode
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
OUTPUT = EXAMPLES / "output"
DPI = 110


def record_script(name: str) -> None:
    """Run a script in this process, with its printed lines in a file, and draw the rows that it evaluated."""
    import enfold

    rows: list[Any] = []
    evaluate = enfold.evaluate

    def remember(*inputs: Any, **options: Any) -> Any:
        rows.append(evaluate(*inputs, **options))
        return rows[-1]

    enfold.evaluate = remember  # type: ignore[assignment]
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    if rows:
        draw_rows(rows, OUTPUT / f"{name}.png")
    for number, figure in enumerate(sorted(Path("runs").glob("*.png")), 1):
        (OUTPUT / f"{name}-{number}.png").write_bytes(figure.read_bytes())


def draw_rows(rows: list[Any], file: Path) -> None:
    """Draw the criterion of each model as a point; the ensemble, single networks and controls have colours."""
    import matplotlib.pyplot as plt

    from enfold.display import CONTROL, ENSEMBLE, MEMBER, NETWORK

    colours = {"ensemble": ENSEMBLE, "control": CONTROL, "member 0": MEMBER}
    shared = [name for name in rows[0].headline if all(name in row.scores for row in rows)]
    metric = next(name for name in ("nll", "crps", "rmse", *shared) if name in shared)
    figure, axes = plt.subplots(figsize=(6, 0.7 + 0.34 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        value, colour = row.scores[metric], colours.get(row.name, NETWORK)
        axes.plot(value, place, "o", color=colour, markersize=8)
        axes.annotate(f"{value:.3f}", (value, place), (10, 0), textcoords="offset points", va="center", color=colour)
    axes.set(yticks=range(len(rows)), yticklabels=[row.name for row in rows], ylim=(len(rows) - 0.5, -0.5))
    label = "NLL (nats)" if metric == "nll" else metric.upper()
    axes.set_xlabel(f"{label} on test examples, lower is better")
    axes.margins(x=0.2)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=DPI)


def record_notebook(name: str) -> None:
    """Run a notebook; its tables, texts and figures are stored by cell."""
    import nbclient
    import nbformat

    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": os.getcwd()}}).execute()
    cells, figures = [], 0
    for cell in notebook.cells:
        found: list[dict[str, str]] = []
        for each in cell.get("outputs", ()):
            data = each.get("data", {})
            if "image/png" in data:
                figures += 1
                file = OUTPUT / f"{name}-{figures}.png"
                file.write_bytes(b64decode(data["image/png"]))
                found.append({"figure": file.name})
            elif "text/html" in data:
                found += [] if "<progress" in data["text/html"] else [{"html": data["text/html"]}]
            else:
                text = each.get("text", data.get("text/plain", ""))
                before = found.pop()["text"] if found and "text" in found[-1] else ""
                found.append({"text": before + text})
        cells.append(found)
    (OUTPUT / f"{name}.json").write_text(json.dumps(cells, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def names() -> list[str]:
    """Return the names of all examples that have a page."""
    sys.path.insert(0, str(Path(__file__).parent))
    from website.gallery import examples, notebooks

    return [file.stem for file in [*examples(), *notebooks()]]


def main(chosen: list[str]) -> int:
    """Record each example in a process of its own."""
    if "ENFOLD_EXAMPLE" in os.environ:
        is_notebook = (EXAMPLES / f"{chosen[0]}.ipynb").exists()
        (record_notebook if is_notebook else record_script)(chosen[0])
        return 0
    OUTPUT.mkdir(exist_ok=True)
    for name in chosen or names():
        for old in OUTPUT.glob(f"{name}*"):
            if old.stem.removeprefix(name).strip("-0123456789") == "":
                old.unlink()
        environment = os.environ | {"ENFOLD_EXAMPLE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        environment["PYTHONPATH"] = str(ROOT / "src")
        if (EXAMPLES / f"{name}.ipynb").exists():
            del environment["MPLBACKEND"]  # notebooks show their figures
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(Path(__file__).resolve()), name]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)  # noqa: S603
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            return 1
        if done.stdout:
            (OUTPUT / f"{name}.txt").write_text(done.stdout, encoding="utf-8")
        print(f"{name}: recorded", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

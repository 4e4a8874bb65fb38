"""The notebook about uncertainty runs, and its members disagree more where there are no data."""

import re
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "uncertainty.ipynb"


@pytest.mark.slow
@pytest.mark.xdist_group("notebook")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    inside, outside = map(float, re.search(r"inside ([\d.]+), outside ([\d.]+)", printed).groups())
    assert outside > 2 * inside

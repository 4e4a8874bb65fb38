"""The notebook of the examples runs from the first cell to the last, and shows tables, figures and bars."""

import re
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("onnxruntime")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("notebook"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    patched = pytest.MonkeyPatch()
    patched.setenv("OMP_NUM_THREADS", "1")
    patched.setenv("PYTHONPATH", ":".join(sys.path))
    patched.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(folder)}}).execute()
    patched.undo()
    return notebook


def outputs(notebook, source):
    """Return the outputs of the first cell that contains a text."""
    return next(cell.outputs for cell in notebook.cells if cell.cell_type == "code" and source in cell.source)


def html_of(found):
    return "".join(each.data.get("text/html", "") for each in found if "data" in each)


def test_no_cell_writes_to_stderr(executed):
    streams = [each for cell in executed.cells for each in cell.get("outputs", ()) if each.output_type == "stream"]
    assert [each.text for each in streams if each.name == "stderr"] == []


def test_a_bar_is_one_output_with_the_last_state(executed):
    bars = [each for each in outputs(executed, "enfold.fit(") if "<progress" in html_of([each])]
    assert len(bars) == 1
    found = re.search(r"value='(\d+)' max='(\d+)'", html_of(bars))
    assert found[1] == found[2]
    assert "100 %" in bars[0].data["text/plain"]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ('load("fashion-mini")', ("test", "uint8 1×28×28", "10 classes")),
        ("enfold.fit(", ("val/nll", "mean_member/val/accuracy", "History of 8 epochs")),
        ("enfold.evaluate(ensemble", ("DeepEnsemble", "accuracy", " %")),
        ("enfold.compress(", ("Network to ship", "class='chosen'", "Diagnosis")),
        ('name="compressed"', ("gain recovered",)),
        ("enfold.measure(", ("FLOPs", "(4.00x)", "ms, batch 128")),
        ("enfold.export(", ("clothes.onnx", "uint8 (batch, 1, 28, 28)")),
    ],
)
def test_results_are_tables(executed, source, shown):
    found = html_of(outputs(executed, source))
    assert all(text in found for text in shown), found
    assert "enfold.export" in source or "<table" in found


@pytest.mark.parametrize("source", ["history.plot();", 'plot("accuracy")', "result.plot();"])
def test_a_plot_is_shown_once(executed, source):
    found = outputs(executed, source)
    assert ["image/png" in each.get("data", {}) for each in found] == [True]


def test_the_notebook_is_stored_without_outputs():
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)

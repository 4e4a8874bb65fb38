"""The server of the examples answers with the uncertainty of the ensemble."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import enfold
from enfold.networks import MLP

fastapi = pytest.importorskip("fastapi")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

APP = Path(__file__).parents[2] / "examples" / "serving" / "app.py"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An ensemble, and the module of a server that has its file."""
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(lambda: MLP(12, [8], 5), 2)
    path = tmp_path_factory.mktemp("served") / "model.onnx"
    enfold.export(ensemble, path, torch.randn(4, 12))
    spec = importlib.util.spec_from_file_location("serving_app", APP)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MODEL", str(path))
        patched.setenv("REJECT", "1.55")
        patched.setitem(sys.modules, "serving_app", module)
        spec.loader.exec_module(module)
        yield ensemble, module


def test_an_answer_has_the_class_and_both_uncertainties(served):
    ensemble, module = served
    torch.manual_seed(1)
    inputs = 3 * torch.randn(7, 12)
    answers = module.predict(module.Question(inputs=inputs.tolist()))
    expected = ensemble.predict(inputs)
    assert [answer["class"] for answer in answers] == expected.mean.argmax(1).tolist()
    assert [answer["probability"] for answer in answers] == pytest.approx(expected.mean.amax(1).tolist(), abs=1e-5)
    assert [answer["entropy"] for answer in answers] == pytest.approx(expected.entropy.tolist(), abs=1e-5)
    between = [answer["mutual_information"] for answer in answers]
    assert between == pytest.approx(expected.mutual_information.tolist(), abs=1e-5)
    rejected = [answer["reject"] for answer in answers]
    assert rejected == (expected.entropy > 1.55).tolist()
    assert set(rejected) == {True, False}
    assert module.describe()["model"] == "DeepEnsemble"


@pytest.mark.parametrize("inputs", [[[1.0] * 11], [1.0] * 12, [["a"] * 12], [[1.0] * 12, [1.0]]])
def test_other_inputs_are_refused(served, inputs):
    with pytest.raises(fastapi.HTTPException) as refused:
        served[1].predict(served[1].Question(inputs=inputs))
    assert refused.value.status_code == 422
    assert "inputs must" in refused.value.detail

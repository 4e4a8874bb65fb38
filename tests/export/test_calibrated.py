"""Calibrated ensembles of every task, whose files have their temperature or scale and named outputs."""

import pytest
import torch

import enfold
from any_task import NUMBERS, PROBLEMS, every_task, examples, loader

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

NAMES = {True: ["mean", "aleatoric", "epistemic"], False: ["probabilities", "entropy", "mutual_information"]}


def run(path, inputs):
    """Return the outputs of a file for a dictionary of inputs, without enfold."""
    if path.suffix == ".pt2":
        with path.open("rb") as file:
            return {name: value.detach() for name, value in torch.export.load(file).module()(*inputs.values()).items()}
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return {each.name: torch.from_numpy(value) for each, value in zip(session.get_outputs(), found, strict=True)}


@every_task
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_the_file_has_the_prediction_after_calibration(name, format, tmp_path):
    problem = PROBLEMS[name]
    ensemble = enfold.DeepEnsemble([problem.network(seed=seed) for seed in range(3)])
    model = enfold.calibrate(ensemble, loader(name), task=problem.task).eval()
    x, z, _ = examples(name, 1)
    result = enfold.export(model, tmp_path / f"net.{format}", {"x": x, "z": z})
    assert list(result.outputs) == NAMES[name in NUMBERS]
    for size in (1, 5):
        inputs = {"x": x[:size], "z": z[:size]}
        found, expected = run(result.path, inputs), model.predict(**inputs)
        before = enfold.Calibrated(ensemble, model.model_task).predict(**inputs)  # a factor of 1
        assert list(found) == NAMES[name in NUMBERS]
        uncertainty = expected.aleatoric if name in NUMBERS else expected.total
        wanted = (expected.mean, uncertainty, expected.epistemic)
        for value, tensor in zip(found.values(), wanted, strict=True):
            torch.testing.assert_close(value, tensor, rtol=1e-4, atol=1e-4)
        uncalibrated = before.aleatoric if name in NUMBERS else before.total
        assert not torch.allclose(found[NAMES[name in NUMBERS][1]], uncalibrated, atol=1e-3)

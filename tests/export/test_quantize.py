"""Files in reduced precision: smaller, close to the float file, and measured beside it."""

import pytest
import torch
from torch import nn

import enfold
from enfold.errors import EnfoldError
from enfold.networks import MLP
from enfold.tasks import Multilabel, Regression

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROWS = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
LABELS = ROWS[:, :4].argmax(1)


def mlp(outputs=4):
    return MLP(20, [64, 64], outputs)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    network = mlp()
    enfold.fit(network, (ROWS, LABELS), epochs=30, lr=1e-2, quiet=True)
    return network.eval()


def types(path):
    model = onnx.load(path)
    return {onnx.TensorProto.DataType.Name(each.data_type) for each in model.graph.initializer if len(each.dims) == 2}


@pytest.mark.filterwarnings("ignore:a calibration error")
@pytest.mark.parametrize(
    ("kind", "stored", "close"),
    [
        ("static", "INT8", 0.2),
        pytest.param("dynamic", "INT8", 0.2, marks=pytest.mark.slow),
        pytest.param("fp16", "FLOAT16", 2e-3, marks=pytest.mark.slow),
        pytest.param("bf16", "BFLOAT16", 2e-2, marks=pytest.mark.slow),
    ],
)
def test_weights_are_smaller_and_outputs_close(network, kind, stored, close, tmp_path):
    path = tmp_path / "net.onnx"
    calibrate_on = ROWS if kind == "static" else None
    result = enfold.export(
        network, path, ROWS, task="classification", quantize=kind, calibrate_on=calibrate_on, test=(ROWS, LABELS)
    )
    whole, reduced = result.table
    assert types(path) == {stored}
    assert reduced.size == path.stat().st_size < whole.size
    found = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"input": ROWS.numpy()})[0]
    with torch.no_grad():
        expected = network(ROWS)
    assert 0 < float((torch.from_numpy(found) - expected).abs().max() / expected.abs().max()) < close
    scores = enfold.evaluate(network, (ROWS, LABELS)).scores
    assert whole.scores == pytest.approx({name: scores[name] for name in whole.scores}, abs=1e-5)
    assert reduced.scores["accuracy"] == (torch.from_numpy(found).argmax(1) == LABELS).double().mean()
    assert set(whole.milliseconds) == {1, 128}
    assert "accuracy" in str(result)
    assert reduced.difference == result.difference > whole.difference


def test_a_pt2_file_in_16_bits(network, tmp_path):
    result = enfold.export(network, tmp_path / "net.pt2", ROWS, quantize="bf16")
    assert result.table[1].size < result.table[0].size
    assert 0 < result.difference < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [Regression(head="gaussian", variance="softplus"), Regression(), Multilabel(num_labels=2)]
)
def test_the_scores_of_other_tasks_are_those_of_evaluate(task, tmp_path):
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(mlp, 2) if task == Regression() else enfold.DeepEnsemble(lambda: mlp(2), 2)
    ensemble.task = task
    shape = {"gaussian": (64, 1), None: (64, 4)}.get(getattr(task, "head", 0), (64, 2))
    targets = torch.randn(shape) if isinstance(task, Regression) else (torch.randn(shape) > 0).float()
    result = enfold.export(ensemble, tmp_path / "e.onnx", ROWS, quantize="fp16", test=(ROWS, targets))
    scores = enfold.evaluate(ensemble, (ROWS, targets)).scores
    found = {name: value for name, value in result.table[0].scores.items() if name != "crps"}  # of points: by member
    assert found == pytest.approx({name: scores[name] for name in found}, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_convolutions_are_quantized_and_what_follows_stays_in_floats(tmp_path):
    torch.manual_seed(0)

    def make():
        layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 4))

    ensemble = enfold.DeepEnsemble(make, 2)
    images = torch.randn(32, 1, 8, 8)
    path = tmp_path / "e.onnx"
    enfold.export(ensemble, path, images, quantize="static", calibrate_on=images)
    nodes = onnx.load(path).graph.node
    writers = {name: node for node in nodes for name in node.output}
    convolutions = [node for node in nodes if node.op_type == "Conv"]
    assert len(convolutions) == 4
    assert all(writers[node.input[1]].op_type == "DequantizeLinear" for node in convolutions)
    assert not any(node.op_type in ("BatchNormalization",) for node in nodes)
    logs = [node for node in nodes if node.op_type in ("Log", "LogSoftmax", "Exp")]
    assert logs
    assert not any("Quantize" in writers[name].op_type for node in logs for name in node.input if name in writers)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quantize": "int4"}, "quantize"),
        ({"quantize": "static"}, "calibrate_on"),
        ({"quantize": "dynamic", "calibrate_on": ROWS}, "calibrate_on"),
        ({"calibrate_on": ROWS}, "calibrate_on"),
        ({"test": (ROWS, LABELS)}, "test"),
        ({"quantize": "dynamic", "path": "net.pt2"}, "quantize"),
        ({"quantize": "fp16", "path": "net.safetensors"}, "quantize"),
        pytest.param({"quantize": "static", "calibrate_on": ROWS[:, :7]}, "examples", marks=pytest.mark.slow),
    ],
)
def test_wrong_arguments_are_named(change, named, tmp_path):
    with pytest.raises(EnfoldError, match=named):
        enfold.export(mlp(), tmp_path / change.pop("path", "net.onnx"), ROWS, **change)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_cannot_be_quantized_is_named(tmp_path):
    with pytest.raises(EnfoldError, match="static"):
        enfold.export(nn.Conv2d(1, 2, 3), tmp_path / "net.onnx", torch.randn(4, 1, 5, 5), quantize="dynamic")
    network = mlp()
    with torch.no_grad():
        network.head.weight[0, 0] = 1e6
    with pytest.raises(EnfoldError, match=r"head.weight.*bf16"):
        enfold.export(network, tmp_path / "net.onnx", ROWS, quantize="fp16")
    assert list(tmp_path.iterdir()) == []

"""What cannot be exported is named, and nothing is written or lost."""

import sys

import pytest
import torch
from torch import nn

import enfold
from enfold.errors import EnfoldError, MissingExtra, WriteError

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROWS = torch.randn(4, 6)


class Branch(nn.Linear):
    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs if outputs.sum() > 0 else -outputs


class Fixed(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.reshape(len(inputs.tolist()), -1))


class InNumpy(nn.Linear):
    def forward(self, inputs):
        return super().forward(torch.from_numpy(inputs.numpy() * 2))


class Random(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) + torch.randn(len(inputs), self.out_features)


class Eigenvalues(nn.Linear):
    def forward(self, inputs):
        outer = inputs[:, :, None] * inputs[:, None]
        return super().forward(torch.linalg.eigvals(outer).real)


@pytest.mark.parametrize(
    ("network", "format", "named"),
    [
        (Branch(6, 3), "pt2", r"control flow.*outputs if outputs.sum\(\) > 0"),
        (Fixed(6, 3), "pt2", "number of examples"),
        (InNumpy(6, 3), "pt2", "numpy"),
        (Random(6, 3), "pt2", "outputs.*random"),
        pytest.param(Eigenvalues(6, 3), "onnx", "linalg_eig", marks=pytest.mark.slow),
    ],
)
def test_an_operation_that_cannot_be_exported_is_named(network, format, named, tmp_path):
    path = tmp_path / f"net.{format}"
    path.write_bytes(b"earlier")
    with pytest.raises(EnfoldError, match=named):
        enfold.export(network.eval(), path, ROWS)
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_graph_that_differs_leaves_no_file_and_names_the_operation(tmp_path, monkeypatch):
    """A converter with another epsilon of a layer norm, which torch does not notice."""
    from enfold.export import formats as module

    network = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)).eval()
    real = module.to_onnx

    def wrong(*args):
        model = real(*args)
        for node in model.graph.node:
            for attribute in node.attribute:
                if node.op_type == "LayerNormalization" and attribute.name == "epsilon":
                    attribute.f = 0.5
        return model

    monkeypatch.setattr(module, "to_onnx", wrong)
    with pytest.raises(EnfoldError, match=r"'outputs'.*layer_norm"):
        enfold.export(network, tmp_path / "net.onnx", ROWS)
    assert list(tmp_path.iterdir()) == []


def test_samples_of_dropout_are_refused_by_name(tmp_path):
    network = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 3))
    with pytest.raises(EnfoldError, match="MCDropout"):
        enfold.export(enfold.MCDropout(network).eval(), tmp_path / "net.onnx", ROWS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"path": "net.h5"}, "path"),
        ({"path": "net.onnx", "format": "pt2"}, "format"),
        ({"format": "tflite"}, "format"),
        ({"example": None}, "example"),
        ({"example": [1, 2]}, "example"),
        ({"example": torch.zeros(0, 6)}, "example"),
        ({"example": torch.zeros(4, 7)}, "example"),
        ({"example": {"a": torch.zeros(2, 6), "b": torch.zeros(3, 6)}}, "example"),
        ({"preprocess": "imagenet"}, "preprocess"),
        ({"preprocess": ((0.5,), (0.0,))}, "preprocess"),
        ({"outputs": "logits"}, "outputs"),
        ({"task": "ranking"}, "task"),
        ({"opset": 9}, "opset"),
        ({"dynamic_axes": {"input": [1]}}, "dynamic_axes"),
        ({"dynamic_axes": {"x": {1: "tokens"}}}, "names of inputs, input, got 'x'"),
        ({"dynamic_axes": {"input": {0: "tokens"}}}, "axes of 'input' from 1 to 1, got 0"),
        ({"dynamic_axes": {"input": {1: "batch"}}}, "got 'batch'"),
        ({"dynamic_axes": {"input": {1: "tokens"}}}, "half and three quarters of tokens"),
        ({"dynamic_axes": {"input": {1: "tokens"}}, "example": ROWS[:, :3]}, "at least 4"),
    ],
)
def test_wrong_arguments_are_named(change, named, tmp_path):
    path = tmp_path / change.pop("path", "net.onnx")
    arguments = {"example": ROWS} | change
    with pytest.raises(EnfoldError, match=named):
        enfold.export(nn.Linear(6, 3), path, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_its_install_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtra, match=r"pip install 'enfold\[onnx\]'"):
        enfold.export(nn.Linear(6, 3), tmp_path / "net.onnx", ROWS)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(WriteError, match="file"):
        enfold.export(nn.Linear(6, 3), tmp_path / "file" / "net.onnx", ROWS)
    with pytest.raises(EnfoldError, match="path"):
        enfold.export(nn.Linear(6, 3), tmp_path, ROWS, format="onnx")

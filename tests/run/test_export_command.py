"""`enfold export` from a run, a saved model and code."""

import json

import numpy as np
import pytest
import torch

from enfold import DeepEnsemble, load, save
from enfold.networks import MLP

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def test_a_step_of_a_run_with_its_normalisation(enfold, finished, tmp_path):
    file = tmp_path / "step.pt2"
    done = enfold("export", finished, file, "--label", "distill-fresh", "--preprocess", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["inputs"]["input"] == {"dtype": "uint8", "shape": ["batch", 1, 4, 4]}
    assert list(result["outputs"]) == ["logits"]
    with file.open("rb") as opened:
        found = torch.export.load(opened).module()
    arrays = np.load(tmp_path / "small.npz")
    pixels = torch.from_numpy(arrays["x_test"][:9])
    network = load(finished / "steps" / "distill-fresh.safetensors")
    mean, std = (torch.tensor(values) for values in data_statistics(finished))
    assert torch.allclose(found(pixels)["logits"], network((pixels / 255 - mean) / std), atol=1e-4)


def data_statistics(run):
    from enfold.run import RunDirectory

    data = RunDirectory(run).recipe().data.load()
    return data.mean, data.std


@pytest.mark.slow
def test_the_members_of_a_run_in_integers_beside_the_float_file(enfold, finished, tmp_path):
    done = enfold("export", finished, tmp_path / "small.onnx", "--quantize", "static", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [row["name"] for row in result["table"]] == ["float32", "int8 static"]
    assert all({"accuracy", "nll"} <= set(row["scores"]) for row in result["table"])
    shown = enfold("export", finished, tmp_path / "again.onnx", "--label", "member-1")
    assert shown.code == 0
    assert "logits: float32 (batch, 4)" in shown.out


@pytest.mark.slow
def test_a_saved_ensemble_and_a_file_of_inputs(enfold, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text("from enfold.networks import MLP\ndef make():\n    return MLP(6, [8], 3)\n")
    save(DeepEnsemble(lambda: MLP(6, [8], 3), 2), tmp_path / "ensemble.safetensors")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32))
    words = ["export", "ensemble.safetensors", "out.pt2", "--network", "nets.py:make", "--example", "x.npy"]
    assert "--trust-code" in enfold(*words).err
    done = enfold(*words, "--trust-code")
    assert done.code == 0, done.err
    assert "mutual_information" in done.out


def test_axes_vary(enfold, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "from torch import nn\ndef make():\n    return nn.Conv2d(1, 2, 3)\n"
    (tmp_path / "nets.py").write_text(text)
    words = ["nets.py:make", "out.pt2", "--shape", "1,8,8", "--vary", "input:2=height", "--vary", "input:3=width"]
    done = enfold("export", *words, "--trust-code")
    assert done.code == 0, done.err
    assert "input: float32 (batch, 1, height, width)" in done.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["RUN", "x.onnx", "--label", "nothing"], "--label"),
        (["RUN", "x.txt"], "path"),
        (["RUN", "x.onnx", "--quantize", "int4"], "quantize"),
        (["RUN", "x.onnx", "--network", "a.py:b"], "--network"),
        (["missing.safetensors", "x.onnx"], "missing.safetensors"),
        (["missing.safetensors", "x.onnx", "--label", "kd"], "--label"),
        (["math:sqrt", "x.onnx", "--trust-code"], "math:sqrt"),
        (["enfold.networks:SmallCNN", "x.onnx", "--trust-code"], "example"),
        (["enfold.networks:SmallCNN", "x.onnx", "--trust-code", "--shape", "3x32"], "--shape"),
        (["enfold.networks:SmallCNN", "x.onnx", "--trust-code", "--preprocess"], "--preprocess"),
        (["enfold.networks:SmallCNN", "x.onnx", "--trust-code", "--shape", "3,32,32", "--vary", "input"], "--vary"),
        (["enfold.networks:SmallCNN", "x.onnx", "--trust-code", "--example", "no.npy"], "no.npy"),
    ],
)
def test_wrong_arguments_are_named(words, named, enfold, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = enfold("export", *[finished if word == "RUN" else word for word in words])
    assert done.code == 2
    assert named in done.err
    assert not (tmp_path / "x.onnx").exists()

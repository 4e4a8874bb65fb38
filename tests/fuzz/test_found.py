"""What fuzzing found: inputs that gave raw exceptions, allocated what they only claim, or quoted themselves."""

import json
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

import enfold
from enfold.data import load
from enfold.data.cifar import extract, read_records
from enfold.data.corruptions import read_cifar_c
from enfold.data.idx import read_idx
from enfold.errors import EnfoldError
from enfold.io.adapters import add_adapter
from enfold.io.checkpoints import load_into
from enfold.metrics.weights import as_weights
from enfold.run import RunDirectory


def network() -> nn.Module:
    return nn.Linear(4, 3)


@pytest.fixture
def _little_memory():
    tracemalloc.start()
    yield
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 50 << 20


@pytest.mark.parametrize("kind", ["missing", "folder", "link"])
def test_files_that_are_no_files(tmp_path, kind):
    path = tmp_path / "a"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(path)
    readers = (
        lambda: read_idx(path, 3),
        lambda: read_records(path, 1),
        lambda: extract(path, tmp_path / "out", ["a"]),
        lambda: enfold.CachedTeacher.load(path),
        lambda: load_into(network(), path),
    )
    for read in readers:
        with pytest.raises(EnfoldError):
            read()


def test_an_idx_file_without_a_value(tmp_path):
    (tmp_path / "a").write_bytes(bytes((0, 0, 8, 3)) + struct.pack(">III", 0, 4, 4))
    with pytest.raises(EnfoldError, match="at least one value"):
        read_idx(tmp_path / "a", 3)


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize("label", [10**17, 10**9])
def test_a_label_that_would_need_as_many_counters(tmp_path, label):
    np.savez(tmp_path / "a.npz", inputs=np.zeros((40, 2), np.float32), labels=np.array([label, *range(39)]))
    with pytest.raises(EnfoldError, match="labels must be below 1,000,000"):
        load(tmp_path / "a.npz")


def test_names_that_are_no_text(tmp_path):
    """Code points above the largest."""
    np.savez(tmp_path / "a.npz", inputs=np.zeros((4, 2), np.float32), labels=np.arange(4), names=np.array(["ab"]))
    with zipfile.ZipFile(tmp_path / "a.npz") as made:
        entries = {each: made.read(each) for each in made.namelist()}
    entries["names.npy"] = entries["names.npy"][:-4] + b"\xff\xff\xff\x7f"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as changed:
        for name, content in entries.items():
            changed.writestr(name, content)
    with pytest.raises(EnfoldError, match=r"a\.npz"):
        load(tmp_path / "a.npz")


def test_whatever_an_image_reader_raises(tmp_path, monkeypatch):
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "images" / name / "0.tif")

    def fail(*given):
        raise TypeError("an integer is required")

    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(EnfoldError, match=r"0\.tif.*an integer is required"):
        load(tmp_path / "images")


def test_a_header_is_not_quoted_at_length(tmp_path):
    header = f"{{'descr': '|u1', 'fortran_order': {'1' * 9000}, 'shape': (1,)}}".encode()
    for name in ("labels", "fog"):
        content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
        (tmp_path / f"{name}.npy").write_bytes(content)
    with pytest.raises(EnfoldError) as refused:
        read_cifar_c(tmp_path, "fog", 1)
    assert len(str(refused.value)) < 1000


def old_file(path, change):
    torch.save(network().state_dict(), path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    path.write_bytes(change(content))
    assert path.read_bytes() != content


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.replace(b"X\x06\x00\x00\x00weight", b"X\xff\xff\xff\x7fweight"),  # a text of 2 GB
        lambda content: content.replace(b"K\x0cNt", b"J\xff\xff\xff\x7fNt"),  # 2**31 values
        lambda content: content.replace(b"K\x0cNt", b"\x8a\x08" + struct.pack("<q", 1 << 50) + b"Nt"),
    ],
)
def test_an_old_file_of_pytorch_that_claims_more_than_it_has(tmp_path, change):
    old_file(tmp_path / "a.pth", change)
    with pytest.raises(EnfoldError, match=r"a\.pth"):
        load_into(network(), tmp_path / "a.pth")


def test_old_files_of_pytorch_are_still_read(tmp_path):
    network_ = network()
    torch.save(network_.state_dict(), tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    found = load_into(network(), tmp_path / "a.pth")
    assert torch.equal(found.weight, network_.weight)


@pytest.fixture
def saved(tmp_path):
    members = enfold.DeepEnsemble(network, 2)
    members(torch.randn(5, 4))
    return enfold.save(members, tmp_path / "m.safetensors")


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": [1]},
        {"fingerprint": {"inputs": [], "outputs": []}},
        {"fingerprint": {"inputs": {"shape": [1 << 40], "dtype": "float32", "low": 0, "high": 1}, "outputs": [[0.0]]}},
        {"fingerprint": {"inputs": {"shape": [4], "dtype": "load", "low": 0, "high": 1}, "outputs": [[0.0]]}},
        {"fingerprint": {"inputs": {"shape": [4], "dtype": "float32", "low": 0, "high": 1}, "outputs": "x"}},
        {"task": "x"},
        {"task": {"name": [], "options": {}}},
        {"weights": True},
        {"num_members": 0},
        {"num_members": -1},
    ],
)
def test_a_manifest_of_another_form(saved, change):
    beside = saved.with_suffix(".json")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), **change}))
    with pytest.raises(EnfoldError):
        enfold.load(saved, network)


@pytest.mark.parametrize("name", ["a" * 1000, "\x00", "a/b", ".."])
def test_names_of_shards_that_are_no_names(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(EnfoldError, match=r"model\.safetensors\.index\.json|shards"):
        load_into(network(), tmp_path)


def test_an_adapter_without_its_configuration(tmp_path):
    with pytest.raises(EnfoldError, match=r"adapter_config\.json"):
        add_adapter(network(), tmp_path)


@pytest.mark.parametrize("weights", ["inputs", [None, 1], 3, {"a": 1, "b": 2}])
def test_weights_of_members_that_are_no_numbers(weights):
    with pytest.raises(EnfoldError, match="weights must be numbers"):
        as_weights(weights, 2)


DATA = (torch.randn(12, 4), torch.arange(12) % 3)


@pytest.mark.parametrize("change", ["tensor", "progress", "folder"])
def test_a_training_checkpoint_of_another_form(tmp_path, change):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    file = tmp_path / "t.safetensors"

    def train():
        torch.manual_seed(0)
        enfold.fit(network(), DATA, checkpoint=file, epochs=1, batch_size=6, quiet=True, select="last")

    train()
    with safe_open(file, "pt") as opened:
        progress = json.loads(opened.metadata()["progress"])
    tensors = load_file(file)
    if change == "tensor":
        tensors["unknown"] = tensors.pop("model/weight")
    elif change == "progress":
        progress["history"] = [1]
    save_file(tensors, file, {"progress": json.dumps(progress)})
    if change == "folder":
        file.unlink()
        file.mkdir()
    with pytest.raises(EnfoldError, match=r"t\.safetensors.*delete it"):
        train()


@pytest.mark.parametrize("change", [{"made_in": [None, 3, {}]}, {"made_in": "x"}, {"environment": [1]}])
def test_a_run_manifest_of_another_form(tmp_path, change):
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    (tmp_path / "run.json").write_text(json.dumps({"format": 2, **change}))
    run = RunDirectory.open(tmp_path)
    assert run.recipe().name == "x"
    assert not run.changed_environment()


def test_a_run_of_another_format_with_versions_of_another_form(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "versions": [1]}))
    with pytest.raises(EnfoldError, match="in format 1"):
        RunDirectory.open(tmp_path)

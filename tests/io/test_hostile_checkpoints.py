"""Checkpoints from anybody: what claims more than it has, or would run code, is refused by the name of its file."""

import json
import pickle
import resource
import struct
import time
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from enfold import DeepEnsemble, EnfoldError
from enfold.integrations.hub import from_pretrained, save_pretrained


def make():
    return nn.Linear(4, 2)


def read(path):
    return DeepEnsemble.from_checkpoints(path, make)


@pytest.fixture(autouse=True)
def _at_little_cost():
    started, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300 << 10  # kilobytes


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (type(self.path).touch, (self.path,))


def put(folder, layout, content):
    """Write a PyTorch file where a layout has one; return what is read."""
    if layout == "shards":
        index = {"weight_map": {"weight": "pytorch_model-00001-of-00001.bin"}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        torch.save(content, folder / "pytorch_model-00001-of-00001.bin")
    elif layout == "adapter":
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        torch.save(content, folder / "adapter_model.bin")
    elif layout == "folds":
        (folder / "fold_0").mkdir()
        torch.save(content, folder / "fold_0" / "checkpoint_final.pth")
    else:
        torch.save(content, folder / layout)
        return folder / layout
    return folder


@pytest.mark.parametrize("layout", ["a.pt", "a.ckpt", "a.pth", "pytorch_model.bin", "shards", "adapter", "folds"])
def test_pickled_objects_are_named_and_not_made(layout, tmp_path):
    folder, trace = tmp_path / "model", tmp_path / "trace"
    folder.mkdir()
    path = put(folder, layout, {"state_dict": make().state_dict(), "extra": Harmful(trace)})
    with pytest.raises(EnfoldError, match=r"pathlib.* pickled object|pickled object \(.*builtins"):
        DeepEnsemble.from_checkpoints(path, make())
    assert not trace.exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "numpy.load", "torch.load", "subprocess.Popen"])
def test_functions_are_not_called(name, tmp_path):
    """A file whose pickle calls a function with a string, as torch.save cannot write it."""
    module, _, function = name.rpartition(".")
    pickled = f"\x80\x02c{module}\n{function}\nX".encode() + struct.pack("<I", 4) + b"true\x85R."
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3")
    with pytest.raises(EnfoldError, match=r"a\.pt"):
        read(tmp_path / "a.pt")


def test_compressed_files_are_not_expanded(tmp_path):
    torch.save({"weight": torch.zeros(1 << 21)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "a.pt", "w", 8) as small:
        for each in plain.infolist():
            small.writestr(each.filename, plain.read(each))
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", bytes(5 << 20))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(EnfoldError, match=name):
            read(tmp_path / name)


def claim(path, before, after):
    """Replace a number in the pickle of a file, in which it is the size of a tensor."""
    with zipfile.ZipFile(path) as archive:
        entries = {each.filename: archive.read(each) for each in archive.infolist()}
    old, new = (b"J" + struct.pack("<i", number) for number in (before, after))
    changed = {name: text.replace(old, new) if name.endswith("data.pkl") else text for name, text in entries.items()}
    assert changed != entries
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in changed.items():
            archive.writestr(name, text)


@pytest.mark.parametrize("size", [1 << 18, 1 << 30, (1 << 31) - 1])
def test_tensors_have_the_bytes_that_they_claim(size, tmp_path):
    torch.save({"weight": torch.zeros(70_001)}, tmp_path / "a.pt")
    claim(tmp_path / "a.pt", 70_001, size)
    with pytest.raises(EnfoldError, match=r"a\.pt"):
        DeepEnsemble.from_checkpoints(tmp_path / "a.pt", nn.Linear(size, 1, bias=False, device="meta"))


def test_the_legacy_format_claims_no_more_either(tmp_path):
    torch.save({"weight": torch.zeros(70_001)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "a.pt").read_bytes()
    old, new = (b"J" + struct.pack("<i", number) for number in (70_001, (1 << 31) - 1))
    (tmp_path / "a.pt").write_bytes(content.replace(old, new))
    with pytest.raises(EnfoldError, match=r"a\.pt"):
        read(tmp_path / "a.pt")


def test_expanded_tensors_take_no_memory(tmp_path):
    torch.save({"weight": torch.zeros(1).expand(1 << 40), "bias": torch.zeros(1).expand(1 << 40)}, tmp_path / "a.pt")
    with pytest.raises(EnfoldError, match=r"shape of '(weight|bias)'"):
        read(tmp_path / "a.pt")


def inside_itself():
    content = {"epoch": 1}
    content["model"] = content["state_dict"] = content
    return content


def nested(depth):
    content = {"weight": 3}
    for _ in range(depth):
        content = {"model": content, "state_dict": content}
    return content


@pytest.mark.parametrize("content", [inside_itself(), nested(60), {"model": {}}, {1: 2}, {("a",): torch.zeros(1)}])
def test_strange_dictionaries_are_refused(content, tmp_path):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(EnfoldError, match=r"a\.pt"):
        read(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 40 << 20) + b"{",
        struct.pack("<Q", 10) + b"{}",
        struct.pack("<Q", 50_000) + b"[" * 50_000,
        struct.pack("<Q", 70) + b'{"weight":{"dtype":"F32","shape":[2,4],"data_offsets":[0,1099511627776]}}',
        b"",
    ],
)
def test_headers_of_safetensors_that_are_too_large(content, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(content)
    if content.endswith(b"{"):  # a sparse file
        with (tmp_path / "a.safetensors").open("r+b") as file:
            file.truncate(50 << 20)
    with pytest.raises(EnfoldError, match=r"a\.safetensors"):
        read(tmp_path / "a.safetensors")
    folder = save_pretrained(make(), tmp_path / "net")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(EnfoldError, match=r"model\.safetensors"):
        from_pretrained(folder, make)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": {}}', '{"weight_map": []}', "", "\x00", "{" * 5000])
@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "pytorch_model.bin.index.json", "adapter_config.json"]
)
def test_descriptions_that_are_damaged(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(EnfoldError, match=rf"{name.replace('.', '[.]')}|peft_type"):
        DeepEnsemble.from_checkpoints(tmp_path, make())


def test_descriptions_that_are_too_large(tmp_path):
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(EnfoldError, match="at most"):
        read(tmp_path)


def test_links_that_form_a_circle_end(tmp_path):
    (tmp_path / "pytorch_model_fsdp_0").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(EnfoldError):
        read(tmp_path)


def test_the_pickle_of_a_plain_dictionary_is_refused(tmp_path):
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"weight": [1.0]}))
    with pytest.raises(EnfoldError, match=r"a\.pt"):
        read(tmp_path / "a.pt")

"""Files from anybody: models, teacher logits, recipes and patterns that cost much, or are damaged, are refused."""

import json
import time

import pytest
import torch
from torch import nn

import enfold
from enfold.errors import EnfoldError
from enfold.io.checkpoints import matching_files
from enfold.networks import make
from enfold.run import parse_recipe, read_recipe


def network():
    return nn.Linear(4, 2)


@pytest.fixture(autouse=True)
def _at_once():
    started = time.process_time()
    yield
    assert time.process_time() - started < 2


def rewritten(path, change):
    beside = path.with_suffix(".json")
    manifest = json.loads(beside.read_text())
    change(manifest)
    beside.write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize("number", [10**8, 10**6, 10**30])
def test_a_manifest_of_more_members_than_its_file_holds(tmp_path, number):
    path = enfold.save(enfold.DeepEnsemble(network, 2), tmp_path / "m.safetensors")
    with pytest.raises(EnfoldError, match=r"m\.json"):
        enfold.load(rewritten(path, lambda manifest: manifest.update(num_members=number)), network)


def test_a_manifest_of_a_method_with_huge_options(tmp_path):
    ensemble = enfold.BatchEnsemble(network(), num_members=2)
    path = enfold.save(ensemble, tmp_path / "m.safetensors")
    with pytest.raises(EnfoldError, match=r"m\.json"):
        enfold.load(rewritten(path, lambda manifest: manifest["options"].update(num_members=10**9)), network)


@pytest.mark.parametrize(
    "about",
    [
        {"num_classes": 10**8},
        {"shape": [10**9]},
        {"network": {"name": "mlp", "widths": [20_000, 20_000]}},
        {"network": {"name": "mlp", "widths": [4000] * 40}},
    ],
)
def test_a_manifest_of_a_larger_network_than_its_file_holds(tmp_path, about):
    spec = {"network": {"name": "mlp", "widths": [8]}, "shape": [4], "num_classes": 4}
    path = enfold.save(make(spec["network"], (4,), 4), tmp_path / "m.safetensors", about=spec)
    assert isinstance(enfold.load(path), nn.Module)
    with pytest.raises(EnfoldError, match=r"m\.json"):
        enfold.load(rewritten(path, lambda manifest: manifest["about"].update(about)))


def test_a_manifest_of_endless_depth(tmp_path):
    path = enfold.save(network(), tmp_path / "m.safetensors")
    path.with_suffix(".json").write_text("[" * 100_000)
    with pytest.raises(EnfoldError, match=r"m\.json"):
        enfold.load(path, network)


def header_with(**changes):
    return {"logits": {"dtype": "F32", "shape": [1, 2, 4], "data_offsets": [0, 32], **changes}}


@pytest.mark.parametrize(
    "header",
    [
        header_with(shape=[1 << 32, 1 << 32, 1], data_offsets=[0, 0]),
        header_with(shape=[-1, -2, 4]),
        header_with(data_offsets=[-32, 0]),
        header_with(data_offsets=[0, 1 << 40]),
        {"__metadata__": [1], **header_with()},
        b"[" * 100_000,
        b"",
    ],
)
def test_teacher_logits_with_a_false_header(tmp_path, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "t.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    with pytest.raises(EnfoldError, match=r"t\.safetensors"):
        enfold.CachedTeacher.load(tmp_path / "t.safetensors")


def test_teacher_logits_are_stored_exactly(tmp_path):
    for kind in (torch.float16, torch.float32, torch.float64):
        logits = torch.randn(3, 5000, 4).to(kind)
        enfold.CachedTeacher(logits, "key", {"inputs": "about"}).save(tmp_path / "t.safetensors")
        found = enfold.CachedTeacher.load(tmp_path / "t.safetensors")
        assert torch.equal(found.logits, logits)
        assert (found.key, found.inputs) == ("key", {"inputs": "about"})


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"\x80", b"\x80\x02.", b".", b"\x80\x02K", b"\x80\x02M\x01", b"PK\x03\x04"])
def test_damaged_checkpoints(tmp_path, content, ending):
    path = tmp_path / f"a{ending}"
    path.write_bytes(content)
    with pytest.raises(EnfoldError, match=f"a{ending}"):
        enfold.DeepEnsemble.from_checkpoints([path], network)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 9)
)


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "network: " + "[" * 5000,
        "network: " + "[" * 5000 + "]" * 5000,
        "network: " + "{a: " * 5000,
        "- " * 5000,
        "&a [*a]",
        "network: &a {name: mlp, x: *a}",
        "name: " + "x" * 2_000_000,
        "members: 4611686018427387904",
        "members: yes",
        "train: {epochs: yes}",
        "train: {lr: true}",
        "train: {lr: .inf}",
        "train: {lr: [.nan, 1]}",
        "train: {batch_size: 2.0}",
        "steps: [{method: kd, train: {epochs: yes}}]",
        "steps: [{method: kd, temperature: .inf}]",
    ],
    ids=range(17),
)
def test_expensive_recipes_are_refused(text):
    with pytest.raises(EnfoldError):
        parse_recipe(text)


def test_recipes_may_use_references():
    recipe = parse_recipe("train: &plan {epochs: 2}\nsteps: [{method: kd, train: *plan}]\n")
    assert recipe.steps[0].train == {"epochs": 2}


@pytest.mark.parametrize("pattern", ["/**/*.pt", "/*/*/*.pt", "../**/*.pt", "../../*/x.pt", "/home/**/a.safetensors"])
def test_recipes_do_not_search_the_file_system(tmp_path, pattern):
    (tmp_path / "r.yaml").write_text(f"checkpoints: '{pattern}'\n")
    with pytest.raises(EnfoldError, match="checkpoint pattern"):
        read_recipe(tmp_path / "r.yaml")


def test_patterns_find_files_and_stop_in_large_folders(tmp_path, monkeypatch):
    for name in ("a/x.pt", "a/b/y.pt", "z.pt", ".hidden/h.pt", "[1].pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)

    def found(pattern):
        return [path.as_posix() for path in matching_files(pattern)]

    assert found("*.pt") == ["[1].pt", "z.pt"]
    assert found("[1].pt") == ["[1].pt"]
    assert found("*/x.pt") == ["a/x.pt"]
    assert found("**/*.pt") == ["[1].pt", "a/b/y.pt", "a/x.pt", "z.pt"]
    assert found(f"{tmp_path}/a/*.pt") == [f"{tmp_path}/a/x.pt"]
    assert found("a/../z*.pt") == ["a/../z.pt"]
    monkeypatch.setattr("enfold.io.patterns.MOST", 3)
    with pytest.raises(EnfoldError, match="checkpoint pattern"):
        matching_files("**/*.pt")

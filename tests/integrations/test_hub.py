"""Folders with a model card: written, read back, refused by name, and loaded without enfold."""

import json
import os
import pickle
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

import enfold
from enfold import EnfoldError
from enfold.errors import MissingExtra
from enfold.integrations.hub import from_pretrained, push_to_hub, save_pretrained
from enfold.io.files import sha256
from enfold.tasks import Classification, Regression
from fresh import run_python
from integrations.stub_hub import HEAD, Handler, Hub

FILES = ["README.md", "config.json", "model.safetensors"]


class Net(nn.Module):
    """The user's own class."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)))


class Other(Net):
    """Tensors of the same names and shapes, and another function."""

    def forward(self, x):
        return self.head(torch.relu(self.hidden(x)))


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def ensemble():
    return enfold.DeepEnsemble(Net, 3).eval()


def calibrated(model, task=None, factor=1.7):
    return enfold.Calibrated(model, task or Classification(), factor).eval()


def configured(folder, **changes):
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def card(folder):
    metadata, body = (folder / "README.md").read_text().removeprefix("---\n").split("---\n", 1)
    return yaml.safe_load(metadata), body


@pytest.mark.parametrize(
    "make",
    [
        lambda: Net().eval(),
        ensemble,
        lambda: enfold.BatchEnsemble(Net(), num_members=3).eval(),
        lambda: enfold.MCDropout(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), num_members=2),
        lambda: enfold.merge.average(ensemble()),
        lambda: calibrated(Net()),
        lambda: calibrated(ensemble()),
        lambda: calibrated(Net(), Regression(), 2.5),
    ],
)
def test_models_are_loaded_as_they_were_saved(make, tmp_path):
    model = make().eval()
    folder = save_pretrained(model, tmp_path / "model")
    assert sorted(each.name for each in folder.iterdir()) == FILES
    network = model.module if isinstance(model, enfold.MCDropout) else Net()
    for found in (from_pretrained(folder, network), enfold.load(str(folder), network)):
        assert type(found) is type(model)
        assert not found.training
        for name, tensor in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor)
        if not isinstance(model, enfold.MCDropout):
            torch.testing.assert_close(found(X), model(X), rtol=0, atol=0)
    metadata, body = card(folder)
    assert metadata["library_name"] == "enfold"
    assert ("ensemble" in metadata["tags"]) == ("members of the class" in body)


def test_members_of_different_networks_are_given_as_a_list(tmp_path):
    networks = [Net(), nn.Linear(4, 3)]
    model = enfold.MixedEnsemble(networks).eval()
    folder = save_pretrained(model, tmp_path / "mixed")
    torch.testing.assert_close(from_pretrained(folder, networks)(X), model(X))
    with pytest.raises(EnfoldError, match="network must be a list"):
        from_pretrained(folder, Net)


def test_a_calibrated_model_predicts_as_before(tmp_path):
    model = calibrated(ensemble(), Classification())
    found = from_pretrained(save_pretrained(model, tmp_path / "c"), Net)
    torch.testing.assert_close(found.predict(X).mean, model.predict(X).mean)
    assert float(found.temperature) == pytest.approx(1.7)
    with pytest.raises(EnfoldError, match="calibrated once"):
        save_pretrained(calibrated(model), tmp_path / "d")


def test_reference_networks_need_no_network(tmp_path):
    about = {"network": {"name": "mlp", "widths": [5]}, "shape": [4], "num_classes": 3}
    model = calibrated(enfold.networks.make(about["network"], (4,), 3))
    folder = save_pretrained(model, tmp_path / "m", about=about)
    torch.testing.assert_close(from_pretrained(folder)(X), model(X))
    with pytest.raises(EnfoldError, match="network must be given"):
        from_pretrained(save_pretrained(Net(), tmp_path / "own"))


WITHOUT = """
import sys
import torch
from safetensors.torch import load_file

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)))

net = Net()
net.load_state_dict(load_file(sys.argv[1] + "/model.safetensors"))
assert not any(name.partition(".")[0] == "enfold" for name in sys.modules)
print(net(torch.ones(1, 4)).tolist())
"""


def test_a_single_network_is_loaded_without_enfold(tmp_path):
    network = Net()
    folder = save_pretrained(network, tmp_path / "net")
    done = run_python(WITHOUT, folder, check=True)
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), network(torch.ones(1, 4)))


def test_the_card_has_metadata_that_the_hub_reads(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    row = enfold.evaluate(ensemble(), (X, torch.tensor([0, 1, 2, 0, 1])), name="e")
    folder = save_pretrained(
        ensemble(),
        tmp_path / "net",
        metrics=row,
        dataset="clouds | <b>",
        pipeline_tag="tabular-classification",
        license="mit",
        tags=["a: b", "x"],
    )
    found = hub.ModelCard.load(folder / "README.md")
    assert (found.data.library_name, found.data.license) == ("enfold", "mit")
    assert found.data.tags == ["pytorch", "enfold", "ensemble", "DeepEnsemble", "a: b", "x"]
    assert {each.metric_type: each.metric_value for each in found.data.eval_results} == row.scores
    assert all(each.dataset_name == "clouds | <b>" for each in found.data.eval_results)
    assert "<b>" not in found.text
    with pytest.raises(EnfoldError, match="metrics"):
        save_pretrained(Net(), tmp_path / "n", metrics={"accuracy": "high"})
    assert not (tmp_path / "n").exists()


def test_files_of_the_user_are_kept(tmp_path):
    folder = save_pretrained(Net(), tmp_path / "net")
    (folder / "README.md").write_text("mine")
    (folder / "notes.txt").write_text("mine too")
    network = Net().eval()
    save_pretrained(network, folder)
    assert (folder / "README.md").read_text() == "mine"
    assert (folder / "notes.txt").read_text() == "mine too"
    torch.testing.assert_close(from_pretrained(folder, Net)(X), network(X))
    save_pretrained(network, folder, card="# Ours")
    assert (folder / "README.md").read_text().endswith("---\n\n# Ours\n")


@pytest.mark.parametrize("there", [{"config.json": '{"model_type": "bert"}'}, {"model.safetensors": "x"}])
def test_models_of_other_libraries_are_not_replaced(there, tmp_path):
    for name, content in there.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(EnfoldError, match="folder must be empty or have a model of enfold"):
        save_pretrained(Net(), tmp_path)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == there


def test_a_failed_save_changes_nothing(tmp_path):
    network = Net().eval()
    folder = save_pretrained(network, tmp_path / "net")
    with pytest.raises(EnfoldError, match="about"):
        save_pretrained(Net(), folder, about={"set": {1}}, card="other")
    assert sorted(each.name for each in folder.iterdir()) == FILES
    torch.testing.assert_close(from_pretrained(folder, Net)(X), network(X))
    assert "other" not in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Other, "class Net .*got Other"),
        (lambda: nn.Linear(4, 3), "tensors of"),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), "tensors of"),
    ],
)
@pytest.mark.parametrize("make", [Net, ensemble, lambda: calibrated(Net())])
def test_another_class_is_refused(make, network, message, tmp_path):
    folder = save_pretrained(make(), tmp_path / "net")
    with pytest.raises(EnfoldError, match=message):
        from_pretrained(folder, network)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name, tmp_path):
    folder = save_pretrained(Net(), tmp_path / "net")
    (folder / name).unlink()
    with pytest.raises(EnfoldError, match=name):
        from_pretrained(folder, Net)


@pytest.mark.parametrize("library", ["transformers", "timm", None])
def test_a_folder_of_another_library_is_refused(library, tmp_path):
    folder = save_pretrained(Net(), tmp_path / "net")
    configured(folder, library_name=library, model_type="bert")
    with pytest.raises(EnfoldError, match=rf"config\.json' is of {library or 'bert'}"):
        from_pretrained(folder, Net)


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (type(self.path).touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.PKL", "model.safetensors"])
def test_pickles_in_a_folder_are_refused(name, tmp_path):
    folder, trace = save_pretrained(Net(), tmp_path / "net"), tmp_path / "trace"
    (folder / name).write_bytes(pickle.dumps(Harmful(trace)))
    configured(folder, sha256=sha256(folder / "model.safetensors"))
    with pytest.raises(EnfoldError, match=name):
        from_pretrained(folder, Net)
    assert not trace.exists()


def test_code_in_a_folder_is_not_run(tmp_path, monkeypatch):
    folder = save_pretrained(Net(), tmp_path / "net")
    for name in ("modeling.py", "conftest.py", "Net.py", "__init__.py"):
        (folder / name).write_text("raise SystemExit('ran')")
    configured(folder, auto_map={"AutoModel": "modeling.Net"}, defined_in="modeling")
    monkeypatch.chdir(folder)
    assert isinstance(from_pretrained(folder, Net), Net)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 1},
        {"format": None},
        {"kind": "pickle"},
        {"kind": ["network"]},
        {"class": None},
        {"sha256": "0" * 64},
        {"about": []},
        {"kind": "calibrated"},
        {"kind": "calibrated", "model": {"kind": "network", "class": "Net"}, "task": {"name": "os.system"}},
        {"kind": "calibrated", "model": {"kind": "network", "class": "Net"}, "task": {"name": [], "options": {}}},
        {"kind": "calibrated", "model": {"kind": "calibrated", "class": "Net", "model": {}, "task": {}}, "task": {}},
        {"kind": "ensemble"},
        {"kind": "ensemble", "method": "os.system", "num_members": 2, "seeds": [], "options": {}},
        {"kind": "ensemble", "method": "DeepEnsemble", "num_members": 10**9, "seeds": [], "options": {}},
        {"kind": "ensemble", "method": "DeepEnsemble", "num_members": True, "seeds": [], "options": {}},
        {"kind": "ensemble", "method": "DeepEnsemble", "num_members": -2, "seeds": [], "options": {}},
        {"kind": "ensemble", "method": "BatchEnsemble", "num_members": 2, "seeds": [], "options": {"rank": 10**9}},
    ],
)
def test_false_configurations_are_refused(changes, tmp_path):
    folder = save_pretrained(Net(), tmp_path / "net")
    configured(folder, **changes)
    with pytest.raises(EnfoldError):
        from_pretrained(folder, Net)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", "3", '{"a": ' * 5000, "\x00", " " * (17 << 20)])
def test_damaged_configurations_are_refused(text, tmp_path):
    folder = save_pretrained(Net(), tmp_path / "net")
    (folder / "config.json").write_text(text)
    with pytest.raises(EnfoldError, match=r"config\.json"):
        from_pretrained(folder, Net)
    with pytest.raises(EnfoldError, match=r"config\.json"):
        save_pretrained(Net(), folder)


def test_tensors_of_other_names_are_refused(tmp_path):
    folder = save_pretrained(Net(), tmp_path / "net")
    state = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in state.items()}, folder / "model.safetensors")
    configured(folder, sha256=sha256(folder / "model.safetensors"))
    with pytest.raises(EnfoldError, match="network must have the tensors"):
        from_pretrained(folder, Net)


@pytest.mark.parametrize("source", ["../elsewhere", "/nowhere/at/all", "./net", "~/net", "net", "a/b/c", "a/..", ""])
def test_paths_are_not_taken_for_repositories(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not source:
        source = "missing"
    with pytest.raises(EnfoldError, match="source"):
        from_pretrained(source, Net)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"pip install 'enfold\[hub\]'"):
        push_to_hub(Net(), "me/net")
    with pytest.raises(MissingExtra, match="hub"):
        from_pretrained("me/net", Net)
    assert isinstance(from_pretrained(save_pretrained(Net(), tmp_path / "net"), Net), Net)


CALLS = """
import json, sys, torch
from torch import nn
from enfold import EnfoldError
from enfold.integrations.hub import from_pretrained, push_to_hub

torch.manual_seed(0)
net = nn.Linear(4, 3)
commit = push_to_hub(net, "me/net", metrics={"accuracy": 0.5})
found = from_pretrained("me/net", lambda: nn.Linear(4, 3))
push_to_hub(nn.Linear(4, 3), "me/net")
errors = []
for call in (
    lambda: from_pretrained("me/other", net),
    lambda: from_pretrained("me/hostile", net),
    lambda: push_to_hub(net, "me/net", token=False),
):
    try:
        call()
    except EnfoldError as error:
        errors.append(str(error))
print(json.dumps([commit, torch.equal(found.weight, net.weight), errors]))
"""


@pytest.mark.timeout(300)
def test_models_are_uploaded_and_downloaded(tmp_path):
    pytest.importorskip("huggingface_hub")
    hub = Hub()
    hub.repositories["me/hostile"] = {"config.json": b"{}", "model.safetensors": b"", "pytorch_model.bin": b"x"}
    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.hub = hub
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{web.server_port}"
    environment = os.environ | {
        "HF_ENDPOINT": address,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_stub",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(Path(enfold.__file__).parents[1]),
    }
    try:
        done = run_python(CALLS, env=environment)
    finally:
        web.shutdown()
        web.server_close()
        thread.join()
    assert done.returncode == 0, done.stderr
    commit, is_equal, errors = json.loads(done.stdout.splitlines()[-1])
    assert commit == f"{address}/me/net/commit/{HEAD}"
    assert is_equal
    files = hub.repositories["me/net"]
    assert sorted(files) == FILES
    assert b"accuracy" in files["README.md"]  # the second upload kept the card
    assert len(errors) == 3
    assert "me/other" in errors[0]
    assert "config.json" in errors[1]
    assert "me/net" in errors[2]
    assert not any(line.endswith(".bin") for line in hub.requests)

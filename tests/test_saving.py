"""The store: what was saved comes back, what was tampered with does not, and nothing is ever run."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from clouds import three_clouds
from enfold import DeepEnsemble, EnfoldError, TrainConfig, fit, load, save
from enfold.io.files import sha256
from enfold.io.usercode import resolve
from enfold.networks import MLP, make
from enfold.saving import FORMAT, versions
from zoo import ZOO, population, vectors

ABOUT = {"network": {"name": "mlp", "widths": [5]}, "shape": [6], "num_classes": 3}


@pytest.fixture
def members():
    return DeepEnsemble(lambda: MLP(6, (5,), 3), 3, seed=4).eval()


@pytest.fixture
def stored(members, tmp_path):
    return save(members, tmp_path / "members.safetensors", about=ABOUT)


def rewrite(path, **changes):
    """The manifest with other values; None leaves a field out."""
    beside = path.with_suffix(".json")
    manifest = {**json.loads(beside.read_text()), **changes}
    beside.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))


def test_members_with_an_lstm_need_one_network_after_they_predicted(tmp_path):
    """`nn.LSTM` lists its weights in an attribute, which differs in class after a call."""

    class Tagger(nn.LSTM):
        def forward(self, inputs):
            return super().forward(inputs)[0]

    def make():
        return Tagger(3, 4, batch_first=True)

    ensemble = DeepEnsemble(make, 2).eval()
    expected = ensemble(torch.ones(2, 5, 3))
    path = save(ensemble, tmp_path / "tagger.safetensors")
    torch.testing.assert_close(load(path, make)(torch.ones(2, 5, 3)), expected)


def test_the_manifest_describes_the_values(members, stored):
    manifest = json.loads(stored.with_suffix(".json").read_text())
    assert manifest == {
        "format": FORMAT,
        "kind": "ensemble",
        "method": "DeepEnsemble",
        "class": "MLP",
        "num_members": 3,
        "seeds": list(members.seeds),
        "options": members.options(),
        "fingerprint": None,
        "task": None,
        "separate": False,
        "versions": versions(),
        "sha256": sha256(stored),
        "about": ABOUT,
    }
    assert set(versions()) == {"python", "enfold", "torch", "numpy", "safetensors"}
    assert sorted(path.name for path in stored.parent.iterdir()) == ["members.json", "members.safetensors"]


def test_a_reference_network_is_rebuilt_from_the_manifest(members, stored, tmp_path):
    state = torch.get_rng_state()
    found = load(stored)
    assert torch.equal(torch.get_rng_state(), state)
    assert (found.num_members, found.seeds, found.training) == (3, members.seeds, False)
    torch.testing.assert_close(found(vectors(4)), members(vectors(4)), rtol=0, atol=0)
    one = save(members.member(2), tmp_path / "one.safetensors", about=ABOUT)
    torch.testing.assert_close(load(one)(vectors(4)), members(vectors(4))[2])


@pytest.mark.parametrize("spec", ["mlp", {"name": "mlp", "widths": [4]}, "wrn-10-1"])
def test_every_spec_of_a_reference_network_is_enough(spec, tmp_path):
    shape = (1, 8, 8)
    network = make(spec, shape, 3).eval()
    path = save(network, tmp_path / "one.safetensors", about={"network": spec, "shape": shape, "num_classes": 3})
    inputs = torch.randn(2, *shape)
    torch.testing.assert_close(load(path)(inputs), network(inputs))


def test_a_distilled_network_is_loaded_without_enfold(tmp_path):
    for name in ("residual", "tied"):
        network = population(name, 1)[0].eval()
        path = save(network, tmp_path / f"{name}.safetensors")
        other = ZOO[name].make().eval()
        other.load_state_dict(load_file(path))
        torch.testing.assert_close(other(ZOO[name].inputs(3)), network(ZOO[name].inputs(3)), rtol=0, atol=0)
    assert set(load_file(tmp_path / "tied.safetensors")) == set(network.state_dict())


def test_a_file_with_one_name_of_a_tied_tensor_is_loaded(tmp_path):
    network = population("tied", 1)[0].eval()
    path = save(network, tmp_path / "one.safetensors")
    save_file({name: tensor for name, tensor in load_file(path).items() if name != "0.2.weight"}, path)
    rewrite(path, sha256=sha256(path))
    found = load(path, ZOO["tied"].make)
    assert found[0][0].weight is found[0][2].weight
    torch.testing.assert_close(found(vectors(3)), network(vectors(3)), rtol=0, atol=0)


class Counting(nn.Module):
    """A network with a state of its own beside its tensors."""

    def __init__(self, extra: object = 3) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(4, 3), extra

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def test_extra_state_is_saved_as_a_tensor_and_refused_by_name_otherwise(tmp_path):
    path = save(Counting(torch.tensor(5)), tmp_path / "one.safetensors")
    assert int(load(path, lambda: Counting(torch.tensor(0))).extra) == 5
    with pytest.raises(EnfoldError, match="_extra_state"):
        save(Counting({"calls": 3}), tmp_path / "two.safetensors")
    with pytest.raises(EnfoldError, match="_extra_state"):
        load(path, lambda: Counting({"calls": 3}))
    assert not (tmp_path / "two.safetensors").exists()


def test_a_network_with_extra_state_trains_and_is_loaded_from_checkpoints(tmp_path):
    data, plan = three_clouds(20, 20, 20), TrainConfig(epochs=2, batch_size=8)
    network = Counting({"calls": 3})
    fit(network, data, config=plan, quiet=True)
    assert network.extra == {"calls": 3}
    with pytest.raises(EnfoldError, match="_extra_state"):
        fit(network, data, config=plan, checkpoint=tmp_path / "state.safetensors", quiet=True)
    torch.save(network.state_dict(), tmp_path / "one.pt")
    members = DeepEnsemble.from_checkpoints([tmp_path / "one.pt"], Counting)
    assert members.member(0).extra == {"calls": 3}
    torch.testing.assert_close(members(torch.ones(2, 4))[0], network(torch.ones(2, 4)))


def test_precision_is_preserved(members, tmp_path):
    for dtype in (torch.float64, torch.bfloat16):
        members.to(dtype)
        found = load(save(members, tmp_path / "m.safetensors", about=ABOUT))
        for key, tensor in members.state_dict().items():
            assert found.state_dict()[key].dtype == dtype
            assert torch.equal(found.state_dict()[key], tensor)


def test_a_network_in_another_memory_layout_is_saved(tmp_path):
    network = population("tied", 1)[0]
    weight = network[0][0].weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    found = load(save(network, tmp_path / "one.safetensors"), ZOO["tied"].make)
    assert found[0][0].weight is found[0][2].weight
    torch.testing.assert_close(found(vectors(3)), network(vectors(3)))


def test_the_network_given_for_loading_is_not_modified(members, stored):
    network = MLP(6, (5,), 3)
    before = network.head.weight.detach().clone()
    found = load(stored, network)
    assert torch.equal(network.head.weight, before)
    assert torch.equal(found.member(0).head.weight, members.member(0).head.weight)


def test_saving_again_replaces_both_files(members, stored):
    with torch.no_grad():
        members.tree.get_parameter("head.bias").fill_(7.0)
    save(members, stored, about=ABOUT)
    assert (load(stored).expand()["head.bias"] == 7).all()


def test_nothing_is_written_if_it_cannot_be_written_completely(members, tmp_path):
    with pytest.raises(EnfoldError, match=r"path must end in \.safetensors, got '.*model\.pt'"):
        save(members, tmp_path / "model.pt")
    for about in ({"data": torch.zeros(2)}, {"self": set()}):
        with pytest.raises(EnfoldError, match="about must contain JSON values"):
            save(members, tmp_path / "model.safetensors", about=about)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["members.json", "members.safetensors"])
def test_both_files_are_needed(missing, stored):
    (stored.parent / missing).unlink()
    with pytest.raises(EnfoldError, match=rf"but '.*{missing}' is missing"):
        load(stored)


def test_values_that_were_changed_are_refused(stored):
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    with pytest.raises(EnfoldError, match=r"must be as it was saved, but its checksum differs"):
        load(stored)
    stored.write_bytes(content[:-50])
    with pytest.raises(EnfoldError, match="checksum differs"):
        load(stored)
    rewrite(stored, sha256=sha256(stored))
    with pytest.raises(EnfoldError, match=r"must be a safetensors file, but it cannot be read"):
        load(stored)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '{"kind": "ensemble"}',
        "\ufffe not json",
        f'{{"format": {FORMAT}}}',
        '{"format": [1]',
    ],
)
def test_invalid_manifests_are_refused(text, stored):
    stored.with_suffix(".json").write_text(text, encoding="utf-8")
    with pytest.raises(
        EnfoldError, match=r"must be a manifest written by enfold, but it cannot be read .*save it again"
    ):
        load(stored)


def test_binary_manifests_are_refused(stored):
    stored.with_suffix(".json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(EnfoldError, match="must be a manifest written by enfold"):
        load(stored)


@pytest.mark.parametrize("field", ["kind", "class", "sha256", "about", "num_members", "seeds"])
@pytest.mark.parametrize("value", [None, 2.5])
def test_every_field_is_needed(field, value, stored):
    rewrite(stored, **{field: value})
    with pytest.raises(EnfoldError, match=f"'{field}' is {value}"):
        load(stored)


def test_another_format_is_refused(stored):
    rewrite(stored, format=FORMAT + 1)
    with pytest.raises(EnfoldError, match=rf"format {FORMAT}, got format {FORMAT + 1}"):
        load(stored)


@pytest.mark.parametrize(
    ("network", "name"),
    [
        (lambda: MLP(6, (4,), 3), r"tree\.head\.weight|tree\.hidden"),
        (lambda: MLP(6, (5, 5), 3), r"tree\.hidden\.1"),
        (lambda: MLP(6, (), 3), r"tree\.hidden\.0|tree\.head"),
        (lambda: nn.Linear(6, 3), "tree"),
    ],
)
def test_tensors_of_another_network_are_refused(network, name, stored):
    with pytest.raises(EnfoldError, match=rf"network must have .*but '({name}).*pass the MLP"):
        load(stored, network)


def test_a_smaller_network_does_not_load_part_of_a_larger_one(tmp_path):
    path = save(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), tmp_path / "two.safetensors")
    with pytest.raises(EnfoldError, match=r"network must have .*but '1"):
        load(path, nn.Sequential(nn.Linear(3, 3)))


def test_another_number_of_members_is_refused(stored):
    for number in (2, 4):
        rewrite(stored, num_members=number)
        with pytest.raises(EnfoldError, match=rf"num_members .*got 3 for {number} networks"):
            load(stored)
    rewrite(stored, num_members=0)
    with pytest.raises(EnfoldError, match="'num_members' is 0"):
        load(stored)


@pytest.mark.parametrize("form", ["{}", '{{"name": "{}"}}'])
def test_code_that_a_manifest_names_is_never_imported(form, stored, tmp_path, monkeypatch):
    trace = tmp_path / "trace"
    code = tmp_path / "harmful.py"
    code.write_text(f"open({str(trace)!r}, 'w')\ndef make(shape, num_classes): ...\n")
    monkeypatch.chdir(tmp_path)
    for name in ("harmful:make", f"{code}:make"):
        spec = name if form == "{}" else {"name": name}
        rewrite(stored, about={**ABOUT, "network": spec})
        with pytest.raises(EnfoldError, match=r"network must be given for a MLP.*pass the network"):
            load(stored)
    assert not trace.exists()
    assert "harmful" not in sys.modules
    assert load(stored, lambda: MLP(6, (5,), 3)).num_members == 3


@pytest.mark.parametrize(
    "about", [{}, {"network": None}, {"network": 3}, {"network": "mlp"}, {"network": {"width": 2}}]
)
def test_without_a_spec_the_network_must_be_given(about, stored):
    rewrite(stored, about=about)
    with pytest.raises(EnfoldError, match="network must be given for a MLP"):
        load(stored)


def test_an_unknown_reference_network_is_refused(stored):
    rewrite(stored, about={**ABOUT, "network": "mlpp"})
    with pytest.raises(EnfoldError, match="there is no network 'mlpp'"):
        load(stored)


def test_a_class_that_is_not_imported_is_named_with_its_file_which_is_not_run(tmp_path):
    file = tmp_path / "own_ensembles.py"
    file.write_text("from enfold import DeepEnsemble\nclass OwnHere(DeepEnsemble): pass\n")
    kind = resolve(f"{file}:OwnHere")
    save(kind([nn.Linear(4, 3)] * 2), tmp_path / "own.safetensors")
    manifest = json.loads((tmp_path / "own.json").read_text())
    assert manifest["defined_in"] == "own_ensembles.py", "without the folder, which is nobody else's business"
    assert type(load(tmp_path / "own.safetensors", nn.Linear(4, 3))) is kind
    manifest["method"] = "NotImportedHere"
    (tmp_path / "own.json").write_text(json.dumps(manifest))
    with pytest.raises(EnfoldError, match=r"'NotImportedHere', which was defined in own_ensembles\.py"):
        load(tmp_path / "own.safetensors", nn.Linear(4, 3))

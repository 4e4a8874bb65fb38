"""Checkpoints that users have: read if they hold tensors, refused in a sentence if not, and never run."""

import pickle

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from enfold import DeepEnsemble, EnfoldError
from enfold.io.checkpoints import WRAPPERS, matching_files
from enfold.merge.common.inputs import require_members
from zoo import ZOO, population, vectors


def make():
    return ZOO["mlp"].make()


@pytest.fixture
def networks():
    return population("mlp")


def assert_loaded(members, networks):
    assert members.num_members == len(networks)
    for member, network in zip(members, networks, strict=True):
        for key, tensor in network.state_dict().items():
            assert torch.equal(member.state_dict()[key], tensor)


def wrapped(state):
    return {"epoch": 3, "best": 0.5, "optimizer": {"lr": 0.1}, "state_dict": state}


def prefixed(state, prefix):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    "content",
    [
        lambda state: state,
        wrapped,
        *[lambda state, key=key: {key: state} for key in WRAPPERS],
        lambda state: {"model": {"state_dict": state}, "args": None},
        lambda state: prefixed(state, "module."),
        lambda state: prefixed(state, "_orig_mod."),
        lambda state: wrapped(prefixed(state, "module._orig_mod.")),
        lambda state: wrapped(prefixed(state, "model.")),
    ],
)
def test_state_dicts_are_found_in_common_checkpoints(content, networks, tmp_path):
    for index, network in enumerate(networks):
        torch.save(content(network.state_dict()), tmp_path / f"{index}.pt")
    assert_loaded(DeepEnsemble.from_checkpoints(str(tmp_path / "*.pt"), make), networks)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_safetensors_are_read(prefix, networks, tmp_path):
    paths = []
    for index, network in enumerate(networks):
        path = tmp_path / f"run{index}" / "model.safetensors"
        path.parent.mkdir()
        save_file(prefixed(network.state_dict(), prefix), path)
        paths.append(path)
    assert_loaded(DeepEnsemble.from_checkpoints(tmp_path / "*/model.safetensors", make), networks)
    assert_loaded(DeepEnsemble.from_checkpoints(paths[::-1], networks[0]), networks[::-1])


@pytest.mark.parametrize("name", ["tied", "listed_twice"])
def test_a_file_with_tied_tensors_once_is_complete(name, tmp_path):
    networks = population(name)
    for index, network in enumerate(networks):
        save_model(network, str(tmp_path / f"{index}.safetensors"))
    members = DeepEnsemble.from_checkpoints(tmp_path / "*.safetensors", ZOO[name].make)
    torch.testing.assert_close(members.eval()(vectors(4)), torch.stack([net.eval()(vectors(4)) for net in networks]))


def test_a_file_without_numbers_is_refused(tmp_path):
    network = nn.Linear(2, 2)
    with torch.no_grad():
        network.weight[0, 0] = torch.nan
    torch.save(network.state_dict(), tmp_path / "one.pt")
    members = DeepEnsemble.from_checkpoints([tmp_path / "one.pt"] * 2, nn.Linear(2, 2))
    with pytest.raises(EnfoldError, match="'weight' of member 0"):
        require_members(members, "the average")


def test_tied_tensors_that_differ_in_the_file_are_refused(tmp_path):
    network = population("tied", 1)[0]
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state["0.2.weight"] += 1
    save_file(state, tmp_path / "one.safetensors")
    with pytest.raises(EnfoldError, match=r"'0\.0\.weight' and '0\.2\.weight' are one tensor in the network"):
        DeepEnsemble.from_checkpoints(tmp_path / "one.safetensors", network)


def test_a_single_name_is_not_a_prefix(tmp_path):
    class Lightning(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make()

        def forward(self, x):
            return self.model(x)

    network = Lightning()
    for name, state in {
        "own": network.state_dict(),
        "parallel": prefixed(network.state_dict(), "module."),
        "double": prefixed(network.state_dict(), "model."),
    }.items():
        torch.save(state, tmp_path / f"{name}.pt")
    assert_loaded(DeepEnsemble.from_checkpoints(tmp_path / "*.pt", Lightning), [network] * 3)


class Harmful:
    """Unpickling it would call `touch`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (type(self.path).touch, (self.path,))


def test_a_pickled_object_is_never_loaded(tmp_path, networks):
    trace = tmp_path / "trace"
    torch.save(networks[0], tmp_path / "network.pt")
    torch.save({"state_dict": networks[0].state_dict(), "extra": Harmful(trace)}, tmp_path / "harmful.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Harmful(trace)))
    for name in ("network.pt", "harmful.pt", "plain.pt"):
        with pytest.raises(
            EnfoldError, match=rf"{name}' is damaged or contains a pickled object.*save network\.state_dict"
        ):
            DeepEnsemble.from_checkpoints(tmp_path / name, make)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: {**state, "3.weight": torch.zeros(2)},
            r"it has the unknown '3\.weight' \(0 missing, 1 unknown\)",
        ),
        (lambda state: {k: v for k, v in state.items() if k != "2.bias"}, r"it lacks '2\.bias' \(1 missing"),
        (lambda state: {**state, "2.bias": torch.zeros(4)}, r"shape of '2\.bias' is \(4,\) instead of \(3,\)"),
        (lambda state: {}, "it lacks '0.bias'"),
        (lambda state: prefixed(state, "encoder."), r"it lacks .*\(4 missing, 4 unknown\)"),
    ],
)
def test_a_checkpoint_of_another_network_is_refused(change, message, networks, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(change(networks[0].state_dict()), path)
    with pytest.raises(EnfoldError, match=f"must fit the network Sequential, but .*{message}"):
        DeepEnsemble.from_checkpoints(path, make)


@pytest.mark.parametrize("content", [3, [torch.zeros(2)], {"loss": 0.1}, {"state_dict": 3}, {"model": {"lr": 1.0}}])
def test_a_file_without_a_state_dict_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(EnfoldError, match="state dict"):
        DeepEnsemble.from_checkpoints(tmp_path / "other.pt", make)


def test_damaged_files_are_refused(networks, tmp_path):
    save_file(networks[0].state_dict(), tmp_path / "a.safetensors")
    torch.save(networks[0].state_dict(), tmp_path / "b.pt")
    for name in ("a.safetensors", "b.pt"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(EnfoldError, match=f"{name}' must be a .* but it cannot be read"):
            DeepEnsemble.from_checkpoints(path, make)
    for name, content in {"empty.pt": b"", "text.pt": b"hello", "text.safetensors": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(EnfoldError, match=name):
            DeepEnsemble.from_checkpoints(tmp_path / name, make)


def test_files_are_found_by_pattern_list_or_name(tmp_path):
    for name in ("b.pt", "a.pt", "c[1].pt"):
        (tmp_path / name).touch()
    (tmp_path / "d.pt").mkdir()
    assert matching_files(tmp_path / "?.pt") == [tmp_path / "a.pt", tmp_path / "b.pt"]
    assert matching_files(str(tmp_path / "c[1].pt")) == [tmp_path / "c[1].pt"]
    assert matching_files([tmp_path / "b.pt", str(tmp_path / "a.pt")]) == [tmp_path / "b.pt", tmp_path / "a.pt"]
    mixed = [tmp_path / "c[1].pt", str(tmp_path / "[ab].pt")]
    assert matching_files(mixed) == [tmp_path / "c[1].pt", tmp_path / "a.pt", tmp_path / "b.pt"]
    for files, message in {
        str(tmp_path / "*.ckpt"): "at least one",
        (tmp_path / "a.pt", tmp_path / "e.pt"): r"e\.pt",
        (): "empty list",
    }.items():
        with pytest.raises(EnfoldError, match=message):
            matching_files(files)


def test_a_factory_for_loading_must_make_networks(networks, tmp_path):
    save_file(networks[0].state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(EnfoldError, match=r"must return an nn.Module, got NoneType"):
        DeepEnsemble.from_checkpoints(tmp_path / "a.safetensors", lambda: None)

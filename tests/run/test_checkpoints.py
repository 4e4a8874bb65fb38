"""Runs that start from checkpoints of members."""

import json
from pathlib import Path

import pytest
import torch

import enfold as library
from enfold.run import RunDirectory


def test_a_run_can_start_from_checkpoints(enfold, finished: Path, small_data: Path, tmp_path) -> None:
    make = library.networks.MLP(16, [16], 4)
    networks = library.load(finished / "members" / "members.safetensors", make).networks()
    for index, network in enumerate(networks):
        torch.save(network.state_dict(), tmp_path / f"mine-{index}.pt")
    given = ["--data", small_data, "--set", "data.val_size=60", "--set", "network={name: mlp, widths: [16]}"]
    brought = ["--checkpoints", str(tmp_path / "mine-*.pt")]
    done = enfold("train", tmp_path / "brought", *given, *brought, "--json")
    assert done.code == 0, done.err
    members = library.load(tmp_path / "brought" / "members" / "members.safetensors", make)
    for one, other in zip(members.networks(), networks, strict=True):
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    for path in tmp_path.glob("mine-*.pt"):
        path.unlink()  # they are in the run now
    for verb in (("merge", tmp_path / "brought", "weight-matching"), ("report", tmp_path / "brought")):
        done = enfold(*verb)
        assert done.code == 0, done.err
    for changes, says in (
        (["--checkpoints", str(tmp_path / "none-*.pt")], "must match at least one"),
        (["--set", f"checkpoints={tmp_path}/one.pt", "--members", "4"], "each of the 4 members, got 1 files"),
        (["--set", f"checkpoints={tmp_path}/one.pt", "--set", "trajectory=true"], "these come from checkpoints"),
    ):
        torch.save(networks[0].state_dict(), tmp_path / "one.pt")
        done = enfold("train", tmp_path / "other", *given, *changes)
        assert (done.code, says in done.err) == (2, True), done.err
        assert not (tmp_path / "other").exists()


@pytest.fixture
def given(finished: Path, small_data: Path, tmp_path: Path) -> list[object]:
    """Three files of members, and a run of them."""
    networks = library.load(finished / "members/members.safetensors", library.networks.MLP(16, [16], 4)).networks()
    for index, network in enumerate(networks):
        torch.save(network.state_dict(), tmp_path / f"mine-{index}.pt")
    return ["--data", small_data, "--set", "data.val_size=60", "--set", "network={name: mlp, widths: [16]}"]


def test_each_checkpoint_is_listed_with_its_scores(enfold, given, tmp_path, small_data):
    """Low scores reveal members that were trained on other inputs."""
    spoilt = torch.load(tmp_path / "mine-1.pt", weights_only=True)
    first = next(iter(spoilt))
    torch.save({**spoilt, first: -spoilt[first]}, tmp_path / "mine-1.pt")  # as if pixels had the other sign
    out = tmp_path / "brought"
    done = enfold("train", out, *given, "--checkpoints", tmp_path / "mine-*.pt", "--json")
    assert done.code == 0, done.err
    files = json.loads(done.out)["files"]
    assert [each["file"] for each in files] == [str(tmp_path / f"mine-{index}.pt") for index in range(3)]
    assert json.loads((out / "members/members.json").read_text())["about"]["files"] == [f["file"] for f in files]
    assert files[1]["accuracy"] < 0.6 < min(files[0]["accuracy"], files[2]["accuracy"])
    data = library.data.load(str(small_data), val_size=60)
    members = library.load(out / "members/members.safetensors", library.networks.MLP(16, [16], 4))
    said = library.predict(members.member(2), data.val)
    assert files[2]["nll"] == pytest.approx(library.metrics.nll(said), rel=1e-5)
    told = f"enfold: member 1 is {tmp_path}/mine-1.pt: validation accuracy {100 * files[1]['accuracy']:.2f} %, NLL "
    assert told in done.err
    assert "its inputs had another form there" in done.err


@pytest.mark.slow
def test_members_are_the_first_files_and_all_without_a_number(enfold, given, tmp_path):
    pattern = tmp_path / "mine-*.pt"
    done = enfold("train", tmp_path / "two", *given, "--checkpoints", pattern, "--members", 2)
    assert done.code == 0, done.err
    assert f"enfold: the first 2 files are used, not {tmp_path / 'mine-2.pt'}" in done.err
    about = json.loads((tmp_path / "two/members/members.json").read_text())["about"]
    assert [Path(file).name for file in about["files"]] == ["mine-0.pt", "mine-1.pt"]
    settings = f"{{source: {given[1]}, val_size: 60}}\nnetwork: {{name: mlp, widths: [16]}}\ncost: false"
    (tmp_path / "r.yaml").write_text(f"data: {settings}\ncheckpoints: mine-*.pt\n")
    for dry in (["--dry-run"], []):
        done = enfold("run", tmp_path / "r.yaml", tmp_path / "all", *dry)
        assert done.code == 0, done.err
    assert "member 2 is " in done.err
    assert RunDirectory.open(tmp_path / "all").recipe().members == 3
    (tmp_path / "r.yaml").write_text(f"data: {settings}\ncheckpoints: mine-*.pt\nmembers: 4\n")
    for dry in (["--dry-run"], []):
        done = enfold("run", tmp_path / "r.yaml", tmp_path / "none", *dry)
        assert "got 3 files of 'mine-*.pt': remove members from the recipe, or set it to 3" in done.err
        assert (done.code, (tmp_path / "none").exists()) == (2, False)


def test_checkpoints_are_stored_unchanged(enfold, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert enfold("train", "runs/here", *given, "--checkpoints", "mine-*.pt").code == 0
    about = json.loads(Path("runs/here/members/members.json").read_text())["about"]
    assert about["files"] == ["mine-0.pt", "mine-1.pt", "mine-2.pt"]


@pytest.mark.slow
def test_one_member_cannot_be_merged(enfold, given, tmp_path):
    done = enfold("train", tmp_path / "one", *given, "--checkpoints", tmp_path / "mine-1.pt")
    assert (done.code, "there is one member: merging it returns that member" in done.err) == (0, True)
    done = enfold("merge", tmp_path / "one", "weight_matching")
    assert (done.code, "weight_matching: its weights are those of member 0" in done.err) == (0, True), done.err

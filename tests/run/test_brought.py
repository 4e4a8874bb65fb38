"""Members that were trained elsewhere, brought into a run."""

from pathlib import Path

import torch

import enfold as library


def test_members_that_are_brought_are_a_run_like_any_other(enfold, finished: Path, small_data: Path, tmp_path) -> None:
    make = library.networks.MLP(16, [16], 4)
    networks = library.load(finished / "members" / "members.safetensors", make).networks()
    for index, network in enumerate(networks):
        torch.save(network.state_dict(), tmp_path / f"mine-{index}.pt")
    given = ["--data", small_data, "--set", "data.validation=60", "--set", "network={name: mlp, widths: [16]}"]
    brought = ["--checkpoints", str(tmp_path / "mine-*.pt")]
    done = enfold("train", tmp_path / "brought", *given, *brought, "--json")
    assert done.code == 0, done.err
    members = library.load(tmp_path / "brought" / "members" / "members.safetensors", make)
    for one, other in zip(members.networks(), networks, strict=True):
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    for path in tmp_path.glob("mine-*.pt"):
        path.unlink()  # they are in the run now
    for verb in (("fold", tmp_path / "brought", "weight-matching"), ("report", tmp_path / "brought")):
        done = enfold(*verb)
        assert done.code == 0, done.err
    for changes, says in (
        (["--checkpoints", str(tmp_path / "none-*.pt")], "must match at least one file"),
        (["--set", f"checkpoints={tmp_path}/one.pt"], "a checkpoint for each of the 4 members, got 1 files"),
        (["--set", f"checkpoints={tmp_path}/one.pt", "--set", "trajectory=true"], "these come from checkpoints"),
    ):
        torch.save(networks[0].state_dict(), tmp_path / "one.pt")
        done = enfold("train", tmp_path / "other", *given, *changes)
        assert (done.code, says in done.err) == (2, True), done.err
        assert not (tmp_path / "other").exists()

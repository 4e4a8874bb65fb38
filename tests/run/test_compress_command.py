"""`enfold compress` of a run and of checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

NETS = "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))\n"


def test_compress_writes_a_network_and_its_reasons(enfold, finished) -> None:
    done = enfold("compress", finished, "--epochs", "1", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["recommendation"].startswith(("Ship", "Train"))
    assert {"control", "best member"} <= {trial["name"] for trial in found["trials"]}
    written = next(finished.rglob("compress.json")).parent
    assert {"network.safetensors", "network.json", "compress.json", "report.html", "trials"} == {
        path.name for path in written.iterdir()
    }
    again = enfold("compress", finished, "--budget", "0.5x")
    assert again.code == 2
    assert "student" in again.err


def test_compress_takes_checkpoints_of_another_tool(enfold, tmp_path: Path, small_data, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS)
    torch.manual_seed(0)
    for index in range(3):
        network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
        torch.save({"state_dict": {f"model.{name}": t for name, t in network.state_dict().items()}}, f"{index}.ckpt")
    words = ["compress", "0.ckpt", "[12].ckpt", "--network", "nets.py:make", "--data", "small.npz", "--epochs", "1"]
    refused = enfold(*words)
    assert refused.code == 2
    assert "--trust-code" in refused.err
    done = enfold(*words, "--set", "lr=0.01", "--memory", "1x", "--out", "shipped", "--json", "--trust-code")
    assert done.code == 0, done.err
    assert "nets.py" in done.err
    found = json.loads(done.out)
    assert found["members"] == 3
    assert "ensemble of 3" in {trial["name"] for trial in found["trials"]}
    state = load_file("shipped/network.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {"1.weight": (4, 16), "1.bias": (4,)}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["a.ckpt", "b.ckpt"], "--network must be given"),
        (["a.ckpt", "--network", "mlp"], "--data must be given"),
        (["a.ckpt", "--network", "mlp", "--data", "digits", "--seed", "1"], "--set seed=1"),
        (["a.ckpt", "--network", "mlp", "--data", "digits"], "a.ckpt"),
        (["a.ckpt", "--network", "mlp", "--data", "digits", "--set", "rate=1"], "no setting 'rate'"),
        (["RUN", "--network", "mlp"], "--network is for checkpoints"),
        (["RUN", "a.ckpt"], "one run"),
    ],
)
def test_compress_names_what_does_not_fit_its_sources(enfold, finished, words: list[str], named: str) -> None:
    done = enfold("compress", *(finished if word == "RUN" else word for word in words))
    assert done.code == 2
    assert named in done.err

"""Estimates of runs on devices that are not here."""

import json

import pytest
import torch
from torch import nn

from enfold.errors import EnfoldError
from enfold.run.cluster import DEVICES, Cluster, Network, Training, predict_run


def test_operations_are_those_of_the_layers():
    network = nn.Sequential(nn.Linear(20, 30, bias=False), nn.ReLU(), nn.Linear(30, 10, bias=False))
    found = Network.measure(network, torch.randn(8, 20))
    forward = 2 * (20 * 30 + 30 * 10)
    assert found.forward == forward
    assert found.stored_bytes == 4 * (20 * 30 + 30 * 10)
    training = found.training(train=100, val=40, epochs=5, batch_size=16, states=4)
    assert training.operations == 5 * (3 * 100 + 40) * forward
    assert training.memory_bytes == int(4 * found.stored_bytes + 16 * found.activation_bytes)
    assert found.training(train=100, epochs=1, batch_size=1, teachers=4).operations == 7 * 100 * forward


def test_time_is_that_of_rounds_on_all_devices():
    rate = 0.5 * DEVICES["A100"].half
    members, steps = [Training(3600 * rate, 2**30)] * 5, [Training(1800 * rate, 2**34)]
    found = predict_run([members, steps], Cluster(2, "A100", 0.5), precision="bfloat16", start_seconds=100.0)
    assert found.seconds == pytest.approx(3 * 3700 + 1900)  # five members on two devices: three rounds
    assert found.device_seconds == pytest.approx(5 * 3700 + 1900)
    assert (found.trainings, found.memory_bytes, found.fits) == ((5, 1), 2**34, True)
    assert not predict_run([[Training(1.0, 2**38)]], Cluster(1, "A100")).fits
    single = predict_run([members], Cluster(5, "A100", 0.5))
    assert single.seconds == pytest.approx(3600 * DEVICES["A100"].half / DEVICES["A100"].single)


@pytest.mark.parametrize(
    "text", ["8xA1", "A100", "0xA100", "8xA100@", "8xA100@1.5", "8xA100@.0", "8 x A100", "-1xA100"]
)
def test_other_clusters_are_refused(text):
    with pytest.raises(EnfoldError, match="the kinds are T4"):
        Cluster.parse(text)


def test_a_recipe_is_estimated_and_nothing_is_written(enfold, recipe_file, tmp_path):
    printed = enfold("run", recipe_file, tmp_path / "out", "--dry-run", "--cluster", "8xA100@0.3").out
    assert "8 x A100 at 30 % of the peak: about " in printed
    assert not (tmp_path / "out").exists()
    words = ("run", recipe_file, tmp_path / "out", "--dry-run", "--cluster", "1xT4")
    found = json.loads(enfold(*words, "--json").out)
    assert found["cluster"] == {"count": 1, "kind": "T4", "share": 0.2}
    assert found["seconds"] >= found["start_seconds"] * sum(found["trainings"]) > 0
    refused = enfold("run", recipe_file, tmp_path / "out", "--cluster", "1xT4")
    assert refused.code == 2
    assert "--cluster is an option of --dry-run" in refused.err

"""Samples around one network are drawn and measured once, for any number of predictions."""

from pathlib import Path

import pytest
import torch
from torch import nn

from enfold.analysis.corruptions import score_corruptions
from enfold.data import Data, Split
from enfold.ensembles.common import sampled
from enfold.ensembles.swag import SWAG
from enfold.evaluate import predict
from enfold.saving import load, save
from enfold.train import TrainConfig
from fitting import fitted

MEMBERS = 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 2))


def images(count: int) -> Split:
    source = torch.Generator().manual_seed(count)
    inputs = torch.randint(256, (count, 3, 16, 16), generator=source, dtype=torch.uint8)
    return Split(inputs, torch.arange(count) % 2)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a member was drawn, and its batch-norm statistics measured."""
    counts = {"drawn": 0, "measured": 0}

    def counting(name: str, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(SWAG, "draw", counting("drawn", SWAG.draw))
    monkeypatch.setattr(sampled, "reestimate", counting("measured", sampled.reestimate))
    return counts


@pytest.mark.slow
def test_clean_and_corrupted_data_are_predicted_by_the_same_samples(counted: dict[str, int], tmp_path: Path) -> None:
    data = Data(images(24), images(8), images(10), 2, (3, 16, 16))
    plan = TrainConfig(epochs=6, batch_size=8, optimizer="sgd", lr=0.1)
    trained = fitted(SWAG(network(), MEMBERS, rank=2, scale=20.0), data, plan)
    assert counted == {"drawn": MEMBERS, "measured": MEMBERS}
    save(trained, tmp_path / "swag.safetensors")
    for drawn in (1, 2):
        model = trained if drawn == 1 else load(tmp_path / "swag.safetensors", network)
        for part in ("val", "test"):
            predict(model, getattr(data, part))
        score_corruptions({"swag": model}, data, ("gaussian_noise", "contrast"), (1, 3, 5))
        assert counted == {"drawn": drawn * MEMBERS, "measured": MEMBERS}, "what is stored is drawn again, not measured"

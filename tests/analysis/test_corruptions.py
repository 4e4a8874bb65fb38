"""Scores on corrupted copies: the mean over kinds and severities, worse where there is more corruption."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from enfold.analysis.corruptions import (
    MEAN_MEMBER,
    average_scores_over_kinds,
    compute_mce,
    require_images,
    score_corruptions,
    summarize_by_kind,
)
from enfold.data import Data, Split, corrupt
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import accuracy, nll


@pytest.fixture
def pictures() -> Data:
    """Bars of four heights in 12 x 12 pictures, as bytes."""
    labels = torch.arange(80) % 4
    heights = (3 * labels + 2)[:, None, None, None]
    bars = (torch.arange(12)[:, None] < heights).expand(80, 1, 12, 12)
    noise = torch.randint(0, 60, bars.shape, generator=torch.Generator().manual_seed(0))
    split = Split((150 * bars + noise).to(torch.uint8), labels)
    return Data(split, split, split, 4, (1, 12, 12))


class Template(nn.Module):
    """Knows the bars: the nearest one wins."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        bars = (torch.arange(12)[None, :, None] < (3 * torch.arange(4) + 2)[:, None, None]).expand(4, 12, 12)
        self.bars = nn.Parameter(bars.flatten(1) * 150 / 255 + 30 / 255)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return -self.scale * torch.cdist(images.flatten(1), self.bars).square()


def test_a_row_contains_the_scores_of_its_corrupted_images(pictures):
    model = Template().eval()
    found = score_corruptions({"one": model}, pictures, ["contrast", "gaussian_noise"], [1, 5], seed=3)["one"]
    moved = Split(corrupt(pictures.test.inputs, "contrast", 5, seed=3), pictures.test.labels)
    said = predict(model, pictures.replace(test=moved).test)
    assert found["contrast"]["5"]["accuracy"] == accuracy(said)
    assert found["contrast"]["5"]["nll"] == pytest.approx(nll(said))
    assert found["contrast"]["5"]["nll"] > found["contrast"]["1"]["nll"]
    cells = [found[kind][severity]["nll"] for kind in found for severity in ("1", "5")]
    assert average_scores_over_kinds(found)["nll"] == pytest.approx(sum(cells) / 4)


def test_the_mean_member_is_the_mean_over_single_members(pictures):
    members = DeepEnsemble([Template(0.2), Template(1.0)]).eval()
    found = score_corruptions({"two": members}, pictures, ["fog"], [3], members_of="two", examples=40)
    alone = [
        score_corruptions({"one": network}, pictures, ["fog"], [3], examples=40)["one"]
        for network in members.networks()
    ]
    mean = sum(each["fog"]["3"]["nll"] for each in alone) / 2
    assert found[MEAN_MEMBER]["fog"]["3"]["nll"] == pytest.approx(mean)
    assert found["two"]["fog"]["3"]["nll"] < mean


def test_subsets_contain_every_class(pictures):
    order = pictures.test.labels.argsort(stable=True)
    by_class = pictures.replace(test=pictures.test[order])
    found = score_corruptions({"one": Template()}, by_class, ["contrast"], [5], examples=40)["one"]["contrast"]["5"]
    moved = corrupt(by_class.test.inputs[::2], "contrast", 5)
    said = predict(Template().eval(), by_class.replace(test=Split(moved, by_class.test.labels[::2])).test)
    assert found["nll"] == pytest.approx(nll(said))


def test_inputs_other_than_images_are_refused():
    split = Split(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(EnfoldError, match="images in memory"):
        require_images(Data(split, split, split, 2, (3,)))


def test_the_scores_can_be_stored(pictures):
    found = score_corruptions({"one": Template()}, pictures, ["pixelate"], [2])
    assert json.loads(json.dumps(found)) == found


def kinds(**errors):
    """Accuracies by kind and severity from errors."""
    return {
        kind: {str(s): {"accuracy": 1 - e, "nll": e, "ece": e, "brier": e} for s, e in enumerate(each, 1)}
        for kind, each in errors.items()
    }


def test_corruption_error_by_hand():
    reference, model = kinds(fog=[0.2, 0.4], snow=[0.1, 0.1]), kinds(fog=[0.1, 0.2], snow=[0.1, 0.3])
    assert compute_mce(reference, reference) == pytest.approx(1)
    assert compute_mce(model, reference) == pytest.approx((0.5 + 2) / 2)
    with pytest.raises(EnfoldError, match="the same kinds and severities"):
        compute_mce(kinds(fog=[0.1, 0.2]), reference)
    with pytest.raises(EnfoldError, match="got none for snow"):
        compute_mce(model, kinds(fog=[0.1, 0.1], snow=[0.0, 0.0]))


def test_over_seeds_by_kind():
    found = summarize_by_kind([kinds(fog=[0.2, 0.4]), kinds(fog=[0.4, 0.4])], "nll")["fog"]
    assert found["1"].mean == pytest.approx(0.3)
    assert found["1"].deviation == pytest.approx(0.02**0.5)
    assert found["mean"].values == pytest.approx((0.3, 0.4))
    assert summarize_by_kind([kinds(fog=[0.2])])["fog"]["1"].deviation is None
    with pytest.raises(EnfoldError, match="must be one of accuracy, nll, ece, brier, got 'mce'"):
        summarize_by_kind([kinds(fog=[0.2])], "mce")
    with pytest.raises(EnfoldError, match="at least one seed"):
        summarize_by_kind([])


def test_severity_six_and_values_out_of_range_are_refused(pictures):
    with pytest.raises(EnfoldError, match="severity"):
        score_corruptions({"one": Template()}, pictures, ["fog"], [6])
    bright = pictures.replace(test=Split(pictures.test.inputs.float(), pictures.test.labels))
    with pytest.raises(EnfoldError, match=r"values in \[0, 1\] without NaN"):
        score_corruptions({"one": Template()}, bright, ["fog"], [1])

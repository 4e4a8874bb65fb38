"""A model that knows its bars doubts noise; its scores are those of its logits, prepared as its own data is."""

import pytest
import torch
from torch import nn

from enfold.analysis.ood import INSIDE, compute_logits, detect, score_ood
from enfold.data import Data, Split
from enfold.data.ood import noise, outside
from enfold.distill.dirichlet import Dirichlet
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.metrics import auroc, ood_scores
from enfold.metrics.predictions import Predictions


@pytest.fixture
def bars():
    """Bars of four heights in 12 x 12 pictures, as bytes."""
    labels = torch.arange(80) % 4
    heights = (3 * labels + 2)[:, None, None, None]
    shown = (torch.arange(12)[:, None] < heights).expand(80, 1, 12, 12)
    grain = torch.randint(0, 60, shown.shape, generator=torch.Generator().manual_seed(0))
    split = Split((150 * shown + grain).to(torch.uint8), labels)
    return Data(split, split, split, 4, (1, 12, 12), mean=(0.4,), std=(0.3,))


class Nearest(nn.Module):
    """Logits are minus the squared distances to the bars, normalised as the data is."""

    def __init__(self, scale=0.05):
        super().__init__()
        shown = (torch.arange(12)[None, :, None] < (3 * torch.arange(4) + 2)[:, None, None]).expand(4, 12, 12)
        self.bars = nn.Parameter((shown.flatten(1) * 150 / 255 + 30 / 255 - 0.4) / 0.3)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, images):
        return -self.scale * torch.cdist(images.flatten(1), self.bars).square()


def test_scores_are_those_of_the_prepared_images(bars):
    model, away = Nearest(), noise("uniform", bars, 50)
    found, mean_member = score_ood({"one": model}, bars, [away])
    assert mean_member is None
    with torch.no_grad():
        logits = model((away.inputs.float() / 255 - 0.4) / 0.3)
    expected = ood_scores(Predictions.from_logits(logits, away.labels), logits)
    torch.testing.assert_close(found["one"].scores["uniform noise"], expected)
    assert set(expected) == {"max_probability", "entropy", "dempster_shafer", "energy"}
    inside = found["one"].scores[INSIDE]["entropy"]
    assert found["one"].detected["uniform noise"]["entropy"]["auroc"] == auroc(inside, expected["entropy"])
    assert found["one"].detected["uniform noise"]["energy"]["auroc"] > 0.99  # far from every bar


def test_members_and_their_mean(bars):
    networks = [Nearest(0.02), Nearest(0.1)]
    sets = [noise("uniform", bars, 30), outside(Split(torch.zeros(9, 3, 5, 5), torch.arange(9)), bars, "black")]
    found, mean_member = score_ood({"two": DeepEnsemble(networks)}, bars, sets, members_of="two")
    assert "mutual_information" in found["two"].detected["black"]
    alone, _ = score_ood({str(i): each for i, each in enumerate(networks)}, bars, sets)
    for name in ("uniform noise", "black"):
        one, other = (alone[i].detected[name]["entropy"]["auroc"] for i in "01")
        assert mean_member[name]["entropy"]["auroc"] == pytest.approx((one + other) / 2)
    assert found["two"].scores["black"]["entropy"].shape == (9,)


def test_log_probabilities_have_no_energy_and_a_dirichlet_student_has_its_own(bars):
    sets = [noise("gaussian", bars, 30)]
    models = {"bare": nn.Sequential(Nearest(), nn.LogSoftmax(-1)), "student": Dirichlet(Nearest())}
    found, _ = score_ood(models, bars, sets)
    assert set(found["bare"].detected["gaussian noise"]) == {"max_probability", "entropy"}
    assert {"mutual_information", "epkl", "rmi", "energy"} <= set(found["student"].detected["gaussian noise"])


def test_an_ensemble_student_is_evaluated_as_members(bars):
    logits = compute_logits(DeepEnsemble([Nearest(), Nearest(0.2)]), bars, bars.test)
    assert logits.shape == (2, 80, 4)
    both = detect({INSIDE: logits, "away": logits.flip(1)}, dirichlet=True)
    assert both.detected["away"]["variation_ratio"]["auroc"] == 0.5

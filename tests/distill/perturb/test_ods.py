"""ODS and ConfODS: the same draws, steps by confidence, and what they are for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from classroom import make_cnn, make_mlp, make_pictures, population
from enfold.distill.perturb.conf_ods import ConfODS
from enfold.distill.perturb.ods import ODS
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError

MIDDLE = make_pictures(low=60, high=200)  # no move is clipped
INPUTS = MIDDLE.prepare(MIDDLE.train.inputs).double()


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_confident_step_is_a_step_times_the_confidence(temperature, seed):
    networks = [network.double().eval() for network in population(make_cnn)]
    teachers = DeepEnsemble(networks)
    settings = {"step": 4.0, "temperature": temperature}
    whole = ODS(**settings)(INPUTS, MIDDLE, teachers, make_mlp(), source(seed)) - INPUTS
    scaled = ConfODS(**settings)(INPUTS, MIDDLE, teachers, make_mlp(), source(seed)) - INPUTS
    chosen = networks[int(torch.randint(3, (), generator=source(seed)))]
    confidence = (chosen(INPUTS).detach() / temperature).softmax(-1).max(-1).values
    assert float(confidence.std()) > 1e-3
    torch.testing.assert_close(scaled, confidence.view(-1, 1, 1, 1) * whole)


def test_a_teacher_is_drawn_for_each_batch():
    """A linear teacher without a say in some pixels never moves them."""

    class Half(nn.Module):
        def __init__(self, first: int) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 3)
            with torch.no_grad():
                self.layer.weight[:, first : first + 16] = 0.0

        def forward(self, inputs):
            return self.layer(inputs.flatten(1))

    teachers = DeepEnsemble([Half(0), Half(16)]).double().eval()
    moved = [ODS()(INPUTS, MIDDLE, teachers, make_mlp(), source(seed)) - INPUTS for seed in range(12)]
    channels = {tuple((move.abs().sum((0, 2, 3)) > 1e-6).tolist()) for move in moved}
    assert channels == {(True, False), (False, True)}


def test_the_teachers_probabilities_follow_the_direction_that_was_drawn():
    teachers = DeepEnsemble([network.double() for network in population(make_cnn)]).eval()
    again = source(3)
    network = teachers.member(int(torch.randint(3, (), generator=again)))
    w = 2 * torch.rand(len(INPUTS), 3, generator=again) - 1
    moved = ODS(step=0.1)(INPUTS, MIDDLE, teachers, make_mlp(), source(3))
    with torch.no_grad():
        gain = (w * (network(moved).softmax(-1) - network(INPUTS).softmax(-1))).sum(-1)
    assert bool((gain > 0).all())


@pytest.mark.parametrize("kind", [ODS, ConfODS])
@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_is_above_0(kind, temperature):
    with pytest.raises(EnfoldError, match=f"temperature .* got {temperature}"):
        kind(temperature=temperature)

"""Members in half or double precision: data in float32 are given to them in their own type."""

from __future__ import annotations

import pytest
import torch

from enfold.distill.losses.kd import KD
from enfold.errors import EnfoldError
from enfold.evaluate import evaluate
from enfold.merge.activation_matching import ActivationMatching
from enfold.merge.cca_merge import CCAMerge
from enfold.merge.ot_fusion import OTFusion
from enfold.merge.perm_avg import PermAVG
from enfold.merge.repair import Repair
from enfold.merge.soup import Soup
from enfold.merge.straight_through import StraightThrough
from enfold.merge.weight_matching import WeightMatching
from enfold.merge.zipit import ZipIt
from enfold.train import TrainConfig

PLAN = TrainConfig(epochs=1, batch_size=16, lr=0.01)
FOLDS = {
    "greedy": Soup(kind="greedy"),
    "learned": Soup(kind="learned", epochs=1),
    "repair": WeightMatching(repair="repair"),
    "closed form": WeightMatching(repair="closed_form"),
    "activations": ActivationMatching(),
    "straight through": StraightThrough(epochs=2),
    "zip": ZipIt(),
    "cca": CCAMerge(),
    "transport": OTFusion(),
    "route": WeightMatching() >> Repair() >> KD(plan=PLAN),
}
TYPES = {torch.float16: 5e-3, torch.bfloat16: 5e-2, torch.float64: 1e-4}  # what the NLL may differ by from float32's


@pytest.mark.filterwarnings("ignore:the soup is member", "ignore::enfold.errors.UnchangedWarning")
@pytest.mark.parametrize("members", ["plain", "normed"], indirect=True)
@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("name", FOLDS)
def test_a_fold_of_members_in_another_type_is_in_that_type(members, data, name, kind):
    expected = evaluate(FOLDS[name](members, data), data).scores
    folded = FOLDS[name](members.to(kind), data)
    assert {parameter.dtype for parameter in folded.parameters()} == {kind}
    near = max(TYPES[kind], 0.05 if name == "route" else 0.0)  # it is trained, with Adam's epsilon of that type
    assert evaluate(folded, data, reference=members).scores["nll"] == pytest.approx(expected["nll"], abs=near)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_soft_permutations_are_learned_in_double_precision(members, data, alpha):
    fold = PermAVG(alpha=alpha, plan=PLAN)
    expected = evaluate(fold(members, data), data).scores["nll"]
    assert evaluate(fold(members.double(), data), data).scores["nll"] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(EnfoldError, match=r"in float32 or float64, got torch.float16: use members.float\(\)"):
        fold(members.half(), data)

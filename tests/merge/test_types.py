"""Members in half or double precision: data in float32 are given to them in their own type."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from enfold.errors import EnfoldError
from enfold.evaluate import evaluate
from enfold.merge import (
    activation_matching,
    cca_merge,
    ot_fusion,
    perm_avg,
    repair,
    soup,
    straight_through,
    weight_matching,
    zipit,
)
from enfold.train import TrainConfig

PLAN = TrainConfig(epochs=1, batch_size=16, lr=0.01)
FOLDS = {
    "greedy": partial(soup, kind="greedy"),
    "learned": partial(soup, kind="learned", epochs=1),
    "repair": partial(weight_matching, repair="repair"),
    "closed form": partial(weight_matching, repair="closed_form"),
    "activations": partial(activation_matching),
    "straight through": partial(straight_through, epochs=2),
    "zip": partial(zipit),
    "cca": partial(cca_merge),
    "transport": partial(ot_fusion),
    "two steps": lambda members, data: repair(weight_matching(members, data), members, data),
}
TYPES = {torch.float16: 5e-3, torch.bfloat16: 5e-2, torch.float64: 1e-4}  # what the NLL may differ by from float32's


@pytest.mark.combinations
@pytest.mark.filterwarnings("ignore::enfold.merge.soup.SingleModelWarning", "ignore::enfold.errors.UnchangedWarning")
@pytest.mark.parametrize("members", [pytest.param("plain", marks=pytest.mark.slow), "normed"], indirect=True)
@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("name", FOLDS)
def test_merges_preserve_the_data_type(members, data, name, kind):
    expected = evaluate(FOLDS[name](members, data), data).scores
    folded = FOLDS[name](members.to(kind), data)
    assert {parameter.dtype for parameter in folded.parameters()} == {kind}
    near = TYPES[kind]
    assert evaluate(folded, data, reference=members).scores["nll"] == pytest.approx(expected["nll"], abs=near)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_soft_permutations_are_learned_in_double_precision(members, data, alpha):
    fold = partial(perm_avg, alpha=alpha, config=PLAN)
    expected = evaluate(fold(members, data), data).scores["nll"]
    assert evaluate(fold(members.double(), data), data).scores["nll"] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(EnfoldError, match="float32 or float64"):
        fold(members.half(), data)

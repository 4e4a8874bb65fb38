"""Targets of a loader: classes are checked, and a user objective gets the targets unmodified."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from enfold import KD, Data, DeepEnsemble, Split, TrainConfig, distill, evaluate, fit, predict
from enfold.data.batches import Batch
from enfold.ensembles.mimo import MIMO
from enfold.errors import EnfoldError
from enfold.merge import soup, straight_through
from enfold.train.objective import batch_outputs

PLAN = TrainConfig(epochs=2, batch_size=16, lr=1e-2)
INPUTS = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
CLASSES = (INPUTS[:, 0] > 0).long() + (INPUTS[:, 1] > 0).long()


def loader(targets: torch.Tensor) -> DataLoader:
    return DataLoader(TensorDataset(INPUTS, targets), batch_size=16)


def of_loaders(targets: torch.Tensor) -> Data:
    return Data(loader(targets), loader(targets), loader(targets), num_classes=3, shape=(6,))


def two_members() -> DeepEnsemble:
    return DeepEnsemble(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), 2)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_a_user_objective_gets_unmodified_targets(kind):
    targets, seen = (torch.tanh(INPUTS[:, 0]) * 10).to(kind), []

    def squares(model: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append(batch.targets)
        outputs = batch_outputs(model, batch)[..., 0]
        return (outputs - batch.targets.to(outputs)).square().mean(1)

    fit(
        two_members(),
        Data(loader(targets), [], [], num_classes=3, shape=(6,)),
        config=PLAN,
        objective=squares,
        quiet=True,
    )
    assert seen[0].dtype == kind
    assert torch.equal(torch.cat(seen[:4]), targets)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32])
def test_classes_may_have_any_integer_type(kind):
    members, others = two_members(), two_members()
    fit(members, of_loaders(CLASSES), config=PLAN, quiet=True)
    fit(others, of_loaders(CLASSES.to(kind)), config=PLAN, quiet=True)
    assert all(torch.equal(one, other) for one, other in zip(members.parameters(), others.parameters(), strict=True))
    scores = [evaluate(members, of_loaders(each).replace(val=[])).scores for each in (CLASSES, CLASSES.to(kind))]
    assert scores[0] == scores[1]
    assert Split(INPUTS, CLASSES.to(kind)).labels.dtype == torch.int64


def refused() -> dict[str, object]:
    """What needs classes, given data of loaders and, as a Split, of good ones."""
    good = Split(INPUTS, CLASSES)
    return {
        "fit": lambda data: fit(two_members(), data.replace(val=[]), config=PLAN, quiet=True),
        "a validation part": lambda data: fit(two_members(), data.replace(train=good), config=PLAN, quiet=True),
        "evaluate": lambda data: evaluate(two_members(), data.replace(val=[])),
        "a plain network": lambda data: fit(nn.Linear(6, 3), data.replace(val=[]), config=PLAN, quiet=True),
        "distill": lambda data: distill(
            two_members(), data.replace(val=good), loss=KD(alpha=0.5), config=PLAN, quiet=True
        ),
        "mimo": lambda data: fit(MIMO(nn.Linear(6, 3), 2), data.replace(val=[]), config=PLAN, quiet=True),
        "straight through": lambda data: straight_through(two_members(), data, epochs=1),
        "soup": lambda data: soup(two_members(), data, kind="learned", epochs=1),
    }


@pytest.mark.parametrize("name", refused())
@pytest.mark.parametrize("value", [0.5, -100, -1, 3])
def test_invalid_classes_are_refused(name, value):
    targets = CLASSES.float() + value if isinstance(value, float) else torch.where(CLASSES == 0, value, CLASSES)
    with pytest.raises(EnfoldError, match=r"labels|targets"):
        refused()[name](of_loaders(targets))


def test_a_split_refuses_floats_and_one_hot_rows():
    with pytest.raises(EnfoldError, match=r"labels.*float32"):
        _ = Split(INPUTS, CLASSES.float()).labels
    with pytest.raises(EnfoldError, match="targets of shape"):
        fit(nn.Linear(6, 3), Data(loader(nn.functional.one_hot(CLASSES)), [], [], 3, (6,)), config=PLAN, quiet=True)
    with pytest.raises(EnfoldError, match="-100"):
        Data(Split(INPUTS, torch.full((64,), -100)), [], [], 3, (6,))


def test_predict_refuses_invalid_classes():
    with pytest.raises(EnfoldError, match=r"targets.*float32"):
        predict(two_members(), of_loaders(CLASSES.float()).test)

"""Inference runs in eval mode and restores the mode of every module; loaded models are in eval mode."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from clouds import three_clouds
from enfold import (
    Data,
    DeepEnsemble,
    MixedEnsemble,
    TrainConfig,
    distill,
    evaluate,
    load,
    measure,
    predict,
    save,
    symmetries,
)
from enfold.distill.teacher import Teacher
from enfold.merge import average, weight_matching


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))


def in_mixed_modes(model: nn.Module) -> nn.Module:
    """In train mode, but for the first part."""
    model.train()
    next(part for part in model.modules() if part is not model).eval()
    return model


@pytest.fixture
def data() -> Data:
    return three_clouds(30, 20, 20)


MODELS = {
    "network": network,
    "stacked": lambda: DeepEnsemble(network, 3),
    "mixed": lambda: MixedEnsemble([network(), network()]),
}
INFERENCE = {
    "predict": lambda model, data: predict(model, data.test),
    "evaluate": lambda model, data: evaluate(model, data),
    "teacher": lambda model, data: Teacher(model, data).logits(data.test.inputs),
    "measure": lambda model, data: measure({"it": model}, "it", data.test.inputs[0], batch_sizes=(2,), rounds=1),
    "distill": lambda model, data: distill(
        model, data, student=network, config=TrainConfig(epochs=1, select="last"), quiet=True
    ),
}


@pytest.mark.combinations
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", INFERENCE)
def test_modes_and_values_are_restored(kind, name, data):
    model = in_mixed_modes(MODELS[kind]())
    modes = [part.training for part in model.modules()]
    values = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    INFERENCE[name](model, data)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(tensor, values[key]) for key, tensor in model.state_dict().items()), "no statistics moved"


@pytest.mark.parametrize("kind", MODELS)
def test_a_teacher_predicts_in_eval_mode(kind, data):
    model = MODELS[kind]().train()
    answers = [Teacher(model, data).logits(data.test.inputs) for _ in range(2)]
    assert torch.equal(*answers)
    assert torch.equal(answers[0], Teacher(model.eval(), data).logits(data.test.inputs))


@pytest.mark.parametrize("merge", [partial(average), partial(weight_matching)], ids=["average", "matching"])
def test_merges_leave_members_in_their_mode_and_return_eval_mode(merge, data):
    members = DeepEnsemble(network, 2).train()
    merged = merge(members, data)
    assert members.training
    assert not any(part.training for part in merged.modules())
    symmetries(plain := network().train(), data.test.inputs[:2])
    assert all(part.training for part in plain.modules())


def test_loaded_models_are_in_eval_mode(tmp_path):
    one = network().train()
    torch.save(one.state_dict(), tmp_path / "one.pt")
    save_file(one.state_dict(), tmp_path / "two.safetensors")
    members = DeepEnsemble.from_checkpoints(str(tmp_path / "*"), network)
    assert not members.training
    assert not any(part.training for each in members for part in each.modules())
    for model in (one, members):
        found = load(save(model.train(), tmp_path / "saved.safetensors"), network)
        assert not any(part.training for part in found.modules())

"""A training that was interrupted goes on to the same bits, and never from another one's checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.data import Data, Split
from enfold.errors import EnfoldError
from enfold.members import Stacked
from enfold.train import CrossEntropy, Epoch, History, Plan, fit

PLAN = Plan(epochs=3, batch_size=16, learning_rate=0.05)
KINDS = {
    "sgd": PLAN.replace(optimizer="sgd"),
    "adam": PLAN.replace(optimizer="adam", select="last"),
    "adamw": PLAN.replace(clip_norm=0.5, patience=2),
    "by member": PLAN.replace(optimizer="sgd", learning_rate=(0.05, 0.2), bootstrap=True),
}


class Interrupted(Exception):
    """Stands for a killed process."""


def interrupt_after(epochs: int):
    def stop(record: Epoch) -> None:
        if record.epoch + 1 == epochs:
            raise Interrupted

    return stop


def made(make, members: int | None) -> nn.Module:
    torch.manual_seed(3)
    network = make["dropping"]()
    network.append(nn.BatchNorm1d(4))
    return network if members is None else Stacked.make(network, members)


def values(history: History) -> list[tuple]:
    """Everything but the time."""
    return [(e.epoch, e.train_loss, e.validation_nll, e.ensemble_nll, e.learning_rate) for e in history.epochs]


def assert_same_bits(first: nn.Module, second: nn.Module) -> None:
    pairs = zip(first.state_dict().items(), second.state_dict().values(), strict=True)
    assert all(torch.equal(tensor, other) for (_, tensor), other in pairs)


@pytest.mark.parametrize("plan", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("members", [None, 2], ids=["network", "members"])
def test_resumed_to_the_same_bits(data, make, tmp_path, plan, members):
    if members is None and plan.varies:
        plan = plan.replace(learning_rate=0.05)
    whole, cut = made(make, members), made(make, members)
    expected = fit(whole, data, plan, quiet=True)
    file = tmp_path / "training.safetensors"
    with pytest.raises(Interrupted):
        fit(cut, data, plan, checkpoint=file, on_epoch=interrupt_after(2), quiet=True)
    again = made(make, members)  # a new process begins with the same start
    torch.manual_seed(99)  # and with another state of torch's own generator
    history = fit(again, data, plan, checkpoint=file, quiet=True)
    assert values(history) == values(expected)
    assert history.chosen == expected.chosen
    assert_same_bits(again, whole)


def test_a_finished_training_is_not_repeated(data, make, tmp_path):
    file = tmp_path / "training.safetensors"
    first, second = made(make, 2), made(make, 2)
    fit(first, data, PLAN, checkpoint=file, quiet=True)
    seen: list[Epoch] = []
    history = fit(second, data, PLAN, checkpoint=file, on_epoch=seen.append, quiet=True)
    assert seen == []
    assert len(history.epochs) == 3
    assert_same_bits(first, second)


def test_a_checkpoint_changes_nothing(data, make, tmp_path):
    first, second = made(make, 2), made(make, 2)
    fit(first, data, PLAN, checkpoint=tmp_path / "a" / "b.safetensors", quiet=True)
    fit(second, data, PLAN, quiet=True)
    assert_same_bits(first, second)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.safetensors"]


def test_tied_weights_can_be_checkpointed(data, tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
            self.up.weight = self.down.weight

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.up(torch.relu(self.down(inputs))))

    torch.manual_seed(0)
    first, file = Tied(), tmp_path / "training.safetensors"
    second = Tied()
    second.load_state_dict(first.state_dict())
    fit(first, data, PLAN, quiet=True)
    with pytest.raises(Interrupted):
        fit(second, data, PLAN, checkpoint=file, on_epoch=interrupt_after(2), quiet=True)
    third = Tied()
    fit(third, data, PLAN, checkpoint=file, quiet=True)
    assert_same_bits(first, third)
    assert third.up.weight is third.down.weight


def other_labels(data: Data) -> Data:
    labels = data.train.labels.clone()
    labels[0] = (labels[0] + 1) % 4
    return data.replace(train=Split(data.train.inputs, labels))


@pytest.mark.parametrize(
    "another",
    [
        lambda data: (data, PLAN.replace(seed=1), CrossEntropy()),
        lambda data: (data, PLAN.replace(epochs=9), CrossEntropy()),
        lambda data: (data, PLAN, CrossEntropy(0.2)),
        lambda data: (data, PLAN, lambda model, batch: CrossEntropy()(model, batch)),
        lambda data: (data.replace(source="elsewhere"), PLAN, CrossEntropy()),
        lambda data: (data.replace(train=data.train[:40]), PLAN, CrossEntropy()),
        lambda data: (other_labels(data), PLAN, CrossEntropy()),
    ],
    ids=["seed", "epochs", "smoothing", "objective", "source", "size", "labels"],
)
def test_a_checkpoint_of_another_training_is_refused(data, make, tmp_path, another):
    file = tmp_path / "training.safetensors"
    fit(made(make, 2), data, PLAN, CrossEntropy(), checkpoint=file, quiet=True)
    network = made(make, 2)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    changed, plan, objective = another(data)
    with pytest.raises(EnfoldError, match="can only continue the training it is from"):
        fit(network, changed, plan, objective, checkpoint=file, quiet=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_a_checkpoint_of_another_number_of_members_is_refused(data, make, tmp_path):
    file = tmp_path / "training.safetensors"
    fit(made(make, 2), data, PLAN, checkpoint=file, quiet=True)
    with pytest.raises(EnfoldError, match="another plan, model or data"):
        fit(made(make, 3), data, PLAN, checkpoint=file, quiet=True)


@pytest.mark.parametrize("keep", [0, 5, 200, -10])
def test_a_broken_file_is_named(data, make, tmp_path, keep):
    file = tmp_path / "training.safetensors"
    fit(made(make, None), data, PLAN, checkpoint=file, quiet=True)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(EnfoldError, match=r"training\.safetensors' must be a training checkpoint.*delete it"):
        fit(made(make, None), data, PLAN, checkpoint=file, quiet=True)


def test_a_function_as_objective_can_be_resumed(data, make, tmp_path):
    """Its text holds its address, which is another one in each process."""

    def objective() -> object:
        def loss(model, batch):
            return CrossEntropy()(model, batch)

        return loss

    file = tmp_path / "training.safetensors"
    with pytest.raises(Interrupted):
        fit(made(make, 2), data, PLAN, objective(), checkpoint=file, on_epoch=interrupt_after(2), quiet=True)
    history = fit(made(make, 2), data, PLAN, objective(), checkpoint=file, quiet=True)
    assert len(history.epochs) == 3


def test_a_history_survives_json():
    history = History([Epoch(0, [1.0], [2.0], [0.5], None, 0.1, 3.0)], [1])
    assert History.from_dict(history.as_dict()) == history

"""An interrupted training resumes to the same bits, and only from its own checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from enfold.data import Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.train import Epoch, History, TrainConfig, cross_entropy, fit

PLAN = TrainConfig(epochs=3, batch_size=16, lr=0.05)
KINDS = {
    "sgd": PLAN.replace(optimizer="sgd"),
    "adam": PLAN.replace(optimizer="adam", select="last"),
    "adamw": PLAN.replace(clip_norm=0.5, patience=2),
    "by member": PLAN.replace(optimizer="sgd", lr=(0.05, 0.2), bootstrap=True),
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
    return network if members is None else DeepEnsemble(network, members)


def values(history: History) -> list[tuple]:
    """Everything but the time."""
    return [(e.epoch, e.train_loss, e.validation_loss, e.ensemble_loss, e.lr) for e in history.epochs]


def assert_same_bits(first: nn.Module, second: nn.Module) -> None:
    pairs = zip(first.state_dict().items(), second.state_dict().values(), strict=True)
    assert all(torch.equal(tensor, other) for (_, tensor), other in pairs)


@pytest.mark.parametrize("plan", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("members", [None, 2], ids=["network", "members"])
def test_resumed_to_the_same_bits(data, make, tmp_path, plan, members):
    if members is None and plan.varies:
        plan = plan.replace(lr=0.05)
    whole, cut = made(make, members), made(make, members)
    expected = fit(whole, data, config=plan, quiet=True)
    file = tmp_path / "training.safetensors"
    with pytest.raises(Interrupted):
        fit(cut, data, config=plan, checkpoint=file, on_epoch=interrupt_after(2), quiet=True)
    again = made(make, members)  # a new process begins with the same start
    torch.manual_seed(99)  # and with another state of torch's own generator
    history = fit(again, data, config=plan, checkpoint=file, quiet=True)
    assert values(history) == values(expected)
    assert history.chosen == expected.chosen
    assert_same_bits(again, whole)


def test_an_interrupted_model_resumes_in_the_same_process(data, make, tmp_path):
    """As in a notebook: the model is half trained when it is given again."""
    whole, cut, file = made(make, 2), made(make, 2), tmp_path / "training.safetensors"
    fit(whole, data, config=PLAN, quiet=True)
    with pytest.raises(Interrupted):
        fit(cut, data, config=PLAN, checkpoint=file, on_epoch=interrupt_after(2), quiet=True)
    fit(cut, data, config=PLAN, checkpoint=file, quiet=True)
    assert_same_bits(cut, whole)


def test_a_finished_training_is_not_repeated(data, make, tmp_path):
    file = tmp_path / "training.safetensors"
    first, second = made(make, 2), made(make, 2)
    fit(first, data, config=PLAN, checkpoint=file, quiet=True)
    seen: list[Epoch] = []
    history = fit(second, data, config=PLAN, checkpoint=file, on_epoch=seen.append, quiet=True)
    assert seen == []
    assert len(history.epochs) == 3
    assert_same_bits(first, second)


def test_a_checkpoint_changes_nothing(data, make, tmp_path):
    first, second = made(make, 2), made(make, 2)
    fit(first, data, config=PLAN, checkpoint=tmp_path / "a" / "b.safetensors", quiet=True)
    fit(second, data, config=PLAN, quiet=True)
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
    start = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    second = Tied()
    second.load_state_dict(start)
    fit(first, data, config=PLAN, quiet=True)
    with pytest.raises(Interrupted):
        fit(second, data, config=PLAN, checkpoint=file, on_epoch=interrupt_after(2), quiet=True)
    third = Tied()
    third.load_state_dict(start)
    fit(third, data, config=PLAN, checkpoint=file, quiet=True)
    assert_same_bits(first, third)
    assert third.up.weight is third.down.weight


def changed(split: Split, part: str) -> Split:
    """A split of which one value is another."""
    inputs, labels = split.inputs.clone(), split.labels.clone()
    (inputs if part == "inputs" else labels)[0] += 1
    return Split(inputs, labels % 4)


@pytest.mark.parametrize(
    ("another", "says"),
    [
        (lambda data: (data, PLAN.replace(seed=1), cross_entropy()), r"config.seed \(0, now 1\)"),
        (lambda data: (data, PLAN.replace(epochs=9), cross_entropy()), r"config.epochs \(3, now 9\)"),
        (lambda data: (data, PLAN, cross_entropy(0.2)), "loss"),
        (lambda data: (data, PLAN, lambda model, batch: cross_entropy()(model, batch)), "loss"),
        (lambda data: (data.replace(train=data.train[:40]), PLAN, cross_entropy()), "training inputs, training labels"),
        (lambda data: (data.replace(train=changed(data.train, "labels")), PLAN, cross_entropy()), "training labels"),
        (lambda data: (data.replace(train=changed(data.train, "inputs")), PLAN, cross_entropy()), "training inputs"),
        (
            lambda data: (data.replace(val=changed(data.val, "inputs")), PLAN, cross_entropy()),
            "validation inputs",
        ),
        (lambda data: (data.replace(mean=(0.5,) * 8, std=(1.0,) * 8), PLAN, cross_entropy()), "normalisation"),
    ],
    ids=["seed", "epochs", "smoothing", "objective", "size", "labels", "inputs", "validation", "normalisation"],
)
def test_a_checkpoint_of_another_training_is_refused(data, make, tmp_path, another, says):
    """By what it says is other, and nothing else."""
    file = tmp_path / "training.safetensors"
    fit(made(make, 2), data, config=PLAN, objective=cross_entropy(), checkpoint=file, quiet=True)
    network = made(make, 2)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    other, plan, objective = another(data)
    with pytest.raises(EnfoldError, match=f"written with different {says}: "):
        fit(network, other, config=plan, objective=objective, checkpoint=file, quiet=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_a_checkpoint_of_other_initial_weights_is_refused(data, make, tmp_path):
    file = tmp_path / "training.safetensors"
    fit(DeepEnsemble(make["mlp"], 2, seed=0), data, config=PLAN, checkpoint=file, quiet=True)
    with pytest.raises(EnfoldError, match="initial weights"):
        fit(DeepEnsemble(make["mlp"], 2, seed=9), data, config=PLAN, checkpoint=file, quiet=True)


def test_equal_data_in_another_object_resume(data, make, tmp_path):
    file = tmp_path / "training.safetensors"
    fit(made(make, 2), data, config=PLAN, checkpoint=file, quiet=True)
    moved = data.replace(source="elsewhere", train=Split(data.train.inputs.clone(), data.train.labels.clone()))
    assert len(fit(made(make, 2), moved, config=PLAN, checkpoint=file, quiet=True).epochs) == 3


def test_in_place_changes_of_data_are_detected(data, make, tmp_path):
    file = tmp_path / "training.safetensors"
    fit(made(make, 2), data, config=PLAN, checkpoint=file, quiet=True)
    data.train.inputs[3] += 1
    with pytest.raises(EnfoldError, match="training inputs: "):
        fit(made(make, 2), data, config=PLAN, checkpoint=file, quiet=True)


class Squares(Dataset):
    """Examples that are created on request."""

    def __init__(self, power: float, noise: bool = False) -> None:
        self.power, self.noise = power, noise

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        inputs = torch.arange(8.0).add(index / 40).pow(self.power) / 100
        return inputs + (torch.rand(8) if self.noise else 0), index % 4


LOADERS = {
    "list": lambda power: [(torch.full((8, 8), power), torch.arange(8) % 4)] * 3,
    "tensors": lambda power: DataLoader(TensorDataset(torch.full((40, 8), power), torch.arange(40) % 4), 8),
    "examples": lambda power: DataLoader(Squares(power), 8, shuffle=True),
    "augmented examples": lambda power: DataLoader(Squares(power, noise=True), 8, shuffle=True),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_the_examples_of_a_loader_are_compared(data, make, tmp_path, loader):
    file = tmp_path / "training.safetensors"
    fit(made(make, 2), data.replace(train=loader(0.5)), config=PLAN, checkpoint=file, quiet=True)
    assert (
        len(fit(made(make, 2), data.replace(train=loader(0.5)), config=PLAN, checkpoint=file, quiet=True).epochs) == 3
    )
    with pytest.raises(EnfoldError, match="different training examples: "):
        fit(made(make, 2), data.replace(train=loader(0.6)), config=PLAN, checkpoint=file, quiet=True)


def test_a_checkpoint_of_another_number_of_members_is_refused(data, make, tmp_path):
    file = tmp_path / "training.safetensors"
    fit(made(make, 2), data, config=PLAN, checkpoint=file, quiet=True)
    with pytest.raises(EnfoldError, match="initial weights, network"):
        fit(made(make, 3), data, config=PLAN, checkpoint=file, quiet=True)


@pytest.mark.parametrize("keep", [0, 5, 200, -10])
def test_a_broken_file_is_reported(data, make, tmp_path, keep):
    file = tmp_path / "training.safetensors"
    fit(made(make, None), data, config=PLAN, checkpoint=file, quiet=True)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(EnfoldError, match=r"training\.safetensors' must be a training checkpoint, .*delete it"):
        fit(made(make, None), data, config=PLAN, checkpoint=file, quiet=True)


def test_a_function_as_objective_can_be_resumed(data, make, tmp_path):
    """Its text holds its address, which is another one in each process."""

    def objective() -> object:
        def loss(model, batch):
            return cross_entropy()(model, batch)

        return loss

    file = tmp_path / "training.safetensors"
    with pytest.raises(Interrupted):
        fit(
            made(make, 2),
            data,
            config=PLAN,
            objective=objective(),
            checkpoint=file,
            on_epoch=interrupt_after(2),
            quiet=True,
        )
    history = fit(made(make, 2), data, config=PLAN, objective=objective(), checkpoint=file, quiet=True)
    assert len(history.epochs) == 3


def test_a_history_survives_json():
    history = History([Epoch(0, [1.0], [2.0], [0.5], None, 0.1, 3.0)], [1])
    assert History.from_dict(history.as_dict()) == history

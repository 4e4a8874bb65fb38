"""The loop: what it does to a model, with any training part, and how it fails."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from enfold.data import Data, Split
from enfold.data.batches import Order
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError, NonFiniteLoss
from enfold.evaluate import predict
from enfold.metrics import accuracy, nll, per_member
from enfold.train import History, TrainConfig, cross_entropy, fit
from enfold.train.checkpoint import stored_history

PLAN = TrainConfig(epochs=3, batch_size=16, lr=0.05)
SGD = TrainConfig(epochs=3, batch_size=16, optimizer="sgd", lr=0.1, schedule="constant", select="last")


def seeded(factory, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return factory()


def states_equal(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def batches(split: Split, size: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(split.inputs.split(size), split.labels.split(size), strict=True))


class Stream(IterableDataset):
    """An iterable of examples without a length."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __iter__(self):
        return iter(list(zip(self.split.inputs, self.split.labels, strict=True)))


def test_fit_equals_a_manual_loop(data, make):
    """SGD with Nesterov momentum and weight decay over a list of batches, bit by bit."""
    network, reference = seeded(make["mlp"]), seeded(make["mlp"])
    parts = batches(data.train)
    fit(network, data.replace(train=parts), config=SGD.replace(weight_decay=1e-2, schedule="cosine"), quiet=True)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
    for step in range(3 * len(parts)):
        inputs, labels = parts[step % len(parts)]
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * step / 12)) / 2
        optimizer.zero_grad()
        F.cross_entropy(reference(inputs), labels).backward()
        optimizer.step()
    for own, expected in zip(network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)


def test_it_learns(data, make):
    members = DeepEnsemble(make["mlp"], 3)
    before = accuracy(predict(members, data.test))
    history = fit(members, data, config=PLAN.replace(epochs=15), quiet=True)
    assert accuracy(predict(members, data.test)) > max(before, 0.6)
    assert history.epochs[-1].train_loss < history.epochs[0].train_loss
    assert not members.training


def test_content_of_the_history(data, make):
    members = DeepEnsemble(make["mlp"], 2)
    history = fit(members, data, config=SGD.replace(lr=0.05), quiet=True)
    last, found = history.epochs[-1], predict(members, data.val)
    assert [record.epoch for record in history.epochs] == [0, 1, 2]
    assert last.validation_loss == pytest.approx(per_member(nll, found).tolist())
    assert last.validation_score == pytest.approx(per_member(accuracy, found).tolist())
    assert last.ensemble_loss == pytest.approx(nll(found))
    assert last.lr == 0.05
    assert history.chosen == []  # select="last"


def test_figures_of_a_model_are_recorded_and_shown(data, capsys):
    class Told(nn.Linear):
        def figures(self) -> dict[str, float]:
            return {"largest weight": float(self.weight.detach().abs().max())}

    network = Told(8, data.num_classes)
    history = fit(network, data, config=TrainConfig(epochs=2, select="last"))
    assert history.epochs[-1].figures == network.figures() != history.epochs[0].figures
    assert f"largest weight {network.figures()['largest weight']:.3g}" in capsys.readouterr().err


def test_the_loss_of_an_epoch_is_the_mean_over_its_examples(data, make):
    """Fifty examples in batches of 16: the last two count as two."""
    frozen = SGD.replace(epochs=1, lr=1e-30, momentum=0.0, weight_decay=0.0)
    network = seeded(make["mlp"])
    history = fit(network, data, config=frozen, quiet=True)
    expected = F.cross_entropy(network(data.train.inputs), data.train.labels).detach()
    assert history.epochs[0].train_loss == pytest.approx([float(expected)], rel=1e-6)


def test_the_epoch_with_the_lowest_validation_nll_is_selected(data, make):
    plan = SGD.replace(epochs=8, lr=1.0, select="best")
    members = DeepEnsemble(make["mlp"], 3)
    start = per_member(nll, predict(members, data.val)).tolist()
    history = fit(members, data, config=plan, quiet=True)
    curves = list(zip(start, *(record.validation_loss for record in history.epochs), strict=True))
    assert history.chosen == [curve.index(min(curve)) for curve in curves]
    assert len(set(history.chosen)) > 1, "choose a plan whose members are best in different epochs"
    kept = per_member(nll, predict(members, data.val)).tolist()
    assert kept == pytest.approx([min(curve) for curve in curves])


def test_a_trained_network_is_not_made_worse(data, make):
    network = seeded(make["mlp"])
    fit(network, data, config=PLAN.replace(epochs=10), quiet=True)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    history = fit(network, data, config=SGD.replace(lr=50.0, epochs=1, select="best"), quiet=True)
    assert history.chosen == [0]
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_the_last_epoch_is_selected_on_request_or_without_validation_data(data, make):
    plan = SGD.replace(lr=1.0, epochs=6)
    last, blind = seeded(make["mlp"]), seeded(make["mlp"])
    fit(last, data, config=plan, quiet=True)
    history = fit(blind, data.replace(val=[]), config=plan.replace(select="best"), quiet=True)
    assert history.chosen == []
    assert history.epochs[0].validation_loss == []
    assert states_equal(last, blind)


def test_zero_epochs_change_nothing(data, make):
    network, before = seeded(make["mlp"]), seeded(make["mlp"])
    history = fit(network, data, config=PLAN.replace(epochs=0), quiet=True)
    assert history.epochs == []
    assert history.chosen == [0]
    assert states_equal(network, before)


@pytest.mark.parametrize("members", [None, 2], ids=["network", "members"])
def test_results_do_not_depend_on_the_global_generator(data, make, members):
    """Dropout too; and the caller's generator is left where it was."""

    def trained(seed: int, drawn: int) -> nn.Module:
        model = seeded(make["dropping"])
        model = model if members is None else DeepEnsemble(model, members)
        torch.manual_seed(drawn)
        state = torch.random.get_rng_state()
        fit(model, data, config=PLAN.replace(seed=seed), quiet=True)
        assert torch.equal(state, torch.random.get_rng_state())
        return model

    assert states_equal(trained(0, 1), trained(0, 2))
    assert not states_equal(trained(0, 1), trained(1, 1))


def test_noise_differs_from_epoch_to_epoch_and_from_member_to_member(data):
    class Noisy(nn.Linear):
        """Remembers what it drew."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                drawn.append(float(torch.rand(())))
            return super().forward(inputs)

    def draws(**changes: int) -> list[float]:
        drawn.clear()
        fit(Noisy(8, 4), data, config=SGD.replace(epochs=2, **changes), quiet=True)
        return list(drawn)

    drawn: list[float] = []
    first = draws()
    assert len(set(first)) == 8  # four batches in each of two epochs
    assert first == draws()
    assert not set(first) & set(draws(first_member=1))
    assert not set(first) & set(draws(seed=1))


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
def test_dropout_differs_within_an_ensemble(data, make):
    """Equal members with the same batches differ by their noise only."""
    members = DeepEnsemble([seeded(make["dropping"])] * 2)
    fit(members, data, config=SGD.replace(order="shared", epochs=1), quiet=True)
    assert members.equal_parameters() == []


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
@pytest.mark.parametrize("shared", [False, True])
def test_equal_members_in_one_order_remain_equal(data, make, shared):
    members = DeepEnsemble([seeded(make["mlp"])] * 2, engine="loop")
    fit(members, data, config=SGD.replace(order="shared" if shared else "own"), quiet=True)
    assert (len(members.equal_parameters()) == 4) == shared


def parts_of(data, kind: str):
    if kind == "list":
        return batches(data.train), batches(data.val)
    if kind == "loader":
        train, validation = (TensorDataset(part.inputs, part.labels) for part in (data.train, data.val))
        return DataLoader(train, 16), DataLoader(validation, 16)
    return DataLoader(Stream(data.train), 16), DataLoader(Stream(data.val), 16)


@pytest.mark.parametrize("kind", ["list", "loader", "stream"])
@pytest.mark.parametrize("members", [None, 2], ids=["network", "members"])
def test_any_iterable_is_a_split(data, make, kind, members):
    train, validation = parts_of(data, kind)
    model, reference = (
        seeded(make["mlp"]) if members is None else DeepEnsemble(make["mlp"], members) for _ in range(2)
    )
    history = fit(model, data.replace(train=train, val=validation), config=SGD, quiet=True)
    fit(reference, data.replace(train=batches(data.train)), config=SGD, quiet=True)
    assert states_equal(model, reference)
    assert len(history.epochs[0].validation_loss) == (members or 1)


def ones_and(data: Data, size: int) -> Data:
    """A loader of batches of this size and a last one of 1."""
    whole = TensorDataset(data.train.inputs[: 2 * size + 1], data.train.labels[: 2 * size + 1])
    return data.replace(train=DataLoader(whole, size))


@pytest.mark.parametrize("members", [1, 2])
def test_batch_norm_trains_without_a_loaders_last_batch_of_one(data, make, capsys, members):
    model = DeepEnsemble(make["normed"], members, seed=0)
    history = fit(model, ones_and(data, 8), config=TrainConfig(epochs=2))
    assert [epoch.steps for epoch in history.epochs] == [2, 2]
    assert "100 %  epoch 2/2" in capsys.readouterr().err


def test_batch_norm_needs_more_than_one_example(data, make):
    message = "batch norm .*raise batch_size.*drop_last=True"
    for part, size in ((ones_and(data, 1), 8), (data, 1)):
        with pytest.raises(EnfoldError, match=message):
            fit(make["normed"](), part, config=TrainConfig(epochs=1, batch_size=size), quiet=True)
    fit(make["mlp"](), ones_and(data, 1), config=TrainConfig(epochs=1), quiet=True)  # which has no batch norm


def test_labels_of_another_integer_type(data, make):
    train = [(inputs, labels.to(torch.int32)) for inputs, labels in batches(data.train)]
    network, reference = seeded(make["mlp"]), seeded(make["mlp"])
    history = fit(network, data.replace(train=train, val=train), config=SGD, quiet=True)
    fit(reference, data.replace(train=batches(data.train)), config=SGD, quiet=True)
    assert states_equal(network, reference)
    assert math.isfinite(history.epochs[0].validation_loss[0])


def test_a_shuffling_loader_is_repeated_by_the_seed(data, make):
    loader = DataLoader(TensorDataset(data.train.inputs, data.train.labels), 16, shuffle=True)

    def trained(drawn: int) -> nn.Module:
        network = seeded(make["mlp"])
        torch.manual_seed(drawn)
        fit(network, data.replace(train=loader), config=SGD, quiet=True)
        return network

    assert states_equal(trained(1), trained(2))


def test_without_a_length_the_schedule_is_per_epoch(data, make):
    stream = DataLoader(Stream(data.train), 16)
    history = fit(seeded(make["mlp"]), data.replace(train=stream), config=SGD.replace(schedule="cosine"), quiet=True)
    rates = [record.lr for record in history.epochs]
    assert rates == pytest.approx([0.1, 0.1 * 0.75, 0.1 * 0.25])


def test_a_generator_is_exhausted_after_an_epoch(data, make):
    with pytest.raises(EnfoldError, match="got none in epoch 2"):
        fit(seeded(make["mlp"]), data.replace(train=iter(batches(data.train))), config=SGD, quiet=True)


def test_a_generator_is_exhausted_by_validation(data, make):
    with pytest.raises(EnfoldError, match=r"there must be examples to predict.*not a generator that is used up"):
        fit(seeded(make["mlp"]), data.replace(val=iter(batches(data.val))), config=SGD, quiet=True)


def test_different_architectures_are_trained_together(data, make):
    networks = [seeded(make["mlp"]), seeded(make["normed"], 1)]
    alone = [seeded(make["mlp"]), seeded(make["normed"], 1)]
    fit(MixedEnsemble(networks), data, config=SGD, quiet=True)
    for network, single in zip(networks, alone, strict=True):
        fit(single, data, config=SGD.replace(order="shared"), quiet=True)
        assert states_equal(network, single)


class Explosive(nn.Module):
    """Gives NaN after some calls in train mode."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(8, 4), calls

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.left -= self.training
        return self.linear(inputs) * (math.nan if self.left < 0 else 1.0)


def test_a_loss_that_is_not_finite_stops_with_epoch_and_batch(data, tmp_path):
    """Four batches an epoch: the seventh is the third of epoch 2."""
    file = tmp_path / "training.safetensors"
    with pytest.raises(NonFiniteLoss, match=r"nan for member 0 in epoch 2, batch 3: .*state after epoch 1"):
        fit(seeded(lambda: Explosive(6)), data, config=PLAN, checkpoint=file, quiet=True)
    network = seeded(lambda: Explosive(100))
    history = fit(network, data, config=PLAN, checkpoint=file, quiet=True)
    assert len(history.epochs) == 3
    assert all(torch.isfinite(parameter).all() for parameter in network.parameters())


def test_the_member_that_diverged_is_named(data, make):
    members = DeepEnsemble(make["mlp"], 3)
    with torch.no_grad():
        members.expand()["0.weight"][1] = math.inf
    with pytest.raises(NonFiniteLoss, match=r"for member 1 in epoch 1, batch 1: lower lr"):
        fit(members, data.replace(val=[]), config=PLAN, quiet=True)


def test_existing_gradients_are_ignored(data, make):
    clean, used = seeded(make["mlp"]), seeded(make["mlp"])
    for parameter in used.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    for network in (clean, used):
        fit(network, data, config=SGD, quiet=True)
    assert states_equal(clean, used)
    assert all(parameter.grad is None for parameter in used.parameters())


def test_settings_that_contradict_the_data_or_the_model(data, make):
    members = DeepEnsemble(make["mlp"], 2)
    with pytest.raises(EnfoldError, match="bootstrap"):
        fit(members, data, config=PLAN.replace(bootstrap=True, order="shared"), quiet=True)
    with pytest.raises(EnfoldError, match="bootstrap"):
        fit(members, data.replace(train=batches(data.train)), config=PLAN.replace(bootstrap=True), quiet=True)
    with pytest.raises(EnfoldError, match=r"bootstrap|bagging"):
        fit(make["mlp"](), data.replace(train=batches(data.train)), config=PLAN.replace(bootstrap=True), quiet=True)
    with pytest.raises(EnfoldError, match="patience"):
        fit(members, data.replace(val=[]), config=PLAN.replace(patience=1), quiet=True)
    with pytest.raises(EnfoldError, match="train"):
        fit(members, data.replace(train=data.train[:0]), config=PLAN, quiet=True)
    assert states_equal(members, DeepEnsemble(make["mlp"], 2))


def test_progress_goes_to_stderr(data, make, capsys):
    fit(DeepEnsemble(make["mlp"], 2), data, config=PLAN, title="two members")
    shown = capsys.readouterr()
    assert shown.out == ""
    line = shown.err.splitlines()[-1]
    assert line.startswith("two members 100 %  epoch 3/3  loss ")
    assert "validation NLL" in line
    assert "ensemble NLL" in line
    fit(make["mlp"](), data, config=PLAN, quiet=True)
    assert capsys.readouterr().err == ""


def test_a_user_objective(data, make):
    """Anything that gives one loss a member is trained: here the distance of all logits to zero."""

    class Quiet:
        def __call__(self, model, batch):
            return model.forward_each(batch.inputs).square().mean(dim=(1, 2))

    members = DeepEnsemble(make["mlp"], 2)
    batch = next(Order(50, range(2)).batches(data, 0))
    before = Quiet()(members, batch)
    fit(members, data, config=SGD, objective=Quiet(), quiet=True)
    assert (Quiet()(members, batch) < 0.2 * before).all()
    assert cross_entropy()(members, batch).mean().item() == pytest.approx(math.log(4), rel=0.05)


def test_the_start_is_epoch_0_of_the_history(data, tmp_path):
    members = DeepEnsemble(lambda: nn.Linear(data.shape[0], data.num_classes), 2)
    before = per_member(nll, predict(members, data.val)).tolist()
    file = tmp_path / "checkpoint.safetensors"
    history = fit(members, data, config=TrainConfig(epochs=2, batch_size=16, lr=100.0), checkpoint=file, quiet=True)
    assert history.start.validation_loss == before
    assert (history.chosen, history.unchanged) == ([0, 0], [0, 1])
    assert len(history.epochs) == 2
    stored = stored_history(file)
    assert (stored.start, stored.chosen) == (history.start, [0, 0])
    assert History.from_dict(json.loads(json.dumps(history.as_dict()))) == history

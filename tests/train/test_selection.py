"""Selection of the epoch by hand: the state is a counter of the epochs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.data.convert import as_data
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.evaluate import predict
from enfold.metrics import calibrated_nll
from enfold.train import fit
from enfold.train.selection import Selection


def counter(members: int | None = None) -> nn.Module:
    """A model whose only weight says how long it was trained."""
    networks = [nn.Linear(1, 1, bias=False) for _ in range(members or 1)]
    for network in networks:
        nn.init.zeros_(network.weight)
    return networks[0] if members is None else DeepEnsemble(networks)


def run(selection: Selection, curves: list[list[float]]) -> int:
    """Feed validation NLLs, curve by curve of a member, counted from the start; how many epochs were trained."""
    for epoch, values in enumerate(zip(*curves, strict=True)):
        if epoch and selection.is_finished(epoch - 1):
            return epoch - 1
        with torch.no_grad():
            for parameter in selection.model.parameters():
                parameter.fill_(epoch)
        selection.update(epoch, list(values))
    return len(curves[0]) - 1


def weights(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def test_each_member_has_its_own_best_epoch():
    selection = Selection(counter(3), patience=None)
    assert run(selection, [[3, 2, 1, 2], [3, 1, 2, 2], [1, 2, 3, 4]]) == 3
    selection.apply()
    assert selection.epoch == [2, 1, 0]
    assert weights(selection.model) == [2.0, 1.0, 0.0]


def test_jointly_evaluated_members_are_selected_together():
    selection = Selection(counter(3), patience=1)
    assert run(selection, [[3, 1, 2, 4, 0]]) == 2
    selection.apply()
    assert selection.epoch == [1, 1, 1]
    assert weights(selection.model) == [1.0, 1.0, 1.0]


def test_the_first_of_equal_epochs_is_selected():
    selection = Selection(counter(), patience=None)
    run(selection, [[3, 1, 1, 1]])
    assert selection.epoch == [1]


def test_patience_counts_epochs_without_improvement():
    selection = Selection(counter(), patience=2)
    assert run(selection, [[5, 4, 6, 6, 1]]) == 3  # best at 1, two worse ones, stopped: 1 is never reached
    selection.apply()
    assert weights(selection.model) == [1.0]
    assert run(Selection(counter(), patience=3), [[5, 4, 6, 6, 1]]) == 4


def test_a_stopped_member_is_frozen_while_others_train():
    selection = Selection(counter(2), patience=1)
    assert run(selection, [[5, 4, 6, 1, 0], [5, 4, 3, 2, 1]]) == 4
    selection.apply()
    assert selection.epoch == [1, 4]
    assert weights(selection.model) == [1.0, 4.0]


def test_members_without_separate_parameters_are_selected_together():
    model = MixedEnsemble([counter(), counter()])
    selection = Selection(model, patience=None)
    run(selection, [[3, 1, 2], [3, 3, 0]])  # means 3, 2, 1
    selection.apply()
    assert selection.epoch == [2]
    assert weights(model) == [2.0, 2.0]


def test_record_and_restore():
    first = Selection(counter(2), patience=1)
    run(first, [[5, 4, 6], [5, 4, 3]])
    second = Selection(counter(2), patience=1)
    second.restore(first.record(), first.state)
    assert second.record() == first.record() == {"best": [4, 3], "epoch": [1, 2]}
    assert Selection(counter(), None).record() == {"best": [None], "epoch": [0]}
    fresh = Selection(counter(), None)
    fresh.restore(fresh.record(), {})
    assert fresh.best == [float("inf")]


def noisy(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return examples whose labels are wrong in part, on which a large network becomes overconfident."""
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(120, 6, generator=source)
    return inputs, (inputs[:, 0] + inputs[:, 1] + torch.randn(120, generator=source) > 0).long()


def test_the_calibrated_epoch_has_the_lowest_nll_at_a_temperature():
    train, val = noisy(0), noisy(1)
    found = {}
    for select in ("best", "calibrated"):
        torch.manual_seed(0)
        members = DeepEnsemble(lambda: nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 2)), 2)
        history = fit(members, train, val, epochs=12, lr=0.02, batch_size=30, select=select, quiet=True)
        found[select] = history, predict(members, as_data(train, val).val)
    history, predictions = found["calibrated"]
    records = [history.start, *history.epochs]
    for member in range(2):
        values = [record.calibrated_loss[member] for record in records]
        assert history.chosen[member] == values.index(min(values))
        assert calibrated_nll(predictions.member(member)) == pytest.approx(min(values), rel=1e-6)
    assert found["best"][0].chosen != history.chosen
    assert all(not record.calibrated_loss for record in found["best"][0].epochs)


def test_without_an_nll_the_calibrated_epoch_is_the_best_one():
    inputs = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    examples = (inputs, inputs[:, :1].square())
    chosen = []
    for select in ("best", "calibrated"):
        torch.manual_seed(0)
        history = fit(nn.Linear(6, 1), examples, examples, epochs=4, lr=0.1, select=select, quiet=True)
        chosen.append((history.chosen, [record.validation_loss for record in history.epochs]))
    assert chosen[0] == chosen[1]

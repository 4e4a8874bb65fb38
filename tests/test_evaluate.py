"""Evaluation in one pass for any chunk size, model and split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clouds import three_clouds
from enfold.data import Data, Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import (
    Row,
    evaluate,
    mean_member_score,
    member_logits,
    predict,
    recovered_fraction,
    score,
    shown,
    shown_gain,
)
from enfold.metrics import METRICS, accuracy, apply_temperature, fit_temperature, gibbs_nll, nll
from enfold.tasks import Regression


class Network(nn.Module):
    """With a batch norm and a dropout, which only eval mode makes repeatable."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.relu(self.norm(self.inner(inputs)))))


@pytest.fixture
def data() -> Data:
    return three_clouds(20, 30, 50)


@pytest.fixture
def members() -> DeepEnsemble:
    return DeepEnsemble(Network, 3)


def models(members: DeepEnsemble) -> dict[str, nn.Module]:
    return {"network": members.member(0), "stacked": members, "mixed": MixedEnsemble(members.networks())}


@pytest.mark.parametrize("kind", ["network", "stacked", "mixed"])
@pytest.mark.parametrize("size", [1, 7, 50, 999])
def test_chunks_do_not_change_what_is_predicted(members, data, kind, size):
    model = models(members)[kind]
    found = predict(model, data.test, batch_size=size)
    assert found.log_probs.shape == (1 if kind == "network" else 3, 50, 3)
    assert torch.equal(found.labels, data.test.labels)
    expected = torch.stack([net.eval()(data.test.inputs) for net in members.networks()]).log_softmax(-1).detach()
    torch.testing.assert_close(found.log_probs, expected[: found.num_members], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["network", "stacked", "mixed"])
def test_the_mode_is_restored_and_models_are_unchanged(members, data, kind):
    model = models(members)[kind].train()
    parts = list(model.modules())
    parts[-1].training = False  # a part that someone froze
    modes = [part.training for part in parts]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    predict(model, data.test)
    assert [part.training for part in parts] == modes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_mode_is_restored_if_prediction_fails(members, data):
    members.train()
    with pytest.raises(RuntimeError):
        predict(members, data.replace(test=Split(torch.zeros(3, 9), torch.zeros(3, dtype=torch.long))).test)
    assert members.training
    assert members.skeleton.network.training


def test_any_iterable_is_a_split(members, data):
    expected = predict(members, data.test).log_probs
    split = data.test
    batches = list(zip(split.inputs.split(8), split.labels.split(8), strict=True))
    loader = DataLoader(TensorDataset(split.inputs, split.labels), 16)
    for part in (batches, loader, iter(batches)):
        found = predict(members, data.replace(test=part).test)
        torch.testing.assert_close(found.log_probs, expected)
        assert torch.equal(found.labels, split.labels)


def test_pixels_are_prepared(data):
    pixels = torch.randint(0, 256, (10, 1, 2, 2), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    pictures = Data([], [], Split(pixels, torch.zeros(10, dtype=torch.long)), 2, (1, 2, 2), mean=(0.5,), std=(0.25,))
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    expected = network((pixels / 255 - 0.5) / 0.25).log_softmax(-1).detach()
    torch.testing.assert_close(predict(network, pictures.test).log_probs[0], expected)


def test_logits_of_a_network_that_returns_more_than_a_tensor():
    class Wrapped(nn.Linear):
        def forward(self, inputs):
            return {"logits": super().forward(inputs), "loss": None}

    network = Wrapped(4, 3)
    assert member_logits(network, torch.zeros(5, 4)).shape == (1, 5, 3)


@pytest.mark.parametrize("part", ["val", "test"])
def test_empty_splits_are_refused(members, data, part):
    with pytest.raises(EnfoldError, match=r"there must be examples to predict.*not a generator that is used up"):
        predict(members, getattr(data.replace(**{part: iter(())}), part))
    with pytest.raises(EnfoldError, match="there must be examples to predict"):
        predict(members, getattr(data.replace(**{part: data.test[:0]}), part))


def test_scores_are_the_metrics_and_those_at_the_fitted_temperature(members, data):
    test, validation = predict(members, data.test), predict(members, data.val)
    plain, full = score(test), score(test, validation)
    assert plain == {name: metric(test) for name, metric in METRICS.items()}
    assert full.keys() - plain.keys() == {"temperature", "cnll", "cece", "cbrier"}
    assert full["temperature"] == fit_temperature(validation)
    assert full["cnll"] == pytest.approx(nll(apply_temperature(test, full["temperature"])))


def test_the_mean_members_scores(members, data):
    test, validation = predict(members, data.test), predict(members, data.val)
    found = mean_member_score(test, validation)
    assert found["nll"] == pytest.approx(gibbs_nll(test))
    own = [accuracy(predict(network, data.test)) for network in members.networks()]
    assert found["accuracy"] == pytest.approx(sum(own) / 3)
    assert mean_member_score(test).keys() == METRICS.keys()


def test_the_gain_recovered(members, data):
    """0 for a mean member, 1 for the ensemble, and values in between."""
    ensemble = evaluate(members, data, reference=members)
    assert ensemble.gain_recovered == pytest.approx(1.0)
    gains = [evaluate(network, data, reference=members).gain_recovered for network in members.networks()]
    assert sum(gains) / 3 == pytest.approx(0.0, abs=1e-6)
    assert recovered_fraction({"nll": 0.9}, {"nll": 1.0}, {"nll": 0.8}) == pytest.approx(0.5)
    assert math.isnan(recovered_fraction({"nll": 0.9}, {"nll": 1.0}, {"nll": 1.0}))
    alone = evaluate(members.member(0), data, reference=members[:1])
    assert math.isnan(alone.gain_recovered)  # one member is its own ensemble


def test_a_row_reads_as_a_line(members, data):
    row = evaluate(members, data, reference=members, name="four networks")
    scores = row.scores
    assert str(row) == (
        f"four networks: accuracy {100 * scores['accuracy']:.2f} %  nll {scores['nll']:.4f}  "
        f"ece {100 * scores['ece']:.2f} %  brier {scores['brier']:.4f}  gain recovered 100 %"
    )
    assert str(evaluate(members, data)).startswith("DeepEnsemble: accuracy ")
    assert "gain" not in str(evaluate(members, data))
    assert str(Row("one", scores, math.nan)).endswith("gain recovered -")
    assert (shown("accuracy", 0.5), shown("nll", 0.5)) == ("50.00 %", "0.5000")
    assert (shown_gain(0.456), shown_gain(-0.1), shown_gain(math.inf), shown_gain(-5090.0)) == (
        "46 %",
        "-10 %",
        "-",
        "-",
    )


def test_without_a_validation_split_there_is_no_temperature(members, data):
    row = evaluate(members, data.replace(val=[]))
    assert "temperature" not in row.scores
    assert row.scores["nll"] == pytest.approx(evaluate(members, data).scores["nll"])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("model", ["network", "stacked", "mixed"])
def test_inputs_are_given_in_the_type_of_the_model(members, data, kind, model):
    expected = predict(models(members)[model], data.test).log_probs
    found = predict(models(members.to(kind))[model], data.test).log_probs
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-2 if kind == torch.bfloat16 else 5e-3)


def test_members_of_different_types_get_their_own_inputs(members, data):
    networks = members.networks()
    expected = predict(MixedEnsemble(networks), data.test).log_probs
    networks[0].half(), networks[1].double()
    torch.testing.assert_close(predict(MixedEnsemble(networks), data.test).log_probs, expected, rtol=0, atol=5e-3)


def test_integers_and_networks_without_parameters_are_unchanged():
    words, inputs = torch.randint(9, (5, 2)), torch.randn(5, 3, dtype=torch.float64)
    embedding = nn.Sequential(nn.Embedding(9, 4), nn.Flatten()).half()
    assert torch.equal(member_logits(embedding, words)[0], embedding(words))
    assert member_logits(nn.Softmax(-1), inputs).dtype == torch.float64


# Other tasks


def numbers(seed, N=60):
    inputs = torch.randn(N, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, 0] + 0.3 * torch.randn(N, generator=torch.Generator().manual_seed(seed + 1))


def heads(width, M=3):
    torch.manual_seed(0)
    return DeepEnsemble([nn.Linear(4, width) for _ in range(M)])


@pytest.mark.parametrize("size", [7, 60])
def test_predictions_of_numbers(size):
    inputs, targets = numbers(0)
    ensemble = heads(2)
    task = Regression(head="gaussian", variance="softplus")
    found = predict(ensemble, (inputs, targets), size, task=task)
    outputs = torch.stack([network(inputs) for network in ensemble.networks()]).detach()
    torch.testing.assert_close(found.means.float(), outputs[..., 0])
    torch.testing.assert_close(found.aleatoric.float(), nn.functional.softplus(outputs[..., 1]))
    torch.testing.assert_close(found.targets.float(), targets)


def test_rows_of_all_tasks():
    inputs, targets = numbers(0)
    for width, y, task, headline in [
        (1, targets, None, "rmse"),
        (2, targets, Regression(head="gaussian", variance="log"), "rmse"),
        (3, targets, Regression(quantiles=(0.1, 0.5, 0.9)), "rmse"),
        (1, targets > 0, None, "accuracy"),
        (2, torch.stack([targets > 0, targets > 1], 1), None, "map"),
    ]:
        ensemble = heads(width)
        row = evaluate(ensemble, (inputs[:30], y[:30]), (inputs[30:], y[30:]), reference=ensemble, task=task)
        assert row.gain_recovered == pytest.approx(1), headline
        assert str(row).startswith(f"DeepEnsemble: {headline} ")
        assert {"scale", "temperature"} & row.scores.keys()


def test_a_student_has_the_task_of_its_reference():
    """Its head follows from its outputs, so that no task has to be named."""
    inputs, targets = numbers(0)
    reference = heads(2)
    reference.task = Regression(head="gaussian", variance="softplus")
    for width, metric in ((1, "mse"), (2, "nll"), (3, "nll")):
        row = evaluate(nn.Linear(4, width), (inputs, targets), reference=reference)
        assert math.isfinite(row.gain_recovered)
        assert metric in row.scores

"""`fit`, `predict` and `evaluate` accept loaders, data sets, tensors, arrays and built-in data, and refuse the rest."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from enfold import EnfoldError, evaluate, fit, predict
from enfold.data import Data, Split
from enfold.data.convert import as_data

INPUTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long()


class DataFrame:
    iloc = None  # how data frames are recognised


class Pairs(Dataset):
    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        return INPUTS[index], LABELS[index]


class Stream(IterableDataset):
    def __iter__(self):
        return zip(INPUTS, LABELS, strict=True)


KINDS = {
    "tensors": (INPUTS, LABELS),
    "list of tensors": [INPUTS, LABELS],
    "arrays": (INPUTS.numpy(), LABELS.numpy()),
    "split": Split(INPUTS, LABELS),
    "tensor data set": TensorDataset(INPUTS, LABELS),
    "data set": Pairs(),
    "stream": Stream(),
    "loader": DataLoader(TensorDataset(INPUTS, LABELS), batch_size=16),
    "batches": [(INPUTS[:20], LABELS[:20]), (INPUTS[20:], LABELS[20:])],
}


def network():
    torch.manual_seed(0)
    return nn.Linear(6, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_and_is_evaluated(kind):
    model = network()
    history = fit(model, KINDS[kind], KINDS[kind], epochs=3, lr=0.1, batch_size=16, quiet=True)
    assert len(history.epochs[-1].validation_loss) == 1
    expected = predict(model, (INPUTS, LABELS))
    torch.testing.assert_close(predict(model, KINDS[kind]).log_probs, expected.log_probs)
    assert evaluate(model, KINDS[kind]).scores["nll"] < 0.6
    assert "cnll" in evaluate(model, KINDS[kind], (INPUTS[::2] + 0.01, LABELS[::2])).scores


@pytest.mark.parametrize("kind", ["tensors", "arrays", "split", "tensor data set"])
def test_data_in_memory_train_to_the_same_bits(kind):
    models = []
    for given in (KINDS["split"], KINDS[kind]):
        models.append(network())
        fit(models[-1], given, epochs=2, batch_size=16, quiet=True)
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_data_set_and_its_splits_train_equally():
    raw = torch.randint(0, 256, (40, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    split = Split(raw, LABELS)
    data = Data(split, split[:20], split[10:], 2, (1, 4, 4), mean=(0.4,), std=(0.2,))
    models = []
    for given in ((data,), (data.train, data.val)):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)))
        fit(models[-1], *given, epochs=2, batch_size=16, quiet=True)
    assert torch.equal(models[0][1].weight, models[1][1].weight)
    assert evaluate(models[0], data).scores == evaluate(models[0], data.test, data.val).scores
    torch.testing.assert_close(data.test.prepare(raw[:1]), (raw[:1] / 255 - 0.4) / 0.2)


def test_inspecting_a_loader_preserves_the_random_state():
    state = torch.random.get_rng_state()
    as_data(DataLoader(TensorDataset(INPUTS, LABELS), batch_size=16, shuffle=True))
    assert torch.equal(torch.random.get_rng_state(), state)


WRONG = {
    "None": (None, "None"),
    "data frame": (DataFrame(), "got a DataFrame.*to_numpy"),
    "data frame in a pair": ((DataFrame(), LABELS), "inputs .*got a DataFrame.*to_numpy"),
    "three tensors": ((INPUTS, LABELS, LABELS), "batch of 3 elements .*unpack="),
    "name": ("cifar10", r"enfold.data.load\('cifar10'\)"),
    "inputs only": (INPUTS, "got a Tensor"),
    "dict": ({"x": INPUTS}, "got a dict"),
    "number": (3, "got a int"),
    "float labels": ((INPUTS, LABELS.float()), "task must be named"),
    "text labels": ((INPUTS.numpy(), np.array(["a"] * 40)), "targets"),
    "list labels": ((INPUTS, LABELS.tolist()), "targets .*got a list"),
    "one-hot labels": ((INPUTS, nn.functional.one_hot(LABELS)), "argmax"),
    "negative labels": ((INPUTS, LABELS - 100), "between 0 and"),
    "too few labels": ((INPUTS, LABELS[:5]), "targets"),
    "batches of three": ([(INPUTS, LABELS, LABELS)], "batch of 3 elements .*unpack="),
    "batches without target": ([{"x": INPUTS}], "must have a target, got a dict"),
    "inputs without target": ([INPUTS], "pair .inputs, targets., got 1 element"),
    "text batches": ([("a", LABELS)], "inputs of a batch of (train|test) must be tensors, got a str"),
    "uneven batches": ([(INPUTS, LABELS[:5])], "batch of (train|test) must have one target per input"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_fit_refuses_other_kinds_at_the_call(kind):
    given, words = WRONG[kind]
    model = network()
    before = model.weight.clone()
    with pytest.raises(EnfoldError, match=words):
        fit(model, given, epochs=1, quiet=True)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("call", [evaluate, predict])
def test_evaluation_refuses_other_kinds_at_the_call(kind, call):
    given, words = WRONG[kind]
    with pytest.raises(EnfoldError, match=words):
        call(network(), given)


def test_validation_examples_are_checked_by_name():
    with pytest.raises(EnfoldError, match="val must be"):
        fit(network(), (INPUTS, LABELS), DataFrame(), epochs=1, quiet=True)


@pytest.mark.parametrize("given", [(INPUTS, LABELS + 5), [(INPUTS, LABELS + 5)]])
def test_labels_beyond_the_outputs_are_refused(given):
    for call in (lambda: fit(network(), given, epochs=1, quiet=True), lambda: evaluate(network(), given)):
        with pytest.raises(EnfoldError, match="labels must be"):
            call()


def test_an_unknown_setting_suggests_the_nearest():
    with pytest.raises(EnfoldError, match="no setting 'epoch', did you mean 'epochs'"):
        fit(network(), (INPUTS, LABELS), epoch=1)

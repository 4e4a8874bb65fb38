"""Examples in memory with several inputs, named columns and inputs that are None; batches that are none are refused."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from enfold import DeepEnsemble, EnfoldError, distill, evaluate, fit
from enfold.data.convert import as_data
from enfold.data.tree import select_examples

FIRST = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
SECOND = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
LABELS = (FIRST[:, 0] > SECOND[:, 0]).long()
SHORT = {"epochs": 2, "batch_size": 16, "quiet": True}


class Pair(nn.Module):
    """Takes two inputs, of which the second may be None but must be passed, as in tabular networks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, first: Tensor, second: Tensor | None) -> Tensor:
        return self.first(first) if second is None else self.first(first) + self.second(second)


class Encoding(Mapping):
    """A mapping that is not a dictionary, as returned by tokenizers."""

    def __init__(self, content):
        self.content = content

    def __getitem__(self, name):
        return self.content[name]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


NAMED = {"first": FIRST, "second": SECOND, "labels": LABELS}


@pytest.mark.parametrize(
    "examples",
    [
        (FIRST, SECOND, LABELS),
        ((FIRST, SECOND), LABELS),
        ({"first": FIRST, "second": SECOND}, LABELS),
        NAMED,
        Encoding(NAMED),
        {name: column.numpy() for name, column in NAMED.items()},
    ],
    ids=["triple", "tuple", "dict", "labels in it", "mapping", "arrays"],
)
def test_columns_train_to_the_same_weights(examples):
    ensemble = DeepEnsemble(Pair, 2)
    fit(ensemble, examples, **SHORT)
    expected = DeepEnsemble(Pair, 2)
    fit(expected, ((FIRST, SECOND), LABELS), **SHORT)
    for name, tensor in ensemble.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name])
    assert evaluate(ensemble, examples).scores == evaluate(expected, ((FIRST, SECOND), LABELS)).scores


@pytest.mark.parametrize(
    "examples",
    [
        ((FIRST, None), LABELS),
        (FIRST, None, LABELS),
        {"first": FIRST, "second": None, "labels": LABELS},
        [{"first": FIRST[:20], "second": None, "label": LABELS[:20]}] * 2,
    ],
    ids=["tuple", "triple", "named", "batches"],
)
def test_inputs_may_be_none(examples):
    ensemble = DeepEnsemble(Pair, 2)
    fit(ensemble, examples, examples, **SHORT)
    network = distill(ensemble, examples, **SHORT)
    assert torch.equal(network(FIRST, None), network.first(FIRST))
    assert evaluate(network, examples, reference=ensemble).scores["nll"] > 0


def test_examples_with_none_can_be_selected():
    first, second = select_examples((FIRST, None), torch.tensor([3, 1]))
    assert torch.equal(first, FIRST[[3, 1]])
    assert second is None


def test_unpack_applies_to_tensors_in_memory():
    both = torch.cat([FIRST, SECOND], dim=1)
    ensemble = DeepEnsemble(Pair, 2)
    fit(ensemble, (both, LABELS), unpack=lambda batch: ((batch[0][:, :3], batch[0][:, 3:]), batch[1]), **SHORT)
    expected = DeepEnsemble(Pair, 2)
    fit(expected, ((FIRST, SECOND), LABELS), **SHORT)
    for name, tensor in ensemble.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name])


def test_a_batch_is_selected_at_once():
    loader = as_data(((FIRST, {"more": SECOND}), LABELS)).train.loader
    dataset = loader.dataset
    first, more = dataset.__getitems__([2, 0])[0]
    assert torch.equal(first, FIRST[[2, 0]])
    assert torch.equal(more["more"], SECOND[[2, 0]])
    assert torch.equal(dataset[2][1], LABELS[2])


@pytest.mark.parametrize(
    "examples",
    [
        [{"first": first, "labels": int(label)} for first, label in zip(FIRST, LABELS, strict=True)],
        [{"first": first, "labels": label} for first, label in zip(FIRST, LABELS, strict=True)],
        list(zip(FIRST, LABELS, strict=True)),
    ],
    ids=["numbers", "dicts", "pairs"],
)
def test_single_examples_are_no_batches(examples):
    with pytest.raises(EnfoldError, match=r"train must yield batches.*DataLoader\(train"):
        fit(nn.Linear(3, 2), examples, **SHORT)
    fit(nn.Linear(3, 2), DataLoader(examples, batch_size=8), **SHORT)


def test_a_data_set_that_cannot_be_collated_is_refused():
    class Graph:
        y = LABELS[:1]

    class Graphs(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return Graph()

    with pytest.raises(EnfoldError, match=r"examples of train must be tensors.*collate_fn"):
        fit(nn.Linear(3, 2), Graphs(), **SHORT)


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(EnfoldError, match="one row per example"):
        fit(Pair(), {"first": FIRST, "second": SECOND[:3], "labels": LABELS}, **SHORT)

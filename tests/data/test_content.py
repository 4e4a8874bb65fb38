"""Identity of data: what it covers, and that reading does not change the data."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from enfold.data import Data, Split
from enfold.data.content import content
from enfold.io.files import digest

SPLIT = Split(torch.arange(48.0).view(12, 4), torch.arange(12) % 3)


def data_of(train: object) -> Data:
    return Data(train, SPLIT, SPLIT, 3, (4,))


class Drawn(Dataset):
    """Examples with noise of three generators, or of one without a state that can be restored."""

    def __init__(self, rewound: bool = True) -> None:
        self.own, self.calls = None if rewound else np.random.default_rng(), 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, object]:
        self.calls += 1
        noise = random.random() + np.random.rand() + (0 if self.own is None else self.own.random())
        return {"inputs": torch.rand(4) + noise, "labels": index % 3, "name": "x", "array": np.zeros(2)}


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("a stream is used up by reading it")


def test_reading_a_loader_changes_no_generator():
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = (content(data_of(DataLoader(Drawn(), 5)))["training examples"] for _ in range(2))
    assert first == second is not None
    assert (random.getstate() == states[0], torch.equal(torch.get_rng_state(), states[1])) == (True, True)
    assert np.array_equal(np.random.get_state()[1], states[2])


@pytest.mark.parametrize(
    "part",
    [
        DataLoader(Drawn(rewound=False), 5),
        DataLoader(Drawn(), 5, num_workers=2),
        DataLoader(Stream(), 5),
        (batch for batch in ()),
        [(object(), torch.zeros(3))],
    ],
    ids=["not the same again", "workers", "stream", "generator", "objects"],
)
def test_loaders_are_identified_by_source_and_length(part):
    found = content(data_of(part))
    assert (found["training examples"], found["training source"]) == (None, "in memory")


def digest_of(dataset: Dataset) -> str | None:
    return content(data_of(DataLoader(dataset, 5)))["training examples"]


def test_every_example_of_a_subset_is_covered():
    """Also those behind the first ones, and those of subsets of subsets."""
    inputs, labels = torch.arange(160.0).view(40, 4), torch.arange(40) % 3
    other = inputs.clone()
    other[39] += 1
    whole, changed = (TensorDataset(each, labels) for each in (inputs, other))
    for make in (
        lambda data: Subset(data, range(10, 40)),
        lambda data: Subset(Subset(data, range(5, 40)), range(5, 35)),
        lambda data: ConcatDataset([whole, Subset(data, range(30, 40))]),
    ):
        assert digest_of(make(whole)) == digest_of(make(TensorDataset(inputs.clone(), labels.clone()))) is not None
        assert digest_of(make(whole)) != digest_of(make(changed))
    rows = list(range(20))
    assert digest_of(Subset(whole, rows)) != digest_of(Subset(whole, [*rows[:19], 30]))
    assert digest_of(Subset(Drawn(), rows)) != digest_of(Subset(Drawn(), [*rows[:19], 3])) is not None


def test_a_dataset_that_changes_its_tensors_is_read():
    class Scaled(TensorDataset):
        factor = 1.0

        def __getitem__(self, index):
            inputs, label = super().__getitem__(index)
            return inputs * self.factor, label

    first, second = (Scaled(SPLIT.inputs, SPLIT.labels) for _ in range(2))
    second.factor = 2.0
    assert digest_of(first) != digest_of(second)


def test_workers_are_not_started():
    """A data set may open its file where it is first read, which must be in the worker."""
    examples = Drawn()
    content(data_of(DataLoader(examples, 5, num_workers=2)))
    assert examples.calls == 0


def test_a_split_is_digested_once(monkeypatch):
    split, calls = Split(torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64)), []
    monkeypatch.setattr("enfold.data.dataset.digest", lambda tensors: calls.append(1) or digest(tensors))
    first = split.digests
    assert (split.digests == first, len(calls)) == (True, 2)
    split.labels[0] = 1
    assert (split.digests[0], split.digests[1]) == (first[0], digest([split.labels]))


def test_digests_depend_on_values_only(monkeypatch):
    tensor = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
    first = digest([tensor])
    monkeypatch.setattr("enfold.io.files.CHUNK", 7)
    assert digest([tensor]) == digest([tensor.transpose(0, 2).contiguous().transpose(0, 2)]) == first
    assert len({digest([each]) for each in (tensor, tensor.view(4, 3, 5), tensor.double(), tensor + 1)}) == 4
    assert digest([torch.ones(1).expand(1, 1)[:, 0]]) == digest([torch.ones(1)])
    assert digest([torch.tensor(1.0)]) != digest([torch.tensor(2.0)])
    assert digest([torch.zeros(0, 3)]) != digest([torch.zeros(3, 0)])

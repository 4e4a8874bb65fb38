"""Batches: random choices depend on the seed, the member and the epoch only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from enfold.data import Data, Split
from enfold.data.augment import augmentation
from enfold.data.batches import Batch, Order
from enfold.data.dataset import evaluation_batches, has_examples, length
from enfold.errors import EnfoldError
from enfold.metrics import left_out_fraction
from enfold.seeds import generator

prop = settings(deadline=None, derandomize=True, max_examples=25)


def numbered(count: int = 10) -> Data:
    """Example i is the vector (i, i) with the label i modulo 3."""
    numbers = torch.arange(count)
    return Data(Split(numbers[:, None].repeat(1, 2).float(), numbers % 3), [], [], 3, (2,))


def pictures(count: int = 12) -> Data:
    pixels = torch.randint(0, 256, (count, 1, 5, 5), generator=torch.Generator().manual_seed(0))
    split = Split(pixels.to(torch.uint8), torch.arange(count) % 2)
    return Data(split, [], [], 2, (1, 5, 5), mean=(0.5,), std=(0.25,))


def epoch(order: Order, data: Data, number: int = 0) -> list[Batch]:
    return list(order.batches(data, number))


def indices(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([batch.indices for batch in batches], dim=-1)


@prop
@given(count=st.integers(1, 40), size=st.integers(1, 50), members=st.none() | st.integers(1, 3))
def test_every_example_once_an_epoch(count, size, members):
    order = Order(size, None if members is None else range(members))
    found = epoch(order, numbered(count))
    assert order.steps(numbered(count).train) == len(found)
    rows = indices(found)
    rows = rows[None] if members is None else rows
    left_out = 1 if count % size == 1 and count > size else 0  # a last batch of one
    assert all(len(set(row.tolist())) == len(row) == count - left_out for row in rows)
    for batch in found:
        assert batch.own == (members is not None)
        assert torch.equal(batch.inputs[..., 0].long(), batch.indices)
        assert torch.equal(batch.targets, batch.indices % 3)


def test_own_orders_differ_and_a_shared_one_is_for_all():
    own = indices(epoch(Order(4, range(3)), numbered()))
    assert len({tuple(row) for row in own.tolist()}) == 3
    shared = epoch(Order(4), numbered())
    assert [batch.indices.ndim for batch in shared] == [1, 1, 1]
    assert [len(batch.targets) for batch in shared] == [4, 4, 2]


def test_an_order_depends_on_seed_member_and_epoch_only():
    data = numbered(30)
    three = indices(epoch(Order(8, range(3)), data, 5))
    assert torch.equal(three[:2], indices(epoch(Order(8, range(2)), data, 5)))
    assert torch.equal(three[2:], indices(epoch(Order(3, [2]), data, 5)))  # member 2 alone, in other batches
    assert not torch.equal(three, indices(epoch(Order(8, range(3)), data, 6)))
    assert not torch.equal(three, indices(epoch(Order(8, range(3), seed=1), data, 5)))


def test_bagging_omits_about_a_third():
    """A point is drawn at least once with probability 1 - (1 - 1/N)^N, about 0.632."""
    size = 10_000
    rows = indices(epoch(Order(size, range(4), bootstrap=True), numbered(size)))
    included = torch.tensor([len(row.unique()) / size for row in rows])
    assert left_out_fraction(size) == pytest.approx(0.368, abs=1e-3)
    torch.testing.assert_close(included, torch.full((4,), 0.632), rtol=0, atol=0.01)
    assert not torch.equal(rows[0].unique(), rows[1].unique())


def test_a_bag_is_the_same_in_every_epoch():
    order, data = Order(8, range(2), bootstrap=True), numbered(40)
    first, second = (indices(epoch(order, data, number)) for number in (0, 1))
    assert torch.equal(first.sort(1).values, second.sort(1).values)
    assert not torch.equal(first, second)


def test_pixels_are_augmented_and_then_normalised():
    data = pictures()
    batch = epoch(Order(12, augment=("pad-crop", "flip")), data, 3)[0]
    raw = data.train.inputs[batch.indices].float() / 255
    moved = augmentation(("pad-crop", "flip"))(raw, generator(0, "augment", "shared", 3))
    torch.testing.assert_close(batch.inputs, (moved - 0.5) / 0.25)
    assert batch.augmented
    plain = epoch(Order(12), data)[0]
    assert not plain.augmented
    torch.testing.assert_close(plain.inputs, data.prepare(data.train.inputs[plain.indices]))


def test_a_members_augmentation_is_its_own():
    data, names = pictures(), ("pad-crop", "flip")
    together = epoch(Order(12, range(3), augment=names), data)[0]
    alone = epoch(Order(12, [1], augment=names), data)[0]
    torch.testing.assert_close(together.inputs[1:2], alone.inputs, rtol=0, atol=0)
    order = torch.argsort(together.indices, dim=1)
    sorted_inputs = torch.stack([rows[index] for rows, index in zip(together.inputs, order, strict=True)])
    assert not torch.equal(sorted_inputs[0], sorted_inputs[1])  # the same pictures, moved otherwise


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(2), 0)] * 5)


def test_a_loader_is_used_unchanged():
    split = numbered().train
    loader = DataLoader(TensorDataset(split.inputs, split.labels), 4)
    order = Order(99, range(2))
    found = epoch(order, numbered().replace(train=loader))
    assert order.steps(loader) == 3
    assert [len(batch.targets) for batch in found] == [4, 4, 2]
    assert all(not batch.own and batch.indices is None and batch.augmented for batch in found)
    assert torch.equal(torch.cat([batch.inputs for batch in found]), split.inputs)


def test_a_loaders_images_are_augmented_on_request():
    data = pictures()
    images = data.prepare(data.train.inputs)
    found = epoch(Order(augment=("flip",)), data.replace(train=[(images, data.train.labels)]))[0]
    mirrored = (found.inputs == images.flip(-1)).flatten(1).all(1)
    assert ((found.inputs == images).flatten(1).all(1) ^ mirrored).all()
    assert 0 < int(mirrored.sum()) < 12


def test_lengths():
    assert length(numbered().train) == 10
    assert length([1, 2]) == 2
    assert length(DataLoader(Stream(), 2)) is None
    assert length(iter([])) is None
    assert Order().steps(DataLoader(Stream(), 2)) is None
    assert [has_examples(part) for part in (numbered().train, iter([]), [], None)] == [True, True, False, False]


def test_invalid_training_data():
    with pytest.raises(EnfoldError, match=r"bootstrap .*got a loader"):
        epoch(Order(bootstrap=True), numbered().replace(train=[]))
    with pytest.raises(EnfoldError, match=r"train .*got none in epoch 1"):
        epoch(Order(), numbered().replace(train=iter([])))
    with pytest.raises(EnfoldError, match=r"train .*got none"):
        epoch(Order(), numbered(0))
    with pytest.raises(EnfoldError, match="augment must"):
        epoch(Order(augment=("rotate",)), pictures())
    with pytest.raises(EnfoldError, match="augment needs"):
        epoch(Order(augment=("flip",)), numbered())
    with pytest.raises(EnfoldError, match="one target per input"):
        Split(torch.zeros(3, 2), torch.zeros(2))


@prop
@given(size=st.integers(1, 15))
def test_evaluation_preserves_the_order_for_any_chunk_size(size):
    data = pictures()
    chunks = list(evaluation_batches(data.train, size))
    assert [len(labels) for _, labels, _ in chunks] == [min(size, 12 - start) for start in range(0, 12, size)]
    torch.testing.assert_close(torch.cat([inputs for inputs, _, _ in chunks]), data.prepare(data.train.inputs))
    assert torch.equal(torch.cat([labels for _, labels, _ in chunks]), data.train.labels)


def test_preparation_does_not_change_inputs_other_than_images():
    data = numbered()
    assert data.prepare(data.train.inputs) is data.train.inputs
    again = data.prepare(data.train.inputs)
    assert torch.equal(again[:, 0], torch.arange(10.0))


def test_a_batch_moves_to_a_device():
    batch = epoch(Order(4, range(2)), numbered())[0]
    moved = batch.to("meta")
    assert (moved.inputs.device.type, moved.targets.device.type) == ("meta", "meta")
    assert moved.own
    assert torch.equal(moved.indices, batch.indices)


def test_a_last_batch_of_one_is_omitted():
    data = Data(Split(torch.zeros(9, 2), torch.zeros(9, dtype=torch.int64)), [], [], 2, (2,))
    sizes = [len(batch.targets) for batch in Order(batch_size=4).batches(data, epoch=0)]
    assert sizes == [4, 4]
    assert Order(batch_size=4).steps(data.train) == 2
    assert [len(batch.targets) for batch in Order(batch_size=9).batches(data, epoch=0)] == [9]


@pytest.mark.parametrize(("sizes", "used"), [([4, 4, 1], [4, 4]), ([4, 1, 3], [4, 3]), ([1, 1], [1, 1]), ([1], [1])])
def test_a_batch_of_one_after_larger_batches_is_omitted(sizes, used):
    loader = [(torch.zeros(size, 2), torch.zeros(size, dtype=torch.int64)) for size in sizes]
    assert [len(batch.targets) for batch in epoch(Order(), numbered().replace(train=loader))] == used


def test_labels_and_inputs_are_checked_when_data_is_made():
    good = Split(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    with pytest.raises(EnfoldError, match=r"labels must be .*got 7 in the test split"):
        Data(good, good, Split(torch.zeros(1, 2), torch.tensor([7])), 2, (2,))
    with pytest.raises(EnfoldError, match=r"inputs must be finite.*val split"):
        Data(good, Split(torch.full((1, 2), torch.nan), torch.tensor([0])), good, 2, (2,))


def test_a_split_batch_is_divided_among_the_members():
    data = Data(*(Split(torch.arange(22.0)[:, None], torch.zeros(22).long()) for _ in range(3)), 2, (1,))
    whole = list(Order(8, seed=3).batches(data, 1))
    parts = list(Order(8, range(3), seed=3, split=True).batches(data, 1))
    assert [tuple(batch.targets.shape) for batch in parts] == [(3, 2), (3, 2), (3, 2)]
    for one, all_of_it in zip(parts, whole, strict=True):
        assert one.own
        assert one.inputs.flatten().tolist() == all_of_it.inputs.flatten()[:6].tolist()
        assert one.indices.flatten().tolist() == all_of_it.indices[:6].tolist()
    with pytest.raises(EnfoldError, match=r"batch_size .*got 7"):
        list(Order(7, range(4), split=True).batches(data, 0))

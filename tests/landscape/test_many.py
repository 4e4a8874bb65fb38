"""Many networks are asked about examples of all classes, whatever the order of the data."""

import pytest
import torch
from torch import nn

from clouds import three_clouds
from enfold.data import Data, Split
from enfold.landscape.many import ROWS, chosen_examples, some_examples, state_of
from enfold.landscape.paths import along, straight
from enfold.landscape.planes import plane_map, radial


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def ends() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [state_of(normed()) for _ in range(2)]


def by_class(data: Data) -> Data:
    test = data.test
    assert isinstance(test, Split)
    return data.replace(test=test[test.labels.argsort(stable=True)])


def test_some_examples_of_sorted_data_are_of_all_classes() -> None:
    few = some_examples(by_class(three_clouds(10, 10, 300)), "test", 30).test
    assert isinstance(few, Split)
    assert few.labels.bincount(minlength=3).min() >= 4


def test_the_same_examples_are_chosen_again_and_none_twice() -> None:
    chosen = chosen_examples(50, 20)
    assert chosen.tolist() == chosen_examples(50, 20).tolist()
    assert len(chosen.unique()) == 20
    for enough in (None, 50, 80):
        assert chosen_examples(50, enough).tolist() == list(range(50)), "all, in their order"


def test_loaders_and_few_examples_are_taken_whole() -> None:
    data = three_clouds(10, 10, 30)
    assert some_examples(data, "test", 30) is data
    loader = data.replace(test=[(data.test.inputs, data.test.labels)])
    assert some_examples(loader, "test", 5) is loader


def test_statistics_of_batches_do_not_tell_the_class_in_sorted_data(ends) -> None:
    data = three_clouds(10, 10, 2 * ROWS)
    paths = [along(normed(), straight(*ends, 3), each, batch_norm="train") for each in (data, by_class(data))]
    torch.testing.assert_close(paths[0].loss, paths[1].loss, rtol=1e-2, atol=0)
    plane = radial(normed(), *ends)
    maps = [plane_map(normed(), plane, each, size=2, examples=None, quiet=True) for each in (data, by_class(data))]
    torch.testing.assert_close(maps[0].loss, maps[1].loss, rtol=1e-2, atol=0)


def test_one_example_alone_in_the_last_batch_is_left_out(ends) -> None:
    data = three_clouds(10, 10, ROWS + 1)
    assert bool(torch.isfinite(along(normed(), straight(*ends, 3), data, batch_norm="train").loss).all())

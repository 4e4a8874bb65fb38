"""Batched predictions of many networks equal single predictions, on examples of all classes."""

import pytest
import torch
from torch import nn

from clouds import three_clouds
from enfold.analysis.paths import make_line, score_path
from enfold.analysis.states import ROWS, copy_state, predict_in_batches, predict_states, sample_indices, sample_split
from enfold.analysis.weight_planes import make_radial_plane, map_plane
from enfold.data import Data, Split
from enfold.engines import runner
from enfold.errors import EnfoldError
from enfold.networks import MLP
from enfold.train.batch_norm import reestimate


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def ends() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [copy_state(normed()) for _ in range(2)]


def by_class(data: Data) -> Data:
    test = data.test
    assert isinstance(test, Split)
    return data.replace(test=test[test.labels.argsort(stable=True)])


def test_subsets_of_sorted_data_contain_all_classes() -> None:
    few = sample_split(by_class(three_clouds(10, 10, 300)), "test", 30).test
    assert isinstance(few, Split)
    assert few.labels.bincount(minlength=3).min() >= 4


def test_the_same_examples_are_chosen_again_and_none_twice() -> None:
    chosen = sample_indices(50, 20)
    assert chosen.tolist() == sample_indices(50, 20).tolist()
    assert len(chosen.unique()) == 20
    for enough in (None, 50, 80):
        assert sample_indices(50, enough).tolist() == list(range(50)), "all, in their order"


def test_loaders_and_small_splits_are_used_completely() -> None:
    data = three_clouds(10, 10, 30)
    assert sample_split(data, "test", 30) is data
    loader = data.replace(test=[(data.test.inputs, data.test.labels)])
    assert sample_split(loader, "test", 5) is loader


def test_batch_statistics_do_not_reveal_the_class_in_sorted_data(ends) -> None:
    data = three_clouds(10, 10, 2 * ROWS)
    paths = [score_path(normed(), make_line(*ends, 3), each, batch_norm="train") for each in (data, by_class(data))]
    torch.testing.assert_close(paths[0].loss, paths[1].loss, rtol=1e-2, atol=0)
    plane = make_radial_plane(normed(), *ends)
    maps = [map_plane(normed(), plane, each, size=2, examples=None, quiet=True) for each in (data, by_class(data))]
    torch.testing.assert_close(maps[0].loss, maps[1].loss, rtol=1e-2, atol=0)


def test_a_last_batch_with_one_example_is_omitted(ends) -> None:
    data = three_clouds(10, 10, ROWS + 1)
    assert bool(torch.isfinite(score_path(normed(), make_line(*ends, 3), data, batch_norm="train").loss).all())


@pytest.mark.parametrize(("count", "engine"), [(3, "loop"), (4, "auto"), (10, "auto")])
def test_one_engine_is_chosen_and_predictions_equal_those_of_single_networks(
    monkeypatch: pytest.MonkeyPatch, count: int, engine: str
) -> None:
    chosen: list[tuple[str, int]] = []

    def choose(name, skeleton, state, inputs):
        chosen.append((name, len(next(iter(state.values())))))
        return true(name, skeleton, state, inputs)

    true = runner.choose_engine
    monkeypatch.setattr(runner, "choose_engine", choose)
    torch.manual_seed(0)
    networks, data = [MLP(4, [6, 5], 3) for _ in range(count)], three_clouds(10, 10, 30)
    parts = list(predict_in_batches(networks[0], map(copy_state, networks), data, at_once=4))
    assert [part.num_members for part in parts] == [4] * (count // 4) + [count % 4] * (count % 4 > 0)
    assert chosen == [(engine, 2)]
    said = torch.cat([part.log_probs for part in parts])
    with torch.no_grad():
        alone = torch.stack([network(data.prepare(data.test.inputs)).log_softmax(-1) for network in networks])
    torch.testing.assert_close(said, alone)


def test_statistics_are_measured_for_every_network() -> None:
    torch.manual_seed(0)
    networks, data = [normed() for _ in range(5)], three_clouds(90, 10, 30)
    said = predict_states(networks[0], map(copy_state, networks), data, batch_norm="reset", at_once=3)
    for index, network in enumerate(networks):
        reestimate(network, data)
        with torch.no_grad():
            alone = network.eval()(data.prepare(data.test.inputs)).log_softmax(-1)
        torch.testing.assert_close(said.log_probs[index], alone)


@pytest.mark.parametrize("count", [2, 4])
def test_inputs_of_another_shape_are_named(count: int) -> None:
    network = MLP(5, [6], 3)
    with pytest.raises(EnfoldError, match=r"whose first layer takes 5 features, fails on inputs of shape \(4,\)"):
        predict_states(network, [copy_state(network)] * count, three_clouds(10, 10, 30), at_once=4)

"""Planes of weights contain their networks exactly, and maps contain their scores."""

import pytest
import torch
from torch import nn

from clouds import three_clouds
from enfold.analysis.diversity_plane import compute_disagreement
from enfold.analysis.states import copy_state, mix_states, sample_indices
from enfold.analysis.weight_planes import make_plane, make_radial_plane, map_plane
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import accuracy, nll


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def states() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [copy_state(network()) for _ in range(3)]


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in state.values()]).double()


def test_planes_contain_their_networks_exactly(states) -> None:
    for plane in (make_radial_plane(network(), *states[:2]), make_plane(network(), *states)):
        for (u, v), state in zip(plane.places.tolist(), plane.networks, strict=True):
            torch.testing.assert_close(plane.state(u, v), state, rtol=0, atol=0)


def test_coordinates_are_lengths(states) -> None:
    plane = make_radial_plane(network(), *states[:2])
    for place, state in zip(plane.places, states, strict=False):
        torch.testing.assert_close(place.norm(), flat(state).norm())
    assert float(flat(plane.state(0.0, 0.0)).norm()) == 0
    three = make_plane(network(), *states)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        torch.testing.assert_close(
            (three.places[i] - three.places[j]).norm(), (flat(states[i]) - flat(states[j])).norm()
        )
    far = flat(three.state(3.0, -2.0)) - flat(states[0])
    torch.testing.assert_close(far.norm().item(), 13**0.5, rtol=1e-5, atol=0)


def test_a_map_contains_the_scores_of_its_networks(states) -> None:
    data, plane = three_clouds(20, 10, 40), make_plane(network(), *states)
    found = map_plane(network(), plane, data, size=4, examples=30, quiet=True)
    assert found.loss.shape == found.accuracy.shape == (4, 4)
    assert found.disagreement.shape == (3, 4, 4)
    few = data.replace(test=data.test[sample_indices(40, 30)])
    for row, column in ((0, 0), (1, 2), (3, 0)):
        net = network()
        net.load_state_dict(plane.state(float(found.u[column]), float(found.v[row])))
        said = predict(net, few.test)
        assert float(found.loss[row, column]) == pytest.approx(nll(said), rel=1e-4)
        assert float(found.accuracy[row, column]) == pytest.approx(accuracy(said))
        for index, state in enumerate(states):
            net.load_state_dict(state)
            apart = compute_disagreement(predict(net, few.test), said)
            assert float(found.disagreement[index, row, column]) == pytest.approx(float(apart))


def test_a_map_contains_all_networks_and_a_radial_map_the_origin(states) -> None:
    data, plane = three_clouds(20, 10, 20), make_radial_plane(network(), *states[:2])
    found = map_plane(network(), plane, data, size=3, margin=0.1, quiet=True)
    for place in (*plane.places, torch.zeros(2)):
        assert found.u[0] < place[0] < found.u[-1]
        assert found.v[0] < place[1] < found.v[-1]


def test_networks_on_one_line_span_no_plane(states) -> None:
    twice = mix_states(states[:2], torch.tensor([2.0, 0.0]))
    with pytest.raises(EnfoldError, match="not lie on one line"):
        make_radial_plane(network(), states[0], twice)
    middle = mix_states(states[:2], torch.tensor([0.5, 0.5]))
    with pytest.raises(EnfoldError, match="not lie on one line"):
        make_plane(network(), states[0], states[1], middle)
    with pytest.raises(EnfoldError, match="size"):
        map_plane(network(), make_radial_plane(network(), *states[:2]), three_clouds(5, 5, 5), size=1)

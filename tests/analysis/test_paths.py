"""Paths: their ends to the bit, their equations, and what keeps a tunnel's points where they are along the line."""

import pytest
import torch
from torch import nn

from clouds import three_clouds
from enfold.analysis.paths import (
    BEZIER,
    TUNNEL,
    Bezier,
    Tunnel,
    make_line,
    match_to,
    score_path,
    train_bezier,
    train_tunnel,
)
from enfold.analysis.states import copy_state, mix_states, sample_indices
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import nll
from enfold.train import TrainConfig, fit

PLAN = TrainConfig(epochs=20, batch_size=32, lr=0.02)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def ends() -> list[dict[str, torch.Tensor]]:
    members = DeepEnsemble(network, 2, seed=3)
    fit(members, three_clouds(120, 60, 60), config=PLAN, quiet=True)
    return [copy_state(members.member(k)) for k in range(2)]


def test_a_straight_path_has_its_ends_and_its_middle(ends) -> None:
    path = make_line(*ends, points=5)
    torch.testing.assert_close(path[0], ends[0], rtol=0, atol=0)
    torch.testing.assert_close(path[-1], ends[1], rtol=0, atol=0)
    torch.testing.assert_close(path[1]["0.weight"], 0.75 * ends[0]["0.weight"] + 0.25 * ends[1]["0.weight"])
    with pytest.raises(EnfoldError, match="points"):
        make_line(*ends, points=1)


def test_a_curve_contains_its_ends_exactly_and_follows_its_equation(ends) -> None:
    curve = Bezier(network(), *ends)
    with torch.no_grad():
        for tensor in curve.control.parameters():
            tensor.add_(torch.randn(tensor.shape))
    path = curve.path(5)
    torch.testing.assert_close(path[0], ends[0], rtol=0, atol=0)
    torch.testing.assert_close(path[-1], ends[1], rtol=0, atol=0)
    control = curve.control.state()["0.weight"].detach()
    first, second = (end["0.weight"] for end in ends)
    torch.testing.assert_close(path[1]["0.weight"], 0.5625 * first + 0.375 * control + 0.0625 * second)


def test_a_new_curve_is_the_straight_line(ends) -> None:
    for bent, line in zip(Bezier(network(), *ends).path(4), make_line(*ends, points=4), strict=True):
        torch.testing.assert_close(bent, line)


def test_training_moves_the_curve_below_the_line_and_preserves_the_ends(ends) -> None:
    data, before = three_clouds(120, 60, 60), [{n: t.clone() for n, t in end.items()} for end in ends]
    curve = train_bezier(network(), *ends, data, BEZIER.replace(epochs=15, batch_size=32, lr=0.03), quiet=True)
    torch.testing.assert_close(ends, before, rtol=0, atol=0)
    settings = {"part": "train"}
    line, bent = (
        score_path(network(), make_line(*ends, 9), data, **settings),
        score_path(network(), curve.path(9), data, **settings),
    )
    assert bent.loss[1:-1].mean() < line.loss[1:-1].mean()
    assert bent.barrier["loss"].height < line.barrier["loss"].height


def test_relaxation_keeps_the_coordinate_along_the_line(ends) -> None:
    data = three_clouds(120, 60, 60)
    plan = TUNNEL.replace(batch_size=32, optimizer="adamw", lr=0.02, weight_decay=0.1)  # any optimizer
    points = Tunnel(network(), *ends, 5)
    fit(points, data, config=plan, quiet=True)
    side = torch.cat([(ends[1][n] - ends[0][n]).flatten() for n in ends[0]]).double()
    origin = torch.cat([tensor.flatten() for tensor in ends[0].values()]).double()
    moved = 0.0
    for index, start in enumerate(make_line(*ends, 5)[1:-1]):
        state = copy_state(points.member(index))
        flat = torch.cat([state[n].flatten() for n in ends[0]]).double()
        t = float((flat - origin) @ side / (side @ side))
        assert t == pytest.approx((index + 1) / 4, abs=1e-6)
        moved += float((flat - torch.cat([start[n].flatten() for n in ends[0]])).norm())
    assert moved > 0.1, "but across the line points move"


def test_a_tunnel_is_below_the_line(ends) -> None:
    data = three_clouds(120, 60, 60)
    path = train_tunnel(network(), *ends, data, TUNNEL.replace(epochs=6, batch_size=32), points=5, quiet=True)
    torch.testing.assert_close(path[0], ends[0], rtol=0, atol=0)
    torch.testing.assert_close(path[-1], ends[1], rtol=0, atol=0)
    line = score_path(network(), make_line(*ends, 5), data, part="train")
    assert score_path(network(), path, data, part="train").loss[1:-1].mean() < line.loss[1:-1].mean()
    for wrong, says in (({"points": 2}, "points"), ({"second": ends[0]}, "first and second")):
        settings = {"first": ends[0], "second": ends[1], "data": data, "quiet": True, **wrong}
        with pytest.raises(EnfoldError, match=says):
            train_tunnel(network(), **settings)


def test_along_gives_scores_and_similarity_to_both_ends(ends) -> None:
    data = three_clouds(120, 60, 60)
    found = score_path(network(), make_line(*ends, 3), data, examples=50)
    few, middle = data.replace(test=data.test[sample_indices(60, 50)]), network()
    middle.load_state_dict(mix_states(ends, torch.tensor([0.5, 0.5])))
    said = predict(middle, few.test)
    assert float(found.loss[1]) == pytest.approx(nll(said), rel=1e-5)
    assert found.disagreement[0, 0] == found.disagreement[1, 2] == 0
    assert found.disagreement[0, 2] == found.disagreement[1, 0]
    torch.testing.assert_close(found.cosine[:, [0, 2]].diagonal(), torch.ones(2, dtype=torch.float64))
    rise = float(found.loss[1] - (found.loss[0] + found.loss[2]) / 2)
    assert found.barrier["loss"].height == pytest.approx(max(rise, 0.0))


def test_a_permuted_copy_is_matched(ends) -> None:
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    other = {
        "0.weight": ends[0]["0.weight"][order],
        "0.bias": ends[0]["0.bias"][order],
        "2.weight": ends[0]["2.weight"][:, order],
        "2.bias": ends[0]["2.bias"],
    }
    torch.testing.assert_close(match_to(network(), ends[0], other, three_clouds(20, 5, 5)), ends[0], rtol=0, atol=0)


def test_batch_norm_statistics_of_a_path() -> None:
    data, members = three_clouds(120, 60, 60), DeepEnsemble(normed, 2, seed=0)
    fit(members, data, config=PLAN.replace(epochs=3), quiet=True)
    first, second = (copy_state(members.member(k)) for k in range(2))
    curve = train_bezier(normed(), first, second, data, BEZIER.replace(epochs=1), quiet=True)
    path = curve.path(3)
    torch.testing.assert_close(path[0], first, rtol=0, atol=0)
    reset, batch = (score_path(normed(), path, data, batch_norm=way) for way in ("reset", "train"))
    assert bool((reset.loss != batch.loss).all())
    assert bool(torch.isfinite(reset.loss).all())

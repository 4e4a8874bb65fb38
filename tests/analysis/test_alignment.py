"""Rows, softness, averages and sweeps with known results, and planted pairs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from enfold.analysis.alignment import (
    Aligned,
    compute_matrix_statistics,
    compute_row_statistics,
    restore_alignment,
    score_average,
    score_naive_averages,
    sweep_temperatures,
    to_json,
    train_alignment,
)
from enfold.analysis.planted_permutations import (
    align_different_pair,
    make_planted_pair,
    recover_planted,
    train_different_pair,
)
from enfold.data import Data, Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.merge import average, perm_avg
from enfold.merge.common.permutation_learning import PUBLISHED, PermutationOptions
from enfold.merge.common.states import states_of
from enfold.metrics import accuracy, nll
from enfold.networks import MLP
from enfold.symmetry import Axis, Group, match_state, permute, symmetries
from enfold.train import TrainConfig
from planted import NETWORKS, drawn, pixels, planted
from symmetry.known_networks import made, symmetry_of

SHORT = PermutationOptions(config=PUBLISHED.replace(epochs=1, batch_size=32))


def random_members(name: str, count: int) -> tuple[DeepEnsemble, Data]:
    make, shape = NETWORKS[name]
    return DeepEnsemble([drawn(make, seed) for seed in range(count)]), pixels(shape)


def groups_of(members: DeepEnsemble, data: Data):
    return symmetries(members.member(0), data.train.inputs[:2]).groups


def test_equal_members_have_distance_zero_and_correlation_one() -> None:
    members, data = random_members("convolutional", 1)
    states = states_of(members) * 3
    for row in compute_row_statistics(states, states, groups_of(members, data)):
        for change in (row.distance, row.deviation):
            assert (change.before, change.after) == (0, 0)
        assert row.correlation.before == row.correlation.after == pytest.approx(1)
        assert row.length.before > 0


@pytest.mark.parametrize("name", ["deep", "convolutional", "residual"])
def test_permuted_copy_is_distant_before_and_equal_after_matching(name: str) -> None:
    members, _, data = planted(name, 2)
    first, second = states_of(members)
    symmetry = symmetries(members.member(0), data.train.inputs[:2])
    after = [first, match_state(first, second, symmetry)]
    rows = compute_row_statistics([first, second], after, symmetry.groups)
    assert [row.hidden for row in rows] == [True] * (len(rows) - 1) + [False]
    for row in rows:
        assert row.distance.before > 0.1
        assert row.distance.after == pytest.approx(0, abs=1e-12)
        assert row.deviation.after == pytest.approx(0, abs=1e-12)
        assert row.correlation.before < 0.99
        assert row.correlation.after == pytest.approx(1)


def test_row_statistics_agree_with_numpy_and_scipy() -> None:
    members, data = random_members("shallow", 3)
    states = states_of(members)
    found, head = compute_row_statistics(states, states, groups_of(members, data))
    weights = [state["hidden.0.weight"].double().numpy() for state in states]
    pairs = [(0, 1), (0, 2), (1, 2)]
    distances = [np.linalg.norm(weights[i] - weights[j], axis=1).mean() for i, j in pairs]
    assert found.distance.before == pytest.approx(np.mean(distances))
    assert found.deviation.before == pytest.approx(np.std(np.stack(weights), axis=0).mean())
    pearson = [
        stats.pearsonr(one, other).statistic
        for i, j in pairs
        for one, other in zip(weights[i], weights[j], strict=True)
    ]
    assert found.correlation.before == pytest.approx(np.mean(pearson))
    assert (found.layer, found.units, head.layer, head.units) == ("hidden.0", 12, "head", 3)


# a layer of a known network, the axis of its outputs, and how many of them a group makes
OUTPUTS = [
    ("vit", "blocks.0.attention.query", 0, 8),
    ("attention", "attend.in_proj_weight", 0, 24),
    ("rotary", "q", 0, 8),
    ("group norm", "0", 0, 6),
    ("separable", "1", 0, 12),
    ("cnn", "4", 1, 5),  # a transposed convolution
    ("lstm", "cell.weight_hh_l0", 0, 20),
    ("text", "0", 1, 6),
    ("low rank", "left", 0, 6),
]


@pytest.mark.parametrize(("name", "layer", "axis", "rows"), OUTPUTS)
def test_rows_are_the_incoming_weights_of_an_output(name, layer, axis, rows) -> None:
    network, _ = made(name)
    states = [
        {key: tensor + shift * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
         for key, tensor in network.state_dict().items() if tensor.is_floating_point()}
        for shift in (0, 1)
    ]  # fmt: skip
    key = layer if layer in states[0] else f"{layer}.weight"
    found = {row.layer: row for row in compute_row_statistics(states, states, symmetry_of(name).groups)}[layer]
    one, other = (np.moveaxis(state[key].double().numpy(), axis, 0).reshape(rows, -1) for state in states)
    assert (found.units, found.hidden) == (rows, True)
    assert found.distance.before == pytest.approx(np.linalg.norm(one - other, axis=1).mean())
    assert found.length.before == pytest.approx(
        (np.linalg.norm(one, axis=1) + np.linalg.norm(other, axis=1)).mean() / 2
    )


def test_rows_without_a_group_are_omitted() -> None:
    group = Group("units", 2, (Axis("w", 0, 2, offset=1), Axis("w", 0, 2, offset=4), Axis("v", 1, 2, "consumes")))
    weights = {"w": torch.arange(14.0).reshape(7, 2), "v": torch.ones(3, 2)}
    found, head = compute_row_statistics([weights] * 2, [weights] * 2, [group])
    assert found.length.before == pytest.approx(weights["w"][[1, 2, 4, 5]].norm(dim=1).mean())
    assert (found.units, head.units, head.hidden) == (4, 3, False)


def test_rows_without_variance_correlate_with_equal_rows_only() -> None:
    members, data = random_members("shallow", 1)
    state = states_of(members)[0]
    still = {**state, "hidden.0.weight": torch.zeros_like(state["hidden.0.weight"])}
    for pair, expected in (([still, still], 1.0), ([state, still], 0.0)):
        assert compute_row_statistics(pair, pair, groups_of(members, data))[0].correlation.after == expected


def test_softness_is_zero_for_a_permutation_and_one_for_the_uniform_matrix() -> None:
    members, data = random_members("shallow", 2)
    (group,) = groups_of(members, data)
    d = group.size
    blocks = torch.block_diag(*[torch.full((2, 2), 0.5)] * (d // 2))  # each unit is mixed with one other
    (found,) = compute_matrix_statistics([group], [torch.stack([torch.eye(d), torch.full((d, d), 1 / d), blocks])])
    assert found.softness == pytest.approx([0.0, 1.0, math.log(2) / math.log(d)])
    assert found.condition[0] == pytest.approx(1)
    assert found.one_to_one[0] == 1
    assert found.one_to_one[1] == pytest.approx(1 / d)


@pytest.mark.slow
def test_learned_states_average_to_the_merge_and_are_restored_from_their_matrices() -> None:
    members, data = random_members("deep", 3)
    found = train_alignment(members, data, SHORT)
    assert [tuple(each.shape) for each in found.matrices] == [(2, 12, 12), (2, 10, 10), (2, 8, 8)]
    states = found.states()
    torch.testing.assert_close(states[0], states_of(members)[0], rtol=0, atol=0)
    folded = predict(perm_avg(members, data, config=SHORT.config), data.test)
    scores = score_average(members, states, data)
    assert scores.nll == pytest.approx(nll(folded), rel=1e-4)
    again = restore_alignment(members, data, SHORT, found.matrices)
    torch.testing.assert_close(again.states(), states, rtol=0, atol=0)
    with pytest.raises(EnfoldError, match="matrices"):
        restore_alignment(members, data, SHORT, found.matrices[:1])


def test_identities_align_nothing() -> None:
    members, data = random_members("deep", 2)
    groups = groups_of(members, data)
    same = Aligned(members, groups, [torch.eye(group.size)[None] for group in groups])
    torch.testing.assert_close(same.states(), states_of(members))


def test_equal_members_and_one_member_have_nothing_to_learn() -> None:
    members, data = random_members("shallow", 1)
    for few in (members, DeepEnsemble([members.member(0)] * 2)):
        with pytest.raises(EnfoldError, match="2 different networks"):
            train_alignment(few, data, SHORT)
    with pytest.raises(EnfoldError, match="universe, gain"):
        train_alignment(members, data, replace(SHORT, universe=True, gain=True))


def test_naive_averages_are_of_the_first_members() -> None:
    members, data = random_members("deep", 3)
    found = score_naive_averages(members, data)
    assert list(found) == [1, 2, 3]
    said = predict(members, data.test)
    assert found[1].accuracy == pytest.approx(sum(accuracy(said.member(k)) for k in range(3)) / 3)
    assert found[2] == score_average(members, states_of(members)[:2], data)
    assert found[3] != found[2]


def test_an_average_is_scored_with_batch_norm_statistics_that_fit_it() -> None:
    members, data = random_members("convolutional", 2)
    right, stale = (nll(predict(average(members, data, repair=kind), data.test)) for kind in ("reset", "none"))
    assert score_average(members, states_of(members), data).nll == pytest.approx(right)
    assert right != pytest.approx(stale, rel=0.02)


def test_a_sweep_goes_from_hard_to_soft_and_is_plain_data() -> None:
    members, data = random_members("shallow", 2)
    still = PermutationOptions(config=PUBLISHED.replace(epochs=0), matched=1.0)
    found = sweep_temperatures(members, data, still, (0.05, 1.0, 10.0))
    soft = [point.softness["hidden.0"] for point in found]
    assert soft[0] < 0.01 < soft[1] < soft[2] < 1
    assert json.loads(json.dumps(to_json(found)))[1]["temperature"] == 1.0


def test_a_temperature_with_singular_matrices_is_reported_as_failed() -> None:
    members, data = random_members("shallow", 2)
    (found,) = sweep_temperatures(members, data, PermutationOptions(config=PUBLISHED.replace(epochs=0)), (1e9,))
    assert found.accuracy is None
    assert "singular" in str(found.failed)


def test_other_errors_are_not_reported_as_singular() -> None:
    members, data = random_members("shallow", 2)
    beyond = PermutationOptions(config=PUBLISHED.replace(epochs=0), universe=True)
    with pytest.raises(EnfoldError, match="universe"):
        sweep_temperatures(members, data, beyond, (1.0,))
    with pytest.raises(EnfoldError, match="universe"):
        recover_planted(members, data, beyond, 0.0)
    hot = replace(beyond, universe=False, temperature=1e9)
    assert recover_planted(members, data, hot, 0.0).recovered["permAVG"] is None


def test_the_planted_pair_computes_one_function_without_noise() -> None:
    members, data = random_members("convolutional", 1)
    for noise, same in ((0.0, True), (1.0, False)):
        pair, symmetry, wanted = make_planted_pair(members, data, noise, seed=3)
        one, other = predict(pair, data.test).log_probs
        assert torch.allclose(one, other, atol=1e-4) is same
        assert {name: len(order) for name, order in wanted.items()} == {g.name: g.size for g in symmetry.groups}


def test_planted_noise_is_in_units_of_each_tensors_deviation() -> None:
    members, data = random_members("deep", 1)
    with torch.no_grad():
        for scale, parameter in zip((0.1, 1.0, 30.0, 300.0), members.parameters(), strict=False):
            parameter.mul_(scale)
    pair, symmetry, wanted = make_planted_pair(members, data, 2.0, seed=3)
    first, second = states_of(pair)
    back = permute(second, symmetry, wanted)
    draws = {name: (back[name] - tensor) / (2.0 * tensor.std(correction=0)) for name, tensor in first.items()}
    assert {name: float(draw.std()) for name, draw in draws.items() if draw.numel() > 40} == {
        f"hidden.{layer}.weight": pytest.approx(1, abs=0.25) for layer in range(3)
    }
    assert float(torch.cat([draw.flatten() for draw in draws.values()]).std()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", ["vit", "attention", "group norm", "separable", "rotary"])
def test_permutations_inside_blocks_are_inverted(name: str) -> None:
    network, inputs = made(name)
    part = Split(inputs, torch.zeros(len(inputs), dtype=torch.long))
    members, data = DeepEnsemble([network]), Data(part, part, part, 3, tuple(inputs.shape[1:]))
    pair, symmetry, wanted = make_planted_pair(members, data, 0.0, seed=2)  # a seed that moves blocks
    first, second = states_of(pair)
    assert any(not torch.equal(first[key], second[key]) for key in first)
    torch.testing.assert_close(permute(second, symmetry, wanted), first, rtol=0, atol=0)


@pytest.mark.slow
def test_a_planted_permutation_is_found_inside_heads() -> None:
    make, shape = NETWORKS["attending"]
    found = recover_planted(DeepEnsemble([drawn(make, 0)]), pixels(shape), SHORT, 0.0).recovered
    assert found["weight matching"] == found["permAVG, matched"] == 1


def test_a_planted_permutation_is_found_without_noise_only() -> None:
    make, shape = NETWORKS["shallow"]
    members, data = DeepEnsemble([drawn(make, 0)]), pixels(shape)
    clean, lost = (recover_planted(members, data, SHORT, noise) for noise in (0.0, 100.0))
    assert clean.chance == pytest.approx(1 / 12)
    assert clean.recovered["weight matching"] == 1
    assert clean.recovered["permAVG, matched"] == 1
    assert clean.recovered["permAVG"] is None or clean.recovered["permAVG"] <= 1
    assert lost.recovered["weight matching"] < 0.5


def two_sided(count: int) -> Split:
    rng = torch.Generator().manual_seed(count)
    labels = torch.arange(count) % 4
    return Split(torch.eye(4)[labels] * 3 + 0.3 * torch.randn(count, 4, generator=rng), labels)


@pytest.mark.slow
def test_members_of_different_tasks_are_accurate_on_their_own_classes() -> None:
    data = Data(two_sided(256), two_sided(64), two_sided(128), 4, (4,))
    plan = TrainConfig(epochs=8, batch_size=32, lr=0.02)
    pairs = {kind: train_different_pair(lambda: MLP(4, [12], 4), data, plan, kind) for kind in ("classes", "labels")}
    halves, shifted = (align_different_pair(pair, data, SHORT, kind) for kind, pair in pairs.items())
    assert halves.members == pytest.approx([0.5, 0.5], abs=0.02)
    assert shifted.members == pytest.approx([1.0, 0.0], abs=0.02)
    logits = predict(pairs["classes"], data.test).log_probs
    own = logits[0].argmax(-1) < 2
    assert own.float().mean() > 0.98, "the first member knows the lower classes only"
    assert halves.rows[0].correlation.before != halves.rows[0].correlation.after
    assert set(halves.softness) == {"hidden.0"}
    assert json.loads(json.dumps(to_json([halves, shifted])))[1]["difference"] == "labels"
    with pytest.raises(EnfoldError, match="'colours'"):
        train_different_pair(lambda: MLP(4, [12], 4), data, plan, "colours")

"""Similarity of networks in weights and predictions, maps of predictions, and samples around a network."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clouds import three_clouds
from enfold.analysis.states import predict_states, sample_indices, unstack_states
from enfold.analysis.trajectory import (
    average_last,
    compute_cosines,
    compute_similarity,
    load_trajectory,
    map_predictions,
    sample_around,
)
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.metrics import disagreement_matrix
from enfold.metrics.predictions import Predictions
from enfold.train import TrainConfig, Trajectory, fit


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Trajectory:
    kept = Trajectory(tmp_path_factory.mktemp("trajectory"))
    plan = TrainConfig(epochs=4, batch_size=16, lr=0.02, select="last")
    fit(DeepEnsemble(network, 2), three_clouds(60, 20, 30), config=plan, trajectory=kept, quiet=True)
    return kept


@settings(max_examples=25)
@given(st.integers(0, 1000))
def test_cosine_is_symmetric_with_ones_on_the_diagonal(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    states = [{"w": torch.randn(3, 2, generator=rng), "b": torch.randn(3, generator=rng)} for _ in range(4)]
    cosine = compute_cosines(states)
    torch.testing.assert_close(cosine.diagonal(), torch.ones(4, dtype=torch.float64), rtol=0, atol=0)
    torch.testing.assert_close(cosine, cosine.T, rtol=0, atol=0)
    flat = torch.stack([torch.cat([state["w"].flatten(), state["b"]]) for state in states]).numpy()
    expected = (flat @ flat.T) / np.outer(np.linalg.norm(flat, axis=1), np.linalg.norm(flat, axis=1))
    torch.testing.assert_close(cosine, torch.from_numpy(expected).double(), rtol=1e-5, atol=1e-6)


def test_cosine_by_hand_ignores_counters() -> None:
    states = [
        {"w": torch.tensor([1.0, 0.0]), "n": torch.tensor(7)},
        {"w": torch.tensor([3.0, 4.0]), "n": torch.tensor(9)},
    ]
    torch.testing.assert_close(compute_cosines(states)[0, 1].item(), 0.6)
    assert compute_cosines([states[0], {"w": torch.zeros(2), "n": torch.tensor(0)}])[0, 1] == 0


@settings(max_examples=25)
@given(st.integers(0, 1000))
def test_disagreement_is_a_metric(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    said = Predictions.from_logits(torch.randn(4, 9, 3, generator=rng), torch.zeros(9, dtype=torch.long))
    d = disagreement_matrix(said)
    assert bool((d.diagonal() == 0).all())
    torch.testing.assert_close(d, d.T, rtol=0, atol=0)
    assert bool((d[:, None, :] <= d[:, :, None] + d[None, :, :] + 1e-12).all()), "the triangle inequality"


def test_similarity_along_a_trajectory(kept: Trajectory) -> None:
    data, found = three_clouds(60, 20, 30), load_trajectory(kept, start=False)
    assert found.member.tolist() == [0] * 4 + [1] * 4
    assert found.epoch.tolist() == [1, 2, 3, 4] * 2
    seen = compute_similarity(network(), found, data, examples=None)
    member = DeepEnsemble([network()] * 8)
    for index, state in enumerate(found.states):
        for name, tensor in member.tree.state().items():
            tensor[index].data.copy_(state[name])
    with torch.no_grad():
        answers = member.eval()(data.test.inputs).argmax(-1)
    expected = (answers[:, None] != answers[None]).double().mean(-1)
    torch.testing.assert_close(seen.disagreement, expected)
    torch.testing.assert_close(seen.accuracy, (answers == data.test.labels).double().mean(-1))
    within, between = seen.split(seen.cosine)
    assert len(within) == 12
    assert len(between) == 16
    assert within.min() > between.max(), "one training stays nearer to itself than to another"


def test_a_map_preserves_distances_in_two_dimensions() -> None:
    rng = torch.Generator().manual_seed(0)
    plane = torch.randn(6, 2, generator=rng, dtype=torch.float64)
    base, axes = torch.full((2, 3), 1 / 3, dtype=torch.float64), 0.02 * torch.eye(2, dtype=torch.float64)
    moved = base.repeat(6, 1, 1)
    moved[:, :, 0] += plane @ axes  # two examples, one class each: a plane in the space of predictions
    moved[:, :, 1] -= plane @ axes
    said = Predictions(moved.log(), torch.zeros(2, dtype=torch.long))
    places = map_predictions(said, "pca")
    torch.testing.assert_close(torch.cdist(places, places), torch.cdist(moved.flatten(1), moved.flatten(1)))


@pytest.mark.slow
def test_tsne_keeps_two_clusters_apart() -> None:
    pytest.importorskip("sklearn")
    rng = torch.Generator().manual_seed(0)
    logits = 0.1 * torch.randn(12, 20, 3, generator=rng)
    logits[6:, :, 0] += 4
    places = map_predictions(Predictions.from_logits(logits, torch.zeros(20, dtype=torch.long)), seed=1)
    apart = torch.cdist(places, places)
    assert apart[:6, 6:].min() > max(apart[:6, :6].max(), apart[6:, 6:].max())


def test_invalid_maps_are_refused() -> None:
    said = Predictions.from_logits(torch.zeros(2, 4, 3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(EnfoldError, match="at least 3 networks, got 2"):
        map_predictions(said)
    with pytest.raises(EnfoldError, match="one of tsne, pca, got 'umap'"):
        map_predictions(said, "umap")  # type: ignore[arg-type]


def test_an_empty_trajectory_gives_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(EnfoldError, match="trajectory: true"):
        load_trajectory(Trajectory(tmp_path))


def test_weights_are_averaged_over_the_last(kept: Trajectory) -> None:
    path = kept.of_member(0)
    mean = average_last(path, 2)
    torch.testing.assert_close(mean["0.weight"], (path[-1]["0.weight"] + path[-2]["0.weight"]) / 2)
    torch.testing.assert_close(average_last(path, 1), path[-1], rtol=0, atol=0)
    with pytest.raises(EnfoldError, match="got 9"):
        average_last(path, 9)


@pytest.mark.parametrize("kind", ["random", "dropout", "gaussian", "pca"])
def test_samples_without_variance_equal_their_centre(kept: Trajectory, kind) -> None:
    data, path = three_clouds(60, 20, 30), kept.of_member(0)[1:]
    members = sample_around(network(), path, kind, 3, data, scale=0.0)
    centre = path[-1] if kind in ("random", "dropout") else average_last(path, len(path))
    for state in unstack_states(members):
        for name in ("0.weight", "0.bias", "3.weight"):
            torch.testing.assert_close(state[name], centre[name])


def flattened(states: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat([state[n].flatten() for n in ("0.weight", "3.weight")]) for state in states]).double()


def test_samples_have_the_distribution_of_their_kind(kept: Trajectory) -> None:
    data, path = three_clouds(60, 20, 30), kept.of_member(1)[1:]
    for kind, own in (("pca", path), ("pca_random", path[-1:])):  # which asks for no spread of training's
        flat = flattened(unstack_states(sample_around(network(), own, kind, 5, data, rank=2)))
        assert torch.linalg.matrix_rank(flat - flat.mean(0), rtol=1e-4) == 2
    around = flattened(unstack_states(sample_around(network(), path, "pca_random", 5, data, scale=0.0, fitted=4)))
    assert float((around - around[0]).norm()) == 0, "the mean of the random samples that axes are fitted to"
    assert 0 < float((around[0] - flattened(path[-1:])[0]).norm()) < 10, "which are at most 10 away from the end"
    with pytest.raises(EnfoldError, match="path"):
        sample_around(network(), path[-1:], "gaussian", 2, data)


def test_batched_predictions_equal_those_of_single_networks(kept: Trajectory) -> None:
    data, states = three_clouds(60, 20, 30), kept.of_member(0)
    together = predict_states(network(), states, data, examples=10, at_once=2)
    assert together.log_probs.shape == (5, 10, 3)
    asked = data.test[sample_indices(30, 10)]
    assert together.labels.tolist() == asked.labels.tolist()
    for index, state in enumerate(states):
        alone = network()
        alone.load_state_dict(state)
        with torch.no_grad():
            expected = torch.log_softmax(alone.eval()(asked.inputs), -1)
        torch.testing.assert_close(together.log_probs[index], expected)


def test_batch_norm_modes(kept: Trajectory) -> None:
    data, state = three_clouds(60, 20, 30), kept.of_member(0)[-1]
    wrong = {**state, "1.running_mean": state["1.running_mean"] + 3}
    stored, batch, reset = (
        predict_states(network(), [wrong], data, batch_norm=way).log_probs[0] for way in ("stored", "train", "reset")
    )
    net = network()
    net.load_state_dict(wrong)
    with torch.no_grad():
        torch.testing.assert_close(stored, torch.log_softmax(net.eval()(data.test.inputs), -1))
        of_batch = torch.log_softmax(net.train()(data.test.inputs), -1)  # which is asked in another order
        torch.testing.assert_close(batch[batch[:, 0].argsort()], of_batch[of_batch[:, 0].argsort()])
        assert (reset - stored).abs().max() > 0.1
        net.load_state_dict(state)
    with pytest.raises(EnfoldError, match="stored, train, reset, got 'none'"):
        predict_states(network(), [state], data, batch_norm="none")

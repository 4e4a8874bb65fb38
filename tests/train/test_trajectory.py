"""Trajectories are stored epoch by epoch and continue after a kill."""

from pathlib import Path

import pytest
import torch
from torch import nn

from clouds import three_clouds
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.train import TrainConfig, Trajectory, fit

PLAN = TrainConfig(epochs=4, batch_size=16, lr=0.05, select="last")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def members() -> DeepEnsemble:
    return DeepEnsemble(network, 2, seed=1)


def test_the_start_every_second_epoch_and_the_last_are_stored(tmp_path: Path) -> None:
    data, model, seen = three_clouds(40, 10, 10), members(), list[dict[str, torch.Tensor]]()
    start = {name: tensor.clone() for name, tensor in model.expand().items()}
    kept = Trajectory(tmp_path / "path", every=2)
    plan = PLAN.replace(epochs=5)
    fit(
        model,
        data,
        config=plan,
        trajectory=kept,
        on_epoch=lambda _: seen.append({n: t.clone() for n, t in model.expand().items()}),
    )
    assert kept.epochs == [0, 2, 4, 5]
    torch.testing.assert_close(kept.state(0), start, rtol=0, atol=0)
    for epoch in (2, 4, 5):
        torch.testing.assert_close(kept.state(epoch), dict(seen[epoch - 1]), rtol=0, atol=0)
    last = kept.of_member(1)[-1]
    torch.testing.assert_close(kept.of_member(1, last=2), kept.of_member(1)[-2:], rtol=0, atol=0)
    torch.testing.assert_close(last, {n: t[1] for n, t in seen[4].items()}, rtol=0, atol=0)


def test_a_single_network_has_a_member_axis_too(tmp_path: Path) -> None:
    fit(network(), three_clouds(40, 10, 10), config=PLAN.replace(epochs=1), trajectory=tmp_path)
    assert Trajectory(tmp_path).state(1)["0.weight"].shape == (1, 5, 4)


def test_a_stopped_training_resumes_its_trajectory(tmp_path: Path) -> None:
    data = three_clouds(40, 10, 10)
    fit(members(), data, config=PLAN, trajectory=tmp_path / "whole")

    def stop(record: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(
            members(),
            data,
            config=PLAN,
            trajectory=tmp_path / "parts",
            checkpoint=tmp_path / "c.safetensors",
            on_epoch=stop,
        )
    assert Trajectory(tmp_path / "parts").epochs == [0, 1]
    fit(members(), data, config=PLAN, trajectory=tmp_path / "parts", checkpoint=tmp_path / "c.safetensors")
    whole, parts = Trajectory(tmp_path / "whole"), Trajectory(tmp_path / "parts")
    assert parts.epochs == whole.epochs == [0, 1, 2, 3, 4]
    for epoch in whole.epochs:
        torch.testing.assert_close(parts.state(epoch), whole.state(epoch), rtol=0, atol=0)


def test_another_trainings_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data = three_clouds(40, 10, 10)
    fit(members(), data, config=PLAN, trajectory=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(EnfoldError, match="seed"):
        fit(members(), data, config=PLAN.replace(seed=3), trajectory=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EnfoldError, match="every must be"):
        Trajectory(tmp_path, every=0)
    with pytest.raises(EnfoldError, match=r"epoch must be .*got 3"):
        Trajectory(tmp_path).state(3)
    Trajectory(tmp_path).file(0).write_bytes(b"broken")
    with pytest.raises(EnfoldError, match="cannot be read"):
        Trajectory(tmp_path).state(0)

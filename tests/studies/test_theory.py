"""The theory of averaging for the stored predictions of a run."""

from pathlib import Path

import pytest

from enfold.metrics import accuracy, mean_member, nll
from enfold.run import RunDirectory, parse_recipe
from enfold.run.execute import execute, seed_runs
from studies.theory import theory_tree

RECIPE = """
data: {source: fashion-mini, train_size: 100, val_size: 60}
network: {name: mlp, widths: [6]}
members: 4
train: {epochs: 1}
control: false
cost: false
steps: [{method: batch_ensemble, label: batch-ensemble}]
"""


def test_identities_and_theorem_1(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", parse_recipe(RECIPE))
    execute(run, run.recipe())
    (seed_run,) = seed_runs(run, run.recipe())
    tree, test = theory_tree(seed_run), run.read_predictions("ensemble")["test"]
    assert tree["ambiguity"]["difference"] < 1e-12
    assert tree["ambiguity"]["ensemble"] < tree["ambiguity"]["members"]
    assert tree["bias and variance"]["difference"] < 1e-12
    voters = tree["voters"]
    assert voters["1"] == pytest.approx(0.45)
    assert voters["1"] > voters["11"] > voters["101"]
    found = tree["ensemble"]
    assert (found["nll"], found["member_nll"]) == (nll(test), mean_member(nll, test))
    assert found["member_accuracy"] == mean_member(accuracy, test)
    assert found["nll"] <= found["masegosa_bound"] <= found["member_nll"]
    assert found["smallest_jensen_gap"] >= -1e-6
    assert tree["rank-one defect"]["ensemble"] > 0.1 > 1e-4 > tree["rank-one defect"]["batch-ensemble"]

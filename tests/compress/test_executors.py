"""Trials on an executor: the same table as in one process, and failures that are rows."""

import pytest

import enfold
from enfold.compress import parallel
from enfold.errors import EnfoldError
from enfold.executors import LocalExecutor, Parallel

from .helpers import SETTINGS, TRAIN, VAL


def table(result):
    return [(trial.name, trial.epochs, trial.scores, trial.note) for trial in result.trials]


@pytest.fixture(scope="module")
def one(members):
    return enfold.compress(members, TRAIN, VAL, **SETTINGS)


def test_the_table_is_that_of_one_process(members, one, tmp_path, monkeypatch):
    found = enfold.compress(members, TRAIN, VAL, executor="serial", folder=tmp_path, **SETTINGS)
    assert table(found) == table(one)
    assert found.chosen.name == one.chosen.name
    monkeypatch.setattr(parallel, "train_trial", None)  # all are in the folder
    assert table(enfold.compress(members, TRAIN, VAL, executor="serial", folder=tmp_path, **SETTINGS)) == table(one)


@pytest.mark.slow
def test_workers_give_the_same_table(members, one):
    with LocalExecutor(1) as worker:
        assert table(enfold.compress(members, TRAIN, VAL, executor=worker, **SETTINGS)) == table(one)


def test_a_failed_trial_is_a_row_and_is_not_repeated(members, one, monkeypatch):
    train, calls = parallel.train_trial, []

    def failing(store, job):
        calls.append(job.name)
        if job.name == broken:
            raise ValueError("a broken route: always")
        train(store, job)

    broken = next(trial.name for trial in one.trials if trial.kind == "distillation")
    monkeypatch.setattr(parallel, "train_trial", failing)
    found = enfold.compress(members, TRAIN, VAL, executor="serial", **SETTINGS)
    notes = [trial.note for trial in found.trials if trial.name == broken]
    assert set(notes) == {"failed: ValueError"}
    assert len(notes) == calls.count(broken)
    assert found.network is not None


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"time": "1 min"}, "time"),
        ({"on_epoch": print}, "on_epoch"),
        ({"executor": Parallel("serial", store="s3://bucket")}, "folder="),
        ({"executor": "auto"}, "auto"),
        ({"executor": "joblib"}, "executor"),
    ],
)
def test_arguments_of_one_process_are_refused(members, given, name):
    with pytest.raises(EnfoldError, match=name):
        enfold.compress(members, TRAIN, VAL, **{"executor": "serial", **SETTINGS, **given})

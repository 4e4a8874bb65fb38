"""Blocks of members as tasks: the same bits wherever they run, and failures that leave the rest usable."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import enfold
from enfold.errors import EnfoldError, FailedMembers, WriteError
from enfold.executors import LocalExecutor, Parallel, Store
from enfold.train import TrainConfig, blocks
from enfold.train.history import History


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def examples(count, seed):
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


TRAIN, VAL = examples(300, 0), examples(60, 1)
SETTINGS = {"epochs": 3, "batch_size": 32, "lr": 1e-2, "quiet": True}


def trained(executor=None, *, kind=enfold.DeepEnsemble, members=4, **settings):
    ensemble = kind(network, members)
    return ensemble, enfold.fit(ensemble, TRAIN, VAL, executor=executor, **(SETTINGS | settings))


def same_bits(one, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.fixture(scope="module")
def worker():
    with LocalExecutor(1) as found:
        yield found


@pytest.mark.combinations
@pytest.mark.parametrize("kind", [enfold.DeepEnsemble, enfold.Bagging])
@pytest.mark.parametrize("settings", [{}, {"order": "shared"}, {"ema": 0.9}, {"lr": (1e-2, 2e-2, 3e-2, 4e-2)}])
def test_one_block_of_all_members_is_the_training_in_one_call(kind, settings):
    if kind is enfold.Bagging:
        settings = {**settings, "order": "own"}
    together, history = trained(kind=kind, **settings)
    block, joined = trained(Parallel("serial", block_size=4), kind=kind, **settings)
    assert same_bits(together, block)
    assert joined.chosen == history.chosen
    assert [each.validation_loss for each in joined.epochs] == [each.validation_loss for each in history.epochs]
    assert block.task == together.task


def test_members_alone_have_the_values_of_members_together_to_rounding():
    def plain():
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    together, alone = enfold.DeepEnsemble(plain, 4), enfold.DeepEnsemble(plain, 4)
    enfold.fit(together, TRAIN, VAL, folds=4, **SETTINGS)
    enfold.fit(alone, TRAIN, VAL, folds=4, executor="serial", **SETTINGS)
    for name, value in together.state_dict().items():
        torch.testing.assert_close(alone.state_dict()[name], value)


def test_workers_give_the_same_bits_as_this_process(worker, tmp_path):
    here, history = trained(Parallel("serial", block_size=3), lr=(1e-2, 2e-2, 3e-2, 4e-2))
    options = {"block_size": 3, "store": f"file://{tmp_path}"}  # members 0 to 2, and member 3
    there, same = trained(Parallel(worker, **options), lr=(1e-2, 2e-2, 3e-2, 4e-2))
    assert same_bits(here, there)
    assert same.chosen == history.chosen
    assert not there.training
    assert [file.name for file in tmp_path.glob("*.checkpoint")] == []


def test_a_repeated_training_costs_nothing(tmp_path, monkeypatch):
    first, history = trained(Parallel("serial", store=tmp_path))
    monkeypatch.setattr(blocks, "train_model", None)
    again, same = trained(Parallel("serial", store=tmp_path))
    assert same_bits(first, again)
    assert same.as_dict() == history.as_dict()


@pytest.mark.parametrize("change", [{"lr": 2e-2}, {"seed": 1}, {"epochs": 4}])
def test_other_inputs_have_other_results_in_the_store(tmp_path, change):
    trained(Parallel("serial", store=tmp_path), members=2)
    other, _ = trained(Parallel("serial", store=tmp_path), members=2, **change)
    alone, _ = trained("serial", members=2, **change)
    assert same_bits(other, alone)


def test_more_members_take_the_first_from_the_store(tmp_path):
    trained(Parallel("serial", store=tmp_path), members=2)
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    trained(Parallel("serial", store=tmp_path), members=3)
    after = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1


def test_an_interrupted_block_continues_from_its_checkpoint(tmp_path, monkeypatch):
    write, full = Store.write, [True]

    def failing(self, name):
        if name.startswith("members-") and full:
            full.clear()
            raise WriteError(name, OSError(28, "No space left on device"))
        return write(self, name)

    monkeypatch.setattr(Store, "write", failing)
    with pytest.raises(FailedMembers, match="No space left"):
        trained(Parallel("serial", store=tmp_path), members=1)
    (checkpoint,) = tmp_path.glob("*.checkpoint")
    monkeypatch.setattr("enfold.train.loop.save_checkpoint", None)  # no epoch is trained again
    ensemble, history = trained(Parallel("serial", store=tmp_path), members=1)
    assert not checkpoint.exists()
    assert len(history.epochs) == 3
    monkeypatch.undo()
    assert same_bits(ensemble, trained("serial", members=1)[0])


def broken_members():
    ensemble = enfold.DeepEnsemble(network, 4)
    networks = ensemble.networks()
    with torch.no_grad():
        networks[2][0].weight.fill_(torch.nan)
    return enfold.DeepEnsemble(networks)


def test_one_failed_member_leaves_the_others(tmp_path):
    ensemble, settings = broken_members(), {**SETTINGS, "select": "last"}
    before = {name: value.clone() for name, value in ensemble.state_dict().items()}
    with pytest.raises(
        FailedMembers, match=r"only 3 of 4 are: member 2 failed with NonFiniteLoss.*for member 2"
    ) as found:
        enfold.fit(ensemble, TRAIN, VAL, executor=Parallel("serial", store=tmp_path), **settings)
    assert found.value.finished == [0, 1, 3]
    assert "in the worker" in found.value.__notes__[0]
    rest, whole = found.value.ensemble, trained("serial", select="last")[0]
    for name, value in rest.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name][[0, 1, 3]])
    assert rest.predict(VAL[0]).members.shape[0] == 3
    for name, value in ensemble.state_dict().items():  # unchanged
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num())


def test_a_checkpoint_has_a_folder_of_blocks_beside_it(tmp_path):
    file = tmp_path / "members.safetensors"
    trained("serial", members=2, checkpoint=file)
    assert len(list((tmp_path / "members.blocks").glob("members-*.safetensors"))) == 2
    assert not file.exists()


def test_a_training_in_one_process_is_not_ignored(tmp_path):
    file = tmp_path / "members.safetensors"
    trained(members=2, checkpoint=file)
    with pytest.raises(EnfoldError, match="belongs to a training of all members in one process"):
        trained("serial", members=2, checkpoint=file)


def test_auto_measures_and_says_what_it_chose(capsys):
    chosen, _ = trained(Parallel("auto", workers=2, threads=1), members=2)
    assert "2 blocks are trained in this process: estimated" in capsys.readouterr().err
    assert same_bits(chosen, trained("serial", members=2)[0])


def test_records_are_logged_after_the_training():
    class Recorder:
        def __init__(self):
            self.steps = []

        def log_settings(self, settings):
            assert settings["num_members"] == 2

        def log_metrics(self, metrics, step):
            self.steps.append((step, "member_1/val/nll" in metrics))

        def close(self):
            pass

    recorder = Recorder()
    trained("serial", members=2, logger=recorder)
    assert recorder.steps == [(1, True), (2, True), (3, True)]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (network(), "got one Sequential"),
        (enfold.PAPA(network, 2), "PAPA trains its members together"),
        (enfold.BatchEnsemble(network(), 2), "BatchEnsemble trains its members together"),
        (enfold.Boosting(network, 2), "Boosting trains its members together"),
    ],
)
def test_what_cannot_be_distributed_is_refused_by_name(model, message):
    with pytest.raises(EnfoldError, match=message):
        enfold.fit(model, TRAIN, VAL, executor="serial", **SETTINGS)


def test_a_class_of_the_user_says_itself_whether_members_are_independent():
    class Coupled(enfold.DeepEnsemble):
        pass

    with pytest.raises(EnfoldError, match="Coupled trains its members together"):
        enfold.fit(Coupled(network, 2), TRAIN, executor="serial", **SETTINGS)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"on_epoch": print}, "on_epoch"),
        ({"trajectory": "folder"}, "trajectory"),
        ({"order": "split"}, "order='split'"),
        ({"executor": "joblib"}, "executor"),
    ],
)
def test_arguments_without_meaning_on_an_executor_are_refused(arguments, name):
    with pytest.raises(EnfoldError, match=name):
        trained(**{"executor": "serial", **arguments})


def test_a_loader_is_sent_with_the_task_and_has_no_permanent_store(tmp_path):
    loader = DataLoader(TensorDataset(*TRAIN), batch_size=32)
    ensemble, one = enfold.DeepEnsemble(network, 2), enfold.DeepEnsemble(network, 2)
    enfold.fit(ensemble, loader, VAL, executor=Parallel("serial", block_size=2), **SETTINGS)
    enfold.fit(one, loader, VAL, **SETTINGS)
    assert same_bits(ensemble, one)
    with pytest.raises(EnfoldError, match="store identifies a result by the content"):
        enfold.fit(one, loader, VAL, executor=Parallel("serial", store=tmp_path), **SETTINGS)


def test_arguments_that_cannot_be_sent_are_refused(worker):
    ensemble = enfold.DeepEnsemble(network, 2)
    with pytest.raises(EnfoldError, match="must be sent to a worker"):
        enfold.fit(ensemble, TRAIN, VAL, executor=worker, outputs=lambda found: found, **SETTINGS)


def test_joined_histories_keep_the_last_epoch_of_a_block_that_stopped():
    _, long = trained("serial", members=1)
    short = History.from_dict(json.loads(json.dumps(long.as_dict())))
    del short.epochs[1:]
    joined = blocks.join_histories([short, long], [1, 1])
    assert len(joined.epochs) == 3
    first, last = short.epochs[0].validation_loss, long.epochs[-1].validation_loss
    assert joined.epochs[-1].validation_loss == [*first, *last]


def test_settings_of_a_block_are_those_of_its_members():
    config = TrainConfig(lr=(1e-3, 2e-3, 3e-3))
    ensemble = enfold.DeepEnsemble(network, 3)
    data = enfold.data.convert.as_data(TRAIN, VAL, batch_size=32)
    made = blocks.make_blocks(ensemble, data, config, None, 2, Store("memory://settings"))
    assert [(each.config.first_member, each.config.lr) for each in made] == [(0, (1e-3, 2e-3)), (2, (3e-3,))]
    assert [each.name for each in made] == ["members 0 to 1", "member 2"]

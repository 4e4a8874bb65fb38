"""`logger=`: what is logged, by whom, and that neither a logger nor its failures change a training."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import enfold
from enfold import EnfoldError, TrainConfig
from enfold.ensembles.hyper_deep_ensemble import HyperDeepEnsemble
from enfold.loggers import Logger, LoggerWarning
from enfold.train import Epoch

SETTINGS = {"epochs": 3, "batch_size": 16, "lr": 1e-2, "quiet": True}


def examples(seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(number, 5, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, 0] + inputs[:, 1] > 0).long()


TRAIN, VAL = examples(0, 48), examples(1, 40)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


class Recorder:
    """A logger of the user's own, without a base class."""

    def __init__(self) -> None:
        self.settings: dict = {}
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log_settings(self, settings) -> None:
        self.settings.update(settings)

    def log_metrics(self, metrics, step) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1

    def steps(self, name: str) -> list[int]:
        return [step for step, metrics in self.rows if name in metrics]


class Failing(Recorder):
    """A logger that draws random numbers, changes what it is given and then fails."""

    def _fail(self, *contents) -> None:
        torch.rand(3), random.random(), np.random.rand()
        torch.manual_seed(17)
        for content in contents:
            content.clear()
        raise ConnectionError("the server is gone")

    def log_settings(self, settings) -> None:
        self._fail(settings)

    def log_metrics(self, metrics, step) -> None:
        self._fail(metrics)

    def close(self) -> None:
        self._fail()


def members(seed: int = 0) -> enfold.DeepEnsemble:
    return enfold.DeepEnsemble(make, 2, seed=seed)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(one, other) for one, other in zip(weights(first), weights(second), strict=True))


def test_an_ensemble_is_logged_under_the_names_of_the_field():
    logger, ensemble = Recorder(), members()
    history = enfold.fit(ensemble, TRAIN, VAL, logger=logger, **SETTINGS)
    assert [step for step, _ in logger.rows] == [0, 1, 2, 3]
    last, record = logger.rows[-1][1], history.epochs[-1]
    assert last["val/nll"] == record.ensemble_loss
    assert last["val/accuracy"] == record.ensemble_score
    assert last["member_1/val/nll"] == record.validation_loss[1]
    assert last["mean_member/val/accuracy"] == pytest.approx(sum(record.validation_score) / 2)
    assert last["train/loss"] == pytest.approx(sum(record.train_loss) / 2)
    assert last["lr"] == record.lr
    assert not any("train" in name or name == "lr" for name in logger.rows[0][1])
    assert logger.settings["num_members"] == 2
    assert logger.settings["lr"] == 1e-2
    assert logger.settings["train_examples"] == 48
    assert all(isinstance(value, str | int | float | None) for value in logger.settings.values())
    assert logger.closed == 1


def test_one_network_and_regression_have_their_own_names():
    logger = Recorder()
    network = nn.Linear(5, 1)
    enfold.fit(network, (TRAIN[0], TRAIN[0][:, :1]), (VAL[0], VAL[0][:, :1]), logger=logger, **SETTINGS)
    assert {"train/loss", "val/mse", "lr"} <= logger.rows[-1][1].keys()
    assert not any(name.startswith(("member_", "mean_member")) for name in logger.rows[-1][1])


def test_a_list_of_loggers_and_a_name(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    first, second = Recorder(), Recorder()
    enfold.fit(make(), TRAIN, logger=[first, "tensorboard", second], **SETTINGS)
    assert len(first.rows) == len(second.rows) == 3
    assert len(list(tmp_path.glob("runs/tensorboard/*/events*"))) == 1


@pytest.mark.parametrize("logger", [Recorder, Failing], ids=lambda kind: kind.__name__)
def test_loggers_do_not_change_a_training(logger):
    plain, logged = members(), members()
    torch.manual_seed(3)
    history = enfold.fit(plain, TRAIN, VAL, **SETTINGS)
    after = torch.rand(1)
    torch.manual_seed(3)
    with warnings.catch_warnings(action="ignore", category=LoggerWarning):
        found = enfold.fit(logged, TRAIN, VAL, logger=logger(), **SETTINGS)
    assert torch.equal(torch.rand(1), after)
    assert same(plain, logged)
    assert [each.validation_loss for each in found.epochs] == [each.validation_loss for each in history.epochs]


def test_a_failing_logger_is_named_once_and_the_others_continue():
    other = Recorder()
    with pytest.warns(LoggerWarning, match="Failing") as caught:
        enfold.fit(make(), TRAIN, logger=[Failing(), other], **SETTINGS)
    assert len([each for each in caught if each.category is LoggerWarning]) == 1
    assert caught[0].filename == __file__
    assert other.steps("train/loss") == [1, 2, 3]
    assert other.closed == 1


def test_loggers_are_closed_after_an_error():
    logger = Recorder()

    def fail(record: Epoch) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        enfold.fit(make(), TRAIN, logger=logger, on_epoch=fail, **SETTINGS)
    assert logger.closed == 1


@pytest.mark.parametrize("wrong", ["tensorbord", 3, object(), Recorder, [Recorder(), "x"]])
def test_other_loggers_are_refused_before_training(wrong):
    network = make()
    before = [value.clone() for value in weights(network)]
    with pytest.raises(EnfoldError, match="logger must be"):
        enfold.fit(network, TRAIN, logger=wrong, **SETTINGS)
    assert all(torch.equal(one, other) for one, other in zip(before, weights(network), strict=True))
    assert isinstance(Recorder(), Logger)


def test_steps_continue_in_a_resumed_training(tmp_path):
    def stop(record: Epoch) -> None:
        if record.epoch == 1:
            raise KeyboardInterrupt

    logger, file = Recorder(), tmp_path / "state"
    settings = SETTINGS | {"epochs": 4, "checkpoint": file, "logger": logger}
    with pytest.raises(KeyboardInterrupt):
        enfold.fit(members(), TRAIN, VAL, on_epoch=stop, **settings)
    enfold.fit(members(), TRAIN, VAL, **settings)
    assert [step for step, _ in logger.rows] == [0, 1, 2, 3, 4]
    whole = Recorder()
    enfold.fit(members(), TRAIN, VAL, logger=whole, **(SETTINGS | {"epochs": 4}))
    assert [row["val/nll"] for _, row in whole.rows] == [row["val/nll"] for _, row in logger.rows]


@pytest.fixture(scope="module")
def trained():
    ensemble = members()
    enfold.fit(ensemble, TRAIN, VAL, **SETTINGS)
    return ensemble


@pytest.mark.filterwarnings("ignore::enfold.UnchangedWarning")
def test_distill_and_control_log_and_close_once(trained):
    for train, title in ((enfold.distill, "distill (KD)"), (enfold.train_control, "control")):
        logger, seen = Recorder(), []
        train(trained, TRAIN, VAL, logger=logger, on_epoch=seen.append, **SETTINGS)
        assert logger.steps("val/nll") == [0, 1, 2, 3]
        assert logger.closed == 1
        assert [each.training for each in seen] == [title] * 3


@pytest.mark.filterwarnings("ignore::enfold.UnchangedWarning", "ignore::enfold.errors.PartialCoverageWarning")
def test_a_first_stage_has_its_own_names(trained):
    logger, seen = Recorder(), []
    enfold.distill(trained, TRAIN, VAL, loss=enfold.Hydra(), logger=logger, on_epoch=seen.append, **SETTINGS)
    stages = {name.split("/")[0] for _, row in logger.rows for name in row}
    assert logger.closed == 1
    assert len({each.training for each in seen}) == (2 if "first_stage" in stages else 1)


@pytest.mark.filterwarnings("ignore")
def test_compress_logs_every_trial_and_the_table(trained):
    logger, seen = Recorder(), []
    result = enfold.compress(trained, TRAIN, VAL, logger=logger, on_epoch=seen.append, **(SETTINGS | {"epochs": 4}))
    assert logger.closed == 1
    assert logger.settings["recommended"] == result.chosen.name
    names = {name for _, row in logger.rows for name in row}
    assert {"control/val/nll", "short-distill/train/loss", "ensemble-of-2/result/nll"} <= names
    for name in names:
        assert logger.steps(name) == sorted(logger.steps(name))
    assert "control" in {each.training for each in seen}
    control = next(row for _, row in logger.rows if "control/result/nll" in row)
    assert control["control/result/nll"] == result.control.scores["nll"]
    assert not any(name.startswith("control/") and name.endswith("batch_size") for name in logger.settings)


@pytest.mark.filterwarnings("ignore")
def test_a_search_of_members_logs_every_chunk():
    logger, seen = Recorder(), []
    model = HyperDeepEnsemble(make, 2, candidates=3, chunk=2)
    enfold.fit(model, TRAIN, VAL, logger=logger, on_epoch=seen.append, **SETTINGS)
    parts = {name.split("/")[0] for _, row in logger.rows for name in row}
    assert {"search-0", "search-2"} <= parts
    assert len({each.training for each in seen}) >= 2


def test_settings_of_the_plan_are_plain():
    logger = Recorder()
    plan = TrainConfig(epochs=1, lr=(1e-2, 1e-3), task=enfold.tasks.Classification(), batch_size=16)
    enfold.fit(members(), TRAIN, config=plan, logger=logger, quiet=True)
    assert logger.settings["lr"] == "0.01, 0.001"
    assert "Classification" in logger.settings["task"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("merge", "options", "names"),
    [
        (enfold.merge.perm_avg, {"train": TRAIN, "val": VAL, "epochs": 2, "quiet": True}, {"train/loss", "val/nll"}),
        (enfold.merge.straight_through, {"train": TRAIN, "epochs": 2}, {"member_1/train/loss"}),
        (enfold.merge.soup, {"val": VAL, "kind": "learned", "epochs": 2}, {"train/loss"}),
    ],
)
def test_merges_that_train_log_their_epochs(trained, merge, options, names):
    logger, seen = Recorder(), []
    merge(trained, logger=logger, on_epoch=seen.append, **options)
    assert [each.epoch for each in seen] == [0, 1]
    assert all(each.training and isinstance(each, Epoch) for each in seen)
    assert names <= logger.rows[-1][1].keys()
    assert logger.rows[-1][0] == 2
    assert logger.closed == 1

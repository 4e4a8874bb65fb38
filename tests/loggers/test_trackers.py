"""TensorBoard, Weights & Biases and MLflow: the records of a training are read back from their files."""

import functools
import json
import math
import struct
import sys
import time

import pytest
import torch
from torch import nn

import enfold
from enfold.errors import MissingExtra
from enfold.loggers import LoggerWarning, MLflow, TensorBoard, WandB

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DATA = (INPUTS, (INPUTS[:, 0] > 0).long())
SETTINGS = {"epochs": 2, "batch_size": 16, "lr": 1e-2, "quiet": True}


def train(logger, epochs: int = 2, **options) -> enfold.History:
    ensemble = enfold.DeepEnsemble(lambda: nn.Linear(4, 2), 2, seed=0)
    return enfold.fit(ensemble, DATA, DATA, logger=logger, **(SETTINGS | {"epochs": epochs}), **options)


def stop(record) -> None:
    raise KeyboardInterrupt


def resumed(make_logger, tmp_path) -> enfold.History:
    """Train 1 epoch, interrupt, and continue with another logger of the same run."""
    file = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        train(make_logger(), 3, checkpoint=file, on_epoch=stop)
    return train(make_logger(), 3, checkpoint=file)


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    history = train(TensorBoard(tmp_path))
    found = scalars(tmp_path)
    assert [step for step, _ in found["val/nll"]] == [0, 1, 2]
    values = [history.start, *history.epochs]
    assert [value for _, value in found["val/nll"]] == pytest.approx([each.ensemble_loss for each in values])
    assert [value for _, value in found["lr"]] == pytest.approx([each.lr for each in history.epochs])
    assert {"member_0/val/nll", "member_1/train/loss", "train/loss", "val/accuracy"} <= found.keys()


def test_tensorboard_settings_are_a_table(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoard(tmp_path)
    logger.log_settings({"optimizer": "a|b", "lr": 0.1})
    logger.close()
    found = EventAccumulator(str(tmp_path)).Reload().Tensors("settings/text_summary")
    assert found[0].tensor_proto.string_val[0].decode().splitlines()[2:] == ["| optimizer | a\\|b |", "| lr | 0.1 |"]


def test_a_resumed_training_continues_in_the_folder(tmp_path):
    pytest.importorskip("tensorboard")
    resumed(lambda: TensorBoard(tmp_path / "events"), tmp_path)
    assert [step for step, _ in scalars(tmp_path / "events")["train/loss"]] == [1, 2, 3]


def entries(file) -> list[bytes]:
    """Return the records of a .wandb file: 7 bytes, then the log format of LevelDB with blocks of 32 KiB."""
    content, found, place, part = file.read_bytes(), [], 7, b""
    while place + 7 <= len(content):
        if place % 32768 > 32768 - 7:  # the rest of a block is too short for a header
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        part += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # complete, or the last of several
            found.append(part)
            part = b""
    return found


def offline_records(folder) -> tuple[list[dict], dict]:
    """Return the rows and the configuration in the files of all offline runs in a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, config = [], {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        records = []
        for _ in range(100):  # another process writes the file
            records = [Record.FromString(each) for each in entries(file)]
            if any(each.WhichOneof("record_type") == "exit" for each in records):
                break
            time.sleep(0.1)
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items})
            updates = [*record.config.update, *record.run.config.update]
            config |= {each.key: json.loads(each.value_json) for each in updates if each.key}
    return rows, config


@pytest.fixture
def quiet_wandb(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    settings = {"SILENT": "true", "CONSOLE": "off", "CACHE_DIR": str(tmp_path), "ERROR_REPORTING": "false"}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_offline(tmp_path, quiet_wandb):
    logger = WandB("digits", "first", mode="offline", dir=str(tmp_path))
    history = train(logger)
    rows, config = offline_records(tmp_path)
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert rows[-1]["val/nll"] == pytest.approx(history.epochs[-1].ensemble_loss)
    assert rows[-1]["member_0/val/nll"] == pytest.approx(history.epochs[-1].validation_loss[0])
    assert config["num_members"] == 2
    assert config["lr"] == 1e-2
    import wandb

    assert wandb.run is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_active_run_of_wandb_is_left_open(tmp_path, quiet_wandb):
    import wandb

    run = wandb.init(project="mine", mode="offline", dir=str(tmp_path))
    try:
        train([WandB()])
        train([WandB()])
        assert wandb.run is run
        run.log({"own": 1.0})
    finally:
        run.finish()
    rows, _ = offline_records(tmp_path)
    *trained, own = rows
    assert [row["epoch"] for row in trained] == [0, 1, 2, 0, 1, 2]
    assert own["own"] == 1.0  # newer versions of wandb add the epoch, the step of all metrics of the run


@pytest.fixture
def store(tmp_path) -> str:
    pytest.importorskip("mlflow")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_with_a_local_store(store, tmp_path):
    make_logger = functools.partial(MLflow, "digits", "first", tracking_uri=store, resume=True)
    history = resumed(make_logger, tmp_path)
    client = make_logger().client
    runs = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"]
    assert (runs[0].info.run_name, runs[0].data.params["num_members"]) == ("first", "2")
    found = [(each.step, each.value) for each in client.get_metric_history(runs[0].info.run_id, "val/nll")]
    assert sorted(found) == [(each.epoch + 1, each.ensemble_loss) for each in [history.start, *history.epochs]]
    assert "member_1/val/accuracy" in runs[0].data.metrics

    logger = make_logger()  # settings that change, and names that MLflow refuses
    logger.log_settings({"num_members": 3, "a+b": "c" * 10_000})
    logger.log_metrics({"f(x)": 1.0, "loss": math.nan}, 1)
    logger.close()
    run = client.get_run(runs[0].info.run_id)
    assert (run.data.params["num_members"], run.data.tags["num_members"]) == ("2", "3")
    assert run.data.metrics["f_x_"] == 1.0
    assert len(run.data.params["a_b"]) == 6000


@pytest.mark.parametrize(("name", "kind"), [("tensorboard", TensorBoard), ("wandb", WandB), ("mlflow", MLflow)])
def test_a_missing_package_is_an_error_before_training(name, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'enfold\[{name}\]'"):
        kind()
    network = nn.Linear(4, 2)
    with pytest.raises(MissingExtra):
        enfold.fit(network, DATA, logger=name, **SETTINGS)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.warns(LoggerWarning, match="TensorBoard"):
        history = train(TensorBoard(tmp_path / "file" / "events"))
    assert len(history.epochs) == 2

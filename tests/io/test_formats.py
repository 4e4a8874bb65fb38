"""Checkpoints as other packages write them, by these packages where they are installed."""

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import enfold
from checkpoint_files import assert_loaded, draw, make, read
from enfold import EnfoldError

pytestmark = pytest.mark.filterwarnings("ignore")


# Lightning


def lightning_module(network, name):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"lr": np.float64(0.1), "widths": [8]})
            setattr(self, name, network)
            self.criterion = nn.CrossEntropyLoss(weight=torch.ones(3))

        def training_step(self, batch, index):
            return self.criterion(getattr(self, name)(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Module()


def train_with_lightning(network, name, folder, callbacks=()):
    from lightning import Trainer

    batches = torch.utils.data.DataLoader([(torch.randn(4), index % 3) for index in range(8)], batch_size=4)
    module = lightning_module(network, name)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=len(callbacks) > 1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, batches)
    trainer.save_checkpoint(folder / "last.ckpt")


@pytest.mark.parametrize(("name", "key"), [("model", None), ("net", None), ("backbone", "backbone"), ("head", "head.")])
def test_lightning(name, key, tmp_path):
    pytest.importorskip("lightning")
    network = make()
    train_with_lightning(network, name, tmp_path)
    assert_loaded(read(tmp_path / "last.ckpt", key=key), [network])
    if key:
        with pytest.raises(EnfoldError, match=rf"key='{name}\.'"):
            read(tmp_path / "last.ckpt")


def test_lightning_with_averaged_weights(tmp_path):
    pytest.importorskip("lightning")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("lightning is too old")
    network = make()
    during = callbacks.ModelCheckpoint(tmp_path, "during", every_n_train_steps=2)
    average = callbacks.EMAWeightAveraging(decay=0.5)
    train_with_lightning(network, "model", tmp_path, [average, during])
    content = torch.load(tmp_path / "during.ckpt", weights_only=False)
    averaged, current = (read(tmp_path / "during.ckpt", key=key) for key in (None, "current_model_state"))
    assert torch.equal(averaged[0][0].weight, content["state_dict"]["model.0.weight"])
    assert torch.equal(current[0][0].weight, content["current_model_state"]["model.0.weight"])
    assert not torch.equal(averaged[0][0].weight, current[0][0].weight)


def test_two_networks_in_one_file_are_not_guessed(tmp_path):
    student, teacher = draw(2)
    torch.save({"state_dict": nn.ModuleDict({"model": student, "ema": teacher}).state_dict()}, tmp_path / "a.ckpt")
    torch.save({"state_dict": student.state_dict(), "state_dict_ema": teacher.state_dict()}, tmp_path / "b.pth")
    for name, keys in (("a.ckpt", ("model", "ema.")), ("b.pth", ("state_dict", "state_dict_ema"))):
        with pytest.raises(EnfoldError, match="key="):
            read(tmp_path / name)
        for key, network in zip(keys, (student, teacher), strict=True):
            assert_loaded(read(tmp_path / name, key=key), [network])
        with pytest.raises(EnfoldError, match=r"key must be a key of .* got 'other'|must have one state dict"):
            read(tmp_path / name, key="other")


@pytest.mark.slow
def test_averaged_and_compiled_models(tmp_path):
    network = draw(1)[0]
    averaged = AveragedModel(network)
    compiled = nn.Sequential(*(torch.compile(each) for each in network))
    torch.save(averaged.state_dict(), tmp_path / "a.pt")
    torch.save({"model": torch.compile(network).state_dict()}, tmp_path / "b.pt")
    torch.save(compiled.state_dict(), tmp_path / "c.pt")
    assert any("_orig_mod" in name for name in compiled.state_dict())
    assert_loaded(read(tmp_path / "*.pt"), [network] * 3)


# transformers


def bert(layers=1):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    return transformers.AutoModelForSequenceClassification.from_config(config)


def test_folders_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    networks = [bert() for _ in range(3)]
    networks[0].save_pretrained(tmp_path / "runs" / "checkpoint-5")
    networks[1].save_pretrained(tmp_path / "runs" / "checkpoint-10", max_shard_size="8KB")
    assert len(list((tmp_path / "runs" / "checkpoint-10").glob("*.safetensors"))) > 1
    (tmp_path / "runs" / "checkpoint-200").mkdir()
    torch.save(networks[2].state_dict(), tmp_path / "runs" / "checkpoint-200" / "pytorch_model.bin")
    torch.save({"lr": 0.1}, tmp_path / "runs" / "checkpoint-200" / "optimizer.pt")
    folders = [tmp_path / "runs" / f"checkpoint-{number}" for number in (5, 10, 200)]
    for files in (tmp_path / "runs", str(tmp_path / "runs" / "checkpoint-*"), folders):
        assert_loaded(read(files, bert), networks)
    assert_loaded(read(folders[1], bert), networks[1:2])


def sharded(folder, network, suffix="safetensors"):
    folder.mkdir(exist_ok=True)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = list(network.state_dict())
    files = {name: f"{stem}-0000{1 + index % 2}-of-00002.{suffix}" for index, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in network.state_dict().items() if files[name] == file}
        (save_file if suffix == "safetensors" else torch.save)(part, folder / file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(suffix, tmp_path):
    networks = draw(2)
    for index, network in enumerate(networks):
        sharded(tmp_path / f"{index}", network, suffix)
    assert_loaded(read(tmp_path), networks)
    index = next((tmp_path / "1").glob("*.index.json"))
    shard = next((tmp_path / "1").glob(f"*-00002-of-00002.{suffix}"))
    content = json.loads(index.read_text())
    for other, message in (
        ({**content["weight_map"], "0.weight": "../0/x.safetensors"}, "own folder, got '../0/x"),
        ({**content["weight_map"], "0.weight": str(shard.resolve())}, "own folder"),
        ({**content["weight_map"], "0.weight": index.name}, "own folder"),
        ({**content["weight_map"], "other": shard.name}, "'other' differs"),
        ({**content["weight_map"], "0.weight": 3}, "weight_map"),
        ([], "weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": other}))
        with pytest.raises(EnfoldError, match=message):
            read(tmp_path / "1")
    index.write_text(json.dumps(content))
    shard.unlink()
    with pytest.raises(EnfoldError, match=rf"'{shard.name}' is missing \(1 in total\)"):
        read(tmp_path / "1")
    index.unlink()
    with pytest.raises(EnfoldError, match="without an index"):
        read(tmp_path / "1")


def test_a_safetensors_file_of_timm(tmp_path):
    network = draw(1)[0]
    state = network.state_dict()
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": {}}))
    assert_loaded(read(tmp_path), [network])
    torch.save(
        {"epoch": 3, "arch": "resnet18", "state_dict": state, "optimizer": {}, "version": 2}, tmp_path / "last.pth.tar"
    )
    assert_loaded(read(tmp_path / "last.pth.tar"), [network])


# nnU-Net


def nnunet(network, fold):
    """What nnU-Net writes into checkpoint_final.pth."""
    return {
        "network_weights": network.state_dict(),
        "optimizer_state": {"state": {}, "param_groups": [{"lr": 0.01}]},
        "grad_scaler_state": None,
        "logging": {"mean_fg_dice": [np.float64(0.5), np.float32(0.25)], "ema_fg_dice": [np.float64(0.4)]},
        "_best_ema": np.float64(0.4),
        "current_epoch": 1000,
        "init_args": {"plans": {"spacing": np.array([1.0, 2.0])}, "fold": fold, "device": torch.device("cpu")},
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": (0, 1),
    }


def test_fold_folders_of_nnunet(tmp_path):
    networks = draw(11)
    for index, network in enumerate(networks):
        fold = tmp_path / f"fold_{index}"
        fold.mkdir()
        torch.save(nnunet(network, index), fold / "checkpoint_final.pth")
        torch.save(nnunet(make(), index), fold / "checkpoint_best.pth")
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(fold / "checkpoint_final.pth", weights_only=True)
    assert_loaded(read(tmp_path), networks)
    assert_loaded(read(str(tmp_path / "fold_*" / "checkpoint_final.pth")), networks)
    (tmp_path / "fold_3" / "checkpoint_final.pth").unlink()
    with pytest.raises(EnfoldError, match="fold_3"):
        read(tmp_path)


def test_numbers_of_numpy_are_not_made(tmp_path, monkeypatch):
    torch.save(nnunet(draw(1)[0], 0), tmp_path / "a.pth")
    before = set(torch.serialization.get_safe_globals())
    made = []
    monkeypatch.setattr(np, "dtype", lambda *given: made.append(given))
    read(tmp_path / "a.pth")
    assert not made
    assert set(torch.serialization.get_safe_globals()) == before


# Paths


def test_compress_reads_what_members_are_read_from(tmp_path):
    networks = draw(2)
    for index, network in enumerate(networks):
        sharded(tmp_path / f"run{index}", network)
    inputs = torch.randn(60, 4)
    labels = networks[0](inputs).argmax(1)
    result = enfold.compress(
        str(tmp_path), (inputs, labels), (inputs, labels), network=make, epochs=1, quiet=True, time=5
    )
    assert isinstance(result.network, nn.Sequential)


def test_folders_that_are_ambiguous_or_empty(tmp_path):
    network = draw(1)[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(EnfoldError, match=r"'.*empty' has none"):
        read(tmp_path / "empty")
    (tmp_path / "mixed" / "a").mkdir(parents=True)
    save_file(network.state_dict(), tmp_path / "mixed" / "a" / "model.safetensors")
    save_file(network.state_dict(), tmp_path / "mixed" / "b.safetensors")
    with pytest.raises(EnfoldError, match="2 of them"):
        read(tmp_path / "mixed")
    with pytest.raises(EnfoldError, match="does not exist"):
        read([tmp_path / "nowhere"])
    assert_loaded(read([tmp_path / "mixed" / "a", tmp_path / "mixed" / "b.safetensors"]), [network] * 2)


def test_the_nearest_name_is_shown(tmp_path):
    state = {name.replace("3.weight", "3.weights"): tensor for name, tensor in draw(1)[0].state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(EnfoldError, match=r"it lacks '3\.weight' .*nearest '3\.weights'"):
        read(tmp_path / "a.safetensors")
